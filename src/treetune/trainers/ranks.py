"""The processes of a run: who this one is, and how they talk."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treetune.models.kernels import refuse_unusable_gpu
from treetune.trainers.meeting import LOOPBACK_INTERFACE, Meeting


@dataclass(frozen=True)
class Ranks:
    """This process among the run's. Every method is a collective: all ranks call it, in one order.

    A rank that doesn't come within `deadline_s` ends the others with an error that names the
    meeting place, instead of leaving them waiting.
    """

    rank: int
    world_size: int
    device: torch.device
    deadline_s: float
    objects: Any = None
    """Group for Python objects and barriers: gloo on every device, since nccl has no deadline
    that names who is missing."""

    @staticmethod
    def join(deadline_s: float, agree: Callable[[Meeting], None] | None = None) -> Ranks:
        """Joins the processes that the launcher started; alone if there is no launcher. `agree` is asked when
        all have met and before they talk. Raises ValueError where a GPU is here that can't be used."""
        refuse_unusable_gpu(os.environ, torch.version.cuda, torch.cuda.is_available())
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found no other
        import deepspeed
        import deepspeed.ops

        for name, alone in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, alone)
        world_size = int(os.environ["WORLD_SIZE"])
        if "MASTER_PORT" not in os.environ:
            assert world_size == 1, "a launcher that starts several ranks names their meeting port"
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"
        local_rank = int(os.environ["LOCAL_RANK"])
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank)
            device, backend = torch.device("cuda", local_rank), "nccl"
        else:
            device, backend = torch.device("cpu"), "gloo"
            # DeepSpeed's own sums over shared memory take a minute to compile, stay behind in
            # /dev/shm, and wait for a dead rank for ever; gloo's have a deadline.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        timeout = datetime.timedelta(seconds=deadline_s)
        if not dist.is_initialized():
            meeting = Meeting.join(os.environ, deadline_s)
            if meeting.machines == 1:
                for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                    os.environ.setdefault(variable, LOOPBACK_INTERFACE)
            if agree is not None:
                agree(meeting)
            dist.init_process_group(
                backend, store=meeting.store, rank=meeting.rank, world_size=world_size, timeout=timeout
            )
            deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
        objects = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
        return Ranks(dist.get_rank(), world_size, device, deadline_s, objects)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def group(self, size: int) -> Any:
        """This rank's group among groups of `size` neighbours, for collectives on tensors."""
        assert self.world_size % size == 0
        groups = [
            dist.new_group(
                list(range(first, first + size)), timeout=datetime.timedelta(seconds=self.deadline_s)
            )
            for first in range(0, self.world_size, size)
        ]
        return groups[self.rank // size]

    def aside(self) -> Ranks:
        """The same processes, for a thread of each that meets the others' while these ones meet: everything
        but `sum` and `group`. Collective.
        """
        if self.world_size == 1:
            return self
        timeout = datetime.timedelta(seconds=self.deadline_s)
        return replace(self, objects=dist.new_group(backend="gloo", timeout=timeout))

    def barrier(self, name: str) -> None:
        if self.world_size == 1:
            return
        try:
            dist.monitored_barrier(self.objects, datetime.timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited {self.deadline_s:.0f} s for the others at '{name}': {error}"
            ) from error

    def exchange(self, name: str, own: Any) -> list[Any]:
        """Everyone's object, in rank order."""
        if self.world_size == 1:
            return [own]
        self.barrier(name)
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, own, group=self.objects)
        return gathered

    def from_first(self, name: str, own: Any) -> Any:
        """The first rank's object."""
        if self.world_size == 1:
            return own
        self.barrier(name)
        box = [own]
        dist.broadcast_object_list(box, src=0, group=self.objects)
        return box[0]

    def to_first(self, name: str, own: Any) -> list[Any]:
        """Everyone's object, in rank order, on the first rank; nothing on the others."""
        if self.world_size == 1:
            return [own]
        self.barrier(name)
        gathered: list[Any] | None = [None] * self.world_size if self.is_first else None
        dist.gather_object(own, gathered, dst=0, group=self.objects)
        return gathered or []

    def hand_out(self, name: str, for_each: Sequence[Any]) -> list[Any]:
        """What every rank has for this one, in rank order; `for_each` has this one's for each."""
        if self.world_size == 1:
            return list(for_each)
        self.barrier(name)
        found = []
        for source in range(self.world_size):
            box: list[Any] = [None]
            given = list(for_each) if source == self.rank else None
            dist.scatter_object_list(box, given, src=source, group=self.objects)
            found += box
        return found

    def machines(self) -> list[str]:
        """The name of everyone's machine, in rank order."""
        return self.exchange("machines", platform.node())

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.world_size > 1:
            on_device = tensor.to(self.device)
            dist.all_reduce(on_device)
            tensor.copy_(on_device)
        return tensor

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
