"""A rollout of your own: problems without a correct answer get a second set of answers."""

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
    """Samples `samples` answers to each problem. If none of them is correct, it samples as many again. Both
    sets are one group for the credit, and are trained on."""

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        """Returns a tree of graded answers for each problem, and metrics of the answers."""
        trees, _ = super().run(context, problems)
        unsolved = {}
        for tree in trees:
            if not any(answer.grade.correct for answer in tree.leaves):
                unsolved[tree.problem.id] = tree
        second_trees = sample_answers(
            context,
            [tree.problem for tree in unsolved.values()],
            samples=self.samples,
            sampling=self.sampling,
            unfinished_reward=self.unfinished_reward,
            max_prompt_tokens=self.max_prompt_tokens,
            purpose="second try",
        )
        for answer in answers_of(second_trees):
            # The number of an answer is unique in its group.
            numbered = replace(answer, sample=answer.sample + self.samples)
            unsolved[answer.problem.id].add_answer(numbered)
        return trees, trajectory_metrics(context, answers_of(trees))
