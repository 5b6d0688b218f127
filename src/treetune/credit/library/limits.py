"""The cost of a call of the library, and the limits at which it ends.

`LimitedEngine` counts what is sampled, and raises `CreditLimitReached` at the budget, at the deadline, or
when the call is cancelled:

    credit ── generate ──> LimitedEngine ── generate, with an alarm among the requests ──> the user's engine
                             counts each result

The alarm is a `Deferred`, a request that follows when a future is done. A timer sets this future at the
deadline; a cancellation sets it, too. As soon as the future is done, the engine calls `Deferred.requests` of
the alarm in its own thread, and this function raises the error. So the deadline also ends a call that waits
for a long sample.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import Literal

from typing_extensions import override

from treetune.engine.base import Engine, EngineWrapper
from treetune.engine.requests import Completion, Deferred, OnResult, Request, ScoreRequest
from treetune.exceptions import CreditLimitReached


@dataclass(frozen=True)
class CreditCost:
    """The cost of a call: how much it sampled, and how long it took.

    Example: nine continuations of each of 40 states: ``CreditCost(samples=360, tokens=21840, seconds=14.2)``.
    """

    samples: int
    """The number of continuations."""
    tokens: int
    """The number of sampled tokens, without those of prompts and prefixes."""
    seconds: float


class CreditLimits:
    """The limits of one call, and what it has sampled so far."""

    def __init__(
        self, budget: int | None = None, deadline: float | None = None, *, can_be_cancelled: bool = False
    ) -> None:
        """Starts the clock of the deadline.

        Args:
            budget: The largest number of sampled tokens. Samples in flight may exceed it. None: no limit.
            deadline: The seconds after which the call has to end. None: no limit.
            can_be_cancelled: Whether another thread may call `end` to cancel the call.
        """
        if budget is not None and budget < 1:
            raise ValueError(f"budget is {budget}: give a number of tokens, or None for no limit")
        if deadline is not None and deadline <= 0:
            raise ValueError(f"deadline is {deadline}: give seconds, or None for no limit")
        self.budget, self.deadline = budget, deadline
        # Whether calls of the engine get an alarm: a future that ends the engine's wait for samples. If there
        # is no deadline, and the call can't be cancelled, nothing would set it.
        self.has_alarm = can_be_cancelled or deadline is not None
        self._samples = self._tokens = 0
        self._started = time.monotonic()
        self._reached_limit: tuple[str, Literal["deadline", "cancelled"]] | None = None
        """The reason why the call has to end, and the kind of limit; None as long as it may continue."""
        self._alarm: Future[None] = Future()

    @property
    def cost(self) -> CreditCost:
        return CreditCost(self._samples, self._tokens, time.monotonic() - self._started)

    def seconds_left(self) -> float | None:
        """Returns the seconds until the deadline; None if there is none."""
        if self.deadline is None:
            return None
        return max(0.0, self._started + self.deadline - time.monotonic())

    def end(self, reason: str, limit: Literal["deadline", "cancelled"]) -> None:
        """Makes the call end as soon as the engine notices the alarm. Any thread may call this."""
        self._reached_limit = reason, limit
        self.set_off_alarm()

    def renew_alarm(self) -> Future[None]:
        """Makes a new alarm for the next call of the engine, and returns it: a future that ends the engine's
        wait when it is set."""
        self._alarm = Future()
        if self._reached_limit is not None:  # `end` was called between two calls of the engine
            self.set_off_alarm()
        return self._alarm

    @contextlib.contextmanager
    def ending_at_deadline(self) -> Iterator[None]:
        """Calls `end` if the deadline passes before the block ends."""
        seconds_left = self.seconds_left()
        if seconds_left is None:
            yield
            return
        reason = f"the deadline of {self.deadline:g} s has passed"
        timer = threading.Timer(seconds_left, self.end, [reason, "deadline"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def set_off_alarm(self) -> None:
        """Sets the alarm's future, which ends the engine's wait. Does nothing if it is set already."""
        with contextlib.suppress(InvalidStateError):
            self._alarm.set_result(None)

    def raise_if_over(self) -> None:
        """Raises CreditLimitReached if the call has to end."""
        if self._reached_limit is not None:
            reason, limit = self._reached_limit
            raise self._error(reason, limit)

    def count(self, completions: Sequence[Completion]) -> None:
        """Counts the samples of a request. Raises CreditLimitReached if they exceed the budget."""
        self._samples += len(completions)
        self._tokens += sum(len(completion.token_ids) for completion in completions)
        if self.budget is not None and self._tokens > self.budget:
            raise self._error(f"the budget of {self.budget} tokens is used up", "budget")

    def _error(self, reason: str, limit: Literal["budget", "deadline", "cancelled"]) -> CreditLimitReached:
        """Returns the error of a call that has reached a limit, with the call's cost so far."""
        cost = self.cost
        return CreditLimitReached(
            f"{reason}: {cost.samples} continuations with {cost.tokens} tokens were sampled in"
            f" {cost.seconds:.1f} s, and there are no advantages. Give fewer answers in a call, fewer"
            " continuations of a state (the credit's `samples`), or a higher limit",
            limit,
        )


class LimitedEngine(EngineWrapper):
    """An engine whose samples are counted and limited."""

    def __init__(self, engine: Engine, limits: CreditLimits) -> None:
        super().__init__(engine)
        self._limits = limits

    @override
    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        """Samples with the engine, and raises CreditLimitReached when the call reaches one of its limits."""
        if not requests:
            # The alarm below is set off when the last request is answered. Without requests, nothing would
            # set it off.
            return []
        limits = self._limits
        call = _CountedCall(limits, on_result)
        watched = call.watch(requests)
        if not limits.has_alarm:
            return self.engine.generate(watched, call.count_result)
        # A `Deferred` stands for requests that follow when a future is done. An additional `Deferred` has the
        # alarm as its future, and its function raises the error if the call has to end. The alarm is set off
        # at the deadline, when the call is cancelled, or when all requests are answered.
        alarm = Deferred(limits.renew_alarm(), call.end_at_alarm)
        with limits.ending_at_deadline():
            # Engines number requests in the order of this list. The alarm stands for no request. It comes
            # last, so that it doesn't change the numbers.
            return self.engine.generate([*watched, alarm], call.count_result)


class _CountedCall:
    """Counts the answers of one call of the engine, and sets off the alarm after the last one."""

    def __init__(self, limits: CreditLimits, on_result: OnResult | None) -> None:
        self._limits, self._on_result = limits, on_result
        self._unanswered = 0
        self._only_scores: list[bool] = []
        """For each request, by its number, whether it only scores given tokens. Nothing is sampled for such a
        request, so it is not counted."""

    def watch(self, requests: Sequence[Request | Deferred]) -> list[Request | Deferred]:
        """Notes the requests, and returns them. Each `Deferred` is replaced by one whose requests are
        watched, too.

        The requests stay in their order, since engines number requests by their position in the list.
        """
        watched: list[Request | Deferred] = []
        for request in requests:
            if isinstance(request, Deferred):
                watched.append(Deferred(request.ready, partial(self._follow, request)))
            else:
                self._only_scores.append(isinstance(request, ScoreRequest))
                watched.append(request)
        self._unanswered += len(watched)
        return watched

    def count_result(self, number: int, completions: list[Completion]) -> Sequence[Request | Deferred]:
        """Counts the samples of an answered request, and returns the new requests that follow from it."""
        if not self._only_scores[number]:  # a request that scores given tokens samples nothing
            self._limits.count(completions)
        new_requests = self._on_result(number, completions) if self._on_result is not None else None
        return self._replace_answered(new_requests or ())

    def _follow(self, deferred: Deferred) -> list[Request | Deferred]:
        """Returns the requests that a `Deferred` stands for."""
        return self._replace_answered(deferred.requests())

    def _replace_answered(self, new_requests: Sequence[Request | Deferred]) -> list[Request | Deferred]:
        """Counts a request as answered, and the new requests that follow from it as unanswered. Returns the
        new requests as `watch` does."""
        watched = self.watch(new_requests)
        self._unanswered -= 1
        if not self._unanswered:
            # The alarm is a future for which the engine waits as well (`LimitedEngine.generate`). No request
            # is left, so the alarm is set off for the engine to return.
            self._limits.set_off_alarm()
        return watched

    def end_at_alarm(self) -> Sequence[Request]:
        """Raises CreditLimitReached if the call has to end. If it doesn't, all requests are answered, and no
        further request follows."""
        self._limits.raise_if_over()
        return ()
