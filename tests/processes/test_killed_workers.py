"""A process that somebody else kills while it works on an answer costs no reward: the work is done again.
Deaths count against the answer or the start at which they happen, and not against the run."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil
import pytest

from treetune.domains.sandbox.bubblewrap import Bubblewrap
from treetune.exceptions import WorkerStartError
from treetune.processes.worker import Servant, load_servant
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Grade, Problem

PROBLEM = Problem(id="train/0", prompt="?", gold="7")


class Marking(Grader):
    """Leaves its process's number in a file, once for each time that it is asked, and is slow the first."""

    def grade(self, response: str, problem: Problem) -> Grade:
        with Path(response).open("a") as file:
            print(os.getpid(), file=file)
        time.sleep(30.0 if len(Path(response).read_text().split()) == 1 else 0.0)
        return Grade(reward=1.0, extracted="7", outcome="correct")


class DyingAt(Grader):
    """Notes each process that loads it in a file. The processes with some numbers die while they load it, and
    those with some other numbers die while they grade. If `raises`, loading raises an exception instead."""

    def __init__(
        self, notes: Path, load: Collection[int], grade: Collection[int] = (), raises: bool = False
    ) -> None:
        self.notes, self.load, self.grade_at, self.raises = notes, load, grade, raises

    def prepare(self) -> None:
        with self.notes.open("a") as file:
            print("loads", file=file)
        self.number = len(self.notes.read_text().split())
        if self.number in self.load and self.raises:
            raise OSError("Stale file handle")
        if self.number in self.load:
            os.kill(os.getpid(), signal.SIGKILL)

    def grade(self, response: str, problem: Problem) -> Grade:
        if self.number in self.grade_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return Grade(reward=1.0, extracted="7", outcome="correct")


def kill_when(victim: Callable[[], int | None]) -> threading.Thread:
    """Kills the process as soon as there is one."""

    def work() -> None:
        while (pid := victim()) is None:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_an_answer_whose_worker_was_killed_is_graded_by_the_next_one(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    kill_when(lambda: int(text) if marks.is_file() and (text := marks.read_text().strip()) else None)
    with GraderPool(Marking(), workers=1, deadline=60.0) as pool:
        (grade,) = pool.grade_many([(str(marks), PROBLEM)])
    assert (grade.outcome, grade.reward) == ("correct", 1.0)
    assert len(set(marks.read_text().split())) == 2


@pytest.mark.parametrize("raises", [False, True])
def test_starts_that_fail_with_a_success_in_between_do_not_end_the_run(raises: bool, tmp_path: Path) -> None:
    grader = DyingAt(tmp_path / "notes", load=[1, 3], grade=[2], raises=raises)
    with GraderPool(grader, workers=1, deadline=60.0) as pool:
        grades = pool.grade_many([("7", PROBLEM), ("8", PROBLEM)])
    assert [grade.outcome for grade in grades] == ["correct", "correct"]
    assert len(grader.notes.read_text().split()) == 4


@pytest.mark.parametrize(
    ("raises", "reason"),
    [
        (False, "SIGKILL"),
        (True, "two worker processes in a row .* cannot load .*: OSError: Stale"),
    ],
)
def test_a_grader_whose_loading_fails_in_each_process_is_given_up_after_two(
    raises: bool, reason: str, tmp_path: Path
) -> None:
    grader = DyingAt(tmp_path / "notes", load=range(1, 100), raises=raises)
    with (
        GraderPool(grader, workers=1, deadline=60.0) as pool,
        pytest.raises(WorkerStartError, match=reason),
    ):
        pool.grade_many([("7", PROBLEM)])
    assert len(grader.notes.read_text().split()) == 2


class NeedsMemory(Servant):
    """Does not fit into memory."""

    def prepare(self) -> None:
        raise MemoryError


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (
            resource.RLIM_INFINITY,
            r"its address space has no limit, so the machine may have too little memory",
        ),
        (3 * 2**30, r"the process may have 3.0 GiB of address space: raise `ulimit -v`"),
    ],
)
def test_loading_without_enough_memory_names_the_limit_if_there_is_one(
    limit: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    with pytest.raises(SystemExit):
        load_servant(pickle.dumps(NeedsMemory()), lambda *message: messages.append(message))
    assert messages == [("failed", f"MemoryError:  ({reason})")]


def test_a_process_that_the_kernel_can_not_end_keeps_no_grade_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a hung disk, where SIGKILL has no effect."""

    class Unending(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)

    monkeypatch.setattr(subprocess, "Popen", Unending)
    with GraderPool(Marking(), workers=1, deadline=0.5) as pool:
        grade = pool.submit(str(tmp_path / "marks"), PROBLEM).result(timeout=60)
    assert grade.outcome == "timeout"


@pytest.mark.skipif(bool(Bubblewrap().missing()), reason="bubblewrap can't be used here")
@pytest.mark.parametrize("inner", [False, True], ids=["bubblewrap", "the first process within"])
def test_a_program_whose_sandbox_was_killed_is_run_again(inner: bool) -> None:
    before = psutil.Process().children(recursive=True)  # what earlier tests keep, such as a scorer's sandbox

    def victim() -> int | None:
        children = psutil.Process().children(recursive=True)
        family = [child for child in children if child not in before]  # bwrap, the first within, the program
        return family[inner].pid if len(family) == 3 else None

    killing = kill_when(victim)
    outcome = Bubblewrap().run("import time\ntime.sleep(1)\nprint('done')")
    killing.join(timeout=60)
    assert not killing.is_alive(), "it was never seen at work"
    assert (outcome.stdout, outcome.exit) == ("done\n", 0)
