"""Environments at work in one process: the state of each answer, made again where it isn't there."""

from __future__ import annotations

import math
import pickle
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from treetune.tasks.graders.base import Unavailable
from treetune.vocabulary import GradeOutcome, Problem
from treetune_domains.environments.base import LONGEST_OBSERVATION, Environment, Turn

MOST_WORLDS = 10_000
"""Answers whose state is kept at a time: where there are more, the oldest is made again when it is asked."""


@dataclass(frozen=True)
class Moment:
    """What an environment is asked: to go on in the answer `session` up to the last of its `actions`.

    `snapshot` is a state from which it may begin, and the number of actions that had led there. One that is
    `from_start` makes the state anew, by all that had led to it; any other one needs it to be there. One that
    `is_over` is forgotten.
    """

    session: int
    problem: Problem
    seed: int
    actions: tuple[str, ...] = ()
    snapshot: tuple[int, bytes] | None = None
    from_start: bool = False
    is_over: bool = False


@dataclass(frozen=True)
class Played:
    """The turns that followed, from where the state stood on, and where it stands now: its copy, for an
    environment that is copied."""

    turns: tuple[Turn, ...] = ()
    snapshot: tuple[int, bytes] | None = None
    seconds: float = 0.0
    was_lost: bool = False
    """Nothing was played, since the state isn't there."""

    @property
    def failed(self) -> bool:
        return bool(self.turns) and self.turns[-1].outcome != "ok"


class Worlds:
    """The states of one process. Not safe to use from several threads for the same answer."""

    def __init__(self) -> None:
        self._states: OrderedDict[int, tuple[int, Any]] = OrderedDict()

    def play(self, environment: Environment, moment: Moment) -> Played:
        """Never raises: whatever the environment does is an outcome of the last turn."""
        start = time.perf_counter()
        try:
            played = self._played(environment, moment)
        except Unavailable as error:
            played = failure("unavailable", str(error))
        return replace(played, seconds=time.perf_counter() - start)

    def _played(self, environment: Environment, moment: Moment) -> Played:
        if moment.is_over:
            self._states.pop(moment.session, None)
            return Played()
        if not moment.from_start and moment.session not in self._states:
            return Played(was_lost=True)
        if moment.from_start:
            done, state = self._begun(environment, moment)
        else:
            done, state = self._states.pop(moment.session)
        turns = []
        for action in moment.actions[done:]:
            turns.append(stepped(environment, state, action))
            if turns[-1].done:
                return Played(tuple(turns))
        self._states[moment.session] = (len(moment.actions), state)
        if len(self._states) > MOST_WORLDS:
            self._states.popitem(last=False)
        copied = environment.again == "copy"
        return Played(tuple(turns), (len(moment.actions), pickle.dumps(state)) if copied else None)

    def _begun(self, environment: Environment, moment: Moment) -> tuple[int, Any]:
        """A state, and how many of the actions have led to it."""
        if moment.snapshot is not None:
            done, pickled = moment.snapshot
            return done, pickle.loads(pickled)
        if len(moment.actions) > 1 and environment.again != "replay":
            raise Unavailable("the process that held the environment's state has ended")
        try:
            return 0, environment.reset(moment.problem, moment.seed)
        except Unavailable:
            raise
        except Exception as error:  # nobody has written anything yet: it can't be the answer's doing
            raise Unavailable(f"the environment did not begin: {_words(error)}") from error


def failure(outcome: GradeOutcome, message: str, seconds: float = 0.0) -> Played:
    """What is left of an environment that is lost."""
    return Played((Turn(done=True, outcome=outcome, message=message),), seconds=seconds)


def stepped(environment: Environment, state: Any, action: str) -> Turn:
    """The turn that follows; what the environment raises is its outcome."""
    try:
        turn = environment.step(state, action)
        if not math.isfinite(turn.reward):
            raise ValueError(f"a reward of {turn.reward}")
    except Unavailable as error:
        return Turn(done=True, outcome="unavailable", message=str(error))
    except (Exception, SystemExit) as error:
        return Turn(done=True, outcome="error", message=_words(error))
    return replace(turn, observation=turn.observation[:LONGEST_OBSERVATION])


def _words(error: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {error}"[:1000] if str(error) else name
