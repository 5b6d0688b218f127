"""A reward of your own: a function."""

from __future__ import annotations


def close(response: str, gold: str, tolerance: float = 0.1) -> float | None:
    """Returns 1 for the reference answer, and less for a number near it.

    The reward falls linearly with the relative distance, to 0 at `tolerance`. None: the response contains no
    number after a "#".

    Example: ``close("#95", "100")`` is 0.5.
    """
    _, marker, answer = response.rpartition("#")
    if not marker:
        return None
    try:
        number, reference = float(answer), float(gold)
    except ValueError:
        return None
    relative_distance = abs(number - reference) / max(1.0, abs(reference))
    return max(0.0, 1.0 - relative_distance / tolerance)
