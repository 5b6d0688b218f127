"""The processes of a run: where they first meet, who this one is, and how they talk."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from treetune.models.pretrained import has_gpu
from treetune.store import held_folders

LOOPBACK_INTERFACE = "lo"


@dataclass(frozen=True)
class Meeting:
    """This process among the run's, before they can talk: the first one's store, where they find each other.

    Where all are on one machine, the store is a file that no other user can read or write, and gloo listens
    on the loopback; a single process has a store in its memory. Over several machines the first rank listens
    on all its interfaces, and gloo on the one that reaches the others: who reaches the port can take part.
    """

    rank: int
    world_size: int
    machine: int
    """Its machine's number, from 0, in the launcher's order."""
    machines: int
    deadline_s: float
    store: Any

    @staticmethod
    def join(environment: Mapping[str, str], deadline_s: float) -> Meeting:
        """Opens the store, or connects to it. Raises RuntimeError where the first rank can't be reached, or
        can't listen."""

        def number(*names: str, default: int) -> int:
            return next((int(environment[name]) for name in names if name in environment), default)

        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        machines = number("CROSS_SIZE", "GROUP_WORLD_SIZE", default=1)
        machine = number("CROSS_RANK", "GROUP_RANK", default=0)
        timeout = datetime.timedelta(seconds=deadline_s)
        if world_size == 1:
            store: Any = dist.HashStore()
        elif machines > 1 and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        elif machines == 1:
            store = dist.FileStore(
                str(_private_folder(environment["MASTER_PORT"], rank) / "store"), world_size
            )
        else:
            address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
            try:
                store = dist.TCPStore(
                    address, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False
                )
            except (OSError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                if rank == 0:
                    raise RuntimeError(
                        f"{platform.node()} can't listen on port {port}, where the ranks meet: {reason};"
                        " name another one (--master_port, MASTER_PORT)"
                    ) from error
                raise RuntimeError(
                    f"rank {rank} on {platform.node()} can't reach the first rank at {address}:{port} within"
                    f" {deadline_s:.0f} s: {reason}; the name must lead to the first machine from here, and"
                    " its port must be open"
                ) from error
        return Meeting(rank, world_size, machine, machines, deadline_s, store)

    def exchange(self, name: str, own: Any) -> list[Any]:
        """Everyone's JSON value, in rank order. Raises RuntimeError that says who didn't come in time."""
        self.store.set(f"{name}/{self.rank}", json.dumps([self.machine, own]))
        deadline = time.monotonic() + self.deadline_s
        values = []
        for rank in range(self.world_size):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                self.store.wait([f"{name}/{rank}"], datetime.timedelta(seconds=left))
            except RuntimeError as error:
                raise RuntimeError(self._who_is_missing(name)) from error
            values.append(json.loads(self.store.get(f"{name}/{rank}"))[1])
        return values

    def _who_is_missing(self, name: str) -> str:
        came = [rank for rank in range(self.world_size) if self.store.check([f"{name}/{rank}"])]
        missing = [str(rank) for rank in range(self.world_size) if rank not in came]
        there = {json.loads(self.store.get(f"{name}/{rank}"))[0] for rank in came}
        away = [str(number + 1) for number in range(self.machines) if number not in there]
        where = f", all of them on machine {', '.join(away)} of {self.machines}" if away else ""
        return (
            f"rank {self.rank} on {platform.node()} waited {self.deadline_s:.0f} s for rank"
            f" {', '.join(missing)}{where}: see what it printed, or whether it was started"
        )

    def interface(self) -> tuple[str, str]:
        """(name, address) of the network interface by which this machine talks to the others: the one that
        GLOO_SOCKET_IFNAME names, or else the one by which it reaches them. Raises ValueError where there is
        none of that name.
        """
        interfaces = psutil.net_if_addrs()
        if named := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
            for family in (socket.AF_INET, socket.AF_INET6):
                for found in interfaces.get(named, ()):
                    if found.family == family:
                        return named, str(found.address)
            raise ValueError(
                f"{platform.node()} has no network interface {named} with an address, which"
                f" GLOO_SOCKET_IFNAME names; it has {', '.join(sorted(interfaces))}"
            )
        key = "address elsewhere"
        if self.machine:
            other = os.environ["MASTER_ADDR"]
        else:
            # The first machine's own name may be a loopback address there: it takes the way to another one.
            try:
                self.store.wait([key], datetime.timedelta(seconds=self.deadline_s))
            except RuntimeError as error:
                raise RuntimeError(
                    f"no rank of another machine has come to {platform.node()} within {self.deadline_s:.0f} s"
                ) from error
            other = self.store.get(key).decode()
        family = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect((other, 9))  # nothing is sent
            address = towards.getsockname()[0]
        if self.machine:
            self.store.set(key, address)
        for name, addresses in interfaces.items():
            if any(found.address.partition("%")[0] == address for found in addresses):
                return name, address
        raise ValueError(f"no network interface of {platform.node()} has the address {address}")


def _private_folder(port: str, rank: int) -> Path:
    """Returns a folder of this user's for the ranks that one launcher has started. Raises ValueError where
    another user has it."""
    if held_folders.MEETING in os.environ:
        folder = Path(os.environ[held_folders.MEETING])
    else:
        # Another launcher's ranks know of each other only who started them.
        launcher = psutil.Process(os.getppid())
        name = f"{held_folders.PREFIX}meeting-{launcher.pid}-{round(launcher.create_time() * 100)}-{port}"
        folder = Path(tempfile.gettempdir()) / name
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    about = folder.lstat()
    if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o077:
        raise ValueError(
            f"{folder}, where the ranks meet, is of user {about.st_uid}, open to others or no folder: have it"
            " deleted, or set TMPDIR to a folder of your own"
        )
    if rank == 0:
        held_folders.hold(folder)
    return folder


def refuse_unusable_gpu(environment: Mapping[str, str], cuda: str | None, is_available: bool) -> None:
    """Raises ValueError where a GPU is here and PyTorch, built for CUDA `cuda` or (None) for a CPU, can't use
    it: the run would go on, on the CPU, a hundred times slower."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES") == "" or environment.get("DS_ACCELERATOR") == "cpu"
    if is_available or hidden or not has_gpu():
        return
    why = f"built for CUDA {cuda}, can't use it: nvidia-smi says which driver there is, and scripts/setup.sh"
    why += " whether it is too old"
    if cuda is None:
        why = "built for a CPU, can't use it: TREETUNE_DEVICE=nvidia ./scripts/setup.sh makes .venv anew"
    raise ValueError(
        f"this machine has an NVIDIA GPU, and PyTorch, {why}. To run on the CPU all the same, set"
        " CUDA_VISIBLE_DEVICES to nothing"
    )


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
        """Joins the processes that the launcher started; alone if there is no launcher. `agree` is called
        when all have met and before they talk. Raises ValueError where a GPU is here that can't be used."""
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

    def for_thread(self) -> Ranks:
        """The same processes, for a second thread of each, which meets the others' threads while the first
        ones meet: for everything but `sum` and `group`. Collective.
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
        """Everyone's object for this rank, in rank order; `for_each` holds this rank's for each."""
        if self.world_size == 1:
            return list(for_each)
        self.barrier(name)
        received = []
        for source in range(self.world_size):
            box: list[Any] = [None]
            sent = list(for_each) if source == self.rank else None
            dist.scatter_object_list(box, sent, src=source, group=self.objects)
            received += box
        return received

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
