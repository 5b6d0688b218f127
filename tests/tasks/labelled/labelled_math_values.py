"""Golds that are one value each, in many writings, with near misses, for make_labelled_math.py.

What is right and what is wrong follows from how a gold is made, so that no grader has a say in it.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

Made = tuple[str, list[str], list[str]]
"""A gold, right answers, wrong answers."""

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spelled(value: int) -> str:
    if value < 20:
        return ONES[value]
    if value < 100:
        return TENS[value // 10 - 2] + (f"-{ONES[value % 10]}" if value % 10 else "")
    if value < 1000:
        return f"{ONES[value // 100]} hundred" + (f" {spelled(value % 100)}" if value % 100 else "")
    return f"{spelled(value // 1000)} thousand" + (f" {spelled(value % 1000)}" if value % 1000 else "")


def surd(draw: random.Random) -> Made:
    a, b, c = draw.randint(1, 9), draw.randint(2, 9), draw.choice((2, 3, 5, 6, 7, 10, 11))
    value = a + b * math.sqrt(c)
    return (
        f"{a} + {b}\\sqrt{{{c}}}",
        [
            f"{b}\\sqrt{{{c}}} + {a}",
            f"{a} + \\sqrt{{{b * b * c}}}",
            f"{a} + {b} \\cdot \\sqrt {c}" if c < 10 else f"{a} + {b}\\cdot\\sqrt{{{c}}}",
            f"\\frac{{{2 * a} + {2 * b}\\sqrt{{{c}}}}}{{2}}",
            f"{a} + {b} \\cdot {c}^{{\\frac{{1}}{{2}}}}",
        ],
        [
            f"{a} - {b}\\sqrt{{{c}}}",
            f"{a + 1} + {b}\\sqrt{{{c}}}",
            f"{a} + {b}\\sqrt{{{c + 1}}}",
            f"{a + b}\\sqrt{{{c}}}",
            f"{value:.3f}",
            f"\\sqrt{{{a + b * b * c}}}",
            f"{a} \\pm {b}\\sqrt{{{c}}}",
            f"{a} + {b}\\sqrt[3]{{{c}}}",
        ],
    )


def logarithm(draw: random.Random) -> Made:
    base, value = draw.sample((2, 3, 5, 6, 7, 10, 11, 13), 2)
    return (
        f"\\log_{{{base}}} {value}",
        [
            f"\\frac{{\\ln {value}}}{{\\ln {base}}}",
            f"\\log_{{{base}}}({value})",
            f"\\frac{{\\log_{{2}} {value}}}{{\\log_{{2}} {base}}}",
            f"\\frac{{1}}{{\\log_{{{value}}} {base}}}",
        ],
        [
            f"\\log_{{{value}}} {base}",
            f"\\log_{{{base}}} {value + 1}",
            f"\\ln {value}",
            f"\\frac{{\\ln {base}}}{{\\ln {value}}}",
            f"{math.log(value, base):.3f}",
            f"\\frac{{{value}}}{{{base}}}",
        ],
    )


def power(draw: random.Random) -> Made:
    base, exponent = draw.randint(2, 9), draw.randint(2, 7)
    value = base**exponent
    wrong = [f"{value + 1}", f"{base}^{{{exponent + 1}}}", f"{base + 1}^{{{exponent}}}", f"-{value}"]
    if base * exponent != value:
        wrong += [f"{base * exponent}", f"{base} \\cdot {exponent}"]
    if exponent**base != value:
        wrong.append(f"{exponent}^{{{base}}}")
    return (
        f"{base}^{{{exponent}}}",
        [
            f"{value}",
            f"{value:,}",
            f"{base}^{exponent}",
            f"{base} \\cdot {base}^{{{exponent - 1}}}",
            f"{value}.0",
        ],
        wrong,
    )


def repeating(draw: random.Random) -> Made:
    digits = draw.choice((1, 2, 3))
    below = 10**digits - 1
    above = draw.randint(1, below - 1)
    shown = f"{above:0{digits}d}"
    value = Fraction(above, below)
    wrong = [
        f"0.{shown}",
        f"\\frac{{{above}}}{{{10**digits}}}",
        f"0.{shown * 2}",
        f"{shown}",
        f"0.\\overline{{{shown}}}1",
    ]
    if value != Fraction(above + 1, below):
        wrong.append(f"0.\\overline{{{(above + 1) % below:0{digits}d}}}")
    return (
        f"0.\\overline{{{shown}}}",
        [
            f"\\frac{{{value.numerator}}}{{{value.denominator}}}",
            f"{above}/{below}",
            f"0.{shown * 3}\\ldots",
            f"0.{shown}\\overline{{{shown}}}",
            f"0.\\overline{{{shown * 2}}}",
        ],
        wrong,
    )


def percent(draw: random.Random) -> Made:
    value = draw.randint(1, 99)
    return (
        f"{value}\\%",
        [
            f"{value}",
            f"{value}\\text{{ percent}}",
            f"{value / 100:g}",
            f"\\frac{{{value}}}{{100}}",
            f"\\text{{{value} percent}}",
            f"{value}.0\\%",
        ],
        [
            f"{value + 1}\\%",
            f"{value / 10:g}\\%",
            f"{value}^\\circ",
            f"{value / 1000:g}",
            f"-{value}\\%",
            f"{100 - value if value != 50 else 49}\\%",
            f"\\frac{{100}}{{{value}}}" if value != 10 else "11",
        ],
    )


def scientific(draw: random.Random) -> Made:
    lead, exponent = draw.randint(11, 99), draw.randint(3, 8)
    if lead % 10 == 0:
        lead += 1
    sign = draw.choice(("", "-"))
    value = Fraction(lead, 10) * Fraction(10) ** (exponent if not sign else -exponent)
    plain = f"{int(value)}" if not sign else f"{float(value):.{exponent + 1}f}"
    shown = f"{lead // 10}.{lead % 10}"
    return (
        f"{shown} \\times 10^{{{sign}{exponent}}}",
        [
            plain,
            f"{shown} \\cdot 10^{{{sign}{exponent}}}",
            f"{lead} \\times 10^{{{int(sign + str(exponent)) - 1}}}",
            f"{shown}\\times10^{{{sign}{exponent}}}",
        ],
        [
            f"{shown} \\times 10^{{{sign}{exponent + 1}}}",
            f"{shown} \\times 10^{{{'' if sign else '-'}{exponent}}}",
            f"{lead // 10} \\times 10^{{{sign}{exponent}}}",
            f"{lead} \\times 10^{{{sign}{exponent}}}",
            f"{shown}^{{{exponent}}}",
            f"{shown}",
        ],
    )


def words(draw: random.Random) -> Made:
    value = draw.choice((draw.randint(3, 99), draw.randint(100, 999), draw.randint(1000, 9999)))
    return (
        f"{value}",
        [
            f"\\text{{{spelled(value)}}}",
            f"\\text{{{spelled(value).capitalize()}}}",
            f"\\text{{{spelled(value).replace('-', ' ')}}}",
            f"\\text{{{spelled(value)} apples}}",
            f"\\text{{{value} apples}}",
        ],
        [
            f"\\text{{{spelled(value + 1)}}}",
            f"\\text{{{spelled(value - 1)}}}",
            f"\\text{{{spelled(value)} or more}}",
            f"\\text{{{spelled(value)} thousand}}" if value < 1000 else f"\\text{{{spelled(value // 1000)}}}",
            f"\\text{{{spelled(value)} hundredths}}" if value < 100 else f"\\text{{{spelled(value % 100)}}}",
            f"\\text{{not {spelled(value)}}}",
        ],
    )


def length(draw: random.Random) -> Made:
    meters = draw.randint(2, 90)
    return (
        f"{meters} \\text{{ meters}}",
        [
            f"{meters}",
            f"{meters}\\text{{ m}}",
            f"\\text{{{meters} meters}}",
            f"{meters * 100} \\text{{ cm}}",
            f"d = {meters}\\,\\mathrm{{m}}",
        ],
        [
            f"{meters} \\text{{ cm}}",
            f"{meters} \\text{{ km}}",
            f"{meters + 1}\\text{{ m}}",
            f"{meters} \\text{{ meters}}^2",
            f"{meters} \\text{{ hours}}",
            f"{meters * 10}\\text{{ cm}}",
        ],
    )


def clock(draw: random.Random) -> Made:
    hour, minute = draw.randint(1, 12), draw.randint(10, 59)
    half, other = draw.sample(("a.m.", "p.m."), 2)
    plain = half.replace(".", "").upper()
    return (
        f"{hour}:{minute} \\text{{ {half}}}",
        [
            f"\\text{{{hour}:{minute} {half}}}",
            f"{hour}:{minute} {plain}",
            f"{hour}{{:}}{minute}\\text{{ {plain}}}",
            f"{hour}:{minute}\\ \\text{{{plain.lower()}}}",
        ],
        [
            f"{hour}:{minute} \\text{{ {other}}}",
            f"\\text{{{hour}:{minute - 1} {half}}}",
            f"{hour % 12 + 1}:{minute} {plain}",
            f"{hour}.{minute}",
            f"\\text{{{hour} {half}}}",
        ],
    )


def chain(draw: random.Random) -> Made:
    a, b = draw.randint(2, 30), draw.randint(2, 30)
    value = a * b
    return (
        f"{value}",
        [
            f"{a} \\cdot {b} = {value}",
            f"n = {a} \\times {b} = {value}",
            f"\\text{{Area}} = {a} \\cdot {b} = {value} \\text{{ cm}}^2",
            f"f({a}) = {value}",
            f"{value + a} - {a} = {value}",
            f"\\angle ABC = {value - 1} + 1 = {value}",
            f"N = \\frac{{{2 * value}}}{{2}} = {value}",
        ],
        [
            f"{a} \\cdot {b} = {value + 1}",
            f"n = {a} \\times {b} = {value} + 1 = {value + 1}",
            f"{a} + {b + 1} = {value}" if a + b + 1 != value else f"{a} = {value}",
            f"x + {a} = {value}",
            f"{value} = {a}x",
            f"n = {value} = {value + b}",
            f"2n = {value}",
        ],
    )
