"""The arena's languages, gains and scores against exact enumeration."""

from __future__ import annotations

import gc
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.main import main
from treetune.rollouts.base import Credit
from treetune.rollouts.credit import Group, Rloo
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.single_turn import SingleTurn
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import Trajectory, token_array
from treetune_lab.arena import languages
from treetune_lab.arena.gain import BATCH, CEILING, at_ratio, best_at, gain, is_unbiased
from treetune_lab.arena.languages import LANGUAGES, Language, TrueAdvantages, language_of
from treetune_lab.arena.scores import Method, gradients_of, scores, shipped_methods, write_page
from treetune_lab.values.sampled import Siblings

SMALL = {
    "first": languages.decision(3, 0),
    "middle": languages.decision(3, 1),
    "last": languages.decision(3, 2, success=0.4),
    "all": languages.every_choice(3),
    "majority": languages.majority(3),
    "luck": languages.luck(3),
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


def exact_variance(language: Language, credit: Credit, size: int) -> tuple[float, np.ndarray[Any, Any]]:
    """V of a credit that samples nothing, and its mean gradient."""
    answers, chances, context = groups_of(language, size)
    gradients, _ = gradients_of(language, context, Method(credit), trees_of(answers))
    mean = chances @ gradients
    return float(chances @ np.square(gradients - mean).sum(1)), mean


def exact_variance_of_continuations(language: Language, samples: int, size: int) -> float:
    """V of VinePPO: that of the true advantages, and the noise of each state's value times what it moves."""
    answers, chances, context = groups_of(language, size)
    trees = trees_of(answers)
    episodes, _ = TrueAdvantages().assign(context, trees)
    total = exact_variance(language, TrueAdvantages(), size)[0]
    for number, chance in enumerate(chances):
        of_group = slice(number * size, (number + 1) * size)
        states: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for row, answer in enumerate(answers[of_group]):
            for place in range(language.length):
                states.setdefault(tuple(answer.response_ids[:place].tolist()), []).append((row, place))
        for ids, members in states.items():
            value = language.values_TS[len(ids), language.statuses(ids)[-1]]
            moved = np.zeros((size, language.length + 1))
            for row, place in members:
                moved[row, place] -= 1
                if place:
                    moved[row, place - 1] += 1
            rows = [replace(one, advantages=own) for one, own in zip(episodes[of_group], moved, strict=True)]
            slope = language.gradients(answers[of_group], rows, [size])[0]
            total += chance * value * (1 - value) / samples * float(slope @ slope)
    return total


@pytest.mark.parametrize("name", SMALL)
def test_values_and_gradient_of_a_language_are_those_of_all_its_answers(name: str) -> None:
    language = SMALL[name]
    chances = np.array([chance for _, chance in all_answers(language)])
    correct = [language.correct_S[language.statuses(ids)[-1]] for ids, _ in all_answers(language)]
    assert chances.sum() == pytest.approx(1)
    assert language.values_TS[0, 0] == pytest.approx(chances @ correct)
    for credit in (Rloo(), TrueAdvantages(), MonteCarlo(values=Siblings())):
        assert exact_variance(language, credit, 2)[1] == pytest.approx(exact_gradient(language), abs=1e-6)
    half_of_it = exact_variance(language, Group(std=False), 2)[1]
    assert half_of_it == pytest.approx(exact_gradient(language) / 2, abs=1e-6)


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
    own, tokens = gradients_of(language, context, Method(credit), trees)
    reference, plain = gradients_of(language, context, Method(Rloo()), trees)
    found = gain(reference, own, tokens / plain, is_unbiased(credit), seed=1)
    if isinstance(credit, MonteCarlo) and credit.values.continues:
        variance = exact_variance_of_continuations(language, credit.samples, size)
    else:
        variance = exact_variance(language, credit, size)[0]
        assert tokens == plain == len(answers_of(trees)) * 4
    scale = size / (size - 1) if isinstance(credit, Group) else 1.0
    exact = exact_variance(language, Rloo(), size)[0] / variance / scale**2
    assert found["gain"]["value"] == pytest.approx(exact, rel=0.08)
    assert found["gain"]["low"] < exact * 1.03 and found["gain"]["high"] > exact * 0.97
    assert found["bias"] == pytest.approx(0, abs=0.01)


def test_a_biased_credit_pays_for_its_bias_and_not_for_its_scale() -> None:
    rng = np.random.default_rng(0)
    true = np.ones(4, np.float32)
    reference = (true + rng.normal(size=(4000, 4))).astype(np.float32)
    doubled = gain(reference, 2 * reference, 1.0, unbiased=False, seed=1)
    assert (doubled["gain"]["value"], doubled["bias"]) == pytest.approx((1, 0), abs=1e-6)
    shifted = reference.copy()
    shifted[:, 0] -= 1  # the mean misses one of four directions
    found = gain(reference, shifted, 2.0, unbiased=False, seed=1)
    assert found["bias"] == pytest.approx(0.25, abs=0.02)
    # After the best scale, 1: noise 4 + 64 × 1 in place of 4.
    assert found["gain"]["value"] == pytest.approx(4 / (4 + BATCH), rel=0.1)
    assert found["gain_per_token"]["value"] == found["gain"]["value"] / 2


def test_what_a_method_is_worth_depends_on_what_training_costs() -> None:
    assert at_ratio(2.0, 4.0, 0.0) == 0.5
    assert at_ratio(2.0, 4.0, 2.0) == 1.0
    few = {"gain": {"value": 2.0}, "cost": 1.0}
    many = {"gain": {"value": 9.0}, "cost": 20.0}
    methods = {"few": few, "many": many, CEILING: {"gain": {"value": 99.0}, "cost": 1.0}}
    assert best_at(methods, 0.25)[0] == "few"
    assert best_at(methods, 30.0) == ("many", pytest.approx(9 * 31 / 50))


OWN = '''
from dataclasses import dataclass

from treetune.rollouts.base import Credit, GroupCredit


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
    assert (tmp_path / "out/arena.png").stat().st_size > 10_000
    assert "rank" not in said
    assert main(["arena", "my_credit", *flags, "--against", "out/arena.json"]) == 0
    assert "those of out/arena.json: 1.000" in capsys.readouterr().out
    assert main(["arena", *flags, "--seed", "2"]) != 0
    assert "has the scores of --seed 1 --problems 125: give" in capsys.readouterr().err
    assert main(["arena", "my_credit", "--problems", "125", "--languages", "slips", "--output", "wordy"]) == 0
    assert not (tmp_path / "wordy/arena_map.png").exists(), "no such language has a place on the map"
    assert gc.isenabled()
    assert main(["arena", "--languages", "nowhere"]) != 0
    assert "there is no language 'nowhere': take one of slips," in capsys.readouterr().err
    assert main(["arena", "json"]) != 0
    assert "json registers no credit and no value estimator" in capsys.readouterr().err


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


def test_scores_stop_when_the_gain_is_known() -> None:
    language = SMALL["first"]
    methods = {"RLOO": Method(Rloo()), "VinePPO": Method(MonteCarlo(samples=2))}
    found = scores(language, methods, most=375, precision=0.01)
    assert found["RLOO"]["problems"] == 125 and found["VinePPO"]["problems"] == 375
    assert found["RLOO"]["cost"] == 1.0 and found["VinePPO"]["cost"] > 2
