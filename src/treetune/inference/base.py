"""What an engine is: token ids in, token ids out, weights exchanged in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treetune.inference.gaps import Tolerance
from treetune.vocabulary import (
    Branch,
    Column,
    Columnar,
    FinishReason,
    Segment,
    TokenIds,
    logprob_array,
    token_array,
)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. Stop strings are matched by the engine in what it samples, and their tokens stay
    in the answer: they were sampled, and nothing that was not is put behind them. So does the one of
    `stop_ids` (beside the end tokens) that ends a sample.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()


ANSWERS, CONTINUATIONS = 0, 1
"""Priorities of requests: those of the lower number are sampled first."""


@dataclass(frozen=True, eq=False)
class Request(Columnar):
    """`n` samples from one prompt. Sample i is drawn with ``seed + i`` and depends on nothing else: not on
    the `priority`, which says what is sampled first, nor on whether somebody `reads_logprobs`."""

    prompt_ids: TokenIds
    seed: int
    n: int
    sampling: SamplingParams
    priority: int = field(default=ANSWERS, compare=False)
    reads_logprobs: bool = True

    def __post_init__(self) -> None:
        self._set("prompt_ids", token_array(self.prompt_ids))


@dataclass(frozen=True, eq=False)
class Completion(Columnar):
    """One sample: its ids (the end token included), their log-probs where somebody reads them, who sampled
    them, and the seconds from asking to having it (with all other samples of its request), which no two runs
    share."""

    token_ids: TokenIds
    logprobs: Column | None
    finish_reason: FinishReason
    policy_version: int
    seconds: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        self._set("token_ids", token_array(self.token_ids))
        if self.logprobs is not None:
            self._set("logprobs", logprob_array(self.logprobs))

    def segment(self, branch: Branch = ()) -> Segment:
        """What it adds to an answer."""
        return Segment(
            self.token_ids,
            logprobs=self.logprobs,
            policy_version=self.policy_version,
            branch=branch,
            seconds=self.seconds,
        )


@dataclass(frozen=True, eq=False)
class Later:
    """Requests that follow from something that isn't there yet, such as what an environment says.

    Once `ready` has come to its end, whichever, `requests` is called in the thread that generates; what it
    gives is treated as what `OnResult` returns. It may raise, which ends generating.
    """

    ready: Future[Any]
    requests: Callable[[], Sequence[Request | Later]]


OnResult = Callable[[int, list[Completion]], Sequence[Request | Later] | None]
"""Called with the request's index and its completions as soon as they are there, in any order.

It may return further requests, which follow from these completions. They are numbered on from the last
request, and sent before what still waits of their priority, so that what has begun ends first. Those that
have to wait for something else come `Later`; sampling goes on meanwhile, and isn't over before."""


@dataclass(frozen=True)
class Canary:
    """What the trainer says about a fixed probe: for these prompts, the engine's own samples are
    scored by `score`, which maps (prompt ids, response ids) pairs to log-probs at `temperature`. A sample
    has at most `max_tokens`, and fewer where its prompt leaves less of the engine's context.
    Every rank's `score` is called, with no pairs where the rank has no server of its own.

    `tolerance` None is the engine's own for its precision.
    """

    prompts: Sequence[TokenIds]
    score: Callable[[Sequence[tuple[TokenIds, TokenIds]]], Sequence[Sequence[float]]]
    tolerance: Tolerance | None = None
    max_tokens: int = 16
    seed: int = 0
    temperature: float = 1.0


@dataclass(frozen=True)
class SyncReport:
    """What a weight sync did: seconds by part, the largest and the mean |engine - trainer| log-prob,
    restarts."""

    seconds: float
    canary_gap: float
    canary_mean_gap: float = math.nan
    restarts: int = 0
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some of a version's weights on their way into the engine, in the order of the model.

    `path` holds them in safetensors format, and `number` counts from 0 to the `last` one. `digest` is the
    file's, where the way has it checked (``shared_memory``), and empty otherwise. `tensors` are the same
    weights by name on this rank's device, where the way needs them there; nobody else has them, and they may
    be kept until the chunk after the next is asked for.
    """

    path: Path
    number: int
    last: bool
    digest: str
    tensors: Mapping[str, Any] = field(default_factory=dict)


class Engine:
    """A running (or starting) engine. Not thread-safe but for `close`.

    One is made per rank; where one server serves all ranks, the others' engines are clients of it.
    """

    version: int
    tokens: int
    """Sampled tokens that this rank has been given so far, those of the canary left out."""
    sleeps: bool = False
    """Whether `asleep` gives anybody memory."""

    @property
    def tokens_per_second(self) -> float:
        """How fast it samples just now, or did last."""
        raise NotImplementedError

    def wait_ready(self) -> None:
        """Blocks until a token has been sampled. Raises EngineError with the end of the log."""
        raise NotImplementedError

    def wait_settled(self) -> None:
        """Blocks until the engine has taken the memory that it is going to hold, where the trainer could
        take it away meanwhile: it measures what is free. Raises EngineError as `wait_ready` does."""

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        """Completions in the order of the requests, those that `on_result` asked for behind the given
        ones. Restarts the server and resends if it dies.

        Raises ValueError for a prompt that does not fit into the context, EngineError when the
        configured number of restarts is used up or a deadline passes.
        """
        raise NotImplementedError

    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        """Puts the weights in `directory` into the live server, drops its prefix cache, and
        compares log-probs with the trainer's. A failure restarts the server on those weights and
        tries once more; then EngineError. Collective: every rank calls it, rank 0's server loads.

        `chunks` are those weights as they are written there: the server is given each as soon as it is made.
        Making them may be collective, so that every rank goes through them to the end; there the directory is
        whole. None: it is whole already.
        """
        raise NotImplementedError

    def asleep(self) -> AbstractContextManager[None]:
        """Inside, the engine's memory belongs to the trainer, if so configured; a server that dies there is
        not started anew before the end."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the server and everything that it started. Safe to call twice and at exit."""
        raise NotImplementedError


class EngineError(RuntimeError):
    """The engine failed for good; the message says what was waited for and where the log lies."""
