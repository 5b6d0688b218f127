"""Gradients of published rules, as exact expectations in languages of three letters.

These tests promise:

* The bias is as stated that a step splitter causes by where it ends steps.
* The difference is as stated between published formulas and those of this project.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import pstdev
from typing import Literal

import numpy as np
import pytest
import torch

from tests.support import tabular_mdp as mdp
from treetune.credit.grpo import group_advantages
from treetune.credit.rloo import leave_one_out_advantages
from treetune.credit.vineppo import step_advantages
from treetune.domains.math_reference_steps import MathReference
from treetune.domains.math_tasks import Sentences
from treetune.rollouts.answers import split_steps
from treetune.tasks.splitter_task import SplitterTask
from treetune.tasks.steps import Gsm8kReference, Lines, StepSplitter
from treetune.trainer.preparation import rewards_to_come
from treetune.vocabulary import TextCodec, token_array

Ids = tuple[int, ...]
A, B, BREAK, MORE, EOS = range(5)
MOST_LETTERS = 3
"""The most letters of an answer; an answer with two ``A`` earns 1."""

Texts = tuple[str, str, str, str]
Kind = Literal["between", "behind", "more"]


@dataclass(frozen=True)
class Language:
    """A language of letters with breaks between them; `texts` are the texts of its tokens.

    After a letter comes a break or the end (`between`), always a break, after which the answer may end
    (`behind`), or a break, the end, or more of the same line (`more`).
    """

    kind: Kind
    texts: Texts

    def policy(self, answer: Ids) -> dict[int, float]:
        letters = [token for token in answer if token in (A, B)]
        after_letter = bool(answer) and answer[-1] in (A, B)
        if after_letter and len(letters) == MOST_LETTERS:
            return {EOS: 1.0}
        if after_letter:
            return {
                "between": {EOS: 0.5, BREAK: 0.5},
                "behind": {BREAK: 1.0},
                "more": {EOS: 0.25, BREAK: 0.5, MORE: 0.25},
            }[self.kind]
        chance_of_end = 0.5 if self.kind == "behind" and letters else 0.0
        chance_of_a = {A: 0.75, B: 0.25}[letters[0]] if len(letters) == 1 else 0.5
        chances = {
            A: (1 - chance_of_end) * chance_of_a,
            B: (1 - chance_of_end) * (1 - chance_of_a),
            EOS: chance_of_end,
        }
        return {token: chance for token, chance in chances.items() if chance}

    def answers(self, prefix: Ids = ()) -> dict[Ids, float]:
        if prefix and prefix[-1] == EOS:
            return {prefix: 1.0}
        chances = {}
        for token, p in self.policy(prefix).items():
            for answer, q in self.answers((*prefix, token)).items():
                chances[answer] = p * q
        return chances

    def value(self, prefix: Ids) -> float:
        return math.fsum(p * (answer.count(A) >= 2) for answer, p in self.answers(prefix).items())

    def read(self, ids: object) -> str:
        return "".join(self.texts[token] for token in list(ids) if token != EOS)


@dataclass(frozen=True, kw_only=True)
class TaskWithSteps(SplitterTask):
    steps: StepSplitter


def bias(language: Language, steps: StepSplitter) -> float:
    """Returns the length of the difference from the exact gradient, as a share of the exact one's."""
    codec = TextCodec(encode=lambda text: (), decode=language.read, eos_id=EOS)
    context = mdp.context(task=TaskWithSteps(steps=steps), codec=codec)
    difference: dict[tuple[Ids, int], float] = {}
    exact: dict[tuple[Ids, int], float] = {}
    for answer, probability in language.answers().items():
        ends = split_steps(context, mdp.problems(1)[0], token_array(answer), language.read(answer))
        values = [language.value(answer[:start]) for start in (0, *ends[:-1])]
        step_advantage_list = step_advantages(values, language.value(answer))
        for position, sampled_token in enumerate(answer):
            state = answer[:position]
            step = next(number for number, end in enumerate(ends) if position < end)
            true_advantage = language.value(answer[: position + 1]) - language.value(state)
            for token, chance in language.policy(state).items():
                slope = probability * ((token == sampled_token) - chance)
                difference[state, token] = difference.get((state, token), 0.0) + slope * (
                    step_advantage_list[step] - true_advantage
                )
                exact[state, token] = exact.get((state, token), 0.0) + slope * true_advantage
    return math.hypot(*difference.values()) / math.hypot(*exact.values())


LINES = ("a", "b", "\n", " ")
SENTENCES = ("This sentence says yes.", "This sentence says no.", " ", "")
CLAUSES = ("this one clause says yes", "this one clause says no", ", ", "")

CASES = [
    # The end of the answer hides a boundary: biased where it is in the last step, exact where it has its own.
    ("between", LINES, Lines(), 0.4490, 0.0),
    ("between", LINES, Gsm8kReference(), 0.4490, 0.0),
    ("between", SENTENCES, Sentences(), 0.4490, 0.0),
    ("behind", LINES, Lines(), 0.4276, 0.0),
    ("behind", SENTENCES, Sentences(), 0.4276, 0.0),
    # Boundaries that depend on what stands before them; the answer may also end there.
    ("between", LINES, Lines(newline="ends"), 0.0, 0.0),
    ("behind", LINES, Lines(newline="ends"), 0.4276, 0.0),
    ("more", LINES, Lines(newline="ends"), 0.0, 0.0),
    # A line that may also go on: only a later token shows whether it has ended.
    ("more", LINES, Lines(), 0.3320, 0.2388),
    ("more", SENTENCES, Sentences(), 0.3320, 0.2388),
    # Parts that are cut by what follows them, and ends where no other token would begin a step.
    ("between", CLAUSES, Sentences(longest=60), 0.2141, 0.3973),
    ("between", CLAUSES, Sentences(longest=None), 0.0, 0.4827),
    ("between", SENTENCES, MathReference(), 0.4145, 0.1868),
]


def _name(part: object) -> str | None:
    return repr(part) if isinstance(part, StepSplitter) else None


@pytest.mark.parametrize(("kind", "texts", "steps", "in_last_step", "own_step"), CASES, ids=_name)
def test_the_bias_of_each_splitter_is_as_stated(
    kind: Kind, texts: Texts, steps: StepSplitter, in_last_step: float, own_step: float
) -> None:
    for end_token, stated in (("last_step", in_last_step), ("own_step", own_step)):
        measured = bias(Language(kind, texts), replace(steps, end_token=end_token))
        assert measured == pytest.approx(stated, abs=5e-5 if stated else 1e-9)


ANSWERS = list(mdp.answers().items())
SLOTS = {slot: index for index, slot in enumerate(mdp.exact_gradient())}
EXACT = np.array(list(mdp.exact_gradient().values()))


def gradient_vector(answer: mdp.Ids, advantages: Sequence[float]) -> np.ndarray:
    vector = np.zeros(len(SLOTS))
    for slot, slope in mdp.score_gradient(answer, advantages).items():
        vector[SLOTS[slot]] = slope
    return vector


def groups(size: int) -> list[tuple[float, list[mdp.Ids]]]:
    """Returns all groups, each with its probability."""
    probabilities_and_groups = []
    for group in itertools.product(ANSWERS, repeat=size):
        probability = math.prod(p for _, p in group)
        probabilities_and_groups.append((probability, [answer for answer, _ in group]))
    return probabilities_and_groups


@pytest.mark.parametrize(("size", "factor"), [(2, 1.414), (4, 1.155), (8, 1.069), (16, 1.033), (64, 1.008)])
def test_dividing_by_the_population_deviation_scales_all_advantages_alike(size: int, factor: float) -> None:
    """GRPO's paper says std; its implementations divide by that of n - 1, as we do."""
    rewards = [float(number % 3 == 0) for number in range(size)]
    ours = np.array(group_advantages(rewards, std=True, eps=1e-6))
    published_advantages = (np.array(rewards) - np.mean(rewards)) / pstdev(rewards)
    assert published_advantages / ours == pytest.approx(np.full(size, factor), abs=1e-3)
    assert math.sqrt(size / (size - 1)) == pytest.approx(factor, abs=1e-3)


def compare_token_means(lengthening: int) -> tuple[float, float, float]:
    """Compares the mean over each group's tokens, as in DAPO's paper, with that over the minibatch's tokens.

    The minibatch has two groups of two answers. The second group answers a problem whose tokens count
    `lengthening` times.

    Returns:
        The cosine of the two gradients, how much longer the second one is, and the weight of the second group
        relative to the first.
    """
    probabilities, gradients, lengths = [], [], []
    for probability, answers in groups(2):
        advantages = group_advantages([mdp.reward(answer) for answer in answers], std=True, eps=1e-6)
        pairs = zip(answers, advantages, strict=True)
        gradients.append(
            sum(gradient_vector(answer, [advantage] * len(answer)) for answer, advantage in pairs)
        )
        probabilities.append(probability)
        lengths.append(sum(map(len, answers)))
    p_G, g_GD, short_G = np.array(probabilities), np.array(gradients), np.array(lengths, float)
    long_G = lengthening * short_G
    by_group = [p_G / short_G @ g_GD / 2, lengthening * (p_G / long_G @ g_GD) / 2]
    both_GG = p_G[:, None] * p_G / (short_G[:, None] + long_G)
    of_minibatch = [both_GG.sum(1) @ g_GD, lengthening * (both_GG.sum(0) @ g_GD)]
    by_group_GD, by_minibatch_GD = np.concatenate(by_group), np.concatenate(of_minibatch)
    weights = [
        np.linalg.norm(of_both) / np.linalg.norm(of_one) for of_both, of_one in zip(of_minibatch, by_group)
    ]
    lengths_of_both = np.linalg.norm(by_group_GD), np.linalg.norm(by_minibatch_GD)
    cosine = by_group_GD @ by_minibatch_GD / np.prod(lengths_of_both)
    return float(cosine), float(lengths_of_both[1] / lengths_of_both[0]), float(weights[1] / weights[0])


@pytest.mark.parametrize(
    ("lengthening", "measured"),
    [(1, (0.9991, 1.0605, 1.0)), (2, (0.9560, 1.1022, 1.8731)), (4, (0.8719, 1.1928, 3.5461))],
)
def test_the_mean_over_the_tokens_of_a_minibatch_weighs_groups_by_their_length(
    lengthening: int, measured: tuple[float, float, float]
) -> None:
    assert compare_token_means(lengthening) == pytest.approx(measured, abs=1e-4)


def _reference(state: mdp.Ids) -> dict[int, float]:
    """Returns a reference policy halfway from the policy to even chances."""
    chances = mdp.policy(state)
    return {token: (p + 1 / len(chances)) / 2 for token, p in chances.items()}


def _penalties(answer: mdp.Ids) -> list[float]:
    """Returns log p - log p_ref (k1) of each token."""
    states = [(answer[:position], token) for position, token in enumerate(answer)]
    return [math.log(mdp.policy(state)[token] / _reference(state)[token]) for state, token in states]


Advantages = Callable[[Sequence[mdp.Ids], float], list[list[float]]]


def published_advantages(answers: Sequence[mdp.Ids], coef: float) -> list[list[float]]:
    """RLOO's paper: the penalty of the whole answer is in the reward that is compared."""
    rewards = [mdp.reward(answer) - coef * sum(_penalties(answer)) for answer in answers]
    pairs = zip(answers, leave_one_out_advantages(rewards), strict=True)
    return [[advantage] * len(answer) for answer, advantage in pairs]


def preset_advantages(answers: Sequence[mdp.Ids], coef: float) -> list[list[float]]:
    """The preset: rewards are compared without penalties, and a token has its own penalty and later ones."""
    leave_one_out = leave_one_out_advantages([mdp.reward(answer) for answer in answers])
    starts = [0, *itertools.accumulate(map(len, answers))]
    advantages_of_tokens: list[float] = []
    penalties_of_tokens: list[float] = []
    for answer, advantage in zip(answers, leave_one_out, strict=True):
        advantages_of_tokens += [advantage] * len(answer)
        penalties_of_tokens += _penalties(answer)
    advantages_N = torch.tensor(advantages_of_tokens, dtype=torch.float64)
    penalties_N = coef * torch.tensor(penalties_of_tokens, dtype=torch.float64)
    of_all = (advantages_N - rewards_to_come(starts, penalties_N)).tolist()
    return [of_all[a:b] for a, b in itertools.pairwise(starts)]


def mean_and_variance(advantages: Advantages, coef: float, size: int = 2) -> tuple[np.ndarray, float]:
    mean, square = np.zeros(len(SLOTS)), 0.0
    for probability, answers in groups(size):
        rows = zip(answers, advantages(answers, coef), strict=True)
        gradient = (
            np.sum(
                [gradient_vector(answer, advantages_of_answer) for answer, advantages_of_answer in rows],
                axis=0,
            )
            / size
        )
        mean += probability * gradient
        square += probability * float(gradient @ gradient)
    return mean, square - float(mean @ mean)


@pytest.mark.parametrize(("coef", "ratio"), [(0.0, 1.0), (0.05, 1.0061), (0.5, 1.0313)])
def test_a_penalty_outside_of_the_compared_rewards_has_the_same_expected_gradient(
    coef: float, ratio: float
) -> None:
    (published_mean, published_variance), (preset_mean, preset_variance) = (
        mean_and_variance(rule, coef) for rule in (published_advantages, preset_advantages)
    )
    assert np.abs(published_mean - preset_mean).max() < 1e-9
    assert preset_variance / published_variance == pytest.approx(ratio, abs=1e-4)
