"""What an answer's critical path is compared with: a length in tokens for each answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated, Any

from annotated_types import Ge, Lt, MinLen

from treetune.config.registrable import Registrable
from treetune.contracts import Answers, Experiment, Finding, Need
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit.episodes import groups_of
from treetune.seeds import derive_seed
from treetune.vocabulary import Problem, Trajectory
from treetune_threads.counting import ThreadCounts
from treetune_threads.measured_lengths import measured_lengths


class ReferenceLength(Registrable):
    """How long correct answers are to be compared with. `prepare` is shaping's."""

    remembers: bool = False

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Raises ValueError where something that it needs isn't there."""

    def lengths(
        self,
        context: RolloutContext,
        trajectories: Sequence[Trajectory],
        counts: Sequence[ThreadCounts],
        memory: dict[str, Any],
    ) -> list[float | None]:
        """For each answer, in tokens; None for those that there is nothing to compare with.

        Wrong answers have one or not, nobody asks for it. `memory` is this part's alone, the same on
        all ranks, and is changed on all of them alike. Collective.
        """
        raise NotImplementedError


@ReferenceLength.register("total")
@dataclass(frozen=True, kw_only=True)
class Total(ReferenceLength):
    """All tokens of the answer itself, as published.

    A thread that adds nothing makes it longer and the critical path not much, so it pays to open some.
    """

    def lengths(
        self,
        context: RolloutContext,
        trajectories: Sequence[Trajectory],
        counts: Sequence[ThreadCounts],
        memory: dict[str, Any],
    ) -> list[float | None]:
        return [float(of_answer.total_num_tokens) for of_answer in counts]


@ReferenceLength.register("group")
@dataclass(frozen=True, kw_only=True)
class OfGroup(ReferenceLength):
    """The median critical path of the other correct answers to the problem.

    Without its own, an answer can do nothing about what it is compared with. One that is correct alone has
    nothing to be compared with.
    """

    needs = (Need(Answers(2), "it compares the answers to a problem"),)

    def lengths(
        self,
        context: RolloutContext,
        trajectories: Sequence[Trajectory],
        counts: Sequence[ThreadCounts],
        memory: dict[str, Any],
    ) -> list[float | None]:
        lengths: list[float | None] = [None] * len(trajectories)
        for positions in groups_of(trajectories).values():
            correct = [position for position in positions if trajectories[position].grade.correct]
            for position in positions:
                others = [counts[p].num_tokens_in_the_longest_thread for p in correct if p != position]
                lengths[position] = float(median(others)) if others else None
        return lengths


@ReferenceLength.register("sequential_demonstration")
@dataclass(frozen=True, kw_only=True)
class OfDemonstration(ReferenceLength):
    """The task's sequential solution of the problem, with its end token: one and the same in all
    iterations, though a noisy teacher wrote it."""

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        try:
            experiment.task.check_demonstrations()
        except ValueError as error:
            yield Finding(str(error), "type", "choose another reference, such as 'group'")

    def lengths(
        self,
        context: RolloutContext,
        trajectories: Sequence[Trajectory],
        counts: Sequence[ThreadCounts],
        memory: dict[str, Any],
    ) -> list[float | None]:
        problems = {trajectory.problem.id: trajectory.problem for trajectory in trajectories}
        known = {name: _demonstrated(context, problem) for name, problem in problems.items()}
        return [known[trajectory.problem.id] for trajectory in trajectories]


@ReferenceLength.register("sequential_running")
@dataclass(frozen=True, kw_only=True)
class Running(ReferenceLength):
    """A running mean of the lengths of correct answers to the problem that opened no block.

    An iteration that has such answers moves it by ``1 - decay`` of the way to their mean, before anything
    is compared. A problem that was never answered so has no reference: a policy that always opens
    blocks gives none, and needs another reference.
    """

    decay: Annotated[float, Ge(0), Lt(1)] = 0.8
    """How much of the running mean an iteration leaves."""

    remembers = True

    def lengths(
        self,
        context: RolloutContext,
        trajectories: Sequence[Trajectory],
        counts: Sequence[ThreadCounts],
        memory: dict[str, Any],
    ) -> list[float | None]:
        own: dict[str, float] = {}
        for name, positions in groups_of(trajectories).items():
            sequential = [
                counts[position].total_num_tokens
                for position in positions
                if trajectories[position].grade.correct and not counts[position].with_parallel
            ]
            if sequential:
                now = fmean(sequential)
                before = memory.get(name)
                own[name] = now if before is None else self.decay * before + (1 - self.decay) * now
        for of_rank in context.ranks.exchange("running-lengths", [own]):
            for changed in of_rank:
                memory.update(changed)
        return [memory.get(trajectory.problem.id) for trajectory in trajectories]


@ReferenceLength.register("sequential_measured")
@dataclass(frozen=True, kw_only=True)
class Measured(ReferenceLength):
    """The mean tokens of another experiment's correct answers to the problem, read from its `answers`
    (``…/evaluations/0400/train/answers.jsonl``), which are to be of the problems that are trained on.

    A problem without correct answers there has no reference.
    """

    answers: Annotated[str, MinLen(1)]

    def prepare(self, problems: Sequence[Problem]) -> None:
        measured_lengths(self.answers).require_some(problems)

    def lengths(
        self,
        context: RolloutContext,
        trajectories: Sequence[Trajectory],
        counts: Sequence[ThreadCounts],
        memory: dict[str, Any],
    ) -> list[float | None]:
        measured = measured_lengths(self.answers)
        return [measured.of(trajectory.problem) for trajectory in trajectories]


def _demonstrated(context: RolloutContext, problem: Problem) -> float:
    seed = derive_seed(context.seed, problem.id, "reference length")
    solution = context.task.of(problem).sequential_demonstration(problem, seed)
    return float(len(context.codec.encode_answer(problem, solution)) + 1)
