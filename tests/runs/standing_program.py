"""``standing_program.py BASE COUNT COMMAND``: a command on the small experiment as a process of its own.

It prints a line and stands still once COUNT + 1 answers are in the journal for sure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.runs.in_process import FakeSettings, small
from treetune.engine.base import Engine, EngineLaunch
from treetune.engine.journal import FLUSH_S
from treetune.engine.requests import Completion, OnResult, Request
from treetune.runtime import commands
from treetune.runtime.base import Evaluation, EvaluationSet

ROOT = Path(__file__).parents[2]
SETS = Evaluation(
    sets=(
        EvaluationSet(split="validation", problems=4, samples=2),
        EvaluationSet(split="test", problems=3, samples=2),
    )
)
STANDING = "standing still\n"


@dataclass(frozen=True, kw_only=True)
class HaltingSettings(FakeSettings):
    """Its engine gives no more answers after some."""

    count: int

    def start(self, launch: EngineLaunch) -> Engine:
        engine: Any = super().start(launch)
        sample, left = engine.generate, [self.count]

        def generate(requests: Sequence[Request], on_result: OnResult) -> list[list[Completion]]:
            def halting(index: int, completions: list[Completion]) -> None:
                on_result(index, completions)
                left[0] -= 1
                if left[0] == 0:
                    time.sleep(1.5 * FLUSH_S)  # so that the next answer is written, and those before it
                elif left[0] == -1:
                    sys.stdout.write(STANDING)
                    sys.stdout.flush()
                    sys.stdin.read()

            return sample(requests, halting)

        engine.generate = generate
        return engine


def standing(base: Path, count: int, command: str) -> subprocess.Popen[str]:
    """The program, which stands still."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(base), str(count), command],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert STANDING in iter(process.stdout.readline, "")
    return process


if __name__ == "__main__":
    folder, answers, name = sys.argv[1:]
    settings = HaltingSettings(count=int(answers))
    sets = {"evaluation": SETS} if name == "run_evaluation" else {}
    commands.run(name, small(Path(folder), engine=settings, **sets), {"type": "policy_iteration"})
