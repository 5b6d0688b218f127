r"""Formulas in LaTeX or plain text, read into sympy without evaluating what a model wrote, and compared.

sympy's own `parse_expr` runs its text as Python, and its arithmetic takes any exponent. Here a text
is tokens and a grammar, and what would be huge is refused before it is computed. Two formulas are equal as
they are written, as exact numbers, as expressions, or by math-verify.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from typing_extensions import override

from treetune.domains.graders.residues import Residue, prime_for
from treetune.exceptions import Absurd, NotAFormula

LONGEST = 600
"""Characters of a formula that are read."""

DEEPEST = 40
LARGEST_EXPONENT = 10_000
LARGEST_EXPONENT_OF_A_SUM = 2500
LARGEST_EXPONENT_OF_A_FUNCTION = 300
LARGEST_DEGREE = 10_000
"""The largest product of exponents within each other: ``((x^{2000})^{2000}`` has four millions."""
MOST_BITS_OF_A_POWERED_FACTOR = 400_000
MOST_NESTED_FUNCTIONS = 3
"""Functions of functions: the time in which sympy finds the sign of a logarithm grows tenfold with each."""
LARGEST_ROOT = 300
LARGEST_FACTORIAL = 3000
LARGEST_TOP = 5000
MOST_DIGITS = 400
"""Digits of a number as it is written."""

BITS_OF_A_HUGE_GOLD = 600
MOST_BITS_UNDER_ROOT = 1200
MOST_BITS = 40_000
"""Binary digits of a number that is computed; of a larger one only the remainder by a prime."""


# Reading

_TOKEN = re.compile(
    r"\s+|(?P<number>\d+\.\d+|\d+\.(?!\d)|\.\d+|\d+)|(?P<command>\\[A-Za-z]+|\\[%{}|])"
    r"|(?P<word>[A-Za-z]+)|(?P<sign>[-+*/^_(){}\[\]|!,=<>%])"
)

_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sinh", "cosh", "tanh",
    "arcsin", "arccos", "arctan", "asin", "acos", "atan", "sqrt", "abs",
}  # fmt: skip
_GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "nu", "rho", "sigma",
    "tau", "phi", "varphi", "omega", "psi", "chi", "xi", "eta", "zeta", "kappa", "Delta", "Omega",
}  # fmt: skip
_SPACES = {"quad", "qquad", "left", "right", "displaystyle", "big", "Big", "bigl", "bigr", "limits"}
_SIGNS = {"cdot": "*", "times": "*", "ast": "*", "div": "/", "colon": ":", "{": "(", "}": ")", "|": "|"}
_PLAIN = str.maketrans({
    "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "π": " \\pi ", "∞": " \\infty ",
    "√": " \\sqrt ", "²": "^2", "³": "^3", "\u00a0": " ", "∙": "*",
})  # fmt: skip


def read_expression(text: str, *, reads_choices: bool = True) -> Any:
    """Reads the sympy expression. Raises NotAFormula, or Absurd for what would be huge.

    `reads_choices`: whether ``C(10,3)`` is a binomial coefficient, and no variable before a pair.
    """
    if len(text) > LONGEST:
        raise Absurd(f"a formula of {len(text)} characters")
    parser = _FormulaParser(_tokens(text), reads_choices)
    expression = parser.sum(0)
    if parser.peek is not None:
        raise NotAFormula(f"what is {parser.peek[1]!r} doing there?")
    return expression


def _tokens(text: str) -> list[tuple[str, str]]:
    text = (
        text.translate(_PLAIN).replace("\\,", " ").replace("\\!", "").replace("\\;", " ").replace("\\ ", " ")
    )
    text = text.replace("**", "^")
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotAFormula(f"{text[position]!r} belongs to no formula")
        position = match.end()
        kind, value = match.lastgroup, match[0]
        if kind == "command":
            name = value[1:]
            if name in _SPACES:
                continue
            tokens.append(("sign", _SIGNS[name]) if name in _SIGNS else (kind, name))
        elif kind == "word":
            if value in _FUNCTIONS or value in ("pi", "infinity"):
                tokens.append(("command", "infty" if value == "infinity" else value))
            elif len(value) > 3:
                raise NotAFormula(f"{value!r} is a word")
            else:
                tokens += [("letter", letter) for letter in value]
        elif kind is not None:
            tokens.append((kind, value))
    return tokens


class _FormulaParser:
    """Recursive descent, one method for each precedence; `depth` bounds the recursion."""

    def __init__(self, tokens: list[tuple[str, str]], reads_choices: bool = True) -> None:
        import sympy

        self._reads_choices = reads_choices

        self._sympy = sympy
        self._tokens = tokens
        self._at = 0
        self._angles = 0  # of how many functions this is the argument: only there 60^\\circ is pi/3

    @property
    def peek(self) -> tuple[str, str] | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, sign: str | None = None) -> tuple[str, str]:
        token = self.peek
        if token is None or (sign is not None and token[1] != sign):
            raise NotAFormula(f"{sign or 'more'} was expected, not {token[1] if token else 'the end'}")
        self._at += 1
        return token

    def _is(self, *signs: str) -> bool:
        return self.peek is not None and self.peek[0] == "sign" and self.peek[1] in signs

    def _sign(self) -> int:
        """Takes plus and minus signs, as many as there are."""
        sign = 1
        while self._is("+", "-"):
            sign *= -1 if self._take()[1] == "-" else 1
        return sign

    def sum(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise Absurd(f"more than {DEEPEST} levels deep")
        total = self._sign() * self._product(depth)
        while self._is("+", "-"):
            total = total + self._sign() * self._product(depth)
        return self._checked(total)

    def _product(self, depth: int) -> Any:
        product = self._power(depth)
        while True:
            if self._is("*"):
                self._take()
                product = self._checked(product * self._signed(depth))
            elif self._is("/"):
                self._take()
                product = self._divided(product, self._signed(depth))
            elif self.peek is not None and (self.peek[0] != "sign" or self.peek[1] in ("(", "{")):
                if self.peek[0] == "number" and self._tokens[self._at - 1][0] == "number":
                    raise NotAFormula("two numbers without a sign between them")
                product = self._checked(product * self._power(depth))
            else:
                return product

    def _signed(self, depth: int) -> Any:
        return self._sign() * self._power(depth)

    def _power(self, depth: int) -> Any:
        base = self._postfix(self._atom(depth), depth)
        if not self._is("^"):
            return base
        self._take()
        if self._angles and self.peek == ("command", "circ"):
            self._take()
            return base * self._sympy.pi / 180
        return self._raised(base, self._argument(depth + 1, power=True))

    def _postfix(self, value: Any, depth: int) -> Any:
        while self._is("!", "%"):
            if self._take()[1] == "%":
                value = value / 100
                continue
            value = self._factorial(value)
        return value

    def _argument(self, depth: int, power: bool = False) -> Any:
        """Reads what a command applies to: a group, or the next digit, letter or command. A `power` or a
        function applies to the whole next number, perhaps with a sign."""
        if self._is("{"):
            return self._group(depth, "{", "}")
        if power and self._is("+", "-"):
            return self._signed(depth)
        token = self.peek
        if token is not None and token[0] == "number" and len(token[1]) > 1 and not power:
            # \frac12 is a half: LaTeX takes one digit at a time.
            self._tokens[self._at] = ("number", token[1][1:])
            return self._number(token[1][0]) if token[1][0].isdigit() else self._atom(depth)
        return self._atom(depth)

    def _group(self, depth: int, opening: str, closing: str) -> Any:
        self._take(opening)
        inner = self.sum(depth + 1)
        self._take(closing)
        return inner

    def _atom(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise Absurd(f"more than {DEEPEST} levels deep")
        sympy = self._sympy
        kind, value = self._take()
        if kind == "number":
            if len(value) > MOST_DIGITS:
                raise Absurd(f"a number of {len(value)} digits")
            return self._number(value.rstrip("."))
        if kind == "letter":
            reads_choice = self._reads_choices and value in ("C", "P")
            if reads_choice and (chosen := self._chosen(value, depth)) is not None:
                return chosen
            if value in ("i", "e") and not self._is("_"):
                return self._constant(value)
            return self._symbol(value + self._index())
        if kind == "command":
            return self._command(value, depth + 1)
        closing = {"(": ")", "[": "]", "{": "}", "|": "|"}.get(value)
        if closing is None:
            raise NotAFormula(f"{value!r} begins no formula")
        inner = self.sum(depth + 1)
        self._take(closing)
        return sympy.Abs(inner) if value == "|" else inner

    def _number(self, digits: str) -> Any:
        return self._sympy.Rational(digits)

    def _symbol(self, name: str) -> Any:
        return self._sympy.Symbol(name)

    def _constant(self, letter: str) -> Any:
        return self._sympy.I if letter == "i" else self._sympy.E

    def _chosen(self, letter: str, depth: int) -> Any:
        r"""Reads the rest of ``C(10,3)``, ``C_{10}^{3}`` or ``P(10,3)``; None of a variable."""
        follows = [token[1] for token in self._tokens[self._at : self._at + 9]]
        if follows[:1] == ["("] and follows[2:3] == [","] and follows[4:5] == [")"]:
            top, bottom = self._tokens[self._at + 1], self._tokens[self._at + 3]
            length = 5
        elif letter == "C" and follows[:1] == ["_"]:
            signs = [place for place, token in enumerate(follows) if token not in ("{", "}")]
            numbers = [self._tokens[self._at + place] for place in signs[:4]]
            if len(numbers) < 4 or numbers[2][1] != "^":
                return None
            top, bottom = numbers[1], numbers[3]
            length = signs[3] + 1
            length += follows[length : length + 1] == ["}"]
        else:
            return None
        if top[0] != "number" or bottom[0] != "number" or not (top[1] + bottom[1]).isdigit():
            return None
        self._at += length
        above, below = self._number(top[1]), self._number(bottom[1])
        choices = self._binomial(above, below)
        return choices if letter == "C" else self._checked(choices * self._factorial(below))

    def _binomial(self, top: Any, bottom: Any) -> Any:
        if any(number.is_number and not 0 <= number <= LARGEST_TOP for number in (top, bottom)):
            raise Absurd("a binomial coefficient of no small numbers")
        if top.free_symbols or bottom.free_symbols:  # sympy takes seconds for a binomial of fractions
            factorial = self._sympy.factorial
            return factorial(top) / (factorial(bottom) * factorial(top - bottom))
        return self._sympy.binomial(top, bottom)

    def _factorial(self, value: Any) -> Any:
        if value.has(self._sympy.Function):
            raise Absurd("a factorial of a function")
        is_small = value.is_Integer and 0 <= value <= LARGEST_FACTORIAL
        if not is_small and not value.free_symbols:
            raise Absurd("a factorial that is no small number's")
        return self._sympy.factorial(value)

    def _index(self) -> str:
        if not self._is("_"):
            return ""
        self._take()
        if not self._is("{"):
            return "_" + self._take()[1]
        self._take("{")
        index = ""
        while not self._is("}"):
            index += self._take()[1]
        self._take("}")
        return "_" + index

    def _command(self, name: str, depth: int) -> Any:
        sympy = self._sympy
        if name == "pi":
            return sympy.pi
        if name == "infty":
            return sympy.oo
        if name in _GREEK:
            return sympy.Symbol(name + self._index())
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            above = self._argument(depth)
            return self._divided(above, self._argument(depth))
        if name in ("binom", "dbinom", "tbinom"):
            top, bottom = self._argument(depth), self._argument(depth)
            return self._binomial(top, bottom)
        if name == "sqrt":
            order = self._group(depth, "[", "]") if self._is("[") else self._number("2")
            return self._raised(self._argument(depth), self._divided(self._number("1"), order))
        if name in _FUNCTIONS:
            return self._function(name, depth)
        raise NotAFormula(f"\\{name} is not known")

    def _function(self, name: str, depth: int) -> Any:
        sympy = self._sympy
        if self._angles >= MOST_NESTED_FUNCTIONS:
            raise Absurd(f"more than {MOST_NESTED_FUNCTIONS} functions within each other")
        base = sympy.Integer(10)
        if name == "log" and self._is("_"):
            self._take()
            base = self._argument(depth)
        power = None
        if self._is("^"):
            self._take()
            power = self._argument(depth)
        grouped = self._is("(", "{", "[")
        self._angles += 1
        argument = self._postfix(self._argument(depth, power=True), depth)
        self._angles -= 1
        while not grouped and self._factor_follows():  # \\sin 2x is the sine of 2x
            argument = self._checked(argument * self._power(depth))
        if self._is("^"):  # \sin x^2 is the sine of x^2
            self._take()
            if self.peek == ("command", "circ"):
                self._take()
                argument = argument * sympy.pi / 180
            else:
                argument = self._raised(argument, self._argument(depth, power=True))
        if name in ("sinh", "cosh", "tanh"):
            self._refuse_huge(argument)
        if name == "log":
            value = sympy.log(argument, base)
        elif name == "exp":
            value = self._raised(sympy.E, argument)
        elif name == "abs":
            value = sympy.Abs(argument)
        else:
            short = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
            value = getattr(sympy, short.get(name, name))(argument)
        if power is None:
            return value
        if power == -1 and name in ("sin", "cos", "tan"):
            return getattr(sympy, "a" + name)(argument)
        return self._raised(value, power)

    def _factor_follows(self) -> bool:
        token = self.peek
        return (
            token is not None and token[0] in ("number", "letter", "command") and token[1] not in _FUNCTIONS
        )

    def _raised(self, base: Any, exponent: Any) -> Any:
        if not exponent.is_number:
            return self._checked(base**exponent)
        size = abs(exponent.evalf(5)) if exponent.is_comparable else 0
        if not size <= self._largest_exponent(base) or (exponent.is_Rational and exponent.q > LARGEST_ROOT):
            raise Absurd("an exponent beyond every answer's")
        if not base.is_Rational:
            degree, bits = _degree_and_bits(base)
            if not (size * degree <= LARGEST_DEGREE and size * bits <= MOST_BITS_OF_A_POWERED_FACTOR):
                raise Absurd("powers of powers beyond every answer's")
        elif exponent.is_Rational and exponent.q > 1:
            return self._root(base, exponent)
        elif _bits(base) * max(float(size), 1) > MOST_BITS:
            raise Absurd("a power of too many digits")
        return self._checked(base**exponent)

    def _refuse_huge(self, argument: Any) -> None:
        """Refuses the argument of a function that grows as a power of e does."""
        if argument.is_number and argument.is_comparable and not abs(argument.evalf(5)) <= LARGEST_EXPONENT:
            raise Absurd("an exponent beyond every answer's")

    def _largest_exponent(self, base: Any) -> int:
        """Returns the largest exponent of a base: sums and functions cost more to evaluate than numbers."""
        sympy = self._sympy
        if base.is_Rational or base.is_Symbol or base in (sympy.E, sympy.I, sympy.pi):
            return LARGEST_EXPONENT
        return LARGEST_EXPONENT_OF_A_FUNCTION if base.has(sympy.Function) else LARGEST_EXPONENT_OF_A_SUM

    def _root(self, base: Any, exponent: Any) -> Any:
        """Takes the root of a rational number: exactly of a perfect power, however large, and otherwise of
        small numbers alone, since sympy looks for their factors."""
        sympy = self._sympy
        order = int(exponent.q)
        above, above_is_exact = sympy.integer_nthroot(abs(base.p), order)
        below, below_is_exact = sympy.integer_nthroot(base.q, order)
        if base.p >= 0 and above_is_exact and below_is_exact:
            return self._raised(sympy.Rational(above, below), sympy.Integer(exponent.p))
        if max(abs(base.p), base.q).bit_length() * max(abs(exponent.p), 1) > MOST_BITS_UNDER_ROOT:
            raise Absurd("a root of a number of too many digits")
        return base**exponent

    def _divided(self, above: Any, below: Any) -> Any:
        if below == 0:
            raise NotAFormula("a division by zero")
        return self._checked(above / below)

    def _checked(self, value: Any) -> Any:
        if value.is_Rational and max(abs(value.p), value.q).bit_length() > MOST_BITS:
            raise Absurd("a number of too many digits")
        return value


def _degree_and_bits(base: Any) -> tuple[float, int]:
    """Returns the largest product of exponents within each other, and the bits of the largest number in it.

    ``((2n)^{50} + 1)^{10}`` has degree 500, and 51 bits in ``2^{50}``.
    """
    if base.is_Rational:
        return 1.0, _bits(base)
    degree, bits = 1.0, 1
    for part in base.args:
        part_degree, part_bits = _degree_and_bits(part)
        degree, bits = max(degree, part_degree), max(bits, part_bits)
    if base.is_Pow and base.exp.is_Rational:
        base_degree, _ = _degree_and_bits(base.base)
        degree = max(degree, base_degree * abs(float(base.exp)))
    return degree, bits


class _ResidueParser(_FormulaParser):
    """Reads a formula as its value modulo a prime: of a number that is too large to be written down."""

    def __init__(self, tokens: list[tuple[str, str]], prime: int) -> None:
        super().__init__(tokens)
        self._prime = prime

    @override
    def _number(self, digits: str) -> Residue:
        return Residue.of(Fraction(digits), self._prime)

    @override
    def _symbol(self, name: str) -> Residue:
        raise Absurd("an unknown in a formula of huge numbers")

    @override
    def _constant(self, letter: str) -> Residue:
        raise Absurd(f"{letter} in a formula of huge numbers")

    @override
    def _command(self, name: str, depth: int) -> Any:
        if name not in ("frac", "dfrac", "tfrac", "cfrac", "binom", "dbinom", "tbinom"):
            raise Absurd(f"\\{name} in a formula of huge numbers")
        return super()._command(name, depth)

    @override
    def _atom(self, depth: int) -> Any:
        if self._is("|"):
            raise Absurd("an absolute value in a formula of huge numbers")
        return super()._atom(depth)

    @override
    def _binomial(self, top: Residue, bottom: Residue) -> Residue:
        return top.choose(bottom)

    @override
    def _factorial(self, value: Residue) -> Residue:
        return value.factorial()

    @override
    def _raised(self, base: Residue, exponent: Residue) -> Residue:
        return base.power(exponent)

    @override
    def _divided(self, above: Residue, below: Residue) -> Residue:
        return above.divide(below)

    @override
    def _checked(self, value: Any) -> Any:
        return value


# Values of expressions

_POINTS = ((3, 7), (-5, 11), (13, 4), (-17, 6), (1, 19), (-2, 9), (331, 2), (-409, 3))
"""Numerators and denominators of the points at which expressions with unknowns are compared. Both signs, and
far from 0 as well: ``|x|`` is x where x is positive, and ``|x - 3|`` is 3 - x where x is small."""

_FEWEST = 3
"""Points at which both must have a value; where there are fewer, the difference is simplified."""

_DIGITS = 40
_SPARE_DIGITS = 15
"""Two numbers that agree to all computed digits but these are one. What is computed is 40 digits more than
the magnitudes of all parts add up to (`_digits_for`), so that a small part beside a large one is
never lost."""

MOST_COMPUTED_DIGITS = 12_000
LARGEST_POWER_THAT_IS_MULTIPLIED_OUT = 100
MOST_DIGITS_OF_A_FACTORIAL = 400
"""Digits to which a factorial of a fraction is computed, at most: some 0.1 s."""


def same_value(first: Any, second: Any, tolerance: float = 0.0) -> bool:
    """Compares for all values of the unknowns; numbers count as equal if they are nearer than `tolerance`.

    Evaluating is a thousand times quicker than simplifying, and sees more: sympy does not find
    that ``log(50)/log(5)`` is ``2 + log(2)/log(5)``. May take long on what a model wrote all the
    same: call it where it can be killed.
    """
    import sympy

    if any(expression.has(sympy.zoo, sympy.nan) for expression in (first, second)):
        return False  # a division by zero equals nothing, not even another one
    if first == second:
        return True
    infinite = (sympy.oo, -sympy.oo)
    if first.has(*infinite) or second.has(*infinite):
        return False  # infinities that aren't the same object
    unknowns = sorted(first.free_symbols | second.free_symbols, key=str)
    if not unknowns:
        agree = _agree(first, second, tolerance)
        return _is_zero_when_simplified(first - second) if agree is None else agree
    compared_points = 0
    for index, (top, bottom) in enumerate(_POINTS):
        # Each unknown has its own value, or else x - y would be 0.
        point = {symbol: Fraction(top + 2 * rank, bottom + index) for rank, symbol in enumerate(unknowns)}
        agree = _agree_at(point, first, second)
        if agree is False:
            return False
        compared_points += agree is not None
    return compared_points >= _FEWEST or _is_zero_when_simplified(first - second)


def _agree_at(point: dict[Any, Fraction], first: Any, second: Any) -> bool | None:
    """Compares two expressions at a point; None where one of them has no value there."""
    import sympy

    first_value, second_value = _rational_value(first, point), _rational_value(second, point)
    if first_value is not None and second_value is not None:
        return first_value == second_value
    values = {symbol: sympy.Rational(value) for symbol, value in point.items()}
    return _agree(first.subs(values), second.subs(values), 0.0)


def _rational_value(expression: Any, point: dict[Any, Fraction]) -> Fraction | None:
    """Evaluates sums, products and integer powers exactly, which sympy's `subs` does a hundred times slower.
    None for every other expression, for a division by zero, and where a power is too large."""
    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    if expression.is_Symbol:
        return point.get(expression)
    if expression.is_Pow:
        base = _rational_value(expression.base, point)
        if base is None or not expression.exp.is_Integer:
            return None
        exponent = int(expression.exp)
        bits = max(abs(base.numerator), base.denominator).bit_length()
        if (base == 0 and exponent <= 0) or bits * abs(exponent) > MOST_BITS:
            return None
        return base**exponent
    if not expression.is_Add and not expression.is_Mul:
        return None
    total = Fraction(0) if expression.is_Add else Fraction(1)
    for part in expression.args:
        value = _rational_value(part, point)
        if value is None:
            return None
        total = total + value if expression.is_Add else total * value
    return total


def _is_zero_when_simplified(difference: Any) -> bool:
    """Simplifies a difference. Raises Absurd where sympy would multiply out a power of a sum."""
    import sympy

    for power in difference.atoms(sympy.Pow):
        if (
            power.base.is_Add
            and power.exp.is_Rational
            and abs(power.exp) > LARGEST_POWER_THAT_IS_MULTIPLIED_OUT
        ):
            raise Absurd("a power of a sum that would have to be multiplied out")
    return bool(sympy.simplify(difference) == 0)


def _agree(first: Any, second: Any, tolerance: float) -> bool | None:
    """Compares two numbers; None where one of them has no value, or none that can be computed."""
    if first.is_Rational and second.is_Rational:
        return bool(first == second or abs(first - second) < tolerance)
    import mpmath

    digits = _digits_for(first, second)
    if digits > _DIGITS:
        if _differ_in_first_digits(first, second, tolerance):
            return False
        if digits > MOST_DIGITS_OF_A_FACTORIAL and _has_factorials_of_fractions(first, second):
            raise Absurd("factorials of fractions whose difference shows in too many digits")
    first_value, second_value = _value(first, digits), _value(second, digits)
    if first_value is None or second_value is None:
        return None
    with mpmath.workdps(digits):
        distance = abs(first_value - second_value)
        largest = max(abs(first_value), abs(second_value))
        return bool(distance < tolerance or distance <= largest * mpmath.mpf(10) ** (_SPARE_DIGITS - digits))


def _differ_in_first_digits(first: Any, second: Any, tolerance: float) -> bool:
    """Returns whether 40 digits show already that two numbers differ. Most that differ do so early, and
    thousands of digits of a factorial or of a power's parts take seconds."""
    import mpmath

    first_value = _value(first, _DIGITS, needs_all_digits=True)
    second_value = _value(second, _DIGITS, needs_all_digits=True)
    if first_value is None or second_value is None:
        return False
    with mpmath.workdps(_DIGITS):
        distance = abs(first_value - second_value)
        largest = max(abs(first_value), abs(second_value))
        return bool(distance > 2 * tolerance and distance > largest * mpmath.mpf(10) ** (-_DIGITS / 2))


def _has_factorials_of_fractions(*expressions: Any) -> bool:
    """Returns whether a factorial stands at a number that is no integer, as where n is a fraction in
    ``(2n)!``: this is the gamma function, of which 1,000 digits take a second."""
    import sympy

    return any(
        not factorial.args[0].is_Integer
        for expression in expressions
        for factorial in expression.atoms(sympy.factorial, sympy.gamma)
    )


def _digits_for(*expressions: Any) -> int:
    """Returns how many digits decide whether two numbers are equal: 40 and the magnitudes of all their parts.

    ``sqrt(10^60 + 1)`` differs from ``10^30`` in its 61st digit. Raises Absurd where these are too many.
    """
    import sympy

    magnitudes = 0.0
    for expression in expressions:
        for part in sympy.preorder_traversal(expression):
            if part.is_Rational:
                magnitudes += max(abs(part.p), part.q).bit_length() * _LOG10_OF_2
            elif part.is_Pow or part.is_Function:
                magnitudes += _magnitude(part)
    if magnitudes > MOST_COMPUTED_DIGITS:
        raise Absurd("numbers whose difference shows in too many digits")
    return _DIGITS + (2 * int(magnitudes) if magnitudes > _DIGITS / 2 else 0)


_LOG10_OF_2 = 0.30103


def _magnitude(number: Any) -> float:
    """Returns the decimal logarithm of a number, without its sign; 0 where it has none."""
    import sympy

    if number.free_symbols or (number.is_Pow and abs(number.exp.evalf(5)) < _SMALL_EXPONENT):
        return 0.0
    try:
        size = abs(number.evalf(5))
        return abs(float(sympy.log(size, 10))) if size.is_finite and size > 0 else 0.0
    except (TypeError, ValueError, OverflowError):
        return 0.0


_SMALL_EXPONENT = 20


def _value(expression: Any, digits: int = _DIGITS, *, needs_all_digits: bool = False) -> Any:
    """Returns the value as an mpmath number of so many digits; None where there is no finite one.

    Where parts cancel each other, fewer digits than asked for may be right: None with `needs_all_digits`.
    """
    import mpmath
    import sympy

    try:
        value = expression.evalf(digits, maxn=digits + 400)
        real, imaginary = value.as_real_imag()
        for part in (real, imaginary):
            if not (part.is_Float or part.is_Rational):
                return None
            # sympy gives a number of which it knows fewer digits a lower precision.
            if needs_all_digits and part.is_Float and mpmath.libmp.prec_to_dps(part._prec) < digits:
                return None
        with mpmath.workdps(digits):
            number = mpmath.mpc(sympy.Float(real, digits)._mpf_, sympy.Float(imaginary, digits)._mpf_)
            return number if mpmath.isfinite(number) else None
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None


# Equal formulas

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
"""Limits of a formula that math-verify is given: it may take minutes to read more."""


def exact_value(formula: str) -> Fraction | None:
    """Reads an integer, a decimal, a fraction, a mixed number or a repeating decimal; None of all else."""
    formula = formula.strip()
    if match := _NUMBER.fullmatch(formula):
        value = Fraction(match[2] if not match[2].endswith(".") else match[2][:-1])
    elif match := _FRACTION.fullmatch(formula):
        _, whole, *numbers = match.groups()
        top, top_digit, bottom, bottom_digit, plain_whole, plain_top, plain_bottom = numbers
        above, below = int(top or top_digit or plain_top), int(bottom or bottom_digit or plain_bottom)
        if below == 0:
            return None
        value = Fraction(above, below) + int(whole or plain_whole or 0)
    elif match := _REPEATING.fullmatch(formula) or _AND_SO_ON.fullmatch(formula):
        _, whole, fixed, repeated = match.groups()
        value = Fraction(int((whole or "0") + fixed + repeated) - int((whole or "0") + fixed or "0"),
                         10 ** len(fixed) * (10 ** len(repeated) - 1))  # fmt: skip
    else:
        return None
    return -value if match[1] == "-" else value


def equal_formulas(given: str, gold: str) -> bool:
    """Compares exactly. Raises Absurd for a `given` that would cost too much to compare."""
    if spaceless(given) == spaceless(gold):
        return True
    value, gold_value = exact_value(given), exact_value(gold)
    if value is not None and gold_value is not None:
        return value == gold_value
    if _has_words(given) or _has_words(gold):
        return False  # text that isn't the gold's says something else
    given, gold = mixed_numbers_added(given), mixed_numbers_added(gold)
    try:
        expected = read_expression(gold)
    except NotAFormula:
        expected = None
    except Absurd:
        # Only a gold that is huge itself is compared by remainders: a huge answer alone is refused.
        return same_residue(given, gold)
    try:
        answer = read_expression(given)
    except NotAFormula:
        answer = None
    except Absurd:
        if expected is not None and expected.is_Rational and _bits(expected) > BITS_OF_A_HUGE_GOLD:
            return same_residue(given, gold)
        raise
    if answer is not None and expected is not None:
        return same_value(answer, expected)
    return _by_math_verify(given, gold)


def _bits(number: Any) -> int:
    return int(max(abs(number.p), number.q).bit_length())


def same_residue(given: str, gold: str) -> bool:
    """Compares two formulas of huge numbers by their remainders modulo a prime of 127 bits.

    The prime is drawn by a digest of both texts, so that no answer can be made to fit it. Raises Absurd
    for what can't be compared like this.
    """
    prime = prime_for(given, gold)
    remainders = []
    for text in (given, gold):
        if len(text) > LONGEST:
            raise Absurd(f"a formula of {len(text)} characters")
        try:
            parser = _ResidueParser(_tokens(text), prime)
            residue = parser.sum(0)
        except NotAFormula:
            return False
        if parser.peek is not None:
            return False
        remainders.append(residue.remainder)
    return remainders[0] == remainders[1]


_TEXT = re.compile(r"\\text(?![a-z])")


def _has_words(formula: str) -> bool:
    return _TEXT.search(formula) is not None


def proportional_equations(given: tuple[str, str], gold: tuple[str, str]) -> bool:
    """Returns whether left - right of one equation is a number, not 0, times that of the other.

    ``2x = 6`` and ``x = 3`` are such equations: their differences are 2x - 6 and x - 3.
    """
    import sympy

    try:
        difference = read_expression(given[0]) - read_expression(given[1])
        gold_difference = read_expression(gold[0]) - read_expression(gold[1])
    except NotAFormula:
        return _by_math_verify(" = ".join(given), " = ".join(gold))
    unknowns = difference.free_symbols
    if unknowns != gold_difference.free_symbols or not unknowns:
        return difference == gold_difference
    # The factor is what the two differ by at some point; it must be right everywhere else, too.
    point = {symbol: sympy.Rational(7 + 4 * rank, 3) for rank, symbol in enumerate(sorted(unknowns, key=str))}
    value, gold_value = difference.subs(point), gold_difference.subs(point)
    if gold_value == 0 or value == 0:
        return same_value(difference, gold_difference) or same_value(difference, -gold_difference)
    return same_value(difference, gold_difference * value / gold_value)


def spaceless(text: str) -> str:
    """Removes white space, but for what parts numbers: "1 2" is not 12, and "12 000" is 12000."""
    return _BLANK.sub("", " ".join(text.split()))


def mixed_numbers_added(formula: str) -> str:
    r"""Makes ``3\frac{1}{2}`` three and a half, not three halves."""
    return _MIXED.sub(r"(\1+\\frac\2\3)", formula)


def _by_math_verify(given: str, gold: str) -> bool:
    """Compares what the grammar here doesn't read by the library math-verify. Raises Absurd, as above."""
    for formula in (given, gold):
        if len(_LARGE_OPERATORS.findall(formula)) > 1:
            raise Absurd("sums, integrals or limits within each other")
        if _HUGE.search(formula) or len(formula) > MOST_CHARACTERS or formula.count("\\") > MOST_COMMANDS:
            raise Absurd("a formula that is longer, or has greater numbers, than every answer's")
    from math_verify import verify
    from sympy import Expr

    if bool(_PRIME.search(given)) is not bool(_PRIME.search(gold)):
        return False  # 45' is no 45 degrees; math-verify reads over the sign
    readings, gold_readings = _parsed(given), _parsed(gold)
    if not readings or not gold_readings:
        return False
    if isinstance(readings[0], Expr) and isinstance(gold_readings[0], Expr):
        return same_value(readings[0], gold_readings[0])
    # No alarm of its own: the grader pool's deadline ends what hangs.
    return bool(verify(gold_readings, readings, float_rounding=10, timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed(formula: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    config = (LatexExtractionConfig(boxed_match_priority=0),)
    return parse(
        f"\\boxed{{{formula}}}", extraction_config=config, parsing_timeout=None, fallback_mode="no_fallback"
    )
