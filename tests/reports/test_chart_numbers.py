"""Axes are round and cover what they show."""

from hypothesis import given
from hypothesis import strategies as st

from treetune.reports.charts import number, stacked_bars, ticks

FINITE = st.floats(-1e9, 1e9).map(lambda x: round(x, 6))


@given(low=FINITE, span=st.floats(1e-4, 1e9))
def test_ticks_cover_the_range_and_are_few(low: float, span: float) -> None:
    marks = ticks(low, low + span)
    slack = 1e-6 * max(1.0, abs(low), span)
    assert marks[0] <= low + slack
    assert marks[-1] >= low + span - slack
    assert 2 <= len(marks) <= 12
    assert marks == sorted(marks)


@given(value=FINITE)
def test_a_single_value_gets_an_axis_around_it(value: float) -> None:
    marks = ticks(value, value)
    assert marks[0] < marks[-1]


def test_numbers_have_three_digits_and_no_noise() -> None:
    shown = [number(x) for x in (0.0, 0.1 + 0.2, 0.03125, 12.345, 999.9, 4510.0, 1.2e-6, -0.5)]
    assert shown == ["0", "0.3", "0.0312", "12.3", "1000", "4\u2009510", "1.2e-06", "-0.5"]


def test_many_iterations_are_averaged_into_few_bars() -> None:
    bars = stacked_bars("time", [(str(i), {"generation": 1.0}) for i in range(1, 1001)], "s")
    assert bars.count("<rect") <= 60
    assert "iteration 1–17: generation 1 s" in bars
