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

from treetune.contracts import Finding
from treetune.engine.settings import VllmSettings
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


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ({"rollout": SimpleNamespace(temperature=0.005)}, "$.rollout.temperature"),
        ({"credit": SimpleNamespace(temperature=0.005)}, "$.credit.temperature"),
        (
            {
                "evaluation": SimpleNamespace(
                    rollout=None, sets=[SimpleNamespace(temperature=None), SimpleNamespace(temperature=0.001)]
                )
            },
            "$.evaluation.sets.1.temperature",
        ),
    ],
)
def test_temperatures_that_vllm_would_raise_are_refused(part: dict[str, Any], key: str) -> None:
    experiment = experiment_with(**part)
    (finding,) = VllmSettings().check(experiment)
    assert finding.key == key and "0.01" in finding.what and finding.remedy


@pytest.mark.parametrize("temperature", [0, 0.01, 0.6, 1.0, None])
def test_other_temperatures_pass(temperature: float | None) -> None:
    assert not list(VllmSettings().check(experiment_with(rollout=SimpleNamespace(temperature=temperature))))


def experiment_with(**parts: Any) -> Any:
    plain = {
        "context_length": 64,
        "model": SimpleNamespace(longest=None),
        "trainer": SimpleNamespace(lora=None),
        "rollout": SimpleNamespace(temperature=1.0),
        "credit": SimpleNamespace(),
        "evaluation": SimpleNamespace(rollout=None, sets=[]),
    }
    return SimpleNamespace(**plain | parts)
