from __future__ import annotations

from treetune.episode_generators.selection.all import All
from treetune.episode_generators.selection.correct_only import CorrectOnly
from treetune.episode_generators.selection.mixed_groups import MixedGroups
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
    kept, metrics = All().select(EPISODES)
    assert kept == EPISODES
    assert metrics["selection/kept"] == metrics["selection/episodes"] == 9


def test_correct_only_keeps_answers_that_reach_the_threshold() -> None:
    assert names(CorrectOnly().select(EPISODES)[0]) == ["easy#0", "easy#1", "easy#2", "fair#1"]
    assert names(CorrectOnly(reward_threshold=0.5).select(EPISODES)[0])[-2:] == ["fair#1", "fair#2"]


def test_correct_only_takes_the_first_answers_of_each_problem_up_to_the_cap() -> None:
    kept, metrics = CorrectOnly(max_per_problem=2).select(EPISODES)
    assert names(kept) == ["easy#0", "easy#1", "fair#1"]
    assert metrics["selection/groups_capped"] == 1


def test_mixed_groups_drops_problems_whose_answers_all_earned_the_same() -> None:
    kept, metrics = MixedGroups().select(EPISODES)
    assert names(kept) == ["fair#0", "fair#1", "fair#2"]
    assert (metrics["selection/groups"], metrics["selection/groups_kept"]) == (3, 1)


def test_an_empty_choice_is_returned_as_such_with_its_metrics() -> None:
    for selection in (CorrectOnly(reward_threshold=2.0), MixedGroups(), All()):
        episodes = [] if isinstance(selection, All) else EPISODES[:3]
        kept, metrics = selection.select(episodes)
        assert kept == []
        assert metrics["selection/kept"] == 0
