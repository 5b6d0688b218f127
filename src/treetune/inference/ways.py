"""Which way new weights take into an engine, by where trainer and engine live."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treetune.inference.launch import Way

WeightTransferSetting = Literal["auto", "file", "shared_memory", "cuda_ipc", "nccl"]

SETTING = "engines.policy.weight_transfer"
MEMORY = Path("/dev/shm")
VERSIONS = 2
"""Of whole weights that lie there at once."""

ON_THE_DEVICE: frozenset[Way] = frozenset({"cuda_ipc", "nccl"})
"""Ways that take weights from where the trainer has them."""


@dataclass(frozen=True)
class Places:
    """Where the trainer's ranks are (`machines`, in their order, training on `device`) and the engine's
    servers: `replicas` for each rank or for all, of one GPU or several, on the GPUs `devices` (None: the
    ranks')."""

    device: str
    machines: tuple[str, ...]
    per_rank: bool
    devices: tuple[int, ...] | None
    tensor_parallel_size: int
    replicas: int = 1
    adapters: bool = False
    by_address: bool = False
    """Whether somebody else started the servers, on whichever machines."""

    @property
    def ranks_gpus(self) -> set[int]:
        """A rank trains on the GPU of its number on its machine."""
        return set(range(max(Counter(self.machines).values())))

    @property
    def one_machine(self) -> bool:
        return len(set(self.machines)) == 1


def choose(setting: WeightTransferSetting, places: Places) -> tuple[Way, str]:
    """The way, and in words why. Raises ValueError where it can't be the one that is set."""
    obstacles = _obstacles(places)
    if places.adapters:
        if setting in ("auto", "file"):
            return "file", "what is sent are adapters, which the server reads from a small file"
        raise ValueError(
            f"{SETTING} is {setting!r}, and trainer.lora.send is 'adapters', which the server reads from a"
            f" file: set {SETTING} to 'auto', or trainer.lora.send to 'merged'"
        )
    if setting != "auto":
        if problem := obstacles.get(setting):
            raise ValueError(f"{SETTING} is {setting!r}, and {problem}")
        return setting, f"{SETTING} says so"
    if places.by_address:
        return "file", "its servers read the experiment's folder, which their machines see"
    for way, why in _REASONS.items():
        if way not in obstacles:
            return way, why
    return "file", "neither has the engine GPUs of its own, nor each rank one server on its GPU"


_REASONS: Mapping[Way, str] = {
    "cuda_ipc": "each server shares the GPU of its rank",
    "nccl": "the engine has GPUs of its own on this machine",
}
"""What ``auto`` takes, from the fastest on, with what speaks for each; ``file`` is left where none can be.
``shared_memory`` is for whoever asks for it: no server has shown so far that it is faster than a file in
/dev/shm."""


def _obstacles(places: Places) -> dict[Way, str]:
    """What is in the way of each way that can't be, and what would be right."""
    found: dict[Way, str] = {}
    if places.by_address:
        found["cuda_ipc"] = found["shared_memory"] = (
            "its servers are reached by address, as on other machines: choose 'file' or 'nccl'"
        )
        if places.device != "cuda":
            found["nccl"] = "the trainer is on a CPU: choose 'file'"
        return found
    alone = places.per_rank or len(places.machines) == 1
    if places.device != "cuda":
        found["cuda_ipc"] = found["nccl"] = "the trainer is on a CPU: choose 'shared_memory' or 'file'"
    else:
        if places.devices or not alone or places.replicas > 1 or places.tensor_parallel_size > 1:
            found["cuda_ipc"] = (
                "that needs a server of one GPU for each rank, which is the rank's own: leave devices out,"
                " set replicas and tensor_parallel_size to 1 and, with several ranks, servers to 'per_rank'"
            )
        if places.devices is None:
            found["nccl"] = "the engine shares the trainer's GPUs, which NCCL can't connect: name its devices"
        elif shared := sorted(places.ranks_gpus.intersection(places.devices)):
            found["nccl"] = (
                f"GPUs {shared} of its devices are the trainer's, and NCCL can't connect a GPU with itself:"
                " name others"
            )
    if not places.one_machine:
        found["shared_memory"] = "the ranks are on several machines: choose 'file'"
    elif not os.access(MEMORY, os.W_OK):
        found["shared_memory"] = f"{MEMORY} can't be written to here: choose 'file'"
    return found
