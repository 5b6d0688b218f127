"""Programs: coroutines that await samples of an engine and results of other threads.

Promises that these tests hold:

* Each request gets its own samples, in whichever order the engine answers.
* A program sends its next request as soon as it has the samples that it waited for.
* A future of another thread delays only the task that awaits it.
* An error or a signal ends all tasks, and each releases its resources (its `finally` runs).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.columns import plain
from tests.support.fake_engine import FakeEngine
from treetune.engine.base import Engine
from treetune.engine.programs import result_of
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.exceptions import EngineError


def fake_engine(**settings: object) -> FakeEngine:
    return FakeEngine(lambda ids, version: [0.3, 0.3, 0.3, 0.1], 3, **settings)  # type: ignore[arg-type]


def request(seed: int, prompt: Sequence[int] = (1,)) -> Request:
    return Request(prompt, seed=seed, n=1, sampling=SamplingParams(max_tokens=4))


async def sample_turns(engine: Engine, seed: int, count: int) -> list[Completion]:
    """Samples `count` turns, each with all turns before it in its prompt."""
    prompt, completions = [1], []
    for turn in range(count):
        (completion,) = await engine.sample(request(100 * seed + turn, prompt))
        completions.append(completion)
        prompt += plain(completion.token_ids)
    return completions


@pytest.mark.parametrize("order", [range, lambda count: reversed(range(count))], ids=["first", "last"])
def test_each_task_gets_its_own_samples_in_whichever_order_they_come(order: object) -> None:
    alone = []
    for seed in range(4):
        fake = fake_engine()
        alone.append(fake.run(sample_turns(fake, seed, 3)))
    together = fake_engine(order=order)

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(sample_turns(together, seed, 3) for seed in range(4)))

    assert together.run(all_of_them()) == alone


def test_a_semaphore_bounds_how_many_tasks_sample_at_a_time() -> None:
    fake, limit = fake_engine(), 2
    running, most_at_a_time = 0, 0

    async def sample_when_free(seed: int, semaphore: asyncio.Semaphore) -> None:
        nonlocal running, most_at_a_time
        async with semaphore:
            running += 1
            most_at_a_time = max(most_at_a_time, running)
            await sample_turns(fake, seed, 2)
            running -= 1

    async def all_of_them() -> None:
        semaphore = asyncio.Semaphore(limit)
        await asyncio.gather(*(sample_when_free(seed, semaphore) for seed in range(7)))

    fake.run(all_of_them())
    assert (running, most_at_a_time) == (0, limit)
    assert len(fake.asked) == 14


def test_a_task_that_waits_for_another_thread_delays_no_other_task() -> None:
    fake, ready = fake_engine(), Future[str]()
    sampled_before: list[int] = []

    async def wait_for_result() -> str:
        result = await result_of(ready)
        sampled_before.append(len(fake.asked))
        return result

    async def sample() -> None:
        await sample_turns(fake, 1, 3)
        ready.set_result("done")

    async def both() -> str:
        result, _ = await asyncio.gather(wait_for_result(), sample())
        return result

    assert fake.run(both()) == "done"
    assert sampled_before == [3]


def test_a_program_that_only_waits_for_other_threads_needs_no_engine() -> None:
    fake = fake_engine(fail_after=0)
    fake.closed = True
    with ThreadPoolExecutor(2) as threads:

        async def sum_of(numbers: Sequence[int]) -> int:
            waiting = [result_of(threads.submit(pow, number, 2)) for number in numbers]
            return sum(await asyncio.gather(*waiting))

        assert fake.run(sum_of([1, 2, 3])) == 14


async def return_seven() -> int:
    return 7


def test_a_program_that_asks_for_nothing_is_done_at_once() -> None:
    assert fake_engine(fail_after=0).run(return_seven()) == 7


def test_the_error_of_a_task_ends_the_program_and_other_tasks_release_their_resources() -> None:
    fake, released = fake_engine(), list[int]()

    async def fails() -> None:
        await sample_turns(fake, 0, 1)
        raise ValueError("no such turn")

    async def holds(seed: int) -> None:
        try:
            await sample_turns(fake, seed, 50)
        finally:
            released.append(seed)

    async def all_of_them() -> None:
        await asyncio.gather(holds(1), fails(), holds(2))

    with pytest.raises(ValueError, match="no such turn"):
        fake.run(all_of_them())
    assert sorted(released) == [1, 2]


def test_the_error_of_another_thread_reaches_the_task_that_awaits_it() -> None:
    fake, lost = fake_engine(), Future[str]()

    async def wait_for_error() -> str:
        try:
            return await result_of(lost)
        except OSError as error:
            return str(error)

    async def both() -> str:
        message, _ = await asyncio.gather(wait_for_error(), fail())
        return message

    async def fail() -> None:
        await sample_turns(fake, 1, 1)
        lost.set_exception(OSError("the grader is gone"))

    assert fake.run(both()) == "the grader is gone"


def test_the_engines_error_ends_the_program() -> None:
    fake, released = fake_engine(fail_after=3), list[int]()

    async def holds() -> None:
        try:
            await sample_turns(fake, 1, 9)
        finally:
            released.append(1)

    with pytest.raises(EngineError, match="told to fail"):
        fake.run(holds())
    assert released == [1]


def test_a_signal_ends_the_program_and_every_task_releases_its_resources() -> None:
    # Workers of several test processes ignore Ctrl-C.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    fake, released = fake_engine(), list[int]()

    async def holds(seed: int, strike: bool) -> None:
        try:
            await sample_turns(fake, seed, 3)
            if strike:
                os.kill(os.getpid(), signal.SIGINT)
            await sample_turns(fake, seed, 50)
        finally:
            released.append(seed)

    async def all_of_them() -> None:
        await asyncio.gather(holds(1, False), holds(2, True), holds(3, False))

    try:
        with pytest.raises(KeyboardInterrupt):
            fake.run(all_of_them())
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert sorted(released) == [1, 2, 3]
    assert len(fake.asked) < 3 * 53


def test_sampling_outside_of_a_program_of_the_engine_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"engine.run\(program\)"):
        asyncio.run(sample_turns(fake_engine(), 1, 1))


def test_a_program_may_be_run_inside_another_event_loop() -> None:
    async def notebook() -> list[Completion]:
        fake = fake_engine()
        completions = fake.run(sample_turns(fake, 1, 2))
        await asyncio.sleep(0)  # the notebook's own loop is the running one again
        return completions

    fake = fake_engine()
    assert asyncio.run(notebook()) == fake.run(sample_turns(fake, 1, 2))
