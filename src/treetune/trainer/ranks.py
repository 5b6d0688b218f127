"""Joins the processes (ranks) of a run, and lets them communicate.

::

    Meeting.join      each rank finds the first one's store: a key-value store in a file (one machine) or
                      at a port (several machines)
    agree(meeting)    checks that need only the store, such as equal versions on all machines
    process groups    nccl or gloo for tensors, gloo for Python objects and barriers
    Ranks             collective methods: every rank calls the same ones in the same order

Every wait has a deadline and a name, which the message of a failure contains.
"""

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

from treetune.exceptions import SameOnAllRanks
from treetune.models.pretrained import has_gpu
from treetune.store import held_folders

LOOPBACK_INTERFACE = "lo"
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The environment variables that name the network interfaces which gloo and NCCL use."""


@dataclass(frozen=True)
class Meeting:
    """This rank and the store in which the ranks find each other, before there are process groups.

    On one machine, the store is a file that no other user can access, and gloo listens on the loopback
    interface. Over several machines, the first rank listens on all interfaces, and gloo on the interface that
    reaches the other machines. Every process that reaches these ports can take part, so they belong behind a
    firewall. If the run has a single process, the store is in its memory.
    """

    rank: int
    world_size: int
    machine: int
    """The number of its machine, from 0, in the launcher's order."""
    machines: int
    deadline_s: float
    store: Any

    @staticmethod
    def join(environment: Mapping[str, str], deadline_s: float) -> Meeting:
        """Opens the store, or connects to it.

        Raises:
            RuntimeError: The first rank can't be reached, or can't listen.
            ValueError: The folder for the store on one machine is not a private one.
        """

        def read_number(*names: str, default: int) -> int:
            """Returns the value of the first of these variables that is set, or else the default."""
            return next((int(environment[name]) for name in names if name in environment), default)

        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        # DeepSpeed's launcher sets the first name of each pair, torchrun the second.
        machines = read_number("CROSS_SIZE", "GROUP_WORLD_SIZE", default=1)
        machine = read_number("CROSS_RANK", "GROUP_RANK", default=0)
        timeout = datetime.timedelta(seconds=deadline_s)
        if world_size == 1:  # a store in memory, since no other process needs it
            store: Any = dist.HashStore()
        elif machines > 1 and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun has a store already, and PyTorch knows how to connect to it.
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        elif machines == 1:
            # A file, which no other user can access. In a store at a port, any process could take part.
            store = dist.FileStore(
                str(_make_private_folder(environment["MASTER_PORT"], rank) / "store"), world_size
            )
        else:
            address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
            try:
                # The store doesn't wait for the other ranks: `exchange` does, and names the missing ones.
                store = dist.TCPStore(
                    address, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False
                )
            except (OSError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                if rank == 0:
                    raise RuntimeError(
                        f"{platform.node()} can't listen on port {port}, to which the other ranks connect:"
                        f" {reason}; choose another port (--master_port, MASTER_PORT)"
                    ) from error
                raise RuntimeError(
                    f"rank {rank} on {platform.node()} can't reach the first rank at {address}:{port} within"
                    f" {deadline_s:.0f} s: {reason}; this machine must be able to resolve the address, and"
                    " the port must be open"
                ) from error
        return Meeting(rank, world_size, machine, machines, deadline_s, store)

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Returns the JSON values of all ranks, in rank order. Collective.

        Args:
            name: The name under which the values are in the store. No other exchange may have it.
            value: This rank's value.

        Raises:
            RuntimeError: A rank has sent none within the deadline; the message names it.
        """
        self.store.set(f"{name}/{self.rank}", json.dumps([self.machine, value]))
        deadline = time.monotonic() + self.deadline_s
        values = []
        for rank in range(self.world_size):
            # The time is above 0 even after the deadline, so `wait` then still returns values that have
            # arrived.
            remaining_s = max(deadline - time.monotonic(), 0.001)
            try:
                self.store.wait([f"{name}/{rank}"], datetime.timedelta(seconds=remaining_s))
            except RuntimeError as error:
                raise RuntimeError(self._describe_missing(name)) from error
            _, value_of_rank = json.loads(self.store.get(f"{name}/{rank}"))
            values.append(value_of_rank)
        return values

    def refuse_problems(self, name: str, problem: str | None) -> None:
        """Raises SameOnAllRanks on every rank if a rank has a problem, with the problems of all ranks.
        Collective.

        Args:
            name: The name of the exchange; see `exchange`.
            problem: This rank's problem; None if it has none.
        """
        problem_by_rank = self.exchange(name, problem)
        problems = [message for message in problem_by_rank if message is not None]
        if problems:
            # All ranks raise, and their processes end. The store may be in the first rank's process. So every
            # rank waits here until all ranks have read the problems, or until the deadline.
            with contextlib.suppress(RuntimeError):
                self.exchange(f"all know: {name}", True)
            raise SameOnAllRanks("\n".join(dict.fromkeys(problems)))  # ranks of a machine report the same

    def _describe_missing(self, name: str) -> str:
        """Returns a message that names the ranks without a value, and the machines without any rank."""
        present = [rank for rank in range(self.world_size) if self.store.check([f"{name}/{rank}"])]
        missing = [str(rank) for rank in range(self.world_size) if rank not in present]
        machines_present = set()
        for rank in present:
            machine, _ = json.loads(self.store.get(f"{name}/{rank}"))
            machines_present.add(machine)
        machines_absent = [
            str(number + 1) for number in range(self.machines) if number not in machines_present
        ]
        absent = ""
        if machines_absent:
            absent = f", and no rank of machine {', '.join(machines_absent)} of {self.machines} has answered"
        return (
            f"rank {self.rank} on {platform.node()} waited {self.deadline_s:.0f} s for rank"
            f" {', '.join(missing)}{absent}: see what it printed, or whether it was started"
        )

    def find_interface(self) -> tuple[str, str]:
        """Returns the name and the address of the network interface that reaches the other machines: the one
        that GLOO_SOCKET_IFNAME names, or else the one of the route to them.

        Raises:
            RuntimeError: This is the first machine, and no rank of another machine has connected in time.
            ValueError: There is no such interface.
        """
        # The store's key for the address of a rank that is not on the first machine.
        key = "address elsewhere"
        is_first_machine = self.machine == 0
        if configured_name := os.environ.get(GLOO_INTERFACE, "").split(",")[0]:
            configured_address = _find_address(configured_name)
            if configured_address is None:
                raise ValueError(_describe_missing_interface(GLOO_INTERFACE, configured_name))
            if not is_first_machine:
                # The first machine waits for it below if the variable isn't set there.
                self.store.set(key, configured_address)
            return configured_name, configured_address
        if not is_first_machine:
            other_address = os.environ["MASTER_ADDR"]
        else:
            # On the first machine, MASTER_ADDR may be a loopback address. So a rank here waits until a rank
            # of another machine has stored its address, and takes the route to that address.
            try:
                self.store.wait([key], datetime.timedelta(seconds=self.deadline_s))
            except RuntimeError as error:
                raise RuntimeError(
                    f"no rank of another machine has connected to {platform.node()} within"
                    f" {self.deadline_s:.0f} s"
                ) from error
            other_address = self.store.get(key).decode()
        # Connecting a UDP socket sends nothing, and makes the kernel choose the interface. Any port will do:
        # 9 is that of the service "discard".
        port = 9
        route = socket.getaddrinfo(other_address, port, type=socket.SOCK_DGRAM)[0]
        family = route[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other_address, port))
            address = probe.getsockname()[0]
        if not is_first_machine:
            self.store.set(key, address)
        for name, addresses in psutil.net_if_addrs().items():
            # An address of IPv6 ends with its interface: fe80::1%eth0.
            if any(entry.address.partition("%")[0] == address for entry in addresses):
                return name, address
        raise ValueError(f"no network interface of {platform.node()} has the address {address}")


def _find_address(interface: str) -> str | None:
    """Returns the IPv4 address of a network interface of this machine, or else its IPv6 address. Returns None
    if it has none, or if there is no such interface."""
    addresses = psutil.net_if_addrs().get(interface, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in addresses:
            if entry.family == family:
                return str(entry.address)
    return None


def _describe_missing_interface(variable: str, name: str) -> str:
    return (
        f"{platform.node()} has no network interface {name} with an address, which {variable} names; it has"
        f" {', '.join(sorted(psutil.net_if_addrs()))}: set {variable} to one of these, or unset it"
    )


def find_missing_interface(environment: Mapping[str, str], *, uses_gloo: bool, uses_nccl: bool) -> str | None:
    """Returns a message if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that this machine
    doesn't have; None if all is well. The libraries' own messages don't name the variable.
    """
    if uses_gloo:  # gloo needs all interfaces of the list
        for name in environment.get(GLOO_INTERFACE, "").split(","):
            if name and _find_address(name) is None:
                return _describe_missing_interface(GLOO_INTERFACE, name)
    names = environment.get(NCCL_INTERFACE, "")
    if uses_nccl and names and not names.startswith("^"):  # "^eth0,lo": all interfaces but these
        # NCCL needs one interface of the list. "eth" stands for all names that begin so, "=eth" for this one.
        present_interfaces = [name for name in psutil.net_if_addrs() if _find_address(name) is not None]
        if names.startswith("="):
            is_there = any(name in present_interfaces for name in names[1:].split(","))
        else:
            prefixes = tuple(name for name in names.split(",") if name)
            is_there = any(name.startswith(prefixes) for name in present_interfaces)
        if not is_there:
            return _describe_missing_interface(NCCL_INTERFACE, names)
    return None


def _make_private_folder(port: str, rank: int) -> Path:
    """Returns a folder for the ranks of one launcher, which no other user can access.

    Raises:
        ValueError: The folder belongs to another user, is open to other users, or is not a folder.
    """
    if held_folders.MEETING_VARIABLE in os.environ:  # `treetune run` has made the folder
        folder = Path(os.environ[held_folders.MEETING_VARIABLE])
    else:
        # The ranks have nothing in common but their launcher. The launcher's start time is part of the name,
        # since a later launcher may get the same process id.
        launcher = psutil.Process(os.getppid())
        start_in_hundredths = round(launcher.create_time() * 100)  # of a second
        name = f"{held_folders.FOLDER_PREFIX}meeting-{launcher.pid}-{start_in_hundredths}-{port}"
        folder = Path(tempfile.gettempdir()) / name
        with contextlib.suppress(FileExistsError):  # another rank was faster, or it is refused below
            folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise ValueError(
            f"{folder}, through which the ranks communicate, belongs to user {status.st_uid}, is open to"
            " other users or is not a folder: have it deleted, or set TMPDIR to a folder of your own"
        )
    if rank == 0:
        # `held_folders.delete_abandoned_folders` deletes folders that no living process holds. Only a single
        # process can hold a folder, so the first rank does it for all.
        held_folders.hold_folder(folder)
    return folder


def refuse_unusable_gpu(environment: Mapping[str, str], cuda: str | None, is_available: bool) -> None:
    """Raises ValueError if the machine has a GPU that PyTorch can't use: the run would continue on the CPU,
    a hundred times slower.

    Args:
        cuda: The version of CUDA that PyTorch was built for; None for a CPU.
        is_available: Whether PyTorch can use a GPU.
    """
    is_hidden = environment.get("CUDA_VISIBLE_DEVICES") == "" or environment.get("DS_ACCELERATOR") == "cpu"
    if is_available or is_hidden or not has_gpu():
        return
    if cuda is None:
        reason = "it is built for CPUs only. TREETUNE_DEVICE=nvidia ./scripts/setup.sh makes a new .venv"
    else:
        reason = (
            f"the driver may be too old for CUDA {cuda}, which it is built for. nvidia-smi prints the"
            " driver's version, and scripts/setup.sh the version that is needed"
        )
    raise ValueError(
        f"this machine has an NVIDIA GPU that PyTorch can't use: {reason}. To run on the CPU nevertheless,"
        " set CUDA_VISIBLE_DEVICES to an empty value"
    )


@dataclass(frozen=True)
class Ranks:
    """This process (rank) among those of the run.

    Every method is collective: all ranks call the same ones in the same order. If a rank doesn't within
    `deadline_s`, the others raise an error that names the call.
    """

    rank: int
    world_size: int
    device: torch.device
    deadline_s: float
    object_group: Any = None
    """The process group for Python objects and barriers: gloo on every device, since nccl's deadlines don't
    name the missing rank."""

    @staticmethod
    def join(deadline_s: float, agree: Callable[[Meeting], None] | None = None) -> Ranks:
        """Joins the processes that the launcher started; a process without a launcher is the only rank.

        Args:
            agree: Checks that all ranks agree, for example on versions. It is called before there are process
                groups, and needs only the key-value store of the meeting.

        Raises:
            ValueError: PyTorch can't use the machine's GPU, or the machine doesn't have the network interface
                that a variable of gloo or NCCL names.
        """
        refuse_unusable_gpu(os.environ, torch.version.cuda, torch.cuda.is_available())
        if not torch.cuda.is_available():
            # Set before the import of DeepSpeed, which otherwise warns that it finds no accelerator.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        import deepspeed.ops

        # DeepSpeed looks for MPI if a variable is missing. So these three variables are set here, and
        # MASTER_ADDR and MASTER_PORT below.
        for name, value_if_alone in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value_if_alone)
        world_size = int(os.environ["WORLD_SIZE"])
        if "MASTER_PORT" not in os.environ:
            assert world_size == 1, "a launcher that starts several ranks sets MASTER_PORT"
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"
        local_rank = int(os.environ["LOCAL_RANK"])
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank)
            device, backend = torch.device("cuda", local_rank), "nccl"
        else:
            device, backend = torch.device("cpu"), "gloo"
            # DeepSpeed's own sums over shared memory take a minute to compile, leave files in /dev/shm, and
            # wait for a dead rank for ever. Gloo's have a deadline.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        timeout = datetime.timedelta(seconds=deadline_s)
        if not dist.is_initialized():  # a process that has joined already keeps its default group
            meeting = Meeting.join(os.environ, deadline_s)
            if meeting.machines == 1:
                # On the loopback interface, no other machine can connect to the ranks.
                for variable in (GLOO_INTERFACE, NCCL_INTERFACE):
                    os.environ.setdefault(variable, LOOPBACK_INTERFACE)
            exchanges_objects = world_size > 1  # by gloo, also on GPUs; see `object_group`
            missing_interface = find_missing_interface(
                os.environ,
                uses_gloo=backend == "gloo" or exchanges_objects,
                uses_nccl=backend == "nccl",
            )
            meeting.refuse_problems("network interfaces", missing_interface)
            if agree is not None:
                agree(meeting)
            dist.init_process_group(
                backend, store=meeting.store, rank=meeting.rank, world_size=world_size, timeout=timeout
            )
            # DeepSpeed takes over this process group, instead of making another.
            deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
        object_group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
        return Ranks(dist.get_rank(), world_size, device, deadline_s, object_group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def group(self, size: int) -> Any:
        """Returns the process group through which this rank exchanges tensors with its neighbours.

        Example: with 4 ranks and `size` 2, the groups are the ranks 0 and 1, and the ranks 2 and 3.
        """
        assert self.world_size % size == 0
        timeout = datetime.timedelta(seconds=self.deadline_s)
        # Every rank must make all groups, also those that it isn't in.
        groups = []
        for start in range(0, self.world_size, size):
            groups.append(dist.new_group(list(range(start, start + size)), timeout=timeout))
        return groups[self.rank // size]

    def for_thread(self) -> Ranks:
        """Returns these ranks for the second thread of each process.

        The second threads get a process group of their own for objects and barriers, so that they can
        communicate while the first threads do. Only the first threads may call `sum` and `group`. Collective.
        """
        if self.world_size == 1:
            return self
        timeout = datetime.timedelta(seconds=self.deadline_s)
        return replace(self, object_group=dist.new_group(backend="gloo", timeout=timeout))

    def barrier(self, name: str) -> None:
        """Waits until all ranks have called this method.

        If a rank doesn't call it in time, the error's message has the `name` and the missing rank. The
        methods below that exchange objects first call `barrier`, since the errors of the exchanges don't say
        which rank is missing.
        """
        if self.world_size == 1:
            return
        try:
            dist.monitored_barrier(self.object_group, datetime.timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited {self.deadline_s:.0f} s for the others at '{name}': {error}"
            ) from error

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Returns the objects of all ranks, in rank order."""
        if self.world_size == 1:
            return [value]
        self.barrier(name)  # its error names a missing rank; that of the exchange doesn't
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.object_group)
        return values

    def from_first(self, name: str, value: Any) -> Any:
        """Returns the first rank's object, on every rank."""
        if self.world_size == 1:
            return value
        self.barrier(name)  # its error names a missing rank; that of the exchange doesn't
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.object_group)
        return values[0]

    def to_first(self, name: str, value: Any) -> list[Any]:
        """Returns the objects of all ranks, in rank order, on the first rank; an empty list on the others."""
        if self.world_size == 1:
            return [value]
        self.barrier(name)  # its error names a missing rank; that of the exchange doesn't
        values: list[Any] | None = [None] * self.world_size if self.is_first else None
        dist.gather_object(value, values, dst=0, group=self.object_group)
        return values or []

    def hand_out(self, name: str, for_ranks: Sequence[Any]) -> list[Any]:
        """Sends an object to each rank, and returns the objects that all ranks have sent to this one, in rank
        order.

        Example: with two ranks, of which rank 0 sends ``["a", "b"]`` and rank 1 ``["c", "d"]``, rank 0 gets
        ``["a", "c"]`` and rank 1 gets ``["b", "d"]``.
        """
        if self.world_size == 1:
            return list(for_ranks)
        self.barrier(name)  # its error names a missing rank; that of the exchange doesn't
        received = []
        for source in range(self.world_size):
            output: list[Any] = [None]  # gets the object that `source` sends to this rank
            sent_values = list(for_ranks) if source == self.rank else None
            dist.scatter_object_list(output, sent_values, src=source, group=self.object_group)
            received += output
        return received

    def machines(self) -> list[str]:
        """Returns the machine names of all ranks, in rank order."""
        return self.exchange("machines", platform.node())

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place, and returns it."""
        if self.world_size > 1:
            on_device = tensor.to(self.device)
            dist.all_reduce(on_device)
            tensor.copy_(on_device)
        return tensor

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
