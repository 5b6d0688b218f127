"""Promises of `check` about pretrained models:

* it compares context_length with the context for which a model was made, with YaRN and learned positions;
* it refuses a context in which a row would depend on its neighbours, and temperatures that vLLM would raise.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.shipped import experiment_of, issues_of
from treetune.contracts import Finding
from treetune.models.pretrained import PretrainedModel


def findings(folder: Path, config: dict[str, Any], context_length: int) -> list[Finding]:
    (folder / "config.json").write_text(json.dumps(config))
    experiment: Any = SimpleNamespace(context_length=context_length)
    return list(PretrainedModel(name_or_path=str(folder)).check(experiment))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "context_length", "message"),
    [
        ({"max_position_embeddings": 64, "rope_parameters": YARN}, 256, None),
        ({"max_position_embeddings": 64, "rope_parameters": YARN}, 257, "made for 256 tokens"),
        ({"n_positions": 64}, 64, None),
        ({"n_positions": 64}, 65, "made for 64 tokens"),
        ({"max_position_embeddings": 256, "rope_parameters": LONGROPE}, 64, None),
        ({"max_position_embeddings": 256, "rope_parameters": LONGROPE}, 65, "LongRoPE"),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 64, None),
    ],
)
def test_a_context_fits_the_model_or_is_refused(
    tmp_path: Path, config: dict[str, Any], context_length: int, message: str | None
) -> None:
    messages = [finding.what for finding in findings(tmp_path, config, context_length)]
    if message is None:
        assert not messages
    else:
        assert any(message in each for each in messages)
        assert all(finding.remedy for finding in findings(tmp_path, config, context_length))


WEIGHTED = "type: 'weighted_by', weights: 'softmax'"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("{rollout+: {temperature: 0.005}}", "rollout.temperature"),
        ("{credit+: {temperature: 0.005}}", "credit.temperature"),
        (
            f"{{credit: {{{WEIGHTED}, over: {{type: 'monte_carlo', temperature: 0.005}}}}}}",
            "credit.over.temperature",
        ),
        ("{evaluation+: {sets: [{split: 'test', temperature: 0.005}]}}", "evaluation.sets.0.temperature"),
    ],
)
def test_temperatures_that_vllm_would_raise_are_refused(override: str, key: str) -> None:
    (issue,) = issues_of("quickstart/vineppo", override)
    assert issue.key == key and "0.01" in issue.what and issue.remedy


@pytest.mark.parametrize(
    "override",
    [
        "{rollout+: {temperature: 0.01}}",
        "{rollout+: {temperature: 0.6}}",
        "{credit+: {temperature: null}}",
        f"{{credit: {{{WEIGHTED}, temperature: 0.005}}}}",  # divides signals, and nothing is sampled with it
    ],
)
def test_other_temperatures_pass(override: str) -> None:
    experiment_of("quickstart/vineppo", override)
