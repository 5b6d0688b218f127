"""Calls the library for requests: a limited number of calls at a time, each with its budget and deadline.

    request ──> waits for a free slot, at most until its deadline ──> CreditAssigner.advantages_async
                                                                           │ in a thread
                slot: a tokenizer and a grader of its own  ────────────────┤
                engine: the servers or the model of the service's owner ───┘

A slot is for one call at a time: tokenizers can't be used by several threads, and a grader remembers the
grades of a call by the names of its problems, which another call may use for other problems.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.concurrency import run_in_threadpool
from typing_extensions import override

from treetune.cluster.credit_service.choices import ALLOWED_CREDITS, read_credit, read_steps
from treetune.cluster.credit_service.messages import CreditSettings
from treetune.config.build import build
from treetune.credit import CreditAssigner, CreditedAnswers, CreditLimitReached, GradedAnswer
from treetune.credit.base import Credit
from treetune.credit.library.assigner import load_tokenizer, read_tokenizer
from treetune.credit.library.engines import open_engine
from treetune.credit.library.servers import CallersServers, read_servers
from treetune.engine.base import Engine
from treetune.engine.requests import SamplingParams
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.pool import GraderPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treetune.vocabulary import TextCodec


Numeric = TypeVar("Numeric", int, float)
Result = TypeVar("Result")


@dataclass(frozen=True)
class ServiceSettings:
    """The settings that the service's owner chooses.

    Example: ``ServiceSettings(engine="http://127.0.0.1:8000", tokenizer="models/rho-1b", grader={"type":
    "math"})``.
    """

    engine: Any = None
    """The engine that samples from the policy, in a form that `CreditAssigner` takes; None: only credit
    without continuations."""
    tokenizer: PreTrainedTokenizerBase | TextCodec | str | Path | None = None
    grader: Grader | Mapping[str, Any] | None = None
    credits: Sequence[str] = ALLOWED_CREDITS
    """The names of the credits that clients may choose."""
    calls: int = 4
    """The number of requests that are worked on at a time. Others wait. With an engine in this process, the
    number is always 1."""
    budget: int | None = None
    """Most sampled tokens of a request; None: any number."""
    deadline: float = 3600.0
    """Most seconds of a request, while it waits and samples. Credit that samples nothing isn't
    interrupted."""


@dataclass(frozen=True)
class _Slot:
    """The tokenizer and the grader of a call. No other call uses them at the same time."""

    tokenizer: Any
    grading: GraderPool | None


class CreditService(AbstractContextManager["CreditService"]):
    """Assigns credit to the answers of requests. Close it, or use it in a `with` statement."""

    def __init__(self, settings: ServiceSettings) -> None:
        """Opens the engine and the tokenizer.

        Raises:
            ConfigError: A configuration is wrong.
            ValueError: The engine or the tokenizer can't be opened, or the servers' API key isn't set.
        """
        import treetune.parts  # noqa: F401  # a configuration may name any part

        unknown = [name for name in settings.credits if name not in Credit.parts_by_name()]
        if unknown:
            raise ValueError(f"there is no credit {unknown[0]!r}: `treetune parts credit` lists them")
        self._settings = settings
        servers = read_servers(settings.engine)  # None if the engine is not given by addresses of servers
        if servers is not None:
            servers.api_key()  # now, and not at the first request
        tokenizer = _find_tokenizer(settings, has_servers=servers is not None)
        grader = settings.grader
        if isinstance(grader, Mapping):  # a mistake is reported before a model is loaded
            grader = build(Grader, dict(grader), key=("grader",))
        self._opened: Engine | None = None
        """The engine that this object has opened and closes."""
        self._graders: list[GraderPool] = []
        self._slots: asyncio.Queue[_Slot] = asyncio.Queue()
        try:
            # Settings of servers that run already, or the engine that this service opens, or None if it has
            # no engine: then only credit that samples nothing can be asked for.
            self._engine: Engine | CallersServers | None = servers or self._open_engine(tokenizer)
            # An engine in this process samples for one call at a time.
            self.calls_at_once = 1 if isinstance(self._engine, Engine) else settings.calls
            self._fill_slots(tokenizer, grader)
        except BaseException:
            self.close()
            raise

    def _open_engine(self, tokenizer: Any) -> Engine | None:
        """Returns the settings' engine. A model, or a folder with a model, is opened as an engine."""
        engine = self._settings.engine
        if engine is None or isinstance(engine, Engine):
            return engine
        codec, special_ids = read_tokenizer(tokenizer)
        assert codec is not None, "there is a tokenizer"
        self._opened = open_engine(engine, codec, special_ids, seed=0)
        return self._opened

    def _fill_slots(self, tokenizer: Any, grader: Grader | None) -> None:
        """Makes a slot for each of the calls that are worked on at a time."""
        for _ in range(self.calls_at_once):
            grading = None
            if grader is not None:
                grading = GraderPool(grader)
                self._graders.append(grading)
            # A copy, since a tokenizer can't be used by several threads at a time.
            self._slots.put_nowait(_Slot(copy.deepcopy(tokenizer), grading))

    async def credit(self, settings: CreditSettings, answers: Sequence[GradedAnswer]) -> CreditedAnswers:
        """Returns the advantages of a request's answers. If the awaiting task is cancelled, sampling ends.

        Raises:
            ValueError: The request asks for something wrong, or for more than the service allows.
            CreditLimitReached: The budget is used up, or the deadline has passed.
            RuntimeError: The grader or the engine failed.
        """
        started = time.monotonic()
        deadline = _choose_limit("deadline", settings.deadline, self._settings.deadline)
        budget = _choose_limit("budget", settings.budget, self._settings.budget)
        assert deadline is not None, "the service has one"
        # In a thread, so that a client's settings with millions of entries keep no other request waiting.
        credit = await run_in_threadpool(read_credit, settings.credit, self._settings.credits)
        steps = None if settings.steps is None else await run_in_threadpool(read_steps, settings.steps)
        sampling = None
        if settings.sampling is not None:
            chosen_sampling = settings.sampling
            sampling = SamplingParams(
                max_tokens=chosen_sampling.max_tokens,
                temperature=chosen_sampling.temperature,
                top_p=chosen_sampling.top_p,
                top_k=chosen_sampling.top_k,
                stop=tuple(chosen_sampling.stop),
                stop_ids=tuple(chosen_sampling.stop_ids),
            )
        try:
            slot = await asyncio.wait_for(self._slots.get(), deadline)
        except TimeoutError as error:
            raise CreditLimitReached(
                f"the deadline of {deadline:g} s has passed, and the request still waited for others: send"
                " fewer requests at a time, or set a later deadline",
                limit="deadline",
            ) from error
        try:
            # The constructor may take a while, since it examines the tokenizer.
            assigner = await _finish_in_thread(
                CreditAssigner,
                credit,
                engine=self._engine,
                grader=slot.grading,
                tokenizer=slot.tokenizer,
                sampling=sampling,
                steps=steps,
                context_length=settings.context_length,
                unfinished_reward=settings.unfinished_reward,
                seed=settings.seed,
            )
            with assigner:
                # At least 0.01, since a deadline has to be positive. Rounded, since a message prints the
                # deadline.
                remaining_s = max(0.01, round(deadline - (time.monotonic() - started), 2))
                return await assigner.advantages_async(
                    answers, iteration=settings.iteration, budget=budget, deadline=remaining_s
                )
        finally:
            self._slots.put_nowait(slot)

    def close(self) -> None:
        """Ends the graders' processes, and the engine if this object has opened it. May be called twice."""
        # The stack calls what was added last first: the graders end before the engine. It also closes the
        # engine if closing a grader fails.
        with ExitStack() as stack:
            if self._opened is not None:
                stack.callback(self._opened.close)
                self._opened = None
            for grading in self._graders:
                stack.callback(grading.close)

    @override
    def __exit__(self, *error: object) -> None:
        self.close()


def _find_tokenizer(settings: ServiceSettings, *, has_servers: bool) -> Any:
    """Returns the tokenizer of the settings, or else that of the engine's folder.

    Raises ValueError if there is an engine and no tokenizer, or if the tokenizer can't be loaded.
    """
    tokenizer = settings.tokenizer
    if tokenizer is None and isinstance(settings.engine, str | Path) and not has_servers:
        # A text that doesn't name servers is a model's folder, which has the tokenizer, too.
        tokenizer = settings.engine
    if tokenizer is None and settings.engine is not None:
        raise ValueError("the grader reads the text that the engine samples: give --tokenizer")
    if isinstance(tokenizer, str | Path):
        return load_tokenizer(tokenizer)
    return tokenizer


async def _finish_in_thread(function: Callable[..., Result], *arguments: Any, **settings: Any) -> Result:
    """Returns the result of a function that is called in a thread.

    If the awaiting task is cancelled, this waits until the function has returned. The function uses the
    tokenizer and the grader of the caller's slot, and the caller gives the slot to another call afterwards.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **settings))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.gather(work, return_exceptions=True)
        raise


def _choose_limit(name: str, chosen: Numeric | None, most_allowed: Numeric | None) -> Numeric | None:
    """Returns a request's limit: the one that the client has `chosen`, or else `most_allowed`, the service's
    limit. Raises ValueError if the client's exceeds the service's."""
    if chosen is not None and most_allowed is not None and chosen > most_allowed:
        # With 15 digits, no number of tokens is rounded.
        raise ValueError(
            f"{name} is {chosen:,.15g}, and this service allows {most_allowed:,.15g}: lower it, or leave it"
            " out"
        )
    return most_allowed if chosen is None else chosen
