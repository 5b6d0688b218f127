"""What a server is told on its way up, and which settings are refused."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treetune.inference import key
from treetune.inference.base import Engine, EngineLaunch, Rendezvous
from treetune.inference.client import KEEP_ALIVE_S
from treetune.inference.engine import start_engine
from treetune.inference.launch import ServerLaunch
from treetune.inference.server import start_servers
from treetune.inference.settings import EngineSettings, VllmSettings

RUN = EngineLaunch(Path("/weights"), Path("/logs"), seed=3, context_length=256)


def launch(device: str = "cpu", rank: int = 0, world_size: int = 1, **settings: object) -> ServerLaunch:
    run = replace(RUN, device=device, ranks=Rendezvous(rank, world_size))
    return ServerLaunch(VllmSettings(**settings), run)  # type: ignore[arg-type]


def with_run(own: ServerLaunch, **changes: Any) -> ServerLaunch:
    return replace(own, run=replace(own.run, **changes))


def test_a_server_listens_to_this_machine_alone() -> None:
    command = launch().command(Path("/weights"), 1234)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "1234"


def test_a_server_closes_no_connection_that_the_client_may_still_use() -> None:
    environment = launch().environment(Path("/scratch"), {})
    assert float(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 10 * KEEP_ALIVE_S


def answers_of(headers: list[tuple[bytes, bytes]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses that a request with these headers gets, where the app behind the key answers 200."""
    monkeypatch.setenv(key.VARIABLE, "secret")
    sent: list[int] = []

    async def send(message: Mapping[str, Any]) -> None:
        sent.extend([message["status"]] if "status" in message else [])

    async def app(scope: Mapping[str, Any], receive: Any, send: key.Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    scope = {"type": "http", "path": "/collective_rpc", "headers": headers}
    asyncio.run(key.KeyRequired(app)(scope, None, send))
    return sent


def test_a_server_answers_those_alone_who_know_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [(name.lower().encode(), value.encode()) for name, value in key.header("secret").items()]
    assert answers_of(known, monkeypatch) == [200]
    assert answers_of([], monkeypatch) == [401]
    assert answers_of([(b"authorization", b"Bearer other")], monkeypatch) == [401]
    command = launch().command(Path("/weights"), 1)
    module, name = command[command.index("--middleware") + 1].rsplit(".", 1)
    assert getattr(importlib.import_module(module), name) is key.KeyRequired


def test_servers_take_answers_before_continuations_and_nobody_tells_them_otherwise() -> None:
    command = launch().command(Path("/weights"), 1)
    assert command[command.index("--scheduling-policy") + 1] == "priority"
    experiment: Any = SimpleNamespace(context_length=256, model=SimpleNamespace(longest=None))
    other = VllmSettings(extra_arguments=("--scheduling-policy", "fcfs"))
    assert [one.key for one in other.check(experiment)] == ["extra_arguments"]
    assert not list(VllmSettings().check(experiment))


@pytest.mark.parametrize(
    ("settings", "send", "remedy"),
    [
        ({"weight_transfer": "nccl"}, "merged", "name its devices"),
        ({"weight_transfer": "cuda_ipc", "tensor_parallel_size": 2}, "merged", "tensor_parallel_size to 1"),
        ({"weight_transfer": "shared_memory"}, "adapters", "trainer.lora.send to 'merged'"),
        ({"weight_transfer": "shared_memory"}, "merged", None),
        ({"weight_transfer": "nccl", "devices": (1,)}, "merged", None),
    ],
)
def test_a_way_of_weights_that_can_not_be_is_found_before_anything_starts(
    settings: dict[str, Any], send: str, remedy: str | None
) -> None:
    experiment: Any = SimpleNamespace(
        context_length=256,
        model=SimpleNamespace(longest=None),
        trainer=SimpleNamespace(lora=SimpleNamespace(send=send)),
    )
    found = list(VllmSettings(**settings).check(experiment))
    assert [one.key for one in found] == ([] if remedy is None else ["weight_transfer"])
    assert all(remedy in one.remedy for one in found if remedy)


def test_a_model_that_is_not_trained_is_served_as_it_is_on_disk() -> None:
    trained = launch()
    served = replace(trained, is_trained=False)
    assert "--hf-overrides" in trained.command(Path("/weights"), 1)
    assert "--hf-overrides" not in served.command(Path("/weights"), 1), "its head may be its embeddings"
    assert "VLLM_SERVER_DEV_MODE" in trained.environment(Path("/scratch"), {})
    assert "VLLM_SERVER_DEV_MODE" not in served.environment(Path("/scratch"), {})


def test_precision_follows_the_device_unless_set() -> None:
    for one, wanted in [
        (launch(), "float32"),
        (launch("cuda"), "bfloat16"),
        (launch(dtype="float16"), "float16"),
    ]:
        command = one.command(Path("/weights"), 1)
        assert command[command.index("--dtype") + 1] == wanted


def test_the_canary_is_as_strict_as_the_precision_allows() -> None:
    assert VllmSettings().tolerance("cpu") == (1e-4, 1e-4)
    assert VllmSettings().tolerance("cuda") == (5e-2, 2.0)
    assert VllmSettings(dtype="float32").tolerance("cuda") == (1e-4, 1e-2)
    assert VllmSettings(canary_tolerance=0.3).tolerance("cpu") == (0.3, 0.3)


def test_float32_on_a_gpu_is_not_rounded_to_tf32() -> None:
    def said(device: str, **settings: object) -> str | None:
        return launch(device, **settings).environment(Path("/s"), {}).get("TRITON_F32_DEFAULT")

    assert said("cuda", dtype="float32") == "ieee"
    assert said("cuda") is None, "bfloat16 has no such thing"
    assert said("cpu") is None


def test_nothing_of_the_training_launcher_reaches_the_server() -> None:
    inherited = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "SLURM_JOB_ID": "7", "HOME": "/h"}
    environment = launch().environment(Path("/scratch"), inherited)
    assert environment["HOME"] == "/h"
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_JOB_ID"} & set(environment)


def test_no_key_of_the_user_reaches_the_server() -> None:
    mine = {"HF_TOKEN": "1", "WANDB_API_KEY": "2", "AWS_SECRET_ACCESS_KEY": "3", "db_password": "4"}
    needed = {"TOKENIZERS_PARALLELISM": "false", "HF_HOME": "/cache", "KEYBOARD": "us", "PATH": "/bin"}
    found = launch().environment(Path("/tmp/scratch"), {**mine, **needed})
    assert not mine.keys() & found.keys()
    assert needed.items() <= found.items()


def test_threads_inherited_from_the_trainer_are_not_the_servers() -> None:
    environment = launch(omp_threads=3).environment(Path("/scratch"), {"OMP_NUM_THREADS": "1"})
    assert environment["OMP_NUM_THREADS"] == "3"


def test_each_rank_has_a_server_on_its_own_gpus() -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "LOCAL_RANK": "1"}
    two = launch("cuda", rank=1, world_size=2, servers="per_rank", tensor_parallel_size=2)
    assert two.environment(Path("/s"), inherited)["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_one_server_takes_the_gpus_that_are_named() -> None:
    own = launch("cuda", devices=(2, 3), tensor_parallel_size=2)
    environment = own.environment(Path("/s"), {"CUDA_VISIBLE_DEVICES": "a,b,c,d"})
    assert environment["CUDA_VISIBLE_DEVICES"] == "c,d"


def test_more_gpus_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"needs GPUs \[0, 1\], and this process sees 1"):
        launch("cuda", tensor_parallel_size=2).environment(Path("/s"), {"CUDA_VISIBLE_DEVICES": "0"})


def test_devices_that_tensor_parallelism_does_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match="doesn't divide"):
        VllmSettings(servers="per_rank", devices=(0, 1, 2), tensor_parallel_size=2)


def test_sleep_on_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frees nothing"):
        start_engine(VllmSettings(sleep=True), replace(RUN, logs=tmp_path))


def test_several_ranks_without_a_place_to_meet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rendezvous"):
        start_engine(VllmSettings(), replace(RUN, logs=tmp_path, ranks=Rendezvous(1, 2)))


def test_an_engine_of_ones_own_is_started_by_the_function_that_it_registers() -> None:
    class Mine(EngineSettings):
        """Not registered as a part: other tests list those."""

    with pytest.raises(TypeError, match="no function is registered in start_engine for settings Mine"):
        start_engine(Mine(), RUN)
    made = Engine()
    start_engine.register(Mine, lambda settings, launch: made)
    assert start_engine(Mine(), RUN) is made
    with pytest.raises(ValueError, match="a judge is asked over HTTP"):
        start_servers(Mine(), RUN, Path("/logs/judge.log"))


def test_devices_that_are_listed_twice_or_not_at_all_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"a GPU twice: \[1, 1\]"):
        VllmSettings(devices=(1, 1), tensor_parallel_size=2)
    with pytest.raises(ValueError, match="devices lists no GPU"):
        VllmSettings(devices=())


def test_adapters_are_served_as_the_policy_on_the_model_that_they_belong_to(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/start"}')
    own = with_run(launch(), adapter_rank=12)
    command = own.command(tmp_path, 1)
    assert command[command.index("--model") + 1] == "/start"
    assert command[command.index("--max-lora-rank") + 1] == "16", "vLLM knows only some"
    assert f"policy={tmp_path}" in command
    assert "policy" not in command, "the model itself has another name"
    with pytest.raises(ValueError, match="rank 512 at most"):
        with_run(launch(), adapter_rank=513).command(tmp_path, 1)


def test_batch_invariance_is_asked_for_on_gpus() -> None:
    on = launch("cuda", batch_invariant=True).environment(Path("/s"), {})
    assert on["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in launch("cuda").environment(Path("/s"), {})


EVERYTHING_ON_A_GPU = {
    "sleep": True,
    "batch_invariant": True,
    "dtype": "float32",
    "tensor_parallel_size": 2,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
}


def test_what_a_server_on_a_gpu_is_told_is_what_this_vllm_knows(tmp_path: Path) -> None:
    """Its own parser, and its own table of variables, in the build for CPUs of the same version."""
    from vllm import envs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/start"}')
    transfers = [{"transfer": method} for method in ("cuda_ipc", "nccl", "shared_memory")]
    for run in ({}, {"adapter_rank": 12}, *transfers):
        for settings in ({}, EVERYTHING_ON_A_GPU):
            command = with_run(launch("cuda", **settings), **run).command(tmp_path, 1234)
            arguments = command[command.index("-m") + 2 :]
            known, unknown = parser.parse_known_args(arguments)
            assert unknown == []
            assert known.enable_sleep_mode is bool(settings)
            assert (known.weight_transfer_config is not None) == ("transfer" in run)
    everything = with_run(launch("cuda", **EVERYTHING_ON_A_GPU), adapter_rank=8, transfer="cuda_ipc")
    environment = everything.environment(Path("/s"), {})
    own = {name for name in environment if name.startswith("VLLM_")}
    assert own <= set(envs.environment_variables)
    assert {"VLLM_SERVER_DEV_MODE", "VLLM_BATCH_INVARIANT", "VLLM_ALLOW_INSECURE_SERIALIZATION"} <= own
