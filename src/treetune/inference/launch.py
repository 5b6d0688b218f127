"""The server's command line and environment: what vLLM is given, and why."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import treetune
from treetune.inference import key
from treetune.inference.scratch import variables
from treetune.inherited import without_secrets

if TYPE_CHECKING:
    from treetune.inference.settings import VllmSettings

ADAPTER_CONFIG = "adapter_config.json"
"""A folder of adapters has it, in the format of peft."""

LOOPBACK = "127.0.0.1"

MODEL_NAME = "policy"
START_MODEL_NAME = "start-model"
"""What the model is called whose adapters are the policy."""

Way = Literal["file", "shared_memory", "cuda_ipc", "nccl"]
"""How new weights come into a server (see `treetune.inference.transfer`)."""

BACKENDS: Mapping[str, str] = {
    "shared_memory": "treetune_shared_memory",
    "cuda_ipc": "ipc",
    "nccl": "nccl",
}
"""What vLLM calls the ways."""

WORKER_EXTENSION = "treetune.inference.shared_memory_worker.WorkerExtension"

_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be set to hold."""

_SOURCES = Path(treetune.__file__).parents[1]

_FROM_THE_LAUNCHER = (
    # What DeepSpeed's launcher tells a rank about itself; vLLM would take part in that group.
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "GROUP_RANK",
)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "PMI_", "OMPI_", "SLURM_")


@dataclass(frozen=True)
class Launch:
    """Everything but the weights and the port that decides how a server is started. It listens on `host`,
    this machine's loopback unless others are to reach it."""

    settings: VllmSettings
    context_length: int
    seed: int
    rank: int
    world_size: int
    device: str
    is_trained: bool = True
    """Whether its weights are exchanged; else they are served as they are on disk."""
    way: Way = "file"
    """How new weights come into it."""
    replica: int = 0
    """Which of this rank's servers it is."""
    host: str = LOOPBACK
    adapter_rank: int | None = None
    """Of the adapters that are served, where they are: the weights are then folders of adapters, whose
    configuration names the model that they belong to."""

    def command(self, weights: Path, port: int) -> list[str]:
        """The server's command line."""
        settings = self.settings
        cuda = self.device == "cuda"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", self.host, "--port", str(port)]
        if self.adapter_rank is None:
            command += ["--model", str(weights), "--served-model-name", MODEL_NAME]
        else:
            largest = next((rank for rank in _ADAPTER_RANKS if rank >= self.adapter_rank), None)
            if largest is None:
                raise ValueError(
                    f"vLLM adds adapters of rank {_ADAPTER_RANKS[-1]} at most, and trainer.lora.rank is"
                    f" {self.adapter_rank}: lower it, or set trainer.lora.send to 'merged'"
                )
            command += ["--model", model_of_adapters(weights), "--served-model-name", START_MODEL_NAME]
            command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(largest)]
            command += ["--lora-modules", f"{MODEL_NAME}={weights}"]
        command += ["--dtype", settings.resolved_dtype(self.device), "--seed", str(self.seed % 2**32)]
        command += ["--max-model-len", str(self.context_length)]
        command += ["--max-num-seqs", str(settings.max_num_seqs)]
        # vLLM refuses a budget below one sequence's length where prompts aren't cut.
        longest = 0 if cuda else self.context_length
        tokens = max(settings.max_num_batched_tokens, settings.max_num_seqs, longest)
        command += ["--max-num-batched-tokens", str(tokens)]
        # Answers before continuations of others, which wait in one queue with them.
        command += ["--scheduling-policy", "priority"]
        command += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
        # The model's own generation_config would change temperature, top-p and top-k behind our back.
        command += ["--generation-config", "vllm"]
        # A tied head keeps its old packed copy when weights are exchanged in place; the directories
        # that are served hold the head as a tensor of its own.
        if self.is_trained:
            command += ["--hf-overrides", '{"tie_word_embeddings": false}']
        # Log-probs of the distribution that was really sampled from, after temperature and top-p.
        command += ["--logprobs-mode", "processed_logprobs"]
        command += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
        command += ["--middleware", f"{key.__name__}.{key.KeyRequired.__name__}"]
        command += [_flag("enable-prefix-caching", settings.caches_prefixes(self.device))]
        command += [_flag("async-scheduling", settings.async_scheduling)]
        if not cuda:
            # A prompt cut over two steps takes back its first seeded draw, which a CPU's generator can't:
            # the engine dies as soon as a wave of prompts is longer than the budget.
            command += ["--no-enable-chunked-prefill"]
            # Attention on a CPU reads whole blocks: at vLLM's 128 tokens, short answers cost a tenth more.
            command += ["--block-size", "32"]
        if self._eager:
            command += ["--enforce-eager"]
        if self._one_process_computes:
            command += ["--distributed-executor-backend", "uni"]
        if cuda:
            command += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        if settings.sleep:
            command += ["--enable-sleep-mode"]
        if self.is_trained and self.way != "file":
            command += ["--weight-transfer-config", json.dumps({"backend": BACKENDS[self.way]})]
        if self.is_trained and self.way == "shared_memory":
            command += ["--worker-extension-cls", WORKER_EXTENSION]  # which has vLLM know that backend
        return [*command, *self._extra]

    def environment(self, scratch: Path, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The server's environment: the inherited one without keys, and without the launcher's words to a
        rank."""
        settings = self.settings
        environment = {
            name: value
            for name, value in without_secrets(inherited).items()
            if name not in _FROM_THE_LAUNCHER and not name.startswith(_LAUNCHER_PREFIXES)
        }
        if self.is_trained:
            environment["VLLM_SERVER_DEV_MODE"] = "1"  # opens the routes that exchange weights
        environment |= {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            **variables(scratch),
            # Longer than the client keeps one: a request on a connection that the server just closed would
            # look like a failure of the server, and on a busy machine its 5 s are not far from our 3.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
            "OMP_NUM_THREADS": str(settings.threads(self.world_size)),
            # The server imports what asks for its key.
            "PYTHONPATH": os.pathsep.join(filter(None, [inherited.get("PYTHONPATH"), str(_SOURCES)])),
        }
        if self.adapter_rank is not None:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # opens the route that exchanges adapters
        if self.is_trained and self.way == "cuda_ipc":
            # Handles of a GPU's memory travel pickled, to a server that listens to who knows its key.
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if self.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._visible_devices(inherited))
            if settings.resolved_dtype(self.device) == "float32":
                # Triton's dot products, vLLM's attention in float32, round to TF32 otherwise.
                environment["TRITON_F32_DEFAULT"] = "ieee"
            if settings.batch_invariant:
                environment["VLLM_BATCH_INVARIANT"] = "1"
        else:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            if self._one_process_computes:
                # vLLM refuses the executor without workers otherwise; the engine core is a process of
                # its own all the same.
                environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            if self._eager:
                # What is left to compile is one small function of the log-probs: 15 s for no gain.
                environment["TORCH_COMPILE_DISABLE"] = "1"
        return environment

    @property
    def _eager(self) -> bool:
        return _or(self.settings.enforce_eager, self.device != "cuda")

    @property
    def _one_process_computes(self) -> bool:
        """On a CPU, a worker process beside the engine core only adds messages between the two: with
        a tiny model on two cores a third of the time.
        """
        own = any(argument.startswith("--distributed-executor-backend") for argument in self._extra)
        return self.device != "cuda" and self.settings.tensor_parallel_size == 1 and not own

    @property
    def _extra(self) -> tuple[str, ...]:
        return self.settings.extra_arguments

    def _visible_devices(self, inherited: Mapping[str, str]) -> list[str]:
        """The server's GPUs: of those that the settings name, or else the trainer's own."""
        listed = [name for name in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        size = self.settings.tensor_parallel_size
        rank = int(inherited.get("LOCAL_RANK", self.rank)) if self.settings.servers == "per_rank" else 0
        count = self.settings.replicas_on(self.device)
        place = rank * count + self.replica
        wanted = self.settings.devices
        indices = wanted[place * size :][:size] if wanted else range(place * size, (place + 1) * size)
        if len(indices) < size or (listed and max(indices) >= len(listed)):
            which = f"server {self.replica + 1} of {count}" if count > 1 else "engine"
            raise ValueError(
                f"the {which} of rank {self.rank} needs GPUs {list(indices) or '(none left)'}, and this"
                f" process sees {len(listed)}: change engines.policy.replicas, engines.policy.devices or"
                " engines.policy.tensor_parallel_size"
            )
        return [listed[index] if listed else str(index) for index in indices]


def model_of_adapters(directory: Path) -> str:
    """The folder of the model that the adapters in this one belong to."""
    return json.loads((directory / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]


def _flag(name: str, on: bool) -> str:
    return f"--{name}" if on else f"--no-{name}"


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value
