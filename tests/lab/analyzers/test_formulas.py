"""Formulas of the analyzers, against exact values and plain references.

These tests promise:

* KL, diversity, distances and ranks are those of their definitions.
* The errors of estimators are as large as theory says, and the truth shares no sample with what it judges.
* Intervals of steps follow from the errors of their values.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import tabular_mdp as mdp
from tests.support.tiny_trainer import tiny_model
from treetune.credit.no_credit import NoCredit
from treetune.credit.vineppo import MonteCarlo
from treetune.lab.analyzers.action_ranking import ActionRanking, score_best, score_pairs
from treetune.lab.analyzers.advantage_distribution import (
    AdvantageDistribution,
    advantages_of_episode,
    describe,
)
from treetune.lab.analyzers.distance import KlToReference, answer_kl, group_of, measure_distances
from treetune.lab.analyzers.diversity import distinct_ngrams, measure_overlap
from treetune.lab.analyzers.figures import (
    Bootstrap,
    correlation,
    mean_of,
    save_figure,
    share_on_right_side,
)
from treetune.lab.analyzers.points import choose_points, spread_evenly
from treetune.lab.analyzers.step_credit import NORMAL_QUANTILE, Shown, make_step_credit
from treetune.lab.analyzers.stored import state_values
from treetune.lab.analyzers.true_values import (
    ESTIMATE_PURPOSE,
    TRUTH_PURPOSE,
    choose_states,
    continue_prefixes,
)
from treetune.lab.analyzers.value_accuracy import ValueAccuracy
from treetune.models.logprobs import CriticModule, ModelInputs
from treetune.tree import trees_of
from treetune.vocabulary import Episode, TokenIds, Trajectory, token_array

# KL


def other_policy(response: tuple[int, ...]) -> dict[int, float]:
    """Returns probabilities as `mdp.policy` does, but other ones."""
    tokens = sorted(mdp.policy(response))
    weights = [1.0 + 2 * i + len(response) for i in range(len(tokens))]
    return {token: w / sum(weights) for token, w in zip(tokens, weights, strict=True)}


def test_both_estimators_expect_the_exact_kl_of_whole_answers() -> None:
    answers = mdp.answers()
    starts = [0, *itertools.accumulate(len(answer) for answer in answers)]
    logprobs = []
    for next_chances in (mdp.policy, other_policy):
        of_tokens = []
        for answer in answers:
            of_tokens += [math.log(next_chances(answer[:t])[answer[t]]) for t in range(len(answer))]
        logprobs.append(torch.tensor(of_tokens, dtype=torch.float64))
    policy, start = logprobs
    probability_of_start = [math.exp(start[answer:b].sum()) for answer, b in itertools.pairwise(starts)]
    assert sum(probability_of_start) == pytest.approx(1)
    exact_kl = sum(
        next_chances * math.log(next_chances / q)
        for next_chances, q in zip(answers.values(), probability_of_start, strict=True)
    )
    assert exact_kl > 0.05
    for values in answer_kl(policy, start, starts).values():
        assert sum(
            next_chances * v for next_chances, v in zip(answers.values(), values, strict=True)
        ) == pytest.approx(exact_kl)


def test_accuracy_is_the_share_of_correct_answers_and_not_the_mean_reward() -> None:
    rewards = {"p0": (0.5, 1.0), "p1": (0.0, 1.2)}
    rows = []
    for problem, rewards_of_problem in rewards.items():
        for reward in rewards_of_problem:
            row = {"checkpoint": 3, "problem": problem, "reward": reward, "k1": 0.1, "k3": 0.1, "tokens": 4}
            rows.append(row)
    numbers = KlToReference().summarise(rows)["by_checkpoint"]["3"]
    assert numbers["accuracy"]["value"] == pytest.approx(0.5)
    assert numbers["reward"]["value"] == pytest.approx(0.675)


# The critic


def test_the_value_of_a_state_is_read_at_its_last_token_with_any_padding() -> None:
    critic = CriticModule(tiny_model(), seed=1).eval()
    states = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10), (1, 2)]
    with torch.no_grad():
        unpadded_values = [
            float(critic(ModelInputs(torch.tensor([state]), torch.tensor([len(state) - 1]))))
            for state in states
        ]
    assert len(set(unpadded_values)) == 4
    assert state_values(critic, torch.device("cpu"), list(map(token_array, states))) == pytest.approx(
        unpadded_values, abs=1e-6
    )


# Advantages


def make_episode(advantages: list[float] | None, trained: list[bool], ends: tuple[int, ...]) -> Episode:
    (answer, *_) = mdp.all_trajectories()
    (untrained_episode,), _ = mdp.assign_credit(NoCredit(), [answer])
    answer = {"reward": 1.0, "response_ids": (2,) * len(trained), "step_ends": ends}
    return replace(untrained_episode, trained=trained, advantages=advantages, **answer)


def test_the_advantage_of_a_step_is_that_of_its_trained_tokens_or_missing() -> None:
    trained_episode = make_episode([0.5, 0.5, 0.25, -1.0], [True, False, False, True], (2, 3, 4))
    assert advantages_of_episode(trained_episode, None) == [0.5, None, -1.0]
    without_advantages = make_episode(None, [True] * 4, (2, 3, 4))
    assert advantages_of_episode(without_advantages, None) is None
    assert advantages_of_episode(without_advantages, [0.5, 0.25, 0.75]) == [-0.25, 0.5, 0.25]


def test_missing_values_are_counted_and_left_out() -> None:
    rows = AdvantageDistribution._rows(0, make_episode(None, [True] * 4, (1, 2, 3, 4)), None, (0.5, 1.0))
    assert [row["value"] for row in rows] == [0.5, 1.0, None, None], "values may end before the steps do"
    numbers = AdvantageDistribution(bins=2).summarise(rows)
    assert numbers["advantage"]["all"] == {"count": 0, "missing": 4}
    assert numbers["advantage"]["histogram"] is None
    first, second = numbers["value"]["by_position"]
    assert (first["count"], first["mean"], second["count"], second["missing"]) == (2, 0.75, 0, 2)
    assert describe([0.0, None, 1.0])["zero"] == 0.5
    assert describe([0.0, None, 1.0])["missing"] == 1


def test_the_values_of_steps_are_drawn_also_where_no_step_has_an_advantage(tmp_path: Path) -> None:
    rows = AdvantageDistribution._rows(0, make_episode(None, [True] * 4, (2, 4)), None, (0.5, 1.0))
    analyzer = AdvantageDistribution(bins=2)
    figure = analyzer.draw({"PPO": {"numbers": analyzer.summarise(rows)}})
    _, _, value_panel = figure.axes
    (line,) = value_panel.get_lines()
    assert list(line.get_ydata()) == [0.5, 1.0]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["PPO"]
    save_figure(figure, tmp_path)


# Diversity


def test_equal_answers_overlap_completely_and_different_ones_not_at_all() -> None:
    answers = ([(1, 2, 3), (1, 2, 3)], [(1, 2, 3), (4, 5, 6)], [(1, 2, 3)])
    assert [measure_overlap(group, 4) for group in answers] == [1, 0, None]
    # Unigrams share 2 of 2 + 2, bigrams 1 of 2 with none in common.
    assert measure_overlap([(1, 2), (2, 1)], 2) == pytest.approx((1 + 0) / 2)
    assert distinct_ngrams([(1, 2), (1, 2)], 2) == pytest.approx((2 / 4 + 1 / 2) / 2)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6).map(tuple), min_size=2, max_size=5), st.randoms())
def test_diversity_does_not_depend_on_the_order_and_stays_between_0_and_1(answers, draw) -> None:
    shuffled = list(answers)
    draw.shuffle(shuffled)
    assert measure_overlap(answers, 3) == pytest.approx(measure_overlap(shuffled, 3))
    assert 0 <= measure_overlap(answers, 3) <= 1
    if any(answers):
        assert 0 < distinct_ngrams(answers, 3) <= 1
    assert measure_overlap([*answers, *answers], 3) >= measure_overlap(answers, 3) - 1e-9, (
        "copies make nothing more diverse"
    )


# Weights


def test_the_squared_distances_of_groups_add_up_to_that_of_all_weights() -> None:
    start = dict(tiny_model(0).named_parameters())
    moved = dict(tiny_model(1).named_parameters())
    with torch.no_grad():
        weight_distances = measure_distances(moved, start)
        difference = torch.cat([(moved[name] - start[name]).flatten() for name in start]).double()
        start_weights = torch.cat([start[name].flatten() for name in start]).double()
    norm = float(difference.norm())
    assert weight_distances["all"] == pytest.approx(
        {"absolute": norm, "relative": norm / float(start_weights.norm())}
    )
    assert list(weight_distances["groups"]) == ["embeddings", "layer 0", "layer 1", "rest", "head"]
    assert math.hypot(*(group["absolute"] for group in weight_distances["groups"].values())) == pytest.approx(
        norm
    )
    assert measure_distances(start, start)["all"] == {"absolute": 0, "relative": 0}
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        measure_distances({name: weight for name, weight in moved.items() if name != "lm_head.weight"}, start)
    assert group_of("transformer.h.11.attn.c_attn.weight") == "layer 11"


# Points and intervals


def test_points_are_chosen_evenly_with_both_ends() -> None:
    assert spread_evenly(range(101), 5) == [0, 25, 50, 75, 100]
    assert spread_evenly([3, 7], 10) == [3, 7]
    assert spread_evenly([3, 7, 9], 1) == [9]
    assert choose_points((4, 0, 4), [0, 2, 4], 10, "a checkpoint", "") == [0, 4]
    with pytest.raises(ValueError, match="3 is not the number of a checkpoint: there are 0, 2"):
        choose_points((3,), [0, 2], 10, "a checkpoint", "there are 0, 2")


def test_intervals_treat_states_of_one_problem_as_dependent() -> None:
    values = np.random.default_rng(0).normal(size=40)
    of_single = Bootstrap(range(40), seed=0)(mean_of(values))
    problems = [i for i in range(40) for _ in range(25)]
    of_copies = Bootstrap(problems, seed=0)(mean_of(np.repeat(values, 25)))
    assert of_single["low"] < of_single["value"] < of_single["high"]
    widths = [interval["high"] - interval["low"] for interval in (of_single, of_copies)]
    assert widths[1] == pytest.approx(widths[0], rel=0.05)
    half_width = 1.96 * values.std(ddof=1) / math.sqrt(40)
    assert widths[0] == pytest.approx(2 * half_width, rel=0.1)


def test_a_mean_of_nothing_and_an_undefined_correlation_have_no_number() -> None:
    no_interval = {"value": None, "low": None, "high": None}
    assert Bootstrap([], seed=0)(mean_of([])) == no_interval
    assert (
        Bootstrap(["p", "q"], seed=0)(lambda rows: correlation(np.ones(2)[rows], np.ones(2)[rows]))
        == no_interval
    )
    assert Bootstrap(["p", "q"], seed=0)(mean_of([math.nan, 2.0]))["value"] == 2


def test_right_side_tells_whether_an_estimate_is_on_the_same_side_of_a_half() -> None:
    assert share_on_right_side([0.9, 0.1, 0.5, 0.9], [0.6, 0.6, 0.9, 0.5]).tolist() == [1, 0, 0.5, 0.5]


MORE_THAN_ALL_STATES = 1000


def many_answers() -> list[Trajectory]:
    """Returns every answer to each of ten problems."""
    answers = []
    for problem in mdp.problems(10):
        for sample, ids in enumerate(mdp.answers()):
            answers.append(mdp.trajectory(ids, problem, sample))
    return answers


def exact_value(state_ids: TokenIds) -> float:
    return mdp.value(mdp.response_part(state_ids))


def test_with_the_distribution_itself_as_the_sample_all_errors_are_the_injected_ones() -> None:
    analyzer = ValueAccuracy(rollouts=mdp.EXACT_SAMPLES, samples=(mdp.EXACT_SAMPLES,), repeats=1)
    states = choose_states(mdp.all_trajectories(), MORE_THAN_ALL_STATES, seed=1, point=3)
    states += choose_states(mdp.all_trajectories(), MORE_THAN_ALL_STATES, seed=1, point=3, prompts=True)
    context = mdp.context(engine=mdp.ExactEngine())
    rows = analyzer.measure(
        context, states, lambda ids: [exact_value(state_ids) + 0.125 for state_ids in ids]
    )
    for state, row in zip(states, rows, strict=True):
        assert row["truth"] == pytest.approx(mdp.value(state.prefix_ids))
    numbers = analyzer.summarise(rows)["all"]
    monte_carlo, critic = numbers["estimators"]["monte_carlo_64"], numbers["estimators"]["critic"]
    errors = {"bias": 0.125, "mean_absolute_error": 0.125, "mean_squared_error": 1 / 64}
    for part in ("within", "prompts"):
        assert monte_carlo[part]["mean_absolute_error"]["value"] == 0
        assert monte_carlo[part]["accuracy"]["value"] >= 0.5
        assert {name: critic[part][name]["value"] for name in errors} == pytest.approx(errors)
    assert critic["within"]["correlation"]["value"] == pytest.approx(1)
    assert numbers["states"]["prompts"]["count"] == 1, "there is one problem, so one prompt"
    distinct = {state.prefix_ids for state in states}
    assert len(distinct) == len(states) == 7, "the prompt, and the states before a second or third letter"


def test_monte_carlo_errors_are_as_large_as_theory_says() -> None:
    analyzer = ValueAccuracy(rollouts=256, samples=(1, 3, 9), repeats=40)
    states = choose_states(many_answers(), MORE_THAN_ALL_STATES, seed=1, point=3)
    rows = analyzer.measure(mdp.context(), states, None)
    values = [mdp.value(state.prefix_ids) for state in states]
    variance = math.fsum(value * (1 - value) for value in values) / len(values)
    estimators = analyzer.summarise(rows)["all"]["estimators"]
    assert list(estimators) == ["monte_carlo_1", "monte_carlo_3", "monte_carlo_9"], "there is no critic here"
    for k in (1, 3, 9):
        error = estimators[f"monte_carlo_{k}"]["within"]
        assert error["mean_squared_error"]["value"] == pytest.approx(variance * (1 / k + 1 / 256), rel=0.12)
        assert error["bias"]["low"] <= 0.01 and error["bias"]["high"] >= -0.01
        assert abs(error["bias"]["value"]) < 0.02
    bound = max(row["truth_error"] for row in rows)
    assert max(abs(row["truth"] - value) for row, value in zip(rows, values, strict=True)) < 5 * bound


def test_the_truth_shares_no_sample_with_the_estimates_nor_with_the_credit_of_the_run() -> None:
    engine = mdp.TabularEngine()
    context = mdp.context(engine=engine)
    states = choose_states(mdp.all_trajectories(), MORE_THAN_ALL_STATES, seed=1, point=3)
    nodes = [(state.trajectory, state.prefix_ids) for state in states]
    seeds_by_purpose = []
    for sample in (
        lambda: continue_prefixes(context, nodes, 256, TRUTH_PURPOSE),
        lambda: continue_prefixes(context, nodes, 256, ESTIMATE_PURPOSE),
        lambda: MonteCarlo(samples=256).assign(context, trees_of(mdp.all_trajectories())),
    ):
        engine.requests.clear()
        sample()
        seeds_by_purpose.append({request.seed + i for request in engine.requests for i in range(request.n)})
    for first, second in itertools.combinations(seeds_by_purpose, 2):
        assert not first & second


def test_no_two_estimators_share_a_sample() -> None:
    means = ValueAccuracy(samples=(1, 3), repeats=2)._mean_rewards_by_k([1, 0, 1, 1, 1, 0, 0, 0])
    assert means == {"monte_carlo_1": [1, 0], "monte_carlo_3": [1, 0]}


def test_states_are_chosen_as_often_as_the_policy_reaches_them() -> None:
    common, rare = (mdp.trajectory(mdp.encode(text) + (mdp.EOS,)) for text in ("a;a", "b;b"))
    first = [choose_states([common] * 9 + [rare], 1, seed, point=0)[0].trajectory for seed in range(300)]
    assert 0.05 < sum(trajectory is rare for trajectory in first) / 300 < 0.16
    assert choose_states([common] * 9, MORE_THAN_ALL_STATES, 0, 0) == choose_states(
        [common] * 9, MORE_THAN_ALL_STATES, 0, 0
    )
    (state,) = choose_states([common] * 9, MORE_THAN_ALL_STATES, 0, 0)
    assert (state.prefix_ids, state.position) == (mdp.encode("a;"), 0.5)


def test_steps_are_ranked_by_their_exact_values() -> None:
    n = mdp.EXACT_SAMPLES
    analyzer = ActionRanking(rollouts=n, samples=(n,), alternatives=n, at_least=2)
    states = choose_states(mdp.all_trajectories(), MORE_THAN_ALL_STATES, seed=1, point=3)
    context = mdp.context(engine=mdp.ExactEngine())
    rows = analyzer.measure(context, states, lambda ids: [-exact_value(state_ids) for state_ids in ids])
    assert {row["text"] for row in rows} == {"a;", "b;"}, "from a third step, the answer ends"
    for row in rows:
        assert sorted(row["steps"]) == ["a;", "b;"]
        for step, truth in zip(row["steps"], row["truths"], strict=True):
            assert truth == pytest.approx(mdp.value(mdp.encode(row["text"] + step)))
    estimators = analyzer.summarise(rows)["all"]["estimators"]
    measured = {}
    for name, scores in estimators.items():
        measured[name] = [scores[measure]["value"] for measure in ("pairwise", "best")]
    assert measured == {"monte_carlo_64": [1, 1], "critic": [0, 0]}, "the critic returned negated values"


def test_a_tie_counts_half_in_pairs_and_is_shared_in_the_best() -> None:
    truths = [0.2, 0.5, 0.9]
    assert score_pairs(truths, [0.0, 0.0, 0.0]) == 0.5
    assert score_pairs(truths, [0.0, 0.0, 1.0]) == pytest.approx(2.5 / 3)
    assert math.isnan(score_pairs([0.5, 0.5], [0.0, 1.0])), "no order, no number"
    assert score_pairs([0.5, 0.52, 0.9], [0.6, 0.5, 0.9], errors=[0.03, 0.03, 0.03]) == 1
    assert score_best(truths, [0.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert score_best(truths, [0.0, 1.0, 1.0]) == 0.5
    assert score_best([0.9, 0.9, 0.1], [1.0, 0.0, 0.0]) == 1


def test_random_guesses_are_right_as_often_as_chance() -> None:
    truths = [0.1, 0.4, 0.4, 0.8, 0.8]
    orders = list(itertools.permutations(range(5)))
    assert sum(score_pairs(truths, order) for order in orders) / len(orders) == pytest.approx(0.5)
    chance = score_best(truths, [0.0] * 5)
    assert chance == pytest.approx(2 / 5)
    assert sum(score_best(truths, order) for order in orders) / len(orders) == pytest.approx(chance)
    tied = [score_best(truths, [random.Random(i).randrange(2) for _ in truths]) for i in range(4000)]
    assert sum(tied) / len(tied) == pytest.approx(chance, abs=0.02)


def test_values_and_advantages_have_intervals_from_the_errors_of_values() -> None:
    credit = make_step_credit([1, 3], 1.0, [0.25, 0.25, 0.25], [1, 3], (0.5, 0.75), (0.03, 0.04))
    low, high = (pytest.approx(0.5 + sign * 0.03 * NORMAL_QUANTILE) for sign in (-1, 1))
    assert credit.values[0] == Shown(0.5, low, high)
    # The first interval is of a difference of two values, the second of a value and a reward without error.
    highs = [0.25 + 0.05 * NORMAL_QUANTILE, 0.25 + 0.04 * NORMAL_QUANTILE]
    assert [advantage.high for advantage in credit.advantages] == pytest.approx(highs)


def test_the_interval_of_a_value_ends_at_the_highest_and_lowest_reward() -> None:
    credit = make_step_credit([1], -2.0, [0.0], [1], (0.9,), (5.0,))
    assert credit.values[0] == Shown(0.9, -2.0, 1.0)


def test_steps_that_are_credited_together_share_one_value_and_its_interval() -> None:
    credit = make_step_credit(
        [1, 2, 3], 0.0, [-0.5] * 3, [1, 2, 3], (0.5, 0.5, 0.5), (0.1, math.inf, math.inf)
    )
    assert [value is None for value in credit.values] == [False, True, True]
    assert [advantage.high for advantage in credit.advantages] == pytest.approx(
        [-0.5 + 0.1 * NORMAL_QUANTILE] * 3
    )


def test_credit_with_other_steps_is_mapped_to_the_steps_of_the_answer() -> None:
    # The credit has cuts at 2 and 4, and the steps of the answer end at 3 and 4.
    credit = make_step_credit([3, 4], 1.0, [0.3, 0.3, 0.6, 0.9], [2, 4], (0.1, 0.4), (0.1, 0.1))
    assert credit.advantages[0] == Shown(pytest.approx(0.4))
    assert credit.values[1] is None
    assert credit.advantages[1].low is not None


def test_credit_of_whole_answers_has_neither_values_nor_intervals() -> None:
    credit = make_step_credit([1, 2], 1.0, [1.5, 1.5])
    assert credit.values == (None, None)
    assert credit.advantages == (Shown(1.5), Shown(1.5))
