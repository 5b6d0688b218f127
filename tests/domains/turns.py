"""Environments that tests act in, one of them small enough to enumerate, and what lends them to a rollout."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from tests.fake_engine import FakeEngine
from tests.support.contexts import context_of
from treetune.domains.environments.base import Again, EarnedInTurns, Environment, Turn
from treetune.domains.environments.pool import EnvironmentPool
from treetune.domains.multi_turn import MultiTurn
from treetune.engine.base import Engine
from treetune.exceptions import Unavailable
from treetune.rollouts.context import RolloutContext
from treetune.tasks.base import Split, Task
from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem, TextCodec

ALPHABET = "ab?+-\nxyz"
EOS = len(ALPHABET)


def encode(text: str) -> tuple[int, ...]:
    return tuple(ALPHABET.index(character) for character in text)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(ALPHABET[token] for token in token_ids if token != EOS)


CODEC = TextCodec(encode=encode, decode=decode, eos_id=EOS)


def likes(ids: tuple[int, ...]) -> dict[str, float]:
    """The policy: what it writes next, by the last token."""
    return {"+": {"a": 0.75, "b": 0.25}, "-": {"a": 0.25, "b": 0.75}}.get(
        ALPHABET[ids[-1]], {"a": 0.5, "b": 0.5}
    )


def probabilities(ids: tuple[int, ...], version: int) -> list[float]:
    wanted = likes(ids)
    return [wanted.get(character, 0.0) for character in ALPHABET] + [0.0]


@dataclass(frozen=True, kw_only=True)
class Ladder(Environment):
    """Three letters, with something earned for each: 1/4 for an ``a`` in the first turn, 1/2 for a ``b`` in
    the second, 1 for a third that is the first again. Two times ``b`` end it. It says ``+`` to ``a`` and
    ``-`` to ``b``."""

    isolation: ClassVar[Isolation] = "inline"

    def reset(self, problem: Problem, seed: int) -> list[str]:
        return []

    def step(self, state: list[str], action: str) -> Turn:
        state.append(action)
        place = len(state)
        reward = [0.25 * (action == "a"), 0.5 * (action == "b"), 1.0 * (action == state[0])][place - 1]
        return Turn("+" if action == "a" else "-", done=place == 3 or state == ["b", "b"], reward=reward)


def played(letters: str) -> list[Turn]:
    """What the ladder says to them."""
    state = Ladder().reset(Problem("", "", ""), 0)
    return [Ladder().step(state, letter) for letter in letters]


@dataclass(frozen=True, kw_only=True)
class LadderElsewhere(Ladder):
    """The same in worker processes."""

    isolation: ClassVar[Isolation] = "process"


@dataclass
class Record:
    """A state that knows its problem."""

    gold: str
    actions: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Obedient(Environment):
    """Does in turn `turn` what the problem's gold says, and says ``+`` in all others."""

    turn: int = 2
    deadline: float = 1.0

    def reset(self, problem: Problem, seed: int) -> Record:
        if problem.gold == "no beginning":
            raise RuntimeError("out of order")
        return Record(problem.gold)

    def step(self, state: Record, action: str) -> Turn:
        state.actions.append(action)
        if state.gold == "pid":
            return Turn(str(os.getpid()))
        if len(state.actions) < self.turn:
            return Turn("+", reward=0.125)
        match state.gold:
            case "hang":
                time.sleep(60)
            case "halfway":  # the head of a message that never follows
                files = Path("/proc/self/fd")
                sockets = [one for one in files.iterdir() if str(one.resolve()).count("socket:")]
                os.write(max(int(one.name) for one in sockets), struct.pack("!i", 256))
                time.sleep(60)
            case "slow":
                time.sleep(0.5)
            case "die":
                os._exit(3)
            case "raise":
                raise RuntimeError("nobody expected this")
            case "leave":
                raise SystemExit("goodbye")
            case "megabyte":
                return Turn("x" * (1 << 20))
            case "strange":
                return Turn("ß")
            case "nan":
                return Turn("+", reward=float("nan"))
            case "gone":
                raise Unavailable("the shop is closed")
        return Turn("+", reward=0.125, done=len(state.actions) == 3)


@dataclass(frozen=True, kw_only=True)
class Unsteady(Environment):
    """Says what no seed decides on, and has states that can be copied, or (`Fleeting`) can't be."""

    again: ClassVar[Again] = "copy"

    def reset(self, problem: Problem, seed: int) -> list[float]:
        return []

    def step(self, state: list[float], action: str) -> Turn:
        state.append(time.perf_counter_ns())
        said = "+" if state[-1] // 64 % 2 else "-"
        return Turn(said, done=len(state) == 3, reward=0.25)


@dataclass(frozen=True, kw_only=True)
class Mute(Unsteady):
    """Has states that can be copied, and says nothing to the policy."""

    def step(self, state: list[float], action: str) -> Turn:
        return replace(super().step(state, action), observation="")


@dataclass(frozen=True, kw_only=True)
class UnsteadyHere(Unsteady):
    """The same in this process."""

    isolation: ClassVar[Isolation] = "inline"


@dataclass(frozen=True, kw_only=True)
class Fleeting(Unsteady):
    again: ClassVar[Again] = "never"


@dataclass(frozen=True, kw_only=True)
class Letters(Task):
    """As many problems as `golds`, all of them a question mark."""

    golds: tuple[str, ...] = ("",) * 4
    environment: Environment = field(default_factory=Ladder)
    grader: Grader = field(default_factory=EarnedInTurns)

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(id=f"{split}/{i}", prompt="?", gold=gold) for i, gold in enumerate(self.golds)]

    def step_boundaries(self, response: str) -> list[int]:
        return [0, len(response)] if response else [0]


def engine(**given: Any) -> FakeEngine:
    return FakeEngine(probabilities, EOS, **{"decode": decode, **given})


def rollout(**given: Any) -> MultiTurn:
    """One letter a turn, and nothing around what the environment says."""
    settings = {"max_tokens": 20, "max_turns": 3, "turn_tokens": 1, "observation_format": "{observation}"}
    return MultiTurn(**{**settings, **given})


def lent(task: Task, engine: Engine, environments: EnvironmentPool, **given: Any) -> RolloutContext:
    sampler = given.pop("rollout", rollout())
    return context_of(
        task,
        engine,
        GraderPool(task.grader),
        CODEC,
        seed=7,
        sampling=sampler.sampling,
        unfinished_reward=sampler.unfinished_reward,
        rollout=sampler,
        environments=environments,
        **given,
    )
