"""A report fits its window, wide and narrow, and can be read, light and dark. (Where there is a browser.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reports.synthetic import write_experiment
from tests.support.browser import MISSING, browser
from tests.support.looking import wrong_with
from treetune_view.report import write_report

CUT_OFF = """
return [...document.querySelectorAll(".cards, h1, h2, .facts, .legend, figcaption")].filter(
  (one) => one.getBoundingClientRect().right > innerWidth || one.scrollWidth > one.clientWidth + 1
).map((one) => one.innerText.slice(0, 40));
"""


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_report_fits_and_can_be_read_at_1400_and_420_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a_long_name_without_any_place_where_it_could_be_broken_into_lines"
    report = write_report([write_experiment(path)])
    with browser() as window:
        for width, dark in ((1400, False), (420, True)):
            window.open(report.as_uri(), width=width, dark=dark)
            assert window.script("return document.querySelectorAll('.cards td').length") > 5
            assert wrong_with(window) == []
            assert window.script(CUT_OFF) == []
