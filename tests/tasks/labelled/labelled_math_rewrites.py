"""Rewrites of MATH's golds by their shape, and near misses, for make_labelled_math.py."""

from __future__ import annotations

import re
from fractions import Fraction

from labelled_math_values import spelled

Variants = tuple[list[str], list[str]]
"""Right ones, wrong ones."""


def rewritten(gold: str) -> tuple[str, list[str], list[str]] | None:
    """(kind, right, wrong) of a gold by its shape; None of a shape that has no rule."""
    plain = re.sub(r"\\!|\\left|\\right|\\,", "", gold).replace("dfrac", "frac").replace(" ", "")
    plain = re.sub(r"\\frac(\d)", r"\\frac{\1}", plain)
    plain = re.sub(r"(\\frac\{-?\d+\})(\d)", r"\1{\2}", plain)
    rules = (
        (r"-?\d+(?:,\d{3})*", "integer", lambda m: _integer(int(m[0].replace(",", "")))),
        (r"(\d*)\.(\d+)", "decimal", lambda m: _decimal(Fraction(f"{m[1] or 0}.{m[2]}"), len(m[2]))),
        (r"(-?)\\frac\{(\d+)\}\{(\d+)\}", "fraction", lambda m: _fraction(m[1], int(m[2]), int(m[3]))),
        (r"(\d+)\^\\circ", "degrees", lambda m: _degrees(int(m[1]))),
        (r"(\d*)\\sqrt\{?(\d+)\}?", "root", lambda m: _root(int(m[1] or 1), int(m[2]))),
        (r"(\d*)\\pi", "pi", lambda m: _pi(int(m[1] or 1))),
        (r"\((-?\d+(?:,-?\d+)+)\)", "tuple", lambda m: _tuple([int(part) for part in m[1].split(",")])),
        (r"-?\d+(?:,-?\d+)+", "list", lambda m: _list([int(part) for part in m[0].split(",")])),
        (r"(\d+)_\{?(\d)\}?", "base", lambda m: _base(m[1], int(m[2]))),
        (r"(-?\d+)([+-])(\d*)i", "complex", lambda m: _complex(int(m[1]), m[2], int(m[3] or 1))),
        (r"\\begin\{pmatrix\}((?:-?\d+(?:\\\\|&)?)+)\\end\{pmatrix\}", "matrix", lambda m: _matrix(m[1])),
    )
    for pattern, kind, rule in rules:
        match = re.fullmatch(pattern, plain)
        if match is not None:
            right, wrong = rule(match)
            return kind, right, wrong
    return None


def _integer(value: int) -> Variants:
    sign, size = ("-" if value < 0 else ""), abs(value)
    right = [
        str(value),
        f"{value}.0",
        f"x = {value}",
        f"{value}.",
        f"\\text{{{value}}}",
        f"\\mathbf{{{value}}}",
        f"\\textbf{{{value}}}",
        f"{sign}\\frac{{{2 * size}}}{{2}}",
        f"{value}\\text{{ units}}",
        f"n = {value - 3} + 3 = {value}",
        f"\\dfrac{{{3 * value}}}{{3}}",
        f"{value + 4} - 4 = {value}",
        f"{value}\\ ",
        f"\\displaystyle {value}",
        f"N={value}\\text{{ ways}}",
    ]
    if size >= 1000:
        right += [f"{value:,}", f"{value:,}".replace(",", "{,}"), f"{value:,}".replace(",", ",\\!")]
    if 0 <= value < 100:
        words = spelled(value)
        right += [
            f"\\text{{{words}}}",
            words.capitalize() if value > 2 else f"\\text{{{words.capitalize()}}}",
        ]
    wrong = [
        str(value + 1),
        str(value - 1),
        str(-value) if value else "-1",
        f"{value}0" if value else "10",
        f"\\frac{{1}}{{{value}}}" if size > 1 else "7",
        f"{value}.5",
        f"x = {value} + 1 = {value + 1}",
        f"{value}x" if value else "x",
        f"{value}, {value + 1}",
        f"\\sqrt{{{size}}}" if size > 1 else "13",
        f"{value}\\pi" if value else "\\pi",
        f"{value + 1} = {value + 1}",
        f"\\text{{{spelled((size + 1) % 100)}}}",
        f"({value}, {value + 2})",
        f"\\frac{{{value}}}{{100}}" if value else "0.01",
        f"10^{{{value}}}" if 0 < size < 9 else f"{value}00" if value else "100",
        f"{value}\\text{{ or }}{value + 1}",
    ]
    if size >= 10 and str(size) != str(size)[::-1]:
        wrong.append(sign + str(size)[::-1].lstrip("0")) if str(size)[::-1].lstrip("0") != str(size) else None
    return right, wrong


def _decimal(value: Fraction, places: int) -> Variants:
    text = f"{float(value):.{places}f}"
    top, bottom = value.numerator, value.denominator
    right = [
        text,
        f"{text}0",
        f"\\frac{{{top}}}{{{bottom}}}",
        f"{top}/{bottom}",
        f"x = {text}",
        f"\\text{{{text}}}",
        f"{text}.",
        text.lstrip("0"),
    ]
    wrong = [
        f"{float(value * 10):.{places}f}",
        f"{float(value / 10):.{places + 1}f}",
        f"{float(value) + 10**-places:.{places}f}",
        f"-{text}",
        f"\\frac{{{bottom}}}{{{top}}}",
        f"{text}\\overline{{3}}",
        str(round(value)),
        f"{text}1",
    ]
    return right, wrong


def _fraction(sign: str, top: int, bottom: int) -> Variants:
    value = Fraction(top, bottom)
    right = [
        f"{sign}\\frac{{{top}}}{{{bottom}}}",
        f"{sign}\\dfrac{{{top}}}{{{bottom}}}",
        f"{sign}\\tfrac{{{top}}}{{{bottom}}}",
        f"{sign}{top}/{bottom}",
        f"{sign}\\sfrac{{{top}}}{{{bottom}}}",
        f"{sign}\\frac{{{3 * top}}}{{{3 * bottom}}}",
        f"P = {sign}\\frac{{{top}}}{{{bottom}}}",
        f"{sign}\\frac{{{2 * top}}}{{{2 * bottom}}} = {sign}\\frac{{{top}}}{{{bottom}}}",
        f"{sign}\\frac {{{top}}} {{{bottom}}}",
        f"{sign}\\left(\\frac{{{top}}}{{{bottom}}}\\right)",
        f"{sign}{top} \\div {bottom}",
        f"{sign}\\frac{{{top}}}{{{bottom}}}.",
        f"x = {sign}\\frac{{{2 * top}}}{{{2 * bottom}}} = {sign}\\frac{{{top}}}{{{bottom}}}",
    ]
    rest = bottom
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest == 1 and bottom < 1000:
        right.append(f"{sign}{float(value)}")
    if not sign and top > bottom and top % bottom:
        right += [
            f"{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}",
            f"{top // bottom} \\tfrac{{{top % bottom}}}{{{bottom}}}",
        ]
    if sign:
        right += [f"\\frac{{-{top}}}{{{bottom}}}", f"\\frac{{{top}}}{{-{bottom}}}"]
    wrong = [
        f"{sign}\\frac{{{top + 1}}}{{{bottom}}}",
        f"{sign}\\frac{{{top}}}{{{bottom + 1}}}",
        f"{sign}\\frac{{{top}}}{{{bottom}}}".removeprefix("-") if sign else f"-\\frac{{{top}}}{{{bottom}}}",
        f"{sign}\\frac{{{bottom}}}{{{top}}}" if top != bottom else "2",
        f"{sign}\\frac{{{top}}}{{{bottom}0}}",
        f"{sign}{top}",
        f"{sign}{bottom}",
        f"{sign}\\frac{{{top}}}{{\\sqrt{{{bottom}}}}}",
        f"{sign}\\frac{{{top}\\pi}}{{{bottom}}}",
        f"{sign}{top}\\frac{{{top}}}{{{bottom}}}",
        f"{sign}\\frac{{{top}}}{{{bottom}}} = {sign}\\frac{{{top + 2}}}{{{bottom}}}",
        f"{sign}{top}.{bottom}",
    ]
    if rest != 1:
        wrong += [f"{sign}{float(value):.2f}", f"{sign}{float(value):.4f}"]
    return right, [one for one in wrong if one]


def _degrees(value: int) -> Variants:
    right = [
        f"{value}^\\circ",
        f"{value}",
        f"{value}^{{\\circ}}",
        f"{value}°",
        f"{value}\\text{{ degrees}}",
        f"\\text{{{value} degrees}}",
        f"\\angle ABC = {value}^\\circ",
        f"{value}\\degree",
        f"x = {value}^\\circ",
        f"180^\\circ - {180 - value}^\\circ = {value}^\\circ",
    ]
    wrong = [
        f"{value + 10}^\\circ",
        f"{180 - value if value != 90 else 45}^\\circ",
        f"{value}\\pi",
        f"{value / 10}^\\circ",
        f"-{value}^\\circ",
        f"\\angle ABC = {value + 5}^\\circ",
        f"{value}\\%",
    ]
    return right, wrong[:-1]


def _root(factor: int, inside: int) -> Variants:
    shown = "" if factor == 1 else str(factor)
    right = [
        f"{shown}\\sqrt{{{inside}}}",
        f"\\sqrt{{{factor * factor * inside}}}",
        f"{shown} \\sqrt {{{inside}}}",
        f"x = {shown}\\sqrt{{{inside}}}",
        f"{factor}\\cdot\\sqrt{{{inside}}}",
        f"{factor} \\cdot {inside}^{{1/2}}",
        f"\\sqrt{{{factor * factor * inside}}} = {shown}\\sqrt{{{inside}}}",
        f"\\frac{{{factor * inside}}}{{\\sqrt{{{inside}}}}}",
        f"\\sqrt{{{inside}}} \\times {factor}",
    ]
    value = factor * inside**0.5
    wrong = [
        f"{factor + 1}\\sqrt{{{inside}}}",
        f"{shown}\\sqrt{{{inside + 1}}}",
        f"\\sqrt{{{factor * inside}}}" if factor > 1 else f"{inside}",
        f"{value:.2f}",
        f"{value:.4f}",
        f"-{shown}\\sqrt{{{inside}}}",
        f"{shown}\\sqrt[3]{{{inside}}}",
        f"{factor * inside}",
        f"{shown}\\sqrt{{{inside}}} + 1",
        f"\\sqrt{{{inside}}} = {value:.1f}",
    ]
    return right, wrong


def _pi(factor: int) -> Variants:
    shown = "" if factor == 1 else str(factor)
    right = [
        f"{shown}\\pi",
        f"{factor}\\cdot\\pi",
        f"{shown}π",
        f"\\pi \\cdot {factor}",
        f"{shown} \\pi \\text{{ cm}}^2",
        f"A = {shown}\\pi",
        f"\\frac{{{2 * factor}\\pi}}{{2}}",
        f"V = {2 * factor}\\pi - {shown}\\pi = {shown}\\pi",
    ]
    wrong = [
        f"{factor + 1}\\pi",
        f"{factor}" if factor > 1 else "1",
        f"{factor * 3.14159:.2f}",
        f"\\frac{{\\pi}}{{{factor + 1}}}",
        f"{shown}\\pi^2",
        f"-{shown}\\pi",
        f"{shown}e",
        f"{factor} + \\pi",
        f"A = {shown}\\pi = {factor * 22 / 7:.2f}",
    ]
    return right, wrong


def _tuple(parts: list[int]) -> Variants:
    inside = ",".join(map(str, parts))
    right = [
        f"({inside})",
        f"\\left({inside}\\right)",
        f"({', '.join(map(str, parts))})",
        f"\\left( {', '.join(map(str, parts))} \\right)",
        f"\\langle {inside} \\rangle",
        f"({','.join(f'{part}.0' for part in parts)})",
        f"{inside}",
        f"(a,b) = ({inside})" if len(parts) == 2 else f"P = ({inside})",
    ]
    changed = [parts[0] + 1, *parts[1:]]
    wrong = [
        f"({','.join(map(str, changed))})",
        f"[{inside}]",
        f"({inside},0)",
        f"\\{{{inside}\\}}",
        f"({','.join(str(-part) for part in parts)})" if any(parts) else "(1,1)",
        f"({parts[0]})",
    ]
    if parts != parts[::-1]:
        wrong.append(f"({','.join(map(str, parts[::-1]))})")
    return right, wrong


def _list(parts: list[int]) -> Variants:
    right = [
        ", ".join(map(str, parts)),
        ",".join(map(str, parts[::-1])),
        f"\\{{{','.join(map(str, parts))}\\}}",
        " \\text{ and } ".join(map(str, parts)),
        ", ".join(f"x = {part}" for part in parts),
        " \\text{ or } ".join(map(str, parts[::-1])),
        "; ".join(map(str, parts)),
    ]
    wrong = [
        ", ".join(map(str, parts[:-1])),
        ", ".join(map(str, [*parts, 99])),
        ", ".join(str(part + 1) for part in parts),
        "".join(map(str, parts)),
        str(sum(parts)),
    ]
    return right, wrong


def _base(digits: str, base: int) -> Variants:
    names = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine"}
    right = [
        f"{digits}_{base}",
        f"{digits}_{{{base}}}",
        f"{digits}_{{\\text{{{names[base]}}}}}",
        f"({digits})_{{{base}}}",
        f"{digits}_{{({base})}}",
        f"\\text{{{digits}}}_{base}",
    ]
    wrong = [
        f"{digits}_{base + 1}",
        f"{digits}_{{10}}",
        str(int(digits, base)),
        f"{digits[::-1]}_{base}" if digits != digits[::-1] else f"1{digits}_{base}",
        f"{digits}0_{base}",
    ]
    return right, wrong


def _complex(real: int, sign: str, imaginary: int) -> Variants:
    shown = "" if imaginary == 1 else str(imaginary)
    other = "-" if sign == "+" else "+"
    right = [
        f"{real}{sign}{shown}i",
        f"{real} {sign} {shown} i",
        f"{sign.replace('+', '')}{shown}i {'+' if real >= 0 else '-'} {abs(real)}",
        f"z = {real}{sign}{shown}i",
        f"{real} {sign} {imaginary} \\cdot i",
    ]
    wrong = [
        f"{real}{other}{shown}i",
        f"{-real}{sign}{shown}i",
        f"{real + 1}{sign}{shown}i",
        f"{real}{sign}{imaginary}",
        f"{shown}i",
        f"{real}{sign}{imaginary + 1}i",
    ]
    return right, wrong


def _matrix(inside: str) -> Variants:
    rows = [row.split("&") for row in inside.split("\\\\") if row]
    shown = " \\\\ ".join(" & ".join(row) for row in rows)
    changed = " \\\\ ".join(" & ".join([f"{int(row[0]) + 1}", *row[1:]]) for row in rows)
    right = [f"\\begin{{{kind}matrix}} {shown} \\end{{{kind}matrix}}" for kind in "pb"]
    right += [
        f"\\left( \\begin{{array}}{{{'c' * len(rows[0])}}} {shown} \\end{{array}} \\right)",
        "\\begin{pmatrix}\n" + shown.replace("\\\\ ", "\\\\\n") + "\n\\end{pmatrix}",
        f"\\mathbf{{v}} = \\begin{{pmatrix}} {shown} \\end{{pmatrix}}",
        f"\\begin{{pmatrix}}{shown}\\\\ \\end{{pmatrix}}",
    ]
    wrong = [
        f"\\begin{{pmatrix}} {changed} \\end{{pmatrix}}",
        f"\\begin{{pmatrix}} {shown} \\\\ 0 \\end{{pmatrix}}"
        if len(rows[0]) == 1
        else f"\\begin{{pmatrix}} {rows[0][0]} \\end{{pmatrix}}",
        rows[0][0],
        f"\\begin{{pmatrix}} {' & '.join(' & '.join(row) for row in rows)} \\end{{pmatrix}}",
    ]
    return right, wrong
