"""How the processes of a run first meet: at a store of the first one's, before they talk to each other."""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from treetune.inference import scratch

LOOPBACK_INTERFACE = "lo"


@dataclass(frozen=True)
class Meeting:
    """This process among the run's, and what it knows of where they are.

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
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        machines = _first(environment, "CROSS_SIZE", "GROUP_WORLD_SIZE", default=1)
        machine = _first(environment, "CROSS_RANK", "GROUP_RANK", default=0)
        if world_size == 1:
            store: Any = dist.HashStore()
        elif machines > 1 and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=deadline_s)))
        elif machines == 1:
            store = dist.FileStore(
                str(_private_folder(environment["MASTER_PORT"], rank) / "store"), world_size
            )
        else:
            store = _store(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), rank, deadline_s)
        return Meeting(rank, world_size, machine, machines, deadline_s, store)

    def exchange(self, name: str, own: Any) -> list[Any]:
        """Everyone's JSON value, in rank order. Raises RuntimeError that says who didn't come in time."""
        self.store.set(f"{name}/{self.rank}", json.dumps([self.machine, own]))
        deadline = time.monotonic() + self.deadline_s
        found = []
        for rank in range(self.world_size):
            key = f"{name}/{rank}"
            left = max(deadline - time.monotonic(), 0.001)
            try:
                self.store.wait([key], datetime.timedelta(seconds=left))
            except RuntimeError as error:
                raise RuntimeError(self._who_is_missing(name)) from error
            found.append(json.loads(self.store.get(key))[1])
        return found

    def interface(self) -> tuple[str, str]:
        """(name, address) of the network interface by which this machine talks to the others: the one that
        GLOO_SOCKET_IFNAME names, or else the one by which it reaches them. Raises ValueError where there is
        none of that name.
        """
        named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if named:
            return named, _address_of(named)
        # The first machine's own name may be a loopback address there: it asks for the way to another one.
        other = os.environ["MASTER_ADDR"] if self.machine else self._address_elsewhere()
        with socket.socket(_family(other), socket.SOCK_DGRAM) as way:
            way.connect((other, 9))  # nothing is sent
            address = way.getsockname()[0]
        if self.machine:
            self.store.set("address elsewhere", address)
        return _interface_of(address), address

    def _address_elsewhere(self) -> str:
        key = "address elsewhere"
        try:
            self.store.wait([key], datetime.timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            raise RuntimeError(
                f"no rank of another machine has come to {platform.node()} within {self.deadline_s:.0f} s"
            ) from error
        return self.store.get(key).decode()

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


def _private_folder(port: str, rank: int) -> Path:
    """A folder of this user's for the ranks that one launcher has started. Raises ValueError where another
    user has it."""
    launcher = psutil.Process(os.getppid())
    name = f"{scratch.PREFIX}meeting-{launcher.pid}-{round(launcher.create_time() * 100)}-{port}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o077:
        raise ValueError(
            f"{folder}, where the ranks meet, is of user {about.st_uid} or open to others: have it"
            " deleted, or set TMPDIR to a folder of your own"
        )
    if rank == 0:
        scratch.hold(folder)
    return folder


def _store(address: str, port: int, rank: int, deadline_s: float) -> Any:
    timeout = datetime.timedelta(seconds=deadline_s)
    try:
        return dist.TCPStore(address, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        if rank == 0:
            raise RuntimeError(
                f"{platform.node()} can't listen on port {port}, where the ranks meet: {_first_line(error)};"
                " name another one (--master_port, MASTER_PORT)"
            ) from error
        raise RuntimeError(
            f"rank {rank} on {platform.node()} can't reach the first rank at {address}:{port} within"
            f" {deadline_s:.0f} s: {_first_line(error)}; the name must lead to the first machine from here,"
            " and its port must be open"
        ) from error


def _first(environment: Mapping[str, str], *names: str, default: int) -> int:
    return next((int(environment[name]) for name in names if name in environment), default)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _family(address: str) -> int:
    return socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0][0]


def _address_of(interface: str) -> str:
    there = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in there.get(interface, ()):
            if one.family == family:
                return str(one.address)
    raise ValueError(
        f"{platform.node()} has no network interface {interface} with an address, which GLOO_SOCKET_IFNAME"
        f" names; it has {', '.join(sorted(there))}"
    )


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    raise ValueError(f"no network interface of {platform.node()} has the address {address}")
