"""Whether two sympy expressions are the same, cheapest evidence first."""

from __future__ import annotations

from typing import Any

_PLACES = ((3, 7), (5, 11), (13, 4), (17, 6))
"""Where expressions with unknowns are compared before anything is simplified: an unequal pair
differs at one of them almost always, and simplifying is a thousand times slower."""

_DIGITS = 30


def same_value(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Equal for all values of their unknowns; numbers also if they differ by less than `tolerance`.

    May take long on what a model wrote: call it where it can be killed.
    """
    import sympy

    if one == other:
        return True
    if one.has(sympy.zoo, sympy.nan) or other.has(sympy.zoo, sympy.nan):
        return False
    if one.has(sympy.oo) or other.has(sympy.oo):
        return False  # infinities that aren't the same object
    difference = one - other
    unknowns = sorted(difference.free_symbols, key=str)
    if not unknowns:
        value = _number(difference)
        if value is not None:
            if abs(value) < tolerance:
                return True
            if abs(value) > 1e-12 * max(1.0, abs(_number(other) or 0.0)):
                return False
        return bool(sympy.simplify(difference) == 0)
    for place, (top, bottom) in enumerate(_PLACES):
        values = {symbol: sympy.Rational(top + 2 * rank, bottom + place) for rank, symbol in enumerate(unknowns)}
        value = _number(difference.subs(values))
        if value is not None and abs(value) > 1e-9 * max(1.0, abs(_number(other.subs(values)) or 0.0)):
            return False
    return bool(sympy.simplify(difference) == 0)


def _number(expression: Any) -> complex | None:
    """Its value, or None where it has none that a float holds."""
    try:
        return complex(expression.evalf(_DIGITS))
    except (TypeError, ValueError, OverflowError):
        return None
