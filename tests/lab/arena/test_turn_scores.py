"""Exact scores of credits in languages of turns.

These tests promise:

* The expected gradient of a credit is that of all groups in all orders.
* Unbiased credits have the true gradient.
* The noise of replayed alternatives is that of enumerated ones.
* The numbers of the audit are those of their definitions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np
import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.credit.base import Credit
from treetune.credit.grpo import Group
from treetune.credit.literature.gigpo import GroupInGroup
from treetune.credit.rloo import Rloo
from treetune.credit.trees import TreeCredit
from treetune.credit.values.siblings import Siblings
from treetune.credit.vineppo import MonteCarlo
from treetune.lab.arena.turn_scores import (
    Audit,
    TurnScore,
    enumerate_full_trees,
    enumerate_single_branchings,
    expected_influence_estimate,
    mean_distribution,
    measure_influence,
    possible_groups,
    score_group_credit,
    score_replays,
    score_trees,
    score_true_advantages,
)
from treetune.lab.arena.turn_tables import (
    PlayedAnswer,
    TurnTable,
    agreement,
    decisive_turn,
    further_turns,
    turn_tables,
)
from treetune.lab.arena.turns import TurnLanguage, TurnRewardCredit, by_index, by_return, padded

TABLES = turn_tables()
NAMES = list(TABLES)
UNBIASED_TREE = TreeCredit()


@pytest.mark.parametrize("name", NAMES)
def test_probabilities_of_all_answers_add_up_to_one(name: str) -> None:
    assert sum(answer.probability for answer in TABLES[name].answers) == pytest.approx(1)


@pytest.mark.parametrize("name", NAMES)
def test_the_true_gradient_is_that_of_rewards_without_a_baseline(name: str) -> None:
    """REINFORCE: E[R Σ ∇ log π]."""
    table = TABLES[name]
    gradient = sum(
        answer.probability * answer.reward * table.scores_KP(answer.turns).sum(0) for answer in table.answers
    )
    assert table.true_gradient == pytest.approx(gradient)


def test_the_language_of_further_turns_is_that_of_the_closed_form() -> None:
    table = further_turns(3, goes_on=0.8, earns=0.5)
    language = TurnLanguage(goes_on=(0.8, 0.8), earns=(0.5, 0.5, 0.5))
    # The derivative by the logit of "another turn" against "end" is that by the logit of action 0.
    assert table.true_gradient[[0, 2]] == pytest.approx(language.true_gradient())
    for answers in (2, 3):
        credit = TurnRewardCredit(baseline=by_index)
        score = score_group_credit(table, credit, answers)
        gradient = gradient_of_ordered_groups(table, advantages_by_index, answers)
        assert score.error == pytest.approx(error_of(table, gradient))
        assert gradient[[0, 2]] == pytest.approx(language.gradient_by_index(answers))


Rule = Callable[[Sequence[PlayedAnswer]], list[list[float]]]
"""Advantages of each turn of each answer of a group, written plainly."""


def gradient_of_ordered_groups(table: TurnTable, rule: Rule, size: int) -> np.ndarray:
    gradient = np.zeros_like(table.true_gradient)
    for group in itertools.product(table.answers, repeat=size):
        probability = math.prod(answer.probability for answer in group)
        for answer, advantages in zip(group, rule(group), strict=True):
            gradient += probability * (np.array(advantages) @ table.scores_KP(answer.turns)) / size
    return gradient


def error_of(table: TurnTable, gradient: np.ndarray) -> float:
    true = table.true_gradient
    return float(np.linalg.norm(gradient - true) / np.linalg.norm(true))


def advantages_by_index(group: Sequence[PlayedAnswer]) -> list[list[float]]:
    rows = []
    for index, answer in enumerate(group):
        others = [other for number, other in enumerate(group) if number != index]
        row = []
        for turn in range(len(answer.turns)):
            advantage = 0.0
            for number in range(turn, len(answer.turns)):
                rewards = [other.turns[number].reply.reward for other in others if len(other.turns) > number]
                advantage += answer.turns[number].reply.reward - (fmean(rewards) if rewards else 0.0)
            row.append(advantage)
        rows.append(row)
    return rows


def gigpo_advantages(group: Sequence[PlayedAnswer]) -> list[list[float]]:
    """Eq. 8 with ω = 1 and γ = 0.95, by the observation before each turn."""

    def discounted(answer: PlayedAnswer, turn: int) -> float:
        return sum(0.95**k * played.reply.reward for k, played in enumerate(answer.turns[turn:]))

    def anchor(answer: PlayedAnswer, turn: int) -> int | None:
        return answer.turns[turn - 1].reply.observation if turn else None

    returns: dict[int | None, list[float]] = {}
    for answer in group:
        for turn in range(len(answer.turns)):
            returns.setdefault(anchor(answer, turn), []).append(discounted(answer, turn))
    mean_reward = fmean(answer.reward for answer in group)
    rows = []
    for answer in group:
        row = []
        for turn in range(len(answer.turns)):
            step_advantage = discounted(answer, turn) - fmean(returns[anchor(answer, turn)])
            row.append(answer.reward - mean_reward + step_advantage)
        rows.append(row)
    return rows


@pytest.mark.parametrize("name", ["corridor", "unreliable tool", "further turns"])
def test_the_bias_of_gigpo_is_that_of_its_formula_over_all_ordered_groups(name: str) -> None:
    table = TABLES[name]
    score = score_group_credit(table, GroupInGroup(), size=3)
    gradient = gradient_of_ordered_groups(table, gigpo_advantages, size=3)
    assert score.error == pytest.approx(error_of(table, gradient))
    assert score.error > 0.05


UNBIASED: dict[str, Credit] = {
    "RLOO": Rloo(),
    "siblings": MonteCarlo(values=Siblings()),
    "padded": TurnRewardCredit(baseline=padded),
    "by return": TurnRewardCredit(baseline=by_return),
}


@pytest.mark.parametrize("credit", UNBIASED.values(), ids=UNBIASED)
@pytest.mark.parametrize("name", NAMES)
def test_unbiased_credits_have_the_true_gradient(name: str, credit: Credit) -> None:
    score = score_group_credit(TABLES[name], credit, size=2)
    assert score.error < 1e-9 and score.cosine == pytest.approx(1)


@pytest.mark.parametrize("name", NAMES)
def test_centring_on_the_group_mean_shrinks_the_gradient_by_a_factor_of_one_minus_1_over_n(
    name: str,
) -> None:
    score = score_group_credit(TABLES[name], Group(std=False), size=3)
    assert (score.error, score.cosine) == pytest.approx((1 / 3, 1))


@pytest.mark.parametrize("name", NAMES)
def test_replays_and_true_advantages_are_unbiased(name: str) -> None:
    for lam in (0.0, 1.0):
        assert score_replays(TABLES[name], size=2, alternatives=2, lam=lam).error < 1e-9
    assert score_true_advantages(TABLES[name], size=2).error < 1e-9


def test_the_noise_of_replays_falls_with_the_number_of_alternatives_to_that_of_true_advantages() -> None:
    table = TABLES["corridor"]
    exact = score_true_advantages(table, 2).variance
    noise = [score_replays(table, 2, alternatives, lam=0.0).variance - exact for alternatives in (5, 20)]
    # The environment of the corridor has no luck, so that Q(state, action) = r + V(next state), and the noise
    # falls as 1 / K.
    assert noise[0] == pytest.approx(4 * noise[1])


def test_the_noise_of_replays_is_that_of_all_alternatives() -> None:
    """Goes through everything that can be drawn for one answer and one alternative at each of its turns."""
    table = decisive_turn(1, turns=2)
    for lam in (0.0, 1.0):
        mean, squares = np.zeros_like(table.true_gradient), 0.0
        for answer in table.answers:
            states = [turn.state for turn in answer.turns]
            continuations = [
                table.continuations_from(state, 2 - number) for number, state in enumerate(states)
            ]
            for first, second in itertools.product(*continuations):
                probability = answer.probability * first.probability * second.probability
                after_first = answer.reward if lam else second.reward
                advantages = np.array([after_first - first.reward, answer.reward - second.reward])
                gradient = advantages @ table.scores_KP(answer.turns)
                mean += probability * gradient
                squares += probability * float(gradient @ gradient)
        score = score_replays(table, size=1, alternatives=1, lam=lam)
        assert score.variance == pytest.approx(squares - float(mean @ mean))
        assert score.turns == pytest.approx(2 + 2 + 1)


SMALL_TABLES = {"agreement": agreement(), "decisive": decisive_turn(1, turns=2), "further": further_turns(2)}


@pytest.mark.parametrize("name", SMALL_TABLES)
def test_trees_that_branch_everywhere_are_unbiased_with_reach(name: str) -> None:
    table = SMALL_TABLES[name]
    outcomes = enumerate_full_trees(table, ways=2)
    assert sum(part.probability for part in outcomes) == pytest.approx(1)
    for prior in (0.0, 2.0):
        assert score_trees(table, outcomes, 2, TreeCredit(prior=prior)).error < 1e-9


def test_a_tree_counts_each_turn_once() -> None:
    """Two roots of one turn each, and two branches of another turn after each of them."""
    score = score_trees(agreement(), enumerate_full_trees(agreement(), ways=2), 2, UNBIASED_TREE)
    assert score.turns == pytest.approx(2 + 4)


def test_branching_before_the_last_turn_is_biased_if_the_policy_decides_the_number_of_turns() -> None:
    fixed, free = decisive_turn(1, turns=2), further_turns(2)
    assert score_trees(fixed, enumerate_single_branchings(fixed, -1, 2), 2, UNBIASED_TREE).error < 1e-9
    assert score_trees(free, enumerate_single_branchings(free, 1, 2), 2, UNBIASED_TREE).error < 1e-9
    longer = further_turns(3)
    assert score_trees(longer, enumerate_single_branchings(longer, -1, 2), 2, UNBIASED_TREE).error > 0.01


def test_keeping_only_branches_with_another_reward_is_biased() -> None:
    table = decisive_turn(1, turns=2)
    outcomes = enumerate_single_branchings(table, -1, 2, only_contrasts=True)
    assert score_trees(table, outcomes, 2, UNBIASED_TREE).error > 0.01


# The audit


def test_credits_that_are_the_true_advantages_have_fidelity_1_and_no_noise() -> None:
    for table in TABLES.values():
        score = score_true_advantages(table, 2)
        assert (score.fidelity, score.noise) == pytest.approx((1, 0), abs=1e-12)


def test_fidelity_is_spearmans_correlation() -> None:
    from scipy.stats import spearmanr

    truths, credits = [0.5, -0.5, 0.1, 0.1, 0.3], [1.0, -1.0, -1.0, 0.5, 0.2]
    audit = Audit()
    for truth, credit in zip(truths, credits, strict=True):
        audit.add((), 0, truth, credit, weight=0.2)
    assert audit.fidelity == pytest.approx(spearmanr(truths, credits).statistic)


def test_spread_is_signal_and_noise() -> None:
    """Two actions with the credits 1 ± 1 and 3 ± 1, equally likely: signal 1, noise 1."""
    audit = Audit()
    for action, credit in ((0, 0.0), (0, 2.0), (1, 2.0), (1, 4.0)):
        audit.add((), action, float(action), credit, weight=0.25)
    assert (audit.spread, audit.noise) == pytest.approx((2, 1))


def test_influence_is_the_mutual_information_of_neighbouring_actions() -> None:
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert measure_influence(agreement(0.75)) == pytest.approx(math.log(2) - entropy)
    assert measure_influence(agreement(0.5)) == pytest.approx(0, abs=1e-12)


def test_the_estimate_from_one_continuation_each_does_not_depend_on_the_influence() -> None:
    estimates = [expected_influence_estimate(agreement(same)) for same in (0.5, 0.75, 0.999)]
    assert estimates[0] > 0
    assert estimates == pytest.approx([estimates[0]] * 3)


def test_the_estimate_of_influence_is_that_of_its_formula() -> None:
    """Eight candidates, one continuation each, α = 1, two actions and one symbol for others."""

    def estimate(nexts: Sequence[int], symbols: int = 3) -> float:
        conditional = np.full((len(nexts), symbols), 1 / (1 + symbols))
        conditional[np.arange(len(nexts)), nexts] = 2 / (1 + symbols)
        marginal = conditional.mean(0)
        return float((conditional * np.log(conditional / marginal)).sum() / len(nexts))

    expected = fmean(estimate(nexts) for nexts in itertools.product((0, 1), repeat=8))
    assert expected_influence_estimate(agreement()) == pytest.approx(expected)


def test_groups_without_order_have_the_probabilities_of_all_their_orders() -> None:
    probabilities = [0.5, 0.3, 0.2]
    probability_by_group = {group.indices: group.probability for group in possible_groups(probabilities, 2)}
    assert probability_by_group[0, 1] == pytest.approx(2 * 0.5 * 0.3) and probability_by_group[
        2, 2
    ] == pytest.approx(0.04)
    assert sum(probability_by_group.values()) == pytest.approx(1)


def test_the_mean_of_two_fair_coins() -> None:
    assert mean_distribution({0.0: 0.5, 1.0: 0.5}, 2) == pytest.approx({0.0: 0.25, 0.5: 0.5, 1.0: 0.25})


def test_the_gain_of_a_biased_credit_is_measured_at_the_true_length() -> None:
    reference = TurnScore(0.0, 1.0, 0.4, 8.0, 0.0, 0.0, 0.0, 1.0)
    half_as_long = reference._replace(variance=0.05, share_of_length=0.5)
    assert half_as_long.gain(reference) == pytest.approx(2)
