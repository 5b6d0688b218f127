"""Locks and claims: which process works in a directory, and which measures an evaluation set.

Promises that these tests hold:

* One run at a time has the lock of a directory, and a killed one loses it.
* One process at a time has the claim of an evaluation set; when it dies, on any machine, the next takes over.
* Only whole checkpoints and whole lines of metrics are read.
* The processes of a run are those of its launcher.
"""

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

from treetune.exceptions import FolderRefused
from treetune.runtime import claims as module
from treetune.runtime.claims import Claim, Claims
from treetune.runtime.directory import LOCK_TRIES, LOCK_TRY_S, ExperimentDirectory, metrics_row
from treetune.runtime.machine import processes_of_the_run
from treetune.runtime.session import patience_for_last_start

ROOT = Path(__file__).parents[2]


@contextmanager
def killed_holder(program: str, folder: Path) -> Iterator[str]:
    """Runs a program on a folder, yields the line that it prints, and kills it at the end."""
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
    folder = directory.checkpoint_folder(number)
    folder.mkdir(parents=True)
    if state:
        (folder / "state.json").write_text("{}")
    if trainer:
        (folder / "trainer").mkdir()


LOCKING_PROGRAM = (
    "import sys\nfrom pathlib import Path\nfrom treetune.runtime.directory import ExperimentDirectory\n"
    "with ExperimentDirectory(Path(sys.argv[1])).locked():\n"
    "    print('locked', flush=True)\n    sys.stdin.read()\n"
)


def test_a_second_run_in_a_directory_is_refused_with_a_remedy(directory: ExperimentDirectory) -> None:
    with killed_holder(LOCKING_PROGRAM, directory.path) as printed:
        assert printed == "locked\n"
        assert directory.is_running()
        with (
            pytest.raises(
                FolderRefused, match=r"another process holds the lock of the run .*APP_EXPERIMENT_NAME"
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
    locked_after_the_end = []
    lock_of_last_start = contextlib.ExitStack()
    lock_of_last_start.enter_context(directory.locked())
    last_start_has_ended = threading.Event()

    def start() -> None:
        with directory.locked("run", patience_for_last_start()):
            locked_after_the_end.append(last_start_has_ended.is_set())

    second_start = threading.Thread(target=start)
    second_start.start()
    second_start.join(3 * LOCK_TRIES * LOCK_TRY_S)
    assert second_start.is_alive(), "it neither gives up nor goes on"
    last_start_has_ended.set()
    lock_of_last_start.close()
    second_start.join()
    assert locked_after_the_end == [True]


def test_only_whole_checkpoints_count_and_a_run_resumes_from_the_newest_with_a_trainer(
    directory: ExperimentDirectory,
) -> None:
    assert not directory.is_running()
    assert (directory.checkpoints(), directory.newest_resumable(), directory.read_metrics()) == ([], None, [])
    assert not directory.path.exists()
    checkpoint(directory, 2)
    checkpoint(directory, 4, state=False)
    checkpoint(directory, 10_000, trainer=False)
    partial = directory.checkpoint_folder(6).with_name(".0006.partial")
    (partial / "trainer").mkdir(parents=True)
    (partial / "state.json").write_text("{}")
    assert (directory.checkpoints(), directory.newest_resumable()) == ([2, 10_000], 2)
    checkpoint(directory, 8)
    assert directory.newest_resumable() == 8


def test_a_line_of_metrics_that_a_crash_cut_off_is_left_out(directory: ExperimentDirectory) -> None:
    directory.path.mkdir()
    rows = [metrics_row(i, 1.5, {"train/loss": 0.123456789}) for i in range(2)]
    for row in rows:
        directory.append_metrics(row)
    with directory.metrics_file.open("a") as file:
        file.write('{"iteration": 2, "train/')
    assert directory.read_metrics() == rows
    assert rows[0] == {"iteration": 0, "wall_time": 1.5, "train/loss": 0.1234568}


# Claims


def write_claim_of_another_machine(folder: Path, number: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{number:04d}"
    file.write_text(json.dumps({"machine": "another", "host": "node7", "pid": 12, "started": "1"}))
    return file


def not_none(claim: Claim | None) -> Claim:
    assert claim is not None
    return claim


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_claim_is_exclusive_until_it_is_released(tmp_path: Path) -> None:
    first = not_none(Claims().take(tmp_path / "set"))
    assert Claims().take(tmp_path / "set") is None
    assert f"process {os.getpid()} on" in Claims().holder(tmp_path / "set")
    assert not_none(Claims().take(tmp_path / "another set")).number == 0
    first.release()
    first.release()
    assert not_none(Claims().take(tmp_path / "set")).number == 1


def test_one_of_many_simultaneous_threads_gets_the_claim(tmp_path: Path) -> None:
    for round_ in range(20):
        with ThreadPoolExecutor(8) as pool:
            claims = [claim for claim in pool.map(lambda _: Claims().take(tmp_path), range(8)) if claim]
        assert [claim.number for claim in claims] == [round_]
        claims[0].release()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time, which stands still unless a test changes it."""
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    return clock


def test_a_holder_on_another_machine_is_dead_when_its_file_has_not_changed_for_the_lease(
    tmp_path: Path, now: list[float]
) -> None:
    claims = Claims(lease_s=10, beat_s=1)
    file = write_claim_of_another_machine(tmp_path / "set")
    os.utime(file, (5, 5))  # the clock of the other machine is far behind
    assert claims.take(tmp_path / "set") is None
    assert claims.holder(tmp_path / "set") == "process 12 on node7"
    now[0] += 9
    assert claims.take(tmp_path / "set") is None
    os.utime(file, (6, 6))
    for _ in range(2):
        now[0] += 9
        assert claims.take(tmp_path / "set") is None, "its file has changed since"
        now[0] += 1
    now[0] += 1
    assert not_none(claims.take(tmp_path / "set")).number == 1


def test_a_claim_whose_file_stays_empty_ends_with_the_lease(tmp_path: Path, now: list[float]) -> None:
    claims = Claims(lease_s=10, beat_s=1)
    (tmp_path / "0003").touch()
    assert claims.take(tmp_path) is None
    now[0] += 11
    assert not_none(claims.take(tmp_path)).number == 4


def test_a_holder_renews_its_claim_and_notices_a_takeover(tmp_path: Path) -> None:
    claim = not_none(Claims(beat_s=0.01).take(tmp_path))
    os.utime(claim.file, (5, 5))
    assert until(lambda: claim.file.stat().st_mtime > 5)
    assert not claim.is_lost()
    write_claim_of_another_machine(tmp_path, number=1)
    assert claim.is_lost()
    claim.release()
    assert Claims().take(tmp_path) is None, "a late release does not free the claim of the successor"


CLAIMING_PROGRAM = (
    "import sys\nfrom pathlib import Path\nfrom treetune.runtime.claims import Claims\n"
    "claim = Claims().take(Path(sys.argv[1]))\nprint(claim.number, flush=True)\nsys.stdin.read()\n"
)


def test_the_claim_of_a_killed_process_on_this_machine_is_free_at_once(tmp_path: Path) -> None:
    with killed_holder(CLAIMING_PROGRAM, tmp_path) as printed:
        assert printed == "0\n"
        assert Claims().take(tmp_path) is None
    assert not_none(Claims().take(tmp_path)).number == 1


# The machine


def test_all_ranks_of_a_launcher_and_what_they_start_are_one_run() -> None:
    rank = "import subprocess; child = subprocess.Popen(['cat']); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sibling:
        assert sibling.stdin is not None and sibling.stdout is not None
        grandchild = int(sibling.stdout.readline())
        pids = {process.pid for process in processes_of_the_run({})}
        sibling.stdin.close()
    assert {os.getpid(), sibling.pid, grandchild} <= pids
    assert os.getppid() not in pids


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
    """`Ranks.join` sets these variables. The parent is the user's shell, which may run other programs too."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    assert processes_of_the_run(environment)[0] == psutil.Process(os.getpid())
