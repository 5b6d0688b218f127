"""Grades answers in the processes or threads that their graders need, within a deadline. Equal answers are
graded once.

The grader's `isolation` decides where a call goes::

    a thread of the run              GraderPool                          processes and threads
    ───────────────────              ──────────                          ─────────────────────
    submit(response, problem)
      ├ "inline" ──────► graded at once, in this thread
      ├ in the memo ───► the future is done
      ├ in flight ─────► waits with the first call (`_waiting`)
      ├ "process" ─────► `Pool` of workers ───────────────► Grading.answer in a worker
      └ "service" ─────► `Pool` of threads ───────────────► Grading.answer in a thread
                         `_settle` ◄─────────────────────── the grade, or how the worker was lost
      future.result() ◄─ all futures that waited for it

The caller only waits in `result()`. The pool gives up a call at its deadline: it kills the worker process, or
abandons the thread, and the future gets the grade of `_grade_lost_answer`. `close` cancels the remaining
calls. The lock protects the memo and `_waiting`, and is never held while a grader runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from treetune.exceptions import Unavailable
from treetune.processes.pool import Pool
from treetune.processes.worker import Servant
from treetune.tasks.graders.base import Grader, MetricSums, Service, ServiceContext
from treetune.tasks.thoughts import ends_in_thought
from treetune.vocabulary import Grade, GradeOutcome, Problem

PACKAGE = Path(__file__).parents[2]

GradeKey = tuple[int, str, str, bytes]
"""The grader's number, the problem's id and gold, and a digest of the response."""


class GraderPool(AbstractContextManager["GraderPool"]):
    """Grades answers, each with the grader of its problem (`Grader.of`).

    Graders with the isolation ``process`` run in `workers` processes. An answer on which a grader hangs gets
    the outcome ``timeout``, and one on which it crashes or needs more than `memory_gib` gets ``error``. The
    worker is replaced, and other answers aren't affected. Services run in threads. ``inline`` graders run in
    the caller's thread.

    The deadline of an answer is its grader's, or `deadline` seconds. Equal answers to a problem are graded
    once: the last `memo_size` grades are remembered, except those with the outcome ``unavailable``. Grades of
    ``inline`` graders aren't remembered, because comparing two strings is cheaper.

    The pool is safe to use from several threads. Workers start with the first answer. They end with the pool,
    and also with this process, however it ends. Close the pool, or use it in a `with` statement.
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
        """Args:
        grader: The grader of all problems.
        workers: The number of processes. None: 2, or 1 on a machine with one core. There are not more,
            because the engine needs the cores.
        deadline: The number of seconds for an answer whose grader has no deadline.
        memory_gib: The memory of a worker in GiB; None: without a limit.
        memo_size: The largest number of grades that are remembered.
        context: The objects of the run that services need. The caller closes it.
        whole_prompt: Returns a problem's prompt as the model reads it, with its chat template. If the prompt
            ends by opening a thought, responses begin within the thought.
        """
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
        """Whether a problem's whole prompt opens a thought, by the problem's id. It is remembered because
        rendering a prompt takes as long as grading some answers."""
        self._memo: OrderedDict[GradeKey, Grade] = OrderedDict()
        self._memo_size = memo_size
        # The lock is reentrant, because `_submit` holds it while it adds the callback `_settle`, which runs
        # at once if the call is done already.
        self._lock = threading.RLock()
        self._waiting: dict[GradeKey, list[Future[Grade]]] = {}
        """The futures that wait for each call in flight."""
        self._graders: dict[int, tuple[int, Grader]] = {}
        """For each grader's `id`, its number in the pool of processes and threads, and the grader itself: as
        long as it is kept, no other object gets the same `id`."""
        self._comparing: dict[int, Comparing] = {}
        """For each grader's `id`, a grader of pairs of answers: are the two equal for that grader?"""
        self._services: list[Service] = []
        self._has_services = False
        self._context = context or ServiceContext()
        self._pool = Pool("the grader pool", workers, memory_gib, _grade_lost_answer)
        try:
            for part in grader.parts():
                if part.isolation != "inline":
                    self._number_of(part)  # registers the grader in the pool of processes and threads
        except BaseException:
            self.close()  # the services of the parts before it run already
            raise

    def submit(
        self, response: str, problem: Problem, *, decided: bool = False, follows_prompt: bool = True
    ) -> Future[Grade]:
        """Returns the future grade of a response, and doesn't wait for it. No response makes the future raise
        an error.

        Args:
            response: The answer.
            problem: The problem that it answers.
            decided: Whether the reward doesn't depend on the grade, because the answer was cut off. If it is
                true, no service is asked, and the answer counts as ``no_answer``.
            follows_prompt: Whether the response comes directly after the prompt. Only such a response can
                begin within a thought that the prompt has opened (with ``<think>``). The last of several
                turns doesn't follow the prompt.

        Raises:
            WorkerStartError: No worker can load the grader. The future raises it, too.
            ValueError: The pool is closed.
        """
        if follows_prompt:
            problem = self._with_open_thought(problem)
        grader = self.grader.of(problem)
        if decided and grader.isolation == "service":
            future: Future[Grade] = Future()
            future.set_result(grader.without_answer(problem))
            return future
        return self._submit(grader, response, problem)

    def _with_open_thought(self, problem: Problem) -> Problem:
        """Returns the problem, with `is_thought_open` set if its whole prompt ends with a tag that opens a
        thought, such as ``<think>``."""
        if self._whole_prompt is None:
            return problem
        if problem.id not in self._thought_is_open:
            self._thought_is_open[problem.id] = ends_in_thought(self._whole_prompt(problem))
        return replace(problem, is_thought_open=True) if self._thought_is_open[problem.id] else problem

    def grade_many(self, pairs: Iterable[tuple[str, Problem]]) -> list[Grade]:
        """Grades pairs of a response and its problem. Returns the grades in the order of the pairs."""
        futures = [self.submit(response, problem) for response, problem in pairs]
        return [future.result() for future in futures]

    def same_answer(self, answer: str, other: str, problem: Problem) -> bool | None:
        """Returns whether two extracted answers are equal according to the problem's grader.

        Returns None if the grader can compare answers only with the gold, or failed to compare these two.
        """
        grader = self.grader.of(problem)
        if not grader.votes_by_value:
            return None
        with self._lock:
            # A `Comparing` grades a pair of answers: the pair is correct if the two are equal. There is one
            # for each grader, because the pool registers every new object as another grader.
            comparing = self._comparing.setdefault(id(grader), Comparing(grader))
        grade = self._submit(comparing, json.dumps([answer, other]), problem).result()
        return grade.correct if grade.outcome == "ok" else None

    def forget_grades(self) -> None:
        """Forgets all grades so far. Call it before a problem's id is used again for another problem."""
        with self._lock:
            self._memo.clear()

    @property
    def has_services(self) -> bool:
        """Whether any grader is a service. If none is, `take_counts` returns no metrics."""
        return self._has_services

    def take_counts(self) -> MetricSums:
        """Returns the counts of all services since the last call of this method, summed by name.

        A count is a sum and its divisor: under ``judge/seconds``, ``(12.0, 4.0)`` means a mean of 3 seconds.
        If the divisor is None, the metric is the sum.
        """
        totals: MetricSums = {}
        # A copy of the list, since another thread may add a service in the meantime.
        for service in list(self._services):
            for name, (value, divisor) in service.take_counts().items():
                total, total_divisor = totals.get(name, (0.0, 0.0))
                if divisor is None or total_divisor is None:
                    totals[name] = total + value, None
                else:
                    totals[name] = total + value, total_divisor + divisor
        return totals

    def close(self) -> None:
        """Ends the workers, and cancels calls that aren't done. Safe to call twice."""
        self._pool.close()

    @override
    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, grader: Grader, response: str, problem: Problem) -> Future[Grade]:
        """Returns the future grade by this grader: computed at once, from the memo, or from the pool."""
        future: Future[Grade] = Future()
        if grader.isolation == "inline":
            future.set_result(grade_response(grader, response, problem))
            return future
        # The key has a digest of the answer, because answers can be long and the memo keeps many of them.
        text = repr((response, problem.transcript)) if grader.reads_turns else response
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            grader_number = self._number_of(grader)  # the pool calls a grader by its number
            key = (grader_number, problem.id, problem.gold, digest)
            remembered_grade = self._memo.get(key)
            if remembered_grade is not None:
                self._memo.move_to_end(key)
                future.set_result(remembered_grade)
            elif (waiting := self._waiting.get(key)) is not None:
                waiting.append(future)
            else:
                deadline_s = self.deadline if grader.deadline is None else grader.deadline
                call = self._pool.submit(
                    grader_number, response, problem, deadline_s=deadline_s, about=problem.id
                )
                self._waiting[key] = [future]
                call.add_done_callback(partial(self._settle, key))
        return future

    def _grade_by(self, grader: Grader, response: str, problem: Problem) -> Grade:
        return self._submit(grader.of(problem), response, problem).result()

    def _number_of(self, grader: Grader) -> int:
        """Returns the grader's number in the pool; registers a grader that has no number.

        The grader is stored with its number, so that it stays alive and no other object gets the same `id`.
        """
        if id(grader) not in self._graders:
            grader_or_service: Grader | Service = grader
            threads = None  # called in a process
            if grader.isolation == "service":
                self._has_services = True
                # If the grader has a running service, the pool calls the service in place of the grader. With
                # `_grade_by`, the service grades by other graders, such as a rule that the grader contains.
                service = grader.serve(self._context, self._grade_by)
                if service is not None:
                    self._services.append(service)
                    grader_or_service = service
                threads = grader_or_service.concurrency
            servant = Grading(grader_or_service)  # the form in which the pool calls it
            number = self._pool.register(servant, type(grader).__name__, threads=threads)
            self._graders[id(grader)] = number, grader
        return self._graders[id(grader)][0]

    def _settle(self, key: GradeKey, call: Future[Grade]) -> None:
        """Sets the grade or the error of a call as the result of all futures that wait for it."""
        error = call.exception()
        with self._lock:
            # A grade is unknown if the grader was unavailable. Such a grade isn't remembered.
            if error is None and (grade := call.result()).is_known:
                self._memo[key] = grade
                if len(self._memo) > self._memo_size:
                    self._memo.popitem(last=False)
            futures = self._waiting.pop(key)
        for future in futures:
            if not future.set_running_or_notify_cancel():  # its caller has cancelled it
                continue
            if error is None:
                future.set_result(call.result())
            else:
                future.set_exception(error)


class Comparing(Grader):
    """Grades whether another grader regards two answers as equal. A response is a JSON list of the two."""

    def __init__(self, grader: Grader) -> None:
        self.grader = grader
        # A comparison doesn't call a service. It is a computation that might hang.
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
    """A grader or a service in the form that pools of processes and threads load."""

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
    """Returns the grader's grade, with the seconds that it took. An exception becomes the outcome
    ``error``."""
    start = time.perf_counter()
    outcome: GradeOutcome = "error"
    try:
        return replace(grader.grade(response, problem), seconds=time.perf_counter() - start)
    except Unavailable as error:
        outcome, message = "unavailable", str(error)
    except (Exception, SystemExit) as error:
        # An exception is recorded with the answer that caused it, and doesn't end the run.
        name = type(error).__name__
        message = (f"{name}: {error}" if str(error) else name) + _users_line(error)
        # Either a running `Service`, or a grader that asks something outside of the run itself.
        is_service = not isinstance(grader, Grader) or grader.isolation == "service"
        if is_service and isinstance(error, OSError):
            outcome = "unavailable"  # e.g. a broken connection
    return Grade(reward=0.0, outcome=outcome, seconds=time.perf_counter() - start, message=message)


def _users_line(error: BaseException) -> str:
    """Returns the innermost line of the user's own files in an error's traceback: `` (reward.py, line 12)``.

    Returns an empty text if the traceback has only lines of this project and of libraries.
    """
    library_folders = (PACKAGE, Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)  # not a real file if the code was made at run time, such as `<string>`
        if file.is_file() and not any(file.is_relative_to(folder) for folder in library_folders):
            return f" ({file.name}, line {frame.lineno})"
    return ""


def _grade_lost_answer(outcome: GradeOutcome, message: str, seconds: float) -> Grade:
    """Returns the grade of an answer on which a grader hung or crashed."""
    return Grade(reward=0.0, outcome=outcome, seconds=seconds, message=message)
