"""What enters the experiment directory enters whole; one run at a time works in it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from treetune.runtime.directory import LOCK_TRIES, LOCK_TRY_S, ExperimentDirectory, metrics_row
from treetune.runtime.session import patience_for_last_start


@pytest.fixture
def directory(tmp_path: Path) -> ExperimentDirectory:
    return ExperimentDirectory(tmp_path / "experiment")


def checkpoint(directory: ExperimentDirectory, number: int, *, state: bool = True, trainer: bool = True):
    place = directory.checkpoint(number)
    place.mkdir(parents=True)
    if state:
        (place / "state.json").write_text("{}")
    if trainer:
        (place / "trainer").mkdir()
    return place


def test_a_second_run_is_refused_and_told_what_to_do(directory: ExperimentDirectory) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom pathlib import Path\n"
            "from treetune.runtime.directory import ExperimentDirectory\n"
            "with ExperimentDirectory(Path(sys.argv[1])).locked():\n"
            "    print('locked', flush=True)\n"
            "    sys.stdin.read()\n",
            str(directory.path),
        ],
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert directory.is_running()
        with (
            pytest.raises(ValueError, match=r"another process is at work on the run .*APP_EXPERIMENT_NAME"),
            directory.locked(),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()
    assert not directory.is_running(), "a lock dies with its holder"
    with directory.locked():
        assert directory.is_running()


def test_a_job_that_was_queued_again_waits_for_its_last_start_to_end(
    directory: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert patience_for_last_start() == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    had = []
    last = contextlib.ExitStack()
    last.enter_context(directory.locked())

    def start() -> None:
        with directory.locked("run", patience_for_last_start()):
            had.append(last_has_ended.is_set())

    last_has_ended = threading.Event()
    again = threading.Thread(target=start)
    again.start()
    again.join(3 * LOCK_TRIES * LOCK_TRY_S)
    assert again.is_alive(), "it neither gives up nor goes on"
    last_has_ended.set()
    last.close()
    again.join()
    assert had == [True]


def test_a_directory_that_is_not_there_is_not_running_and_has_no_checkpoints(
    directory: ExperimentDirectory,
) -> None:
    assert not directory.is_running()
    assert directory.checkpoints() == []
    assert directory.resumable() is None
    assert directory.read_metrics() == []
    assert not directory.path.exists()


def test_half_written_checkpoints_do_not_count(directory: ExperimentDirectory) -> None:
    checkpoint(directory, 2)
    checkpoint(directory, 4, state=False)
    checkpoint(directory, 10_000)
    partial = directory.checkpoint(6).with_name(".0006.partial")
    partial.mkdir()
    (partial / "state.json").write_text("{}")
    assert directory.checkpoints() == [2, 10_000]


def test_a_run_goes_on_from_the_newest_checkpoint_that_has_a_trainer(directory: ExperimentDirectory) -> None:
    checkpoint(directory, 2)
    checkpoint(directory, 4)
    checkpoint(directory, 6, trainer=False)
    assert directory.resumable() == 4


def test_a_line_of_metrics_that_a_crash_tore_is_left_out(directory: ExperimentDirectory) -> None:
    directory.path.mkdir()
    rows = [metrics_row(i, 1.5, {"train/loss": 0.123456789}) for i in range(2)]
    for row in rows:
        directory.append_metrics(row)
    with directory.metrics.open("a") as file:
        file.write('{"iteration": 2, "train/')
    assert directory.read_metrics() == rows
    assert rows[0] == {"iteration": 0, "wall_time": 1.5, "train/loss": 0.1234568}
