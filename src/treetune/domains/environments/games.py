"""Games: a maze, and a number to guess."""

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
"""Replies to a guess in symbols: the hidden number is lower, it is higher, or the guess isn't a number."""
COLUMNS, ROWS = "abcdefgh", "12345678"
"""The names of a maze's columns and rows."""
DIRECTIONS: Mapping[str, tuple[int, int]] = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}
"""The change of column and row of a step in each direction."""

GridCell = tuple[int, int]
"""The indices of a cell's column and row: (0, 0) is a1."""


@dataclass
class Walk:
    """The state of an answer in the maze."""

    at: GridCell
    """The policy's position."""
    gems: list[GridCell]
    """The cells of the gems that are left."""
    passages: frozenset[tuple[GridCell, GridCell]]
    """The open passages, from cell to cell, each in both directions."""
    steps: int = 0
    """Turns so far."""


@Environment.register("maze")
@dataclass(frozen=True, kw_only=True)
class Maze(Game):
    """A square of cells with walls between some of them, and gems to pick up. The first cell is a1.

    The prompt gives the position, its open directions, and the cells of the gems. An action is N, E, S or W,
    and the observation is the new position with its open directions. Each gem earns 1 / `gems` in the turn
    that picks it up, and the last one ends the answer.
    """

    size: Annotated[int, Gt(1), Le(8)] = 4
    """The number of cells along each side."""
    gems: Annotated[int, Gt(0)] = 2
    """The number of gems, each in another cell."""
    steps: Annotated[int, Gt(0)] = 12
    """The number of turns after which the answer ends."""
    walls: Annotated[float, Ge(0), Le(1)] = 0.3
    """The probability that a passage is closed, for those that aren't needed to reach every cell."""

    isolation: ClassVar[Isolation] = "inline"

    def __post_init__(self) -> None:
        if self.gems >= self.size**2:
            raise ValueError(f"{self.gems} gems and the start don't fit into a maze of size {self.size}")

    @override
    def problem(self, id: str, level: int) -> Problem:
        walk = self._begin_walk(level)
        cells_of_gems = " ".join(map(_name_of_cell, walk.gems))
        return Problem(
            id=id,
            prompt=f"{self._write_position(walk)} {cells_of_gems}\n",
            gold=str(self.gems),  # the number of gems
            data={"level": level},
        )

    @override
    def alphabet(self) -> str:
        return f"{COLUMNS[: self.size]}{ROWS[: self.size]}{''.join(DIRECTIONS)}: \n"

    @override
    def reset(self, problem: Problem, seed: int) -> Walk:
        return self._begin_walk(problem.data["level"])

    @override
    def step(self, state: Walk, action: str) -> Turn:
        state.steps += 1
        # With any other text than N, E, S and W the position stays, and the turn counts.
        dx, dy = DIRECTIONS.get(after_thought(action).strip(), (0, 0))
        target = (state.at[0] + dx, state.at[1] + dy)
        if (state.at, target) in state.passages:
            state.at = target
        earned = 0.0
        if state.at in state.gems:
            state.gems.remove(state.at)
            earned = 1.0 / self.gems  # the number of gems at the beginning
        # `state.gems` are the cells of the gems that are left, and `self.steps` is the most turns.
        is_done = not state.gems or state.steps == self.steps
        return Turn(self._write_position(state), done=is_done, reward=earned)

    def _write_position(self, walk: Walk) -> str:
        """Writes the present cell and its open directions, such as ``b2:NE``."""
        x, y = walk.at
        open_directions = ""
        for name, (dx, dy) in DIRECTIONS.items():
            if (walk.at, (x + dx, y + dy)) in walk.passages:
                open_directions += name
        return f"{_name_of_cell(walk.at)}:{open_directions}"

    def _begin_walk(self, level: int) -> Walk:
        """Returns the state in which all answers to a level begin."""
        generator = derived_random(level, "maze")  # a level is a seed, not a difficulty
        cells = [(x, y) for x in range(self.size) for y in range(self.size)]
        at, *gems = generator.sample(cells, self.gems + 1)
        return Walk(at, gems, self._draw_passages(generator))

    def _draw_passages(self, generator: random.Random) -> frozenset[tuple[GridCell, GridCell]]:
        """Returns each open passage in both directions: a random tree over all cells, and some further
        passages."""
        reached = {(0, 0)}
        # Passages from a reached cell to one that wasn't reached when the passage was added
        frontier = [((0, 0), neighbour) for neighbour in self._neighbours((0, 0))]
        passages = set()
        while frontier:
            cell, neighbour = frontier.pop(generator.randrange(len(frontier)))
            if neighbour in reached:  # this passage isn't needed: it may stay a wall
                if generator.random() >= self.walls:
                    passages |= {(cell, neighbour), (neighbour, cell)}
                continue
            reached.add(neighbour)
            passages |= {(cell, neighbour), (neighbour, cell)}
            for next_neighbour in self._neighbours(neighbour):
                if next_neighbour not in reached:
                    frontier.append((neighbour, next_neighbour))
        return frozenset(passages)

    def _neighbours(self, cell: GridCell) -> list[GridCell]:
        around = [(cell[0] + dx, cell[1] + dy) for dx, dy in DIRECTIONS.values()]
        return [(x, y) for x, y in around if 0 <= x < self.size and 0 <= y < self.size]


def _name_of_cell(cell: GridCell) -> str:
    return COLUMNS[cell[0]] + ROWS[cell[1]]


@Environment.register("guess_number")
@dataclass(frozen=True, kw_only=True)
class GuessNumber(Game):
    """A hidden number to guess. The reply to each wrong guess says whether the number is lower or higher, and
    the right guess earns 1. Bisection needs about log2(n) guesses for n numbers.
    """

    most: Annotated[int, Gt(0)] = 9
    """The largest number; the smallest is 0."""
    guesses: Annotated[int, Gt(0)] = 4
    """The number of turns after which the answer ends."""
    form: Literal["symbols", "words"] = "symbols"
    """The form of prompts and replies. ``symbols``: the reply to a guess is ``<`` (the hidden number is
    lower), ``>`` (it is higher) or ``!`` (the guess isn't a number), so that a small model can play.
    ``words``: the reply is in English."""

    isolation: ClassVar[Isolation] = "inline"

    @override
    def problem(self, id: str, level: int) -> Problem:
        # A level is a seed, not a difficulty.
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
        is_number = guess.isascii() and guess.isdecimal()
        number = int(guess[:20]) if is_number else None  # Python refuses a text of thousands of digits
        if number == state["number"]:
            return Turn(done=True, reward=1.0)
        symbols = self.form == "symbols"
        if number is None:
            observation = UNREAD if symbols else "That is no number."
        elif state["number"] < number:
            observation = LOWER if symbols else "My number is lower."
        else:
            observation = HIGHER if symbols else "My number is higher."
        return Turn(observation, done=state["guesses"] == self.guesses)
