"""The analyzers' formulas against exact values and plain references."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rollouts import tabular_mdp as mdp
from tests.trainers.helpers import tiny_model
from treetune.models.logprobs import CriticModule, ModelInputs
from treetune.vocabulary import Episode, token_array
from treetune_lab.analyzers.advantage_distribution import AdvantageDistribution, describe, steps_advantages
from treetune_lab.analyzers.distance import KlToReference, answer_kl, distances, group_of
from treetune_lab.analyzers.diversity import distinct_ngrams, overlap
from treetune_lab.analyzers.figures import Bootstrap, correlation, mean_of, right_side
from treetune_lab.analyzers.gradients import GradientSums
from treetune_lab.analyzers.points import choose, evenly
from treetune_lab.analyzers.stored import state_values

# Gradients

VECTORS = {(1.0, 0.0): 0.5, (3.0, 2.0): 0.25, (-1.0, 4.0): 0.25}
"""A gradient that is one of three, with these probabilities."""


@pytest.mark.parametrize("count", [2, 3, 4])
def test_variance_and_norm_of_the_gradient_are_unbiased(count: int) -> None:
    mean = sum(p * np.array(g) for g, p in VECTORS.items())
    variance = sum(p * np.square(np.array(g) - mean).sum() for g, p in VECTORS.items())
    expected = {"variance": 0.0, "squared_norm": 0.0}
    for drawn in itertools.product(VECTORS, repeat=count):
        sums = GradientSums(batch_size=8)
        for vector in drawn:
            sums.add([torch.tensor(vector[:1]), torch.tensor(vector[1:])])
        for name in expected:
            expected[name] += math.prod(VECTORS[v] for v in drawn) * sums.numbers()[name]
    assert expected["variance"] == pytest.approx(variance)
    assert expected["squared_norm"] == pytest.approx(np.square(mean).sum())


def test_gradient_statistics_equal_those_of_all_gradients_at_once() -> None:
    gradients = np.random.default_rng(0).normal(0.5, 1.0, size=(12, 30))
    sums = GradientSums(batch_size=16)
    for row in gradients:
        sums.add([torch.tensor(row[:10]).reshape(2, 5), torch.tensor(row[10:])])
    numbers = sums.numbers()
    variance = gradients.var(0, ddof=1).sum()
    norm = np.square(gradients.mean(0)).sum() - variance / 12
    products = gradients @ gradients.T
    pairs = products[~np.eye(12, dtype=bool)].mean()
    assert numbers["variance"] == pytest.approx(variance)
    assert numbers["noise_scale"] == pytest.approx(16 * variance / norm)
    assert numbers["relative_variance"] == pytest.approx(variance / norm)
    assert numbers["cosine"] == pytest.approx(pairs / products.diagonal().mean())


def test_a_gradient_that_drowns_in_noise_has_no_noise_scale() -> None:
    sums = GradientSums(batch_size=4)
    for vector in ((1.0, 0.0), (-1.0, 0.0)):
        sums.add([torch.tensor(vector)])
    assert sums.numbers()["noise_scale"] is None
    lonely = GradientSums(batch_size=4)
    lonely.add([torch.ones(2)])
    with pytest.raises(ValueError, match="1 minibatches"):
        lonely.numbers()


# KL


def other_policy(response: tuple[int, ...]) -> dict[int, float]:
    """As `mdp.policy`, with other probabilities."""
    tokens = sorted(mdp.policy(response))
    weights = [1.0 + 2 * i + len(response) for i in range(len(tokens))]
    return {token: w / sum(weights) for token, w in zip(tokens, weights, strict=True)}


def test_both_estimators_expect_the_exact_kl_of_whole_answers() -> None:
    answers = mdp.answers()
    starts = [0, *itertools.accumulate(len(answer) for answer in answers)]
    policy, start = (
        torch.tensor([math.log(p(a[:t])[a[t]]) for a in answers for t in range(len(a))], dtype=torch.float64)
        for p in (mdp.policy, other_policy)
    )
    probability_of_start = [math.exp(start[a:b].sum()) for a, b in itertools.pairwise(starts)]
    assert sum(probability_of_start) == pytest.approx(1)
    exact = sum(p * math.log(p / q) for p, q in zip(answers.values(), probability_of_start, strict=True))
    assert exact > 0.05
    for values in answer_kl(policy, start, starts).values():
        assert sum(p * v for p, v in zip(answers.values(), values, strict=True)) == pytest.approx(exact)


def test_accuracy_is_the_share_of_correct_answers_and_not_what_they_earn_on_average() -> None:
    rewards = {"p0": (0.5, 1.0), "p1": (0.0, 1.2)}
    rows = [
        {"checkpoint": 3, "problem": problem, "reward": reward, "k1": 0.1, "k3": 0.1, "tokens": 4}
        for problem, of_problem in rewards.items()
        for reward in of_problem
    ]
    numbers = KlToReference().summarise(rows)["by_checkpoint"]["3"]
    assert numbers["accuracy"]["value"] == pytest.approx(0.5)
    assert numbers["reward"]["value"] == pytest.approx(0.675)


# The critic


def test_a_states_value_is_read_at_its_last_token_whatever_it_is_padded_with() -> None:
    critic = CriticModule(tiny_model(), seed=1).eval()
    states = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10), (1, 2)]
    with torch.no_grad():
        alone = [
            float(critic(ModelInputs(torch.tensor([state]), torch.tensor([len(state) - 1]))))
            for state in states
        ]
    assert len(set(alone)) == 4
    assert state_values(critic, torch.device("cpu"), list(map(token_array, states))) == pytest.approx(
        alone, abs=1e-6
    )


# Advantages


def episode(advantages: list[float] | None, trained: list[bool], ends: tuple[int, ...]) -> Episode:
    return Episode(
        prompt_ids=(1,),
        response_ids=(2,) * len(trained),
        trained=tuple(trained),
        reward=1.0,
        group="p",
        trajectory="p#0",
        policy_version=0,
        advantages=None if advantages is None else tuple(advantages),
        step_ends=ends,
    )


def test_a_steps_advantage_is_that_of_its_trained_tokens_and_missing_where_it_has_none() -> None:
    made = episode([0.5, 0.5, 0.25, -1.0], [True, False, False, True], (2, 3, 4))
    assert steps_advantages(made, None) == [0.5, None, -1.0]
    without = episode(None, [True] * 4, (2, 3, 4))
    assert steps_advantages(without, None) is None
    assert steps_advantages(without, [0.5, 0.25, 0.75]) == [-0.25, 0.5, 0.25]


def test_missing_values_are_counted_and_left_out() -> None:
    rows = AdvantageDistribution._rows(0, episode(None, [True] * 4, (1, 2, 3, 4)), None, (0.5, 1.0))
    assert [row["value"] for row in rows] == [0.5, 1.0, None, None], "values may end before the steps do"
    numbers = AdvantageDistribution(bins=2).summarise(rows)
    assert numbers["advantage"]["all"] == {"count": 0, "missing": 4}
    assert numbers["advantage"]["histogram"] is None
    first, second = numbers["value"]["by_position"]
    assert (first["count"], first["mean"], second["count"], second["missing"]) == (2, 0.75, 0, 2)
    assert describe([0.0, None, 1.0])["zero"] == 0.5


# Diversity


def test_equal_answers_overlap_wholly_and_strange_ones_not_at_all() -> None:
    assert overlap([(1, 2, 3), (1, 2, 3)], 4) == 1
    assert overlap([(1, 2, 3), (4, 5, 6)], 4) == 0
    assert overlap([(1, 2, 3)], 4) is None
    # Unigrams share 2 of 2 + 2, bigrams 1 of 2 with none in common.
    assert overlap([(1, 2), (2, 1)], 2) == pytest.approx((1 + 0) / 2)
    assert distinct_ngrams([(1, 2), (1, 2)], 2) == pytest.approx((2 / 4 + 1 / 2) / 2)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6).map(tuple), min_size=2, max_size=5), st.randoms())
def test_diversity_does_not_depend_on_the_order_and_stays_between_0_and_1(answers, draw) -> None:
    shuffled = list(answers)
    draw.shuffle(shuffled)
    assert overlap(answers, 3) == pytest.approx(overlap(shuffled, 3))
    assert 0 <= overlap(answers, 3) <= 1
    if any(answers):
        assert 0 < distinct_ngrams(answers, 3) <= 1
    assert overlap([*answers, *answers], 3) >= overlap(answers, 3) - 1e-9, "copies make nothing more diverse"


# Weights


def test_the_groups_squares_add_up_to_the_whole_distance() -> None:
    start = dict(tiny_model(0).named_parameters())
    moved = dict(tiny_model(1).named_parameters())
    with torch.no_grad():
        found = distances(moved, start)
        flat = torch.cat([(moved[name] - start[name]).flatten() for name in start]).double()
        size = torch.cat([start[name].flatten() for name in start]).double()
    assert found["all"]["absolute"] == pytest.approx(float(flat.norm()))
    assert found["all"]["relative"] == pytest.approx(float(flat.norm() / size.norm()))
    assert list(found["groups"]) == ["embeddings", "layer 0", "layer 1", "rest", "head"]
    squares = sum(group["absolute"] ** 2 for group in found["groups"].values())
    assert squares == pytest.approx(found["all"]["absolute"] ** 2)
    assert distances(start, start)["all"] == {"absolute": 0, "relative": 0}
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        distances({name: w for name, w in moved.items() if name != "lm_head.weight"}, start)
    assert group_of("transformer.h.11.attn.c_attn.weight") == "layer 11"


# Points and intervals


def test_points_are_chosen_evenly_with_both_ends() -> None:
    assert evenly(range(101), 5) == [0, 25, 50, 75, 100]
    assert evenly([3, 7], 10) == [3, 7]
    assert evenly([3, 7, 9], 1) == [9]
    assert choose((4, 0, 4), [0, 2, 4], 10, "a checkpoint", "") == [0, 4]
    with pytest.raises(ValueError, match="3 is not the number of a checkpoint: there are 0, 2"):
        choose((3,), [0, 2], 10, "a checkpoint", "there are 0, 2")


def test_intervals_know_that_states_of_one_problem_are_not_independent() -> None:
    values = np.random.default_rng(0).normal(size=40)
    apart = Bootstrap(range(40), seed=0)(mean_of(values))
    copied = Bootstrap([i for i in range(40) for _ in range(25)], seed=0)(mean_of(np.repeat(values, 25)))
    assert apart["low"] < apart["value"] < apart["high"]
    width = [one["high"] - one["low"] for one in (apart, copied)]
    assert width[1] == pytest.approx(width[0], rel=0.05)
    half_width = 1.96 * values.std(ddof=1) / math.sqrt(40)
    assert width[0] == pytest.approx(2 * half_width, rel=0.1)


def test_what_is_not_there_has_no_number() -> None:
    nothing = {"value": None, "low": None, "high": None}
    assert Bootstrap([], seed=0)(mean_of([])) == nothing
    assert (
        Bootstrap(["p", "q"], seed=0)(lambda rows: correlation(np.ones(2)[rows], np.ones(2)[rows])) == nothing
    )
    assert Bootstrap(["p", "q"], seed=0)(mean_of([math.nan, 2.0]))["value"] == 2


def test_the_right_side_of_a_half() -> None:
    assert right_side([0.9, 0.1, 0.5, 0.9], [0.6, 0.6, 0.9, 0.5]).tolist() == [1, 0, 0.5, 0.5]
