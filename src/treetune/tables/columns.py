"""The columns and panels of a table, and the numbers of an evaluation that they may show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen

from treetune.config.errors import did_you_mean
from treetune.rollouts.metrics import name_in
from treetune.rollouts.numbers import (
    OF_CORRECT,
    Better,
    declared,
    declared_ratios,
    full_name,
)
from treetune.vocabulary import CORRECT_SCORE

PASS_AT_1 = "pass_at_1"


@dataclass(frozen=True)
class ValueKind:
    """The kind of a number: a `share` of 1 or not, and which way a difference is an improvement."""

    better: Better
    share: bool = False


_OWN = {
    PASS_AT_1: ValueKind("higher", share=True),
    "majority_vote": ValueKind("higher", share=True),
    "unfinished": ValueKind("lower", share=True),
    "mean_tokens": ValueKind("lower"),
}


def value_named(name: str) -> ValueKind:
    """Raises ValueError for a name that no evaluation has, with the nearest that one has.

    Known are the evaluation's own numbers, ``pass_at_K`` for every K that its samples allow, declared
    numbers of answers (``num_tokens_in_the_longest_thread``, or with its group ``threads/…``), each with
    ``_right`` at its end for the mean over correct answers alone, ratios over another row, and the
    evaluation's own numbers of a domain (``domains/logic/pass_at_1``).
    """
    if (of := name_in(name)) is not None:
        if not of[0] or full_name(of[1]) or is_ratio(of[1]):
            raise ValueError(f"{name!r} is no number of a domain: those are {', '.join(_OWN)} and pass_at_K")
        return value_named(of[1])
    if name in _OWN:
        return _OWN[name]
    if is_ratio(name):
        return ValueKind("higher")
    full = full_name(name)
    if full is not None:
        number = declared()[full.removesuffix(OF_CORRECT)]
        return ValueKind(number.better, number.share)
    if re.fullmatch(r"pass_at_[1-9]\d*", name):
        return _OWN[PASS_AT_1]
    known = [*_OWN, *(full.partition("/")[2] for full in declared()), *declared_ratios()]
    raise ValueError(
        f"{name!r} is no number of an evaluation; {did_you_mean(name, known)} (pass_at_K is known for"
        " other K as well)"
    )


def is_ratio(name: str) -> bool:
    """Returns whether a number is over another row, and so not in any one evaluation's files."""
    return name in declared_ratios()


def number_in(summary: Mapping[str, Any], name: str, where: Path | str) -> float:
    """The number in an evaluation's summary. Raises ValueError that says what the summary lacks."""
    value_named(name)
    if (of := name_in(name)) is not None:
        domains = summary.get("domains") or {}
        if of[0] not in domains:
            there = ", ".join(domains) or "none"
            raise ValueError(f"no domain {of[0]!r} in {where}: its domains are {there}")
        return number_in(domains[of[0]], of[1], where)
    full = full_name(name)
    if full is not None:
        group, _, short = full.partition("/")
        numbers = summary.get(group)
        if not isinstance(numbers, Mapping):
            raise ValueError(
                f"no {group} counted: {where} has no key {group!r}. It is from before they were counted,"
                " or the model's answers have none"
            )
        found, missing = numbers.get(short), f"no {short}: not in {group} of {where}"
    elif name in summary:
        found, missing = summary[name], f"no {name}: not in {where}"
    else:
        found = (summary.get("pass_at_k") or {}).get(name.removeprefix("pass_at_"))
        missing = f"no {name}: {where} is of {summary.get('samples', 'too few')} samples to a problem"
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(missing)
    return float(found)


def by_problem(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    """Each problem's mean over its answers; None where it is no mean over answers, or one lacks it. What
    nobody could grade is no part of an accuracy."""
    domain, name = name_in(name) or ("", name)
    found: dict[str, list[float]] = {}
    for row in rows:
        if domain and row.get("domain") != domain:
            continue
        if name == PASS_AT_1 and row.get("outcome") == "unavailable":
            continue
        number = _of_answer(row, name)
        if number is None:
            return None
        found.setdefault(row["problem"], []).append(number)
    return {problem: sum(some) / len(some) for problem, some in found.items()}


def _of_answer(row: Mapping[str, Any], name: str) -> float | None:
    if name == PASS_AT_1:
        return float(row["reward"] >= CORRECT_SCORE)
    if name == "unfinished":
        found: Any = row.get("finish_reason") and float(row["finish_reason"] == "length")
    elif name == "mean_tokens":
        found = row.get("tokens")
    else:
        group, _, short = (full_name(name) or "").partition("/")
        found = (row.get(group) or {}).get(short)
    return float(found) if isinstance(found, int | float) else None


Name = Annotated[str, MinLen(1)]

Axis = Literal["tokens", "seconds", "steps"]
"""The costs of training, see `curves`."""


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The factor by which a row needs less of `over` than the row `of` until that one's best accuracy.

    Both are read along training, on the column's `curve`, at the checkpoints that are kept.
    """

    of: Name
    over: Axis


@dataclass(frozen=True, kw_only=True)
class Area:
    """The area under the column's `curve` from no cost on, as a mean accuracy: between measurements it is
    taken to change evenly, behind the last one it stays."""

    over: Axis
    """The cost."""
    upto: Annotated[float, Gt(0)]
    """The cost at which the area ends."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The amount of `over` that it takes until the column's `curve` first comes to `accuracy`."""

    accuracy: Annotated[float, Gt(0), Le(1)]
    over: Axis


@dataclass(frozen=True, kw_only=True)
class MeasuredColumn:
    """A quantity, measured for every row: exactly one of `evaluation`, `analysis`, `speedup`, `area` and
    `reach`."""

    name: Name
    """Stands above the column."""
    evaluation: Name | None = None
    """The evaluation set whose pass@1 it is, or the number that `value` names."""
    analysis: Name | None = None
    """The analysis in whose ``result.json`` it is a number."""
    value: Name | None = None
    """A number of the evaluation (see `value_named`), or the dotted key path in the analysis, which a cell
    may replace."""
    over: Name | None = None
    """The row that a ratio is over, seed by seed: ``speed_up`` is how many times longer its mean answer is
    than the mean longest thread of this one."""
    speedup: Speedup | None = None
    area: Area | None = None
    reach: Reach | None = None
    curve: Name | None = None
    """The evaluation set to draw along training, where one is measured then."""
    percent: bool | None = None
    """Shows shares as percent; null: as the value's kind says, and other numbers are taken for shares."""
    digits: Annotated[int, Ge(0)] | None = None
    """Digits behind the point."""
    unit: str = ""
    """Stands behind numbers."""
    better: Better | None = None
    """The direction in which a difference is an improvement; null: as the value's kind says, else higher."""

    def __post_init__(self) -> None:
        of_curve = {"speedup": self.speedup, "area": self.area, "reach": self.reach}
        kinds = (self.evaluation, self.analysis, *of_curve.values())
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError(
                f"column {self.name!r} needs one of evaluation (a set whose pass@1 it shows), analysis (whose"
                " number it shows), speedup (over another row), area (under its curve) and reach (what an"
                " accuracy costs)"
            )
        if self.value is not None and self.evaluation is None and self.analysis is None:
            raise ValueError(f"column {self.name!r}: value is a number of an evaluation or an analysis")
        if self.evaluation is not None:
            try:
                value_named(self.number)
            except ValueError as error:
                raise ValueError(f"column {self.name!r}: {error}") from None
        if (self.over is not None) != (self.evaluation is not None and is_ratio(self.number)):
            raise ValueError(
                f"column {self.name!r}: a ratio such as speed_up is over another row, which over names, and"
                " nothing else is"
            )
        for kind, settings in of_curve.items():
            if settings is not None and self.curve is None:
                raise ValueError(f"column {self.name!r}: {kind} is read along the curve of a set; name one")
        if self.curve is not None and self.evaluation is not None and self.number != PASS_AT_1:
            raise ValueError(
                f"column {self.name!r}: a curve is of pass@1; panels draw {self.number} along training"
            )

    @property
    def number(self) -> str:
        """The name of the number of `evaluation`."""
        return self.value or PASS_AT_1

    @property
    def known(self) -> ValueKind:
        """The kind of its number; analyses and a `speedup` are taken for shares of which more is better."""
        if self.reach is not None:
            return ValueKind("lower")
        return value_named(self.number) if self.evaluation is not None else ValueKind("higher", share=True)

    @property
    def in_percent(self) -> bool:
        return self.known.share if self.percent is None else self.percent

    @property
    def improves(self) -> Better:
        return self.better or self.known.better


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of the figure along training, with a line for every row: exactly one of `metric` and
    `evaluation`."""

    name: Name
    """Stands above the panel."""
    metric: Name | None = None
    """A key of ``metrics.jsonl``."""
    evaluation: Name | None = None
    """A set whose pass@1 it is, or the number that `value` names."""
    value: Name | None = None
    """A number of the evaluation."""
    percent: bool | None = None
    """Shows shares as percent; null: those of evaluations."""

    def __post_init__(self) -> None:
        if (self.metric is None) == (self.evaluation is None):
            raise ValueError(
                f"panel {self.name!r} needs one of metric (such as 'train/entropy') and evaluation (a set"
                " whose pass@1 it shows)"
            )
        if self.value is not None and self.evaluation is None:
            raise ValueError(f"panel {self.name!r}: value is a number of an evaluation, and there is none")
        try:
            value_named(self.number)
        except ValueError as error:
            raise ValueError(f"panel {self.name!r}: {error}") from None
        if is_ratio(self.number):
            raise ValueError(f"panel {self.name!r}: {self.number} is over another row, which panels have not")

    @property
    def number(self) -> str:
        """The name of the number of `evaluation`."""
        return self.value or PASS_AT_1

    @property
    def in_percent(self) -> bool:
        if self.percent is not None:
            return self.percent
        return self.evaluation is not None and value_named(self.number).share

    @property
    def title(self) -> str:
        return f"{self.name} (%)" if self.in_percent else self.name
