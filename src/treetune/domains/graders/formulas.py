r"""Reads formulas in LaTeX or plain text as sympy expressions, safely, and compares them.

sympy's own `parse_expr` executes its text as Python, and its arithmetic accepts any exponent. Here a text is
split into tokens, a grammar reads them, and a value that would be huge is refused before it is computed::

    \frac{1}{2}x^2    tokens  command frac, sign {, number 1, sign }, sign {, number 2, sign }, letter x, …
                      sympy   x**2/2

The grammar, from the loosest binding to the tightest, with the method that reads each rule::

    sum       _FormulaParser.sum             1 + 2x - y
    product   _FormulaParser._read_product   2x,  2 * x,  6 / 3
    power     _FormulaParser._read_power     x^2,  n!^2,  60^\circ (only within a function)
    postfix   _FormulaParser._read_postfix   n!,  50%
    atom      _FormulaParser._read_atom      12,  x_1,  (1 + 2),  |x|,  \frac12,  \sin x,  C(10,3)

`equal_formulas` compares two formulas in this order: as texts, as exact numbers, as expressions, and with the
library math-verify.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from typing_extensions import override

from treetune.domains.graders.residues import Residue, prime_for
from treetune.exceptions import Absurd, NotAFormula

# Limits. A model wrote the answer: without limits, a few characters such as 9^{9^9} take all memory or all
# time. Gold answers stay below each limit.

MOST_CHARACTERS_OF_FORMULA = 600
"""The most characters of a formula that is read."""

MOST_NESTED_BRACKETS = 40
"""The most brackets and commands within each other: each takes several of Python's frames."""
LARGEST_EXPONENT = 10_000
"""The largest exponent of a number or a letter, as in ``2^{10000}``."""
LARGEST_EXPONENT_OF_A_SUM = 2500
"""The largest exponent of a sum, as in ``(x + 1)^{2500}``, which is evaluated at several points."""
LARGEST_EXPONENT_OF_A_FUNCTION = 300
"""The largest exponent of a function, as in ``(\\sin x)^{300}``. It is smaller because larger powers of
functions are evaluated to more digits."""
LARGEST_DEGREE = 10_000
"""The largest product of exponents within each other. For ``(x^{2000})^{2000}`` this product is four
million."""
MOST_BITS_OF_A_POWERED_FACTOR = 400_000
"""The largest product of a sum's exponent and the bits of a number in the sum. For ``(2^{100}x + 1)^{50}``
this product is some 5,000."""
MOST_NESTED_FUNCTIONS = 3
"""The most functions within each other. The time in which sympy finds the sign of a logarithm grows tenfold
with each."""
LARGEST_ROOT = 300
"""The largest denominator of an exponent: ``2^{1/300}`` is read, and ``2^{1/301}`` is not."""
LARGEST_FACTORIAL = 3000
"""The largest n of n!, which has some 9,000 digits."""
LARGEST_NUMBER_IN_A_BINOMIAL = 5000
"""The largest number in a binomial coefficient, above or below."""
MOST_DIGITS_OF_A_NUMBER = 400
"""The most digits of a number in a formula."""
MOST_TOKENS_OF_A_BINOMIAL = 9
"""Tokens after the letter of a binomial coefficient that are read: ``C_{10}^{3}`` has eight."""

BITS_OF_A_HUGE_GOLD = 600
"""If the gold is a number of more bits, a huge answer is compared by remainders. If it isn't, a huge answer
is refused."""
MOST_BITS_UNDER_ROOT = 1200
"""The most bits of a number under a root that isn't a perfect power, because sympy factors such a number."""
MOST_BITS_OF_A_NUMBER = 40_000
"""The most bits of a number that is computed. Of a larger number only the remainder modulo a prime is
computed."""


# Reading

_TOKEN = re.compile(
    r"\s+|(?P<number>\d+\.\d+|\d+\.(?!\d)|\.\d+|\d+)|(?P<command>\\[A-Za-z]+|\\[%{}|])"
    r"|(?P<word>[A-Za-z]+)|(?P<sign>[-+*/^_(){}\[\]|!,=<>%])"
)
"""White space, or a token: ``3.5``, ``3.``, ``.5`` or ``3``; ``\\frac`` or ``\\{``; ``xy``; ``+``."""

_FUNCTION_NAMES = {
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sinh", "cosh", "tanh",
    "arcsin", "arccos", "arctan", "asin", "acos", "atan", "sqrt", "abs",
}  # fmt: skip
_SYMPY_NAMES = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
"""Functions that sympy knows by another name."""
_FRACTION_COMMANDS = ("frac", "dfrac", "tfrac", "cfrac")
_BINOMIAL_COMMANDS = ("binom", "dbinom", "tbinom")
_GREEK_LETTERS = {
    "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "nu", "rho", "sigma",
    "tau", "phi", "varphi", "omega", "psi", "chi", "xi", "eta", "zeta", "kappa", "Delta", "Omega",
}  # fmt: skip
_LAYOUT_COMMANDS = {"quad", "qquad", "left", "right", "displaystyle", "big", "Big", "bigl", "bigr", "limits"}
"""Commands that change the look of a formula and not its value. They are ignored."""
_SIGN_OF_COMMAND = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "colon": ":", "{": "(", "}": ")", "|": "|",
}  # fmt: skip
"""The signs of commands: ``\\cdot`` is ``*``."""
_TO_ASCII = str.maketrans({
    "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "π": " \\pi ", "∞": " \\infty ",
    "√": " \\sqrt ", "²": "^2", "³": "^3", "\u00a0": " ", "∙": "*",
})  # fmt: skip
_LONGEST_PRODUCT_OF_LETTERS = 3
"""The most letters that are read as a product: ``xyz`` is a product of three, and ``none`` is a word."""
_CLOSING_SIGNS = {"(": ")", "[": "]", "{": "}", "|": "|"}


class FormulaToken(NamedTuple):
    """A token of a formula.

    Example: ``2\\pi x`` has `FormulaToken("number", "2")`, `FormulaToken("command", "pi")` and
    `FormulaToken("letter", "x")`.
    """

    kind: str
    """``number``, ``letter``, ``command`` or ``sign``."""
    text: str
    """The token's characters; a command's without the backslash."""


_DEGREE_SIGN = FormulaToken("command", "circ")


def read_expression(text: str, *, reads_choices: bool = True) -> Any:
    """Reads a formula as a sympy expression.

    Args:
        text: The formula.
        reads_choices: Whether ``C(10,3)`` is a binomial coefficient, and not a variable C before a pair.

    Raises:
        NotAFormula: The grammar doesn't read the text.
        Absurd: The formula is too long, or its value would be huge.
    """
    if len(text) > MOST_CHARACTERS_OF_FORMULA:
        raise Absurd(f"a formula of {len(text)} characters")
    parser = _FormulaParser(_split_into_tokens(text), reads_choices)
    expression = parser.sum(0)
    if parser.next_token is not None:
        raise NotAFormula(f"{parser.next_token.text!r} was not expected")
    return expression


def _split_into_tokens(text: str) -> list[FormulaToken]:
    """Returns the tokens of a formula (see the head of this file), without white space and without commands
    that don't change the value. Raises NotAFormula for a word, and for a character that no formula has."""
    text = text.translate(_TO_ASCII)
    # Spaces of LaTeX; \! is one of negative width, as within 1{\!}000.
    text = text.replace("\\,", " ").replace("\\!", "").replace("\\;", " ").replace("\\ ", " ")
    text = text.replace("**", "^")  # as Python writes a power
    tokens: list[FormulaToken] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotAFormula(f"{text[position]!r} is not allowed in a formula")
        position = match.end()
        kind, matched = match.lastgroup, match[0]
        if kind == "command":
            name = matched[1:]
            if name in _SIGN_OF_COMMAND:
                tokens.append(FormulaToken("sign", _SIGN_OF_COMMAND[name]))
            elif name not in _LAYOUT_COMMANDS:
                tokens.append(FormulaToken("command", name))
        elif kind == "word":
            tokens += _tokens_of_word(matched)
        elif kind is not None:  # None: white space
            tokens.append(FormulaToken(kind, matched))
    return tokens


def _tokens_of_word(word: str) -> list[FormulaToken]:
    """Returns a command for ``sin`` or ``pi`` without a backslash, else letters: ``xy`` is x times y."""
    if word == "infinity":
        return [FormulaToken("command", "infty")]
    if word in _FUNCTION_NAMES or word == "pi":
        return [FormulaToken("command", word)]
    if len(word) > _LONGEST_PRODUCT_OF_LETTERS:
        raise NotAFormula(f"{word!r} is a word")
    return [FormulaToken("letter", letter) for letter in word]


class _FormulaParser:
    """A recursive descent parser, with a method for each rule of the grammar in the module's head.

    Each method takes its tokens from the front of those that remain. `depth` is the number of brackets and
    commands around these tokens. It is bounded, and so is the recursion.
    """

    def __init__(self, tokens: list[FormulaToken], reads_choices: bool = True) -> None:
        import sympy

        self._sympy = sympy
        self._reads_choices = reads_choices
        """Whether ``C(10,3)`` is a binomial coefficient, and not a variable C before a pair."""
        self._tokens = tokens
        self._position = 0
        """The index of the next token."""
        self._open_functions = 0
        """The number of functions whose argument is being read. Within such an argument, 60^\\circ is pi/3.
        Elsewhere it is 60 with a unit."""

    # Tokens

    @property
    def next_token(self) -> FormulaToken | None:
        """The next token; None at the end."""
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self, sign: str | None = None) -> FormulaToken:
        """Takes the next token, which has to be `sign` unless that is None."""
        token = self.next_token
        if token is None or (sign is not None and token.text != sign):
            raise NotAFormula(f"{sign or 'more'} was expected, not {token.text if token else 'the end'}")
        self._position += 1
        return token

    def _next_is(self, *signs: str) -> bool:
        token = self.next_token
        return token is not None and token.kind == "sign" and token.text in signs

    # Rules, from the loosest binding to the tightest

    def sum(self, depth: int) -> Any:
        """Reads ``-2x + 3 - y``."""
        if depth > MOST_NESTED_BRACKETS:
            raise Absurd(f"more than {MOST_NESTED_BRACKETS} levels deep")
        total = self._read_plus_and_minus() * self._read_product(depth)
        while self._next_is("+", "-"):
            total = total + self._read_plus_and_minus() * self._read_product(depth)
        return self._check_size(total)

    def _read_plus_and_minus(self) -> int:
        """Reads any number of plus and minus signs: ``--`` is 1, and ``+-`` is -1."""
        sign = 1
        while self._next_is("+", "-"):
            if self._take().text == "-":
                sign = -sign
        return sign

    def _read_product(self, depth: int) -> Any:
        """Reads ``2 * x``, ``6 / -3`` or ``2x(y + 1)``. It computes from the left: ``1/2x`` is x/2."""
        product = self._read_power(depth)
        while True:
            if self._next_is("*"):
                self._take()
                product = self._check_size(product * self._read_signed_power(depth))
            elif self._next_is("/"):
                self._take()
                product = self._divide(product, self._read_signed_power(depth))
            elif self._factor_is_next():
                product = self._check_size(product * self._read_power(depth))
            else:
                return product

    def _factor_is_next(self) -> bool:
        """Returns whether a factor without ``*`` before it comes next, as the x of ``2x``."""
        token = self.next_token
        if token is None:
            return False
        if token.kind == "sign":
            # "|" and "[" are missing here, because they may close a bracket around this product, as in |2x|
            # and ]1, 2x[.
            return token.text in ("(", "{")
        if token.kind == "number" and self._tokens[self._position - 1].kind == "number":
            raise NotAFormula("two numbers without a sign between them")
        return True

    def _read_signed_power(self, depth: int) -> Any:
        """Reads ``-x^2``, which is -(x^2)."""
        return self._read_plus_and_minus() * self._read_power(depth)

    def _read_power(self, depth: int) -> Any:
        """Reads ``x^2``, ``x^{n + 1}``, ``2^-1`` or, within a function, ``60^\\circ``."""
        base = self._read_postfix(self._read_atom(depth))
        if not self._next_is("^"):
            return base
        self._take()
        if self._open_functions and self.next_token == _DEGREE_SIGN:  # elsewhere degrees are a unit
            self._take()
            return base * self._sympy.pi / 180
        # Authors who write 2^10 mean 1024, although LaTeX would raise only the 1.
        return self._raise_to(base, self._read_argument(depth + 1, takes_all_digits=True))

    def _read_postfix(self, value: Any) -> Any:
        """Reads the signs after a value: ``n!``, ``3!!`` (the factorial of 3!), ``50%``."""
        while self._next_is("!", "%"):
            if self._take().text == "%":
                value = value / 100
            else:
                value = self._factorial(value)
        return value

    def _read_argument(self, depth: int, takes_all_digits: bool = False) -> Any:
        """Reads the argument of a command: a group, or the next digit, letter or command.

        With `takes_all_digits`, a number is read with all its digits, and may have a sign. This is for powers
        and functions: ``2^10`` is 1024, and ``\\sin 30`` is the sine of 30.
        """
        if self._next_is("{"):
            return self._read_group(depth, "{", "}")
        if takes_all_digits:
            return self._read_signed_power(depth) if self._next_is("+", "-") else self._read_atom(depth)
        token = self.next_token
        if token is not None and token.kind == "number" and len(token.text) > 1:
            # \frac12 is a half: LaTeX takes one digit as an argument, and the next argument begins after it.
            first_digit, other_digits = token.text[0], token.text[1:]
            self._tokens[self._position] = FormulaToken("number", other_digits)
            if first_digit.isdigit():
                return self._make_number(first_digit)
            # The first character is the point of .5, which is skipped. The 5 is read below.
        return self._read_atom(depth)

    def _read_group(self, depth: int, opening: str, closing: str) -> Any:
        """Reads ``{x + 1}``, or the ``[3]`` of ``\\sqrt[3]{x}``."""
        self._take(opening)
        inner = self.sum(depth + 1)
        self._take(closing)
        return inner

    def _read_atom(self, depth: int) -> Any:
        """Reads ``12``, ``x``, ``x_1``, ``C(10,3)``, ``\\pi``, ``\\frac12``, ``(x + 1)`` or ``|x|``."""
        if depth > MOST_NESTED_BRACKETS:
            raise Absurd(f"more than {MOST_NESTED_BRACKETS} levels deep")
        kind, text = self._take()
        if kind == "number":
            if len(text) > MOST_DIGITS_OF_A_NUMBER:
                raise Absurd(f"a number of {len(text)} digits")
            return self._make_number(text.rstrip("."))  # "3." is 3
        if kind == "letter":
            return self._read_after_letter(text)
        if kind == "command":
            return self._read_command(text, depth + 1)
        closing = _CLOSING_SIGNS.get(text)
        if closing is None:
            raise NotAFormula(f"{text!r} can't begin a formula")
        inner = self.sum(depth + 1)
        self._take(closing)
        return self._sympy.Abs(inner) if text == "|" else inner

    def _read_after_letter(self, letter: str) -> Any:
        """Reads the rest of ``C(10,3)`` or ``x_1``; ``i`` and ``e`` without an index are constants."""
        if self._reads_choices and letter in ("C", "P"):
            binomial = self._read_binomial(letter)
            if binomial is not None:
                return binomial
        if letter in ("i", "e") and not self._next_is("_"):
            return self._make_constant(letter)
        return self._make_symbol(letter + self._read_index())

    def _read_binomial(self, letter: str) -> Any:
        """Reads the rest of ``C(10,3)``, ``C_{10}^{3}`` or ``P(10,3)``; None if the letter is a variable."""
        tokens = self._tokens[self._position : self._position + MOST_TOKENS_OF_A_BINOMIAL]
        texts = [token.text for token in tokens]
        if texts[:1] == ["("] and texts[2:3] == [","] and texts[4:5] == [")"]:
            # The five tokens of (10,3)
            top, bottom, token_count = tokens[1], tokens[3], 5
        elif letter == "C" and texts[:1] == ["_"]:
            # _{10}^{3}, with or without each of the braces. Without braces it has four tokens.
            positions = [position for position, text in enumerate(texts) if text not in ("{", "}")]
            if len(positions) < 4 or texts[positions[2]] != "^":
                return None
            top, bottom = tokens[positions[1]], tokens[positions[3]]
            token_count = positions[3] + 1
            if texts[token_count : token_count + 1] == ["}"]:
                token_count += 1
        else:
            return None
        if top.kind != "number" or bottom.kind != "number":
            return None
        if not top.text.isdigit() or not bottom.text.isdigit():  # no decimals
            return None
        self._position += token_count
        top_number, bottom_number = self._make_number(top.text), self._make_number(bottom.text)
        choices = self._binomial(top_number, bottom_number)
        if letter == "C":
            return choices
        # P(10,3) is 10 · 9 · 8.
        return self._check_size(choices * self._factorial(bottom_number))

    def _read_index(self) -> str:
        """Reads the index of a variable, if it has one: ``_1``, or ``_{12}``, which becomes ``_12``."""
        if not self._next_is("_"):
            return ""
        self._take()
        if not self._next_is("{"):
            return "_" + self._take().text
        self._take("{")
        index = ""
        while not self._next_is("}"):
            index += self._take().text
        self._take("}")
        return "_" + index

    def _read_command(self, name: str, depth: int) -> Any:
        """Reads the arguments of a command, and returns its value."""
        sympy = self._sympy
        if name == "pi":
            return sympy.pi
        if name == "infty":
            return sympy.oo
        if name in _GREEK_LETTERS:  # \alpha or \alpha_1
            return sympy.Symbol(name + self._read_index())
        if name in _FRACTION_COMMANDS:  # \frac{1}{2} or \frac12
            numerator = self._read_argument(depth)
            denominator = self._read_argument(depth)
            return self._divide(numerator, denominator)
        if name in _BINOMIAL_COMMANDS:  # \binom{10}{3}
            top = self._read_argument(depth)
            bottom = self._read_argument(depth)
            return self._binomial(top, bottom)
        if name == "sqrt":  # \sqrt{x} or \sqrt[3]{x}
            order = self._read_group(depth, "[", "]") if self._next_is("[") else self._make_number("2")
            radicand = self._read_argument(depth)
            return self._raise_to(radicand, self._divide(self._make_number("1"), order))
        if name in _FUNCTION_NAMES:
            return self._read_function(name, depth)
        raise NotAFormula(f"\\{name} is not supported")

    def _read_function(self, name: str, depth: int) -> Any:
        """Reads ``\\sin x``, ``\\sin^2 x``, ``\\sin 2x``, ``\\log_2 8`` or ``\\sin 30^\\circ``.

        In ``\\sin(x)^2`` it reads ``\\sin(x)``, and `_read_power` squares its value.
        """
        sympy = self._sympy
        if self._open_functions >= MOST_NESTED_FUNCTIONS:
            raise Absurd(f"more than {MOST_NESTED_FUNCTIONS} functions within each other")
        base = sympy.Integer(10)
        if name == "log" and self._next_is("_"):  # \log_2 8
            self._take()
            base = self._read_argument(depth)
        power = None
        if self._next_is("^"):  # \sin^2 x
            self._take()
            power = self._read_argument(depth)
        argument = self._read_argument_of_function(depth)
        value = self._value_of_function(name, argument, base)
        if power is None:
            return value
        if power == -1 and name in ("sin", "cos", "tan"):  # \sin^{-1} x is the arc sine, not 1/sin(x)
            return getattr(sympy, "a" + name)(argument)
        return self._raise_to(value, power)

    def _read_argument_of_function(self, depth: int) -> Any:
        """Reads ``(x)`` of ``\\sin(x)y``, ``2x`` of ``\\sin 2x \\cos x``, ``x^2`` of ``\\sin x^2``, or
        ``30^\\circ``."""
        # In \sin(x)y the group is the whole argument, and y is multiplied by the sine.
        is_grouped = self._next_is("(", "{", "[")
        # Brackets that a reader sees end the argument: \sin(x)^2 is (\sin x)^2. Braces aren't seen:
        # \sin{x}^2 looks like \sin x^2, which is the sine of x^2.
        is_bracketed = self._next_is("(", "[")
        self._open_functions += 1
        argument = self._read_argument(depth, takes_all_digits=True)
        if not is_bracketed:
            argument = self._read_postfix(argument)  # \sin x! is the sine of x!
        self._open_functions -= 1
        while not is_grouped and self._factor_of_argument_is_next():
            argument = self._check_size(argument * self._read_power(depth))
        # The loop has read each further factor with its exponent. So if an exponent comes next, the argument
        # is a single factor.
        if not self._next_is("^"):
            return argument
        if self._tokens[self._position + 1 : self._position + 2] == [_DEGREE_SIGN]:
            # In \sin 30^\circ and also in \sin(30)^\circ, 30 is the angle: a sine itself has no degrees.
            self._position += 2
            return argument * self._sympy.pi / 180
        if is_bracketed:
            return argument  # `_read_power` raises the function's value
        self._take()
        exponent = self._read_argument(depth, takes_all_digits=True)
        return self._raise_to(argument, exponent)  # \sin x^2 is the sine of x^2

    def _factor_of_argument_is_next(self) -> bool:
        """Returns whether a further factor of a function's argument comes next.

        This is so for the x of ``\\sin 2x``. In ``\\sin x \\cos x`` the cosine is multiplied by the sine.
        """
        token = self.next_token
        if token is None or token.kind not in ("number", "letter", "command"):
            return False
        return token.text not in _FUNCTION_NAMES

    # Values. `_ResidueParser` overrides these methods.

    def _make_number(self, digits: str) -> Any:
        return self._sympy.Rational(digits)

    def _make_symbol(self, name: str) -> Any:
        return self._sympy.Symbol(name)

    def _make_constant(self, letter: str) -> Any:
        return self._sympy.I if letter == "i" else self._sympy.E

    def _value_of_function(self, name: str, argument: Any, base: Any) -> Any:
        """Returns the value of a function. Only ``log`` uses `base`."""
        sympy = self._sympy
        if name in ("sinh", "cosh", "tanh"):  # they are computed from powers of e
            self._refuse_huge(argument)
        if name == "log":
            return sympy.log(argument, base)
        if name == "exp":
            return self._raise_to(sympy.E, argument)
        if name == "abs":
            return sympy.Abs(argument)
        return getattr(sympy, _SYMPY_NAMES.get(name, name))(argument)

    def _binomial(self, top: Any, bottom: Any) -> Any:
        """Returns the binomial coefficient of `top` over `bottom`. Raises Absurd for a large or a negative
        number."""
        for number in (top, bottom):
            if number.is_number and not 0 <= number <= LARGEST_NUMBER_IN_A_BINOMIAL:
                raise Absurd("a binomial coefficient of a large or negative number")
        if top.free_symbols or bottom.free_symbols:
            # Some terms with letters, such as fractions, take sympy's own binomial seconds. Factorials of
            # letters are only written down.
            factorial = self._sympy.factorial
            return factorial(top) / (factorial(bottom) * factorial(top - bottom))
        return self._sympy.binomial(top, bottom)

    def _factorial(self, value: Any) -> Any:
        """Returns the factorial of a small whole number, or of a term with letters. (sympy only writes the
        latter down.) Raises Absurd for anything else."""
        if value.has(self._sympy.Function):
            raise Absurd("a factorial of a function")
        is_small = value.is_Integer and 0 <= value <= LARGEST_FACTORIAL
        if not is_small and not value.free_symbols:
            raise Absurd("a factorial of anything but a small whole number")
        return self._sympy.factorial(value)

    def _raise_to(self, base: Any, exponent: Any) -> Any:
        """Returns the power. Raises Absurd if it could be expensive."""
        if not exponent.is_number:
            return self._check_size(base**exponent)
        # A complex exponent can't be compared, and counts as small: e^{i pi} is allowed. The conditions are
        # written as `not … <= …`, so that they also refuse nan.
        size = abs(exponent.evalf(5)) if exponent.is_comparable else 0
        is_too_large = not size <= self._largest_exponent(base)
        is_too_high_a_root = exponent.is_Rational and exponent.q > LARGEST_ROOT
        if is_too_large or is_too_high_a_root:
            raise Absurd("an exponent that is larger than in any answer")
        if not base.is_Rational:
            # Such as (2n)^{50}: the exponent multiplies its degree and its bits.
            degree, bits = _degree_and_bits(base)
            if not (size * degree <= LARGEST_DEGREE and size * bits <= MOST_BITS_OF_A_POWERED_FACTOR):
                raise Absurd("powers of powers that are larger than in any answer")
        elif exponent.is_Rational and exponent.q > 1:
            return self._root(base, exponent)
        elif _count_bits(base) * max(float(size), 1) > MOST_BITS_OF_A_NUMBER:
            raise Absurd("a power of too many digits")
        return self._check_size(base**exponent)

    def _refuse_huge(self, argument: Any) -> None:
        """Raises Absurd for a large argument of a function that grows exponentially."""
        if argument.is_number and argument.is_comparable and not abs(argument.evalf(5)) <= LARGEST_EXPONENT:
            raise Absurd("an exponent that is larger than in any answer")

    def _largest_exponent(self, base: Any) -> int:
        """Returns the largest exponent that is allowed for a base. It is smaller for sums and functions,
        which cost more to evaluate than numbers."""
        sympy = self._sympy
        if base.is_Rational or base.is_Symbol or base in (sympy.E, sympy.I, sympy.pi):
            return LARGEST_EXPONENT
        return LARGEST_EXPONENT_OF_A_FUNCTION if base.has(sympy.Function) else LARGEST_EXPONENT_OF_A_SUM

    def _root(self, base: Any, exponent: Any) -> Any:
        """Returns the root of a rational number, as in ``8^{1/3}``.

        The root of a perfect power is exact, however large the number is. Any other number has to be small,
        since sympy factors it.
        """
        sympy = self._sympy
        order = int(exponent.q)
        numerator, denominator = base.p, base.q
        numerator_root, is_exact_above = sympy.integer_nthroot(abs(numerator), order)
        denominator_root, is_exact_below = sympy.integer_nthroot(denominator, order)
        # The exact root is only for a base that isn't negative. The root of a negative base is complex, and
        # sympy computes it below.
        if numerator >= 0 and is_exact_above and is_exact_below:
            root = sympy.Rational(numerator_root, denominator_root)
            return self._raise_to(root, sympy.Integer(exponent.p))
        if _count_bits(base) * max(abs(exponent.p), 1) > MOST_BITS_UNDER_ROOT:
            raise Absurd("a root of a number of too many digits")
        return base**exponent

    def _divide(self, numerator: Any, denominator: Any) -> Any:
        if denominator == 0:
            raise NotAFormula("a division by zero")
        return self._check_size(numerator / denominator)

    def _check_size(self, value: Any) -> Any:
        """Returns the value. Raises Absurd for a number of too many bits."""
        if value.is_Rational and _count_bits(value) > MOST_BITS_OF_A_NUMBER:
            raise Absurd("a number of too many digits")
        return value


def _count_bits(number: Any) -> int:
    """Returns the number of bits of a rational number's numerator or denominator, whichever has more."""
    return int(max(abs(number.p), number.q).bit_length())


def _degree_and_bits(base: Any) -> tuple[float, int]:
    """Returns the degree of an expression, and the bits of the largest number in it.

    The exponents of powers within each other are multiplied. The degree is the largest such product in the
    expression. Example: ``((2n)^{50} + 1)^{10}`` has the degree 50 · 10 = 500, and 51 bits in ``2^{50}``.
    """
    if base.is_Rational:
        return 1.0, _count_bits(base)
    degree, bits = 1.0, 1
    for part in base.args:
        part_degree, part_bits = _degree_and_bits(part)
        degree = max(degree, part_degree)
        bits = max(bits, part_bits)
    if base.is_Pow and base.exp.is_Rational:
        base_degree, _ = _degree_and_bits(base.base)
        degree = max(degree, base_degree * abs(float(base.exp)))
    return degree, bits


class _ResidueParser(_FormulaParser):
    """Reads a formula as its value modulo a prime, for numbers such as ``2^{10^9}`` that are too large to
    compute.

    It reads only numbers, sums, products, powers, fractions, factorials and binomial coefficients.
    """

    def __init__(self, tokens: list[FormulaToken], prime: int) -> None:
        super().__init__(tokens)
        self._prime = prime

    @override
    def _make_number(self, digits: str) -> Residue:
        return Residue.of(Fraction(digits), self._prime)

    @override
    def _make_symbol(self, name: str) -> Residue:
        raise Absurd("an unknown in a formula of huge numbers")

    @override
    def _make_constant(self, letter: str) -> Residue:
        raise Absurd(f"{letter} in a formula of huge numbers")

    @override
    def _read_command(self, name: str, depth: int) -> Any:
        if name not in _FRACTION_COMMANDS and name not in _BINOMIAL_COMMANDS:
            raise Absurd(f"\\{name} in a formula of huge numbers")
        return super()._read_command(name, depth)

    @override
    def _read_atom(self, depth: int) -> Any:
        if self._next_is("|"):
            raise Absurd("an absolute value in a formula of huge numbers")
        return super()._read_atom(depth)

    @override
    def _binomial(self, top: Residue, bottom: Residue) -> Residue:
        return top.choose(bottom)

    @override
    def _factorial(self, value: Residue) -> Residue:
        return value.factorial()

    @override
    def _raise_to(self, base: Residue, exponent: Residue) -> Residue:
        return base.power(exponent)

    @override
    def _divide(self, numerator: Residue, denominator: Residue) -> Residue:
        return numerator.divide(denominator)

    @override
    def _check_size(self, value: Any) -> Any:
        return value


# Values of expressions

_COMPARISON_POINTS = ((3, 7), (-5, 12), (13, 6), (-17, 9), (1, 23), (-2, 14), (331, 8), (-409, 10))
"""Numerators and denominators of the first unknown, at the points at which expressions with unknowns are
compared. They have both signs, and some are far from 0, since ``|x|`` is x for positive numbers, and
``|x - 3|`` is 3 - x for small ones."""

_QUOTIENT_POINTS = ((7, 3), (23, 5), (-31, 4), (101, 7))
"""Points at which the factor between two proportional expressions is computed; usually only the first is
needed. None of them is in `_COMPARISON_POINTS`, where the factor is then tested."""

_FEWEST_COMPARED_POINTS = 3
"""If both expressions have a value at fewer points, their difference is simplified instead."""

_FEWEST_DIGITS = 40
"""Digits that are computed in addition to those for the magnitudes of all parts (`_choose_digits`), so that a
small part is never lost in a sum with a large one."""
_SPARE_DIGITS = 15
"""The number of computed digits, from the end, in which equal numbers may differ."""
_MOST_FURTHER_DIGITS = 400
"""The most digits that sympy computes in addition to those that it is asked for."""
_LOG10_OF_2 = 0.30103
_SMALL_EXPONENT = 20
"""A power with a smaller exponent than this doesn't count among the magnitudes (`_choose_digits`), but its
base does."""

MOST_COMPUTED_DIGITS = 12_000
"""The largest sum of the magnitudes of all parts of two numbers. The number of computed digits is about twice
this sum."""
LARGEST_POWER_THAT_IS_MULTIPLIED_OUT = 100
"""The largest exponent of a sum in a difference that sympy simplifies."""
MOST_DIGITS_OF_A_FACTORIAL = 400
"""The most digits to which a factorial of a fraction is computed, which takes some 0.1 s."""


def same_value(first: Any, second: Any, tolerance: float = 0.0) -> bool:
    """Returns whether two expressions are equal for all values of their unknowns.

    Numbers are equal if they differ by less than `tolerance`. Expressions with unknowns are evaluated at
    several points. This is a thousand times faster than simplifying their difference, and finds more: sympy
    does not find that ``log(50)/log(5)`` is ``2 + log(2)/log(5)``. A formula of a model may still take long,
    so call this function in a process that can be killed.
    """
    import sympy

    if any(expression.has(sympy.zoo, sympy.nan) for expression in (first, second)):
        return False  # a division by zero isn't even equal to another one
    if first == second:
        return True
    infinite = (sympy.oo, -sympy.oo)
    if first.has(*infinite) or second.has(*infinite):
        return False  # they are written differently, and digits can't compare infinities
    unknowns = sorted(first.free_symbols | second.free_symbols, key=str)
    if not unknowns:
        agree = _agree(first, second, tolerance)
        if agree is None:
            return _is_zero_when_simplified(first - second)
        return agree
    compared_points = 0
    for top, bottom in _COMPARISON_POINTS:
        # Each unknown gets another value, or else x - y would be 0. The difference of 2 is arbitrary.
        point = {symbol: Fraction(top + 2 * rank, bottom) for rank, symbol in enumerate(unknowns)}
        agree = _agree_at(point, first, second)
        if agree is False:
            return False
        if agree is not None:
            compared_points += 1
    return compared_points >= _FEWEST_COMPARED_POINTS or _is_zero_when_simplified(first - second)


def _agree_at(point: dict[Any, Fraction], first: Any, second: Any) -> bool | None:
    """Compares two expressions at a point. Returns None if one of them has no value there."""
    import sympy

    first_value, second_value = _rational_value(first, point), _rational_value(second, point)
    if first_value is not None and second_value is not None:
        return first_value == second_value  # exact, and faster than the comparison below
    values = {symbol: sympy.Rational(value) for symbol, value in point.items()}
    return _agree(first.subs(values), second.subs(values), tolerance=0.0)


def _rational_value(expression: Any, point: dict[Any, Fraction]) -> Fraction | None:
    """Evaluates sums, products and integer powers exactly, a hundred times faster than sympy's `subs`.

    Returns None for every other expression, for a division by zero, and for a power that is too large.
    """
    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    if expression.is_Symbol:
        return point.get(expression)
    if expression.is_Pow:
        base = _rational_value(expression.base, point)
        if base is None or not expression.exp.is_Integer:
            return None
        exponent = int(expression.exp)
        if base == 0 and exponent <= 0:
            return None
        bits = max(abs(base.numerator), base.denominator).bit_length()
        if bits * abs(exponent) > MOST_BITS_OF_A_NUMBER:
            return None
        return base**exponent
    if not expression.is_Add and not expression.is_Mul:
        return None
    result = Fraction(0) if expression.is_Add else Fraction(1)
    for part in expression.args:
        value = _rational_value(part, point)
        if value is None:
            return None
        if expression.is_Add:
            result += value
        else:
            result *= value
    return result


def _is_zero_when_simplified(difference: Any) -> bool:
    """Returns whether a difference becomes 0 when it is simplified. Raises Absurd if sympy would multiply out
    a large power of a sum."""
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
    """Compares two numbers. Returns None if the value of one can't be computed."""
    if first.is_Rational and second.is_Rational:
        return bool(first == second or abs(first - second) < tolerance)
    import mpmath

    digits = _choose_digits(first, second)
    if digits > _FEWEST_DIGITS:
        # Many digits are expensive. Most numbers that differ do so in the first ones.
        if _differ_in_first_digits(first, second, tolerance):
            return False
        if digits > MOST_DIGITS_OF_A_FACTORIAL and _has_factorials_of_fractions(first, second):
            raise Absurd("factorials of fractions whose difference shows in too many digits")
    first_value, second_value = _evaluate(first, digits), _evaluate(second, digits)
    if first_value is None or second_value is None:
        return None
    with mpmath.workdps(digits):
        distance = abs(first_value - second_value)
        larger = max(abs(first_value), abs(second_value))
        # Equal numbers may differ in the last `_SPARE_DIGITS` digits.
        rounding = larger * mpmath.mpf(10) ** (_SPARE_DIGITS - digits)
        return bool(distance < tolerance or distance <= rounding)


def _differ_in_first_digits(first: Any, second: Any, tolerance: float) -> bool:
    """Returns whether 40 digits already show that two numbers differ."""
    import mpmath

    first_value = _evaluate(first, _FEWEST_DIGITS, needs_all_digits=True)
    second_value = _evaluate(second, _FEWEST_DIGITS, needs_all_digits=True)
    if first_value is None or second_value is None:
        return False
    with mpmath.workdps(_FEWEST_DIGITS):
        distance = abs(first_value - second_value)
        larger = max(abs(first_value), abs(second_value))
        # They differ surely if the first half of the digits shows it. The last ones may be inexact. For the
        # same reason the distance has to exceed the tolerance clearly.
        rounding = larger * mpmath.mpf(10) ** (-_FEWEST_DIGITS / 2)
        return bool(distance > 2 * tolerance and distance > rounding)


def _has_factorials_of_fractions(*expressions: Any) -> bool:
    """Returns whether one of the expressions, which have no unknowns, has a factorial of a fraction.

    `same_value` compares ``(2n)!`` at n = 3/7, for example, and so computes (6/7)!. sympy computes such a
    factorial with the gamma function, which takes a second for 1,000 digits.
    """
    import sympy

    factorials: set[Any] = set()
    for expression in expressions:
        factorials |= expression.atoms(sympy.factorial, sympy.gamma)
    return any(not factorial.args[0].is_Integer for factorial in factorials)


def _choose_digits(*expressions: Any) -> int:
    """Returns the number of digits that decide whether two numbers are equal.

    The number is 40 (`_FEWEST_DIGITS`). The magnitude of 1000 or 0.001 is 3. If the sum of the magnitudes of
    all parts is large, twice this sum is added: ``sqrt(10^60 + 1)`` differs from ``10^30`` only in its 62nd
    digit.

    Raises Absurd if the magnitudes are too large.
    """
    import sympy

    magnitudes = 0.0
    for expression in expressions:
        for part in sympy.preorder_traversal(expression):
            if part.is_Rational:
                magnitudes += _count_bits(part) * _LOG10_OF_2
            elif part.is_Pow or part.is_Function:
                magnitudes += _magnitude(part)
    if magnitudes > MOST_COMPUTED_DIGITS:
        raise Absurd("numbers whose difference shows in too many digits")
    if magnitudes <= _FEWEST_DIGITS / 2:  # 40 digits are at least twice the sum
        return _FEWEST_DIGITS
    return _FEWEST_DIGITS + 2 * int(magnitudes)


def _magnitude(number: Any) -> float:
    """Returns the absolute decimal logarithm of a part of an expression: 3 for 1000 and for 0.001.

    `_choose_digits` adds up the magnitudes of all parts to choose how many digits to compute. The result is 0
    for three kinds of parts: a part with variables, a power with a small exponent, and a part without a
    finite value.
    """
    import sympy

    if number.free_symbols:
        return 0.0
    is_small_power = number.is_Pow and abs(number.exp.evalf(5)) < _SMALL_EXPONENT
    if is_small_power:
        return 0.0  # such as a square or a root: `_choose_digits` counts the base, which is another part
    try:
        size = abs(number.evalf(5))
        if not (size.is_finite and size > 0):
            return 0.0  # 0 has no logarithm
        return abs(float(sympy.log(size, 10)))
    except (TypeError, ValueError, OverflowError):  # no real number, or one beyond all floats
        return 0.0


def _evaluate(expression: Any, digits: int = _FEWEST_DIGITS, *, needs_all_digits: bool = False) -> Any:
    """Returns the value of an expression as an mpmath number with so many digits. Returns None if it has no
    finite value.

    If parts of the expression cancel each other, fewer digits may be right. If `needs_all_digits` is True,
    the result is None in this case.
    """
    import mpmath
    import sympy

    try:
        # Where parts cancel each other, sympy computes more digits than it is asked for. `maxn` bounds them.
        value = expression.evalf(digits, maxn=digits + _MOST_FURTHER_DIGITS)
        real, imaginary = value.as_real_imag()
        for part in (real, imaginary):
            if not (part.is_Float or part.is_Rational):
                return None
            # The precision of sympy's number says how many digits are right.
            if needs_all_digits and part.is_Float and mpmath.libmp.prec_to_dps(part._prec) < digits:
                return None
        with mpmath.workdps(digits):
            number = mpmath.mpc(sympy.Float(real, digits)._mpf_, sympy.Float(imaginary, digits)._mpf_)
            return number if mpmath.isfinite(number) else None
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):  # sympy's, if there is no number
        return None


# Equal formulas

_DECIMAL_NUMBER = re.compile(r"(?P<sign>[-+]?) ?(?P<digits>\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})")
"""``-12``, ``3.5``, ``3.`` or ``.5``."""
_LATEX_FRACTION = re.compile(
    r"(?P<sign>[-+]?) ?(?:(?P<whole>\d{1,20}) ?)?\\frac"
    r" ?(?:\{ ?(?P<above>-?\d{1,200}) ?\}|(?P<above_digit>\d))"
    r" ?(?:\{ ?(?P<below>\d{1,200}) ?\}|(?P<below_digit>\d))"
)
"""``3\\frac{1}{2}`` or ``\\frac12``."""
_PLAIN_FRACTION = re.compile(
    r"(?P<sign>[-+]?) ?(?:(?P<whole>\d{1,20}) )?(?P<above>\d{1,200}) ?/ ?(?P<below>\d{1,200})"
)
"""``1/2`` or ``3 1/2``."""
_REPEATING_DECIMAL = re.compile(
    r"(?P<sign>[-+]?) ?(?P<whole>\d{0,50})\.(?P<fixed>\d{0,50})"
    r"\\(?:overline|bar) ?\{?(?P<repeated>\d{1,50})\}?"
)
"""``0.1\\overline{36}``."""
_DECIMAL_WITH_DOTS = re.compile(
    r"(?P<sign>[-+]?) ?(?P<whole>\d{0,20})\.(?P<fixed>\d{0,20}?)"
    r"(?P<repeated>\d{1,12}?)(?P=repeated){1,20} ?\\dots"
)
"""``0.13636\\dots``: digits that occur at least twice in a row before the dots are repeated for ever."""
_TEXT_COMMAND = re.compile(r"\\text(?![a-z])")
_MIXED_NUMBER = re.compile(
    r"(?<![\d.}A-Za-z)])(\d{1,20}) ?\\frac ?(\d|\{ ?\d{1,20} ?\}) ?(\d|\{ ?\d{1,20} ?\})"
)

_TOO_LARGE_FOR_MATH_VERIFY = re.compile(
    r"\d{400}|\^ ?\{? ?[-+(]? ?\d{5}|!\s*!|\d{4,}\s*!|\^[^-+*/=,]{0,40}\^[^-+*/=,]{0,40}\^"
)
"""A number of 400 digits, an exponent of five, ``n!!``, the factorial of a number of four digits, or three
powers within each other."""
_MEANINGLESS_SPACE = re.compile(r"(?<!\d) | (?!\d)|(?<=\d) (?=\d{3}(?!\d))")
"""A space without a meaning: not between two digits, unless it is before a group of three."""
_PRIME = re.compile(r"\d ?'")
_LARGE_OPERATORS = re.compile(r"\\(?:i*o?int|sum|prod|lim)(?![a-z])")
MOST_CHARACTERS_FOR_MATH_VERIFY = 200
"""Characters of the longest formula for math-verify, which may take minutes to read a longer one."""
MOST_COMMANDS_FOR_MATH_VERIFY = 20
"""The most backslashes of such a formula."""


def exact_value(formula: str) -> Fraction | None:
    """Reads an integer, a decimal, a fraction, a mixed number or a repeating decimal. Returns None for any
    other formula."""
    formula = formula.strip()
    if match := _DECIMAL_NUMBER.fullmatch(formula):
        value = Fraction(match["digits"].removesuffix("."))
    elif match := _LATEX_FRACTION.fullmatch(formula):
        above, below = match["above"] or match["above_digit"], match["below"] or match["below_digit"]
        if int(below) == 0:
            return None
        value = int(match["whole"] or 0) + Fraction(int(above), int(below))
    elif match := _PLAIN_FRACTION.fullmatch(formula):
        if int(match["below"]) == 0:
            return None
        value = int(match["whole"] or 0) + Fraction(int(match["above"]), int(match["below"]))
    elif match := _REPEATING_DECIMAL.fullmatch(formula) or _DECIMAL_WITH_DOTS.fullmatch(formula):
        # 0.1363636… · 1000 is 136.3636…, and 0.1363636… · 10 is 1.3636…: it is (136 - 1) / (1000 - 10).
        digits_before = (match["whole"] or "0") + match["fixed"]
        numerator = int(digits_before + match["repeated"]) - int(digits_before)
        denominator = 10 ** len(match["fixed"]) * (10 ** len(match["repeated"]) - 1)
        value = Fraction(numerator, denominator)
    else:
        return None
    return -value if match["sign"] == "-" else value


def equal_formulas(answer: str, gold: str) -> bool:
    """Returns whether two formulas have exactly the same value.

    Raises Absurd if the comparison could be too expensive.
    """
    if remove_spaces(answer) == remove_spaces(gold):
        return True
    exact_answer, exact_gold = exact_value(answer), exact_value(gold)
    if exact_answer is not None and exact_gold is not None:
        return exact_answer == exact_gold
    if _has_words(answer) or _has_words(gold):
        return False  # they aren't the same text, and words can't be compared by their value
    answer, gold = write_mixed_numbers_as_sums(answer), write_mixed_numbers_as_sums(gold)
    try:
        gold_expression = read_expression(gold)
    except NotAFormula:
        gold_expression = None
    except Absurd:
        # The value of the gold is too large to be computed. So only remainders are compared.
        return same_residue(answer, gold)
    try:
        answer_expression = read_expression(answer)
    except NotAFormula:
        answer_expression = None
    except Absurd:
        # The answer's value is too large to be computed. It may be right if the gold is a very large number.
        # If the gold isn't, the answer is refused (Absurd).
        is_number = gold_expression is not None and gold_expression.is_Rational
        if is_number and _count_bits(gold_expression) > BITS_OF_A_HUGE_GOLD:
            return same_residue(answer, gold)
        raise
    if answer_expression is not None and gold_expression is not None:
        return same_value(answer_expression, gold_expression)
    return _compare_by_math_verify(answer, gold)


def same_residue(answer: str, gold: str) -> bool:
    """Compares two formulas of huge numbers by their remainders modulo a prime of 127 bits.

    The prime depends on a digest of both texts, so that no answer can be chosen to fit the prime. Raises
    Absurd for formulas that can't be compared in this way.
    """
    prime = prime_for(answer, gold)
    remainders = []
    for text in (answer, gold):
        if len(text) > MOST_CHARACTERS_OF_FORMULA:
            raise Absurd(f"a formula of {len(text)} characters")
        try:
            parser = _ResidueParser(_split_into_tokens(text), prime)
            residue = parser.sum(0)
        except NotAFormula:
            return False
        if parser.next_token is not None:
            return False
        remainders.append(residue.remainder)
    return remainders[0] == remainders[1]


def _has_words(formula: str) -> bool:
    return _TEXT_COMMAND.search(formula) is not None


def are_proportional_equations(sides: tuple[str, str], gold_sides: tuple[str, str]) -> bool:
    """Returns whether two equations are multiples of each other: left - right of one equation is left - right
    of the other, times a number that isn't 0.

    ``2x = 6`` and ``x = 3`` are such equations: the differences are 2x - 6 and x - 3, and the number is 2.
    """
    try:
        difference = read_expression(sides[0]) - read_expression(sides[1])
        gold_difference = read_expression(gold_sides[0]) - read_expression(gold_sides[1])
    except NotAFormula:
        return _compare_by_math_verify(" = ".join(sides), " = ".join(gold_sides))
    unknowns = difference.free_symbols
    if unknowns != gold_difference.free_symbols or not unknowns:
        return difference == gold_difference  # a factor is only computed for equal sets of unknowns
    factor = _quotient_at_a_point(difference, gold_difference, sorted(unknowns, key=str))
    if factor is None:  # no point gives a factor, so only 1 and -1 are tried
        return same_value(difference, gold_difference) or same_value(difference, -gold_difference)
    # The factor at a point must be right everywhere else, too.
    return same_value(difference, gold_difference * factor)


def _quotient_at_a_point(first: Any, second: Any, unknowns: list[Any]) -> Any:
    """Returns first / second at the first of `_QUOTIENT_POINTS` at which both have a finite value other than
    0; None if there is no such point.

    At the point x = 7/3, for example, ``3*x - 7`` is 0, and ``1/(3*x - 7)`` isn't finite.
    """
    import sympy

    for top, bottom in _QUOTIENT_POINTS:
        # Each unknown gets another value, or else x - y would be 0. The difference of 4 is arbitrary.
        point = {symbol: sympy.Rational(top + 4 * rank, bottom) for rank, symbol in enumerate(unknowns)}
        values = (first.subs(point), second.subs(point))
        if all(value != 0 and not value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo) for value in values):
            return values[0] / values[1]
    return None


def remove_spaces(text: str) -> str:
    """Removes white space, except between two numbers: "1 2" is not 12, but "12 000" is 12000."""
    return _MEANINGLESS_SPACE.sub("", " ".join(text.split()))


def write_mixed_numbers_as_sums(formula: str) -> str:
    r"""Writes ``3\frac{1}{2}`` as the sum ``(3+\frac{1}{2})``, so that it is three and a half and not three
    halves."""
    return _MIXED_NUMBER.sub(r"(\1+\\frac\2\3)", formula)


def _compare_by_math_verify(answer: str, gold: str) -> bool:
    """Compares formulas that this grammar doesn't read, such as ``\\int_0^1 x dx``, with the library
    math-verify.

    Raises Absurd for a formula that the library may take long to read.
    """
    for formula in (answer, gold):
        if len(_LARGE_OPERATORS.findall(formula)) > 1:
            raise Absurd("sums, integrals or limits within each other")
        if (
            _TOO_LARGE_FOR_MATH_VERIFY.search(formula)
            or len(formula) > MOST_CHARACTERS_FOR_MATH_VERIFY
            or formula.count("\\") > MOST_COMMANDS_FOR_MATH_VERIFY
        ):
            raise Absurd("a formula that is longer, or has larger numbers, than any answer")
    from math_verify import verify
    from sympy import Expr

    has_prime, gold_has_prime = _PRIME.search(answer) is not None, _PRIME.search(gold) is not None
    if has_prime != gold_has_prime:
        return False  # 45' (minutes) is not 45 degrees, and math-verify ignores the sign
    readings, gold_readings = _parse_by_math_verify(answer), _parse_by_math_verify(gold)
    if not readings or not gold_readings:
        return False
    if isinstance(readings[0], Expr) and isinstance(gold_readings[0], Expr):
        return same_value(readings[0], gold_readings[0])
    # math-verify's own timeout is an alarm signal. Here the deadline of the grader pool ends a call that
    # hangs.
    return bool(verify(gold_readings, readings, float_rounding=10, timeout_seconds=None))


@lru_cache(maxsize=256)
def _parse_by_math_verify(formula: str) -> Any:
    """Returns the library's readings of a formula, the first of which is a sympy object. The list is empty if
    the library can't read the formula.

    The library searches a text for its answer. So the formula is put into a box, for which the library looks
    first.
    """
    from math_verify import LatexExtractionConfig, parse

    boxes_first = LatexExtractionConfig(boxed_match_priority=0)
    return parse(
        f"\\boxed{{{formula}}}",
        extraction_config=[boxes_first],
        parsing_timeout=None,
        fallback_mode="no_fallback",
    )
