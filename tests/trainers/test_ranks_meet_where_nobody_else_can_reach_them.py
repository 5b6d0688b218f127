"""Ranks of one machine listen on its loopback address alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from treetune.trainers.rendezvous import alone_on_one_machine

PROGRAM = """
import json, os, socket, sys
from pathlib import Path
from treetune.trainers.ranks import Ranks

ranks = Ranks.join(60.0)
ranks.barrier("everybody listens")
own = {os.readlink(one).strip("socket:[]") for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
listening = []
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in own:
            listening.append(fields[1].rpartition(":")[0])
found = ranks.exchange("what listens", listening)
if ranks.is_first:
    print(json.dumps(found))
ranks.leave()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_of_a_rank_listens_beyond_this_machine(world_size: int) -> None:
    environment = {name: value for name, value in os.environ.items() if "SOCKET_IFNAME" not in name}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if world_size > 1:  # as DeepSpeed's launcher says it
        environment |= {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment["MASTER_PORT"] = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdout=subprocess.PIPE,
            text=True,
            env=environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {}),
        )
        for rank in range(world_size)
    ]
    try:
        said = [one.communicate(timeout=120)[0] for one in processes]
    finally:
        for one in processes:
            one.kill()
    listening = json.loads(said[0].splitlines()[-1])
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert len(listening) == world_size
    assert {address for row in listening for address in row} <= loopback
    assert world_size == 1 or listening[0], "ranks that meet listen somewhere"


@pytest.mark.parametrize(
    ("said", "alone"),
    [
        ({"WORLD_SIZE": "1"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_SIZE": "4"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "4"}, False),
    ],
)
def test_ranks_are_on_one_machine_where_the_launcher_says_so(said: dict[str, str], alone: bool) -> None:
    assert alone_on_one_machine(said) is alone
