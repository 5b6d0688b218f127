"""What an answer is worth. `treetune new` puts this file beside rows of your own: change it as you like."""

from __future__ import annotations

import re


def answer_in(text: str) -> str:
    r"""The last line without what announces it: ``Answer: 7``, ``#### 7`` and ``\boxed{7}`` are all ``7``."""
    lines = text.strip().splitlines() or [""]
    return re.split(r"####|answer is|answer:|\\boxed", lines[-1].casefold())[-1].strip(" .:$*{}")


def score(response: str, gold: str) -> float | None:
    """1 for the gold's answer, 0 for another one (numbers by value), None where there is no answer."""
    said, wanted = answer_in(response), answer_in(gold)
    if not said:
        return None
    try:
        return float(float(said.replace(",", "")) == float(wanted.replace(",", "")))
    except ValueError:
        return float(said == wanted)
