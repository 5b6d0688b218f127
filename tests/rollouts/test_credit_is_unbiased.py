"""Each estimator's expectation over all answers, against the exact policy gradient."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.columns import plain
from tests.rollouts import tabular_mdp as mdp
from treetune.rollouts.base import Credit
from treetune.rollouts.credit import Group, Outcome, Rloo
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.states import StepBoundaries
from treetune.rollouts.values import Estimate
from treetune.tree import trees_of


def expected_gradient(credit: Credit, group_size: int, engine: mdp.TabularEngine) -> mdp.Gradient:
    """Σ over all groups of answers, weighted by their probability, of the mean over the group."""
    total: mdp.Gradient = {}
    for group in itertools.product(mdp.answers().items(), repeat=group_size):
        probability = math.prod(p for _, p in group)
        trajectories = [mdp.trajectory(answer, sample=i) for i, (answer, _) in enumerate(group)]
        episodes, _ = credit.assign(mdp.context(engine=engine), trees_of(trajectories))
        for episode in episodes:
            assert episode.advantages is not None
            term = mdp.score_gradient(plain(episode.response_ids), episode.advantages.tolist())
            mdp.add(total, term, probability / group_size)
    return total


@pytest.mark.parametrize(
    ("credit", "group_size", "share"),
    [
        (Outcome(), 1, 1.0),
        (Rloo(), 2, 1.0),
        (Rloo(), 3, 1.0),
        (Group(std=False), 2, 1 / 2),
        (Group(std=False), 3, 2 / 3),
        (MonteCarlo(samples=mdp.EXACT_SAMPLES), 1, 1.0),
        (MonteCarlo(samples=mdp.EXACT_SAMPLES, siblings_count_into_prompt_value=True), 2, 1.0),
    ],
    ids=lambda part: getattr(part, "__class__", type).__name__ if isinstance(part, Credit) else str(part),
)
def test_expected_gradient_is_this_share_of_the_policy_gradient(
    credit: Credit, group_size: int, share: float
) -> None:
    gradient = expected_gradient(credit, group_size, mdp.ExactEngine())
    exact = mdp.exact_gradient()
    assert gradient.keys() == exact.keys()
    assert max(map(abs, exact.values())) > 0.05
    for key, slope in exact.items():
        assert gradient[key] == pytest.approx(share * slope, abs=1e-12), key


def test_the_cap_on_states_leaves_the_gradient_before_it_exact_and_none_behind_it() -> None:
    credit = MonteCarlo(samples=mdp.EXACT_SAMPLES, max_states=2)
    gradient = expected_gradient(credit, 1, mdp.ExactEngine())
    for (state, token), slope in mdp.exact_gradient().items():
        step = state.count(mdp.END_OF_STEP)
        exact = slope if step < 2 else 0.0
        assert gradient[state, token] == pytest.approx(exact, abs=1e-12), (state, token)


@dataclass(frozen=True, kw_only=True)
class Ungraded(StepBoundaries):
    """Nobody could grade what was sampled from the states that begin with some letters."""

    unknown: tuple[str, ...]

    def estimate(self, *given: Any) -> list[Estimate]:
        _, beginnings, *_ = given
        found = super().estimate(*given)
        return [
            replace(estimate, rewards=(), unavailable=len(estimate.rewards))
            if mdp.decode(beginning.token_ids) in self.unknown
            else estimate
            for beginning, estimate in zip(beginnings, found, strict=True)
        ]


@pytest.mark.parametrize("unknown", [("a;",), ("a;", "b;"), ("a;", "a;b;", "b;b;")])
def test_states_whose_continuations_nobody_could_grade_leave_the_gradient_exact(
    unknown: tuple[str, ...],
) -> None:
    credit = MonteCarlo(samples=mdp.EXACT_SAMPLES, states=Ungraded(unknown=unknown))
    gradient = expected_gradient(credit, 1, mdp.ExactEngine())
    for key, slope in mdp.exact_gradient().items():
        assert gradient[key] == pytest.approx(slope, abs=1e-12), key


def test_monte_carlo_gives_each_step_its_exact_advantage_when_sampling_has_no_noise() -> None:
    credit = MonteCarlo(samples=mdp.EXACT_SAMPLES)
    trajectories = mdp.all_trajectories()
    episodes, _ = credit.assign(mdp.context(engine=mdp.ExactEngine()), trees_of(trajectories))
    for episode in episodes:
        assert episode.advantages is not None
        assert episode.step_values is not None
        answer, start = plain(episode.response_ids), 0
        for end, before in zip(episode.step_ends, episode.step_values, strict=True):
            exact = mdp.value(answer[:end]) - mdp.value(answer[:start])
            assert before == pytest.approx(mdp.value(answer[:start]), abs=1e-12)
            assert episode.advantages[start:end] == pytest.approx([exact] * (end - start), abs=1e-12)
            start = end


def test_monte_carlo_mean_over_seeds_is_the_exact_advantage_within_its_standard_error() -> None:
    seeds, samples = 600, 2
    trajectories = mdp.all_trajectories()
    sums: dict[tuple[int, int], float] = {}
    squares: dict[tuple[int, int], float] = {}
    for seed in range(seeds):
        episodes, _ = MonteCarlo(samples=samples).assign(mdp.context(seed=seed), trees_of(trajectories))
        for row, episode in enumerate(episodes):
            assert episode.advantages is not None
            for step, end in enumerate(episode.step_ends):
                advantage = episode.advantages[end - 1]
                sums[row, step] = sums.get((row, step), 0.0) + advantage
                squares[row, step] = squares.get((row, step), 0.0) + advantage**2
    for (row, step), total in sums.items():
        answer, ends = plain(trajectories[row].response_ids), (0, *trajectories[row].step_ends)
        exact = mdp.value(answer[: ends[step + 1]]) - mdp.value(answer[: ends[step]])
        variance = squares[row, step] / seeds - (total / seeds) ** 2
        # 4.5 standard errors for some forty estimates: fixed seeds, so it passes or it doesn't.
        assert abs(total / seeds - exact) <= 4.5 * math.sqrt(variance / seeds) + 1e-12, (row, step)
