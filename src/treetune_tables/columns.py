"""What a reproduction's table shows of every row: columns at the end of training, panels along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen

from treetune.rollouts.numbers import Better
from treetune_tables.values import PASS_AT_1, Value, is_ratio, value_named

Name = Annotated[str, MinLen(1)]

Axis = Literal["tokens", "seconds", "steps"]
"""What training costs, see `curves`."""


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How many times less of `over` a row needs than the row `of` until that one's best accuracy.

    Both are read along training, on the column's `curve`, at the checkpoints that are kept.
    """

    of: Name
    over: Axis


@dataclass(frozen=True, kw_only=True)
class Area:
    """The area under the column's `curve` from no cost to `upto` of `over`, as a mean accuracy: between
    measurements it is taken to change evenly, behind the last one it stays."""

    over: Axis
    upto: Annotated[float, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How much of `over` it takes until the column's `curve` first comes to `accuracy`."""

    accuracy: Annotated[float, Gt(0), Le(1)]
    over: Axis


@dataclass(frozen=True, kw_only=True)
class Column:
    """One quantity, measured for every row: exactly one of `evaluation`, `analysis`, `speedup`, `area` and
    `reach`.

    `evaluation` is the evaluation set whose pass@1 it is, or the number that `value` names (see
    `values`). A ratio is over the row `over`, seed by seed: ``speed_up`` is how many times longer its mean
    answer is than the mean longest thread of this one. With `analysis`, it is a number in that analysis'
    ``result.json``, at the dotted key path `value` (which a cell may replace). `curve` is the evaluation
    set to draw along training, where one is measured then.

    `percent` shows shares as percent, `digits` so many behind the point, `unit` is put after numbers.
    `better` says which way a difference is an improvement. Where left out, what is known of the value
    says so, and other numbers are shares of which higher is better.
    """

    name: Name
    """Stands above the column."""
    evaluation: Name | None = None
    analysis: Name | None = None
    value: Name | None = None
    over: Name | None = None
    speedup: Speedup | None = None
    area: Area | None = None
    reach: Reach | None = None
    curve: Name | None = None
    percent: bool | None = None
    digits: Annotated[int, Ge(0)] | None = None
    unit: str = ""
    better: Better | None = None

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
                value_named(self.shown)
            except ValueError as error:
                raise ValueError(f"column {self.name!r}: {error}") from None
        if (self.over is not None) != (self.evaluation is not None and is_ratio(self.shown)):
            raise ValueError(
                f"column {self.name!r}: a ratio such as speed_up is over another row, which over names, and"
                " nothing else is"
            )
        for kind, settings in of_curve.items():
            if settings is not None and self.curve is None:
                raise ValueError(f"column {self.name!r}: {kind} is read along the curve of a set; name one")
        if self.curve is not None and self.evaluation is not None and self.shown != PASS_AT_1:
            raise ValueError(
                f"column {self.name!r}: a curve is of pass@1; panels draw {self.shown} along training"
            )

    @property
    def shown(self) -> str:
        """The name of the number of `evaluation`."""
        return self.value or PASS_AT_1

    @property
    def known(self) -> Value:
        """What is known of the number: of an analysis', and of a `speedup`, nothing."""
        if self.reach is not None:
            return Value("lower")
        return value_named(self.shown) if self.evaluation is not None else Value("higher", share=True)

    @property
    def in_percent(self) -> bool:
        return self.known.share if self.percent is None else self.percent

    @property
    def improves(self) -> Better:
        return self.better or self.known.better


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of the figure along training, with a line for every row: exactly one of `metric`, a key
    of ``metrics.jsonl``, and `evaluation`, a set whose pass@1 it is, or the number that `value` names.
    `percent` shows shares as percent; None does so for those of evaluations.
    """

    name: Name
    """Stands above the panel."""
    metric: Name | None = None
    evaluation: Name | None = None
    value: Name | None = None
    percent: bool | None = None

    def __post_init__(self) -> None:
        if (self.metric is None) == (self.evaluation is None):
            raise ValueError(
                f"panel {self.name!r} needs one of metric (such as 'train/entropy') and evaluation (a set"
                " whose pass@1 it shows)"
            )
        if self.value is not None and self.evaluation is None:
            raise ValueError(f"panel {self.name!r}: value is a number of an evaluation, and there is none")
        try:
            value_named(self.shown)
        except ValueError as error:
            raise ValueError(f"panel {self.name!r}: {error}") from None
        if is_ratio(self.shown):
            raise ValueError(f"panel {self.name!r}: {self.shown} is over another row, which panels have not")

    @property
    def shown(self) -> str:
        """The name of the number of `evaluation`."""
        return self.value or PASS_AT_1

    @property
    def in_percent(self) -> bool:
        if self.percent is not None:
            return self.percent
        return self.evaluation is not None and value_named(self.shown).share

    @property
    def title(self) -> str:
        return f"{self.name} (%)" if self.in_percent else self.name
