"""The states of environments: each answer has one, in this process or in a separate process.

`ForkedProcesses` starts this module as ``python -m treetune.domains.environments.worlds``. Such a process
loads an environment once and then forks itself for each answer. A fork takes milliseconds and shares what was
loaded::

    this process                           the environment's process (`main`)
    ────────────                           ──────────────────────────────────
    ForkedProcesses
      .fork ──("fork", 0), a descriptor ───► forks ──► the process of an answer
            ◄── the child's number ─────────              │
      .end ──("kill" or "dies", number) ───► ends the child
            ◄── its exit code ──────────────              │
    ForkedWorld
      .call ──(method, arguments) ──────────────────────► World.call
            ◄────────── Played ───────────────────────────┘

`ForkedProcesses` sends one order at a time, under its lock, and waits `START_SECONDS` for each reply. A call
waits for its own deadline. If a process is killed, the wait for its reply ends with EOFError.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal

from typing_extensions import override

from treetune.domains.environments.base import LONGEST_OBSERVATION, Environment, Turn
from treetune.exceptions import Unavailable, WorkerStartError
from treetune.processes.pool import (
    ENDING_SECONDS,
    START_SECONDS,
    call_clock,
    describe_exit,
    pickle_servant,
    start_worker,
)
from treetune.processes.worker import (
    Servant,
    become_worker,
    die_with_parent,
    load_servant,
    pack_message,
    read_message,
)
from treetune.vocabulary import GradeOutcome, Problem

log = logging.getLogger(__name__)

Snapshot = tuple[int, bytes]
"""The number of actions that have been played, and the pickled state after them."""

Order = Literal["fork", "kill", "dies"]
"""An order to the process that has loaded the environment. ``fork`` forks a process for an answer. ``kill``
ends an answer's process at once. ``dies`` is for a process that has closed its connection: it first gets
`_TIME_TO_END_S` to end by itself, so that its exit code tells the reason, and is then ended."""
_TIME_TO_END_S = 1.0
"""Seconds that a process which has closed its connection has to end by itself."""


@dataclass(frozen=True)
class Played:
    """The result of a call: the turns that it played, and the state after them.

    Example: ``Played((Turn(observation="lower"),), seconds=0.2)``.
    """

    turns: tuple[Turn, ...] = ()
    snapshot: Snapshot | None = None
    """The state after the turns, for an environment that is copied; None for any other, and after the last
    turn."""
    seconds: float = 0.0
    waited_s: float = 0.0
    """Seconds that the call waited for a free place at a server; no deadline includes them."""


def failed_result(outcome: GradeOutcome, message: str, seconds: float = 0.0) -> Played:
    """Returns the result of a call after which the environment can't be used any more."""
    return Played((Turn(done=True, outcome=outcome, message=message),), seconds=seconds)


@dataclass(eq=False)
class World:
    """The environment of one answer and its state.

    Its methods don't raise: an exception of the environment becomes the outcome of a last turn.
    """

    environment: Environment
    _state: Any = None
    _played_actions: int = 0
    """The number of actions that led to the state."""

    def begin(
        self, problem: Problem, seed: int, actions: Sequence[str] = (), snapshot: Snapshot | None = None
    ) -> Played:
        """Reaches the state after `actions`, from the snapshot or, without one, from the beginning.

        Returns the turns of the actions that it had to play again: those after the snapshot, or all.
        """
        try:
            if snapshot is not None:
                self._take_over(snapshot)
            # Without a snapshot, the actions must be played again. They lead to the same state only in an
            # environment whose `again` is "replay".
            elif actions and self.environment.again != "replay":
                raise Unavailable("the process that held the environment's state has ended")
            else:
                self._state = self.environment.reset(problem, seed)
            reached = self._snapshot()
        except Unavailable as error:
            return failed_result("unavailable", str(error))
        except Exception as error:  # no action has been played yet, so the policy can't be the cause
            return failed_result("unavailable", f"the environment did not begin: {_describe_error(error)}")
        turns: list[Turn] = []
        for action in actions[self._played_actions :]:  # those that aren't in the snapshot
            played = self.step(action)
            turns += played.turns
            if turns[-1].done:  # the environment has failed, or ends the answer earlier than before
                return Played(tuple(turns))
            reached = played.snapshot
        return Played(tuple(turns), reached)

    def _take_over(self, snapshot: Snapshot) -> None:
        """Continues from a snapshot's state. Raises Unavailable if the state can't be read."""
        action_count, pickled_state = snapshot
        try:
            self._state = pickle.loads(pickled_state)
        except Exception as error:  # a journal of an earlier version names classes that are gone
            raise Unavailable(f"the environment's state can't be read: {_describe_error(error)}") from error
        self._played_actions = action_count

    def call(self, deadline: float, method: str, *arguments: Any) -> Played:
        """Calls a method by its name. `deadline` is not used: it is only there so that `ForkedWorld` has the
        same signature, since nothing can end a call in this process."""
        played: Played = getattr(self, method)(*arguments)
        return played

    def step(self, action: str) -> Played:
        """Returns the turn that follows from an action."""
        self._played_actions += 1
        try:
            turn = self.environment.step(self._state, action)
            if not math.isfinite(turn.reward):
                raise ValueError(f"a reward of {turn.reward}")
            snapshot = None if turn.done else self._snapshot()
        except Unavailable as error:
            return failed_result("unavailable", str(error))
        except (Exception, SystemExit) as error:  # code of a user may call sys.exit
            return failed_result("error", _describe_error(error))
        turn = replace(turn, observation=turn.observation[:LONGEST_OBSERVATION])
        return Played((turn,), snapshot)

    def _snapshot(self) -> Snapshot | None:
        """Returns the number of actions so far and the state, for environments that are continued from
        copies; None for others."""
        if self.environment.again != "copy":
            return None
        return self._played_actions, pickle.dumps(self._state)


def _describe_error(error: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {error}"[:1000] if str(error) else name


@dataclass(frozen=True)
class Loaded(Servant):
    """An environment as a `Servant`, which pools of processes and threads can load."""

    environment: Environment

    @override
    def prepare(self) -> None:
        self.environment.prepare()

    @override
    def answer(self, world: World, method: str, *arguments: Any) -> Played:
        played = world.call(math.inf, method, *arguments)
        return replace(played, waited_s=call_clock().paused_s)


class ForkedProcesses:
    """Forks a process for each answer from a process that has loaded the environment. Thread-safe.

    The first answer starts the loading process. The thread that starts it has to last as long as the run,
    because the kernel ends the loading process with that thread, and the forked processes with the loading
    process. The loading process must not have threads when it forks. So an environment may start threads in
    `reset`, but not in `prepare`.
    """

    def __init__(self, environment: Environment, memory_gib: float | None) -> None:
        self._pickled = pickle_servant(Loaded(environment), type(environment).__name__)
        self._memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
        self._lock = threading.Lock()
        """Held while an order is sent and answered: only one thread at a time may use the connection."""
        self._process: subprocess.Popen[bytes] | None = None
        """The process that loads the environment once, and forks a process for each answer."""
        self._orders: Connection | None = None
        """The connection over which this process is told to fork or to end another process."""
        self._closed = False

    def fork(self) -> ForkedWorld:
        """Forks a process for an answer. Raises WorkerStartError if the environment can't be loaded.

        If the loading process fails to load the environment, dies or hangs, this starts another one, once:
        the failure may have a passing cause, such as an operating system that is short of memory.
        """
        with self._lock:
            for is_last in (False, True):
                try:
                    return self._fork_once()
                except (EOFError, OSError) as error:
                    self._stop()
                    if is_last:
                        raise WorkerStartError(f"no environment could be started: {error}") from error
                    log.warning("an environment could not be started: %s; it is tried once more", error)
        raise AssertionError("the second attempt returns or raises")

    def _fork_once(self) -> ForkedWorld:
        """Forks a process for an answer. Raises EOFError or OSError if the loading process dies or hangs."""
        orders = self._orders or self._start()
        ours, theirs = Pipe()
        with theirs:
            try:
                orders.send(("fork", 0))  # other orders have a process's number in place of the 0
                reduction.send_handle(orders, theirs.fileno(), None)  # None: only Windows needs a pid
                return ForkedWorld(self, ours, orders.recv())
            except (EOFError, OSError) as error:
                ours.close()
                raise EOFError("its process ends, or hangs, when it forks") from error

    def end(self, pid: int, order: Order) -> str:
        """Ends an answer's process and all that it started. Returns how it ended."""
        with self._lock:
            if self._orders is not None:
                try:
                    self._orders.send((order, pid))
                    return describe_exit(self._orders.recv())
                except (EOFError, OSError):
                    # The loading process was killed. The processes of all answers died with it.
                    self._stop()
        return "was killed"

    def close(self) -> None:
        """Ends all processes. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._stop()

    def _start(self) -> Connection:
        """Starts the process that loads the environment, and returns the connection for orders to it.

        Raises:
            WorkerStartError: This object is closed.
            EOFError: The process can't load the environment, has died, or takes longer than `START_SECONDS`.
        """
        if self._closed:
            raise WorkerStartError("the environment was closed while it was played")
        self._stop()  # an earlier one may have failed to start
        ours, theirs = Pipe()
        _limit_waits(ours, START_SECONDS)  # each wait below raises BlockingIOError after so many seconds
        with theirs:
            # The connection goes both ways: it becomes the standard input and output of the process.
            self._process, setup = start_worker(
                "treetune.domains.environments.worlds", self._memory_bytes, theirs.fileno(), theirs.fileno()
            )
        try:
            # The process reads its setup and the environment as framed bytes, before the connection carries
            # objects.
            with open(os.dup(ours.fileno()), "wb") as requests:
                requests.write(pack_message(setup) + pack_message(self._pickled))
            kind, message = ours.recv()
        except BlockingIOError as error:
            raise EOFError(f"it was not loaded within {START_SECONDS:g} s") from error
        except (EOFError, OSError) as error:
            raise EOFError(f"its process {self._describe_end()}") from error
        if kind == "failed":
            raise EOFError(f"its process cannot load it: {message}")
        self._orders = ours
        return ours

    def _stop(self) -> None:
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel can't end it, as on a hung disk
                self._process.wait(ENDING_SECONDS)
            self._process = None

    def _describe_end(self) -> str:
        """Says how the loading process, which has closed its connection, came to its end."""
        assert self._process is not None
        try:
            return describe_exit(self._process.wait(ENDING_SECONDS))
        except subprocess.TimeoutExpired:
            return "closed its connection"


class ForkedWorld:
    """A `World` in a separate process, which ends when this object is closed or no longer exists."""

    def __init__(self, forks: ForkedProcesses, connection: Connection, pid: int) -> None:
        self._forks, self._connection, self._pid = forks, connection, pid

    def call(self, deadline: float, method: str, *arguments: Any) -> Played:
        """Calls a method of the process's world. After an exception the process has ended.

        Raises:
            TimeoutError: There was no result within `deadline` seconds.
            EOFError: The process has ended; the message says how.
        """
        try:
            # Each wait raises BlockingIOError after so many seconds.
            _limit_waits(self._connection, deadline)
            self._connection.send((method, *arguments))
            played: Played = self._connection.recv()
            return played
        except BlockingIOError as error:
            self.close()
            raise TimeoutError from error
        except (EOFError, OSError) as error:
            # With the order "dies", the process gets some time to end by itself, so that the message, which
            # `close` returns, can say how it ended.
            raise EOFError(self.close("dies")) from error

    def close(self, order: Order = "kill") -> str:
        """Ends the process and returns how it ended. Safe to call twice.

        With the order "kill" the process is ended at once. With "dies" the process first gets some time to
        end by itself, so that its exit code tells the reason.
        """
        if self._connection.closed:
            return "was ended"
        self._connection.close()
        return self._forks.end(self._pid, order)


def _limit_waits(connection: Connection, seconds: float) -> None:
    """Makes each wait for a connection raise BlockingIOError after `seconds`, also a wait in the middle of a
    message."""
    # Whole seconds and microseconds (the kernel's struct timeval). 0 would mean no limit, and an infinite
    # time can't be written, so it becomes 1e9 seconds.
    microseconds = max(1, int(min(seconds, 1e9) * 1e6))
    limit = struct.pack("ll", *divmod(microseconds, 10**6))
    # The socket closes its descriptor at the end of the block, so it gets a copy of the connection's.
    with socket.socket(fileno=os.dup(connection.fileno())) as connection_socket:
        connection_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


# The child's side


def main() -> None:
    """Loads the environment, and forks a process for each answer that is to be played.

    Orders come one at a time. ``("fork", 0)`` comes with a descriptor, and is answered by the child's number.
    (The 0 stands where other orders have the number of a child.) ``("kill", pid)`` and ``("dies", pid)`` are
    answered by the exit code of that child. A child serves calls of its `World` on the descriptor until that
    is closed.
    """
    requests, _ = become_worker()
    orders = Connection(os.dup(requests.fileno()))
    pickled_servant = read_message(requests)
    # If the environment can't be loaded, `load_servant` sends ("failed", reason), and exits.
    servant = load_servant(pickled_servant, lambda *message: orders.send(message))
    environment = servant.environment
    orders.send(("loaded", None))
    while True:
        try:
            order, pid = orders.recv()
        except EOFError:
            return
        if order != "fork":
            # "kill" ends the process at once. "dies" is for a process that is ending: the process gets some
            # time to end by itself, so that its exit code tells the reason.
            patience = _TIME_TO_END_S if order == "dies" else 0.0
            try:
                exit_code = _end_process(pid, patience)
            except ChildProcessError:
                # It is the child of an earlier loading process. The kernel has killed it with its parent.
                exit_code = -signal.SIGKILL
            orders.send(exit_code)
            continue
        descriptor = reduction.recv_handle(orders)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(descriptor)
            orders.send(pid)
            continue
        # The process of an answer begins here, and must never return into the loop above.
        try:
            os.setsid()  # so that `_end_process` also ends the processes that it starts
            die_with_parent(parent)
            orders.close()
            requests.close()
            world = World(environment)
            connection = Connection(descriptor)
            no_deadline = math.inf  # `ForkedWorld.call`, in the parent, waits until the deadline
            while True:
                method, *arguments = connection.recv()
                connection.send(world.call(no_deadline, method, *arguments))
        except EOFError:
            pass  # the parent has closed the connection: the answer has ended
        except Exception:
            traceback.print_exc()
            os._exit(1)
        finally:
            os._exit(0)


def _end_process(pid: int, patience: float) -> int:
    """Waits at most `patience` seconds for a process to end, then kills it with all that it started.

    Returns its exit code. Raises ChildProcessError for a process that isn't a child of this one.
    """
    deadline = time.monotonic() + patience
    # WNOWAIT leaves the ended child unreaped, so that no other process can get its number meanwhile.
    wait_options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while os.waitid(os.P_PID, pid, wait_options) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    # Kills the process's group, with all processes that it started. Then kills the process itself, in case it
    # has not made its group yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    from treetune.domains.environments import worlds

    worlds.main()  # of the imported module, whose classes have the names under which they were pickled
