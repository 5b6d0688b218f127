"""Biases of value estimators and credits, as exact expectations over all answers and all draws.

These tests promise:

* The expected values and gradient of every estimator and credit that is declared unbiased are exact.
* The bias of the others is as stated.
* Every registered part is in one of the tables, so a new part cannot be forgotten.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.credit.expectations import critic_of, expectation, knows_length_alone
from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from treetune.credit.base import Credit
from treetune.credit.gae import Gae
from treetune.credit.grpo import Group
from treetune.credit.reinforce import Outcome
from treetune.credit.rloo import Rloo
from treetune.credit.states.base import Estimate, StateRule
from treetune.credit.states.by_tokens import EveryNTokens, LowProbability
from treetune.credit.states.one_line import StepBoundaries
from treetune.credit.values.base import ValueEstimator
from treetune.credit.values.bisect import Bisect
from treetune.credit.values.continuations import FreshContinuations
from treetune.credit.values.critic import ControlVariate, CriticEstimator
from treetune.credit.values.filtered import Filtered
from treetune.credit.values.sequential import Sequential
from treetune.credit.values.siblings import Siblings, ToppedUp
from treetune.credit.values.smoothed import Smoothed
from treetune.credit.vineppo import MonteCarlo
from treetune.domains.multi_turn import TurnStates
from treetune.lab.signposts import Decided
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.model_scores import ModelScores
from treetune.threads.parallel_threads import ThreadStates
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics, Trajectory

CRITIC = ModelScores(critic=critic_of(knows_length_alone))
"""A critic that is wrong at most states."""


def credit(values: ValueEstimator, samples: int = 1, states: StateRule | None = None) -> MonteCarlo:
    return MonteCarlo(samples=samples, values=values, states=states or StepBoundaries())


def other_answers_of(texts: Sequence[str]) -> list[Trajectory]:
    """Returns answers to another problem than the one whose expectation is taken."""
    problem = mdp.problems(2)[1]
    return [mdp.trajectory((*mdp.encode(text), mdp.EOS), problem, i) for i, text in enumerate(texts)]


ANSWERS_TO_ANOTHER_PROBLEM = [
    other_answers_of(["a;b;a", "b;b;a"]),
    other_answers_of(["a", "b;a;a", "a;a;b"]),
    # With this answer all gains miss equally. If an answer's own sample were left in a sum, be it by
    # rounding, it would choose among them.
    other_answers_of(["b;a;a"]),
]
"""The answers from which the estimators learn that learn from other problems alone."""
LEARN_FROM_OTHERS = (ControlVariate, Filtered)

LITERATURE = {
    part
    for part in [*Credit.parts_by_name().values(), *ValueEstimator.parts_by_name().values()]
    if part.__module__.startswith("treetune.credit.literature")
}
"""The parts that `test_published_methods` compares with the exact gradient."""

UNBIASED: list[tuple[MonteCarlo, int]] = [
    (credit(FreshContinuations(), samples=2), 1),
    (credit(FreshContinuations(), states=EveryNTokens(tokens=3)), 1),
    (credit(FreshContinuations(), states=LowProbability(below=0.6, every=1)), 1),
    (credit(Siblings()), 3),
    (MonteCarlo(samples=2, values=ToppedUp(), max_states=2, behind_max_states="one_step"), 2),
    (credit(Siblings(), states=EveryNTokens(tokens=1)), 2),
    (credit(ControlVariate()), 1),
    (credit(ControlVariate(), samples=2), 1),
    (credit(ControlVariate(over=Siblings())), 2),
    (credit(Filtered()), 1),
    (credit(ControlVariate(over=Filtered(behind=0.5, before=0.3))), 1),
    (credit(Filtered(), samples=2), 1),
    (credit(Filtered(over=Siblings()), states=EveryNTokens(tokens=1)), 2),
    (MonteCarlo(samples=1, values=Filtered(), max_states=2, behind_max_states="one_step"), 1),
]

BIASED: list[tuple[MonteCarlo, int, float, float, float]] = [
    (credit(Sequential(error=0.31, most=3)), 1, 0.0526, 0.9997, 0.0278),
    (credit(Bisect(threshold=0.5)), 1, 0.2100, 0.9833, 0.0),
    (credit(Bisect(threshold=0.5), samples=2), 1, 0.1637, 0.9923, 0.0),
    (credit(Smoothed()), 1, 0.5190, 0.9863, 0.0508),
    (credit(Smoothed(), samples=2), 1, 0.5275, 0.9768, 0.0591),
    (credit(Smoothed(over=Siblings())), 2, 0.4966, 0.9998, 1.9e-5),
    (credit(CriticEstimator()), 1, 0.8369, 0.5511, 0.2588),
    (credit(ControlVariate(over=Filtered())), 1, 0.0058, 1.0, 0.0),
]


def _name(part: object) -> str | None:
    if not isinstance(part, MonteCarlo):
        return None
    return f"{type(part.values).__name__}-{type(part.states).__name__}-{part.samples}"


@pytest.mark.parametrize(("part", "group_size"), UNBIASED, ids=_name)
def test_an_estimator_that_is_declared_unbiased_is_exact_in_expectation(
    part: MonteCarlo, group_size: int
) -> None:
    assert part.values.unbiased
    for other_answers in ANSWERS_TO_ANOTHER_PROBLEM if isinstance(part.values, LEARN_FROM_OTHERS) else [[]]:
        needs_logprobs = isinstance(part.states, LowProbability)
        measured = expectation(part, group_size, CRITIC, other_answers, logprobs=needs_logprobs)
        assert measured.bias_and_cosine[0] < 1e-9
        assert measured.value_bias < 1e-9


@pytest.mark.parametrize(("part", "group_size", "bias", "cosine", "value_bias"), BIASED, ids=_name)
def test_the_bias_of_each_other_estimator_is_as_stated(
    part: MonteCarlo, group_size: int, bias: float, cosine: float, value_bias: float
) -> None:
    assert not part.values.unbiased
    other_answers = ANSWERS_TO_ANOTHER_PROBLEM[0] if isinstance(part.values, LEARN_FROM_OTHERS) else []
    measured = expectation(part, group_size, CRITIC, other_answers)
    assert (*measured.bias_and_cosine, measured.value_bias) == pytest.approx(
        (bias, cosine, value_bias), abs=5e-5
    )


def test_every_rule_for_states_is_compared_with_the_exact_gradient() -> None:
    """`test_turns_and_threads` tests the states of threads and turns."""
    tested = {type(part.states) for part, *_ in UNBIASED} | {ThreadStates, TurnStates}
    assert set(StateRule.parts_by_name().values()) == tested


def test_every_estimator_is_declared_unbiased_or_has_its_bias_stated() -> None:
    tested = {type(part.values) for part, *_ in BIASED} | {type(values) for values in [*ALONE, *OVER_ANOTHER]}
    tested.add(Decided)  # values states of tasks that know what decides, which this language does not
    assert set(ValueEstimator.parts_by_name().values()) - LITERATURE <= tested


SMALL: dict[type, dict[str, Any]] = {Sequential: {"error": 0.2, "most": 2}}
"""Settings of the estimators whose defaults ask for more samples than can be enumerated."""


def instantiate(over: Sequence[ValueEstimator]) -> Iterator[ValueEstimator]:
    """Yields every registered estimator with each combination of its switches.

    Args:
        over: The estimators under those that stand on another one. If it is empty, those are yielded that
            stand on none.
    """
    for part in ValueEstimator.parts_by_name().values():
        fields_by_name = {field.name: field for field in fields(part)}
        if ("over" in fields_by_name) != bool(over):
            continue
        switches = [name for name, field in fields_by_name.items() if isinstance(field.default, bool)]
        for values in itertools.product([False, True], repeat=len(switches)):
            settings = SMALL.get(part, {}) | dict(zip(switches, values, strict=True))
            if not over:
                yield part(**settings)
            for estimator in over:
                yield part(**settings, over=estimator)


ALONE = [estimator for estimator in instantiate([]) if estimator.unbiased]
UNDER_ANOTHER = [estimator for estimator in ALONE if type(estimator) not in SMALL]
OVER_ANOTHER = [estimator for estimator in instantiate(UNDER_ANOTHER) if estimator.unbiased]


@pytest.mark.parametrize(
    ("values", "max_states"),
    [*((estimator, None) for estimator in [*ALONE, *OVER_ANOTHER]), *((estimator, 1) for estimator in ALONE)],
    ids=str,
)
def test_every_registered_estimator_that_is_declared_unbiased_is_exact_in_expectation(
    values: ValueEstimator, max_states: int | None
) -> None:
    """A new estimator is tested here without being listed. After a bound on states there is one step."""
    part = MonteCarlo(samples=1, values=values, max_states=max_states, behind_max_states="one_step")
    group_size = 1 if type(values) in SMALL else 2
    other_answers = ANSWERS_TO_ANOTHER_PROBLEM[-1] if values.learns_from_others else []
    measured = expectation(part, group_size, CRITIC, other_answers)
    assert measured.bias_and_cosine[0] < 1e-9
    assert measured.value_bias < 1e-9


@dataclass(frozen=True, kw_only=True)
class SomeStatesUngraded(StepBoundaries):
    """States that begin with these letters have no graded continuation."""

    unknown: tuple[str, ...]

    def estimate(self, context: RolloutContext, beginnings: Any, *plan: Any) -> list[Estimate]:
        estimates = super().estimate(context, beginnings, *plan)
        result = []
        for beginning, estimate in zip(beginnings, estimates, strict=True):
            if mdp.decode(beginning.token_ids) in self.unknown:
                result.append(replace(estimate, rewards=(), all_rewards=(None,) * len(estimate.rewards)))
            else:
                result.append(estimate)
        return result


@pytest.mark.parametrize("unknown", [("a;",), ("a;", "b;"), ("a;", "a;b;", "b;b;")])
def test_states_whose_continuations_nobody_could_grade_leave_the_gradient_exact(
    unknown: tuple[str, ...],
) -> None:
    part = MonteCarlo(samples=1, states=SomeStatesUngraded(unknown=unknown))
    assert expectation(part, 1).bias_and_cosine[0] < 1e-9


def test_monte_carlo_gives_each_step_its_exact_advantage_when_sampling_has_no_noise() -> None:
    part = MonteCarlo(samples=mdp.EXACT_SAMPLES)
    episodes, _ = mdp.assign_credit(part, engine=mdp.ExactEngine())
    for episode in episodes:
        answer, start = plain(episode.response_ids), 0
        for end, before in zip(episode.step_ends, episode.step_values, strict=True):
            expected = mdp.value(answer[:end]) - mdp.value(answer[:start])
            assert before == pytest.approx(mdp.value(answer[:start]), abs=1e-12)
            assert episode.advantages[start:end] == pytest.approx([expected] * (end - start), abs=1e-12)
            start = end


@dataclass(frozen=True, kw_only=True)
class WithCritic(Gae):
    """Does the trainer's part of the credit with the context's critic."""

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes, metrics = super().assign(context, trees)
        assert context.model_scores.critic is not None
        values = context.model_scores.critic.values(answers_of(trees))
        for episode, values_of_answer in zip(episodes, values, strict=True):
            rewards = [0.0] * (len(values_of_answer) - 1) + [episode.reward]
            advantages, _ = self.from_values(rewards, values_of_answer.tolist())
            object.__setattr__(episode, "advantages", np.array(advantages))
        return episodes, metrics


CREDITS: list[tuple[Credit, int, float, float]] = [
    # The gradient of one problem. Dividing by the standard deviation also changes the weights of problems.
    (Outcome(), 1, 0.0, 1.0),
    (Rloo(), 2, 0.0, 1.0),
    (Rloo(), 3, 0.0, 1.0),
    (Group(std=False), 2, 0.5, 1.0),
    (Group(std=False), 3, 0.3333, 1.0),
    (Group(std=True), 2, 0.2929, 1.0),
    (Group(std=True), 3, 0.1547, 1.0),
    (WithCritic(lam=1.0), 1, 0.0, 1.0),
    (WithCritic(lam=0.5), 1, 0.7546, 0.6606),
    (WithCritic(lam=0.0), 1, 0.8713, 0.4989),
    (MonteCarlo(samples=1, siblings_count_into_prompt_value=True), 2, 0.0, 1.0),
    (MonteCarlo(samples=1, lam=0.5), 1, 0.0, 1.0),
    (MonteCarlo(samples=1, lam=1.0), 1, 0.0, 1.0),
    (MonteCarlo(samples=1, max_states=2, behind_max_states="no_advantage"), 1, 0.0766, 0.9971),
    (MonteCarlo(samples=1, max_states=1, behind_max_states="no_advantage"), 1, 0.2790, 0.9603),
    (MonteCarlo(samples=1, max_states=2, behind_max_states="one_step"), 1, 0.0, 1.0),
    (MonteCarlo(samples=1, max_states=1, behind_max_states="one_step"), 1, 0.0, 1.0),
    (
        MonteCarlo(samples=1, max_states=4, behind_max_states="one_step", states=EveryNTokens(tokens=1)),
        1,
        0.0,
        1.0,
    ),
]


def is_of_package(part: type) -> bool:
    return part.__module__.startswith("treetune")


def test_every_credit_with_advantages_is_compared_with_the_exact_gradient() -> None:
    """`test_trees` tests the credit of trees."""
    tested = {base for part, *_ in CREDITS for base in type(part).__mro__}
    # The advantages of "distillation" are a teacher's, and no rewards. "thread_shapley" needs a language with
    # a fork, and "resets" trees: see `tests/threads/test_shapley.py` and `literature/test_resets.py`.
    elsewhere = ("none", "tree", "distillation", "thread_shapley", "resets")
    # Other tests register credits, too: only those of the package count.
    package_credits = {name: part for name, part in Credit.parts_by_name().items() if is_of_package(part)}
    registered = {part for name, part in package_credits.items() if name not in elsewhere}
    assert registered - LITERATURE <= tested


@pytest.mark.parametrize(("part", "group_size", "bias", "cosine"), CREDITS, ids=str)
def test_the_bias_of_each_credit_is_as_stated(
    part: Credit, group_size: int, bias: float, cosine: float
) -> None:
    measured = expectation(part, group_size, CRITIC).bias_and_cosine
    assert measured == pytest.approx((bias, cosine), abs=5e-5)
    assert bias or measured[0] < 1e-9


@pytest.mark.parametrize("group_size", [2, 3])
def test_a_group_centred_on_its_own_mean_has_a_known_share_of_the_gradient(group_size: int) -> None:
    share = (group_size - 1) / group_size
    gradient = expectation(Group(std=False), group_size).gradient
    exact = {key: share * slope for key, slope in mdp.exact_gradient().items()}
    assert gradient == pytest.approx(exact, abs=1e-12) and max(map(abs, exact.values())) > 0.02
