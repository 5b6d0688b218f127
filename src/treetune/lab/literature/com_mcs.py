"""ComMCS: the value of a state, mixed with the next one's along the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt
from typing_extensions import override

from treetune.lab.values.over_another import OverAnother
from treetune.rollouts.valuation import StepValues, Valuation, Value, ValueEstimator


@ValueEstimator.register("com_mcs")
@dataclass(frozen=True, kw_only=True)
class CompoundValues(OverAnother):
    """(1 − c) V̂(s_n) + c V̂(s_{n+1}) for V(s_n): the next state's estimate is one of this state's, too, since
    the policy sampled the step between (Sun et al., arXiv:2508.10539, with m = n + 1). Behind the last state
    stands the reward.

    The paper labels states for a verifier and finds c from the verifier's spread of values; here it is
    `next_weight`. Its figure has 8 samples as sure as 10, which the best c makes of 1 / (1 − c): 0.2.

    A step is worth this mixture behind it less V̂ before it, unmixed: a baseline that knew what the step
    brought about would be biased. So it is as unbiased as the other estimator. `filtered` goes on mixing to
    the answer's end, and learns how much."""

    next_weight: Annotated[float, Ge(0), Lt(1)] = 0.2
    """c."""

    @property
    @override
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.over.unbiased

    @property
    @override
    def learns_from_others(self) -> bool:  # type: ignore[override]
        return self.over.learns_from_others

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        values = self.over.values(valuation)
        return [
            self._mixed(of_answer, answer.reward)
            for of_answer, answer in zip(values, valuation.answers, strict=True)
        ]

    def _mixed(self, of_answer: StepValues, reward: float) -> StepValues:
        c, after, mixed = self.next_weight, Value(reward, 0.0), list[Value | None]()
        for one in reversed(of_answer):
            if one is None:
                mixed.append(None)
                continue
            value = (1 - c) * one.value + c * after.value
            variance = (1 - c) ** 2 * one.variance + c**2 * after.variance
            mixed.append(one._replace(value=value, variance=variance, baseline=one.baseline_or_value))
            after = one
        return mixed[::-1]
