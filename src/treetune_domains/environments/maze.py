"""A maze in which gems are to be picked up, one step a turn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from treetune.seeds import derived_random
from treetune.tasks.graders.base import Isolation
from treetune.vocabulary import Problem
from treetune_domains.environments.base import Environment, Game, Turn

COLUMNS, ROWS = "abcdefgh", "12345678"
WAYS: Mapping[str, tuple[int, int]] = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}

Cell = tuple[int, int]


@dataclass
class Walk:
    at: Cell
    gems: list[Cell]
    passages: frozenset[tuple[Cell, Cell]]
    steps: int = 0


@Environment.register("maze")
@dataclass(frozen=True, kw_only=True)
class Maze(Game):
    """Cells from a1 to the far corner of a square of `size`, with walls between some; `gems` lie in some.

    The prompt says where one stands, which ways are open there, and where the gems lie. A turn is one of N,
    E, S and W, and is answered with the new place and its open ways. Each gem earns its share of 1 in the
    turn in which it is picked up; the last one ends the answer, and so does running out of `steps`. `walls`
    is the share of passages that are closed, of those without which every cell can still be reached.
    """

    size: Annotated[int, Gt(1), Le(8)] = 4
    gems: Annotated[int, Gt(0)] = 2
    steps: Annotated[int, Gt(0)] = 12
    walls: Annotated[float, Ge(0), Le(1)] = 0.3

    isolation: ClassVar[Isolation] = "inline"

    def __post_init__(self) -> None:
        if self.gems >= self.size**2:
            raise ValueError(f"{self.gems} gems don't fit beside the start into a maze of size {self.size}")

    def problem(self, id: str, level: int) -> Problem:
        walk = self._walk(level)
        gems = " ".join(map(_name, walk.gems))
        return Problem(
            id=id, prompt=f"{self._place(walk)} {gems}\n", gold=str(self.gems), data={"level": level}
        )

    def alphabet(self) -> str:
        return f"{COLUMNS[: self.size]}{ROWS[: self.size]}{''.join(WAYS)}: \n"

    def reset(self, problem: Problem, seed: int) -> Walk:
        return self._walk(problem.data["level"])

    def step(self, state: Walk, action: str) -> Turn:
        state.steps += 1
        way = WAYS.get(action.strip())
        if way is not None:
            there = (state.at[0] + way[0], state.at[1] + way[1])
            if (state.at, there) in state.passages:
                state.at = there
        earned = 0.0
        if state.at in state.gems:
            state.gems.remove(state.at)
            earned = 1.0 / self.gems
        return Turn(self._place(state), done=not state.gems or state.steps == self.steps, reward=earned)

    def _place(self, walk: Walk) -> str:
        x, y = walk.at
        ways = [name for name, (dx, dy) in WAYS.items() if (walk.at, (x + dx, y + dy)) in walk.passages]
        return f"{_name(walk.at)}:{''.join(ways)}"

    def _walk(self, level: int) -> Walk:
        generator = derived_random(level, "maze")
        cells = [(x, y) for x in range(self.size) for y in range(self.size)]
        at, *gems = generator.sample(cells, self.gems + 1)
        return Walk(at, gems, self._passages(generator))

    def _passages(self, generator: random.Random) -> frozenset[tuple[Cell, Cell]]:
        """Both ways of each open passage: a random tree over all cells, and some of the others."""
        reached, edge = {(0, 0)}, [((0, 0), there) for there in self._beside((0, 0))]
        passages = set()
        while edge:
            here, there = edge.pop(generator.randrange(len(edge)))
            if there in reached:
                if generator.random() >= self.walls:
                    passages |= {(here, there), (there, here)}
                continue
            reached.add(there)
            passages |= {(here, there), (there, here)}
            edge += [(there, further) for further in self._beside(there) if further not in reached]
        return frozenset(passages)

    def _beside(self, cell: Cell) -> list[Cell]:
        around = [(cell[0] + dx, cell[1] + dy) for dx, dy in WAYS.values()]
        return [(x, y) for x, y in around if 0 <= x < self.size and 0 <= y < self.size]


def _name(cell: Cell) -> str:
    return COLUMNS[cell[0]] + ROWS[cell[1]]
