"""What is on a page of 1,200 pixels is seen, not cut off at its side. (Where there is a browser to ask.)"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.reports.plans import ACCOUNT, finish, plan_of
from tests.support.browser import CHROMIUM
from treetune_tables.columns import Column, Panel
from treetune_tables.curves import curves, panel_curves
from treetune_tables.measure import measure
from treetune_tables.settings import Cell, MethodRow
from treetune_tables.write import as_html

ASK = """<script>
const cut = [...document.querySelectorAll(".scroll")].filter(one => one.scrollWidth > one.clientWidth);
document.title = "cut off: " + cut.map(one => one.innerText.slice(0, 60)).join(" / ");
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no browser here")
def test_tables_with_several_columns_and_panels_are_not_cut_off(tmp_path: Path) -> None:
    columns = tuple(Column(name=f"MATH DeepSeekMath-7B {i}", evaluation="test") for i in range(4))
    panels = tuple(Panel(name=f"length of sampled answers {i}", metric="train/entropy") for i in range(5))
    rows = tuple(
        MethodRow(
            name=f"{name}, with a name of its own",
            experiment=name,
            cells={column.name: Cell(published=0.5, source="a paper") for column in columns},
        )
        for name in ("sft", "ppo", "vine")
    )
    plan = plan_of(tmp_path, columns=columns, panels=panels, rows=rows, baseline=rows[0].name)
    plan = finish(plan, {"sft": 0.4, "ppo": 0.5, "vine": 0.6})
    page = tmp_path / "page.html"
    page.write_text(as_html(measure(plan), curves(plan), ACCOUNT, panel_curves(plan)) + ASK)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--dump-dom"]
    done = subprocess.run(
        [str(CHROMIUM), *options, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    (title,) = re.findall(r"<title>(.*?)</title>", done.stdout)[:1]
    assert title == "cut off: "
