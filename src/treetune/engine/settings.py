"""The configuration of engines, and the choices that follow from it. `engine.start_engine` starts them."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import CONFIG_ROOT, Experiment, Feature, Finding, Part, TextScores
from treetune.engine.base import Engine, EngineLaunch, Tolerance, TransferMethod
from treetune.findings import placed_parts
from treetune.store.held_folders import SHARED_MEMORY

Dtype = Literal["float32", "bfloat16", "float16"]

TRANSFER_KEY = "engines.policy.weight_transfer"
LOWEST_TEMPERATURE = 0.01
"""The lowest temperature above 0 at which vLLM samples. It raises lower ones to it, and the trainer would
compute log-probs at another temperature."""
HIGHEST_TEMPERATURE = 2.0
"""The highest temperature that vLLM accepts. It answers requests with a higher one with an error."""
VERSIONS_AT_ONCE = 2
"""The number of versions of the weights that are in memory at the same time while an engine loads new
ones."""
METHODS_ON_THE_DEVICE: frozenset[TransferMethod] = frozenset({"cuda_ipc", "nccl"})
"""The transfers that read the weights on the trainer's device."""

GIB = 2**30
MOST_SERVERS = 8
"""The most servers that are chosen for a CPU. With more cores, each server gets more threads."""
SHARE_OF_HOST_MEMORY = 1 / 2
"""The share of a machine's memory that the servers on a CPU may take together."""
SERVER_GIB = 3
"""GiB of memory of a server with a small model, without its cache."""

_ADDRESS = re.compile(r"https?://[^/:@?#\s]+:\d+")
_PLAIN_ADDRESS = re.compile(r"https?://[^/@?#\s]+(/[^/@?#\s]+)*")
"""An address of `PlainVllmSettings`, which may have a path, and for routers no port."""


def _problem_of_addresses(addresses: Sequence[str], form: re.Pattern[str]) -> str | None:
    """Returns what is wrong with a list of addresses, such as "is empty"; None if nothing is."""
    if not addresses:
        return "is empty"
    if any(re.search("[@?#]", address) for address in addresses):
        # Settings are printed and stored, so they must not contain a key or a password.
        return "has a user name, a password or a query in an address, which is not shown here"
    malformed = [address for address in addresses if not form.fullmatch(address)]
    if malformed:
        return f"has {malformed[0]!r}"
    if len(set(addresses)) < len(addresses):
        return "names a server twice"
    return None


class EngineSettings(Registrable):
    """The settings of an engine. A custom engine implements `start`."""

    key_path: ClassVar[str] = "engines.policy"
    """The path of the settings in the configuration, for messages."""
    canary_tolerance: float | None

    def start(self, launch: EngineLaunch) -> Engine:
        """Begins to start a custom engine, and returns at once; `Engine.wait_ready` waits for it. Every rank
        calls this. Raises ValueError if the settings don't fit the device or the ranks."""
        raise NotImplementedError

    @property
    def weights_in_memory(self) -> bool:
        """Whether new weights are written into /dev/shm, if it exists, and not into the experiment's
        folder."""
        return True

    def tolerance(self, device: str) -> Tolerance:
        """Returns the log-prob gap that the canary accepts on `device`."""
        raise NotImplementedError

    def check_temperature(self, temperature: float, key: str) -> Iterator[Finding]:
        """Yields a finding if this engine can't sample at the temperature that `key` sets."""
        yield from ()

    def computes_in(self, device: str) -> str:
        """Returns the precision in which log-probs are computed on `device`: a name of PyTorch's, or
        ``quantised``."""
        return "float32"

    def threads(self, ranks: int) -> int | None:
        """Returns the number of threads of a server on a CPU; None for an engine without servers."""
        return None

    def transfer_method(
        self, *, device: str, machines: Sequence[str], adapters: bool
    ) -> tuple[TransferMethod, str]:
        """Returns the transfer of new weights into the engine, and the reason for it.

        Args:
            device: The device that ranks train on.
            machines: The machine of each rank, in rank order.
            adapters: Whether adapters are sent, and not whole weights.

        Raises:
            ValueError: The configured transfer isn't possible.
        """
        return "file", "this engine supports no other transfer"


@EngineSettings.register("vllm")
@dataclass(frozen=True, kw_only=True)
class VllmSettings(EngineSettings):
    """One or several vLLM servers, which the run starts and manages.

    With one thread on a CPU, the same seeds give bit-identical tokens and log-probs, whatever else is
    sampled. With more threads, the last bits of a log-prob depend on the other rows of its batch. Times are
    in seconds.
    """

    dtype: Dtype | None = None
    """Number format of weights and activations; null: float32 on a CPU and bfloat16 on a GPU."""
    context_length: Annotated[int, Gt(1)] | None = None
    """Most tokens of prompt and response together; null: the run's."""
    max_concurrency: Annotated[int, Gt(0)] = 512
    """Most requests in flight."""
    max_num_seqs: Annotated[int, Gt(0)] = 512
    """Most sequences that a server samples at the same time."""
    max_num_batched_tokens: Annotated[int, Gt(0)] = 16384
    """Most tokens of one step of a server."""
    servers: Literal["one", "per_rank"] = "one"
    """``one`` engine for all ranks, on the first rank's machine, or one for each rank (``per_rank``)."""
    replicas: Annotated[int, Gt(0)] | None = None
    """The number of servers of an engine. The same seeds give the same answers with any number. Null: one on
    the trainer's GPUs, or as many as fit on `devices`; on a CPU as many as fill the cores (with one thread
    each, or `omp_threads`)."""
    devices: tuple[Annotated[int, Ge(0)], ...] | None = None
    """The GPUs of the servers, `tensor_parallel_size` for each, numbered as this process sees them; null: the
    trainer's GPUs, which trainer and servers then share."""
    addresses: tuple[str, ...] | None = None
    """Addresses of servers that are running already, on this machine or others, for all ranks. Example:
    ``http://10.0.0.2:8000``, started by the command ``serve_engine``."""
    key_file: str | None = None
    """The file with the key of the servers at `addresses`, of mode 600."""
    tensor_parallel_size: Annotated[int, Gt(0)] = 1
    """The number of GPUs of a server."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] | None = None
    """Share of a GPU's memory that a server uses; null: the largest one that by `plan` leaves enough memory
    for the trainer."""
    kv_cache_gib: Annotated[int, Gt(0)] = 1
    """GiB of memory for keys and values on a CPU."""
    prefix_caching: bool | None = None
    """Whether common beginnings of prompts are computed once; null: on a GPU only. On a CPU a block of the
    cache has 32 tokens, so short prompts would gain little."""
    async_scheduling: bool = True
    """Plans a step while the step before it runs."""
    enforce_eager: bool | None = None
    """Whether the model runs without compilation and CUDA graphs; null: on a CPU only."""
    sleep: bool = False
    """Frees the GPU's memory for the trainer while it trains."""
    batch_invariant: bool = False
    """Uses kernels on a GPU whose results don't depend on the other rows of the batch (vLLM's
    VLLM_BATCH_INVARIANT). They are slower. Only with them the same seeds give the same tokens on a GPU."""
    omp_threads: Annotated[int, Gt(0)] | None = None
    """The number of threads of a server on a CPU; null: its share of the cores, less one."""
    start_timeout: Annotated[float, Gt(0)] = 600.0
    """Most seconds until a new server has sampled a token, plus 5 for each GiB of the weights."""
    request_timeout: Annotated[float, Gt(0)] = 1800.0
    """Most seconds for one request."""
    sync_timeout: Annotated[float, Gt(0)] = 300.0
    """Most seconds for each part of a weight sync, plus 5 for each GiB of the weights."""
    max_restarts: Annotated[int, Ge(0)] = 3
    """Most restarts of a server in a row, during one call to sample or to load weights."""
    weight_transfer: Literal["auto", "file", "shared_memory", "cuda_ipc", "nccl"] = "auto"
    """The way in which new weights are transferred to the engine. ``auto`` chooses ``cuda_ipc`` if each
    server shares its rank's GPU, ``nccl`` if the engine has `devices` of its own, and otherwise files in
    /dev/shm; the log names the choice. With ``shared_memory`` a server reads each chunk in /dev/shm as soon
    as it is written. ``file`` writes files into the experiment's folder. Adapters are always sent as
    files."""
    canary_tolerance: Annotated[float, Gt(0)] | None = None
    """Largest accepted difference between log-probs of engine and trainer after a sync, in the mean over the
    canary's tokens; null: 1e-4 in float32 and 5e-2 otherwise. A single token may differ by 40 times this
    value; in float32, by 100 times this value on a GPU, and by no more than the value itself on a CPU."""
    extra_arguments: tuple[str, ...] = ()
    """Further arguments of the server's command line."""

    gives = (TextScores(),)

    def __post_init__(self) -> None:
        if self.addresses is not None:
            self._check_addresses(self.addresses)
        elif self.key_file is not None:
            raise ValueError("key_file is for servers at addresses, and addresses is not set: leave it out")
        if self.devices is None:
            return
        wrong_list = ""
        if not self.devices:
            wrong_list = "no GPU"
        elif len(set(self.devices)) < len(self.devices):
            wrong_list = f"a GPU twice: {list(self.devices)}"
        if wrong_list:
            raise ValueError(
                f"devices lists {wrong_list}: list the GPUs of all servers, or set it to null to share the"
                " trainer's"
            )
        if len(self.devices) % self.tensor_parallel_size:
            raise ValueError(
                f"devices lists {len(self.devices)} GPUs, which tensor_parallel_size"
                f" {self.tensor_parallel_size} doesn't divide: each server needs as many GPUs as that"
            )
        servers_on_devices = len(self.devices) // self.tensor_parallel_size
        if self.servers == "one" and self.replicas not in (None, servers_on_devices):
            raise ValueError(
                f"devices lists {len(self.devices)} GPUs, which hold {servers_on_devices} servers with"
                f" tensor_parallel_size = {self.tensor_parallel_size}, and replicas is {self.replicas}:"
                " make them equal, or leave replicas out"
            )

    def _check_addresses(self, addresses: Sequence[str]) -> None:
        """Raises ValueError if an address is wrong, if `key_file` is missing, or if a setting is set that is
        only for servers that the run starts."""
        problem = _problem_of_addresses(addresses, _ADDRESS)
        if problem is not None:
            raise ValueError(
                f"addresses {problem}: list servers such as 'http://10.0.0.2:8000', each of them once; the"
                " key belongs into key_file"
            )
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
                    f"{name} is for servers that the run starts, and those at addresses are running already:"
                    " leave one of the two out"
                )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.addresses is not None and _sends_adapters(experiment):
            yield Finding(
                "servers at addresses take whole weights, and trainer.lora.send is 'adapters'",
                "addresses",
                "set trainer.lora.send to 'merged'",
            )
        yield from _findings_on_temperatures(self, experiment)
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
                "extra_arguments set --scheduling-policy, but the run sets it already, so that answers are"
                " sampled before continuations",
                "extra_arguments",
                "leave it out",
            )
        if self.weight_transfer not in ("auto", "file"):
            # Device, ranks and machines are known only when the run starts. So the transfer is checked for
            # one rank on a GPU, where each transfer may be possible.
            try:
                self.transfer_method(device="cuda", machines=["here"], adapters=_sends_adapters(experiment))
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
    def check_temperature(self, temperature: float, key: str) -> Iterator[Finding]:
        yield from check_vllm_temperature(temperature, key)

    @override
    def tolerance(self, device: str) -> Tolerance:
        return vllm_tolerance(self.canary_tolerance, self.resolved_dtype(device), device)

    @property
    @override
    def weights_in_memory(self) -> bool:
        return self.weight_transfer != "file" and self.addresses is None

    @property
    def largest_part(self) -> int:
        """Most samples of one HTTP request."""
        return self.max_num_seqs

    def replicas_on(self, device: str) -> int:
        """Returns the number of servers of an engine on `device`. With `servers` ``per_rank``, this is the
        number of each rank's servers."""
        if self.addresses is not None:
            return len(self.addresses)
        if self.replicas is not None:
            return self.replicas
        if self.servers == "per_rank":
            return 1
        if device == "cuda":  # as many as fit on `devices`, or one on the trainer's GPUs
            return len(self.devices) // self.tensor_parallel_size if self.devices else 1
        threads_of_worker = self.omp_threads or 1
        return choose_server_count(threads_of_worker * self.tensor_parallel_size, self.kv_cache_gib)

    def caches_prefixes(self, device: str) -> bool:
        """Returns whether a server keeps the keys and values of earlier prompts."""
        return self.prefix_caching if self.prefix_caching is not None else device == "cuda"

    def tokens_of_a_step(self, device: str, context_length: int) -> int:
        """Returns the most tokens that a server computes in one step (``--max-num-batched-tokens``).

        A step has room for at least one token of each sequence.
        """
        tokens = max(self.max_num_batched_tokens, self.max_num_seqs)
        if device == "cuda":
            return tokens
        # On a CPU a prompt is computed in a single step, and may be as long as the context.
        return max(tokens, context_length)

    @override
    def threads(self, ranks: int) -> int:
        if self.omp_threads:
            return self.omp_threads
        # Each server gets an equal share of the cores. One core of the share is left for the server's HTTP
        # process and its clients. If there are more threads than free cores, OpenMP's threads spin while they
        # wait for each other.
        engines = ranks if self.servers == "per_rank" else 1
        servers = engines * self.replicas_on("cpu")
        cores_of_server = len(os.sched_getaffinity(0)) // servers
        return max(1, cores_of_server - 1)

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
        """Returns the configured transfer of new weights or, with ``auto``, the fastest possible one, each
        with the reason. Raises ValueError if the configured one isn't possible."""
        if adapters:
            if self.weight_transfer in ("auto", "file"):
                return "file", "adapters are sent, which the server reads from a small file"
            raise ValueError(
                f"{TRANSFER_KEY} is {self.weight_transfer!r}, and trainer.lora.send is 'adapters', which the"
                f" server reads from a file: set {TRANSFER_KEY} to 'auto', or trainer.lora.send to 'merged'"
            )
        obstacles = self._obstacles(device, machines)
        if self.weight_transfer != "auto":
            if obstacle := obstacles.get(self.weight_transfer):
                raise ValueError(f"{TRANSFER_KEY} is {self.weight_transfer!r}, and {obstacle}")
            return self.weight_transfer, f"it is set by {TRANSFER_KEY}"
        if self.addresses is not None:
            return "file", "the servers at addresses read the experiment's folder, which their machines see"
        # The fastest of the possible transfers is chosen. ``shared_memory`` is never chosen here, since it
        # wasn't faster than a file in /dev/shm in any measurement.
        if "cuda_ipc" not in obstacles:
            return "cuda_ipc", "each server shares the GPU of its rank"
        if "nccl" not in obstacles:
            return "nccl", "the engine has GPUs of its own on this machine"
        return "file", "no GPU is shared by a rank and its server, and the engine has no GPUs of its own"

    def _obstacles(self, device: str, machines: Sequence[str]) -> dict[TransferMethod, str]:
        """Returns the transfers that aren't possible, each with the reason and the remedy."""
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
            ranks = len(machines)  # `machines` has an entry for each rank
            ranks_share_servers = self.servers != "per_rank" and ranks > 1
            has_several_workers = self.replicas_on(device) > 1 or self.tensor_parallel_size > 1
            if self.devices or ranks_share_servers or has_several_workers:
                obstacles["cuda_ipc"] = (
                    "that transfer needs a server for each rank, on the rank's own GPU: leave devices out,"
                    " set replicas and tensor_parallel_size to 1 and, with several ranks, servers to"
                    " 'per_rank'"
                )
            # The ranks of a machine train on its first GPUs, one for each rank: four ranks on GPUs 0 to 3.
            most_ranks_on_a_machine = max(Counter(machines).values())
            trainers_gpus = set(range(most_ranks_on_a_machine))
            if self.devices is None:
                obstacles["nccl"] = (
                    "the engine shares the trainer's GPUs, and NCCL can't connect a GPU with itself: give the"
                    " engine devices of its own"
                )
            elif shared_gpus := sorted(trainers_gpus.intersection(self.devices)):
                obstacles["nccl"] = (
                    f"GPUs {shared_gpus} of its devices are the trainer's, and NCCL can't connect a GPU with"
                    " itself: choose other devices"
                )
        if len(set(machines)) > 1:
            obstacles["shared_memory"] = "the ranks are on several machines: choose 'file'"
        elif not os.access(SHARED_MEMORY, os.W_OK):
            obstacles["shared_memory"] = f"{SHARED_MEMORY} can't be written to here: choose 'file'"
        return obstacles


@EngineSettings.register("plain_vllm")
@dataclass(frozen=True, kw_only=True)
class PlainVllmSettings(EngineSettings):
    """Servers that `vllm serve` started and the run did not, of any vLLM whose routes return token ids, with
    a router or without.

    The run uses only vLLM's own routes: ``/inference/v1/generate`` (a server started with
    ``--enable-scale-out``) or ``/v1/completions``. A run that trains needs the routes that load weights, too:
    a server started with the environment variable VLLM_SERVER_DEV_MODE=1. Anyone who reaches such a server
    controls it, so it belongs on a private network. Sample i of a request has the seed ``seed + i``, as with
    the engine ``vllm``; whether the same seeds give the same tokens depends on how the servers were started.
    Times are in seconds.
    """

    addresses: tuple[str, ...]
    """Addresses that are asked for samples: servers, or one router for all of `servers`. Example:
    ``http://10.0.0.2:8000``."""
    servers: tuple[str, ...] | None = None
    """The address of each server behind a router. Weights are loaded into each of them. Null: `addresses` are
    the servers."""
    model: str | None = None
    """The model's name in the servers; null: the only one that they list."""
    key_variable: str | None = None
    """The environment variable with the servers' API key, such as ``VLLM_API_KEY``; null: no key is sent."""
    certificate: str | None = None
    """A PEM file with the certificates that https addresses are verified with; null: the system's."""
    route: Literal["auto", "tokens", "completions"] = "auto"
    """The route that samples: ``tokens`` (/inference/v1/generate), ``completions`` (/v1/completions), or
    ``auto``: ``tokens`` if the server has that route, and otherwise ``completions``."""
    weight_transfer: Literal["auto", "file", "none"] = "auto"
    """The way in which weights get into the servers. ``file``: each server reads the experiment's folder,
    which its machine must see under the same path. ``none``: the servers keep the weights that they have, for
    evaluations only. ``auto``: ``file`` if the server has the routes for it, and otherwise ``none``."""
    dtype: Dtype | None = None
    """The servers' number format; null: float32 if the run is on a CPU, and bfloat16 on a GPU."""
    max_concurrency: Annotated[int, Gt(0)] = 512
    """Most requests in flight at an address."""
    max_num_seqs: Annotated[int, Gt(0)] = 256
    """Most sequences that each server samples at the same time."""
    samples_per_request: Annotated[int, Gt(0)] = 16
    """Most samples of one HTTP request. A router distributes requests, so smaller requests fill its servers
    more evenly; larger ones take less time on the way."""
    retries: Annotated[int, Ge(0)] = 4
    """How often a request is sent again if its server can't be reached or is overloaded (HTTP 429, 500, 502,
    503, 504), after 0.5, 1, 2, 4 and then 8 seconds. Then the server counts as lost."""
    max_restarts: Annotated[int, Ge(0)] = 3
    """How often in a row a server may be lost and come back, during one call to sample or to load weights."""
    start_timeout: Annotated[float, Gt(0)] = 600.0
    """Most seconds that the run waits for a server that is away, plus 5 for each GiB of the weights."""
    request_timeout: Annotated[float, Gt(0)] = 1800.0
    """Most seconds for one request, with its retries."""
    sync_timeout: Annotated[float, Gt(0)] = 300.0
    """Most seconds for each part of a weight sync, plus 5 for each GiB of the weights."""
    canary_tolerance: Annotated[float, Gt(0)] | None = None
    """Largest accepted difference between log-probs of engine and trainer after a sync, as for the engine
    ``vllm``."""

    sleep: ClassVar[bool] = False
    context_length: ClassVar[None] = None
    tensor_parallel_size: ClassVar[int] = 1
    gives = (TextScores(),)

    def __post_init__(self) -> None:
        for key, urls in (("addresses", self.addresses), ("servers", self.servers)):
            if urls is None:
                continue
            problem = _problem_of_addresses(urls, _PLAIN_ADDRESS)
            if problem is not None:
                raise ValueError(
                    f"{key} {problem}: list addresses such as 'http://10.0.0.2:8000', each of them once,"
                    " without a slash at the end; a key belongs into the environment variable that"
                    " key_variable names"
                )
        if self.servers is not None and len(self.addresses) > 1:
            raise ValueError(
                f"servers are those behind a router, and addresses lists {len(self.addresses)}: list the"
                " router's address alone in addresses, or leave servers out"
            )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if _sends_adapters(experiment):
            yield Finding(
                "plain servers take whole weights, and trainer.lora.send is 'adapters'",
                key=(),  # the key of the engine itself
                remedy="set trainer.lora.send to 'merged'",
            )
        yield from _findings_on_temperatures(self, experiment)
        try:
            self.api_key()
        except ValueError as error:
            yield Finding(str(error), "key_variable", level="missing")

    def api_key(self) -> str:
        """Returns the API key of the servers; empty if none is sent. Raises ValueError if its environment
        variable isn't set."""
        if self.key_variable is None:
            return ""
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            raise ValueError(
                f"{self.key_path}.key_variable is {self.key_variable!r}, and this environment variable is not"
                " set: export it before the start, or set key_variable to null for servers without a key"
            )
        return key

    @override
    def check_temperature(self, temperature: float, key: str) -> Iterator[Finding]:
        yield from check_vllm_temperature(temperature, key)

    @override
    def tolerance(self, device: str) -> Tolerance:
        return vllm_tolerance(self.canary_tolerance, self.resolved_dtype(device), device)

    @property
    @override
    def weights_in_memory(self) -> bool:
        return False  # the servers may be on other machines

    @property
    def largest_part(self) -> int:
        """Most samples of one HTTP request."""
        return min(self.samples_per_request, self.max_num_seqs)

    def caches_prefixes(self, device: str) -> bool:
        """Returns whether requests with the same beginning should go to the same server, which may have its
        keys and values."""
        return self.servers is None  # a router chooses the server by itself

    def resolved_dtype(self, device: str) -> Dtype:
        """Returns the precision that the servers compute in."""
        return self.dtype or ("bfloat16" if device == "cuda" else "float32")

    @override
    def computes_in(self, device: str) -> str:
        return self.resolved_dtype(device)

    @override
    def transfer_method(
        self, *, device: str, machines: Sequence[str], adapters: bool
    ) -> tuple[TransferMethod, str]:
        if adapters:
            raise ValueError(
                "trainer.lora.send is 'adapters', and plain servers take whole weights: set it to 'merged'"
            )
        if self.weight_transfer == "none":
            raise ValueError(
                f"{TRANSFER_KEY} is 'none', and this run trains, so that its servers need new weights: set it"
                " to 'auto', and start the servers with VLLM_SERVER_DEV_MODE=1"
            )
        return "file", "plain servers read the experiment's folder, which their machines see"


@EngineSettings.register("in_process")
@dataclass(frozen=True, kw_only=True)
class InProcessSettings(EngineSettings):
    """Samples in the run's own process, with PyTorch and without a server. For tests, and for models of at
    most some millions of weights. Every rank has its own engine.

    With one thread (OMP_NUM_THREADS=1), the same seeds give bit-identical tokens and log-probs, whatever else
    is sampled. The model may have attention over all earlier tokens or over a sliding window of them. Models
    with other layers (recurrent states, convolutions) are refused at the start.
    """

    rows: Annotated[int, Gt(0)] = 512
    """Most samples that are drawn at the same time."""
    canary_tolerance: Annotated[float, Ge(0)] | None = None
    """Largest mean difference between log-probs of engine and trainer after a sync; null: 1e-4."""

    gives = (TextScores(),)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if _sends_adapters(experiment):
            yield Finding(
                "the engine in_process takes whole weights, and trainer.lora.send is 'adapters'",
                key=(),  # the key of the engine itself
                remedy="set trainer.lora.send to 'merged'",
            )

    @override
    def tolerance(self, device: str) -> Tolerance:
        mean = 1e-4 if self.canary_tolerance is None else self.canary_tolerance
        return Tolerance(mean, mean if device == "cpu" else 100 * mean)


class ServedModel(Registrable):
    """A model that a run serves in addition to the policy, and doesn't train."""

    default = "judge"

    model: str
    server: EngineSettings


@dataclass(frozen=True, kw_only=True)
class Engines(Part):
    """The models that a run serves."""

    policy: EngineSettings
    """The model whose weights follow the training."""
    judge: ServedModel | None = None
    """The model that judges answers, for graders that use one."""

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return self.policy.gives

    @classmethod
    @override
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"policy"})


def choose_server_count(
    threads: int, cache_gib: int, environment: Mapping[str, str] = os.environ, *, memory: int | None = None
) -> int:
    """Returns the number of servers for which there are cores and memory, at least one.

    With several ranks the number is one, since the ranks compute on the same cores, and may be on machines of
    different sizes. OMP_NUM_THREADS limits the cores, so that several runs can share a machine.

    Args:
        threads: The threads of a server.
        cache_gib: The memory of a server's cache.
        memory: The machine's memory in bytes; None: that of this machine (`read_host_memory`).
    """
    if int(environment.get("WORLD_SIZE") or 1) > 1:
        return 1
    cores = len(os.sched_getaffinity(0))
    # OpenMP also takes a list, such as "8,2": threads at the outer level, and within each of them.
    omp_threads = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    if omp_threads.isdecimal() and int(omp_threads):
        cores = min(cores, int(omp_threads))
    memory = read_host_memory() if memory is None else memory
    servers_in_memory = int(SHARE_OF_HOST_MEMORY * memory / ((SERVER_GIB + cache_gib) * GIB))
    return max(1, min(cores // threads, servers_in_memory, MOST_SERVERS))


def vllm_tolerance(mean: float | None, dtype: Dtype, device: str) -> Tolerance:
    """Returns the difference of log-probs that the canary accepts for a vLLM server.

    The canary is a check: the engine samples after a few prompts, and the trainer scores these samples.

    Args:
        mean: The configured bound of the mean; None: 1e-4 in float32 and 5e-2 otherwise.
        dtype: The precision that the server computes in.
        device: The trainer's device.
    """
    exact = dtype == "float32"
    mean = mean or (1e-4 if exact else 5e-2)
    # `factor` is the bound of a single token's difference, divided by the bound of the mean. On a GPU and in
    # bfloat16 the mean decides, and the bound of a single token is loose.
    if not exact:
        # Measured with a policy in bfloat16: the differences between engine and trainer had a standard
        # deviation of 0.05, and the largest was 0.48. The policy's log-probs by one set of kernels and by
        # another differed by up to 0.66. The default bound of a token, 40 * 5e-2, is three times as large.
        factor = 40
    elif device == "cpu":
        factor = 1
    else:
        # The engine's kernels on a GPU sum in another order than the trainer's. The default bound of a token,
        # 100 * 1e-4, is far above the largest difference of a tiny model on an H100, 5e-5
        # (docs/results/gpu.md).
        factor = 100
    return Tolerance(mean, factor * mean)


def is_quantised(arguments: Sequence[str]) -> bool:
    """Returns whether a server's arguments quantise its weights, keys or values."""
    # ``--option=value`` is split, so an option is always followed by its value. vLLM reads ``_`` in an option
    # as ``-``.
    options_and_values: list[str] = []
    for argument in arguments:
        options_and_values += argument.replace("_", "-").split("=")
    # The "" gives the last entry a pair, too.
    for option, value in itertools.pairwise([*options_and_values, ""]):
        if option in ("--quantization", "-q") and value.lower() != "none":
            return True
        if option == "--kv-cache-dtype" and value not in ("auto", "bfloat16", "float16", "float32"):
            return True
    return False


def read_host_memory() -> int:
    """Returns the bytes of memory that this process may use: the machine's, or the limit of its control
    group."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # The files of versions 2 and 1 of control groups. Without a limit, the first one contains "max".
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            return min(machine_bytes, int(text))
    return machine_bytes


def _findings_on_temperatures(engine: EngineSettings, experiment: Experiment) -> Iterator[Finding]:
    """Yields a finding for each temperature at which the engine of the policy can't sample."""
    # A pipeline that estimates the difficulty of rows has no `engines`.
    engines = getattr(experiment, "engines", None)
    if engines is not None and engines.policy is not engine:
        return  # a judge's server, which never samples from the policy
    for key, temperature in _find_temperatures(experiment):
        yield from engine.check_temperature(temperature, key)


def _find_temperatures(experiment: Experiment) -> Iterator[tuple[str, float]]:
    """Yields the key and the value of each temperature at which the policy is sampled.

    These are the temperatures of all parts that sample from the policy, however deep they stand in others,
    such as in ``credit.over`` and in ``rollout.rollout``. `experiment` may also be a pipeline that estimates
    the difficulty of rows.
    """
    for placed in placed_parts(experiment):
        # Parts that sample from the policy set a number of `samples`. Other parts may have a temperature,
        # too: a judge samples from another model, and a mixture of domains samples no tokens.
        if not hasattr(placed.part, "samples"):
            continue
        temperature = getattr(placed.part, "temperature", None)
        if isinstance(temperature, int | float):
            yield ".".join((CONFIG_ROOT, *placed.path, "temperature")), temperature


def check_vllm_temperature(temperature: float, key: str) -> Iterator[Finding]:
    """Yields a finding if vLLM would sample at another temperature, or refuse this one."""
    if 0 < temperature < LOWEST_TEMPERATURE:
        yield Finding(
            f"temperature is {temperature:g}, and vLLM samples at {LOWEST_TEMPERATURE:g} or more",
            key,
            f"raise it to {LOWEST_TEMPERATURE:g}, or set it to 0 for the likeliest tokens",
        )
    elif temperature > HIGHEST_TEMPERATURE:
        yield Finding(
            f"temperature is {temperature:g}, and vLLM refuses temperatures above {HIGHEST_TEMPERATURE:g}",
            key,
            f"lower it to {HIGHEST_TEMPERATURE:g} or less, or choose the engine 'in_process', which has no"
            " upper limit",
        )


def _sends_adapters(experiment: Experiment) -> bool:
    lora: Any = experiment.trainer.lora
    return lora is not None and lora.send == "adapters"
