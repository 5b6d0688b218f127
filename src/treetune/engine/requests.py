"""Defines what is asked of an engine, and what it returns, as token ids.

The nouns::

    SamplingParams    how samples are drawn
    Request           asks for samples after a prompt
    ScoreRequest      asks for the log-probs of given tokens after a prompt
    Completion        a sample of a request, or the tokens of a score request with their log-probs
    Deferred          requests that wait for something else, such as the reply of an environment
    OnResult          called with the samples of a request, and returns the requests that follow
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from treetune.overriding import override
from treetune.vocabulary import (
    Branch,
    Column,
    Columnar,
    FinishReason,
    Segment,
    TokenIds,
    concatenate,
    logprob_array,
    token_array,
)


@dataclass(frozen=True)
class SamplingParams:
    """The settings of sampling.

    The engine ends a sample at a stop string, at a token of `stop_ids` and at an end token of the model. The
    tokens of the stop string or the stop token stay in the sample, since they were sampled.
    """

    max_tokens: int
    """The most tokens of a sample."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """The number of likeliest tokens to sample among; -1: all tokens."""
    stop: tuple[str, ...] = ()
    """The stop strings."""
    stop_ids: tuple[int, ...] = ()

    def with_special_stops(self, special_ids: Mapping[str, int]) -> SamplingParams:
        """Returns settings in which stop strings that are special tokens have become `stop_ids`. An engine
        looks for stop strings in the text of a sample, which doesn't contain special tokens.

        Args:
            special_ids: The ids of special tokens, such as ``{"<|im_end|>": 151645}``.
        """
        ids = [special_ids[text] for text in self.stop if text in special_ids]
        texts = tuple(text for text in self.stop if text not in special_ids)
        return replace(self, stop=texts, stop_ids=(*self.stop_ids, *ids)) if ids else self


ANSWER_PRIORITY, CONTINUATION_PRIORITY = 0, 1
"""The priorities of requests. Requests with the lower number are sampled first."""


@dataclass(frozen=True, eq=False)
class Request(Columnar):
    """A request for `n` samples after one prompt.

    Sample i is drawn with the seed ``seed + i``, and depends on nothing else: neither on `priority`, which
    orders requests, nor on `reads_logprobs`, nor on the other requests.

    Example: eight answers of at most 64 tokens to a prompt of four::

        Request(prompt_ids=array([17, 10, 17, 28]), seed=5122, n=8, sampling=SamplingParams(max_tokens=64))
    """

    prompt_ids: TokenIds
    seed: int
    n: int
    sampling: SamplingParams
    priority: int = field(default=ANSWER_PRIORITY, compare=False)
    reads_logprobs: bool = True
    """Whether the caller reads the samples' log-probs. If it doesn't, they are neither sent nor stored."""

    def __post_init__(self) -> None:
        self._set("prompt_ids", token_array(self.prompt_ids))


@dataclass(frozen=True, eq=False)
class ScoreRequest(Request):
    """A request for the log-probs of given tokens after a prompt: under the model's whole distributions, at
    temperature 1, without top-p and top-k.

    Nothing is sampled. The request has one completion, which consists of `text_ids`. Programs use
    `Engine.score`, which makes this request.

    Example: the log-probs of the text ``4`` and the end token after a prompt of four tokens::

        ScoreRequest(prompt_ids=array([17, 10, 17, 28]), text_ids=array([20, 2]))
    """

    seed: int = 0
    n: int = 1
    # Nothing is sampled, but a vLLM server needs room for one token after the text.
    sampling: SamplingParams = SamplingParams(max_tokens=1)
    priority: int = field(default=CONTINUATION_PRIORITY, compare=False)
    text_ids: TokenIds = field(kw_only=True)
    """The tokens that are scored."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("text_ids", token_array(self.text_ids))

    @property
    def all_ids(self) -> TokenIds:
        """The prompt and the text."""
        return concatenate([self.prompt_ids, self.text_ids])


@dataclass(frozen=True, eq=False)
class Completion(Columnar):
    """A sample of a request, or the given tokens of a `ScoreRequest`, whose finish reason is ``length``.

    Example: the text ``4`` and the end token, sampled by the policy after three iterations::

        Completion(token_ids=array([20, 2]), logprobs=array([-0.11, -0.02]), finish_reason='stop',
                   policy_version=3, seconds=0.8)
    """

    token_ids: TokenIds
    """The sampled tokens, with the end token, or the given ones."""
    logprobs: Column | None
    """The log-probs of the tokens; None if the request doesn't need them."""
    finish_reason: FinishReason
    policy_version: int
    """The version of the weights that sampled it: the number of iterations that had trained them."""
    seconds: float = field(default=0.0, compare=False)
    """The seconds until the answer with this sample had arrived. They differ from run to run."""

    def __post_init__(self) -> None:
        self._set("token_ids", token_array(self.token_ids))
        if self.logprobs is not None:
            self._set("logprobs", logprob_array(self.logprobs))

    def segment(self, branch: Branch = ()) -> Segment:
        """Returns the sample as a segment of an answer."""
        return Segment(
            self.token_ids,
            logprobs=self.logprobs,
            policy_version=self.policy_version,
            branch=branch,
            seconds=self.seconds,
        )


@dataclass(frozen=True, eq=False)
class Deferred:
    """Requests that depend on something that isn't known yet, such as the reply of an environment.

    Once `ready` is done, with a result or an error, the thread that runs `generate` calls `requests`. The
    requests that this call returns are treated like those that `OnResult` returns. If the call raises,
    `generate` raises.

    Only engines and `ProgramLoop` use this class. A program awaits `result_of(future)` instead.
    """

    ready: Future[Any]
    requests: Callable[[], Sequence[Request | Deferred]]


OnResult = Callable[[int, list[Completion]], Sequence[Request | Deferred] | None]
"""A function that is called with a request's index and its completions as soon as they have arrived, in any
order of requests.

It may return further requests, which follow from these completions. Their indices continue those of the
earlier requests. They are sent before waiting requests of the same priority, so that answers which have begun
are finished first. Requests that have to wait for something else are returned as `Deferred`; `generate`
continues meanwhile, and doesn't return before they are answered, too."""
