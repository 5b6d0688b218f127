"""The configuration of engines: plain data, and the choices that follow from it (`engine.start_engine`)."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Experiment, Finding, Part
from treetune.engine.base import Engine, EngineLaunch, Tolerance, TransferMethod
from treetune.store.held_folders import MEMORY

Dtype = Literal["float32", "bfloat16", "float16"]

SETTING = "engines.policy.weight_transfer"
LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower ones to it, so that the trainer would compute log-probs at another temperature."""
VERSIONS = 2
"""Versions of the whole weights that lie in memory at once, on their way into the engine."""
ON_THE_DEVICE: frozenset[TransferMethod] = frozenset({"cuda_ipc", "nccl"})
"""Transfers that take weights from where the trainer has them."""

GIB = 2**30
MOST_SERVERS = 8
"""Servers that are chosen for a CPU at most: beyond this, they get more threads instead."""
SHARE_OF_MEMORY = 1 / 2
"""The share of a machine's memory that these servers may take."""
SERVER_GIB = 3
"""Memory of a server of a small model, beside its cache."""

_ADDRESS = re.compile(r"https?://[^/:@?#\s]+:\d+")


class EngineSettings(Registrable):
    """The sampler of a model. `treetune.engine.engine.start_engine` starts ours; an engine of your own writes
    `start`."""

    canary_tolerance: float | None

    def start(self, launch: EngineLaunch) -> Engine:
        """Begins to start an engine of your own and returns at once; `Engine.wait_ready` waits for it. Every
        rank calls this. Raises ValueError if the settings don't suit the device or the ranks."""
        raise NotImplementedError

    @property
    def weights_in_memory(self) -> bool:
        """True if weights on their way into the engine lie in /dev/shm, where there is one."""
        return True

    def tolerance(self, device: str) -> Tolerance:
        """Returns the log-prob gap that the canary accepts on `device`."""
        raise NotImplementedError

    def computes_in(self, device: str) -> str:
        """Returns the precision in which log-probs are computed on `device`: a name of PyTorch's, or
        ``quantised``."""
        return "float32"

    def threads(self, ranks: int) -> int | None:
        """Returns the threads of one server on a CPU, or None."""
        return None

    def transfer_method(
        self, *, device: str, machines: Sequence[str], adapters: bool
    ) -> tuple[TransferMethod, str]:
        """Returns the transfer of new weights into the engine, and the reason. The ranks are on `machines`,
        in their order, train on `device`, and send `adapters` or whole weights. Raises ValueError if the
        transfer that is set isn't possible."""
        return "file", "this engine supports no other transfer"


@EngineSettings.register("vllm")
@dataclass(frozen=True, kw_only=True)
class VllmSettings(EngineSettings):
    """A managed vLLM server, or several that are alike.

    With one thread on a CPU, the same seeds give the same tokens and log-probs to the last bit, whatever else
    is sampled; with more, the last bits of a log-prob depend on what shared its batch. Times are in seconds.
    """

    dtype: Dtype | None = None
    """Null is float32 on a CPU and bfloat16 on a GPU."""
    context_length: Annotated[int, Gt(1)] | None = None
    """Tokens of prompt and response together; null is the run's."""
    max_concurrency: Annotated[int, Gt(0)] = 512
    """Requests in flight at most."""
    max_num_seqs: Annotated[int, Gt(0)] = 512
    """Sequences that the server works on at once."""
    max_num_batched_tokens: Annotated[int, Gt(0)] = 16384
    """Tokens of one step of the server."""
    servers: Literal["one", "per_rank"] = "one"
    """One engine for all ranks, on the first rank's machine, or one for each rank."""
    replicas: Annotated[int, Gt(0)] | None = None
    """Servers of an engine. The same seeds give the same answers with any number of them. Null is one on the
    trainer's GPUs, as many as `devices` hold, and on a CPU as many as fill the cores (of one thread each,
    unless `omp_threads` says otherwise)."""
    devices: tuple[Annotated[int, Ge(0)], ...] | None = None
    """GPUs of the servers, `tensor_parallel_size` each, numbered as this process sees them; null shares the
    trainer's."""
    addresses: tuple[str, ...] | None = None
    """Servers that somebody else started, on this machine or others (``http://10.0.0.2:8000``, command
    ``serve_engine``), for all ranks."""
    key_file: str | None = None
    """The file with the key of the servers at `addresses`, of mode 600."""
    tensor_parallel_size: Annotated[int, Gt(0)] = 1
    """GPUs of one server."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] | None = None
    """Share of a GPU's memory that the server takes; null is the largest that fits by plan beside what the
    trainer keeps there meanwhile."""
    kv_cache_gib: Annotated[int, Gt(0)] = 1
    """Memory for keys and values on a CPU."""
    prefix_caching: bool | None = None
    """Null is on for a GPU only: on a CPU a block is 32 tokens, so that short prompts share little."""
    async_scheduling: bool = True
    """Plans a step while the one before it runs."""
    enforce_eager: bool | None = None
    """Null is on for a CPU only."""
    sleep: bool = False
    """Gives a GPU's memory to the trainer while it trains."""
    batch_invariant: bool = False
    """On a GPU, kernels whose results don't depend on what shares the batch: with them alone, the same seeds
    give the same tokens there. Slower (vLLM's VLLM_BATCH_INVARIANT)."""
    omp_threads: Annotated[int, Gt(0)] | None = None
    """Threads of a server on a CPU; null is its share of the cores but one."""
    start_timeout: Annotated[float, Gt(0)] = 600.0
    """Seconds until a token was sampled, and 5 more for each GiB of the weights."""
    request_timeout: Annotated[float, Gt(0)] = 1800.0
    """Seconds for one request."""
    sync_timeout: Annotated[float, Gt(0)] = 300.0
    """Seconds for each part of a weight sync, and 5 more for each GiB of the weights."""
    max_restarts: Annotated[int, Ge(0)] = 3
    """Restarts within one call to sample or to load weights."""
    weight_transfer: Literal["auto", "file", "shared_memory", "cuda_ipc", "nccl"] = "auto"
    """How new weights come into the engine. ``auto`` is ``cuda_ipc`` where each server shares its rank's GPU,
    ``nccl`` where the engine has `devices` of its own, and otherwise files in /dev/shm; the log says which.
    ``shared_memory`` has the server take chunks in /dev/shm as they are written. ``file`` puts files beside
    the experiment. Adapters always go as files."""
    canary_tolerance: Annotated[float, Gt(0)] | None = None
    """Difference between a log-prob of the engine and the trainer's after a sync, in the mean over the
    canary's tokens. Null is 1e-4 in float32 and 5e-2 otherwise. A single token may differ by 40 times that,
    in float32 by 100 times it on a GPU, and by no more than it on a CPU."""
    extra_arguments: tuple[str, ...] = ()
    """Ends the server's command line."""

    def __post_init__(self) -> None:
        if self.addresses is not None:
            self._check_addresses(self.addresses)
        elif self.key_file is not None:
            raise ValueError("key_file is the key of servers at addresses, and there are none")
        if self.devices is None:
            return
        if len(set(self.devices)) < max(1, len(self.devices)):
            listed = f"a GPU twice: {list(self.devices)}" if self.devices else "no GPU"
            raise ValueError(
                f"devices lists {listed}: give each server's its numbers, or null to share the trainer's"
            )
        if len(self.devices) % self.tensor_parallel_size:
            raise ValueError(
                f"devices lists {len(self.devices)} GPUs, which tensor_parallel_size"
                f" {self.tensor_parallel_size} doesn't divide: each server needs that many"
            )
        servers = len(self.devices) // self.tensor_parallel_size
        if self.servers == "one" and self.replicas not in (None, servers):
            raise ValueError(
                f"devices lists {len(self.devices)} GPUs, which hold {servers} servers with"
                f" tensor_parallel_size = {self.tensor_parallel_size}, and replicas is {self.replicas}:"
                " make them equal, or leave replicas out"
            )

    def _check_addresses(self, addresses: Sequence[str]) -> None:
        wrong = [address for address in addresses if not _ADDRESS.fullmatch(address)]
        if wrong or not addresses or len(set(addresses)) < len(addresses):
            what = f"has {wrong[0]!r}" if wrong else "names a server twice" if addresses else "is empty"
            raise ValueError(f"addresses {what}: it lists servers such as 'http://10.0.0.2:8000', each once")
        if self.key_file is None:
            raise ValueError("addresses need key_file, the file with the key that serve_engine was given")
        for name, is_set in (
            ("replicas", self.replicas is not None),
            ("devices", self.devices is not None),
            ("sleep", self.sleep),
            ("servers: 'per_rank'", self.servers == "per_rank"),
        ):
            if is_set:
                raise ValueError(
                    f"{name} is about servers that the run starts, and those at addresses are there already:"
                    " leave one of them out"
                )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.addresses is not None and _sends_adapters(experiment):
            yield Finding(
                "servers at addresses take whole weights, and trainer.lora.send is 'adapters'",
                "addresses",
                "set trainer.lora.send to 'merged'",
            )
        for key, temperature in _temperatures(experiment):
            if 0 < temperature < LOWEST_TEMPERATURE:
                yield Finding(
                    f"temperature is {temperature:g}, and vLLM samples at {LOWEST_TEMPERATURE:g} or more",
                    key,
                    f"raise it to {LOWEST_TEMPERATURE:g}, or set it to 0 for the likeliest tokens",
                )
        longest = experiment.model.longest
        if self.context_length is not None and self.context_length < experiment.context_length:
            yield Finding(
                f"the engine's context_length is {self.context_length}, and the run's is"
                f" {experiment.context_length}",
                "context_length",
                "leave it out, so that the engine has the run's",
            )
        if self.context_length is not None and longest is not None and self.context_length > longest:
            yield Finding(
                f"the engine's context_length is {self.context_length}, and the model was made for {longest}"
                " tokens",
                "context_length",
                "leave it out, so that the engine has the run's",
            )
        if any(argument.startswith("--scheduling-policy") for argument in self.extra_arguments):
            yield Finding(
                "extra_arguments have a --scheduling-policy of their own, and answers are to go before"
                " continuations",
                "extra_arguments",
                "leave it out",
            )
        if self.weight_transfer not in ("auto", "file"):
            device = "cpu" if self.weight_transfer == "shared_memory" else "cuda"
            try:  # on one rank; the obstacles of several are known when they have met
                self.transfer_method(device=device, machines=["here"], adapters=_sends_adapters(experiment))
            except ValueError as error:
                yield Finding.of(error, "weight_transfer")
        if self.max_num_batched_tokens < self.max_num_seqs:
            yield Finding(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, fewer than max_num_seqs ="
                f" {self.max_num_seqs}: not every sequence could have one token in a step",
                "max_num_batched_tokens",
                "raise it, or lower max_num_seqs",
            )

    @override
    def tolerance(self, device: str) -> Tolerance:
        exact = self.resolved_dtype(device) == "float32"
        mean = self.canary_tolerance or (1e-4 if exact else 5e-2)
        # Measured elsewhere on one bfloat16 policy: standard deviation 0.05, largest 0.48; against itself
        # with other kernels, 0.66. In float32 a GPU's kernels add up in another order than the trainer's.
        times = 40 if not exact else 1 if device == "cpu" else 100
        return Tolerance(mean, times * mean)

    @property
    @override
    def weights_in_memory(self) -> bool:
        return self.weight_transfer != "file" and self.addresses is None

    def replicas_on(self, device: str) -> int:
        """Returns the servers of an engine on `device`."""
        if self.addresses is not None:
            return len(self.addresses)
        if self.replicas is not None or self.servers == "per_rank":
            return self.replicas or 1
        if device == "cuda":
            return len(self.devices or ()) // self.tensor_parallel_size or 1
        return servers_that_fill((self.omp_threads or 1) * self.tensor_parallel_size, self.kv_cache_gib)

    def caches_prefixes(self, device: str) -> bool:
        """Returns whether a server keeps the keys and values of earlier prompts."""
        return self.prefix_caching if self.prefix_caching is not None else device == "cuda"

    @override
    def threads(self, ranks: int) -> int:
        # One core is left to the server's HTTP side and its clients: more threads than free cores wait for
        # each other, spinning.
        servers = self.replicas_on("cpu") * (ranks if self.servers == "per_rank" else 1)
        share = len(os.sched_getaffinity(0)) // servers
        return self.omp_threads or max(1, share - 1)

    def resolved_dtype(self, device: str) -> Dtype:
        """Returns the precision that the server computes in on `device`."""
        return self.dtype or ("bfloat16" if device == "cuda" else "float32")

    @override
    def computes_in(self, device: str) -> str:
        return "quantised" if is_quantised(self.extra_arguments) else self.resolved_dtype(device)

    @override
    def transfer_method(
        self, *, device: str, machines: Sequence[str], adapters: bool
    ) -> tuple[TransferMethod, str]:
        if adapters:
            if self.weight_transfer in ("auto", "file"):
                return "file", "what is sent are adapters, which the server reads from a small file"
            raise ValueError(
                f"{SETTING} is {self.weight_transfer!r}, and trainer.lora.send is 'adapters', which the"
                f" server reads from a file: set {SETTING} to 'auto', or trainer.lora.send to 'merged'"
            )
        obstacles = self._obstacles(device, machines)
        if self.weight_transfer != "auto":
            if obstacle := obstacles.get(self.weight_transfer):
                raise ValueError(f"{SETTING} is {self.weight_transfer!r}, and {obstacle}")
            return self.weight_transfer, f"{SETTING} says so"
        if self.addresses is not None:
            return "file", "its servers read the experiment's folder, which their machines see"
        # From the fastest on. ``shared_memory`` has to be asked for: no server has shown so far that it is
        # faster than a file in /dev/shm.
        if "cuda_ipc" not in obstacles:
            return "cuda_ipc", "each server shares the GPU of its rank"
        if "nccl" not in obstacles:
            return "nccl", "the engine has GPUs of its own on this machine"
        return "file", "no GPU is shared by a rank and its server, and the engine has no GPUs of its own"

    def _obstacles(self, device: str, machines: Sequence[str]) -> dict[TransferMethod, str]:
        """Returns the transfers that aren't possible, each with the reason and a remedy."""
        obstacles: dict[TransferMethod, str] = {}
        if self.addresses is not None:
            obstacles["cuda_ipc"] = obstacles["shared_memory"] = (
                "its servers are reached by address, as on other machines: choose 'file' or 'nccl'"
            )
            if device != "cuda":
                obstacles["nccl"] = "the trainer is on a CPU: choose 'file'"
            return obstacles
        if device != "cuda":
            obstacles["cuda_ipc"] = obstacles["nccl"] = (
                "the trainer is on a CPU: choose 'shared_memory' or 'file'"
            )
        else:
            is_shared = self.servers != "per_rank" and len(machines) > 1
            if self.devices or is_shared or self.replicas_on(device) > 1 or self.tensor_parallel_size > 1:
                obstacles["cuda_ipc"] = (
                    "that needs a server of one GPU for each rank, which is the rank's own: leave devices"
                    " out, set replicas and tensor_parallel_size to 1 and, with several ranks, servers to"
                    " 'per_rank'"
                )
            # A rank trains on the GPU of its number on its machine.
            trainers_gpus = set(range(max(Counter(machines).values())))
            if self.devices is None:
                obstacles["nccl"] = (
                    "the engine shares the trainer's GPUs, which NCCL can't connect: name its devices"
                )
            elif shared := sorted(trainers_gpus.intersection(self.devices)):
                obstacles["nccl"] = (
                    f"GPUs {shared} of its devices are the trainer's, and NCCL can't connect a GPU with"
                    " itself: name others"
                )
        if len(set(machines)) > 1:
            obstacles["shared_memory"] = "the ranks are on several machines: choose 'file'"
        elif not os.access(MEMORY, os.W_OK):
            obstacles["shared_memory"] = f"{MEMORY} can't be written to here: choose 'file'"
        return obstacles


@EngineSettings.register("in_process")
@dataclass(frozen=True, kw_only=True)
class InProcessSettings(EngineSettings):
    """Samples in the run's own process, with PyTorch and a cache of keys and values: no server to start. For
    models of at most some millions of weights, and for trials. Every rank has an engine of its own.

    With one thread (OMP_NUM_THREADS=1), the same seeds give the same tokens and log-probs to the last bit,
    whatever else is sampled. The model's layers must be attention over all tokens before, or over a sliding
    window of them: others (recurrent states, convolutions) are refused at the start.
    """

    rows: Annotated[int, Gt(0)] = 512
    """Samples that are worked on at once."""
    canary_tolerance: Annotated[float, Ge(0)] | None = None
    """Largest mean difference between log-probs of engine and trainer after a sync; null is 1e-4."""

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if _sends_adapters(experiment):
            yield Finding(
                "the engine in_process takes whole weights, and trainer.lora.send is 'adapters'",
                (),
                "set trainer.lora.send to 'merged'",
            )

    @override
    def tolerance(self, device: str) -> Tolerance:
        mean = 1e-4 if self.canary_tolerance is None else self.canary_tolerance
        return Tolerance(mean, mean if device == "cpu" else 100 * mean)


class ServedModel(Registrable):
    """A model that a run serves beside the policy. It is not trained."""

    default = "judge"

    model: str
    server: EngineSettings


@dataclass(frozen=True, kw_only=True)
class Engines(Part):
    """The models that a run serves."""

    policy: EngineSettings
    """The model whose weights follow the training."""
    judge: ServedModel | None = None
    """The model that judges answers, where a grader asks it."""

    @classmethod
    @override
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"policy"})


def servers_that_fill(
    threads: int, cache_gib: int, environment: Mapping[str, str] = os.environ, *, memory: int | None = None
) -> int:
    """Returns how many servers of so many threads the cores and the memory hold; at least one, and one alone
    beside several ranks, which compute on the same cores and may be on unlike machines.

    A run may use the cores that it is bound to, or as many as OMP_NUM_THREADS says: whoever runs several at
    once shares the cores out with it. `memory` is in bytes, by default the machine's.
    """
    if int(environment.get("WORLD_SIZE") or 1) > 1:
        return 1
    cores = len(os.sched_getaffinity(0))
    threads_set = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads_set.isdecimal() and int(threads_set):
        cores = min(cores, int(threads_set))
    whole = host_memory() if memory is None else memory
    fitting = int(SHARE_OF_MEMORY * whole / ((SERVER_GIB + cache_gib) * GIB))
    return max(1, min(cores // threads, fitting, MOST_SERVERS))


def is_quantised(arguments: Sequence[str]) -> bool:
    """Returns whether a server's command line has it compute with weights, keys or values of few bits."""
    words = [word for argument in arguments for word in argument.replace("_", "-").split("=")]
    for option, value in itertools.pairwise([*words, ""]):
        if option in ("--quantization", "-q") and value.lower() != "none":
            return True
        if option == "--kv-cache-dtype" and value not in ("auto", "bfloat16", "float16", "float32"):
            return True
    return False


def host_memory() -> int:
    """Returns the bytes that this process may use: the machine's, or fewer where a control group has a
    limit."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            return min(whole, int(text))
    return whole


def _temperatures(experiment: Experiment) -> Iterator[tuple[str, float]]:
    """Yields the temperatures at which the policy is sampled, and their keys."""
    evaluation = getattr(experiment, "evaluation", None)
    parts = {
        "$.rollout": getattr(experiment, "rollout", None),
        "$.credit": getattr(experiment, "credit", None),
        "$.evaluation.rollout": getattr(evaluation, "rollout", None),
    }
    for number, measured in enumerate(getattr(evaluation, "sets", ())):
        parts[f"$.evaluation.sets.{number}"] = measured
    for key, part in parts.items():
        temperature = getattr(part, "temperature", None)
        if isinstance(temperature, int | float):
            yield f"{key}.temperature", temperature


def _sends_adapters(experiment: Experiment) -> bool:
    lora: Any = experiment.trainer.lora
    return lora is not None and lora.send == "adapters"
