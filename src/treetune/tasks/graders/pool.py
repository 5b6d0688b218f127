"""Grades answers, each in the process or thread that its grader asks for, within its deadline, and once.

Where a call goes is the grader's `isolation`::

    a thread of the run              GraderPool                          processes and threads
    ───────────────────              ──────────                          ─────────────────────
    submit(response, problem)
      ├ "inline" ──────► graded at once, in this thread
      ├ the memo has it ► the future is done
      ├ it is in flight ► waits with the first one (`_waiting`)
      ├ "process" ─────► `Pool` of workers ───────────────► Grading.answer in a worker
      └ "service" ─────► `Pool` of threads ───────────────► Grading.answer in a thread
                         `_settle` ◄─────────────────────── the grade, or how the worker was lost
      future.result() ◄─ all futures that waited for it

The caller waits only where it asks for `result()`. The pool gives up a call that passes its deadline: it
kills the worker process, or leaves the thread to itself, and the future gets `_grade_lost_answer`.
`close` cancels what is left. The lock keeps the memo and `_waiting` consistent; no grader runs under it.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from typing_extensions import override

from treetune.exceptions import Unavailable
from treetune.processes.pool import Pool
from treetune.processes.worker import Servant
from treetune.tasks.graders.base import Counts, Grader, Service, ServiceContext
from treetune.tasks.thoughts import ends_in_thought
from treetune.vocabulary import Grade, GradeOutcome, Problem

Key = tuple[int, str, str, bytes]


class GraderPool(AbstractContextManager["GraderPool"]):
    """Grades answers, each by the grader that there is for its problem (`Grader.of`).

    Where a grader runs in a process, there are `workers` of these: an answer on which it hangs gets the
    outcome ``timeout``, one on which it crashes or runs out of `memory_gib` gets ``error``; the worker is
    replaced and the others go on. Services are called in threads. An answer has its grader's
    deadline, or else `deadline` seconds. Equal answers to a problem are graded once: the last `memo_size`
    grades are kept, unless nothing is known. A grader that is ``inline`` runs in the caller's thread, without
    memo: there is nothing to guard against, and comparing two strings is far cheaper than sending
    them away or looking them up.

    Safe to use from several threads. Workers start with the first answer, and end with the pool or
    with this process, however it ends. Close it, or use it in a `with` statement.
    """

    def __init__(
        self,
        grader: Grader,
        *,
        workers: int | None = None,
        deadline: float = 10.0,
        memory_gib: float | None = 4.0,
        memo_size: int = 100_000,
        context: ServiceContext | None = None,
        whole_prompt: Callable[[Problem], str] | None = None,
    ) -> None:
        """`workers` is by default 2, or 1 where there is but one core: the engine needs the others. `context`
        is what services are lent; whoever made it closes it. `whole_prompt` writes a problem's prompt as the
        model gets it: one that ends with what opens a thought leaves that out of the response."""
        if workers is None:
            workers = min(2, os.cpu_count() or 1)
        if workers < 1 or deadline <= 0 or memo_size < 0:
            raise ValueError(
                f"a grader pool needs workers >= 1, a deadline > 0 and memo_size >= 0, not {workers}, "
                f"{deadline} and {memo_size}"
            )
        self.grader = grader
        self.deadline = deadline
        self._whole_prompt = whole_prompt
        self._thought_is_open: dict[str, bool] = {}
        """By the ids of problems, since writing a prompt takes as long as grading some answers."""
        self._memo: OrderedDict[Key, Grade] = OrderedDict()
        self._memo_size = memo_size
        # Reentrant: a call may be done when its callback is added, and then `_settle` runs within `_submit`.
        self._lock = threading.RLock()
        self._waiting: dict[Key, list[Future[Grade]]] = {}
        self._graders: dict[int, tuple[int, Grader]] = {}
        self._comparing: dict[int, Comparing] = {}
        self._services: list[Service] = []
        self._has_services = False
        self._context = context or ServiceContext()
        self._pool = Pool("the grader pool", workers, memory_gib, _grade_lost_answer)
        for part in (part for part in grader.parts() if part.isolation != "inline"):
            self._number(part)

    def submit(
        self, response: str, problem: Problem, *, decided: bool = False, follows_prompt: bool = True
    ) -> Future[Grade]:
        """Returns the future grade. Does not block, nor raise for what the answer is.

        `decided` says that the answer earns what it earns whatever its grade is (it was cut off): then no
        service is asked about it, and it has no answer. `follows_prompt` says that the response stands behind
        the prompt, which may have opened its thought; the last of several turns doesn't.

        The future raises WorkerStartError if no worker can load the grader; so does `submit` from
        then on. Raises ValueError if the pool is closed.
        """
        if follows_prompt:
            problem = self._with_open_thought(problem)
        grader = self.grader.of(problem)
        if decided and grader.isolation == "service":
            done: Future[Grade] = Future()
            done.set_result(grader.without_answer(problem))
            return done
        return self._submit(grader, response, problem)

    def _with_open_thought(self, problem: Problem) -> Problem:
        """Returns the problem, which says whether its whole prompt ends within a thought."""
        if self._whole_prompt is None:
            return problem
        if problem.id not in self._thought_is_open:
            self._thought_is_open[problem.id] = ends_in_thought(self._whole_prompt(problem))
        return replace(problem, is_thought_open=True) if self._thought_is_open[problem.id] else problem

    def grade_many(self, pairs: Iterable[tuple[str, Problem]]) -> list[Grade]:
        """Grades (response, problem) pairs, in their order."""
        futures = [self.submit(response, problem) for response, problem in pairs]
        return [future.result() for future in futures]

    def same_answer(self, answer: str, other: str, problem: Problem) -> bool | None:
        """Returns whether two answers, as they were extracted, are equal to the problem's grader; None
        where it can't say: it compares no answers, or hung on these."""
        grader = self.grader.of(problem)
        if not grader.votes_by_value:
            return None
        with self._lock:
            comparing = self._comparing.setdefault(id(grader), Comparing(grader))
        grade = self._submit(comparing, json.dumps([answer, other]), problem).result()
        return grade.correct if grade.outcome == "ok" else None

    @property
    def has_services(self) -> bool:
        """Returns whether any grader is a service; `counted` may tell of it then."""
        return self._has_services

    def counted(self) -> Counts:
        """Returns what all services have counted since the last call, summed by name.

        A count is a value and what it is divided by: ("judge/seconds", (12.0, 4.0)) are 3 seconds on average,
        and None for the second one is a plain sum.
        """
        totals: Counts = {}
        for service in list(self._services):
            for name, (value, divisor) in service.counted().items():
                total, total_divisor = totals.get(name, (0.0, None if divisor is None else 0.0))
                if divisor is None or total_divisor is None:
                    totals[name] = total + value, None
                else:
                    totals[name] = total + value, total_divisor + divisor
        return totals

    def close(self) -> None:
        """Ends the workers; grades that are still missing are cancelled. Safe to call twice."""
        self._pool.close()

    @override
    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, grader: Grader, response: str, problem: Problem) -> Future[Grade]:
        """Returns the future grade by this very grader: at once, from the memo, or from the pool."""
        future: Future[Grade] = Future()
        if grader.isolation == "inline":
            future.set_result(grade_response(grader, response, problem))
            return future
        # A digest, because answers can be long and the memo keeps many.
        text = repr((response, problem.transcript)) if grader.reads_turns else response
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            number = self._number(grader)
            key = (number, problem.id, problem.gold, digest)
            remembered = self._memo.get(key)
            if remembered is not None:
                self._memo.move_to_end(key)
                future.set_result(remembered)
            elif (waiting := self._waiting.get(key)) is not None:
                waiting.append(future)
            else:
                deadline = self.deadline if grader.deadline is None else grader.deadline
                call = self._pool.submit(number, response, problem, deadline=deadline, about=problem.id)
                self._waiting[key] = [future]
                call.add_done_callback(partial(self._settle, key))
        return future

    def _grade_by(self, grader: Grader, response: str, problem: Problem) -> Grade:
        return self._submit(grader.of(problem), response, problem).result()

    def _number(self, grader: Grader) -> int:
        """Returns the grader's number, which it gets when it is first met.

        The grader is kept: Python could give the `id` of one that is gone to another.
        """
        if id(grader) not in self._graders:
            grader_or_service: Grader | Service = grader
            threads = None
            if grader.isolation == "service":
                self._has_services = True
                if service := grader.serve(self._context, self._grade_by):
                    self._services.append(service)
                    grader_or_service = service
                threads = grader_or_service.concurrency
            servant = Grading(grader_or_service)
            number = self._pool.register(servant, type(grader).__name__, threads=threads)
            self._graders[id(grader)] = number, grader
        return self._graders[id(grader)][0]

    def _settle(self, key: Key, call: Future[Grade]) -> None:
        """Gives the grade, or the error, of a call to all futures that wait for it."""
        error = call.exception()
        with self._lock:
            if error is None and (grade := call.result()).is_known:
                self._memo[key] = grade
                if len(self._memo) > self._memo_size:
                    self._memo.popitem(last=False)
            futures = self._waiting.pop(key)
        for future in futures:
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(call.result())
            else:
                future.set_exception(error)


class Comparing(Grader):
    """Asks another grader whether two answers are the same. Its responses are the two, as a JSON list."""

    def __init__(self, grader: Grader) -> None:
        self.grader = grader
        # A comparison asks no service: it is a computation that might hang.
        self.isolation = "inline" if grader.isolation == "inline" else "process"  # type: ignore[misc]
        self.deadline = grader.deadline

    @override
    def prepare(self) -> None:
        self.grader.prepare()

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        return response

    @override
    def verdict(self, extracted: str, problem: Problem) -> float:
        answer, other = json.loads(extracted)
        return float(self.grader.same_answer(answer, other, problem))


@dataclass(frozen=True)
class Grading(Servant):
    """The servant of a grader, or of one that is a service at work."""

    grader: Grader | Service

    @override
    def prepare(self) -> None:
        if isinstance(self.grader, Grader):
            self.grader.prepare()

    @override
    def answer(self, response: str, problem: Problem) -> Grade:
        return grade_response(self.grader, response, problem)

    @override
    def close(self) -> None:
        if not isinstance(self.grader, Grader):
            self.grader.close()


def grade_response(grader: Grader | Service, response: str, problem: Problem) -> Grade:
    """Returns the grader's verdict with the seconds that it took; an exception is the outcome ``error``."""
    start = time.perf_counter()
    outcome: GradeOutcome = "error"
    try:
        return replace(grader.grade(response, problem), seconds=time.perf_counter() - start)
    except Unavailable as error:
        outcome, message = "unavailable", str(error)
    except (Exception, SystemExit) as error:
        # Whatever an answer makes a grader raise is recorded with that answer, and ends no run.
        name = type(error).__name__
        message = f"{name}: {error}" if str(error) else name
        is_service = not isinstance(grader, Grader) or grader.isolation == "service"
        if is_service and isinstance(error, OSError):
            outcome = "unavailable"  # broken connections are among these
    return Grade(reward=0.0, outcome=outcome, seconds=time.perf_counter() - start, message=message)


def _grade_lost_answer(outcome: GradeOutcome, message: str, seconds: float) -> Grade:
    """Grades an answer on which a grader hung or crashed."""
    return Grade(reward=0.0, outcome=outcome, seconds=seconds, message=message)
