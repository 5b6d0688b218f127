"""A number to be found by guesses that are told to be too high or too low."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from treetune.seeds import derived_random
from treetune.tasks.graders.base import Isolation
from treetune.vocabulary import Problem
from treetune_domains.environments.base import Environment, Game, Turn

LOWER, HIGHER, UNREAD = "<", ">", "!"


@dataclass
class Hidden:
    number: int
    guesses: int = 0


@Environment.register("guess_number")
@dataclass(frozen=True, kw_only=True)
class GuessNumber(Game):
    """A number from 0 to `most` is hidden; each guess is told where it lies, and the right one of at most
    `guesses` earns 1. Halving what is left finds every number in about log2(`most` + 1) guesses.
    """

    most: Annotated[int, Gt(0)] = 9
    guesses: Annotated[int, Gt(0)] = 4
    form: Literal["symbols", "words"] = "symbols"
    """In ``symbols`` the answer to a guess is ``<`` (it is lower), ``>`` (higher) or ``!`` (that was no
    number), so that a small model can play; in ``words`` it is said in English."""

    isolation: ClassVar[Isolation] = "inline"

    def problem(self, id: str, level: int) -> Problem:
        number = derived_random(level, "hidden number").randint(0, self.most)
        prompt = f"0-{self.most}\n"
        if self.form == "words":
            prompt = (
                f"I have a number from 0 to {self.most} in mind. You have {self.guesses} guesses; after each"
                " I say whether my number is lower or higher. Answer with a number and nothing else."
            )
        return Problem(id=id, prompt=prompt, gold=str(number))

    def alphabet(self) -> str:
        if self.form == "words":
            return super().alphabet()
        return f"0123456789-{LOWER}{HIGHER}{UNREAD}\n"

    def reset(self, problem: Problem, seed: int) -> Hidden:
        return Hidden(int(problem.gold))

    def step(self, state: Hidden, action: str) -> Turn:
        state.guesses += 1
        guess = action.strip()
        if guess.isascii() and guess.isdecimal() and int(guess[:20]) == state.number:
            return Turn(done=True, reward=1.0)
        return Turn(self._said(state, guess), done=state.guesses == self.guesses)

    def _said(self, state: Hidden, guess: str) -> str:
        if not (guess.isascii() and guess.isdecimal()):
            return UNREAD if self.form == "symbols" else "That is no number."
        lower = state.number < int(guess[:20])
        if self.form == "symbols":
            return LOWER if lower else HIGHER
        return "My number is lower." if lower else "My number is higher."
