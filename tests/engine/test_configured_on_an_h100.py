"""Every shipped experiment's server builds vLLM's whole configuration on a simulated H100, with one, four and
eight GPUs. What samples there (Model Runner V2) is not what samples on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.peak_memory import config_of
from tests.support.shipped import ROOT, experiment_of, whole_configurations
from treetune.cluster.commands import start_shape
from treetune.engine.base import EngineLaunch, Rendezvous
from treetune.engine.launch import BACKENDS, ServerLaunch
from treetune.engine.settings import VllmSettings
from treetune.models.shapes import Shape

PROGRAM = Path(__file__).with_name("on_a_simulated_h100.py")
RANKS = (1, 4, 8)

LONGEST = {
    "rho": 2048,
    "deepseek": 4096,
    "Qwen2.5-1.5B": 32_768,
    "Qwen2.5-3B": 32_768,
    "Qwen2.5-7B": 131_072,
    "Qwen2.5-32B": 131_072,
    "Qwen3-4B-Thinking": 262_144,
    "Qwen3-8B": 40_960,
}
"""Published positions (max_position_embeddings), by what the model's name has in it."""


def experiments() -> dict[str, Any]:
    """All with an engine of vLLM's, by file."""
    made = {
        name: experiment_of(str(ROOT / name))
        for name in whole_configurations()
        if not name.startswith(("configs/tables/", "configs/data_pipelines/"))
    }
    return {name: root for name, root in made.items() if isinstance(root.engines.policy, VllmSettings)}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The distinct starts of servers (as JSON), with the experiments that start one so."""
    folder = tmp_path_factory.mktemp("models")
    starts: dict[str, list[str]] = {}
    shapes: dict[str, Shape | None] = {}
    for name, root in experiments().items():
        if (model := repr(root.model)) not in shapes:
            shapes[model] = start_shape(root)
        shape = shapes[model]
        assert shape is not None
        weights = folder / str([*shapes.values()].index(shape))
        # A tiny model's is the run's.
        longest = next((positions for known, positions in LONGEST.items() if known in shape.source), 4096)
        config_of(shape, max_position_embeddings=longest).save_pretrained(weights)
        for count in RANKS:
            policy = root.engines.policy
            transfer, _ = policy.transfer_method(device="cuda", machines=["here"] * count, adapters=False)
            run = EngineLaunch(
                weights, Path("/logs"), seed=0, context_length=root.context_length, device="cuda",
                ranks=Rendezvous(count - 1, count), transfer=transfer,
            )  # fmt: skip
            launch = ServerLaunch(policy, run)
            there = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}
            environment = launch.environment(Path("/scratch"), there)
            own = {key: value for key, value in environment.items() if key.startswith("VLLM_")}
            command = launch.command(weights, 8000)
            start = {"command": command[command.index("-m") + 2 :], "environment": own}
            starts.setdefault(json.dumps(start), []).append(f"{name} on {count}")
    return starts


@pytest.fixture(scope="module")
def answers(asked: dict[str, list[str]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], input=f"[{','.join(asked)}]", capture_output=True, text=True,
        timeout=300, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == len(asked)
    return found


def test_every_shipped_experiment_builds_vllms_configuration_on_an_h100(
    asked: dict[str, list[str]], answers: list[dict[str, Any]]
) -> None:
    refused = {
        names[0]: one["error"] for names, one in zip(asked.values(), answers, strict=True) if "error" in one
    }
    assert refused == {}
    assert len({name.split(" on ")[0] for names in asked.values() for name in names}) >= 100


def test_it_is_what_the_settings_ask_for(asked: dict[str, list[str]], answers: list[dict[str, Any]]) -> None:
    for (start, names), answer in zip(asked.items(), answers, strict=True):
        told, command = answer["told"], json.loads(start)["command"]
        experiment = experiment_of(str(ROOT / names[0].split(" on ")[0]))
        settings = experiment.engines.policy
        assert isinstance(settings, VllmSettings)
        expected = {
            "runner": "V2",
            "async_scheduling": settings.async_scheduling,
            "policy": "priority",
            "chunked_prefill": True,
            "sequences": settings.max_num_seqs,
            "tokens": settings.max_num_batched_tokens,
            "graphs": "FULL_AND_PIECEWISE",
            "sleeps_by": "cumem" if settings.sleep else None,
            "dtype": settings.resolved_dtype("cuda"),
            "context": experiment.context_length,
            "prefix_caching": settings.caches_prefixes("cuda"),
            "gpus": settings.tensor_parallel_size,
            "transfer": next((BACKENDS[way] for way in BACKENDS if BACKENDS[way] in " ".join(command)), None),
            "tied": False,
        }
        assert {key: told[key] for key in expected} == expected, names[0]
        assert told["largest_graph"] >= settings.max_num_seqs, names[0]
