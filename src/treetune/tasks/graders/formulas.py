r"""Whether two formulas are equal: as written, as exact numbers, as expressions, or by math-verify."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from treetune.tasks.graders.expressions import Absurd, NotAFormula, read_expression
from treetune.tasks.graders.same_value import same_value

_NUMBER = re.compile(r"([-+]?) ?(\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})")
_FRACTION = re.compile(
    r"([-+]?) ?(?:(\d{1,20}) ?(?=\\frac))?"
    r"(?:\\frac ?(?:\{ ?(-?\d{1,200}) ?\}|(\d)) ?(?:\{ ?(\d{1,200}) ?\}|(\d))"
    r"|(?:(\d{1,20}) )?(\d{1,200}) ?/ ?(\d{1,200}))"
)
_REPEATING = re.compile(r"([-+]?) ?(\d{0,50})\.(\d{0,50})\\(?:overline|bar) ?\{?(\d{1,50})\}?")
_AND_SO_ON = re.compile(r"([-+]?) ?(\d{0,20})\.(\d{0,20}?)(\d{1,12}?)\4{1,20} ?\\dots")
_MIXED = re.compile(r"(?<![\d.}A-Za-z)])(\d{1,20}) ?\\frac ?(\d|\{ ?\d{1,20} ?\}) ?(\d|\{ ?\d{1,20} ?\})")

_HUGE = re.compile(r"\d{400}|\^ ?\{? ?[-+(]? ?\d{5}|!\s*!|\d{4,}\s*!|\^[^-+*/=,]{0,40}\^[^-+*/=,]{0,40}\^")
_BLANK = re.compile(r"(?<!\d) | (?!\d)|(?<=\d) (?=\d{3}(?!\d))")
_PRIME = re.compile(r"\d ?'")
_LARGE_OPERATORS = re.compile(r"\\(?:i*o?int|sum|prod|lim)(?![a-z])")
MOST_CHARACTERS = 200
MOST_COMMANDS = 20
"""Of a formula that math-verify is given: it may take minutes to read more."""


def exact_value(formula: str) -> Fraction | None:
    """Of an integer, a decimal, a fraction, a mixed number or a repeating decimal; None of anything else."""
    formula = formula.strip()
    if found := _NUMBER.fullmatch(formula):
        value = Fraction(found[2] if not found[2].endswith(".") else found[2][:-1])
    elif found := _FRACTION.fullmatch(formula):
        _, whole, *numbers = found.groups()
        top, top_digit, bottom, bottom_digit, plain_whole, plain_top, plain_bottom = numbers
        above, below = int(top or top_digit or plain_top), int(bottom or bottom_digit or plain_bottom)
        if below == 0:
            return None
        value = Fraction(above, below) + int(whole or plain_whole or 0)
    elif found := _REPEATING.fullmatch(formula) or _AND_SO_ON.fullmatch(formula):
        _, whole, fixed, repeated = found.groups()
        value = Fraction(int((whole or "0") + fixed + repeated) - int((whole or "0") + fixed or "0"),
                         10 ** len(fixed) * (10 ** len(repeated) - 1))  # fmt: skip
    else:
        return None
    return -value if found[1] == "-" else value


def equal_formulas(given: str, gold: str) -> bool:
    """Exactly equal. Raises Absurd for a `given` that would cost too much to compare."""
    if spaceless(given) == spaceless(gold):
        return True
    one, other = exact_value(given), exact_value(gold)
    if one is not None and other is not None:
        return one == other
    given, gold = mixed_numbers_added(given), mixed_numbers_added(gold)
    try:
        meant = read_expression(gold)
    except (NotAFormula, Absurd):
        meant = None
    try:
        said = read_expression(given)
    except NotAFormula:
        said = None
    if said is not None and meant is not None:
        return same_value(said, meant)
    return _by_math_verify(given, gold)


def proportional_equations(given: tuple[str, str], gold: tuple[str, str]) -> bool:
    """Whether left - right of one is a number, not 0, times that of the other."""
    import sympy

    try:
        one, other = (read_expression(left) - read_expression(right) for left, right in (given, gold))
    except NotAFormula:
        return _by_math_verify(" = ".join(given), " = ".join(gold))
    if one.free_symbols != other.free_symbols or not one.free_symbols:
        return one == other
    place = {
        symbol: sympy.Rational(7 + 4 * rank, 3)
        for rank, symbol in enumerate(sorted(one.free_symbols, key=str))
    }
    above, below = one.subs(place), other.subs(place)
    if below == 0 or above == 0:
        return same_value(one, other) or same_value(one, -other)
    return same_value(one, other * above / below)


def spaceless(text: str) -> str:
    """Without white space, but for what parts numbers: "1 2" is not 12, and "12 000" is 12000."""
    return _BLANK.sub("", " ".join(text.split()))


def mixed_numbers_added(formula: str) -> str:
    r"""``3\frac{1}{2}`` is three and a half, not three halves."""
    return _MIXED.sub(r"(\1+\\frac\2\3)", formula)


def _by_math_verify(given: str, gold: str) -> bool:
    for formula in (given, gold):
        if len(_LARGE_OPERATORS.findall(formula)) > 1:
            raise Absurd("sums, integrals or limits within each other")
        if _HUGE.search(formula) or len(formula) > MOST_CHARACTERS or formula.count("\\") > MOST_COMMANDS:
            raise Absurd("a formula that is longer, or has greater numbers, than every answer's")
    from math_verify import verify
    from sympy import Expr

    if bool(_PRIME.search(given)) is not bool(_PRIME.search(gold)):
        return False  # 45' is no 45 degrees; math-verify reads over the sign
    one, other = _parsed(given), _parsed(gold)
    if not one or not other:
        return False
    if isinstance(one[0], Expr) and isinstance(other[0], Expr):
        return same_value(one[0], other[0])
    # No alarm of its own: the grader pool's deadline ends what hangs.
    return bool(verify(other, one, float_rounding=10, timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed(formula: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    config = (LatexExtractionConfig(boxed_match_priority=0),)
    return parse(
        f"\\boxed{{{formula}}}", extraction_config=config, parsing_timeout=None, fallback_mode="no_fallback"
    )
