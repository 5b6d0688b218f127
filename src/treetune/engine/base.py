"""The engine's interface: token ids in, token ids out, weights exchanged in place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from treetune.store.files import write_json
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

T = TypeVar("T")

TransferMethod = Literal["file", "shared_memory", "cuda_ipc", "nccl"]
"""The ways of new weights into a server (see `treetune.engine.transfer`)."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings of sampling. Stop strings are matched by the engine in its samples, and their tokens stay in
    the answer, since they were sampled. So does the token of `stop_ids` (beside the end tokens) that ends a
    sample.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def with_special_stops(self, special_ids: Mapping[str, int]) -> SamplingParams:
        """Returns the same with stop strings that are special tokens among `stop_ids`: an engine looks for
        stop strings in text, which doesn't show such tokens."""
        ids = [special_ids[text] for text in self.stop if text in special_ids]
        texts = tuple(text for text in self.stop if text not in special_ids)
        return replace(self, stop=texts, stop_ids=(*self.stop_ids, *ids)) if ids else self


ANSWERS, CONTINUATIONS = 0, 1
"""Priorities of requests: those of the lower number are sampled first."""


@dataclass(frozen=True, eq=False)
class Request(Columnar):
    """`n` samples from one prompt. Sample i is drawn with ``seed + i`` and depends on nothing else: not on
    the `priority`, which says what is sampled first, nor on whether somebody `reads_logprobs`.

    Example: eight answers of at most 64 tokens to a prompt of four::

        Request(prompt_ids=array([17, 10, 17, 28]), seed=5122, n=8, sampling=SamplingParams(max_tokens=64))
    """

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
    """A sample: its ids (the end token included), their log-probs if somebody reads them, the policy version
    that sampled them, and the seconds from the request to the answer (with all other samples of the request),
    which no two runs share.

    Example: ``4`` and the end token, by the policy after three iterations::

        Completion(token_ids=array([20, 2]), logprobs=array([-0.11, -0.02]), finish_reason='stop',
                   policy_version=3, seconds=0.8)
    """

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
        """Returns it as a segment of an answer."""
        return Segment(
            self.token_ids,
            logprobs=self.logprobs,
            policy_version=self.policy_version,
            branch=branch,
            seconds=self.seconds,
        )


@dataclass(frozen=True, eq=False)
class Later:
    """Requests that follow from something that isn't there yet, such as the reply of an environment.

    Once `ready` is done, with a result or an error, `requests` is called in the thread that generates; its
    requests are treated as those that `OnResult` returns. It may raise, which ends generating.

    Only engines and what stands around them deal with these: a program awaits `result_of(future)`.
    """

    ready: Future[Any]
    requests: Callable[[], Sequence[Request | Later]]


OnResult = Callable[[int, list[Completion]], Sequence[Request | Later] | None]
"""Called with the request's index and its completions as soon as they are there, in any order.

It may return further requests, which follow from these completions. They are numbered on from the last
request, and sent before what still waits of their priority, so that what has begun ends first. Those that
have to wait for something else come `Later`; sampling goes on meanwhile, and isn't over before."""


class Tolerance(NamedTuple):
    """The accepted \\|engine log-prob - trainer log-prob\\|: in the mean over all tokens of a canary, and of
    any one. In bfloat16 single tokens lie far off by rounding alone, so that the mean decides."""

    mean: float
    largest: float


@dataclass(frozen=True)
class Canary:
    """A fixed probe of the engine's weights: the engine samples after these prompts, and `score` maps
    (prompt ids, response ids) pairs to the trainer's log-probs at `temperature`. Every rank's `score` is
    called, with no pairs where the rank has no server of its own."""

    prompts: Sequence[TokenIds]
    score: Callable[[Sequence[tuple[TokenIds, TokenIds]]], Sequence[Sequence[float]]]
    tolerance: Tolerance | None = None
    """None is the engine's own for its precision."""
    max_tokens: int = 16
    """Tokens of a sample at most; fewer where the prompt leaves less of the engine's context."""
    seed: int = 0
    temperature: float = 1.0

    def requests(self, context_length: int) -> list[Request]:
        """Returns a request for each prompt. A prompt that fills the context loses its beginning: any text
        shows whose weights they are."""
        requests = []
        for prompt in self.prompts:
            fitting = prompt[-(context_length - 1) :]
            tokens = min(self.max_tokens, context_length - len(fitting))
            sampling = SamplingParams(max_tokens=tokens, temperature=self.temperature)
            requests.append(Request(fitting, self.seed, 1, sampling))
        return requests


@dataclass(frozen=True)
class SyncReport:
    """The result of a weight sync: seconds by part, the largest and the mean |engine - trainer| log-prob,
    restarts. `gave_up` says why the weights come by file from here on, if they came otherwise before."""

    seconds: float
    canary_gap: float
    canary_mean_gap: float = math.nan
    restarts: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    gave_up: str = ""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some of a version's weights on their way into the engine, in the order of the model.

    `path` holds them in safetensors format, and `number` counts from 0 to the `last` one. `digest` is the
    file's if the transfer has it checked (``shared_memory``), and empty otherwise. `tensors` are the same
    weights by name on this rank's device if the transfer needs them there, whole for every stream; nobody
    else has them, and they may be kept until the chunk after the next is asked for.
    """

    path: Path
    number: int
    last: bool
    digest: str
    tensors: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Rendezvous:
    """This rank among the run's, and `folder`, empty at first, which all of them see: it may be None where
    there is one rank alone. `barrier` returns when all ranks have called it."""

    rank: int = 0
    world_size: int = 1
    folder: Path | None = None
    barrier: Callable[[str], None] = lambda name: None
    _meetings: int = field(default=0, init=False)

    def gather(self, value: Any) -> list[Any]:
        """Returns the JSON value of every rank, in rank order. Collective."""
        if self.world_size == 1:
            return [value]
        self._meetings += 1
        write_json(self._file(self._meetings, self.rank), value, durable=False)
        self.barrier("engines agree")
        # Everybody is here, so nobody reads any more what was left at the last meeting. No name comes again:
        # a file system that machines share may show an old file under it.
        self._file(self._meetings - 1, self.rank).unlink(missing_ok=True)
        return [json.loads(self._file(self._meetings, rank).read_text()) for rank in range(self.world_size)]

    def _file(self, meeting: int, rank: int) -> Path:
        assert self.folder is not None
        return self.folder / f"engine-meeting-{meeting}-{rank}.json"


@dataclass(frozen=True)
class EngineLaunch:
    """The facts of a run with which one of its engines is started, beside the engine's settings."""

    weights: Path
    """The folder of the weights that it starts on."""
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
    """The tokens that text doesn't show, by their texts: a stop string that is one is looked for by its
    id."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    ranks: Rendezvous = field(default_factory=Rendezvous)
    transfer: TransferMethod = "file"
    """How new weights come into it."""
    adapter_rank: int | None = None
    """The rank of adapters, if `weights` and the folders that are loaded later hold adapters."""


class Engine:
    """A running (or starting) engine. Not thread-safe but for `close`.

    One is made per rank; where one server serves all ranks, the others' engines are clients of it.
    """

    version: int
    tokens: int
    """Sampled tokens that this rank has been given so far, those of the canary left out."""
    sleeps: bool = False
    """Whether `asleep` gives anybody memory."""
    at_once: int = 256
    """Samples that are drawn at a time; further ones wait."""

    tokens_per_second: float = 0.0
    """The rate of sampling just now, or the last one; 0 before any."""

    def wait_ready(self) -> None:
        """Blocks until a token has been sampled. Raises EngineError with the end of the log."""

    def wait_settled(self) -> None:
        """Blocks until the engine has taken the memory that it is going to hold, where the trainer could
        take it away meanwhile: it measures what is free. Raises EngineError as `wait_ready` does."""

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        """Returns completions in the order of the requests, those that `on_result` asked for behind the given
        ones. Restarts the server and resends if it dies.

        Raises ValueError for a prompt that does not fit into the context, EngineError when the
        configured number of restarts is used up or a deadline passes.
        """
        raise NotImplementedError

    def run(self, program: Coroutine[Any, Any, T]) -> T:
        """Runs a program that awaits `sample`, with all its tasks, and returns its result::

            async def two_answers() -> list[list[Completion]]:
                return await asyncio.gather(engine.sample(first), engine.sample(second))

            engine.run(two_answers())

        Raises what the program raises, and what `generate` raises.
        """
        from treetune.engine.programs import ProgramLoop  # which builds on the nouns of this file

        # Of all that an event loop may have, it has what tasks, futures and semaphores ask for.
        return ProgramLoop(self.generate).run(program)  # type: ignore[abstract]

    async def sample(self, request: Request) -> list[Completion]:
        """Returns the samples of a request, to a program that `run` runs. Other tasks of the program go on
        meanwhile. What a task asks for next goes before what still waits of its priority, so that what has
        begun ends first."""
        from treetune.engine.programs import running_program_loop

        return await running_program_loop().sample(request)

    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        """Puts the weights in `directory` into the live server, drops its prefix cache, and
        compares log-probs with the trainer's. Where its transfer fails, the server reads `directory`, now and
        at later calls; where that fails, a new one is started on it; then EngineError, as at the third
        call in a row that needs a new one. Collective: every rank calls it, rank 0's server loads.

        `chunks` are those weights as they are written there: the server is given each as soon as it is made.
        Making them may be collective, so that every rank goes through them to the end; there the directory is
        whole. None: it is whole already.
        """
        raise NotImplementedError

    def asleep(self, *, keep_weights: bool = True) -> AbstractContextManager[None]:
        """Gives the engine's memory to the trainer inside the block, if so configured; a server that dies
        there is not started anew before the end. Its weights may be dropped where others are loaded before
        anybody samples."""
        return nullcontext()

    def close(self) -> None:
        """Ends the server and everything that it started. Safe to call twice and at exit."""


def check_request(index: int, request: Request, context_length: int) -> None:
    """Raises ValueError for a request that can't be sampled."""
    length, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if not length:
        raise ValueError(f"request {index} has an empty prompt")
    if request.n < 1 or max_tokens < 1:
        raise ValueError(f"request {index} asks for {request.n} samples of at most {max_tokens} tokens")
    if length + max_tokens > context_length:
        raise ValueError(
            f"request {index}: a prompt of {length} tokens and max_tokens = {max_tokens} need"
            f" {length + max_tokens} tokens, and the engine's context_length is {context_length}"
        )


def _forwarded(name: str) -> Any:
    return property(lambda self: getattr(self.engine, name))


class EngineWrapper(Engine):
    """An engine that forwards everything but sampling to another one: a subclass writes `generate`, on which
    `run` and `sample` rest."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    version = _forwarded("version")
    tokens = _forwarded("tokens")
    sleeps = _forwarded("sleeps")
    at_once = _forwarded("at_once")
    tokens_per_second = _forwarded("tokens_per_second")
    wait_ready = _forwarded("wait_ready")
    wait_settled = _forwarded("wait_settled")
    load = _forwarded("load")
    asleep = _forwarded("asleep")
    close = _forwarded("close")
