"""RTMC: values of states that a group's answers share. The fewer answers share a state, the more its baseline
is shrunk towards the group's mean (arXiv:2604.11037).

Example, with ``prior: 2``: of a group with the mean reward 0.25, two answers went through a state, and earned
1 and 0. The state's baseline is (1 + 0 + 2 · 0.25) / (2 + 2) = 0.375.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from typing_extensions import override

from treetune.credit.values.base import StepValues, Valuation, ValueEstimator, value_of_rewards
from treetune.credit.values.siblings import Siblings
from treetune.rollouts.metrics import mean


@ValueEstimator.register("rtmc")
@dataclass(frozen=True, kw_only=True)
class RolloutTree(Siblings):
    """RTMC: a step's advantage is Q(s, a) − V'(s), where Q is the mean reward of the group's answers that
    took the step. V' is the mean reward of the n answers that went through s, shrunk towards the group's
    mean, as if `prior` more answers had gone through s and earned this mean:
    (Σ r + prior · mean) / (n + prior) (Wang et al., arXiv:2604.11037, eq. 11, after a public port of the
    code). An answer counts in its own values. Nothing is sampled.

    Here a state is the prefix of an answer. The paper's states are signatures of an agent's state, which
    don't record the order of its actions. The paper also discounts by 0.99 per turn, and may divide by the
    standard deviation (`trainer.advantage_normalisation`).

    **Biased**, by the prior and by the answer's own reward in its values: on the tests' language the expected
    gradient is off by 35 % of its length with three answers (cosine 0.998)."""

    unbiased = False

    prior: Annotated[float, Ge(0)] = 2.0
    """The number of answers that the group's mean counts as, in addition to those that went through a
    state."""

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        """Returns the mean reward of all answers that went through each state. The baseline is this mean,
        shrunk towards the group's mean."""
        # For each state of an answer, the rewards of the other answers that went through the state.
        others = valuation.sibling_rewards()
        values: list[StepValues] = []
        for answer in valuation.answers:
            group_mean = mean([leaf.reward for leaf in answer.tree.leaves])
            step_values: StepValues = []
            for answer_state in answer.states:
                state_value = value_of_rewards([answer.reward, *others[answer_state]])
                assert state_value is not None, "an answer went through its own states"
                # The baseline is a mean in which `prior` further answers count, each with the group's mean as
                # its reward.
                sum_of_rewards = state_value.value * state_value.samples + self.prior * group_mean
                baseline = sum_of_rewards / (state_value.samples + self.prior)
                step_values.append(state_value._replace(baseline=baseline))
            values.append(step_values)
        return values
