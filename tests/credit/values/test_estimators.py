"""The value estimators of `monte_carlo`: what each samples, and which values it gives.

These tests promise:

* Each estimator gives the values, standard errors and cost that were worked out by hand.
* Bisecting, sequential sampling and topping up sample no more than they need.
* Smoothing and filtering are the least-squares solution; they and control variates lower the variance.
* Values of the wrong shape are refused, and answers whose prompt has no value are left out and reported.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.credit.expectations import critic_of, expectation, knows_length_alone
from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from treetune.credit.rloo import Rloo
from treetune.credit.states.by_tokens import EveryNTokens, LowProbability
from treetune.credit.values.base import (
    StepValues,
    Valuation,
    Value,
    ValueEstimator,
    shared_tokens,
    value_of_rewards,
)
from treetune.credit.values.bisect import Bisect
from treetune.credit.values.continuations import FreshContinuations
from treetune.credit.values.critic import ControlVariate, CriticEstimator, critic_values
from treetune.credit.values.filtered import Filtered, filter_values
from treetune.credit.values.sequential import Sequential, UntilSure
from treetune.credit.values.siblings import Siblings, ToppedUp
from treetune.credit.values.smoothed import Smoothed, smooth_walk
from treetune.credit.vineppo import MonteCarlo
from treetune.rollouts.answers import contiguous_share
from treetune.rollouts.model_scores import Critic, ModelScores
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Trajectory


def make_answers(*texts: str) -> list[Trajectory]:
    """Returns answers to one problem, each with the end token."""
    return [mdp.trajectory((*mdp.encode(text), mdp.EOS), sample=i) for i, text in enumerate(texts)]


def advantages_of(episodes: Sequence[Episode]) -> list[list[float]]:
    return [episode.advantages.tolist() for episode in episodes]


def test_siblings_give_a_state_the_mean_reward_of_the_other_answers_from_it_at_no_cost() -> None:
    credit, engine = MonteCarlo(values=Siblings()), mdp.TabularEngine()
    group = make_answers("a;a", "a;b", "a;b;a", "b")  # they earn 1, 0, 1, 0
    episodes, metrics = mdp.assign_credit(credit, group, engine=engine)
    assert not (engine.requests or credit.needs_engine or "credit/value_tokens" in metrics)
    assert episodes[0].step_values == pytest.approx((1 / 3, 1 / 2))
    # After "a;b" only the third answer goes on with ";", so its last two steps are one.
    assert episodes[2].step_values == pytest.approx((1 / 3, 1 / 2, 1 / 2))
    assert episodes[2].advantages == pytest.approx([1 / 6] * 2 + [1 / 2] * 4)
    assert episodes[3].advantages == pytest.approx([-2 / 3] * 2)


def test_siblings_that_share_nothing_but_the_prompt_are_rloo() -> None:
    group = make_answers("a", "b", "a;a")
    only_prompt = MonteCarlo(values=Siblings(), max_states=None, states=EveryNTokens(tokens=100))
    advantages, expected = (
        advantages_of(mdp.assign_credit(credit, group)[0]) for credit in (only_prompt, Rloo())
    )
    assert list(map(pytest.approx, advantages)) == expected


def test_shared_tokens_are_counted_for_each_pair() -> None:
    (tree,) = trees_of(make_answers("a;a", "a;b", "a"))
    assert shared_tokens(tree) == [[0, 2, 1], [2, 0, 1], [1, 1, 0]]


def test_siblings_count_among_continuations_without_the_answers_own_reward() -> None:
    group = make_answers("a;a", "a;b")
    uncounted, counted = (
        mdp.assign_credit(MonteCarlo(samples=3, values=FreshContinuations(count_siblings=count)), group)[0]
        for count in (False, True)
    )
    for uncounted_episode, counted_episode, sibling_reward in zip(
        uncounted, counted, (0.0, 1.0), strict=True
    ):
        assert counted_episode.step_values == pytest.approx(
            [(3 * v + sibling_reward) / 4 for v in uncounted_episode.step_values]
        )


def test_continuations_make_up_for_the_siblings_that_a_state_lacks() -> None:
    """The prompt has two siblings, as many as configured; the end of the first step has one, others none."""
    group = make_answers("a;a", "a;b", "b;a")
    _, metrics = mdp.assign_credit(MonteCarlo(samples=2, values=ToppedUp()), group)
    _, plain_metrics = mdp.assign_credit(MonteCarlo(samples=2), group)
    assert (metrics["credit/value_samples"], plain_metrics["credit/value_samples"]) == (1 + 2, 2 * 3)


def test_values_have_the_standard_errors_of_their_means() -> None:
    group = make_answers("a;a", "b")
    (first, second), _ = mdp.assign_credit(MonteCarlo(values=Siblings()), group)
    # One other answer, which was wrong or right: the share is shrunk to 1 of 3 or 2 of 3.
    assert first.step_errors == (pytest.approx(math.sqrt(2 / 9)), math.inf)
    assert second.step_errors == (pytest.approx(math.sqrt(2 / 9)),)
    (with_continuations, _), _ = mdp.assign_credit(MonteCarlo(samples=3), group)
    shares = [(3 * value + 1) / 5 for value in with_continuations.step_values]
    assert with_continuations.step_errors == pytest.approx([math.sqrt(p * (1 - p) / 3) for p in shares])
    (bounded, _), _ = mdp.assign_credit(
        MonteCarlo(samples=3, max_states=1, behind_max_states="no_advantage"), group
    )
    assert bounded.step_errors == (with_continuations.step_errors[0], 0.0)


def test_the_reward_of_each_continuation_is_kept_with_the_answer() -> None:
    group = make_answers("a;a", "b")
    (first, second), _ = mdp.assign_credit(MonteCarlo(samples=3), group)
    assert list(first.continuations) == [0, *first.step_ends[:-1]], "for each state, by its length"
    assert [sum(rewards) / 3 for rewards in first.continuations.values()] == pytest.approx(first.step_values)
    assert second.continuations == {0: first.continuations[0]}
    (without_continuations, _), _ = mdp.assign_credit(MonteCarlo(values=Siblings()), group)
    assert not without_continuations.continuations, "nothing was continued"
    (piloted, _), metrics = mdp.assign_credit(MonteCarlo(samples=2, values=Sequential(pilot=True)), group)
    counts = map(len, piloted.continuations.values())
    assert sum(counts) == metrics["credit/value_samples"], "with those of the pilot"


def long_answer(steps: int) -> Trajectory:
    """Returns an answer longer than any of the language, which `EngineWithDecidingStep` can value."""
    return replace(make_answers("a;" * (steps - 1) + "a")[0], grade=mdp.Grade(1.0, "ok"))


class EngineWithDecidingStep(mdp.TabularEngine):
    """Its continuations earn 0 before the deciding step, and 1 from it on."""

    def __init__(self, deciding_step: int) -> None:
        super().__init__()
        self.deciding_step = deciding_step

    def _completion(self, request: mdp.Request, rng: random.Random, sample: int) -> mdp.Completion:
        steps_before = mdp.response_part(request.prompt_ids).count(mdp.END_OF_STEP)
        is_decided = steps_before >= self.deciding_step
        return mdp.completion((*mdp.encode("a;a" if is_decided else "b"), mdp.EOS))


@pytest.mark.parametrize("deciding_step", [1, 5, 15])
def test_bisecting_finds_the_step_that_decides_in_a_logarithm_of_waves(deciding_step: int) -> None:
    class OnlyNew(mdp.InlinePool):
        """Grades only the continuation, by the text that the engine above gives it."""

        def submit(self, response: str, problem: mdp.Problem, **how: object) -> mdp.Future[mdp.Grade]:
            return super().submit("aa" if response.endswith("a;a") else "", problem)

    engine = EngineWithDecidingStep(deciding_step)
    credit = MonteCarlo(samples=2, values=Bisect())
    limits = {"context_length": 256, "sampling": mdp.SamplingParams(128)}
    (episode,), _ = mdp.assign_credit(credit, [long_answer(16)], engine=engine, grader=OnlyNew(), **limits)
    # One wave for the ends of the answer, and one for each halving of its 16 steps.
    assert len(engine.requests) <= 1 + 4
    has_gained = [episode.advantages[end - 1] > 0.5 for end in episode.step_ends]
    assert has_gained == [step == deciding_step - 1 for step in range(16)]


def test_bisecting_stops_at_its_bound_of_tokens() -> None:
    def requests_with(most_tokens: int | None) -> int:
        credit = MonteCarlo(samples=1, values=Bisect(threshold=0.1, most_tokens=most_tokens))
        return len(mdp.sampled_requests(credit))

    assert requests_with(1) == 1 < requests_with(None)


@pytest.mark.parametrize(
    "values",
    [
        Bisect(threshold=0.2),
        Smoothed(),
        Sequential(),
        Siblings(),
        ToppedUp(),
        CriticEstimator(),
        ControlVariate(),
        Filtered(),
    ],
    ids=repr,
)
def test_values_do_not_depend_on_the_number_of_ranks(values: ValueEstimator) -> None:
    def assign_on_rank(context: mdp.RolloutContext) -> tuple[list[Episode], None]:
        problems = contiguous_share(mdp.problems(4), context.ranks.rank, context.ranks.world_size)
        trees = trees_of(
            mdp.trajectory(ids, problem, i) for problem in problems for i, ids in enumerate(mdp.answers())
        )
        return MonteCarlo(samples=2, values=values).assign(context, trees)[0], None

    scores = ModelScores(critic=critic_of(knows_length_alone))
    mdp.assert_ranks_agree(3, assign_on_rank, engine=mdp.TabularEngine, model_scores=lambda: scores)


def test_the_critic_values_the_state_before_the_next_sampled_token() -> None:
    critic = Critic(lambda rows: [np.array([0.9, math.nan, 0.4, 0.3, 0.2, math.nan]) for _ in rows])
    group = make_answers("a;a;b")
    scores = ModelScores(critic=critic)
    context = mdp.context(model_scores=scores)
    valuation = Valuation(context, trees_of(group), EveryNTokens(tokens=1), mdp.SamplingParams(6), 1)
    assert critic_values(valuation) == [[0.9, 0.4, 0.4, 0.3, 0.2, None]]
    engine = mdp.TabularEngine()
    credit = MonteCarlo(values=CriticEstimator())
    (episode,), metrics = mdp.assign_credit(credit, group, model_scores=scores, engine=engine)
    assert not engine.requests and "credit/value_tokens" not in metrics
    assert episode.step_values == (0.9, 0.4, 0.2)
    assert episode.advantages == pytest.approx([-0.5] * 2 + [-0.2] * 2 + [0.8] * 2)


def test_a_control_variate_with_a_perfect_critic_lowers_the_variance_and_keeps_the_gradient() -> None:
    other_problem = [mdp.trajectory((*mdp.encode("a;b"), mdp.EOS), mdp.problems(2)[1])]
    without_critic = expectation(MonteCarlo(samples=1), 1)
    scores = ModelScores(critic=critic_of(mdp.value))
    with_critic = expectation(MonteCarlo(samples=1, values=ControlVariate()), 1, scores, other_problem)
    assert with_critic.variance < 0.5 * without_critic.variance
    assert with_critic.gradient == pytest.approx(without_critic.gradient, abs=1e-12)


def test_a_control_variate_learns_nothing_from_its_own_problem() -> None:
    scores = ModelScores(critic=critic_of(lambda prefix: -3.0))
    controlled, plain_episodes = (
        mdp.assign_credit(
            MonteCarlo(samples=2, values=values), make_answers("a;a", "a;b"), model_scores=scores
        )[0]
        for values in (ControlVariate(), FreshContinuations())
    )
    assert advantages_of(controlled) == advantages_of(plain_episodes)


def test_a_control_variate_trusts_a_critic_as_far_as_it_is_right() -> None:
    def weight_and_error(value: Callable[[mdp.Ids], float]) -> tuple[float, float]:
        group = [
            mdp.trajectory(ids, problem, i)
            for problem in mdp.problems(60)
            for i, ids in enumerate(mdp.answers())
        ]
        credit = MonteCarlo(samples=3, values=ControlVariate())
        scores = ModelScores(critic=critic_of(value))
        _, metrics = mdp.assign_credit(credit, group, model_scores=scores)
        return metrics["credit/critic_weight"], metrics["credit/critic_error"]

    right, wrong = weight_and_error(mdp.value), weight_and_error(lambda prefix: mdp.value(prefix) + 2.0)
    assert right[0] > 0.9
    assert right[1] < 0.1
    assert wrong[0] < 0.1
    assert wrong[1] == pytest.approx(2.0, abs=0.1)


def test_a_state_whose_error_is_small_enough_is_not_sampled_again() -> None:
    budget = UntilSure(first=4, error=0.2, most=12)
    assert budget.ask(0, list) == 4
    assert budget.ask(1, lambda: [1.0] * 4) == 0
    assert budget.ask(1, lambda: [1.0, 0.0, 1.0, 0.0]) == 4
    assert budget.ask(3, lambda: [1.0, 0.0] * 6) == 0


def test_a_pilot_decides_how_much_is_sampled_and_does_not_count() -> None:
    budget = UntilSure(first=2, error=0.2, most=20, pilot=True)
    undecided = budget.ask(1, lambda: [1.0, 0.0])
    assert 0 < budget.ask(1, lambda: [1.0, 1.0]) < undecided <= 20
    assert budget.ask(2, lambda: [1.0, 0.0, 1.0]) == 0
    assert budget.counted([1.0, 0.0, 1.0]) == [1.0]
    _, metrics = mdp.assign_credit(MonteCarlo(samples=2, values=Sequential(pilot=True)))
    assert metrics["credit/value_samples"] > 2 * metrics["credit/value_states"]


def solve_normal_equations(path: list[Value | None], step_variance: float) -> list[float]:
    """Solves the normal equations of all values and steps together, which the smoother must agree with."""
    measured = [(position, value) for position, value in enumerate(path) if value is not None]
    matrix, right = np.zeros((len(measured), len(measured))), np.zeros(len(measured))
    for number, (_, value) in enumerate(measured):
        weight = 1 / max(value.variance, 1e-12)
        matrix[number, number] += weight
        right[number] += weight * value.value
    for number in range(len(measured) - 1):
        weight = 1 / (step_variance * (measured[number + 1][0] - measured[number][0]))
        matrix[number : number + 2, number : number + 2] += weight * np.array([[1, -1], [-1, 1]])
    return list(np.linalg.solve(matrix, right))


paths_of_values = st.lists(
    st.one_of(st.none(), st.builds(Value, st.floats(0, 1), st.floats(0.01, 0.3))), min_size=1, max_size=12
)


@given(paths_of_values, st.floats(0, 1), st.floats(0.001, 0.5))
def test_smoothing_is_the_least_squares_answer(path: list[Value | None], reward: float, step: float) -> None:
    path = [Value(0.5, 0.1), *path, Value(reward, 0.2)]
    smoothed = smooth_walk(path, step)
    assert [value is None for value in smoothed] == [value is None for value in path]
    assert [value.value for value in smoothed if value is not None] == pytest.approx(
        solve_normal_equations(path, step), abs=1e-6
    )


def test_filtering_combines_values_from_behind_and_baselines_from_before() -> None:
    path: list[Value | None] = [Value(0.4, 0.1), None, Value(0.8, 0.1)]
    first, missing, last = filter_values(path, 1.0, gain_from_later=0.5, gain_from_earlier=0.25)
    assert missing is None
    assert (last.value, first.value) == pytest.approx((0.9, (0.4 + 0.9) / 2))
    assert (first.baseline_or_value, last.baseline_or_value) == pytest.approx((0.4, 0.75 * 0.8 + 0.25 * 0.4))


def test_filtering_lowers_the_variance_and_keeps_the_gradient() -> None:
    other_problems = [
        mdp.trajectory(ids, problem, i)
        for problem in mdp.problems(4)[1:]
        for i, ids in enumerate(mdp.answers())
    ]
    raw, filtered = (
        expectation(MonteCarlo(samples=1, values=values), 1, None, other_problems)
        for values in (FreshContinuations(), Filtered())
    )
    assert filtered.variance < 0.9 * raw.variance
    assert filtered.gradient == pytest.approx(raw.gradient, abs=1e-12)


def test_smoothing_lowers_the_error_of_few_continuations_where_values_walk() -> None:
    rng = random.Random(0)
    raw, smooth = [], []
    for _ in range(200):
        exact = [0.5]
        for _ in range(12):
            exact.append(min(max(exact[-1] + rng.choice([-0.1, 0.1]), 0.0), 1.0))
        paths_of_values: list[Value | None] = [
            value_of_rewards([float(rng.random() < exact_value) for _ in range(3)]) for exact_value in exact
        ]
        path = [*paths_of_values, Value(float(rng.random() < exact[-1]), 0.2)]
        raw += [
            (value.value - exact_value) ** 2
            for value, exact_value in zip(paths_of_values, exact, strict=True)
            if value
        ]
        smooth += [
            (value.value - exact_value) ** 2
            for value, exact_value in zip(smooth_walk(path, 0.01), exact)
            if value
        ]
    assert fmean(smooth) < 0.5 * fmean(raw)


def test_steps_can_have_a_fixed_number_of_tokens_or_end_with_an_unsure_token() -> None:
    answer = long_answer(4)
    assert list(EveryNTokens(tokens=3).step_starts(answer)) == [0, 3, 6]
    chances = (0.95, 0.5, 0.99, 0.8, 0.3, 0.99, 0.97, 0.2)
    unsure = mdp.trajectory(plain(answer.response_ids), logprobs=[math.log(p) for p in chances])
    # A step ends after every second token below 0.9. There is no state after the last token of all.
    assert list(LowProbability(below=0.9, every=2).step_starts(unsure)) == [0, 4]
    assert list(LowProbability(below=0.9, every=1).step_starts(unsure)) == [0, 2, 4, 5]
    credit = MonteCarlo(samples=1, states=EveryNTokens(tokens=3))
    (episode,), _ = mdp.assign_credit(credit, make_answers("a;a;b"))
    assert (episode.step_ends, mdp.decode(episode.response_ids)) == ((3, 6), "a;a;b")


@pytest.mark.parametrize(
    "returned",
    [
        None,
        [0.5],
        [None],
        [[0.5]],
        [[0.5, 0.5, 0.5]],
        [[Value(0.5, 0.0)]],
        [[Value(0.5, 0.0), Value(0.5, 0.0), None, None]],
        [[[Value(0.5, 0.0), Value(0.5, 0.0), None]]],
        [[Value(0.5, 0.0), None, None]] * 2,
    ],
    ids=str,
)
def test_values_that_do_not_fit_the_states_are_refused(returned: Any) -> None:
    class Given(FreshContinuations):
        def values(self, valuation: Valuation) -> Any:
            assert [len(answer.states) for answer in valuation.answers] == [3]
            return returned

    with pytest.raises(ValueError, match="Given: give each state of each answer a Value or None"):
        mdp.assign_credit(MonteCarlo(samples=1, values=Given()), make_answers("a;a;b"))


def test_answers_whose_prompt_has_no_value_are_left_out_counted_and_reported() -> None:
    class OfTheFirst(FreshContinuations):
        """Gives no value to the prompt of any answer but the first."""

        def values(self, valuation: Valuation) -> list[StepValues]:
            first, *others_values = super().values(valuation)
            return [first, *([None, *values[1:]] for values in others_values)]

    messages: list[str] = []
    credit = MonteCarlo(samples=1, values=OfTheFirst())
    episodes, metrics = mdp.assign_credit(credit, make_answers("a;a;b", "b;a;b"), say=messages.append)
    assert (len(episodes), metrics["credit/unvalued"]) == (1, 1.0)
    assert "credit/value_unavailable" not in metrics
    assert messages == ["iteration 4: 1 answers are left out, since their prompt has no value"]


def test_an_estimator_that_does_not_state_whether_it_is_unbiased_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'silent', .*Silent .*doesn't set `unbiased`"):

        @ValueEstimator.register("silent")
        class Silent(ValueEstimator):
            pass

    assert "silent" not in ValueEstimator.parts_by_name()
