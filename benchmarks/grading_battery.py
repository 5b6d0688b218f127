r"""Grades answers of forty kinds, made from templates with drawn numbers, and counts the mistakes.

    .venv/bin/python benchmarks/grading_battery.py
    .venv/bin/python benchmarks/grading_battery.py --show --kind "clock times"
    .venv/bin/python benchmarks/grading_battery.py --seconds 3

Each kind has a function that draws a gold, answers that say the same and answers that don't. The grader is
the one that Python imports, so that PYTHONPATH chooses between two checkouts. --seconds N times N rounds
over all answers.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

ROUNDS = 8
"""Draws of each kind."""


class Drawn(NamedTuple):
    """One gold with its answers, each of which stands in a box unless it is a whole response."""

    gold: str
    right: Sequence[str]
    wrong: Sequence[str]
    prompt: str = "?"
    are_responses: bool = False


KINDS: dict[str, Callable[[random.Random], Drawn]] = {}


def kind(name: str) -> Callable[[Callable[[random.Random], Drawn]], Callable[[random.Random], Drawn]]:
    """Registers a function that draws answers of one kind."""

    def register(draw: Callable[[random.Random], Drawn]) -> Callable[[random.Random], Drawn]:
        KINDS[name] = draw
        return draw

    return register


@kind("upright i")
def _upright_i(rng: random.Random) -> Drawn:
    a, b = rng.randint(1, 20), rng.randint(2, 20)
    return Drawn(
        rf"{a}+{b}\mathrm{{i}}",
        [f"{a}+{b}i", rf"{b}\mathrm{{i}}+{a}", rf"{a} + {b}\operatorname{{i}}"],
        [f"{a + b}", f"{a}", f"{a}-{b}i", f"{a}+{b}", rf"{b}+{a}\mathrm{{i}}" if a != b else "0"],
    )


@kind("upright e")
def _upright_e(rng: random.Random) -> Drawn:
    a = rng.randint(2, 30)
    return Drawn(
        rf"\frac{{{a}}}{{\mathrm{{e}}}}",
        [f"{a}e^{{-1}}", rf"\frac{{{a}}}{{e}}", rf"{a}/\mathrm{{e}}"],
        [f"{a}", f"{a}e", rf"\frac{{{a}}}{{2}}", rf"{a}\mathrm{{e}}"],
    )


@kind("upright functions")
def _upright_functions(rng: random.Random) -> Drawn:
    a = rng.randint(2, 30)
    name = rng.choice(["ln", "sin", "cos", "tan", "arctan"])
    other = "cos" if name != "cos" else "sin"
    return Drawn(
        rf"\{name} {a}",
        [
            rf"\operatorname{{{name}}} {a}",
            rf"\mathrm{{{name}}}({a})",
            rf"\text{{{name}}}\,{a}",
            rf"{name}({a})",
        ],
        [f"{a}", rf"\operatorname{{{other}}} {a}", rf"\mathrm{{{name}}}({a + 1})"],
    )


@kind("clock times")
def _clock(rng: random.Random) -> Drawn:
    hour, minute = rng.randint(1, 11), rng.choice([0, 5, 10, 15, 20, 30, 40, 45, 50])
    later = hour % 11 + 1
    return Drawn(
        f"{hour}:{minute:02d}",
        [f"{hour}:{minute:02d}", rf"\text{{{hour}:{minute:02d}}}", rf"{hour}{{:}}{minute:02d}"],
        [
            f"{later}:{minute:02d}",
            f"{hour}:{minute + 1:02d}",
            f"{2 * hour}:{2 * minute:02d}" if minute else f"{later}:00",
            f"{hour}",
        ],
        "At what time do they meet?",
    )


@kind("times with a half of the day")
def _half_day(rng: random.Random) -> Drawn:
    hour, minute = rng.randint(1, 11), rng.randint(0, 59)
    half, other = rng.sample(["a.m.", "p.m."], 2)
    hour_of_day = hour + (12 if half == "p.m." else 0)
    return Drawn(
        rf"{hour}:{minute:02d} \text{{ {half}}}",
        [
            f"{hour}:{minute:02d} {half}",
            f"{hour}:{minute:02d} {half.replace('.', '').upper()}",
            f"{hour_of_day:02d}:{minute:02d}",
            rf"\text{{{hour}:{minute:02d}{half}}}",
        ],
        [
            f"{hour}:{minute:02d} {other}",
            f"{hour + 1}:{minute:02d} {half}",
            f"{hour}:{(minute + 7) % 60:02d} {half}",
        ],
        "When does the train leave?",
    )


@kind("dates")
def _date(rng: random.Random) -> Drawn:
    year, month, day = rng.randint(1900, 2030), rng.randint(1, 12), rng.randint(1, 12)
    names = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ]
    name = names[month - 1]
    swapped = [f"{year}-{day:02d}-{month:02d}"] if day != month else []
    return Drawn(
        f"{year}-{month:02d}-{day:02d}",
        [
            rf"\text{{{name} {day}, {year}}}",
            f"{day} {name} {year}",
            f"{year}-{month}-{day}",
            f"{year}/{month:02d}/{day:02d}",
        ],
        [
            *swapped,
            f"{year}-{month:02d}-{day + 1:02d}",
            f"{year + 1}-{month:02d}-{day:02d}",
            f"{year - month - day}",
        ],
    )


@kind("scores")
def _score(rng: random.Random) -> Drawn:
    a, b = rng.randint(3, 20), rng.randint(0, 9)
    return Drawn(
        f"{a}-{b}",
        [f"{a}-{b}", f"{a} - {b}", f"{a}–{b}", rf"\text{{{a}-{b}}}"],
        [f"{a + 1}-{b + 1}", f"{a - 1}-{b}", f"{b}-{a}" if a != b else "99-1"],
        "What was the final score?",
    )


@kind("ratios of three")
def _ratio(rng: random.Random) -> Drawn:
    a, b, c = rng.sample(range(1, 12), 3)
    return Drawn(
        f"{a}:{b}:{c}",
        [f"{2 * a}:{2 * b}:{2 * c}", f"{a} : {b} : {c}", f"{3 * a}:{3 * b}:{3 * c}"],
        [f"{a}:{b * c}", f"{a}:{c}:{b}", f"{a}:{b}", f"{a}:{b}:{c + 1}", rf"\frac{{{a}}}{{{b * c}}}"],
        "What is the ratio?",
    )


@kind("ratios of two")
def _ratio_of_two(rng: random.Random) -> Drawn:
    a, b = rng.sample([2, 3, 5, 7], 2)
    return Drawn(
        f"{a}:{b}",
        [
            f"{2 * a}:{2 * b}",
            rf"\frac{{{a}}}{{{b}}}",
            rf"{a}\text{{ to }}{b}",
            f"{4 * a}:{4 * b}",
            f"{a}/{b}",
        ],
        [f"{b}:{a}", f"{a}:{b + 1}", f"{a}", rf"\frac{{{b}}}{{{a}}}", f"{a}:{b}:1"],
        "What is the ratio of boys to girls?",
    )


@kind("divisions by zero")
def _zero(rng: random.Random) -> Drawn:
    a = rng.randint(2, 50)
    return Drawn(
        rf"\frac{{{a}}}{{0}}",
        [rf"\frac{{{a}}}{{0}}"],
        [rf"\frac{{{a + 1}}}{{0}}", "0", r"\infty", f"{a}", "1/0"],
    )


@kind("nearly equal")
def _near(rng: random.Random) -> Drawn:
    power = rng.randint(100, 3000)
    return Drawn(
        rf"1-\frac{{1}}{{2^{{{power}}}}}",
        [rf"\frac{{2^{{{power}}}-1}}{{2^{{{power}}}}}", f"1-2^{{-{power}}}"],
        [
            "1",
            rf"1-\frac{{1}}{{2^{{{power + 1}}}}}",
            f"1+2^{{-{power}}}",
            "0.9999999999999999999999999999999999",
        ],
    )


@kind("roots nearly equal")
def _near_roots(rng: random.Random) -> Drawn:
    power = rng.randint(20, 80)
    return Drawn(
        rf"\sqrt{{10^{{{2 * power}}}+1}}",
        [rf"\sqrt{{1+10^{{{2 * power}}}}}", rf"\sqrt{{10^{{{power}}} \cdot 10^{{{power}}} + 1}}"],
        [f"10^{{{power}}}", rf"\sqrt{{10^{{{2 * power}}}-1}}", f"10^{{{power}}}+1"],
    )


@kind("large powers")
def _powers(rng: random.Random) -> Drawn:
    power = rng.randint(500, 10**6)
    return Drawn(
        f"2^{{{power}}}",
        [rf"2 \cdot 2^{{{power - 1}}}", rf"4 \cdot 2^{{{power - 2}}}", rf"\frac{{2^{{{power + 1}}}}}{{2}}"],
        [f"2^{{{power - 1}}}", f"2^{{{power}}}+1", f"3^{{{power}}}", f"2^{{{power + 1}}}"],
    )


@kind("large factorials")
def _factorials(rng: random.Random) -> Drawn:
    n = rng.randint(300, 5000)
    return Drawn(
        rf"\binom{{{2 * n}}}{{{n}}}",
        [
            rf"\frac{{{2 * n}!}}{{({n}!)^2}}",
            rf"\frac{{{2 * n}!}}{{{n}! {n}!}}",
            rf"\binom{{{2 * n}}}{{{2 * n - n}}}",
        ],
        [rf"\frac{{{2 * n}!}}{{{n}!}}", rf"\binom{{{2 * n}}}{{{n - 1}}}", rf"\binom{{{2 * n - 1}}}{{{n}}}"],
    )


@kind("labels")
def _labels(rng: random.Random) -> Drawn:
    letters = rng.sample("ABCDEFGH", 4)
    text = "".join(letters)
    shuffled = "".join(letters[1:] + letters[:1])
    return Drawn(
        text,
        [rf"\text{{{text}}}", rf"\mathrm{{{text}}}", f"{text}."],
        [shuffled, text[::-1], text[:3], text[:3] + "Z"],
    )


@kind("Roman numbers")
def _roman(rng: random.Random) -> Drawn:
    gold, wrong = rng.choice(
        [("IV", "VI"), ("XI", "IX"), ("XL", "LX"), ("CD", "DC"), ("XIV", "XVI"), ("MC", "CM")]
    )
    return Drawn(gold, [gold, rf"\text{{{gold}}}"], [wrong, rf"\mathrm{{{wrong}}}", gold + "I"])


@kind("products of variables")
def _products(rng: random.Random) -> Drawn:
    a, x, y = rng.randint(2, 9), *rng.sample("abmnxyz", 2)
    return Drawn(
        f"{a}{x}{y}",
        [f"{a}{y}{x}", rf"{a} {x} \cdot {y}", rf"{x} \cdot {a}{y}"],
        [f"{a + 1}{x}{y}", f"{a}{x}+{y}", f"{a}{x}", f"{x}{y}"],
    )


@kind("text behind a number")
def _suffix(rng: random.Random) -> Drawn:
    a = rng.randint(3, 90)
    nouns = rng.sample(
        ["apples", "students", "cm", "ways", "red balls", "square units", "km", "seats", "books"], 3
    )
    bad = rng.sample(
        [
            "dozen",
            "squared",
            "is wrong",
            "k",
            "hundredths",
            "or so",
            "thousand",
            "million",
            "cubed",
            "maybe",
            "percent off",
            "not",
            "tenths",
            "or more",
            "times two",
            "minus one",
            "is incorrect",
            "factorial",
            "and a half",
        ],
        6,
    )
    return Drawn(
        f"{a}", [rf"{a}\text{{ {noun}}}" for noun in nouns], [rf"{a}\text{{ {text}}}" for text in bad]
    )


@kind("compound units")
def _compound(rng: random.Random) -> Drawn:
    a = rng.randint(2, 60)
    return Drawn(
        rf"{a} \text{{ m/s}}",
        [
            rf"{a * 18 / 5:g}\text{{ km/h}}",
            rf"{a} \text{{ meters per second}}",
            rf"{a}\ \mathrm{{m/s}}",
            f"{a}",
        ],
        [
            rf"{a}\text{{ km/h}}",
            rf"{a}\text{{ m/s}}^2",
            rf"{a}\text{{ m}}",
            rf"{a}\text{{ miles per hour}}",
            rf"{a}\text{{ s}}",
        ],
    )


@kind("areas and volumes")
def _areas(rng: random.Random) -> Drawn:
    a = rng.randint(2, 60)
    return Drawn(
        rf"{a} \text{{ m}}^2",
        [
            rf"{a * 10000}\text{{ cm}}^2",
            rf"{a} \text{{ square meters}}",
            rf"{a}\text{{ sq m}}",
            rf"{a} \text{{ m}}^{{2}}",
        ],
        [
            rf"{a}\text{{ cm}}^2",
            rf"{a}\text{{ m}}",
            rf"{a}\text{{ m}}^3",
            rf"{a * 100}\text{{ cm}}^2",
            rf"{a}\text{{ cubic meters}}",
        ],
    )


@kind("temperatures")
def _temperatures(rng: random.Random) -> Drawn:
    a = 5 * rng.randint(1, 20)
    return Drawn(
        rf"{a}^\circ\text{{C}}",
        [
            rf"{a}°C",
            rf"{a * 9 // 5 + 32}^\circ\text{{F}}",
            rf"{a}^{{\circ}} \mathrm{{C}}",
            rf"{a}\text{{ degrees Celsius}}",
        ],
        [
            rf"{a}^\circ\text{{F}}",
            rf"{a + 1}^\circ\text{{C}}",
            rf"{a}\text{{ degrees Fahrenheit}}",
            rf"{a}\text{{ K}}",
        ],
    )


@kind("durations")
def _durations(rng: random.Random) -> Drawn:
    hours, minutes = rng.randint(1, 5), rng.randint(5, 55)
    total = 60 * hours + minutes
    return Drawn(
        rf"{total}\text{{ minutes}}",
        [
            rf"{hours}\text{{ hours }}{minutes}\text{{ minutes}}",
            rf"{hours}\text{{ h }}{minutes}\text{{ min}}",
            rf"\text{{{hours} hours and {minutes} minutes}}",
            rf"{total}\text{{ min}}",
        ],
        [
            rf"{total}\text{{ hours}}",
            rf"{hours}\text{{ hours }}{minutes + 1}\text{{ minutes}}",
            rf"{hours}\text{{ hours}}",
            rf"{hours + 1}\text{{ h }}{minutes}\text{{ min}}",
        ],
    )


@kind("money")
def _money(rng: random.Random) -> Drawn:
    dollars, cents = rng.randint(1, 20), rng.randint(10, 99)
    return Drawn(
        rf"\${dollars}.{cents}",
        [
            rf"{dollars}\text{{ dollars and }}{cents}\text{{ cents}}",
            rf"{100 * dollars + cents}\text{{ cents}}",
            rf"{dollars}.{cents}\text{{ USD}}",
            f"{dollars}.{cents}",
            rf"\text{{{dollars}.{cents} dollars}}",
        ],
        [
            rf"{dollars}.{cents}\text{{ cents}}",
            f"€{dollars}.{cents}",
            rf"\${dollars}.{cents}0\text{{ million}}",
            rf"{dollars}\text{{ dollars}}",
        ],
    )


@kind("named pairs")
def _named(rng: random.Random) -> Drawn:
    a, b = rng.sample(range(1, 40), 2)
    return Drawn(
        f"(x,y)=({a},{b})",
        [
            f"x={a}, y={b}",
            f"y={b}, x={a}",
            f"({a},{b})",
            rf"x={a} \text{{ and }} y={b}",
            rf"\begin{{cases}} x={a} \\ y={b} \end{{cases}}",
        ],
        [f"x={b}, y={a}", f"y={a}, x={b}", f"({b},{a})", f"x={a}", rf"\{{{a},{b}\}}"],
    )


@kind("names of inequalities")
def _inequality(rng: random.Random) -> Drawn:
    a = rng.randint(2, 50)
    return Drawn(
        f"x<{a}",
        [rf"(-\infty,{a})", f"{a}>x", rf"x \lt {a}", rf"x\in(-\infty,{a})"],
        [f"y<{a}", rf"x\le {a}", f"x>{a}", rf"(-\infty,{a}]", f"{a}", f"x<{a + 1}"],
    )


@kind("distances")
def _distances(rng: random.Random) -> Drawn:
    a = rng.randint(2, 30)
    return Drawn(
        rf"(-\infty,-{a})\cup({a},\infty)",
        [f"|x|>{a}", rf"x<-{a} \text{{ or }} x>{a}", rf"({a},\infty) \cup (-\infty,-{a})"],
        [f"|x|<{a}", rf"|x| \ge {a}", f"x>{a}", rf"|x|>{a + 1}", rf"(-{a},{a})"],
    )


@kind("real numbers but some")
def _reals(rng: random.Random) -> Drawn:
    a = rng.randint(1, 30)
    return Drawn(
        rf"\mathbb{{R}}\setminus\{{{a}\}}",
        [
            rf"x\ne {a}",
            rf"x \neq {a}",
            rf"(-\infty,{a})\cup({a},\infty)",
            rf"\text{{all real numbers except }} {a}",
            rf"\mathbb R \setminus \{{ {a} \}}",
        ],
        [r"\mathbb{R}", rf"\{{{a}\}}", rf"x\ne {a + 1}", rf"(-\infty,{a}]\cup[{a},\infty)", f"x={a}"],
    )


@kind("signs in ASCII")
def _ascii(rng: random.Random) -> Drawn:
    a = rng.randint(1, 60)
    return Drawn(
        rf"x\geq {a}",
        [f"x>={a}", rf"[{a},\infty)", f"{a}<=x", rf"x \geqslant {a}"],
        [f"x>{a}", f"x<={a}", f"x={a}", f"y>={a}"],
    )


@kind("no solution")
def _no_solution(rng: random.Random) -> Drawn:
    gold = rng.choice([r"\emptyset", r"\text{no solution}", r"\varnothing", r"\{\}"])
    return Drawn(
        gold,
        [
            r"\text{no solution}",
            r"\emptyset",
            r"\text{No solutions}",
            r"\text{no real solutions}",
            r"\varnothing",
        ],
        ["0", r"\{0\}", r"\text{one solution}", r"\mathbb{R}", r"\text{infinitely many solutions}"],
    )


@kind("cases")
def _cases(rng: random.Random) -> Drawn:
    a, b = rng.sample(range(1, 40), 2)
    return Drawn(
        rf"\begin{{cases}} x={a} \\ y={b} \end{{cases}}",
        [f"x={a}, y={b}", f"({a},{b})", rf"\begin{{cases}} y={b} \\ x={a} \end{{cases}}"],
        [f"({b},{a})", f"x={b}, y={a}", f"x={a}", rf"\begin{{cases}} x={b} \\ y={a} \end{{cases}}"],
    )


@kind("conditions")
def _conditions(rng: random.Random) -> Drawn:
    a = rng.randint(2, 30)
    return Drawn(
        f"n = {a}k",
        [
            rf"n={a}k, k\in\mathbb{{Z}}",
            rf"n = {a}k \text{{ for all integers }} k",
            rf"{a}k \text{{ where }} k \in \mathbb{{Z}}",
            rf"n={a}k \quad (k \in \mathbb{{Z}})",
        ],
        [
            rf"n={a + 1}k, k\in\mathbb{{Z}}",
            rf"n={a}k+1, k\in\mathbb{{Z}}",
            rf"m={a}k, k \in \mathbb{{Z}}",
            f"{a}",
        ],
    )


@kind("yes and no")
def _yes(rng: random.Random) -> Drawn:
    gold, other = rng.sample(["Yes", "No"], 2)
    reason = {"Yes": "it is possible", "No": "it is not possible"}
    return Drawn(
        rf"\text{{{gold}}}",
        [
            rf"\text{{{gold}, {reason[gold]}}}",
            gold.lower(),
            rf"\textbf{{{gold}.}}",
            rf"\text{{{gold}, because of parity}}",
        ],
        [
            rf"\text{{{other}, {reason[other]}}}",
            other,
            rf"\text{{{gold} or {other}}}",
            rf"\text{{{gold} and {other.lower()}}}",
        ],
    )


@kind("dressed numbers")
def _dressed(rng: random.Random) -> Drawn:
    a = rng.randint(10, 900)
    return Drawn(
        f"{a}",
        [
            rf"\textcolor{{red}}{{{a}}}",
            rf"\underline{{{a}}}",
            rf"\mathbf{{\text{{{a}}}}}",
            rf"{a}\checkmark",
            rf"{{\color{{blue}} {a}}}",
            rf"\text{{{a}}}",
            rf"\boldsymbol{{{a}}}",
            rf"\boxed{{{a}}}",
            rf"\large {a}",
        ],
        [
            rf"\textcolor{{{a}}}{{{a + 1}}}",
            rf"\underline{{{a + 1}}}",
            rf"\mathbf{{\text{{{a}1}}}}",
            rf"\overline{{{a}}}",
        ],
    )


@kind("chosen")
def _chosen(rng: random.Random) -> Drawn:
    n, k = rng.randint(8, 30), rng.randint(2, 3)
    return Drawn(
        rf"\binom{{{n}}}{{{k}}}",
        [
            f"C({n},{k})",
            rf"C_{{{n}}}^{{{k}}}",
            rf"\frac{{{n}!}}{{{k}!({n}-{k})!}}",
            rf"\mathrm{{C}}({n},{k})",
        ],
        [f"C({n},{k + 1})", f"C({n + 1},{k})", f"P({n},{k})", f"({n},{k})", f"{n * k}"],
    )


@kind("transposes")
def _transposes(rng: random.Random) -> Drawn:
    a, b, c = rng.sample(range(1, 30), 3)
    column = rf"\begin{{pmatrix}} {a} \\ {b} \\ {c} \end{{pmatrix}}"
    return Drawn(
        column,
        [
            f"({a},{b},{c})^T",
            rf"\begin{{pmatrix}} {a} & {b} & {c} \end{{pmatrix}}^T",
            rf"({a},{b},{c})^{{\top}}",
            rf"\begin{{bmatrix}} {a} \\ {b} \\ {c} \end{{bmatrix}}",
        ],
        [f"({b},{a},{c})^T", rf"\begin{{pmatrix}} {a} & {b} & {c} \end{{pmatrix}}", f"({a},{b})^T"],
    )


@kind("powers of ten")
def _scientific(rng: random.Random) -> Drawn:
    a, power = rng.randint(101, 999), rng.randint(5, 30)
    number = f"{a // 100}.{a % 100:02d}"
    return Drawn(
        rf"{number} \times 10^{{{power}}}",
        [
            rf"{number} \text{{ x }} 10^{{{power}}}",
            rf"{number} \cdot 10^{{{power}}}",
            f"{number}e{power}",
            f"{number} x 10^{{{power}}}",
        ],
        [
            rf"{number} \times 10^{{{power + 1}}}",
            number,
            rf"{number} \text{{ x }} 10^{{{power - 1}}}",
            rf"{number} + 10^{{{power}}}",
        ],
    )


@kind("lists as JSON")
def _json(rng: random.Random) -> Drawn:
    a, b, c = sorted(rng.sample(range(1, 60), 3))
    return Drawn(
        f'["{a}", "{b}", "{c}"]',
        [f"{a}, {b}, {c}", f"{c}, {a}, {b}", rf"{a}, {b} \text{{ and }} {c}", f"[{a}, {b}, {c}]"],
        [f"{a}, {b}", f"{a}, {b}, {c + 1}", f"{a}", f"{a}, {b}, {c}, {c + 1}"],
    )


@kind("two candidates")
def _hedges(rng: random.Random) -> Drawn:
    a, b = rng.sample(range(1, 99), 2)
    return Drawn(
        f"{a}",
        [f"{a}", f"{a}.0"],
        [
            rf"{a} \text{{ or }} {b}",
            f"{a}, {b}",
            rf"\{{{a}, {b}\}}",
            rf"{a}\text{{ (or {b})}}",
            rf"{b} \text{{ or }} {a}",
            rf"\pm {a}",
            rf"{a}\text{{ if not }}{b}",
            f"{a}; {b}",
            rf"{a} \vee {b}",
            rf"{a}\text{{ / }}{b}",
        ],
    )


@kind("unboxed endings")
def _endings(rng: random.Random) -> Drawn:
    a, b = rng.sample(range(10, 99), 2)
    return Drawn(
        f"{a}",
        [
            f"Final Answer: **{a}**",
            f"The answer is **{a}** chairs.",
            f"### Final Answer\n\n{a}",
            f"The answer is therefore {a}.",
            f"<answer>{a}</answer>",
            f"答案：{a}",
            f"Final Answer: The greatest $m$ is {a}.",
            f"**Answer:** {a}",
            f"**Final Answer**\n\n$${a}$$",
            f"So the final answer is ${a}$.",
            f"## Answer\n${a}$",
            f"最终答案是 {a}。",
        ],
        [
            f"Final Answer: **{b}**",
            f"The answer is not {a}.",
            f"### Final Answer\n\n{b}",
            f"The answer is {a} or {b}.",
            f"<answer>{b}</answer>",
            f"答案：{b}",
            f"The number {a} is nice.",
            f"The answer is {a}, or maybe {b}.",
        ],
        are_responses=True,
    )


@kind("several boxes")
def _boxes(rng: random.Random) -> Drawn:
    a, b = rng.sample(range(1, 99), 2)
    return Drawn(
        rf"\(\boxed{{{a}}}\) and \(\boxed{{-{b}}}\).",
        [
            rf"\boxed{{{a}, -{b}}}",
            rf"$x=\boxed{{-{b}}}$ or $x=\boxed{{{a}}}$",
            rf"$\boxed{{{a}}}$ and $\boxed{{-{b}}}$",
        ],
        [
            rf"\boxed{{{a}}}",
            rf"\boxed{{-{b}}}",
            rf"\boxed{{{a}, {b}}}",
            rf"$\boxed{{{a}}}$ and $\boxed{{{b}}}$",
        ],
        are_responses=True,
    )


@kind("boxes without braces")
def _bare_boxes(rng: random.Random) -> Drawn:
    a, b = rng.sample(range(2, 99), 2)
    return Drawn(
        rf"\frac{{{a}}}{{{b}}}",
        [
            rf"So \boxed\frac{{{a}}}{{{b}}}",
            rf"\fbox{{$\frac{{{a}}}{{{b}}}$}}",
            rf"\boxed {{\frac{{{a}}}{{{b}}}}}",
        ],
        [rf"So \boxed\frac{{{b}}}{{{a}}}", rf"\boxed {a}", rf"\boxed\sqrt{{{a}}}"],
        are_responses=True,
    )


class BatteryRow(NamedTuple):
    """One answer with its label."""

    kind: str
    gold: str
    response: str
    prompt: str
    is_right: bool


def battery(seed: int = 1) -> Iterator[BatteryRow]:
    """Yields the answers of all kinds, each once; the same ones for the same seed."""
    seen: set[tuple[str, str]] = set()
    for name, draw in KINDS.items():
        rng = random.Random(f"{seed}/{name}")
        for _ in range(ROUNDS):
            drawn = draw(rng)
            for is_right, answers in ((True, drawn.right), (False, drawn.wrong)):
                for answer in answers:
                    response = answer if drawn.are_responses else f"So it is $\\boxed{{{answer}}}$."
                    if (drawn.gold, response) in seen:
                        continue
                    seen.add((drawn.gold, response))
                    yield BatteryRow(name, drawn.gold, response, drawn.prompt, is_right)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", action="append", help="default: all of them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print what was judged otherwise than labelled")
    parser.add_argument(
        "--seconds", type=int, metavar="ROUNDS", help="print answers per second, of so many rounds"
    )
    options = parser.parse_args(arguments)

    from treetune.domains.graders.math import MathGrader
    from treetune.vocabulary import Problem

    grader = MathGrader()
    grader.prepare()
    rows = [row for row in battery(options.seed) if not options.kind or row.kind in options.kind]
    accepted: dict[str, int] = {}
    rejected: dict[str, int] = {}
    for row in rows:
        grade = grader.grade(row.response, Problem("battery/0", row.prompt, row.gold))
        if grade.correct is row.is_right:
            continue
        counts = rejected if row.is_right else accepted
        counts[row.kind] = counts.get(row.kind, 0) + 1
        if options.show:
            label = "rejects right" if row.is_right else "accepts wrong"
            print(
                f"{row.kind}: {label} {row.response!r} to {row.gold!r}"
                f" ({grade.outcome}: {grade.message or ''})"
            )
    print("| kind | right | wrong | accepts wrong | rejects right |\n|---|---:|---:|---:|---:|")
    for name in dict.fromkeys(row.kind for row in rows):
        right = sum(row.kind == name and row.is_right for row in rows)
        wrong = sum(row.kind == name and not row.is_right for row in rows)
        print(f"| {name} | {right} | {wrong} | {accepted.get(name, 0)} | {rejected.get(name, 0)} |")
    right = sum(row.is_right for row in rows)
    print(f"| all | {right} | {len(rows) - right} | {sum(accepted.values())} | {sum(rejected.values())} |")
    if options.seconds:
        start = time.perf_counter()
        for _ in range(options.seconds):
            for row in rows:
                grader.grade(row.response, Problem("battery/0", row.prompt, row.gold))
        seconds = time.perf_counter() - start
        print(f"{options.seconds * len(rows) / seconds:.0f} answers a second", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
