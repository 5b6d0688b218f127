"""Asks a language model about solutions: each question once, its costs counted and bounded by a budget.

All questions are asked in one event loop::

    Questions.ask, of many solutions at the same time
       │
       ├─ the answer is in the journal ─► returned at once
       ├─ another task asks the same ───► waits for that task
       └─ a task for the request, `SolutionAsker._ask`, which waits for
            _room             one of `concurrency` permits, which each request gives back when it ends
            Ledger.reserved   enough budget: a request that ends frees what it had reserved. If none is in
                              flight, there never is enough: `OutOfBudget`, for all that wait
            EndpointClient    the answer: `timeout` for each of `retries` + 1 attempts, with pauses between

Each attempt has a deadline, and nothing else has. So every request ends, and others that wait for a permit or
for budget go on. After a failure that concerns all requests, requests in flight are not sent again, and
waiting requests raise the failure when it is their turn. `wait_for_all` waits for everything that it was
given, even if some of it raises.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from typing_extensions import override

from treetune.data.prompts import ANSWER_AGAIN
from treetune.domains.endpoints import asking
from treetune.domains.endpoints.asking import AnsweredRequest, AnswerJournal
from treetune.domains.endpoints.client import EndpointClient
from treetune.domains.endpoints.settings import EndpointMessage, EndpointSettings, Prices
from treetune.exceptions import EndpointError, OutOfBudget, RequestRefused, Unanswered, Unreadable
from treetune.tasks.thoughts import read_thoughts


@dataclass
class TokenUsage:
    """The tokens of answers and of their requests. `estimated` counts the answers whose endpoint didn't
    report tokens: for these, bytes are counted as tokens, which is an upper bound."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    estimated: int = 0

    def add(self, input_tokens: int, output_tokens: int, is_estimated: bool) -> None:
        """Adds one answered request."""
        self.requests += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        self.estimated += int(is_estimated)

    def as_row(self, prices: Prices | None) -> dict[str, Any]:
        """Returns the sums for the summary, with the dollars if the prices are known."""
        row: dict[str, Any] = dict(vars(self))
        if prices is not None:
            row["dollars"] = round(prices.dollars(self.input_tokens, self.output_tokens), 6)
        return row


class Ledger:
    """Counts the tokens of all answers, those of earlier runs included. Admits a request only if its highest
    possible cost fits into `budget` (dollars), together with the dollars spent and the highest possible costs
    of the requests in flight."""

    def __init__(self, prices: Prices | None, budget: float | None) -> None:
        assert budget is None or prices is not None
        self.prices = prices
        self.steps: dict[str, TokenUsage] = defaultdict(TokenUsage)
        """The tokens that each kind of question has used. The keys are names such as ``check``."""
        self.exhausted = False
        """Whether a request didn't fit into the budget although no other was in flight. From then on, no
        request is admitted."""
        self._budget = budget
        self._reserved: list[float] = []
        """The highest possible cost of each request in flight, in dollars."""
        self._changed = asyncio.Condition()

    @property
    def total(self) -> TokenUsage:
        """The sums over all steps."""
        total = TokenUsage()
        for usage in self.steps.values():
            for name, value in vars(usage).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    @property
    def dollars(self) -> float:
        """The dollars spent so far; 0 if prices aren't known."""
        total = self.total
        return self.prices.dollars(total.input_tokens, total.output_tokens) if self.prices else 0.0

    @asynccontextmanager
    async def reserve(self, input_tokens: int, output_tokens: int) -> AsyncIterator[None]:
        """Reserves the most that a request may cost, until the ``async with`` block ends.

        The request has at most `input_tokens`, and its answer at most `output_tokens`. Raises OutOfBudget if
        the budget doesn't suffice.
        """
        if self._budget is None or self.prices is None:
            yield
            return
        highest_cost = self.prices.dollars(input_tokens, output_tokens)
        async with self._changed:
            while not self.exhausted and self.dollars + sum(self._reserved) + highest_cost > self._budget:
                # A request in flight mostly costs less than was reserved for it. When it ends, the budget may
                # suffice. With no request in flight, it never will.
                if not self._reserved:
                    self.exhausted = True
                    self._changed.notify_all()  # others that wait have to see it
                else:
                    await self._changed.wait()
            if self.exhausted:
                raise OutOfBudget
            self._reserved.append(highest_cost)
        try:
            yield
        finally:
            async with self._changed:
                self._reserved.remove(highest_cost)
                self._changed.notify_all()


T = TypeVar("T")

TEMPLATE_TOKENS = 1000
"""The most tokens that a chat template is assumed to add to a request. They are reserved in the budget, in
addition to a token for each byte of the request."""


class SolutionAsker(asking.Asker):
    """Sends the questions about all solutions. After a failure that concerns all requests, every further
    request raises this failure."""

    def __init__(
        self,
        client: EndpointClient,
        endpoint: EndpointSettings,
        journal: AnswerJournal,
        ledger: Ledger,
        extra_for: Mapping[Any, Mapping[str, Any]],
    ) -> None:
        super().__init__(client, journal)
        self.failure: EndpointError | None = None
        self._endpoint, self._ledger = endpoint, ledger
        self._extra_for = extra_for
        """Further fields of the requests of a step, by the step's name."""
        self._request_slots = asyncio.Semaphore(endpoint.concurrency)
        self._unanswered_in_a_row = 0
        self._is_answering = False
        """Whether the endpoint has answered a request."""

    @property
    def is_stopping(self) -> bool:
        """Whether no further question can be answered: after a failure, or without budget."""
        return self.failure is not None or self._ledger.exhausted

    async def reply(self, step: str, messages: Sequence[EndpointMessage]) -> AnsweredRequest:
        """Returns the answer to a question of a step. Raises Unanswered, OutOfBudget or EndpointError."""
        return await self.answer(step, self._endpoint.body(messages, self._extra_for.get(step, {})))

    @override
    async def _ask(
        self, key: str, step: str, body: Mapping[str, Any], keep: Callable[[AnsweredRequest], bool]
    ) -> AnsweredRequest:
        """Sends a request if the budget allows it.

        A failure that concerns all requests is kept in `failure`, and ends the work. `keep` tells whether an
        answer is written to the journal.
        """
        most_request_tokens = self.estimated_tokens(body) + TEMPLATE_TOKENS
        most_answer_tokens = self._endpoint.max_tokens
        async with self._request_slots, self._ledger.reserve(most_request_tokens, most_answer_tokens):
            if self.failure is not None:
                raise self.failure
            try:
                answer = await super()._ask(key, step, body, keep)
            except Unanswered as error:
                if isinstance(error, RequestRefused) and self._is_answering:
                    raise  # the endpoint answers others, so the refusal concerns this request only
                self._unanswered_in_a_row += 1
                if self._unanswered_in_a_row >= self._endpoint.give_up_after:
                    self.failure = EndpointError(
                        f"{self._unanswered_in_a_row} requests in a row failed; the last: {error}"
                    )
                raise
            except EndpointError as error:
                self.failure = error
                raise
            self._unanswered_in_a_row = 0
            self._is_answering = True
            self._ledger.steps[step].add(answer.input_tokens, answer.output_tokens, answer.estimated)
            return answer


class Questions:
    """The questions about one solution, with their answers and costs."""

    def __init__(self, asker: SolutionAsker, repairs: int) -> None:
        self._asker, self._repairs = asker, repairs
        self._answers: dict[str, AnsweredRequest] = {}
        """The answers so far, by their keys in the journal."""

    @property
    def keys(self) -> list[str]:
        """The keys of its answers in the journal."""
        return sorted(self._answers)

    @property
    def usage(self) -> TokenUsage:
        usage = TokenUsage()
        for answer in self._answers.values():
            usage.add(answer.input_tokens, answer.output_tokens, answer.estimated)
        return usage

    async def ask(
        self, step: str, messages: Sequence[EndpointMessage], parse: Callable[[str], T]
    ) -> tuple[T, list[EndpointMessage]]:
        """Asks a question, and returns the result of `parse` for the answer, and the conversation so far.

        If `parse` raises Unreadable, or the answer was cut off, the model gets the reason and answers again,
        at most `repairs` times. Raises the last Unreadable, or what the request raises.
        """
        conversation = list(messages)
        for repairs_left in range(self._repairs, -1, -1):
            answer = await self._asker.reply(step, conversation)
            self._answers[answer.key] = answer  # an answer that can't be read counts in `usage` too
            text = without_thought(answer.text)
            try:
                if not answer.complete:
                    raise Unreadable("the answer was cut off at max_tokens")
                if not text:
                    raise Unreadable("the answer is empty")
                return parse(text), [*conversation, ("assistant", text)]
            except Unreadable as error:
                if repairs_left == 0:
                    raise
                repair_request = ANSWER_AGAIN.format(reason=error)
                if text and answer.complete:
                    conversation = [*conversation, ("assistant", text), ("user", repair_request)]
                else:
                    # There is no whole answer to show, so the reason is added to the question.
                    role, last_text = conversation[-1]
                    conversation = [*conversation[:-1], (role, f"{last_text}\n\n{repair_request}")]
        raise AssertionError("every way out of the loop returns or raises")


def without_thought(text: str) -> str:
    """Returns an answer without the thought before it, which some servers leave in the answer."""
    reading = read_thoughts(text)
    # If the text ends with a closing tag, that tag isn't the end of the model's own thought. It belongs to a
    # solution that the answer repeats, and the whole text is the answer.
    ends_with_repeated_tag = not reading.is_cut_off and not reading.answer.strip()
    return text.strip() if ends_with_repeated_tag else reading.answer.strip()


async def wait_for_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Waits until all of the work has ended, so that no paid request is cancelled, and returns the results.
    Raises the first exception, in the order of `work`."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


async def run_workers(worker: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Runs `count` tasks of a worker, and returns when all have ended.

    If a worker raises an error, the others are cancelled, and that error is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        # Callers catch the error itself, and not a group of errors. If several workers fail, it is mostly for
        # the same reason, such as a full disk. So the first error is enough.
        raise errors.exceptions[0] from None
