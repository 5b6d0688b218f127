"""The start of vLLM servers: command, environment, number and devices; and the choice of a weight transfer.

Promises that these tests hold:

* A server gets the options and variables that the run relies on, and none of the trainer's keys or ranks.
* The installed vLLM knows each of these options and variables.
* A server answers only requests with its key.
* As many servers start as GPUs, cores and memory allow, and no GPU has two.
* The weight transfer follows from where trainer and engine run; an impossible one is refused with a remedy.
* Settings that contradict each other, the experiment or the machine are refused before a server starts.
"""

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
from treetune.engine.launch import ADAPTER_CONFIG, ServerLaunch, add_reading_time
from treetune.engine.server import start_servers
from treetune.engine.settings import GIB, EngineSettings, VllmSettings, choose_server_count, read_host_memory

RUN = EngineLaunch(Path("/weights"), Path("/logs"), seed=3, context_length=256)


def launch(device: str = "cpu", rank: int = 0, world_size: int = 1, **settings: object) -> ServerLaunch:
    run = replace(RUN, device=device, ranks=Rendezvous(rank, world_size))
    return ServerLaunch(VllmSettings(**settings), run)  # type: ignore[arg-type]


def with_run(server: ServerLaunch, **changes: Any) -> ServerLaunch:
    return replace(server, run=replace(server.run, **changes))


def option(server: ServerLaunch, name: str, weights: Path = Path("/weights")) -> str:
    command = server.command(weights, 1234)
    return command[command.index(f"--{name}") + 1]


def environment(server: ServerLaunch, **inherited: str) -> dict[str, str]:
    return server.environment(Path("/scratch"), inherited)


# The command and its environment

NOT_PASSED_ON = (
    *("RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_JOB_ID"),
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password"),
)
PASSED_ON = ("TOKENIZERS_PARALLELISM", "HF_HOME", "KEYBOARD", "PATH", "HOME")


@pytest.mark.parametrize(
    ("server", "name", "value"),
    [
        (launch(), "host", "127.0.0.1"),  # this machine alone
        (launch(), "port", "1234"),
        (launch(), "scheduling-policy", "priority"),  # answers before continuations
        (launch(), "dtype", "float32"),
        (launch("cuda"), "dtype", "bfloat16"),
        (launch(dtype="float16"), "dtype", "float16"),
    ],
)
def test_a_server_is_started_with_the_options_that_the_run_relies_on(
    server: ServerLaunch, name: str, value: str
) -> None:
    assert option(server, name) == value


@pytest.mark.parametrize(
    ("server", "inherited", "name", "value"),
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
        # GPUs: those that the settings name, and otherwise those of the server's rank.
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
        # The training launcher's variables and the user's keys are not passed on; similar names are.
        *((launch(), {name: "1"}, name, None) for name in NOT_PASSED_ON),
        *((launch(), {name: "1"}, name, "1") for name in PASSED_ON),
    ],
)
def test_a_server_gets_its_own_variables_and_no_launcher_variables_or_keys(
    server: ServerLaunch, inherited: dict[str, str], name: str, value: str | None
) -> None:
    assert environment(server, **inherited).get(name) == value


def test_a_server_closes_no_connection_that_the_client_may_still_use() -> None:
    assert float(environment(launch())["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 10 * KEEP_ALIVE_S


def test_a_model_that_is_not_trained_is_served_as_it_is_on_disk() -> None:
    for is_trained in (True, False):
        server = replace(launch(), is_trained=is_trained)
        assert ("--hf-overrides" in server.command(Path("/weights"), 1)) == is_trained, "its head may be tied"
        assert ("VLLM_SERVER_DEV_MODE" in environment(server)) == is_trained


def test_adapters_are_served_as_the_policy_on_the_model_that_they_belong_to(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/start"}')
    server = with_run(launch(), adapter_rank=12)
    assert option(server, "model", tmp_path) == "/start"
    assert option(server, "max-lora-rank", tmp_path) == "16", "vLLM knows only some"
    command = server.command(tmp_path, 1)
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


def test_a_server_refuses_requests_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(key.KEY_VARIABLE, "secret")

    async def app(scope: Mapping[str, Any], receive: Any, send: key.Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    def statuses_of_answers(headers: list[tuple[bytes, bytes]]) -> list[int]:
        sent: list[int] = []

        async def send(message: Mapping[str, Any]) -> None:
            sent.extend([message["status"]] if "status" in message else [])

        scope = {"type": "http", "path": "/collective_rpc", "headers": headers}
        asyncio.run(key.KeyRequired(app)(scope, None, send))
        return sent

    headers_with_key = [
        (name.lower().encode(), value.encode()) for name, value in key.key_header("secret").items()
    ]
    assert statuses_of_answers(headers_with_key) == [200]
    assert statuses_of_answers([]) == [401]
    assert statuses_of_answers([(b"authorization", b"Bearer other")]) == [401]
    command = launch().command(Path("/weights"), 1)
    last = max(position for position, argument in enumerate(command) if argument == "--middleware")
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


def test_the_installed_vllm_knows_every_option_and_variable_of_a_server_on_a_gpu(tmp_path: Path) -> None:
    """vLLM's parser and table of variables are the same in its build for CPUs."""
    from vllm import envs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/start"}')
    transfers = [{"transfer": method} for method in ("cuda_ipc", "nccl", "shared_memory")]
    for run in ({}, {"adapter_rank": 12}, *transfers):
        for settings in ({}, EVERYTHING_ON_A_GPU):
            command = with_run(launch("cuda", **settings), **run).command(tmp_path, 1234)
            options, unknown = parser.parse_known_args(command[command.index("-m") + 2 :])
            assert unknown == []
            assert options.enable_sleep_mode is bool(settings)
            assert (options.weight_transfer_config is not None) == ("transfer" in run)
    everything = with_run(launch("cuda", **EVERYTHING_ON_A_GPU), adapter_rank=8, transfer="cuda_ipc")
    variables = {name for name in environment(everything) if name.startswith("VLLM_")}
    assert variables <= set(envs.environment_variables)
    assert {"VLLM_SERVER_DEV_MODE", "VLLM_BATCH_INVARIANT", "VLLM_ALLOW_INSECURE_SERIALIZATION"} <= variables


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
def test_each_server_sees_gpus_that_no_other_sees(settings: dict[str, object], devices: list[str]) -> None:
    first_server = launch("cuda", **settings)
    count = first_server.settings.replicas_on("cuda")
    visible_devices = []
    for number in range(count):
        server = replace(first_server, replica=number)
        visible_devices.append(environment(server)["CUDA_VISIBLE_DEVICES"])
    assert visible_devices == devices


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with sixteen cores, and no variables that say how many this process may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("threads", "cache", "variables", "memory_gib", "expected"),
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
    sixteen_cores: None, threads: int, cache: int, variables: dict[str, str], memory_gib: int, expected: int
) -> None:
    assert choose_server_count(threads, cache, variables, memory=memory_gib * GIB) == expected


def test_an_engine_on_a_cpu_fills_the_cores_unless_its_settings_say_how_many(
    sixteen_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    servers_that_memory_holds = read_host_memory() // 2 // (4 * GIB)
    for settings, device, count in (
        ({}, "cpu", max(1, min(2, servers_that_memory_holds))),
        ({"replicas": 1}, "cpu", 1),
        ({"replicas": 5}, "cpu", 5),
        ({"omp_threads": 2}, "cpu", 1),
        ({"servers": "per_rank"}, "cpu", 1),
        ({}, "cuda", 1),
        ({"devices": (0, 1)}, "cuda", 2),
    ):
        assert VllmSettings(**settings).replicas_on(device) == count, settings  # type: ignore[arg-type]
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("treetune.engine.settings.read_host_memory", lambda: 1024 * GIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    assert (VllmSettings().replicas_on("cpu"), VllmSettings().threads(1)) == (6, 1), "a thread each"


# How weights come in


def choose_transfer(
    setting: str = "auto", device: str = "cpu", machines: tuple[str, ...] = ("a",), **changes: Any
) -> str:
    """Returns the transfer that the settings choose for a trainer with one rank on each of `machines`."""
    adapters = changes.pop("adapters", False)
    settings = VllmSettings(weight_transfer=setting, **changes)  # type: ignore[arg-type]
    return settings.transfer_method(device=device, machines=machines, adapters=adapters)[0]


AT_ADDRESSES = {"addresses": ("http://a:1", "http://b:1"), "key_file": "k", "machines": ("one", "other")}


@pytest.mark.parametrize(
    ("changes", "expected"),
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
        ({"device": "cuda", **AT_ADDRESSES}, "file"),
        ({"device": "cuda", "setting": "nccl", **AT_ADDRESSES}, "nccl"),
    ],
)
def test_the_weight_transfer_follows_from_the_devices_of_trainer_and_engine(
    changes: dict[str, Any], expected: str
) -> None:
    assert choose_transfer(**changes) == expected


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
        ("cuda_ipc", {"device": "cuda", **AT_ADDRESSES}, ""),
        ("shared_memory", AT_ADDRESSES, ""),
        ("nccl", AT_ADDRESSES, ""),
    ],
)
def test_an_impossible_weight_transfer_is_refused_with_a_remedy(
    setting: str, changes: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"weight_transfer is '{setting}'.*{remedy}"):
        choose_transfer(setting, **changes)


def test_servers_at_addresses_take_no_weights_from_the_memory_of_this_machine() -> None:
    settings = VllmSettings(addresses=("http://a:1", "http://b:1"), key_file="k")
    assert not settings.weights_in_memory and settings.replicas_on("cuda") == 2
    assert own_address("http://127.0.0.1:8000") == "127.0.0.1"


# What is refused


@pytest.mark.parametrize(
    ("settings", "send", "expected_keys", "remedy"),
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
def test_check_finds_settings_that_contradict_the_experiment(
    settings: dict[str, Any], send: str, expected_keys: list[str], remedy: str
) -> None:
    experiment: Any = SimpleNamespace(
        context_length=256,
        model=SimpleNamespace(longest=None),
        trainer=SimpleNamespace(lora=SimpleNamespace(send=send)),
    )
    problems = list(VllmSettings(**settings).check(experiment))
    assert [problem.key for problem in problems] == expected_keys
    assert all(remedy in (problem.remedy or "") for problem in problems)


ADDRESSES: dict[str, Any] = {"addresses": ("http://a:1",), "key_file": "k"}


@pytest.mark.parametrize(
    ("settings", "message"),
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
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VllmSettings(**settings)


def test_an_engine_that_this_machine_cannot_run_is_refused(tmp_path: Path) -> None:
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


def test_the_engine_of_a_users_own_settings_is_started_by_them() -> None:
    own_engine = Engine()

    class OwnEngineSettings(EngineSettings):
        """Not registered as a part: other tests list those."""

        def start(self, launch: EngineLaunch) -> Engine:
            return own_engine

    assert start_engine(OwnEngineSettings(), RUN) is own_engine
    with pytest.raises(ValueError, match="a judge needs a server that answers over HTTP"):
        start_servers(OwnEngineSettings(), RUN, Path("/logs/judge.log"))


def test_large_weights_have_more_time_to_start_and_to_sync(tmp_path: Path) -> None:
    """Two sparse files hold 70 billion weights of two bytes; adapters of this model get the same time."""
    model, adapters = tmp_path / "model", tmp_path / "adapters"
    for folder in (model, adapters):
        folder.mkdir()
    for number in range(2):
        with (model / f"{number}.safetensors").open("wb") as file:
            file.truncate(70 * 10**9)
    (adapters / ADAPTER_CONFIG).write_text(json.dumps({"base_model_name_or_path": str(model)}))
    settings = VllmSettings(sync_timeout=300, start_timeout=600)
    for folder in (model, adapters):
        longer = add_reading_time(settings, folder)
        assert (round(longer.sync_timeout), round(longer.start_timeout)) == (952, 1252)
    assert add_reading_time(settings, tmp_path / "nothing") == settings
