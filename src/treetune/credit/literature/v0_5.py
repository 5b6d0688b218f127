"""V0.5: a baseline between the mean reward of few answers and a value model's prediction. The better the two
agree, the more the prediction weighs (arXiv:2603.10848).

Example: two answers have the mean reward 0.5, whose variance is at most 1 / 8. A prediction of 0.6 differs
from the mean by no more than this noise, so the prediction is the baseline. A prediction of 0 differs by
more: the baseline is then 0.25.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune import contracts
from treetune.contracts import Experiment, Finding, Need
from treetune.credit.base import UNUSED_ADVANTAGES_REMEDY, Credit, CriticSettings, check_critic_is_kept
from treetune.credit.episodes import whole_answer_episodes
from treetune.credit.values.critic import CRITIC_NEEDS
from treetune.rollouts.context import RolloutContext, require
from treetune.rollouts.metrics import mean
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Episode, Metrics


@Credit.register("v0_5")
@dataclass(frozen=True, kw_only=True)
class FusedBaseline(Credit):
    """V0.5: A_i = R_i − (w · m + (1 − w) · V), where m is the mean reward of the problem's k answers and V a
    value model's prediction for the prompt (Zhang et al., arXiv:2603.10848). `fused_baseline` has the formula
    of w.

    V is the value that the run's critic gives to the prompt. The authors' value model is frozen, and was
    trained on other policies. Their rollout, which samples more answers where m and V disagree, is not part
    of this credit.

    **Biased**: an answer's own reward is in m, and so in w. On the tests' language the expected gradient is
    off by 11 % of its length with three answers and the exact V, and has the right direction (cosine 1)."""

    spread: Annotated[float, Gt(0)] = 1.0
    """The highest possible reward minus the lowest. In the paper it is 2, since rewards are ±1."""
    critic: CriticSettings = field(default_factory=CriticSettings)
    """Settings of the critic's training."""

    gives = (contracts.Advantages(True), contracts.CriticValues(), contracts.CreditForRewards())
    needs = (
        Need(contracts.Answers(2), "it takes the mean of a problem's answers"),
        Need(contracts.UseOfAdvantages(), "it trains a critic for them", UNUSED_ADVANTAGES_REMEDY),
        *CRITIC_NEEDS,
    )

    @property
    @override
    def critic_settings(self) -> CriticSettings | None:
        return self.critic

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return check_critic_is_kept(experiment, "the credit 'v0_5'", "choose the credit 'james_stein'")

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        """Gives all tokens of an answer its reward minus a mean of the group's mean reward and the critic's
        value of the prompt, weighted by how reliable they are."""
        answers = answers_of(trees)
        critic = require(context.model_scores.critic, "critic")
        columns = iter(critic.values(answers))  # for each answer a value before each token
        advantages: list[float] = []
        for tree in trees:
            rewards = [leaf.reward for leaf in tree.leaves]
            # An answer's first value is that of the prompt. It is equal for all answers, up to rounding.
            prompt_values = [_first_value(next(columns)) for _ in rewards]
            baseline = fused_baseline(rewards, mean(prompt_values), self.spread)
            advantages += [reward - baseline for reward in rewards]
        return whole_answer_episodes(context, answers, advantages)


def _first_value(values: Column) -> float:
    """Returns the critic's value before the first sampled token. The values before injected tokens are
    NaN."""
    return next(value for value in values.tolist() if not math.isnan(value))


def fused_baseline(rewards: Sequence[float], prediction: float, spread: float) -> float:
    """Returns w · m + (1 − w) · V, where m is the mean of the k rewards, and V is the `prediction`.

    w = Δ² / (Δ² + σ²) minimises the squared error. σ² = spread² / 4k is the largest variance that a mean of k
    rewards can have. Δ² = max(0, (m − V)² − σ²) is the part of the squared difference that this noise doesn't
    explain: an estimate of the squared error of V. If the noise explains all of it, V gets all the weight.
    """
    group_mean = mean(rewards)
    noise = spread**2 / (4 * len(rewards))
    squared_error = max(0.0, (group_mean - prediction) ** 2 - noise)
    weight = squared_error / (squared_error + noise)
    return weight * group_mean + (1 - weight) * prediction
