"""Grids that a rule changes, in the manner of ARC: the rule is told, or to be found from examples."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le, MinLen

from treetune.tasks.base import Task
from treetune.vocabulary import Problem
from treetune_domains.graders.grid import LARGEST, Grid, GridGrader, written
from treetune_domains.puzzles.grid_rules import Rule, RuleName, applied, explanations, rules_of
from treetune_domains.puzzles.puzzles import Puzzle, Puzzles

GRADER = GridGrader()


@Task.register("grid_puzzles")
@dataclass(frozen=True, kw_only=True)
class GridPuzzles(Puzzles):
    r"""What becomes of a grid of `rows` by `columns` cells (fewest and most of each), in so many `colours`,
    when `steps` rules (fewest and most) out of `rules` are applied to it one after the other.

    With `shown` 0 the rules are told, in symbols ``mt:120/031>\n`` for mirrored, then transposed. Else so
    many pairs of grids before and after show them, ``120/031=021/130;211/003>\n``, and every chain of as
    many rules that explains the pairs has the same answer. No puzzle's rules leave its grid as it is.

    **Demonstrations** write the grid after each rule on a line, behind the rule's symbol where it isn't told,
    and then the answer: ``021/130\n02/13/…``. On a slip one cell of the line is another colour, and the
    teacher goes on from it.
    """

    rows: tuple[Annotated[int, Ge(1), Le(30)], Annotated[int, Ge(1), Le(30)]] = (2, 4)
    columns: tuple[Annotated[int, Ge(1), Le(30)], Annotated[int, Ge(1), Le(30)]] = (2, 4)
    colours: Annotated[int, Ge(2), Le(10)] = 4
    rules: Annotated[tuple[RuleName, ...], MinLen(1)] = (
        "mirror", "flip", "transpose", "turn", "shift_right", "shift_down", "fall", "recolour", "fill",
    )  # fmt: skip
    steps: tuple[Annotated[int, Ge(1), Le(3)], Annotated[int, Ge(1), Le(3)]] = (1, 1)
    shown: Annotated[int, Ge(0), Le(10)] = 2
    grader: GridGrader = GRADER

    kind: ClassVar[str] = "grid puzzles"

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "steps"):
            least, most = getattr(self, name)
            if least > most:
                raise ValueError(f"{name} is [{least}, {most}]: give the smaller one first")
        if len(set(self.rules)) != len(self.rules):
            raise ValueError(f"rules {list(self.rules)} names one of them twice")
        largest = max(self.rows[1], self.columns[1]) * 2 ** self.steps[1]
        if "double" in self.rules and largest > LARGEST:
            raise ValueError(
                f"rule 'double' makes grids of {largest} cells a side here, and the grader reads {LARGEST}: "
                "choose smaller rows, columns or steps"
            )

    def _draw(self, generator: random.Random) -> Puzzle | None:
        every = rules_of(self.rules, self.colours)
        chain = [generator.choice(every) for _ in range(generator.randint(*self.steps))]
        grids = [self._grid(generator) for _ in range(self.shown + 1)]
        question, answer = grids[-1], applied(chain, grids[-1])
        pairs = [(grid, applied(chain, grid)) for grid in grids[:-1]]
        if answer == question:
            return None
        if pairs and any(applied(one, question) != answer for one in explanations(every, len(chain), pairs)):
            return None
        prompt = self._in_symbols(chain, pairs, question)
        key = prompt
        if self.wording == "words":
            prompt = self._in_words(chain, pairs, question)
        rules = [(rule.name, rule.colours) for rule in chain]
        return Puzzle(prompt, json.dumps(answer), key, {"grid": question, "rules": rules})

    def _grid(self, generator: random.Random) -> Grid:
        rows, columns = generator.randint(*self.rows), generator.randint(*self.columns)
        return tuple(tuple(generator.randrange(self.colours) for _ in range(columns)) for _ in range(rows))

    def _in_symbols(self, chain: Sequence[Rule], pairs: Sequence[tuple[Grid, Grid]], question: Grid) -> str:
        told = (
            "".join(f"{written(before)}={written(after)};" for before, after in pairs)
            if pairs
            else "".join(rule.symbol for rule in chain) + ":"
        )
        return f"{told}{written(question)}>\n"

    def _in_words(self, chain: Sequence[Rule], pairs: Sequence[tuple[Grid, Grid]], question: Grid) -> str:
        if pairs:
            shown = "\n\n".join(
                f"Example {number}\nInput: {json.dumps(before)}\nOutput: {json.dumps(after)}"
                for number, (before, after) in enumerate(pairs, start=1)
            )
            told = f"The same rule turns each input grid into its output grid.\n\n{shown}\n\nNow the input is"
        else:
            steps = "; then ".join(map(str, chain))
            told = f"A grid is changed as follows: {steps}.\nThe grid is"
        return (
            f"{told} {json.dumps(question)}\nWhat is the output? Think first, and end with the grid as a list"
            f" of rows: {self.grader.tagged('[[…], […]]')}"
        )

    def _solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        grid: Grid = problem.data["grid"]
        for name, colours in problem.data["rules"]:
            rule = Rule(name, tuple(colours))
            grid = rule(grid)
            if self._slips(generator):
                grid = self._with_slip(grid, generator)
            if self.wording == "symbols":
                yield f"{rule.symbol}:{written(grid)}" if self.shown else written(grid)
            else:
                yield f"{str(rule).capitalize()}: {json.dumps(grid)}"
        yield written(grid) if self.wording == "symbols" else json.dumps(grid)

    def _with_slip(self, grid: Grid, generator: random.Random) -> Grid:
        row, column = generator.randrange(len(grid)), generator.randrange(len(grid[0]))
        others = [colour for colour in range(self.colours) if colour != grid[row][column]]
        cells = [list(one) for one in grid]
        cells[row][column] = generator.choice(others)
        return tuple(map(tuple, cells))

    def _letters(self) -> str:
        symbols = "".join(rule.symbol for rule in rules_of(self.rules, self.colours))
        return symbols + "0123456789"[: self.colours] + "/=;:>"
