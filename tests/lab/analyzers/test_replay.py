"""The comparison of two trainings of one iteration.

These tests promise that advantages are compared over exactly the tokens that both trainings train.
"""

from __future__ import annotations

import pytest
import torch

from treetune.lab.analyzers.replay import ReplayedStep, compare_steps
from treetune.vocabulary import Episode


def make_training(trained: list[bool], advantages: list[float]) -> ReplayedStep:
    """Returns a training on one answer of four tokens."""
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
    first = make_training([True, True, True, True], [1.0, 2.0, 3.0, -9.0])
    second = make_training([True, True, True, False], [2.0, 4.0, 6.0, 0.0])
    for steps in ({"own": first, "other": second}, {"own": second, "other": first}):
        assert compare_steps(steps)["correlation_of_advantages"] == pytest.approx(1.0)


def test_advantages_of_trainings_without_a_common_token_have_no_correlation() -> None:
    first, second = make_training([True, False] * 2, [1.0] * 4), make_training([False, True] * 2, [2.0] * 4)
    assert compare_steps({"own": first, "other": second})["correlation_of_advantages"] is None
