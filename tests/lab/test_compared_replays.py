"""Two trainings of the same iteration are compared on what both of them did."""

from __future__ import annotations

import pytest
import torch

from treetune.lab.analyzers.replay import ReplayedStep, compare_steps
from treetune.vocabulary import Episode


def step(trained: list[bool], advantages: list[float]) -> ReplayedStep:
    """A training on one answer of four tokens."""
    episode = Episode(
        prompt_ids=[1],
        response_ids=[2, 3, 4, 5],
        trained=trained,
        reward=1.0,
        group="train/0",
        trajectory="train/0#0",
        policy_version=0,
        advantages=advantages,
    )
    return ReplayedStep([episode], torch.ones(1), torch.ones(1), {}, None, None, None, 0)


def test_advantages_are_correlated_over_the_tokens_that_both_train() -> None:
    own = step([True, True, True, True], [1.0, 2.0, 3.0, -9.0])
    other = step([True, True, True, False], [2.0, 4.0, 6.0, 0.0])
    for steps in ({"own": own, "other": other}, {"own": other, "other": own}):
        assert compare_steps(steps)["correlation_of_advantages"] == pytest.approx(1.0)


def test_advantages_of_trainings_without_a_common_token_have_no_correlation() -> None:
    own, other = step([True, False] * 2, [1.0] * 4), step([False, True] * 2, [2.0] * 4)
    assert compare_steps({"own": own, "other": other})["correlation_of_advantages"] is None
