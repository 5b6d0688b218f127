"""What a plan said of an iteration stands beside what was measured, in the report and in `watch`."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.small_run import directory_of, small, trained
from treetune.credit.vineppo import MonteCarlo
from treetune.runtime.directory import PREDICTION
from treetune.store.checksums import read_record, write_record
from treetune.view.curves import compare_with_plan
from treetune.view.experiment import read_experiment
from treetune.view.report.write import write_report
from treetune.view.store import Store
from treetune.view.terminal import run_page


def test_continuations_that_go_beside_answers_share_a_row_with_them(tmp_path: Path) -> None:
    path = directory_of(trained(small(tmp_path, credit=MonteCarlo(samples=1)))).path
    write_record(path / PREDICTION, {"seconds/generation": 3.0, "seconds/credit": 1.0})
    experiment = read_experiment(path)
    curves = [experiment.curve(f"seconds/{phase}") for phase in ("generation", "credit")]
    measured = sum(y for curve in curves for _, y in curve) / len(experiment.metrics)
    ((metric, planned, took, _),) = compare_with_plan(experiment)
    assert (metric, planned) == ("seconds/generation + seconds/credit", "4 s")
    assert float(took.removesuffix(" s")) == pytest.approx(measured, rel=0.01)


def test_a_run_keeps_its_plan_and_report_and_watch_show_by_how_much_it_was_off(tmp_path: Path) -> None:
    path = directory_of(trained(small(tmp_path))).path
    said = read_record(path / PREDICTION, "")
    assert said["seconds/training"] > 0 and said["memory/training"] > 2**30
    assert "seconds/total" not in said, "sampling in the run's own process has no estimate"
    experiment = read_experiment(path)
    assert {metric for metric, *_ in compare_with_plan(experiment)} == {name for name in said if "/" in name}

    mean = sum(y for _, y in experiment.curve("rollout/sampled_tokens")) / len(experiment.metrics)
    predicted = {"rollout/sampled_tokens": mean / 1.25, "train/never": 1.0, "seconds/sync": 0}
    write_record(path / PREDICTION, predicted)
    ((metric, _, _, difference),) = compare_with_plan(read_experiment(path))
    assert (metric, difference) == ("rollout/sampled_tokens", "+25%")
    page = write_report([path], tmp_path / "report.html").read_text()
    assert re.search(r"rollout/<wbr>sampled_tokens<.*>\+25%<", page)
    store, console = Store([tmp_path], tmp_path / "cache"), Console(width=100, record=True, file=StringIO())
    console.print(run_page(store, store.runs()[0], 100))
    text = console.export_text()
    assert "planned and measured" in text and "+25%" in text
