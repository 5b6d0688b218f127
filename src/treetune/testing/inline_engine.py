"""An engine without a server: the run's own process samples, from the weights that it is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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


@dataclass(frozen=True, kw_only=True)
class InlineSettings(EngineSettings):
    """For scripts and tests that start a run dozens of times, an engine for each rank. At temperature 1."""

    canary_tolerance: float | None = None

    def tolerance(self, device: str) -> Tolerance:
        return Tolerance(1e-3, 1e-3)

    def start(self, model_directory: Path, log_directory: Path, **rest: Any) -> Engine:
        return InlineEngine(model_directory, rest["end_ids"])


class InlineEngine(Engine):
    """Runs a request's samples together and nothing else with them: its tokens and log-probs are the same
    whatever it is asked besides. The canary is left out: weights can't be lost on their way here."""

    def __init__(self, folder: Path, end_ids: Sequence[int]) -> None:
        self.version = self.tokens = 0
        self._end_ids = set(end_ids)
        self._closed = False
        self._model = _read(folder)

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
                results[index] = self._sampled(request)
                ask((on_result(index, results[index]) if on_result is not None else None) or ())
        return results

    def _sampled(self, request: Request) -> list[Completion]:
        import torch

        most = request.sampling.max_tokens
        assert request.sampling.temperature == 1, "the model's own distribution is sampled"
        chance = np.stack([np.random.default_rng(request.seed + i).random(most) for i in range(request.n)])
        ids = np.tile(request.prompt_ids, (request.n, 1)).astype(np.int64)
        logprobs = np.empty((request.n, 0))
        with torch.no_grad():
            for place in range(most):
                logits_BV = self._model(input_ids=torch.from_numpy(ids)).logits[:, -1]
                logprobs_BV = logits_BV.double().log_softmax(-1).numpy()
                sums_BV = np.exp(logprobs_BV).cumsum(1)
                drawn_B = (sums_BV[:, :-1] <= chance[:, place, None] * sums_BV[:, -1:]).sum(1)
                ids = np.concatenate([ids, drawn_B[:, None]], axis=1)
                own_B = np.take_along_axis(logprobs_BV, drawn_B[:, None], axis=1)
                logprobs = np.concatenate([logprobs, own_B], axis=1)
                answers = ids[:, len(request.prompt_ids) :]
                if np.isin(answers, list(self._end_ids)).any(1).all():
                    break
        return [self._completion(*row) for row in zip(answers, logprobs, strict=True)]

    def _completion(self, ids: Any, logprobs: Any) -> Completion:
        ends = np.flatnonzero(np.isin(ids, list(self._end_ids)))
        length = int(ends[0]) + 1 if len(ends) else len(ids)
        self.tokens += length
        reason: Any = "stop" if len(ends) else "length"
        return Completion(ids[:length], logprobs[:length].astype(np.float32), reason, self.version)

    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        for _ in chunks or ():
            pass
        self._model, self.version = _read(directory), version
        return SyncReport(0.0, 0.0)

    def asleep(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._closed = True


def _read(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
