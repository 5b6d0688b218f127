"""Promises of MCP servers:

* a bad result is an error of its call alone, and resources and links become text;
* the time of a call runs while the server works on it, and not while it waits for its turn;
* a server that hangs keeps no caller longer than two calls, and what it prints is bounded;
* headers and secrets reach an address, and no message shows them.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from treetune.domains.environments.mcp_tools import Mcp, end_servers
from treetune.domains.environments.pool import EnvironmentPool
from treetune.domains.environments.tools import Tools
from treetune.exceptions import Unavailable
from treetune.findings import missing_requirements
from treetune.vocabulary import Problem

PLAIN = str(Path(__file__).parents[2] / "support" / "plain_mcp_server.py")
COUNTING = str(Path(__file__).parents[2] / "support" / "mcp_server.py")


@pytest.fixture(autouse=True)
def ended_servers() -> Iterator[None]:
    """End all servers after each test."""
    yield
    end_servers()


def plain_server(call_seconds: float = 5.0) -> Mcp:
    return Mcp(command=(sys.executable, PLAIN), call_seconds=call_seconds)


def test_a_result_that_breaks_its_schema_is_an_error_of_its_call_alone() -> None:
    server = plain_server()
    with ThreadPoolExecutor(8) as threads:
        good = [threads.submit(server.call_server, "echo", n=n) for n in range(7)]
        malformed = threads.submit(server.call_server, "breaks_schema")
    assert malformed.result().startswith("Error: the result of breaks_schema can't be read: ")
    assert [json.loads(call.result()) for call in good] == [{"n": n} for n in range(7)]
    assert server.call_server("unknown_part").startswith("Error: the result of unknown_part can't be read")
    assert server.call_server("echo", n=9) == '{"n": 9}'


def test_resources_and_links_are_text() -> None:
    server = plain_server()
    assert server.call_server("resource") == "inside"
    assert server.call_server("link") == "[b file:///b.txt: the second]"
    assert server.call_server("blob") == "[image/png file:///a.bin]\n[image image/png]"


def test_calls_that_wait_for_their_turn_do_not_run_out_of_time() -> None:
    """Twelve calls of 0.4 s, one after the other, take longer than one may."""
    server = plain_server(call_seconds=2.0)
    with ThreadPoolExecutor(12) as threads:
        results = list(threads.map(lambda n: server.call_server("slow", seconds=0.4, n=n), range(12)))
    assert [json.loads(result)["n"] for result in results] == list(range(12))


def test_turns_that_wait_for_their_turn_at_a_server_do_not_run_out_of_time() -> None:
    """Ten turns of 0.4 s, one after the other: longer than a turn may take, and than all of an answer may."""
    tools = Tools(tools=(plain_server(call_seconds=2.0),), format="hermes", deadline=2.0)
    with EnvironmentPool() as pool:
        plays = [pool.begin(tools, Problem("p", "?", ""), n, seconds=2.0) for n in range(10)]
        played = [play.act(turn_of("slow", seconds=0.4, n=n)) for n, play in enumerate(plays)]
        turns = [turn for future in played for turn in future.result(60).turns]
    assert [turn.outcome for turn in turns] == ["ok"] * 10
    assert [json.loads(turn.results[0][2])["n"] for turn in turns] == list(range(10))


def test_a_turn_whose_calls_take_too_long_together_still_runs_out_of_time() -> None:
    tools = Tools(tools=(plain_server(call_seconds=5.0),), format="hermes", deadline=1.0)
    with EnvironmentPool() as pool:
        play = pool.begin(tools, Problem("p", "?", ""), 0)
        (turn,) = play.act(turn_of("slow", seconds=3.0)).result(60).turns
    assert turn.outcome == "unavailable" and turn.message == "no result within 1 s"


def turn_of(name: str, **arguments: float) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_call_that_takes_too_long_has_no_result_and_those_behind_it_are_answered() -> None:
    server = plain_server(call_seconds=2.0)
    with ThreadPoolExecutor(5) as threads:
        server.call_server("echo")
        long = threads.submit(server.call_server, "slow", seconds=3.0)
        threading.Event().wait(0.3)
        behind = [threads.submit(server.call_server, "slow", seconds=0.2, n=n) for n in range(4)]
    assert long.result() == "No result within 2 s."
    assert [json.loads(call.result())["n"] for call in behind] == list(range(4))


def test_a_server_that_hangs_keeps_nobody_longer_than_two_calls(tmp_path: Path) -> None:
    server = Mcp(command=(sys.executable, COUNTING, str(tmp_path / "counted")), call_seconds=1.0)
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda _: server.call_server("hang"), range(16)))
    assert set(results) <= {"No result within 1 s.", "The server ended during the call."}
    assert server.call_server("count") == "1"


def test_the_times_of_all_calls_on_which_a_server_works_run_at_once(tmp_path: Path) -> None:
    server = Mcp(command=(sys.executable, COUNTING, str(tmp_path / "counted")), call_seconds=2.0)
    with ThreadPoolExecutor(6) as threads:
        waiting = [threads.submit(server.call_server, "wait") for _ in range(4)]
        threading.Event().wait(0.5)
        assert server.call_server("count") == "1"
        assert [call.result() for call in waiting] == ["No result within 2 s."] * 4
    assert server.call_server("count") == "2"


def test_output_of_a_server_is_read_and_only_its_end_kept() -> None:
    server = plain_server()
    assert server.call_server("print_much") == "{}"
    assert server.call_server("echo") == "{}"
    talking = (
        "import sys; sys.stderr.write('x' * 2_000_000 + chr(10) + 'out of order' + chr(10)); sys.exit(1)"
    )
    with pytest.raises(Unavailable, match=r"available: out of order$"):
        Mcp(command=(sys.executable, "-c", talking)).call_server("echo")


@pytest.fixture
def address() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Serve an address that refuses all requests; yield it, and the list of their headers and paths."""
    requests: list[dict[str, str]] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append({**self.headers, "path": self.path})
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_DELETE = do_POST

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp?key=${{SHOP_KEY}}", requests
        server.shutdown()


def test_headers_reach_an_address_and_no_secret_is_told(
    address: tuple[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, requests = address
    headers = {"Authorization": "Bearer ${SHOP_TOKEN}", "X-Plain": "one"}
    server = Mcp(address=url, headers=headers, start_seconds=5.0)
    missing = "".join(missing_requirements([server]))
    assert "SHOP_TOKEN" in missing and "SHOP_KEY" in missing
    monkeypatch.setenv("SHOP_TOKEN", "abcdef")
    monkeypatch.setenv("SHOP_KEY", "hidden")
    assert not missing_requirements([server])
    with pytest.raises(Unavailable) as refused:
        server.call_server("echo")
    assert requests[0]["Authorization"] == "Bearer abcdef" and requests[0]["X-Plain"] == "one"
    assert requests[0]["path"] == "/mcp?key=hidden"
    assert "abcdef" not in str(refused.value) and "hidden" not in str(refused.value)
    assert "abcdef" not in repr(server)
    server = Mcp(address="http://${ME}:${WORD}@shop/mcp?key=hidden")
    assert server.name == "http://shop/mcp" and "hidden" not in repr(server)


@pytest.mark.parametrize("user", ["user:word@", "word@", "${ME}:word@"])
def test_a_password_in_an_address_is_refused_and_not_shown(user: str) -> None:
    with pytest.raises(ValueError, match="user name or a password") as error:
        Mcp(address=f"http://{user}shop/mcp")
    assert "word@" not in str(error.value)


def test_headers_are_for_an_address_alone() -> None:
    with pytest.raises(ValueError, match="headers are for an MCP server at an address"):
        Mcp(command=("true",), headers={"a": "b"})
