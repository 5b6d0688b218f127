"""The line of an evaluation that an answer of another program becomes, and what all readers share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treetune.view.store.folders import digest
from treetune.view.store.foreign.conversation import turns, written

UNFINISHED = "length"
"""The reason for the end of an answer that was cut off."""

_CUT_OFF = re.compile(r"length|too_?long|max_(\w+_)?tokens?|truncat|timed?_?out|context", re.IGNORECASE)

NESTED = 2
"""Levels of objects of numbers that become numbers of the answer."""

LARGEST_COUNT = 2**53
"""Tokens and samples; what is more is none."""

MOST_NUMBERS = 200
"""Numbers of one answer that are kept."""


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
) -> dict[str, Any]:
    """Returns the line of an evaluation. A rollout that failed is not graded, whatever number stands there:
    nobody has looked at its answer."""
    if outcome is None:
        outcome = "error" if error else "unavailable" if reward is None else "ok"
    return {
        "problem": problem,
        "sample": sample if sample is not None and sample <= LARGEST_COUNT else None,
        "prompt": written(prompt),
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
    }


def _count(value: object) -> int | None:
    number = number_of(value) if isinstance(value, int | float) else None
    return int(number) if number is not None and 0 <= number <= LARGEST_COUNT else None


def problem_name(prompt: Any, task: object = None, identity: object = None, *, unique: bool = False) -> str:
    """Returns the name of a problem: its task and its id, and a digest of its prompt.

    Ids of other programs are often places in a list (0, 1, 2), or 0 for all, and several tasks write into one
    file: the prompt tells them apart. `unique` says that the task and the id already do.
    """
    parts = [str(part) for part in (task, identity) if is_plain(part) and str(part)]
    mark = digest(written(prompt))
    if unique and parts:
        return "/".join(parts)
    return f"{'/'.join(parts)}@{mark[:6]}" if parts else mark[:8]


def is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def is_number(value: object) -> bool:
    """Returns whether a value is a finite number; a bool is one of 0 and 1."""
    return isinstance(value, int | float) and number_of(value) is not None


def number_of(value: object) -> float | None:
    """Returns a value as a number, of a text too; None for NaN, infinity, null and all else."""
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
    """Returns the finite numbers of an object and of those within it, named by their path."""
    numbers = dict[str, float]()
    for path, number in _numbers(values, without, NESTED):
        if len(numbers) == MOST_NUMBERS:
            break
        numbers[path] = number
    return numbers


def _numbers(values: Mapping[str, Any], without: Sequence[str], depth: int) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if name in without or not isinstance(name, str):
            continue
        if isinstance(value, Mapping) and depth:
            for path, inner in _numbers(value, (), depth - 1):
                yield f"{name}/{path}", inner
        elif isinstance(value, int | float) and (number := number_of(value)) is not None:
            yield name, number


def finish_reason_of(reason: object, *, truncated: object = False) -> str | None:
    """Returns why an answer ended; `UNFINISHED` for one that was cut off by a limit of length or time."""
    if truncated is True or (isinstance(reason, str) and _CUT_OFF.search(reason)):
        return UNFINISHED
    return reason if isinstance(reason, str) and reason else None


def output_tokens(usage: object) -> float | None:
    """Returns how many tokens the model wrote, of a usage as providers write it."""
    if not isinstance(usage, Mapping):
        return None
    for name in ("output_tokens", "completion_tokens", "generated_tokens"):
        if is_number(usage.get(name)):
            return usage[name]
    return None


def error_words(error: Any) -> str:
    """Describes an error as programs write it: a text, an object, or a list of these."""
    if not error:
        return ""
    if isinstance(error, str):
        return error
    if isinstance(error, list):
        return "; ".join(filter(None, map(error_words, error)))
    if isinstance(error, Mapping):
        kind = error.get("type") or error.get("error") or error.get("name")
        told = next(
            (
                error[key]
                for key in ("message", "error_chain_str", "error_chain_repr", "detail")
                if error.get(key)
            ),
            "",
        )
        parts = [part if isinstance(part, str) else written(part) for part in (kind, told) if part]
        return ": ".join(dict.fromkeys(parts)) or written(error)
    return written(error)
