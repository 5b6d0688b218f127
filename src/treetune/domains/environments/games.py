"""Games: a maze, and a number to be found."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.domains.environments.base import Environment, Game, Turn
from treetune.seeds import derived_random
from treetune.tasks.graders.base import Isolation
from treetune.tasks.thoughts import after_thought
from treetune.vocabulary import Problem

LOWER, HIGHER, UNREAD = "<", ">", "!"
COLUMNS, ROWS = "abcdefgh", "12345678"
DIRECTIONS: Mapping[str, tuple[int, int]] = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}

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
    """A square of cells from a1 to the far corner, with walls between some, and gems to be picked up.

    The prompt gives the position, its open directions, and where the gems lie. A turn is one of N, E, S and
    W, and is answered with the new position and its open directions. Each gem earns its share of 1 in the
    turn in which it is picked up; the last one ends the answer.
    """

    size: Annotated[int, Gt(1), Le(8)] = 4
    """Cells of a side."""
    gems: Annotated[int, Gt(0)] = 2
    """Cells with a gem."""
    steps: Annotated[int, Gt(0)] = 12
    """Turns after which the answer ends."""
    walls: Annotated[float, Ge(0), Le(1)] = 0.3
    """The share of passages that are closed, of those without which every cell can still be reached."""

    isolation: ClassVar[Isolation] = "inline"

    def __post_init__(self) -> None:
        if self.gems >= self.size**2:
            raise ValueError(f"{self.gems} gems don't fit beside the start into a maze of size {self.size}")

    @override
    def problem(self, id: str, level: int) -> Problem:
        walk = self._walk(level)
        gems = " ".join(map(_name, walk.gems))
        return Problem(
            id=id, prompt=f"{self._position(walk)} {gems}\n", gold=str(self.gems), data={"level": level}
        )

    @override
    def alphabet(self) -> str:
        return f"{COLUMNS[: self.size]}{ROWS[: self.size]}{''.join(DIRECTIONS)}: \n"

    @override
    def reset(self, problem: Problem, seed: int) -> Walk:
        return self._walk(problem.data["level"])

    @override
    def step(self, state: Walk, action: str) -> Turn:
        state.steps += 1
        dx, dy = DIRECTIONS.get(after_thought(action).strip(), (0, 0))
        there = (state.at[0] + dx, state.at[1] + dy)
        if (state.at, there) in state.passages:
            state.at = there
        earned = 0.0
        if state.at in state.gems:
            state.gems.remove(state.at)
            earned = 1.0 / self.gems
        return Turn(self._position(state), done=not state.gems or state.steps == self.steps, reward=earned)

    def _position(self, walk: Walk) -> str:
        x, y = walk.at
        beside = {name: (x + dx, y + dy) for name, (dx, dy) in DIRECTIONS.items()}
        is_open = [name for name, cell in beside.items() if (walk.at, cell) in walk.passages]
        return f"{_name(walk.at)}:{''.join(is_open)}"

    def _walk(self, level: int) -> Walk:
        generator = derived_random(level, "maze")
        cells = [(x, y) for x in range(self.size) for y in range(self.size)]
        at, *gems = generator.sample(cells, self.gems + 1)
        return Walk(at, gems, self._passages(generator))

    def _passages(self, generator: random.Random) -> frozenset[tuple[Cell, Cell]]:
        """Returns each open passage in both directions: a random tree over all cells, and some of the
        others."""
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
        around = [(cell[0] + dx, cell[1] + dy) for dx, dy in DIRECTIONS.values()]
        return [(x, y) for x, y in around if 0 <= x < self.size and 0 <= y < self.size]


def _name(cell: Cell) -> str:
    return COLUMNS[cell[0]] + ROWS[cell[1]]


@Environment.register("guess_number")
@dataclass(frozen=True, kw_only=True)
class GuessNumber(Game):
    """A hidden number is to be guessed; each guess is answered with the direction, and the right one earns 1.
    Halving the numbers that are left needs about log2 of them guesses.
    """

    most: Annotated[int, Gt(0)] = 9
    """The largest number; the smallest is 0."""
    guesses: Annotated[int, Gt(0)] = 4
    """Turns after which the answer ends."""
    form: Literal["symbols", "words"] = "symbols"
    """In ``symbols`` the answer to a guess is ``<`` (it is lower), ``>`` (higher) or ``!`` (that was no
    number), so that a small model can play; in ``words`` it is in English."""

    isolation: ClassVar[Isolation] = "inline"

    @override
    def problem(self, id: str, level: int) -> Problem:
        number = derived_random(level, "hidden number").randint(0, self.most)
        prompt = f"0-{self.most}\n"
        if self.form == "words":
            prompt = (
                f"I have a number from 0 to {self.most} in mind. You have {self.guesses} guesses; after each"
                " I say whether my number is lower or higher. Answer with a number and nothing else."
            )
        return Problem(id=id, prompt=prompt, gold=str(number))

    @override
    def alphabet(self) -> str:
        if self.form == "words":
            return super().alphabet()
        return f"0123456789-{LOWER}{HIGHER}{UNREAD}\n"

    @override
    def reset(self, problem: Problem, seed: int) -> dict[str, int]:
        return {"number": int(problem.gold), "guesses": 0}

    @override
    def step(self, state: dict[str, int], action: str) -> Turn:
        state["guesses"] += 1
        guess = after_thought(action).strip()
        symbols = self.form == "symbols"
        if not (guess.isascii() and guess.isdecimal()):
            observation = UNREAD if symbols else "That is no number."
        elif (number := int(guess[:20])) == state["number"]:
            return Turn(done=True, reward=1.0)
        elif state["number"] < number:
            observation = LOWER if symbols else "My number is lower."
        else:
            observation = HIGHER if symbols else "My number is higher."
        return Turn(observation, done=state["guesses"] == self.guesses)
