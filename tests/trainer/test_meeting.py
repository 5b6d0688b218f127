"""How ranks find each other before they talk: over the loopback alone, or by an interface that all reach."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainer.helpers import free_port
from treetune.trainer.ranks import Meeting


def together(ranks: int, act: Callable[[Meeting], Any], deadline_s: float = 30.0, **more: str) -> list[Any]:
    """What each of so many ranks gets, or its error; threads of this process stand for them."""
    port = str(free_port())
    results: list[Any] = [None] * ranks
    meetings = {}  # the first one's store is there as long as its meeting

    def one(rank: int) -> None:
        environment = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port} | more
        try:
            meetings[rank] = Meeting.join(environment, deadline_s)
            results[rank] = act(meetings[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    return {tuple(one.laddr) for one in psutil.Process().net_connections() if one.status == "LISTEN"}


def test_everyone_gets_everyones_value_in_rank_order() -> None:
    found = together(3, lambda meeting: meeting.exchange("squares", meeting.rank**2))
    assert found == [[0, 1, 4]] * 3
    before = listening()
    meeting = Meeting.join({"RANK": "0", "WORLD_SIZE": "1"}, 5)
    assert meeting.exchange("self", "x") == ["x"]
    assert listening() == before, "one process alone listens nowhere"


def test_ranks_on_one_machine_meet_where_no_other_user_can_look_and_listen_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = listening()

    def look(meeting: Meeting) -> set[tuple[str, int]]:
        meeting.exchange("all are here", True)
        seen = listening() - before
        meeting.exchange("all have looked", True)
        return seen

    assert together(2, look, MASTER_ADDR="0.0.0.0") == [set(), set()]
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    port = folder.name.rpartition("-")[2]
    with pytest.raises(ValueError, match=r"through which the ranks communicate, .*open to other users"):
        Meeting.join({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}, 1.0)


def test_who_does_not_come_is_named_with_its_machine() -> None:
    def act(meeting: Meeting) -> Any:
        if meeting.rank == 1:
            return None
        return meeting.exchange("facts", meeting.rank)

    error, _ = together(2, act, deadline_s=1.5, MASTER_ADDR="127.0.0.1", CROSS_SIZE="2")
    assert isinstance(error, RuntimeError)
    assert "waited 2 s for rank 1, all of them on machine 2 of 2" in str(error)


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


def test_a_port_that_another_run_has_is_told_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(
            RuntimeError,
            match=rf"can't listen on port {port}, .*already in use.*choose another port .*MASTER_PORT",
        ):
            Meeting.join(environment | {"CROSS_SIZE": "2"}, 1.0)


def test_an_interface_that_is_not_there_is_told_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting.join({"RANK": "0", "WORLD_SIZE": "1"}, 5)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib9")
    with pytest.raises(ValueError, match=r"has no network interface ib9 with an address.*it has .*lo"):
        meeting.interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert meeting.interface() == ("lo", "127.0.0.1")
