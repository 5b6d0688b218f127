"""What several turns can't go with is refused before anything starts, with what would do instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import treetune.parts  # noqa: F401  (registers them)
from treetune.config.build import build
from treetune.config.errors import ConfigError
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.contracts import Turns
from treetune.runtime.base import PolicyIteration, Runtime

GAME = "multi_turn/maze.jsonnet"
TOOLS = "multi_turn/qwen2.5-1.5b-instruct_python_GSM8K.jsonnet"
VALUES = "{credit: {type: 'monte_carlo', samples: 3, states: {type: 'turns'}}}"


def built(file: str, *changes: str) -> PolicyIteration:
    config = load([file], list(changes), environ={})
    root = build(Runtime, config.data, Explanation(config))
    assert isinstance(root, PolicyIteration)
    return root


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            GAME,
            ["{credit: {type: 'monte_carlo', samples: 3}}"],
            "turns have an environment's words between them.*'turns'} for turns",
        ),
        (
            GAME,
            [VALUES, "{task+: {environment: {type: 'gem', id: 'x', again: 'never'}}}"],
            "can neither be copied nor played again",
        ),
        (
            GAME,
            [VALUES, "{rollout: {type: 'single_turn', max_tokens: 9}}"],
            "choose the rollout 'multi_turn'",
        ),
        (
            GAME,
            ["{task: {type: 'addition_chain', count: 3}}"],
            "lacks an environment, and the task has none.*type: 'tools'",
        ),
        (GAME, ["{task+: {environment: {type: 'tools', tools: [{type: 'python'}]}}}"], 'no game "tools"'),
        (GAME, ["{rollout+: {turn_tokens: 500}}"], "turn_tokens is 500, which no turn reaches"),
        (GAME, ["{rollout+: {observation_format: 'so'}}"], "leaves the observation out"),
        (GAME, ["{rollout+: {stop: ['']}}"], "end at once all that is sampled"),
        (TOOLS, ["{rollout+: {environment+: {tools: []}}}"], "at least 1"),
        (TOOLS, ["{rollout+: {environment+: {call: '('}}}"], "no regular expression"),
    ],
)
def test_what_can_not_go_with_turns_says_what_can(file: str, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(file, *changes)
    assert re.search(message, " ".join(str(caught.value).split()))


@pytest.mark.parametrize(
    "credit",
    [
        "{credit: {type: 'rloo'}}",
        "{credit: {type: 'gae'}}",
        VALUES,
        "{credit: {type: 'monte_carlo', states: {type: 'turns'}, values: {type: 'siblings'}}}",
    ],
)
@pytest.mark.parametrize("file", [GAME, TOOLS])
def test_credit_that_is_made_for_turns_goes_with_games_and_tools(file: str, credit: str) -> None:
    assert Turns() in built(file, credit).rollout.gives


def test_what_an_environment_needs_and_is_not_there_is_told_before_a_run(tmp_path: Path) -> None:
    search = f"{{type: 'search', corpus: ['{tmp_path}/passages.jsonl']}}"
    told = built(TOOLS, f"{{rollout+: {{environment+: {{tools: [{search}]}}}}}}").missing_for_grades()
    assert told == [f"{tmp_path}/passages.jsonl isn't there, which is searched"]
