"""Measures of credit for single steps in the arena.

These tests promise:

* Rank correlations, decisive steps and chance are those of plain references, in any scale and order.
* Measures of sampled answers have those of all answers in their intervals.
* Means over languages have the intervals of independent means.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import spearmanr

import treetune.parts  # noqa: F401  (registers them)
from tests.lab.arena.test_arena import ANSWERS_OF_EXACT, SMALL, all_answers, make_all_groups
from treetune.credit.grpo import Group
from treetune.credit.values.siblings import Siblings
from treetune.credit.vineppo import MonteCarlo
from treetune.lab.arena import languages
from treetune.lab.arena.languages import Language, TrueAdvantages, language_of
from treetune.lab.arena.scores import ScoredMethod, assign_credit, score_methods
from treetune.lab.arena.signals import HindsightRatio, LogProbability
from treetune.lab.arena.steps import (
    decisive_hits,
    rank_correlations,
    step_measures,
    step_sums,
    true_advantages,
)
from treetune.lab.arena.steps_page import compare_with_chance, mean_over_languages, write_steps_page
from treetune.rollouts.single_turn import SingleTurn
from treetune.tree import trees_of

ROWS = arrays(np.float64, (3, 6), elements=st.integers(-4, 4).map(float))
"""Three answers of six steps, with many ties."""


@given(ROWS, ROWS)
def test_rank_correlations_are_spearmans_with_ties(first_NS: Any, second_NS: Any) -> None:
    correlations_N = rank_correlations(first_NS, second_NS)
    for correlation, first_S, second_S in zip(correlations_N, first_NS, second_NS, strict=True):
        if np.ptp(second_S) == 0:
            assert math.isnan(correlation)
        elif np.ptp(first_S) == 0:
            assert correlation == 0
        else:
            assert correlation == pytest.approx(spearmanr(first_S, second_S).statistic)


@given(ROWS, ROWS, st.floats(1e-3, 1e3))
def test_measures_of_steps_do_not_depend_on_the_scale_of_credit(
    credit_NS: Any, true_NS: Any, scale: float
) -> None:
    """A learning rate could undo the scale. The small numbers are rounding, which must not order ties."""
    scaled_NS = scale * (credit_NS + 1e-14 * np.arange(6))
    np.testing.assert_allclose(rank_correlations(scaled_NS, true_NS), rank_correlations(credit_NS, true_NS))
    np.testing.assert_allclose(rank_correlations(-scaled_NS, true_NS), -rank_correlations(credit_NS, true_NS))
    np.testing.assert_array_equal(decisive_hits(-scaled_NS, true_NS), decisive_hits(credit_NS, true_NS))


@given(ROWS, ROWS, st.permutations(range(6)))
def test_measures_of_steps_do_not_depend_on_the_order_of_steps(
    credit_NS: Any, true_NS: Any, order: list[int]
) -> None:
    reordered = credit_NS[:, order], true_NS[:, order]
    np.testing.assert_allclose(rank_correlations(*reordered), rank_correlations(credit_NS, true_NS))
    np.testing.assert_array_equal(decisive_hits(*reordered), decisive_hits(credit_NS, true_NS))


@given(ROWS)
def test_true_advantages_always_find_the_decisive_step_and_equal_credit_finds_it_by_chance(
    true_NS: Any,
) -> None:
    hits_N, chance_N = decisive_hits(true_NS, true_NS), decisive_hits(np.ones_like(true_NS), true_NS)
    for true_S, hit, chance in zip(true_NS, hits_N, chance_N, strict=True):
        if not true_S.any():
            assert math.isnan(hit) and math.isnan(chance)
            continue
        assert hit == 1
        assert chance == np.mean(np.abs(true_S) == np.abs(true_S).max())


def test_if_several_credits_are_largest_the_decisive_step_is_found_by_chance() -> None:
    true_NS = np.array([[0.0, -0.5, 0.1], [0.3, 0.1, -0.3]])
    credit_NS = np.array([[1.0, 1.0, 0.5], [-2.0, 2.0, 0.0]])
    assert decisive_hits(credit_NS, true_NS).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("name", SMALL)
def test_true_advantages_and_log_probabilities_equal_those_of_an_enumeration(name: str) -> None:
    language = SMALL[name]
    answers = all_answers(language)
    ids_of_answers = [tuple(ids) for ids, _ in answers]
    status_NT = np.stack([language.statuses(ids) for ids in ids_of_answers])
    is_correct_N = language.correct_S[status_NT[:, -1]]
    chances_N = np.array([chance for _, chance in answers])

    def chance_of(prefix: tuple[int, ...], weights_N: Any) -> float:
        has_prefix_N = np.array([ids[: len(prefix)] == prefix for ids in ids_of_answers])
        return float((chances_N * weights_N)[has_prefix_N].sum())

    true_NS, logprobs_NT = true_advantages(language, status_NT), language.log_probabilities(status_NT)
    everything_N = np.ones(len(answers))
    for number, ids in enumerate(ids_of_answers):
        reached = [chance_of(ids[:end], everything_N) for end in range(len(ids) + 1)]
        values = [chance_of(ids[:end], is_correct_N) / reached[end] for end in range(len(ids) + 1)]
        assert true_NS[number] == pytest.approx(np.diff(values), abs=1e-12)
        assert logprobs_NT[number] == pytest.approx(np.diff(np.log(reached)))


def expected_measures(language: Language, credit: Any) -> dict[str, float]:
    """The means over all groups of two answers, weighted by their probabilities."""
    answers, chances, context = make_all_groups(language, ANSWERS_OF_EXACT)
    credited = assign_credit(context, ScoredMethod(credit), trees_of(answers))
    sums = step_sums(language, credited.answers, credited.episodes, credited.groups)
    return {name: float(chances @ sums.sums[name] / (chances @ sums.counts[name])) for name in sums.sums}


@pytest.mark.parametrize("credit", [MonteCarlo(values=Siblings()), Group(std=False), LogProbability()])
@pytest.mark.parametrize("name", ["middle", "majority", "luck"])
def test_the_intervals_of_sampled_measures_contain_the_enumerated_ones(name: str, credit: Any) -> None:
    language = SMALL[name]
    context = languages.context_of(language, 3000, seed=7)
    trees, _ = SingleTurn(samples=ANSWERS_OF_EXACT, max_tokens=language.length + 1).run(
        context, context.task.problems("train")
    )
    credited = assign_credit(context, ScoredMethod(credit), trees)
    blocks = [step_sums(language, credited.answers, credited.episodes, credited.groups)]
    exact = expected_measures(language, credit)
    for measure, number in step_measures(blocks, seed=1).items():
        width = number["high"] - number["low"]
        assert number["value"] == pytest.approx(exact[measure], abs=1.3 * width + 1e-9), measure


def test_exact_signals_find_the_decisive_step_and_whole_answer_credit_does_so_by_chance() -> None:
    language = language_of("uneven of 6")
    methods = {
        "truth": ScoredMethod(TrueAdvantages()),
        "hindsight": ScoredMethod(HindsightRatio()),
        "group": ScoredMethod(Group(std=False)),
        "log-probability": ScoredMethod(LogProbability()),
    }
    by_method = score_methods(language, methods, most_problems=40)
    for name in ("truth", "hindsight"):
        assert by_method[name]["truth"]["value"] == pytest.approx(1)
        assert by_method[name]["decisive"]["value"] == 1
        assert compare_with_chance(by_method[name]) == "above"
    group = by_method["group"]
    assert group["truth"]["value"] == group["fluency"]["value"] == 0
    assert group["decisive"]["value"] == group["chance"]["value"] == pytest.approx(1 / 6)
    assert compare_with_chance(group) == "at"
    assert by_method["log-probability"]["fluency"]["value"] == pytest.approx(1)
    assert by_method["log-probability"]["decisive"]["value"] == 0, "the last token has six wordings"
    assert compare_with_chance(by_method["log-probability"]) == "below"


def test_the_hindsight_ratio_is_bayes_rule() -> None:
    """π(token | state, correct) / π(token | state), from the probabilities of all correct answers."""
    language = SMALL["luck"]
    answers, _, context = make_all_groups(language, 1)
    credited = assign_credit(context, ScoredMethod(HindsightRatio()), trees_of(answers))
    correct = [
        (ids, chance)
        for ids, chance in all_answers(language)
        if language.correct_S[language.statuses(ids)[-1]]
    ]
    for answer, episode in zip(credited.answers, credited.episodes, strict=True):
        ids = answer.response_ids[: language.length].tolist()
        logprobs_T = language.log_probabilities(language.statuses(ids)[None])[0]
        for end in range(1, language.length + 1):
            before = sum(chance for other_ids, chance in correct if other_ids[: end - 1] == ids[: end - 1])
            after = sum(chance for other_ids, chance in correct if other_ids[:end] == ids[:end])
            if before:
                ratio = after / before / math.exp(logprobs_T[end - 1])
                assert episode.advantages[end - 1] == pytest.approx(ratio - 1)
            else:
                assert episode.advantages[end - 1] == 0


def test_means_over_languages_have_the_intervals_of_independent_means(tmp_path: Path) -> None:
    def number(value: float, half_width: float) -> dict[str, float]:
        return {"value": value, "low": value - half_width, "high": value + half_width}

    nothing = {"value": None, "low": None, "high": None}
    first = {
        "truth": number(0.5, 0.03),
        "fluency": nothing,
        "decisive": number(1, 0),
        "chance": number(0.25, 0),
    }
    second = first | {"truth": number(0.9, 0.04)}
    by_language = {"a": {"mine": first, "only in a": first}, "b": {"mine": second}}
    means = mean_over_languages(by_language)
    assert list(means) == ["mine"], "others were not scored in every language"
    assert means["mine"]["truth"] == pytest.approx(number(0.7, 0.025))
    assert means["mine"]["fluency"]["value"] is None
    write_steps_page(tmp_path, by_language, "treetune arena")
    page = (tmp_path / "arena_steps.md").read_text()
    assert "| mine | 0.90 [0.86, 0.94] | – | 1.000 | above 0.250 |" in page
    assert page.count("| mine |") == 3 and page.count("| only in a |") == 1
