"""Where the processes of a run meet: on one machine, where nobody outside of it can reach them."""

from __future__ import annotations

import datetime
import socket
from collections.abc import MutableMapping

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"


def alone_on_one_machine(environment: MutableMapping[str, str]) -> bool:
    """Whether the launcher started all ranks here. DeepSpeed's says how many are here as LOCAL_SIZE, torchrun
    as LOCAL_WORLD_SIZE; where neither is said, more than one rank may be anywhere."""
    world_size = int(environment["WORLD_SIZE"])
    here = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or "1"
    return int(here) == world_size


def stay_on_loopback(environment: MutableMapping[str, str]) -> None:
    """gloo and NCCL listen on the interface of this machine's name unless told otherwise."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.setdefault(variable, LOOPBACK_INTERFACE)


def local_store(environment: MutableMapping[str, str], timeout: datetime.timedelta) -> dist.Store:
    """Where ranks of one machine find each other. PyTorch's own store listens on all interfaces: a single
    rank needs none that listens, and several have one on the loopback address. Raises ValueError where the
    port is taken."""
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world_size == 1:
        return dist.HashStore()
    port = int(environment["MASTER_PORT"])
    listening = None
    if rank == 0:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((LOOPBACK, port))
            except OSError as error:
                raise ValueError(
                    f"the ranks can't meet on port {port}: {error.strerror}. Give the launcher another"
                    " --master_port"
                ) from error
            server.listen()
            listening = server.detach()
    return dist.TCPStore(
        LOOPBACK, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listening
    )
