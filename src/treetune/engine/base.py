"""Defines the interface of engines: requests and samples as token ids, and weights that are exchanged in
place.

The nouns, in the order in which a run meets them::

    EngineLaunch    the facts of the run with which an engine is started
    Request         samples that are asked for after a prompt (in `engine.requests`)
    ScoreRequest    log-probs that are asked for: those of given tokens after a prompt (in `engine.requests`)
    Completion      one of these samples, or the given tokens with their log-probs (in `engine.requests`)
    Chunk           some of the new weights, on their way into the engine
    Canary          a check that the new weights have arrived
    SyncReport      the result of loading new weights
    Engine          the interface, which `VllmEngine` and `InProcessEngine` implement
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from treetune.engine.programs import ProgramLoop, running_program_loop
from treetune.engine.requests import Completion, Deferred, OnResult, Request, SamplingParams, ScoreRequest
from treetune.store.files import write_json
from treetune.vocabulary import Column, TokenIds

T = TypeVar("T")

TransferMethod = Literal["file", "shared_memory", "cuda_ipc", "nccl"]
"""The ways in which new weights are transferred to a server (see `treetune.engine.transfer`)."""


class Tolerance(NamedTuple):
    """The accepted difference between a log-prob of the engine and the trainer's, in nats.

    In bfloat16, rounding alone changes the log-probs of single tokens a lot, so the mean is the more reliable
    bound.
    Example: ``Tolerance(mean=5e-2, largest=2.0)``.
    """

    mean: float
    """The bound of the mean over all tokens of a canary."""
    largest: float
    """The bound of each single token."""


@dataclass(frozen=True)
class Canary:
    """A check that the engine has the trainer's weights: the engine samples after a few prompts, and its
    log-probs of the samples are compared with the trainer's."""

    prompts: Sequence[TokenIds]
    score: Callable[[Sequence[tuple[TokenIds, TokenIds]]], Sequence[Sequence[float]]]
    """Returns the trainer's log-probs of the response tokens, from pairs (prompt, response). It is called on
    every rank, since it may be collective, without pairs on ranks that have no server."""
    tolerance: Tolerance | None = None
    """The accepted difference; None: the engine's default for its precision."""
    max_tokens: int = 16
    """Most tokens of a sample; fewer if the prompt nearly fills the engine's context."""
    seed: int = 0
    """The seed of each sample. The same seed lets old and new weights draw comparable samples."""
    temperature: float = 1.0

    def requests(self, context_length: int) -> list[Request]:
        """Returns a request for one sample after each prompt. If a prompt fills the context, its beginning is
        cut off: any text serves for the comparison."""
        requests = []
        for prompt in self.prompts:
            fitting = prompt[-(context_length - 1) :]  # leaves room for one token
            tokens = min(self.max_tokens, context_length - len(fitting))
            sampling = SamplingParams(max_tokens=tokens, temperature=self.temperature)
            requests.append(Request(fitting, self.seed, n=1, sampling=sampling))
        return requests


@dataclass(frozen=True)
class SyncReport:
    """The result of loading new weights into an engine."""

    seconds: float
    canary_gap: float
    """The largest difference between log-probs of engine and trainer."""
    canary_mean_gap: float = math.nan
    """The mean difference."""
    restarts: int = 0
    """The servers that had to be restarted."""
    parts: dict[str, float] = field(default_factory=dict)
    """The seconds of each part of the sync, such as ``{"reload": 1.2, "sample_canary": 0.3}``."""
    gave_up: str = ""
    """The reason why weights are transferred by file from now on, if the configured transfer failed."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some of a version's weights on their way into the engine, in the order of the model's weights."""

    path: Path
    """The chunk's file, in safetensors format."""
    number: int
    """The number of the chunk, from 0."""
    last: bool
    """Whether it is the last chunk."""
    digest: str
    """The file's digest if the transfer verifies it (``shared_memory``); else empty."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """The weights by name on this rank's device, if the transfer needs them there; else empty. They are
    complete, so every stream of the device may read them. They may be used until the chunk after the next one
    is requested."""


@dataclass
class Rendezvous:
    """The means by which the engines of all ranks exchange values: files in a folder, and a barrier."""

    rank: int = 0
    world_size: int = 1
    folder: Path | None = None
    """A folder that all ranks see, empty at first; None is enough for a single rank."""
    barrier: Callable[[str], None] = lambda name: None
    """Returns when all ranks have called it."""
    _meetings: int = field(default=0, init=False)

    def gather(self, value: Any) -> list[Any]:
        """Returns the JSON value of every rank, in rank order. Collective."""
        if self.world_size == 1:
            return [value]
        self._meetings += 1
        write_json(self._file(self._meetings, self.rank), value, durable=False)
        self.barrier("engines agree")
        # A meeting is a call of `gather` on all ranks. All ranks have come to this meeting, so no rank still
        # reads the files of the meeting before. Each meeting has file names of its own, since a network file
        # system may show an old file under a name that is used again.
        self._file(self._meetings - 1, self.rank).unlink(missing_ok=True)
        return [json.loads(self._file(self._meetings, rank).read_text()) for rank in range(self.world_size)]

    def _file(self, meeting: int, rank: int) -> Path:
        assert self.folder is not None
        return self.folder / f"engine-meeting-{meeting}-{rank}.json"


@dataclass(frozen=True)
class EngineLaunch:
    """The facts of a run with which one of its engines is started, in addition to the engine's settings."""

    weights: Path
    """The folder of the first weights."""
    logs: Path
    """The folder of its logs."""
    seed: int
    context_length: int
    """Tokens of prompt and response together."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    end_ids: Sequence[int] = ()
    """Tokens that end an answer (`TextCodec.end_ids`)."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """The ids of special tokens, which the text of a sample doesn't contain, by their texts."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    ranks: Rendezvous = field(default_factory=Rendezvous)
    transfer: TransferMethod = "file"
    """The way in which new weights are transferred."""
    trains: bool = False
    """Whether a trainer will send new weights."""
    adapter_rank: int | None = None
    """The rank (LoRA's r) of the adapters, if `weights` and the folders that are loaded later hold adapters;
    None if they hold whole models."""


class Engine:
    """A running (or starting) engine. Only `close` may be called from another thread.

    Every rank has an engine. If all ranks share one server, the first rank's engine manages it, and the
    others' are clients of it.
    """

    version: int
    """The version of the present weights: the number of iterations that have trained them."""
    tokens: int
    """The sampled tokens that this rank has received so far, without those of canaries."""
    sleeps: bool = False
    """Whether `asleep` frees memory."""
    scores: bool = False
    """Whether `generate` answers a `ScoreRequest`."""
    at_once: int = 256
    """The most samples that are drawn at the same time. Further samples wait."""

    tokens_per_second: float = 0.0
    """The present rate of sampling, or the last one; 0 before the first sample."""

    def wait_ready(self) -> None:
        """Blocks until the engine has sampled a token. Raises EngineError with the end of the server's log if
        it fails to start."""

    def wait_settled(self) -> None:
        """Blocks until the engine has reserved its memory, if the trainer uses the same device. A server
        sizes its cache by the memory that is free when it starts, which the trainer must not change
        meanwhile. Raises EngineError as `wait_ready` does."""

    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        """Samples all requests, and the further requests that `on_result` returns. If a server dies, it is
        restarted, and its requests are sent again.

        Returns:
            The completions of each request, by the request's index: `requests` have the first indices, and
            the requests that `on_result` returns the next ones. `on_result` is called with the same indices.

        Raises:
            ValueError: A prompt doesn't fit into the context.
            EngineError: A deadline has passed, or a server failed more often than it may be restarted.
        """
        raise NotImplementedError

    def run(self, program: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine that awaits `sample`, and all tasks that it starts, until it returns::

            async def two_answers() -> list[list[Completion]]:
                return await asyncio.gather(engine.sample(first), engine.sample(second))

            completions_of_both = engine.run(two_answers())

        Exceptions of the coroutine and of `generate` reach the caller.

        Returns:
            The coroutine's result.
        """
        # mypy takes ProgramLoop for abstract: it implements only those methods of an event loop that tasks,
        # futures and semaphores call.
        loop = ProgramLoop(self.generate)  # type: ignore[abstract]
        return loop.run(program)

    async def sample(self, request: Request) -> list[Completion]:
        """Returns the samples of a request. Only a program that `run` runs may await this method; other tasks
        of the program run meanwhile. A task's next request is sent before waiting requests of the same
        priority, so that answers which have begun are finished first."""
        return await running_program_loop().sample(request)

    async def score(self, prompt_ids: TokenIds, text_ids: TokenIds) -> Column:
        """Returns the log-probs of given tokens after a prompt, shape [tokens of the text].

        They are the log-probs under the model's whole distributions, at temperature 1. Only a program that
        `run` runs may await this method.

        Scores that are awaited at the same time (`asyncio.gather`) are computed in batches. A vLLM server
        that caches prefixes doesn't compute a prompt again that it has in its cache.

        Example: ``await engine.score(array([17, 10, 17, 28]), array([20, 2]))`` is ``array([-0.11, -0.02])``.

        Raises:
            ValueError: The engine can't score, or the text doesn't fit into the context, or has a token that
                the model doesn't have.
            EngineError: As `generate`.
        """
        if not self.scores:
            raise ValueError(
                f"the engine {type(self).__name__} can't score given tokens: choose the engine 'vllm',"
                " 'plain_vllm' or 'in_process', or let its `generate` answer ScoreRequest and set its"
                " attribute `scores`"
            )
        (completion,) = await self.sample(ScoreRequest(prompt_ids, text_ids=text_ids))
        assert completion.logprobs is not None, "scores are log-probs"
        return completion.logprobs

    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        """Loads new weights into the running servers, drops their prefix caches, and compares their log-probs
        with the trainer's. Collective: every rank calls it, and the ranks that have servers load.

        It makes up to three attempts: first with the configured transfer, then by having the servers read
        `directory`, and last with a new server that starts with `directory`. If the transfer fails, later
        calls begin with the second attempt.

        Args:
            directory: The folder of the weights. It is complete when all chunks have been made.
            version: The version of the weights: the number of iterations that have trained them.
            canary: The check that compares the log-probs: the engine samples after a few prompts, and the
                trainer scores the samples. None: nothing is compared.
            chunks: Makes the weights one chunk after the other, while they are written into the directory.
                Each chunk is sent as soon as it is made. Making them may be collective, so every rank makes
                all of them. None: the directory is complete already.

        Raises:
            EngineError: No attempt succeeded, or a new server was needed at the third call in a row.
        """
        raise NotImplementedError

    def asleep(self, *, keep_weights: bool = True) -> AbstractContextManager[None]:
        """Frees the engine's memory for the trainer during a block, if so configured. A server that dies
        meanwhile is restarted only after the block.

        Args:
            keep_weights: Whether the weights are needed after the block. With False they are dropped, and
                others must be loaded before the next sample.
        """
        return nullcontext()

    def close(self) -> None:
        """Ends the servers and all processes that they started. It may be called twice, and at exit."""


def check_request(index: int, request: Request, context_length: int) -> None:
    """Raises ValueError for a request that can't be sampled or scored: its prompt is empty, it asks for no
    sample or scores no text, or it doesn't fit into the context."""
    length, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if not length:
        raise ValueError(f"request {index} has an empty prompt")
    if isinstance(request, ScoreRequest):
        _check_text(index, request, context_length)
        return
    if request.n < 1 or max_tokens < 1:
        raise ValueError(f"request {index} asks for {request.n} samples of at most {max_tokens} tokens")
    if length + max_tokens > context_length:
        raise ValueError(
            f"request {index}: a prompt of {length} tokens and max_tokens = {max_tokens} need"
            f" {length + max_tokens} tokens, and the engine's context_length is {context_length}"
        )


def _check_text(index: int, request: ScoreRequest, context_length: int) -> None:
    """Raises ValueError for a text that can't be scored."""
    ids, text_tokens = request.all_ids, len(request.text_ids)
    if not text_tokens:
        raise ValueError(f"request {index} has no tokens to score")
    if ids.min() < 0:
        raise ValueError(f"request {index} scores the token {ids.min()}: token ids are 0 or larger")
    # When vLLM scores a text, it also samples one token after it. So there must be room for that token.
    if len(ids) + 1 > context_length:
        raise ValueError(
            f"request {index}: a prompt of {len(request.prompt_ids)} tokens, {text_tokens} tokens to score"
            f" and one after them need {len(ids) + 1} tokens, and the engine's context_length is"
            f" {context_length}: score a shorter text, or raise context_length"
        )


def _forward_attribute(name: str) -> Any:
    """Returns a property that has the value of the wrapped engine's attribute."""
    return property(lambda self: getattr(self.engine, name))


class EngineWrapper(Engine):
    """An engine that forwards everything but sampling to another one. A subclass implements `generate`, which
    `run` and `sample` use."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    version = _forward_attribute("version")
    tokens = _forward_attribute("tokens")
    sleeps = _forward_attribute("sleeps")
    scores = _forward_attribute("scores")
    at_once = _forward_attribute("at_once")
    tokens_per_second = _forward_attribute("tokens_per_second")
    wait_ready = _forward_attribute("wait_ready")
    wait_settled = _forward_attribute("wait_settled")
    load = _forward_attribute("load")
    asleep = _forward_attribute("asleep")
    close = _forward_attribute("close")
