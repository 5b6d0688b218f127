"""DAPO's dynamic sampling: further problems are sampled until enough of them have answers that differ in
score (arXiv:2503.14476, section 3.2).

Example, with ``groups: 64``: of the iteration's 64 problems 40 have answers that differ, so a second round
samples 64 further problems, of which 30 have such answers: 70 are enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Answers, Experiment, Finding, Need, SampledAnswers, UseOfAdvantages
from treetune.rollouts.answers import contiguous_share, rank_share
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean, trajectory_metrics
from treetune.rollouts.single_turn import RolloutAround
from treetune.rollouts.storage import trajectories_from_bytes, trajectories_to_bytes
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Metrics, Problem, Trajectory


@Rollout.register("until_mixed")
@dataclass(frozen=True, kw_only=True)
class UntilMixed(RolloutAround):
    """DAPO's dynamic sampling (Yu et al., arXiv:2503.14476, section 3.2): runs `rollout` on the iteration's
    problems and then, round by round, on further ones, until `groups` problems have answers that differ in
    score.

    With the selection ``mixed_groups`` and its `at_most`, each iteration trains on the same number of groups
    with spread. All sampled answers are kept and counted, also those to problems without spread. So
    ``episodes/score`` is the policy's score on problems that were not chosen by its answers.

    After the last round, or when the split has no further problem, the log says so, and the iteration
    continues with the groups that it has.

    Metrics: ``rollout/rounds``, the number of rounds; ``rollout/groups_dropped``, the share of problems whose
    answers all scored the same; ``rollout/groups_lacking``, the number of groups that were missing at the
    end. The metrics ``episodes/…`` and the numbers of answers are computed over all rounds together. Other
    metrics of the inner rollout are averaged over the rounds, weighted by their numbers of problems.
    """

    groups: Annotated[int, Gt(0)]
    """The number of problems that must have answers with different scores."""
    max_rounds: Annotated[int, Gt(0)] = 10
    """The largest number of rounds, the first included."""
    problems_per_round: Annotated[int, Gt(0)] | None = None
    """The number of problems of each further round; null: as many as the first round has."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (
            Need(SampledAnswers(), "it samples until answers differ"),
            Need(Answers(2), "it waits for answers that differ"),
            Need(
                UseOfAdvantages(),
                "answers that differ only matter where they are compared",
                "choose the rollout 'single_turn', or an objective that learns from advantages",
            ),
        )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if isinstance(self.rollout, UntilMixed):
            yield Finding(
                "until_mixed can't be within another one", "rollout", "name a rollout that samples answers"
            )
        first_round = experiment.problems_per_iteration
        if first_round is None:
            yield Finding(
                "the rollout asks for further problems where answers don't differ, and"
                " problems_per_iteration null has none left",
                "$.problems_per_iteration",  # "$" is the configuration's root
                "set it to a number below that of the training problems",
            )
        elif first_round == experiment.task.size("train"):
            yield Finding(
                f"the rollout asks for further problems, and problems_per_iteration takes all {first_round}",
                "$.problems_per_iteration",
                "lower it",
            )
        else:
            further_round = self.problems_per_round or first_round
            most_problems = first_round + (self.max_rounds - 1) * further_round
            if self.groups > most_problems:
                yield Finding(
                    f"{self.groups} groups are asked for, and {self.max_rounds} rounds have"
                    f" {most_problems} problems",
                    "groups",
                    "lower groups, or raise max_rounds or problems_per_iteration",
                )
        most_selected = experiment.selection.at_most
        if most_selected is not None and most_selected < self.groups:
            yield Finding(
                f"the rollout samples until {self.groups} groups have spread (groups), and the selection"
                f" trains on {most_selected} of them (at_most)",
                "groups",
                "make the two equal",
            )

    @override
    def most_problems(self, problems: int) -> int:
        further = (self.max_rounds - 1) * (self.problems_per_round or problems)
        return self.rollout.most_problems(problems + further)

    @override
    def most_answers(self, problems: int) -> int:
        further = (self.max_rounds - 1) * (self.problems_per_round or problems)
        return self.rollout.most_answers(problems + further)

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        trees: list[Tree] = []
        sampled_problems: list[Problem] = []
        rounds: list[_Round] = []
        further_problems: list[Problem] | None = None  # None until a further round needs them
        problems_of_round = list(problems)
        mixed_groups = 0  # problems whose answers differ in score
        # Each rank decides by itself whether a further round follows. All ranks come to the same decision,
        # since the metrics of a round are the same on all ranks.
        while True:
            answers_so_far = len(answers_of(trees))
            round_context = _context_after(context, answers_so_far)
            round_trees, metrics = self.rollout.run(round_context, problems_of_round)
            trees += round_trees
            sampled_problems += problems_of_round
            rounds.append(_Round(len(problems_of_round), metrics))
            # `episodes/mixed` is a share: times the number of problems, it is the number of mixed groups.
            mixed_groups += round(metrics["episodes/mixed"] * metrics["episodes/problems"])
            if mixed_groups >= self.groups or len(rounds) == self.max_rounds:
                break
            if further_problems is None:
                source = context.further_problems
                further_problems = [] if source is None else list(source.draw())
            count = self.problems_per_round or len(problems)
            problems_of_round, further_problems = further_problems[:count], further_problems[count:]
            if not problems_of_round:
                break
        if mixed_groups < self.groups:
            self._log_missing_groups(context, mixed_groups, len(sampled_problems), len(rounds))
        if len(rounds) > 1:
            trees = _share_between_ranks(context, sampled_problems, trees)
        # The metrics of all answers replace the rounds' means with the same names (by `|` below).
        metrics_of_answers = trajectory_metrics(context, answers_of(trees))
        return trees, _average_metrics(rounds) | metrics_of_answers | {
            "rollout/rounds": float(len(rounds)),
            "rollout/groups_dropped": 1.0 - mixed_groups / len(sampled_problems),
            "rollout/groups_lacking": float(max(0, self.groups - mixed_groups)),
        }

    def _log_missing_groups(
        self, context: RolloutContext, mixed_groups: int, problems: int, rounds: int
    ) -> None:
        """Logs that fewer than `groups` problems have answers that differ in score, and why no further round
        follows."""
        reason = "the split has no further problem"
        if rounds == self.max_rounds:
            reason = f"max_rounds is {self.max_rounds}"
        context.log.say(
            f"iteration {context.iteration + 1}: {self.groups} problems with answers that differ in score"
            f" were asked for; went on with {mixed_groups} of {problems} after {rounds} rounds, since"
            f" {reason}"
        )


class _Round(NamedTuple):
    """A finished round."""

    problems: int
    metrics: Metrics
    """The metrics of all ranks."""


def _average_metrics(rounds: Sequence[_Round]) -> Metrics:
    """Returns the means of the rounds' metrics, weighted by the number of problems."""
    values: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    for finished_round in rounds:
        for name, value in finished_round.metrics.items():
            values.setdefault(name, []).append(value)
            weights.setdefault(name, []).append(float(finished_round.problems))
    return {name: mean(values[name], weights[name]) for name in values}


def _context_after(context: RolloutContext, earlier_answers: int) -> RolloutContext:
    """Returns the context for a round of this rank. Its display of progress also counts earlier answers.

    Args:
        context: The context of the rollout.
        earlier_answers: The number of answers that this rank has sampled in earlier rounds.
    """

    def show_progress(done: int, total: int) -> None:
        context.log.progress(earlier_answers + done, earlier_answers + total)

    return replace(context, log=replace(context.log, progress=show_progress))


def _share_between_ranks(
    context: RolloutContext, problems: Sequence[Problem], trees: Sequence[Tree]
) -> list[Tree]:
    """Returns this rank's contiguous share of the trees of all rounds, in the order of `problems`.
    Collective.

    After several rounds a rank has a share of each round, but credit and storage expect one contiguous share.
    """
    by_problem = {tree.problem.id: tree for tree in trees}
    world_size = context.ranks.world_size
    if world_size > 1:
        messages_to_ranks = []
        for rank in range(world_size):
            share = contiguous_share(problems, rank, world_size)
            # This rank can only hand out the trees of problems that it has sampled itself.
            trees_for_rank = [by_problem[problem.id] for problem in share if problem.id in by_problem]
            messages_to_ranks.append(trajectories_to_bytes(answers_of(trees_for_rank)))
        answers: list[Trajectory] = []
        for message in context.ranks.hand_out("rounds", messages_to_ranks):
            answers += trajectories_from_bytes(message)
        by_problem = {tree.problem.id: tree for tree in trees_of(answers)}
    share_of_trees = []
    for problem in rank_share(context, problems):
        if problem.id in by_problem:  # a problem without answers may have no tree
            share_of_trees.append(by_problem[problem.id])
    return share_of_trees
