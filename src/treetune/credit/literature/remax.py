"""ReMax: the reward of the policy's most likely answer as the baseline (arXiv:2310.10505).

Example: greedy decoding solves the problem. A sampled answer that is right has the advantage 1 − 1 = 0, and
one that is wrong 0 − 1 = −1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from treetune.contracts import (
    Advantages,
    Continuations,
    Experiment,
    Finding,
    Need,
    OneLine,
    SampledAnswers,
    UseOfAdvantages,
    innermost_rollout,
)
from treetune.credit.base import UNUSED_ADVANTAGES_REMEDY, ContinuingCredit, Credit
from treetune.credit.episodes import whole_answer_episodes
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean, pool_columns
from treetune.rollouts.single_turn import sample_answers
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics


@Credit.register("remax")
@dataclass(frozen=True, kw_only=True)
class ReMax(ContinuingCredit):
    """ReMax: A_i = r_i − r(greedy answer), where each token of the greedy answer is the most likely one (Li
    et al., arXiv:2310.10505, Algorithm 1).

    The credit samples one greedy answer to each problem, after the rollout. So one sampled answer to a
    problem is enough. Unbiased: the greedy answer depends only on the problem, and not on the sampled answer.
    If the greedy answer could not be graded, the baseline is 0.
    """

    # `CreditForRewards` is left out, so that shaping is refused: it would not change the greedy answer's
    # reward.
    gives = (Advantages(before_training=True), Continuations())
    needs = (
        Need(SampledAnswers(), "it samples a greedy answer for comparison"),
        Need(OneLine(), "its greedy answer is written in one go"),
        Need(UseOfAdvantages(), "it samples an answer for them", UNUSED_ADVANTAGES_REMEDY),
    )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        sampling = experiment.rollout.sampling
        if sampling is not None and sampling.temperature == 0:
            _, key = innermost_rollout(experiment.rollout)
            yield Finding(
                "the credit 'remax' compares sampled answers with a greedy one, and at temperature 0 they are"
                " the same",
                f"{key}.temperature",
                "set it to 1",
            )

    @override
    def is_unbiased(self, context: RolloutContext) -> bool:
        return True

    @property
    @override
    def further_answers(self) -> int:
        return 1  # the greedy one

    @override
    def continuations(self, answers: int, tokens: float, limit: int) -> tuple[int, int]:
        return 0, 0

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        sampling = context.settings.sampling
        assert sampling is not None, "a rollout that samples has sampling settings"
        greedy_trees = sample_answers(
            context,
            [tree.problem for tree in trees],
            samples=1,
            sampling=replace(sampling, temperature=0.0, top_p=1.0, top_k=-1),
            unfinished_reward=context.settings.unfinished_reward,
            purpose="greedy",
        )
        advantages: list[float] = []
        greedy_rewards: list[float] = []
        greedy_lengths: list[float] = []
        for tree, greedy_tree in zip(trees, greedy_trees, strict=True):
            (greedy_answer,) = greedy_tree.leaves
            # If the greedy answer has no grade, the baseline is 0, which keeps the gradient unbiased.
            baseline = greedy_answer.reward if greedy_answer.grade.is_known else 0.0
            advantages += [answer.reward - baseline for answer in tree.leaves]
            greedy_rewards.append(baseline)
            greedy_lengths.append(float(len(greedy_answer.response_ids)))
        episodes, metrics = whole_answer_episodes(context, answers_of(trees), advantages)
        columns = pool_columns(context, "greedy", {"rewards": greedy_rewards, "tokens": greedy_lengths})
        if columns["rewards"]:
            metrics["credit/greedy_reward"] = mean(columns["rewards"])
            metrics["credit/value_tokens"] = sum(columns["tokens"])
        return episodes, metrics
