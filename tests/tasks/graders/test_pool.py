"""Promises of the grader pool:

* a grader that hangs, crashes or prints costs one answer its reward, and no other answer notices;
* equal answers to a problem are graded once;
* workers import nothing heavy, and are gone after the pool or its process, however it ended;
* a grader that waits for a service runs in threads, with a deadline for each call, and is asked no more while
  every call hangs;
* each problem is graded by its own grader.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from tests.tasks.graders.hostile_graders import Counting, Obedient, Unloadable
from treetune.exceptions import Unavailable, WorkerStartError
from treetune.tasks.graders.base import GradeBy, Grader, Isolation, ServiceContext
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Grade, Problem

PROBLEM = Problem(id="train/0", prompt="?", gold="7")
PATIENCE = 60.0
"""Seconds after which a test fails instead of waiting on."""


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool(Obedient(), workers=2, deadline=1.0) as pool:
        yield pool


def wait_until(condition: Callable[[], bool], description: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {description}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def workers_of(pid: int) -> list[int]:
    return [
        child.pid
        for child in psutil.Process(pid).children()
        if "processes.worker" in " ".join(child.cmdline())
    ]


def test_grades_come_in_the_order_of_the_answers_whatever_their_length(pool: GraderPool) -> None:
    answers = [*(f"answer {i}" for i in range(500)), "long " * 500_000]  # more than a pipe holds
    grades = pool.grade_many([(answer, PROBLEM) for answer in answers])
    assert [grade.extracted for grade in grades] == answers
    assert all(0 <= grade.seconds < PATIENCE for grade in grades)


@pytest.mark.parametrize(
    ("answer", "outcome", "message"),
    [
        ("sleep", "timeout", "1 s"),
        ("spin", "timeout", "1 s"),
        ("exit", "error", "exit code 3"),
        ("segfault", "error", "SIGSEGV"),
        ("allocate", "error", "MemoryError"),
        ("raise", "error", "ValueError: I don't like this answer"),
        ("quit", "error", "SystemExit: 4"),
    ],
)
def test_an_answer_on_which_the_grader_hangs_or_crashes_has_an_outcome_that_says_how(
    pool: GraderPool, answer: str, outcome: str, message: str
) -> None:
    grade = pool.submit(answer, PROBLEM).result(timeout=PATIENCE)
    assert (grade.outcome, grade.reward) == (outcome, 0.0)
    assert message in (grade.message or "")


def test_hostile_answers_leave_the_grades_of_their_neighbours_alone(pool: GraderPool) -> None:
    hostile = {10: "exit a", 11: "segfault a", 30: "sleep a", 50: "exit b", 90: "spin a", 91: "raise a"}
    answers = [hostile.get(i, f"neighbour {i}") for i in range(100)]
    grades = pool.grade_many([(answer, PROBLEM) for answer in answers])
    assert {i for i, grade in enumerate(grades) if grade.outcome != "ok"} == set(hostile)
    assert all(grade.extracted == answers[i] for i, grade in enumerate(grades) if i not in hostile)


def test_workers_import_nothing_heavy_and_what_a_grader_prints_disturbs_no_grade(pool: GraderPool) -> None:
    grades = pool.grade_many([(f"print {i}", PROBLEM) for i in range(5)])
    assert [grade.outcome for grade in grades] == ["ok"] * 5
    assert pool.submit("modules", PROBLEM).result(timeout=PATIENCE).extracted == ""


def test_equal_answers_to_a_problem_are_graded_once(tmp_path: Path) -> None:
    record = tmp_path / "record"
    other_problem = Problem(id="train/1", prompt="?", gold="8")
    with GraderPool(Counting(str(record)), workers=2) as pool:
        pairs = [("7", PROBLEM), ("7", other_problem), ("8", other_problem), ("7", PROBLEM)] * 20
        grades = pool.grade_many(pairs) + pool.grade_many(pairs)
    assert [grade.reward for grade in grades] == [1.0, 0.0, 1.0, 1.0] * 40
    assert sorted(record.read_text().splitlines()) == ["train/0 7", "train/1 7", "train/1 8"]


def test_the_memo_forgets_the_answer_that_was_not_asked_for_the_longest(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with GraderPool(Counting(str(record)), workers=1, memo_size=2) as pool:
        for answer in ["1", "2", "1", "3", "1", "2"]:
            pool.grade_many([(answer, PROBLEM)])
    assert record.read_text().split()[1::2] == ["1", "2", "3", "2"]


def test_a_grader_that_answers_inline_runs_in_this_process_and_need_not_be_sent_to_another() -> None:
    class Local(FinalAnswer):
        """Cannot be pickled: its class is within a function."""

    before = workers_of(psutil.Process().pid)
    with GraderPool(Local()) as pool:
        assert pool.submit("#7", PROBLEM).result(timeout=0).reward == 1.0
        assert [grade.reward for grade in pool.grade_many([("#7", PROBLEM), ("#8", PROBLEM)])] == [1.0, 0.0]
        assert workers_of(psutil.Process().pid) == before


def test_workers_and_what_they_started_are_gone_after_close(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    before = set(workers_of(psutil.Process().pid))
    with GraderPool(Obedient(), workers=2, deadline=PATIENCE) as pool:
        future = pool.submit(f"child {note}", PROBLEM)
        wait_until(lambda: note.exists() and bool(note.read_text()), "the grader has started a process")
        pids = [*set(workers_of(psutil.Process().pid)) - before, int(note.read_text())]
        assert len(pids) == 3
    wait_until(lambda: not any(map(is_alive, pids)), "all processes are gone")
    with pytest.raises(CancelledError):
        future.result(timeout=0)
    with pytest.raises(ValueError, match="closed"):
        pool.submit("7", PROBLEM)
    pool.close()


SCRIPT = """
import resource, sys
sys.path[:0] = {paths!r}
from tests.tasks.graders.hostile_graders import Obedient
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem
problem = Problem(id="train/0", prompt="?", gold="7")
"""


def start_program(script: str) -> subprocess.Popen[str]:
    program = SCRIPT.format(paths=[path for path in sys.path if path]) + textwrap.dedent(script)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("answer", ["answer", "sleep", "spin"])
def test_workers_are_gone_after_their_parent_was_killed(answer: str) -> None:
    script = f"""
        with GraderPool(Obedient(), workers=2, deadline=600) as pool:
            print(pool.submit("pid", problem).result().extracted, flush=True)
            pool.submit({answer!r}, problem)
            input()
    """
    with start_program(script) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip().isdigit(), "a worker has graded"
        workers = workers_of(parent.pid)
        assert len(workers) == 2
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, workers)), "the workers are gone")


def test_a_run_that_forgets_to_close_its_pool_ends_and_leaves_no_workers() -> None:
    script = """
        pool = GraderPool(Obedient(), workers=1, deadline=600)
        print(pool.submit("pid", problem).result().extracted)
    """
    with start_program(script) as run:
        printed, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, errors
    wait_until(lambda: not is_alive(int(printed)), "the worker is gone")


def test_workers_keep_within_a_hard_limit_on_address_space_below_the_pools_own() -> None:
    script = """
        resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
        with GraderPool(Obedient(), workers=1, deadline=20.0, memory_gib=8.0) as pool:
            print(pool.submit("answer", problem).result(60).outcome)
    """
    with start_program(script) as run:
        printed, errors = run.communicate(timeout=90)
    assert printed.strip() == "ok", errors


def test_a_grader_that_workers_cannot_load_raises_where_its_grade_is_awaited() -> None:
    with GraderPool(Unloadable(), workers=1) as pool:
        future = pool.submit("7", PROBLEM)
        with pytest.raises(WorkerStartError, match="a_module_that_nobody_has"):
            future.result(timeout=PATIENCE)
        with pytest.raises(WorkerStartError, match="a_module_that_nobody_has"):
            pool.submit("8", PROBLEM)


def test_a_grader_that_cannot_be_sent_and_sizes_that_make_no_sense_are_refused_at_once() -> None:
    class Local(Obedient):
        pass

    with pytest.raises(ValueError, match="top level of a module"):
        GraderPool(Local())
    for wrong in ({"workers": 0}, {"deadline": 0.0}, {"memo_size": -1}):
        with pytest.raises(ValueError, match="grader pool needs"):
            GraderPool(FinalAnswer(), **wrong)  # type: ignore[arg-type]


# Graders that wait for a service


@dataclass(frozen=True, eq=False)
class Service(Grader):
    """Misbehave as the answer says, and remember all answers; "meet" waits until four calls meet."""

    isolation: ClassVar[Isolation] = "service"
    deadline: float | None = 30.0
    concurrency: int = 4
    asked: list[str] = field(default_factory=list)
    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(4))
    released: threading.Event = field(default_factory=threading.Event)

    def grade(self, response: str, problem: Problem) -> Grade:
        self.asked.append(response)
        match response.split()[0]:
            case "hang":
                self.released.wait(PATIENCE)
            case "meet":
                self.together.wait(PATIENCE)
            case "down":
                raise Unavailable("the judge is down")
            case "refused":
                raise ConnectionRefusedError("nobody listens there")
            case "wrong":
                raise ValueError("no such answer")
        return Grade(reward=float(problem.gold in response), outcome="ok")


def test_services_end_if_another_part_of_the_grader_is_refused() -> None:
    closed: list[str] = []

    class RunningService:
        concurrency = 1

        def close(self) -> None:
            closed.append("service")

    class Served(Service):
        def serve(self, context: ServiceContext, grade_by: GradeBy) -> Any:
            return RunningService()

    class Local(Obedient):
        pass

    with pytest.raises(ValueError, match="top level of a module"):
        GraderPool(ByGold({"7": Served(), "8": Local()}))
    assert closed == ["service"]


def outcomes(pool: GraderPool, *answers: str) -> list[str]:
    futures = [pool.submit(answer, PROBLEM) for answer in answers]
    return [future.result(timeout=PATIENCE).outcome for future in futures]


def test_calls_of_a_service_run_side_by_side_and_a_missing_service_leaves_answers_ungraded() -> None:
    with GraderPool(Service()) as pool:
        assert outcomes(pool, *(f"meet {i}" for i in range(4))) == ["ok"] * 4
        grade = pool.submit("down", PROBLEM).result(timeout=PATIENCE)
        assert (grade.outcome, grade.message, grade.correct) == ("unavailable", "the judge is down", False)
        assert outcomes(pool, "refused", "wrong", "7") == ["unavailable", "error", "ok"]


def test_a_call_that_hangs_is_given_up_at_its_deadline_and_delays_no_other() -> None:
    service = Service(deadline=0.3, concurrency=1)
    with GraderPool(service, deadline=PATIENCE) as pool:
        began = time.monotonic()
        assert outcomes(pool, "hang 1", "7", "hang 2", "7 again") == ["unavailable", "ok"] * 2
        assert time.monotonic() - began < PATIENCE / 2
        service.released.set()


def test_a_service_in_which_every_call_hangs_is_no_longer_asked() -> None:
    service = Service(deadline=0.05, concurrency=2)
    with GraderPool(service) as pool:
        assert outcomes(pool, *(f"hang {i}" for i in range(30))) == ["unavailable"] * 30
        assert len(service.asked) < 20
        service.released.set()
        while outcomes(pool, "7") != ["ok"]:
            time.sleep(0.01)


def test_an_ungraded_answer_is_asked_again_and_a_graded_or_decided_one_is_not() -> None:
    service = Service()
    with GraderPool(service) as pool:
        for _ in range(3):
            assert outcomes(pool, "down", "7") == ["unavailable", "ok"]
        assert pool.submit("7 decided", PROBLEM, decided=True).result(timeout=0).outcome == "no_answer"
    assert sorted(service.asked) == ["7", "down", "down", "down"]
    with GraderPool(FinalAnswer()) as pool:  # a rule costs nothing, so it still extracts the answer
        assert pool.submit("#7", PROBLEM, decided=True).result(timeout=0).extracted == "7"


@dataclass(frozen=True, eq=False)
class ByGold(Grader):
    """A grader for each gold."""

    graders: dict[str, Grader]

    def of(self, problem: Problem) -> Grader:
        return self.graders[problem.gold]

    def parts(self) -> list[Grader]:
        return list(self.graders.values())


def test_each_problem_is_graded_by_its_own_grader_in_the_isolation_of_that_grader(tmp_path: Path) -> None:
    record = tmp_path / "record"
    service = Service()
    graders = {"7": service, "8": Counting(str(record)), "9": FinalAnswer(), "10": Obedient(deadline=0.5)}
    answers = {"7": "#7", "8": "#8", "9": "#9", "10": "sleep"}
    pairs = [(answers[gold], Problem(id="the same", prompt="?", gold=gold)) for gold in graders]
    with GraderPool(ByGold(graders), workers=1, deadline=PATIENCE) as pool:
        grades = pool.grade_many(pairs)
    assert [(grade.outcome, grade.reward) for grade in grades] == [
        ("ok", 1.0),
        ("ok", 0.0),
        ("ok", 1.0),
        ("timeout", 0.0),
    ]
    assert (record.read_text(), service.asked) == ("the same #8\n", ["#7"])
