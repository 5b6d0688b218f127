"""The reward function of this experiment. Change it as you like.

`treetune new` wrote this file.
"""

from __future__ import annotations

import re


def extract_answer(text: str) -> str:
    r"""Returns the answer in the last line, in lower case: ``Answer: 7`` and ``\boxed{7}`` give ``7``."""
    lines = text.strip().splitlines()
    if not lines:
        return ""
    after_marker = re.split(r"####|answer is|answer:|\\boxed", lines[-1].casefold())[-1]
    return after_marker.strip(" .:$*{}")


def score(response: str, gold: str) -> float | None:
    """Returns 1 if the response has the reference answer `gold`, 0 if not, and None if it has no answer."""
    answer, expected = extract_answer(response), extract_answer(gold)
    if not answer:
        return None
    try:
        # Numbers are compared by value: "1,000" equals "1000.0".
        is_correct = float(answer.replace(",", "")) == float(expected.replace(",", ""))
    except ValueError:
        is_correct = answer == expected
    return float(is_correct)
