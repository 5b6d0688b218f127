"""One run at a time works in a directory, one process at a time measures a set, a dead one's work is taken
over; what enters the directory enters whole."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from treetune.runtime import claims as module
from treetune.runtime.claims import Claim, Claims
from treetune.runtime.directory import LOCK_TRIES, LOCK_TRY_S, ExperimentDirectory, metrics_row
from treetune.runtime.machine import processes_of_the_run
from treetune.runtime.session import patience_for_last_start

ROOT = Path(__file__).parents[2]


@contextmanager
def killed_holder(program: str, folder: Path) -> Iterator[str]:
    """What a process printed that has something of the folder's until this ends, when it is killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        env={"PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        yield holder.stdout.readline()
    finally:
        holder.kill()
        holder.communicate()


# The directory


@pytest.fixture
def directory(tmp_path: Path) -> ExperimentDirectory:
    return ExperimentDirectory(tmp_path / "experiment")


def checkpoint(
    directory: ExperimentDirectory, number: int, *, state: bool = True, trainer: bool = True
) -> None:
    place = directory.checkpoint(number)
    place.mkdir(parents=True)
    if state:
        (place / "state.json").write_text("{}")
    if trainer:
        (place / "trainer").mkdir()


LOCKING = (
    "import sys\nfrom pathlib import Path\nfrom treetune.runtime.directory import ExperimentDirectory\n"
    "with ExperimentDirectory(Path(sys.argv[1])).locked():\n"
    "    print('locked', flush=True)\n    sys.stdin.read()\n"
)


def test_a_second_run_is_refused_and_told_what_to_do(directory: ExperimentDirectory) -> None:
    with killed_holder(LOCKING, directory.path) as printed:
        assert printed == "locked\n"
        assert directory.is_running()
        with (
            pytest.raises(
                ValueError, match=r"another process holds the lock of the run .*APP_EXPERIMENT_NAME"
            ),
            directory.locked(),
        ):
            pass
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


def test_checkpoints_are_those_that_are_whole_and_a_run_goes_on_from_the_newest_with_a_trainer(
    directory: ExperimentDirectory,
) -> None:
    assert not directory.is_running()
    assert (directory.checkpoints(), directory.resumable(), directory.read_metrics()) == ([], None, [])
    assert not directory.path.exists()
    checkpoint(directory, 2)
    checkpoint(directory, 4, state=False)
    checkpoint(directory, 10_000, trainer=False)
    partial = directory.checkpoint(6).with_name(".0006.partial")
    (partial / "trainer").mkdir(parents=True)
    (partial / "state.json").write_text("{}")
    assert (directory.checkpoints(), directory.resumable()) == ([2, 10_000], 2)
    checkpoint(directory, 8)
    assert directory.resumable() == 8


def test_a_line_of_metrics_that_a_crash_tore_is_left_out(directory: ExperimentDirectory) -> None:
    directory.path.mkdir()
    rows = [metrics_row(i, 1.5, {"train/loss": 0.123456789}) for i in range(2)]
    for row in rows:
        directory.append_metrics(row)
    with directory.metrics.open("a") as file:
        file.write('{"iteration": 2, "train/')
    assert directory.read_metrics() == rows
    assert rows[0] == {"iteration": 0, "wall_time": 1.5, "train/loss": 0.1234568}


# Claims


def claimed_elsewhere(folder: Path, number: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{number:04d}"
    file.write_text(json.dumps({"machine": "another", "host": "node7", "pid": 12, "started": "1"}))
    return file


def taken(claim: Claim | None) -> Claim:
    assert claim is not None
    return claim


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_what_one_holds_another_does_not_get_until_it_is_released(tmp_path: Path) -> None:
    first = taken(Claims().take(tmp_path / "set"))
    assert Claims().take(tmp_path / "set") is None
    assert f"process {os.getpid()} on" in Claims().holder(tmp_path / "set")
    assert taken(Claims().take(tmp_path / "another set")).number == 0
    first.release()
    first.release()
    assert taken(Claims().take(tmp_path / "set")).number == 1


def test_of_many_who_take_at_once_one_gets_it(tmp_path: Path) -> None:
    for round_ in range(20):
        with ThreadPoolExecutor(8) as pool:
            claims = [claim for claim in pool.map(lambda _: Claims().take(tmp_path), range(8)) if claim]
        assert [claim.number for claim in claims] == [round_]
        claims[0].release()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still."""
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    return clock


def test_a_holder_on_another_machine_is_dead_when_its_file_has_not_changed_for_the_lease(
    tmp_path: Path, now: list[float]
) -> None:
    claims = Claims(lease_s=10, beat_s=1)
    file = claimed_elsewhere(tmp_path / "set")
    os.utime(file, (5, 5))  # that machine's clock is far behind
    assert claims.take(tmp_path / "set") is None
    assert claims.holder(tmp_path / "set") == "process 12 on node7"
    now[0] += 9
    assert claims.take(tmp_path / "set") is None
    os.utime(file, (6, 6))
    for _ in range(2):
        now[0] += 9
        assert claims.take(tmp_path / "set") is None, "it has beaten since"
        now[0] += 1
    now[0] += 1
    assert taken(claims.take(tmp_path / "set")).number == 1


def test_a_claim_that_its_maker_never_wrote_to_ends_with_the_lease(tmp_path: Path, now: list[float]) -> None:
    claims = Claims(lease_s=10, beat_s=1)
    (tmp_path / "0003").touch()
    assert claims.take(tmp_path) is None
    now[0] += 11
    assert taken(claims.take(tmp_path)).number == 4


def test_a_holder_shows_signs_of_life_and_learns_that_it_was_taken_over(tmp_path: Path) -> None:
    claim = taken(Claims(beat_s=0.01).take(tmp_path))
    os.utime(claim.file, (5, 5))
    assert until(lambda: claim.file.stat().st_mtime > 5)
    assert not claim.is_lost()
    claimed_elsewhere(tmp_path, number=1)
    assert claim.is_lost()
    claim.release()
    assert Claims().take(tmp_path) is None, "a late release frees nothing of its successor's"


CLAIMING = (
    "import sys\nfrom pathlib import Path\nfrom treetune.runtime.claims import Claims\n"
    "claim = Claims().take(Path(sys.argv[1]))\nprint(claim.number, flush=True)\nsys.stdin.read()\n"
)


def test_a_killed_holder_on_this_machine_is_succeeded_at_once(tmp_path: Path) -> None:
    with killed_holder(CLAIMING, tmp_path) as printed:
        assert printed == "0\n"
        assert Claims().take(tmp_path) is None
    assert taken(Claims().take(tmp_path)).number == 1


# The machine


def test_all_ranks_of_a_launcher_and_what_they_start_are_one_run() -> None:
    rank = "import subprocess; child = subprocess.Popen(['cat']); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sibling:
        assert sibling.stdin is not None and sibling.stdout is not None
        grandchild = int(sibling.stdout.readline())
        found = {process.pid for process in processes_of_the_run({})}
        sibling.stdin.close()
    assert {os.getpid(), sibling.pid, grandchild} <= found
    assert os.getppid() not in found


@pytest.mark.parametrize(
    "environment",
    [
        {"LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},  # torchrun's
        {"LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    ],
)
def test_a_rank_counts_from_its_launcher(environment: dict[str, str]) -> None:
    assert processes_of_the_run(environment)[0] == psutil.Process(os.getppid())


def test_a_process_without_a_launcher_counts_from_itself_after_it_has_joined_the_ranks() -> None:
    """`Ranks.join` sets these variables. The parent is the user's shell, which may run other programs."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    assert processes_of_the_run(environment)[0] == psutil.Process(os.getpid())
