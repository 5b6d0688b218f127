"""Maps rows whose fields have known names: dumps of verl, SkyRL and slime, tables of TRL and W&B, and other
rows with a prompt, an answer and a number.

For each kind of field, the first name in `FIELD_NAMES` that a row has is used. All other numbers are kept,
too. A table of TRL has a column for each reward function, and none for the reward: the reward is their sum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from treetune.exceptions import NotAnAnswer
from treetune.view.store.foreign.conversation import is_conversation, is_message
from treetune.view.store.foreign.line import (
    describe_error,
    finish_reason_of,
    is_number,
    make_line,
    number_of,
    numbers_in,
    output_tokens,
    problem_name,
)

FIELD_NAMES: Mapping[str, tuple[str, ...]] = {
    "text": ("response", "completion", "output", "output_response", "generation"),
    "reward": ("score", "reward", "scores", "rewards"),
    "prompt": ("prompt", "input", "input_prompt", "question", "problem"),
    "gold": ("gts", "gold", "ground_truth", "answer", "target", "label", "solution"),
    "problem": ("example_id", "problem_id", "group_index", "id"),
    "task": ("data_source", "task", "env_name", "env_class"),
    "extracted": ("pred", "prediction", "extracted", "extracted_answer"),
    "error": ("error", "exception"),
    "finish": ("finish_reason", "stop_reason", "stop_condition", "status"),
    "tokens": ("response_length", "completion_length", "completion_tokens", "output_tokens", "num_tokens"),
}
"""The names of fields in other programs, by the kind of field. The first name that a row has is used."""

COLUMNS_OF_TABLE = ("step", "prompt", "completion")
"""The columns of each table of completions of TRL, in addition to those of reward functions."""
NOT_REWARD_COLUMNS = ("step", "advantage", "advantages", *FIELD_NAMES["tokens"])
"""Columns of numbers that are not from reward functions."""

FAILED_REASONS = ("aborted", "abort", "failed", "error")
"""Finish reasons that mean that an answer failed and was not graded: values of slime's status, and reasons
that SkyRL and servers give."""

MAIN_REWARD_NAMES = ("score", "reward", "total", "overall", "acc", "accuracy", "correct")
"""If a reward is an object of several numbers, the first of these names that it has names the reward."""


def _split_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a row in which a conversation in the field ``messages`` is split into prompt and answer.

    The answer begins with the first message of the model. A row without such a conversation, or with a field
    for the answer, is returned as it is.
    """
    messages = row.get("messages")
    if not is_conversation(messages) or any(name in row for name in FIELD_NAMES["text"]):
        return row
    assert isinstance(messages, list)
    roles = [message.get("role") for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(messages)
    return {name: value for name, value in row.items() if name != "messages"} | {
        "prompt": messages[:first],
        "response": messages[first:],
    }


def is_answer(row: Mapping[str, Any]) -> bool:
    """Returns whether a row has a prompt, an answer, and a reward, which may be null."""
    row = _split_messages(row)
    return _first_value(row, "prompt") is not None and _has_field(row, "text") and _has_reward(row)


def _has_field(row: Mapping[str, Any], kind: str) -> bool:
    """Returns whether a row has a field of a kind, which may be null."""
    return any(name in row for name in FIELD_NAMES[kind])


def _has_reward(row: Mapping[str, Any]) -> bool:
    """Returns whether a row has a reward, which may be null, or columns of reward functions."""
    return _has_field(row, "reward") or is_row_of_a_table(row)


def is_row_of_a_table(row: Mapping[str, Any]) -> bool:
    """Returns whether a row is from one of TRL's tables of completions, with columns of reward functions."""
    return all(name in row for name in COLUMNS_OF_TABLE) and bool(_reward_columns(row))


def answer_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row in the form of a line of an evaluation's file (`line`).

    Raises NotAnAnswer for a row without a prompt, an answer or a reward.
    """
    row = _split_messages(row)
    values = {kind: _first_value(row, kind) for kind in FIELD_NAMES}
    prompt = values["prompt"]
    if prompt is None:
        raise NotAnAnswer(f"it has no prompt ({', '.join(FIELD_NAMES['prompt'])})")
    if not _has_field(row, "text"):
        raise NotAnAnswer(f"it has no answer ({', '.join(FIELD_NAMES['text'])})")
    reply = _read_reply(values["text"], values["finish"], row.get("usage"))
    if not _has_reward(row):
        raise NotAnAnswer(f"it has no reward ({', '.join(FIELD_NAMES['reward'])})")
    reward, remark = _read_reward(row, values["reward"])
    error = describe_error(values["error"]) or _find_failure(reply)
    numbers = _read_numbers(row)
    if error and reward is not None:  # a failed rollout counts as not graded
        numbers["reward_of_a_failure"] = reward
    is_cut_off = row.get("truncated") or row.get("is_truncated")
    return make_line(
        prompt=prompt,
        text=reply.text,
        reward=None if error else reward,
        problem=problem_name(prompt, values["task"], values["problem"]),
        gold=values["gold"] if values["gold"] is not None else _read_gold_of_skyrl(row),
        error=error,
        finish_reason=finish_reason_of(reply.finish_reason, truncated=is_cut_off),
        tokens=values["tokens"] if is_number(values["tokens"]) else output_tokens(reply.usage),
        extracted=values["extracted"],
        message=remark,
        numbers=numbers,
    )


class _Reply(NamedTuple):
    """The answer of a row, as far as it doesn't concern the reward."""

    text: Any
    """A text, a message or a conversation; None if the answer failed."""
    finish_reason: Any
    usage: Any
    """The counts of tokens, as endpoints return them."""


def _read_reply(text: Any, finish_reason: Any, usage: Any) -> _Reply:
    """Returns a row's answer. Raises NotAnAnswer for a list of several answers.

    Example: for an endpoint's reply ``{"choices": [{"message": m, "finish_reason": "stop"}], "usage": u}`` as
    the text, the result is ``_Reply(m, "stop", u)``.
    """
    if isinstance(text, Mapping) and isinstance(text.get("choices"), list):  # a reply of an endpoint
        choices = text["choices"]
        usage = usage or text.get("usage")
        finish_reason = finish_reason or next((choice.get("finish_reason") for choice in choices), None)
        text = [choice.get("message") or choice.get("text") for choice in choices]
    if isinstance(text, list) and len(text) > 1 and not is_conversation(text):
        raise NotAnAnswer(f"its answer is a list of {len(text)} values")
    if isinstance(text, list) and len(text) == 1 and not is_message(text[0]):
        [text] = text  # a list of one answer
    return _Reply(text, finish_reason, usage)


def _find_failure(reply: _Reply) -> str:
    """Returns the reason why an answer without an error counts as failed; "" if it doesn't."""
    reason = reply.finish_reason
    if isinstance(reason, str) and reason.casefold() in FAILED_REASONS:
        return f"the answer ended as {reason}"
    return "its answer is null" if reply.text is None else ""


def _read_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row that are kept as numbers of the answer."""
    # These fields have ids, or belong to the problem or the environment.
    other_fields = [
        *FIELD_NAMES["problem"],
        *FIELD_NAMES["text"],
        *FIELD_NAMES["prompt"],
        "metadata",
        "env_extras",
        "reward_model",
    ]
    # The reward isn't repeated among the numbers. If it is an object of several numbers, all of them are
    # kept.
    single_rewards = [name for name in FIELD_NAMES["reward"] if is_number(row.get(name))]
    return numbers_in(row, [*other_fields, *single_rewards])


def _read_gold_of_skyrl(row: Mapping[str, Any]) -> Any:
    """Returns the reference answer in SkyRL's field for it; None if there is none."""
    extras = row.get("env_extras")
    if not isinstance(extras, Mapping):
        return None
    spec = extras.get("reward_spec") or extras.get("reward_model") or {}
    return spec.get("ground_truth") if isinstance(spec, Mapping) else None


def _first_value(row: Mapping[str, Any], kind: str) -> Any:
    """Returns the value of the first field of a kind that isn't null in a row; None if there is none."""
    return next((row[name] for name in FIELD_NAMES[kind] if row.get(name) is not None), None)


def _read_reward(row: Mapping[str, Any], value: Any) -> tuple[float | None, str]:
    """Returns the reward of a row, and a remark.

    The remark says if the reward is one of several numbers, a sum, or missing; otherwise it is empty. `value`
    is the value of the row's field for the reward.
    """
    if isinstance(value, Mapping):
        numbers = numbers_in(value)
        if not numbers:
            return None, "its reward has no number"
        name = next((name for name in MAIN_REWARD_NAMES if name in numbers), next(iter(numbers)))
        remark = f"the reward is {name}, one of {len(numbers)} numbers" if len(numbers) > 1 else ""
        return numbers[name], remark
    if isinstance(value, list):
        if not value:
            return None, "its reward is empty"
        rewards_of_tokens = [number_of(reward) for reward in value]
        finite_rewards = [reward for reward in rewards_of_tokens if reward is not None]
        if len(finite_rewards) < len(value):
            return None, "its reward is a list with values that are not numbers"
        remark = f"the sum of {len(finite_rewards)} numbers" if len(finite_rewards) > 1 else ""
        return sum(finite_rewards), remark
    if _has_field(row, "reward"):
        number = number_of(value)
        if number is None:
            return None, f"its reward is {json.dumps(value)}, which is not a number"
        return number, ""
    columns = _reward_columns(row)  # a table of TRL has a column for each reward function
    scores = [number_of(row[name]) for name in columns]
    finite_scores = [score for score in scores if score is not None]  # a function may skip an answer
    if not finite_scores:
        return None, f"{', '.join(columns)} have no number"
    remark = f"the sum of {', '.join(columns)}" if len(columns) > 1 else ""
    return sum(finite_scores), remark


def _reward_columns(row: Mapping[str, Any]) -> list[str]:
    """Returns the columns of reward functions in a row of TRL's table.

    They are the columns of numbers with "reward" or "score" in their names. If there are none, they are all
    columns of numbers whose names don't have another meaning.
    """
    names_with_other_meaning = {
        *NOT_REWARD_COLUMNS,
        *FIELD_NAMES["prompt"],
        *FIELD_NAMES["text"],
        *FIELD_NAMES["gold"],
        *FIELD_NAMES["problem"],
    }
    columns = []
    for name, value in row.items():
        if name not in names_with_other_meaning and isinstance(value, int | float):
            columns.append(name)
    named_as_rewards = [name for name in columns if "reward" in name.casefold() or "score" in name.casefold()]
    return named_as_rewards or columns
