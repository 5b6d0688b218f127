"""Commands as a person gives them, each in a process of its own, without each paying for the imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
from treetune.main import main
import deepspeed, transformers, treetune.parts, treetune.runtime.commands  # once for all that are forked off
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


def run_each(
    *commands: Sequence[str],
    cwd: Path = ROOT,
    python: Path | str = sys.executable,
    source: Path = ROOT / "src",
) -> str:
    """Carries out the commands, one after the other. Returns what they printed; fails with it where one ends
    with another code than 0."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("APP_", "PYTHON"))}
    done = subprocess.run(
        [python, "-c", PROGRAM, source], input="".join(json.dumps(one) + "\n" for one in commands),
        cwd=cwd, env=environment | {"OMP_NUM_THREADS": "1"}, check=False, timeout=60 + 60 * len(commands),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
