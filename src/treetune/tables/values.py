"""The numbers of an evaluation that a column or a panel may show, and how they are read from its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from treetune.config.errors import did_you_mean
from treetune.vocabulary import FULL_REWARD

Better = Literal["higher", "lower", "neither"]

PASS_AT_1 = "pass_at_1"
SPEED_UP = "speed_up"
"""Over another row, so not in any evaluation's files."""

TOTAL, LONGEST = "total_num_tokens", "num_tokens_in_the_longest_thread"
THREADS = "threads"
"""The key of both files under which the numbers of threads stand."""


@dataclass(frozen=True)
class Value:
    """What a number is: a `share` of 1 or not, and which way a difference is an improvement."""

    better: Better
    share: bool = False
    of_threads: bool = False


_OWN = {
    PASS_AT_1: Value("higher", share=True),
    "majority_vote": Value("higher", share=True),
    "unfinished": Value("lower", share=True),
    "mean_tokens": Value("lower"),
}
_OF_THREADS = {
    TOTAL: Value("lower", of_threads=True),
    LONGEST: Value("lower", of_threads=True),
    "acceleration_ratio": Value("higher", share=True, of_threads=True),
    "parallel_ratio": Value("neither", share=True, of_threads=True),
    "parallel_count": Value("neither", of_threads=True),
    "with_parallel": Value("neither", share=True, of_threads=True),
    "thread_counts_per_block": Value("neither", of_threads=True),
    "avg_tokens_per_parallel_block": Value("neither", of_threads=True),
    "format_correct": Value("higher", share=True, of_threads=True),
    "seconds_sampling": Value("lower", of_threads=True),
    "seconds_critical": Value("lower", of_threads=True),
}
VALUES: Mapping[str, Value] = {**_OWN, **_OF_THREADS, SPEED_UP: Value("higher")}
"""By name. Beside them there are ``pass_at_K`` for every K that the evaluation's samples allow, and
``<name>_right`` of each number of threads: its mean over right answers alone."""

RIGHT = "_right"


def value_named(name: str) -> Value:
    """Raises ValueError for a name that no evaluation has, with the nearest that one has."""
    if name in VALUES:
        return VALUES[name]
    if name.removesuffix(RIGHT) in _OF_THREADS:
        return _OF_THREADS[name.removesuffix(RIGHT)]
    if re.fullmatch(r"pass_at_[1-9]\d*", name):
        return VALUES[PASS_AT_1]
    raise ValueError(
        f"{name!r} is no number of an evaluation; {did_you_mean(name, list(VALUES))} (pass_at_K is known for"
        " other K as well)"
    )


def number_in(summary: Mapping[str, Any], name: str, where: Path | str) -> float:
    """The number in an evaluation's summary. Raises ValueError that says what the summary lacks."""
    if value_named(name).of_threads:
        threads = summary.get(THREADS)
        if not isinstance(threads, Mapping):
            raise ValueError(
                f"no threads counted: {where} has no key {THREADS!r}. It is from before threads were counted,"
                " or the tags are no tokens of the model"
            )
        found, missing = threads.get(name), f"no {name}: not in {THREADS} of {where}"
    elif name in summary:
        found, missing = summary[name], f"no {name}: not in {where}"
    else:
        found = (summary.get("pass_at_k") or {}).get(name.removeprefix("pass_at_"))
        missing = f"no {name}: {where} is of {summary.get('samples', 'too few')} samples to a problem"
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(missing)
    return float(found)


def by_problem(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    """Each problem's mean over its answers; None where it is no mean over answers, or one lacks it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        number = _of_answer(row, name)
        if number is None:
            return None
        found.setdefault(row["problem"], []).append(number)
    return {problem: sum(some) / len(some) for problem, some in found.items()}


def _of_answer(row: Mapping[str, Any], name: str) -> float | None:
    if name == PASS_AT_1:
        return float(row["reward"] >= FULL_REWARD)
    if name == "unfinished":
        found: Any = row.get("finish_reason") and float(row["finish_reason"] == "length")
    elif name == "mean_tokens":
        found = row.get("tokens")
    else:
        found = (row.get(THREADS) or {}).get(name)
    return float(found) if isinstance(found, int | float) else None
