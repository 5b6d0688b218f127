"""vLLM's server survives its engine process and leaves requests unanswered: the guard ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from treetune.inference import guard

from .stubs import below, none_alive, until

SERVER = """
import subprocess, sys, time
sleep = ["-S", "-c", "import time; time.sleep(600)"]
engine = subprocess.Popen(["VLLM::EngineCore", *sleep], executable=sys.executable)
subprocess.Popen([sys.executable, *sleep])
open(sys.argv[1], "w").write(str(engine.pid))
time.sleep(600)
"""


def test_when_the_engine_process_is_killed_its_server_ends_and_nothing_is_left(tmp_path: Path) -> None:
    scratch, ready, server = tmp_path / "scratch", tmp_path / "ready", tmp_path / "server.py"
    scratch.mkdir()
    server.write_text(SERVER)
    python = [sys.executable, "-I", "-S"]
    watched = subprocess.Popen(
        [*python, str(guard.__file__), str(os.getpid()), str(scratch), *python, str(server), str(ready)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    tree: list[int] = []
    try:
        assert until(lambda: ready.is_file() and ready.read_text() != "")
        tree = below(watched.pid)
        assert len(tree) == 3
        # The guard looks for it twice a second, and has to have seen it.
        assert not until(lambda: watched.poll() is not None, 1.5)
        os.kill(int(ready.read_text()), signal.SIGKILL)
        # Its standard input stays open: an end of it would be a request to end.
        assert until(lambda: watched.poll() is not None)
        assert watched.stderr is not None
        assert "is gone: its server is ended" in watched.stderr.read()
        assert none_alive(tree)
        assert not scratch.exists()
    finally:
        watched.kill()
        for pid in tree:
            if not none_alive([pid]):
                os.kill(pid, signal.SIGKILL)
