"""Environments at work for many answers at once, each where it wants to run and within its deadline.

An answer's state lives in one process (`Worlds`), is driven from the run's own (`Play`), and its turns are
written down as they come (`TurnJournal`): they outlive a crash and are not asked for again.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from treetune.processes.pool import Pool
from treetune.processes.worker import Servant
from treetune.store.journal import Journal
from treetune.tasks.graders.base import Unavailable
from treetune.vocabulary import GradeOutcome, Problem
from treetune_domains.environments.base import LONGEST_OBSERVATION, Environment, Turn

MOST_WORLDS = 10_000
"""Answers whose state is kept at a time: where there are more, the oldest is made again when it is asked."""

SUFFIX = ".turns"
"""The ending of the file beside a journal of requests."""

Snapshot = tuple[int, bytes]
"""A pickled state, behind the number of actions that had led to it."""


@dataclass(frozen=True)
class Moment:
    """A call of an environment: go on in the answer `session` up to the last of its `actions`."""

    session: int
    problem: Problem
    seed: int
    actions: tuple[str, ...] = ()
    snapshot: Snapshot | None = None
    """A state from which it may begin."""
    from_start: bool = False
    """Make the state anew, by all actions that led to it; otherwise it has to be there."""
    is_over: bool = False
    """Forget the answer."""


@dataclass(frozen=True)
class Played:
    """The turns that followed on a call, from the state that there was."""

    turns: tuple[Turn, ...] = ()
    snapshot: Snapshot | None = None
    """The state now, for an environment that is copied."""
    seconds: float = 0.0
    was_lost: bool = False
    """Nothing was played, since the state isn't there."""


def failure(outcome: GradeOutcome, message: str, seconds: float = 0.0) -> Played:
    """Returns the result of a call whose environment is lost."""
    return Played((Turn(done=True, outcome=outcome, message=message),), seconds=seconds)


class Worlds(Servant):
    """The states of an environment's answers in one process. Not safe to use from several threads for the
    same answer."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._states: OrderedDict[int, tuple[int, Any]] = OrderedDict()

    def prepare(self) -> None:
        self.environment.prepare()

    def answer(self, moment: Moment) -> Played:
        """Plays. Never raises: an exception of the environment is an outcome of the last turn."""
        start = time.perf_counter()
        try:
            played = self._played(moment)
        except Unavailable as error:
            played = failure("unavailable", str(error))
        return replace(played, seconds=time.perf_counter() - start)

    def _played(self, moment: Moment) -> Played:
        if moment.is_over:
            self._states.pop(moment.session, None)
            return Played()
        if moment.from_start:
            done, state = self._begun(moment)
        elif moment.session in self._states:
            done, state = self._states.pop(moment.session)
        else:
            return Played(was_lost=True)
        turns: list[Turn] = []
        for action in moment.actions[done:]:
            turns.append(self._step(state, action))
            if turns[-1].done:
                return Played(tuple(turns))
        self._states[moment.session] = (len(moment.actions), state)
        if len(self._states) > MOST_WORLDS:
            self._states.popitem(last=False)
        copied = self.environment.again == "copy"
        return Played(tuple(turns), (len(moment.actions), pickle.dumps(state)) if copied else None)

    def _begun(self, moment: Moment) -> tuple[int, Any]:
        """Returns a state, and how many of the actions have led to it."""
        if moment.snapshot is not None:
            done, pickled = moment.snapshot
            try:
                return done, pickle.loads(pickled)
            except Exception as error:  # a journal of an earlier version names classes that are gone
                raise Unavailable(f"the environment's state can't be read: {_described(error)}") from error
        if len(moment.actions) > 1 and self.environment.again != "replay":
            raise Unavailable("the process that held the environment's state has ended")
        try:
            return 0, self.environment.reset(moment.problem, moment.seed)
        except Unavailable:
            raise
        except Exception as error:  # nobody has written anything yet: it can't be the answer's doing
            raise Unavailable(f"the environment did not begin: {_described(error)}") from error

    def _step(self, state: Any, action: str) -> Turn:
        try:
            turn = self.environment.step(state, action)
            if not math.isfinite(turn.reward):
                raise ValueError(f"a reward of {turn.reward}")
        except Unavailable as error:
            return Turn(done=True, outcome="unavailable", message=str(error))
        except (Exception, SystemExit) as error:
            return Turn(done=True, outcome="error", message=_described(error))
        return replace(turn, observation=turn.observation[:LONGEST_OBSERVATION])


def _described(error: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {error}"[:1000] if str(error) else name


class TurnJournal:
    """A journal of turns, by the answer that they belong to and the actions before them.

    An answer that is sampled again comes to the same turns without its environment, also where that isn't
    asked the same twice: a turn that hung stays a ``timeout``. One that was ``unavailable`` is asked for
    again. `others` are journals to read turns from, and not to write to. Safe to use from several threads.
    """

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        self._journal = Journal(path, others)

    def known(self, answer: int, actions: Sequence[str]) -> Played | None:
        row = self._journal.get(_key(answer, actions))
        if row is None:
            return None
        _, turn, copied = row
        return Played((Turn(*turn),), copied and (copied[0], base64.b64decode(copied[1])))

    def add(self, answer: int, actions: Sequence[str], played: Played) -> None:
        """Keeps one turn, the last of these actions'."""
        (turn,) = played.turns
        if turn.outcome == "unavailable":
            return
        done, state = played.snapshot or (0, None)
        copied = None if state is None else [done, base64.b64encode(state).decode("ascii")]
        self._journal.add([_key(answer, actions), dataclasses.astuple(turn), copied])

    def close(self) -> None:
        self._journal.close()


def _key(answer: int, actions: Sequence[str]) -> str:
    text = json.dumps([answer, *actions])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


Waiting = Generator["Future[Played]", Played, Played]
"""Yields the futures that it waits for, is sent their results, and returns a result."""


def _driven(steps: Waiting) -> Future[Played]:
    """Runs a generator from one future that it waits for to the next, and returns the future of its
    result."""
    result: Future[Played] = Future()

    def go_on(done: Future[Played] | None = None) -> None:
        try:
            if done is None:
                waited = next(steps)
            elif (error := done.exception()) is not None:
                waited = steps.throw(error)
            else:
                waited = steps.send(done.result())
        except StopIteration as end:
            result.set_result(end.value)
        except BaseException as error:  # handed on to whoever waits
            result.set_exception(error)
        else:
            waited.add_done_callback(go_on)

    go_on()
    return result


class Play:
    """The environment of one answer, played one action after the other."""

    def __init__(
        self,
        ask: Callable[[Moment, int], Future[Played]],
        moment: Moment,
        recorded: tuple[TurnJournal, int] | None = None,
    ) -> None:
        """`ask` has a moment played, with time for so many turns. `recorded` is a journal that may know
        turns, and the answer's name there."""
        self._ask, self._moment, self._recorded = ask, moment, recorded
        self._lost: Turn | None = None
        self._is_behind = False
        """The environment has not played the last turns, which the journal knew."""
        begun = ask(replace(moment, from_start=True), max(1, len(moment.actions)))
        self.begun = _driven(self._begin(begun))
        """Done once it has begun, with the turns that had been taken already and were played again."""

    def act(self, action: str) -> Future[Played]:
        """Returns the one turn that follows from an action."""
        return _driven(self._act(action))

    def end(self) -> None:
        """Ends the answer: no more actions follow."""
        self._ask(replace(self._moment, is_over=True), 1)

    def _begin(self, begun: Future[Played]) -> Waiting:
        played = yield begun
        if played.turns and played.turns[-1].outcome != "ok":
            # Nobody has written anything yet: it isn't the answer's doing.
            self._lost = replace(played.turns[-1], outcome="unavailable")
            return Played((self._lost,))
        return self._with_snapshot(played)

    def _act(self, action: str) -> Waiting:
        yield self.begun
        actions = (*self._moment.actions, action)
        self._moment = replace(self._moment, actions=actions)
        if self._recorded is not None:
            journal, answer = self._recorded
            if (known := journal.known(answer, actions)) is not None:
                self._is_behind = True
                return self._with_snapshot(known)
        if self._lost is not None:
            return Played((self._lost,))
        played = Played(was_lost=True) if self._is_behind else (yield self._ask(self._moment, 1))
        if played.was_lost:  # the state is made anew, by all actions that led to it
            self._is_behind = False
            played = yield self._ask(replace(self._moment, from_start=True), len(actions))
            played = replace(played, turns=played.turns[-1:])
        if self._recorded is not None:
            journal.add(answer, actions, played)
        return self._with_snapshot(played)

    def _with_snapshot(self, played: Played) -> Played:
        if played.snapshot is not None:
            self._moment = replace(self._moment, snapshot=played.snapshot)
        return played


class EnvironmentPool:
    """Plays environments for answers that go on independently of each other.

    Where an environment runs in a process, there are `workers` of these; an answer stays with one of them.
    A turn in which it hangs has the outcome ``timeout``, one in which it crashes or runs out of `memory_gib`
    ``error``; the worker is replaced, and the other answers that it held are played again there, or left out
    where they can't be.

    Workers start with the first turn, and end with the pool or with this process, however it ends. Close it,
    or use it in a `with` statement.
    """

    def __init__(self, *, workers: int | None = None, memory_gib: float | None = 4.0) -> None:
        self._workers = workers or min(2, os.cpu_count() or 1)
        self._pool = Pool("the environment pool", self._workers, memory_gib, failure)
        self._known: dict[int, tuple[int, Worlds]] = {}
        self._sessions = itertools.count()
        self._held = [0] * self._workers

    def begin(
        self,
        environment: Environment,
        problem: Problem,
        seed: int,
        actions: Sequence[str] = (),
        snapshot: Snapshot | None = None,
        recorded: tuple[TurnJournal, int] | None = None,
    ) -> Play:
        """Begins an answer, or goes on behind the `actions` that had been taken in it; see `Play`.

        Raises what kept workers from starting, once that is known.
        """
        number, worlds = self._number(environment)
        moment = Moment(next(self._sessions), problem, seed, tuple(actions), snapshot)
        worker: int | None = None
        if environment.isolation == "process":
            worker = min(range(self._workers), key=lambda index: self._held[index])
            self._held[worker] += 1

        def ask(moment: Moment, turns: int) -> Future[Played]:
            if environment.isolation == "inline":
                played: Future[Played] = Future()
                played.set_result(worlds.answer(moment))
                return played
            if moment.is_over and worker is not None:
                self._held[worker] -= 1
            deadline = environment.deadline * turns
            return self._pool.submit(
                number, moment, deadline=deadline, about=problem.id, worker=worker, pieces=turns
            )

        return Play(ask, moment, recorded)

    def close(self) -> None:
        """Ends the workers; turns that are still missing are cancelled. Safe to call twice."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _number(self, environment: Environment) -> tuple[int, Worlds]:
        """Returns the environment's number in the pool. Its states are kept in this process, so that no other
        environment can have its place in memory."""
        if id(environment) not in self._known:
            number, worlds = -1, Worlds(environment)
            threads = environment.concurrency if environment.isolation == "service" else None
            if environment.isolation != "process":
                worlds.prepare()
            if environment.isolation != "inline":
                number = self._pool.register(worlds, type(environment).__name__, threads=threads)
            self._known[id(environment)] = number, worlds
        return self._known[id(environment)]
