"""Expectations over all answers and all that could be sampled of them, against the exact ones: every credit's
gradient, and every value estimator's values, are equal to these where they are said to be unbiased, and as
far off as stated where they aren't."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.columns import plain
from tests.credit.expectations import critic_of, expectation, knows_length_alone
from tests.rollouts import tabular_mdp as mdp
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
from treetune.vocabulary import Episode, Metrics

CRITIC = ModelScores(critic=critic_of(knows_length_alone))
"""Off at most states."""


def credit(values: ValueEstimator, samples: int = 1, states: StateRule | None = None) -> MonteCarlo:
    return MonteCarlo(samples=samples, values=values, states=states or StepBoundaries())


OTHERS = [
    [
        mdp.trajectory(mdp.encode(text[:-1]) + (mdp.EOS,), mdp.problems(2)[1], i)
        for i, text in enumerate(texts)
    ]
    for texts in (["a;b;a.", "b;b;a."], ["a.", "b;a;a.", "a;a;b."], ["b;a;a."])
]
"""What those learn from that learn from other problems alone. To the last, gains miss equally: what is left
of an answer's own sample in a sum, be it rounding, would choose among them."""
LEARNING = (ControlVariate, Filtered)

OF_THE_LITERATURE = {
    part
    for family in (Credit, ValueEstimator)
    for part in family.registered().values()
    if part.__module__.startswith("treetune.credit.literature")
}
"""Held against the exact gradient in `test_credits_of_the_literature`."""

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
def test_what_says_unbiased_is(part: MonteCarlo, group_size: int) -> None:
    assert part.values.unbiased
    for of_others in OTHERS if isinstance(part.values, LEARNING) else [[]]:
        likely = isinstance(part.states, LowProbability)
        found = expectation(part, group_size, CRITIC, of_others, logprobs=likely)
        assert found.bias_and_cosine[0] < 1e-9
        assert found.value_bias < 1e-9


@pytest.mark.parametrize(("part", "group_size", "bias", "cosine", "of_values"), BIASED, ids=_name)
def test_what_is_biased_is_as_far_off_as_stated(
    part: MonteCarlo, group_size: int, bias: float, cosine: float, of_values: float
) -> None:
    assert not part.values.unbiased
    others = OTHERS[0] if isinstance(part.values, LEARNING) else []
    found = expectation(part, group_size, CRITIC, others)
    assert (*found.bias_and_cosine, found.value_bias) == pytest.approx((bias, cosine, of_values), abs=5e-5)


def test_every_rule_for_states_keeps_the_gradient() -> None:
    """Those of threads and turns find exact values in `test_credit_for_turns_and_threads`."""
    known = {type(part.states) for part, *_ in UNBIASED} | {ThreadStates, TurnStates}
    assert set(StateRule.registered().values()) == known


def test_what_does_not_say_unbiased_has_its_bias_stated() -> None:
    known = {type(part.values) for part, *_ in BIASED} | {type(values) for values in [*ALONE, *UPON]}
    known.add(Decided)  # of tasks that know what decides, which this language does not
    assert set(ValueEstimator.registered().values()) - OF_THE_LITERATURE <= known


SMALL: dict[type, dict[str, Any]] = {Sequential: {"error": 0.2, "most": 2}}
"""Settings of those whose defaults ask for more than can be enumerated."""


def made(over: Sequence[ValueEstimator]) -> Iterator[ValueEstimator]:
    """Every registered estimator that stands on another, over each of these, or on none where there are none;
    each with its switches on and off."""
    for part in ValueEstimator.registered().values():
        names = {one.name: one for one in fields(part)}
        if ("over" in names) == bool(over):
            switches = [name for name, one in names.items() if isinstance(one.default, bool)]
            for chosen in itertools.product([False, True], repeat=len(switches)):
                settings = SMALL.get(part, {}) | dict(zip(switches, chosen, strict=True))
                yield from (part(**settings, over=one) for one in over) if over else [part(**settings)]


ALONE = [one for one in made([]) if one.unbiased]
UPON = [one for one in made([one for one in ALONE if type(one) not in SMALL]) if one.unbiased]


@pytest.mark.parametrize(
    ("values", "max_states"),
    [*((one, None) for one in [*ALONE, *UPON]), *((one, 1) for one in ALONE)],
    ids=str,
)
def test_whatever_is_registered_and_says_unbiased_is(values: ValueEstimator, max_states: int | None) -> None:
    """A new one is here without being listed; behind a bound on states there is one step."""
    part = MonteCarlo(samples=1, values=values, max_states=max_states, behind_max_states="one_step")
    group_size = 1 if type(values) in SMALL else 2
    others = OTHERS[-1] if values.learns_from_others else []
    found = expectation(part, group_size, CRITIC, others)
    assert found.bias_and_cosine[0] < 1e-9
    assert found.value_bias < 1e-9


@dataclass(frozen=True, kw_only=True)
class Ungraded(StepBoundaries):
    """Nobody could grade what was sampled from the states that begin with some letters."""

    unknown: tuple[str, ...]

    def estimate(self, context: RolloutContext, beginnings: Any, *given: Any) -> list[Estimate]:
        found = super().estimate(context, beginnings, *given)
        return [
            replace(estimate, rewards=(), earned=(None,) * len(estimate.rewards))
            if mdp.decode(beginning.token_ids) in self.unknown
            else estimate
            for beginning, estimate in zip(beginnings, found, strict=True)
        ]


@pytest.mark.parametrize("unknown", [("a;",), ("a;", "b;"), ("a;", "a;b;", "b;b;")])
def test_states_whose_continuations_nobody_could_grade_leave_the_gradient_exact(
    unknown: tuple[str, ...],
) -> None:
    part = MonteCarlo(samples=1, states=Ungraded(unknown=unknown))
    assert expectation(part, 1).bias_and_cosine[0] < 1e-9


def test_monte_carlo_gives_each_step_its_exact_advantage_when_sampling_has_no_noise() -> None:
    part = MonteCarlo(samples=mdp.EXACT_SAMPLES)
    episodes, _ = mdp.credited(part, engine=mdp.ExactEngine())
    for episode in episodes:
        answer, start = plain(episode.response_ids), 0
        for end, before in zip(episode.step_ends, episode.step_values, strict=True):
            exact = mdp.value(answer[:end]) - mdp.value(answer[:start])
            assert before == pytest.approx(mdp.value(answer[:start]), abs=1e-12)
            assert episode.advantages[start:end] == pytest.approx([exact] * (end - start), abs=1e-12)
            start = end


@dataclass(frozen=True, kw_only=True)
class WithCritic(Gae):
    """The trainer's part of the credit, with the context's critic."""

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes, metrics = super().assign(context, trees)
        assert context.model_scores.critic is not None
        values = context.model_scores.critic.values(answers_of(trees))
        for episode, of_answer in zip(episodes, values, strict=True):
            rewards = [0.0] * (len(of_answer) - 1) + [episode.reward]
            advantages, _ = self.from_values(rewards, of_answer.tolist())
            object.__setattr__(episode, "advantages", np.array(advantages))
        return episodes, metrics


OF_CREDIT: list[tuple[Credit, int, float, float]] = [
    # Of one problem; dividing by the standard deviation weighs problems otherwise.
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
    (MonteCarlo(samples=1, max_states=2), 1, 0.0766, 0.9971),
    (MonteCarlo(samples=1, max_states=1), 1, 0.2790, 0.9603),
    (MonteCarlo(samples=1, max_states=2, behind_max_states="one_step"), 1, 0.0, 1.0),
    (MonteCarlo(samples=1, max_states=1, behind_max_states="one_step"), 1, 0.0, 1.0),
    (
        MonteCarlo(samples=1, max_states=4, behind_max_states="one_step", states=EveryNTokens(tokens=1)),
        1,
        0.0,
        1.0,
    ),
]


def test_every_credit_with_advantages_is_held_against_the_exact_gradient() -> None:
    """That of trees over all trees, in `test_credit_of_trees`."""
    known = {base for part, *_ in OF_CREDIT for base in type(part).__mro__}
    # The advantages of "distillation" are a teacher's, and no rewards. "thread_shapley" needs a language with
    # a fork, and "resets" trees: see `tests/threads/test_shapley_values_of_threads.py` and
    # `test_resets_of_wrong_answers`.
    others = ("none", "tree", "distillation", "thread_shapley", "resets")
    of_answers = {
        one
        for name, one in Credit.registered().items()
        if name not in others and one.__module__.startswith("treetune")  # tests register some of their own
    }
    assert of_answers - OF_THE_LITERATURE <= known


@pytest.mark.parametrize(("part", "group_size", "bias", "cosine"), OF_CREDIT, ids=str)
def test_what_credit_makes_of_rewards_is_as_far_off_as_stated(
    part: Credit, group_size: int, bias: float, cosine: float
) -> None:
    found = expectation(part, group_size, CRITIC).bias_and_cosine
    assert found == pytest.approx((bias, cosine), abs=5e-5)
    assert bias or found[0] < 1e-9


@pytest.mark.parametrize("group_size", [2, 3])
def test_a_group_centred_on_its_own_mean_takes_this_share_of_the_gradient(group_size: int) -> None:
    share = (group_size - 1) / group_size
    gradient = expectation(Group(std=False), group_size).gradient
    exact = {key: share * slope for key, slope in mdp.exact_gradient().items()}
    assert gradient == pytest.approx(exact, abs=1e-12) and max(map(abs, exact.values())) > 0.02
