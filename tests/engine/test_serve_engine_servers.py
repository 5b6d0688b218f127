"""Servers that `serve_engine` has started, and that a run uses by their addresses.

Promises that these tests hold:

* The run loads its weights into such a server, samples from it, waits for it, and never ends or replaces it.
* No answer comes from another run's weights, or from weights that changed while it was sampled.
* A server with another model, context or key is refused in one message.
* A server that hangs or takes no weights is given up, and the others go on.
* The key file is readable by its owner alone.
"""

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

from tests.support import stub_server
from tests.support.stubs import Stub, StubLaunch, answers, below, request, until
from treetune.engine import key, serve_engine_servers
from treetune.engine.base import EngineLaunch, Rendezvous
from treetune.engine.client import Address, Client
from treetune.engine.engine import VllmEngine, start_engine
from treetune.engine.launch import ServerProcess, find_free_port, is_listening
from treetune.engine.serve_engine_servers import ServeEngineServer, read_key, shared_settings
from treetune.engine.settings import VllmSettings
from treetune.exceptions import EngineError, ServerFailure

ROOT = Path(__file__).resolve().parents[2]
KEY = "the key of servers and run"


class Elsewhere:
    """Servers that are started apart from the engine, and engines that have their addresses."""

    def __init__(self, stub: Stub) -> None:
        self.stub, self.processes, self.engines = stub, {}, []  # type: ignore[var-annotated]
        stub.faults.mkdir(exist_ok=True)
        for version in range(3):
            (stub.weights(version) / "config.json").write_text('{"hidden_size": 64}')

    def launch(self, **settings: Any) -> StubLaunch:
        return self.stub.launch(kv_cache_gib=1, **settings)

    def serve(self, port: int | None = None, **started: Any) -> str:
        """Starts a server that has other weights than the run at first; `started` changes its description."""
        description = shared_settings(self.launch(), self.stub.weights(2)) | started
        launch, variables = self.launch(), {key.DESCRIPTION_VARIABLE: json.dumps(description)}
        log = self.stub.folder / "elsewhere.log"
        weights = self.stub.weights(2)
        process = ServerProcess(launch, weights, log, port=port, server_key=KEY, variables=variables)
        assert until(lambda: is_listening(process.port))
        self.processes[process.url] = process
        return process.url

    def engine(
        self, *urls: str, rank: int = 0, run: str = "run", key: str = KEY, **settings: Any
    ) -> VllmEngine:
        launch = self.launch(**settings)
        servers = [ServeEngineServer(url, key, launch, run, loads_weights=rank == 0) for url in urls]
        engine = VllmEngine(launch.settings, launch.run, servers)
        self.engines.append(engine)
        return engine

    def kill(self, url: str) -> int:
        """Kills a server and returns its port, which is free afterwards."""
        process = self.processes.pop(url)
        for pid in below(process._guard.pid):
            with contextlib.suppress(ProcessLookupError):  # a process may end with its parent
                os.kill(pid, signal.SIGKILL)
        process.end(at_once=True)
        return process.port

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for process in self.processes.values():
            process.end(at_once=True)


@pytest.fixture
def elsewhere(stub: Stub) -> Iterator[Elsewhere]:
    servers = Elsewhere(stub)
    yield servers
    servers.close()


def test_the_run_loads_its_weights_samples_and_leaves_the_servers_running(elsewhere: Elsewhere) -> None:
    """There are two ranks: the first loads weights, and both sample."""
    stub, urls = elsewhere.stub, [elsewhere.serve(), elsewhere.serve()]
    first, second = elsewhere.engine(*urls), elsewhere.engine(*urls, rank=1)
    for engine in (first, second):
        engine.wait_ready()
        assert engine.generate([request(i) for i in range(8)]) == [answers(i) for i in range(8)]
    assert set(stub.servers_of_requests()) == {0, 1}
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


def test_ranks_that_start_from_settings_name_the_runs_weights_alike(elsewhere: Elsewhere) -> None:
    stub, url = elsewhere.stub, elsewhere.serve()
    key_file = stub.folder / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY)
    settings = VllmSettings(addresses=(url,), key_file=str(key_file), start_timeout=20.0)
    barrier = threading.Barrier(2, timeout=60)

    def sample_load_and_sample(rank: int) -> Any:
        def meet(name: str) -> None:
            barrier.wait()

        launch = EngineLaunch(
            stub.weights(0),
            stub.folder / "logs",
            seed=0,
            context_length=stub_server.CONTEXT,
            ranks=Rendezvous(rank, 2, stub.folder, meet),
        )
        engine = start_engine(settings, launch)
        elsewhere.engines.append(engine)  # type: ignore[arg-type]
        before = engine.generate([request(rank)])
        report = engine.load(stub.weights(1), 1, stub.canary(1))
        return before, report.restarts, engine.generate([request(rank)])

    with ThreadPoolExecutor(2) as ranks:
        results = list(ranks.map(sample_load_and_sample, range(2)))
    assert results == [([answers(i)], 0, [answers(i, version=1)]) for i in range(2)]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "gpu7", "127.example.org"])
def test_nccl_on_the_loopback_is_refused_only_with_servers_on_other_machines(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(serve_engine_servers, "ServeEngineServer", lambda url, *others, **named: url)
    key_file = tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY)
    url = f"http://{host}:8000"
    settings = VllmSettings(addresses=(url,), key_file=str(key_file), weight_transfer="nccl")
    launch = EngineLaunch(tmp_path, tmp_path, seed=0, context_length=8, transfer="nccl")
    if host in ("gpu7", "127.example.org"):
        with pytest.raises(ValueError, match="NCCL_SOCKET_IFNAME is this machine's loopback"):
            serve_engine_servers.servers_at_addresses(settings, launch)
    else:
        assert serve_engine_servers.servers_at_addresses(settings, launch) == [url]


def test_a_lost_server_is_waited_for_while_others_sample_and_gets_the_newest_weights(
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
    stub.forget_requests()
    assert engine.generate(asked) == [answers(i, version=1) for i in range(20)]
    assert set(stub.servers_of_requests()) == {0, 1}, "it is back, with the newest weights"
    assert engine.restarts == 1


def test_a_server_that_fails_to_load_weights_or_only_claims_to_is_asked_once_more(
    elsewhere: Elsewhere,
) -> None:
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
    assert ours.generate([request(1)]) == [answers(1)], "the run's weights were loaded again"


@pytest.mark.parametrize(
    ("started", "message"),
    [
        ({"context_length": 32}, "started with context_length 32, and the run's is 64"),
        ({"vllm": "0.1"}, r"started with vllm 0\.1"),
        ({"model": {"hidden_size": 32}}, r"another model \(hidden_size 32, and the run's has 64\)"),
    ],
)
def test_a_server_with_other_settings_or_another_model_is_refused(
    elsewhere: Elsewhere, started: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        elsewhere.engine(elsewhere.serve(**started)).wait_ready()


def test_a_server_that_is_away_has_another_key_or_refuses_weights_is_refused(elsewhere: Elsewhere) -> None:
    nowhere = f"http://127.0.0.1:{find_free_port()}"
    with pytest.raises(EngineError, match=rf"{nowhere} has been away for .* Cannot connect.*addresses"):
        elsewhere.engine(nowhere, start_timeout=0.5).wait_ready()
    url = elsewhere.serve()
    with pytest.raises(EngineError, match=f"{url} has another key than"):
        elsewhere.engine(url, key="wrong").wait_ready()
    elsewhere.stub.order("reload-fails")
    engine = elsewhere.engine(url, start_timeout=0.5)
    (engine._replicas[0].server)._weights = elsewhere.stub.folder / "nowhere"  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=r"could not load the weights in .*must see"):
        engine.wait_ready()


def test_serve_engine_prints_the_override_for_a_run_and_ends_its_server(elsewhere: Elsewhere) -> None:
    port, key_file = find_free_port(), elsewhere.stub.folder / "key"
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
        assert not is_listening(port)
    finally:
        process.kill()
        process.wait()


def test_answers_from_weights_that_changed_while_they_were_sampled_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(key.KEY_VARIABLE, KEY)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: key.Send) -> None:
        if scope.get("changes"):
            await wrapped(scope_of(key.WEIGHTS_ROUTE, b"are=new"), None, drop)
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"sampled"})

    async def drop(message: Any) -> None: ...

    async def keep(message: Any) -> None:
        sent.append(message.get("status", message.get("body")))

    wrapped = key.KeyRequired(app)

    def scope_of(path: str, query: bytes = b"", weights: str = "", **more: Any) -> dict[str, Any]:
        pairs = key.key_header(KEY, weights).items()
        headers = [(name.lower().encode(), value.encode()) for name, value in pairs]
        return {"type": "http", "path": path, "query_string": query, "headers": headers, **more}

    def ask(scope: dict[str, Any]) -> list[Any]:
        sent.clear()
        asyncio.run(wrapped(scope, None, keep))
        return list(sent)

    ask(scope_of(key.WEIGHTS_ROUTE, b"are=run+0001"))
    assert ask(scope_of("/v1/completions", weights="run 0001")) == [200, b"sampled"]
    assert ask(scope_of("/v1/completions")) == [200, b"sampled"], "a request that names no weights takes any"
    assert ask(scope_of("/v1/completions", weights="run 0002"))[0] == 409
    assert ask(scope_of("/v1/completions", weights="run 0001", changes=True))[0] == 409
    assert b"sampled" not in sent


def test_a_server_that_hangs_is_given_up_and_its_requests_go_to_the_others(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, urls = elsewhere.stub, [elsewhere.serve(), elsewhere.serve()]
    engine = elsewhere.engine(*urls)
    engine.wait_ready()
    stub.order("hangs")
    reported: list[str] = []

    def reason_gone(self: ServeEngineServer, address: Address) -> str | None:
        """Reports each server once as hanging, after the fault was taken."""
        if (stub.faults / "hangs").exists() or address.url in reported:
            return None
        reported.append(address.url)
        return "it no longer answers"

    monkeypatch.setattr(ServeEngineServer, "reason_gone", reason_gone)
    assert engine.generate([request(1), request(2)]) == [answers(1), answers(2)]
    assert reported


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


def test_a_request_that_names_other_weights_than_the_server_has_fails_at_the_server(
    elsewhere: Elsewhere,
) -> None:
    client = Client()
    with pytest.raises(ServerFailure, match="has the weights '', not 'some'"):
        client.post(Address(elsewhere.serve(), 0, KEY, "some"), "/v1/completions", {}, timeout=10)
    client.close()
