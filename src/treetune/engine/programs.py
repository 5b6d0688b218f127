"""Programs that await an engine: each answer is a coroutine, and one thread runs all of them.

A rollout is a program that awaits its samples and its grades. `ProgramLoop` is the event loop that runs it
with `Engine.generate`, which samples until no request is left::

    ProgramLoop.run(program), in the thread that called it
       │
       │  1. run every task until it waits; each waits for one of these:
       │        await engine.sample(request)    the engine, which calls `_set_samples` with the samples
       │        await result_of(future)         another thread (a grader, an environment); the engine calls
       │                                        `Deferred.requests` in this thread once the future is done
       │        await a task or a semaphore     another task of this loop
       ▼
    Engine.generate(the requests of step 1)
       │
       │  2. whenever one request is answered, or one future is done:
       │        run its task, and the tasks that waited for it, until all tasks wait again;
       │        send their new requests, before requests that are still waiting in the engine
       ▼
    3. no request is left: `generate` returns, and the program is done

A program runs in one thread, before `generate` and inside of its callbacks, so programs need no locks. The
loop has no timers. Everything that a program waits for has its own deadline: the engine's requests, the
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

from treetune.engine.requests import Completion, Deferred, OnResult, Request

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

Generate = Callable[[Sequence[Request | Deferred], OnResult], object]

log = logging.getLogger(__name__)


class ProgramLoop(asyncio.AbstractEventLoop):
    """Runs one program with an engine's `generate`.

    Tasks, futures, `asyncio.gather` and `asyncio.Semaphore` work as in any event loop.
    """

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._ready: deque[asyncio.Handle] = deque()
        self._new_requests: list[Request | Deferred] = []
        """The requests that the engine hasn't got yet. A `Deferred` stands for requests that wait for another
        thread's result, such as a grade."""
        self._samples: list[asyncio.Future[list[Completion]] | None] = []
        """The future of each request's samples; None once it is answered. The index is the number that the
        engine gives the request, since engines number requests in the order in which they get them. A
        `Deferred` has no number."""

    def run(self, program: Coroutine[Any, Any, T]) -> T:
        """Returns the result of the program, or raises what it or the engine raised."""
        self._program: asyncio.Task[Any] = self.create_task(program)
        try:
            requests = self._run_until_all_wait()
            while requests and all(isinstance(request, Deferred) for request in requests):
                # A `Deferred` waits for another thread's result, such as a grade. A resumed run may have all
                # samples in its journal, and wait only for grades. That needs no engine, which may still be
                # starting.
                requests = self._wait_for_first(requests)
            if requests:
                # For each answered request, the engine calls `_set_samples`, which returns further requests.
                self._generate(requests, self._set_samples)
            assert self._program.done(), "all requests are answered, and the program still waits"
            result: T = self._program.result()
            return result
        finally:
            self._cancel_tasks()

    def _wait_for_first(self, requests: Sequence[Request | Deferred]) -> list[Request | Deferred]:
        """Waits until one of these requests is ready, and returns the others and the requests that follow.

        All of these requests are `Deferred`: each waits for the result of another thread, such as a grade.
        """
        # This keeps all of the requests. The condition is only for the type checker.
        deferred = [request for request in requests if isinstance(request, Deferred)]
        wait([request.ready for request in deferred], return_when=FIRST_COMPLETED)
        first_ready = next(request for request in deferred if request.ready.done())
        others = [request for request in deferred if request is not first_ready]
        return [*others, *first_ready.requests()]

    def sample(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Returns the future of a request's samples. The engine gets the request once all tasks wait."""
        samples: asyncio.Future[list[Completion]] = self.create_future()
        self._new_requests.append(request)
        self._samples.append(samples)
        return samples

    def wait_for(self, future: Future[Any]) -> asyncio.Future[None]:
        """Returns a future of this loop that is done as soon as `future`, which another thread sets, is
        done."""
        is_done: asyncio.Future[None] = self.create_future()

        def resume_tasks() -> list[Request | Deferred]:
            is_done.set_result(None)
            return self._run_until_all_wait()

        # A `Deferred` stands for requests that depend on a future. When `future` is done, the engine calls
        # `resume_tasks`, in this loop's thread, and takes the requests that it returns.
        self._new_requests.append(Deferred(ready=future, requests=resume_tasks))
        return is_done

    def _set_samples(self, number: int, completions: list[Completion]) -> list[Request | Deferred]:
        """Resumes the task that waits for a request's samples, and returns the requests that follow."""
        samples = self._samples[number]
        assert samples is not None, "the engine reports every request once"
        self._samples[number] = None  # so that their memory is free before the last request is answered
        if not samples.cancelled():  # a program may have cancelled the task that waited
            samples.set_result(completions)
        return self._run_until_all_wait()

    def _run_until_all_wait(self) -> list[Request | Deferred]:
        """Runs all tasks that are ready until each of them waits, and returns their new requests. Raises what
        the program raised."""
        # The tasks ask asyncio for the running loop. Another loop may run already, as in a notebook.
        outer_loop = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(outer_loop)
        if self._program.done():
            self._program.result()  # raises the program's error, if it raised one
        requests, self._new_requests = self._new_requests, []
        return requests

    def _cancel_tasks(self) -> None:
        """Ends the tasks that still wait after an error or a signal, so that they release their resources."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        while self._ready:
            # `run` raises the first error. Errors of tasks that are being ended would hide it, and would keep
            # other tasks from releasing their resources.
            with contextlib.suppress(BaseException):
                self._run_until_all_wait()

    # The methods of an event loop that asyncio's tasks, futures and semaphores use

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
        if "handle" in context and error is not None:  # the error of a callback, which no task raises
            raise error
        log.warning("a program: %s", context["message"], exc_info=error)

    @override
    def get_debug(self) -> bool:
        return False


def running_program_loop() -> ProgramLoop:
    """Returns the loop that runs the calling program. Raises RuntimeError if none does."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, ProgramLoop):
        raise RuntimeError("only a program of an engine can await this: run yours by `engine.run(program)`")
    return loop


async def result_of(future: Future[T]) -> T:
    """Returns the result of a future that another thread sets, such as a grade. Other tasks run meanwhile."""
    if not future.done():
        await running_program_loop().wait_for(future)
    return future.result()
