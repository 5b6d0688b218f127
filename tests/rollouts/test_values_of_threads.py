"""What a thread is worth, against the exact values of a small language with a fork."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import Future
from dataclasses import replace

import pytest

from tests.columns import plain
from tests.rollouts.scripted_engine import ScriptedEngine
from tests.rollouts.threads import context, decode
from tests.trees import answered
from treetune.inference.base import Request
from treetune.rollouts.context import AnswerSettings
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.valuation import FreshContinuations, ValueEstimator
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Grade, Metrics, Problem, Trajectory
from treetune_lab.values.sampled import Sequential
from treetune_threads.parallel_threads import ParallelThreads, ThreadStates

FORK = "<Parallel><Outlines><Outline>1:;</Outline><Outline>2:;</Outline></Outlines>"
CHANCE = {"main": 0.5, "1": 0.3, "2": 0.8, "end": 0.6}
"""Of writing ``?1`` rather than ``?0``, in each of the four samples of an answer."""
PARTS = ("main", "1", "2", "end")


def script(before: str, request: Request) -> str:
    part = {"1:": "1", "2:": "2", ">\n": "end"}.get(before[-2:], "main")
    said = "?1" if random.Random(request.seed).random() < CHANCE[part] else "?0"
    return {"main": f"{said}{FORK}", "end": f"</Parallel>{said}$"}.get(part, f"{said}\n</Thread>")


def reward(bits: tuple[int, ...]) -> float:
    """Something in which no part's effect is independent of the others."""
    main, first, second, end = bits
    return float((main and first) or (second and end))


def value(known: tuple[int, ...]) -> float:
    total = 0.0
    for rest in itertools.product((0, 1), repeat=4 - len(known)):
        chance = 1.0
        for part, bit in zip(PARTS[len(known) :], rest, strict=True):
            chance *= CHANCE[part] if bit else 1 - CHANCE[part]
        total += chance * reward((*known, *rest))
    return total


def bits_of(text: str) -> tuple[int, ...]:
    return tuple(int(text[place + 1]) for place, letter in enumerate(text) if letter == "?")


class Pool:
    has_services = False

    def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
        future: Future[Grade] = Future()
        future.set_result(Grade(reward(bits_of(response)), "ok"))
        return future


def credited(samples: int, answers: int = 4) -> tuple[list[Trajectory], list[Episode], ScriptedEngine]:
    rollout = ParallelThreads(samples=answers, max_tokens=300)
    engine = ScriptedEngine(script)
    lent = context(engine=engine, context_length=4096, grader=Pool())
    lent = replace(lent.with_services(rollout), settings=AnswerSettings(4096, rollout.sampling))
    trajectories, _ = answered(rollout.run(lent, [Problem(id="train/0", prompt=";", gold="")]))
    engine.requests.clear()
    episodes, metrics = MonteCarlo(samples=samples, states=ThreadStates()).assign(
        lent, trees_of(trajectories)
    )
    assert metrics["credit/value_samples"] == samples * metrics["credit/value_states"]
    return trajectories, episodes, engine


def test_values_of_half_written_answers_come_to_the_exact_ones() -> None:
    samples = 700
    trajectories, episodes, _ = credited(samples)
    assert len({bits_of(t.text) for t in trajectories}) > 2
    for trajectory, episode in zip(trajectories, episodes, strict=True):
        bits = bits_of(trajectory.text)
        exact = [value(bits[:known]) for known in range(5)]
        sampled = [place for place, s in enumerate(trajectory.segments) if s.origin == "sampled"]
        assert episode.step_values is not None and episode.advantages is not None
        for place, segment in enumerate(sampled):
            deviation = 4 * (0.25 / samples) ** 0.5
            assert episode.step_values[segment] == pytest.approx(exact[place], abs=deviation)
            start, end = (0, *episode.step_ends)[segment : segment + 2]
            assert plain(episode.trained[start:end]) == (True,) * (end - start)
            for advantage in episode.advantages[start:end]:
                assert advantage == pytest.approx(exact[place + 1] - exact[place], abs=2 * deviation)
        total = sum(episode.advantages[episode.step_ends[segment] - 1] for segment in sampled)
        assert total == pytest.approx(episode.reward - episode.step_values[0])


def test_what_is_known_is_not_sampled_again_and_equal_states_are_one() -> None:
    trajectories, _, engine = credited(3, answers=6)
    states = {bits_of(t.text)[:known] for t in trajectories for known in range(4)}
    # Behind k known samples the other 4 - k are written.
    assert len(engine.requests) == 3 * sum(4 - len(known) for known in states)
    for request in engine.requests:
        assert decode(request.prompt_ids).startswith(";")


def test_no_value_depends_on_what_else_is_estimated() -> None:
    alone, together = credited(3, answers=1)[1], credited(3, answers=6)[1]
    assert alone == together[:1]


@pytest.mark.parametrize("values", [FreshContinuations(), Sequential(error=0.1, most=6)])
@pytest.mark.parametrize("order", [1, 2])
def test_begun_with_each_answer_the_values_are_the_same_and_nothing_more_is_sampled(
    values: ValueEstimator, order: int
) -> None:
    def made(pipelined: bool) -> tuple[list[Episode], Metrics, list[tuple[tuple[int, ...], int]], int]:
        credit = MonteCarlo(samples=3, states=ThreadStates(), values=values, pipelined=pipelined)
        rollout = ParallelThreads(samples=4, max_tokens=300)
        engine = ScriptedEngine(script, order if pipelined else 0)
        lent = context(
            engine=engine,
            context_length=4096,
            grader=Pool(),
            sampling=rollout.sampling,
            services=[rollout],
        )
        early = credit.early_continuations(lent)
        problems = [Problem(id=f"train/{i}", prompt=";" * (i + 1), gold="") for i in range(2)]
        trees, _ = rollout.run(lent if early is None else early.attached(lent), problems)
        before = len(engine.requests)
        episodes, metrics = credit.assign(lent.with_services(*[early] if early else []), trees)
        asked = sorted((plain(one.prompt_ids), one.seed) for one in engine.requests)
        return episodes, metrics, asked, len(engine.requests) - before

    *expected, _ = made(False)
    *found, later = made(True)
    assert found == expected
    # The first turn was over with the answers; what depends on its rewards comes after all of these.
    assert (later == 0) == isinstance(values, FreshContinuations)
