"""An engine without a server: the run's own process samples, from the weights that it is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.analyzers.expansion import PolicySteps
from treetune.inference.base import (
    Canary,
    Chunk,
    Completion,
    Engine,
    EngineError,
    Later,
    OnResult,
    Request,
    SyncReport,
)
from treetune.inference.gaps import Tolerance
from treetune.inference.settings import EngineSettings
from treetune.testing.model_engine import ModelEngine


@dataclass(frozen=True, kw_only=True)
class InlineSettings(EngineSettings):
    """For scripts and tests that start a run dozens of times, an engine for each rank. At temperature 1."""

    canary_tolerance: float | None = None

    def tolerance(self, device: str) -> Tolerance:
        return Tolerance(1e-3, 1e-3)

    def start(self, model_directory: Path, log_directory: Path, **rest: Any) -> Engine:
        return InlineEngine(model_directory, rest["end_ids"])


class InlineEngine(ModelEngine):
    """Runs a request's samples together and nothing else with them: its tokens and log-probs are the same
    whatever it is asked besides. The canary is left out: weights can't be lost on their way here."""

    def __init__(self, folder: Path, end_ids: Sequence[int]) -> None:
        super().__init__(_read(folder), end_ids)
        self._closed = False

    @property
    def tokens_per_second(self) -> float:
        return 0.0

    def wait_ready(self) -> None:
        """It is."""

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        waiting: deque[tuple[int, Request]] = deque()
        promised: list[Later] = []

        def ask(further: Sequence[Request | Later]) -> None:
            for one in further:
                if isinstance(one, Later):
                    promised.append(one)
                else:
                    waiting.append((len(results), one))
                    results.append([])

        ask(requests)
        while waiting or promised:
            if self._closed:
                raise EngineError("the engine was closed")
            if not waiting:
                wait([one.ready for one in promised], return_when=FIRST_COMPLETED)
            for later in [one for one in promised if one.ready.done()]:
                promised.remove(later)
                ask(later.requests())
            if waiting:
                index, request = waiting.popleft()
                results[index] = self._wave([request], range(1))[0]
                ask((on_result(index, results[index]) if on_result is not None else None) or ())
        return results

    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        for _ in chunks or ():
            pass
        self._steps, self.version = _read(directory), version
        return SyncReport(0.0, 0.0)

    def asleep(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._closed = True


def _read(folder: Path) -> PolicySteps:
    from transformers import AutoModelForCausalLM

    return PolicySteps(AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(), 1.0)
