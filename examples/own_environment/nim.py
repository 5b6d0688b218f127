"""An environment of one's own: Nim. Take one, two or three matches in turn; who takes the last one wins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from treetune import Environment, Game, Problem, Turn, derived_random


@Environment.register("nim")
@dataclass(frozen=True, kw_only=True)
class Nim(Game):
    """Nim against a player who takes at random."""

    most: Annotated[int, Ge(5)] = 12
    """Matches to begin with, at most."""

    def problem(self, id: str, level: int) -> Problem:
        matches = derived_random(level, "nim").randint(5, self.most)
        return Problem(id=id, prompt=f"{matches}\n", gold=str(matches))

    def alphabet(self) -> str:
        return "0123456789!\n"

    def reset(self, problem: Problem, seed: int) -> dict[str, Any]:
        """Returns the state that an answer begins with. All answers to a problem meet the same chances."""
        return {"matches": int(problem.gold), "chance": derived_random(seed, "nim")}

    def step(self, state: dict[str, Any], action: str) -> Turn:
        """Plays the policy's turn and the other's. A turn that isn't a move loses."""
        if action.strip() not in {"1", "2", "3"}:
            return Turn("!", done=True)
        state["matches"] -= int(action)
        if state["matches"] <= 0:
            return Turn(done=True, reward=1.0)
        state["matches"] -= state["chance"].randint(1, 3)
        return Turn(str(max(0, state["matches"])), done=state["matches"] <= 0)
