"""Values and advantages that a method gives steps, held against the true ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treetune.lab.analyzers.figures import Bootstrap, mean_of
from treetune.vocabulary import Episode

MATTERS = 0.01
"""A step whose true advantage is smaller has no sign to speak of."""


@dataclass(frozen=True)
class Truth:
    """The truth about one answer: the problem, where its steps end, the true value before each, and its
    reward; the variances of the values as estimates, where they are such."""

    problem: Hashable
    step_ends: tuple[int, ...]
    values: tuple[float, ...]
    reward: float
    noise: tuple[float, ...] = ()

    @property
    def advantages(self) -> list[float]:
        after = (*self.values[1:], self.reward)
        return [behind - before for before, behind in zip(self.values, after, strict=True)]


def reliability(truths: Sequence[Truth]) -> float | None:
    """The share of the variance of true advantages that is not their own noise: a correlation with them is
    that with the exact ones times its root. None where they don't vary."""
    noise = [
        before + after
        for truth in truths
        if truth.noise
        for before, after in zip(truth.noise, (*truth.noise[1:], 0.0), strict=True)
    ]
    variance = float(np.var([one for truth in truths for one in truth.advantages]))
    return 1.0 - float(np.mean(noise)) / variance if variance and noise else None


@dataclass(frozen=True)
class Credited:
    """The credit of one method: an episode of each answer, and the tokens that were sampled for it."""

    episodes: Sequence[Episode]
    tokens: int = 0


def measure(truths: Sequence[Truth], credited: Credited, seed: int) -> dict[str, Any]:
    """Returns ``value_bias``, the mean of value − true value, and ``decisive_signs``, the share of advantages
    with the right sign at the step that decides most. Intervals are of 95 %, over problems. They are None
    where a method gives no values, or nothing decides."""
    off: list[float] = []
    right: list[float] = []
    problems: list[Hashable] = []
    for truth, episode in zip(truths, credited.episodes, strict=True):
        assert episode.advantages is not None, "a method that gives advantages before training"
        true = truth.advantages
        decisive = max(range(len(true)), key=lambda step: abs(true[step]))
        starts = (0, *truth.step_ends[:-1])
        own = dict(zip((0, *episode.step_ends[:-1]), episode.step_values or ()))
        for step, (start, end) in enumerate(zip(starts, truth.step_ends, strict=True)):
            problems.append(truth.problem)
            off.append(own.get(start, math.nan) - truth.values[step])
            decides = step == decisive and abs(true[step]) >= MATTERS
            found = float(episode.advantages[start:end].mean())
            right.append(float(np.sign(found) == np.sign(true[step])) if decides else math.nan)
    bootstrap = Bootstrap(problems, seed)
    return {
        "value_bias": bootstrap(mean_of(off)),
        "decisive_signs": bootstrap(mean_of(right)),
        "answers": len(truths),
        "tokens_per_answer": credited.tokens / len(truths),
    }
