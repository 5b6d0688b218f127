"""Puzzles in the style of ARC, in which rules change a grid. The rules are given, or have to be inferred from
examples."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Le, MinLen
from typing_extensions import override

from treetune.domains.graders.puzzles import LARGEST_GRID, Grid, GridGrader, write_grid
from treetune.domains.puzzles.base import Puzzle, Puzzles
from treetune.tasks.base import Task
from treetune.vocabulary import Problem

GRADER = GridGrader()
EMPTY_CELL = 0
"""The value of an empty cell."""

RuleName = Literal[
    "mirror", "flip", "transpose", "turn", "shift_right", "shift_down", "fall", "recolour", "double", "fill"
]


def _transpose(grid: Grid) -> Grid:
    return tuple(zip(*grid, strict=True))


def _fall(grid: Grid) -> Grid:
    """Moves the cells that aren't empty to the bottom of their columns, in their order."""
    fallen_columns = []
    for column in _transpose(grid):
        full_cells = [cell for cell in column if cell != EMPTY_CELL]
        empty_cells = [EMPTY_CELL] * column.count(EMPTY_CELL)
        fallen_columns.append((*empty_cells, *full_cells))
    return _transpose(tuple(fallen_columns))


def _exchange_colours(grid: Grid, colours: dict[int, int]) -> Grid:
    return tuple(tuple(colours.get(cell, cell) for cell in row) for row in grid)


def _double(grid: Grid) -> Grid:
    """Makes every cell a square of two by two cells."""
    doubled: list[tuple[int, ...]] = []
    for row in grid:
        wide_row: list[int] = []
        for cell in row:
            wide_row += [cell, cell]
        doubled += [tuple(wide_row), tuple(wide_row)]
    return tuple(doubled)


_RULES: dict[RuleName, tuple[str, str, Callable[..., Grid]]] = {
    "mirror": (
        "m",
        "mirror it, so that left and right change sides",
        lambda grid: tuple(row[::-1] for row in grid),
    ),
    "flip": ("f", "flip it, so that top and bottom change sides", lambda grid: grid[::-1]),
    "transpose": ("t", "transpose it, so that rows become columns", _transpose),
    "turn": ("r", "turn it by a quarter to the right", lambda grid: _transpose(grid[::-1])),
    "shift_right": (
        "s",
        "shift every row to the right by one cell, the last one coming in at the left",
        lambda grid: tuple(row[-1:] + row[:-1] for row in grid),
    ),
    "shift_down": (
        "d",
        "shift every column down by one cell, the last one coming in at the top",
        lambda grid: grid[-1:] + grid[:-1],
    ),
    "fall": ("g", "let all cells that aren't 0 fall to the bottom", _fall),
    "recolour": (
        "c",
        "exchange {0} and {1}",
        lambda grid, first, second: _exchange_colours(grid, {first: second, second: first}),
    ),
    "double": ("x", "make every cell a square of two by two cells", _double),
    "fill": (
        "o",
        "put {0} in the place of every 0",
        lambda grid, colour: _exchange_colours(grid, {EMPTY_CELL: colour}),
    ),
}
"""The symbol of each rule, its words, in which ``{0}`` is a colour, and its function, which gets the grid and
the rule's colours."""


class GridTransformation(NamedTuple):
    """A rule with its `colours`: the two that ``recolour`` exchanges, or the one with which ``fill`` fills.
    Other rules have none."""

    name: RuleName
    colours: tuple[int, ...] = ()

    @property
    def symbol(self) -> str:
        """The rule in symbols, such as ``m`` or ``c12``."""
        return _RULES[self.name][0] + "".join(map(str, self.colours))

    def __call__(self, grid: Grid) -> Grid:
        return _RULES[self.name][2](grid, *self.colours)

    @override
    def __str__(self) -> str:
        return _RULES[self.name][1].format(*self.colours)


def rules_of(names: Sequence[RuleName], colours: int) -> Sequence[GridTransformation]:
    """Returns all rules with these names for cells from 0 to ``colours - 1``."""
    rules: list[GridTransformation] = []
    for name in names:
        if name == "recolour":  # exchanges two colours, so (1, 2) is the same rule as (2, 1)
            rules += (GridTransformation(name, pair) for pair in combinations(range(colours), 2))
        elif name == "fill":  # with any colour but 0, that of empty cells
            rules += (GridTransformation(name, (colour,)) for colour in range(1, colours))
        else:
            rules.append(GridTransformation(name))
    return tuple(rules)


def apply_rules(rules: Sequence[GridTransformation], grid: Grid) -> Grid:
    """Returns the grid after all rules, one after the other."""
    for rule in rules:
        grid = rule(grid)
    return grid


def find_explanations(
    rules: Sequence[GridTransformation], count: int, examples: Sequence[tuple[Grid, Grid]]
) -> Iterator[tuple[GridTransformation, ...]]:
    """Yields all chains of `count` rules that turn the first grid of every example into its second. A chain's
    rules are applied one after the other."""
    (question, answer), *further_examples = examples

    def chains(grid: Grid, length: int) -> Iterator[tuple[GridTransformation, ...]]:
        """Yields the chains of `length` rules that turn a grid into `answer`, the first example's output."""
        if length == 0:
            if grid == answer:
                yield ()
            return
        for rule in rules:
            for further_rules in chains(rule(grid), length - 1):
                yield (rule, *further_rules)

    for chain in chains(question, count):
        if all(apply_rules(chain, input_grid) == output_grid for input_grid, output_grid in further_examples):
            yield chain


@Task.register("grid_puzzles")
@dataclass(frozen=True, kw_only=True)
class GridPuzzles(Puzzles):
    r"""The answer is what becomes of a grid by one or several rules. Either the rules are given: with the
    wording ``symbols`` the prompt is ``mt:120/031>\n`` for "mirror, then transpose". Or they have to be
    inferred from pairs of grids before and after them: ``120/031=021/130;211/003>\n``. In this case all
    chains of the same number of rules that explain the pairs lead to the same answer. The answer always
    differs from the grid in the question.

    **Demonstrations** have the grid after each rule on a line, and then the answer: ``021/130\n01/23/10\n…``.
    If the rules aren't given, each line has the rule's symbol before the grid. In a line with an error one
    cell has another colour, and the demonstration continues with this grid.
    """

    rows: tuple[Annotated[int, Ge(1), Le(30)], Annotated[int, Ge(1), Le(30)]] = (2, 4)
    """The fewest and the most rows of a grid."""
    columns: tuple[Annotated[int, Ge(1), Le(30)], Annotated[int, Ge(1), Le(30)]] = (2, 4)
    """The fewest and the most columns."""
    colours: Annotated[int, Ge(2), Le(10)] = 4
    """The number of colours."""
    rules: Annotated[tuple[RuleName, ...], MinLen(1)] = (
        "mirror", "flip", "transpose", "turn", "shift_right", "shift_down", "fall", "recolour", "fill",
    )  # fmt: skip
    """The possible rules of a puzzle."""
    steps: tuple[Annotated[int, Ge(1), Le(3)], Annotated[int, Ge(1), Le(3)]] = (1, 1)
    """The fewest and the most rules of a puzzle."""
    shown: Annotated[int, Ge(0), Le(10)] = 2
    """The number of pairs of grids that show the rules. 0: the rules are given."""
    grader: GridGrader = GRADER

    kind: ClassVar[str] = "grid puzzles"
    ranges: ClassVar[tuple[str, ...]] = ("rows", "columns", "steps")

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.rules)) != len(self.rules):
            raise ValueError(f"rules {list(self.rules)} names one of them twice")
        largest = max(self.rows[1], self.columns[1]) * 2 ** self.steps[1]
        if "double" in self.rules and largest > LARGEST_GRID:
            raise ValueError(
                f"rule 'double' makes grids of {largest} cells a side here, and the grader reads"
                f" {LARGEST_GRID}: choose smaller rows, columns or steps"
            )

    @override
    def draw_puzzle(self, generator: random.Random) -> Puzzle | None:
        all_rules = rules_of(self.rules, self.colours)
        chain = [generator.choice(all_rules) for _ in range(generator.randint(*self.steps))]
        grids: list[Grid] = []
        for _ in range(self.shown + 1):
            row_count, column_count = generator.randint(*self.rows), generator.randint(*self.columns)
            grid = []
            for _ in range(row_count):
                grid.append(tuple(generator.randrange(self.colours) for _ in range(column_count)))
            grids.append(tuple(grid))
        question, answer = grids[-1], apply_rules(chain, grids[-1])
        pairs = [(grid, apply_rules(chain, grid)) for grid in grids[:-1]]
        if answer == question:
            return None  # the rules change nothing
        if pairs and any(
            apply_rules(explanation, question) != answer
            for explanation in find_explanations(all_rules, len(chain), pairs)
        ):
            return None  # other rules explain the pairs, too, and lead to another answer
        # The key is the puzzle in symbols: ``120/031=021/130;211/003>`` with pairs, and ``mt:120/031>`` with
        # the rules where no pairs are shown. Equal puzzles have equal keys.
        if pairs:
            texts = [
                f"{write_grid(input_grid)}={write_grid(output_grid)};" for input_grid, output_grid in pairs
            ]
        else:
            texts = [*(rule.symbol for rule in chain), ":"]
        key = f"{''.join(texts)}{write_grid(question)}>\n"
        prompt = key if self.wording == "symbols" else self._in_words(chain, pairs, question)
        # `solution` makes rules of these tuples again.
        data = {"grid": question, "rules": [tuple(rule) for rule in chain]}
        return Puzzle(prompt, json.dumps(answer), key, data)

    def _in_words(
        self, chain: Sequence[GridTransformation], pairs: Sequence[tuple[Grid, Grid]], question: Grid
    ) -> str:
        """Writes the prompt in English, with the example pairs, or with the rules if there are no pairs."""
        if pairs:
            examples = "\n\n".join(
                f"Example {number}\nInput: {json.dumps(input_grid)}\nOutput: {json.dumps(output_grid)}"
                for number, (input_grid, output_grid) in enumerate(pairs, start=1)
            )
            introduction = (
                f"The same rule turns each input grid into its output grid.\n\n{examples}\n\nNow the input is"
            )
        else:
            steps = "; then ".join(map(str, chain))
            introduction = f"A grid is changed as follows: {steps}.\nThe grid is"
        return (
            f"{introduction} {json.dumps(question)}\nWhat is the output? Think first, and end with the grid"
            f" as a list of rows: {self.grader.write_in_tags('[[…], […]]')}"
        )

    @override
    def solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        grid: Grid = problem.data["grid"]
        for name, colours in problem.data["rules"]:
            rule = GridTransformation(name, tuple(colours))
            grid = rule(grid)
            if self.draws_error(generator):  # one cell gets another colour, also for the next rules
                row, column = generator.randrange(len(grid)), generator.randrange(len(grid[0]))
                other_colours = [colour for colour in range(self.colours) if colour != grid[row][column]]
                cells = [list(row_cells) for row_cells in grid]
                cells[row][column] = generator.choice(other_colours)
                grid = tuple(map(tuple, cells))
            # If no pairs are shown, the prompt gives the rules, and the symbols of the rules aren't repeated.
            if self.wording == "symbols":
                yield f"{rule.symbol}:{write_grid(grid)}" if self.shown else write_grid(grid)
            else:
                yield f"{str(rule).capitalize()}: {json.dumps(grid)}"
        yield write_grid(grid) if self.wording == "symbols" else json.dumps(grid)

    @override
    def symbols(self) -> str:
        symbols = "".join(rule.symbol for rule in rules_of(self.rules, self.colours))
        return symbols + "0123456789"[: self.colours] + "/=;:>"
