"""When what a program printed, or a function returned, is what was expected."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

PRINTED_TOLERANCE = 1e-6
"""Of numbers that are printed, absolute or relative, as most judges of programming contests have it."""

RETURNED_TOLERANCE = 1e-5
"""Of numbers that a function returns, as in Reasoning360's tests."""

_LONGEST_NUMBER = 400
_FREE_CASE = {"yes", "no", "true", "false"}
_DEEPEST = 100


def same_output(printed: str, expected: str) -> bool:
    """Line by line, word by word. How many spaces stand between words, what stands at the end of lines, and
    empty lines at the end don't matter; nor does the case of yes, no, true and false.

    Where a whole number is expected, what is printed has to be that number (``7.0`` is 7, ``7.000000001``
    isn't); where the expected number has a decimal point or an exponent, they may differ by 1e-6 at most,
    absolutely or relatively.
    """
    one, other = printed.rstrip().split("\n"), expected.rstrip().split("\n")
    return len(one) == len(other) and all(map(_same_line, one, other))


def _same_line(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    one, other = printed.split(), expected.split()
    return len(one) == len(other) and all(map(_same_word, one, other))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if expected.lower() in _FREE_CASE:
        return printed.lower() == expected.lower()
    if max(len(printed), len(expected)) > _LONGEST_NUMBER or "_" in printed:
        return False  # `int` is quadratic, and reads 1_0 as ten
    try:
        whole = int(expected)
    except ValueError:
        whole = None
    try:
        if whole is not None:
            return bool(Decimal(printed) == whole)
        return close(float(printed), float(expected), PRINTED_TOLERANCE)
    except (ValueError, ArithmeticError):
        return False


def same_value(returned: Any, expected: Any, depth: int = 0) -> bool:
    """Values as JSON holds them: numbers within 1e-5 where one is no whole number, all else exactly.

    True is not 1: a function that returns one where the other is expected is wrong.
    """
    if depth > _DEEPEST:
        return False
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, int) and isinstance(expected, int):
        return returned == expected
    if isinstance(returned, int | float) and isinstance(expected, int | float):
        try:
            return close(float(returned), float(expected), RETURNED_TOLERANCE)
        except OverflowError:
            return False
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(
            same_value(one, other, depth + 1) for one, other in zip(returned, expected)
        )
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(
            same_value(value, expected[key], depth + 1) for key, value in returned.items()
        )
    return type(returned) is type(expected) and bool(returned == expected)


def close(one: float, other: float, tolerance: float) -> bool:
    """Never for what is not a number; infinities are close to themselves alone."""
    return one == other or abs(one - other) <= tolerance * max(1.0, min(abs(one), abs(other)))
