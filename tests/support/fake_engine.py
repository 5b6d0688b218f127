"""Provide a deterministic engine without a server, which samples from given probabilities of the next
token.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager
from pathlib import Path

from treetune.engine.base import Canary, Chunk, Engine, SyncReport
from treetune.engine.requests import Completion, Deferred, OnResult, Request, SamplingParams, ScoreRequest
from treetune.exceptions import EngineError
from treetune.vocabulary import FinishReason

Ids = tuple[int, ...]

Probabilities = Callable[[Ids, int], Sequence[float]]
"""A function from the token ids so far and the policy version to the probabilities of the next token, one for
each entry of the vocabulary."""


class FakeEngine(Engine):
    """An engine that behaves as `Engine` says in every respect that needs no process.

    `decode` is needed for stop strings. `fail_after` raises EngineError once that many requests
    have been answered, as a crash in the middle of the work would; `order` gives the order in which
    requests are answered. `asked` keeps every request that was sampled or scored.
    """

    scores = True

    def __init__(
        self,
        probabilities: Probabilities,
        eos_id: int,
        *,
        context_length: int = 1 << 20,
        decode: Callable[[Sequence[int]], str] | None = None,
        fail_after: int | None = None,
        order: Callable[[int], Sequence[int]] = range,
    ) -> None:
        self.version = 0
        self.tokens = 0
        self.asked: list[Request] = []
        self.loaded: list[tuple[Path, int]] = []
        self.closed = False
        self.fail_after = fail_after
        self._probabilities, self._eos_id = probabilities, eos_id
        self._context_length, self._decode, self._order = context_length, decode, order

    @property
    def tokens_per_second(self) -> float:
        return 0.0

    def wait_ready(self) -> None:
        assert not self.closed

    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        assert not self.closed
        results: list[list[Completion]] = []
        waiting: list[tuple[int, Request]] = []
        promised: list[Deferred] = []

        def ask(requests: Iterable[Request | Deferred]) -> None:
            for request in requests:
                if isinstance(request, Deferred):
                    promised.append(request)
                else:
                    waiting.append((len(results), request))
                    results.append([])

        ask(requests)
        while waiting or promised:
            if not waiting:
                wait([later.ready for later in promised], return_when=FIRST_COMPLETED)
                later = next(later for later in promised if later.ready.done())
                promised.remove(later)
                ask(later.requests())
                continue
            batch = list(waiting)
            waiting.clear()
            for index, request in [batch[position] for position in self._order(len(batch))]:
                if self.fail_after is not None and len(self.asked) >= self.fail_after:
                    raise EngineError("the fake engine was told to fail here")
                needed = len(request.prompt_ids) + request.sampling.max_tokens
                if needed > self._context_length:
                    raise ValueError(f"needs {needed} tokens of context, there are {self._context_length}")
                self.asked.append(request)
                prompt = tuple(request.prompt_ids.tolist())
                if isinstance(request, ScoreRequest):
                    results[index] = [self._score(prompt, tuple(request.text_ids.tolist()))]
                    if on_result is not None:
                        ask(on_result(index, results[index]) or ())
                    continue
                seeds = range(request.seed, request.seed + request.n)
                results[index] = [
                    self._sample(prompt, seed, request.sampling, request.reads_logprobs) for seed in seeds
                ]
                self.tokens += sum(len(completion.token_ids) for completion in results[index])
                if on_result is not None:
                    ask(on_result(index, results[index]) or ())
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
        self.loaded.append((directory, version))
        self.version = version
        gap = math.nan
        if canary is not None:
            sampling = SamplingParams(max_tokens=canary.max_tokens, temperature=canary.temperature)
            prompts = [tuple(map(int, prompt)) for prompt in canary.prompts]
            samples = [self._sample(prompt, canary.seed, sampling) for prompt in prompts]
            scores = canary.score([(p, s.token_ids) for p, s in zip(prompts, samples)])
            gap = max(
                (abs(a - b) for s, row in zip(samples, scores) for a, b in zip(s.logprobs, row)), default=0.0
            )
            if gap > (1e-4 if canary.tolerance is None else canary.tolerance.largest):
                raise EngineError(f"canary gap {gap}")
        return SyncReport(seconds=0.0, canary_gap=gap)

    def asleep(self, *, keep_weights: bool = True) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        self.closed = True

    def _sample(
        self, prompt: Ids, seed: int, sampling: SamplingParams, reads_logprobs: bool = True
    ) -> Completion:
        # Each sample has its generator, so that other requests change nothing.
        generator = random.Random(seed)
        ids: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        reason: FinishReason = "length"
        while len(ids) < sampling.max_tokens:
            distribution = apply_sampling_params(self._probabilities(prompt + ids, self.version), sampling)
            token = generator.choices(range(len(distribution)), distribution)[0]
            ids, logprobs = (*ids, token), (*logprobs, math.log(distribution[token]))
            if token == self._eos_id or self._stops(ids, sampling):
                reason = "stop"
                break
        return Completion(ids, logprobs if reads_logprobs else None, reason, self.version)

    def _score(self, prompt: Ids, text: Ids) -> Completion:
        logprobs = []
        for t, token in enumerate(text):
            chance = self._probabilities(prompt + text[:t], self.version)[token]
            logprobs.append(math.log(chance) if chance else -9999.0)
        return Completion(text, logprobs, "length", self.version)

    def _stops(self, ids: Ids, sampling: SamplingParams) -> bool:
        if ids[-1] in sampling.stop_ids:
            return True
        if not sampling.stop:
            return False
        assert self._decode is not None, "stop strings need `decode`"
        text = self._decode(ids)
        return any(stop in text for stop in sampling.stop)


def apply_sampling_params(probabilities: Sequence[float], sampling: SamplingParams) -> list[float]:
    """Apply temperature, top-k and top-p to the probabilities."""
    if sampling.temperature == 0:
        best = max(range(len(probabilities)), key=lambda token: (probabilities[token], -token))
        return [float(token == best) for token in range(len(probabilities))]
    weights = [p ** (1 / sampling.temperature) for p in probabilities]
    total = sum(weights)
    weights = [weight / total for weight in weights]
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept_tokens, mass = set(), 0.0
    for rank, token in enumerate(ranked):
        if (sampling.top_k > 0 and rank >= sampling.top_k) or mass >= sampling.top_p:
            break
        kept_tokens.add(token)
        mass += weights[token]
    return [weight / mass if token in kept_tokens else 0.0 for token, weight in enumerate(weights)]
