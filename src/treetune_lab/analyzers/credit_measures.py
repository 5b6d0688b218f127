"""The quality of credit: the advantages that a method gives steps, held against the true ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treetune.vocabulary import Episode
from treetune_lab.analyzers.figures import Bootstrap, correlation, mean_of

MEASURES = ("correlation", "error", "bias", "signs", "decisive_signs")

WORDS = {
    "correlation": "correlation of advantages with the true ones",
    "error": "mean squared error, the best scale given",
    "bias": "mean of value − true value",
    "signs": "right signs of all steps that matter",
    "decisive_signs": "right signs at the decisive step",
}

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
    """The credit of one method: an episode of each answer, the tokens and seconds that it took."""

    episodes: Sequence[Episode]
    tokens: int
    seconds: float


def of_steps(episode: Episode, step_ends: Sequence[int]) -> list[float]:
    """The mean advantage of the tokens of each step, whatever steps the credit itself saw."""
    assert episode.advantages is not None, "a method that gives advantages before training"
    starts = (0, *step_ends[:-1])
    return [float(episode.advantages[start:end].mean()) for start, end in zip(starts, step_ends, strict=True)]


def measure(truths: Sequence[Truth], credited: Credited, seed: int) -> dict[str, Any]:
    """The numbers of `WORDS`, with 95 % intervals over problems, and what they cost.

    ``error`` is that of the method's advantages times the one factor that makes it smallest: what a learning
    rate does. It is a share of the true advantages' mean square, so 1 is no better than no credit at all.
    ``bias`` is of values, where the method gives such. Steps are weighed equally."""
    rows: dict[str, list[Any]] = {name: [] for name in ("problem", "true", "found", "decides", "off")}
    for truth, episode in zip(truths, credited.episodes, strict=True):
        true = truth.advantages
        decisive = max(range(len(true)), key=lambda step: abs(true[step]))
        for step, (exact, found) in enumerate(zip(true, of_steps(episode, truth.step_ends), strict=True)):
            rows["problem"].append(truth.problem)
            rows["true"].append(exact)
            rows["found"].append(found)
            rows["decides"].append(step == decisive and abs(exact) >= MATTERS)
            rows["off"].append(_value_at(episode, truth, step) - truth.values[step])
    true_S, found_S = np.array(rows["true"]), np.array(rows["found"])
    decides_S = np.array(rows["decides"], bool)
    matters_S = np.abs(true_S) >= MATTERS
    right_S = (np.sign(true_S) == np.sign(found_S)).astype(float)
    bootstrap = Bootstrap(rows["problem"], seed)
    return {
        "correlation": bootstrap(lambda chosen: correlation(found_S[chosen], true_S[chosen])),
        "error": bootstrap(lambda chosen: _scaled_error(found_S[chosen], true_S[chosen])),
        "bias": bootstrap(mean_of(rows["off"])),
        "signs": bootstrap(mean_of(np.where(matters_S, right_S, math.nan))),
        "decisive_signs": bootstrap(mean_of(np.where(decides_S, right_S, math.nan))),
        "steps": len(true_S),
        "answers": len(truths),
        "tokens_per_answer": credited.tokens / len(truths),
        "seconds": credited.seconds,
    }


def _value_at(episode: Episode, truth: Truth, step: int) -> float:
    """Returns the method's value of the state before a step; NaN where it gives none."""
    if episode.step_values is None:
        return math.nan
    start = (0, *truth.step_ends)[step]
    own = dict(zip((0, *episode.step_ends[:-1]), episode.step_values))
    return own.get(start, math.nan)


def _scaled_error(found: Any, true: Any) -> float:
    """1 − r² without a constant: what is left of the truth's square once the best multiple is taken off."""
    whole = float((true * true).sum())
    own = float((found * found).sum())
    if not whole:
        return math.nan
    return 1.0 - (float((found * true).sum()) ** 2 / own / whole if own else 0.0)
