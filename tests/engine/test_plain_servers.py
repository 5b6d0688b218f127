"""The engine over plain vLLM servers, tested with a fake HTTP server.

Promises that these tests hold:

* Both routes give the same samples; sample i of a request has the seed ``seed + i``, however it is split.
* Each reply other than a whole answer ends in a retry, in another server, or in one clear message.
* No answer of weights that the run didn't send is used, also behind a router.
* A server that can't do what the run needs is refused before anything is sampled.
* A server that is lost at any point of a load is met again.
* An evaluation ends if a server comes back with other weights.
* The API key is sent, and is in no message.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import stub_server
from tests.support.fake_vllm import ROUTES, FakeVllm, send
from tests.support.plain_server import round_robin_proxy
from tests.support.stubs import Stub, answers, request, until
from treetune.config.build import build
from treetune.engine import addressed, plain_client, plain_servers
from treetune.engine.addressed import AddressedServer
from treetune.engine.base import EngineLaunch
from treetune.engine.client import Address, Client
from treetune.engine.engine import VllmEngine, start_engine
from treetune.engine.launch import find_free_port
from treetune.engine.plain_client import PlainClient
from treetune.engine.requests import Request, SamplingParams
from treetune.engine.settings import PlainVllmSettings
from treetune.exceptions import EngineError, ServerFailure
from treetune.rollouts.base import Rollout
from treetune.vocabulary import token_array


class Servers:
    """Fake servers, and the engines that use them."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.fakes: list[FakeVllm] = []
        self.engines: list[VllmEngine] = []

    def serve(self, port: int = 0, **attributes: Any) -> FakeVllm:
        """Starts a server that has other weights than the run at first."""
        fake = FakeVllm("weights of nobody", port)
        for name, value in attributes.items():
            setattr(fake, name, value)
        self.fakes.append(fake)
        return fake

    def engine(self, *addresses: str, trains: bool = True, **settings: Any) -> VllmEngine:
        chosen = PlainVllmSettings(
            addresses=addresses, dtype="float32", **{"start_timeout": 20.0, **settings}
        )
        launch = EngineLaunch(
            self.stub.weights(0),
            self.stub.folder / "logs",
            seed=0,
            context_length=stub_server.CONTEXT,
            trains=trains,
        )
        engine = start_engine(chosen, launch)
        assert isinstance(engine, VllmEngine)
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for fake in self.fakes:
            with contextlib.suppress(OSError):
                fake.close()


@pytest.fixture
def servers(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setattr(plain_client, "FIRST_WAIT_S", 0.01)
    started = Servers(stub)
    yield started
    started.close()


# Samples


def test_answers_that_arrive_together_after_a_pause_have_the_rate_of_the_pause(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = servers.engine(servers.serve().url)
    engine.generate([request(1)])
    now = time.monotonic() + 60.0
    monkeypatch.setattr("treetune.engine.engine.time", SimpleNamespace(monotonic=lambda: now))
    tokens_before = engine.tokens
    for seed in range(2, 5):
        engine._count_tokens(answers(seed))
        now += 0.001
    assert engine.tokens_per_second == pytest.approx((engine.tokens - tokens_before) / 60.0, rel=0.01)


@pytest.mark.parametrize("route", ["tokens", "completions"])
def test_both_routes_give_the_samples_of_the_seeds_however_a_request_is_split(
    servers: Servers, route: str
) -> None:
    fake = servers.serve()
    engine = servers.engine(fake.url, route=route, samples_per_request=3)
    assert engine.generate([request(5, n=8), request(2)]) == [answers(5, n=8), answers(2)]
    sent = fake.requests
    assert {body["path"] for body in sent} == {ROUTES[0] if route == "tokens" else ROUTES[1]}
    seeds_and_counts = []
    for body in sent:
        parameters = body.get("sampling_params", body)
        seeds_and_counts.append((parameters["seed"], parameters["n"]))
        assert (parameters["top_p"], parameters["repetition_penalty"], parameters["min_p"]) == (1.0, 1.0, 0.0)
    assert sorted(seeds_and_counts) == [(2, 2), (5, 3), (8, 3), (11, 2)]


def test_a_server_without_the_token_route_is_asked_by_the_other_one(servers: Servers) -> None:
    fake = servers.serve(token_route=False)
    engine = servers.engine(fake.url)
    assert engine.generate([request(1)]) == [answers(1)]
    assert {body["path"] for body in fake.requests} == {"/v1/completions"}
    with pytest.raises(EngineError, match=r"doesn't have the route /inference.*--enable-scale-out"):
        servers.engine(fake.url, route="tokens").wait_ready()


def test_log_probs_that_are_not_read_are_not_requested(servers: Servers) -> None:
    fake = servers.serve()
    engine = servers.engine(fake.url)
    (completions,) = engine.generate([replace(request(1), reads_logprobs=False)])
    assert [completion.logprobs for completion in completions] == [None, None]
    assert fake.requests[-1]["sampling_params"]["logprobs"] is None


@pytest.mark.parametrize("stop", [(), ("\n",)])
def test_text_is_decoded_only_where_a_stop_string_needs_it(servers: Servers, stop: tuple[str, ...]) -> None:
    fake = servers.serve()
    engine = servers.engine(fake.url)
    engine.generate([Request(token_array([1, 2]), 0, 1, SamplingParams(max_tokens=3, stop=stop))])
    parameters = fake.requests[-1]["sampling_params"]
    assert (parameters["stop"], parameters["detokenize"]) == (list(stop), bool(stop))
    assert parameters["include_stop_str_in_output"]


# Replies


@pytest.mark.parametrize("reply", [429, 500, 502, 503, 504, "cut"])
def test_only_a_request_with_a_temporary_failure_is_sent_again(servers: Servers, reply: int | str) -> None:
    fake = servers.serve()
    engine = servers.engine(fake.url)
    engine.wait_ready()
    fake.replies = [reply, reply]
    assert engine.generate([request(1), request(2)]) == [answers(1), answers(2)]
    assert len(fake.requests) == 4
    assert engine.restarts == 0, "the server was never lost"


@pytest.mark.parametrize(
    "reply",
    [
        "forgets a log-prob",
        "null log-prob",
        "one sample too few",
        "no choices",
        "no JSON",
        "another form",
        "aborted",
        "other weights",
    ],
)
def test_an_answer_that_is_not_whole_is_asked_for_again(servers: Servers, reply: str) -> None:
    fake = servers.serve()
    engine = servers.engine(fake.url)
    engine.wait_ready()
    fake.replies = [reply]
    assert engine.generate([request(1)]) == [answers(1)]
    assert engine.restarts == 1, "it counts as lost, and was met again"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (503, r"failed 2 times in a row \(max_restarts is 1\).*HTTP 503.*sent 5 times"),
        ("other weights", r"failed 2 times.*sampled by the weights \['other'\], not by"),
        ("another form", r"failed 2 times.*has another form than vLLM's: expected the 'content'.*got 7"),
        ("no choices", r"has another form than vLLM's: expected 'choices'.*got {\"choices\": \[\]}"),
        ("null log-prob", r"expected a finite number for each log-prob, got \[-.*null\]"),
        (400, "refused /inference/v1/generate with HTTP 400"),
        (401, r"HTTP 401: set engines\.policy\.key_variable"),
        (404, "doesn't have the route or the model"),
    ],
)
def test_a_failure_that_stays_ends_in_one_message(servers: Servers, reply: int | str, message: str) -> None:
    fake = servers.serve()
    engine = servers.engine(fake.url, max_restarts=1)
    engine.wait_ready()
    fake.replies = [reply] * 100
    with pytest.raises(EngineError, match=message):
        engine.generate([request(1)])


def test_a_server_that_hangs_after_a_late_failure_is_lost_at_the_deadline(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait before the second attempt uses up the time: aiohttp sets no limit for 0 seconds or less."""
    monkeypatch.setattr(plain_client, "FIRST_WAIT_S", 0.5)
    fake = servers.serve()
    engine = servers.engine(fake.url, request_timeout=1.0, max_restarts=0)
    engine.wait_ready()
    fake.replies = ["late 503", "hangs"]
    with pytest.raises(EngineError, match=r"HTTP 503.*sent 1 times"):
        engine.generate([request(1)])
    assert len(fake.requests) == 1


@pytest.mark.parametrize("timeout", [0.0, -0.4])
def test_a_request_without_time_left_is_not_sent(servers: Servers, timeout: float) -> None:
    fake = servers.serve()
    client = Client()
    try:
        with pytest.raises(ServerFailure, match="/health: no time is left"):
            client.post(Address(fake.url, 1, ""), "/health", timeout=timeout)
    finally:
        client.close()
    assert not fake.paths


def test_a_server_that_hangs_is_lost_at_the_deadline_and_its_requests_go_to_the_other_one(
    servers: Servers,
) -> None:
    first, second = servers.serve(), servers.serve()
    engine = servers.engine(first.url, second.url, request_timeout=4.0)
    engine.wait_ready()
    first.replies = ["hangs"]
    assert engine.generate([request(i) for i in range(6)]) == [answers(i) for i in range(6)]
    assert first.requests and second.requests


# Weights


def test_weights_are_loaded_named_and_checked_by_the_canary(servers: Servers) -> None:
    fakes = [servers.serve(), servers.serve()]
    engine = servers.engine(*(fake.url for fake in fakes))
    assert engine.generate([request(1)]) == [answers(1)], "the start weights were loaded first"
    report = engine.load(servers.stub.weights(1), 1, servers.stub.canary(1))
    assert (report.canary_gap, report.restarts) == (0.0, 0)
    assert engine.generate([request(1), request(2)]) == [answers(1, version=1), answers(2, version=1)]
    names = {fake.weights_name for fake in fakes}
    assert len(names) == 1 and names.pop().endswith(" 0001")
    assert all("/reset_prefix_cache" in fake.paths for fake in fakes)


def test_a_server_that_keeps_its_old_weights_is_found_by_the_canary(servers: Servers) -> None:
    fake = servers.serve()
    engine = servers.engine(fake.url)
    engine.wait_ready()
    fake.reload_lies = True
    with pytest.raises(EngineError, match=r"could not be loaded into the engine.*log-probs"):
        engine.load(servers.stub.weights(1), 1, servers.stub.canary(1))


def test_a_restarted_server_gets_the_newest_weights_before_it_samples(servers: Servers) -> None:
    first, second = servers.serve(), servers.serve()
    engine = servers.engine(first.url, second.url)
    engine.load(servers.stub.weights(1), 1, servers.stub.canary(1))
    # As if it had been restarted: it has the weights that it was started with, which no load has named.
    first.weights, first.weights_name = "weights of nobody", "default"
    requests = [request(i) for i in range(12)]
    assert engine.generate(requests) == [answers(i, version=1) for i in range(12)]
    assert until(lambda: first.weights == "weights 1")


def test_two_servers_behind_a_proxy_get_weights_each_and_share_the_requests(servers: Servers) -> None:
    fakes = [servers.serve(), servers.serve()]
    with round_robin_proxy([fake.url for fake in fakes]) as (proxy, _):
        engine = servers.engine(proxy, servers=tuple(fake.url for fake in fakes))
        requests = [request(i) for i in range(10)]
        assert engine.generate(requests) == [answers(i) for i in range(10)]
        engine.load(servers.stub.weights(1), 1, servers.stub.canary(1))
        assert engine.generate(requests) == [answers(i, version=1) for i in range(10)]
        assert {fake.weights for fake in fakes} == {"weights 1"}
        assert min(len(fake.requests) for fake in fakes) >= 8
        # One of them is restarted, and the proxy doesn't know.
        fakes[0].weights, fakes[0].weights_name = "weights of nobody", "default"
        assert engine.generate(requests) == [answers(i, version=1) for i in range(10)]
        assert fakes[0].weights == "weights 1"
        engine.close()


def test_a_server_behind_a_proxy_that_is_away_is_waited_for(servers: Servers) -> None:
    fake = servers.serve()
    nowhere = f"http://127.0.0.1:{find_free_port()}"
    with round_robin_proxy([fake.url]) as (proxy, _):
        engine = servers.engine(proxy, servers=(fake.url, nowhere), start_timeout=1.0)
        with pytest.raises(EngineError, match=rf"{nowhere} has been away for .*vllm serve"):
            engine.wait_ready()


@pytest.mark.parametrize("failing", ["before the load", "at its beginning"])
def test_a_server_that_is_lost_when_a_load_begins_is_met_again(servers: Servers, failing: str) -> None:
    fake = servers.serve()
    engine = servers.engine(fake.url, start_timeout=60.0)
    engine.wait_ready()
    (replica,) = engine._replicas
    server = replica.server
    assert isinstance(server, AddressedServer)
    address = server.wait_until_ready()
    if failing == "before the load":
        # As the server's own thread does if its check fails after the main thread has read the address.
        with server._changed:
            server._set_away("its check failed")
    else:
        fake.statuses["/update_weight_version"] = [503]
    with pytest.raises(ServerFailure, match=r"its check failed|HTTP 503"):
        server.begin_weights(address)
    assert not server._is_loading, "its thread would leave it alone for ever"
    assert until(lambda: server.current_address() is not None)


def test_a_server_that_another_thread_has_lost_during_a_load_is_met_again(servers: Servers) -> None:
    fake = servers.serve()
    engine = servers.engine(fake.url, start_timeout=60.0)
    engine.wait_ready()
    (replica,) = engine._replicas
    server = replica.server
    assert isinstance(server, AddressedServer)
    address = server.begin_weights(server.wait_until_ready())
    with server._changed:
        server._set_away("another rank has reported it")
    server.report_failure(address, "the load failed")
    assert until(lambda: server.current_address() is not None), "its thread leaves it alone for ever"


# Evaluations


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_when_it_is_met_takes_weights_afterwards(servers: Servers, status: int) -> None:
    fake = servers.serve(statuses={"/weight_info": [status, status]})
    engine = servers.engine(fake.url)
    assert engine.generate([request(1)]) == [answers(1)], "it was given the run's weights"


@pytest.mark.parametrize("status", [403, 404, 405])
def test_a_server_that_refuses_the_routes_of_weights_keeps_its_own(servers: Servers, status: int) -> None:
    fake = servers.serve(statuses={"/weight_info": [status] * 100}, weights="weights 2")
    engine = servers.engine(fake.url, trains=False)
    (completions,) = engine.generate([request(1)])
    assert completions[0].token_ids.tolist() == answers(1, version=2)[0].token_ids.tolist()


@pytest.mark.parametrize("settings", [{}, {"weight_transfer": "none"}])
@pytest.mark.parametrize("behind_router", [False, True])
def test_an_evaluation_ends_if_its_server_comes_back_with_other_weights(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], behind_router: bool
) -> None:
    monkeypatch.setattr(addressed, "CHECK_EVERY_S", 0.1)
    fake = servers.serve(dev_mode=bool(settings), weights="weights 2")
    with round_robin_proxy([fake.url]) as (proxy, _):
        if behind_router:
            engine = servers.engine(proxy, servers=(fake.url,), trains=False, **settings)
        else:
            engine = servers.engine(fake.url, trains=False, **settings)
        engine.generate([request(1)])
        fake.statuses["/v1/models"] = [503] * 4
        assert until(lambda: not fake.statuses["/v1/models"])
        engine.generate([request(2)])  # it was away, and came back with the same weights
        fake.weights = "weights 3"
        fake.statuses["/v1/models"] = [503] * 4
        assert until(lambda: not fake.statuses["/v1/models"])

        def is_refused() -> bool:
            try:
                engine.generate([request(3)])
            except EngineError as error:
                return "came back with other weights" in str(error)
            return False

        assert until(is_refused)
        engine.close()


def test_an_evaluation_ends_if_its_server_comes_back_without_the_routes_of_weights(servers: Servers) -> None:
    fake = servers.serve()
    engine = servers.engine(fake.url, trains=False, max_restarts=1)
    engine.generate([request(1)])
    fake.dev_mode, fake.weights = False, "weights 3"
    fake.replies = ["no JSON"]  # the client meets a server again after such a failure
    with pytest.raises(EngineError, match="was restarted without the routes that load weights"):
        engine.generate([request(2)])


def test_a_server_that_cannot_load_weights_evaluates_with_those_it_has(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(plain_servers.logger, "info", messages.append)
    fake = servers.serve(dev_mode=False, weights="weights 2")
    engine = servers.engine(fake.url, trains=False)
    (completions,) = engine.generate([request(1)])
    (message,) = messages
    assert message.endswith("has the model tiny, samples by /inference/v1/generate and keeps its weights")
    ids = [completion.token_ids.tolist() for completion in completions]
    assert ids == [answer.token_ids.tolist() for answer in answers(1, version=2)]
    with pytest.raises(EngineError, match=r"has no routes that load weights: .*VLLM_SERVER_DEV_MODE=1"):
        engine.load(servers.stub.weights(1), 1, servers.stub.canary(1))


def test_weights_are_left_alone_if_the_configuration_says_so(servers: Servers) -> None:
    fake = servers.serve(weights="weights 2")
    engine = servers.engine(fake.url, trains=False, weight_transfer="none")
    engine.generate([request(1)])
    assert "/collective_rpc" not in fake.paths
    settings = PlainVllmSettings(addresses=(fake.url,), weight_transfer="none")
    with pytest.raises(ValueError, match="is 'none', and this run trains"):
        settings.transfer_method(device="cpu", machines=["here"], adapters=False)


# Refusals


@pytest.mark.parametrize(
    ("attributes", "settings", "message"),
    [
        ({"dev_mode": False}, {}, r"no routes that load weights: .*VLLM_SERVER_DEV_MODE=1.*This run trains"),
        ({"max_model_len": 32}, {}, "takes 32 tokens .* context_length is 64: .*--max-model-len 64"),
        ({"models": ["a", "b"]}, {}, r"has 'a', 'b': set engines\.policy\.model"),
        ({}, {"model": "c"}, r"has 'tiny', and engines\.policy\.model is 'c'"),
        ({"models": []}, {}, "has no model"),
        ({"key": "secret"}, {}, r"HTTP 401: set engines\.policy\.key_variable"),
        ({"returns_token_ids": False}, {"route": "completions"}, "returned no token ids"),
        ({"reload_fails": True}, {"start_timeout": 5.0}, r"could not load the weights in .*must see"),
    ],
)
def test_a_server_that_cannot_do_what_the_run_needs_is_refused_at_the_start(
    servers: Servers, attributes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    fake = servers.serve(**attributes)
    engine = servers.engine(fake.url, **settings)
    with pytest.raises(EngineError, match=message):
        engine.wait_ready()
    assert not fake.requests


@pytest.mark.parametrize("is_certain", [False, True])
def test_raw_log_probs_are_refused_only_where_they_differ_from_those_of_the_samples(
    servers: Servers, is_certain: bool
) -> None:
    """A model that is certain of a token gives it a log-prob of 0 in both modes."""
    fake = servers.serve(processed_logprobs=False, is_certain=is_certain)
    engine = servers.engine(fake.url)
    assert engine.generate([request(1)]) == [answers(1)]
    warm = Request(token_array([1, 2, 3]), 0, 1, SamplingParams(max_tokens=5, temperature=0.6))
    assert len(engine.generate([replace(warm, reads_logprobs=False)])[0]) == 1
    with pytest.raises(EngineError, match="start it with --logprobs-mode processed_logprobs"):
        engine.generate([warm])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": []}, r"expected 'choices', a list of samples, got {\"choices\": \[\]}"),
        ({"choices": None}, "expected 'choices'"),
        ({"choices": [7]}, "expected a sample with its 'index', got 7"),
        ({"choices": [{"index": 0, "token_ids": "12"}]}, "expected 'token_ids', a list of integers"),
        ({"choices": [{"index": 0, "token_ids": [1, None]}]}, "expected 'token_ids'"),
        (
            {"choices": [{"index": 0, "token_ids": [1], "logprobs": 3}]},
            "expected 'logprobs', an object, got 3",
        ),
        (
            {"choices": [{"index": 0, "token_ids": [1], "logprobs": {"content": [{"logprob": None}]}}]},
            r"expected a finite number for each log-prob, got \[null\]",
        ),
        (
            {"choices": [{"index": 0, "token_ids": [1], "logprobs": None}]},
            "expected one sample with tokens and",
        ),
        (
            {"choices": [{"index": 0, "token_ids": [], "logprobs": None}]},
            "expected one sample with tokens and",
        ),
    ],
    ids=str,
)
def test_a_malformed_answer_at_the_first_meeting_ends_the_run_with_one_message(
    servers: Servers, answer: dict[str, Any], message: str
) -> None:
    engine = servers.engine(servers.serve(probe_answer=answer).url)
    with pytest.raises(EngineError, match=message):
        engine.wait_ready()


def test_an_error_in_the_thread_of_a_server_ends_the_run_at_once(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise ValueError("a mistake in the client")

    monkeypatch.setattr(PlainClient, "meet", fail)
    engine = servers.engine(servers.serve().url, start_timeout=60.0)
    with pytest.raises(EngineError, match=r"an error in treetune \(ValueError: a mistake in the client\)"):
        engine.wait_ready()


def test_the_key_is_read_from_the_environment_sent_and_never_shown(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = servers.serve(key="a very secret key")
    monkeypatch.setenv("MY_KEY", "a very secret key\n")
    engine = servers.engine(fake.url, key_variable="MY_KEY")
    assert engine.generate([request(1)]) == [answers(1)]
    monkeypatch.setenv("MY_KEY", "a wrong key")
    with pytest.raises(EngineError, match="HTTP 401") as refusal:
        servers.engine(fake.url, key_variable="MY_KEY").wait_ready()
    assert "wrong key" not in str(refusal.value)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match=r"MY_KEY.*is not set: export it"):
        servers.engine(fake.url, key_variable="MY_KEY")
    assert all("Authorization" not in headers for headers in servers.serve().headers)


def test_check_finds_a_missing_key_adapters_and_a_tiny_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    import treetune.parts  # noqa: F401  # registers the rollouts

    rollout = build(Rollout, {"type": "single_turn", "samples": 2, "temperature": 0.001, "max_tokens": 8})
    trainer = SimpleNamespace(lora=SimpleNamespace(send="adapters"))
    experiment: Any = make_dataclass("Experiment", ["trainer", "rollout"])(trainer, rollout)
    settings = PlainVllmSettings(addresses=("http://a:1",), key_variable="MY_KEY")
    adapters, temperature, key = settings.check(experiment)
    assert "trainer.lora.send is 'adapters'" in adapters.what
    assert temperature.key == "$.rollout.temperature"
    assert (key.level, key.key) == ("missing", "key_variable") and "MY_KEY" in key.what


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"addresses": ()}, "addresses is empty"),
        ({"addresses": ("10.0.0.2:8000",)}, "addresses has '10.0.0.2:8000'"),
        ({"addresses": ("http://me:secret@a:1",)}, "a password or a query in an address, which is not shown"),
        ({"addresses": ("http://a:1",), "servers": ("http://b:1?key=secret",)}, "servers has a user name"),
        ({"addresses": ("http://a:1/",)}, "addresses has 'http://a:1/'"),
        ({"addresses": ("http://a:1", "http://a:1")}, "names a server twice"),
        ({"addresses": ("http://a:1",), "servers": ()}, "servers is empty"),
        ({"addresses": ("http://a:1", "http://b:1"), "servers": ("http://c:1",)}, "the router's address"),
    ],
)
def test_addresses_that_cannot_be_asked_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        PlainVllmSettings(**settings)
    assert "secret" not in str(error.value)


def test_a_router_may_have_a_path_and_no_port() -> None:
    PlainVllmSettings(addresses=("https://llm.example.org/serve/app",), servers=("http://10.0.0.2:8000",))


def test_a_certificate_that_cannot_be_read_is_refused(servers: Servers, tmp_path: Path) -> None:
    wrong = tmp_path / "certificate.pem"
    wrong.write_text("no certificate")
    with pytest.raises(ValueError, match=r"engines\.policy\.certificate, .*must be a PEM file"):
        servers.engine("https://127.0.0.1:1", certificate=str(wrong))


def test_an_address_where_another_program_answers_is_refused(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(self: FakeVllm, handler: Any, body: dict[str, Any] | None) -> None:
        send(handler, 200, {"data": ["no card"]})

    monkeypatch.setattr(FakeVllm, "answer", answer)
    with pytest.raises(EngineError, match="doesn't list its models as vLLM does"):
        servers.engine(servers.serve().url).wait_ready()
