"""Credits of the literature: each gives what a plain reference of its public code or formula gives, and its
expected gradient is the exact one where it says so, and as far off as stated where it doesn't."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np
import pytest

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from tests.rollouts.expectations import critic_of, expectation, knows_length_alone
from treetune.rollouts.base import Credit
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Trajectory
from treetune_lab.literature.james_stein import JamesStein
from treetune_lab.literature.optimal_token_baseline import OptimalTokenBaseline
from treetune_lab.literature.token_level import Distributions


def along(answer: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    ids = plain(answer.response_ids)
    chances = [list(mdp.policy(ids[:t]).values()) for t in range(len(ids))]
    squares = [sum(p * p for p in one) for one in chances]
    return np.array(squares), np.array([-sum(p * math.log(p) for p in one) for one in chances])


DISTRIBUTIONS = Distributions(lambda answers: [along(one) for one in answers])
CRITIC = critic_of(knows_length_alone)


def group(texts: str, problem: int = 0) -> list[Trajectory]:
    """Answers to a problem with the policy's log-probs; each ends with the end token."""
    answers = [(*mdp.encode(text), mdp.EOS) for text in texts.split()]
    of = mdp.problems(problem + 1)[problem]
    return [mdp.trajectory(one, of, i, logprobs=mdp.policy_logprobs(one)) for i, one in enumerate(answers)]


def credited(credit: Credit, answers: Sequence[Trajectory], *services: object) -> list[Episode]:
    return credit.assign(mdp.context(services=services), trees_of(answers))[0]


GROUP = group("a;a;b a;b;b a;a b")
OTHERS = group("a;a b b;a;a a;b;a", 1) + group("b;b;b a;a;a", 2)


@pytest.mark.parametrize("exact", [False, True])
def test_the_optimal_token_baseline_weighs_answers_by_the_energy_of_their_paths(exact: bool) -> None:
    """verl's: B_t over the answers that are so long; 0 where only the longest is left."""
    credit = OptimalTokenBaseline(squared_norms="exact" if exact else "of_sampled")
    answers = group("a;a;b a;b b a;a")
    energies = []
    for answer in answers:
        ids, energy = plain(answer.response_ids), 0.0
        energies.append([])
        for t, token in enumerate(ids):
            chances = mdp.policy(ids[:t])
            squares = sum(p * p for p in chances.values()) if exact else chances[token]
            energy += 1 - 2 * chances[token] + squares
            energies[-1].append(energy)
    lengths = [len(one) for one in energies]
    for own, episode in enumerate(credited(credit, answers, DISTRIBUTIONS)):
        for t, advantage in enumerate(episode.advantages):
            there = [i for i in range(4) if lengths[i] > t]
            total = sum(energies[i][t] for i in there)
            baseline = sum(answers[i].reward * energies[i][t] for i in there) / total
            expected = answers[own].reward - (baseline if len(there) > 1 else 0.0)
            assert advantage == pytest.approx(expected, abs=1e-6)


def test_the_james_stein_baseline_shrinks_towards_the_other_problems() -> None:
    problems = [GROUP, OTHERS[:4], OTHERS[4:]]
    rewards = [[one.reward for one in answers] for answers in problems]
    found = iter(credited(JamesStein(), [one for answers in problems for one in answers]))
    for number, own in enumerate(rewards):
        others = rewards[:number] + rewards[number + 1 :]
        target = fmean(fmean(one) for one in others)
        v = fmean(variance(one) / len(one) for one in others)
        s = fmean((fmean(one) - target) ** 2 for one in others)
        shrinkage = v / (v + s + 1e-6)
        assert 0 < shrinkage < 1
        for index, reward in enumerate(own):
            alone = fmean(own[:index] + own[index + 1 :])
            expected = reward - (1 - shrinkage) * alone - shrinkage * target
            assert next(found).advantages == pytest.approx(
                [expected] * len(plain(problems[number][index].response_ids)), abs=1e-12
            )


def test_the_james_stein_baseline_of_one_problem_alone_is_rloos() -> None:
    rewards = [one.reward for one in GROUP]
    for index, episode in enumerate(credited(JamesStein(), GROUP)):
        expected = rewards[index] - fmean(rewards[:index] + rewards[index + 1 :])
        assert episode.advantages == pytest.approx([expected] * len(episode.advantages))


def test_the_james_stein_baseline_is_the_same_on_two_ranks() -> None:
    def work(context):
        share = [GROUP, OTHERS[:4], OTHERS[4:]]
        own = [one for i, one in enumerate(share) if i * context.ranks.world_size // 3 == context.ranks.rank]
        return JamesStein().assign(context, trees_of([one for answers in own for one in answers]))

    mdp.assert_ranks_agree(2, work)


@dataclass(frozen=True)
class Case:
    """A credit, answers to a problem, and by how much the expected gradient is off, with its cosine."""

    credit: Credit
    answers: int
    bias: float = 0.0
    cosine: float = 1.0
    service: object = None
    others: Sequence[Trajectory] = ()


CASES = [
    Case(OptimalTokenBaseline(), 3, 0.3326, 0.9999),
    Case(OptimalTokenBaseline(squared_norms="exact"), 3, 0.3326, 0.9998, DISTRIBUTIONS),
    Case(JamesStein(), 2),
    Case(JamesStein(), 2, others=OTHERS),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.credit))
def test_the_expected_gradient_is_as_far_off_as_stated(case: Case) -> None:
    found = expectation(case.credit, case.answers, case.service, case.others, logprobs=True)
    assert found.bias_and_cosine == pytest.approx((case.bias, case.cosine), abs=5e-5)
    assert case.bias or found.bias_and_cosine[0] < 1e-9


def test_every_credit_of_the_literature_is_held_against_the_exact_gradient() -> None:
    known = {type(case.credit) for case in CASES}
    assert {one for one in Credit.registered().values() if "literature" in one.__module__} <= known
