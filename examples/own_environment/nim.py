"""An environment of your own: the game Nim.

Two players take one, two or three matches in turn; the player who takes the last match wins. A game, as the
policy sees it:

    prompt          9       (matches)
    turn            1
    observation     5       (8 were left, and the opponent took 3)
    turn            1
    observation     2       (4 were left, and the opponent took 2)
    turn            2       (the last match: the policy wins)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from treetune import Environment, Game, Problem, Turn, derived_random


@Environment.register("nim")
@dataclass(frozen=True, kw_only=True)
class Nim(Game):
    """Nim against an opponent who takes matches at random. A game that the policy wins has the reward 1."""

    most: Annotated[int, Ge(5)] = 12
    """The largest number of matches at the start."""

    def problem(self, id: str, level: int) -> Problem:
        matches = derived_random(level, "nim").randint(5, self.most)
        return Problem(id=id, prompt=f"{matches}\n", gold=str(matches))

    def alphabet(self) -> str:
        return "0123456789!\n"

    def reset(self, problem: Problem, seed: int) -> dict[str, Any]:
        """Returns the state at the start of a game. `seed` is the same for all answers to a problem."""
        return {"matches": int(problem.gold), "opponent": derived_random(seed, "nim")}

    def step(self, state: dict[str, Any], action: str) -> Turn:
        """Plays the policy's turn, and then the opponent's. A turn that isn't 1, 2 or 3 loses the game."""
        if action.strip() not in {"1", "2", "3"}:
            return Turn("!", done=True)
        state["matches"] -= int(action)
        if state["matches"] <= 0:
            return Turn(done=True, reward=1.0)
        state["matches"] -= state["opponent"].randint(1, 3)
        matches_left = max(0, state["matches"])
        return Turn(str(matches_left), done=matches_left == 0)
