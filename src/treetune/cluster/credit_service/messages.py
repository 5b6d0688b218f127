"""The requests and the responses of the service. The OpenAPI schema is made from these types."""

from __future__ import annotations

import math
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Len
from pydantic import AllowInfNan, BaseModel, ConfigDict

MOST_ANSWERS = 100_000
"""Most answers of a request."""

TokenId = Annotated[int, Ge(0), Le(2**31 - 1)]
Seed = Annotated[int, Ge(-(2**63)), Le(2**63 - 1)]
Finite = Annotated[float, AllowInfNan(False)]
FiniteOrNull = Finite | None
"""A number of a response; null where it isn't finite, since JSON has no infinities."""


class JsonMessage(BaseModel):
    """A JSON object without unknown keys, in which no text is read as a number."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class AnswerIn(JsonMessage):
    """An answer that was sampled and graded elsewhere, with the keys of `treetune.credit.GradedAnswer`."""

    prompt_ids: Annotated[list[TokenId], Len(1)]
    """The token ids of the whole prompt, with its chat template."""
    response_ids: Annotated[list[TokenId], Len(1)]
    """The token ids of the answer as they were sampled, with the end token, without padding."""
    reward: Finite
    group: str | None = None
    """The name of the problem. Null: answers with equal `prompt_ids` are a group."""
    logprobs: list[Finite] | None = None
    """The log-prob that each token of the answer was sampled with."""
    sampled: list[bool] | None = None
    """True for the tokens that the policy sampled, false for those of a tool. Null: it sampled all."""
    finished: bool = True
    """False for an answer that was cut off."""
    prompt: str = ""
    """The text of the problem, for the grader. Empty: the decoded `prompt_ids`."""
    gold: str = ""
    """The reference answer."""
    data: dict[str, Any] = {}
    """Further columns of the problem, for the grader."""
    step_ends: list[int] | None = None
    """The number of response tokens up to the end of each step. Null: the rule `steps` splits the text."""
    step_rewards: list[Finite] = []
    """The reward of each turn; they add up to `reward`."""
    fork: Annotated[list[int], Len(2, 2)] | None = None
    """The number of the earlier answer in its group from which it branched off, and the number of response
    tokens that both share."""


class SamplingChoice(JsonMessage):
    """The parameters that the answers were sampled with."""

    max_tokens: Annotated[int, Gt(0), Le(2**20)]
    """Most tokens of a whole answer."""
    temperature: Annotated[Finite, Ge(0)] = 1.0
    top_p: Annotated[Finite, Gt(0), Le(1)] = 1.0
    top_k: Annotated[int, Ge(-1)] = -1
    """The number of most probable tokens that are sampled from; -1: all."""
    stop: Annotated[list[str], Len(0, 16)] = []
    stop_ids: Annotated[list[TokenId], Len(0, 1024)] = []


class CreditSettings(JsonMessage):
    """The settings of a request."""

    credit: str | dict[str, Any]
    """The name of a credit, such as ``rloo``, or its configuration, such as ``{"type": "monte_carlo",
    "samples": 9}``."""
    steps: str | dict[str, Any] | None = None
    """The rule that splits answers into steps; null: ``{"type": "lines", "newline": "ends"}``."""
    sampling: SamplingChoice | None = None
    """Needed by credit that samples continuations."""
    context_length: Annotated[int, Gt(1), Le(2**24)] | None = None
    """Most tokens of prompt and answer together. Null: the longest prompt and `max_tokens`."""
    unfinished_reward: Finite | None = 0.0
    """The reward of a continuation that was cut off; null: it is graded."""
    seed: Seed = 0
    """Enters the seeds of continuations."""
    iteration: Seed = 0
    """Enters the seeds of continuations: the trainer's step."""
    budget: Annotated[int, Gt(0)] | None = None
    """Most sampled tokens. Null: the service's limit."""
    deadline: Annotated[Finite, Gt(0)] | None = None
    """Most seconds of the request, while it waits and samples. Null: the service's limit."""


class CreditRequest(CreditSettings):
    """The body of POST /advantages."""

    answers: Annotated[list[AnswerIn], Len(1, MOST_ANSWERS)]
    """All answers to a problem must be in one request."""


class RequestCost(JsonMessage):
    """The samples that were drawn for a request, and the seconds that it took."""

    samples: int
    tokens: int
    seconds: float


class CreditResponse(JsonMessage):
    """The response of POST /advantages. Lists are in the order of the request's answers."""

    advantages: list[list[float]]
    """For each answer an advantage for each token."""
    trained: list[list[bool]]
    """For each answer a mask of the tokens to train."""
    step_ends: list[list[int]]
    """For each answer the number of response tokens up to the end of each step."""
    values: list[list[FiniteOrNull] | None]
    """For each answer the value before each step; null if the credit estimates no values."""
    errors: list[list[FiniteOrNull] | None]
    """The standard errors of `values`."""
    left_out: list[int]
    """The numbers of answers without credit, because no continuation of their prompt could be graded."""
    cost: RequestCost
    metrics: dict[str, FiniteOrNull]
    """The metrics that a run shows."""


class Failure(JsonMessage):
    """The response to a request that failed."""

    error: str
    """The reason of the failure, and what would be right."""


class Health(JsonMessage):
    """The response of GET /health."""

    status: str
    version: str


def finite_or_none(number: float) -> float | None:
    """Returns a number for JSON, which has no infinities: None for them and for NaN."""
    return float(number) if math.isfinite(number) else None
