"""Programs that await an engine: each answer is a coroutine, and one thread runs all of them.

A rollout awaits its samples and its grades, and reads from top to bottom. `ProgramLoop` is the event loop
that runs such programs above `Engine.generate`, which samples until nothing is asked for any more::

    ProgramLoop.run(program), in the thread that called it
       │
       │  1. run every task until it waits; each waits for one of these:
       │        await engine.sample(request)    the engine, which calls `_answered` with the samples
       │        await result_of(future)         another thread (a grader, an environment); the engine calls
       │                                        `Later.requests` in this thread once the future is done
       │        await a task or a semaphore     another task of this loop
       ▼
    Engine.generate(all that was asked for in 1.)
       │
       │  2. one request is answered, or one future is done:
       │        its task goes on, and with it whatever waited for that task, until all tasks wait again;
       │        what they asked for meanwhile goes to the engine, before what still waits there
       ▼
    3. nothing is asked for any more: `generate` returns, and the program is done

Nothing runs beside `generate`: a program goes on only inside its callbacks, so that programs need no locks.
The loop has no timers. Whatever a program waits for has a deadline of its own: the engine's requests, the
grader's answers, the environment's turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from typing_extensions import override

from treetune.engine.base import Completion, Later, OnResult, Request

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

Generate = Callable[[Sequence[Request | Later], OnResult], object]

log = logging.getLogger(__name__)


class ProgramLoop(asyncio.AbstractEventLoop):
    """Runs one program above an engine's `generate`.

    Tasks, futures, `asyncio.gather` and `asyncio.Semaphore` work in it as they do in any event loop.
    """

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._ready: deque[asyncio.Handle] = deque()
        self._asked: list[Request | Later] = []  # since the engine was told last
        # The samples that each request waits for, by the number that the engine gives it: engines number
        # requests in the order in which they get them.
        self._samples: list[asyncio.Future[list[Completion]] | None] = []

    def run(self, program: Coroutine[Any, Any, T]) -> T:
        """Returns the result of the program, or raises what it or the engine raised."""
        self._program: asyncio.Task[Any] = self.create_task(program)
        try:
            asked = self._run_until_all_wait()
            laters = [later for later in asked if isinstance(later, Later)]
            while laters and len(laters) == len(asked):
                # A run that goes on may have all samples in its journal and wait for grades alone. That takes
                # no engine, which may still be starting.
                asked = self._wait_for_first(laters)
                laters = [later for later in asked if isinstance(later, Later)]
            if asked:
                self._generate(asked, self._answered)
            assert self._program.done(), "the program waits for something that nobody is going to do"
            result: T = self._program.result()
            return result
        finally:
            self._cancel_tasks()

    def _wait_for_first(self, laters: Sequence[Later]) -> list[Request | Later]:
        """Waits for one of these, and returns the others and what it asks for."""
        wait([later.ready for later in laters], return_when=FIRST_COMPLETED)
        first = next(later for later in laters if later.ready.done())
        return [*(later for later in laters if later is not first), *first.requests()]

    def sample(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Asks the engine for a request's samples."""
        samples: asyncio.Future[list[Completion]] = self.create_future()
        self._asked.append(request)
        self._samples.append(samples)
        return samples

    def wait_for(self, future: Future[Any]) -> asyncio.Future[None]:
        """Returns a future of this loop that is done as soon as another thread has done `future`."""
        is_done: asyncio.Future[None] = self.create_future()

        def go_on() -> list[Request | Later]:
            is_done.set_result(None)
            return self._run_until_all_wait()

        self._asked.append(Later(future, go_on))
        return is_done

    def _answered(self, number: int, completions: list[Completion]) -> list[Request | Later]:
        samples = self._samples[number]
        assert samples is not None, "the engine reports every request once"
        self._samples[number] = None  # an answered request's samples aren't held until all are answered
        samples.set_result(completions)
        return self._run_until_all_wait()

    def _run_until_all_wait(self) -> list[Request | Later]:
        """Runs what is ready, and returns what was asked for. Raises what the program raised."""
        outer = asyncio._get_running_loop()  # a notebook's, for one
        asyncio._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(outer)
        if self._program.done():
            self._program.result()
        asked, self._asked = self._asked, []
        return asked

    def _cancel_tasks(self) -> None:
        """Ends the tasks that an error or a signal left waiting, so that they give back what they hold."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        while self._ready:
            # `run` raises the first error already; what tasks raise on their way out would hide it, and keep
            # others from giving back what they hold.
            with contextlib.suppress(BaseException):
                self._run_until_all_wait()

    # What asyncio's tasks, futures and semaphores ask of their event loop

    @override
    def call_soon(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    @override
    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    @override
    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and error is not None:  # of a callback, and so of no task that would raise it
            raise error
        log.warning("a program: %s", context["message"], exc_info=error)

    @override
    def get_debug(self) -> bool:
        return False


def running_program_loop() -> ProgramLoop:
    """Returns the loop that runs the calling program. Raises RuntimeError outside of one."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, ProgramLoop):
        raise RuntimeError("this is awaited by programs of an engine: run yours with `engine.run(program)`")
    return loop


async def result_of(future: Future[T]) -> T:
    """Returns the result of what another thread does, such as a grade, while other tasks go on."""
    if not future.done():
        await running_program_loop().wait_for(future)
    return future.result()
