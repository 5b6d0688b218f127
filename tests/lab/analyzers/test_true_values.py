"""True values, and the measures that compare credit with them.

These tests promise:

* The true value of a state is exact where its task knows what decides, and as noisy as stated elsewhere.
* A value depends on no other state, and is found once for given weights.
* True advantages have the right sign and order in any scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import contexts
from tests.support.tiny_trainer import tiny_model
from treetune.credit.episodes import make_episode
from treetune.engine.requests import SamplingParams
from treetune.lab.analyzers.credit_measures import CreditOfMethod, Truth, measure_method, measure_reliability
from treetune.lab.analyzers.true_values import (
    EstimatedValue,
    PolicySteps,
    StateIds,
    TrueValues,
    expand_continuations,
    find_values_once,
    mean_and_noise,
)
from treetune.lab.arena.languages import Language, fork
from treetune.lab.arena.languages import context_of as context_of_language
from treetune.lab.signposts import CHATTER_LETTERS, SIGN_LETTERS, SignpostRule, Signposts
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.single_turn import SingleTurn
from treetune.tasks.graders.pool import GraderPool
from treetune.tree import answers_of
from treetune.vocabulary import TextCodec, Trajectory, token_array


def true_credit(answers: Sequence[Trajectory], factor: float = 1.0) -> tuple[list[Truth], CreditOfMethod]:
    """Returns what is true of answers of a language, and episodes with the true advantages times a factor."""
    truths, episodes = [], []
    for answer in answers:
        language: Language = answer.problem.data["language"]
        step_starts = np.array([0, *answer.step_ends[:-1]])
        values = tuple(
            language.values_TS[step_starts, language.statuses(answer.response_ids)[step_starts]].tolist()
        )
        truths.append(Truth(answer.problem.id, answer.step_ends, values, answer.reward))
        context = context_of_language(language, 1, seed=1)
        advantages = [factor * true_advantage for true_advantage in truths[-1].advantages]
        episodes.append(make_episode(context, answer, advantages, values if factor else None))
    return truths, CreditOfMethod(episodes)


@pytest.mark.parametrize(
    ("factor", "bias", "signs"), [(1.0, 0.0, 1.0), (7.0, 0.0, 1.0), (-1.0, 0.0, 0.0), (0.0, None, 0.0)]
)
def test_true_advantages_have_the_right_sign_where_it_is_decided_in_any_scale(
    factor: float, bias: float | None, signs: float
) -> None:
    context = context_of_language(fork(), 4, seed=1)
    trees, _ = SingleTurn(samples=8, max_tokens=40).run(context, context.task.problems("train"))
    measures = measure_method(*true_credit(answers_of(trees), factor), seed=0)
    assert measures["value_bias"]["value"] == pytest.approx(bias, abs=1e-12)
    assert measures["value_error"]["value"] == pytest.approx(bias, abs=1e-12), "the values are the true ones"
    correlation = None if factor == 0 else np.sign(factor)
    assert measures["advantage_correlation"]["value"] == pytest.approx(correlation)
    assert measures["decisive_signs"]["value"] == signs
    assert measures["answers"] == 32


def test_the_advantages_of_untrained_tokens_have_no_sign() -> None:
    context = context_of_language(fork(), 4, seed=1)
    trees, _ = SingleTurn(samples=8, max_tokens=40).run(context, context.task.problems("train"))
    truths, credit = true_credit(answers_of(trees))
    untrained = [replace(episode, trained=np.zeros_like(episode.trained)) for episode in credit.episodes]
    assert measure_method(truths, CreditOfMethod(untrained), seed=0)["decisive_signs"]["value"] == 0.0


EOS = 0


def make_task(rule: SignpostRule, chatter: int = 1) -> Signposts:
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
        grader=GraderPool(task.grader),
        codec=TextCodec(
            encode=lambda text: [1 + alphabet.index(character) for character in text],
            decode=lambda ids: "".join(alphabet[token - 1] for token in ids if token != EOS),
            eos_id=EOS,
        ),
        seed=3,
        iteration=0,
        context_length=100,
        sampling=SamplingParams(max_tokens=30),
    )


@dataclass
class Teacher:
    """A policy that gives the teacher's probabilities of the next character."""

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
        sign = SIGN_LETTERS.index(lines[(len(answered) - 1) % task.period][0])
        if len(answered) > task.steps:
            chances = {"": 1.0}
        elif not line:
            chances = {SIGN_LETTERS[sign]: 1.0}
        elif len(line) == 1:
            wrong = (1 - task.rate(sign)) / (task.options - 1)
            chances = {str(option): wrong for option in range(1, task.options + 1)}
            chances[str(task.right(sign))] = task.rate(sign)
        elif len(line) < 2 + task.chatter:
            chances = dict.fromkeys(CHATTER_LETTERS[: task.letters], 1 / task.letters)
        else:
            chances = {"\n": 1.0}
        row = [0.0] * (1 + len(task.alphabet()))
        for character, chance in chances.items():
            row[1 + task.alphabet().index(character) if character else EOS] = chance
        return row


def states_of_demonstrations(task: Signposts, context: RolloutContext) -> tuple[list[StateIds], list[float]]:
    """Returns all prefixes of some demonstrations that end with a line, and their values to the teacher."""
    states, values = [], []
    for problem in task.problems("train")[:4]:
        answer = task.demonstration(problem, 1)
        for end in task.step_boundaries(answer)[:-1]:
            beginning_ids = token_array(context.codec.encode(answer[:end]))
            states.append(StateIds(problem, context.codec.encode_prompt(problem), beginning_ids))
            values.append(task.teacher_value(problem, answer[:end]))
    return states, values


@pytest.mark.parametrize("rule", ["all", "first", "last", "once"])
def test_following_all_options_of_a_decision_gives_the_exact_value(rule: SignpostRule) -> None:
    task = make_task(rule)
    context = context_of(task)
    states, exact = states_of_demonstrations(task, context)
    estimates = expand_continuations(Teacher(task, context), context, states, samples=2)
    assert [estimate.value for estimate in estimates] == pytest.approx(exact, abs=1e-5)
    assert [estimate.noise for estimate in estimates] == pytest.approx([0] * len(exact), abs=1e-9)


class TaskWithoutDecisions(Signposts):
    """A task that doesn't know what decides its answers."""

    decision = None
    decided = None


def test_estimated_values_are_off_by_no_more_than_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treetune.lab.analyzers.true_values.KnowsDecisions", TaskWithoutDecisions)
    task = make_task("all", chatter=0)
    context = context_of(task)
    states, exact = states_of_demonstrations(task, context)
    estimates = expand_continuations(Teacher(task, context), context, states, samples=300)
    errors = [
        (estimate.value - value) / estimate.noise**0.5
        for estimate, value in zip(estimates, exact, strict=True)
        if estimate.noise
    ]
    assert len(errors) > 5
    assert max(map(abs, errors)) < 4


def test_a_value_does_not_depend_on_the_other_states() -> None:
    task = make_task("last")
    context = context_of(task)
    states, _ = states_of_demonstrations(task, context)
    estimated_alone = [
        expand_continuations(Teacher(task, context), context, [state], samples=3) for state in states
    ]
    together = expand_continuations(Teacher(task, context), context, states, samples=3)
    assert [estimate for [estimate] in estimated_alone] == together


def test_token_by_token_the_policy_gives_the_probabilities_of_the_whole_text() -> None:
    model = tiny_model().eval()
    steps = PolicySteps(model, temperature=0.7)
    steps.begin(np.array([[1, 2, 3], [4, 5, 6]]))
    steps.extend([1, 0, 1], [7, 8, 9])
    chances = steps.extend([2, 0], [1, 2])
    with torch.no_grad():
        logits = model(torch.tensor([[4, 5, 6, 9, 1], [4, 5, 6, 7, 2]])).logits[:, -1].double() / 0.7
    assert chances == pytest.approx(logits.softmax(-1).numpy(), abs=1e-5)


@dataclass(frozen=True, kw_only=True)
class CountingTrueValues(TrueValues):
    """Counts the states whose values are asked for."""

    counts: list[int] = field(default_factory=list)

    def find(
        self, context: Any, session: Any, point: int, states: Sequence[StateIds]
    ) -> list[EstimatedValue]:
        self.counts.append(len(states))
        return [EstimatedValue(float(len(state.begun_ids)), 0.25) for state in states]

    def describe_settings(self) -> str:
        return "counting"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    weights = {0: b"start", 1: b"later"}
    monkeypatch.setattr(
        "treetune.lab.analyzers.true_values.weights_digest", lambda session, point: weights[point]
    )
    return SimpleNamespace(directory=SimpleNamespace(path=tmp_path))


def test_values_are_found_once_and_only_a_line_that_was_cut_short_is_found_again(
    session: Any, tmp_path: Path
) -> None:
    task, truth = make_task("last"), CountingTrueValues()
    context = context_of(task)
    states, _ = states_of_demonstrations(task, context)
    distinct = len({(state.problem.id, tuple(state.begun_ids)) for state in states})
    values = find_values_once(truth, context, session, 0, [*states, *states])[: len(states)]
    assert find_values_once(truth, context, session, 0, states) == values
    assert truth.counts == [distinct]
    [file] = (tmp_path / "truths").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    for _ in range(2):
        assert find_values_once(truth, context, session, 0, states) == values
        assert truth.counts == [distinct, 1]
    find_values_once(truth, context, session, 1, states)
    assert truth.counts == [distinct, 1, distinct], "other weights, other values"


def test_the_noise_of_a_mean_is_its_squared_standard_error() -> None:
    estimate = mean_and_noise([0.0, 1.0, 1.0, 0.0])
    assert estimate == EstimatedValue(0.5, pytest.approx(1 / 12))


def test_truth_that_is_half_noise_has_a_reliability_of_a_half() -> None:
    generator = np.random.default_rng(0)
    truths = []
    for number in range(4000):
        exact, noise = generator.normal(size=2)
        truths.append(Truth(number, (1,), (exact + noise,), 0.0, (1.0,)))
    assert measure_reliability(truths) == pytest.approx(0.5, abs=0.05)
    assert measure_reliability([Truth(0, (1,), (0.5,), 1.0)]) is None
