from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from tests.tasks.hostile_graders import Counting, Obedient, Unloadable
from treetune.processes.pool import WorkerStartError
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem

PROBLEM = Problem(id="train/0", prompt="?", gold="7")
PATIENCE = 60.0
"""Seconds after which a test fails instead of waiting on."""


@pytest.fixture
def pool() -> Iterator[GraderPool]:
    with GraderPool(Obedient(), workers=2, deadline=1.0) as pool:
        yield pool


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def workers_of(pid: int) -> list[int]:
    return [
        child.pid
        for child in psutil.Process(pid).children()
        if "processes.worker" in " ".join(child.cmdline())
    ]


def test_grades_come_in_the_order_of_the_answers(pool: GraderPool) -> None:
    answers = [f"answer {i}" for i in range(500)]
    grades = pool.grade_many([(answer, PROBLEM) for answer in answers])
    assert [grade.extracted for grade in grades] == answers


def test_a_grader_that_answers_inline_need_not_be_sent_to_a_process() -> None:
    class Local(FinalAnswer):
        """Cannot be pickled: its class is within a function."""

    with GraderPool(Local()) as pool:
        assert pool.submit("# 7", PROBLEM).result(timeout=PATIENCE).correct


@pytest.mark.parametrize("answer", ["sleep", "spin"])
def test_an_answer_on_which_the_grader_hangs_is_a_timeout(pool: GraderPool, answer: str) -> None:
    grade = pool.submit(answer, PROBLEM).result(timeout=PATIENCE)
    assert (grade.outcome, grade.reward) == ("timeout", 0.0)
    assert grade.message is not None
    assert "1 s" in grade.message


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("exit", "exit code 3"),
        ("segfault", "SIGSEGV"),
        ("allocate", "MemoryError"),
        ("raise", "ValueError: I don't like this answer"),
        ("quit", "SystemExit: 4"),
    ],
)
def test_an_answer_on_which_the_grader_crashes_is_an_error_that_says_how(
    pool: GraderPool, answer: str, told: str
) -> None:
    grade = pool.submit(answer, PROBLEM).result(timeout=PATIENCE)
    assert (grade.outcome, grade.reward) == ("error", 0.0)
    assert grade.message is not None
    assert told in grade.message


def test_hostile_answers_leave_the_grades_of_their_neighbours_alone(pool: GraderPool) -> None:
    hostile = {10: "exit", 11: "segfault", 30: "sleep", 50: "exit 1", 90: "spin", 91: "raise"}
    answers = [hostile.get(i, f"answer {i}") for i in range(100)]
    grades = pool.grade_many([(answer, PROBLEM) for answer in answers])
    bad = {i for i, grade in enumerate(grades) if grade.outcome != "ok"}
    assert bad == set(hostile)
    assert all(grade.extracted == answers[i] for i, grade in enumerate(grades) if i not in bad)


def test_what_a_grader_prints_does_not_disturb_its_grades(pool: GraderPool) -> None:
    grades = pool.grade_many([(f"print {i}", PROBLEM) for i in range(5)])
    assert [grade.outcome for grade in grades] == ["ok"] * 5


def test_an_answer_longer_than_a_pipe_holds_is_graded(pool: GraderPool) -> None:
    answer = "long " * 500_000
    assert pool.submit(answer, PROBLEM).result(timeout=PATIENCE).extracted == answer


def test_workers_import_nothing_heavy(pool: GraderPool) -> None:
    assert pool.submit("modules", PROBLEM).result(timeout=PATIENCE).extracted == ""


def test_equal_answers_to_a_problem_are_graded_once(tmp_path: Path) -> None:
    record = tmp_path / "record"
    other = Problem(id="train/1", prompt="?", gold="8")
    with GraderPool(Counting(str(record)), workers=2) as pool:
        pairs = [("7", PROBLEM), ("7", other), ("8", other), ("7", PROBLEM)] * 20
        grades = pool.grade_many(pairs) + pool.grade_many(pairs)
    assert [grade.reward for grade in grades] == [1.0, 0.0, 1.0, 1.0] * 40
    assert sorted(record.read_text().splitlines()) == ["train/0 7", "train/1 7", "train/1 8"]


def test_the_memo_forgets_what_was_not_asked_for_longest(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with GraderPool(Counting(str(record)), workers=1, memo_size=2) as pool:
        for answer in ["1", "2", "1", "3", "1", "2"]:
            pool.grade_many([(answer, PROBLEM)])
    assert record.read_text().split()[1::2] == ["1", "2", "3", "2"]


def test_a_grader_that_needs_no_isolation_runs_in_this_process() -> None:
    with GraderPool(FinalAnswer()) as pool:
        assert pool.submit("#7", PROBLEM).result(timeout=0).reward == 1.0
        assert [grade.reward for grade in pool.grade_many([("#7", PROBLEM), ("#8", PROBLEM)])] == [1.0, 0.0]
        assert not workers_of(psutil.Process().pid)


def test_workers_and_what_they_started_are_gone_after_close(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with GraderPool(Obedient(), workers=2, deadline=PATIENCE) as pool:
        future = pool.submit(f"child {note}", PROBLEM)
        until(lambda: note.exists() and bool(note.read_text()), "the grader has started a process")
        pids = [*workers_of(psutil.Process().pid), int(note.read_text())]
        assert len(pids) == 3
    until(lambda: not any(map(alive, pids)), "all processes are gone")
    with pytest.raises(CancelledError):
        future.result(timeout=0)
    with pytest.raises(ValueError, match="closed"):
        pool.submit("7", PROBLEM)
    pool.close()


@pytest.mark.parametrize("answer", ["answer", "sleep", "spin"])
def test_workers_are_gone_after_their_parent_was_killed(answer: str) -> None:
    script = f"""
        from tests.tasks.hostile_graders import Obedient
        from treetune.tasks.graders.pool import GraderPool
        from treetune.vocabulary import Problem
        problem = Problem(id="train/0", prompt="?", gold="7")
        with GraderPool(Obedient(), workers=2, deadline=600) as pool:
            print(pool.submit("pid", problem).result().extracted, flush=True)
            pool.submit({answer!r}, problem)
            input()
    """
    paths = [path for path in sys.path if path]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{textwrap.dedent(script)}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip().isdigit(), "a worker has graded"
        workers = workers_of(parent.pid)
        assert len(workers) == 2
        parent.send_signal(signal.SIGKILL)
        until(lambda: not any(map(alive, workers)), "the workers are gone")


def test_a_run_that_forgets_to_close_its_pool_ends_and_leaves_no_workers() -> None:
    script = """
        from tests.tasks.hostile_graders import Obedient
        from treetune.tasks.graders.pool import GraderPool
        from treetune.vocabulary import Problem
        pool = GraderPool(Obedient(), workers=1, deadline=600)
        print(pool.submit("pid", Problem(id="train/0", prompt="?", gold="7")).result().extracted)
    """
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{textwrap.dedent(script)}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    until(lambda: not alive(int(done.stdout)), "the worker is gone")


def test_a_grader_that_workers_cannot_load_is_told_to_who_waits() -> None:
    with GraderPool(Unloadable(), workers=1) as pool:
        future = pool.submit("7", PROBLEM)
        with pytest.raises(WorkerStartError, match="a_module_that_nobody_has"):
            future.result(timeout=PATIENCE)
        with pytest.raises(WorkerStartError, match="a_module_that_nobody_has"):
            pool.submit("8", PROBLEM)


def test_a_grader_that_cannot_be_sent_to_a_worker_is_refused_at_once() -> None:
    class Local(Obedient):
        pass

    with pytest.raises(ValueError, match="top level of a module"):
        GraderPool(Local())


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"deadline": 0.0}, {"memo_size": -1}])
def test_sizes_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="grader pool needs"):
        GraderPool(FinalAnswer(), **wrong)


def test_workers_keep_within_a_hard_limit_on_address_space_below_the_pools_own() -> None:
    program = textwrap.dedent(
        """
        import resource
        from tests.tasks.hostile_graders import Obedient
        from treetune.tasks.graders.pool import GraderPool
        from treetune.vocabulary import Problem

        resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
        with GraderPool(Obedient(), workers=1, deadline=20.0, memory_gib=8.0) as pool:
            print(pool.submit("answer", Problem(id="a", prompt="", gold="7")).result(60).outcome)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "ok", done.stderr
