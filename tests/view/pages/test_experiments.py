"""The list of experiments, and the table that compares several.

Promises that these tests hold:

* Every experiment below the folders is listed once, with state, progress, accuracy and the reason of its end.
* The list can be searched, filtered, sorted and grouped by any key of the configuration.
* Experiments that are compared stand in one table with what differs between them.
* The page of a fork names the run that it was forked from, and links to it if the viewer shows it.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.view.conftest import Viewer
from tests.view.recorded import begin_run, record_evaluation, record_iteration, recorded_run
from tests.view.report.page import Page
from treetune.runtime.console import Console
from treetune.runtime.directory import ExperimentDirectory
from treetune.view.experiment import RunProgress
from treetune.view.store import Store


def status(viewer: Viewer, name: str = "run") -> RunProgress:
    return viewer.store.status(viewer.store.run(name))


def log_line(run: ExperimentDirectory, text: str) -> None:
    console = Console(run.logs_folder / "run.log", visible=False)
    console.say(text)
    console.close()


def test_experiments_are_found_below_the_folders_and_not_inside_of_experiments(viewer: Viewer) -> None:
    model = viewer.record("quickstart/vineppo").path / "checkpoints" / "0003" / "policy"
    begin_run(viewer.folder / "other" / "deep" / "grpo")
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    begin_run(viewer.folder / ".hidden" / "run")
    assert [run.name for run in viewer.store.runs()] == ["other/deep/grpo", "quickstart/vineppo"]


def test_experiments_of_several_folders_have_different_names(tmp_path: Path) -> None:
    for name in ("here", "there"):
        begin_run(tmp_path / name / "sft")
        begin_run(tmp_path / "more" / name / "sft")
    folders = [tmp_path / "here", tmp_path / "there", tmp_path / "more" / "here"]
    names = {run.name for run in Store(folders, tmp_path / "cache").runs()}
    assert len(names) == 3 and "there/sft" in names


def test_a_finished_run_has_its_newest_accuracy_with_its_interval(viewer: Viewer) -> None:
    viewer.record(iterations=3)
    progress = status(viewer)
    assert (progress.state, progress.seconds_left) == ("finished", None)
    assert (progress.finished_iterations, progress.planned_iterations) == (3, 3)
    [accuracy] = progress.accuracies
    assert (accuracy.label, accuracy.iteration, accuracy.value) == ("validation", 3, 1.0)
    assert accuracy.low <= accuracy.value <= accuracy.high
    assert progress.method == "monte_carlo · ppo"


def test_a_run_that_holds_its_lock_is_running_and_a_killed_one_shows_its_last_message(
    viewer: Viewer,
) -> None:
    run = viewer.record(iterations=2, planned=10)
    log_line(run, "iteration 3: training")
    with run.locked():
        running = status(viewer)
    assert (running.state, running.why) == ("running", "iteration 3: training")
    # Eight iterations of 7.9 s are left, and the current one may be nearly over.
    assert 7 * 7.9 - 1e-6 <= running.seconds_left <= 8 * 7.9
    killed = status(viewer)
    assert killed.state == "stopped" and "iteration 3: training" in killed.why


def test_the_time_left_shrinks_between_iterations(viewer: Viewer) -> None:
    run = begin_run(viewer.folder / "run", planned=2)
    record_iteration(run, 0, wall_time=time.time() - 5)
    with run.locked():
        assert status(viewer).seconds_left <= 7.9 - 5


def test_a_run_says_why_it_ended(viewer: Viewer) -> None:
    begin_run(viewer.folder / "waiting")
    assert status(viewer, "waiting").state == "waiting"
    run = viewer.record("failed", planned=10)
    (run.logs_folder / "run.log").write_text(
        "2026-11-22 19:03:11,801 INFO iteration 2: sampling\n"
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in <module>\n'
        "OSError: the checkpoint could not be written\n"
    )
    assert status(viewer, "failed").why == "OSError: the checkpoint could not be written"
    signs = {"diagnostics/entropy": 1.0, "diagnostics/kl": 0.0, "diagnostics/stop": 1.0}
    record_iteration(begin_run(viewer.folder / "collapsed", planned=10), 0, **signs)
    assert status(viewer, "collapsed").why == "signs of collapse: entropy"


def test_changed_files_are_read_again_and_a_line_that_is_cut_off_is_not_counted(viewer: Viewer) -> None:
    run, store = viewer.record(planned=3), viewer.store
    fingerprints = [store.fingerprint(store.runs())]
    assert status(viewer).finished_iterations == 1
    record_iteration(run, 1)
    fingerprints.append(store.fingerprint(store.runs()))
    assert status(viewer).finished_iterations == 2
    record_evaluation(run, 2)
    fingerprints.append(store.fingerprint(store.runs()))
    assert len(set(fingerprints)) == 3 and status(viewer).accuracies[0].iteration == 2
    with run.metrics_file.open("a") as file:
        file.write('{"iteration": 2, "episodes/reward": 0.9')
    assert status(viewer).finished_iterations == 2


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, ["best", "idle", "worst"]),
        ({"state": "finished"}, ["best", "worst"]),
        ({"search": "BES"}, ["best"]),
        ({"sort": "accuracy"}, ["best", "worst", "idle"]),
    ],
)
def test_the_list_can_be_searched_filtered_and_sorted(
    viewer: Viewer, query: dict[str, str], names: list[str]
) -> None:
    viewer.record("best", iterations=3)
    viewer.record("worst")
    begin_run(viewer.folder / "idle")
    elements = Page(viewer.page("/", **query)).elements
    inputs = [attributes for tag, attributes in elements if tag == "input"]
    assert [attributes["value"] for attributes in inputs if attributes.get("name") == "run"] == names
    viewer.refusal("/?sort=nonsense", 400)


def test_a_folder_that_cannot_be_read_is_a_row_that_says_so(viewer: Viewer) -> None:
    (begin_run(viewer.folder / "run").path / "config.json").write_text("{torn")
    assert "is not an experiment" in viewer.page("/")


def test_chosen_experiments_are_compared_in_one_table(viewer: Viewer) -> None:
    recorded_run(viewer.folder / "one", iterations=2)
    credit = {"type": "group", "note": "<b>"}
    other = begin_run(viewer.folder / "two", planned=1, seed=2, credit=credit)
    metrics = {
        "rollout/sampled_tokens": 1234.0,
        "train/steps": 8.0,
        "train/tokens": 1e3,
        "seconds/total": 90.0,
    }
    record_iteration(other, 0, **metrics)
    page = viewer.page("/run?run=one&run=two")
    rows = {}
    for row in page.split("Side by side")[1].split("<tr>")[2:]:
        head = re.sub("<.*?>", "", row.split("</th>")[0]).strip()
        rows[head] = re.findall(r"<td[^>]*>(.*?)</td>", row)
    accuracy, nothing = rows["pass@1 on validation"]
    assert "none" in nothing and "after 2 iterations" in accuracy
    expected = {
        "finished iterations": ["2", "1"],
        "credit.type": ["monte_carlo", "group"],
        "seed": ["1", "2"],
    }
    assert {name: rows[name] for name in expected} == expected
    assert rows["optimiser steps"][1] == "8" and rows["sampled tokens of answers"][1] == "1,234"
    assert rows["time in iterations"][1] == '90 s <span class="note">90 s an iteration</span>'
    unshown = {"sampled tokens of continuations", "experiment_name", "directory", "rollout.type"}
    assert not unshown & rows.keys(), "metrics that no run recorded, and settings that are alike"
    assert "&lt;b&gt;" in page and "<b>" not in page.split("Side by side")[1].split("</table>")[0]
    assert "Side by side" not in viewer.page("/run?run=one")


def test_experiments_are_grouped_by_any_key_with_the_mean_of_the_shown_column(viewer: Viewer) -> None:
    for seed, name in ((1, "ppo/seed-1"), (2, "ppo/seed-2"), (3, "grpo/seed-1")):
        credit = {"type": "group"} if "grpo" in name else {"type": "monte_carlo"}
        run = begin_run(viewer.folder / name, planned=1, seed=seed, credit=credit)
        record_iteration(run, 0, **{"episodes/reward": seed / 4, "train/steps": 8.0})

    def groups(**query: Any) -> dict[str, tuple[int, str]]:
        """Reads the number of experiments and the shown mean of each group of the list."""
        count_and_mean = {}
        for body in viewer.page("/", **query).split("<tbody")[1:]:
            head = re.sub(r"<.*?>|±", "", body.split("</th>")[0].split("scope=")[1].split(">", 1)[1])
            mean = re.findall(r'data-label="[^m][^"]*">([^<]*)<', body)[0]
            count_and_mean[head.split()[0]] = (body.count('name="run"'), mean)
        return count_and_mean

    column = {"column": "reward, newest"}
    assert groups(group="credit.type", **column) == {
        "group": (1, "0.75"), "monte_carlo": (2, "0.375 [0.25, 0.5]")
    }  # fmt: skip
    assert set(groups(group="folder", **column)) == {"grpo", "ppo"}
    assert set(groups(group="seed", **column)) == {"1", "2", "3"}
    page = viewer.page("/", sort="reward, newest", **column)
    assert re.findall(r'id="row-([^"]+)"', page) == ["grpo/seed-1", "ppo/seed-2", "ppo/seed-1"]


def test_the_page_of_a_fork_names_its_parent_and_compares_their_configurations(viewer: Viewer) -> None:
    origin = {"run": "elsewhere/base", "after": 2, "config": "4567cdef"}
    fork = viewer.record("fork")
    fork.manifest_file.write_text(json.dumps({"config": "0123abcd", "continued": [], "forked": origin}))
    page = viewer.page("/run", run="fork")
    assert "from <code>elsewhere/base</code> after iteration 2" in page
    assert "what differs in the configuration" not in page

    # The parent was resumed with another configuration after the fork, and its folder was moved.
    base = viewer.record("moved/base")
    resumed = [{"after": 3, "config": "89ab0123", "changed": {}}]
    base.manifest_file.write_text(json.dumps({"config": "4567cdef", "continued": resumed}))
    page = viewer.page("/run", run="fork")
    assert '<a href="/run?run=moved%2Fbase">moved/base</a> after iteration 2' in page
    assert 'href="/configuration?run=fork&amp;run=moved%2Fbase&amp;only=differences"' in page
    assert "forked" not in viewer.page("/run", run="moved/base")
