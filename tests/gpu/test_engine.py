"""An engine on a GPU.

The tests hold that new weights arrive by every transfer, that samples after a sleep are those from before,
and that memory is free while the engine sleeps and after it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open

from tests.engine.test_vllm_server import CONTEXT, Policy, policy, requests
from tests.gpu.conftest import ON_A_GPU, rehearse_if_asked
from treetune.engine.base import Chunk, EngineLaunch
from treetune.engine.engine import VllmEngine, start_engine
from treetune.engine.requests import Request
from treetune.engine.settings import VllmSettings

pytestmark = [pytest.mark.server, pytest.mark.slow]
SHARE = 0.3
"""The engine's share of the GPU's memory."""


class Served(NamedTuple):
    """An engine, the policies that it serves by version, and the free memory before its start."""

    engine: VllmEngine
    policies: list[Policy]
    device: str
    free_before: int


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def start(device: str, policies: list[Policy], logs: Path, transfer: Any, **settings: Any) -> VllmEngine:
    defaults: dict[str, Any] = {"omp_threads": 1, "replicas": 1, "dtype": "float32", "start_timeout": 400.0}
    if device == "cuda":
        defaults |= {"gpu_memory_utilization": SHARE, "sleep": True}
    launch = EngineLaunch(
        policies[0].folder, logs, seed=0, context_length=CONTEXT, device=device, transfer=transfer
    )
    engine = start_engine(VllmSettings(**defaults | settings), launch)
    assert isinstance(engine, VllmEngine)
    engine.wait_ready()
    return engine


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    folder = tmp_path_factory.mktemp("weights")
    return [policy(folder / str(seed), seed) for seed in range(3)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def served(
    request: pytest.FixtureRequest, policies: list[Policy], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    if request.param == "cpu":
        rehearse_if_asked(request.config)
    before = free_bytes()
    transfer = "cuda_ipc" if request.param == "cuda" else "shared_memory"
    engine = start(request.param, policies, tmp_path_factory.mktemp("logs"), transfer)
    yield Served(engine, policies, request.param, before)
    engine.close()


def canary(served: Served, version: int) -> Any:
    return replace(
        served.policies[version].canary(), tolerance=VllmSettings(dtype="float32").tolerance(served.device)
    )


def chunks(served: Served, version: int, folder: Path) -> Iterator[Chunk]:
    weights = dict(served.policies[version].model.named_parameters())
    for chunk in served.policies[version].chunks(folder):
        with safe_open(chunk.path, "pt") as file:
            names = list(file.keys())
        yield replace(chunk, tensors={name: weights[name].detach().to(served.device) for name in names})


def test_new_weights_are_loaded_from_files(served: Served) -> None:
    for version in (1, 2, 0):
        report = served.engine.load(served.policies[version].folder, version, canary(served, version))
        assert report.restarts == 0


def test_new_weights_are_loaded_in_chunks(served: Served, tmp_path: Path) -> None:
    """Chunks come by CUDA IPC on a GPU, and through /dev/shm on a CPU."""
    for version in (1, 2):
        folder = tmp_path / str(version)
        report = served.engine.load(folder, version, canary(served, version), chunks(served, version, folder))
        assert report.restarts == 0


def tokens_of(engine: VllmEngine, sampled: list[Request]) -> list[list[Any]]:
    tokens = []
    for completions in engine.generate(sampled):
        tokens.append([completion.token_ids.tolist() for completion in completions])
    return tokens


@pytest.mark.parametrize("keep_weights", [True, False], ids=["kept", "dropped"])
def test_an_engine_frees_its_memory_while_it_sleeps_and_samples_as_before(
    served: Served, keep_weights: bool
) -> None:
    served.engine.load(served.policies[1].folder, 1, canary(served, 1))
    sampled, awake = requests(4), free_bytes()
    before = tokens_of(served.engine, sampled)
    with served.engine.asleep(keep_weights=keep_weights):
        if served.device == "cuda":
            gpu_bytes = torch.cuda.mem_get_info()[1]
            assert free_bytes() - awake > 0.8 * SHARE * gpu_bytes - 2**31, (
                "most of the engine's share is free"
            )
    if not keep_weights:
        report = served.engine.load(served.policies[1].folder, 1, canary(served, 1))
        assert report.restarts == 0
    assert tokens_of(served.engine, sampled) == before


def test_the_engines_memory_is_free_after_its_end(served: Served) -> None:
    """This must be the last test with the module's engine, since it closes it."""
    served.engine.close()
    assert served.free_before - free_bytes() < 2**29


@ON_A_GPU
def test_batch_invariant_kernels_give_the_same_tokens_for_the_same_seeds(
    policies: list[Policy], tmp_path: Path
) -> None:
    engine = start("cuda", policies, tmp_path, "file", batch_invariant=True, dtype="bfloat16")
    try:
        sampled = requests(24)
        together = tokens_of(engine, sampled)
        alone = [tokens_of(engine, [request])[0] for request in sampled[:3]]
        assert alone == together[:3]
    finally:
        engine.close()


@ON_A_GPU
def test_new_weights_are_sent_to_another_gpu_by_nccl(policies: list[Policy], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: NCCL can't connect it with itself")
    engine = start("cuda", policies, tmp_path, "nccl", devices=(1,), sleep=False)
    served = Served(engine, policies, "cuda", 0)
    try:
        for version in (1, 2):
            folder = tmp_path / str(version)
            report = engine.load(folder, version, canary(served, version), chunks(served, version, folder))
            assert report.restarts == 0
    finally:
        engine.close()
