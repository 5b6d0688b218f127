"""Charts: axes, numbers and colours, and curves that lie in the same place.

The tests hold that no two ticks have the same label, that an axis has all its values, and that curves which
would hide each other are all visible.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from treetune.view.charts import (
    Chart,
    Series,
    StackedBar,
    average_neighbours,
    axis_limits,
    format_number,
    line_chart,
    tick_labels,
)
from treetune.view.templates import colour_of, read_palette

FINITE = st.floats(-1e9, 1e9).map(lambda x: round(x, 6))


@given(low=FINITE, step=st.floats(1e-4, 1e8).map(lambda x: round(x, 6)))
@example(low=36.01, step=0.01)
@example(low=36_012.0, step=1.0)
@example(low=1e-6, step=1e-7)
def test_no_two_ticks_have_the_same_label(low: float, step: float) -> None:
    assume(step > 1e-8 * abs(low))
    labels = tick_labels([low + i * step for i in range(5)])
    assert len(set(labels)) == 5, labels


def test_tick_labels_are_as_short_as_they_can_be() -> None:
    assert tick_labels([36.01, 36.02, 36.03]) == ["36.01", "36.02", "36.03"]
    assert tick_labels([0, 20_000, 40_000]) == ["0", "20k", "40k"]
    assert tick_labels([0.0, 0.25, 0.5]) == ["0", "0.25", "0.50"]
    assert tick_labels([0.0, 1e-6, 2e-6]) == ["0", "1e-06", "2e-06"]


@given(values=st.lists(FINITE, min_size=1))
def test_an_axis_holds_its_values_and_does_not_cross_zero_for_nothing(values: list[float]) -> None:
    low, high = axis_limits(values)
    assert low < high and low <= min(values) and high >= max(values)
    hair = 0.02 * (high - low)
    assert low >= -hair or min(values) < 0
    assert high <= hair or max(values) > 0 or set(values) == {0.0}


@pytest.mark.parametrize("value", [0.0, 0.5, -2.0])
def test_a_constant_is_shown_on_an_axis_from_zero(value: float) -> None:
    low, high = axis_limits([value] * 5)
    assert min(abs(low), abs(high)) < 0.02 * (high - low)
    assert low <= value <= high <= max(1.1, 1.1 * value)


def strokes(figure: str) -> list[str]:
    return re.findall(r"<polyline ([^>]*)>", figure)


def test_curves_in_the_same_place_are_dashed_in_turns_so_that_each_is_seen() -> None:
    rows = [Series(f"row {i}", [(1, 0.2), (2, 0.2), (3, 0.5 if i == 2 else 0.2)], f"c{i}") for i in range(3)]
    first, second, other = strokes(line_chart(Chart("accuracy", rows, "up")))
    assert 'dasharray="7.2 7.2"' in first and 'dasharray="7.2 7.2"' in second and "dasharray" not in other
    assert 'dashoffset="7.2"' in second and 'dashoffset="0"' in first
    radii = re.findall(r'r="([\d.]+)"', line_chart(Chart("accuracy", rows, "up")))
    assert radii[0] > radii[3], "what is drawn below is larger"


def test_levels_in_the_same_place_are_dashed_in_turns() -> None:
    rows = [Series(f"row {i}", [(4, 0.2)], f"c{i}", is_level=True) for i in range(2)]
    assert all(
        'dasharray="7.2 10.8"' in stroke for stroke in strokes(line_chart(Chart("accuracy", rows, "up")))
    )


def test_points_have_titles_and_ticks_of_iterations_are_whole_numbers() -> None:
    chart = line_chart(Chart("accuracy", [Series("<a>", [(1, 0.25), (2, 0.5)], "c0", {2: (0.4, 0.6)})], "up"))
    assert "<title>&lt;a&gt;, 1: 0.25</title>" in chart
    assert "<title>&lt;a&gt;, 2: 0.5 [0.4, 0.6]</title>" in chart
    assert re.findall(r'text-anchor="middle">([^<]*)<', chart) == ["1", "2"]


def test_many_iterations_make_a_small_chart_and_few_bars() -> None:
    points = [(i, (i * 37) % 11) for i in range(1000)]
    assert len(line_chart(Chart("loss", [Series("loss", points, "own")]))) < 20_000
    bars = average_neighbours([StackedBar(str(i), {"generation": 1.0}) for i in range(1, 1001)])
    assert len(bars) <= 60 and bars[0] == ("1–17", {"generation": 1.0})


def test_numbers_have_three_digits_and_no_noise() -> None:
    written = [format_number(x) for x in (0.0, 0.1 + 0.2, 0.03125, 12.345, 999.9, 4510.0, 1.2e-6, -0.5)]
    assert written == ["0", "0.3", "0.0312", "12.3", "1000", "4\u2009510", "1.2e-06", "-0.5"]


@pytest.mark.parametrize(
    ("better", "half_width", "text", "is_there"),
    [
        ("down", 0.0, "↓ lower is better", True),
        ("down", 0.0, "band:", False),
        ("", 0.0, "better", False),
        ("up", 0.1, "↑ higher is better; band: range over seeds", True),
    ],
)
def test_a_figure_says_which_way_is_better_and_what_its_band_is(
    better: Any, half_width: float, text: str, is_there: bool
) -> None:
    interval = {1: (0.2 - half_width, 0.2 + half_width)} if half_width else {}
    chart = line_chart(Chart("x", [Series("a", [(1, 0.2)], "c0", interval)], better, "range over seeds"))
    assert (text in chart) == is_there


def test_every_row_of_a_long_table_has_a_colour_of_the_palette() -> None:
    series = [Series(f"row {row}", [(0, row), (1, row + 1)], colour_of(row)) for row in range(30)]
    drawn = line_chart(Chart("long", series, "up"))
    for row in series:
        assert row.colour in read_palette("light") and row.colour in read_palette("dark")
        assert f'<g class="{row.colour}">' in drawn
