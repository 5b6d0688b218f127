"""Answers that a grader would rather not see, from a seed."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator

GOLDS = (
    "5", r"\frac{3}{4}", "(1,2)", r"(-\infty,3]", r"\{1,2,3\}", "x^2+2x+1", r"2\sqrt{3}",
    r"\text{Evelyn}", "1, 2", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "2516_8", r"50\%",
    "12\\text{ cm}", "y=2x+3", r"1.2 \times 10^5",
)  # fmt: skip

_COMMANDS = (
    "frac", "sqrt", "left(", "right)", "int_0^1", "sum_{n=1}^{\\infty}", "prod", "lim_{x\\to 0}",
    "binom", "begin{pmatrix}", "end{pmatrix}", "text{", "boxed{", "overline", "log", "sin", "cdot",
    "times", "pm", "cup", "infty", "pi", "le", "{", "}",
)  # fmt: skip
_CODE = (
    "__import__('os').system('sleep 100')", "exec('while True: pass')",
    "().__class__.__bases__[0].__subclasses__()", "import sys; sys.exit(0)", "lambda: (yield)",
    "open('/dev/zero').read()", "[0]*10**12", "os.fork()", "raise SystemExit",
    "'; DROP TABLE answers; --", "\x00\x00", "${jndi:ldap://127.0.0.1/a}", "%s%s%s%n", "eval(input())",
)  # fmt: skip


def hostile_answers(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """`count` pairs of a response and a gold, the same for the same seed."""
    generator = random.Random(seed)
    for _ in range(count):
        kind = generator.choice(_KINDS)
        inner = kind(generator)
        response = generator.choice(
            (
                f"\\boxed{{{inner}}}",
                f"So the answer is {inner}",
                f"\n#### {inner}",
                f"$\\boxed{{{inner}}}$.\n#### {inner}",
                inner,
            )
        )
        yield response, generator.choice(GOLDS)


def _huge_power(generator: random.Random) -> str:
    base, exponent = generator.randint(2, 99), "9" * generator.randint(1, 30)
    return generator.choice(
        (
            f"{base}^{{{exponent}}}",
            f"{base}**{exponent}",
            f"({base}x+1)^{{{exponent}}}",
            f"10^{{-{exponent}}}",
        )
    )


def _power_tower(generator: random.Random) -> str:
    levels = generator.randint(2, 40)
    return "^{".join(str(generator.randint(2, 9)) for _ in range(levels)) + "}" * generator.choice(
        (levels - 1, 0)
    )


def _factorials(generator: random.Random) -> str:
    number = generator.choice((3, 20, 1000, 10**6, 10**12))
    return (
        f"{'(' * 3}{number}{'!)' * 3}"
        if generator.random() < 0.5
        else f"{number}" + "!" * generator.randint(1, 9)
    )


_NESTS = (
    ("(", ")"), (r"\frac{1}{1+", "}"), (r"\sqrt{", "}"), ("{", "}"), (r"\left[", r"\right]"), ("|", "|"),
    (r"\boxed{", "}"), (r"\begin{pmatrix}", r"\end{pmatrix}"), (r"\{", r"\}"), ("-", ""), (r"\sin", ""),
    (r"\text{", "}"),
)  # fmt: skip


def _nested(generator: random.Random) -> str:
    depth = generator.choice((5, 30, 300, 5000))
    opening, closing = generator.choice(_NESTS)
    return (
        opening * depth
        + str(generator.randint(0, 9))
        + closing * (depth - generator.choice((0, 0, 1, depth)))
    )


def _long(generator: random.Random) -> str:
    piece = generator.choice(
        (
            "7",
            "1+",
            "x",
            "1,",
            " ",
            "a ",
            "\\",
            "$",
            "{",
            "1/",
            "9.",
            "\n",
            "x=",
            r"\pm",
            "(",
            "٣",
            "∞",
            "é",
            "\\cup",
            "<",
        )
    )
    return piece * (100_000 // len(piece))


def _latex_soup(generator: random.Random) -> str:
    return "".join(
        generator.choice(("\\" + generator.choice(_COMMANDS), generator.choice("{}^_()[]123xy,=+-&$ \\")))
        for _ in range(generator.randint(1, 120))
    )


def _characters(generator: random.Random) -> str:
    alphabet = generator.choice(
        (
            string.printable,
            "0123456789.,eE+-",
            "٠١٢٣٤٥٦٧٨٩０１２３½²₃Ⅷ",
            "\u202e\u200b\ufeff\x07\x1b[0m",
            "\ud800",
            "{}\\^_",
        )
    )
    return "".join(generator.choice(alphabet) for _ in range(generator.choice((1, 10, 200, 3000))))


def _code(generator: random.Random) -> str:
    return generator.choice(_CODE) * generator.choice((1, 1, 50))


def _many_parts(generator: random.Random) -> str:
    count = generator.choice((3, 60, 1000))
    sign = generator.choice((", ", r" \cup ", "=", "<", "&", r"\\", r" \text{ or } ", "+", r"\pm"))
    part = generator.choice(("1", "x_{n}", "(1,2)", r"\frac{a}{b}", r"\sin x"))
    return sign.join(part for _ in range(count))


_TERMS = (
    r"\sqrt{{{a}+\sqrt{{{b}}}}}", r"\sin({a}x)\cos({b}x)", "(x+{a})^{b}", r"\frac{{x^{a}}}{{x+{b}}}",
    r"\log_{{{a}}}{{{b}}}", r"\int_0^{a} x^{b} dx", r"\sum_{{n=1}}^{{{a}}} n^{b}",
)  # fmt: skip


def _hard_to_simplify(generator: random.Random) -> str:
    return "+".join(
        generator.choice(_TERMS).format(a=generator.randint(2, 9), b=generator.randint(2, 9))
        for _ in range(generator.randint(2, 25))
    )


def _decimal(generator: random.Random) -> str:
    digits = generator.choice((10, 500, 5000))
    number = "".join(generator.choice(string.digits) for _ in range(digits))
    return generator.choice(
        (f"0.{number}", f"{number}.{number}", f"1e{number[:9]}", f"{number}/{number}", f"1/{'0' * digits}")
    )


_KINDS: tuple[Callable[[random.Random], str], ...] = (
    _huge_power, _power_tower, _factorials, _nested, _long, _latex_soup, _characters, _code, _many_parts,
    _hard_to_simplify,
    _decimal,
)  # fmt: skip
