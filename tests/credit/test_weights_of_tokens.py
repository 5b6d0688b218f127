"""Advantages that are weighted by a token's entropy or surprise: each weight is that of a plain reference of
its formula, ranks agree, and settings that make no sense are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pvariance
from typing import Any

import numpy as np
import pytest

from tests.columns import plain
from tests.credit.expectations import expectation
from tests.rollouts import tabular_mdp as mdp
from tests.support.shipped import experiment_of
from treetune.credit.base import Credit
from treetune.credit.grpo import Group
from treetune.credit.literature.forking_tokens import ForkingTokens
from treetune.credit.literature.weighted_by import WeightedBy
from treetune.credit.rloo import Rloo
from treetune.findings import findings
from treetune.rollouts.model_scores import (
    Deviation,
    Distributions,
    GroupDivergences,
    ModelScores,
    ReferenceDistances,
)
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Trajectory

from .test_credits_of_the_literature import DISTRIBUTIONS, GROUP, along, group

GTPO = WeightedBy(over=Rloo())


def uniform(ids: Sequence[int]) -> dict[int, float]:
    """The reference: all tokens that the policy may sample are equally likely."""
    tokens = list(mdp.policy(tuple(ids)))
    return dict.fromkeys(tokens, 1 / len(tokens))


def deviation(row: Trajectory | Episode) -> Deviation:
    ids = plain(row.response_ids)
    distances = []
    for t in range(len(ids)):
        chances, reference = mdp.policy(ids[:t]), uniform(ids[:t])
        distances.append(1 - sum(math.sqrt(chances[token] * reference[token]) for token in chances))
    return Deviation(np.array(distances), along(row)[1] / math.log(3))


DISTANCES = ModelScores(reference_distances=ReferenceDistances(lambda rows: [deviation(row) for row in rows]))


def kl(chances: dict[int, float], others: dict[int, float]) -> float:
    return sum(p * math.log(p / others[token]) for token, p in chances.items() if p > 0)


def divergences_along(rows: Sequence[Trajectory | Episode]) -> list[np.ndarray]:
    """JS(π ‖ P) = ½ KL(π ‖ M) + ½ KL(P ‖ M) with M = (π + P) / 2, for rows that answer one problem."""
    columns = []
    for row in rows:
        ids = plain(row.response_ids)
        column = []
        for t in range(len(ids)):
            beginnings = [plain(other.response_ids)[:t] for other in rows if len(other.response_ids) > t]
            of_others = [mdp.policy(beginning) for beginning in beginnings]
            tokens = {token for chances in of_others for token in chances}
            mean = {token: fmean(chances.get(token, 0.0) for chances in of_others) for token in tokens}
            mixture = {token: (mdp.policy(ids[:t]).get(token, 0.0) + mean[token]) / 2 for token in tokens}
            column.append((kl(mdp.policy(ids[:t]), mixture) + kl(mean, mixture)) / 2)
        columns.append(np.array(column).round(12))
    return columns


DIVERGENCES = ModelScores(group_divergences=GroupDivergences(divergences_along))
ICT = WeightedBy(
    over=Rloo(), signal="group_divergence", weights="top_share", share=0.1, among="answer", drop=True
)


BOTH = replace(DISTRIBUTIONS, reference_distances=DISTANCES.reference_distances)


def credited(
    credit: Credit, answers: Sequence[Trajectory] = GROUP, scores: ModelScores = BOTH
) -> list[Episode]:
    context = mdp.context(model_scores=scores)
    return credit.assign(context, trees_of(answers))[0]


def weights_of(credit: WeightedBy, answers: Sequence[Trajectory] = GROUP) -> list[list[float]]:
    """The weighted advantages of each answer, divided by those without weights."""
    plain_rows = credited(credit.over, answers)
    weighted_rows = credited(credit, answers)
    return [
        (weighted.advantages / unweighted.advantages).tolist()
        for weighted, unweighted in zip(weighted_rows, plain_rows, strict=True)
    ]


def entropies_of(answers: Sequence[Trajectory] = GROUP) -> list[list[float]]:
    return [along(answer)[1].tolist() for answer in answers]


def surprises_of(answers: Sequence[Trajectory] = GROUP) -> list[list[float]]:
    logprobs = [mdp.policy_logprobs(plain(answer.response_ids)) for answer in answers]
    return [(-np.float32(of_answer)).tolist() for of_answer in logprobs]


def lively_entropies(row: Trajectory | Episode) -> np.ndarray:
    """Entropies that differ among the answers at each position, and none of which is 0."""
    return np.array([0.1 + 0.2 * token for token in plain(row.response_ids)])


def gtpo_reference(answers: Sequence[Trajectory], base: float, bonus: float) -> list[list[float]]:
    """Eq. 3 and 5, for rewards of 0 and 1: the shaped rewards of each token, with `LIVELY`'s entropies."""
    entropies = [lively_entropies(answer).tolist() for answer in answers]
    shaped = []
    for answer, own in zip(answers, entropies, strict=True):
        row = []
        for t, entropy in enumerate(own):
            of_set = [
                row_of_other[t]
                for other, row_of_other in zip(answers, entropies, strict=True)
                if other.reward == answer.reward and len(row_of_other) > t
            ]
            if answer.reward == 1.0:
                row.append(base + bonus * entropy / sum(of_set) * len(of_set))
            else:
                inverse = sum(1 / other for other in of_set)
                row.append(-base - bonus / entropy / inverse * len(of_set))
        shaped.append(row)
    return shaped


LIVELY = ModelScores(
    distributions=Distributions(lambda rows: [(along(row)[0], lively_entropies(row)) for row in rows])
)


def test_gtpos_weights_are_the_shares_of_the_entropy_among_answers_with_the_same_result() -> None:
    for base, bonus in ((0.9, 0.1), (1.0, 0.5)):
        credit = WeightedBy(over=Group(std=False), base=base, bonus=bonus)
        unweighted = credited(credit.over)
        expected = gtpo_reference(GROUP, base, bonus)
        for row, before, shaped in zip(credited(credit, GROUP, LIVELY), unweighted, expected, strict=True):
            assert row.advantages == pytest.approx(np.abs(before.advantages) * shaped, rel=1e-6)


def test_gtpos_standardised_advantages_are_those_of_equation_6() -> None:
    """Over the tokens of the correct answers, and over those of the wrong ones; the weights' sizes and the
    size of the other credit's advantages cancel out."""
    shaped = gtpo_reference(GROUP, 1.0, 0.1)
    expected = []
    for answer, row in zip(GROUP, shaped, strict=True):
        of_set = [
            value
            for other, values in zip(GROUP, shaped, strict=True)
            if other.reward == answer.reward
            for value in values
        ]
        centre, deviation = fmean(of_set), math.sqrt(pvariance(of_set))
        expected.append([(value - centre) / deviation for value in row])
    for over in (Rloo(), Group()):
        credit = WeightedBy(over=over, standardise=True, base=5.0, bonus=100.0)
        for row, reference in zip(credited(credit, GROUP, LIVELY), expected, strict=True):
            assert row.advantages == pytest.approx(reference, abs=1e-5)


def test_answers_of_one_result_have_no_advantage_and_certain_tokens_share_equally() -> None:
    right = [one for one in group("a;a;b a;a") if one.reward == 1.0]
    assert all(set(row.advantages) == {0.0} for row in credited(WeightedBy(standardise=True), right))
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
        distances, entropies = deviation(answer)
        scores = [d * h**exponent for d, h in zip(distances, entropies, strict=True)]
        exponentials = [math.exp(score / temperature) for score in scores]
        expected = [len(scores) * value / sum(exponentials) for value in exponentials]
        assert weights == pytest.approx(expected) and fmean(weights) == pytest.approx(1.0)
    assert max(map(max, all_weights)) > 1.001


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_top_share_is_that_of_forking_tokens_or_of_each_answer(share: float) -> None:
    credit = WeightedBy(over=Rloo(), weights="top_share", share=share)
    expected = credited(ForkingTokens(over=Rloo(), share=share))
    for row, same in zip(credited(credit), expected, strict=True):
        assert row.advantages.tolist() == same.advantages.tolist()
    by_answer = replace(credit, among="answer", signal="surprise")
    for surprises, weights in zip(surprises_of(), weights_of(by_answer), strict=True):
        least = sorted(surprises, reverse=True)[max(1, int(share * len(surprises))) - 1]
        assert weights == [float(surprise >= least) for surprise in surprises]


def test_ict_trains_the_tokens_of_each_answer_whose_distributions_differ_most_from_the_groups() -> None:
    """In the language the second letter, at position 2, depends on the first one, and nothing else does."""
    answers = group("a;a;b a;a b;b b;b;a")
    for row, before in zip(credited(ICT, answers, DIVERGENCES), credited(ICT.over, answers), strict=True):
        assert row.trained.tolist() == [position == 2 for position in range(len(row.response_ids))]
        assert row.advantages[2] == before.advantages[2]
    # Without a token that differs, all of an answer's tokens are equally far from the mean.
    same = credited(ICT, group("a;a b"), DIVERGENCES)
    assert all(row.trained.all() for row in same)


def test_rsi_keeps_an_interval_of_the_surprise_over_the_entropy() -> None:
    credit = WeightedBy(over=Rloo(), signal="relative_surprise", weights="interval", bounds=(0.5, 1.2))
    kept = 0
    for weights, surprises, entropies in zip(weights_of(credit), surprises_of(), entropies_of(), strict=True):
        for weight, surprise, entropy in zip(weights, surprises, entropies, strict=True):
            index = surprise / entropy if entropy else 0.0
            assert weight == float(0.5 <= index <= 1.2)
            kept += int(weight)
    assert 0 < kept < sum(map(len, entropies_of()))


def test_tokens_of_weight_0_are_left_out_of_means_if_so_configured() -> None:
    credit = WeightedBy(over=Rloo(), weights="interval", bounds=(0.6, 0.7), drop=True)
    kept_some = False
    for row, entropies in zip(credited(credit), entropies_of(), strict=True):
        kept = [0.6 <= entropy <= 0.7 for entropy in entropies]
        assert row.trained.tolist() == (kept if any(kept) else [True] * len(kept))
        kept_some = kept_some or row.trained.tolist() != [True] * len(kept)
    assert kept_some
    none = replace(credit, bounds=(98.0, 99.0))
    for row in credited(none):
        assert row.trained.all() and set(row.advantages) == {0.0}


def test_tokens_that_are_not_trained_do_not_count() -> None:
    """A tool's tokens are in no share and no mean."""
    masked = [replace(row, trained=np.arange(len(row.response_ids)) != 1) for row in credited(Rloo())]
    context = mdp.context(model_scores=DISTRIBUTIONS)
    for weights in ("softmax", "group_share"):
        rows = WeightedBy(over=Rloo(), weights=weights).weigh_tokens(context, masked)  # type: ignore[arg-type]
        assert [row.advantages[1] for row in rows] == [row.advantages[1] for row in masked]
    for before, row in zip(
        masked, WeightedBy(over=Rloo(), weights="softmax").weigh_tokens(context, masked), strict=True
    ):
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
def test_two_ranks_weigh_as_one(credit: Credit) -> None:
    def work(context: Any) -> Any:
        share = [GROUP, group("a;a;b b;a a", problem=1)]
        answers = [
            answer
            for number, of_problem in enumerate(share)
            if number * context.ranks.world_size // 2 == context.ranks.rank
            for answer in of_problem
        ]
        rows, metrics = credit.assign(context, trees_of(answers))
        return [row.advantages.tolist() for row in rows], metrics

    mdp.assert_ranks_agree(2, work, model_scores=lambda: DISTRIBUTIONS)


def test_what_is_asked_of_the_trainer_is_that_of_the_signal_and_of_the_other_credit() -> None:
    assert GTPO.asks_distributions and not GTPO.asks_reference
    assert not WeightedBy(signal="surprise").asks_distributions
    assert WeightedBy(signal="surprise", over=ForkingTokens()).asks_distributions
    assert ICT.asks_distributions and not ICT.asks_reference
    deviation = WeightedBy(signal="deviation", weights="softmax")
    assert deviation.asks_reference and deviation.asks_distributions and deviation.asks_trainer


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
    return [finding.what for _, finding in findings(experiment) if finding.level == "error"]


@pytest.mark.parametrize("credit", ["gtpo", "dgpo", "ict", "forking_tokens"])
def test_check_takes_the_presets_and_refuses_them_while_training_overlaps(credit: str) -> None:
    experiment = experiment_of(f"quickstart/grpo,credit/{credit}")
    assert errors(experiment) == []
    overlapping = replace(experiment, overlap="one_step")
    assert any(
        "the credit asks the trainer for the policy's distributions" in what for what in errors(overlapping)
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
    without = replace(experiment, trainer=replace(trainer, measure_kl=False))
    assert any("the trainer keeps no reference model" in what for what in errors(without))
    ahead = replace(experiment, trainer=replace(trainer, reference_scores="while_sampling"))
    assert any("the reference may still score answers" in what for what in errors(ahead))
    together = replace(experiment, trainer=replace(trainer, sequence_parallel_size=2))
    assert any("ranks that share a sequence" in what for what in errors(together))


def test_check_refuses_a_divergence_from_a_group_of_one_and_from_ranks_that_share_a_sequence() -> None:
    experiment = experiment_of("quickstart/grpo,credit/ict")
    one_answer = replace(experiment, rollout=replace(experiment.rollout, samples=1))
    assert any("it compares a token with those of the other answers" in what for what in errors(one_answer))
    together = replace(experiment, trainer=replace(experiment.trainer, sequence_parallel_size=2))
    assert any("signal 'group_divergence' compares whole distributions" in what for what in errors(together))


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
    found = expectation(credit, answers, DISTRIBUTIONS, logprobs=True)
    assert found.bias_and_cosine == pytest.approx((bias, cosine), abs=5e-5)


@pytest.mark.parametrize(("answers", "bias", "cosine"), [(2, 0.3992, 0.9437), (3, 0.5045, 0.9131)])
def test_icts_expected_gradient_is_as_far_off_as_stated(answers: int, bias: float, cosine: float) -> None:
    found = expectation(ICT, answers, DIVERGENCES, logprobs=True)
    assert found.bias_and_cosine == pytest.approx((bias, cosine), abs=5e-5)


def test_dgpos_expected_gradient_is_as_far_off_as_stated() -> None:
    """The reference gives all tokens that may come the same probability."""
    credit = WeightedBy(over=Rloo(), signal="deviation", weights="softmax")
    found = expectation(credit, 2, DISTANCES, logprobs=True)
    assert found.bias_and_cosine == pytest.approx((0.0094, 1.0), abs=5e-5)
