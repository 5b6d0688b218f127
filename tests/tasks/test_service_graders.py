"""Graders that wait for something outside are called in threads, and nobody waits for them too long."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import ClassVar

from tests.tasks.hostile_graders import Counting, Obedient
from treetune.tasks.graders.base import Grader, Isolation, Unavailable
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Grade, Problem

PROBLEM = Problem(id="train/0", prompt="?", gold="7")
PATIENCE = 60.0


@dataclass(frozen=True, eq=False)
class Service(Grader):
    """Does what the answer says; remembers what it was asked, and how many calls there were at once."""

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


def outcomes(pool: GraderPool, *answers: str) -> list[str]:
    futures = [pool.submit(answer, PROBLEM) for answer in answers]
    return [future.result(timeout=PATIENCE).outcome for future in futures]


def test_calls_of_a_service_run_side_by_side() -> None:
    with GraderPool(Service()) as pool:
        assert outcomes(pool, *(f"meet {i}" for i in range(4))) == ["ok"] * 4


def test_a_service_that_is_not_there_leaves_the_answer_without_a_verdict() -> None:
    with GraderPool(Service()) as pool:
        grade = pool.submit("down", PROBLEM).result(timeout=PATIENCE)
        assert (grade.outcome, grade.message, grade.correct) == ("unavailable", "the judge is down", False)
        assert outcomes(pool, "refused", "wrong", "7") == ["unavailable", "error", "ok"]


def test_a_call_that_hangs_is_given_up_at_its_deadline_and_holds_nobody_up() -> None:
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


def test_what_could_not_be_judged_is_asked_again_and_a_verdict_is_not() -> None:
    service = Service()
    with GraderPool(service) as pool:
        for _ in range(3):
            assert outcomes(pool, "down", "7") == ["unavailable", "ok"]
    assert sorted(service.asked) == ["7", "down", "down", "down"]


def test_no_service_is_asked_about_an_answer_whose_reward_is_decided() -> None:
    service = Service()
    with GraderPool(service) as pool:
        assert pool.submit("7", PROBLEM, decided=True).result(timeout=0).outcome == "no_answer"
        assert not service.asked
    with GraderPool(FinalAnswer()) as pool:  # a rule costs nothing, and says what the answer was
        assert pool.submit("#7", PROBLEM, decided=True).result(timeout=0).extracted == "7"


@dataclass(frozen=True, eq=False)
class ByGold(Grader):
    """Another grader for each gold."""

    graders: dict[str, Grader]

    def of(self, problem: Problem) -> Grader:
        return self.graders[problem.gold]

    def parts(self) -> list[Grader]:
        return list(self.graders.values())


def test_each_problem_is_graded_by_its_own_grader_where_that_wants_to_be(tmp_path) -> None:  # type: ignore[no-untyped-def]
    record = tmp_path / "record"
    service = Service()
    graders = {"7": service, "8": Counting(str(record)), "9": FinalAnswer(), "10": Obedient(deadline=0.5)}
    pairs = [
        (f"#{gold}" if gold != "10" else "sleep", Problem(id="the same", prompt="?", gold=gold))
        for gold in graders
    ]
    with GraderPool(ByGold(graders), workers=1, deadline=PATIENCE) as pool:
        grades = pool.grade_many(pairs)
    assert [grade.outcome for grade in grades] == ["ok", "ok", "ok", "timeout"]
    assert [grade.reward for grade in grades] == [1.0, 0.0, 1.0, 0.0]
    assert record.read_text() == "the same #8\n"
    assert service.asked == ["#7"]
