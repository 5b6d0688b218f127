"""The meeting of ranks before they communicate.

These tests promise that ranks find each other over the loopback alone or by an interface that all reach, and
that a rank, an address, a port or an interface that is missing is named.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.support.tiny_trainer import free_port
from treetune.exceptions import SameOnAllRanks
from treetune.trainer.ranks import Meeting, find_missing_interface


def act_on_ranks(
    ranks: int, act: Callable[[Meeting], Any], deadline_s: float = 30.0, **variables: str
) -> list[Any]:
    """Returns what each rank gets, or its error; threads of this process stand for ranks."""
    port = str(free_port())
    results: list[Any] = [None] * ranks
    meetings = {}  # the first one's store is there as long as its meeting

    def act_on_rank(rank: int) -> None:
        environment = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port} | variables
        try:
            meetings[rank] = Meeting.join(environment, deadline_s)
            results[rank] = act(meetings[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=act_on_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def listening_addresses() -> set[tuple[str, int]]:
    """Returns the addresses at which this process listens."""
    return {
        tuple(connection.laddr)
        for connection in psutil.Process().net_connections()
        if connection.status == "LISTEN"
    }


def test_every_rank_gets_the_values_of_all_ranks_in_order() -> None:
    values = act_on_ranks(3, lambda meeting: meeting.exchange("squares", meeting.rank**2))
    assert values == [[0, 1, 4]] * 3
    before = listening_addresses()
    meeting = Meeting.join({"RANK": "0", "WORLD_SIZE": "1"}, 5)
    assert meeting.exchange("self", "x") == ["x"]
    assert listening_addresses() == before, "one process alone listens nowhere"


def test_ranks_on_one_machine_meet_in_a_private_folder_and_listen_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = listening_addresses()

    def look(meeting: Meeting) -> set[tuple[str, int]]:
        meeting.exchange("all are here", True)
        new_addresses = listening_addresses() - before
        meeting.exchange("all have looked", True)
        return new_addresses

    assert act_on_ranks(2, look, MASTER_ADDR="0.0.0.0") == [set(), set()]
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    port = folder.name.rpartition("-")[2]
    with pytest.raises(ValueError, match=r"through which the ranks communicate, .*open to other users"):
        Meeting.join({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}, 1.0)


def test_a_rank_that_does_not_come_is_named_with_its_machine() -> None:
    def act(meeting: Meeting) -> Any:
        if meeting.rank == 1:
            return None
        return meeting.exchange("facts", meeting.rank)

    error, _ = act_on_ranks(2, act, deadline_s=1.5, MASTER_ADDR="127.0.0.1", CROSS_SIZE="2")
    assert isinstance(error, RuntimeError)
    assert "waited 2 s for rank 1, and no rank of machine 2 of 2 has answered: see" in str(error)


def test_missing_ranks_of_a_machine_that_has_others_are_not_assigned_to_an_absent_machine() -> None:
    """Of four ranks on two machines, only the first comes: rank 1 is missing on its machine."""
    environment = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": str(free_port())}
    meeting = Meeting.join(environment | {"MASTER_ADDR": "127.0.0.1", "CROSS_SIZE": "2"}, 1.5)
    with pytest.raises(RuntimeError, match=r"for rank 1, 2, 3, and no rank of machine 2 of 2 has answered"):
        meeting.exchange("facts", 0)


def test_a_first_rank_that_cannot_be_reached_is_named_with_its_address() -> None:
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with pytest.raises(
        RuntimeError, match=r"rank 1 on .* can't reach the first rank at 127.0.0.1:\d+ within"
    ):
        Meeting.join(environment | {"CROSS_SIZE": "2", "CROSS_RANK": "1"}, 1.0)


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other_server:
        port = other_server.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(
            RuntimeError,
            match=rf"can't listen on port {port}, .*already in use.*choose another port .*MASTER_PORT",
        ):
            Meeting.join(environment | {"CROSS_SIZE": "2"}, 1.0)


def test_a_missing_interface_is_named_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting.join({"RANK": "0", "WORLD_SIZE": "1"}, 5)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib9")
    with pytest.raises(ValueError, match=r"has no network interface ib9 with an address.*it has .*lo"):
        meeting.find_interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert meeting.find_interface() == ("lo", "127.0.0.1")


@pytest.mark.parametrize(
    ("variable", "value", "missing"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", None),
        ("GLOO_SOCKET_IFNAME", "lo,ib9", "ib9"),
        ("NCCL_SOCKET_IFNAME", "ib9,l", None),  # all names that begin with one of these
        ("NCCL_SOCKET_IFNAME", "^ib9", None),
        ("NCCL_SOCKET_IFNAME", "=l", "=l"),
        ("NCCL_SOCKET_IFNAME", "ib9,ib8", "ib9,ib8"),
    ],
)
def test_variables_of_gloo_and_nccl_must_name_interfaces_of_this_machine(
    variable: str, value: str, missing: str | None
) -> None:
    message = find_missing_interface({variable: value}, uses_gloo=True, uses_nccl=True)
    if missing is None:
        assert message is None
    else:
        assert message is not None
        assert f"has no network interface {missing} with an address, which {variable} names" in message
        assert re.search(r"it has .*\blo\b.*: set ", message)


def test_a_problem_of_one_rank_is_raised_on_all() -> None:
    def act(meeting: Meeting) -> Any:
        meeting.refuse_problems("interfaces", "node2 has no ib0" if meeting.rank == 1 else None)

    errors = act_on_ranks(2, act, MASTER_ADDR="127.0.0.1", CROSS_SIZE="2")
    assert [(type(error), str(error)) for error in errors] == [(SameOnAllRanks, "node2 has no ib0")] * 2


def test_a_run_on_one_machine_with_a_missing_interface_ends_in_one_message() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "from treetune.trainer.ranks import Ranks; Ranks.join(30)"],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "ib9", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.stderr.strip().splitlines()[-1].startswith("treetune.exceptions.SameOnAllRanks: ")
    assert "GLOO_SOCKET_IFNAME" in run.stderr


def test_the_first_machine_finds_its_interface_if_only_the_others_configure_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = torch.distributed.HashStore()
    first, other = (Meeting(number, 2, number, 2, 1.0, store) for number in range(2))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert other.find_interface() == ("lo", "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert first.find_interface() == ("lo", "127.0.0.1")
