"""Whether two sympy expressions are the same, by what they are worth."""

from __future__ import annotations

from typing import Any

_PLACES = ((3, 7), (-5, 11), (13, 4), (-17, 6), (1, 19), (-2, 9), (331, 2), (-409, 3))
"""Numerators and denominators of where expressions with unknowns are compared. Both signs, and far from
0 as well: ``|x|`` is x where x is positive, and ``|x - 3|`` is 3 - x where x is small."""

_FEWEST = 3
"""Places at which both must have a value; where there are fewer, the difference is simplified."""

_DIGITS = 40
_SAME_TO = 1e-25
"""Relative. Two answers that agree to 25 digits at all places are one: formulas as short as answers
don't come as near by chance."""


def same_value(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Equal for all values of their unknowns; numbers also if they differ by less than `tolerance`.

    Evaluating is a thousand times quicker than simplifying, and sees more: sympy does not find
    that ``log(50)/log(5)`` is ``2 + log(2)/log(5)``. May take long on what a model wrote all the
    same: call it where it can be killed.
    """
    import sympy

    if one == other:
        return True
    infinite = (sympy.zoo, sympy.nan, sympy.oo, -sympy.oo)
    if one.has(*infinite) or other.has(*infinite):
        return False  # infinities that aren't the same object
    unknowns = sorted(one.free_symbols | other.free_symbols, key=str)
    if not unknowns:
        agree = _agree(one, other, tolerance)
        return bool(sympy.simplify(one - other) == 0) if agree is None else agree
    seen = 0
    for place, (top, bottom) in enumerate(_PLACES):
        values = {
            symbol: sympy.Rational(top + 2 * rank, bottom + place) for rank, symbol in enumerate(unknowns)
        }
        agree = _agree(one.subs(values), other.subs(values), 0.0)
        if agree is False:
            return False
        seen += agree is not None
    return seen >= _FEWEST or bool(sympy.simplify(one - other) == 0)


def _agree(one: Any, other: Any, tolerance: float) -> bool | None:
    """Of two numbers; None where one of them has no value, or none that can be computed."""
    if one.is_Rational and other.is_Rational:
        return bool(one == other or abs(one - other) < tolerance)
    given, meant = _value(one), _value(other)
    if given is None or meant is None:
        return None
    distance = abs(given - meant)
    return bool(distance < tolerance or distance <= _SAME_TO * max(abs(given), abs(meant)))


def _value(expression: Any) -> Any:
    """Its value as an mpmath number of 40 digits; None where there is no finite one."""
    import mpmath
    import sympy

    try:
        value = expression.evalf(_DIGITS, maxn=400)
        real, imaginary = value.as_real_imag()
        if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
            return None
        with mpmath.workdps(_DIGITS):
            number = mpmath.mpc(sympy.Float(real, _DIGITS)._mpf_, sympy.Float(imaginary, _DIGITS)._mpf_)
            return number if mpmath.isfinite(number) else None
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None
