"""Reports and tables fit their windows and can be read: nothing is cut off at a side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browser import MISSING, browser
from tests.support.page_faults import find_page_faults
from tests.tables.plans import ACCOUNT, finish, plan_of
from tests.view.report.synthetic import write_experiment
from treetune.tables.columns import MeasuredColumn, Panel
from treetune.tables.curves import make_column_curves, make_panel_curves
from treetune.tables.measure import measure_cells
from treetune.tables.settings import CellSource, MethodRow
from treetune.tables.write import as_html
from treetune.view.report.write import write_report

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
FIND_OVERFLOW = """
return [...document.querySelectorAll(".cards, h1, h2, .facts, .legend, figcaption")].filter(
  (element) =>
    element.getBoundingClientRect().right > innerWidth || element.scrollWidth > element.clientWidth + 1
).map((element) => element.innerText.slice(0, 40));
"""
FIND_CUT_OFF_TABLES = """
const tables = [...document.querySelectorAll(".scroll")];
const cutOff = tables.filter((table) => table.scrollWidth > table.clientWidth);
return [tables.length > 0, cutOff.map((table) => table.innerText)];
"""


def wide_table(folder: Path) -> str:
    """Renders a table with several columns and panels."""
    columns = tuple(MeasuredColumn(name=f"MATH DeepSeekMath-7B {i}", evaluation="test") for i in range(4))
    panels = tuple(Panel(name=f"length of sampled answers {i}", metric="train/entropy") for i in range(5))
    cells = {column.name: CellSource(published=0.5, source="a paper") for column in columns}
    rows = tuple(
        MethodRow(name=f"{name}, with a name of its own", experiment=name, cells=cells)
        for name in ("sft", "ppo", "vine")
    )
    plan = plan_of(folder, columns=columns, panels=panels, rows=rows, baseline=rows[0].name)
    plan = finish(plan, {"sft": 0.4, "ppo": 0.5, "vine": 0.6})
    return as_html(measure_cells(plan), make_column_curves(plan), ACCOUNT, make_panel_curves(plan))


def test_reports_fit_wide_and_narrow_windows_and_tables_1200_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a_long_name_without_any_place_where_it_could_be_broken_into_lines"
    report = write_report([write_experiment(path)])
    page = tmp_path / "page.html"
    page.write_text(wide_table(tmp_path / "runs"))
    with browser() as window:
        for width, dark in ((1400, False), (420, True)):
            window.open(report.as_uri(), width=width, dark=dark)
            assert window.script("return document.querySelectorAll('.cards td').length") > 5
            assert find_page_faults(window) == [] == window.script(FIND_OVERFLOW)
        window.open(page.as_uri(), width=1200)
        assert window.script(FIND_CUT_OFF_TABLES) == [True, []]
