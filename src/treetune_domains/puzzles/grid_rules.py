"""Transformations of grids, as in ARC, and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from treetune_domains.graders.grid import Grid

RuleName = Literal[
    "mirror", "flip", "transpose", "turn", "shift_right", "shift_down", "fall", "recolour", "double", "fill"
]

EMPTY = 0
"""The cell that others fall through and that is filled."""


def mirror(grid: Grid) -> Grid:
    """Left and right change sides."""
    return tuple(row[::-1] for row in grid)


def flip(grid: Grid) -> Grid:
    """Top and bottom change sides."""
    return grid[::-1]


def transpose(grid: Grid) -> Grid:
    return tuple(zip(*grid, strict=True))


def turn(grid: Grid) -> Grid:
    """A quarter to the right."""
    return transpose(flip(grid))


def shift_right(grid: Grid) -> Grid:
    """By one cell; what leaves at the right comes in at the left."""
    return tuple(row[-1:] + row[:-1] for row in grid)


def shift_down(grid: Grid) -> Grid:
    return grid[-1:] + grid[:-1]


def fall(grid: Grid) -> Grid:
    """Cells that aren't empty fall to the bottom, in their order."""
    columns = transpose(grid)
    fallen = [
        (*[EMPTY] * column.count(EMPTY), *[cell for cell in column if cell != EMPTY]) for column in columns
    ]
    return transpose(tuple(fallen))


def double(grid: Grid) -> Grid:
    """Each cell becomes four."""
    return tuple(tuple(cell for cell in row for _ in range(2)) for row in grid for _ in range(2))


@dataclass(frozen=True)
class Rule:
    """A transformation; `colours` are the two that ``recolour`` exchanges, or the one that ``fill`` fills
    with. `symbol` is its name in symbols, ``m`` or ``c12``."""

    name: RuleName
    colours: tuple[int, ...] = ()

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.name] + "".join(map(str, self.colours))

    def __call__(self, grid: Grid) -> Grid:
        if self.name == "recolour":
            one, other = self.colours
            exchanged = {one: other, other: one}
            return tuple(tuple(exchanged.get(cell, cell) for cell in row) for row in grid)
        if self.name == "fill":
            (colour,) = self.colours
            return tuple(tuple(colour if cell == EMPTY else cell for cell in row) for row in grid)
        return _PLAIN[self.name](grid)

    def __str__(self) -> str:
        return WORDS[self.name].format(*self.colours)


_PLAIN: dict[RuleName, Callable[[Grid], Grid]] = {
    "mirror": mirror,
    "flip": flip,
    "transpose": transpose,
    "turn": turn,
    "shift_right": shift_right,
    "shift_down": shift_down,
    "fall": fall,
    "double": double,
}

SYMBOLS: dict[RuleName, str] = {
    "mirror": "m", "flip": "f", "transpose": "t", "turn": "r", "shift_right": "s", "shift_down": "d",
    "fall": "g", "recolour": "c", "double": "x", "fill": "o",
}  # fmt: skip

WORDS: dict[RuleName, str] = {
    "mirror": "mirror it, so that left and right change sides",
    "flip": "flip it, so that top and bottom change sides",
    "transpose": "transpose it, so that rows become columns",
    "turn": "turn it by a quarter to the right",
    "shift_right": "shift every row to the right by one cell, the last one coming in at the left",
    "shift_down": "shift every column down by one cell, the last one coming in at the top",
    "fall": "let all cells that aren't 0 fall to the bottom",
    "recolour": "exchange {0} and {1}",
    "double": "make every cell a square of two by two cells",
    "fill": "put {0} in the place of every 0",
}


def rules_of(names: Sequence[RuleName], colours: int) -> Sequence[Rule]:
    """Every rule of these names on cells from 0 to ``colours - 1``."""
    return tuple(_rules_of(names, colours))


def _rules_of(names: Sequence[RuleName], colours: int) -> Iterator[Rule]:
    for name in names:
        if name == "recolour":
            yield from (Rule(name, pair) for pair in permutations(range(colours), 2) if pair[0] < pair[1])
        elif name == "fill":
            yield from (Rule(name, (colour,)) for colour in range(1, colours))
        else:
            yield Rule(name)


def applied(rules: Sequence[Rule], grid: Grid) -> Grid:
    for rule in rules:
        grid = rule(grid)
    return grid


def explanations(
    rules: Sequence[Rule], count: int, examples: Sequence[tuple[Grid, Grid]]
) -> Iterator[tuple[Rule, ...]]:
    """Every chain of `count` rules that leads from each example's first grid to its second."""
    first, *others = examples
    for chain in _chains(rules, count, *first):
        if all(applied(chain, before) == after for before, after in others):
            yield chain


def _chains(rules: Sequence[Rule], count: int, before: Grid, after: Grid) -> Iterator[tuple[Rule, ...]]:
    if count == 0:
        if before == after:
            yield ()
        return
    for rule in rules:
        yield from ((rule, *rest) for rest in _chains(rules, count - 1, rule(before), after))
