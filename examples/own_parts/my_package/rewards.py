"""A reward of one's own: a plain function."""

from __future__ import annotations


def close(response: str, gold: str, tolerance: float = 0.1) -> float | None:
    """1 for the gold, less for a number near it, 0 from `tolerance` on; None where no number was given."""
    _, marker, answer = response.rpartition("#")
    try:
        number, wanted = float(answer), float(gold)
    except ValueError:
        return None
    if not marker:
        return None
    distance = abs(number - wanted) / max(1.0, abs(wanted))
    return max(0.0, 1.0 - distance / tolerance)
