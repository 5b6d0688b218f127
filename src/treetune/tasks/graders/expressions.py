"""Formulas in LaTeX or plain text, read into sympy without evaluating what a model wrote.

sympy's own `parse_expr` runs its text as Python, and its arithmetic takes any exponent. Here a text
is tokens and a grammar, and what would be huge is refused before it is computed.
"""

from __future__ import annotations

import re
from typing import Any

LONGEST = 600
"""Characters of a formula that are read."""

DEEPEST = 40
LARGEST_EXPONENT = 300
LARGEST_FACTORIAL = 200
LARGEST_TOP = 1000
MOST_DIGITS = 400


class NotAFormula(ValueError):
    """The text is no formula of this grammar."""


class Absurd(ValueError):
    """Reading or computing this formula would cost more than any real answer's."""


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
_STARTS = {"(", "{", "[", "|"}


def read_expression(text: str) -> Any:
    """The sympy expression. Raises NotAFormula, or Absurd for what would be huge."""
    if len(text) > LONGEST:
        raise Absurd(f"a formula of {len(text)} characters")
    parser = _Parser(_tokens(text))
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
        found = _TOKEN.match(text, position)
        if found is None:
            raise NotAFormula(f"{text[position]!r} belongs to no formula")
        position = found.end()
        kind, value = found.lastgroup, found[0]
        if kind == "command":
            name = value[1:]
            if name in _SPACES:
                continue
            kind, value = ("sign", _SIGNS[name]) if name in _SIGNS else (kind, name)
        if kind == "word":
            tokens += _word(value)
        elif kind is not None:
            tokens.append((kind, value))
    return tokens


def _word(word: str) -> list[tuple[str, str]]:
    if word in _FUNCTIONS or word in ("pi", "infinity"):
        return [("command", {"infinity": "infty"}.get(word, word))]
    if len(word) > 3:
        raise NotAFormula(f"{word!r} is a word")
    return [("letter", letter) for letter in word]


class _Parser:
    """Recursive descent, one method for each precedence; `depth` bounds the recursion."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        import sympy

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

    def sum(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise Absurd(f"more than {DEEPEST} levels deep")
        total = self._sympy.Integer(0)
        sign = 1
        while self._is("+", "-"):
            sign *= -1 if self._take()[1] == "-" else 1
        total = sign * self._product(depth)
        while self._is("+", "-"):
            sign = 1
            while self._is("+", "-"):
                sign *= -1 if self._take()[1] == "-" else 1
            total = total + sign * self._product(depth)
        return _checked(total)

    def _product(self, depth: int) -> Any:
        product = self._power(depth)
        while True:
            if self._is("*"):
                self._take()
                product = _checked(product * self._signed(depth))
            elif self._is("/"):
                self._take()
                product = _divided(product, self._signed(depth))
            elif self.peek is not None and (self.peek[0] != "sign" or self.peek[1] in ("(", "{")):
                if self.peek[0] == "number" and self._tokens[self._at - 1][0] == "number":
                    raise NotAFormula("two numbers without a sign between them")
                product = _checked(product * self._power(depth))
            else:
                return product

    def _signed(self, depth: int) -> Any:
        sign = 1
        while self._is("+", "-"):
            sign *= -1 if self._take()[1] == "-" else 1
        return sign * self._power(depth)

    def _power(self, depth: int) -> Any:
        base = self._postfix(self._atom(depth), depth)
        if not self._is("^"):
            return base
        self._take()
        if self._angles and self.peek == ("command", "circ"):
            self._take()
            return base * self._sympy.pi / 180
        return _raised(base, self._argument(depth + 1, power=True))

    def _postfix(self, value: Any, depth: int) -> Any:
        while self._is("!", "%"):
            if self._take()[1] == "%":
                value = value / 100
                continue
            if not (value.is_Integer and 0 <= value <= LARGEST_FACTORIAL):
                raise Absurd("a factorial that is no small number's")
            value = self._sympy.factorial(value)
        return value

    def _argument(self, depth: int, power: bool = False) -> Any:
        """What a command applies to: a group, or the next digit, letter or command. What a `power` or a
        function applies to is the whole next number, perhaps with a sign."""
        if self._is("{"):
            return self._group(depth, "{", "}")
        if power and self._is("+", "-"):
            return self._signed(depth)
        token = self.peek
        if token is not None and token[0] == "number" and len(token[1]) > 1 and not power:
            # \frac12 is a half: LaTeX takes one digit at a time.
            self._tokens[self._at] = ("number", token[1][1:])
            return self._sympy.Integer(int(token[1][0])) if token[1][0].isdigit() else self._atom(depth)
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
            return sympy.Rational(value.rstrip(".") if value.endswith(".") else value)
        if kind == "letter":
            letter = {"i": sympy.I, "e": sympy.E}.get(value)
            return sympy.Symbol(value + self._index()) if letter is None or self._is("_") else letter
        if kind == "command":
            return self._command(value, depth + 1)
        if value in ("(", "[", "{"):
            inner = self.sum(depth + 1)
            self._take({"(": ")", "[": "]", "{": "}"}[value])
            return inner
        if value == "|":
            inner = self.sum(depth + 1)
            self._take("|")
            return sympy.Abs(inner)
        raise NotAFormula(f"{value!r} begins no formula")

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
            return _divided(above, self._argument(depth))
        if name in ("binom", "dbinom", "tbinom"):
            top, bottom = self._argument(depth), self._argument(depth)
            if any(number.is_number and not 0 <= number <= LARGEST_TOP for number in (top, bottom)):
                raise Absurd("a binomial coefficient of no small numbers")
            return sympy.binomial(top, bottom)
        if name == "sqrt":
            order = self._group(depth, "[", "]") if self._is("[") else sympy.Integer(2)
            return _raised(self._argument(depth), _divided(sympy.Integer(1), order))
        if name in _FUNCTIONS:
            return self._function(name, depth)
        raise NotAFormula(f"\\{name} is not known")

    def _factor_follows(self) -> bool:
        token = self.peek
        return (
            token is not None and token[0] in ("number", "letter", "command") and token[1] not in _FUNCTIONS
        )

    def _function(self, name: str, depth: int) -> Any:
        sympy = self._sympy
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
            argument = _checked(argument * self._power(depth))
        if self._is("^"):  # \sin x^2 is the sine of x^2
            self._take()
            if self.peek == ("command", "circ"):
                self._take()
                argument = argument * sympy.pi / 180
            else:
                argument = _raised(argument, self._argument(depth, power=True))
        if name == "log":
            value = sympy.log(argument, base)
        elif name == "exp":
            value = _raised(sympy.E, argument)
        elif name == "abs":
            value = sympy.Abs(argument)
        else:
            short = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
            value = getattr(sympy, short.get(name, name))(argument)
        if power is None:
            return value
        if power == -1 and name in ("sin", "cos", "tan"):
            return getattr(sympy, "a" + name)(argument)
        return _raised(value, power)


def _raised(base: Any, exponent: Any) -> Any:
    if exponent.is_number:
        size = abs(exponent.evalf(5)) if exponent.is_comparable else 0
        if not size <= LARGEST_EXPONENT or (exponent.is_Rational and exponent.q > LARGEST_EXPONENT):
            raise Absurd("an exponent beyond every answer's")
        if base.is_Rational and max(abs(base.p), base.q).bit_length() * max(float(size), 1) > 4 * MOST_DIGITS:
            raise Absurd("a power of too many digits")
    return _checked(base**exponent)


def _divided(above: Any, below: Any) -> Any:
    if below == 0:
        raise NotAFormula("a division by zero")
    return _checked(above / below)


def _checked(value: Any) -> Any:
    if value.is_Rational and max(abs(value.p), value.q).bit_length() > 4 * MOST_DIGITS:
        raise Absurd("a number of too many digits")
    return value
