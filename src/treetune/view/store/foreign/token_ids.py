"""Finds the token ids of an answer in a row of another program, if the program stored them.

slime stores the ids of prompt and answer in one list, and verifiers 0.4 stores the ids of each message. Other
programs may have a field with the ids of the prompt and one with those of the answer. The dumps of verl, TRL
and SkyRL have only texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROMPT_NAMES = ("prompt_ids", "prompt_token_ids", "input_ids")
ANSWER_NAMES = ("response_ids", "response_token_ids", "completion_ids", "completion_token_ids", "output_ids")
MASK_NAMES = ("loss_mask", "response_mask", "completion_mask")
LOGPROB_NAMES = ("rollout_log_probs", "response_logprobs", "completion_logprobs", "logprobs")
"""The names that fields with an entry for each token may have. The first name that a row has is used."""


@dataclass(frozen=True)
class StoredTokens:
    """The token ids of a prompt and its answer, as they were sampled.

    Example: an answer of three tokens, of which a tool wrote the second::

        StoredTokens([12, 7], [5, 6, 0], sampled=[True, False, True], logprobs=[-0.1, 0.0, -1.5])
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    sampled: Sequence[bool] | None = None
    """Whether the model sampled each response token; None if it sampled all of them."""
    logprobs: Sequence[float] | None = None
    """The log-prob of each response token; None if the row has no log-probs."""


def stored_tokens(row: Any) -> StoredTokens | None:
    """Returns the token ids of a row. Returns None if it has none, or if it has several answers.

    The row of an agent has several answers if it has several conversations, or a conversation that forks.
    """
    if not isinstance(row, Mapping):
        return None
    # The form of verifiers: each of the `traces` is a conversation, and the `nodes` of a trace are its
    # messages.
    traces = row.get("traces")
    if isinstance(traces, list):
        is_single = len(traces) == 1 and isinstance(traces[0], Mapping)
        return _tokens_of_trace(traces[0]) if is_single else None
    if isinstance(row.get("nodes"), list):
        return _tokens_of_trace(row)
    # The form of slime: `tokens` has the prompt and the answer, which is the last `response_length` tokens.
    response_length = row.get("response_length")
    tokens = _as_token_ids(row.get("tokens"))
    prompt_ids: list[int] | None
    response_ids: list[int] | None
    if tokens is not None and isinstance(response_length, int) and 0 < response_length < len(tokens):
        prompt_ids, response_ids = tokens[:-response_length], tokens[-response_length:]
    else:
        prompt_ids, response_ids = _first_ids(row, PROMPT_NAMES), _first_ids(row, ANSWER_NAMES)
    if not prompt_ids or not response_ids:
        return None
    return StoredTokens(
        prompt_ids,
        response_ids,
        sampled=_as_mask(_first_column(row, MASK_NAMES, len(response_ids))),
        logprobs=_first_column(row, LOGPROB_NAMES, len(response_ids)),
    )


def _tokens_of_trace(trace: Mapping[str, Any]) -> StoredTokens | None:
    """Returns the tokens of a trace of verifiers.

    Returns None if one of its messages has no token ids, if the conversation forks, or if there is no prompt
    or no answer.
    """
    ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    has_logprobs = True
    for number, node in enumerate(trace.get("nodes") or ()):
        node_ids = _as_token_ids(node.get("token_ids")) if isinstance(node, Mapping) else None
        if node_ids is None:
            return None
        # `parent` is the number of the message that this one follows. If that isn't the message just before
        # it, the conversation forks.
        parent = node.get("parent", number - 1)
        if number > 0 and parent != number - 1:
            return None
        # Without a mask, either all tokens of a message were sampled, or none.
        mask = _as_mask(_as_numbers(node.get("mask"), len(node_ids)))
        node_sampled = [bool(node.get("sampled"))] * len(node_ids) if mask is None else mask
        node_logprobs = _as_numbers(node.get("logprobs"), len(node_ids))
        if node_logprobs is None and any(node_sampled):
            has_logprobs = False
        ids += node_ids
        sampled += node_sampled
        logprobs += node_logprobs or [0.0] * len(node_ids)  # 0 for tokens that weren't sampled
    # The first token belongs to the prompt, whether it was sampled or not. So the answer begins at the first
    # sampled token after it.
    if True not in sampled[1:]:
        return None
    start = sampled.index(True, 1)
    return StoredTokens(
        prompt_ids=ids[:start],
        response_ids=ids[start:],
        sampled=sampled[start:],
        logprobs=logprobs[start:] if has_logprobs else None,
    )


def _first_ids(row: Mapping[str, Any], names: Sequence[str]) -> list[int] | None:
    """Returns the token ids in the first of these fields that has some; None if there is none."""
    for name in names:
        if (ids := _as_token_ids(row.get(name))) is not None:
            return ids
    return None


def _as_token_ids(values: Any) -> list[int] | None:
    """Returns a value as a list of token ids; None if it is anything else."""
    if hasattr(values, "tolist"):  # slime stores tensors
        values = values.tolist()
    if not isinstance(values, list) or not all(isinstance(value, int) and value >= 0 for value in values):
        return None
    return values


def _first_column(row: Mapping[str, Any], names: Sequence[str], length: int) -> list[float] | None:
    """Returns the numbers in the first of these fields that has `length` of them; None if there is none."""
    for name in names:
        if (column := _as_numbers(row.get(name), length)) is not None:
            return column
    return None


def _as_numbers(values: Any, length: int) -> list[float] | None:
    """Returns a value as a list of `length` numbers; None if it is anything else."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list) or len(values) != length:
        return None
    return values if all(isinstance(value, int | float) for value in values) else None


def _as_mask(column: Sequence[float] | None) -> list[bool] | None:
    return None if column is None else [bool(value) for value in column]
