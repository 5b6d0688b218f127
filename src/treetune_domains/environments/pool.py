"""Environments at work for many answers at once, each where it wants to run and within its deadline."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from treetune.processes.pool import Pool
from treetune.processes.worker import Servant
from treetune.vocabulary import Problem
from treetune_domains.environments.base import Environment
from treetune_domains.environments.journal import TurnJournal
from treetune_domains.environments.worlds import Moment, Played, Worlds, failure


@dataclass
class Playing(Servant):
    """The servant of an environment: plays it, in a worker process or in this one."""

    environment: Environment
    worlds: Worlds = field(default_factory=Worlds)

    def prepare(self) -> None:
        self.environment.prepare()

    def answer(self, moment: Moment) -> Played:
        return self.worlds.play(self.environment, moment)


Ask = Callable[[Moment, int], "Future[Played]"]
"""Has a moment played, with time for so many turns."""


class Play:
    """One answer's environment: it is told one action after the other, and ended.

    `begun` is there once it has begun, with the turns that had been taken already and were played again.
    `recorded` is a journal that may know turns, and the answer's name there.
    """

    def __init__(self, ask: Ask, moment: Moment, recorded: tuple[TurnJournal, int] | None = None) -> None:
        self._ask, self._moment, self._recorded = ask, moment, recorded
        self._is_behind = False
        self._lost: Played | None = None
        self.begun: Future[Played] = Future()
        asked = self._ask(replace(moment, from_start=True), max(1, len(moment.actions)))
        _then(asked, self.begun, lambda played: self._began(played))

    def act(self, action: str) -> Future[Played]:
        """What follows from an action: one turn."""
        told: Future[Played] = Future()
        _then(self.begun, told, lambda _: self._acted(action))
        return told

    def end(self) -> None:
        """Nothing more is asked."""
        self._ask(replace(self._moment, is_over=True), 1)

    def _began(self, played: Played) -> Played:
        if played.failed:  # nobody has written anything: it isn't the answer's doing
            self._lost = Played((replace(played.turns[-1], outcome="unavailable"),))
        return self._lost or self._kept(played)

    def _acted(self, action: str) -> Played | Future[Played]:
        moment = self._moment = replace(self._moment, actions=(*self._moment.actions, action))
        known = self._recorded and self._recorded[0].known(self._recorded[1], moment.actions)
        if known:
            self._is_behind = True  # where the environment stands
            return self._kept(known)
        if self._lost is not None:
            return self._lost
        if self._is_behind:
            return self._again()
        told: Future[Played] = Future()
        _then(self._ask(moment, 1), told, self._stepped)
        return told

    def _stepped(self, played: Played) -> Played | Future[Played]:
        return self._again() if played.was_lost else self._written(played)

    def _again(self) -> Future[Played]:
        """The last turn, by a state that is made anew."""
        self._is_behind = False
        told: Future[Played] = Future()
        asked = self._ask(replace(self._moment, from_start=True), len(self._moment.actions))
        _then(asked, told, lambda played: self._written(replace(played, turns=played.turns[-1:])))
        return told

    def _written(self, played: Played) -> Played:
        if self._recorded is not None:
            self._recorded[0].add(self._recorded[1], self._moment.actions, played)
        return self._kept(played)

    def _kept(self, played: Played) -> Played:
        if played.snapshot is not None:
            self._moment = replace(self._moment, snapshot=played.snapshot)
        return played


def _then(
    first: Future[Played], told: Future[Played], following: Callable[[Played], Played | Future[Played]]
) -> None:
    """Tells what follows from the first, or what went wrong."""

    def tell(done: Future[Played]) -> None:
        try:
            result = following(done.result())
        except BaseException as error:  # handed on to whoever waits
            told.set_exception(error)
            return
        if isinstance(result, Future):
            _then(result, told, lambda played: played)
        else:
            told.set_result(result)

    first.add_done_callback(tell)


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
        self._known: dict[int, tuple[int, Playing]] = {}
        self._sessions = itertools.count()
        self._held = [0] * self._workers

    def begin(
        self,
        environment: Environment,
        problem: Problem,
        seed: int,
        actions: Sequence[str] = (),
        snapshot: tuple[int, bytes] | None = None,
        recorded: tuple[TurnJournal, int] | None = None,
    ) -> Play:
        """An answer begins, or goes on behind the `actions` that had been taken in it; see `Play`.

        Raises what kept workers from starting, once that is known.
        """
        number, playing = self._number(environment)
        moment = Moment(next(self._sessions), problem, seed, tuple(actions), snapshot)
        if environment.isolation == "inline":
            return Play(lambda moment, turns: _done(playing.answer(moment)), moment, recorded)
        worker: int | None = None
        if environment.isolation == "process":
            worker = min(range(self._workers), key=lambda place: self._held[place])
            self._held[worker] += 1

        def ask(moment: Moment, turns: int) -> Future[Played]:
            if moment.is_over and worker is not None:
                self._held[worker] -= 1
            return self._pool.submit(
                number,
                moment,
                deadline=environment.deadline * turns,
                about=problem.id,
                worker=worker,
                pieces=turns,
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

    def _number(self, environment: Environment) -> tuple[int, Playing]:
        """What an environment is known by, from when it is first met. It is kept, so that no other one can
        have its place in memory."""
        if id(environment) not in self._known:
            number, playing = -1, Playing(environment)
            threads = environment.concurrency if environment.isolation == "service" else None
            if environment.isolation != "process":
                playing.prepare()
            if environment.isolation != "inline":
                number = self._pool.register(playing, type(environment).__name__, threads=threads)
            self._known[id(environment)] = number, playing
        return self._known[id(environment)]


def _done(played: Played) -> Future[Played]:
    future: Future[Played] = Future()
    future.set_result(played)
    return future
