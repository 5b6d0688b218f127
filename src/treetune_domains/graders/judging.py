"""A judge at work: asked once, waited for, and done without where it is down."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from treetune.tasks.graders.base import Counts, GradeBy, ServiceContext, Unavailable
from treetune.vocabulary import Grade, Problem
from treetune_domains.endpoints.client import Client, EndpointError, Refused, Reply, Unanswered
from treetune_domains.endpoints.journal import Answer, AnswerJournal
from treetune_domains.endpoints.settings import Asking, Message, Place

if TYPE_CHECKING:
    from treetune.tasks.base import Task
    from treetune_domains.graders.judge import JudgeGrader

T = TypeVar("T")

log = logging.getLogger(f"treetune.{__name__}")  # a run logs what is below "treetune"

AGAIN = "That holds no verdict in the form that was asked for. Give the verdict alone, in that form."

PROBE_S = 30.0
"""While the judge is down, somebody looks as often as this whether it is back."""

CLOSE_S = 5.0

TOLD_EVERY_S = 15.0

OWN_SHARE = 0.9
"""Of the deadline, after which the judge gives a question up itself and says what it waited for."""


@dataclass(frozen=True)
class ServedModel:
    """A language model that the run serves: how it is asked, where it is (which may wait for it), and what it
    is called there. `identity` says which model it is; `failed`, of a place, and `succeeded` tell whoever
    serves it."""

    asking: Asking
    place: Callable[[], Place]
    name: str
    identity: str
    failed: Callable[[Place, str], None] = lambda place, reason: None
    succeeded: Callable[[], None] = lambda: None
    refuse_unusable: Callable[[Task, Sequence[Problem]], None] = lambda task, problems: None
    """Raises ValueError where it can't be asked about answers to the task's problems."""


class Judge:
    """A `JudgeGrader` at work. Safe to use from several threads."""

    def __init__(self, grader: JudgeGrader, context: ServiceContext, grade_by: GradeBy) -> None:
        """Raises ValueError where it has neither an endpoint nor a model that the run serves, or no key."""
        self._grader, self._context, self._grade_by = grader, context, grade_by
        place: Place | Callable[[], Place]
        self._served: ServedModel | None = None
        if grader.endpoint is not None:
            self._asking: Asking = grader.endpoint
            self._model = self._identity = grader.endpoint.model
            place = grader.endpoint.place()
        elif (served := context.get(ServedModel)) is not None:
            self._served = served
            self._asking, place = served.asking, served.place
            self._model, self._identity = served.name, served.identity
        else:
            raise ValueError(
                "the judge has no endpoint, and no model is served here: give it endpoint: {base_url: …,"
                " model: …}"
            )
        self.concurrency = self._asking.concurrency
        self._trouble = _Trouble()
        self._loop = _Loop(lambda stopping: Client(self._asking, place, stopping, self._trouble.met))
        self._line = _Line(self._asking.give_up_after)
        self._lock = threading.Lock()
        self._counts: Counts = {}
        self._attempts = 0

    def grade(self, response: str, problem: Problem) -> Grade:
        shown = self._grader.extract(response, problem)
        if shown is None:
            return self._grader.without_answer(problem)
        rule = self._by_rule(response, problem)
        if rule is not None and rule.correct and self._grader.when == "rule_rejects":
            self._count(spared=1)
            return replace(rule, numbers={**rule.numbers, "rule": rule.reward})
        try:
            reward = self._judged(self._grader.asked(shown, problem))
        except Unavailable:
            self._count(unavailable=1)
            raise
        extracted = None if rule is None else rule.extracted
        grade = Grade(reward=reward, outcome="ok", extracted=extracted, numbers={"judge": reward})
        self._count(correct=(float(grade.correct), 1))
        if rule is not None:
            self._count(agreement=(float(grade.correct == rule.correct), 1))
            grade = replace(grade, numbers={**grade.numbers, "rule": rule.reward})
        return grade

    def counted(self) -> Counts:
        with self._lock:
            counts, self._counts = self._counts, {}
        failed = self._loop.failed_attempts
        counts["judge/failed_attempts"] = float(failed - self._attempts), None
        self._attempts = failed
        return counts

    def close(self) -> None:
        self._loop.close()

    def _by_rule(self, response: str, problem: Problem) -> Grade | None:
        """None where there is none, or it isn't there: then the judge alone decides."""
        if self._grader.rule is None:
            return None
        grade = self._grade_by(self._grader.rule, response, problem)
        return grade if grade.is_known else None

    def _judged(self, question: str) -> float:
        """What the verdict earns. Raises Unavailable where there is none to be had."""
        until = time.monotonic() + OWN_SHARE * self._grader.deadline
        messages: list[Message] = [("user", question)]
        if self._grader.system is not None:
            messages.insert(0, ("system", self._grader.system))
        for left in range(self._grader.again, -1, -1):
            reply = self._reply(messages, until)
            reward = self._grader.reward(reply)
            if reward is not None:
                return reward
            self._count(without_verdict=1)
            messages += [("assistant", reply), ("user", AGAIN)] if left else []
        raise Unavailable("the judge's replies hold no verdict")

    def _reply(self, messages: Sequence[Message], until: float) -> str:
        """What it says, or had said: a reply with a verdict is kept."""
        with self._loop.busy():
            return self._kept_reply(messages, until)

    def _kept_reply(self, messages: Sequence[Message], until: float) -> str:
        body = self._asking.question(self._model, messages, {})
        text = json.dumps([self._identity, body], sort_keys=True)
        key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        journal = self._context.shared(_answers)
        known = journal.get(key)
        if known is not None and self._grader.reward(known.text) is not None:
            self._count(known=1)
            return known.text
        reply = self._ask(body, until)
        if self._grader.reward(reply.text) is not None:
            estimated = reply.input_tokens is None or reply.output_tokens is None
            tokens = reply.input_tokens or 0, reply.output_tokens or 0
            journal.add(Answer(key, "judge", reply.text, reply.complete, *tokens, estimated))
        return reply.text

    def _ask(self, body: dict[str, Any], until: float) -> Reply:
        self._line.enter()
        began = time.monotonic()
        tried: list[Place] = []
        try:
            reply = self._loop.ask(body, max(0.1, until - began), tried)
        except EndpointError as error:
            self._line.refused(str(error))
            raise Unavailable(str(error)) from error
        except Refused as error:  # about this question alone: it is too long, or has what nobody takes
            raise Unavailable(str(error)) from error
        except (Unanswered, TimeoutError) as error:
            why = str(error) if isinstance(error, Unanswered) else "no reply within the deadline"
            for place in self._line.failed(why, tried[-1:]):
                if self._served is not None:
                    self._served.failed(place, why)
            raise Unavailable(f"the judge gave no answer: {why}") from error
        self._line.answered()
        self._trouble.over()
        if self._served is not None:
            self._served.succeeded()
        self._count(asked=1, seconds=(time.monotonic() - began, 1))
        if reply.input_tokens is not None and reply.output_tokens is not None:
            self._count(input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)
            if self._grader.prices is not None:
                self._count(dollars=self._grader.prices.dollars(reply.input_tokens, reply.output_tokens))
        return reply

    def _count(self, **found: float | tuple[float, float]) -> None:
        with self._lock:
            for short, number in found.items():
                value, over = number if isinstance(number, tuple) else (number, None)
                before, parts = self._counts.get(f"judge/{short}", (0.0, 0.0))
                self._counts[f"judge/{short}"] = before + value, None if over is None else (parts or 0) + over


def _answers(context: ServiceContext) -> AnswerJournal:
    """Opens the answers of this process, in which those of all earlier ones are found."""
    if context.folder is None:
        return AnswerJournal(None)
    path = context.folder / f"{context.name}.jsonl"
    return AnswerJournal(path, others=sorted({*context.folder.glob("*.jsonl")} - {path}))


class _Line:
    """Whether anybody answers at the other end: after some failures in a row, nobody is kept waiting for it
    but one who looks, now and then, whether it is back."""

    def __init__(self, give_up_after: int) -> None:
        self._give_up_after = give_up_after
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._places: set[Place] = set()
        self._looked = 0.0
        self._why = ""
        self._refusal: str | None = None

    def enter(self) -> None:
        """Raises Unavailable where it is down."""
        with self._lock:
            if self._refusal is not None:
                raise Unavailable(self._refusal)
            if self._in_a_row < self._give_up_after:
                return
            now = time.monotonic()
            if now - self._looked < PROBE_S:
                raise Unavailable(f"the judge is down: {self._why}")
            self._looked = now

    def failed(self, why: str, places: Sequence[Place]) -> frozenset[Place]:
        """Those where nobody answered, if it counts as down from now on."""
        with self._lock:
            self._in_a_row += 1
            self._places.update(places)
            self._why = why
            if self._in_a_row != self._give_up_after:
                return frozenset()
            self._looked = time.monotonic()
            return frozenset(self._places)

    def refused(self, why: str) -> None:
        """It never will answer: a wrong key, no such model."""
        with self._lock:
            self._refusal = why

    def answered(self) -> None:
        with self._lock:
            self._in_a_row = 0
            self._places.clear()


class _Trouble:
    """What is said of failures while they go on: a line now and then, and one when they are over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said = -TOLD_EVERY_S
        self._since: float | None = None
        """When what was told of began; None where nobody was told of any."""
        self._attempts = 0

    def met(self, words: str) -> None:
        with self._lock:
            now = time.monotonic()
            self._attempts += 1
            if now - self._said < TOLD_EVERY_S:
                return
            self._said = now
            self._since = now if self._since is None else self._since
        log.info("the judge gives no answer: %s", words)

    def over(self) -> None:
        with self._lock:
            since, self._since = self._since, None
            attempts, self._attempts = self._attempts, 0
        if since is not None:
            log.info("the judge answers, after %d failures in %.0f s", attempts, time.monotonic() - since)


class _Loop:
    """A client in a thread of its own, which starts with the first question."""

    def __init__(self, make: Callable[[Callable[[], bool]], Client]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Client | None = None
        self._closed = False
        self._idle = threading.Condition()
        self._busy = 0

    @property
    def failed_attempts(self) -> int:
        return 0 if self._client is None else self._client.failed_attempts

    def ask(self, body: dict[str, Any], seconds: float, tried: list[Place]) -> Reply:
        """As `Client.ask`; raises TimeoutError as well."""
        with self._lock:
            if self._closed:
                raise Unanswered("the judge is no longer asked")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="judge", daemon=True).start()
                client = self._make(lambda: self._closed)
                self._run(client.__aenter__(), 10.0)
                self._client = client
        assert self._client is not None
        return self._run(self._client.ask(body, tried), seconds)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, what was asked is waited for when this is closed."""
        with self._idle:
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Waits a little for what was asked: it is paid for. Safe to call twice."""
        with self._lock:
            self._closed = True
        with self._idle:
            self._idle.wait_for(lambda: not self._busy, CLOSE_S)
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._client is not None:
            leaving = asyncio.run_coroutine_threadsafe(self._client.__aexit__(), loop)
            concurrent.futures.wait([leaving], 5.0)
            loop.call_soon_threadsafe(loop.stop)

    def _run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        loop = self._loop
        assert loop is not None
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise
        except concurrent.futures.CancelledError as error:
            raise Unanswered("the judge is no longer asked") from error
