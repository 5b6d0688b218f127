"""The machine that a run is planned for: the one that it runs on, or any other."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from treetune.inference.cores import GIB, host_memory
from treetune.inference.ways import MEMORY

MIB = 2**20
USABLE = 0.99
"""Of a GPU's memory: an H100 of 80 GiB reports 79.2 to programs."""

QUERY_DEADLINE_S = 20


def in_units(size: int) -> str:
    """Bytes in words."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of `nodes` that are alike. Memories are in bytes, `device_memory` of each GPU; None: not known.

    `ranks` are those of the run on this machine: one for each GPU, on a CPU one, unless others were started.
    `gpus` are those that it sees; None: one for each rank. A `shared_memory` of 0 can't be written to.
    """

    device: Literal["cuda", "cpu"]
    ranks: int
    cores: int
    device_memory: int = 0
    host_memory: int | None = None
    shared_memory: int | None = None
    nodes: int = 1
    gpus: int | None = None

    @property
    def world_size(self) -> int:
        return self.ranks * self.nodes

    @property
    def words(self) -> str:
        several = f"{self.nodes} machines, each with " if self.nodes > 1 else ""
        ranks = "one rank" if self.ranks == 1 else f"{self.ranks} ranks"
        if self.device == "cpu":
            memory = "" if self.host_memory is None else f" and {self.host_memory / GIB:.1f} GiB of memory"
            return f"{several}no GPU, {self.cores} cores{memory}, {ranks}"
        gpus = "one GPU" if self.ranks == 1 else f"{self.ranks} GPUs"
        if self.gpus is not None and self.gpus > self.ranks:
            gpus = f"{self.ranks} of {self.gpus} GPUs (one for each rank)"
        return f"{several}{gpus} of {self.device_memory / GIB:.0f} GiB"


def described_machine(gpus: int, memory_gib: float, nodes: int = 1, host_gib: float | None = None) -> Machine:
    """A machine as it is told: what isn't told of its host is not known."""
    return Machine(
        device="cuda",
        ranks=gpus,
        cores=len(os.sched_getaffinity(0)),
        device_memory=int(memory_gib * GIB),
        host_memory=None if host_gib is None else int(host_gib * GIB),
        nodes=nodes,
    )


def here(environment: Mapping[str, str] = os.environ, *, started: bool = False) -> Machine:
    """This machine, for the ranks that a launcher started on it: DeepSpeed's says their number in LOCAL_SIZE,
    torchrun in LOCAL_WORLD_SIZE; those of all machines are WORLD_SIZE. Where no launcher did, it has a rank
    for each GPU, as a run will; or one, where this process is the run (`started`). Asks nvidia-smi, not
    PyTorch, so that nothing heavy is imported.

    Raises ValueError where nvidia-smi doesn't answer.
    """
    memories = _gpu_memories(environment)
    world = int(environment.get("WORLD_SIZE", "0"))
    local = int(environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE", "0"))
    ranks = local or world or (1 if started else max(1, len(memories)))
    return Machine(
        device="cuda" if memories else "cpu",
        ranks=ranks,
        cores=len(os.sched_getaffinity(0)),
        device_memory=min(memories, default=0),
        host_memory=host_memory(),
        shared_memory=shutil.disk_usage(MEMORY).total if os.access(MEMORY, os.W_OK) else 0,
        nodes=max(1, world // ranks),
        gpus=len(memories) or None,
    )


def _gpu_memories(environment: Mapping[str, str]) -> list[int]:
    """Of the GPUs that this process may use, in bytes."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip(" ,-1"):
        return []
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if visible:
        command += [f"--id={visible}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"nvidia-smi is here and doesn't say which GPUs there are ({error}): run it by hand; without"
            " GPUs, set CUDA_VISIBLE_DEVICES to nothing"
        ) from error
    return [int(line) * 2**20 for line in done.stdout.split() if line.isdecimal()]
