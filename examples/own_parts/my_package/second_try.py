"""A rollout of one's own: problems without a correct answer are asked a second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treetune import (
    Metrics,
    Problem,
    Rollout,
    RolloutContext,
    SingleTurn,
    Tree,
    answers_of,
    sample_answers,
    trajectory_metrics,
)


@Rollout.register("second_try")
@dataclass(frozen=True, kw_only=True)
class SecondTry(SingleTurn):
    """`samples` answers to each problem and, where none of them is correct, as many again. Both are trained
    on as one group."""

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        trees, _ = super().run(context, problems)
        unsolved = {
            tree.problem.id: tree for tree in trees if not any(one.grade.correct for one in tree.leaves)
        }
        again = sample_answers(
            context,
            [tree.problem for tree in unsolved.values()],
            samples=self.samples,
            sampling=self.sampling,
            unfinished_reward=self.unfinished_reward,
            max_prompt_tokens=self.max_prompt_tokens,
            purpose="second try",
        )
        for one in answers_of(again):
            unsolved[one.problem.id].take(replace(one, sample=one.sample + self.samples))
        return trees, trajectory_metrics(context, answers_of(trees))
