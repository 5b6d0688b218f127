from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.rollouts import tabular_mdp as mdp
from treetune.rollouts.base import Selection
from treetune.rollouts.selection import All, CorrectOnly, MixedGroups, PreferencePairs, SomeTokens
from treetune.vocabulary import Episode


def episode(group: str, sample: int, reward: float) -> Episode:
    return Episode(
        prompt_ids=(1,),
        response_ids=(2,),
        trained=(True,),
        reward=reward,
        group=group,
        trajectory=f"{group}#{sample}",
        policy_version=0,
    )


EPISODES = [
    episode(group, sample, reward)
    for group, rewards in {"easy": (1.0, 1.0, 1.0), "fair": (0.0, 1.0, 0.5), "hard": (0.0, 0.0, 0.0)}.items()
    for sample, reward in enumerate(rewards)
]


def names(episodes: list[Episode]) -> list[str]:
    return [e.trajectory for e in episodes]


def test_all_keeps_every_episode_in_order() -> None:
    kept, metrics = All().select(mdp.context(), EPISODES)
    assert kept == EPISODES
    assert metrics["selection/kept"] == metrics["selection/episodes"] == 9


def test_correct_only_keeps_answers_that_reach_the_threshold() -> None:
    assert names(CorrectOnly().select(mdp.context(), EPISODES)[0]) == ["easy#0", "easy#1", "easy#2", "fair#1"]
    assert names(CorrectOnly(reward_threshold=0.5).select(mdp.context(), EPISODES)[0])[-2:] == [
        "fair#1",
        "fair#2",
    ]


def test_correct_only_takes_the_first_answers_of_each_problem_up_to_the_cap() -> None:
    kept, metrics = CorrectOnly(max_per_problem=2).select(mdp.context(), EPISODES)
    assert names(kept) == ["easy#0", "easy#1", "fair#1"]
    assert metrics["selection/groups_capped"] == 1


def test_mixed_groups_drops_problems_whose_answers_all_earned_the_same() -> None:
    kept, metrics = MixedGroups().select(mdp.context(), EPISODES)
    assert names(kept) == ["fair#0", "fair#1", "fair#2"]
    assert (metrics["selection/groups"], metrics["selection/groups_kept"]) == (3, 1)


def test_of_the_mixed_groups_the_first_ones_are_kept_and_the_others_counted() -> None:
    kept, metrics = MixedGroups(at_most=2).select(
        mdp.context(),
        [
            *EPISODES,
            *(episode(name, sample, float(sample)) for name in ("c", "a", "b") for sample in range(2)),
        ],
    )
    assert names(kept) == ["fair#0", "fair#1", "fair#2", "c#0", "c#1"]
    assert metrics["selection/groups_dropped"] == pytest.approx(2 / 6)
    assert metrics["selection/groups_surplus"] == 2


def pairs_of(rows: list[Episode]) -> list[tuple[str, str]]:
    """Names of better and other answer, as neighbours carry them."""
    for number, (better, other) in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        assert (better.pair, better.chosen, other.pair, other.chosen) == (number, True, number, False)
    return [(better.trajectory, other.trajectory) for better, other in zip(rows[::2], rows[1::2])]


def test_pairs_are_all_right_answers_against_all_wrong_ones_to_the_same_problem() -> None:
    rows, metrics = PreferencePairs(reward_threshold=0.5).select(mdp.context(), EPISODES)
    assert pairs_of(rows) == [("fair#1", "fair#0"), ("fair#2", "fair#0")]
    rows, _ = PreferencePairs(reward_threshold=1.0).select(mdp.context(), EPISODES)
    assert pairs_of(rows) == [("fair#1", "fair#0"), ("fair#1", "fair#2")]
    assert (metrics["selection/pairs"], metrics["selection/groups_kept"], metrics["selection/kept"]) == (
        2,
        1,
        3,
    )


SHAPED = [
    replace(one, reward=reward)
    for one, reward in zip(EPISODES, (0.2, 1.0, 0.6, 1.0, 0.1, 0.7, 0.0, 0.9, 1.4), strict=True)
]
"""The same verdicts, and rewards that would choose others."""


@pytest.mark.parametrize("selection", [CorrectOnly(), MixedGroups(), PreferencePairs()])
def test_what_is_right_is_the_score_s_to_say_whatever_shaping_gave(selection: Selection) -> None:
    kept, metrics = selection.select(mdp.context(), SHAPED)
    expected, the_same = selection.select(mdp.context(), EPISODES)
    assert names(kept) == names(expected)
    assert metrics == the_same


MIXED = [episode(group, sample, float(sample % 2)) for group in ("one", "two") for sample in range(12)]


def test_of_too_many_pairs_a_draw_is_taken_that_is_its_problem_s_own() -> None:
    selection = PreferencePairs(max_pairs_per_problem=5)

    def drawn(episodes: list[Episode], **place: int) -> list[tuple[str, str]]:
        return pairs_of(selection.select(mdp.context(**place), episodes)[0])

    rows, metrics = selection.select(mdp.context(), MIXED)
    assert (metrics["selection/pairs"], metrics["selection/pairs_possible"]) == (10, 72)
    assert metrics["selection/groups_capped"] == 2
    assert len(set(pairs_of(rows))) == 10, "none is drawn twice"
    assert drawn(MIXED) == drawn(MIXED)
    assert drawn(MIXED[12:]) == drawn(MIXED)[5:], "whatever other problems there are"
    assert drawn(MIXED, iteration=4) != drawn(MIXED)
    assert drawn(MIXED, seed=2) != drawn(MIXED)


def test_every_pair_is_as_likely_as_any_other() -> None:
    selection = PreferencePairs(max_pairs_per_problem=9)
    counts: Counter[tuple[str, str]] = Counter()
    draws = 400
    for seed in range(draws):
        counts.update(pairs_of(selection.select(mdp.context(seed=seed), MIXED[:12])[0]))
    assert len(counts) == 36
    assert all(
        count == pytest.approx(draws / 4, abs=6 * (draws * 3 / 16) ** 0.5) for count in counts.values()
    )


def test_an_empty_choice_is_returned_as_such_with_its_metrics() -> None:
    for selection in (CorrectOnly(reward_threshold=2.0), PreferencePairs(), MixedGroups(), All()):
        episodes = [] if isinstance(selection, All) else EPISODES[:3]
        kept, metrics = selection.select(mdp.context(), episodes)
        assert kept == []
        assert metrics["selection/kept"] == 0


def test_tokens_keeps_unlikely_ones_with_an_advantage_and_leaves_out_answers_without_any() -> None:
    def answer(sample: int, advantages: tuple[float, ...]) -> Episode:
        return replace(
            episode("fair", sample, 1.0),
            response_ids=(2, 3, 4, 5),
            trained=(False, True, True, True),
            advantages=advantages,
            behaviour_logprobs=np.log([0.1, 0.89, 0.9, 0.5]),
        )

    given = [answer(0, (1.0, 1.0, 1.0, 0.0)), answer(1, (1.0, 0.0, 1.0, 0.0)), answer(2, (1.0,) * 4)]
    kept, metrics = SomeTokens().select(mdp.context(), given)
    assert {one.trajectory: one.trained.tolist() for one in kept} == {
        "fair#0": [False, True, False, False],
        "fair#2": [False, True, False, True],
    }
    assert metrics["selection/tokens"] == 3 / 9
    assert metrics["selection/kept"] == 2
