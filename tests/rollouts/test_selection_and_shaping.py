"""Selections of episodes and tokens, and shaping of rewards.

These tests promise:

* Each selection keeps the episodes that its name says, by the grader's score and not by the shaped reward.
* Pairs are drawn evenly, and each problem's draw depends on the problem alone.
* Penalties are those of their papers, never reward a wrong answer, and are the same on any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import tabular_mdp as mdp
from tests.support.trees import answered
from treetune.domains.mixture import Domain, Mixture
from treetune.rollouts.base import Selection
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.selection import All, CorrectOnly, MixedGroups, PreferencePairs, SomeTokens
from treetune.rollouts.shaping import (
    LengthPenalty,
    OverlongPenalty,
    apply_shaping,
    length_bonuses,
    overlong_bonus,
)
from treetune.rollouts.single_turn import SingleTurn
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Metrics, Trajectory


def episodes_of(**rewards: tuple[float, ...]) -> list[Episode]:
    """Returns an episode for each reward of each group."""
    episodes = []
    for group, group_rewards in rewards.items():
        for sample, reward in enumerate(group_rewards):
            episode = Episode(
                prompt_ids=(1,),
                response_ids=(2,),
                trained=(True,),
                reward=reward,
                group=group,
                trajectory=f"{group}#{sample}",
                policy_version=0,
            )
            episodes.append(episode)
    return episodes


EPISODES = episodes_of(easy=(1.0, 1.0, 1.0), fair=(0.0, 1.0, 0.5), hard=(0.0, 0.0, 0.0))
SHAPED = [
    replace(episode, reward=reward)
    for episode, reward in zip(EPISODES, (0.2, 1.0, 0.6, 1.0, 0.1, 0.7, 0.0, 0.9, 1.4), strict=True)
]
"""The same scores with shaped rewards, by which other episodes would be chosen."""


def select(
    selection: Selection, episodes: list[Episode] = EPISODES, **changed: int
) -> tuple[list[str], Metrics]:
    selected, metrics = selection.select(mdp.context(**changed), episodes)
    return [episode.trajectory for episode in selected], metrics


@pytest.mark.parametrize(
    ("selection", "names", "metrics"),
    [
        (All(), [episode.trajectory for episode in EPISODES], {"episodes": 9, "kept": 9}),
        (CorrectOnly(), ["easy#0", "easy#1", "easy#2", "fair#1"], {}),
        (CorrectOnly(reward_threshold=0.5), ["easy#0", "easy#1", "easy#2", "fair#1", "fair#2"], {}),
        (CorrectOnly(max_per_problem=2), ["easy#0", "easy#1", "fair#1"], {"groups_capped": 1}),
        (CorrectOnly(max_per_problem=3), ["easy#0", "easy#1", "easy#2", "fair#1"], {"groups_capped": 0}),
        (MixedGroups(), ["fair#0", "fair#1", "fair#2"], {"groups": 3, "groups_kept": 1}),
    ],
    ids=str,
)
def test_each_selection_keeps_its_episodes_in_order(
    selection: Selection, names: list[str], metrics: dict[str, float]
) -> None:
    kept_names, all_metrics = select(selection)
    assert kept_names == names
    assert {name: all_metrics[f"selection/{name}"] for name in metrics} == metrics


def test_the_first_mixed_groups_are_kept_and_the_others_counted() -> None:
    further_groups = episodes_of(c=(0.0, 1.0), a=(0.0, 1.0), b=(0.0, 1.0))
    kept, metrics = select(MixedGroups(at_most=2), [*EPISODES, *further_groups])
    assert kept == ["fair#0", "fair#1", "fair#2", "c#0", "c#1"]
    assert metrics["selection/groups_dropped"] == pytest.approx(2 / 6)
    assert metrics["selection/groups_surplus"] == 2


def pairs_of(rows: list[Episode]) -> list[tuple[str, str]]:
    """Returns the names of the better and the other answer of each pair, which are neighbours."""
    for number, (better, other) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        assert (better.pair, better.chosen, other.pair, other.chosen) == (number, True, number, False)
    return [(better.trajectory, other.trajectory) for better, other in zip(rows[::2], rows[1::2])]


def test_pairs_are_all_right_answers_against_all_wrong_ones_to_the_same_problem() -> None:
    rows, _ = PreferencePairs(reward_threshold=0.5).select(mdp.context(), EPISODES)
    assert pairs_of(rows) == [("fair#1", "fair#0"), ("fair#2", "fair#0")]
    rows, metrics = PreferencePairs(reward_threshold=1.0).select(mdp.context(), EPISODES)
    assert pairs_of(rows) == [("fair#1", "fair#0"), ("fair#1", "fair#2")]
    assert [metrics[f"selection/{name}"] for name in ("pairs", "groups_kept", "kept")] == [2, 1, 3]


@pytest.mark.parametrize("selection", [CorrectOnly(), MixedGroups(), PreferencePairs()])
def test_selections_go_by_the_score_and_not_by_the_shaped_reward(selection: Selection) -> None:
    assert select(selection, SHAPED) == select(selection)


MIXED = episodes_of(one=(0.0, 1.0) * 6, two=(0.0, 1.0) * 6)


def test_too_many_pairs_are_reduced_by_a_draw_that_depends_on_the_problem_alone() -> None:
    selection = PreferencePairs(max_pairs_per_problem=5)

    def draw_pairs(episodes: list[Episode], **changed: int) -> list[tuple[str, str]]:
        return pairs_of(selection.select(mdp.context(**changed), episodes)[0])

    names = ("pairs", "pairs_possible", "groups_capped")
    assert [select(selection, MIXED)[1][f"selection/{name}"] for name in names] == [10, 72, 2]
    assert len(set(draw_pairs(MIXED))) == 10, "none is drawn twice"
    assert draw_pairs(MIXED) == draw_pairs(MIXED)
    assert draw_pairs(MIXED[12:]) == draw_pairs(MIXED)[5:], "whatever other problems there are"
    assert draw_pairs(MIXED) not in (draw_pairs(MIXED, iteration=4), draw_pairs(MIXED, seed=2))


def test_every_pair_is_as_likely_as_any_other() -> None:
    selection = PreferencePairs(max_pairs_per_problem=9)
    counts: Counter[tuple[str, str]] = Counter()
    draws = 400
    for seed in range(draws):
        counts.update(pairs_of(selection.select(mdp.context(seed=seed), MIXED[:12])[0]))
    expected = pytest.approx(draws / 4, abs=6 * (draws * 3 / 16) ** 0.5)
    assert len(counts) == 36 and all(count == expected for count in counts.values())


def test_an_empty_selection_is_returned_with_its_metrics() -> None:
    for selection in (CorrectOnly(reward_threshold=2.0), PreferencePairs(), MixedGroups(), All()):
        selected, metrics = select(selection, [] if selection == All() else EPISODES[:3])
        assert (selected, metrics["selection/kept"]) == ([], 0)


def test_some_tokens_keeps_unlikely_tokens_with_an_advantage_and_drops_answers_without_any() -> None:
    episodes = [
        replace(
            episode,
            response_ids=(2, 3, 4, 5),
            trained=(False, True, True, True),
            advantages=advantages,
            behaviour_logprobs=np.log([0.1, 0.89, 0.9, 0.5]),
        )
        for episode, advantages in zip(
            EPISODES[3:6], [(1.0, 1.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0), (1.0,) * 4], strict=True
        )
    ]
    selected, metrics = SomeTokens().select(mdp.context(), episodes)
    assert {episode.trajectory: episode.trained.tolist() for episode in selected} == {
        "fair#0": [False, True, False, False],
        "fair#2": [False, True, False, True],
    }
    assert (metrics["selection/tokens"], metrics["selection/kept"]) == (3 / 9, 2)


SINGLE_TURN = SingleTurn(samples=4, max_tokens=mdp.LONGEST)
BOTH = (OverlongPenalty(cache=4, scale=0.5), LengthPenalty(weight=0.25))


def test_the_overlong_penalty_is_that_of_dapo_at_its_lengths() -> None:
    expected = {0: 0, 16384: 0, 16385: -1 / 4096, 18432: -0.5, 20480: -1, 20481: -1, 99999: -1}
    bonuses = {length: overlong_bonus(length, longest=20480, cache=4096) for length in expected}
    assert bonuses == pytest.approx(expected, abs=1e-12)
    assert [overlong_bonus(length, 10, 10) for length in (0, 5, 10)] == [0.0, -0.5, -1.0], "all of it cache"


@pytest.mark.parametrize(("weight", "findings"), [(1.0, 1), (0.0, 0)])
def test_the_cache_is_compared_with_the_smallest_budget_of_a_trained_domain(
    weight: float, findings: int
) -> None:
    long_answers = Domain(task=mdp.LetterTask())
    short_answers = Domain(task=mdp.LetterTask(), weight=weight, max_tokens=10)
    mixture = Mixture(domains={"long": long_answers, "short": short_answers})
    experiment: Any = SimpleNamespace(rollout=SingleTurn(samples=4, max_tokens=100), task=mixture)
    assert not list(OverlongPenalty(cache=10).check(experiment))
    all_findings = list(OverlongPenalty(cache=11).check(experiment))
    assert len(all_findings) == findings
    assert all("the smallest max_tokens of a domain is 10" in finding.what for finding in all_findings)


def test_the_length_penalty_is_that_of_kimi() -> None:
    lengths, right = [100, 200, 300, 100, 300], [True, True, True, False, False]
    assert length_bonuses(lengths, right) == [0.5, 0.0, -0.5, 0.0, -0.5]


groups = st.lists(st.tuples(st.integers(1, 10**6), st.booleans()), min_size=1, max_size=12)


@given(groups)
def test_a_length_penalty_never_rewards_wrong_answers_nor_prefers_longer_ones(
    group: list[tuple[int, bool]],
) -> None:
    lengths, right = [length for length, _ in group], [ok for _, ok in group]
    bonuses = length_bonuses(lengths, right)
    assert all(-0.5 <= bonus <= 0.5 for bonus in bonuses)
    assert all(ok or bonus <= 0.0 for bonus, ok in zip(bonuses, right, strict=True))
    for kind in (True, False):
        lengths_and_costs = sorted(
            (length, -bonus) for length, bonus, ok in zip(lengths, bonuses, right) if ok is kind
        )
        costs = [cost for _, cost in lengths_and_costs]
        assert costs == sorted(costs)
    if len(set(lengths)) == 1:
        assert set(bonuses) == {0.0}


def roll_out_with_shaping(context: RolloutContext) -> tuple[list[Trajectory], Metrics]:
    trajectories, metrics = answered(SINGLE_TURN.run(context, mdp.problems(5)))
    earned, changed = answered(apply_shaping(context, BOTH, trees_of(trajectories)))
    return earned, metrics | changed


def test_bonuses_add_up_and_the_score_stays_as_it_is() -> None:
    trajectories, _ = mdp.roll_out(SINGLE_TURN, 5)
    earned, metrics = roll_out_with_shaping(mdp.context())
    parts = [shaping.bonuses(mdp.context(), trajectories) for shaping in BOTH]
    for before, after, overlong, length in zip(trajectories, earned, *parts, strict=True):
        assert after == replace(before, bonus=overlong + length)
        assert (after.score, after.reward) == (
            before.reward,
            pytest.approx(before.reward + overlong + length),
        )
    assert len({answer.bonus for answer in earned}) > 3
    expected = {
        "shaping/overlong_penalty": sum(parts[0]) / 20,
        "shaping/length_penalty": sum(parts[1]) / 20,
        "episodes/score": sum(answer.score for answer in trajectories) / 20,
        "episodes/reward": sum(answer.reward for answer in earned) / 20,
        "episodes/reward_std": float(np.std([answer.reward for answer in earned])),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_shaping_is_the_same_for_any_number_of_ranks(world_size: int) -> None:
    mdp.assert_ranks_agree(world_size, roll_out_with_shaping, engine=mdp.TabularEngine)


def test_a_length_penalty_can_begin_at_a_later_iteration() -> None:
    trajectories, _ = mdp.roll_out(SINGLE_TURN, 5)
    later = LengthPenalty(from_iteration=4)
    assert set(later.bonuses(mdp.context(iteration=3), trajectories)) == {0.0}
    assert set(later.bonuses(mdp.context(iteration=4), trajectories)) != {0.0}


def test_without_shaping_nothing_changes_and_no_rank_waits() -> None:
    trajectories, _ = mdp.roll_out(SINGLE_TURN, 2)
    assert answered(apply_shaping(mdp.context(ranks=None), (), trees_of(trajectories))) == (trajectories, {})
