"""What the list of experiments says of each: state and why, accuracy, time left."""

import logging
import time
from pathlib import Path

from starlette.testclient import TestClient

from tests.reports.page import Page
from tests.viewer.recorded import begin_run, record_evaluation, record_iteration, recorded_run
from treetune.runtime.console import Console
from treetune_view.experiment import Status
from treetune_view.store import Store


def of(store: Store, name: str) -> Status:
    return store.status(store.run(name))


def test_experiments_are_found_below_the_folders_and_not_inside_of_experiments(
    store: Store, folder: Path
) -> None:
    recorded_run(folder / "quickstart" / "vineppo")
    begin_run(folder / "other" / "deep" / "grpo")
    model = folder / "quickstart" / "vineppo" / "checkpoints" / "0003" / "policy"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (folder / ".hidden").mkdir()
    begin_run(folder / ".hidden" / "run")

    assert [run.name for run in store.runs()] == ["other/deep/grpo", "quickstart/vineppo"]


def test_experiments_of_several_folders_have_different_names(tmp_path: Path) -> None:
    for name in ("here", "there"):
        begin_run(tmp_path / name / "sft")
        begin_run(tmp_path / "more" / name / "sft")
    folders = [tmp_path / "here", tmp_path / "there", tmp_path / "more" / "here"]

    names = [run.name for run in Store(folders, tmp_path / "cache").runs()]

    assert len(set(names)) == 3
    assert "there/sft" in names


def test_a_finished_run_has_its_newest_accuracy_with_its_interval(store: Store, folder: Path) -> None:
    recorded_run(folder / "run", iterations=3)

    found = of(store, "run")

    assert (found.state, found.done, found.planned, found.seconds_left) == ("finished", 3, 3, None)
    [accuracy] = found.accuracies
    assert (accuracy.label, accuracy.iteration, accuracy.value) == ("validation", 3, 1.0)
    assert accuracy.low is not None and accuracy.low <= accuracy.value <= (accuracy.high or 0)
    assert found.method == "monte_carlo · ppo"


def test_a_run_with_the_lock_is_running_and_says_what_it_is_at(store: Store, folder: Path) -> None:
    run = recorded_run(folder / "run", iterations=2, planned=10)
    console = Console(run.logs / "run.log", visible=False)
    console.say("iteration 3: training")
    with run.locked():
        found = of(store, "run")
    console.close()

    assert (found.state, found.why) == ("running", "iteration 3: training")
    # Eight iterations of 7.9 s, the one that goes on may be nearly over.
    assert found.seconds_left is not None and 7 * 7.9 - 1e-6 <= found.seconds_left <= 8 * 7.9


def test_a_run_that_was_killed_is_stopped_and_has_its_last_words(store: Store, folder: Path) -> None:
    run = recorded_run(folder / "run", iterations=2, planned=10)
    console = Console(run.logs / "run.log", visible=False)
    console.say("iteration 3: sampling")
    console.close()

    assert of(store, "run").state == "stopped"
    assert "iteration 3: sampling" in of(store, "run").why


def test_a_run_that_failed_says_with_what(store: Store, folder: Path) -> None:
    run = recorded_run(folder / "run", iterations=1, planned=10)
    (run.logs / "run.log").write_text(
        "2026-11-22 19:03:11,801 INFO iteration 2: sampling\n"
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in <module>\n'
        "OSError: the checkpoint could not be written\n"
    )

    assert of(store, "run").why == "OSError: the checkpoint could not be written"


def test_a_collapsed_run_names_the_signs(store: Store, folder: Path) -> None:
    run = begin_run(folder / "run", planned=10)
    record_iteration(run, 0, **{"diagnostics/entropy": 1.0, "diagnostics/kl": 0.0, "diagnostics/stop": 1.0})

    assert of(store, "run").why == "signs of collapse: entropy"


def test_a_run_that_has_done_nothing_waits(store: Store, folder: Path) -> None:
    begin_run(folder / "run")

    assert of(store, "run").state == "waiting"


def test_what_is_known_is_read_again_when_a_file_is_another(store: Store, folder: Path) -> None:
    run = recorded_run(folder / "run", iterations=1, planned=3)
    before = store.mark(store.runs())
    assert of(store, "run").done == 1

    record_iteration(run, 1)
    after = store.mark(store.runs())
    assert of(store, "run").done == 2
    record_evaluation(run, 2)

    assert len({before, after, store.mark(store.runs())}) == 3
    assert of(store, "run").accuracies[0].iteration == 2


def test_a_torn_line_is_not_read(store: Store, folder: Path) -> None:
    run = recorded_run(folder / "run", iterations=2, planned=3)
    with run.metrics.open("a") as file:
        file.write('{"iteration": 2, "episodes/reward": 0.9')

    assert of(store, "run").done == 2


def test_the_list_can_be_searched_filtered_and_sorted(client: TestClient, folder: Path) -> None:
    recorded_run(folder / "best", iterations=3)
    recorded_run(folder / "worst", iterations=1)
    begin_run(folder / "idle")

    def names(**query: str) -> list[str]:
        page = Page(client.get("/", params=query).text)
        boxes = [attributes for tag, attributes in page.elements if tag == "input"]
        return [attributes["value"] or "" for attributes in boxes if attributes.get("name") == "run"]

    assert names() == ["best", "idle", "worst"]
    assert names(state="finished") == ["best", "worst"]
    assert names(search="BES") == ["best"]
    assert names(sort="accuracy") == ["best", "worst", "idle"]
    assert client.get("/", params={"sort": "nonsense"}).status_code == 400


def test_a_folder_that_cannot_be_read_is_a_row_that_says_so(client: TestClient, folder: Path) -> None:
    run = begin_run(folder / "run")
    (run.path / "config.json").write_text("{torn")

    page = client.get("/")

    assert page.status_code == 200
    assert "is no experiment" in page.text


def test_time_goes_on_between_records(store: Store, folder: Path) -> None:
    run = begin_run(folder / "run", planned=2)
    record_iteration(run, 0, wall_time=time.time() - 5)
    with run.locked():
        left = of(store, "run").seconds_left

    assert left is not None and left <= 7.9 - 5
    logging.getLogger("treetune").handlers.clear()
