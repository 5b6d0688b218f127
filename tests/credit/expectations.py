"""Exact expectations over all answers, or all trees, and all that could be sampled of them, in the language
that can be enumerated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
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
    """Goes through everything that could be drawn, one way after the other, with its probability."""

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
            choice, of = self._way.pop()
            self._way.append((choice + 1, of))


class ChoosingEngine(mdp.TabularEngine):
    """Its continuations are drawn: one that earns 1 or one that earns 0, by what the state is worth. Those of
    the other problems come from their seeds."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices

    def _completion(self, request: Request, rng: Any, sample: int) -> Completion:
        if plain(request.prompt_ids)[0] != mdp.encode("0")[0]:
            return super()._completion(request, rng, sample)
        prefix = mdp.response_part(request.prompt_ids)
        of_reward = {mdp.reward(answer): answer for answer in mdp.answers(prefix, mdp.budget(request))}
        chance = mdp.value(prefix, mdp.budget(request))
        drawn = self._choices.draw([chance, 1 - chance]) if len(of_reward) == 2 else None
        answer = of_reward[1.0 - drawn] if drawn is not None else next(iter(of_reward.values()))
        return mdp.completion(answer[len(prefix) :])


class DrawingEngine(ChoosingEngine):
    """Draws whole continuations, in the order in which they are asked for, with their log-probs."""

    def _completion(self, request: Request, rng: Any, sample: int) -> Completion:
        prefix = mdp.response_part(request.prompt_ids)
        possible = mdp.answers(prefix, mdp.budget(request))
        answer = list(possible)[self._choices.draw(list(possible.values()))]
        logprobs = mdp.policy_logprobs(answer)[len(prefix) :]
        return Completion(answer[len(prefix) :], logprobs, mdp.finish_reason(answer), policy_version=3)


def trees(rollout: TreeRollout) -> Iterator[tuple[Tree, float]]:
    """All trees that a rollout could grow, with their probabilities."""
    choices = Choices()
    for _ in choices.ways():
        ((tree,), _) = rollout.run(mdp.context(engine=DrawingEngine(choices)), mdp.problems(1))
        yield tree, choices.probability


class DrawnStates:
    """The random generator of a branching, which goes through all that it could draw."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def choices(self, population: Sequence[Any], k: int) -> list[Any]:
        uniform = [1 / len(population)] * len(population)
        return [population[self._choices.draw(uniform)] for _ in range(k)]


def critic_of(value: Callable[[mdp.Ids], float]) -> Critic:
    """A critic that holds states to be worth this, by the tokens of the answer so far."""

    def of_answer(answer: Trajectory) -> Column:
        ids = plain(answer.response_ids)
        return np.array([value(ids[:length]) for length in range(len(ids))])

    return Critic(lambda answers: [of_answer(answer) for answer in answers])


def knows_length_alone(prefix: mdp.Ids) -> float:
    """The mean value of all states as long as this one."""
    chances: dict[mdp.Ids, float] = {}
    for answer, chance in mdp.answers().items():
        if len(answer) > len(prefix):
            state = answer[: len(prefix)]
            chances[state] = chances.get(state, 0.0) + chance
    return sum(p * mdp.value(s) for s, p in chances.items()) / sum(chances.values())


def half_informed_logprob(prefix: mdp.Ids, token: int) -> float:
    """Of a model that mixes the policy half and half with one that knows that the answer will earn 1 (by
    Bayes' rule)."""
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
class Recorded(ValueEstimator):
    """Keeps what another estimator has said last."""

    over: ValueEstimator
    said: list[tuple[Valuation, list[StepValues]]] = field(default_factory=list)

    def budget(self, samples: int) -> Budget:
        return self.over.budget(samples)

    def first_states(self, states: int) -> Sequence[int]:
        return self.over.first_states(states)

    def values(self, valuation: Valuation) -> list[StepValues]:
        found = self.over.values(valuation)
        self.said[:] = [(valuation, found)]
        return found


def bias_and_cosine(found: mdp.Gradient, exact: mdp.Gradient) -> tuple[float, float]:
    """The length of the difference as a share of the exact gradient's, and the cosine."""
    assert found.keys() <= exact.keys()
    length = math.hypot(*exact.values())
    off = math.hypot(*(found.get(key, 0.0) - slope for key, slope in exact.items()))
    along = sum(found.get(key, 0.0) * slope for key, slope in exact.items())
    return off / length, along / (length * math.hypot(*found.values()))


@dataclass
class Expectation:
    """Of the gradient and its squared length, and of values by state: Σ p·value and Σ p over all answers that
    come to one and know its value."""

    gradient: mdp.Gradient = field(default_factory=dict)
    square: float = 0.0
    values: dict[mdp.Ids, list[float]] = field(default_factory=dict)

    @property
    def bias_and_cosine(self) -> tuple[float, float]:
        return bias_and_cosine(self.gradient, mdp.exact_gradient())

    @property
    def variance(self) -> float:
        """Of the gradient of one answer, or of a group's mean."""
        return self.square - math.fsum(slope * slope for slope in self.gradient.values())

    @property
    def value_bias(self) -> float:
        """The root of the mean square, over states as often as they are come to, of the difference of a
        value's expectation from the true value."""
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
    others: Sequence[Trajectory] = (),
    logprobs: bool = False,
) -> Expectation:
    """Over all groups of answers to one problem and all that could be drawn of their states, beside fixed
    answers to other problems. With `logprobs` the answers have the policy's.

    A group stands for all its orders.
    """
    recorded: Recorded | None = None
    if isinstance(credit, MonteCarlo) and not credit.siblings_count_into_prompt_value:
        recorded = Recorded(over=credit.values)
        credit = replace(credit, values=recorded)
    found = Expectation()
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
            episodes, _ = credit.assign(context, trees_of([*answers, *others]))
            weight = chance * choices.probability
            mean: mdp.Gradient = {}
            for episode in episodes[: len(answers)]:
                mdp.add(mean, mdp.gradient_of(episode), 1 / group_size)
            mdp.add(found.gradient, mean, weight)
            found.square += weight * math.fsum(slope * slope for slope in mean.values())
            if recorded is not None:
                _add_values(found.values, *recorded.said[0], weight)
    return found


def _add_values(
    total: dict[mdp.Ids, list[float]],
    valuation: Valuation,
    found: Sequence[StepValues],
    weight: float,
) -> None:
    """Of the first problem's answers."""
    for answer, along in zip(valuation.answers, found, strict=True):
        for at, value in zip(answer.states, along, strict=True):
            if value is not None and at.tree == 0:
                sums = total.setdefault(plain(answer.trajectory.response_ids)[: at.length], [0.0, 0.0])
                sums[0] += weight * value.value
                sums[1] += weight
