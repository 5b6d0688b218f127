"""Environments at work for many answers at once, each where it wants to run and within its deadline.

An answer is played from the run's own process (`Play`), beside all others: a slow turn costs its own answer
alone. Turns are written down as they come (`TurnJournal`): they outlive a crash and are not asked for again.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.domains.environments.base import Environment, Turn
from treetune.domains.environments.worlds import (
    ForkedProcesses,
    ForkedWorld,
    Loaded,
    Played,
    Snapshot,
    World,
    failure,
)
from treetune.processes.pool import Pool
from treetune.store.journal import Journal
from treetune.store.timeline import Timeline
from treetune.vocabulary import Problem

SUFFIX = ".turns"
"""The ending of the file beside a journal of requests."""

PAUSE_S = 1.0
"""Seconds without a turn that the timeline shows as a pause."""


class TurnJournal:
    """A journal of turns, by the answer that they belong to and the actions before them.

    An answer that is sampled again comes to the same turns without its environment, also where that isn't
    asked the same twice: a turn that hung stays a ``timeout``. One that was ``unavailable`` is asked for
    again. `others` are journals to read turns from, and not to write to. Safe to use from several threads.
    """

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        self._journal = Journal(path, others)

    @staticmethod
    def beside(requests: Path, others: Sequence[Path] = ()) -> TurnJournal:
        """Opens the journal of turns that lies beside a journal of requests, and those beside the others."""
        return TurnJournal(requests.with_suffix(SUFFIX), [other.with_suffix(SUFFIX) for other in others])

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


class Site:
    """The place where an environment's answers are played, at most `concurrency` turns at a time."""

    def __init__(
        self, environment: Environment, services: Pool, memory_gib: float | None, timeline: Timeline
    ) -> None:
        self._environment, self._services, self._timeline = environment, services, timeline
        self._name, where = type(environment).__name__, environment.isolation
        self._forks = ForkedProcesses(environment, memory_gib) if where == "process" else None
        if where != "process":
            environment.prepare()
        self._number = -1
        if where == "service":
            self._number = services.register(Loaded(environment), self._name, threads=environment.concurrency)
        self._threads = ThreadPoolExecutor(environment.concurrency, "environments")
        self._lock = threading.Lock()
        self._playing = self._turns = 0
        self._since = self._until = 0.0

    def do(self, play: Callable[..., Played], *arguments: Any) -> Future[Played]:
        """Returns the future result of what plays an answer; it is done already for one that is played in
        this process."""
        if self._environment.isolation != "inline":
            return self._threads.submit(self._timed, play, *arguments)
        future: Future[Played] = Future()
        future.set_result(play(*arguments))
        return future

    def world(self) -> World | ForkedWorld:
        return World(self._environment) if self._forks is None else self._forks.fork()

    def call(
        self, world: World | ForkedWorld, turns: int, most: float, method: str, *arguments: Any
    ) -> Played:
        """Returns the result of a call that has time for so many turns, and `most` seconds. Raises EOFError
        where the process of the world ends."""
        deadline = min(most, self._environment.deadline * turns)
        if self._number >= 0:
            asked = self._services.submit(
                self._number, world, method, *arguments, deadline=deadline, about=self._name
            )
            played: Played = asked.result()
            return played
        try:
            return world.call(deadline, method, *arguments)
        except TimeoutError:
            return failure("timeout", f"no result within {deadline / turns:g} s")

    def close(self) -> None:
        if self._forks is not None:
            self._forks.close()
        self._threads.shutdown(cancel_futures=True)
        self._draw()

    def _timed(self, play: Callable[..., Played], *arguments: Any) -> Played:
        with self._lock:
            if not self._playing and time.time() - self._until > PAUSE_S:
                self._draw()
                self._since = time.time()
            self._playing += 1
            self._turns += 1
        try:
            return play(*arguments)
        finally:
            with self._lock:
                self._playing -= 1
                self._until = time.time()

    def _draw(self) -> None:
        """Puts the time since the last pause on the timeline."""
        if self._turns:
            self._timeline.past("environments", self._name, self._since, self._until, turns=self._turns)
        self._turns = 0


@dataclass(eq=False)
class Play:
    """The environment of one answer, played one action after the other: `begin` where turns have been taken
    already, then `act`, each once the one before is done; `end` when no more actions follow."""

    site: Site
    problem: Problem
    seed: int
    actions: tuple[str, ...]
    snapshot: Snapshot | None
    recorded: tuple[TurnJournal, int] | None
    """A journal that may know turns, and the answer's name there."""
    seconds: float
    """What is left of the answer's time for its turns."""
    _world: World | ForkedWorld | None = None
    _lost: Turn | None = None

    def begin(self) -> Future[Played]:
        """Returns the turns that have been taken already, played again."""
        return self.site.do(self._play, None)

    def act(self, action: str) -> Future[Played]:
        """Returns the one turn that follows from an action, and the seconds from here to there."""
        return self.site.do(self._act, action, time.perf_counter())

    def end(self) -> None:
        if isinstance(self._world, ForkedWorld):
            self._world.close()
        self._world = None

    def _act(self, action: str, since: float) -> Played:
        played, actions = None, (*self.actions, action)
        if self.recorded is not None:
            journal, answer = self.recorded
            played = journal.known(answer, actions)
        if played is not None:
            self.end()  # a state that has come to the turns before knows nothing of this one
        else:
            played = self._play(action)
            if self.recorded is not None:
                journal.add(answer, actions, played)
        self.actions, self.snapshot = actions, played.snapshot or self.snapshot
        return replace(played, seconds=time.perf_counter() - since)

    def _play(self, action: str | None) -> Played:
        """Plays an action, or None, up to where the answer is. Where its process ends, which once may be the
        machine's doing, another one begins anew."""
        begins, played = True, Played()
        for _ in range(2 if self._lost is None else 0):
            try:
                begins = self._world is None
                if self._world is None:
                    self._world = self.site.world()
                    turns, start = max(1, len(self.actions)), (self.problem, self.seed)
                    played = self.site.call(
                        self._world, turns, math.inf, "begin", *start, self.actions, self.snapshot
                    )
                    if action is None or (played.turns and played.turns[-1].outcome != "ok"):
                        break
                    begins = False
                begun = time.perf_counter()
                played = self.site.call(self._world, 1, self.seconds, "step", action)
                self.seconds -= time.perf_counter() - begun - played.waited
                if self.seconds <= 0:
                    played = failure("timeout", "the time for the answer's turns ran out")
                break
            except EOFError as error:
                self._world = None
                played = failure("error", f"the worker process {error}")
        if begins and played.turns and played.turns[-1].outcome != "ok":
            # Nobody has written anything yet: it isn't the answer's doing.
            self._lost = replace(played.turns[-1], outcome="unavailable")
        return played if self._lost is None else Played((self._lost,))


class EnvironmentPool(AbstractContextManager["EnvironmentPool"]):
    """Plays environments for answers that go on independently of each other.

    Where an environment runs in processes, each answer has its own from its first turn to its last. A turn in
    which it hangs has the outcome ``timeout``, one in which it crashes or runs out of `memory_gib` ``error``,
    and no other answer notices.

    Processes end with the pool or with this process, however it ends. Close it, or use it in a `with`
    statement. The `timeline` shows when environments were at work.
    """

    def __init__(self, *, memory_gib: float | None = 4.0, timeline: Timeline | None = None) -> None:
        self._memory_gib, self._timeline = memory_gib, timeline or Timeline()
        self._services = Pool("the environment pool", 1, memory_gib, failure)
        self._sites: dict[int, tuple[Site, Environment]] = {}

    def begin(
        self,
        environment: Environment,
        problem: Problem,
        seed: int,
        actions: Sequence[str] = (),
        snapshot: Snapshot | None = None,
        recorded: tuple[TurnJournal, int] | None = None,
        seconds: float = math.inf,
    ) -> Play:
        """Returns the play of a new answer, or of one that goes on behind the `actions` that had been taken
        in it, whose turns to come have so many seconds together."""
        if id(environment) not in self._sites:  # which is kept: no other one can have its place in memory
            site = Site(environment, self._services, self._memory_gib, self._timeline)
            self._sites[id(environment)] = site, environment
        site = self._sites[id(environment)][0]
        return Play(site, problem, seed, tuple(actions), snapshot, recorded, seconds)

    def close(self) -> None:
        """Ends the processes; turns that are still missing are cancelled. Safe to call twice."""
        self._services.close()
        for site, _ in self._sites.values():
            site.close()

    @override
    def __exit__(self, *error: object) -> None:
        self.close()
