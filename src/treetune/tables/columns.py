"""The columns and panels of a table, and the numbers of an evaluation that they may show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen

from treetune.config.errors import did_you_mean
from treetune.rollouts.metrics import split_domain
from treetune.rollouts.numbers import (
    CORRECT_SUFFIX,
    Better,
    declared_numbers,
    declared_ratios,
    find_full_name,
)
from treetune.vocabulary import CORRECT_SCORE

PASS_AT_1 = "pass_at_1"


@dataclass(frozen=True)
class ValueKind:
    """The kind of a number: whether it is a share between 0 and 1, and which direction is an improvement.

    Example: `ValueKind("lower", share=True)` is the kind of `unfinished`.
    """

    better: Better
    share: bool = False


# The numbers that every evaluation has, whatever its task.
_BASIC_NUMBERS = {
    PASS_AT_1: ValueKind("higher", share=True),
    "majority_vote": ValueKind("higher", share=True),
    "unfinished": ValueKind("lower", share=True),
    "mean_tokens": ValueKind("lower"),
}


def kind_of_value(name: str) -> ValueKind:
    """Returns the kind of a number of an evaluation.

    These names exist:

    * the numbers of every evaluation (``pass_at_1``, ``unfinished``, …), and ``pass_at_K`` for every K that
      its samples allow;
    * the numbers of answers that a group declares, such as ``threads/num_tokens_in_the_longest_thread``. The
      group's name ``threads/`` may be left out. With ``_right`` at the end, the number is the mean over only
      the correct answers;
    * ratios to another row (``speed_up``);
    * the numbers of every evaluation for a single domain (``domains/logic/pass_at_1``).

    Raises ValueError for any other name, and suggests the nearest one.
    """
    domain_and_name = split_domain(name)
    if domain_and_name is not None:
        domain, name_in_domain = domain_and_name
        if not domain or find_full_name(name_in_domain) or is_ratio(name_in_domain):
            names = ", ".join(_BASIC_NUMBERS)
            raise ValueError(f"{name!r} is not a number of a domain: those are {names} and pass_at_K")
        return kind_of_value(name_in_domain)
    if name in _BASIC_NUMBERS:
        return _BASIC_NUMBERS[name]
    if is_ratio(name):
        return ValueKind("higher")
    full = find_full_name(name)
    if full is not None:
        number = declared_numbers()[full.removesuffix(CORRECT_SUFFIX)]
        return ValueKind(number.better, number.share)
    if re.fullmatch(r"pass_at_[1-9]\d*", name):
        return _BASIC_NUMBERS[PASS_AT_1]
    declared_names = [full.partition("/")[2] for full in declared_numbers()]
    valid_names = [*_BASIC_NUMBERS, *declared_names, *declared_ratios()]
    raise ValueError(
        f"{name!r} is not a number of an evaluation; {did_you_mean(name, valid_names)} (pass_at_K exists for"
        " other K as well)"
    )


def is_ratio(name: str) -> bool:
    """Returns whether a number is a ratio of two rows. No single evaluation has such a number in its
    files."""
    return name in declared_ratios()


def read_number_of_summary(summary: Mapping[str, Any], name: str, source: Path | str) -> float:
    """Returns a number from an evaluation's summary.

    Raises ValueError where the summary doesn't have the number, with a message that says what is missing.

    Args:
        summary: The content of the summary.
        name: The name of the number, see `kind_of_value`.
        source: The summary's file or another name for it, for the message.
    """
    kind_of_value(name)  # raises ValueError for a name that no evaluation has
    domain_and_name = split_domain(name)
    if domain_and_name is not None:
        domain, name_in_domain = domain_and_name
        domains = summary.get("domains") or {}
        if domain not in domains:
            raise ValueError(
                f"no domain {domain!r} in {source}: its domains are {', '.join(domains) or 'none'}"
            )
        return read_number_of_summary(domains[domain], name_in_domain, source)
    full = find_full_name(name)
    if full is not None:
        group, _, short = full.partition("/")
        numbers = summary.get(group)
        if not isinstance(numbers, Mapping):
            raise ValueError(
                f"no {group} counted: {source} has no key {group!r}. An earlier version wrote it, which did"
                " not count them, or the model's answers have none"
            )
        value, message = numbers.get(short), f"no {short}: not in {group} of {source}"
    elif name in summary:
        value, message = summary[name], f"no {name}: not in {source}"
    else:  # pass_at_K: `kind_of_value` has refused other names
        value = (summary.get("pass_at_k") or {}).get(name.removeprefix("pass_at_"))
        samples = summary.get("samples", "too few")
        message = f"no {name}: {source} has {samples} samples of each problem"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(message)
    return float(value)


def means_by_problem(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    """Returns each problem's mean of a number over its answers: `{"train/45": 0.75}` where 3 of 4 are
    correct.

    Returns None where the number is not a mean over answers, and where an answer has no such number. An
    answer that could not be graded is left out of an accuracy.

    Args:
        rows: A row for each answer of an evaluation.
        name: The name of the number, see `kind_of_value`.
    """
    domain, name = split_domain(name) or ("", name)
    numbers_by_problem: dict[str, list[float]] = {}
    for row in rows:
        if domain and row.get("domain") != domain:
            continue
        if name == PASS_AT_1 and row.get("outcome") == "unavailable":
            continue
        number = _number_of_answer(row, name)
        if number is None:
            return None
        numbers_by_problem.setdefault(row["problem"], []).append(number)
    return {problem: sum(numbers) / len(numbers) for problem, numbers in numbers_by_problem.items()}


def _number_of_answer(row: Mapping[str, Any], name: str) -> float | None:
    """Returns the number of a single answer, or None where the answer's row has no such number.

    A number that is a share of the answers, such as the accuracy, is 0 or 1 for a single answer.
    """
    if name == PASS_AT_1:
        return float(row["reward"] >= CORRECT_SCORE)
    number: Any
    if name == "unfinished":
        finish_reason = row.get("finish_reason")
        number = float(finish_reason == "length") if finish_reason else None
    elif name == "mean_tokens":
        number = row.get("tokens")
    else:
        full_name = find_full_name(name)
        if full_name is None:
            return None
        group, _, short = full_name.partition("/")
        number = (row.get(group) or {}).get(short)
    return float(number) if isinstance(number, int | float) else None


Name = Annotated[str, MinLen(1)]

Axis = Literal["tokens", "seconds", "steps"]
"""A cost of training: sampled tokens, seconds without evaluation, or gradient steps (`curves.AXES`)."""


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """The factor by which a row needs less of `over` than the row `of` to reach the best accuracy of `of`.

    Both accuracies are measured along training, on the column's `curve`, at the checkpoints that are kept.
    Example: 2.0 where `of` is at its best (0.53) after 10 M tokens, and the row has 0.53 after 5 M.
    """

    of: Name
    """The name of the row to compare with."""
    over: Axis
    """The cost."""


@dataclass(frozen=True, kw_only=True)
class Area:
    """The area under the column's `curve` from cost 0 to `upto`, given as a mean accuracy.

    Between two measurements the accuracy changes linearly; after the last one it stays as it is.
    """

    over: Axis
    """The cost."""
    upto: Annotated[float, Gt(0)]
    """The cost at which the area ends."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The amount of `over` that a row needs until the column's `curve` first reaches `accuracy`."""

    accuracy: Annotated[float, Gt(0), Le(1)]
    """The accuracy to reach, from 0 to 1."""
    over: Axis
    """The cost."""


@dataclass(frozen=True, kw_only=True)
class MeasuredColumn:
    """A column with a quantity that is measured for every row. Exactly one of `evaluation`, `analysis`,
    `speedup`, `area` and `reach` says which.

    Example: `{name: "MATH500", evaluation: "math500_test", value: "pass_at_8"}`.
    """

    name: Name
    """The title above the column."""
    evaluation: Name | None = None
    """The evaluation set whose number is shown: pass@1, or the number that `value` names."""
    analysis: Name | None = None
    """The analysis whose ``result.json`` has the number."""
    value: Name | None = None
    """For an evaluation, the name of the number (see `kind_of_value`; null: pass@1). For an analysis, the
    dotted key path of the number in its result, such as ``states.0.error``; a row's cell may replace it."""
    over: Name | None = None
    """The row that a ratio compares with, seed by seed: ``speed_up`` is the mean answer length of that row,
    divided by the mean length of the longest thread of this one."""
    speedup: Speedup | None = None
    area: Area | None = None
    reach: Reach | None = None
    curve: Name | None = None
    """An evaluation set that is measured along training. Its pass@1 is drawn over iterations and costs, and
    `speedup`, `area` and `reach` are computed from it."""
    percent: bool | None = None
    """Whether numbers are shown in percent. null: an evaluation's number is if it is a share, numbers of an
    analysis and an `area` are, and a `speedup` and a `reach` aren't."""
    digits: Annotated[int, Ge(0)] | None = None
    """The number of digits after the decimal point. null: 1 in percent, or else three significant digits."""
    unit: str = ""
    """A unit, written after each number."""
    better: Better | None = None
    """The direction in which a difference is an improvement. null: that of the evaluation's number, "lower"
    for a `reach`, and "higher" for everything else."""

    def __post_init__(self) -> None:
        read_from_curve = {"speedup": self.speedup, "area": self.area, "reach": self.reach}
        quantities = (self.evaluation, self.analysis, *read_from_curve.values())
        if sum(quantity is not None for quantity in quantities) != 1:
            raise ValueError(
                f"column {self.name!r} needs one of evaluation (a set whose pass@1 it shows), analysis (whose"
                " number it shows), speedup (over another row), area (under its curve) and reach (what an"
                " accuracy costs)"
            )
        if self.value is not None and self.evaluation is None and self.analysis is None:
            raise ValueError(f"column {self.name!r}: value is a number of an evaluation or an analysis")
        if self.evaluation is not None:
            try:
                kind_of_value(self.number)  # raises ValueError for a name that no evaluation has
            except ValueError as error:
                raise ValueError(f"column {self.name!r}: {error}") from None
        shows_ratio = self.evaluation is not None and is_ratio(self.number)
        if shows_ratio != (self.over is not None):
            raise ValueError(
                f"column {self.name!r}: a ratio such as speed_up needs the row that it compares with: set"
                " over; no other column takes over"
            )
        for key, settings in read_from_curve.items():
            if settings is not None and self.curve is None:
                raise ValueError(
                    f"column {self.name!r}: {key} is computed from an accuracy curve: set curve to the name"
                    " of an evaluation set"
                )
        if self.curve is not None and self.evaluation is not None and self.number != PASS_AT_1:
            raise ValueError(f"column {self.name!r}: a curve shows pass@1; draw {self.number} in a panel")

    @property
    def number(self) -> str:
        """The name of the number of `evaluation`."""
        return self.value or PASS_AT_1

    @property
    def is_read_from_curve(self) -> bool:
        """Whether the column's numbers are computed from `curve`, which must then be without gaps.

        The `curve` of a column of another quantity is only drawn.
        """
        return self.speedup is not None or self.area is not None or self.reach is not None

    @property
    def kind(self) -> ValueKind:
        """The kind of the column's number."""
        if self.reach is not None:
            return ValueKind("lower")
        if self.speedup is not None:
            return ValueKind("higher")
        if self.evaluation is not None:
            return kind_of_value(self.number)
        # An area under a curve of accuracies is a share. A number of an analysis is treated as a share, too:
        # it is shown in percent unless the column says otherwise.
        return ValueKind("higher", share=True)

    @property
    def in_percent(self) -> bool:
        return self.kind.share if self.percent is None else self.percent

    @property
    def improves(self) -> Better:
        return self.better or self.kind.better


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of the figure along training, with a line for every row. Exactly one of `metric` and
    `evaluation` says what is drawn."""

    name: Name
    """The title above the panel."""
    metric: Name | None = None
    """A key of ``metrics.jsonl``."""
    evaluation: Name | None = None
    """The evaluation set whose number is drawn: pass@1, or the number that `value` names."""
    value: Name | None = None
    """The name of a number of the evaluation (see `kind_of_value`); null: pass@1."""
    percent: bool | None = None
    """Whether numbers are shown in percent. null: an evaluation's number is if it is a share, and a metric
    isn't."""

    def __post_init__(self) -> None:
        if (self.metric is None) == (self.evaluation is None):
            raise ValueError(
                f"panel {self.name!r} needs one of metric (such as 'train/entropy') and evaluation (a set"
                " whose pass@1 it shows)"
            )
        if self.value is not None and self.evaluation is None:
            raise ValueError(f"panel {self.name!r}: value is a number of an evaluation, and there is none")
        try:
            kind_of_value(self.number)  # raises ValueError for a name that no evaluation has
        except ValueError as error:
            raise ValueError(f"panel {self.name!r}: {error}") from None
        if is_ratio(self.number):
            raise ValueError(
                f"panel {self.name!r}: {self.number} compares with another row, and a panel has none"
            )

    @property
    def number(self) -> str:
        """The name of the number of `evaluation`."""
        return self.value or PASS_AT_1

    @property
    def in_percent(self) -> bool:
        if self.percent is not None:
            return self.percent
        return self.evaluation is not None and kind_of_value(self.number).share

    @property
    def title(self) -> str:
        return f"{self.name} (%)" if self.in_percent else self.name
