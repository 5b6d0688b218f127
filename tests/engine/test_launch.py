"""What a server is told on its way up, how many there are and where, how weights come in, and which settings
are refused."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treetune.engine import key
from treetune.engine.base import Engine, EngineLaunch, Rendezvous
from treetune.engine.client import KEEP_ALIVE_S
from treetune.engine.cuda_transfers import own_address
from treetune.engine.engine import start_engine
from treetune.engine.launch import ADAPTER_CONFIG, ServerLaunch, with_time_for
from treetune.engine.server import start_servers
from treetune.engine.settings import GIB, EngineSettings, VllmSettings, host_memory, servers_that_fill

RUN = EngineLaunch(Path("/weights"), Path("/logs"), seed=3, context_length=256)


def launch(device: str = "cpu", rank: int = 0, world_size: int = 1, **settings: object) -> ServerLaunch:
    run = replace(RUN, device=device, ranks=Rendezvous(rank, world_size))
    return ServerLaunch(VllmSettings(**settings), run)  # type: ignore[arg-type]


def with_run(own: ServerLaunch, **changes: Any) -> ServerLaunch:
    return replace(own, run=replace(own.run, **changes))


def option(own: ServerLaunch, name: str, weights: Path = Path("/weights")) -> str:
    command = own.command(weights, 1234)
    return command[command.index(f"--{name}") + 1]


def environment(own: ServerLaunch, **inherited: str) -> dict[str, str]:
    return own.environment(Path("/scratch"), inherited)


# The command and its environment

STAY = (
    *("RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_JOB_ID"),
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password"),
)
REACH = ("TOKENIZERS_PARALLELISM", "HF_HOME", "KEYBOARD", "PATH", "HOME")


@pytest.mark.parametrize(
    ("own", "name", "value"),
    [
        (launch(), "host", "127.0.0.1"),  # this machine alone
        (launch(), "port", "1234"),
        (launch(), "scheduling-policy", "priority"),  # answers before continuations
        (launch(), "dtype", "float32"),
        (launch("cuda"), "dtype", "bfloat16"),
        (launch(dtype="float16"), "dtype", "float16"),
    ],
)
def test_options_of_the_command(own: ServerLaunch, name: str, value: str) -> None:
    assert option(own, name) == value


@pytest.mark.parametrize(
    ("own", "inherited", "name", "value"),
    [
        # Float32 on a GPU is not rounded to TF32; bfloat16 has no such thing.
        (launch("cuda", dtype="float32"), {}, "TRITON_F32_DEFAULT", "ieee"),
        (launch("cuda"), {}, "TRITON_F32_DEFAULT", None),
        (launch(), {}, "TRITON_F32_DEFAULT", None),
        (launch("cuda", batch_invariant=True), {}, "VLLM_BATCH_INVARIANT", "1"),
        (launch("cuda"), {}, "VLLM_BATCH_INVARIANT", None),
        (launch("cuda"), {}, "VLLM_USE_FLASHINFER_SAMPLER", "0"),
        (launch("cuda"), {"VLLM_USE_FLASHINFER_SAMPLER": "1"}, "VLLM_USE_FLASHINFER_SAMPLER", "1"),
        # Threads inherited from the trainer are not the server's.
        (launch(omp_threads=3), {"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS", "3"),
        # GPUs: those that are named; each rank's own.
        (
            launch("cuda", devices=(2, 3), tensor_parallel_size=2),
            {"CUDA_VISIBLE_DEVICES": "a,b,c,d"},
            "CUDA_VISIBLE_DEVICES",
            "c,d",
        ),
        (
            launch("cuda", rank=1, world_size=2, servers="per_rank", tensor_parallel_size=2),
            {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "LOCAL_RANK": "1"},
            "CUDA_VISIBLE_DEVICES",
            "6,7",
        ),
        (
            replace(launch("cuda", rank=1, world_size=2, servers="per_rank", replicas=2), replica=1),
            {"LOCAL_RANK": "1"},
            "CUDA_VISIBLE_DEVICES",
            "3",
        ),
        # Neither the training launcher's variables nor keys of the user; what only looks like one does.
        *((launch(), {name: "1"}, name, None) for name in STAY),
        *((launch(), {name: "1"}, name, "1") for name in REACH),
    ],
)
def test_variables_of_its_environment(
    own: ServerLaunch, inherited: dict[str, str], name: str, value: str | None
) -> None:
    assert environment(own, **inherited).get(name) == value


def test_a_server_closes_no_connection_that_the_client_may_still_use() -> None:
    assert float(environment(launch())["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 10 * KEEP_ALIVE_S


def test_a_model_that_is_not_trained_is_served_as_it_is_on_disk() -> None:
    for is_trained in (True, False):
        own = replace(launch(), is_trained=is_trained)
        assert ("--hf-overrides" in own.command(Path("/weights"), 1)) == is_trained, "its head may be tied"
        assert ("VLLM_SERVER_DEV_MODE" in environment(own)) == is_trained


def test_adapters_are_served_as_the_policy_on_the_model_that_they_belong_to(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/start"}')
    own = with_run(launch(), adapter_rank=12)
    assert option(own, "model", tmp_path) == "/start"
    assert option(own, "max-lora-rank", tmp_path) == "16", "vLLM knows only some"
    command = own.command(tmp_path, 1)
    assert f"policy={tmp_path}" in command
    assert "policy" not in command, "the model itself has another name"
    with pytest.raises(ValueError, match="up to rank 512"):
        with_run(launch(), adapter_rank=513).command(tmp_path, 1)


@pytest.mark.parametrize(
    ("model", "length", "refused"), [("cohere2", 64, True), ("cohere2", 16, False), ("gemma2", 64, False)]
)
def test_a_model_that_vllm_computes_with_wider_windows_is_refused(
    tmp_path: Path, model: str, length: int, refused: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model, "sliding_window": 16}))
    server = launch(context_length=length)
    if not refused:
        assert server.command(tmp_path, 8000)
        return
    with pytest.raises(ValueError, match=r"17 tokens wide.* set context_length to 16 or less"):
        server.command(tmp_path, 8000)


def test_a_server_answers_those_alone_who_know_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(key.VARIABLE, "secret")

    async def app(scope: Mapping[str, Any], receive: Any, send: key.Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    def statuses(headers: list[tuple[bytes, bytes]]) -> list[int]:
        sent: list[int] = []

        async def send(message: Mapping[str, Any]) -> None:
            sent.extend([message["status"]] if "status" in message else [])

        scope = {"type": "http", "path": "/collective_rpc", "headers": headers}
        asyncio.run(key.KeyRequired(app)(scope, None, send))
        return sent

    known = [(name.lower().encode(), value.encode()) for name, value in key.header("secret").items()]
    assert statuses(known) == [200]
    assert statuses([]) == statuses([(b"authorization", b"Bearer other")]) == [401]
    command = launch().command(Path("/weights"), 1)
    last = max(number for number, word in enumerate(command) if word == "--middleware")
    module, name = command[last + 1].rsplit(".", 1)
    assert getattr(importlib.import_module(module), name) is key.KeyRequired


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
            known, unknown = parser.parse_known_args(command[command.index("-m") + 2 :])
            assert unknown == []
            assert known.enable_sleep_mode is bool(settings)
            assert (known.weight_transfer_config is not None) == ("transfer" in run)
    everything = with_run(launch("cuda", **EVERYTHING_ON_A_GPU), adapter_rank=8, transfer="cuda_ipc")
    own = {name for name in environment(everything) if name.startswith("VLLM_")}
    assert own <= set(envs.environment_variables)
    assert {"VLLM_SERVER_DEV_MODE", "VLLM_BATCH_INVARIANT", "VLLM_ALLOW_INSECURE_SERIALIZATION"} <= own


def test_the_canary_is_as_strict_as_the_precision_allows() -> None:
    assert VllmSettings().tolerance("cpu") == (1e-4, 1e-4)
    assert VllmSettings().tolerance("cuda") == (5e-2, 2.0)
    assert VllmSettings(dtype="float32").tolerance("cuda") == (1e-4, 1e-2)
    assert VllmSettings(canary_tolerance=0.3).tolerance("cpu") == (0.3, 0.3)


# How many servers


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({"replicas": 2}, ["0", "1"]),
        ({"replicas": 2, "tensor_parallel_size": 2}, ["0,1", "2,3"]),
        ({"devices": (4, 5, 6, 7), "tensor_parallel_size": 2}, ["4,5", "6,7"]),
    ],
)
def test_each_server_has_gpus_of_its_own(settings: dict[str, object], devices: list[str]) -> None:
    one = launch("cuda", **settings)
    count = one.settings.replicas_on("cuda")
    found = [environment(replace(one, replica=i))["CUDA_VISIBLE_DEVICES"] for i in range(count)]
    assert found == devices


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("threads", "cache", "variables", "memory", "servers"),
    [
        (1, 1, {}, 256, 8),
        (1, 1, {}, 24, 3),
        (1, 1, {}, 4, 1),
        (1, 5, {}, 64, 4),
        (4, 1, {}, 256, 4),
        (32, 1, {}, 256, 1),
        (1, 1, {"OMP_NUM_THREADS": "2"}, 256, 2),
        (1, 1, {"OMP_NUM_THREADS": "1"}, 256, 1),
        (1, 1, {"OMP_NUM_THREADS": "many"}, 256, 8),
        (1, 1, {"WORLD_SIZE": "1"}, 256, 8),
        (1, 1, {"WORLD_SIZE": "2"}, 256, 1),
    ],
)
def test_servers_on_a_cpu_are_as_many_as_cores_memory_and_other_runs_leave_room_for(
    cores: None, threads: int, cache: int, variables: dict[str, str], memory: int, servers: int
) -> None:
    assert servers_that_fill(threads, cache, variables, memory=memory * GIB) == servers


def test_an_engine_on_a_cpu_fills_the_cores_unless_it_is_told_otherwise(
    cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    room = host_memory() // 2 // (4 * GIB)
    for settings, device, count in (
        ({}, "cpu", max(1, min(2, room))),
        ({"replicas": 1}, "cpu", 1),
        ({"replicas": 5}, "cpu", 5),
        ({"omp_threads": 2}, "cpu", 1),
        ({"servers": "per_rank"}, "cpu", 1),
        ({}, "cuda", 1),
        ({"devices": (0, 1)}, "cuda", 2),
    ):
        assert VllmSettings(**settings).replicas_on(device) == count, settings  # type: ignore[arg-type]
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("treetune.engine.settings.host_memory", lambda: 1024 * GIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    assert (VllmSettings().replicas_on("cpu"), VllmSettings().threads(1)) == (6, 1), "a thread each"


# How weights come in


def chosen(
    setting: str = "auto", device: str = "cpu", machines: tuple[str, ...] = ("a",), **changes: Any
) -> str:
    """The transfer for settings, ranks and devices."""
    adapters = changes.pop("adapters", False)
    settings = VllmSettings(weight_transfer=setting, **changes)  # type: ignore[arg-type]
    return settings.transfer_method(device=device, machines=machines, adapters=adapters)[0]


GIVEN = {"addresses": ("http://a:1", "http://b:1"), "key_file": "k", "machines": ("one", "other")}


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, "file"),
        ({"machines": ("a", "a")}, "file"),
        ({"machines": ("a", "b"), "servers": "per_rank"}, "file"),
        ({"adapters": True}, "file"),
        ({"device": "cuda"}, "cuda_ipc"),
        ({"device": "cuda", "machines": ("a", "a")}, "file"),
        ({"device": "cuda", "machines": ("a", "a"), "servers": "per_rank"}, "cuda_ipc"),
        ({"device": "cuda", "machines": ("a", "b"), "servers": "per_rank"}, "cuda_ipc"),
        ({"device": "cuda", "tensor_parallel_size": 2}, "file"),
        ({"device": "cuda", "replicas": 2}, "file"),
        ({"device": "cuda", "machines": ("a", "a"), "servers": "per_rank", "replicas": 2}, "file"),
        ({"device": "cuda", "devices": (1, 2), "tensor_parallel_size": 2}, "nccl"),
        ({"device": "cuda", "devices": (1, 2), "replicas": 2}, "nccl"),
        ({"device": "cuda", "devices": (0,)}, "file"),
        ({"device": "cuda", "devices": (1, 2), "machines": ("a", "a"), "replicas": 2}, "file"),
        ({"device": "cuda", "devices": (1,), "machines": ("a", "b"), "servers": "per_rank"}, "nccl"),
        ({"device": "cuda", **GIVEN}, "file"),
        ({"device": "cuda", "setting": "nccl", **GIVEN}, "nccl"),
    ],
)
def test_the_way_is_chosen_by_where_trainer_and_engine_live(changes: dict[str, Any], way: str) -> None:
    assert chosen(**changes) == way


@pytest.mark.parametrize(
    ("setting", "changes", "remedy"),
    [
        ("cuda_ipc", {}, "choose 'shared_memory'"),
        ("nccl", {}, "choose 'shared_memory'"),
        ("nccl", {"device": "cuda"}, "give the engine devices of its own"),
        ("nccl", {"device": "cuda", "devices": (0, 1)}, "choose other devices"),
        ("cuda_ipc", {"device": "cuda", "devices": (1,)}, "leave devices out"),
        ("cuda_ipc", {"device": "cuda", "replicas": 2}, "set replicas"),
        ("shared_memory", {"machines": ("a", "b"), "servers": "per_rank"}, "choose 'file'"),
        ("shared_memory", {"adapters": True}, "'merged'"),
        ("cuda_ipc", {"device": "cuda", **GIVEN}, ""),
        ("shared_memory", GIVEN, ""),
        ("nccl", GIVEN, ""),
    ],
)
def test_a_way_that_can_not_be_is_refused_with_what_would_be_right(
    setting: str, changes: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"weight_transfer is '{setting}'.*{remedy}"):
        chosen(setting, **changes)


def test_servers_that_somebody_else_started_have_no_weights_in_this_ones_memory() -> None:
    settings = VllmSettings(addresses=("http://a:1", "http://b:1"), key_file="k")
    assert not settings.weights_in_memory and settings.replicas_on("cuda") == 2
    assert own_address("http://127.0.0.1:8000") == "127.0.0.1"


# What is refused


@pytest.mark.parametrize(
    ("settings", "send", "key", "remedy"),
    [
        ({}, "merged", [], ""),
        ({"extra_arguments": ("--scheduling-policy", "fcfs")}, "merged", ["extra_arguments"], ""),
        ({"weight_transfer": "nccl"}, "merged", ["weight_transfer"], "give the engine devices of its own"),
        (
            {"weight_transfer": "cuda_ipc", "tensor_parallel_size": 2},
            "merged",
            ["weight_transfer"],
            "tensor_parallel_size to 1",
        ),
        (
            {"weight_transfer": "shared_memory"},
            "adapters",
            ["weight_transfer"],
            "trainer.lora.send to 'merged'",
        ),
        ({"weight_transfer": "shared_memory"}, "merged", [], ""),
        ({"weight_transfer": "nccl", "devices": (1,)}, "merged", [], ""),
    ],
)
def test_what_can_not_be_is_found_before_anything_starts(
    settings: dict[str, Any], send: str, key: list[str], remedy: str
) -> None:
    experiment: Any = SimpleNamespace(
        context_length=256,
        model=SimpleNamespace(longest=None),
        trainer=SimpleNamespace(lora=SimpleNamespace(send=send)),
    )
    found = list(VllmSettings(**settings).check(experiment))
    assert [one.key for one in found] == key
    assert all(remedy in (one.remedy or "") for one in found)


ADDRESSES: dict[str, Any] = {"addresses": ("http://a:1",), "key_file": "k"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"servers": "per_rank", "devices": (0, 1, 2), "tensor_parallel_size": 2}, "doesn't divide"),
        ({"devices": (1, 1), "tensor_parallel_size": 2}, r"a GPU twice: \[1, 1\]"),
        ({"devices": ()}, "devices lists no GPU"),
        ({"devices": (0, 1, 2, 3), "replicas": 2}, r"hold 4 servers .* and replicas is 2"),
        ({**ADDRESSES, "addresses": ("10.0.0.2:8000",)}, "addresses has '10.0.0.2:8000'"),
        ({**ADDRESSES, "addresses": ("http://a:1", "http://a:1")}, "names a server twice"),
        ({**ADDRESSES, "addresses": ("http://me:word@a:1",)}, "in an address, which is not shown here"),
        ({**ADDRESSES, "addresses": ()}, "addresses is empty"),
        ({"addresses": ("http://a:1",)}, "addresses need key_file"),
        ({"key_file": "k"}, "addresses is not set"),
        ({**ADDRESSES, "replicas": 2}, "replicas is for servers"),
        ({**ADDRESSES, "sleep": True}, "sleep is for servers"),
        ({**ADDRESSES, "servers": "per_rank"}, "per_rank' is for servers"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VllmSettings(**settings)


def test_a_machine_that_can_not_do_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs GPUs \[0, 1\], and this process sees 1"):
        environment(launch("cuda", tensor_parallel_size=2), CUDA_VISIBLE_DEVICES="0")
    second_rank = launch("cuda", 1, 2, devices=(4, 5), tensor_parallel_size=2, servers="per_rank")
    with pytest.raises(
        ValueError, match=r"of rank 1 needs 2 GPUs, and .*policy\.devices has none left for it"
    ):
        environment(second_rank)
    with pytest.raises(ValueError, match="frees no memory"):  # on a CPU
        start_engine(VllmSettings(sleep=True), replace(RUN, logs=tmp_path))
    with pytest.raises(ValueError, match="rendezvous"):
        start_engine(VllmSettings(), replace(RUN, logs=tmp_path, ranks=Rendezvous(1, 2)))


def test_an_engine_of_ones_own_is_started_by_its_settings() -> None:
    made = Engine()

    class Mine(EngineSettings):
        """Not registered as a part: other tests list those."""

        def start(self, launch: EngineLaunch) -> Engine:
            return made

    assert start_engine(Mine(), RUN) is made
    with pytest.raises(ValueError, match="a judge needs a server that answers over HTTP"):
        start_servers(Mine(), RUN, Path("/logs/judge.log"))


def test_large_weights_have_more_time_to_start_and_to_sync(tmp_path: Path) -> None:
    """70 billion weights in files, sparse ones; their adapters wait for them as well."""
    model, adapters = tmp_path / "model", tmp_path / "adapters"
    for folder in (model, adapters):
        folder.mkdir()
    for number in range(2):
        with (model / f"{number}.safetensors").open("wb") as file:
            file.truncate(70 * 10**9)
    (adapters / ADAPTER_CONFIG).write_text(json.dumps({"base_model_name_or_path": str(model)}))
    settings = VllmSettings(sync_timeout=300, start_timeout=600)
    for folder in (model, adapters):
        found = with_time_for(settings, folder)
        assert (round(found.sync_timeout), round(found.start_timeout)) == (952, 1252)
    assert with_time_for(settings, tmp_path / "nothing") == settings
