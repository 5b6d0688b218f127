"""A model sampled in this process: by its own chances, each sample from its own seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from treetune.inference.base import Completion, Request, SamplingParams
from treetune.testing.model_engine import ModelEngine

CHANCES = (0.2, 0.5, 0.3)
"""Of the end token, 0, and of two others."""


class Always:
    """The same chances whatever came before."""

    def begin(self, ids_BT: np.ndarray) -> np.ndarray:
        return np.tile(CHANCES, (len(ids_BT), 1))

    def go_on(self, rows: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        return np.tile(CHANCES, (len(rows), 1))


def request(seed: int, n: int, prompt: Sequence[int] = (1, 2)) -> Request:
    return Request(list(prompt), seed, n, SamplingParams(max_tokens=5))  # type: ignore[arg-type]


def test_tokens_come_as_often_as_the_model_says_and_end_at_the_end_token_or_the_budget() -> None:
    [samples] = ModelEngine(Always(), [0]).generate([request(0, 4000)])
    first = [int(one.token_ids[0]) for one in samples]
    assert [first.count(token) / 4000 for token in range(3)] == pytest.approx(CHANCES, abs=0.03)
    for one in samples:
        ended = one.token_ids[-1] == 0
        assert one.finish_reason == ("stop" if ended else "length")
        assert len(one.token_ids) == 5 or ended
        assert one.logprobs == pytest.approx(np.log(np.array(CHANCES)[one.token_ids]), abs=1e-6)


def test_a_sample_does_not_depend_on_what_else_is_asked() -> None:
    engine = ModelEngine(Always(), [0])
    alone = engine.generate([request(7, 2)])
    assert engine.generate([request(1, 3), request(7, 5), request(2, 1, (1,))])[1][:2] == alone[0]


def test_what_follows_from_answers_is_numbered_on() -> None:
    seen: list[int] = []

    def on_result(index: int, completions: list[Completion]) -> list[Request]:
        seen.append(index)
        return [request(50 + index, 1)] if index < 2 else []

    results = ModelEngine(Always(), [0]).generate([request(0, 1), request(1, 1)], on_result)
    assert seen == [0, 1, 2, 3]
    assert results[2] == ModelEngine(Always(), [0]).generate([request(50, 1)])[0]
