"""Graders at work: each answer where its grader wants to be called, within its deadline, and once."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from types import TracebackType
from typing import Self

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.process import Work
from treetune.tasks.graders.processes import WorkerProcesses
from treetune.tasks.graders.service import Counts, Service, Surroundings
from treetune.tasks.graders.threads import ServiceThreads
from treetune.tasks.graders.worker import Grading, graded
from treetune.vocabulary import Grade, GradeOutcome, Problem

Key = tuple[int, str, str, bytes]


class GraderPool:
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
        around: Surroundings | None = None,
    ) -> None:
        """`workers` is by default 2, or 1 where there is but one core: the engine needs the others. `around`
        is what services are lent; whoever made it closes it."""
        if workers is None:
            workers = min(2, os.cpu_count() or 1)
        if workers < 1 or deadline <= 0 or memo_size < 0:
            raise ValueError(
                f"a grader pool needs workers >= 1, a deadline > 0 and memo_size >= 0, not {workers}, "
                f"{deadline} and {memo_size}"
            )
        self.grader = grader
        self.deadline = deadline
        self._memo: OrderedDict[Key, Grade] = OrderedDict()
        self._memo_size = memo_size
        self._lock = threading.Lock()
        self._waiting: dict[Key, list[Future[Grade]]] = {}
        self._keys: dict[int, Key] = {}
        self._closed = False
        self._failure: BaseException | None = None
        self._works = 0
        self._graders: dict[int, tuple[int, Grader]] = {}
        memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
        self._processes = WorkerProcesses(workers, memory_bytes, self._settle, _lost, self._fail)
        self._threads: dict[int, ServiceThreads] = {}
        self._services: dict[int, Service] = {}
        self._around = around or Surroundings()
        for part in grader.parts():
            self._number(part)

    def submit(self, response: str, problem: Problem, *, decided: bool = False) -> Future[Grade]:
        """The grade, as soon as it is there. Does not block, nor raise for what the answer is.

        `decided` says that the answer earns what it earns whatever its grade is (it was cut off): then no
        service is asked about it, and it has no answer.

        The future raises WorkerStartError if no worker can load the grader; so does `submit` from
        then on. Raises ValueError if the pool is closed.
        """
        grader = self.grader.of(problem)
        if decided and grader.isolation == "service":
            spared: Future[Grade] = Future()
            spared.set_result(grader.without_answer(problem))
            return spared
        return self._submit(grader, response, problem)

    def _submit(self, grader: Grader, response: str, problem: Problem) -> Future[Grade]:
        future: Future[Grade] = Future()
        if grader.isolation == "inline":
            future.set_result(graded(grader, response, problem))
            return future
        # A digest, because answers can be long and the memo keeps many.
        digest = hashlib.blake2b(response.encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            if self._closed:
                raise self._failure or ValueError("the grader pool is closed")
            number = self._number(grader)
            key = (number, problem.id, problem.gold, digest)
            known = self._memo.get(key)
            if known is None:
                self._enqueue(key, future, number, grader, response, problem)
                return future
            self._memo.move_to_end(key)
        future.set_result(known)
        return future

    def grade_many(self, pairs: Iterable[tuple[str, Problem]]) -> list[Grade]:
        """The grades of (response, problem) pairs, in their order."""
        futures = [self.submit(response, problem) for response, problem in pairs]
        return [future.result() for future in futures]

    @property
    def has_services(self) -> bool:
        """Whether anything is going to be `counted`."""
        return bool(self._threads)

    def counted(self) -> Counts:
        """What all services have done since this was last asked."""
        total: Counts = {}
        for service in list(self._services.values()):
            for name, (value, over) in service.counted().items():
                before, parts = total.get(name, (0.0, None if over is None else 0.0))
                total[name] = before + value, None if over is None or parts is None else parts + over
        return total

    def close(self) -> None:
        """Ends the workers; grades that are still missing are cancelled. Safe to call twice."""
        with self._lock:
            self._closed = True
        for threads in self._threads.values():
            threads.close()
        for service in self._services.values():
            service.close()
        self._processes.close()
        self._fail(CancelledError("the grader pool was closed before this answer was graded"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _grade_by(self, grader: Grader, response: str, problem: Problem) -> Grade:
        return self._submit(grader.of(problem), response, problem).result()

    def _number(self, grader: Grader) -> int:
        """What a grader is known by, from when it is first met. The grader is kept, so that no other one can
        have its place in memory."""
        if id(grader) not in self._graders:
            number = len(self._graders)
            if grader.isolation == "process":
                self._processes.teach(number, Grading(grader), type(grader).__name__)
            elif grader.isolation == "service":
                service = self._services[number] = grader.serve(self._around, self._grade_by)
                self._threads[number] = ServiceThreads(
                    partial(graded, service), service.concurrency, self._settle, _lost
                )
            self._graders[id(grader)] = number, grader
        return self._graders[id(grader)][0]

    def _enqueue(
        self, key: Key, future: Future[Grade], number: int, grader: Grader, response: str, problem: Problem
    ) -> None:
        """With the lock held."""
        same = self._waiting.get(key)
        if same is not None:
            same.append(future)
            return
        self._waiting[key] = [future]
        self._works += 1
        self._keys[self._works] = key
        deadline = self.deadline if grader.deadline is None else grader.deadline
        work = Work(self._works, number, (response, problem), deadline, about=problem.id)
        if grader.isolation == "service":
            self._threads[number].add(work)
        else:
            self._processes.add(work)

    def _settle(self, work: Work, grade: Grade) -> None:
        with self._lock:
            key = self._keys.pop(work.number, None)
            if key is None:  # the pool was closed meanwhile
                return
            if grade.is_known:
                self._memo[key] = grade
                if len(self._memo) > self._memo_size:
                    self._memo.popitem(last=False)
            futures = self._waiting.pop(key)
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_result(grade)

    def _fail(self, error: BaseException) -> None:
        """Nothing more is graded: whoever waits is told why."""
        with self._lock:
            if not self._closed:
                self._closed, self._failure = True, error
            futures = [future for same in self._waiting.values() for future in same]
            self._waiting.clear()
            self._keys.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def _lost(outcome: GradeOutcome, message: str, seconds: float) -> Grade:
    """Of an answer on which a grader hung or crashed."""
    return Grade(reward=0.0, outcome=outcome, seconds=seconds, message=message)
