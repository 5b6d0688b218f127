"""Value accuracy and the ranking of steps, where every value is known (`tabular_mdp`)."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tests.rollouts import tabular_mdp as mdp
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.tree import trees_of
from treetune.vocabulary import TokenIds, Trajectory
from treetune_lab.analyzers.action_ranking import ActionRanking, best, pairwise
from treetune_lab.analyzers.true_values import ESTIMATE, TRUTH, choose_states, continued
from treetune_lab.analyzers.value_accuracy import ValueAccuracy

EVERY = 1000


def many_answers() -> list[Trajectory]:
    """Every answer to each of ten problems."""
    return [
        mdp.trajectory(answer, problem, sample)
        for problem in mdp.problems(10)
        for sample, answer in enumerate(mdp.answers())
    ]


def exact(state_ids: TokenIds) -> float:
    return mdp.value(mdp.response_part(state_ids))


def test_with_the_distribution_itself_as_the_sample_all_errors_are_those_that_were_put_in() -> None:
    analyzer = ValueAccuracy(rollouts=mdp.EXACT_SAMPLES, samples=(mdp.EXACT_SAMPLES,), repeats=1)
    states = choose_states(mdp.all_trajectories(), EVERY, seed=1, point=3)
    states += choose_states(mdp.all_trajectories(), EVERY, seed=1, point=3, prompts=True)
    context = mdp.context(engine=mdp.ExactEngine())
    rows = analyzer.measure(context, states, lambda ids: [exact(one) + 0.125 for one in ids])
    for state, row in zip(states, rows, strict=True):
        assert row["truth"] == pytest.approx(mdp.value(state.prefix_ids))
    numbers = analyzer.summarise(rows)["all"]
    monte_carlo, critic = numbers["estimators"]["monte_carlo_64"], numbers["estimators"]["critic"]
    for part in ("within", "prompts"):
        assert monte_carlo[part]["mean_absolute_error"]["value"] == 0
        assert monte_carlo[part]["accuracy"]["value"] >= 0.5
        for measure, error in (
            ("bias", 0.125),
            ("mean_absolute_error", 0.125),
            ("mean_squared_error", 1 / 64),
        ):
            assert critic[part][measure]["value"] == pytest.approx(error)
    assert critic["within"]["correlation"]["value"] == pytest.approx(1)
    assert numbers["states"]["prompts"]["count"] == 1, "there is one problem, so one prompt"
    distinct = {state.prefix_ids for state in states}
    assert len(distinct) == len(states) == 7, "the prompt, and what may stand before a second or third letter"


def test_monte_carlo_errors_are_as_large_as_theory_says() -> None:
    analyzer = ValueAccuracy(rollouts=256, samples=(1, 3, 9), repeats=40)
    states = choose_states(many_answers(), EVERY, seed=1, point=3)
    rows = analyzer.measure(mdp.context(), states, None)
    values = [mdp.value(state.prefix_ids) for state in states]
    variance = math.fsum(v * (1 - v) for v in values) / len(values)
    found = analyzer.summarise(rows)["all"]["estimators"]
    assert list(found) == ["monte_carlo_1", "monte_carlo_3", "monte_carlo_9"], "there is no critic here"
    for k in (1, 3, 9):
        error = found[f"monte_carlo_{k}"]["within"]
        assert error["mean_squared_error"]["value"] == pytest.approx(variance * (1 / k + 1 / 256), rel=0.12)
        assert error["bias"]["low"] <= 0.01
        assert error["bias"]["high"] >= -0.01
        assert abs(error["bias"]["value"]) < 0.02
    bound = max(row["truth_error"] for row in rows)
    assert max(abs(row["truth"] - v) for row, v in zip(rows, values, strict=True)) < 5 * bound


def test_truth_shares_no_rollout_with_what_it_judges_nor_with_the_runs_own_credit() -> None:
    engine = mdp.TabularEngine()
    context = mdp.context(engine=engine)
    states = choose_states(mdp.all_trajectories(), EVERY, seed=1, point=3)
    nodes = [(state.trajectory, state.prefix_ids) for state in states]
    drawn = []
    for purpose in (TRUTH, ESTIMATE):
        continued(context, nodes, 256, purpose)
        drawn.append({request.seed + i for request in engine.requests for i in range(request.n)})
        engine.requests.clear()
    MonteCarlo(samples=256).assign(context, trees_of(mdp.all_trajectories()))
    drawn.append({request.seed + i for request in engine.requests for i in range(request.n)})
    for one, other in itertools.combinations(drawn, 2):
        assert not one & other


def test_no_two_estimators_share_a_rollout() -> None:
    analyzer = ValueAccuracy(samples=(1, 3), repeats=2)
    means = analyzer._means([1, 0, 1, 1, 1, 0, 0, 0])
    assert means == {"monte_carlo_1": [1, 0], "monte_carlo_3": [1, 0]}


def test_states_are_drawn_as_often_as_the_policy_comes_there() -> None:
    common, rare = (mdp.trajectory(mdp.encode(text) + (mdp.EOS,)) for text in ("a;a", "b;b"))
    first = [choose_states([common] * 9 + [rare], 1, seed, point=0)[0].trajectory for seed in range(300)]
    assert 0.05 < sum(t is rare for t in first) / 300 < 0.16
    assert choose_states([common] * 9, EVERY, 0, 0) == choose_states([common] * 9, EVERY, 0, 0)
    (only,) = choose_states([common] * 9, EVERY, 0, 0)
    assert (only.prefix_ids, only.position) == (mdp.encode("a;"), 0.5)


def test_steps_are_ranked_by_their_exact_values() -> None:
    n = mdp.EXACT_SAMPLES
    analyzer = ActionRanking(rollouts=n, samples=(n,), alternatives=n, at_least=2)
    states = choose_states(mdp.all_trajectories(), EVERY, seed=1, point=3)
    context = mdp.context(engine=mdp.ExactEngine())
    rows = analyzer.measure(context, states, lambda ids: [-exact(one) for one in ids])
    assert {row["text"] for row in rows} == {"a;", "b;"}, "from a third step, the answer ends"
    for row in rows:
        assert sorted(row["steps"]) == ["a;", "b;"]
        for step, truth in zip(row["steps"], row["truths"], strict=True):
            assert truth == pytest.approx(mdp.value(mdp.encode(row["text"] + step)))
    estimators = analyzer.summarise(rows)["all"]["estimators"]
    assert estimators["monte_carlo_64"]["pairwise"]["value"] == 1
    assert estimators["monte_carlo_64"]["best"]["value"] == 1
    assert estimators["critic"]["pairwise"]["value"] == 0, "it was told the opposite"
    assert estimators["critic"]["best"]["value"] == 0


def test_ties_count_half_in_pairs_and_share_in_the_best() -> None:
    truths = [0.2, 0.5, 0.9]
    assert pairwise(truths, [0.0, 0.0, 0.0]) == 0.5
    assert pairwise(truths, [0.0, 0.0, 1.0]) == pytest.approx(2.5 / 3)
    assert math.isnan(pairwise([0.5, 0.5], [0.0, 1.0])), "no order, no number"
    assert pairwise([0.5, 0.52, 0.9], [0.6, 0.5, 0.9], errors=[0.03, 0.03, 0.03]) == 1
    assert best(truths, [0.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert best(truths, [0.0, 1.0, 1.0]) == 0.5
    assert best([0.9, 0.9, 0.1], [1.0, 0.0, 0.0]) == 1


def test_guesses_are_right_as_often_as_chance_says() -> None:
    truths = [0.1, 0.4, 0.4, 0.8, 0.8]
    orders = list(itertools.permutations(range(5)))
    assert sum(pairwise(truths, order) for order in orders) / len(orders) == pytest.approx(0.5)
    chance = best(truths, [0.0] * 5)
    assert chance == pytest.approx(2 / 5)
    assert sum(best(truths, order) for order in orders) / len(orders) == pytest.approx(chance)
    tied = [best(truths, [random.Random(i).randrange(2) for _ in truths]) for i in range(4000)]
    assert sum(tied) / len(tied) == pytest.approx(chance, abs=0.02)
