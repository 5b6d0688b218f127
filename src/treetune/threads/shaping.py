"""Shaping for threads: the shorter the critical path of a correct answer is, the more the answer earns.

* `acceleration` compares the critical path with a reference length (`ReferenceLength`). Example, with the
  form ``saved``, `weight` 0.5 and `clip` 0.2: a critical path of 80 tokens against a reference of 100 saves
  0.2, and earns 0.1 more.
* `group_length_penalty` compares the critical path with the shortest one of a correct answer of the group.
"""

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
from treetune.contracts import Answers, Experiment, Finding, Need, TaskDemonstrations
from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext, require
from treetune.rollouts.shaping import indices_by_problem
from treetune.seeds import derive_seed
from treetune.tasks.mixed import task_of, trained_parts_of
from treetune.threads.format import TagIds
from treetune.threads.numbers import ThreadCounts, count_threads_of_answer
from treetune.vocabulary import CORRECT_SCORE, Problem, Trajectory

Counts = Sequence[ThreadCounts]
Lengths = list[float | None]


class ReferenceLength(Registrable):
    """The length that the critical path of a correct answer is compared with."""

    remembers: bool = False
    """Whether it uses shaping's memory, under the label ``acceleration``."""

    def check_at_start(self, problems: Sequence[Problem]) -> None:
        """Raises ValueError if something is missing that the reference needs for these training problems.
        `Acceleration.check_at_start` calls it when a run begins."""

    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        """Returns a reference length in tokens for each answer. Collective.

        The length is None for an answer without a reference. The lengths for wrong answers are not used.

        Args:
            context: The context of the phase.
            answers: This rank's answers.
            counts: The token counts of each answer.
        """
        raise NotImplementedError


@ReferenceLength.register("total")
@dataclass(frozen=True, kw_only=True)
class Total(ReferenceLength):
    """The total number of tokens of the answer itself, as published.

    A useless thread makes the answer longer, but hardly its critical path. So an answer is rewarded for
    opening threads whether they help or not.
    """

    @override
    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        return [float(thread_counts.total_num_tokens) for thread_counts in counts]


@ReferenceLength.register("group")
@dataclass(frozen=True, kw_only=True)
class OfGroup(ReferenceLength):
    """The median critical path of the other correct answers to the problem.

    The path of the answer itself is left out, so that it cannot influence its reference. The only correct
    answer to a problem has no reference.
    """

    needs = (Need(Answers(2), "it compares the answers to a problem"),)

    @override
    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        """Returns for each answer the median critical path of the other correct answers to its problem."""
        lengths: Lengths = [None] * len(answers)
        for indices in indices_by_problem(answers).values():
            correct = [index for index in indices if answers[index].grade.correct]
            for index in indices:
                other_answers = [other_index for other_index in correct if other_index != index]
                path_lengths = [
                    counts[other_index].num_tokens_in_the_longest_thread for other_index in other_answers
                ]
                lengths[index] = float(median(path_lengths)) if path_lengths else None
        return lengths


@ReferenceLength.register("sequential_demonstration")
@dataclass(frozen=True, kw_only=True)
class OfDemonstration(ReferenceLength):
    """The length of the task's sequential demonstration for the problem, with its end token. It is the same
    in all iterations, even if demonstrations have random errors."""

    needs = (
        Need(
            TaskDemonstrations(),
            "it compares lengths with theirs",
            "choose another reference, such as 'group'",
        ),
    )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if TaskDemonstrations() not in experiment.task.gives:
            return  # `needs` reports it
        for task in trained_parts_of(experiment.task):
            # One problem is tried, to see whether the task can write demonstrations at all. It can't if, for
            # example, its data set can only score answers.
            try:
                for problem in task.examples(1):
                    task.sequential_demonstration(problem, 0)
            except ValueError as error:
                yield Finding(str(error), "type", "choose another reference, such as 'group'")

    @override
    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        """Returns for each answer the length of a demonstration without threads of its problem."""
        lengths: dict[str, float] = {}
        problems = {answer.problem.id: answer.problem for answer in answers}
        for problem in problems.values():
            seed = derive_seed(context.seed, problem.id, "reference length")
            solution = task_of(context.task, problem).sequential_demonstration(problem, seed)
            tokens = len(context.codec.encode_answer(problem, solution)) + 1  # and the end token
            lengths[problem.id] = float(tokens)
        return [lengths[answer.problem.id] for answer in answers]


@ReferenceLength.register("sequential_running")
@dataclass(frozen=True, kw_only=True)
class Running(ReferenceLength):
    """A running mean, over iterations, of the lengths of the problem's correct answers without threads.

    Before lengths are compared, an iteration with such answers moves the running mean towards their mean, by
    a share of ``1 - decay`` of the difference. A problem that never had such an answer has no reference. So a
    policy that always opens blocks needs another reference.
    """

    decay: Annotated[float, Ge(0), Lt(1)] = 0.8
    """The weight of the earlier running mean when an iteration's mean is added."""

    remembers = True

    @override
    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        """Returns for each answer the running mean, over iterations, of the lengths of its problem's correct
        answers without threads."""
        # The running means that earlier iterations have stored under the label "acceleration", by problem.
        shaping_memory = require(context.shaping_memory, "shaping memory")
        memory = shaping_memory.setdefault("acceleration", {})
        new_means: dict[str, float] = {}
        for problem_id, indices in indices_by_problem(answers).items():
            sequential_lengths = []
            for index in indices:
                if answers[index].grade.correct and not counts[index].with_parallel:
                    sequential_lengths.append(counts[index].total_num_tokens)
            if not sequential_lengths:
                continue
            new_mean = fmean(sequential_lengths)
            old_mean = memory.get(problem_id)
            if old_mean is None:
                new_means[problem_id] = new_mean
            else:
                new_means[problem_id] = self.decay * old_mean + (1 - self.decay) * new_mean
        # The memory must be the same on all ranks, so every rank applies the changes of all ranks.
        for new_means_of_rank in context.ranks.exchange("running-lengths", new_means):
            memory.update(new_means_of_rank)
        return [memory.get(answer.problem.id) for answer in answers]


@ReferenceLength.register("sequential_measured")
@dataclass(frozen=True, kw_only=True)
class Measured(ReferenceLength):
    """The mean length of another experiment's correct answers to the problem.

    A problem to which the other experiment has no correct answer has no reference.
    """

    answers: Annotated[str, MinLen(1)]
    """The file of an evaluation on the training problems (``…/evaluations/0400/train/answers.jsonl``)."""

    @override
    def check_at_start(self, problems: Sequence[Problem]) -> None:
        """Raises ValueError if the file `answers` has a correct answer to none of the problems.

        It is the file of an evaluation of the "sequential experiment", another experiment whose answers have
        no threads. Their lengths are the reference.
        """
        if all(length is None for length in self._lengths_of(problems)):
            measured = measured_lengths(self.answers).values()
            solved = sum(length is not None for _, length in measured)
            raise ValueError(
                f"{self.answers} has correct answers to {solved}"
                f" problems, to none of the {len(problems)} that are trained on: evaluate the sequential"
                " experiment on the split 'train' (evaluation.sets) and name that set's answers.jsonl"
            )

    @override
    def lengths(self, context: RolloutContext, answers: Sequence[Trajectory], counts: Counts) -> Lengths:
        return self._lengths_of([answer.problem for answer in answers])

    def _lengths_of(self, problems: Iterable[Problem]) -> Lengths:
        """Returns the length for each problem.

        Raises:
            ValueError: A problem has another prompt in the file.
        """
        measured = measured_lengths(self.answers)
        lengths: Lengths = []
        for problem in problems:
            # A problem that the file doesn't have counts as one without correct answers.
            prompt, length = measured.get(problem.id, (problem.prompt, None))
            if prompt != problem.prompt:
                raise ValueError(
                    f"problem {problem.id!r} reads {prompt!r} in {self.answers} and {problem.prompt!r} here:"
                    " the answers are of another task, or of the same with other settings"
                )
            lengths.append(length)
        return lengths


@lru_cache(maxsize=4)
def measured_lengths(path: str) -> Mapping[str, tuple[str, float | None]]:
    """Reads the ``answers.jsonl`` of an evaluation of the sequential experiment: another experiment, whose
    answers have no threads.

    Returns:
        For each problem, by its id, the prompt and the mean length of the correct answers in tokens. The mean
        length is None if there are no correct answers.

    Raises:
        ValueError: The file can't be read, or is not an evaluation's ``answers.jsonl``.
    """
    prompts: dict[str, str] = {}
    lengths: dict[str, list[int]] = {}
    line_number = 0  # for the error message below
    try:
        with Path(path).open() as file:
            for line in file:
                line_number += 1
                row = json.loads(line)
                prompts[row["problem"]] = row["prompt"]
                if (row["reward"] or 0.0) >= CORRECT_SCORE:  # null for an answer that could not be graded
                    lengths.setdefault(row["problem"], []).append(row["tokens"])
    except OSError as error:
        raise ValueError(
            f"the answers that shaping compares lengths with can't be read ({error}): run the evaluation of"
            " the sequential experiment first, or choose another reference"
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"line {line_number} of {path} is not a row of an evaluation's answers.jsonl"
            f" ({type(error).__name__}: {error})"
        ) from error
    measured: dict[str, tuple[str, float | None]] = {}
    for problem_id, prompt in prompts.items():
        mean_length = fmean(lengths[problem_id]) if problem_id in lengths else None
        measured[problem_id] = (prompt, mean_length)
    return measured


AccelerationForm = Literal["saved", "ratio"]


def acceleration(critical_path: float, reference: float, form: AccelerationForm) -> float:
    """Returns by how much a critical path is shorter than the reference, both in tokens: 1 − critical path /
    reference (``saved``), or reference / critical path − 1 (``ratio``).

    Example: a critical path of 80 against 100 is 0.2 (``saved``), or 0.25 (``ratio``).
    """
    # An answer may have no tokens. At least 1 avoids a division by 0 below.
    critical_path, reference = max(1.0, critical_path), max(1.0, reference)
    if form == "saved":
        return 1.0 - critical_path / reference
    return reference / critical_path - 1.0


@Shaping.register("acceleration")
@dataclass(frozen=True, kw_only=True)
class Acceleration(Shaping):
    """Adds to the reward of a correct answer `weight` times its `acceleration` against the `reference`, at
    most `clip` and at least `floor`. Wrong answers, and correct ones without a reference, get nothing.

    `numbers.count_threads` defines critical paths. Prompts are not a part of them.

    ``acceleration/without_reference`` is the share of correct answers without a reference. The other metrics
    are about correct answers with one: ``acceleration/reference_tokens`` is their mean reference,
    ``acceleration/unclipped`` their mean acceleration before `clip` and `floor`, and ``acceleration/at_clip``
    the share of them that reached `clip`.
    """

    weight: Annotated[float, Gt(0)]
    """Factor of the acceleration."""
    clip: Annotated[float, Gt(0)]
    """The largest acceleration that counts."""
    form: AccelerationForm
    """``saved``: 1 - critical path / reference; ``ratio``: reference / critical path - 1."""
    reference: ReferenceLength
    """The length that critical paths are compared with: `total` (as in ThreadWeaver: the answer's own tokens,
    which rewards useless threads, too), `group`, or one of three lengths of a sequential answer:
    `sequential_demonstration`, `sequential_running`, `sequential_measured`."""
    floor: Annotated[float, Le(0)] = 0.0
    """The smallest acceleration that counts. With 0, a correct answer never loses reward for being slow:
    threads that don't help yet cost nothing, and a policy does not unlearn them before it writes them well.
    With a floor below 0, slow answers lose up to ``-floor`` times `weight`, so slower answers earn less than
    slow ones. Against the reference `total`, the acceleration is never below 0."""
    threads: Literal["forked", "written"] = "forked"
    """The threads that count. ``forked`` counts threads that were sampled in parallel. ``written`` counts all
    thread tags, as published, although a policy can write threads one after the other and save no time."""
    opening: Annotated[float, Ge(0)] = 0.0
    """A bonus for a correct answer with at least one block."""

    measures = ("without_reference", "reference_tokens", "unclipped", "at_clip")

    @property
    @override
    def remembers(self) -> bool:  # type: ignore[override]
        return self.reference.remembers

    @override
    def check_at_start(self, problems: Sequence[Problem]) -> None:
        self.reference.check_at_start(problems)

    @override
    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        return self.assess(context, trajectories)[0]

    @override
    def assess(
        self, context: RolloutContext, trajectories: Sequence[Trajectory]
    ) -> tuple[list[float], Mapping[str, Sequence[float]]]:
        """Returns the bonus of each answer, and the numbers that are measured on correct answers."""
        tags = TagIds.of(context.codec.encode)
        only_forked = self.threads == "forked"
        counts = [
            count_threads_of_answer(trajectory, tags, only_forked=only_forked) for trajectory in trajectories
        ]
        references = self.reference.lengths(context, trajectories, counts)
        bonuses = [0.0] * len(trajectories)
        measured: dict[str, list[float]] = {name: [] for name in self.measures}
        for index, (thread_counts, reference) in enumerate(zip(counts, references, strict=True)):
            if not trajectories[index].grade.correct:
                continue
            # `with_parallel` is 1 or 0: an answer gets the bonus `opening` once if it has a block. The bonus
            # for its acceleration is added below.
            bonuses[index] = self.opening * thread_counts.with_parallel
            measured["without_reference"].append(float(reference is None))
            if reference is None:
                continue
            value = acceleration(thread_counts.num_tokens_in_the_longest_thread, reference, self.form)
            bonuses[index] += self.weight * max(self.floor, min(value, self.clip))
            measured["reference_tokens"].append(reference)
            measured["unclipped"].append(value)
            measured["at_clip"].append(float(value >= self.clip))
        return bonuses, measured


EPSILON = 1e-6
"""The ε in the formula of `group_penalties`."""


def group_penalties(
    lengths: Sequence[int], correct: Sequence[bool], *, threshold: float, weight: float, window: int
) -> list[float]:
    """Returns ThreadWeaver's group length penalty α O_i for each answer i of a group.

    O_i = clip((L_i − L) / window, 0, 1), where L_i is the length of answer i, and L that of the shortest
    correct answer.

    α is 0 if the share of correct answers is below the threshold τ. If it is not, α is
    β (share − τ + ε) / (1 − τ + ε), where β is the `weight`. So α is β if all answers are correct. ε avoids a
    division by 0 if τ is 1.
    """
    share = sum(correct) / len(correct)
    if share < threshold:
        return [0.0] * len(lengths)
    alpha = weight * (share - threshold + EPSILON) / (1.0 - threshold + EPSILON)
    # There is a correct answer, since the threshold is above 0.
    shortest = min(length for length, is_correct in zip(lengths, correct, strict=True) if is_correct)
    penalties = []
    for length in lengths:
        excess = (length - shortest) / window
        penalties.append(alpha * min(1.0, max(0.0, excess)))
    return penalties


@Shaping.register("group_length_penalty")
@dataclass(frozen=True, kw_only=True)
class GroupLengthPenalty(Shaping):
    """ThreadWeaver's group length penalty: subtracts `group_penalties` from the rewards of all answers to a
    problem. The length of an answer is that of its critical path in tokens.

    ThreadWeaver's public code has the same settings, and does not use the penalty by default.
    """

    threshold: Annotated[float, Gt(0), Le(1)] = 0.8
    """The smallest share of correct answers in a group at which length is penalised."""
    weight: Annotated[float, Gt(0)] = 0.2
    """The largest penalty. An answer gets it if all answers of its group are correct, and it is longer than
    the shortest of them by `window` tokens or more."""
    window: Annotated[int, Gt(0)] = 10_000
    """The number of tokens over which the penalty grows to its full size, counted from the length of the
    shortest correct answer."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, Need(Answers(2), "it compares the answers to a problem"))

    @override
    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        """Returns a negative bonus for each answer: its length penalty within its group."""
        tags = TagIds.of(context.codec.encode)
        bonuses = [0.0] * len(trajectories)
        for indices in indices_by_problem(trajectories).values():
            group = [trajectories[index] for index in indices]
            penalties = group_penalties(
                [count_threads_of_answer(answer, tags).num_tokens_in_the_longest_thread for answer in group],
                [answer.grade.correct for answer in group],
                threshold=self.threshold,
                weight=self.weight,
                window=self.window,
            )
            for index, penalty in zip(indices, penalties, strict=True):
                bonuses[index] = -penalty
        return bonuses
