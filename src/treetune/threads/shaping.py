"""Shaping for threads: correct answers earn more the shorter their critical path is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Answers, Experiment, Finding, Need
from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext, ShapingMemory
from treetune.rollouts.shaping import groups_of
from treetune.seeds import derive_seed
from treetune.threads.format import TagIds
from treetune.threads.numbers import ThreadCounts, counts_of
from treetune.vocabulary import CORRECT_SCORE, Problem, Trajectory

Counts = Sequence[ThreadCounts]
Lengths = list[float | None]


class ReferenceLength(Registrable):
    """A length that the critical paths of correct answers are compared with."""

    remembers: bool = False
    """Whether it uses shaping's memory, under the label ``acceleration``."""

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Raises ValueError where something that it needs isn't there; called as `Shaping.prepare` is."""

    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        """Returns a length in tokens for each answer; None for those that there is nothing to compare with.

        Wrong answers have one or not, nobody asks for it. Collective.
        """
        raise NotImplementedError


@ReferenceLength.register("total")
@dataclass(frozen=True, kw_only=True)
class Total(ReferenceLength):
    """All tokens of the answer itself, as published.

    A thread that adds nothing makes it longer and the critical path not much, so it pays to open some.
    """

    @override
    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        return [float(of_answer.total_num_tokens) for of_answer in counts]


@ReferenceLength.register("group")
@dataclass(frozen=True, kw_only=True)
class OfGroup(ReferenceLength):
    """The median critical path of the other correct answers to the problem.

    Without its own, an answer can do nothing about what it is compared with. One that is correct alone has
    nothing to be compared with.
    """

    needs = (Need(Answers(2), "it compares the answers to a problem"),)

    @override
    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        lengths: Lengths = [None] * len(answers)
        for indices in groups_of(answers).values():
            correct = [index for index in indices if answers[index].grade.correct]
            for index in indices:
                others = [counts[one].num_tokens_in_the_longest_thread for one in correct if one != index]
                lengths[index] = float(median(others)) if others else None
        return lengths


@ReferenceLength.register("sequential_demonstration")
@dataclass(frozen=True, kw_only=True)
class OfDemonstration(ReferenceLength):
    """The task's sequential solution of the problem, with its end token: one and the same in all
    iterations, though a noisy teacher wrote it."""

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        try:
            experiment.task.check_demonstrations()
        except ValueError as error:
            yield Finding(str(error), "type", "choose another reference, such as 'group'")

    @override
    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        lengths: dict[str, float] = {}
        for problem in {answer.problem.id: answer.problem for answer in answers}.values():
            seed = derive_seed(context.seed, problem.id, "reference length")
            solution = context.task.of(problem).sequential_demonstration(problem, seed)
            lengths[problem.id] = float(len(context.codec.encode_answer(problem, solution)) + 1)
        return [lengths[answer.problem.id] for answer in answers]


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

    @override
    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        memory = context.get(ShapingMemory).setdefault("acceleration", {})
        changed: dict[str, float] = {}
        for name, indices in groups_of(answers).items():
            sequential = [
                counts[index].total_num_tokens
                for index in indices
                if answers[index].grade.correct and not counts[index].with_parallel
            ]
            if sequential:
                now = fmean(sequential)
                before = memory.get(name)
                changed[name] = now if before is None else self.decay * before + (1 - self.decay) * now
        for of_rank in context.ranks.exchange("running-lengths", [changed]):
            for one in of_rank:
                memory.update(one)
        return [memory.get(answer.problem.id) for answer in answers]


@ReferenceLength.register("sequential_measured")
@dataclass(frozen=True, kw_only=True)
class Measured(ReferenceLength):
    """The mean tokens of another experiment's correct answers to the problem.

    A problem without correct answers there has no reference.
    """

    answers: Annotated[str, MinLen(1)]
    """The evaluation's file (``…/evaluations/0400/train/answers.jsonl``), of the problems that are trained
    on."""

    @override
    def prepare(self, problems: Sequence[Problem]) -> None:
        if all(length is None for length in self._of(problems)):
            measured = measured_lengths(self.answers).values()
            raise ValueError(
                f"{self.answers} has correct answers to {sum(length is not None for _, length in measured)}"
                f" problems, to none of the {len(problems)} that are trained on: evaluate the sequential"
                " experiment on the split 'train' (evaluation.sets) and name that set's answers.jsonl"
            )

    @override
    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        return self._of([answer.problem for answer in answers])

    def _of(self, problems: Iterable[Problem]) -> Lengths:
        """Raises ValueError for a problem that reads otherwise there."""
        measured = measured_lengths(self.answers)
        found = [(problem, *measured.get(problem.id, (problem.prompt, None))) for problem in problems]
        for problem, prompt, _ in found:
            if prompt != problem.prompt:
                raise ValueError(
                    f"problem {problem.id!r} reads {prompt!r} in {self.answers} and {problem.prompt!r} here:"
                    " the answers are of another task, or of the same with other settings"
                )
        return [length for _, _, length in found]


@lru_cache(maxsize=4)
def measured_lengths(path: str) -> Mapping[str, tuple[str, float | None]]:
    """Returns by problem what was asked and the mean tokens of its correct answers, from an evaluation's
    ``answers.jsonl``. Raises ValueError where it isn't there or isn't such a file."""
    prompts: dict[str, str] = {}
    lengths: dict[str, list[int]] = {}
    number = 0
    try:
        with Path(path).open() as file:
            for line in file:
                number += 1
                row = json.loads(line)
                prompts[row["problem"]] = row["prompt"]
                if (row["reward"] or 0.0) >= CORRECT_SCORE:  # null where nobody could grade it
                    lengths.setdefault(row["problem"], []).append(row["tokens"])
    except OSError as error:
        raise ValueError(
            f"the answers that shaping compares lengths with can't be read ({error}): run the evaluation of"
            " the sequential experiment first, or choose another reference"
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"line {number} of {path} is no row of an evaluation's answers.jsonl"
            f" ({type(error).__name__}: {error})"
        ) from error
    return {one: (prompt, fmean(lengths[one]) if one in lengths else None) for one, prompt in prompts.items()}


Form = Literal["saved", "ratio"]


def acceleration(critical_path: float, reference: float, form: Form) -> float:
    """Returns how much shorter it is than the reference: 1 − critical path / reference (``saved``), or
    reference / critical path − 1 (``ratio``). Both are 0 where they are equal; lengths in tokens."""
    critical_path, reference = max(1.0, critical_path), max(1.0, reference)
    return 1.0 - critical_path / reference if form == "saved" else reference / critical_path - 1.0


@Shaping.register("acceleration")
@dataclass(frozen=True, kw_only=True)
class Acceleration(Shaping):
    """`weight` times the `acceleration` of a correct answer against the `reference`, at most `clip` and at
    least `floor`; wrong answers get nothing, nor do correct ones that there is nothing to compare with.

    Critical paths are counted as `numbers.count` says, on responses only.

    ``acceleration/without_reference`` is the share of correct answers without one; of the others
    ``acceleration/reference_tokens`` and ``acceleration/unclipped`` are the mean reference and the mean
    acceleration before `clip` and `floor`, ``acceleration/at_clip`` the share that reached `clip`.
    """

    weight: Annotated[float, Gt(0)]
    """Factor of the acceleration."""
    clip: Annotated[float, Gt(0)]
    """Acceleration at most."""
    form: Form
    """``saved``: 1 - critical path / reference; ``ratio``: reference / critical path - 1."""
    reference: ReferenceLength
    """The length that is compared: `total` (as ThreadWeaver has it: against the answer's own tokens, which
    rewards threads that add nothing), `group`, and three of a sequential answer's length:
    `sequential_demonstration`, `sequential_running`, `sequential_measured`."""
    floor: Annotated[float, Le(0)] = 0.0
    """Acceleration at least. With 0, a correct answer never earns less for being slow: threads that don't pay
    yet cost nothing, and a policy isn't taught to give them up before it can write them well. Below 0, up to
    ``-floor`` can be lost too, so that there is something to learn between slow and slower. Against `total`
    nothing is ever below 0."""
    threads: Literal["forked", "written"] = "forked"
    """Threads that count: those that were ``written`` count by their tags, as published, though a policy can
    write those one after the other and save no time; ``forked`` ones were really sampled beside each
    other."""
    opening: Annotated[float, Ge(0)] = 0.0
    """Added for opening any block at all in a correct answer."""

    measures = ("without_reference", "reference_tokens", "unclipped", "at_clip")

    @property
    @override
    def remembers(self) -> bool:  # type: ignore[override]
        return self.reference.remembers

    @override
    def prepare(self, problems: Sequence[Problem]) -> None:
        self.reference.prepare(problems)

    @override
    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        return self.assess(context, trajectories)[0]

    @override
    def assess(
        self, context: RolloutContext, trajectories: Sequence[Trajectory]
    ) -> tuple[list[float], Mapping[str, Sequence[float]]]:
        tags = TagIds.of(context.codec.encode)
        only_forked = self.threads == "forked"
        counts = [counts_of(trajectory, tags, only_forked=only_forked) for trajectory in trajectories]
        references = self.reference.lengths(context, trajectories, counts)
        bonuses = [0.0] * len(trajectories)
        measured: dict[str, list[float]] = {name: [] for name in self.measures}
        for index, (of_answer, reference) in enumerate(zip(counts, references, strict=True)):
            if not trajectories[index].grade.correct:
                continue
            bonuses[index] = self.opening * of_answer.with_parallel
            measured["without_reference"].append(float(reference is None))
            if reference is None:
                continue
            value = acceleration(of_answer.num_tokens_in_the_longest_thread, reference, self.form)
            bonuses[index] += self.weight * max(self.floor, min(value, self.clip))
            measured["reference_tokens"].append(reference)
            measured["unclipped"].append(value)
            measured["at_clip"].append(float(value >= self.clip))
        return bonuses, measured


EPSILON = 1e-6


def group_penalties(
    lengths: Sequence[int], correct: Sequence[bool], *, threshold: float, weight: float, window: int
) -> list[float]:
    """α O_i for each answer of a group, with O_i = clip((L_i − L_shortest correct) / window, 0, 1).

    α is 0 where the share of correct answers is below the threshold τ, and β (share − τ + ε) / (1 − τ + ε)
    from there on, β being the weight: all of it where all are correct (ThreadWeaver's group length penalty).
    """
    share = sum(correct) / len(correct)
    if share < threshold:
        return [0.0] * len(lengths)
    alpha = weight * (share - threshold + EPSILON) / (1.0 - threshold + EPSILON)
    shortest = min(length for length, ok in zip(lengths, correct, strict=True) if ok)
    return [alpha * min(1.0, max(0.0, (length - shortest) / window)) for length in lengths]


@Shaping.register("group_length_penalty")
@dataclass(frozen=True, kw_only=True)
class GroupLengthPenalty(Shaping):
    """Minus `group_penalties` of the critical paths, in tokens, of all answers to a problem. The
    reference has it with these settings, and off."""

    threshold: Annotated[float, Gt(0), Le(1)] = 0.8
    """Share of correct answers in the group from which on length costs anything."""
    weight: Annotated[float, Gt(0)] = 0.2
    """What the longest answers lose at most, where all are correct."""
    window: Annotated[int, Gt(0)] = 10_000
    """Tokens beyond the shortest correct answer at which the penalty is whole."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, Need(Answers(2), "it compares the answers to a problem"))

    @override
    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        tags = TagIds.of(context.codec.encode)
        bonuses = [0.0] * len(trajectories)
        for indices in groups_of(trajectories).values():
            group = [trajectories[index] for index in indices]
            penalties = group_penalties(
                [counts_of(one, tags).num_tokens_in_the_longest_thread for one in group],
                [one.grade.correct for one in group],
                threshold=self.threshold,
                weight=self.weight,
                window=self.window,
            )
            for index, penalty in zip(indices, penalties, strict=True):
                bonuses[index] = -penalty
        return bonuses
