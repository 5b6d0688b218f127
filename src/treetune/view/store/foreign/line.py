"""Makes the line of an evaluation from another program's answer, and has helpers that all readers use."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treetune.view.store.folders import short_hash
from treetune.view.store.foreign.conversation import (
    MESSAGE_FIELDS,
    is_conversation,
    is_message,
    read_turns,
    write_as_text,
)

UNFINISHED_REASON = "length"
"""The finish reason of an answer that was cut off."""

# Words in the finish reasons of other programs that mean that the answer was cut off.
_CUT_OFF = re.compile(r"length|too_?long|max_(\w+_)?tokens?|truncat|timed?_?out|context", re.IGNORECASE)

NESTED_LEVELS = 2
"""The number of levels of nested objects whose numbers become numbers of the answer."""

LARGEST_COUNT = 2**53
"""The largest number of tokens, and the largest number of a sample, that is accepted. A larger one counts as
missing."""

MOST_NUMBERS = 200
"""The most numbers that are kept of an answer."""


def make_line(
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
    """Returns an answer in the form of a line of an evaluation's file.

    A rollout that failed counts as not graded, even if the program wrote a number, because its grader didn't
    see a whole answer.

    Args:
        prompt: A text, or a conversation as a list of messages.
        text: The answer as a text, a message, or a list of messages.
        reward: The reward; None if it is unknown.
        problem: The name of the problem.
        gold: The reference answer; None if it is unknown.
        error: The error with which the rollout failed; empty if it didn't fail.
        finish_reason: The reason why the answer ended, which is `UNFINISHED_REASON` if it was cut off.
        tokens: The number of tokens that the model wrote. Anything that is no such number becomes None.
        extracted: The part of the answer that the grader compared.
        message: Remarks on the answer and its reward.
        outcome: The grader's outcome; None if it follows from `error` and `reward`.
        numbers: Further numbers of the answer, by name.
        sample: The number of the answer among those to its problem, from 0; None if it is unknown.
        changed: The reason why the text that pages show differs from what the model wrote. If it is empty,
            `describe_change` finds it.
    """
    if outcome is None:
        if error:
            outcome = "error"
        else:
            outcome = "unavailable" if reward is None else "ok"
    return {
        "problem": problem,
        # A larger number, which can only be a mistake, might not fit into the column of the index.
        "sample": sample if sample is not None and sample <= LARGEST_COUNT else None,
        "prompt": write_as_text(prompt),
        # A conversation of a single message is shown as a plain prompt.
        "messages": read_turns(prompt) if isinstance(prompt, list) and len(prompt) > 1 else [],
        "text": write_as_text(text),
        "gold": None if gold is None else write_as_text(gold),
        "reward": reward,
        "outcome": outcome,
        "finish_reason": finish_reason,
        "tokens": _as_count(tokens),
        "extracted": None if extracted is None else write_as_text(extracted),
        "message": "; ".join(part for part in (error, message) if part),
        "numbers": dict(numbers or {}),
        # Here a conversation of a single message is kept as well, because `treetune credit` encodes it with
        # the chat template.
        "asked_messages": read_turns(prompt),
        "changed": changed or describe_change(text),
    }


def describe_change(answer: Any) -> str:
    """Returns the reason why the text that pages show of an answer differs from what the model wrote.

    It is empty for an answer that is a text, or a single message that has only text: these are shown as the
    model wrote them. In an answer of several messages, or with thoughts or calls of tools in separate fields,
    the chat template put tokens around each part. Pages show these parts without those tokens. Example:
    "several messages".
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


def _as_count(value: object) -> int | None:
    """Returns a value as a count; None if it is no number from 0 to LARGEST_COUNT."""
    number = number_of(value) if isinstance(value, int | float) else None
    return int(number) if number is not None and 0 <= number <= LARGEST_COUNT else None


def problem_name(prompt: Any, task: object = None, identity: object = None, *, unique: bool = False) -> str:
    """Returns the name of a problem: its task and its id, and a hash of its prompt.

    The ids of other programs are often positions in a list (0, 1, 2), or 0 for all problems, and several
    tasks may write into the same file. So the name has the hash, unless task and id together are `unique`.

    Examples: "gsm8k/17@3f2a1b", and "gsm8k/17" if task and id are unique.
    """
    parts = [str(part) for part in (task, identity) if is_plain(part) and str(part)]
    task_and_id = "/".join(parts)
    prompt_hash = short_hash(write_as_text(prompt))
    if not parts:
        return prompt_hash[:8]
    return task_and_id if unique else f"{task_and_id}@{prompt_hash[:6]}"


def is_plain(value: object) -> bool:
    """Returns whether a value is a text or a number."""
    return isinstance(value, str | int | float)


def is_number(value: object) -> bool:
    """Returns whether a value is a finite number. True and False are numbers, too: 1 and 0."""
    return isinstance(value, int | float) and number_of(value) is not None


def number_of(value: object) -> float | None:
    """Returns a number, or a text that is one, as a float. Returns None for NaN, infinity and all else."""
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
    """Returns the finite numbers of an object and of objects nested in it, by path: {"metrics/length": 31.0}.

    Fields of the object itself whose names are in `without` are left out. At most `MOST_NUMBERS` are
    returned.
    """
    numbers = dict[str, float]()
    for path, number in _find_numbers(values, without, NESTED_LEVELS):
        if len(numbers) == MOST_NUMBERS:
            break
        numbers[path] = number
    return numbers


def _find_numbers(
    values: Mapping[str, Any], left_out_names: Sequence[str], depth: int
) -> Iterator[tuple[str, float]]:
    """Yields (path, number) for each finite number of an object and of objects nested in it.

    `left_out_names` has the names of fields that are left out. Fields of nested objects with these names are
    not left out. `depth` is the number of levels of nested objects that are read.
    """
    for name, value in values.items():
        if name in left_out_names or not isinstance(name, str):
            continue
        if isinstance(value, Mapping) and depth:
            for path, inner in _find_numbers(value, (), depth - 1):
                yield f"{name}/{path}", inner
        elif isinstance(value, int | float) and (number := number_of(value)) is not None:
            yield name, number


def finish_reason_of(reason: object, *, truncated: object = False) -> str | None:
    """Returns an answer's finish reason, which is `UNFINISHED_REASON` if a limit of length or time cut the
    answer off.

    Returns None if the program gives no reason. `truncated` is True if the program says in another field that
    the answer was cut off.
    """
    if truncated is True or (isinstance(reason, str) and _CUT_OFF.search(reason)):
        return UNFINISHED_REASON
    return reason if isinstance(reason, str) and reason else None


def output_tokens(usage: object) -> float | None:
    """Returns the number of tokens that the model wrote, from the usage in a provider's reply.

    Returns None if the usage doesn't say it.
    """
    if not isinstance(usage, Mapping):
        return None
    for name in ("output_tokens", "completion_tokens", "generated_tokens"):
        if is_number(usage.get(name)):
            return usage[name]
    return None


def describe_error(error: Any) -> str:
    """Returns the text of an error, which may be a text, an object, or a list of them. It is empty if there
    is no error."""
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
        parts = [part if isinstance(part, str) else write_as_text(part) for part in (kind, message) if part]
        # The keys of a dictionary are distinct, so a kind that equals the message is written once.
        return ": ".join(dict.fromkeys(parts)) or write_as_text(error)
    return write_as_text(error)
