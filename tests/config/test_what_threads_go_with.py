"""Parts that take an answer for one line are refused beside answers that fork, before anything starts."""

from __future__ import annotations

import re

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.errors import ConfigError
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.contracts import Forks
from treetune.runtime.base import PolicyIteration, Runtime

TINY = "threadweaver/tiny/rl_parallel_published.jsonnet"
MONTE_CARLO = "{shaping: [], credit: {type: 'monte_carlo', states: {type: 'threads'}, samples: 3}}"


def built(*changes: str, right: tuple[str, ...] = ()) -> PolicyIteration:
    config = load([TINY, *right], list(changes), environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    return root


@pytest.mark.parametrize(
    ("changes", "right", "message"),
    [
        (
            ["{shaping: [], credit: {type: 'monte_carlo'}}"],
            (),
            "don't see their siblings.*monte_carlo' with states",
        ),
        (["{credit: {type: 'gae'}}"], (), "don't see their siblings"),
        (
            [MONTE_CARLO, "{rollout+: {parallel: false}}"],
            (),
            "values the threads of answers.*parallel_threads",
        ),
        (
            [],
            ("analyzers/value_accuracy.jsonnet",),
            "value_accuracy' .it continues answers from their beginnings",
        ),
        (["{rollout+: {thread_tokens: 500}}"], (), "no thread reaches"),
        (["{trainer+: {layout: 'tree', sequence_parallel_size: 2}}"], (), "ranks can't share"),
    ],
)
def test_what_cannot_go_with_threads_says_what_can(
    changes: list[str], right: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        built(*changes, right=right)
    assert re.search(message, " ".join(str(caught.value).split()))


def test_the_credit_of_one_line_goes_with_the_sequential_baseline() -> None:
    built("{shaping: [], credit: {type: 'monte_carlo'}, rollout+: {parallel: false}}")
    built(MONTE_CARLO)
    mixed = built(right=("rollouts/until_mixed.jsonnet",))
    assert Forks() in mixed.rollout.gives
