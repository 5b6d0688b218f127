"""Runs a command on the small experiment in a process of its own, which stands still after some answers.

    standing_program.py BASE COUNT COMMAND

It prints a line and stands still once COUNT + 1 answers are in the journal for sure.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fork_server import ROOT, ForkedCommand, start_forked
from tests.support.small_run import FakeSettings, small
from treetune.engine.base import Engine, EngineLaunch
from treetune.engine.journal import FLUSH_EVERY_S
from treetune.engine.requests import Completion, OnResult, Request
from treetune.runtime import commands
from treetune.runtime.base import Evaluation, EvaluationSet

SETS = Evaluation(
    sets=(
        EvaluationSet(split="validation", problems=4, samples=2),
        EvaluationSet(split="test", problems=3, samples=2),
    )
)
STANDING = "standing still\n"
DEADLINE_S = 600.0


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
                    time.sleep(1.5 * FLUSH_EVERY_S)  # so that the next answer is written, and those before it
                elif left[0] == -1:
                    sys.stdout.write(STANDING)
                    sys.stdout.flush()
                    threading.Event().wait()  # until a signal comes

            return sample(requests, halting)

        engine.generate = generate
        return engine


@dataclass(frozen=True)
class StandingCommand:
    """The program, which stands still."""

    process: ForkedCommand
    output: Path

    def lines(self) -> list[str]:
        """Returns what it has printed, without the line that says that it stands still."""
        return self.output.read_text().replace(STANDING, "").splitlines()


def start_standing(base: Path, count: int, command: str, output: Path) -> StandingCommand:
    """Starts the program, and returns when it stands still."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    arguments = [str(base), str(count), command]
    with output.open("wb") as file:
        process = start_forked(
            arguments, program=Path(__file__), cwd=ROOT, environment=environment, output=file
        )
    deadline = time.monotonic() + DEADLINE_S
    while STANDING not in output.read_text():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)
    return StandingCommand(process, output)


if __name__ == "__main__":
    folder, answers, name = sys.argv[1:]
    settings = HaltingSettings(count=int(answers))
    sets = {"evaluation": SETS} if name == "run_evaluation" else {}
    commands.run(name, small(Path(folder), engine=settings, **sets), {"type": "policy_iteration"})
