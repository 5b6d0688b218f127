"""The reward of an answer. `treetune new` has copied this file into an experiment on your rows.

Change it as you like.
"""

from __future__ import annotations

import re


def answer_in(text: str) -> str:
    r"""Returns the last line without what announces it: ``Answer: 7`` and ``\boxed{7}`` give ``7``."""
    lines = text.strip().splitlines() or [""]
    return re.split(r"####|answer is|answer:|\\boxed", lines[-1].casefold())[-1].strip(" .:$*{}")


def score(response: str, gold: str) -> float | None:
    """Returns 1 for the reference answer `gold` and 0 for another one. None: the response holds no answer."""
    answer, expected = answer_in(response), answer_in(gold)
    if not answer:
        return None
    try:
        # Numbers are compared by value: "1,000" is "1000.0".
        return float(float(answer.replace(",", "")) == float(expected.replace(",", "")))
    except ValueError:
        return float(answer == expected)
