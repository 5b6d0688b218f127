"""Credit as an HTTP service (`treetune serve_credit`), called in this process without a network.

Promises that these tests hold:

* The same answers get the same advantages as from the library, exactly, as JSON and as Arrow.
* The OpenAPI schema is valid, is made from the library's fields, and describes requests and answers.
* Requests need the key. Each limit (size, budget, deadline) has its HTTP status and the library's message.
* Requests run at the same time, and wait for each other where they must. A client that disconnects ends its
  request.
* Nothing that a client sends is executed, or names a file, an address or a part that isn't allowed; no
  request makes the service fail (500).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import threading
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pyarrow as pa
import pytest
from starlette.types import ASGIApp, Message

from tests.credit.library.test_library import answers_in_run
from tests.credit.library.test_library import as_graded_answer as graded
from tests.credit.library.test_library import fake_engine as engine
from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from tests.support.fake_vllm import FakeVllm
from treetune.cluster.credit_service import arrow
from treetune.cluster.credit_service.app import JSON_TYPE, make_application, make_openapi
from treetune.cluster.credit_service.choices import (
    ALLOWED_CREDITS,
    ALLOWED_STATES,
    ALLOWED_STEPS,
    ALLOWED_VALUES,
)
from treetune.cluster.credit_service.messages import AnswerIn, CreditResponse, SamplingChoice
from treetune.cluster.credit_service.service import CreditService, ServiceSettings
from treetune.config.schema import keys_of
from treetune.credit import CreditAssigner, CreditedAnswers, GradedAnswer, advantages
from treetune.credit.base import Credit
from treetune.credit.rloo import Rloo
from treetune.credit.states.base import StateRule
from treetune.credit.values.base import ValueEstimator
from treetune.engine.requests import SamplingParams
from treetune.exceptions import ConfigError
from treetune.tasks.graders.pool import GraderPool
from treetune.tasks.steps import StepSplitter

KEY = "the-key-of-the-test"
MOST_BYTES = 200_000
VINE = {"type": "monte_carlo", "samples": 3}
OPEN_ENGINE = "treetune.cluster.credit_service.service.open_engine"


class Reply(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@pytest.fixture
def serve() -> Iterator[Callable[..., ASGIApp]]:
    services = []

    def start(**settings: Any) -> ASGIApp:
        chosen = {"engine": engine(), "tokenizer": mdp.CODEC, "grader": mdp.LetterGrader(), **settings}
        service = CreditService(ServiceSettings(**chosen))
        services.append(service)
        return make_application(service, KEY, MOST_BYTES)

    yield start
    for service in services:
        service.close()


async def call(
    app: ASGIApp,
    body: bytes = b"",
    *,
    path: str = "/advantages",
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    disconnects_after: float | None = None,
) -> Reply:
    """Send a request to the application as uvicorn would."""
    all_headers = {"authorization": f"Bearer {KEY}", "content-type": JSON_TYPE, **(headers or {})}
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0
    received = bytearray()

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.sleep(60 if disconnects_after is None else disconnects_after)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            received.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    return Reply(status, bytes(received))


def post(app: ASGIApp, request: Any, **more: Any) -> Reply:
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    return asyncio.run(call(app, body, **more))


def rows_of_run() -> list[dict[str, Any]]:
    """Return the answers of a run as a client sends them."""
    rows = []
    for trajectory in answers_in_run():
        answer = graded(trajectory)
        row = {"prompt_ids": list(answer.prompt_ids), "response_ids": answer.response_ids.tolist()}
        row |= {"reward": answer.reward, "group": answer.group, "prompt": answer.prompt, "gold": "a"}
        row |= {"logprobs": answer.logprobs.tolist(), "step_ends": list(answer.step_ends or ())}
        rows.append(row)
    return rows


def request_for(credit: Any = "rloo", **settings: Any) -> dict[str, Any]:
    common = {"credit": credit, "sampling": {"max_tokens": mdp.LONGEST}, "seed": 1, "context_length": 64}
    return {"answers": rows_of_run(), **common, **settings}


def from_library(credit: Any) -> CreditedAnswers:
    return advantages(
        [{**row, "response_ids": np.array(row["response_ids"])} for row in rows_of_run()],
        credit=credit,
        engine=engine(),
        grader=mdp.LetterGrader(),
        tokenizer=mdp.CODEC,
        sampling=SamplingParams(max_tokens=mdp.LONGEST),
        context_length=64,
        seed=1,
    )


def arrow_request(
    rows: list[dict[str, Any]], settings: Any, types: Mapping[str, Any] | None = None, **options: Any
) -> bytes:
    """Return answers and settings as an Arrow stream.

    Args:
        types: Other types of columns than pyarrow's own.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name == "data":
            values = [None if value is None else json.dumps(value) for value in values]
        columns[name] = pa.array(values, (types or {}).get(name))
    table = pa.table(columns)
    if settings is not None:
        text = settings if isinstance(settings, str) else json.dumps(settings)
        table = table.replace_schema_metadata({"treetune": text})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


AS_ARROW = {"content-type": arrow.MEDIA_TYPE}


# Equal to the library


@pytest.mark.parametrize(
    "credit",
    [
        "rloo",
        {"type": "group", "std": False},
        VINE,
        {
            "type": "monte_carlo",
            "values": {"type": "siblings"},
            "states": {"type": "every_n_tokens", "tokens": 1},
        },
        {"type": "probability_mask", "over": {"type": "rloo"}, "below": 0.7},
        "trace",
    ],
    ids=str,
)
def test_advantages_are_exactly_those_of_the_library(serve: Callable[..., ASGIApp], credit: Any) -> None:
    expected = from_library(credit)
    request = request_for(credit)
    reply = post(serve(), request)
    assert reply.status == 200, reply.body
    answer = reply.json
    assert answer["advantages"] == [row.tolist() for row in expected.advantages]
    assert answer["trained"] == [row.tolist() for row in expected.trained]
    assert answer["step_ends"] == [list(ends) for ends in expected.step_ends]
    assert answer["values"] == [None if row is None else list(row) for row in expected.values]
    assert answer["cost"]["samples"] == expected.cost.samples
    assert answer["metrics"] == expected.metrics

    settings = {name: value for name, value in request.items() if name != "answers"}
    reply = post(serve(), arrow_request(request["answers"], settings), headers=AS_ARROW)
    assert reply.status == 200, reply.body
    table = pa.ipc.open_stream(reply.body).read_all()
    for column in ("advantages", "trained", "step_ends", "values"):
        assert table.column(column).to_pylist() == answer[column]
    assert table.column("left_out").to_pylist() == [False] * len(expected.advantages)
    metadata = json.loads(table.schema.metadata[b"treetune"])
    assert metadata["metrics"] == answer["metrics"]
    assert metadata["cost"]["tokens"] == answer["cost"]["tokens"]


def test_forks_tools_and_data_arrive_in_both_types(serve: Callable[..., ASGIApp]) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt_ids": [1], "response_ids": [2, 3, 4], "reward": 1.0, "data": {"level": 1}},
        {"prompt_ids": [1], "response_ids": [2, 3, 5], "reward": 0.0, "fork": [0, 2], "finished": False},
    ]
    expected = advantages(rows, credit="tree")
    as_json = post(serve(), {"answers": rows, "credit": "tree"})
    as_arrow = post(serve(), arrow_request(rows, {"credit": "tree"}), headers=AS_ARROW)
    table = pa.ipc.open_stream(as_arrow.body).read_all()
    assert as_json.json["advantages"] == table.column("advantages").to_pylist() == expected.advantages
    assert as_json.json["trained"] == table.column("trained").to_pylist() == expected.trained
    tool = [{**row, "sampled": [True, False, True], "fork": None} for row in rows]
    expected = advantages(tool, credit="gigpo")
    for body, headers in (
        (json.dumps({"answers": tool, "credit": "gigpo"}).encode(), {}),
        (arrow_request(tool, {"credit": "gigpo"}, {"fork": pa.list_(pa.int64())}), AS_ARROW),
    ):
        reply = post(serve(), body, headers=headers)
        assert reply.status == 200, reply.body


# Schema


def test_the_schema_is_valid_and_describes_requests_and_answers(serve: Callable[..., ASGIApp]) -> None:
    app = serve()
    openapi = post(app, b"", path="/openapi.json", method="GET", headers={"authorization": ""}).json
    assert openapi == make_openapi()
    models = pytest.importorskip("fastapi.openapi.models")
    models.OpenAPI.model_validate(openapi)
    for name in openapi["components"]["schemas"]:
        jsonschema.Draft202012Validator.check_schema(openapi["components"]["schemas"][name])

    def check(instance: Any, name: str) -> None:
        described = {"$ref": f"#/components/schemas/{name}", "components": openapi["components"]}
        jsonschema.validate(instance, described, jsonschema.Draft202012Validator)

    request = request_for(VINE)
    check(request, "CreditRequest")
    check(post(app, request).json, "CreditResponse")
    check(post(app, {"answers": []}).json, "Failure")
    check(post(app, b"", path="/health", method="GET").json, "Health")
    with pytest.raises(jsonschema.ValidationError):
        check({**request, "engine": "http://10.0.0.1"}, "CreditRequest")


def test_messages_have_the_fields_of_the_library() -> None:
    def names(noun: type) -> set[str]:
        return {field.name for field in dataclasses.fields(noun)}

    assert set(AnswerIn.model_fields) == names(GradedAnswer)
    assert set(SamplingChoice.model_fields) == names(SamplingParams)
    assert set(CreditResponse.model_fields) == names(CreditedAnswers)


# Key and limits


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"bearer {KEY}é"]
)
def test_a_request_without_the_key_is_refused(serve: Callable[..., ASGIApp], authorization: str) -> None:
    app = serve()
    for path, method in (("/advantages", "POST"), ("/metrics", "GET"), ("/nothing", "GET")):
        reply = post(app, request_for(), path=path, method=method, headers={"authorization": authorization})
        assert reply.status == 401
        assert KEY not in reply.body.decode()
    assert post(app, b"", path="/health", method="GET", headers={"authorization": ""}).json["status"] == "ok"


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY}"])
def test_the_scheme_of_the_key_is_read_in_any_case(serve: Callable[..., ASGIApp], authorization: str) -> None:
    headers = {"authorization": authorization}
    assert post(serve(), b"", path="/metrics", method="GET", headers=headers).status == 200


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        (request_for(VINE, budget=20), 422, "the budget of 20 tokens is used up"),
        (request_for(budget=5000), 400, "budget is 5,000, and this service allows 1,000"),
        (request_for(deadline=90.0), 400, "deadline is 90, and this service allows 60"),
        (b" " * (MOST_BYTES + 1), 413, "the body has more than 200,000 bytes: send fewer answers"),
        (b"{", 400, "Invalid JSON"),
        (b"[1]", 400, "Input should be an object"),
        ({"answers": rows_of_run()}, 400, "credit: Field required"),
        (request_for(credits="rloo"), 400, "credits: Extra inputs are not permitted"),
        (request_for("gae"), 400, "credit.type is 'gae', which this service doesn't allow: choose one of"),
        (request_for({"type": "group", "stdd": 1}), 400, "credit.stdd: unknown key of credit 'group'"),
        (request_for(VINE, sampling=None), 400, "give sampling"),
        (request_for(VINE, sampling={"max_tokens": 2}), 400, "raise sampling.max_tokens"),
        ({"answers": [], "credit": "rloo"}, 400, "answers: List should have at least 1 item"),
    ],
)
def test_each_failure_has_its_status_and_its_message(
    serve: Callable[..., ASGIApp], request_: Any, status: int, message: str
) -> None:
    reply = post(serve(budget=1000, deadline=60.0), request_)
    assert (reply.status, message in reply.json["error"]) == (status, True), reply.body


def test_a_mistake_in_an_answer_is_named_without_its_value(serve: Callable[..., ASGIApp]) -> None:
    request = request_for()
    request["answers"][2]["reward"] = "secret"
    request["answers"][3]["response_ids"] = [1, -2]
    error = post(serve(), request).json["error"]
    assert "answers.2.reward: Input should be a valid number" in error
    assert "answers.3.response_ids.1: Input should be greater than or equal to 0" in error
    assert "secret" not in error


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": ""}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_other_types_of_bodies_are_refused(
    serve: Callable[..., ASGIApp], headers: dict[str, str], status: int
) -> None:
    assert post(serve(), request_for(), headers=headers).status == status


def test_other_paths_and_methods_are_refused(serve: Callable[..., ASGIApp]) -> None:
    assert post(serve(), b"", path="/", method="GET").status == 404
    assert post(serve(), b"", method="GET").status == 405


def servers_request(**settings: Any) -> dict[str, Any]:
    """Return a request whose continuations fit a fake server."""
    rows = [{**row, "group": "only"} for row in rows_of_run()[:4]]
    common = {"credit": VINE, "sampling": {"max_tokens": mdp.LONGEST}, "unfinished_reward": 0.5}
    return {"answers": rows, **common, **settings}


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    server = FakeVllm("weights of the trainer")
    yield server
    server.close()


def test_a_request_ends_at_its_deadline_and_a_failing_engine_is_a_bad_gateway(
    serve: Callable[..., ASGIApp], fake: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    app = serve(engine=[fake.url])
    assert post(app, servers_request()).status == 200
    fake.replies = ["hangs"] * 10
    reply = post(app, servers_request(deadline=0.6))
    assert reply.status == 504 and "s has passed" in reply.json["error"]
    fake.models = ["a", "b"]
    reply = post(app, servers_request())
    assert (reply.status, reply.json["error"]) == (502, "the engine failed; the service's log says why")
    assert "set engine.model" in caplog.text


def test_requests_run_at_the_same_time_and_wait_for_a_free_place(
    serve: Callable[..., ASGIApp], fake: FakeVllm
) -> None:
    expected = post(serve(engine=[fake.url]), servers_request()).json["advantages"]

    async def call_five(app: ASGIApp) -> list[Reply]:
        body = json.dumps(servers_request()).encode()
        return list(await asyncio.gather(*(call(app, body) for _ in range(5))))

    for calls in (1, 3):
        replies = asyncio.run(call_five(serve(engine=[fake.url], calls=calls)))
        assert [reply.json["advantages"] for reply in replies] == [expected] * 5


def test_a_request_that_waits_too_long_for_others_is_given_up(
    serve: Callable[..., ASGIApp], fake: FakeVllm
) -> None:
    app = serve(engine=[fake.url], calls=1)
    fake.replies = ["hangs"] * 10

    async def call_two() -> tuple[Reply, Reply]:
        long = asyncio.create_task(call(app, json.dumps(servers_request(deadline=1.5)).encode()))
        await asyncio.sleep(0.1)
        short = await call(app, json.dumps(servers_request(deadline=0.3)).encode())
        return await long, short

    long, short = asyncio.run(call_two())
    assert (long.status, short.status) == (504, 504)
    assert "still waited for others" in short.json["error"]


def test_more_requests_than_may_wait_are_refused(
    serve: Callable[..., ASGIApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treetune.cluster.credit_service.app.MOST_WAITING_REQUESTS", 2)

    async def call_five(app: ASGIApp) -> list[Reply]:
        body = json.dumps(request_for(VINE)).encode()
        return list(await asyncio.gather(*(call(app, body) for _ in range(5))))

    replies = asyncio.run(call_five(serve()))
    assert [reply.status for reply in replies] == [200, 200, 200, 503, 503]


def test_bodies_of_waiting_requests_take_no_more_memory_than_those_in_progress(
    serve: Callable[..., ASGIApp],
) -> None:
    app = serve(calls=1)
    large = json.dumps(request_for()).encode().ljust(MOST_BYTES * 2 // 3)

    async def call_two() -> list[Reply]:
        return list(await asyncio.gather(call(app, large), call(app, large)))

    assert sorted(reply.status for reply in asyncio.run(call_two())) == [200, 503]
    assert [post(app, large).status for _ in range(3)] == [200, 200, 200], "their memory is free again"


@pytest.mark.parametrize(
    ("work", "further_settings"),
    [
        ("app._describe_mistakes", {"answers": "none"}),
        ("app.make_openapi", None),  # asks for the schema
        ("service.read_credit", {}),
        ("service.read_steps", {"steps": "lines"}),
    ],
)
def test_work_that_computes_does_not_keep_other_requests_waiting(
    serve: Callable[..., ASGIApp], monkeypatch: pytest.MonkeyPatch, work: str, further_settings: Any
) -> None:
    health_was_answered = threading.Event()
    waited: list[bool] = []

    def compute(*arguments: Any) -> Any:
        waited.append(health_was_answered.wait(20))
        raise ValueError("computed")

    monkeypatch.setattr(f"treetune.cluster.credit_service.{work}", compute)

    async def ask_both() -> None:
        app = serve()
        if further_settings is None:
            asking = asyncio.create_task(call(app, path="/openapi.json", method="GET"))
        else:
            asking = asyncio.create_task(call(app, json.dumps(request_for() | further_settings).encode()))
        await asyncio.sleep(0.05)  # the other request begins
        assert (await call(app, path="/health", method="GET")).status == 200
        health_was_answered.set()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(ask_both())
    assert waited == [True]


def test_a_slot_is_free_only_after_its_thread_has_ended(
    serve: Callable[..., ASGIApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is cancelled while a thread still examines the slot's tokenizer."""
    in_thread, may_end = threading.Event(), threading.Event()

    def examine(*arguments: Any, **named: Any) -> CreditAssigner:
        in_thread.set()
        may_end.wait(60)
        return CreditAssigner(*arguments, **named)

    app = serve(engine=None, tokenizer=None, grader=None, calls=1)
    monkeypatch.setattr("treetune.cluster.credit_service.service.CreditAssigner", examine)

    async def cancel() -> bool:
        request = asyncio.create_task(call(app, json.dumps(request_for()).encode()))
        while not in_thread.is_set():
            await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.sleep(0.05)
        ended_early = request.done()
        may_end.set()
        await request
        return ended_early

    assert asyncio.run(cancel()) is False


def test_an_advantage_that_is_not_finite_is_a_fault_of_the_credit(
    serve: Callable[..., ASGIApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = serve()
    assign = Rloo.assign

    def assign_infinity(self: Rloo, context: Any, trees: Any) -> Any:
        episodes, metrics = assign(self, context, trees)
        infinite = [dataclasses.replace(e, advantages=e.advantages + np.inf) for e in episodes]
        return infinite, metrics

    monkeypatch.setattr(Rloo, "assign", assign_infinity)
    reply = post(app, request_for())
    assert reply.status == 500 and "gave answer 0 an advantage that isn't finite" in reply.json["error"]


def test_a_client_that_disconnects_ends_its_request(serve: Callable[..., ASGIApp], fake: FakeVllm) -> None:
    app = serve(engine=[fake.url], calls=1)
    fake.replies = ["hangs"] * 10
    reply = post(app, servers_request(), disconnects_after=0.5)
    assert "disconnected" in reply.json["error"]
    fake.replies = []
    assert post(app, servers_request()).status == 200, "its place is free again"


def test_a_request_that_the_ending_service_cancels_gets_an_answer(
    serve: Callable[..., ASGIApp], fake: FakeVllm
) -> None:
    app = serve(engine=[fake.url])
    fake.replies = ["hangs"] * 10

    async def cancel_while_sampling() -> Reply:
        request = asyncio.create_task(call(app, json.dumps(servers_request()).encode()))
        while not fake.requests:
            await asyncio.sleep(0.01)
        request.cancel()
        return await request

    reply = asyncio.run(cancel_while_sampling())
    assert reply.status == 503 and "is ending" in reply.json["error"]


def test_the_metrics_count_requests_and_their_cost(serve: Callable[..., ASGIApp]) -> None:
    app = serve()
    cost = post(app, request_for(VINE)).json["cost"]
    post(app, b"{")
    metrics = post(app, b"", path="/metrics", method="GET").body.decode()
    parser = pytest.importorskip("prometheus_client.parser")
    samples = {}
    for family in parser.text_string_to_metric_families(metrics):
        for sample in family.samples:
            samples[sample.name, sample.labels.get("status")] = sample.value
    assert samples["treetune_credit_requests_total", "200"] == 1
    assert samples["treetune_credit_requests_total", "400"] == 1
    assert samples["treetune_credit_answers_total", None] == len(rows_of_run())
    assert samples["treetune_credit_tokens_total", None] == cost["tokens"] > 0
    assert samples["treetune_credit_requests_in_progress", None] == 0


def test_the_grades_of_one_request_are_not_used_for_another(serve: Callable[..., ASGIApp]) -> None:
    """Both have a problem of the same name, and other data for the grader."""
    app = serve(grader=LevelGrader())
    row, other_row = ({**row, "data": {"level": 0}} for row in rows_of_run()[:2])
    settings = {name: value for name, value in request_for(VINE).items() if name != "answers"}
    easy = post(app, {"answers": [row, other_row], **settings}).json["values"]
    hard_rows = [{**row, "data": {"level": 9}} for row in (row, other_row)]
    hard = post(app, {"answers": hard_rows, **settings}).json["values"]
    assert max(map(max, hard)) == 0.0 < min(map(min, easy))


class LevelGrader(mdp.LetterGrader):
    """A grader that reads the problem's data, and whose pool remembers grades."""

    isolation = "service"

    def grade(self, response: str, problem: Any) -> Any:
        return dataclasses.replace(
            super().grade(response, problem), reward=float(len(response) >= problem.data["level"])
        )


# Attacks

SECRET = "the content of a file"


def attacks(file: Path) -> Iterator[Any]:
    """Yield requests that try to read a file, to run code, to reach an address, or to break the service."""
    programs = [
        f"importstr '{file}'",
        f"{{ type: importstr '{file}' }}",
        f"{{ type: 'group', std: import '{file}' }}",
        "{ type: std.extVar('APP_SEED') }",
        "local f(x) = f(x); { type: f(1) }",
        f"file://{file}",
        str(file),
        "my_rewards:score",
        "http://169.254.169.254/",
        "__import__('os').system('true')",
        "a" * 100_000,
    ]
    for program in programs:
        for key in ("credit", "steps"):
            yield request_for(**{"credit": VINE, key: program})
            yield request_for(**{"credit": VINE, key: {"type": program}})
        yield request_for({**VINE, "values": program})
        yield request_for({**VINE, "values": {"type": program}})
        yield request_for({**VINE, "states": {"type": program}})
        for key in ("engine", "grader", "tokenizer", "imports", "function", "path", "key_file"):
            yield request_for(**{key: program})
            yield request_for({**VINE, key: program})
    yield request_for({"type": "distillation", "teacher": {"type": "pretrained", "path": str(file)}})
    yield request_for({"type": "distillation", "teacher": {"path": str(file)}})
    yield request_for({**VINE, "values": {"type": "critic"}})
    yield request_for({**VINE, "states": {"type": "threads"}})
    yield request_for({"type": "monte_carlo", "samples": 10**12})
    yield request_for({"type": "monte_carlo", "samples": 1e300})
    yield request_for({"type": "hicra", "phrases": ["so"] * 5000})
    nested: Any = "rloo"
    for _ in range(40):
        nested = {"type": "probability_mask", "over": nested}
    yield request_for(nested)
    yield b'{"credit": ' + b'{"type":' * 50_000
    yield b'{"credit": "rloo", "answers": ' + b"[" * 90_000
    yield json.dumps(request_for()).replace("1.0", "NaN").encode()
    yield json.dumps(request_for()).replace("1.0", "1e999").encode()
    yield json.dumps(request_for()).replace('"seed": 1', '"seed": ' + "9" * 5000).encode()
    yield request_for(seed=10**30)
    yield request_for(VINE, answers=[{"prompt_ids": [1], "response_ids": [2**31 - 1], "reward": 1}])
    yield request_for(VINE, answers=[{"prompt_ids": [2**31 - 1], "response_ids": [1], "reward": 1}])
    yield request_for(sampling={"max_tokens": 2**40})
    yield request_for(sampling={"max_tokens": 8, "stop": ["x"] * 10_000})
    yield request_for(context_length=2**60)
    yield request_for(answers=[{"prompt_ids": [1], "response_ids": [2**40], "reward": 1}] * 2)
    yield request_for("tree", answers=[{"prompt_ids": [1], "response_ids": [2], "reward": 1, "fork": [9, 9]}])
    yield request_for(
        answers=[{"prompt_ids": [1], "response_ids": [2], "reward": 1, "step_ends": [10**9]}] * 2
    )
    yield b"\x00" * 100
    yield b"\xff\xfe{"


def test_no_request_reads_a_file_runs_code_or_breaks_the_service(
    serve: Callable[..., ASGIApp], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret.jsonnet"
    file.write_text(json.dumps(SECRET))
    app = serve(budget=5000)
    post(app, request_for(VINE))  # so that late imports happen before `open` is refused

    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError(f"the request opened {arguments}")

    for name in ("os.system", "subprocess.Popen", "socket.create_connection", "socket.socket.connect"):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr("pathlib.Path.open", refuse)
    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    monkeypatch.setattr("treetune.config.jsonnet.sum_of", refuse)
    for request in attacks(file):
        reply = post(app, request)
        assert 400 <= reply.status < 500, (str(request)[-300:], reply)
        assert SECRET not in reply.body.decode()


def test_no_part_that_a_client_can_choose_has_a_field_for_a_file_or_a_function() -> None:
    families: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (Credit, ALLOWED_CREDITS),
        (ValueEstimator, ALLOWED_VALUES),
        (StateRule, ALLOWED_STATES),
        (StepSplitter, ALLOWED_STEPS),
    )
    texts = set()
    for family, names in families:
        for name in names:
            part = family.parts_by_name()[name]
            for key, declared in keys_of(part).items():
                hint = declared.annotation
                if _may_be_text(hint):
                    texts.add(f"{name}.{key}")
                assert not _mentions(hint, Path) and not _mentions(hint, Callable), (name, key)
    # Each of these is compared with text of answers, or added to it.
    assert texts == {"hicra.phrases", "lines.answer_marker", "rredcot.lead_in", "trace.lead_in"}


def _may_be_text(hint: Any) -> bool:
    return hint in (str, Any, object) or any(map(_may_be_text, _arguments(hint)))


def _mentions(hint: Any, kind: Any) -> bool:
    if hint is kind or typing.get_origin(hint) is kind:
        return True
    return any(_mentions(argument, kind) for argument in _arguments(hint))


def _arguments(hint: Any) -> tuple[Any, ...]:
    return () if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)


@pytest.mark.parametrize(
    ("rows", "settings", "types", "options", "message"),
    [
        (rows_of_run(), None, {}, {}, "the schema's metadata has no key 'treetune'"),
        (rows_of_run(), "{", {}, {}, "Invalid JSON"),
        (rows_of_run(), {"credit": "rloo", "answers": []}, {}, {}, "Extra inputs"),
        (rows_of_run(), {"credit": "rloo"}, {}, {"compression": "zstd"}, "the stream is compressed"),
        (rows_of_run(), {"credit": "rloo"}, {}, {"compression": "lz4"}, "the stream is compressed"),
        (
            rows_of_run(),
            {"credit": "rloo"},
            {"gold": pa.dictionary(pa.int32(), pa.string())},
            {},
            "the stream has dictionaries",
        ),
        (
            rows_of_run(),
            {"credit": "rloo"},
            {"response_ids": pa.list_view(pa.int64())},
            {},
            "the column 'response_ids' has the type list_view.*give lists of integers",
        ),
        (
            rows_of_run(),
            {"credit": "rloo"},
            {"gold": pa.string_view()},
            {},
            "'gold' has the type string_view",
        ),
        ([{"prompt_ids": [1], "reward": 1.0}], {"credit": "rloo"}, {}, {}, "'response_ids' is missing"),
        ([{**rows_of_run()[0], "engine": "x"}], {"credit": "rloo"}, {}, {}, "there is no column 'engine'"),
        (
            [{**rows_of_run()[0], "reward": None}] * 2,
            {"credit": "rloo"},
            {"reward": pa.float64()},
            {},
            "answer 0: its reward is None",
        ),
        ([{**rows_of_run()[0], "prompt_ids": [1, None]}] * 2, {"credit": "rloo"}, {}, {}, "prompt_ids"),
    ],
)
def test_a_wrong_stream_is_refused(
    serve: Callable[..., ASGIApp],
    rows: list[dict[str, Any]],
    settings: Any,
    types: dict[str, Any],
    options: dict[str, Any],
    message: str,
) -> None:
    reply = post(serve(), arrow_request(rows, settings, types, **options), headers=AS_ARROW)
    assert reply.status == 400
    assert re.search(message, reply.json["error"]), reply.body


def test_two_columns_of_the_same_name_are_refused(serve: Callable[..., ASGIApp]) -> None:
    columns = [pa.array([[1]]), pa.array([[2]]), pa.array([1.0]), pa.array([0.0])]
    table = pa.table(columns, names=["prompt_ids", "response_ids", "reward", "reward"])
    table = table.replace_schema_metadata({"treetune": '{"credit": "rloo"}'})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    reply = post(serve(), sink.getvalue().to_pybytes(), headers=AS_ARROW)
    assert reply.status == 400 and "two columns of the same name" in reply.json["error"]


def test_a_text_of_data_that_is_not_json_is_refused(serve: Callable[..., ASGIApp]) -> None:
    for text in ("{", "[]", "[" * 100_000):
        columns = {"prompt_ids": [[1]], "response_ids": [[2]], "reward": [1.0], "data": [text]}
        table = pa.table(columns, metadata={"treetune": '{"credit": "rloo"}'})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        reply = post(serve(), sink.getvalue().to_pybytes(), headers=AS_ARROW)
        assert reply.status == 400 and "the column 'data'" in reply.json["error"]


def test_damaged_streams_never_make_the_service_fail(serve: Callable[..., ASGIApp]) -> None:
    app = serve()
    stream = arrow_request(rows_of_run()[:2], {"credit": "rloo"})
    rng = random.Random(0)
    bodies = [stream[: rng.randrange(len(stream))] for _ in range(40)]
    for _ in range(160):
        damaged = bytearray(stream)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        bodies.append(bytes(damaged))
    for body in bodies:
        assert post(app, body, headers=AS_ARROW).status in (200, 400)


# The owner's settings


def test_the_owner_limits_the_credits(serve: Callable[..., ASGIApp]) -> None:
    app = serve(credits=("rloo",))
    assert post(app, request_for("rloo")).status == 200
    reply = post(app, request_for("group"))
    assert reply.status == 400 and "choose one of" in reply.json["error"]


def test_without_an_engine_only_credit_of_rewards_is_assigned(serve: Callable[..., ASGIApp]) -> None:
    app = serve(engine=None, tokenizer=None, grader=None)
    assert post(app, request_for("rloo")).status == 200
    reply = post(app, request_for(VINE))
    assert reply.status == 400 and "give engine" in reply.json["error"]


def test_wrong_settings_of_the_owner_are_refused() -> None:
    with pytest.raises(ConfigError, match="grader"):
        CreditService(ServiceSettings(grader={"type": "nothing"}))
    with pytest.raises(ValueError, match="addresses has a user name, a password or a query"):
        CreditService(ServiceSettings(engine=["http://a:1?x"]))
    with pytest.raises(ValueError, match="give --tokenizer"):
        CreditService(ServiceSettings(engine=lambda requests: []))


def test_a_wrong_grader_is_reported_before_the_engine_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(OPEN_ENGINE, lambda *arguments, **settings: opened.append(arguments))
    with pytest.raises(ConfigError, match="grader"):
        CreditService(
            ServiceSettings(engine=lambda requests: [], tokenizer=mdp.CODEC, grader={"type": "nothing"})
        )
    assert opened == []


def test_a_service_that_cannot_be_opened_closes_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    opened = engine()
    monkeypatch.setattr(opened, "close", lambda: closed.append("engine"))
    monkeypatch.setattr(OPEN_ENGINE, lambda *arguments, **settings: opened)

    class Local(mdp.LetterGrader):
        """Can't be sent to a worker process, since it isn't at the top level of a module."""

        isolation = "process"

    with pytest.raises(ValueError, match="top level of a module"):
        CreditService(ServiceSettings(engine=lambda requests: [], tokenizer=mdp.CODEC, grader=Local()))
    assert closed == ["engine"]


def test_the_engine_is_closed_even_if_a_grader_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    opened = engine()
    monkeypatch.setattr(opened, "close", lambda: closed.append("engine"))
    monkeypatch.setattr(OPEN_ENGINE, lambda *arguments, **settings: opened)

    close = GraderPool.close

    def fail(pool: GraderPool) -> None:
        close(pool)
        raise RuntimeError("worker processes did not end")

    monkeypatch.setattr(GraderPool, "close", fail)
    settings = ServiceSettings(engine=lambda requests: [], tokenizer=mdp.CODEC, grader=mdp.LetterGrader())
    with pytest.raises(RuntimeError, match="did not end"):
        CreditService(settings).close()
    assert closed == ["engine"]


def test_numbers_of_arrays_keep_their_bits_as_json() -> None:
    """The text of a float has as many digits as its value needs."""
    numbers = np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-500, 500).clip(-300, 300)
    assert plain(np.array(json.loads(json.dumps(numbers.tolist())))) == plain(numbers)
