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

Better = Literal["higher", "lower", "neither"]

OF_CORRECT = "_right"
"""Ends the name of a mean over correct answers alone."""
LARGEST = "_max"


@dataclass(frozen=True)
class Number:
    """What is known of a number for those who show it.

    `title` says what a chart of it shows, `better` which way a difference is an improvement, `share`
    whether it is one (shown in percent). With `largest`, the largest is recorded beside the mean; with
    `while_training`, its means at each evaluation are metrics of the run (all are in ``summary.json``).
    `label` is for those few that the line of an iteration and the report's table of results show.
    """

    title: str
    better: Better = "neither"
    share: bool = False
    largest: bool = False
    while_training: bool = False
    label: str | None = None


Measure = Callable[[Sequence[Trajectory], TextCodec], Sequence[Mapping[str, float]]]


@dataclass(frozen=True)
class NumberGroup:
    """Numbers that belong together: number `x` of group `g` is ``g/x`` on a trajectory and in metrics.

    `ratios` compare two experiments in a table, the higher the better: the mean of the first number in the
    other one, over the mean of the second in this one.

    `measure` gives what can be said of finished answers, whatever rollout made them: of each a number or
    none by each short name. None where a rollout alone can count it, and puts it on its trajectories.
    """

    name: str
    numbers: Mapping[str, Number]
    measure: Measure | None = None
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)

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
    """All numbers of registered groups by full name, in the order of their declaration."""
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
    """Registered groups' ratios, of full names."""
    return {
        name: (f"{group.name}/{theirs}", f"{group.name}/{own}")
        for group in _groups.values()
        for name, (theirs, own) in group.ratios.items()
    }


def measured(trees: Sequence[Tree], codec: TextCodec) -> list[Tree]:
    """The trees with what each registered group can measure of their answers, beside what the rollout had
    counted."""
    trajectories = answers_of(trees)
    numbers = [dict(trajectory.numbers) for trajectory in trajectories]
    for group in _groups.values():
        if group.measure is not None:
            for own, found in zip(numbers, group.measure(trajectories, codec), strict=True):
                own |= {f"{group.name}/{name}": value for name, value in found.items()}
    return with_answers(
        trees, [replace(one, numbers=own) for one, own in zip(trajectories, numbers, strict=True)]
    )


def columns(trajectories: Iterable[Trajectory]) -> dict[str, list[float]]:
    """Each number of the answers that have it, and under its name with `OF_CORRECT` that of correct ones."""
    found: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.numbers.items():
            found.setdefault(name, []).append(value)
            if trajectory.grade.correct:
                found.setdefault(name + OF_CORRECT, []).append(value)
    return found


def number_metrics(everyones: Mapping[str, Sequence[float]]) -> Metrics:
    """The means of all ranks' `columns`, and the largest where a number is declared so."""
    metrics = {name: math.fsum(values) / len(values) for name, values in everyones.items()}
    for name, number in declared().items():
        if number.largest and name in everyones:
            metrics[name + LARGEST] = max(everyones[name])
    return metrics


def by_group(numbers: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """``{'g/x': 1.0}`` as ``{'g': {'x': 1.0}}``, as an evaluation's files have it."""
    nested: dict[str, dict[str, float]] = {}
    for full, value in numbers.items():
        group, _, name = full.partition("/")
        nested.setdefault(group, {})[name] = value
    return nested


def evaluated(label: str, summary: Mapping[str, Any]) -> Metrics:
    """What an evaluation's summary has of the numbers that are metrics of the run."""
    return {
        f"evaluation/{label}/{full}{ending}": summary[group][name + ending]
        for full, number in declared().items()
        for group, _, name in [full.partition("/")]
        for ending in ("", OF_CORRECT)
        if number.while_training and name + ending in summary.get(group, {})
    }


def in_words(metrics: Mapping[str, float]) -> list[str]:
    """What the line of an iteration says of an iteration's metrics."""
    return [
        f"{number.label} {metrics[name]:{'.0%' if number.share else '.1f'}}"
        for name, number in declared().items()
        if number.label is not None and name in metrics
    ]
