"""Where a published formula and ours differ, how much that is: exact expectations over all groups of answers
in the tests' language. docs/methods/policy_gradient.md tells the figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import pstdev

import numpy as np
import pytest
import torch

from tests.rollouts import tabular_mdp as mdp
from treetune.rollouts.credit import group_advantages, leave_one_out_advantages
from treetune.trainers.preparation import rewards_to_come

ANSWERS = list(mdp.answers().items())
SLOTS = {slot: place for place, slot in enumerate(mdp.exact_gradient())}
EXACT = np.array(list(mdp.exact_gradient().values()))


def score(answer: mdp.Ids, advantages: Sequence[float]) -> np.ndarray:
    vector = np.zeros(len(SLOTS))
    for slot, slope in mdp.score_gradient(answer, advantages).items():
        vector[SLOTS[slot]] = slope
    return vector


def groups(size: int) -> list[tuple[float, list[mdp.Ids]]]:
    """All groups, each with its probability."""
    return [
        (math.prod(p for _, p in group), [answer for answer, _ in group])
        for group in itertools.product(ANSWERS, repeat=size)
    ]


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize(("size", "factor"), [(2, 1.414), (4, 1.155), (8, 1.069), (16, 1.033), (64, 1.008)])
def test_dividing_by_the_deviation_of_n_makes_all_advantages_larger_alike(size: int, factor: float) -> None:
    """GRPO's paper says std; its implementations divide by that of n - 1, as we do."""
    rewards = [float(place % 3 == 0) for place in range(size)]
    mean = sum(rewards) / size
    for ours, reward in zip(group_advantages(rewards, std=True, eps=1e-6), rewards, strict=True):
        assert (reward - mean) / pstdev(rewards) / ours == pytest.approx(factor, abs=1e-3)
    assert math.sqrt(size / (size - 1)) == pytest.approx(factor, abs=1e-3)


def _of_two_groups(lengthening: int) -> tuple[float, float, float]:
    """Of a minibatch of two groups of two answers, the second to a problem whose tokens count `lengthening`
    times: the cosine between the mean over each group's tokens, as DAPO's paper has it, and that over the
    minibatch's, how much longer the latter is, and what the second group weighs against the first."""
    probabilities, gradients, lengths = [], [], []
    for probability, answers in groups(2):
        advantages = group_advantages([mdp.reward(answer) for answer in answers], std=True, eps=1e-6)
        pairs = zip(answers, advantages, strict=True)
        gradients.append(sum(score(answer, [own] * len(answer)) for answer, own in pairs))
        probabilities.append(probability)
        lengths.append(sum(map(len, answers)))
    p_G, g_GD, short_G = np.array(probabilities), np.array(gradients), np.array(lengths, float)
    long_G = lengthening * short_G
    by_group = [p_G / short_G @ g_GD / 2, lengthening * (p_G / long_G @ g_GD) / 2]
    both_GG = p_G[:, None] * p_G / (short_G[:, None] + long_G)
    of_minibatch = [both_GG.sum(1) @ g_GD, lengthening * (both_GG.sum(0) @ g_GD)]
    published, ours = np.concatenate(by_group), np.concatenate(of_minibatch)
    weights = [np.linalg.norm(one) / np.linalg.norm(two) for one, two in zip(of_minibatch, by_group)]
    return (
        cosine(published, ours),
        float(np.linalg.norm(ours) / np.linalg.norm(published)),
        float(weights[1] / weights[0]),
    )


@pytest.mark.parametrize(
    ("lengthening", "measured"),
    [(1, (0.9991, 1.0605, 1.0)), (2, (0.9560, 1.1022, 1.8731)), (4, (0.8719, 1.1928, 3.5461))],
)
def test_the_mean_over_a_minibatchs_tokens_weighs_groups_by_their_length(
    lengthening: int, measured: tuple[float, float, float]
) -> None:
    assert _of_two_groups(lengthening) == pytest.approx(measured, abs=1e-4)


def _reference(state: mdp.Ids) -> dict[int, float]:
    """Halfway from the policy to even chances."""
    chances = mdp.policy(state)
    return {token: (p + 1 / len(chances)) / 2 for token, p in chances.items()}


def _penalties(answer: mdp.Ids) -> list[float]:
    """Of each token, log p - log p_ref (k1)."""
    states = [(answer[:place], token) for place, token in enumerate(answer)]
    return [math.log(mdp.policy(state)[token] / _reference(state)[token]) for state, token in states]


Advantages = Callable[[Sequence[mdp.Ids], float], list[list[float]]]


def published(answers: Sequence[mdp.Ids], coef: float) -> list[list[float]]:
    """RLOO's paper: the whole answer's penalty is in the reward that is compared."""
    rewards = [mdp.reward(answer) - coef * sum(_penalties(answer)) for answer in answers]
    pairs = zip(answers, leave_one_out_advantages(rewards), strict=True)
    return [[own] * len(answer) for answer, own in pairs]


def ours(answers: Sequence[mdp.Ids], coef: float) -> list[list[float]]:
    """The preset: compared without, and each token answers for its own penalty and those behind it."""
    given = leave_one_out_advantages([mdp.reward(answer) for answer in answers])
    starts = [0, *itertools.accumulate(map(len, answers))]
    advantages_N = torch.tensor(
        [own for answer, own in zip(answers, given, strict=True) for _ in answer], dtype=torch.float64
    )
    penalties_N = coef * torch.tensor(
        [d for answer in answers for d in _penalties(answer)], dtype=torch.float64
    )
    of_all = (advantages_N - rewards_to_come(starts, penalties_N)).tolist()
    return [of_all[a:b] for a, b in itertools.pairwise(starts)]


def mean_and_variance(advantages: Advantages, coef: float, size: int = 2) -> tuple[np.ndarray, float]:
    mean, square = np.zeros(len(SLOTS)), 0.0
    for probability, answers in groups(size):
        rows = zip(answers, advantages(answers, coef), strict=True)
        gradient = np.sum([score(answer, own) for answer, own in rows], axis=0) / size
        mean += probability * gradient
        square += probability * float(gradient @ gradient)
    return mean, square - float(mean @ mean)


@pytest.mark.parametrize(("coef", "ratio"), [(0.0, 1.0), (0.05, 1.0061), (0.5, 1.0313)])
def test_a_penalty_outside_of_what_is_compared_has_the_same_gradient_on_average(
    coef: float, ratio: float
) -> None:
    (theirs, their_variance), (own, own_variance) = (
        mean_and_variance(rule, coef) for rule in (published, ours)
    )
    assert np.abs(theirs - own).max() < 1e-9
    assert own_variance / their_variance == pytest.approx(ratio, abs=1e-4)
