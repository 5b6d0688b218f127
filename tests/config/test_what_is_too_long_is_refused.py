"""Contexts, prompts, answers and budgets that don't fit into each other are told before anything starts."""

from __future__ import annotations

import pytest

from tests.config.refusals import GRPO, SFT, VINEPPO, assert_told

TOO_LONG = {
    "a cache beyond the budget": (
        GRPO,
        "{shaping: [{type: 'overlong_penalty', cache: 49}]}",
        "shaping.0.cache",
        "49 tokens",
    ),
    "a set's budget below its threads'": (
        "threadweaver/tiny/rl_parallel_published.jsonnet",
        "{rollout+: {thread_tokens: 9}, evaluation: {sets: [{split: 'test', max_tokens: 9}]}}",
        "evaluation.sets.0.max_tokens",
        "no thread reaches",
    ),
    "a set beyond the context": (
        VINEPPO,
        "{evaluation+: {sets: [{split: 'test', max_tokens: 5000}]}}",
        "evaluation.sets.0.max_tokens",
        "leaves no room",
    ),
    "answers beyond the context": (VINEPPO, "{context_length: 40}", "rollout.max_tokens", "leaves no room"),
    "prompts beyond the context": (
        VINEPPO,
        "{rollout+: {max_prompt_tokens: 5000}}",
        "rollout.max_prompt_tokens",
        "leaves nothing",
    ),
    "a model that is too short": (
        SFT,
        "{model+: {context_length: 100}}",
        "context_length",
        "made for 100 tokens",
    ),
    "an engine that is too short": (
        VINEPPO,
        "{engines+: { policy+: {context_length: 50} }}",
        "engines.policy.context_length",
        "is 50",
    ),
    "an engine beyond the model": (
        SFT,
        "{engines+: { policy+: {context_length: 300} }}",
        "engines.policy.context_length",
        "for 128 tokens",
    ),
    "a prompt beyond the context": (
        GRPO,
        "{model: {type: 'tiny'}, context_length: 50}",
        "rollout.max_tokens",
        "a prompt of 13 tokens",
    ),
    "prompts that are all left out": (
        GRPO,
        "{model: {type: 'tiny'}, rollout+: {max_prompt_tokens: 5}}",
        "rollout.max_prompt_tokens",
        "no problem would be left",
    ),
    "a demonstration beyond the context": (
        SFT,
        "{context_length: 30}",
        "context_length",
        "prompt and demonstration",
    ),
}


@pytest.mark.parametrize("too_long", TOO_LONG)
def test_what_does_not_fit_is_told_with_its_key_its_file_and_a_remedy(too_long: str) -> None:
    assert_told(*TOO_LONG[too_long])
