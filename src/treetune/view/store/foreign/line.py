"""Makes the line of an evaluation from another program's answer, and has helpers of all readers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treetune.view.store.folders import digest
from treetune.view.store.foreign.conversation import (
    MESSAGE_FIELDS,
    is_conversation,
    is_message,
    turns,
    written,
)

UNFINISHED = "length"
"""The finish reason of an answer that was cut off."""

_CUT_OFF = re.compile(r"length|too_?long|max_(\w+_)?tokens?|truncat|timed?_?out|context", re.IGNORECASE)

NESTED = 2
"""The levels of nested objects whose numbers become numbers of the answer."""

LARGEST_COUNT = 2**53
"""The largest number of tokens, and the largest number of a sample, that is believed."""

MOST_NUMBERS = 200
"""The most numbers of an answer that are stored."""


def line(
    *,
    prompt: Any,
    text: Any,
    reward: float | None,
    problem: str,
    gold: Any = None,
    error: str = "",
    finish_reason: str | None = None,
    tokens: object = None,
    extracted: object = None,
    message: str = "",
    outcome: str | None = None,
    numbers: Mapping[str, float] | None = None,
    sample: int | None = None,
    changed: str = "",
) -> dict[str, Any]:
    """Returns the line of an evaluation.

    A rollout that failed counts as not graded, even where the program wrote a number: its grader didn't see a
    whole answer.

    Args:
        prompt: A text, or a conversation as a list of messages.
        text: The answer, also as a message or a list of messages.
        reward: None if it is unknown.
        outcome: None if it follows from `error` and `reward`.
        sample: The number of the answer among those to its problem, from 0.
        changed: Why `text` is not what the model wrote. If this is empty, `describe_change` says why.
    """
    if outcome is None:
        outcome = "error" if error else "unavailable" if reward is None else "ok"
    return {
        "problem": problem,
        "sample": sample if sample is not None and sample <= LARGEST_COUNT else None,
        "prompt": written(prompt),
        # A conversation of a single message is shown as a plain prompt.
        "messages": turns(prompt) if isinstance(prompt, list) and len(prompt) > 1 else [],
        "text": written(text),
        "gold": None if gold is None else written(gold),
        "reward": reward,
        "outcome": outcome,
        "finish_reason": finish_reason,
        "tokens": _count(tokens),
        "extracted": None if extracted is None else written(extracted),
        "message": "; ".join(part for part in (error, message) if part),
        "numbers": dict(numbers or {}),
        # A single message is included here: `treetune credit` encodes the prompt with the chat template.
        "asked_messages": turns(prompt),
        "changed": changed or describe_change(text),
    }


def describe_change(answer: Any) -> str:
    """Returns why the text of an answer is not what the model wrote token by token; empty where it is.

    Answers of several messages, and messages with thoughts or calls of tools in fields of their own, are
    written as text for people, without the tokens that the chat template puts around these parts.

    Examples: "" for a text or a message with text alone, "several messages".
    """
    if is_conversation(answer) and len(answer) > 1:
        return "several messages"
    [message] = answer if is_conversation(answer) else [answer]
    if not is_message(message):
        return ""
    further_fields = [name for name in MESSAGE_FIELDS if name != "content" and message.get(name)]
    if further_fields or not isinstance(message.get("content"), str):
        return "a message with thoughts or calls of tools"
    return ""


def _count(value: object) -> int | None:
    number = number_of(value) if isinstance(value, int | float) else None
    return int(number) if number is not None and 0 <= number <= LARGEST_COUNT else None


def problem_name(prompt: Any, task: object = None, identity: object = None, *, unique: bool = False) -> str:
    """Returns the name of a problem: its task and its id, and a digest of its prompt.

    Ids of other programs are often positions in a list (0, 1, 2), or 0 for all, and several tasks write into
    the same file. So the name contains a hash of the prompt, unless task and id are `unique`.

    Examples: "gsm8k/17@3f2a1b", and "gsm8k/17" if unique.
    """
    parts = [str(part) for part in (task, identity) if is_plain(part) and str(part)]
    mark = digest(written(prompt))
    if unique and parts:
        return "/".join(parts)
    return f"{'/'.join(parts)}@{mark[:6]}" if parts else mark[:8]


def is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def is_number(value: object) -> bool:
    """Returns whether a value is a finite number; True and False count as 1 and 0."""
    return isinstance(value, int | float) and number_of(value) is not None


def number_of(value: object) -> float | None:
    """Returns a number, or a text of one, as a float; None for NaN, infinity and all else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def numbers_in(values: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, float]:
    """Returns the finite numbers of an object and of nested ones by their paths: {"metrics/length": 31.0}."""
    numbers = dict[str, float]()
    for path, number in _numbers(values, without, NESTED):
        if len(numbers) == MOST_NUMBERS:
            break
        numbers[path] = number
    return numbers


def _numbers(values: Mapping[str, Any], without: Sequence[str], depth: int) -> Iterator[tuple[str, float]]:
    """Yields the numbers of an object by their paths. `without` are names of its own fields that are left
    out, and `depth` is the number of levels of nested objects that are read."""
    for name, value in values.items():
        if name in without or not isinstance(name, str):
            continue
        if isinstance(value, Mapping) and depth:
            for path, inner in _numbers(value, (), depth - 1):
                yield f"{name}/{path}", inner
        elif isinstance(value, int | float) and (number := number_of(value)) is not None:
            yield name, number


def finish_reason_of(reason: object, *, truncated: object = False) -> str | None:
    """Returns an answer's finish reason: `UNFINISHED` where a limit of length or time cut it off."""
    if truncated is True or (isinstance(reason, str) and _CUT_OFF.search(reason)):
        return UNFINISHED
    return reason if isinstance(reason, str) and reason else None


def output_tokens(usage: object) -> float | None:
    """Returns the number of tokens that the model wrote, from the usage in a provider's reply."""
    if not isinstance(usage, Mapping):
        return None
    for name in ("output_tokens", "completion_tokens", "generated_tokens"):
        if is_number(usage.get(name)):
            return usage[name]
    return None


def describe_error(error: Any) -> str:
    """Returns the text of an error, which programs write as a text, an object, or a list of these."""
    if not error:
        return ""
    if isinstance(error, str):
        return error
    if isinstance(error, list):
        return "; ".join(filter(None, map(describe_error, error)))
    if isinstance(error, Mapping):
        kind = error.get("type") or error.get("error") or error.get("name")
        message: Any = ""
        for key in ("message", "error_chain_str", "error_chain_repr", "detail"):
            if error.get(key):
                message = error[key]
                break
        parts = [part if isinstance(part, str) else written(part) for part in (kind, message) if part]
        return ": ".join(dict.fromkeys(parts)) or written(error)  # once where both are the same
    return written(error)
