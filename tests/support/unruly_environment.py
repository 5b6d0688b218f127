"""An environment that hangs, dies, answers a megabyte or isn't there, as its level says."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from treetune.domains.environments.base import Game, Turn
from treetune.exceptions import Unavailable
from treetune.vocabulary import Problem

MOODS = ("calm", "calm", "hangs", "calm", "dies", "calm", "says a megabyte", "calm", "is closed", "calm")
TURNS = 3


@dataclass(frozen=True, kw_only=True)
class Unruly(Game):
    """Three turns, each of which earns 1/4 for an even digit; the second one shows the level's mood."""

    deadline: float = 1.0
    moods: tuple[str, ...] = MOODS
    """Of the levels, over and over again."""

    def problem(self, id: str, level: int) -> Problem:
        return Problem(id=id, prompt="?\n", gold=self.moods[level % len(self.moods)])

    def alphabet(self) -> str:
        return "0123456789?+\n"

    def reset(self, problem: Problem, seed: int) -> list[str]:
        return [problem.gold]

    def step(self, state: list[str], action: str) -> Turn:
        state.append(action)
        turns, mood = len(state) - 1, state[0]
        if turns == 2 and mood == "hangs":
            time.sleep(600)
        if turns == 2 and mood == "dies":
            os._exit(1)
        if turns == 2 and mood == "is closed":
            raise Unavailable("the shop is closed")
        said = "+" * (1 << 20) if turns == 2 and mood == "says a megabyte" else "+"
        return Turn(said, done=turns == TURNS, reward=0.25 * (action in {"0", "2", "4", "6", "8"}))
