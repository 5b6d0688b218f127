"""Ctrl-C and SIGTERM while a run samples: one line, a known exit code, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STANDS_STILL = """
import sys
from pathlib import Path
from tests.runtime.evaluator_program import HaltingSettings
from tests.runtime.in_process import small
from treetune.runtime import commands
config = small(Path(sys.argv[1]), engine=HaltingSettings(count=6))
commands.run("run_iteration_loop", config, {"type": "policy_iteration"})
"""
"""Answers four requests in an iteration, so that it stands still in the second."""


@pytest.mark.parametrize(
    ("number", "again", "code", "said"),
    [
        (signal.SIGINT, None, 130, "stopped in iteration 2; the same command continues"),
        # DeepSpeed's launcher answers Ctrl-C with a SIGTERM to ranks that are on their way out.
        (signal.SIGINT, signal.SIGTERM, 130, "stopped in iteration 2; the same command continues"),
        (signal.SIGTERM, None, 143, "ended by SIGTERM in iteration 2"),
    ],
)
def test_a_stopped_run_says_so_in_one_line(
    number: signal.Signals, again: signal.Signals | None, code: int, said: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "standing still\n" in iter(process.stdout.readline, "")
    process.send_signal(number)
    if again is not None:
        process.send_signal(again)
    _, errors = process.communicate(timeout=300)
    lines = [line for line in errors.splitlines() if "machine is busy" not in line]
    assert len(lines) == 4, errors
    way, begun, first, last = lines
    assert way.startswith("new weights come into the engine by file")
    assert begun == "60 training problems, 2 iterations"
    assert first.startswith("iteration 1/2")
    assert last == said
    assert process.returncode == code
    log = (tmp_path / "small" / "logs" / "run.log").read_text()
    assert said in log and "Traceback" not in log
