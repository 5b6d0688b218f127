"""A section is one class: whoever defines one has it on the page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.reports.page import Page
from tests.reports.synthetic import summary, write_experiment, write_summary
from treetune.rollouts.numbers import declared
from treetune_view.experiment import Experiment
from treetune_view.report import sections as base
from treetune_view.report import write_report
from treetune_view.report.recorded import NumbersSection


@pytest.fixture(autouse=True)
def _the_lists_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    base.all_sections()
    monkeypatch.setattr(base, "_SECTIONS", list(base._SECTIONS))


def test_a_section_is_shown_where_it_applies_with_its_columns_of_the_results(tmp_path: Path) -> None:
    class Hops(base.ReportSection):
        title = "Hops & skips"

        def applies(self, experiment: Experiment) -> bool:
            return experiment.name == "with"

        def html(self, experiment: Experiment) -> str:
            experiment.missing.append("no hop was seen")
            return f"<p>{len(experiment.metrics)} iterations of hops</p>"

        def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
            return {"hops": str(summary["hops"])} if "hops" in summary else {}

    paths = [write_experiment(tmp_path / name, name=name, iterations=3) for name in ("with", "without")]
    write_summary(paths[0], 3, "validation", summary(0.5, hops=4.25))
    page = Page(write_report(paths))
    assert page.text.count("Hops & skips") == 1 and "3 iterations of hops" in page.text
    assert "no hop was seen" in page.text, "what a section misses stands with what is missing"
    assert "iteration hops" in page.words and page.words.count("4.25") == 1


def test_a_section_with_nothing_to_show_has_no_title(tmp_path: Path) -> None:
    class Empty(base.ReportSection):
        title = "Emptiness"

        def applies(self, experiment: Experiment) -> bool:
            return True

        def html(self, experiment: Experiment) -> str:
            return ""

    assert "Emptiness" not in Page(write_report([write_experiment(tmp_path / "run")])).text


def test_somebody_elses_number_under_the_name_of_a_group_is_passed_over() -> None:
    section = NumbersSection()
    full, number = next((full, one) for full, one in declared().items() if one.label is not None)
    group, _, name = full.partition("/")
    assert section.columns({group: 3.0}) == section.columns({}) == section.columns({group: None}) == {}
    assert list(section.columns({group: {name: 0.5}})) == [number.label]
