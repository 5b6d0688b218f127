"""How the engine is configured, and the way from a configuration to a starting engine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from treetune.config.registrable import Registrable
from treetune.contracts import Experiment, Finding
from treetune.inference.addresses import check_addresses
from treetune.inference.base import Engine
from treetune.inference.cores import servers_that_fill
from treetune.inference.gaps import Tolerance
from treetune.inference.launch import Way
from treetune.inference.ways import Places, WeightTransferSetting, choose

if TYPE_CHECKING:
    from treetune.inference.launch import Launch
    from treetune.inference.ranks import RankFiles
    from treetune.inference.server_interface import Server

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]


class EngineSettings(Registrable):
    """What samples. Starting it gives an `Engine`."""

    canary_tolerance: float | None

    @property
    def weights_in_memory(self) -> bool:
        """Whether weights on their way into the engine lie in memory, where that can be."""
        return True

    def tolerance(self, device: str) -> Tolerance:
        """The log-prob gap that the canary accepts on `device`."""
        raise NotImplementedError

    def threads(self, ranks: int) -> int | None:
        """Of one server on a CPU; None where there is no such thing."""
        return None

    def way(self, *, device: str, machines: Sequence[str], adapters: bool) -> tuple[Way, str]:
        """How new weights come into the engine, and why so: for ranks on these machines, in their order,
        which train on `device`, and whether they send adapters. Raises ValueError where it can't be as it is
        set."""
        return "file", "it is the only way of this engine"

    def start(
        self,
        model_directory: Path,
        log_directory: Path,
        *,
        seed: int,
        context_length: int,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: Path | None = None,
        barrier: Callable[[str], None] = lambda name: None,
        device: str = "cpu",
        end_ids: Sequence[int] = (),
        adapter_rank: int | None = None,
        way: Way = "file",
    ) -> Engine:
        """Begins to start an engine on the weights in `model_directory` and returns at once;
        ``Engine.wait_ready`` waits for it.

        Every rank calls this. `rendezvous` is a folder, empty at first, that all ranks of the run see;
        `barrier` returns when all ranks have called it. Both are used only where there are several ranks.
        `end_ids` are the tokens that end an answer (`TextCodec.end_ids`). New weights come by `way`. With
        `adapter_rank`, this directory and those loaded later hold adapters of that rank. Raises ValueError
        where the settings don't suit the device or the ranks.
        """
        raise NotImplementedError

    def serve(
        self,
        model_directory: Path,
        log: Path,
        *,
        seed: int,
        context_length: int,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: Path | None = None,
        device: str = "cpu",
    ) -> list[Server]:
        """Begins to start servers, for all ranks, of a model that isn't trained. Every rank calls this,
        and the first one's starts them. Raises ValueError where the settings don't suit the device."""
        raise NotImplementedError


@EngineSettings.register("vllm")
@dataclass(frozen=True, kw_only=True)
class VllmSettings(EngineSettings):
    """A managed vLLM server.

    Settings that are None are chosen for the device: `dtype` float32 on a CPU and bfloat16 on a
    GPU, `enforce_eager` on a CPU only, `prefix_caching` on a GPU only (on a CPU a block is 32
    tokens, so that short prompts share little), `canary_tolerance` (difference between a log-prob of
    the engine and the trainer's after a sync, in the mean over the canary's tokens) 1e-4 in float32 and
    5e-2 otherwise, where any one token may differ by 40 times that (in float32 by 100 times it on a GPU,
    and by no more than it on a CPU),
    `context_length` (tokens of prompt and response together) that of the run, `omp_threads` the
    server's share of the cores but one. With one thread, the same seeds give the same tokens and
    log-probs to the last bit, whatever else is sampled; with more, the last bits of a log-prob
    depend on what shared its batch.

    `servers`: 'one' engine for all ranks (on the first rank's machine) or one 'per_rank'. An engine has
    `replicas`, servers that are alike and deal out its requests; None is one on the trainer's GPUs, as
    many as `devices` hold, and on a CPU as many as fill the cores (of one thread each, unless
    `omp_threads` says otherwise; see `servers_that_fill`). `devices`: the GPUs of the servers,
    `tensor_parallel_size` each, numbered as this process sees them; None shares the trainer's. Or
    `addresses` are those of servers that somebody else started, on this machine or others
    (``http://10.0.0.2:8000``, command ``serve_engine``), for all ranks; `key_file` holds their key.
    `sleep` gives a GPU's memory to the trainer while it trains.

    Times are in seconds: `start_timeout` until a token was sampled, `request_timeout` for one
    request, `sync_timeout` for each part of a weight sync. `max_restarts` bounds the restarts of
    one call to `generate` or `load`. `max_concurrency` bounds the requests in flight.
    `extra_arguments` end the server's command line.
    """

    dtype: Dtype | None = None
    context_length: Annotated[int, Gt(1)] | None = None
    max_concurrency: Annotated[int, Gt(0)] = 512
    max_num_seqs: Annotated[int, Gt(0)] = 512
    """Sequences that the server works on at once."""
    max_num_batched_tokens: Annotated[int, Gt(0)] = 16384
    """Tokens of one step of the server."""
    servers: Literal["one", "per_rank"] = "one"
    replicas: Annotated[int, Gt(0)] | None = None
    """Servers of an engine. The same seeds give the same answers with any number of them."""
    devices: tuple[Annotated[int, Ge(0)], ...] | None = None
    addresses: tuple[str, ...] | None = None
    key_file: str | None = None
    """Of mode 600."""
    tensor_parallel_size: Annotated[int, Gt(0)] = 1
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.85
    """Share of a GPU's memory that the server takes."""
    kv_cache_gib: Annotated[int, Gt(0)] = 1
    """Memory for keys and values on a CPU."""
    prefix_caching: bool | None = None
    async_scheduling: bool = True
    """Plans a step while the one before it runs."""
    enforce_eager: bool | None = None
    sleep: bool = False
    batch_invariant: bool = False
    """On a GPU, kernels whose results don't depend on what shares the batch: with them alone, the same seeds
    give the same tokens there. Slower (vLLM's VLLM_BATCH_INVARIANT)."""
    omp_threads: Annotated[int, Gt(0)] | None = None
    start_timeout: Annotated[float, Gt(0)] = 600.0
    request_timeout: Annotated[float, Gt(0)] = 1800.0
    sync_timeout: Annotated[float, Gt(0)] = 300.0
    max_restarts: Annotated[int, Ge(0)] = 3
    weight_transfer: WeightTransferSetting = "auto"
    """How new weights come into the engine. ``auto`` is ``cuda_ipc`` where each server shares its rank's GPU,
    ``nccl`` where the engine has `devices` of its own, and otherwise files in /dev/shm; the log says which.
    ``shared_memory`` has the server take chunks in /dev/shm as they are written. ``file`` puts files beside
    the experiment. Adapters always go as files."""
    canary_tolerance: Annotated[float, Gt(0)] | None = None
    extra_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_addresses(self)
        if self.devices is not None and len(set(self.devices)) < max(1, len(self.devices)):
            raise ValueError(
                "devices lists "
                + (f"a GPU twice: {list(self.devices)}" if self.devices else "no GPU")
                + ": give each server's its numbers, or null to share the trainer's"
            )
        if self.devices is not None and len(self.devices) % self.tensor_parallel_size:
            raise ValueError(
                f"devices lists {len(self.devices)} GPUs, which tensor_parallel_size"
                f" {self.tensor_parallel_size} doesn't divide: each server needs that many"
            )
        if self.servers == "one" and self.devices and self.replicas is not None:
            places = len(self.devices) // self.tensor_parallel_size
            if places != self.replicas:
                raise ValueError(
                    f"devices lists {len(self.devices)} GPUs, which hold {places} servers with"
                    f" tensor_parallel_size = {self.tensor_parallel_size}, and replicas is {self.replicas}:"
                    " make them equal, or leave replicas out"
                )

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.addresses is not None and _sends_adapters(experiment):
            yield Finding(
                "servers at addresses take whole weights, and trainer.lora.send is 'adapters'",
                "addresses",
                "set trainer.lora.send to 'merged'",
            )
        own, longest = self.context_length, experiment.model.longest
        if own is not None and own < experiment.context_length:
            yield Finding(
                f"the engine's context_length is {own}, and the run's is {experiment.context_length}",
                "context_length",
                "leave it out, so that the engine has the run's",
            )
        if own is not None and longest is not None and own > longest:
            yield Finding(
                f"the engine's context_length is {own}, and the model was made for {longest} tokens",
                "context_length",
                "leave it out, so that the engine has the run's",
            )
        if any(one.startswith("--scheduling-policy") for one in self.extra_arguments):
            yield Finding(
                "extra_arguments have a --scheduling-policy of their own, and answers are to go before"
                " continuations",
                "extra_arguments",
                "leave it out",
            )
        if self.weight_transfer not in ("auto", "file"):
            device = "cpu" if self.weight_transfer == "shared_memory" else "cuda"
            try:  # on one rank; what several are in the way of is known when they have met
                self.way(device=device, machines=["here"], adapters=_sends_adapters(experiment))
            except ValueError as error:
                yield Finding.of(error, "weight_transfer")
        if self.max_num_batched_tokens < self.max_num_seqs:
            yield Finding(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, fewer than max_num_seqs ="
                f" {self.max_num_seqs}: not every sequence could have one token in a step",
                "max_num_batched_tokens",
                "raise it, or lower max_num_seqs",
            )

    def tolerance(self, device: str) -> Tolerance:
        """The log-prob gap that the canary accepts on `device`."""
        exact = self.resolved_dtype(device) == "float32"
        mean = self.canary_tolerance or (1e-4 if exact else 5e-2)
        # Measured elsewhere on one bfloat16 policy: standard deviation 0.05, largest 0.48; against itself
        # with other kernels, 0.66. In float32 a GPU's kernels add up in another order than the trainer's.
        times = 40 if not exact else 1 if device == "cpu" else 100
        return Tolerance(mean, times * mean)

    @property
    def weights_in_memory(self) -> bool:
        return self.weight_transfer != "file" and self.addresses is None

    def way(self, *, device: str, machines: Sequence[str], adapters: bool) -> tuple[Way, str]:
        places = Places(
            device=device,
            machines=tuple(machines),
            per_rank=self.servers == "per_rank",
            devices=self.devices if device == "cuda" else None,
            tensor_parallel_size=self.tensor_parallel_size,
            replicas=self.replicas_on(device),
            adapters=adapters,
            by_address=self.addresses is not None,
        )
        return choose(self.weight_transfer, places)

    def replicas_on(self, device: str) -> int:
        """`replicas`, or as many as are there for."""
        if self.addresses is not None:
            return len(self.addresses)
        if self.replicas is not None or self.servers == "per_rank":
            return self.replicas or 1
        if device == "cuda":
            return len(self.devices or ()) // self.tensor_parallel_size or 1
        return servers_that_fill((self.omp_threads or 1) * self.tensor_parallel_size, self.kv_cache_gib)

    def caches_prefixes(self, device: str) -> bool:
        """Whether a server keeps the keys and values of prompts that it has seen."""
        return self.prefix_caching if self.prefix_caching is not None else device == "cuda"

    def threads(self, ranks: int) -> int:
        """`omp_threads`, or this server's share of the cores but one, which its HTTP side and its clients
        need: more threads than free cores wait for each other, spinning.
        """
        servers = self.replicas_on("cpu") * (ranks if self.servers == "per_rank" else 1)
        share = len(os.sched_getaffinity(0)) // servers
        return self.omp_threads or max(1, share - 1)

    def resolved_dtype(self, device: str) -> Dtype:
        """The precision that the server computes in on `device`."""
        return self.dtype or ("bfloat16" if device == "cuda" else "float32")

    def start(
        self,
        model_directory: Path,
        log_directory: Path,
        *,
        seed: int,
        context_length: int,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: Path | None = None,
        barrier: Callable[[str], None] = lambda name: None,
        device: str = "cpu",
        end_ids: Sequence[int] = (),
        adapter_rank: int | None = None,
        way: Way = "file",
    ) -> Engine:
        if self.sleep and device != "cuda":
            raise ValueError(
                "engines.policy.sleep is true and the engine runs on a CPU, where vLLM's sleep frees nothing:"
                " set it to false"
            )
        if world_size > 1 and rendezvous is None:
            raise ValueError("several ranks need a rendezvous folder to find the engine's server")
        from treetune.inference.engine import VllmEngine
        from treetune.inference.launch import Launch
        from treetune.inference.ranks import RankFiles
        from treetune.inference.server import servers_of

        launch = Launch(
            settings=self,
            context_length=self.context_length or context_length,
            seed=seed,
            rank=rank,
            world_size=world_size,
            device=device,
            way=way,
            adapter_rank=adapter_rank,
        )
        own = self.servers == "per_rank"
        ranks = RankFiles(rank, world_size, rendezvous, barrier)
        if self.addresses is not None:
            servers = self._given(launch, model_directory, ranks)
        else:
            servers = servers_of(
                launch,
                model_directory,
                log_directory / f"server-{rank if own else 0}.log",
                None if own else rendezvous,
            )
        return VllmEngine(
            self,
            servers,
            ranks,
            context_length=self.context_length or context_length,
            device=device,
            end_ids=end_ids,
            way=way,
        )

    def _given(self, launch: Launch, weights: Path, ranks: RankFiles) -> list[Server]:
        """Collective."""
        from treetune_cluster.given import GivenServer, read_key

        assert self.addresses is not None and self.key_file is not None
        key = read_key(Path(self.key_file).expanduser())
        interface = os.environ.get("NCCL_SOCKET_IFNAME")
        if launch.way == "nccl" and interface == "lo" and not all("//127." in url for url in self.addresses):
            raise ValueError(
                "engines.policy.weight_transfer is 'nccl', the servers at addresses are on other machines,"
                " and NCCL would use this one's loopback: set NCCL_SOCKET_IFNAME to the interface between"
                " them"
            )
        run = ranks.gather(secrets.token_hex(8))[0]
        first = launch.rank == 0
        return [GivenServer(url, key, launch, weights, run, loads=first) for url in self.addresses]

    def serve(
        self,
        model_directory: Path,
        log: Path,
        *,
        seed: int,
        context_length: int,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: Path | None = None,
        device: str = "cpu",
    ) -> list[Server]:
        from treetune.inference.launch import Launch
        from treetune.inference.server import servers_of

        filling = device == "cpu" and self.replicas is None and self.addresses is None  # for what is trained
        launch = Launch(
            settings=replace(self, replicas=1, devices=None) if filling else self,
            context_length=context_length,
            seed=seed,
            rank=rank,
            world_size=world_size,
            device=device,
            is_trained=False,
        )
        return servers_of(launch, model_directory, log, rendezvous if world_size > 1 else None)


@EngineSettings.register("in_process")
@dataclass(frozen=True, kw_only=True)
class InProcessSettings(EngineSettings):
    """Samples in the run's own process, with PyTorch and a cache of keys and values: no server to start. For
    models of at most some millions of weights, and for trials. Every rank has an engine of its own.

    With one thread (OMP_NUM_THREADS=1), the same seeds give the same tokens and log-probs to the last bit,
    whatever else is sampled. The model's attention must be causal over all tokens: no sliding windows.
    """

    rows: Annotated[int, Gt(0)] = 512
    """Samples that are worked on at once."""
    canary_tolerance: Annotated[float, Ge(0)] | None = None
    """Largest mean difference between log-probs of engine and trainer after a sync; null is 1e-4."""

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if _sends_adapters(experiment):
            yield Finding(
                "the engine in_process takes whole weights, and trainer.lora.send is 'adapters'",
                (),
                "set trainer.lora.send to 'merged'",
            )

    def tolerance(self, device: str) -> Tolerance:
        mean = 1e-4 if self.canary_tolerance is None else self.canary_tolerance
        return Tolerance(mean, mean if device == "cpu" else 100 * mean)

    def start(
        self,
        model_directory: Path,
        log_directory: Path,
        *,
        context_length: int,
        device: str = "cpu",
        end_ids: Sequence[int] = (),
        **rest: Any,
    ) -> Engine:
        from treetune.inference.in_process import InProcessEngine

        return InProcessEngine(
            model_directory,
            rows=self.rows,
            tolerance=self.tolerance(device),
            context_length=context_length,
            device=device,
            end_ids=end_ids,
        )

    def serve(self, model_directory: Path, log: Path, **rest: Any) -> Any:
        raise ValueError(
            "engines.judge.server is 'in_process', and a judge is asked over HTTP: set it to 'vllm'"
        )


def _sends_adapters(experiment: Experiment) -> bool:
    lora = experiment.trainer.lora
    return lora is not None and lora.send == "adapters"
