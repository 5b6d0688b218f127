"""Servers that somebody else started: sampled from, given weights, waited for, never replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from treetune.engine import key
from treetune.engine.base import EngineLaunch, Rendezvous
from treetune.engine.client import Address, Client
from treetune.engine.engine import VllmEngine, start_engine
from treetune.engine.given import GivenServer, read_key, shared_settings
from treetune.engine.launch import ServerProcess, free_port, listens
from treetune.engine.settings import VllmSettings
from treetune.exceptions import EngineError, ServerFailure

from . import stub_server
from .stubs import Stub, StubLaunch, answers, below, request, until

ROOT = Path(__file__).resolve().parents[2]
KEY = "a key that both know"


class Elsewhere:
    """Servers started by hand, as it were, and an engine that knows their addresses."""

    def __init__(self, stub: Stub) -> None:
        self.stub, self.processes, self.engines = stub, {}, []  # type: ignore[var-annotated]
        stub.faults.mkdir(exist_ok=True)
        for version in range(3):
            (stub.weights(version) / "config.json").write_text('{"hidden_size": 64}')

    def launch(self, **settings: Any) -> StubLaunch:
        return self.stub.launch(kv_cache_gib=1, **settings)

    def serve(self, port: int | None = None, **started: Any) -> str:
        """A server that has other weights at first."""
        told = shared_settings(self.launch(), self.stub.weights(2)) | started
        launch, variables = self.launch(), {key.DESCRIPTION: json.dumps(told)}
        log = self.stub.folder / "elsewhere.log"
        weights = self.stub.weights(2)
        process = ServerProcess(launch, weights, log, port=port, server_key=KEY, variables=variables)
        assert until(lambda: listens(process.port))
        self.processes[process.url] = process
        return process.url

    def engine(
        self, *urls: str, rank: int = 0, run: str = "run", key: str = KEY, **settings: Any
    ) -> VllmEngine:
        launch = self.launch(**settings)
        servers = [GivenServer(url, key, launch, run, loads_weights=rank == 0) for url in urls]
        made = VllmEngine(launch.settings, launch.run, servers)
        self.engines.append(made)
        return made

    def kill(self, url: str) -> int:
        """The server's port, where nobody listens any more."""
        process = self.processes.pop(url)
        for pid in below(process._guard.pid):
            with contextlib.suppress(ProcessLookupError):  # one may end with the one before it
                os.kill(pid, signal.SIGKILL)
        process.end(at_once=True)
        return process.port

    def close(self) -> None:
        for one in self.engines:
            one.close()
        for process in self.processes.values():
            process.end(at_once=True)


@pytest.fixture
def elsewhere(stub: Stub) -> Iterator[Elsewhere]:
    found = Elsewhere(stub)
    yield found
    found.close()


def test_they_are_given_the_runs_weights_and_give_its_answers_and_stay(elsewhere: Elsewhere) -> None:
    """Of two ranks, the first brings weights in, and both sample."""
    stub, urls = elsewhere.stub, [elsewhere.serve(), elsewhere.serve()]
    first, second = elsewhere.engine(*urls), elsewhere.engine(*urls, rank=1)
    for engine in (first, second):
        engine.wait_ready()
        assert engine.generate([request(i) for i in range(8)]) == [answers(i) for i in range(8)]
    assert set(stub.asked_of()) == {0, 1}
    stub.paths()
    report = first.load(stub.weights(1), 1, stub.canary(1))
    assert (report.canary_gap, report.restarts) == (0.0, 0)
    assert sorted(stub.paths()) == ["/collective_rpc"] * 2 + ["/reset_prefix_cache"] * 2
    second.load(stub.weights(1), 1)
    for engine in (first, second):
        assert engine.generate([request(3)]) == [answers(3, version=1)]
        engine.close()
    assert all(process.exit_code() is None for process in elsewhere.processes.values())


@pytest.mark.parametrize(
    "answer", [{}, {"status": "ok"}, {"process": 3, "weights": "", "started": None}], ids=str
)
def test_an_address_where_another_program_answers_is_refused(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    monkeypatch.setattr(Client, "post", lambda *arguments, **named: answer)
    with pytest.raises(EngineError, match="was not started by `serve_engine`: it doesn't answer with"):
        elsewhere.engine("http://127.0.0.1:1", start_timeout=60.0).wait_ready()


def test_ranks_that_start_from_settings_agree_on_whose_weights_they_mean(elsewhere: Elsewhere) -> None:
    stub, url = elsewhere.stub, elsewhere.serve()
    key_file = stub.folder / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY)
    settings = VllmSettings(addresses=(url,), key_file=str(key_file), start_timeout=20.0)
    together = threading.Barrier(2, timeout=60)

    def rank(number: int) -> Any:
        def meet(name: str) -> None:
            together.wait()

        launch = EngineLaunch(
            stub.weights(0),
            stub.folder / "logs",
            seed=0,
            context_length=stub_server.CONTEXT,
            ranks=Rendezvous(number, 2, stub.folder, meet),
        )
        engine = start_engine(settings, launch)
        elsewhere.engines.append(engine)  # type: ignore[arg-type]
        before = engine.generate([request(number)])
        report = engine.load(stub.weights(1), 1, stub.canary(1))
        return before, report.restarts, engine.generate([request(number)])

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(rank, range(2)))
    assert found == [([answers(i)], 0, [answers(i, version=1)]) for i in range(2)]


def test_one_that_is_lost_is_waited_for_while_the_others_go_on_and_gets_its_weights(
    elsewhere: Elsewhere,
) -> None:
    stub, urls = elsewhere.stub, [elsewhere.serve(), elsewhere.serve()]
    engine = elsewhere.engine(*urls, max_concurrency=2)
    engine.load(stub.weights(1), 1, stub.canary(1))
    stub.slow_down(0.02)
    port = 0

    def on_result(index: int, completions: list[Any]) -> None:
        nonlocal port
        port = port or elsewhere.kill(urls[0])

    asked = [request(i) for i in range(20)]
    assert engine.generate(asked, on_result) == [answers(i, version=1) for i in range(20)]
    assert elsewhere.serve(port) == urls[0]
    engine.wait_ready()
    stub.forget_what_was_asked()
    assert engine.generate(asked) == [answers(i, version=1) for i in range(20)]
    assert set(stub.asked_of()) == {0, 1}, "it is back, with the newest weights"
    assert engine.restarts == 1


def test_one_that_takes_no_weights_or_lies_about_them_is_asked_once_more(elsewhere: Elsewhere) -> None:
    stub, urls = elsewhere.stub, [elsewhere.serve(), elsewhere.serve()]
    engine = elsewhere.engine(*urls)
    engine.wait_ready()
    stub.order("reload-fails")
    assert engine.load(stub.weights(1), 1, stub.canary(1)).canary_gap == 0.0
    stub.order("reload-lies")
    assert engine.load(stub.weights(2), 2, stub.canary(2)).canary_gap == 0.0
    assert engine.generate([request(1), request(2)]) == [answers(1, version=2), answers(2, version=2)]
    with pytest.raises(EngineError, match="could not be loaded into the engine"):
        engine.load(stub.weights(1), 1, stub.canary(2))


def test_weights_of_another_run_are_never_sampled_from(elsewhere: Elsewhere) -> None:
    url = elsewhere.serve()
    ours = elsewhere.engine(url)
    ours.wait_ready()
    theirs = elsewhere.engine(url, run="another run")
    theirs.load(elsewhere.stub.weights(1), 1, elsewhere.stub.canary(1))
    theirs.close()
    assert ours.generate([request(1)]) == [answers(1)], "brought in again"


@pytest.mark.parametrize(
    ("started", "words"),
    [
        ({"context_length": 32}, "started with context_length 32, and the run's is 64"),
        ({"vllm": "0.1"}, r"started with vllm 0\.1"),
        ({"model": {"hidden_size": 32}}, r"another model \(hidden_size 32, and the run's has 64\)"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused_in_one_line(
    elsewhere: Elsewhere, started: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        elsewhere.engine(elsewhere.serve(**started)).wait_ready()


def test_one_that_is_away_or_has_another_key_or_refuses_its_weights_is_told(elsewhere: Elsewhere) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=rf"{nowhere} has been away for .* Cannot connect.*addresses"):
        elsewhere.engine(nowhere, start_timeout=0.5).wait_ready()
    url = elsewhere.serve()
    with pytest.raises(EngineError, match=f"{url} has another key than"):
        elsewhere.engine(url, key="wrong").wait_ready()
    elsewhere.stub.order("reload-fails")
    gone = elsewhere.engine(url, start_timeout=0.5)
    (gone._replicas[0].server)._weights = elsewhere.stub.folder / "nowhere"  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=r"could not load the weights in .*must see"):
        gone.wait_ready()


def test_serve_engine_says_what_a_run_is_to_be_given_and_ends_its_server(elsewhere: Elsewhere) -> None:
    port, key_file = free_port(), elsewhere.stub.folder / "key"
    command = [sys.executable, "-m", "tests.engine.serving_program", str(elsewhere.stub.folder), str(port)]
    printed = elsewhere.stub.folder / "printed"
    with printed.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        assert until(lambda: "it is ready" in printed.read_text()), printed.read_text()
        (line,) = [line for line in printed.read_text().splitlines() if "it is ready" in line]
        override = f'{{engines+: {{policy+: {{addresses: ["{url}"], key_file: "{key_file}"}}}}}}'
        assert shlex.split(line)[-2:] == ["--override", override], "a shell passes it on unchanged"
        engine = elsewhere.engine(url, key=read_key(key_file))
        assert engine.generate([request(1)]) == [answers(1)]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert not listens(port)
    finally:
        process.kill()
        process.wait()


def test_answers_of_weights_that_changed_meanwhile_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(key.VARIABLE, KEY)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: key.Send) -> None:
        if scope.get("changes"):
            await wrapped(of(key.ROUTE, b"are=new"), None, drop)
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"sampled"})

    async def drop(message: Any) -> None: ...

    async def keep(message: Any) -> None:
        sent.append(message.get("status", message.get("body")))

    wrapped = key.KeyRequired(app)

    def of(path: str, query: bytes = b"", weights: str = "", **more: Any) -> dict[str, Any]:
        pairs = key.header(KEY, weights).items()
        headers = [(name.lower().encode(), value.encode()) for name, value in pairs]
        return {"type": "http", "path": path, "query_string": query, "headers": headers, **more}

    def asked(scope: dict[str, Any]) -> list[Any]:
        sent.clear()
        asyncio.run(wrapped(scope, None, keep))
        return list(sent)

    asked(of(key.ROUTE, b"are=run+0001"))
    assert asked(of("/v1/completions", weights="run 0001")) == [200, b"sampled"]
    assert asked(of("/v1/completions")) == [200, b"sampled"], "who names none asks whatever is there"
    assert asked(of("/v1/completions", weights="run 0002"))[0] == 409
    assert asked(of("/v1/completions", weights="run 0001", changes=True))[0] == 409
    assert b"sampled" not in sent


def test_a_server_that_hangs_is_given_up_and_its_requests_go_to_the_others(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, urls = elsewhere.stub, [elsewhere.serve(), elsewhere.serve()]
    engine = elsewhere.engine(*urls)
    engine.wait_ready()
    stub.order("hangs")
    asked: list[str] = []

    def gone(self: GivenServer, address: Address) -> str | None:
        """Once of each of them, as if nothing had come of looking at it."""
        if (stub.faults / "hangs").exists() or address.url in asked:
            return None
        asked.append(address.url)
        return "it no longer answers"

    monkeypatch.setattr(GivenServer, "gone", gone)
    assert engine.generate([request(1), request(2)]) == [answers(1), answers(2)]
    assert asked


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ValueError, match="can't be read"):
        read_key(path)
    path.write_text("secret\n")
    path.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == "secret"
    path.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_key(path)


def test_a_refusal_for_other_weights_is_the_servers_failure(elsewhere: Elsewhere) -> None:
    client = Client()
    with pytest.raises(ServerFailure, match="has the weights '', not 'some'"):
        client.post(Address(elsewhere.serve(), 0, KEY, "some"), "/v1/completions", {}, timeout=10)
    client.close()
