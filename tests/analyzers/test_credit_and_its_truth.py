"""The bench of credit, and true values: exact where they can be, found once, and as noisy as they say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import chains, contexts
from tests.support.chain_critic import ChainCritic
from tests.support.chains import InlineGrades
from tests.trainers.helpers import tiny_model
from treetune.inference.base import SamplingParams
from treetune.rollouts.base import Credit, Critic
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import Group
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.valuation import FreshContinuations, ValueEstimator
from treetune.vocabulary import Episode, TextCodec, Trajectory, token_array
from treetune_lab.analyzers.credit_bench import credited
from treetune_lab.analyzers.credit_measures import Credited, Truth, measure, reliability
from treetune_lab.analyzers.true_values import (
    PolicySteps,
    State,
    TrueValues,
    Value,
    expanded,
    found_once,
    mean_and_noise,
)
from treetune_lab.signposts import CHATTER, SIGNS, Rule, Signposts
from treetune_lab.values.critic import ControlVariate
from treetune_lab.values.over_another import Filtered
from treetune_lab.values.sampled import Siblings


def task(language: chains.Language, steps: int = 5, count: int = 4) -> chains.ChainTask:
    return chains.ChainTask(language=language, steps=steps, count=count, difficulties=2)


@pytest.mark.parametrize("language", chains.LANGUAGES)
def test_values_are_the_means_of_many_answers_from_there(language: chains.Language) -> None:
    problem = task(language).problems("train")[1]
    chain: chains.Chain = problem.data["chain"]
    grader = chains.ChainGrader()
    begun = [chains.token(chain.first, 0, 2), chains.token(chain.first, 1, 0)]
    for start, value in (([], chain.value(0, chain.first)), (begun, chain.value(1, chain.first))):
        rng, earned = random.Random(0), 0.0
        for _ in range(2000):
            ids = [*start, *chains.continued(chain, start, rng).token_ids[:-1].tolist()]
            assert len(ids) == chain.steps * chains.WORDS_OF_STEP
            earned += grader.grade(" ".join(map(str, ids)), problem).reward / 2000
        assert earned == pytest.approx(value, abs=0.05)


def true_episode(answer: Trajectory) -> Episode:
    of_steps = truth_of(answer).advantages
    return Episode(
        prompt_ids=answer.prompt_ids,
        response_ids=answer.response_ids,
        trained=[True] * len(answer.response_ids),  # type: ignore[arg-type]
        reward=answer.reward,
        group=answer.problem.id,
        trajectory=answer.id,
        policy_version=0,
        advantages=np.repeat(of_steps, np.diff(answer.step_ends, prepend=0)),
        step_ends=answer.step_ends,
        step_values=truth_of(answer).values,
    )


def times(episode: Episode, factor: float) -> Episode:
    return replace(episode, advantages=factor * episode.advantages)


def truth_of(answer: Trajectory) -> Truth:
    return Truth(answer.problem.id, answer.step_ends, chains.true_values(answer), answer.reward)


@pytest.mark.parametrize("language", chains.LANGUAGES)
def test_the_gradient_with_true_advantages_is_the_exact_one_on_average(language: chains.Language) -> None:
    of = task(language, steps=3, count=2)
    answers = chains.answers_of_chains(of, samples=1500, seed=3)
    mean: chains.Gradient = {}
    for answer in answers:
        for slot, value in chains.gradient(answer, true_episode(answer)).items():
            mean[slot] = mean.get(slot, 0.0) + value / len(answers)
    exact = chains.exact_gradient(of)
    assert chains.length(exact) > 0
    assert chains.cosine(mean, exact) > 0.97
    assert chains.length(mean) == pytest.approx(chains.length(exact), rel=0.15)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (1.0, {"correlation": 1.0, "error": 0.0, "bias": 0.0, "decisive_signs": 1.0, "signs": 1.0}),
        (7.0, {"correlation": 1.0, "error": 0.0}),
        (-1.0, {"correlation": -1.0, "decisive_signs": 0.0}),
        (0.0, {"correlation": None, "error": 1.0, "bias": None}),
    ],
    ids=["true", "in another scale", "wrong", "none at all"],
)
def test_true_advantages_measure_as_perfect_in_any_scale_and_their_negatives_as_wrong(
    factor: float, expected: dict[str, float | None]
) -> None:
    answers = chains.answers_of_chains(task("fork"), samples=8, seed=1)
    episodes = [times(true_episode(one), factor) for one in answers]
    if not factor:
        episodes = [replace(one, step_values=None) for one in episodes]
    found = measure([truth_of(one) for one in answers], Credited(episodes, 0, 0.0), seed=0)
    assert {name: found[name]["value"] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_more_continuations_are_nearer_to_the_truth_and_dearer_and_groups_are_free() -> None:
    of = task("slips", steps=8, count=24)
    answers = chains.answers_of_chains(of, samples=8, seed=2)

    def found(credit: Credit) -> tuple[float, float]:
        of_method = credited(chains.context_of(of, 5), credit, answers)
        measured = measure([truth_of(one) for one in answers], of_method, 0)
        return measured["correlation"]["value"], measured["tokens_per_answer"]

    group, few, many = found(Group()), found(MonteCarlo(samples=2)), found(MonteCarlo(samples=16))
    assert group[1] == found(MonteCarlo(values=Siblings()))[1] == 0
    assert many[0] > max(group[0], few[0])
    assert many[1] == pytest.approx(8 * few[1], rel=0.05)


@pytest.mark.parametrize("language", chains.LANGUAGES)
def test_the_critic_of_a_language_knows_the_answer_so_far_alone_and_is_wrong(
    language: chains.Language,
) -> None:
    of = task(language, steps=4, count=16)
    critic = ChainCritic.of_earlier(of, samples=8, seed=1)
    answers = chains.answers_of_chains(of, samples=32, seed=2)
    known: dict[tuple[int, ...], float] = {}
    for answer, values in zip(answers, critic(answers), strict=True):
        ids = answer.response_ids.tolist()
        for place, value in enumerate(values.tolist()):
            assert known.setdefault(tuple(ids[:place]), value) == value
            assert 0 <= value <= 1
    assert len(known) < sum(len(answer.response_ids) for answer in answers)
    rewards = [answer.reward for answer in answers]
    assert 0.02 < critic.error(answers) < 0.75 * (0.01 + np.std(rewards))


def test_a_critic_beside_continuations_is_nearer_to_the_truth_at_the_same_cost() -> None:
    of = task("walk", steps=8, count=24)
    answers = chains.answers_of_chains(of, samples=8, seed=2)
    truths = [truth_of(one) for one in answers]
    critic = ChainCritic.of_earlier(of, samples=8, seed=1)

    def found(values: ValueEstimator) -> tuple[float, float]:
        context = chains.context_of(of, 5).with_services(Critic(critic))
        of_method = credited(context, MonteCarlo(samples=3, values=values), answers)
        measured = measure(truths, of_method, 0)
        return measured["error"]["value"], measured["tokens_per_answer"]

    raw, beside, filtered = (found(values) for values in (FreshContinuations(), ControlVariate(), Filtered()))
    assert raw[1] == beside[1] == filtered[1]
    assert beside[0] < raw[0] - 0.02
    assert filtered[0] < raw[0] - 0.05


EOS = 0


def signposts(rule: Rule, chatter: int = 1) -> Signposts:
    return Signposts(
        rule=rule,
        steps=4,
        period=2,
        rates=(0.8, 0.3),
        chatter=chatter,
        letters=2,
        signs=5,
        train_size=15,
        validation_size=2,
        test_size=2,
    )


def context_of(task: Signposts) -> RolloutContext:
    alphabet = task.alphabet()
    return contexts.context_of(
        task=task,
        engine=None,
        grader=InlineGrades(task.grader),
        codec=TextCodec(
            encode=lambda text: [1 + alphabet.index(one) for one in text],
            decode=lambda ids: "".join(alphabet[one - 1] for one in ids if one != EOS),
            eos_id=EOS,
        ),
        seed=3,
        iteration=0,
        context_length=100,
        sampling=SamplingParams(max_tokens=30),
    )


@dataclass
class Teacher:
    """Its next characters, with their chances."""

    task: Signposts
    context: RolloutContext
    ids: list[list[int]] = field(default_factory=list)

    def begin(self, ids_BT: np.ndarray) -> np.ndarray:
        self.ids = ids_BT.tolist()
        return self._chances()

    def extend(self, rows: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        self.ids = [[*self.ids[row], token] for row, token in zip(rows, tokens, strict=True)]
        return self._chances()

    def _chances(self) -> np.ndarray:
        return np.array([self._after(ids) for ids in self.ids])

    def _after(self, ids: list[int]) -> list[float]:
        task, text = self.task, self.context.codec.decode(ids)
        lines = text.split("\n")
        answered, line = lines[task.period :], lines[-1]
        sign = SIGNS.index(lines[(len(answered) - 1) % task.period][0])
        if len(answered) > task.steps:
            chances = {"": 1.0}
        elif not line:
            chances = {SIGNS[sign]: 1.0}
        elif len(line) == 1:
            wrong = (1 - task.rate(sign)) / (task.options - 1)
            chances = {str(one): wrong for one in range(1, task.options + 1)}
            chances[str(task.right(sign))] = task.rate(sign)
        elif len(line) < 2 + task.chatter:
            chances = dict.fromkeys(CHATTER[: task.letters], 1 / task.letters)
        else:
            chances = {"\n": 1.0}
        row = [0.0] * (1 + len(task.alphabet()))
        for character, chance in chances.items():
            row[1 + task.alphabet().index(character) if character else EOS] = chance
        return row


def places_of(task: Signposts, context: RolloutContext) -> tuple[list[State], list[float]]:
    """All prefixes of some demonstrations that end with a line, and what they are worth to the teacher."""
    places, values = [], []
    for problem in task.problems("train")[:4]:
        answer = task.demonstration(problem, 1)
        for end in task.step_boundaries(answer)[:-1]:
            begun = token_array(context.codec.encode(answer[:end]))
            places.append(State(problem, context.codec.encode_prompt(problem), begun))
            values.append(task.teacher_value(problem, answer[:end]))
    return places, values


@pytest.mark.parametrize("rule", ["all", "first", "last", "once"])
def test_taking_both_ways_where_something_is_decided_gives_the_exact_value(rule: Rule) -> None:
    task = signposts(rule)
    context = context_of(task)
    places, exact = places_of(task, context)
    found = expanded(Teacher(task, context), context, places, samples=2)
    assert [known.value for known in found] == pytest.approx(exact, abs=1e-5)
    assert [known.noise for known in found] == pytest.approx([0] * len(exact), abs=1e-9)


class Blind(Signposts):
    """A task that doesn't know what decides."""

    decision = None
    decided = None


def test_values_of_a_task_that_knows_nothing_are_off_by_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treetune_lab.analyzers.true_values.KnowsDecisions", Blind)
    task = signposts("all", chatter=0)
    context = context_of(task)
    places, exact = places_of(task, context)
    found = expanded(Teacher(task, context), context, places, samples=300)
    off = [(k.value - v) / k.noise**0.5 for k, v in zip(found, exact, strict=True) if k.noise]
    assert len(off) > 5
    assert max(map(abs, off)) < 4


def test_a_value_does_not_depend_on_what_else_is_asked() -> None:
    task = signposts("last")
    context = context_of(task)
    places, _ = places_of(task, context)
    alone = [expanded(Teacher(task, context), context, [place], samples=3) for place in places]
    together = expanded(Teacher(task, context), context, places, samples=3)
    assert [one for [one] in alone] == together


def test_a_model_is_asked_token_by_token_what_it_says_of_the_whole() -> None:
    model = tiny_model().eval()
    steps = PolicySteps(model, temperature=0.7)
    steps.begin(np.array([[1, 2, 3], [4, 5, 6]]))
    steps.extend([1, 0, 1], [7, 8, 9])
    found = steps.extend([2, 0], [1, 2])
    with torch.no_grad():
        whole = model(torch.tensor([[4, 5, 6, 9, 1], [4, 5, 6, 7, 2]])).logits[:, -1].double() / 0.7
    assert found == pytest.approx(whole.softmax(-1).numpy(), abs=1e-5)


@dataclass(frozen=True, kw_only=True)
class Counting(TrueValues):
    """Counts what it is asked."""

    asked: list[int] = field(default_factory=list)

    def find(self, context: Any, session: Any, point: int, places: Sequence[State]) -> list[Value]:
        self.asked.append(len(places))
        return [Value(float(len(place.begun_ids)), 0.25) for place in places]

    def described(self) -> str:
        return "counting"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    weights = {0: b"start", 1: b"later"}
    monkeypatch.setattr(
        "treetune_lab.analyzers.true_values.weights_digest", lambda session, point: weights[point]
    )
    return SimpleNamespace(directory=SimpleNamespace(path=tmp_path))


def test_what_was_found_once_is_not_asked_again_but_for_a_line_that_was_cut_short(
    session: Any, tmp_path: Path
) -> None:
    task, truth = signposts("last"), Counting()
    context = context_of(task)
    places, _ = places_of(task, context)
    distinct = len({(one.problem.id, tuple(one.begun_ids)) for one in places})
    whole = found_once(truth, context, session, 0, [*places, *places])[: len(places)]
    assert found_once(truth, context, session, 0, places) == whole
    assert truth.asked == [distinct]
    [file] = (tmp_path / "truths").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    for _ in range(2):
        assert found_once(truth, context, session, 0, places) == whole
        assert truth.asked == [distinct, 1]
    found_once(truth, context, session, 1, places)
    assert truth.asked == [distinct, 1, distinct], "other weights, other values"


def test_the_noise_of_a_mean_is_its_variance() -> None:
    known = mean_and_noise([0.0, 1.0, 1.0, 0.0])
    assert known == Value(0.5, pytest.approx(1 / 12))


def test_truth_that_is_half_noise_is_reliable_by_half() -> None:
    generator = np.random.default_rng(0)
    truths = []
    for number in range(4000):
        exact, noise = generator.normal(size=2)
        truths.append(Truth(number, (1,), (exact + noise,), 0.0, (1.0,)))
    assert reliability(truths) == pytest.approx(0.5, abs=0.05)
    assert reliability([Truth(0, (1,), (0.5,), 1.0)]) is None
