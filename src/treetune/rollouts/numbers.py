"""Named numbers of an answer, and their means wherever something is averaged over answers.

A rollout, or a room for answers of one kind (threads), declares a `NumberGroup` in one file. Its numbers then
are in the metrics of an iteration and of an evaluation, in an evaluation's files, in the line of an
iteration and in the report, and a table's columns and panels may show them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from treetune.tree import Tree, answers_of, with_answers
from treetune.vocabulary import Metrics, TextCodec, Trajectory

EVALUATED = ("pass_at_1", "ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
"""The numbers of a summary that become metrics of the run, of all problems and of each domain's."""

Better = Literal["higher", "lower", "neither"]

OF_CORRECT = "_right"
"""Ends the name of a mean over correct answers alone."""
LARGEST = "_max"


@dataclass(frozen=True)
class Number:
    """Describes a number for charts and tables."""

    title: str
    """Title of its charts."""
    better: Better = "neither"
    """The direction in which a difference is an improvement."""
    share: bool = False
    """Whether it is a share, shown in percent."""
    largest: bool = False
    """Whether the largest is recorded beside the mean."""
    while_training: bool = False
    """Whether its means at each evaluation are metrics of the run (all are in ``summary.json``)."""
    label: str | None = None
    """Name in the line of an iteration and the report's table of results; None: it isn't there."""


Measure = Callable[[Sequence[Trajectory], TextCodec], Sequence[Mapping[str, float]]]


@dataclass(frozen=True)
class NumberGroup:
    """Numbers that belong together: number `x` of group `g` is ``g/x`` on a trajectory and in metrics."""

    name: str
    numbers: Mapping[str, Number]
    measure: Measure | None = None
    """Returns the numbers of finished answers by short name, whatever rollout made them; an answer may lack
    some. None where only a rollout can count them, which puts them on its trajectories."""
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Compare two experiments in a table, the higher the better: the mean of the first number in the other
    one, over the mean of the second in this one."""

    @classmethod
    def register(
        cls, name: str, numbers: Mapping[str, Number], ratios: Mapping[str, tuple[str, str]] | None = None
    ) -> Callable[[Measure], Measure]:
        """Decorator of the group's `measure`: ``@NumberGroup.register("threads", {…})``."""

        def add(measure: Measure) -> Measure:
            declare(cls(name, numbers, measure, ratios or {}))
            return measure

        return add


_groups: dict[str, NumberGroup] = {}


def declare(group: NumberGroup) -> None:
    """Makes a group known; called once, where the module that declares it is imported."""
    assert group.name not in _groups, f"numbers {group.name!r} are registered twice"
    _groups[group.name] = group


def registered() -> dict[str, NumberGroup]:
    return dict(_groups)


def declared() -> dict[str, Number]:
    """Returns the numbers of all groups by full name, in the order of their declaration."""
    return {
        f"{group.name}/{name}": number for group in _groups.values() for name, number in group.numbers.items()
    }


def full_name(name: str) -> str | None:
    """``group/name`` of a declared number, which may be named without its group and with `OF_CORRECT` at
    its end; None for any other name."""
    for full in declared():
        short = full.partition("/")[2]
        for ending in ("", OF_CORRECT):
            if name in (full + ending, short + ending):
                return full + ending
    return None


def declared_ratios() -> dict[str, tuple[str, str]]:
    """Returns all groups' ratios, of full names."""
    return {
        name: (f"{group.name}/{other}", f"{group.name}/{this}")
        for group in _groups.values()
        for name, (other, this) in group.ratios.items()
    }


def measured(trees: Sequence[Tree], codec: TextCodec) -> list[Tree]:
    """Returns the trees with the numbers that groups measure of their answers, beside those that the rollout
    counted."""
    trajectories = answers_of(trees)
    numbers = [dict(trajectory.numbers) for trajectory in trajectories]
    for group in _groups.values():
        if group.measure is not None:
            for of_answer, measured in zip(numbers, group.measure(trajectories, codec), strict=True):
                of_answer |= {f"{group.name}/{name}": value for name, value in measured.items()}
    return with_answers(
        trees, [replace(answer, numbers=own) for answer, own in zip(trajectories, numbers, strict=True)]
    )


def columns(trajectories: Iterable[Trajectory]) -> dict[str, list[float]]:
    """Returns each number of the answers that have it, and under its name with `OF_CORRECT` that of correct
    answers."""
    columns: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.numbers.items():
            columns.setdefault(name, []).append(value)
            if trajectory.grade.correct:
                columns.setdefault(name + OF_CORRECT, []).append(value)
    return columns


def number_metrics(columns: Mapping[str, Sequence[float]]) -> Metrics:
    """Returns the means of all ranks' `columns`, and the largest where a number is declared so."""
    metrics = {name: math.fsum(values) / len(values) for name, values in columns.items()}
    for name, number in declared().items():
        if number.largest and name in columns:
            metrics[name + LARGEST] = max(columns[name])
    return metrics


def by_group(numbers: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Returns ``{'g/x': 1.0}`` as ``{'g': {'x': 1.0}}``, as an evaluation's files have it."""
    nested: dict[str, dict[str, float]] = {}
    for full, value in numbers.items():
        group, _, name = full.partition("/")
        nested.setdefault(group, {})[name] = value
    return nested


def evaluated(label: str, summary: Mapping[str, Any]) -> Metrics:
    """Returns the numbers of an evaluation's summary that are metrics of the run."""
    return {
        f"evaluation/{label}/{full}{ending}": summary[group][name + ending]
        for full, number in declared().items()
        for group, _, name in [full.partition("/")]
        for ending in ("", OF_CORRECT)
        if number.while_training and name + ending in summary.get(group, {})
    }


def in_words(metrics: Mapping[str, float]) -> list[str]:
    """Returns the labelled numbers of an iteration for its line on the console."""
    return [
        f"{number.label} {metrics[name]:{'.0%' if number.share else '.1f'}}"
        for name, number in declared().items()
        if number.label is not None and name in metrics
    ]
