"""Golds that are sets, formulas, equations and matrices, with near misses, for make_labelled_math.py.

What is right and what is wrong follows from how a gold is made, so that no grader has a say in it.
"""

from __future__ import annotations

import random

from labelled_math_values import Made


def signed(value: int) -> str:
    return f"+ {value}" if value >= 0 else f"- {-value}"


def interval(draw: random.Random) -> Made:
    low = draw.randint(-9, 5)
    high = low + draw.randint(1, 9)
    left, right = draw.choice("(["), draw.choice(")]")
    signs = {"(": "<", "[": "\\le", ")": "<", "]": "\\le"}
    turned = {"<": ">", "\\le": "\\ge"}
    other = {"(": "[", "[": "(", ")": "]", "]": ")"}
    below, above = signs[left], signs[right]
    return (
        f"{left}{low},{high}{right}",
        [
            f"\\left{left} {low}, {high} \\right{right}",
            f"x \\in {left}{low}, {high}{right}",
            f"{low} {below} x {above} {high}",
            f"{high} {turned[above]} t {turned[below]} {low}",
            f"{left}{low}.0, {high}{right}",
        ],
        [
            f"{other[left]}{low},{high}{right}",
            f"{left}{low},{high}{other[right]}",
            f"{left}{low},{high + 1}{right}",
            f"{left}{low - 1},{high}{right}",
            f"{low} {below} x {signs[other[right]]} {high}",
            f"\\{{{low},{high}\\}}",
            f"x {above} {high}",
            f"{left}{-high},{-low}{right}" if low != -high else f"{left}{low},{low + 50}{right}",
        ],
    )


def rays(draw: random.Random) -> Made:
    low = draw.randint(-9, 5)
    high = low + draw.randint(1, 9)
    return (
        f"(-\\infty,{low}) \\cup ({high},\\infty)",
        [
            f"({high}, \\infty) \\cup (-\\infty, {low})",
            f"x < {low} \\text{{ or }} x > {high}",
            f"x > {high} \\text{{ or }} x < {low}",
            f"x \\in \\left(-\\infty, {low}\\right) \\cup \\left({high}, +\\infty\\right)",
        ],
        [
            f"(-\\infty,{low}] \\cup [{high},\\infty)",
            f"({low},{high})",
            f"(-\\infty,{low})",
            f"x > {high}",
            f"(-\\infty,{high}) \\cup ({low},\\infty)",
            f"(-\\infty,{low}) \\cup ({high + 1},\\infty)",
            f"x < {low} \\text{{ or }} x \\ge {high}",
        ],
    )


def quadratic(draw: random.Random) -> Made:
    a, b = draw.sample([one for one in range(-8, 9) if one], 2)
    if a + b == 0:
        b += 9
    x = draw.choice("xtn")
    total, product = a + b, a * b
    return (
        f"{x}^2 {signed(total)}{x} {signed(product)}",
        [
            f"({x} {signed(a)})({x} {signed(b)})",
            f"\\left({x} {signed(b)}\\right)\\left({x} {signed(a)}\\right)",
            f"{product} {signed(total)}{x} + {x}^{{2}}",
            f"{x} \\cdot {x} {signed(product)} {signed(total)} {x}",
            f"f({x}) = {x}^2 {signed(total)}{x} {signed(product)}",
        ],
        [
            f"({x} {signed(-a)})({x} {signed(-b)})",
            f"{x}^2 {signed(total)}{x} {signed(product + 1)}",
            f"{x}^2 {signed(total + 1)}{x} {signed(product)}",
            f"{x}^2 {signed(total)}{x}",
            f"{x}^3 {signed(total)}{x} {signed(product)}",
            f"2{x}^2 {signed(total)}{x} {signed(product)}",
            f"{x}^2 {signed(-total)}{x} {signed(product)}",
            f"{product}",
        ],
    )


def quotient(draw: random.Random) -> Made:
    a, b = draw.randint(1, 20), draw.randint(2, 12)
    return (
        f"\\frac{{x + {a}}}{{{b}}}",
        [
            f"(x+{a})/{b}",
            f"\\frac{{x}}{{{b}}} + \\frac{{{a}}}{{{b}}}",
            f"\\frac{{{a} + x}}{{{b}}}",
            f"\\frac{{1}}{{{b}}}(x + {a})",
            f"\\dfrac{{2x + {2 * a}}}{{{2 * b}}}",
        ],
        [
            f"\\frac{{x}}{{{b}}} + {a}",
            f"x + \\frac{{{a}}}{{{b}}}",
            f"\\frac{{x + {a + 1}}}{{{b}}}",
            f"\\frac{{x + {a}}}{{{b + 1}}}",
            f"\\frac{{{b}}}{{x + {a}}}",
            f"\\frac{{x - {a}}}{{{b}}}",
            f"{b}(x+{a})",
        ],
    )


def line(draw: random.Random) -> Made:
    slope, start = draw.randint(2, 9), draw.choice([one for one in range(-9, 10) if one])
    return (
        f"y = {slope}x {signed(start)}",
        [
            f"y - {slope}x = {start}",
            f"{slope}x - y {signed(start)} = 0",
            f"{slope}x {signed(start)} = y",
            f"2y = {2 * slope}x {signed(2 * start)}",
            f"y = {start} + {slope}x",
        ],
        [
            f"y = {slope}x {signed(-start)}",
            f"y = -{slope}x {signed(start)}",
            f"x = {slope}y {signed(start)}",
            f"y = {slope}x",
            f"{slope}x + y {signed(start)} = 0",
            f"y = {slope + 1}x {signed(start)}",
            f"2y = {slope}x {signed(start)}",
        ],
    )


def square_matrix(draw: random.Random) -> Made:
    a, b, c, d = draw.sample(range(-9, 10), 4)
    shown = f"{a} & {b} \\\\ {c} & {d}"
    return (
        f"\\begin{{pmatrix}} {shown} \\end{{pmatrix}}",
        [
            f"\\begin{{bmatrix}} {shown} \\end{{bmatrix}}",
            f"\\begin{{pmatrix}}\n{a} & {b} \\\\\n{c} & {d}\n\\end{{pmatrix}}",
            f"\\left[\\begin{{array}}{{rr}} {shown} \\end{{array}}\\right]",
            f"\\mathbf{{M}} = \\begin{{pmatrix}} {a}&{b}\\\\{c}&{d} \\end{{pmatrix}}",
        ],
        [
            f"\\begin{{pmatrix}} {a} & {c} \\\\ {b} & {d} \\end{{pmatrix}}",
            f"\\begin{{pmatrix}} {a + 1} & {b} \\\\ {c} & {d} \\end{{pmatrix}}",
            f"\\begin{{pmatrix}} {b} & {a} \\\\ {c} & {d} \\end{{pmatrix}}",
            f"\\begin{{pmatrix}} {a} & {b} \\end{{pmatrix}}",
            f"{a * d - b * c}",
            f"\\begin{{pmatrix}} {a} & {b} & 0 \\\\ {c} & {d} & 0 \\end{{pmatrix}}",
        ],
    )


def fraction_pair(draw: random.Random) -> Made:
    a, b, c = draw.randint(1, 9), draw.choice((2, 4, 5, 8)), draw.randint(-9, 9)
    while a % b == 0:
        a += 1
    return (
        f"\\left(\\frac{{{a}}}{{{b}}}, {c}\\right)",
        [
            f"({a}/{b}, {c})",
            f"({a / b:g}, {c})",
            f"(x,y) = \\left(\\tfrac{{{a}}}{{{b}}}, {c}\\right)",
            f"\\left( \\frac{{{3 * a}}}{{{3 * b}}} , {c} \\right)",
        ],
        [
            f"({c}, {a}/{b})",
            f"({a}/{b}, {c + 1})",
            f"({b}/{a}, {c})",
            f"[{a}/{b}, {c}]",
            f"({a}, {b}, {c})",
            f"(-{a}/{b}, {c})",
            f"{a / b + c:g}",
            f"\\{{\\frac{{{a}}}{{{b}}}, {c}\\}}",
        ],
    )
