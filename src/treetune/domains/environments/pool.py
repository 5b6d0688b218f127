"""Runs the environments of many answers at the same time, each where its `isolation` says.

Answers don't wait for each other, so a slow turn delays only its own answer. Each turn is written to a
journal (`TurnJournal`), so a run that was killed and continues doesn't play it again::

    MultiTurn                     Play (of an answer)             Site (of an environment)
    ─────────                     ───────────────────             ────────────────────────
    play.act(action) ───────────► a thread of the site:
                                    turn is in the journal?
      await the future              otherwise Site.call ────────► inline: World, in this process
                                                                  process: ForkedWorld, the answer's process
                                                                  service: World, in the threads of a Pool
             ◄─────────────────── Played (writes the journal) ◄── Turn, or "timeout" at the deadline
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
    failed_result,
)
from treetune.processes.pool import Pool
from treetune.store.journal import Journal
from treetune.store.timeline import Timeline
from treetune.vocabulary import Problem

TURNS_SUFFIX = ".turns"
"""The suffix of the file with a journal of turns. The rest of its name is that of the journal of requests."""

LONGEST_PAUSE_S = 1.0
"""The number of seconds without a turn after which the timeline shows a pause."""


class TurnJournal:
    """A journal of turns. The key of a turn is a hash of its answer's number and of the actions up to the
    turn.

    An answer that is sampled again gets the same turns from the journal, and its environment doesn't play
    them. This also holds for turns that the environment might not repeat: a turn that hung stays a
    ``timeout``. Only a turn that was ``unavailable`` is played again. `others` are further journals from
    which turns are read. Safe to use from several threads.
    """

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        self._journal = Journal(path, others)

    @staticmethod
    def for_requests(requests: Path, other_requests: Sequence[Path] = ()) -> TurnJournal:
        """Opens the journal of turns next to the file `requests`, which is a journal of requests. Turns are
        also read from the journals of turns next to the files `other_requests`."""
        return TurnJournal(
            requests.with_suffix(TURNS_SUFFIX), [path.with_suffix(TURNS_SUFFIX) for path in other_requests]
        )

    def find(self, answer_number: int, actions: Sequence[str]) -> Played | None:
        """Returns the turn that followed the last action of an answer. Returns None if the journal doesn't
        have this turn."""
        row = self._journal.get(_key_of_turn(answer_number, actions))
        if row is None:
            return None
        _key, turn, encoded_snapshot = row
        snapshot: Snapshot | None = None
        if encoded_snapshot is not None:
            action_count, state = encoded_snapshot  # the number of played actions, and the pickled state
            snapshot = action_count, base64.b64decode(state)
        return Played((Turn(*turn),), snapshot)

    def add(self, answer_number: int, actions: Sequence[str], played: Played) -> None:
        """Writes the turn that followed the last action of an answer, unless the environment was
        unavailable."""
        (turn,) = played.turns
        if turn.outcome == "unavailable":  # the turn is to be played again
            return
        encoded_snapshot: list[Any] | None = None
        if played.snapshot is not None:
            action_count, state = played.snapshot
            encoded_snapshot = [action_count, base64.b64encode(state).decode("ascii")]
        key = _key_of_turn(answer_number, actions)
        self._journal.add([key, dataclasses.astuple(turn), encoded_snapshot])

    def close(self) -> None:
        self._journal.close()


def _key_of_turn(answer_number: int, actions: Sequence[str]) -> str:
    text = json.dumps([answer_number, *actions])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class Site:
    """Runs one environment for its answers, with at most `concurrency` turns at a time."""

    def __init__(
        self, environment: Environment, services: Pool, memory_gib: float | None, timeline: Timeline
    ) -> None:
        self._environment = environment
        self._services = services
        self._timeline = timeline
        self._name = type(environment).__name__
        self._forks: ForkedProcesses | None = None
        """Forks the processes of an environment that runs in processes."""
        self._service_number: int | None = None
        """The number of a ``service`` environment in the pool of services."""
        if environment.isolation == "process":
            self._forks = ForkedProcesses(environment, memory_gib)
        else:
            environment.prepare()  # in this process, where both ``inline`` and ``service`` run
        if environment.isolation == "service":
            self._service_number = services.register(
                Loaded(environment), self._name, threads=environment.concurrency
            )
        self._threads = ThreadPoolExecutor(environment.concurrency, "environments")
        # The following attributes are for the timeline. They are read and changed under this lock.
        self._lock = threading.Lock()
        self._playing = 0
        """The number of turns that are being played now."""
        self._turns = 0
        """The number of turns since the last pause."""
        self._active_since = self._active_until = 0.0
        """The times at which the first of these turns began and the last of them ended."""

    def submit(self, play: Callable[..., Played], *arguments: Any) -> Future[Played]:
        """Calls a function that plays turns, in a thread.

        For an ``inline`` environment, the function is called in the caller's thread. The future is then done
        already.
        """
        if self._environment.isolation != "inline":
            return self._threads.submit(self._call_and_measure, play, *arguments)
        future: Future[Played] = Future()
        future.set_result(play(*arguments))
        return future

    def new_world(self) -> World | ForkedWorld:
        return World(self._environment) if self._forks is None else self._forks.fork()

    def call(
        self, world: World | ForkedWorld, turns: int, most_seconds: float, method: str, *arguments: Any
    ) -> Played:
        """Calls a method of `World` and returns its result, or a ``timeout``.

        Args:
            world: The environment of the answer and its state.
            turns: The number of turns that the call plays. The call's deadline is so many times the
                environment's.
            most_seconds: An upper bound of the call's deadline.
            method: The method's name.
            arguments: The method's arguments.

        Raises:
            EOFError: The world's process has ended.
        """
        deadline = min(most_seconds, self._environment.deadline * turns)
        if self._service_number is not None:
            future = self._services.submit(
                self._service_number, world, method, *arguments, deadline_s=deadline, about=self._name
            )
            played: Played = future.result()
            return played
        try:
            return world.call(deadline, method, *arguments)
        except TimeoutError:
            # The message names the deadline of one turn.
            return failed_result("timeout", f"no result within {deadline / turns:g} s")

    def close(self) -> None:
        if self._forks is not None:
            self._forks.close()
        self._threads.shutdown(cancel_futures=True)
        self._record_span()

    def _call_and_measure(self, play: Callable[..., Played], *arguments: Any) -> Played:
        """Calls a function that plays turns, and notes its time for the timeline."""
        with self._lock:
            # After a pause of more than LONGEST_PAUSE_S, the timeline gets a new span. Shorter pauses are not
            # shown.
            if not self._playing and time.time() - self._active_until > LONGEST_PAUSE_S:
                self._record_span()
                self._active_since = time.time()
            self._playing += 1
            self._turns += 1
        try:
            return play(*arguments)
        finally:
            with self._lock:
                self._playing -= 1
                self._active_until = time.time()

    def _record_span(self) -> None:
        """Adds the span of time from the last pause to the end of the last turn to the timeline, if there was
        a turn."""
        if self._turns:
            self._timeline.record_past(
                "environments", self._name, self._active_since, self._active_until, turns=self._turns
            )
        self._turns = 0


@dataclass(eq=False)
class Play:
    """The environment of one answer, which plays one action after the other.

    Call `begin` first if the answer has turns already. Then call `act` for each action, once the previous
    turn is there, and `end` after the last action.
    """

    site: Site
    problem: Problem
    seed: int
    actions: tuple[str, ...]
    """The actions of the turns so far."""
    snapshot: Snapshot | None
    """The state after these turns, for an environment that is copied; None for any other."""
    journal: tuple[TurnJournal, int] | None
    """The journal of turns, and the answer's number in it; None if there is no journal."""
    seconds: float
    """The time that the answer has left for its turns."""
    _world: World | ForkedWorld | None = None
    _lost_turn: Turn | None = None
    """The turn with which all calls are answered after the environment could not begin; None if it has not
    failed so."""

    def begin(self) -> Future[Played]:
        """Brings the environment to the state after the turns so far. Returns the turns that had to be played
        again, because no snapshot has them."""
        no_action = None  # `_play` then only makes the environment's world
        return self.site.submit(self._play, no_action)

    def act(self, action: str) -> Future[Played]:
        """Plays an action. Returns its turn, and the seconds from this call to the turn."""
        return self.site.submit(self._act, action, time.perf_counter())

    def end(self) -> None:
        """Ends the process of the answer, if it has one. Safe to call twice."""
        if isinstance(self._world, ForkedWorld):
            self._world.close()
        self._world = None

    def _act(self, action: str, start: float) -> Played:
        """Takes the turn after an action from the journal, or plays the action if the journal lacks it.

        `start` is the moment at which `act` was called.
        """
        actions = (*self.actions, action)
        played: Played | None = None
        if self.journal is not None:
            journal, answer_number = self.journal
            played = journal.find(answer_number, actions)
        if played is not None:
            # The world hasn't played this turn, so its state is too old. If the journal lacks a later turn, a
            # new world begins with all actions.
            self.end()
        else:
            played = self._play(action)
            if self.journal is not None:
                journal.add(answer_number, actions, played)
        self.actions = actions
        self.snapshot = played.snapshot or self.snapshot
        return replace(played, seconds=time.perf_counter() - start)

    def _play(self, action: str | None) -> Played:
        """Plays an action, in a new world if there is none. If `action` is None, only makes the world.

        If the world's process ends, a second process tries once more, since the operating system may have
        ended the first one, and not the environment.
        """
        if self._lost_turn is not None:  # the environment could not begin before, and isn't tried again
            return Played((self._lost_turn,))
        for _ in range(2):
            # Whether the world has reached the state before the action.
            has_begun = self._world is not None
            try:
                if self._world is None:
                    self._world = self.site.new_world()
                    played = self._begin_world(self._world)
                    if action is None or _has_failed(played):
                        break
                    has_begun = True
                assert action is not None, "a world that has begun plays actions"
                return self._step(self._world, action)
            except EOFError as error:
                self._world = None
                played = failed_result("error", f"the worker process {error}")
        # Here the action has no turn: it is None, the world could not begin, or two processes have ended.
        if not has_begun and _has_failed(played):
            # The policy's last action hasn't been played yet, so it can't be the cause.
            self._lost_turn = replace(played.turns[-1], outcome="unavailable")
            return Played((self._lost_turn,))
        return played

    def _begin_world(self, world: World | ForkedWorld) -> Played:
        """Brings a new world to the state after the turns so far. Returns the turns that it had to play."""
        # A new answer plays no turn here, but the environment's `reset` has the time of one turn. The bound
        # is `math.inf`, because the answer's time (`self.seconds`) is only for the turns that follow.
        turns = max(1, len(self.actions))
        return self.site.call(
            world, turns, math.inf, "begin", self.problem, self.seed, self.actions, self.snapshot
        )

    def _step(self, world: World | ForkedWorld, action: str) -> Played:
        """Returns the turn after an action, or a ``timeout`` if this turn uses up the answer's time."""
        start = time.perf_counter()
        one_turn = 1
        played = self.site.call(world, one_turn, self.seconds, "step", action)
        # The time that the call waited for a busy server (`waited`) doesn't count.
        self.seconds -= time.perf_counter() - start - played.waited_s
        if self.seconds <= 0:
            return failed_result("timeout", "the time for the answer's turns ran out")
        return played


def _has_failed(played: Played) -> bool:
    return bool(played.turns) and played.turns[-1].outcome != "ok"


class EnvironmentPool(AbstractContextManager["EnvironmentPool"]):
    """Plays environments for many answers, independently of each other.

    If an environment runs in processes, each answer has its own process from its first turn to its last. A
    turn in which the environment hangs has the outcome ``timeout``. A turn in which it crashes, or needs more
    than `memory_gib`, has the outcome ``error``. Other answers aren't affected.

    All processes end when the pool is closed, and when this process ends for whatever reason. Close the pool,
    or use it in a `with` statement. The `timeline` shows when turns were played.
    """

    def __init__(self, *, memory_gib: float | None = 4.0, timeline: Timeline | None = None) -> None:
        self._memory_gib = memory_gib
        self._timeline = timeline or Timeline()
        # Only ``service`` environments are in this pool. They run in threads, so its one worker never starts.
        self._services = Pool(
            "the environment pool", workers=1, memory_gib=memory_gib, make_lost_result=failed_result
        )
        self._sites: dict[int, tuple[Site, Environment]] = {}
        """The site of each environment, by the environment's `id`. The environment is kept with it, so that
        no other object can get the same `id`."""

    def begin(
        self,
        environment: Environment,
        problem: Problem,
        seed: int,
        actions: Sequence[str] = (),
        snapshot: Snapshot | None = None,
        journal: tuple[TurnJournal, int] | None = None,
        seconds: float = math.inf,
    ) -> Play:
        """Returns the object that plays the turns of an answer.

        Args:
            environment: The environment that replies.
            problem: The answer's problem.
            seed: The seed of the environment's random events.
            actions: The actions of the turns so far, if an answer is continued.
            snapshot: The environment's state after these actions, for an environment whose state is copied.
            journal: A journal of turns, and the answer's number in it.
            seconds: The time for all further turns of the answer together.
        """
        if id(environment) not in self._sites:
            site = Site(environment, self._services, self._memory_gib, self._timeline)
            # The environment is kept, too, so that no other object can get its `id`.
            self._sites[id(environment)] = site, environment
        site, _ = self._sites[id(environment)]
        return Play(site, problem, seed, tuple(actions), snapshot, journal, seconds)

    def close(self) -> None:
        """Ends all processes, and cancels turns that haven't been played. Safe to call twice."""
        self._services.close()
        for site, _ in self._sites.values():
            site.close()

    @override
    def __exit__(self, *error: object) -> None:
        self.close()
