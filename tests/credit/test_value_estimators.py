"""What each value estimator asks for, and what it makes of it."""

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

from tests.columns import plain
from tests.credit.expectations import critic_of, expectation, knows_length_alone
from tests.rollouts import tabular_mdp as mdp
from treetune.credit.rloo import Rloo
from treetune.credit.states.by_tokens import EveryNTokens, LowProbability
from treetune.credit.values.base import (
    StepValues,
    Valuation,
    Value,
    ValueEstimator,
    mean_of,
    shared_tokens,
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


def answers(*texts: str) -> list[Trajectory]:
    """To one problem, each with the end token."""
    return [mdp.trajectory((*mdp.encode(text), mdp.EOS), sample=i) for i, text in enumerate(texts)]


def advantages(episodes: Sequence[Episode]) -> list[list[float]]:
    return [one.advantages.tolist() for one in episodes]


def test_siblings_are_worth_what_the_others_earned_from_there_and_cost_nothing() -> None:
    credit, engine = MonteCarlo(values=Siblings()), mdp.TabularEngine()
    group = answers("a;a", "a;b", "a;b;a", "b")  # they earn 1, 0, 1, 0
    episodes, metrics = mdp.credited(credit, group, engine=engine)
    assert not (engine.requests or credit.needs_engine or "credit/value_tokens" in metrics)
    assert episodes[0].step_values == pytest.approx((1 / 3, 1 / 2))
    # Behind "a;b" nobody went on with ";" but the third: its last steps are one.
    assert episodes[2].step_values == pytest.approx((1 / 3, 1 / 2, 1 / 2))
    assert episodes[2].advantages == pytest.approx([1 / 6] * 2 + [1 / 2] * 4)
    assert episodes[3].advantages == pytest.approx([-2 / 3] * 2)


def test_siblings_that_share_nothing_but_the_prompt_are_rloo() -> None:
    group = answers("a", "b", "a;a")
    only_prompt = MonteCarlo(values=Siblings(), max_states=None, states=EveryNTokens(tokens=100))
    found, expected = (advantages(mdp.credited(one, group)[0]) for one in (only_prompt, Rloo()))
    assert list(map(pytest.approx, found)) == expected


def test_shared_tokens_are_counted_for_each_pair() -> None:
    (tree,) = trees_of(answers("a;a", "a;b", "a"))
    assert shared_tokens(tree) == [[0, 2, 1], [2, 0, 1], [1, 1, 0]]


def test_siblings_count_among_continuations_without_the_answers_own_reward() -> None:
    group = answers("a;a", "a;b")
    alone, counted = (
        mdp.credited(MonteCarlo(samples=3, values=FreshContinuations(count_siblings=count)), group)[0]
        for count in (False, True)
    )
    for of_alone, of_counted, other in zip(alone, counted, (0.0, 1.0), strict=True):
        assert of_counted.step_values == pytest.approx([(3 * v + other) / 4 for v in of_alone.step_values])


def test_continuations_make_up_for_the_siblings_that_a_state_lacks() -> None:
    """The prompt has as many as were asked for, the first step's end one, and the others none."""
    group = answers("a;a", "a;b", "b;a")
    _, metrics = mdp.credited(MonteCarlo(samples=2, values=ToppedUp()), group)
    _, plainly = mdp.credited(MonteCarlo(samples=2), group)
    assert (metrics["credit/value_samples"], plainly["credit/value_samples"]) == (1 + 2, 2 * 3)


def test_values_have_the_standard_errors_of_their_means_and_steps_without_a_value_none() -> None:
    group = answers("a;a", "b")
    (first, second), _ = mdp.credited(MonteCarlo(values=Siblings()), group)
    # One other answer, which was wrong or right: the share is shrunk to 1 of 3 or 2 of 3.
    assert first.step_errors == (pytest.approx(math.sqrt(2 / 9)), math.inf)
    assert second.step_errors == (pytest.approx(math.sqrt(2 / 9)),)
    (of_three, _), _ = mdp.credited(MonteCarlo(samples=3), group)
    shares = [(3 * value + 1) / 5 for value in of_three.step_values]
    assert of_three.step_errors == pytest.approx([math.sqrt(p * (1 - p) / 3) for p in shares])
    (bounded, _), _ = mdp.credited(MonteCarlo(samples=3, max_states=1), group)
    assert bounded.step_errors == (of_three.step_errors[0], 0.0)


def test_what_each_continuation_earned_is_kept_with_the_answer() -> None:
    group = answers("a;a", "b")
    (first, second), _ = mdp.credited(MonteCarlo(samples=3), group)
    assert list(first.continuations) == [0, *first.step_ends[:-1]], "for each state, by its length"
    assert [sum(own) / 3 for own in first.continuations.values()] == pytest.approx(first.step_values)
    assert second.continuations == {0: first.continuations[0]}
    (alone, _), _ = mdp.credited(MonteCarlo(values=Siblings()), group)
    assert not alone.continuations, "nothing was continued"
    (piloted, _), metrics = mdp.credited(MonteCarlo(samples=2, values=Sequential(pilot=True)), group)
    counts = map(len, piloted.continuations.values())
    assert sum(counts) == metrics["credit/value_samples"], "with those of the pilot"


def long_answer(steps: int) -> Trajectory:
    """Longer than the language has any; what it is worth is scripted by `Jump`."""
    return replace(answers("a;" * (steps - 1) + "a")[0], grade=mdp.Grade(1.0, "ok"))


class Jump(mdp.TabularEngine):
    """Continuations earn nothing before a step, and everything from it on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def _completion(self, request: mdp.Request, rng: random.Random, sample: int) -> mdp.Completion:
        begun = mdp.response_part(request.prompt_ids).count(mdp.END_OF_STEP)
        return mdp.completion((*mdp.encode("a;a" if begun >= self.at else "b"), mdp.EOS))


@pytest.mark.parametrize("at", [1, 5, 15])
def test_bisecting_finds_the_step_that_decides_in_a_logarithm_of_waves(at: int) -> None:
    class OnlyNew(mdp.InlinePool):
        """Grades what was written after the beginning, which the script is about."""

        def submit(self, response: str, problem: mdp.Problem, **how: object) -> mdp.Future[mdp.Grade]:
            return super().submit("aa" if response.endswith("a;a") else "", problem)

    engine = Jump(at)
    credit = MonteCarlo(samples=2, values=Bisect())
    room = {"context_length": 256, "sampling": mdp.SamplingParams(128)}
    (episode,), _ = mdp.credited(credit, [long_answer(16)], engine=engine, grader=OnlyNew(), **room)
    assert len(engine.requests) <= 1 + 4
    gained = [episode.advantages[end - 1] > 0.5 for end in episode.step_ends]
    assert gained == [step == at - 1 for step in range(16)]


def test_bisecting_stops_at_its_bound_of_tokens() -> None:
    bounded, unbounded = (
        len(mdp.asked_for(MonteCarlo(samples=1, values=Bisect(threshold=0.1, most_tokens=most))))
        for most in (1, None)
    )
    assert bounded == 1 < unbounded


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
def test_values_are_the_same_however_many_ranks_find_them(values: ValueEstimator) -> None:
    def run(context: mdp.RolloutContext) -> tuple[list[Episode], None]:
        problems = contiguous_share(mdp.problems(4), context.ranks.rank, context.ranks.world_size)
        trees = trees_of(mdp.trajectory(a, p, i) for p in problems for i, a in enumerate(mdp.answers()))
        return MonteCarlo(samples=2, values=values).assign(context, trees)[0], None

    scores = ModelScores(critic=critic_of(knows_length_alone))
    mdp.assert_ranks_agree(3, run, engine=mdp.TabularEngine, model_scores=lambda: scores)


def test_the_critic_is_asked_for_the_state_before_the_next_sampled_token() -> None:
    critic = Critic(lambda given: [np.array([0.9, math.nan, 0.4, 0.3, 0.2, math.nan]) for _ in given])
    group = answers("a;a;b")
    scores = ModelScores(critic=critic)
    context = mdp.context(model_scores=scores)
    valuation = Valuation(context, trees_of(group), EveryNTokens(tokens=1), mdp.SamplingParams(6), 1)
    assert critic_values(valuation) == [[0.9, 0.4, 0.4, 0.3, 0.2, None]]
    engine = mdp.TabularEngine()
    credit = MonteCarlo(values=CriticEstimator())
    (episode,), metrics = mdp.credited(credit, group, model_scores=scores, engine=engine)
    assert not engine.requests and "credit/value_tokens" not in metrics
    assert episode.step_values == (0.9, 0.4, 0.2)
    assert episode.advantages == pytest.approx([-0.5] * 2 + [-0.2] * 2 + [0.8] * 2)


def test_a_perfect_critic_takes_the_noise_of_all_baselines_away() -> None:
    other = [mdp.trajectory((*mdp.encode("a;b"), mdp.EOS), mdp.problems(2)[1])]
    plain_one = expectation(MonteCarlo(samples=1), 1)
    scores = ModelScores(critic=critic_of(mdp.value))
    beside = expectation(MonteCarlo(samples=1, values=ControlVariate()), 1, scores, other)
    assert beside.variance < 0.5 * plain_one.variance
    assert beside.gradient == pytest.approx(plain_one.gradient, abs=1e-12)


def test_a_control_variate_learns_nothing_from_the_problem_that_it_is_for() -> None:
    scores = ModelScores(critic=critic_of(lambda prefix: -3.0))
    found, alone = (
        mdp.credited(MonteCarlo(samples=2, values=values), answers("a;a", "a;b"), model_scores=scores)[0]
        for values in (ControlVariate(), FreshContinuations())
    )
    assert advantages(found) == advantages(alone)


def test_a_control_variate_leans_on_a_critic_as_far_as_that_is_right() -> None:
    def weight_and_error(value: Callable[[mdp.Ids], float]) -> tuple[float, float]:
        group = [mdp.trajectory(a, p, i) for p in mdp.problems(60) for i, a in enumerate(mdp.answers())]
        credit = MonteCarlo(samples=3, values=ControlVariate())
        scores = ModelScores(critic=critic_of(value))
        _, metrics = mdp.credited(credit, group, model_scores=scores)
        return metrics["credit/critic_weight"], metrics["credit/critic_error"]

    right, wrong = weight_and_error(mdp.value), weight_and_error(lambda prefix: mdp.value(prefix) + 2.0)
    assert right[0] > 0.9
    assert right[1] < 0.1
    assert wrong[0] < 0.1
    assert wrong[1] == pytest.approx(2.0, abs=0.1)


def test_a_state_that_is_sure_is_not_asked_for_again() -> None:
    budget = UntilSure(first=4, error=0.2, most=12)
    assert budget.ask(0, list) == 4
    assert budget.ask(1, lambda: [1.0] * 4) == 0
    assert budget.ask(1, lambda: [1.0, 0.0, 1.0, 0.0]) == 4
    assert budget.ask(3, lambda: [1.0, 0.0] * 6) == 0


def test_a_pilot_decides_and_does_not_count() -> None:
    budget = UntilSure(first=2, error=0.2, most=20, pilot=True)
    undecided = budget.ask(1, lambda: [1.0, 0.0])
    assert 0 < budget.ask(1, lambda: [1.0, 1.0]) < undecided <= 20
    assert budget.ask(2, lambda: [1.0, 0.0, 1.0]) == 0
    assert budget.counted([1.0, 0.0, 1.0]) == [1.0]
    _, metrics = mdp.credited(MonteCarlo(samples=2, values=Sequential(pilot=True)))
    assert metrics["credit/value_samples"] > 2 * metrics["credit/value_states"]


def solved(path: list[Value | None], step_variance: float) -> list[float]:
    """The smoother's answer as the solution of the normal equations of all looks and steps together."""
    known = [(place, one) for place, one in enumerate(path) if one is not None]
    matrix, right = np.zeros((len(known), len(known))), np.zeros(len(known))
    for number, (_, one) in enumerate(known):
        weight = 1 / max(one.variance, 1e-12)
        matrix[number, number] += weight
        right[number] += weight * one.value
    for number in range(len(known) - 1):
        weight = 1 / (step_variance * (known[number + 1][0] - known[number][0]))
        matrix[number : number + 2, number : number + 2] += weight * np.array([[1, -1], [-1, 1]])
    return list(np.linalg.solve(matrix, right))


looks = st.lists(
    st.one_of(st.none(), st.builds(Value, st.floats(0, 1), st.floats(0.01, 0.3))), min_size=1, max_size=12
)


@given(looks, st.floats(0, 1), st.floats(0.001, 0.5))
def test_smoothing_is_the_least_squares_answer(path: list[Value | None], reward: float, step: float) -> None:
    path = [Value(0.5, 0.1), *path, Value(reward, 0.2)]
    found = smooth_walk(path, step)
    assert [one is None for one in found] == [one is None for one in path]
    assert [one.value for one in found if one is not None] == pytest.approx(solved(path, step), abs=1e-6)


def test_filtering_sees_values_from_behind_and_baselines_from_before() -> None:
    along: list[Value | None] = [Value(0.4, 0.1), None, Value(0.8, 0.1)]
    first, between, last = filter_values(along, 1.0, behind=0.5, before=0.25)
    assert between is None
    assert (last.value, first.value) == pytest.approx((0.9, (0.4 + 0.9) / 2))
    assert (first.baseline_or_value, last.baseline_or_value) == pytest.approx((0.4, 0.75 * 0.8 + 0.25 * 0.4))


def test_filtering_takes_noise_from_what_is_held_against_what_and_turns_nothing() -> None:
    other = [mdp.trajectory(a, p, i) for p in mdp.problems(4)[1:] for i, a in enumerate(mdp.answers())]
    raw, found = (
        expectation(MonteCarlo(samples=1, values=values), 1, None, other)
        for values in (FreshContinuations(), Filtered())
    )
    assert found.variance < 0.9 * raw.variance
    assert found.gradient == pytest.approx(raw.gradient, abs=1e-12)


def test_smoothing_lowers_the_error_of_few_continuations_where_values_walk() -> None:
    rng = random.Random(0)
    raw, smooth = [], []
    for _ in range(200):
        truth = [0.5]
        for _ in range(12):
            truth.append(min(max(truth[-1] + rng.choice([-0.1, 0.1]), 0.0), 1.0))
        looks: list[Value | None] = [mean_of([float(rng.random() < v) for _ in range(3)]) for v in truth]
        path = [*looks, Value(float(rng.random() < truth[-1]), 0.2)]
        raw += [(one.value - v) ** 2 for one, v in zip(looks, truth, strict=True) if one]
        smooth += [(one.value - v) ** 2 for one, v in zip(smooth_walk(path, 0.01), truth) if one]
    assert fmean(smooth) < 0.5 * fmean(raw)


def test_steps_can_be_so_many_tokens_or_end_with_an_unsure_one() -> None:
    one = long_answer(4)
    assert list(EveryNTokens(tokens=3).step_starts(one)) == [0, 3, 6]
    chances = (0.95, 0.5, 0.99, 0.8, 0.3, 0.99, 0.97, 0.2)
    unsure = mdp.trajectory(plain(one.response_ids), logprobs=[math.log(p) for p in chances])
    # Behind every second token below 0.9; behind the last of all there is no state.
    assert list(LowProbability(below=0.9, every=2).step_starts(unsure)) == [0, 4]
    assert list(LowProbability(below=0.9, every=1).step_starts(unsure)) == [0, 2, 4, 5]
    credit = MonteCarlo(samples=1, states=EveryNTokens(tokens=3))
    (episode,), _ = mdp.credited(credit, answers("a;a;b"))
    assert (episode.step_ends, mdp.decode(episode.response_ids)) == ((3, 6), "a;a;b")


@pytest.mark.parametrize(
    "found",
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
def test_values_that_do_not_fit_the_states_are_refused(found: Any) -> None:
    class Given(FreshContinuations):
        def values(self, valuation: Valuation) -> Any:
            assert [len(answer.states) for answer in valuation.answers] == [3]
            return found

    with pytest.raises(ValueError, match="Given: give each state of each answer a Value or None"):
        mdp.credited(MonteCarlo(samples=1, values=Given()), answers("a;a;b"))


def test_answers_whose_prompt_has_no_value_are_left_out_counted_and_reported() -> None:
    class OfTheFirst(FreshContinuations):
        """Gives no value to the prompt of any answer but the first."""

        def values(self, valuation: Valuation) -> list[StepValues]:
            first, *others = super().values(valuation)
            return [first, *([None, *values[1:]] for values in others)]

    messages: list[str] = []
    credit = MonteCarlo(samples=1, values=OfTheFirst())
    episodes, metrics = mdp.credited(credit, answers("a;a;b", "b;a;b"), say=messages.append)
    assert (len(episodes), metrics["credit/unvalued"]) == (1, 1.0)
    assert "credit/value_unavailable" not in metrics
    assert messages == ["iteration 4: 1 answers are left out, since their prompt has no value"]


def test_an_estimator_says_whether_it_is_unbiased_or_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'silent', .*Silent .*doesn't set `unbiased`"):

        @ValueEstimator.register("silent")
        class Silent(ValueEstimator):
            pass

    assert "silent" not in ValueEstimator.registered()
