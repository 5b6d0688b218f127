"""Shapley values of threads.

These tests promise:

* The values of a game are the mean marginals over all orders.
* A counterfactual answer has the chosen threads alone, and only its end is sampled.
* The credit has the exact values of a small language with a fork, and its cost is counted.
* The bias of the expected gradient is as stated.
"""

from __future__ import annotations

import itertools
import math
import random
from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scripted_engine import ScriptedEngine
from tests.support.shipped import experiment_of
from tests.support.threads import TextPool, context, sampling_context
from treetune.credit.rloo import leave_one_out_advantages
from treetune.engine.requests import Request
from treetune.rollouts.answers import Start
from treetune.rollouts.context import RolloutContext
from treetune.threads.parallel_threads import ParallelThreads
from treetune.threads.shapley import (
    Block,
    Threads,
    ThreadShapley,
    find_blocks,
    mean_marginals,
    segments_with,
    shapley_values,
    subsets,
)
from treetune.tree import answers_of
from treetune.vocabulary import Episode, Grade, Metrics, Problem, Trajectory

# Games


def games(players: int) -> st.SearchStrategy[dict[Threads, float]]:
    sets = subsets(range(players))
    worths = st.lists(st.floats(-5, 5), min_size=len(sets), max_size=len(sets))
    return worths.map(lambda values: dict(zip(sets, values, strict=True)))


any_game = st.integers(1, 5).flatmap(games)


def players_of(game: dict[Threads, float]) -> list[int]:
    return sorted(max(game, key=len))


@given(any_game)
def test_values_are_the_mean_marginals_over_all_orders(game: dict[Threads, float]) -> None:
    players = players_of(game)
    brute_force = dict.fromkeys(players, 0.0)
    orders = list(itertools.permutations(players))
    for order in orders:
        for position, player in enumerate(order):
            before = frozenset(order[:position])
            brute_force[player] += (game[before | {player}] - game[before]) / len(orders)
    assert shapley_values(players, game.__getitem__) == pytest.approx(brute_force, abs=1e-9)
    assert mean_marginals(orders, game.__getitem__) == pytest.approx(brute_force, abs=1e-9)


@given(any_game, st.randoms(use_true_random=False))
def test_values_sum_to_what_all_players_add(game: dict[Threads, float], draw: random.Random) -> None:
    players = players_of(game)
    added = game[frozenset(players)] - game[frozenset()]
    assert sum(shapley_values(players, game.__getitem__).values()) == pytest.approx(added, abs=1e-9)
    few_orders = [draw.sample(players, len(players)) for _ in range(2)]
    assert sum(mean_marginals(few_orders, game.__getitem__).values()) == pytest.approx(added, abs=1e-9)


@given(any_game, st.data())
def test_players_that_can_be_exchanged_have_the_same_value(
    game: dict[Threads, float], data: st.DataObject
) -> None:
    players = players_of(game)
    first, second = data.draw(st.sampled_from(players)), data.draw(st.sampled_from(players))

    def exchange(group: Threads) -> Threads:
        swap = {first: second, second: first}
        return frozenset(swap.get(player, player) for player in group)

    def mean_reward_after(group: Threads) -> float:
        return game[group] + game[exchange(group)]

    values = shapley_values(players, mean_reward_after)
    assert values[first] == pytest.approx(values[second], abs=1e-9)


@given(any_game)
def test_a_player_that_adds_nothing_has_the_value_zero(game: dict[Threads, float]) -> None:
    players = [*players_of(game), 99]
    values = shapley_values(players, lambda group: game[group - {99}])
    assert values[99] == 0
    assert values[0] == pytest.approx(shapley_values(players[:-1], game.__getitem__)[0], abs=1e-9)


# A language with a fork: each part writes one bit, and the text after the join may depend on the threads

FORK = "<Parallel><Outlines><Outline>1:;</Outline><Outline>2:;</Outline></Outlines>"
CHANCE = {"main": 0.5, "1": 0.3, "2": 0.8}
"""The probability that a part is written as ``?1`` rather than ``?0``."""

Bits = dict[str, int]
"""The bits of the parts ``main``, ``1``, ``2`` and ``end``; a thread that is left out has none."""


def chance_of_end(bits: Bits) -> float:
    """Returns the probability of ``?1`` after the join, which grows with the threads that wrote a 1."""
    return 0.2 + 0.3 * bits.get("1", 0) + 0.4 * bits.get("2", 0)


def bits_written(text: str) -> Bits:
    main, _, after_fork = text.partition("<Parallel>")
    bits = {"main": int(main[main.index("?") + 1])}
    for number in "12":
        _, header, thread = after_fork.partition(f"<Thread>\n{number}:")
        if header:
            bits[number] = int(thread[1])
    _, end_tag, end = after_fork.rpartition("</Parallel>")
    if end_tag:
        bits["end"] = int(end[1])
    return bits


def script(before: str, request: Request) -> str:
    after_header = {"1:": "1", "2:": "2"}.get(before[-2:])
    part = after_header or ("end" if before.endswith("\n") else "main")
    draw = random.Random(request.seed).random()
    chance = chance_of_end(bits_written(before)) if part == "end" else CHANCE[part]
    bit_text = "?1" if draw < chance else "?0"
    return {"main": f"{bit_text}{FORK}", "end": f"</Parallel>{bit_text}$"}.get(part, f"{bit_text}\n</Thread>")


def reward(bits: Bits) -> float:
    return float((bits["main"] and bits.get("1", 0)) or (bits.get("2", 0) and bits["end"]))


def mean_reward_after(bits: Bits) -> float:
    """Returns the mean reward after these bits of the main text and the threads."""
    chance = chance_of_end(bits)
    return chance * reward({**bits, "end": 1}) + (1 - chance) * reward({**bits, "end": 0})


def reward_of_text(text: str) -> float:
    return reward(bits_written(text))


def context_with(engine: ScriptedEngine, rollout: ParallelThreads) -> RolloutContext:
    return sampling_context(engine, rollout, TextPool(reward_of_text))


def assign_credit(
    credit: ThreadShapley, answers: int = 6
) -> tuple[list[Trajectory], list[Episode], Metrics, ScriptedEngine]:
    rollout, engine = ParallelThreads(samples=answers, max_tokens=300), ScriptedEngine(script)
    rollout_context = context_with(engine, rollout)
    trees, _ = rollout.run(rollout_context, [Problem(id="train/0", prompt=";", gold="")])
    engine.requests.clear()
    episodes, metrics = credit.assign(rollout_context, trees)
    return answers_of(trees), episodes, metrics, engine


def exact_values(bits: Bits) -> dict[int, float]:
    """Returns the Shapley values of the two threads of an answer with these bits."""

    def reward_of_threads(group: Threads) -> float:
        names = {str(thread + 1) for thread in group} | {"main"}
        return mean_reward_after({name: bit for name, bit in bits.items() if name in names})

    return shapley_values([0, 1], reward_of_threads)


def thread_advantages(answer: Trajectory, episode: Episode) -> dict[int, float]:
    """Returns the advantage of each thread, which all its sampled tokens share."""
    advantages: dict[int, float] = {}
    start = 0
    for segment in answer.segments:
        end = start + len(segment.token_ids)
        if segment.branch and segment.origin == "sampled":
            (advantages[segment.branch[0][1]],) = set(episode.advantages[start:end].tolist())
        start = end
    return advantages


def test_a_thread_gets_its_exact_value_up_to_the_noise_of_sampling() -> None:
    samples = 200
    answers, episodes, _, _ = assign_credit(ThreadShapley(samples=samples))
    deviation = 4 * (0.25 / samples) ** 0.5
    assert len({tuple(bits_written(answer.text).items()) for answer in answers}) > 2
    for answer, episode in zip(answers, episodes, strict=True):
        advantages = thread_advantages(answer, episode)
        assert advantages == pytest.approx(exact_values(bits_written(answer.text)), abs=2 * deviation)


def test_text_outside_of_threads_has_the_advantage_of_rloo_and_the_cost_is_counted() -> None:
    answers, episodes, metrics, engine = assign_credit(ThreadShapley(samples=2))
    outcome = leave_one_out_advantages([answer.reward for answer in answers])
    for episode, advantage in zip(episodes, outcome, strict=True):
        assert episode.advantages[0] == pytest.approx(advantage)
        assert episode.advantages[-1] == pytest.approx(advantage)
    assert metrics["credit/value_states"] == 4 * len(answers), "two threads have four sets"
    assert metrics["credit/value_samples"] == len(engine.requests) == 2 * 4 * len(answers)
    # After the join, each sample writes one tag, a bit of two tokens, and the end.
    assert metrics["credit/value_tokens"] == 4 * len(engine.requests)


@pytest.mark.parametrize(("threads", "present"), [((1,), "2"), ((0,), "1"), ((), ""), ((0, 1), "12")])
def test_a_counterfactual_answer_has_these_threads_alone_and_only_its_end_is_sampled(
    threads: tuple[int, ...], present: str
) -> None:
    answers, *_ = assign_credit(ThreadShapley(samples=1), answers=2)
    answer = answers[0]
    (block,) = find_blocks(answer)
    assert (block.number, block.threads) == (0, (0, 1))
    engine, rollout = ScriptedEngine(script), ParallelThreads(samples=2, max_tokens=300)
    start = Start(answer.problem, answer.prompt_ids, 7, segments_with(block, frozenset(threads)))
    (counterfactual,) = engine.run(
        rollout.answers_without_threads(context_with(engine, rollout), [start], [0])
    )
    bits, original = bits_written(counterfactual.text), bits_written(answer.text)
    assert set(bits) == {"main", "end", *present}
    assert all(bits[name] == original[name] for name in bits if name != "end")
    assert len(engine.requests) == 1


def test_values_over_random_orders_sum_to_what_all_threads_add() -> None:
    answers, exact, *_ = assign_credit(ThreadShapley(samples=3))
    _, over_orders, metrics, _ = assign_credit(ThreadShapley(samples=3, exact_threads=1, permutations=1))
    assert metrics["credit/value_states"] == 3 * len(answers), "an order of two threads has three sets"
    for answer, with_all_sets, with_one_order in zip(answers, exact, over_orders, strict=True):
        # The answers of a set have their own seeds, so both rows have the same values of all and no threads.
        totals = [sum(thread_advantages(answer, row).values()) for row in (with_all_sets, with_one_order)]
        assert totals[0] == pytest.approx(totals[1])


@pytest.mark.parametrize(("threads", "sets"), [(4, 16), (5, 32), (6, 42)])
def test_a_block_has_exact_values_where_random_orders_need_as_many_sets(threads: int, sets: int) -> None:
    """Eight orders of five threads go through up to 34 sets, and there are 32."""
    credit, block = ThreadShapley(samples=1), Block(0, tuple(range(threads)), ())
    answers, *_ = assign_credit(credit, answers=2)
    orders = credit._draw_orders(context(), answers[0], block)
    assert bool(orders) == (threads == 6)
    assert len(credit._choose_sets(block.threads, orders)) <= sets
    assert credit.continuations(1, 1.0, threads)[1] == sets


@pytest.mark.parametrize(
    "credit",
    [
        ThreadShapley(samples=1),
        ThreadShapley(samples=1, weights="leave_one_out"),
        ThreadShapley(samples=1, exact_threads=7, permutations=1),
        ThreadShapley(samples=1, exact_threads=2, permutations=3),
    ],
    ids=str,
)
def test_the_most_sets_of_an_answer_are_those_of_the_worst_division_into_blocks(
    credit: ThreadShapley,
) -> None:
    most_sets = [0]  # by the number of threads of the answer
    for threads in range(1, 25):
        divisions = [credit._most_sets(size) + most_sets[threads - size] for size in range(1, threads + 1)]
        most_sets.append(max(divisions))
        bound = credit.continuations(1, 1.0, threads)[1]
        sets_per_thread = max(credit._most_sets(size) / size for size in range(1, threads + 1))
        assert most_sets[-1] <= bound <= threads * sets_per_thread
    assert ThreadShapley(samples=1, weights="leave_one_out").continuations(1, 1.0, 10)[1] == 20


def expected_gradient(advantage: str) -> dict[tuple[str, tuple[int, ...]], float]:
    """Returns Σ p · A · ∂ log p / ∂ logit for the bits of the threads, by the main bit before them."""
    gradient: dict[tuple[str, tuple[int, ...]], float] = {}
    for main, first, second in itertools.product((0, 1), repeat=3):
        bits = {"main": main, "1": first, "2": second}
        probability = math.prod(CHANCE[name] if bit else 1 - CHANCE[name] for name, bit in bits.items())
        without = {
            name: mean_reward_after({part: part_bit for part, part_bit in bits.items() if part != name})
            for name in "12"
        }
        exact = {"1": mean_reward_after(bits), "2": mean_reward_after(bits)}
        leave_one_out = {name: mean_reward_after(bits) - without[name] for name in "12"}
        values = exact_values(bits)
        shapley = {"1": values[0], "2": values[1]}
        advantage_by_thread = {"true": exact, "leave_one_out": leave_one_out, "shapley": shapley}[advantage]
        for name in "12":
            slope = bits[name] - CHANCE[name]
            key = name, (main,)
            gradient[key] = gradient.get(key, 0.0) + probability * advantage_by_thread[name] * slope
    return gradient


@pytest.mark.parametrize(
    ("weights", "bias", "cosine"), [("leave_one_out", 0.0, 1.0), ("shapley", 0.3319, 0.9671)]
)
def test_the_bias_of_the_expected_gradient_of_threads_is_as_stated(
    weights: str, bias: float, cosine: float
) -> None:
    true, gradient = expected_gradient("true"), expected_gradient(weights)
    length = math.hypot(*true.values())
    difference = math.hypot(*(gradient[key] - slope for key, slope in true.items()))
    dot_product = sum(gradient[key] * slope for key, slope in true.items())
    assert difference / length == pytest.approx(bias, abs=5e-5)
    assert dot_product / length / math.hypot(*gradient.values()) == pytest.approx(cosine, abs=5e-5)


def test_leave_one_out_takes_one_set_for_each_thread() -> None:
    answers, episodes, metrics, _ = assign_credit(ThreadShapley(samples=200, weights="leave_one_out"))
    assert metrics["credit/value_states"] == 3 * len(answers)
    deviation = 4 * (0.25 / 200) ** 0.5
    for answer, episode in zip(answers, episodes, strict=True):
        bits = bits_written(answer.text)
        bits.pop("end")
        exact = {
            thread: mean_reward_after(bits)
            - mean_reward_after({part: bit for part, bit in bits.items() if part != str(thread + 1)})
            for thread in (0, 1)
        }
        assert thread_advantages(answer, episode) == pytest.approx(exact, abs=2 * deviation)


def test_a_block_whose_answers_nobody_could_grade_gives_its_threads_no_advantage() -> None:
    class Closed(TextPool):
        def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
            future: Future[Grade] = Future()
            future.set_result(Grade(0.0, "unavailable"))
            return future

    rollout, engine = ParallelThreads(samples=3, max_tokens=300), ScriptedEngine(script)
    rollout_context = context_with(engine, rollout)
    trees, _ = rollout.run(rollout_context, [Problem(id="train/0", prompt=";", gold="")])
    episodes, metrics = ThreadShapley(samples=2).assign(
        replace(rollout_context, grader=Closed(reward_of_text)), trees
    )
    for answer, episode in zip(answers_of(trees), episodes, strict=True):
        assert thread_advantages(answer, episode) == {0: 0.0, 1: 0.0}
    assert metrics["credit/value_unknown"] == 3 and metrics["credit/value_unavailable"] == 2 * 4 * 3


def test_the_fragment_is_for_answers_with_threads() -> None:
    experiment = experiment_of("threadweaver/tiny/rl_parallel_published,credit/thread_shapley")
    assert experiment.credit == ThreadShapley()
