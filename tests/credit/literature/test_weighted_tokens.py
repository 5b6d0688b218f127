"""Advantages that are weighted by the entropy or the surprise of their token.

These tests promise:

* Each weight is that of a plain reference of its published formula.
* Several ranks give the weights of one.
* `check` and the credit refuse settings that make no sense.
* The bias of each expected gradient is as stated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pvariance
from typing import Any

import numpy as np
import pytest

from tests.credit.expectations import expectation
from tests.credit.literature.test_published_methods import (
    DISTRIBUTIONS,
    GROUP,
    make_group,
    squares_and_entropies,
)
from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from tests.support.shipped import experiment_of
from treetune.credit.base import Credit, TrainerScores
from treetune.credit.grpo import Group
from treetune.credit.literature.forking_tokens import ForkingTokens
from treetune.credit.literature.implicit_reward import ImplicitReward
from treetune.credit.literature.weighted_by import WeightedBy
from treetune.credit.rloo import Rloo
from treetune.findings import collect_findings
from treetune.rollouts.model_scores import (
    Deviation,
    Distributions,
    GroupDivergences,
    ModelScores,
    ReferenceDistances,
)
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Trajectory

GTPO = WeightedBy(over=Rloo())


def uniform_chances(ids: Sequence[int]) -> dict[int, float]:
    """Returns the reference policy, to which all tokens that the policy may sample are equally likely."""
    tokens = list(mdp.policy(tuple(ids)))
    return dict.fromkeys(tokens, 1 / len(tokens))


def deviation_from_uniform(row: Trajectory | Episode) -> Deviation:
    ids = plain(row.response_ids)
    distances = []
    for t in range(len(ids)):
        chances, reference = mdp.policy(ids[:t]), uniform_chances(ids[:t])
        distances.append(1 - sum(math.sqrt(chances[token] * reference[token]) for token in chances))
    return Deviation(np.array(distances), squares_and_entropies(row)[1] / math.log(3))


DISTANCES = ModelScores(
    reference_distances=ReferenceDistances(lambda rows: [deviation_from_uniform(row) for row in rows])
)


def kl(chances: dict[int, float], reference: dict[int, float]) -> float:
    return sum(p * math.log(p / reference[token]) for token, p in chances.items() if p > 0)


def group_divergences(rows: Sequence[Trajectory | Episode]) -> list[np.ndarray]:
    """Returns JS(π ‖ P) for each token of rows that answer one problem, with P the mean over the rows.

    JS(π ‖ P) = ½ KL(π ‖ M) + ½ KL(P ‖ M) with M = (π + P) / 2.
    """
    columns = []
    for row in rows:
        ids = plain(row.response_ids)
        column = []
        for t in range(len(ids)):
            prefixes = [plain(other.response_ids)[:t] for other in rows if len(other.response_ids) > t]
            chances_by_row = [mdp.policy(prefix) for prefix in prefixes]
            tokens = set().union(*chances_by_row)
            chances = mdp.policy(ids[:t])
            mean = {token: fmean(of_row.get(token, 0.0) for of_row in chances_by_row) for token in tokens}
            mixture = {token: (chances.get(token, 0.0) + mean[token]) / 2 for token in tokens}
            column.append((kl(chances, mixture) + kl(mean, mixture)) / 2)
        columns.append(np.array(column).round(12))
    return columns


DIVERGENCES = ModelScores(group_divergences=GroupDivergences(group_divergences))
ICT = WeightedBy(
    over=Rloo(), signal="group_divergence", weights="top_share", share=0.1, among="answer", drop=True
)


DISTRIBUTIONS_AND_DISTANCES = replace(DISTRIBUTIONS, reference_distances=DISTANCES.reference_distances)


def assign_credit(
    credit: Credit,
    answers: Sequence[Trajectory] = GROUP,
    scores: ModelScores = DISTRIBUTIONS_AND_DISTANCES,
) -> list[Episode]:
    context = mdp.context(model_scores=scores)
    return credit.assign(context, trees_of(answers))[0]


def weights_of(credit: WeightedBy, answers: Sequence[Trajectory] = GROUP) -> list[list[float]]:
    """The weighted advantages of each answer, divided by those without weights."""
    plain_rows = assign_credit(credit.over, answers)
    weighted_rows = assign_credit(credit, answers)
    return [
        (weighted.advantages / unweighted.advantages).tolist()
        for weighted, unweighted in zip(weighted_rows, plain_rows, strict=True)
    ]


def entropies_of(answers: Sequence[Trajectory] = GROUP) -> list[list[float]]:
    return [squares_and_entropies(answer)[1].tolist() for answer in answers]


def surprises_of(answers: Sequence[Trajectory] = GROUP) -> list[list[float]]:
    logprobs = [mdp.policy_logprobs(plain(answer.response_ids)) for answer in answers]
    return [(-np.float32(of_answer)).tolist() for of_answer in logprobs]


def varied_entropies(row: Trajectory | Episode) -> np.ndarray:
    """Returns entropies that differ among the answers at each position, and are never 0."""
    return np.array([0.1 + 0.2 * token for token in plain(row.response_ids)])


def same_result(answer: Trajectory, answers: Sequence[Trajectory]) -> list[int]:
    """Returns the numbers of the answers that earned what this one earned."""
    return [number for number, other in enumerate(answers) if other.reward == answer.reward]


def shaped_rewards_of_gtpo(answers: Sequence[Trajectory], base: float, bonus: float) -> list[list[float]]:
    """Returns the shaped rewards of each token with varied entropies: eq. 3 and 5, for rewards of 0 and 1."""
    entropies = [varied_entropies(answer).tolist() for answer in answers]
    shaped = []
    for number, answer in enumerate(answers):
        row = []
        for t, entropy in enumerate(entropies[number]):
            at_position = [entropies[i][t] for i in same_result(answer, answers) if len(entropies[i]) > t]
            if answer.reward == 1.0:
                row.append(base + bonus * entropy / sum(at_position) * len(at_position))
            else:
                inverse = sum(1 / other_entropy for other_entropy in at_position)
                row.append(-base - bonus / entropy / inverse * len(at_position))
        shaped.append(row)
    return shaped


VARIED_DISTRIBUTIONS = ModelScores(
    distributions=Distributions(
        lambda rows: [(squares_and_entropies(row)[0], varied_entropies(row)) for row in rows]
    )
)


def test_gtpos_weights_are_the_shares_of_the_entropy_among_answers_with_the_same_result() -> None:
    for base, bonus in ((0.9, 0.1), (1.0, 0.5)):
        credit = WeightedBy(over=Group(std=False), base=base, bonus=bonus)
        unweighted_episodes = assign_credit(credit.over)
        expected = shaped_rewards_of_gtpo(GROUP, base, bonus)
        for episode, unweighted_episode, shaped in zip(
            assign_credit(credit, GROUP, VARIED_DISTRIBUTIONS), unweighted_episodes, expected, strict=True
        ):
            assert episode.advantages == pytest.approx(
                np.abs(unweighted_episode.advantages) * shaped, rel=1e-6
            )


def test_gtpos_standardised_advantages_are_those_of_equation_6() -> None:
    """Each is over the tokens of the correct answers, or over those of the wrong ones. The sizes of the
    weights and of the other credit's advantages cancel out."""
    shaped = shaped_rewards_of_gtpo(GROUP, 1.0, 0.1)
    expected = []
    for answer, row in zip(GROUP, shaped, strict=True):
        values = list(itertools.chain.from_iterable(shaped[i] for i in same_result(answer, GROUP)))
        centre, deviation = fmean(values), math.sqrt(pvariance(values))
        expected.append([(value - centre) / deviation for value in row])
    for over in (Rloo(), Group()):
        credit = WeightedBy(over=over, standardise=True, base=5.0, bonus=100.0)
        for row, reference in zip(assign_credit(credit, GROUP, VARIED_DISTRIBUTIONS), expected, strict=True):
            assert row.advantages == pytest.approx(reference, abs=1e-5)


def test_answers_of_one_result_have_no_advantage_and_certain_tokens_share_equally() -> None:
    right = [answer for answer in make_group("a;a;b a;a") if answer.reward == 1.0]
    assert all(set(row.advantages) == {0.0} for row in assign_credit(WeightedBy(standardise=True), right))
    # The end token after the third letter is certain: H = 0 for all that have it.
    for row, weights in zip(GROUP, weights_of(GTPO), strict=True):
        if len(row.response_ids) == mdp.LONGEST:
            assert weights[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [0.2, 1.0])
@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_dgpos_weights_are_a_softmax_over_the_answer_with_a_mean_of_1(
    temperature: float, exponent: float
) -> None:
    """w_t = T · softmax(d · H^κ / τ), A_t = w_t · A."""
    credit = WeightedBy(
        over=Rloo(), signal="deviation", weights="softmax", temperature=temperature, exponent=exponent
    )
    all_weights = weights_of(credit)
    for answer, weights in zip(GROUP, all_weights, strict=True):
        distances, entropies = deviation_from_uniform(answer)
        scores = [d * h**exponent for d, h in zip(distances, entropies, strict=True)]
        exponentials = [math.exp(score / temperature) for score in scores]
        expected = [len(scores) * value / sum(exponentials) for value in exponentials]
        assert weights == pytest.approx(expected) and fmean(weights) == pytest.approx(1.0)
    assert max(map(max, all_weights)) > 1.001


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_top_share_is_taken_of_all_tokens_as_by_forking_tokens_or_of_each_answer(share: float) -> None:
    credit = WeightedBy(over=Rloo(), weights="top_share", share=share)
    expected = assign_credit(ForkingTokens(over=Rloo(), share=share))
    for row, expected_row in zip(assign_credit(credit), expected, strict=True):
        assert row.advantages.tolist() == expected_row.advantages.tolist()
    by_answer = replace(credit, among="answer", signal="surprise")
    for surprises, weights in zip(surprises_of(), weights_of(by_answer), strict=True):
        threshold = sorted(surprises, reverse=True)[max(1, int(share * len(surprises))) - 1]
        assert weights == [float(surprise >= threshold) for surprise in surprises]


def test_ict_trains_the_tokens_of_each_answer_whose_distributions_differ_most_from_the_groups() -> None:
    """In the language the second letter, at position 2, depends on the first one, and nothing else does."""
    answers = make_group("a;a;b a;a b;b b;b;a")
    for row, before in zip(
        assign_credit(ICT, answers, DIVERGENCES), assign_credit(ICT.over, answers), strict=True
    ):
        assert row.trained.tolist() == [position == 2 for position in range(len(row.response_ids))]
        assert row.advantages[2] == before.advantages[2]
    # Without a token that differs, all of an answer's tokens are equally far from the mean.
    no_difference = assign_credit(ICT, make_group("a;a b"), DIVERGENCES)
    assert all(row.trained.all() for row in no_difference)


def test_rsi_keeps_an_interval_of_the_surprise_over_the_entropy() -> None:
    credit = WeightedBy(over=Rloo(), signal="relative_surprise", weights="interval", bounds=(0.5, 1.2))
    kept_tokens = 0
    for weights, surprises, entropies in zip(weights_of(credit), surprises_of(), entropies_of(), strict=True):
        for weight, surprise, entropy in zip(weights, surprises, entropies, strict=True):
            relative_surprise = surprise / entropy if entropy else 0.0
            assert weight == float(0.5 <= relative_surprise <= 1.2)
            kept_tokens += int(weight)
    assert 0 < kept_tokens < sum(map(len, entropies_of()))


def test_tokens_of_weight_0_are_left_out_of_means_if_so_configured() -> None:
    credit = WeightedBy(over=Rloo(), weights="interval", bounds=(0.6, 0.7), drop=True)
    was_any_left_out = False
    for row, entropies in zip(assign_credit(credit), entropies_of(), strict=True):
        is_kept = [0.6 <= entropy <= 0.7 for entropy in entropies]
        assert row.trained.tolist() == (is_kept if any(is_kept) else [True] * len(is_kept))
        was_any_left_out = was_any_left_out or row.trained.tolist() != [True] * len(is_kept)
    assert was_any_left_out
    keeps_no_token = replace(credit, bounds=(98.0, 99.0))
    for row in assign_credit(keeps_no_token):
        assert row.trained.all() and set(row.advantages) == {0.0}


def test_tokens_that_are_not_trained_do_not_count() -> None:
    """A tool's tokens are in no share and no mean."""
    masked = [replace(row, trained=np.arange(len(row.response_ids)) != 1) for row in assign_credit(Rloo())]
    context = mdp.context(model_scores=DISTRIBUTIONS)
    for weights in ("softmax", "group_share"):
        rows = WeightedBy(over=Rloo(), weights=weights).weigh_tokens(context, masked)  # type: ignore[arg-type]
        assert [row.advantages[1] for row in rows] == [row.advantages[1] for row in masked]
    softmax_rows = WeightedBy(over=Rloo(), weights="softmax").weigh_tokens(context, masked)
    for before, row in zip(masked, softmax_rows, strict=True):
        assert row.advantages[row.trained].mean() == pytest.approx(before.advantages[0])


@pytest.mark.parametrize(
    "credit",
    [
        GTPO,
        WeightedBy(over=Rloo(), standardise=True),
        WeightedBy(over=Rloo(), weights="top_share"),
        WeightedBy(over=Rloo(), signal="surprise", weights="softmax"),
    ],
)
def test_two_ranks_give_the_weights_of_one(credit: Credit) -> None:
    groups = [GROUP, make_group("a;a;b b;a a", 1)]

    def assign_on_rank(context: Any) -> Any:
        answers: list[Trajectory] = []
        for number, group in enumerate(groups):
            if number * context.ranks.world_size // len(groups) == context.ranks.rank:
                answers += group
        rows, metrics = credit.assign(context, trees_of(answers))
        return [row.advantages.tolist() for row in rows], metrics

    mdp.assert_ranks_agree(2, assign_on_rank, model_scores=lambda: DISTRIBUTIONS)


def test_a_credit_asks_the_trainer_for_its_signal_and_for_the_credit_under_it() -> None:
    assert GTPO.trainer_scores == TrainerScores(distributions=True, passes=1)
    assert WeightedBy(signal="surprise").trainer_scores == TrainerScores()
    over_forking_tokens = WeightedBy(signal="surprise", over=ForkingTokens())
    assert over_forking_tokens.trainer_scores == TrainerScores(distributions=True, passes=1)
    assert ICT.trainer_scores == TrainerScores(
        distributions=True, compared_with=frozenset({"group"}), passes=1
    )
    deviation = WeightedBy(signal="deviation", weights="softmax", over=ForkingTokens())
    assert deviation.asks_trainer
    assert deviation.trainer_scores == TrainerScores(
        reference=True, distributions=True, compared_with=frozenset({"reference"}), passes=3
    )
    both = WeightedBy(signal="deviation", weights="softmax", over=ICT)
    assert both.trainer_scores == TrainerScores(
        reference=True, distributions=True, compared_with=frozenset({"reference", "group"}), passes=3
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "interval"}, "bounds and weights 'interval' belong together"),
        ({"bounds": (0.5, 2.0)}, "bounds and weights 'interval' belong together"),
        ({"weights": "interval", "bounds": (2.0, 0.5)}, r"bounds \[2.0, 0.5\] must be \[lowest, highest\]"),
        ({"weights": "top_share", "standardise": True}, "would give tokens of weight 0 an advantage"),
        (
            {"weights": "interval", "bounds": (0.5, 2.0), "drop": True, "standardise": True},
            "would give tokens of weight 0 an advantage",
        ),
        ({"weights": "softmax", "drop": True}, "weights 'softmax' gives no token the weight 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightedBy(**settings)


def errors(experiment: Any) -> list[str]:
    return [finding.what for _, finding in collect_findings(experiment) if finding.level == "error"]


@pytest.mark.parametrize("credit", ["gtpo", "dgpo", "ict", "forking_tokens"])
def test_check_accepts_the_presets_and_refuses_them_while_training_overlaps(credit: str) -> None:
    experiment = experiment_of(f"quickstart/grpo,credit/{credit}")
    assert errors(experiment) == []
    overlapping = replace(experiment, overlap="one_step")
    assert any(
        "the credit asks the trainer for the policy's distributions" in error for error in errors(overlapping)
    )


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_check_refuses_surprises_of_cut_distributions_relative_to_the_entropies_of_uncut_ones(
    cut: dict[str, Any],
) -> None:
    experiment = experiment_of("quickstart/grpo")
    relative = WeightedBy(signal="relative_surprise", weights="softmax")
    experiment = replace(experiment, rollout=replace(experiment.rollout, **cut))
    (message,) = errors(replace(experiment, credit=relative))
    assert message.startswith("relative_surprise divides by the entropy of the whole distribution")
    assert errors(replace(experiment, credit=replace(relative, signal="surprise"))) == []


def test_check_refuses_a_deviation_without_a_reference_that_can_be_compared() -> None:
    experiment = experiment_of("quickstart/grpo,credit/dgpo")
    trainer = experiment.trainer
    without_reference = replace(experiment, trainer=replace(trainer, measure_kl=False))
    assert any("the trainer keeps no reference model" in error for error in errors(without_reference))
    scores_while_sampling = replace(experiment, trainer=replace(trainer, reference_scores="while_sampling"))
    assert any("the reference may still score answers" in error for error in errors(scores_while_sampling))
    shares_sequences = replace(experiment, trainer=replace(trainer, sequence_parallel_size=2))
    assert any("ranks that share a sequence" in error for error in errors(shares_sequences))


def test_check_refuses_a_deviation_from_another_model_than_the_start_model() -> None:
    experiment = experiment_of("quickstart/grpo,credit/dgpo")
    rewards_of_model = ImplicitReward(reward_model=experiment.model)
    other_reference = replace(experiment, credit=replace(experiment.credit, over=rewards_of_model))
    assert any(
        "the credit 'implicit_reward' takes another model" in error for error in errors(other_reference)
    )


def test_check_refuses_a_divergence_from_a_group_of_one_and_from_ranks_that_share_a_sequence() -> None:
    experiment = experiment_of("quickstart/grpo,credit/ict")
    one_answer = replace(experiment, rollout=replace(experiment.rollout, samples=1))
    assert any("it compares a token with those of the other answers" in error for error in errors(one_answer))
    shares_sequences = replace(experiment, trainer=replace(experiment.trainer, sequence_parallel_size=2))
    assert any(
        "signal 'group_divergence' compares whole distributions" in error
        for error in errors(shares_sequences)
    )


@pytest.mark.parametrize(
    ("credit", "answers", "bias", "cosine"),
    [
        (WeightedBy(over=Rloo(), weights="softmax"), 2, 0.1222, 0.9976),
        (WeightedBy(over=Rloo(), signal="surprise", base=0.0, bonus=1.0), 3, 0.0271, 0.9996),
        (WeightedBy(over=Rloo(), signal="surprise", standardise=True), 3, 1.0398, -0.1218),
        (
            WeightedBy(over=Rloo(), signal="relative_surprise", weights="interval", bounds=(0.5, 1.2)),
            2,
            0.0144,
            0.9999,
        ),
    ],
)
def test_the_expected_gradient_is_as_far_off_as_stated(
    credit: Credit, answers: int, bias: float, cosine: float
) -> None:
    measured = expectation(credit, answers, DISTRIBUTIONS, logprobs=True)
    assert measured.bias_and_cosine == pytest.approx((bias, cosine), abs=5e-5)


@pytest.mark.parametrize(("answers", "bias", "cosine"), [(2, 0.3992, 0.9437), (3, 0.5045, 0.9131)])
def test_icts_expected_gradient_is_as_far_off_as_stated(answers: int, bias: float, cosine: float) -> None:
    measured = expectation(ICT, answers, DIVERGENCES, logprobs=True)
    assert measured.bias_and_cosine == pytest.approx((bias, cosine), abs=5e-5)


def test_dgpos_expected_gradient_is_as_far_off_as_stated() -> None:
    """The reference gives all tokens that may come the same probability."""
    credit = WeightedBy(over=Rloo(), signal="deviation", weights="softmax")
    measured = expectation(credit, 2, DISTANCES, logprobs=True)
    assert measured.bias_and_cosine == pytest.approx((0.0094, 1.0), abs=5e-5)
