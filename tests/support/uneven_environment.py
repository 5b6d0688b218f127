"""An environment whose turns take 0, 50 or 500 ms or 2 s, and one in twenty hangs, as level and turn say."""

from __future__ import annotations

import time
from dataclasses import dataclass

from treetune.domains.environments.base import Environment, Game, Turn
from treetune.seeds import derived_random
from treetune.vocabulary import Problem

SECONDS = (0.0, 0.05, 0.5, 2.0)


@Environment.register("uneven")
@dataclass(frozen=True, kw_only=True)
class Uneven(Game):
    """`turns` turns, each of which earns its share of 1 for an even digit."""

    turns: int = 4
    hangs: float = 0.05
    """The share of turns that never end."""
    waits: bool = True
    """False: nothing takes any time, and what would hang ends as an error at once."""
    concurrency: int = 256
    deadline: float = 5.0

    def problem(self, id: str, level: int) -> Problem:
        return Problem(id=id, prompt="?\n", gold=str(level))

    def alphabet(self) -> str:
        return "0123456789?+\n"

    def reset(self, problem: Problem, seed: int) -> list[int]:
        return [int(problem.gold), 0]

    def seconds(self, level: int, turn: int) -> float | None:
        """Returns what a turn takes; None: it hangs."""
        drawn = derived_random(level, f"turn {turn}")
        return None if drawn.random() < self.hangs else drawn.choice(SECONDS)

    def step(self, state: list[int], action: str) -> Turn:
        state[1] += 1
        seconds = self.seconds(*state)
        if seconds is None and not self.waits:
            raise TimeoutError
        if self.waits:
            time.sleep(3600 if seconds is None else seconds)
        return Turn("+", state[1] == self.turns, (action[:1] in "02468") / self.turns)
