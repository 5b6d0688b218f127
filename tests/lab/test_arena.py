"""The arena's languages, gains and scores against exact enumeration."""

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
from tests.columns import plain
from tests.credit.expectations import Choices
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
from treetune.engine.requests import Later, OnResult, Request
from treetune.lab.arena import languages
from treetune.lab.arena.gain import BATCH, TRUE_ADVANTAGES, at_ratio, best_at, gain, half_width
from treetune.lab.arena.languages import LANGUAGES, Language, TrueAdvantages, language_of
from treetune.lab.arena.scores import (
    ScoredMethod,
    fitted_critic,
    gradients_of,
    rank_correlation,
    scores,
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
"""Answers to a problem where all groups of answers are gone through."""

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
"""What two answers to a problem are enough for, and no other problem changes."""

GROWN = TreeRollout(samples=2, max_tokens=8, branching=AtStates(states=EveryNTokens(tokens=1), ways=(2,)))
"""Trees of two answers, each of which goes on in two ways from its first token: four to divide by."""
OF_TREES = {
    "tree": ScoredMethod(TreeCredit(), GROWN),
    "siblings in a tree": ScoredMethod(MonteCarlo(values=Siblings()), GROWN),
}


def all_answers(language: Language) -> list[tuple[list[int], float]]:
    """All answers with their probabilities."""
    found = [([], 0, 1.0)]
    for place in range(language.length):
        found = [
            ([*ids, 1 + after * language.most_wordings + wording], after, chance * part / wordings)
            for ids, status, chance in found
            for after, part in zip(language.after_TSO[place, status], language.chances_TSO[place, status])
            for wordings in [language.wordings_TS[place, status]]
            for wording in range(wordings)
            if part
        ]
    return [(ids, chance) for ids, _, chance in found]


def exact_gradient(language: Language) -> np.ndarray[Any, Any]:
    """The policy gradient, flat as `Language.gradients` has it: of the ways alone, since wordings earn
    nothing."""
    visits_S, rows = np.eye(len(language.correct_S))[0], []
    for place in range(language.length):
        after_SO, chances_SO = language.after_TSO[place], language.chances_TSO[place]
        gains_SO = language.values_TS[place + 1][after_SO] - language.values_TS[place][:, None]
        wordings = np.zeros(len(language.correct_S) * language.most_wordings)
        rows += [(visits_S[:, None] * chances_SO * gains_SO).ravel(), wordings]
        following = np.zeros_like(visits_S)
        np.add.at(following, after_SO, visits_S[:, None] * chances_SO)
        visits_S = following
    return np.concatenate(rows)


def groups_of(language: Language, size: int) -> tuple[list[Trajectory], np.ndarray[Any, Any], Any]:
    """All groups of answers, each a problem of its own, with their probabilities."""
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


class Decided(Engine):
    """Ends answers as it is told: of a state's continuations the first `right` are correct, and no others."""

    version = 0

    def __init__(self, language: Language, right: Mapping[tuple[int, ...], float]) -> None:
        self._rests: dict[tuple[int, ...], list[languages.Completion]] = {}
        self._right = right
        self.undecided: dict[tuple[int, ...], float] = {}
        """The values of the states that were continued and that may end either way."""
        self._language = language
        for ids, _ in all_answers(language):
            is_correct = int(language.correct_S[language.statuses(ids)[-1]])
            for place in range(len(ids) + 1):
                rest = languages.Completion(token_array([*ids[place:], 0]), None, "stop", 0)
                self._rests.setdefault(tuple(ids[:place]), [rest, rest])[is_correct] = rest

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[languages.Completion]]:
        results = []
        for number, one in enumerate(requests):
            assert isinstance(one, Request)
            ids = tuple(one.prompt_ids[1:].tolist())
            value = self._language.values_TS[len(ids), self._language.statuses(ids)[-1]]
            if 0 < value < 1:
                self.undecided[ids] = float(value)
            right = self._right.get(ids, 0)
            results.append([self._rests[ids][sample < right] for sample in range(one.n)])
            assert on_result is None or not on_result(number, results[-1]), "each state is continued once"
        return results


def exact_variance(language: Language, credit: Credit, size: int) -> tuple[float, np.ndarray[Any, Any]]:
    """V of a credit, and its mean gradient.

    The gradient of given answers has a slope in what each state's continuations earn. Where these are correct
    with probability v, the state adds v (1 − v) × (what one correct one changes) · (what all change)."""
    answers, chances, context = groups_of(language, size)

    def gradients(right: Mapping[tuple[int, ...], float]) -> tuple[np.ndarray[Any, Any], Decided]:
        engine = Decided(language, right)
        lent = replace(context, engine=engine)
        return gradients_of(language, lent, ScoredMethod(credit), trees_of(answers))[0].astype(float), engine

    wrong_ND, engine = gradients({})
    mean_ND, sum_ND, noise_N = wrong_ND.copy(), wrong_ND.copy(), np.zeros(len(wrong_ND))
    for ids, value in engine.undecided.items():
        one_ND, all_ND = (gradients({ids: right})[0] - wrong_ND for right in (1, math.inf))
        mean_ND += value * all_ND
        sum_ND += all_ND
        noise_N += value * (1 - value) * (one_ND * all_ND).sum(1)
    assert gradients(dict.fromkeys(engine.undecided, math.inf))[0] == pytest.approx(sum_ND, abs=1e-6)
    mean_D = chances @ mean_ND
    return float(chances @ (np.square(mean_ND - mean_D).sum(1) + noise_N)), mean_D


def exact_variance_of_trees(language: Language, method: ScoredMethod) -> tuple[float, np.ndarray[Any, Any]]:
    """V of a credit over all trees that its rollout could grow, and its mean gradient."""
    assert method.rollout is not None
    possible, choices = all_answers(language), Choices()

    @cache
    def rests(begun: tuple[int, ...]) -> tuple[list[languages.Completion], list[float]]:
        known = [(ids[len(begun) :], chance) for ids, chance in possible if ids[: len(begun)] == [*begun]]
        total = sum(chance for _, chance in known)
        ends = [languages.Completion(token_array([*ids, 0]), None, "stop", 0) for ids, _ in known]
        return ends, [chance / total for _, chance in known]

    class Drawn(Language):
        def sample(self, begun: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[languages.Completion]:
            return [rests(tuple(ids))[0][choices.draw(rests(tuple(ids))[1])] for ids in begun]

    drawn = Drawn(*(getattr(language, one.name) for one in fields(language)))
    context = languages.context_of(drawn, len(possible) ** 4, seed=1)
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
    half_of_it = exact_variance(language, Group(std=False), 2)[1]
    assert half_of_it == pytest.approx(exact_gradient(language) / 2, abs=1e-6)


MAYBE_BIASED = {
    "cut after the prompt": MonteCarlo(samples=2, max_states=1),
    "cut after two states": MonteCarlo(samples=2, max_states=2),
    "of two states": MonteCarlo(samples=2, max_states=2, behind_max_states="one_step"),
    "steps of one token": MonteCarlo(samples=2, states=EveryNTokens(tokens=1)),
    "steps of two tokens": MonteCarlo(samples=2, states=EveryNTokens(tokens=2)),
    "cut, of siblings": MonteCarlo(values=Siblings(), max_states=1),
    "group": Group(std=False),
}


@pytest.mark.parametrize("name", MAYBE_BIASED)
def test_a_credit_that_says_it_is_unbiased_has_the_exact_gradient(name: str) -> None:
    """The whole credit is asked: a credit of unbiased values may cut states off or choose them by what comes
    next. One that calls itself biased is off on some language."""
    credit = MAYBE_BIASED[name]
    says = credit.is_unbiased(languages.context_of(SMALL["last"], 1, seed=1))
    off = {}
    for language_name, language in SMALL.items():
        mean_D, exact_D = exact_variance(language, credit, 2)[1], exact_gradient(language)
        off[language_name] = float(np.linalg.norm(mean_D - exact_D) / np.linalg.norm(exact_D))
    assert says == (max(off.values()) < 1e-5), off


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
def test_continuations_that_are_sampled_otherwise_are_of_another_policy(
    overrides: dict[str, Any], is_unbiased: bool
) -> None:
    context = languages.context_of(SMALL["last"], 1, seed=1)
    assert MonteCarlo(**overrides).is_unbiased(context) == is_unbiased
    # Without continuations, nothing is sampled by these parameters.
    assert MonteCarlo(**overrides, values=Siblings()).is_unbiased(context)


def test_steps_that_count_the_end_token_into_the_last_one_are_biased() -> None:
    context = languages.context_of(SMALL["last"], 1, seed=1)
    biased = replace(context, task=LooksAhead(language=SMALL["last"], count=1))
    assert not MonteCarlo().is_unbiased(biased)
    assert MonteCarlo(states=EveryNTokens(tokens=1)).is_unbiased(biased), "it doesn't go by the task's steps"


@pytest.mark.parametrize("begin_with", [False, True])
def test_steps_that_begin_with_an_unlikely_token_are_chosen_by_what_comes_next(begin_with: bool) -> None:
    """How far off the gradient is then: test_estimators_and_their_bias.py."""
    context = languages.context_of(SMALL["last"], 1, seed=1)
    credit = MonteCarlo(states=LowProbability(below=0.6, every=1, begin_with=begin_with))
    assert credit.is_unbiased(context) != begin_with


class LooksAhead(languages.LanguageTask):
    """A task whose boundaries depend on what follows them."""

    boundaries_look_back = False


def test_a_class_that_is_built_on_an_unbiased_credit_is_not_believed() -> None:
    class Shifted(Rloo):
        def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
            return [reward - 0.5 for reward in super().advantages(rewards)]

    context = languages.context_of(SMALL["last"], 1, seed=1)
    assert Rloo().is_unbiased(context) and not Shifted().is_unbiased(context)


def test_a_credit_whose_states_are_cut_off_is_told_no_gain_where_late_steps_decide() -> None:
    """With the estimator believed, it was told the gain of a quiet gradient that goes nowhere."""
    language, credit = SMALL["last"], MonteCarlo(samples=9, max_states=1)
    found = scores(language, {"cut": ScoredMethod(credit)}, most=2000)["cut"]
    variance, mean_D = exact_variance(language, credit, ANSWERS_OF_EXACT)
    exact_D = exact_gradient(language)
    scale = float(exact_D @ exact_D / (mean_D @ exact_D)) if mean_D @ exact_D > 1e-9 else math.inf
    reference = exact_variance(language, Rloo(), ANSWERS_OF_EXACT)[0]
    missed = scale**2 * float(mean_D @ mean_D) - float(exact_D @ exact_D)
    exact_gain = 0.0 if scale == math.inf else reference / (scale**2 * variance + BATCH * missed)
    assert exact_gain < 0.3, "what decides stands behind the states"
    assert found["gain"]["value"] is None or found["gain"]["value"] < 0.5


@pytest.mark.parametrize("method", OF_TREES.values(), ids=OF_TREES)
def test_the_gradient_over_all_trees_is_that_of_as_many_answers_as_begin_them(method: ScoredMethod) -> None:
    language = SMALL["majority"]
    half_of_it = exact_variance_of_trees(language, method)[1]
    assert half_of_it == pytest.approx(exact_gradient(language) / 2, abs=1e-6)


def test_a_quarter_of_the_answers_is_correct_in_all_languages_but_three() -> None:
    shares = {name: float(language_of(name).values_TS[0, 0]) for name in LANGUAGES}
    others = {name: round(share, 2) for name, share in shares.items() if abs(share - 0.25) > 0.01}
    assert others == {"first of 8 at 5 %": 0.05, "repair": 0.42, "fork": 0.46}


@pytest.mark.parametrize("name", LANGUAGES)
def test_answers_of_every_language_are_sampled_as_its_table_says(name: str) -> None:
    language = language_of(name)
    drawn = language.sample([[]] * 4000, range(4000))
    ends = np.array([language.statuses(one.token_ids)[-1] for one in drawn])
    assert language.correct_S[ends].mean() == pytest.approx(language.values_TS[0, 0], abs=0.03)
    assert all(len(one.token_ids) == language.length + 1 for one in drawn)
    begun = drawn[7].token_ids[: language.length // 2].tolist()
    rests = language.sample([begun] * 4000, range(4000))
    ends = np.array([language.statuses([*begun, *one.token_ids])[-1] for one in rests])
    expected = language.values_TS[len(begun), language.statuses(begun)[-1]]
    assert language.correct_S[ends].mean() == pytest.approx(expected, abs=0.03)
    alone, beside = language.sample([begun], [3]), language.sample([[], begun], [9, 3])
    assert alone[0].token_ids.tolist() == beside[1].token_ids.tolist()


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
    own, tokens = gradients_of(language, context, ScoredMethod(credit), trees)
    reference, plain = gradients_of(language, context, ScoredMethod(Rloo()), trees)
    found = gain(reference, reference, own, tokens / plain, credit.is_unbiased(context), seed=1)
    variance = exact_variance(language, credit, size)[0]
    assert plain == len(answers_of(trees)) * 4
    assert (tokens > plain) == (isinstance(credit, MonteCarlo) and credit.values.continues)
    scale = size / (size - 1) if isinstance(credit, Group) else 1.0
    exact = exact_variance(language, Rloo(), size)[0] / variance / scale**2
    assert found["gain"]["value"] == pytest.approx(exact, rel=0.08)
    assert found["gain"]["low"] < exact * 1.03 and found["gain"]["high"] > exact * 0.97
    assert found["bias"] == pytest.approx(0, abs=0.01)


def test_a_biased_credit_pays_for_its_bias_and_not_for_its_scale() -> None:
    rng = np.random.default_rng(0)
    true = np.ones(4, np.float32)
    reference = (true + rng.normal(size=(4000, 4))).astype(np.float32)
    doubled = gain(reference, reference, 2 * reference, 1.0, unbiased=False, seed=1)
    assert (doubled["gain"]["value"], doubled["bias"]) == pytest.approx((1, 0), abs=1e-6)
    shifted = reference.copy()
    shifted[:, 0] -= 1  # the mean misses one of four directions
    found = gain(reference, reference, shifted, 2.0, unbiased=False, seed=1)
    assert found["bias"] == pytest.approx(0.25, abs=0.02)
    # Scaled by 4/3 it goes as far along the true gradient: noise 4 (4/3)² + 64 × 4/3 in place of 4.
    assert found["gain"]["value"] == pytest.approx(4 / (4 * 16 / 9 + BATCH * 4 / 3), rel=0.1)
    assert found["gain_per_token"]["value"] == found["gain"]["value"] / 2
    noisy = (true + 20 * rng.normal(size=(4000, 4))).astype(np.float32)
    aside = np.tile(np.array([1, -1, 1, -1], np.float32), (4000, 1))
    found = gain(noisy, noisy, aside, 1.0, unbiased=False, seed=1)
    assert (found["gain"]["value"] or 0) < 0.1, "what goes elsewhere gains nothing, however quiet it is"


def test_the_interval_of_a_biased_credit_knows_that_its_bias_and_scale_are_estimates() -> None:
    rng = np.random.default_rng(0)
    mean, own = np.eye(8)[0], np.eye(8)[:2].sum(0)

    def found() -> list[Any]:
        noise_ND, more_ND = rng.normal(size=(2, 400, 8))
        rows = (mean + 3 * noise_ND, mean + noise_ND, own + noise_ND + more_ND)
        reference_ND, true_ND, own_ND = (one.astype(np.float32) for one in rows)
        held_to = (reference_ND, true_ND)
        return [gain(reference_ND, one, own_ND, 1.0, unbiased=False, seed=1) for one in held_to]

    exact = 72 / (16 + BATCH)  # it is right along the true gradient, and as far off beside it
    of_reference, of_true = zip(*(found() for _ in range(100)))
    for intervals in ([one["gain"] for one in of_reference], [one["gain"] for one in of_true]):
        assert 0.88 < np.mean([one["low"] < exact < one["high"] for one in intervals]) < 0.995
    widths = [np.mean([half_width(one) for one in each]) for each in (of_true, of_reference)]
    assert widths[0] < 0.8 * widths[1], "true advantages tell more of a bias than RLOO does"


def test_a_biased_credit_is_held_to_what_shares_its_luck() -> None:
    rng = np.random.default_rng(0)
    luck_ND, other_ND = rng.normal(size=(2, 500, 8))
    reference, true = (
        (np.eye(8)[0] + 3 * luck_ND).astype(np.float32),
        (np.eye(8)[0] + other_ND).astype(np.float32),
    )
    for own, exact in ((reference, 1.0), (true, 9.0)):
        found = gain(reference, true, own / 2, 1.0, unbiased=False, seed=1)
        assert found["gain"]["value"] == pytest.approx(exact, rel=0.1)
        assert half_width(found) < 0.1


def test_a_gain_stands_in_its_interval_or_is_none_where_the_true_gradient_is_lost_in_noise() -> None:
    rng, lost = np.random.default_rng(0), 0
    for _ in range(200):
        reference, true, own = rng.normal(size=(3, 100, 4)).astype(np.float32)
        found = gain(reference, true, true + own, 1.0, unbiased=False, seed=1)["gain"]
        lost += found["value"] is None
        assert found["value"] is None or 0.99 * found["low"] <= found["value"] <= 1.01 * found["high"]
    assert 20 < lost < 100


def test_what_a_method_is_worth_depends_on_what_training_costs() -> None:
    assert at_ratio(2.0, 4.0, 0.0) == 0.5
    assert at_ratio(2.0, 4.0, 2.0) == 1.0
    few = {"gain": {"value": 2.0}, "cost": 1.0}
    many = {"gain": {"value": 9.0}, "cost": 20.0}
    methods = {"few": few, "many": many, TRUE_ADVANTAGES: {"gain": {"value": 99.0}, "cost": 1.0}}
    assert best_at(methods, 0.25)[0] == "few"
    assert best_at(methods, 30.0) == ("many", pytest.approx(9 * 31 / 50))


def test_ranks_are_of_gains_that_both_know_and_equal_ones_share_theirs() -> None:
    one, other = (
        {"slips": {str(place): {"gain_per_token": {"value": gain}} for place, gain in enumerate(gains)}}
        for gains in ([1.0, 2.0, 2.0, 3.0, None], [1.0, 3.0, 2.0, None, 4.0])
    )
    assert rank_correlation(one, other) == pytest.approx(3**0.5 / 2)
    assert math.isnan(rank_correlation(one, {"walk": other["slips"]}))


OWN = '''
from dataclasses import dataclass

from treetune.credit.base import Credit, GroupCredit


@Credit.register("half_of_the_best")
@dataclass(frozen=True, kw_only=True)
class HalfOfTheBest(GroupCredit):
    """Half of the best answer's reward is the baseline."""

    def advantages(self, rewards):
        return [reward - max(rewards) / 2 for reward in rewards]
'''


def test_a_credit_of_ones_own_is_one_file_and_has_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_credit.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--problems", "125", "--languages", "first of 8", "last of 8", "--output", "out"]
    assert main(["arena", "my_credit", *flags]) == 0
    said = capsys.readouterr().out
    assert "first of 8" in said and "half_of_the_best" in said
    assert "| half_of_the_best |" in (tmp_path / "out/arena.md").read_text()
    # Half of the best answer's reward is the same for all steps, which finds the decisive one by chance.
    assert (
        "| half_of_the_best | 0.000 | 0.000 | 0.125 | at 0.125 |"
        in (tmp_path / "out/arena_steps.md").read_text()
    )
    assert (tmp_path / "out/arena.png").stat().st_size > 10_000
    assert "rank" not in said
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
    divides = OWN.replace("half_of_the_best", "divides").replace("max(rewards) / 2", "float('nan')")
    (tmp_path / "own_parts/divides.py").write_text(divides)
    assert main(["arena", "own_parts", *flags[:4]]) != 0
    assert "divides gives advantages that are not finite" in capsys.readouterr().err
    assert gc.isenabled(), "an error turns automatic collections on again, too"
    (tmp_path / "own_parts/divides.py").unlink()
    lies = OWN.replace("half_of_the_best", "lies").replace("reward - max(rewards) / 2", "reward / 1000")
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
    by_language = {name: scores(language_of(name), methods, most=24) for name in ("last of 2", "first of 4")}
    for found in by_language.values():
        assert set(found) == set(methods)
        assert all(one["problems"] == 24 and one["cost"] >= 1 for one in found.values())
    write_page(tmp_path, by_language, "treetune arena", trained=["critic"])
    assert (tmp_path / "arena_map.png").stat().st_size > 10_000
    page = (tmp_path / "arena.md").read_text()
    assert page.count("| λ-GRPO |") == 3 and "| nan" not in page


@pytest.mark.parametrize("name", SMALL)
def test_a_language_lends_the_distributions_of_its_tokens(name: str) -> None:
    language = SMALL[name]
    answers, _, context = groups_of(language, 1)
    episodes, _ = TrueAdvantages().assign(context, trees_of(answers))
    for answer, (squares, entropies) in zip(answers, language.distributions(episodes), strict=True):
        ids = answer.response_ids.tolist()
        for place in range(language.length):
            following: dict[int, float] = {}
            for other, chance in all_answers(language):
                if other[:place] == ids[:place]:
                    following[other[place]] = following.get(other[place], 0.0) + chance
            chances = np.array(list(following.values())) / sum(following.values())
            assert squares[place] == pytest.approx((chances**2).sum())
            assert entropies[place] == pytest.approx(-(chances * np.log(chances)).sum(), abs=1e-12)
        assert (squares[-1], entropies[-1]) == (1.0, 0.0)


@pytest.mark.parametrize("name", SMALL)
def test_a_language_lends_the_divergence_of_each_distribution_from_the_mean_of_its_group(name: str) -> None:
    language = SMALL[name]
    answers, _, context = groups_of(language, 2)
    episodes, _ = TrueAdvantages().assign(context, trees_of(answers[:100]))
    possible = all_answers(language)

    @cache
    def following(ids: tuple[int, ...]) -> np.ndarray:
        chances = np.zeros(1 + len(language.correct_S) * language.most_wordings)
        for other, chance in possible:
            if tuple(other[: len(ids)]) == ids:
                chances[other[len(ids)]] += chance
        return chances / chances.sum()

    def kl(chances: np.ndarray, others: np.ndarray) -> float:
        return float(sum(p * np.log(p / q) for p, q in zip(chances, others, strict=True) if p > 0))

    for episode, divergences in zip(episodes, language.divergences(episodes), strict=True):
        group = [plain(other.response_ids) for other in episodes if other.group == episode.group]
        assert len(group) > 1
        for place in range(language.length):
            chances = following(plain(episode.response_ids)[:place])
            mean = np.mean([following(ids[:place]) for ids in group], axis=0)
            mixture = (chances + mean) / 2
            assert divergences[place] == pytest.approx(
                (kl(chances, mixture) + kl(mean, mixture)) / 2, abs=1e-10
            )
        assert divergences[-1] == 0.0


@pytest.mark.parametrize("name", SMALL)
def test_a_language_scores_texts_by_its_table_and_by_bayes_rule_if_it_knows_the_result(name: str) -> None:
    """Of an answer that will be correct, the chance is its own over that of all correct answers."""
    language = SMALL[name]
    for ids, chance in all_answers(language):
        for start in range(len(ids)):
            begun, text = ids[:start], [*ids[start:], languages.EOS]
            whole = [*language.score([], begun).logprobs, *language.score(begun, text).logprobs]
            assert math.exp(sum(whole)) == pytest.approx(chance)
        told = math.exp(sum(language.score([], ids, will_be_correct=True).logprobs))
        is_correct = language.correct_S[language.statuses(ids)[-1]]
        assert told == pytest.approx(chance / language.values_TS[0, 0] if is_correct else 0.0, abs=1e-12)
    assert language.score([], [languages.EOS]).logprobs.tolist() == [-9999.0]
    assert language.score([], [language.gold_id + 1000]).logprobs.tolist() == [-9999.0]


def test_scores_stop_when_the_gain_is_known() -> None:
    language = SMALL["first"]
    methods = {"RLOO": ScoredMethod(Rloo()), "VinePPO": ScoredMethod(MonteCarlo(samples=2))}
    found = scores(language, methods, most=375, precision=0.01)
    assert found["RLOO"]["problems"] == 125 and found["VinePPO"]["problems"] == 375
    assert found["RLOO"]["cost"] == 1.0 and found["VinePPO"]["cost"] > 2
