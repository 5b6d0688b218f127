"""Commands as a person gives them, each in a process of its own, without each paying for the imports."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.fork_server import MODULES, ROOT, start_forked

DEADLINE_EACH_S = 600.0

PROGRAM = """
import importlib, json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
from treetune.main import main
for module in sys.argv[2:]:  # once for all that are forked off
    importlib.import_module(module)
for line in sys.stdin:
    print(flush=True)
    if not (child := os.fork()):
        code = 1
        try:
            code = main(json.loads(line))
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"{line} ended with {code}")
"""


def run_each(*commands: Sequence[str], cwd: Path = ROOT) -> str:
    """Carries out the commands, one after the other.

    Returns what they printed. Fails with it where a command ends with another code than 0.
    """
    printed = ""
    for command in commands:
        with tempfile.TemporaryFile() as output:
            process = start_forked(command, cwd=cwd, environment=_environment(), output=output)
            try:
                code = process.wait(DEADLINE_EACH_S)
            finally:
                process.kill()
            output.seek(0)
            printed += output.read().decode(errors="replace") + "\n"
        assert code == 0, f"{command} ended with {code}:\n{printed[-4000:]}"
    return printed


def run_each_with(python: Path, sources: Path, commands: Sequence[Sequence[str]], cwd: Path = ROOT) -> None:
    """Carries out the commands with another Python and other sources. Fails as `run_each` does."""
    done = subprocess.run(
        [python, "-c", PROGRAM, sources, *MODULES],
        input="".join(json.dumps(command) + "\n" for command in commands),
        cwd=cwd,
        env=_environment(),
        check=False,
        timeout=DEADLINE_EACH_S * len(commands),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def _environment() -> Mapping[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("APP_", "PYTHON"))}
    return inherited | {"OMP_NUM_THREADS": "1"}
