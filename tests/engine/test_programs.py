"""Programs await their samples and other threads' results: who goes on when, and what an error ends.

* Each request gets its own samples, in whichever order the engine answers.
* What a program asks for next, it asks for as soon as it has what it waited for.
* A future of another thread holds up only whoever waits for it.
* An error or a signal ends everything, and every task gives back what it holds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.columns import plain
from tests.fake_engine import FakeEngine
from treetune.engine.base import Engine
from treetune.engine.programs import result_of
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.exceptions import EngineError


def engine(**given: object) -> FakeEngine:
    return FakeEngine(lambda ids, version: [0.3, 0.3, 0.3, 0.1], 3, **given)  # type: ignore[arg-type]


def request(seed: int, prompt: Sequence[int] = (1,)) -> Request:
    return Request(prompt, seed=seed, n=1, sampling=SamplingParams(max_tokens=4))


async def turns(of: Engine, seed: int, count: int) -> list[Completion]:
    """Samples turn after turn, each behind the turns before it."""
    prompt, completions = [1], list[Completion]()
    for turn in range(count):
        (completion,) = await of.sample(request(100 * seed + turn, prompt))
        completions.append(completion)
        prompt += plain(completion.token_ids)
    return completions


@pytest.mark.parametrize("order", [range, lambda count: reversed(range(count))], ids=["first", "last"])
def test_each_task_gets_its_own_samples_in_whichever_order_they_come(order: object) -> None:
    alone = []
    for seed in range(4):
        of = engine()
        alone.append(of.run(turns(of, seed, 3)))
    together = engine(order=order)

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(turns(together, seed, 3) for seed in range(4)))

    assert together.run(all_of_them()) == alone


def test_a_semaphore_bounds_how_many_are_begun_and_the_next_begins_when_one_ends() -> None:
    of, begun, most = engine(), [0, 0], 2

    async def one(seed: int, free: asyncio.Semaphore) -> None:
        async with free:
            begun[0] += 1
            begun[1] = max(begun)
            await turns(of, seed, 2)
            begun[0] -= 1

    async def all_of_them() -> None:
        free = asyncio.Semaphore(most)
        await asyncio.gather(*(one(seed, free) for seed in range(7)))

    of.run(all_of_them())
    assert begun == [0, most]
    assert len(of.asked) == 14


def test_whoever_waits_for_another_thread_holds_up_nobody_else() -> None:
    of, ready = engine(), Future[str]()
    sampled_before: list[int] = []

    async def waits() -> str:
        said = await result_of(ready)
        sampled_before.append(len(of.asked))
        return said

    async def samples() -> None:
        await turns(of, 1, 3)
        ready.set_result("done")

    async def both() -> str:
        said, _ = await asyncio.gather(waits(), samples())
        return said

    assert of.run(both()) == "done"
    assert sampled_before == [3]


def test_a_program_that_waits_for_other_threads_alone_needs_no_engine() -> None:
    of = engine(fail_after=0)
    of.closed = True
    with ThreadPoolExecutor(2) as threads:

        async def sum_of(numbers: Sequence[int]) -> int:
            waiting = [result_of(threads.submit(pow, number, 2)) for number in numbers]
            return sum(await asyncio.gather(*waiting))

        assert of.run(sum_of([1, 2, 3])) == 14


async def _nothing() -> int:
    return 7


def test_a_program_that_asks_for_nothing_is_done_at_once() -> None:
    assert engine(fail_after=0).run(_nothing()) == 7


def test_the_error_of_a_task_ends_the_program_and_the_others_give_back_what_they_hold() -> None:
    of, given_back = engine(), list[int]()

    async def fails() -> None:
        await turns(of, 0, 1)
        raise ValueError("no such turn")

    async def holds(seed: int) -> None:
        try:
            await turns(of, seed, 50)
        finally:
            given_back.append(seed)

    async def all_of_them() -> None:
        await asyncio.gather(holds(1), fails(), holds(2))

    with pytest.raises(ValueError, match="no such turn"):
        of.run(all_of_them())
    assert sorted(given_back) == [1, 2]


def test_the_error_of_another_thread_reaches_whoever_waited_for_it() -> None:
    of, lost = engine(), Future[str]()

    async def waits() -> str:
        try:
            return await result_of(lost)
        except OSError as error:
            return str(error)

    async def both() -> str:
        said, _ = await asyncio.gather(waits(), fail())
        return said

    async def fail() -> None:
        await turns(of, 1, 1)
        lost.set_exception(OSError("the grader is gone"))

    assert of.run(both()) == "the grader is gone"


def test_the_engines_error_ends_the_program() -> None:
    of, given_back = engine(fail_after=3), list[int]()

    async def holds() -> None:
        try:
            await turns(of, 1, 9)
        finally:
            given_back.append(1)

    with pytest.raises(EngineError, match="told to fail"):
        of.run(holds())
    assert given_back == [1]


def test_a_signal_ends_the_program_and_every_task_gives_back_what_it_holds() -> None:
    # Workers of several test processes ignore Ctrl-C.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    of, given_back = engine(), list[int]()

    async def holds(seed: int, strike: bool) -> None:
        try:
            await turns(of, seed, 3)
            if strike:
                os.kill(os.getpid(), signal.SIGINT)
            await turns(of, seed, 50)
        finally:
            given_back.append(seed)

    async def all_of_them() -> None:
        await asyncio.gather(holds(1, False), holds(2, True), holds(3, False))

    try:
        with pytest.raises(KeyboardInterrupt):
            of.run(all_of_them())
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert sorted(given_back) == [1, 2, 3]
    assert len(of.asked) < 3 * 53


def test_samples_are_awaited_by_programs_of_an_engine_alone() -> None:
    with pytest.raises(RuntimeError, match=r"engine.run\(program\)"):
        asyncio.run(turns(engine(), 1, 1))


def test_a_program_may_be_run_inside_another_event_loop() -> None:
    async def notebook() -> list[Completion]:
        of = engine()
        completions = of.run(turns(of, 1, 2))
        await asyncio.sleep(0)  # the notebook's own loop is the running one again
        return completions

    of = engine()
    assert asyncio.run(notebook()) == of.run(turns(of, 1, 2))
