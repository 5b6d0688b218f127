"""Define environments for tests, one of them small enough to enumerate, and contexts for rollouts in them."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from tests.support.contexts import context_of
from tests.support.fake_engine import FakeEngine
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
    """Return the policy's chances for the next letter, which depend on the last token alone."""
    return {"+": {"a": 0.75, "b": 0.25}, "-": {"a": 0.25, "b": 0.75}}.get(
        ALPHABET[ids[-1]], {"a": 0.5, "b": 0.5}
    )


def probabilities(ids: tuple[int, ...], version: int) -> list[float]:
    chances = likes(ids)
    return [chances.get(character, 0.0) for character in ALPHABET] + [0.0]


@dataclass(frozen=True, kw_only=True)
class Ladder(Environment):
    """A game of three letters, each of which can earn a reward.

    An ``a`` in the first turn earns 1/4, a ``b`` in the second 1/2, and a third letter that repeats the first
    earns 1. Two times ``b`` end the game. It answers ``+`` to ``a`` and ``-`` to ``b``.
    """

    isolation: ClassVar[Isolation] = "inline"

    def reset(self, problem: Problem, seed: int) -> list[str]:
        return []

    def step(self, state: list[str], action: str) -> Turn:
        state.append(action)
        turn = len(state)
        reward_of_turn = {1: 0.25 * (action == "a"), 2: 0.5 * (action == "b"), 3: 1.0 * (action == state[0])}
        is_over = turn == 3 or state == ["b", "b"]
        return Turn("+" if action == "a" else "-", done=is_over, reward=reward_of_turn[turn])


def played(letters: str) -> list[Turn]:
    """Play these letters, and list the ladder's turns."""
    state = Ladder().reset(Problem("", "", ""), 0)
    return [Ladder().step(state, letter) for letter in letters]


@dataclass(frozen=True, kw_only=True)
class LadderElsewhere(Ladder):
    """The ladder in worker processes."""

    isolation: ClassVar[Isolation] = "process"


@dataclass
class Record:
    """A state that remembers the gold of its problem."""

    gold: str
    actions: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Obedient(Environment):
    """Misbehave in turn `turn` as the problem's gold says, and answer ``+`` in all other turns."""

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
            case "halfway":  # sends the head of a message, and never the message
                descriptors = Path("/proc/self/fd").iterdir()
                sockets = [int(file.name) for file in descriptors if "socket:" in str(file.resolve())]
                os.write(max(sockets), struct.pack("!i", 256))
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
class KilledAtStart(Obedient):
    """Kills the first processes that load it, of which `notes` has a line each. If `raises`, it raises an
    exception in them instead."""

    notes: str
    kills: int
    raises: bool = False

    def prepare(self) -> None:
        with Path(self.notes).open("a") as file:
            print("loads", file=file)
        is_to_fail = len(Path(self.notes).read_text().split()) <= self.kills
        if is_to_fail and self.raises:
            raise OSError("Stale file handle")
        if is_to_fail:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Unsteady(Environment):
    """Answer by the clock, which no seed decides; states can be copied, but for those of `Fleeting`."""

    again: ClassVar[Again] = "copy"

    def reset(self, problem: Problem, seed: int) -> list[float]:
        return []

    def step(self, state: list[float], action: str) -> Turn:
        state.append(time.perf_counter_ns())
        observation = "+" if state[-1] // 64 % 2 else "-"
        return Turn(observation, done=len(state) == 3, reward=0.25)


@dataclass(frozen=True, kw_only=True)
class Mute(Unsteady):
    """An environment whose states can be copied, and that says nothing to the policy."""

    def step(self, state: list[float], action: str) -> Turn:
        return replace(super().step(state, action), observation="")


@dataclass(frozen=True, kw_only=True)
class UnsteadyHere(Unsteady):
    """`Unsteady` in this process."""

    isolation: ClassVar[Isolation] = "inline"


@dataclass(frozen=True, kw_only=True)
class Fleeting(Unsteady):
    again: ClassVar[Again] = "never"


@dataclass(frozen=True, kw_only=True)
class Letters(Task):
    """A problem for each of `golds`, all with a question mark as prompt."""

    golds: tuple[str, ...] = ("",) * 4
    environment: Environment = field(default_factory=Ladder)
    grader: Grader = field(default_factory=EarnedInTurns)

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(id=f"{split}/{i}", prompt="?", gold=gold) for i, gold in enumerate(self.golds)]

    def step_boundaries(self, response: str) -> list[int]:
        return [0, len(response)] if response else [0]


def engine(**settings: Any) -> FakeEngine:
    return FakeEngine(probabilities, EOS, **{"decode": decode, **settings})


def rollout(**settings: Any) -> MultiTurn:
    """Make a rollout of one letter a turn, with nothing around the environment's observations."""
    defaults = {"max_tokens": 20, "max_turns": 3, "turn_tokens": 1, "observation_format": "{observation}"}
    return MultiTurn(**{**defaults, **settings})


def lent(task: Task, engine: Engine, environments: EnvironmentPool, **settings: Any) -> RolloutContext:
    """Make the context of a rollout with these environments."""
    sampler = settings.pop("rollout", rollout())
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
        **settings,
    )
