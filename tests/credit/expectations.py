"""Exact expectations in the language of `tabular_mdp`: over all answers or trees, and over everything that
could be sampled for their credit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from treetune.credit.base import Credit
from treetune.credit.states.base import Budget
from treetune.credit.values.base import StepValues, Valuation, ValueEstimator
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.requests import Completion, Request
from treetune.lab.trees.rollout import TreeRollout
from treetune.rollouts.model_scores import Critic, ModelScores, ReferenceScores, ScoredText
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Column, Trajectory


class Choices:
    """Goes through everything that could be drawn, one outcome after the other, with its probability.

    Each pass of `ways` answers the calls of `draw` with the next combination of choices.
    """

    def __init__(self) -> None:
        self._way: list[tuple[int, int]] = []

    def draw(self, probabilities: Sequence[float]) -> int:
        if self._drawn == len(self._way):
            self._way.append((0, len(probabilities)))
        choice, _ = self._way[self._drawn]
        self._drawn += 1
        self.probability *= probabilities[choice]
        return choice

    def ways(self) -> Iterator[None]:
        while True:
            self._drawn, self.probability = 0, 1.0
            yield
            assert self._drawn == len(self._way), "the same draws lead to the same questions"
            while self._way and self._way[-1][0] == self._way[-1][1] - 1:
                self._way.pop()
            if not self._way:
                return
            choice, number_of_choices = self._way.pop()
            self._way.append((choice + 1, number_of_choices))


class ChoosingEngine(mdp.TabularEngine):
    """Draws one continuation of a state that earns 1 or one that earns 0, by the value of the state.

    Continuations of the other problems come from their seeds.
    """

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices

    def _completion(self, request: Request, rng: Any, sample: int) -> Completion:
        if plain(request.prompt_ids)[0] != mdp.encode("0")[0]:
            return super()._completion(request, rng, sample)
        prefix = mdp.response_part(request.prompt_ids)
        answer_by_reward = {mdp.reward(answer): answer for answer in mdp.answers(prefix, mdp.budget(request))}
        chance = mdp.value(prefix, mdp.budget(request))
        is_wrong = self._choices.draw([chance, 1 - chance]) if len(answer_by_reward) == 2 else None
        answer = (
            answer_by_reward[1.0 - is_wrong]
            if is_wrong is not None
            else next(iter(answer_by_reward.values()))
        )
        return mdp.completion(answer[len(prefix) :])


class DrawingEngine(ChoosingEngine):
    """Draws whole continuations, in the order of their requests, with their log-probs."""

    def _completion(self, request: Request, rng: Any, sample: int) -> Completion:
        prefix = mdp.response_part(request.prompt_ids)
        possible = mdp.answers(prefix, mdp.budget(request))
        answer = list(possible)[self._choices.draw(list(possible.values()))]
        logprobs = mdp.policy_logprobs(answer)[len(prefix) :]
        return Completion(answer[len(prefix) :], logprobs, mdp.finish_reason(answer), policy_version=3)


def trees(rollout: TreeRollout) -> Iterator[tuple[Tree, float]]:
    """Yields all trees that a rollout could grow, with their probabilities."""
    choices = Choices()
    for _ in choices.ways():
        ((tree,), _) = rollout.run(mdp.context(engine=DrawingEngine(choices)), mdp.problems(1))
        yield tree, choices.probability


class DrawnStates:
    """Replaces the random generator of a branching, and goes through all that it could draw."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def choices(self, population: Sequence[Any], k: int) -> list[Any]:
        uniform = [1 / len(population)] * len(population)
        return [population[self._choices.draw(uniform)] for _ in range(k)]


def critic_of(value: Callable[[mdp.Ids], float]) -> Critic:
    """Returns a critic with this value for each state, by the tokens of the answer so far."""

    def of_answer(answer: Trajectory) -> Column:
        ids = plain(answer.response_ids)
        return np.array([value(ids[:length]) for length in range(len(ids))])

    return Critic(lambda answers: [of_answer(answer) for answer in answers])


def knows_length_alone(prefix: mdp.Ids) -> float:
    """Returns the mean value of all states of this length."""
    chances: dict[mdp.Ids, float] = {}
    for answer, chance in mdp.answers().items():
        if len(answer) > len(prefix):
            state = answer[: len(prefix)]
            chances[state] = chances.get(state, 0.0) + chance
    return sum(p * mdp.value(s) for s, p in chances.items()) / sum(chances.values())


def half_informed_logprob(prefix: mdp.Ids, token: int) -> float:
    """Returns the log-prob of a model that mixes the policy half and half with an informed policy.

    The informed policy knows that the answer will earn 1, by Bayes' rule.
    """
    before, after = mdp.value(prefix), mdp.value((*prefix, token))
    ratio = after / before if before else 1.0
    return math.log(mdp.policy(prefix)[token] * (1 + ratio) / 2)


def half_informed_logprobs(texts: Sequence[ScoredText]) -> list[Column]:
    columns = []
    for text in texts:
        ids = plain(text.text_ids)
        columns.append(np.array([half_informed_logprob(ids[:t], token) for t, token in enumerate(ids)]))
    return columns


REWARD_MODEL = ModelScores(reference=ReferenceScores(half_informed_logprobs))
"""The implicit reward model of the tests' language."""


@dataclass(frozen=True, kw_only=True)
class RecordingEstimator(ValueEstimator):
    """Records the last values of another estimator."""

    over: ValueEstimator
    last_values: list[tuple[Valuation, list[StepValues]]] = field(default_factory=list)

    def budget(self, samples: int) -> Budget:
        return self.over.budget(samples)

    def first_states(self, states: int) -> Sequence[int]:
        return self.over.first_states(states)

    def values(self, valuation: Valuation) -> list[StepValues]:
        values = self.over.values(valuation)
        self.last_values[:] = [(valuation, values)]
        return values


def bias_and_cosine(gradient: mdp.Gradient, exact: mdp.Gradient) -> tuple[float, float]:
    """Returns the length of the difference as a share of the exact gradient's, and the cosine."""
    assert gradient.keys() <= exact.keys()
    length = math.hypot(*exact.values())
    off = math.hypot(*(gradient.get(key, 0.0) - slope for key, slope in exact.items()))
    along = sum(gradient.get(key, 0.0) * slope for key, slope in exact.items())
    return off / length, along / (length * math.hypot(*gradient.values()))


@dataclass
class Expectation:
    """The expectation of a gradient, of its squared length, and of values by state.

    `values` holds Σ p·value and Σ p over all answers that reach a state and have a value of it.
    """

    gradient: mdp.Gradient = field(default_factory=dict)
    square: float = 0.0
    values: dict[mdp.Ids, list[float]] = field(default_factory=dict)

    @property
    def bias_and_cosine(self) -> tuple[float, float]:
        return bias_and_cosine(self.gradient, mdp.exact_gradient())

    @property
    def variance(self) -> float:
        """Returns the variance of the gradient of one answer, or of a group's mean."""
        return self.square - math.fsum(slope * slope for slope in self.gradient.values())

    @property
    def value_bias(self) -> float:
        """Returns the root mean square of the bias of a value, over states as often as they are reached."""
        weights = math.fsum(weight for _, weight in self.values.values())
        squares = [
            weight * (total / weight - mdp.value(state)) ** 2
            for state, (total, weight) in self.values.items()
        ]
        return math.sqrt(math.fsum(squares) / weights)


def expectation(
    credit: Credit,
    group_size: int,
    scores: ModelScores | None = None,
    other_answers: Sequence[Trajectory] = (),
    logprobs: bool = False,
) -> Expectation:
    """Returns the expectation over all groups of answers to one problem, and over all draws of their credit.

    Each combination of answers stands for all its orders.

    Args:
        others: Fixed answers to other problems, which credit sees beside each group.
        logprobs: Whether the answers have the policy's log-probs.
    """
    recording: RecordingEstimator | None = None
    if isinstance(credit, MonteCarlo) and not credit.siblings_count_into_prompt_value:
        recording = RecordingEstimator(over=credit.values)
        credit = replace(credit, values=recording)
    total = Expectation()
    for group in itertools.combinations_with_replacement(mdp.answers(), group_size):
        orders = len(set(itertools.permutations(group)))
        chance = orders * math.prod(mdp.answers()[answer] for answer in group)
        answers = [
            mdp.trajectory(answer, sample=i, logprobs=mdp.policy_logprobs(answer) if logprobs else None)
            for i, answer in enumerate(group)
        ]
        choices = Choices()
        for _ in choices.ways():
            context = mdp.context(engine=ChoosingEngine(choices), model_scores=scores or ModelScores())
            episodes, _ = credit.assign(context, trees_of([*answers, *other_answers]))
            weight = chance * choices.probability
            mean: mdp.Gradient = {}
            for episode in episodes[: len(answers)]:
                mdp.add(mean, mdp.gradient_of(episode), 1 / group_size)
            mdp.add(total.gradient, mean, weight)
            total.square += weight * math.fsum(slope * slope for slope in mean.values())
            if recording is not None:
                _add_values(total.values, *recording.last_values[0], weight)
    return total


def _add_values(
    sums_by_state: dict[mdp.Ids, list[float]],
    valuation: Valuation,
    values: Sequence[StepValues],
    weight: float,
) -> None:
    """Adds the values of the first problem's answers to the sums by state."""
    for answer, values_of_answer in zip(valuation.answers, values, strict=True):
        for state, value in zip(answer.states, values_of_answer, strict=True):
            if value is not None and state.tree == 0:
                ids = plain(answer.trajectory.response_ids)[: state.length]
                sums = sums_by_state.setdefault(ids, [0.0, 0.0])
                sums[0] += weight * value.value
                sums[1] += weight
