"""The credit arena: its languages, the gain of a credit, and the scores of methods.

These tests promise:

* Values, gradients and distributions of a language are those of all its answers, by enumeration.
* A credit that is declared unbiased has the exact gradient, and a wrong declaration is refused.
* The gain is that of exact enumeration; a biased credit pays for its bias and not for its scale.
* Every shipped method, and a user's own in one file, has a score.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.credit.expectations import Choices
from tests.support.columns import plain
from treetune.credit.base import Credit
from treetune.credit.grpo import Group
from treetune.credit.literature.com_mcs import CompoundValues
from treetune.credit.rloo import Rloo
from treetune.credit.states.by_tokens import EveryNTokens, LowProbability
from treetune.credit.trees import TreeCredit
from treetune.credit.values.continuations import FreshContinuations
from treetune.credit.values.filtered import Filtered
from treetune.credit.values.siblings import Siblings, ToppedUp
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.base import Engine
from treetune.engine.requests import Deferred, OnResult, Request
from treetune.lab.arena import languages
from treetune.lab.arena.gain import (
    BATCH_OF_PROBLEMS,
    TRUE_ADVANTAGES,
    at_ratio,
    best_at,
    draw_gain,
    half_width,
    measure_gain,
)
from treetune.lab.arena.languages import LANGUAGES, Language, TrueAdvantages, language_of
from treetune.lab.arena.scores import (
    ScoredMethod,
    fitted_critic,
    gradients_of,
    rank_correlation,
    score_methods,
    shipped_methods,
    write_page,
)
from treetune.lab.trees.branching import AtStates
from treetune.lab.trees.rollout import TreeRollout
from treetune.main import main
from treetune.rollouts.single_turn import SingleTurn
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import Trajectory, token_array

ANSWERS_OF_EXACT = 2
"""The number of answers to a problem where all groups of answers are enumerated."""

SMALL = {
    "first": languages.decision(3, 0),
    "middle": languages.decision(3, 1),
    "last": languages.decision(3, 2, success=0.4),
    "all": languages.every_choice(3),
    "majority": languages.majority(3),
    "luck": languages.luck(3),
}


UNBIASED = {
    "RLOO": Rloo(),
    "siblings": MonteCarlo(values=Siblings()),
    "true advantages": TrueAdvantages(),
    "VinePPO, K = 1": MonteCarlo(samples=1),
    "VinePPO, K = 3": MonteCarlo(samples=3),
    "VinePPO, K = 9": MonteCarlo(samples=9),
    "K = 1 and siblings": MonteCarlo(samples=1, values=FreshContinuations(count_siblings=True)),
    "K = 3, siblings at the prompt": MonteCarlo(samples=3, siblings_count_into_prompt_value=True),
    "K = 3, of two states": MonteCarlo(samples=3, max_states=2, behind_max_states="one_step"),
    "topped up to 1": MonteCarlo(samples=1, values=ToppedUp()),
    "topped up to 3": MonteCarlo(samples=3, values=ToppedUp()),
    "topped up to 9": MonteCarlo(samples=9, values=ToppedUp()),
    "filtered, K = 1": MonteCarlo(samples=1, values=Filtered(behind=0.3, before=0.2)),
    "ComMCS, K = 3": MonteCarlo(samples=3, values=CompoundValues()),
}
"""Credits that need only two answers to a problem, and that no other problem changes."""

TREE_ROLLOUT = TreeRollout(
    samples=2, max_tokens=8, branching=AtStates(states=EveryNTokens(tokens=1), ways=(2,))
)
"""Trees of two answers, each of which goes on in two ways from its first token: four to divide by."""
TREE_METHODS = {
    "tree": ScoredMethod(TreeCredit(), TREE_ROLLOUT),
    "siblings in a tree": ScoredMethod(MonteCarlo(values=Siblings()), TREE_ROLLOUT),
}


def all_answers(language: Language) -> list[tuple[list[int], float]]:
    """Returns all answers with their probabilities."""
    prefixes: list[tuple[list[int], int, float]] = [([], 0, 1.0)]
    for position in range(language.length):
        longer = []
        for ids, status, chance in prefixes:
            wordings = language.wordings_TS[position, status]
            next_statuses = language.after_TSO[position, status]
            for next_status, share in zip(next_statuses, language.chances_TSO[position, status]):
                # A way that the language never takes has the probability 0.
                if not share:
                    continue
                for wording in range(wordings):
                    token = 1 + next_status * language.most_wordings + wording
                    longer.append(([*ids, token], next_status, chance * share / wordings))
        prefixes = longer
    return [(ids, chance) for ids, _, chance in prefixes]


def exact_gradient(language: Language) -> np.ndarray[Any, Any]:
    """Returns the policy gradient, flat as in `Language.gradients`.

    Wordings earn nothing, so that their slopes are 0.
    """
    visits_S, rows = np.eye(len(language.correct_S))[0], []
    for position in range(language.length):
        after_SO, chances_SO = language.after_TSO[position], language.chances_TSO[position]
        gains_SO = language.values_TS[position + 1][after_SO] - language.values_TS[position][:, None]
        wordings = np.zeros(len(language.correct_S) * language.most_wordings)
        rows += [(visits_S[:, None] * chances_SO * gains_SO).ravel(), wordings]
        next_visits_S = np.zeros_like(visits_S)
        np.add.at(next_visits_S, after_SO, visits_S[:, None] * chances_SO)
        visits_S = next_visits_S
    return np.concatenate(rows)


def make_all_groups(language: Language, size: int) -> tuple[list[Trajectory], np.ndarray[Any, Any], Any]:
    """Returns all groups of answers, each to a problem of its own, with their probabilities."""
    possible = all_answers(language)
    context = languages.context_of(language, len(possible) ** size, seed=1)
    context = languages.with_critic(context, fitted_critic(language, seed=1))
    problems = iter(context.task.problems("train"))
    answers, chances = [], []
    for group in itertools.product(possible, repeat=size):
        problem = next(problems)
        chances.append(math.prod(chance for _, chance in group))
        for number, (ids, _) in enumerate(group):
            text = " ".join(map(str, ids))
            answers.append(
                Trajectory(
                    problem=problem,
                    sample=number,
                    prompt_ids=token_array([1]),
                    segments=(languages.Completion(token_array([*ids, 0]), None, "stop", 0).segment(),),
                    finish_reason="stop",
                    text=text,
                    grade=context.grader.submit(text, problem).result(),
                    step_ends=language.step_ends,
                )
            )
    return answers, np.array(chances), context


class EngineWithDecidedContinuations(Engine):
    """Makes the first `correct_counts[state]` continuations of a state correct, and no others."""

    version = 0

    def __init__(self, language: Language, correct_count: Mapping[tuple[int, ...], float]) -> None:
        self._rests: dict[tuple[int, ...], list[languages.Completion]] = {}
        self._right = correct_count
        self.undecided: dict[tuple[int, ...], float] = {}
        """The values of the continued states from which an answer may end either way."""
        self._language = language
        for ids, _ in all_answers(language):
            is_correct = int(language.correct_S[language.statuses(ids)[-1]])
            for position in range(len(ids) + 1):
                continuation = languages.Completion(token_array([*ids[position:], 0]), None, "stop", 0)
                self._rests.setdefault(tuple(ids[:position]), [continuation, continuation])[is_correct] = (
                    continuation
                )

    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[languages.Completion]]:
        results = []
        for number, request in enumerate(requests):
            assert isinstance(request, Request)
            ids = tuple(request.prompt_ids[1:].tolist())
            value = self._language.values_TS[len(ids), self._language.statuses(ids)[-1]]
            if 0 < value < 1:
                self.undecided[ids] = float(value)
            correct_count = self._right.get(ids, 0)
            results.append([self._rests[ids][sample < correct_count] for sample in range(request.n)])
            assert on_result is None or not on_result(number, results[-1]), "each state is continued once"
        return results


def exact_variance(language: Language, credit: Credit, size: int) -> tuple[float, np.ndarray[Any, Any]]:
    """Returns the variance of a credit, and its mean gradient.

    The gradient of given answers is linear in the results of each state's continuations. Where these are
    correct with probability v, the state adds v (1 − v) × (the change by one correct continuation) · (the
    change by all of them).
    """
    answers, chances, context = make_all_groups(language, size)

    def gradients(
        correct_counts: Mapping[tuple[int, ...], float],
    ) -> tuple[np.ndarray[Any, Any], EngineWithDecidedContinuations]:
        engine = EngineWithDecidedContinuations(language, correct_counts)
        lent_context = replace(context, engine=engine)
        return gradients_of(language, lent_context, ScoredMethod(credit), trees_of(answers))[0].astype(
            float
        ), engine

    wrong_ND, engine = gradients({})
    mean_ND, sum_ND, noise_N = wrong_ND.copy(), wrong_ND.copy(), np.zeros(len(wrong_ND))
    for ids, value in engine.undecided.items():
        one_ND, all_ND = (gradients({ids: correct_counts})[0] - wrong_ND for correct_counts in (1, math.inf))
        mean_ND += value * all_ND
        sum_ND += all_ND
        noise_N += value * (1 - value) * (one_ND * all_ND).sum(1)
    assert gradients(dict.fromkeys(engine.undecided, math.inf))[0] == pytest.approx(sum_ND, abs=1e-6)
    mean_D = chances @ mean_ND
    return float(chances @ (np.square(mean_ND - mean_D).sum(1) + noise_N)), mean_D


def exact_variance_of_trees(language: Language, method: ScoredMethod) -> tuple[float, np.ndarray[Any, Any]]:
    """Returns the variance of a credit over all trees that its rollout could grow, and its mean gradient."""
    assert method.rollout is not None
    possible, choices = all_answers(language), Choices()

    @cache
    def continuations_of(prefix: tuple[int, ...]) -> tuple[list[languages.Completion], list[float]]:
        suffixes = [
            (ids[len(prefix) :], chance) for ids, chance in possible if ids[: len(prefix)] == [*prefix]
        ]
        total = sum(chance for _, chance in suffixes)
        completions = [languages.Completion(token_array([*ids, 0]), None, "stop", 0) for ids, _ in suffixes]
        return completions, [chance / total for _, chance in suffixes]

    class DrawingLanguage(Language):
        def sample(
            self, prefixes: Sequence[Sequence[int]], seeds: Sequence[int]
        ) -> list[languages.Completion]:
            completions = []
            for ids in prefixes:
                possible_completions, chances = continuations_of(tuple(ids))
                completions.append(possible_completions[choices.draw(chances)])
            return completions

    drawing_language = DrawingLanguage(*(getattr(language, field.name) for field in fields(language)))
    context = languages.context_of(drawing_language, len(possible) ** 4, seed=1)
    problems = iter(context.task.problems("train"))
    trees, chances = [], []
    for _ in choices.ways():
        trees += method.rollout.run(context, [next(problems)])[0]
        chances.append(choices.probability)
    rows_ND = gradients_of(language, context, ScoredMethod(method.credit), trees)[0].astype(float)
    mean_D = chances @ rows_ND
    return float(chances @ np.square(rows_ND - mean_D).sum(1)), mean_D


@pytest.mark.parametrize("name", SMALL)
def test_values_and_gradient_of_a_language_are_those_of_all_its_answers(name: str) -> None:
    language = SMALL[name]
    chances = np.array([chance for _, chance in all_answers(language)])
    correct = [language.correct_S[language.statuses(ids)[-1]] for ids, _ in all_answers(language)]
    assert chances.sum() == pytest.approx(1)
    assert language.values_TS[0, 0] == pytest.approx(chances @ correct)
    for credit in UNBIASED.values():
        assert exact_variance(language, credit, 2)[1] == pytest.approx(exact_gradient(language), abs=1e-6)
    half_gradient_D = exact_variance(language, Group(std=False), 2)[1]
    assert half_gradient_D == pytest.approx(exact_gradient(language) / 2, abs=1e-6)


MAYBE_BIASED = {
    "cut after the prompt": MonteCarlo(samples=2, max_states=1, behind_max_states="no_advantage"),
    "cut after two states": MonteCarlo(samples=2, max_states=2, behind_max_states="no_advantage"),
    "of two states": MonteCarlo(samples=2, max_states=2, behind_max_states="one_step"),
    "steps of one token": MonteCarlo(samples=2, states=EveryNTokens(tokens=1)),
    "steps of two tokens": MonteCarlo(samples=2, states=EveryNTokens(tokens=2)),
    "cut, of siblings": MonteCarlo(values=Siblings(), max_states=1, behind_max_states="no_advantage"),
    "group": Group(std=False),
}


@pytest.mark.parametrize("name", MAYBE_BIASED)
def test_a_credit_is_declared_unbiased_exactly_if_its_gradient_is_exact(name: str) -> None:
    """The declaration is of the whole credit: a credit with unbiased values may cut states off, or choose
    them by the next tokens. A credit that is declared biased is biased in some language."""
    credit = MAYBE_BIASED[name]
    declared = credit.is_unbiased(languages.context_of(SMALL["last"], 1, seed=1))
    bias_by_language = {}
    for language_name, language in SMALL.items():
        mean_D, exact_D = exact_variance(language, credit, 2)[1], exact_gradient(language)
        bias_by_language[language_name] = float(np.linalg.norm(mean_D - exact_D) / np.linalg.norm(exact_D))
    assert declared == (max(bias_by_language.values()) < 1e-5), bias_by_language


@pytest.mark.parametrize(
    ("overrides", "is_unbiased"),
    [
        ({}, True),
        ({"temperature": 1.0, "top_p": 1.0}, True),  # as the rollout has it
        ({"temperature": 0.5}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 3}, False),
    ],
)
def test_continuations_with_other_sampling_parameters_are_of_another_policy_and_biased(
    overrides: dict[str, Any], is_unbiased: bool
) -> None:
    context = languages.context_of(SMALL["last"], 1, seed=1)
    assert MonteCarlo(**overrides).is_unbiased(context) == is_unbiased
    # Without continuations, nothing is sampled by these parameters.
    assert MonteCarlo(**overrides, values=Siblings()).is_unbiased(context)


def test_steps_that_depend_on_later_tokens_are_biased() -> None:
    context = languages.context_of(SMALL["last"], 1, seed=1)
    biased = replace(context, task=TaskThatLooksAhead(language=SMALL["last"], count=1))
    assert not MonteCarlo().is_unbiased(biased)
    assert MonteCarlo(states=EveryNTokens(tokens=1)).is_unbiased(biased), "it doesn't use the task's steps"


@pytest.mark.parametrize("begin_with", [False, True])
def test_steps_that_begin_with_an_unlikely_token_depend_on_it_and_are_biased(begin_with: bool) -> None:
    """test_bias_of_estimators.py states how large the bias is then."""
    context = languages.context_of(SMALL["last"], 1, seed=1)
    credit = MonteCarlo(states=LowProbability(below=0.6, every=1, begin_with=begin_with))
    assert credit.is_unbiased(context) != begin_with


class TaskThatLooksAhead(languages.LanguageTask):
    """A task whose boundaries depend on what follows them."""

    boundaries_look_back = False


def test_a_subclass_of_an_unbiased_credit_does_not_inherit_its_declaration() -> None:
    class Shifted(Rloo):
        def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
            return [reward - 0.5 for reward in super().advantages(rewards)]

    context = languages.context_of(SMALL["last"], 1, seed=1)
    assert Rloo().is_unbiased(context) and not Shifted().is_unbiased(context)


def test_a_credit_that_cuts_states_off_has_no_gain_where_late_steps_decide() -> None:
    """If only the values were asked whether they are biased, its quiet gradient would have a high gain."""
    language, credit = SMALL["last"], MonteCarlo(samples=9, max_states=1, behind_max_states="no_advantage")
    score = score_methods(language, {"cut": ScoredMethod(credit)}, most_problems=2000)["cut"]
    variance, mean_D = exact_variance(language, credit, ANSWERS_OF_EXACT)
    exact_D = exact_gradient(language)
    scale = float(exact_D @ exact_D / (mean_D @ exact_D)) if mean_D @ exact_D > 1e-9 else math.inf
    reference = exact_variance(language, Rloo(), ANSWERS_OF_EXACT)[0]
    squared_bias = scale**2 * float(mean_D @ mean_D) - float(exact_D @ exact_D)
    exact_gain = (
        0.0 if scale == math.inf else reference / (scale**2 * variance + BATCH_OF_PROBLEMS * squared_bias)
    )
    assert exact_gain < 0.3, "the deciding step is after the states"
    assert score["gain"]["value"] is None or score["gain"]["value"] < 0.5


@pytest.mark.parametrize("method", TREE_METHODS.values(), ids=TREE_METHODS)
def test_the_gradient_over_all_trees_is_that_of_as_many_independent_answers(method: ScoredMethod) -> None:
    language = SMALL["majority"]
    half_gradient_D = exact_variance_of_trees(language, method)[1]
    assert half_gradient_D == pytest.approx(exact_gradient(language) / 2, abs=1e-6)


def test_a_quarter_of_the_answers_is_correct_in_all_but_three_languages() -> None:
    shares = {name: float(language_of(name).values_TS[0, 0]) for name in LANGUAGES}
    exceptions = {name: round(share, 2) for name, share in shares.items() if abs(share - 0.25) > 0.01}
    assert exceptions == {"first of 8 at 5 %": 0.05, "repair": 0.42, "fork": 0.46}


@pytest.mark.parametrize("name", LANGUAGES)
def test_answers_are_sampled_with_the_probabilities_of_the_language(name: str) -> None:
    language = language_of(name)
    completions = language.sample([[]] * 4000, range(4000))
    ends = np.array([language.statuses(completion.token_ids)[-1] for completion in completions])
    assert language.correct_S[ends].mean() == pytest.approx(language.values_TS[0, 0], abs=0.03)
    assert all(len(completion.token_ids) == language.length + 1 for completion in completions)
    prefix = completions[7].token_ids[: language.length // 2].tolist()
    continuations = language.sample([prefix] * 4000, range(4000))
    ends = np.array([language.statuses([*prefix, *completion.token_ids])[-1] for completion in continuations])
    expected = language.values_TS[len(prefix), language.statuses(prefix)[-1]]
    assert language.correct_S[ends].mean() == pytest.approx(expected, abs=0.03)
    alone, with_another = language.sample([prefix], [3]), language.sample([[], prefix], [9, 3])
    assert alone[0].token_ids.tolist() == with_another[1].token_ids.tolist()


@pytest.mark.parametrize(
    ("name", "credit"),
    [
        ("first", Rloo()),
        ("first", MonteCarlo(values=Siblings())),
        ("first", TrueAdvantages()),
        ("luck", MonteCarlo(values=Siblings())),
        ("majority", Group(std=False)),
        ("majority", MonteCarlo(samples=2)),
        ("last", MonteCarlo(samples=1)),
    ],
    ids=str,
)
def test_the_gain_is_that_of_exact_enumeration(name: str, credit: Credit) -> None:
    language, size = SMALL[name], 2
    context = languages.context_of(language, 3000, seed=5)
    trees, _ = SingleTurn(samples=size, max_tokens=4).run(context, context.task.problems("train"))
    own_ND, tokens = gradients_of(language, context, ScoredMethod(credit), trees)
    reference_ND, reference_tokens = gradients_of(language, context, ScoredMethod(Rloo()), trees)
    estimate = measure_gain(
        reference_ND, reference_ND, own_ND, tokens / reference_tokens, credit.is_unbiased(context), seed=1
    )
    variance = exact_variance(language, credit, size)[0]
    assert reference_tokens == len(answers_of(trees)) * 4
    assert (tokens > reference_tokens) == (isinstance(credit, MonteCarlo) and credit.values.continues)
    scale = size / (size - 1) if isinstance(credit, Group) else 1.0
    exact_gain = exact_variance(language, Rloo(), size)[0] / variance / scale**2
    assert estimate["gain"]["value"] == pytest.approx(exact_gain, rel=0.08)
    assert estimate["gain"]["low"] < exact_gain * 1.03 and estimate["gain"]["high"] > exact_gain * 0.97
    assert estimate["bias"] == pytest.approx(0, abs=0.01)


def test_a_biased_credit_pays_for_its_bias_and_not_for_its_scale() -> None:
    rng = np.random.default_rng(0)
    true_gradient = np.ones(4, np.float32)
    reference = (true_gradient + rng.normal(size=(4000, 4))).astype(np.float32)
    doubled = measure_gain(reference, reference, 2 * reference, 1.0, unbiased=False, seed=1)
    assert (doubled["gain"]["value"], doubled["bias"]) == pytest.approx((1, 0), abs=1e-6)
    shifted = reference.copy()
    shifted[:, 0] -= 1  # the mean misses one of four directions
    estimate = measure_gain(reference, reference, shifted, 2.0, unbiased=False, seed=1)
    assert estimate["bias"] == pytest.approx(0.25, abs=0.02)
    # Scaled by 4/3 it goes as far along the true gradient: noise 4 (4/3)² + 64 × 4/3 in place of 4.
    assert estimate["gain"]["value"] == pytest.approx(4 / (4 * 16 / 9 + BATCH_OF_PROBLEMS * 4 / 3), rel=0.1)
    assert estimate["gain_per_token"]["value"] == estimate["gain"]["value"] / 2
    noisy = (true_gradient + 20 * rng.normal(size=(4000, 4))).astype(np.float32)
    orthogonal = np.tile(np.array([1, -1, 1, -1], np.float32), (4000, 1))
    estimate = measure_gain(noisy, noisy, orthogonal, 1.0, unbiased=False, seed=1)
    assert (estimate["gain"]["value"] or 0) < 0.1, "a gradient in another direction gains nothing"


def test_the_interval_of_a_biased_credit_includes_the_errors_of_bias_and_scale() -> None:
    rng = np.random.default_rng(0)
    mean, biased_mean = np.eye(8)[0], np.eye(8)[:2].sum(0)

    def estimates() -> list[Any]:
        noise_ND, more_ND = rng.normal(size=(2, 400, 8))
        rows = (mean + 3 * noise_ND, mean + noise_ND, biased_mean + noise_ND + more_ND)
        reference_ND, true_ND, own_ND = (interval.astype(np.float32) for interval in rows)
        truths = (reference_ND, true_ND)
        return [
            measure_gain(reference_ND, interval, own_ND, 1.0, unbiased=False, seed=1) for interval in truths
        ]

    # The credit is exact along the true gradient, and off by the same length in another direction.
    exact = 72 / (16 + BATCH_OF_PROBLEMS)
    of_reference, of_true = zip(*(estimates() for _ in range(100)))
    for intervals in (
        [interval["gain"] for interval in of_reference],
        [interval["gain"] for interval in of_true],
    ):
        assert 0.88 < np.mean([interval["low"] < exact < interval["high"] for interval in intervals]) < 0.995
    widths = [
        np.mean([half_width(interval) for interval in intervals]) for intervals in (of_true, of_reference)
    ]
    assert widths[0] < 0.8 * widths[1], "true advantages tell more of a bias than RLOO does"


def test_a_biased_credit_is_compared_with_the_gradient_that_shares_its_noise() -> None:
    rng = np.random.default_rng(0)
    luck_ND, other_ND = rng.normal(size=(2, 500, 8))
    reference_ND, true_ND = (
        (np.eye(8)[0] + 3 * luck_ND).astype(np.float32),
        (np.eye(8)[0] + other_ND).astype(np.float32),
    )
    for own_ND, exact in ((reference_ND, 1.0), (true_ND, 9.0)):
        estimate = measure_gain(reference_ND, true_ND, own_ND / 2, 1.0, unbiased=False, seed=1)
        assert estimate["gain"]["value"] == pytest.approx(exact, rel=0.1)
        assert half_width(estimate) < 0.1


def test_a_gain_lies_in_its_interval_or_is_none_where_noise_hides_the_true_gradient() -> None:
    rng, without_gain = np.random.default_rng(0), 0
    for _ in range(200):
        reference_ND, true_ND, own_ND = rng.normal(size=(3, 100, 4)).astype(np.float32)
        gain_interval = measure_gain(reference_ND, true_ND, true_ND + own_ND, 1.0, unbiased=False, seed=1)[
            "gain"
        ]
        without_gain += gain_interval["value"] is None
        assert (
            gain_interval["value"] is None
            or 0.99 * gain_interval["low"] <= gain_interval["value"] <= 1.01 * gain_interval["high"]
        )
    assert 20 < without_gain < 100


def test_the_best_method_depends_on_the_cost_of_training() -> None:
    assert at_ratio(2.0, 4.0, 0.0) == 0.5
    assert at_ratio(2.0, 4.0, 2.0) == 1.0
    few = {"gain": {"value": 2.0}, "cost": 1.0}
    many = {"gain": {"value": 9.0}, "cost": 20.0}
    methods = {"few": few, "many": many, TRUE_ADVANTAGES: {"gain": {"value": 99.0}, "cost": 1.0}}
    assert best_at(methods, 0.25)[0] == "few"
    assert best_at(methods, 30.0) == ("many", pytest.approx(9 * 31 / 50))


def test_the_legend_of_the_gains_has_a_method_that_the_first_panel_does_not_show() -> None:
    score = {"cost": 2.0, "gain": {"value": 1.5, "low": 1.0, "high": 2.0}}
    without_gain = {"cost": 2.0, "gain": {"value": None, "low": None, "high": None}}
    figure = draw_gain(
        {"first": {"RLOO": score, "tree": without_gain}, "second": {"tree": score, "VinePPO": score}}
    )
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["RLOO", "tree", "VinePPO"]


def test_rank_correlation_takes_the_gains_that_both_have_and_gives_equal_gains_equal_ranks() -> None:
    first, second = (
        {"slips": {str(number): {"gain_per_token": {"value": gain}} for number, gain in enumerate(gains)}}
        for gains in ([1.0, 2.0, 2.0, 3.0, None], [1.0, 3.0, 2.0, None, 4.0])
    )
    assert rank_correlation(first, second) == pytest.approx(3**0.5 / 2)
    assert math.isnan(rank_correlation(first, {"walk": second["slips"]}))


USERS_CREDIT = '''
from dataclasses import dataclass

from treetune.credit.base import Credit, GroupCredit


@Credit.register("half_of_the_best")
@dataclass(frozen=True, kw_only=True)
class HalfOfTheBest(GroupCredit):
    """Half of the best answer's reward is the baseline."""

    def advantages(self, rewards):
        return [reward - max(rewards) / 2 for reward in rewards]
'''


def test_a_users_credit_in_one_file_has_a_score_and_wrong_calls_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_credit.py").write_text(USERS_CREDIT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--problems", "125", "--languages", "first of 8", "last of 8", "--output", "out"]
    assert main(["arena", "my_credit", *flags]) == 0
    output = capsys.readouterr().out
    assert "first of 8" in output and "half_of_the_best" in output
    assert "| half_of_the_best |" in (tmp_path / "out/arena.md").read_text()
    # Half of the best answer's reward is the same for all steps, which finds the decisive one by chance.
    assert (
        "| half_of_the_best | 0.000 | 0.000 | 0.125 | at 0.125 |"
        in (tmp_path / "out/arena_steps.md").read_text()
    )
    assert (tmp_path / "out/arena.png").stat().st_size > 10_000
    assert "rank" not in output
    assert main(["arena", "my_credit", *flags, "--against", "out/arena.json"]) == 0
    assert "those of out/arena.json: 1.000" in capsys.readouterr().out
    assert main(["arena", *flags, "--seed", "2"]) != 0
    assert "has the scores of --seed 1 --problems 125: give" in capsys.readouterr().err
    earlier = json.loads((tmp_path / "out/arena.json").read_text())
    del earlier["scores"]["first of 8"]["half_of_the_best"]["decisive"]
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier/arena.json").write_text(json.dumps(earlier))
    assert main(["arena", "my_credit", *flags[:-1], "earlier"]) != 0
    assert "earlier/arena.json was written by an earlier version" in capsys.readouterr().err
    assert main(["arena", "my_credit", "--problems", "125", "--languages", "slips", "--output", "wordy"]) == 0
    assert not (tmp_path / "wordy/arena_map.png").exists(), "no such language has a place on the map"
    assert gc.isenabled()
    assert main(["arena", "--methods", "RLOO", "GRPO", *flags[:-1], "two"]) == 0
    assert list(json.loads((tmp_path / "two/arena.json").read_text())["scores"]["first of 8"]) == [
        "RLOO",
        "GRPO",
    ]
    assert main(["arena", "--methods", "REINFORCE"]) != 0
    assert "there is no method 'REINFORCE': choose one of " in capsys.readouterr().err
    assert main(["arena", "--languages", "nowhere"]) != 0
    assert "there is no language 'nowhere': choose one of slips," in capsys.readouterr().err
    (tmp_path / "own_parts").mkdir()
    divides = USERS_CREDIT.replace("half_of_the_best", "divides").replace("max(rewards) / 2", "float('nan')")
    (tmp_path / "own_parts/divides.py").write_text(divides)
    assert main(["arena", "own_parts", *flags[:4]]) != 0
    assert "divides gives advantages that are not finite" in capsys.readouterr().err
    assert gc.isenabled(), "an error turns automatic collections on again, too"
    (tmp_path / "own_parts/divides.py").unlink()
    lies = USERS_CREDIT.replace("half_of_the_best", "lies").replace(
        "reward - max(rewards) / 2", "reward / 1000"
    )
    lies = lies.replace("    def adv", "    unbiased = True\n\n    def adv")
    (tmp_path / "lies.py").write_text(lies)
    assert main(["arena", "lies", *flags[:4]]) != 0
    assert "lies declares itself unbiased, but its mean gradient isn't the policy gradient" in (
        capsys.readouterr().err
    )
    assert main(["arena", "my_credit", "--problems", "1"]) != 0
    assert "--problems is 1: at least 2 are needed" in capsys.readouterr().err
    assert main(["arena", "json"]) != 0
    assert "json registers no credit or value estimator" in capsys.readouterr().err


def test_every_shipped_method_has_a_score_and_a_place_on_the_map(tmp_path: Path) -> None:
    methods = shipped_methods()
    assert len(methods) > 30
    by_language = {
        name: score_methods(language_of(name), methods, most_problems=24)
        for name in ("last of 2", "first of 4")
    }
    for scores_by_method in by_language.values():
        assert set(scores_by_method) == set(methods)
        assert all(score["problems"] == 24 and score["cost"] >= 1 for score in scores_by_method.values())
    write_page(tmp_path, by_language, "treetune arena", not_recommended=["critic"])
    assert (tmp_path / "arena_map.png").stat().st_size > 10_000
    page = (tmp_path / "arena.md").read_text()
    assert page.count("| λ-GRPO |") == 3 and "| nan" not in page


@pytest.mark.parametrize("name", SMALL)
def test_a_language_gives_the_squares_and_entropies_of_its_distributions(name: str) -> None:
    language = SMALL[name]
    answers, _, context = make_all_groups(language, 1)
    episodes, _ = TrueAdvantages().assign(context, trees_of(answers))
    for answer, (squares, entropies) in zip(answers, language.distributions(episodes), strict=True):
        ids = answer.response_ids.tolist()
        for position in range(language.length):
            chance_by_token: dict[int, float] = {}
            for other_ids, chance in all_answers(language):
                if other_ids[:position] == ids[:position]:
                    chance_by_token[other_ids[position]] = (
                        chance_by_token.get(other_ids[position], 0.0) + chance
                    )
            chances = np.array(list(chance_by_token.values())) / sum(chance_by_token.values())
            assert squares[position] == pytest.approx((chances**2).sum())
            assert entropies[position] == pytest.approx(-(chances * np.log(chances)).sum(), abs=1e-12)
        assert (squares[-1], entropies[-1]) == (1.0, 0.0)


@pytest.mark.parametrize("name", SMALL)
def test_a_language_gives_the_divergence_of_each_distribution_from_the_mean_of_its_group(name: str) -> None:
    language = SMALL[name]
    answers, _, context = make_all_groups(language, 2)
    episodes, _ = TrueAdvantages().assign(context, trees_of(answers[:100]))
    possible = all_answers(language)

    @cache
    def next_chances(ids: tuple[int, ...]) -> np.ndarray:
        chances = np.zeros(1 + len(language.correct_S) * language.most_wordings)
        for other_ids, chance in possible:
            if tuple(other_ids[: len(ids)]) == ids:
                chances[other_ids[len(ids)]] += chance
        return chances / chances.sum()

    def kl(chances: np.ndarray, reference: np.ndarray) -> float:
        return float(sum(p * np.log(p / q) for p, q in zip(chances, reference, strict=True) if p > 0))

    for episode, divergences in zip(episodes, language.divergences(episodes), strict=True):
        group = [plain(other_ids.response_ids) for other_ids in episodes if other_ids.group == episode.group]
        assert len(group) > 1
        for position in range(language.length):
            chances = next_chances(plain(episode.response_ids)[:position])
            mean = np.mean([next_chances(ids[:position]) for ids in group], axis=0)
            mixture = (chances + mean) / 2
            assert divergences[position] == pytest.approx(
                (kl(chances, mixture) + kl(mean, mixture)) / 2, abs=1e-10
            )
        assert divergences[-1] == 0.0


@pytest.mark.parametrize("name", SMALL)
def test_a_language_scores_texts_by_its_table_or_by_bayes_rule_if_the_result_is_known(name: str) -> None:
    """The chance of an answer that will be correct is its own, divided by that of all correct answers."""
    language = SMALL[name]
    for ids, chance in all_answers(language):
        for start in range(len(ids)):
            prefix, text = ids[:start], [*ids[start:], languages.END_TOKEN]
            logprobs = [*language.score([], prefix).logprobs, *language.score(prefix, text).logprobs]
            assert math.exp(sum(logprobs)) == pytest.approx(chance)
        informed_chance = math.exp(sum(language.score([], ids, will_be_correct=True).logprobs))
        is_correct = language.correct_S[language.statuses(ids)[-1]]
        assert informed_chance == pytest.approx(
            chance / language.values_TS[0, 0] if is_correct else 0.0, abs=1e-12
        )
    assert language.score([], [languages.END_TOKEN]).logprobs.tolist() == [-9999.0]
    assert language.score([], [language.gold_id + 1000]).logprobs.tolist() == [-9999.0]


def test_scoring_stops_when_the_gain_is_precise_enough() -> None:
    language = SMALL["first"]
    methods = {"RLOO": ScoredMethod(Rloo()), "VinePPO": ScoredMethod(MonteCarlo(samples=2))}
    score_by_method = score_methods(language, methods, most_problems=375, precision=0.01)
    assert score_by_method["RLOO"]["problems"] == 125 and score_by_method["VinePPO"]["problems"] == 375
    assert score_by_method["RLOO"]["cost"] == 1.0 and score_by_method["VinePPO"]["cost"] > 2
