"""Samples further problems until enough of them have answers that differ in score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Answers, Experiment, Finding, Need, SampledAnswers, UseOfAdvantages
from treetune.rollouts.answers import contiguous_share, rank_share
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import FurtherProblems, RolloutContext
from treetune.rollouts.metrics import mean, trajectory_metrics
from treetune.rollouts.single_turn import RolloutAround
from treetune.rollouts.storage import trajectories_from_bytes, trajectories_to_bytes
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Metrics, Problem, Trajectory


@Rollout.register("until_mixed")
@dataclass(frozen=True, kw_only=True)
class UntilMixed(RolloutAround):
    """`rollout` on the iteration's problems and then, round by round, on further ones, until `groups`
    problems have answers that differ in score.

    DAPO's dynamic sampling (Yu et al., arXiv:2503.14476, section 3.2). Together with the selection
    ``mixed_groups`` with `at_most`, each iteration trains on equally many groups that say something.
    Everything that was sampled is kept and counted, so that ``episodes/score`` is the policy's on
    problems that were not chosen by how it answered them.

    Where the rounds are over, or the split has no problem left that the iteration hasn't had, the log says
    so, and the iteration goes on with the groups that it has.

    ``rollout/rounds``; ``rollout/groups_dropped``: share of problems whose answers all scored the same;
    ``rollout/groups_lacking``: how many were missing at the end. What the inner rollout measures
    beyond ``episodes/`` and numbers of answers is averaged over the rounds, each with the weight of its
    problems.
    """

    groups: Annotated[int, Gt(0)]
    """Problems with answers that differ that are enough."""
    max_rounds: Annotated[int, Gt(0)] = 10
    """Rounds at most, the first included."""
    problems_per_round: Annotated[int, Gt(0)] | None = None
    """Problems of a further round; None: as many as the first has."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (
            Need(SampledAnswers(), "it samples until answers differ"),
            Need(Answers(2), "it waits for answers that differ"),
            Need(
                UseOfAdvantages(),
                "answers that differ are worth something where they are compared",
                "choose the rollout 'single_turn', or an objective that learns from advantages",
            ),
        )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if isinstance(self.rollout, UntilMixed):
            yield Finding(
                "until_mixed can't be within another one", "rollout", "name a rollout that samples answers"
            )
        first = experiment.problems_per_iteration
        if first is None:
            yield Finding(
                "the rollout asks for further problems where answers don't differ, and"
                " problems_per_iteration null has none left",
                "$.problems_per_iteration",
                "set it to a number below that of the training problems",
            )
        elif first == experiment.task.size("train"):
            yield Finding(
                f"the rollout asks for further problems, and problems_per_iteration takes all {first}",
                "$.problems_per_iteration",
                "lower it",
            )
        else:
            most = first + (self.max_rounds - 1) * (self.problems_per_round or first)
            if self.groups > most:
                yield Finding(
                    f"{self.groups} groups are asked for, and {self.max_rounds} rounds have {most} problems",
                    "groups",
                    "lower groups, or raise max_rounds or problems_per_iteration",
                )
        kept = experiment.selection.at_most
        if kept is not None and kept < self.groups:
            yield Finding(
                f"the rollout samples until {self.groups} groups have spread (groups), and the selection"
                f" trains on {kept} of them (at_most)",
                "groups",
                "make the two equal",
            )

    @override
    def most_answers(self, problems: int) -> int:
        further = (self.max_rounds - 1) * (self.problems_per_round or problems)
        return (problems + further) * self.samples

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        trees: list[Tree] = []
        asked: list[Problem] = []
        rounds: list[_Round] = []
        further: list[Problem] | None = None
        upcoming = list(problems)
        mixed = 0
        # A round's metrics are of all ranks, so all of them decide alike.
        while True:
            answers_so_far = len(answers_of(trees))
            round_trees, metrics = self.rollout.run(_after(context, answers_so_far), upcoming)
            trees += round_trees
            asked += upcoming
            rounds.append(_Round(len(upcoming), metrics))
            mixed += round(metrics["episodes/mixed"] * metrics["episodes/problems"])
            if mixed >= self.groups or len(rounds) == self.max_rounds:
                break
            if further is None:
                others = context.find(FurtherProblems)
                further = [] if others is None else list(others.draw())
            size = self.problems_per_round or len(problems)
            upcoming, further = further[:size], further[size:]
            if not upcoming:
                break
        if mixed < self.groups:
            self._say_what_lacks(context, mixed, len(asked), len(rounds))
        if len(rounds) > 1:
            trees = _share_out(context, asked, trees)
        of_all_answers = trajectory_metrics(context, answers_of(trees))
        return trees, _average(rounds) | of_all_answers | {
            "rollout/rounds": float(len(rounds)),
            "rollout/groups_dropped": 1.0 - mixed / len(asked),
            "rollout/groups_lacking": float(max(0, self.groups - mixed)),
        }

    def _say_what_lacks(self, context: RolloutContext, mixed: int, asked: int, rounds: int) -> None:
        reason = "the split has no further problem"
        if rounds == self.max_rounds:
            reason = f"max_rounds is {self.max_rounds}"
        context.log.say(
            f"iteration {context.iteration + 1}: {self.groups} problems with answers that differ in score"
            f" were asked for; went on with {mixed} of {asked} after {rounds} rounds, since {reason}"
        )


class _Round(NamedTuple):
    """A round: how many problems it had, and its metrics, of all ranks."""

    problems: int
    metrics: Metrics


def _average(rounds: Sequence[_Round]) -> Metrics:
    """Returns the means of the rounds' metrics, each round with the weight of its problems."""
    names = dict.fromkeys(name for past in rounds for name in past.metrics)
    averages = {}
    for name in names:
        measured = [past for past in rounds if name in past.metrics]
        values = [past.metrics[name] for past in measured]
        averages[name] = mean(values, [float(past.problems) for past in measured])
    return averages


def _after(context: RolloutContext, done: int) -> RolloutContext:
    """Returns the context for a round that comes after `done` answers of this rank."""
    progress = context.log.progress
    log = replace(context.log, progress=lambda of_round, total: progress(done + of_round, done + total))
    return replace(context, log=log)


def _share_out(context: RolloutContext, asked: Sequence[Problem], trees: Sequence[Tree]) -> list[Tree]:
    """Returns this rank's share of all rounds' trees, so that all ranks' are in the order of `asked`.

    As they were sampled, a rank would hold a share of each round. Collective.
    """
    by_problem = {tree.problem.id: tree for tree in trees}
    world_size = context.ranks.world_size
    if world_size > 1:
        for_each_rank = []
        for rank in range(world_size):
            share = contiguous_share(asked, rank, world_size)
            trees_for_rank = [by_problem[problem.id] for problem in share if problem.id in by_problem]
            for_each_rank.append(trajectories_to_bytes(answers_of(trees_for_rank)))
        answers: list[Trajectory] = []
        for data in context.ranks.hand_out("rounds", for_each_rank):
            answers += trajectories_from_bytes(data)
        by_problem = {tree.problem.id: tree for tree in trees_of(answers)}
    return [by_problem[problem.id] for problem in rank_share(context, asked) if problem.id in by_problem]
