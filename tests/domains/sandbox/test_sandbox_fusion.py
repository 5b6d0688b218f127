"""Programs go to servers of SandboxFusion evenly; one that fails costs no verdict while another is there."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from treetune.domains.graders.code import Code
from treetune.domains.sandbox.base import ProgramLimits, SandboxUnavailable
from treetune.domains.sandbox.fusion import SandboxFusion
from treetune.domains.sandbox.program import UnsafeLocal
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem


class Server(ThreadingHTTPServer):
    """Speaks as SandboxFusion does. `fails` says how it answers instead of running anything; where there is
    `together`, it answers when the others have been asked as well."""

    asked = 0
    fails: str | None = None
    together: threading.Barrier | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, asked: dict[str, Any]) -> Any:
        if self.fails == "says so":
            return {"status": "SandboxError", "message": "no room", "run_result": None}
        if self.fails == "nonsense":
            return ["?"]
        files = {name: base64.b64decode(data).decode() for name, data in asked["files"].items()}
        limits = ProgramLimits(seconds=asked["run_timeout"])
        outcome = UnsafeLocal().run(asked["code"], stdin=asked["stdin"], files=files, limits=limits)
        result = {
            "status": "TimeLimitExceeded" if outcome.killed_by == "time" else "Finished",
            "execution_time": outcome.seconds,
            "return_code": outcome.exit,
            "stdout": outcome.stdout,
            "stderr": outcome.stderr,
        }
        status = "Success" if outcome.ok else "Failed"
        return {"status": status, "message": "", "compile_result": None, "run_result": result}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.asked += 1
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code"
        if self.server.together is not None:
            self.server.together.wait(timeout=20)
        if self.server.fails == "status":
            return self.send_error(503)
        data = json.dumps(self.server.answer(asked)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    found = [Server(("127.0.0.1", 0), Handler) for _ in range(2)]
    for server in found:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    for server in found:
        server.shutdown()
        server.server_close()


def addresses(servers: list[Server]) -> tuple[str, ...]:
    return tuple(server.address for server in servers)


def test_programs_run_there(servers: list[Server]) -> None:
    fusion = SandboxFusion(addresses=addresses(servers))
    assert fusion.missing() == ()
    outcome = fusion.run("import a; print(a.B + int(input()))", stdin="2", files={"a.py": "B = 1"})
    assert (outcome.stdout, outcome.exit) == ("3\n", 0)
    assert fusion.run("exit(3)").exit == 3
    assert fusion.run("while True: pass", limits=ProgramLimits(seconds=0.3)).killed_by == "time"
    assert fusion.run("print('x' * 9999)", limits=ProgramLimits(output_kib=1)).killed_by == "output"


def test_the_servers_share_the_programs(servers: list[Server]) -> None:
    fusion = SandboxFusion(addresses=addresses(servers))
    # No server answers before the other has been asked: two programs at a time have to go to both.
    servers[0].together = servers[1].together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: fusion.run("print(1)"), range(12)))
    assert [server.asked for server in servers] == [6, 6]


@pytest.mark.parametrize("fails", ["status", "says so", "nonsense"])
def test_a_server_that_fails_costs_no_verdict(servers: list[Server], fails: str) -> None:
    fusion = SandboxFusion(addresses=addresses(servers))
    servers[0].fails = fails
    assert all(fusion.run("print(1)").ok for _ in range(6))
    assert servers[0].asked == 1, "it is left alone for a while"
    assert servers[1].asked >= 5
    servers[1].fails = fails
    with pytest.raises(SandboxUnavailable, match="no server of SandboxFusion"):
        fusion.run("print(1)")


def test_a_server_that_is_gone_costs_no_verdict_and_an_address_that_is_none_is_refused(
    servers: list[Server],
) -> None:
    gone = "http://127.0.0.1:9"
    assert SandboxFusion(addresses=(gone, servers[0].address)).run("print(1)").ok
    assert "no server" in SandboxFusion(addresses=(gone,)).missing()[0]
    with pytest.raises(ValueError, match=r"http://10\.0\.0\.1:8080"):
        SandboxFusion(addresses=("10.0.0.1:8080",))


def test_code_is_graded_there_and_stays_without_a_verdict_when_all_are_gone(servers: list[Server]) -> None:
    grader = Code(sandbox=SandboxFusion(addresses=addresses(servers)), limits=ProgramLimits(seconds=10))
    problem = Problem(id="p", prompt="?", gold=json.dumps({"functional": "assert f(2) == 4"}))
    right, wrong = (f"```python\ndef f(n): return {what}\n```" for what in ("n * n", "5"))
    with GraderPool(grader, workers=1) as pool:
        assert [grade.reward for grade in pool.grade_many([(right, problem), (wrong, problem)])] == [1.0, 0.0]
        for server in servers:
            server.fails = "status"
        lost = pool.submit(right + "\n", problem).result(60)
        assert lost.outcome == "unavailable"
        for server in servers:
            server.fails = None
        assert pool.submit(right + "\n\n", problem).result(60).correct
