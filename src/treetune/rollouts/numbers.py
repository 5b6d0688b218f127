"""Named numbers of an answer, such as ``threads/parallel_count``, and their means in metrics.

A rollout, or a package for one kind of answers (threads), declares a `NumberGroup`. That is all that is
needed to have its numbers in the metrics of iterations and evaluations, in an evaluation's files, in the
console's line of an iteration and in the report. The columns and panels of tables can show them, too.
Example::

    @NumberGroup.register("digits", {"share": Number("share of digits", share=True)})
    def measure(trajectories, codec):
        return [{"share": sum(map(str.isdigit, t.text)) / len(t.text)} for t in trajectories]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from treetune.tree import Tree, answers_of, with_answers
from treetune.vocabulary import Metrics, TextCodec, Trajectory

EVALUATED_NUMBERS = ("pass_at_1", "ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
"""The numbers of an evaluation's summary that become metrics of the run. There is a metric over all problems,
and one for each domain."""

Better = Literal["higher", "lower", "neither"]

CORRECT_SUFFIX = "_right"
"""The ending of a metric's name if it is the mean over only the correct answers."""
LARGEST_SUFFIX = "_max"
"""The ending of a metric's name if it is the largest value."""


@dataclass(frozen=True)
class Number:
    """Describes a number for charts and tables."""

    title: str
    """The title of its charts."""
    better: Better = "neither"
    """The direction in which a difference is an improvement."""
    share: bool = False
    """Whether it is a share, which is shown in percent."""
    largest: bool = False
    """Whether the largest value is recorded in addition to the mean."""
    while_training: bool = False
    """Whether its means at each evaluation are metrics of the run. (An evaluation's ``summary.json`` has the
    means of all numbers.)"""
    label: str | None = None
    """Its name in the console's line of an iteration and in the report's table of results; None: neither of
    these shows it."""


Measure = Callable[[Sequence[Trajectory], TextCodec], Sequence[Mapping[str, float]]]


@dataclass(frozen=True)
class NumberGroup:
    """Numbers that belong together. The number `x` of the group `g` is called ``g/x`` in
    `Trajectory.numbers` and in metrics."""

    name: str
    numbers: Mapping[str, Number]
    measure: Measure | None = None
    """Returns the numbers of each finished answer by short name (`x`), whatever rollout made the answers. An
    answer may have only some of the numbers. None if only the rollout can count the group's numbers: it then
    puts them into `Trajectory.numbers` itself."""
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Ratios that compare an experiment with a baseline in a table; a higher one is better. Each has a name
    and two numbers: the baseline's mean of the first number is divided by the experiment's mean of the
    second. Example: ``{"speed_up": ("total_num_tokens", "num_tokens_in_the_longest_thread")}``."""

    @classmethod
    def register(
        cls, name: str, numbers: Mapping[str, Number], ratios: Mapping[str, tuple[str, str]] | None = None
    ) -> Callable[[Measure], Measure]:
        """Returns a decorator that declares a group whose `measure` is the decorated function:
        ``@NumberGroup.register("threads", {…})``."""

        def add(measure: Measure) -> Measure:
            declare_group(cls(name, numbers, measure, ratios or {}))
            return measure

        return add


_groups: dict[str, NumberGroup] = {}


def declare_group(group: NumberGroup) -> None:
    """Registers a group. It is called once, when the module that declares the group is imported."""
    assert group.name not in _groups, f"numbers {group.name!r} are registered twice"
    _groups[group.name] = group


def registered_groups() -> dict[str, NumberGroup]:
    """Returns all groups by name."""
    return dict(_groups)


def declared_numbers() -> dict[str, Number]:
    """Returns the numbers of all groups by full name, in the order of their declaration."""
    numbers = {}
    for group in _groups.values():
        for name, number in group.numbers.items():
            numbers[f"{group.name}/{name}"] = number
    return numbers


def find_full_name(name: str) -> str | None:
    """Returns the name of a declared number with its group; None for a name that is not declared.

    Example: ``find_full_name("parallel_count_right")`` is ``"threads/parallel_count_right"``.
    """
    for full_name in declared_numbers():
        short_name = full_name.partition("/")[2]
        for ending in ("", CORRECT_SUFFIX):
            if name in (full_name + ending, short_name + ending):
                return full_name + ending
    return None


def declared_ratios() -> dict[str, tuple[str, str]]:
    """Returns the ratios of all groups by name, each with the full names of its two numbers.

    A ratio compares an experiment with a baseline: the baseline's mean of the first number, divided by the
    experiment's mean of the second.
    """
    ratios = {}
    for group in _groups.values():
        for name, (of_baseline, of_experiment) in group.ratios.items():
            ratios[name] = (f"{group.name}/{of_baseline}", f"{group.name}/{of_experiment}")
    return ratios


def add_measured_numbers(trees: Sequence[Tree], codec: TextCodec) -> list[Tree]:
    """Returns the trees with more numbers on their answers: the numbers that a `NumberGroup` measures are
    added to those that the rollout counted."""
    trajectories = answers_of(trees)
    numbers_of_answers = [dict(trajectory.numbers) for trajectory in trajectories]
    for group in _groups.values():
        if group.measure is None:
            continue
        measured_of_answers = group.measure(trajectories, codec)
        for numbers, measured_numbers in zip(numbers_of_answers, measured_of_answers, strict=True):
            for name, value in measured_numbers.items():
                numbers[f"{group.name}/{name}"] = value
    pairs = zip(trajectories, numbers_of_answers, strict=True)
    return with_answers(trees, [replace(answer, numbers=numbers) for answer, numbers in pairs])


def collect_number_columns(trajectories: Iterable[Trajectory]) -> dict[str, list[float]]:
    """Returns the values of each number over the answers that have the number.

    The values of only the correct answers are also returned, under the name with `CORRECT_SUFFIX` appended.
    """
    columns: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.numbers.items():
            columns.setdefault(name, []).append(value)
            if trajectory.grade.correct:
                columns.setdefault(name + CORRECT_SUFFIX, []).append(value)
    return columns


def number_metrics(columns: Mapping[str, Sequence[float]]) -> Metrics:
    """Returns the mean of each column, and the largest value for numbers that declare `largest`.

    Args:
        columns: The values of each number over all ranks, by full name.
    """
    metrics = {name: math.fsum(values) / len(values) for name, values in columns.items()}
    for name, number in declared_numbers().items():
        if number.largest and name in columns:
            metrics[name + LARGEST_SUFFIX] = max(columns[name])
    return metrics


def group_numbers(numbers: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Returns ``{'g/x': 1.0}`` as ``{'g': {'x': 1.0}}``, as an evaluation's files have it."""
    nested: dict[str, dict[str, float]] = {}
    for full_name, value in numbers.items():
        group, _, name = full_name.partition("/")
        nested.setdefault(group, {})[name] = value
    return nested


def evaluation_metrics(label: str, summary: Mapping[str, Any]) -> Metrics:
    """Returns the numbers of an evaluation's summary that are metrics of the run.

    Example: ``{"evaluation/gsm8k_test/threads/parallel_count": 1.8}``.
    """
    metrics: Metrics = {}
    for full_name, number in declared_numbers().items():
        if not number.while_training:
            continue
        group, _, name = full_name.partition("/")
        means = summary.get(group, {})
        for ending in ("", CORRECT_SUFFIX):
            if name + ending in means:
                metrics[f"evaluation/{label}/{full_name}{ending}"] = means[name + ending]
    return metrics


def describe_numbers(metrics: Mapping[str, float]) -> list[str]:
    """Returns the labelled numbers of an iteration for its line on the console, such as ``"longest thread
    312.4"``."""
    texts = []
    for name, number in declared_numbers().items():
        if number.label is not None and name in metrics:
            format_spec = ".0%" if number.share else ".1f"
            texts.append(f"{number.label} {metrics[name]:{format_spec}}")
    return texts
