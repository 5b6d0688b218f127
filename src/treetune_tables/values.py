"""The numbers of an evaluation that a column or a panel may show, and how they are read from its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.config.errors import did_you_mean
from treetune.rollouts.domain_numbers import name_in
from treetune.rollouts.numbers import (
    OF_CORRECT,
    Better,
    declared,
    declared_ratios,
    full_name,
)
from treetune.vocabulary import CORRECT_SCORE

PASS_AT_1 = "pass_at_1"


@dataclass(frozen=True)
class Value:
    """What a number is: a `share` of 1 or not, and which way a difference is an improvement."""

    better: Better
    share: bool = False


_OWN = {
    PASS_AT_1: Value("higher", share=True),
    "majority_vote": Value("higher", share=True),
    "unfinished": Value("lower", share=True),
    "mean_tokens": Value("lower"),
}


def value_named(name: str) -> Value:
    """Raises ValueError for a name that no evaluation has, with the nearest that one has.

    Known are the evaluation's own numbers, ``pass_at_K`` for every K that its samples allow, declared
    numbers of answers (``num_tokens_in_the_longest_thread``, or with its group ``threads/…``), each with
    ``_right`` at its end for the mean over correct answers alone, ratios over another row, and the
    evaluation's own numbers of a domain (``domains/logic/pass_at_1``).
    """
    if (of := name_in(name)) is not None:
        if not of[0] or full_name(of[1]) or is_ratio(of[1]):
            raise ValueError(f"{name!r} is no number of a domain: those are {', '.join(_OWN)} and pass_at_K")
        return value_named(of[1])
    if name in _OWN:
        return _OWN[name]
    if is_ratio(name):
        return Value("higher")
    full = full_name(name)
    if full is not None:
        number = declared()[full.removesuffix(OF_CORRECT)]
        return Value(number.better, number.share)
    if re.fullmatch(r"pass_at_[1-9]\d*", name):
        return _OWN[PASS_AT_1]
    known = [*_OWN, *(full.partition("/")[2] for full in declared()), *declared_ratios()]
    raise ValueError(
        f"{name!r} is no number of an evaluation; {did_you_mean(name, known)} (pass_at_K is known for"
        " other K as well)"
    )


def is_ratio(name: str) -> bool:
    """Whether it is over another row, and so not in any one evaluation's files."""
    return name in declared_ratios()


def number_in(summary: Mapping[str, Any], name: str, where: Path | str) -> float:
    """The number in an evaluation's summary. Raises ValueError that says what the summary lacks."""
    value_named(name)
    if (of := name_in(name)) is not None:
        domains = summary.get("domains") or {}
        if of[0] not in domains:
            there = ", ".join(domains) or "none"
            raise ValueError(f"no domain {of[0]!r} in {where}: its domains are {there}")
        return number_in(domains[of[0]], of[1], where)
    full = full_name(name)
    if full is not None:
        group, _, short = full.partition("/")
        numbers = summary.get(group)
        if not isinstance(numbers, Mapping):
            raise ValueError(
                f"no {group} counted: {where} has no key {group!r}. It is from before they were counted,"
                " or the model's answers have none"
            )
        found, missing = numbers.get(short), f"no {short}: not in {group} of {where}"
    elif name in summary:
        found, missing = summary[name], f"no {name}: not in {where}"
    else:
        found = (summary.get("pass_at_k") or {}).get(name.removeprefix("pass_at_"))
        missing = f"no {name}: {where} is of {summary.get('samples', 'too few')} samples to a problem"
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(missing)
    return float(found)


def by_problem(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    """Each problem's mean over its answers; None where it is no mean over answers, or one lacks it. What
    nobody could grade is no part of an accuracy."""
    domain, name = name_in(name) or ("", name)
    found: dict[str, list[float]] = {}
    for row in rows:
        if domain and row.get("domain") != domain:
            continue
        if name == PASS_AT_1 and row.get("outcome") == "unavailable":
            continue
        number = _of_answer(row, name)
        if number is None:
            return None
        found.setdefault(row["problem"], []).append(number)
    return {problem: sum(some) / len(some) for problem, some in found.items()}


def _of_answer(row: Mapping[str, Any], name: str) -> float | None:
    if name == PASS_AT_1:
        return float(row["reward"] >= CORRECT_SCORE)
    if name == "unfinished":
        found: Any = row.get("finish_reason") and float(row["finish_reason"] == "length")
    elif name == "mean_tokens":
        found = row.get("tokens")
    else:
        group, _, short = (full_name(name) or "").partition("/")
        found = (row.get(group) or {}).get(short)
    return float(found) if isinstance(found, int | float) else None
