"""``evaluator_program.py BASE COUNT``: run_evaluation of the small experiment as a process of its own.

It prints a line and stands still once COUNT + 1 answers are in the journal for sure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fake_engine import FakeEngine
from tests.runtime.in_process import FakeSettings, small
from tests.runtime.test_evaluators import SETS
from treetune.inference.base import Completion, Engine, EngineLaunch, OnResult, Request
from treetune.inference.journal import FLUSH_S
from treetune.runtime.commands import run_evaluation


class Halting(Engine):
    """The other engine, which after some answers gives no more."""

    def __init__(self, engine: FakeEngine, count: int) -> None:
        self._engine, self._left = engine, count

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._engine.version

    def generate(
        self, requests: Sequence[Request], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        def halting(index: int, completions: list[Completion]) -> None:
            assert on_result is not None
            on_result(index, completions)
            self._left -= 1
            if self._left == 0:
                time.sleep(1.5 * FLUSH_S)  # so that the next answer is written, and those before it
            elif self._left == -1:
                sys.stdout.write("standing still\n")
                sys.stdout.flush()
                sys.stdin.read()

        return self._engine.generate(requests, halting)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load(self, *arguments: Any) -> Any:
        return self._engine.load(*arguments)

    def asleep(self) -> AbstractContextManager[None]:
        return self._engine.asleep()

    def wait_ready(self) -> None: ...

    tokens_per_second = 0.0

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class HaltingSettings(FakeSettings):
    count: int

    def start(self, launch: EngineLaunch) -> Engine:
        engine = super().start(launch)
        assert isinstance(engine, FakeEngine)
        return Halting(engine, self.count)


if __name__ == "__main__":
    base, count = Path(sys.argv[1]), int(sys.argv[2])
    run_evaluation(small(base, evaluation=SETS, engine=HaltingSettings(count=count)), {})
