"""Values that know their neighbours, without the bias of smoothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from treetune.rollouts.values.valuation import AlongAnswer, Valuation, ValueEstimator
from treetune_lab.values.over_another import OverAnother, Sums

GAINS = tuple(tenth / 10 for tenth in range(10))
"""How much of a value may be its neighbour's."""


@ValueEstimator.register("filtered")
@dataclass(frozen=True, kw_only=True)
class Filtered(OverAnother):
    """Smooths another estimator's values in two halves, each from the side that it may know.

    What a step has brought about is seen from behind: q_i = (1 − g)·V̂_i + g·q_{i+1}, with the reward behind
    the last. Values along an answer are a martingale, so that each later one has the mean V(s_i). What it is
    held against is seen from before: f_i = (1 − h)·V̂_i + h·f_{i−1} knows nothing of what was done in s_i, and
    for any such f ∇log π(a|s)·f has the mean 0. A step's advantage is q_{i+1} − f_i: as unbiased as the other
    estimator, where `smoothed` sees both values from both sides.

    g (`behind`) and h (`before`), where they aren't given, are those of `GAINS` that come nearest to V̂ one
    state before and one behind, whose noise is their own, and so the ones with the least variance. They are
    learnt from the iteration's other problems, which share no sample with this one; with one problem alone
    both are 0. ``credit/filter_behind`` and ``credit/filter_before`` are those of all problems together. If
    one is learnt over an estimator that itself learns from other problems, it is **biased** by as much as
    one problem weighs among them."""

    behind: Annotated[float, Ge(0), Lt(1)] | None = None
    before: Annotated[float, Ge(0), Lt(1)] | None = None

    @property
    def learns_from_others(self) -> bool:  # type: ignore[override]
        return self.over.learns_from_others or None in (self.behind, self.before)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        learns = None in (self.behind, self.before)
        return self.over.unbiased and not (learns and self.over.learns_from_others)

    def values(self, valuation: Valuation) -> list[list[AlongAnswer]]:
        found = self.over.values(valuation)
        own = [
            Sums(
                (_misses(along, leaf.reward) for along, leaf in zip(of_tree, tree.leaves, strict=True)),
                2 * len(GAINS),
            ).rounded()
            for of_tree, tree in zip(found, valuation.trees, strict=True)
        ]
        everyones = [
            one for of_rank in valuation.context.ranks.exchange("value-misses", own) for one in of_rank
        ]
        total = Sums(everyones, 2 * len(GAINS))
        valuation.metrics |= dict(
            zip(("credit/filter_behind", "credit/filter_before"), self._gains(total.rounded()), strict=True)
        )
        gains = [self._gains(total.without(one)) for one in own]
        return [
            [
                filtered(along, leaf.reward, *of_problem)
                for along, leaf in zip(of_tree, tree.leaves, strict=True)
            ]
            for of_tree, tree, of_problem in zip(found, valuation.trees, gains, strict=True)
        ]

    def _gains(self, misses: Sequence[float]) -> tuple[float, float]:
        """Those that are given, or else those that miss least; the smallest of equals."""
        sides = misses[: len(GAINS)], misses[len(GAINS) :]
        behind, before = (GAINS[min(range(len(GAINS)), key=side.__getitem__)] for side in sides)
        return (
            behind if self.behind is None else self.behind,
            before if self.before is None else self.before,
        )


def _looks(along: AlongAnswer, reward: float) -> list[float]:
    return [*(one.value for one in along if one is not None), reward]


def _misses(along: AlongAnswer, reward: float) -> list[float]:
    """Sums of squares for each of `GAINS`: of what is seen from behind less the value before it, and then of
    what is seen from before less the next."""
    looks = _looks(along, reward)
    held = [one.held_against for one in along if one is not None]
    behind, before = [], []
    for gain in GAINS:
        after = _from_behind(looks, gain)
        behind.append(math.fsum((one - look) ** 2 for one, look in zip(after[1:-1], looks)))
        ahead = _from_before(held, gain)
        before.append(math.fsum((one - look) ** 2 for one, look in zip(ahead, looks[1:])))
    return behind + before


def _from_behind(looks: Sequence[float], gain: float) -> list[float]:
    found = [looks[-1]]
    for look in reversed(looks[:-1]):
        found.append((1 - gain) * look + gain * found[-1])
    return found[::-1]


def _from_before(looks: Sequence[float], gain: float) -> list[float]:
    found: list[float] = []
    for look in looks:
        found.append((1 - gain) * look + gain * found[-1] if found else look)
    return found


def filtered(along: AlongAnswer, reward: float, behind: float, before: float) -> AlongAnswer:
    """The values of an answer with these gains."""
    values = iter(_from_behind(_looks(along, reward), behind))
    baselines = iter(_from_before([one.held_against for one in along if one is not None], before))
    return [
        None if one is None else one._replace(value=next(values), baseline=next(baselines)) for one in along
    ]
