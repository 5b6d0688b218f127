"""V0.5: a baseline between the mean of few answers and a value model's guess, by how well they agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune import contracts
from treetune.contracts import Experiment, Finding, Need
from treetune.lab.values.critic import CRITIC_NEEDS
from treetune.rollouts.base import UNUSED_REMEDY, Credit, Critic, CriticSettings, check_critic_goes_on
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import whole_answer
from treetune.rollouts.metrics import mean
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics


@Credit.register("v0_5")
@dataclass(frozen=True, kw_only=True)
class FusedBaseline(Credit):
    """The reward less w · m + (1 − w) · V, where m is the mean reward of the problem's k answers and V a
    value model's guess for the prompt (Zhang et al., arXiv:2603.10848): see `fused_baseline`.

    V is what the run's critic says of the prompt. The authors' is a frozen model that knows other policies;
    their rollout, which samples more answers where the two disagree, is not part of this.

    **Biased**: an answer's own reward is in m, and so in w. On the tests' language the expected gradient is
    off by 11 % of its length with three answers and the exact V, in length alone (cosine 1)."""

    spread: Annotated[float, Gt(0)] = 1.0
    """The most that an answer earns less the least: 2 for the paper's ±1."""
    critic: CriticSettings = field(default_factory=CriticSettings)
    """Settings of the critic's training."""

    gives = (contracts.Advantages(True), contracts.CriticValues(), contracts.CreditForRewards())
    needs = (
        Need(contracts.Answers(2), "it takes the mean of a problem's answers"),
        Need(contracts.UseOfAdvantages(), "it trains a critic for them", UNUSED_REMEDY),
        *CRITIC_NEEDS,
    )

    @property
    @override
    def critic_settings(self) -> CriticSettings | None:
        return self.critic

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return check_critic_goes_on(experiment, "the credit 'v0_5'", "choose the credit 'james_stein'")

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        answers = answers_of(trees)
        guesses = iter(context.get(Critic).values(answers))
        advantages: list[float] = []
        for tree in trees:
            rewards = [leaf.reward for leaf in tree.leaves]
            # All begin at the prompt: their first values are one, up to rounding.
            firsts = [next(one for one in next(guesses).tolist() if one == one) for _ in rewards]
            baseline = fused_baseline(rewards, mean(firsts), self.spread)
            advantages += [reward - baseline for reward in rewards]
        return whole_answer(context, answers, advantages)


def fused_baseline(rewards: Sequence[float], guess: float, spread: float) -> float:
    """Returns w · m + (1 − w) · V with the w that makes its squared error least: Δ² / (Δ² + σ²).

    σ² = spread² / 4k is the largest variance of a mean of k rewards, and Δ² = max(0, (m − V)² − σ²)
    what is left of the difference beyond it: a guess within the noise is believed.
    """
    centre = mean(rewards)
    noise = spread**2 / (4 * len(rewards))
    off = max(0.0, (centre - guess) ** 2 - noise)
    weight = off / (off + noise)
    return weight * centre + (1 - weight) * guess
