"""A tiny model sampled in this process: stands for the server where that costs more than all sampling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from treetune.analyzers.expansion import NextTokens
from treetune.inference.base import Completion, Engine, Later, OnResult, Request

ROWS = 2048
"""Samples at a time."""


class ModelEngine(Engine):
    """Samples token by token, requests of one length together. A sample comes from its own seed."""

    def __init__(self, steps: NextTokens, end_ids: Sequence[int], version: int = 0) -> None:
        self._steps, self._end_ids, self.version = steps, set(end_ids), version
        self.tokens = 0

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        waiting: list[Request] = []
        results: dict[int, list[Completion]] = {}
        begun = 0
        following = list(requests)
        while following:
            for one in following:
                assert isinstance(one, Request), "no answer here waits for anything"
                waiting.append(one)
            results |= self._wave(waiting, range(begun, len(waiting)))
            following, done = [], range(begun, len(waiting))
            begun = len(waiting)
            for index in done:
                if on_result is not None:
                    following += on_result(index, results[index]) or ()
        return [results[index] for index in range(len(waiting))]

    def _wave(self, requests: Sequence[Request], numbers: range) -> dict[int, list[Completion]]:
        samples = [(number, sample) for number in numbers for sample in range(requests[number].n)]
        alike: dict[tuple[int, int, float], list[tuple[int, int]]] = defaultdict(list)
        for number, sample in samples:
            asked = requests[number]
            alike[len(asked.prompt_ids), asked.sampling.max_tokens, asked.sampling.temperature].append(
                (number, sample)
            )
        found: dict[tuple[int, int], Completion] = {}
        for (_, most, temperature), group in sorted(alike.items()):
            assert temperature == 1, "the model's own distribution is sampled"
            for start in range(0, len(group), ROWS):
                found |= self._sampled(requests, group[start : start + ROWS], most)
        return {number: [found[number, sample] for sample in range(requests[number].n)] for number in numbers}

    def _sampled(
        self, requests: Sequence[Request], group: Sequence[tuple[int, int]], most: int
    ) -> dict[tuple[int, int], Completion]:
        chance = np.stack([np.random.default_rng(requests[n].seed + s).random(most) for n, s in group])
        prompts = list(dict.fromkeys(number for number, _ in group))
        chances_BV = self._steps.begin(np.stack([requests[number].prompt_ids for number in prompts]))
        rows = [prompts.index(number) for number, _ in group] if len(prompts) > 1 else [0] * len(group)
        alive = list(range(len(group)))
        ids: list[list[int]] = [[] for _ in group]
        logprobs: list[list[float]] = [[] for _ in group]
        while alive:
            own_WV = chances_BV[rows]
            sums_WV = own_WV.cumsum(1)
            drawn_W = np.array([chance[one, len(ids[one])] for one in alive])
            tokens = (sums_WV[:, :-1] <= drawn_W[:, None] * sums_WV[:, -1:]).sum(1).tolist()
            for row, (one, token) in enumerate(zip(alive, tokens, strict=True)):
                ids[one].append(token)
                logprobs[one].append(float(np.log(own_WV[row, token])))
            on = [
                row for row, one in enumerate(alive)
                if ids[one][-1] not in self._end_ids and len(ids[one]) < most
            ]  # fmt: skip
            if on:
                chances_BV = self._steps.go_on([rows[row] for row in on], [tokens[row] for row in on])
            alive, rows = [alive[row] for row in on], list(range(len(on)))
        self.tokens += sum(map(len, ids))
        written = zip(group, ids, logprobs, strict=True)
        return {place: self._completion(own_ids, own) for place, own_ids, own in written}

    def _completion(self, ids: list[int], logprobs: list[float]) -> Completion:
        stopped = ids[-1] in self._end_ids
        return Completion(ids, logprobs, "stop" if stopped else "length", policy_version=self.version)  # type: ignore[arg-type]
