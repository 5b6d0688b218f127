"""A rollout of one's own: problems that nobody solved are asked a second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treetune.episode_generators.base import GenerationContext, Rollout
from treetune.episode_generators.metrics import trajectory_metrics
from treetune.episode_generators.rollout.answers import rank_share
from treetune.episode_generators.rollout.single_turn import SingleTurn, sample_answers
from treetune.vocabulary import Metrics, Problem, Trajectory


@Rollout.register("second_try")
@dataclass(frozen=True, kw_only=True)
class SecondTry(SingleTurn):
    """`samples` answers to each problem and, where none of them is correct, as many again. Both are trained
    on as one group."""

    def run(
        self, context: GenerationContext, problems: Sequence[Problem]
    ) -> tuple[list[Trajectory], Metrics]:
        first, _ = super().run(context, problems)
        solved = {answer.problem.id for answer in first if answer.score > 0}
        unsolved = [problem for problem in rank_share(context, problems) if problem.id not in solved]
        second = sample_answers(
            context,
            unsolved,
            samples=self.samples,
            sampling=self.sampling,
            unfinished_reward=self.unfinished_reward,
            max_prompt_tokens=self.max_prompt_tokens,
            purpose="second try",
        )
        answers = {problem.id: [one for one in first if one.problem.id == problem.id] for problem in problems}
        for one in second:
            answers[one.problem.id].append(replace(one, sample=one.sample + self.samples))
        trajectories = [one for group in answers.values() for one in group]
        return trajectories, trajectory_metrics(context, trajectories)
