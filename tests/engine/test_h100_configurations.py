"""Every shipped experiment's server builds vLLM's whole configuration on a simulated H100.

The tests hold, for one, four and eight GPUs, that vLLM accepts the configuration and that it is what the
settings ask for. On a GPU, other code of vLLM samples (Model Runner V2) than on a CPU.
"""

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
from treetune.cluster.commands import find_shape
from treetune.engine.base import EngineLaunch, Rendezvous
from treetune.engine.launch import BACKEND_OF_METHOD, ServerLaunch
from treetune.engine.settings import VllmSettings
from treetune.models.shapes import Shape

PROGRAM = Path(__file__).with_name("simulated_h100_program.py")
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
    """Builds all shipped experiments that start a vLLM server, by the name of their file."""
    roots: dict[str, Any] = {}
    for name in whole_configurations():
        if name.startswith(("configs/tables/", "configs/data_pipelines/")):
            continue
        root = experiment_of(str(ROOT / name))
        if isinstance(root.engines.policy, VllmSettings):
            roots[name] = root
    return roots


@pytest.fixture(scope="module")
def server_starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The distinct commands and environments of servers, as JSON, with the experiments that use each."""
    folder = tmp_path_factory.mktemp("models")
    starts: dict[str, list[str]] = {}
    shapes: dict[str, Shape | None] = {}
    for name, root in experiments().items():
        if (model := repr(root.model)) not in shapes:
            shapes[model] = find_shape(root.model, root.task.alphabet)
        shape = shapes[model]
        assert shape is not None
        weights = folder / str([*shapes.values()].index(shape))
        # A tiny model has as many positions as its run needs.
        longest = next((positions for part, positions in LONGEST.items() if part in shape.source), 4096)
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
            variables = {key: value for key, value in environment.items() if key.startswith("VLLM_")}
            command = launch.command(weights, 8000)
            start = {"command": command[command.index("-m") + 2 :], "environment": variables}
            starts.setdefault(json.dumps(start), []).append(f"{name} on {count}")
    return starts


@pytest.fixture(scope="module")
def configurations(server_starts: dict[str, list[str]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], input=f"[{','.join(server_starts)}]", capture_output=True, text=True,
        timeout=300, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert len(results) == len(server_starts)
    return results


def test_every_shipped_experiment_builds_vllms_configuration_on_an_h100(
    server_starts: dict[str, list[str]], configurations: list[dict[str, Any]]
) -> None:
    refused, experiments = {}, set()
    for names, result in zip(server_starts.values(), configurations, strict=True):
        experiments |= {name.split(" on ")[0] for name in names}
        if "error" in result:
            refused[names[0]] = result["error"]
    assert refused == {}
    assert len(experiments) >= 100


def test_the_configuration_is_what_the_settings_ask_for(
    server_starts: dict[str, list[str]], configurations: list[dict[str, Any]]
) -> None:
    for (start, names), result in zip(server_starts.items(), configurations, strict=True):
        configuration, command = result["configuration"], " ".join(json.loads(start)["command"])
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
            "transfer": next((backend for backend in BACKEND_OF_METHOD.values() if backend in command), None),
            "tied": False,
        }
        assert {key: configuration[key] for key in expected} == expected, names[0]
        assert configuration["largest_graph"] >= settings.max_num_seqs, names[0]
