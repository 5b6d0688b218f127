"""The service's routes: they check the key, read the body, and turn results and errors into HTTP responses.

| route | returns |
|---|---|
| POST /advantages | the advantages of answers, as JSON or as an Arrow stream like the request |
| GET /health | that the service is up; without the key |
| GET /openapi.json | the schema of requests and responses; without the key |
| GET /metrics | counts, as Prometheus reads them |

| status | meaning |
|---|---|
| 400 | the request is wrong, or asks for something that the service doesn't allow |
| 401 | the key is missing or wrong |
| 408, 413, 415 | the body didn't arrive in time, is too large, or is of another type |
| 422 | the budget is used up |
| 500 | the grader failed, or the service has a fault |
| 502 | the engine failed; the service's log says why |
| 503 | too many requests or bytes wait already, or the service is ending |
| 504 | the deadline has passed |

Each request is a task of the event loop. Bodies and credit are computed in threads::

    task of a request                                      a thread
    ────────────────────────────────────────────────       ───────────────────────────────
    _read_body: waits for the client,
      BODY_TIMEOUT_S at most
    _read_request ───────────────────────────────────────► parses the body
    _credit_while_connected: waits for the first of
      task CreditService.credit
        waits for a free slot, until its deadline
        CreditAssigner, and its advantages_async ────────► samples until the deadline, grades
        frees the slot ◄─────────────────────────────────  returns
      task _wait_for_disconnect: the client is gone
        the task above is cancelled ─────────────────────► the engine stops waiting for samples
        waits until it has freed the slot ◄──────────────  returns
    _write_response ─────────────────────────────────────► writes the response's body

If a client disconnects, its request ends: nothing more is sampled for it. An error in a thread decides the
status of that request alone. A thread has no deadline while it parses or writes a body, or assigns credit
that samples nothing. After SIGTERM, requests get `serving.SHUTDOWN_GRACE_S` seconds to end. Then their tasks
are cancelled, and the process ends when its threads have returned.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import treetune
from treetune.cluster.credit_service import arrow
from treetune.cluster.credit_service.messages import (
    CreditRequest,
    CreditResponse,
    CreditSettings,
    Failure,
    Health,
    finite_or_none,
)
from treetune.cluster.credit_service.service import CreditService
from treetune.credit import CreditedAnswers, CreditLimitReached, GradedAnswer
from treetune.exceptions import EngineError

LOG = logging.getLogger("treetune.credit_service")

JSON_TYPE = "application/json"
OPEN_PATHS = ("/health", "/openapi.json")
"""The paths that need no key. They show nothing of the owner's settings."""
BODY_TIMEOUT_S = 300.0
"""Most seconds until a body has arrived."""
MOST_WAITING_REQUESTS = 64
"""Most requests that wait for others."""
MOST_LISTED_MISTAKES, MOST_CHARACTERS_OF_PLACE = 5, 200
"""Most mistakes of a request that one message lists, and most characters of the place of each mistake."""


@dataclass
class _Bodies:
    """The limits on the sizes of bodies, and the bytes of the bodies that are in memory at present.

    The limits keep the service from running out of memory: read as Python's objects, a body takes several
    times its size, also while its request waits for others.
    """

    most_bytes: int
    """Most bytes of a body."""
    most_bytes_together: int
    """Most bytes of the bodies of all requests together, including those that wait."""
    bytes_together: int = 0
    """The present bytes of the bodies of all requests."""


class _Refusal(Exception):
    """A request that is refused with an HTTP status, before the library is called."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class ServedCounts:
    """The counts that GET /metrics shows."""

    requests: Counter[int] = field(default_factory=Counter)
    """Requests for advantages, by the status of the response."""
    answers: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    in_progress: int = 0

    def text(self) -> str:
        """Returns the counts in Prometheus' text format."""
        lines = [
            "# HELP treetune_credit_requests_total Requests for advantages, by the status of the response.",
            "# TYPE treetune_credit_requests_total counter",
        ]
        for status, count in sorted(self.requests.items()):
            lines.append(f'treetune_credit_requests_total{{status="{status}"}} {count}')
        for name, kind, help_text, value in (
            ("answers_total", "counter", "Answers that have advantages.", self.answers),
            ("samples_total", "counter", "Continuations that were sampled for them.", self.samples),
            ("tokens_total", "counter", "Tokens of these continuations.", self.tokens),
            ("seconds_total", "counter", "Seconds of calls that returned advantages.", self.seconds),
            ("requests_in_progress", "gauge", "Requests that wait or are worked on.", self.in_progress),
        ):
            lines.append(f"# HELP treetune_credit_{name} {help_text}")
            lines.append(f"# TYPE treetune_credit_{name} {kind}")
            lines.append(f"treetune_credit_{name} {value}")
        return "\n".join(lines) + "\n"


def make_application(service: CreditService, key: str, most_bytes: int) -> ASGIApp:
    """Returns the ASGI application of the service.

    Args:
        key: The key that requests need.
        most_bytes: Most bytes of a body.
    """
    counts = ServedCounts()
    # The bodies of all requests, also of those that wait, may together have as many bytes as `calls_at_once`
    # bodies of the largest size.
    bodies = _Bodies(most_bytes, service.calls_at_once * most_bytes)

    async def show_health(request: Request) -> Response:
        return JSONResponse(Health(status="ok", version=treetune.__version__).model_dump())

    async def show_schema(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(make_openapi))

    async def show_metrics(request: Request) -> Response:
        return PlainTextResponse(counts.text(), media_type="text/plain; version=0.0.4")

    async def respond_to_request(request: Request) -> Response:
        """Responds to a request for advantages, and counts it."""
        if counts.in_progress >= service.calls_at_once + MOST_WAITING_REQUESTS:
            counts.requests[503] += 1
            return _make_failure(503, f"{MOST_WAITING_REQUESTS} requests wait already: send it again later")
        started = time.monotonic()
        counts.in_progress += 1
        status = 500  # counted if an exception leaves this function
        body = bytearray()  # `_respond` reads the body into it, and adds its length to `bodies`
        try:
            response, credited = await _respond(request, body, service, bodies)
            status = response.status_code
            if credited is not None:
                counts.answers += len(credited.advantages)
                counts.samples += credited.cost.samples
                counts.tokens += credited.cost.tokens
                counts.seconds += time.monotonic() - started
            return response
        finally:
            bodies.bytes_together -= len(body)
            counts.in_progress -= 1
            counts.requests[status] += 1

    routes = [
        Route("/advantages", respond_to_request, methods=["POST"]),
        Route("/health", show_health),
        Route("/openapi.json", show_schema),
        Route("/metrics", show_metrics),
    ]
    return _KeyRequired(Starlette(routes=routes), key)


class _KeyRequired:
    """Middleware that answers 401 to requests without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = authorization.partition(b" ")
            # The time of `compare_digest` doesn't show how much of a wrong key is right.
            if not (scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)):
                message = "send the service's key in the header `Authorization: Bearer KEY`"
                response = _make_failure(401, message, {"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _respond(
    request: Request, body: bytearray, service: CreditService, bodies: _Bodies
) -> tuple[Response, CreditedAnswers | None]:
    """Returns the response to a request for advantages, and the advantages; None in place of advantages if
    the request failed.

    Args:
        body: An empty array, into which the request's body is read. The caller needs its length afterwards.
    """
    try:
        media_type = _read_media_type(request)
        await _read_body(request, body, bodies)
        credited = await _read_and_credit(request, media_type, bytes(body), service)
        response = await run_in_threadpool(_write_response, media_type, credited)
        return response, credited
    except _Refusal as refusal:
        return _make_failure(refusal.status, str(refusal)), None
    except asyncio.CancelledError:
        # uvicorn cancels requests that run longer than SHUTDOWN_GRACE_S after SIGTERM. The client still gets
        # a response, so the cancellation ends here.
        return _make_failure(503, "the service is ending: send the request again later"), None
    except ClientDisconnect:
        return _make_failure(400, "the client has disconnected"), None
    except CreditLimitReached as error:
        return _make_failure(504 if error.limit == "deadline" else 422, str(error)), None
    except EngineError as error:
        # The message may have addresses of the owner, which clients don't get to know.
        LOG.warning("the engine failed: %s", error)
        return _make_failure(502, "the engine failed; the service's log says why"), None
    except RuntimeError as error:  # such as a grader that failed
        LOG.exception("a request failed")
        return _make_failure(500, str(error)), None
    except Exception:
        LOG.exception("a request failed because of a fault in treetune")
        return _make_failure(500, "the service has failed; its log has the traceback"), None


async def _read_and_credit(
    request: Request, media_type: str, body: bytes, service: CreditService
) -> CreditedAnswers:
    """Returns the advantages. Raises _Refusal for a request that is wrong, and what `CreditService.credit`
    raises."""
    try:
        # In a thread, so that a large body doesn't keep other requests waiting.
        settings, answers = await run_in_threadpool(_read_request, media_type, body)
        return await _credit_while_connected(request, service, settings, answers)
    except ValueError as error:
        # Most of these errors mean that the request is wrong. But NumPy also raises ValueError for faults of
        # this program. So the message goes into the log, too, and not only to the client.
        LOG.warning("a request is refused: %s", error)
        raise _Refusal(400, str(error)) from error


def _make_failure(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the response to a request that failed. With the status 503, a further header asks the client to
    send the same request again after a second."""
    all_headers = dict(headers or {})
    if status == 503:
        all_headers["Retry-After"] = "1"
    return JSONResponse(Failure(error=message).model_dump(), status, all_headers)


def _read_media_type(request: Request) -> str:
    """Returns the type of the body. Raises _Refusal for a type that the service doesn't read."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in (JSON_TYPE, arrow.MEDIA_TYPE):
        raise _Refusal(415, f"the content type is {media_type!r}: send {JSON_TYPE} or {arrow.MEDIA_TYPE}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise _Refusal(415, "the body is compressed: send it without a content encoding")
    return media_type


async def _read_body(request: Request, body: bytearray, bodies: _Bodies) -> None:
    """Reads the request's body into `body`. Raises _Refusal as soon as too many bytes have arrived, or if the
    body is not complete after BODY_TIMEOUT_S."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                bodies.bytes_together += len(part)
                if len(body) > bodies.most_bytes:
                    raise _Refusal(
                        413,
                        f"the body has more than {bodies.most_bytes:,} bytes: send fewer answers in a"
                        " request, or start the service with a larger --megabytes",
                    )
                if bodies.bytes_together > bodies.most_bytes_together:
                    raise _Refusal(
                        503,
                        f"the bodies of all requests have more than {bodies.most_bytes_together:,} bytes:"
                        " send it again later",
                    )
    except TimeoutError as error:
        raise _Refusal(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from error


def _read_request(media_type: str, body: bytes) -> tuple[CreditSettings, list[GradedAnswer]]:
    """Returns the settings and the answers of a request. Raises _Refusal for a body that doesn't fit the
    schema, and ValueError for other mistakes."""
    try:
        return _parse_request(media_type, body)
    except ValidationError as error:
        # Here, in the thread: a body may have so many mistakes that it takes seconds to list them.
        raise _Refusal(400, _describe_mistakes(error)) from error


def _parse_request(media_type: str, body: bytes) -> tuple[CreditSettings, list[GradedAnswer]]:
    """Returns the settings and the answers of a request. Raises ValidationError or ValueError."""
    if media_type == arrow.MEDIA_TYPE:
        settings_text, answers_of_table = arrow.read_request(body)
        return CreditSettings.model_validate_json(settings_text), answers_of_table
    request = CreditRequest.model_validate_json(body)
    answers = []
    for answer in request.answers:
        columns = dict(answer)
        # As an array, so that the advantages are arrays, too, and not lists of Python's numbers.
        columns["response_ids"] = np.asarray(answer.response_ids)
        answers.append(GradedAnswer(**columns))
    return request, answers  # a CreditRequest is a CreditSettings that has the answers, too


async def _credit_while_connected(
    request: Request, service: CreditService, settings: CreditSettings, answers: Sequence[GradedAnswer]
) -> CreditedAnswers:
    """Returns the advantages. Raises ClientDisconnect if the client disconnects before they are there, and
    what `CreditService.credit` raises."""
    work = asyncio.create_task(service.credit(settings, answers))
    watcher = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        watcher.cancel()
        if not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work


async def _wait_for_disconnect(request: Request) -> None:
    """Waits until the client has disconnected. The body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _write_response(media_type: str, credited: CreditedAnswers) -> Response:
    """Returns the response with the advantages, in the media type that the request had."""
    # JSON has neither NaN nor infinity: such numbers become None.
    metrics = {name: finite_or_none(value) for name, value in credited.metrics.items()}
    cost = {
        "samples": credited.cost.samples,
        "tokens": credited.cost.tokens,
        "seconds": credited.cost.seconds,
    }
    if media_type == arrow.MEDIA_TYPE:
        contents = arrow.write_response(credited, {"cost": cost, "metrics": metrics})
        return Response(contents, media_type=arrow.MEDIA_TYPE)
    columns = {
        "advantages": [row.tolist() for row in credited.advantages],
        "trained": [row.tolist() for row in credited.trained],
        "step_ends": [list(map(int, ends)) for ends in credited.step_ends],
        "values": list(map(_finite_numbers, credited.values)),
        "errors": list(map(_finite_numbers, credited.errors)),
        "left_out": credited.left_out,
        "cost": cost,
        "metrics": metrics,
    }
    # Python writes a float so that reading it gives the same bits.
    return Response(json.dumps(columns, allow_nan=False), media_type=JSON_TYPE)


def _finite_numbers(numbers: Sequence[float] | None) -> list[float | None] | None:
    return None if numbers is None else list(map(finite_or_none, numbers))


def _describe_mistakes(error: ValidationError) -> str:
    """Returns a message that names the place of each mistake, and doesn't repeat the values that the client
    has sent."""
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for mistake in mistakes[:MOST_LISTED_MISTAKES]:
        place = ".".join(map(str, mistake["loc"]))[:MOST_CHARACTERS_OF_PLACE]
        lines.append(f"{place}: {mistake['msg']}" if place else mistake["msg"])
    if len(mistakes) > MOST_LISTED_MISTAKES:
        lines.append(f"and {len(mistakes) - MOST_LISTED_MISTAKES} more mistakes")
    return "; ".join(lines)


# Schema


def make_openapi() -> dict[str, Any]:
    """Returns the OpenAPI schema of the service."""
    _, definitions = models_json_schema(
        [
            (CreditRequest, "validation"),
            (CreditResponse, "serialization"),
            (Failure, "serialization"),
            (Health, "serialization"),
        ],
        ref_template="#/components/schemas/{model}",
    )
    binary = TypeAdapter(bytes).json_schema()
    failures = {
        str(status): _describe_response(description, "Failure")
        for status, description in (
            (400, "The request is wrong, or asks for something that the service doesn't allow."),
            (401, "The key is missing or wrong."),
            (408, "The body did not arrive in time."),
            (413, "The body is too large."),
            (415, "The body is of another type."),
            (422, "The budget is used up."),
            (500, "The grader failed, or the service has a fault."),
            (502, "The engine failed."),
            (503, "Too many requests or bytes wait already, or the service is ending."),
            (504, "The deadline has passed."),
        )
    }
    post = {
        "summary": "The advantages of answers that were sampled and graded elsewhere",
        "security": [{"key": []}],
        "requestBody": {
            "required": True,
            "content": {
                JSON_TYPE: {"schema": _schema_reference("CreditRequest")},
                arrow.MEDIA_TYPE: {"schema": binary},
            },
        },
        "responses": {
            "200": {
                "description": "The advantages, in the type of the request.",
                "content": {
                    JSON_TYPE: {"schema": _schema_reference("CreditResponse")},
                    arrow.MEDIA_TYPE: {"schema": binary},
                },
            },
            **failures,
        },
    }
    text = {"description": "Counts.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    schema = {"description": "This schema.", "content": {JSON_TYPE: {"schema": {"type": "object"}}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "treetune credit",
            "version": treetune.__version__,
            "description": "An advantage for each token of answers that another trainer has sampled.",
        },
        "paths": {
            "/advantages": {"post": post},
            "/health": {
                "get": {
                    "summary": "Whether the service is up",
                    "responses": {"200": _describe_response("It is up.", "Health")},
                }
            },
            "/metrics": {
                "get": {
                    "summary": "Counts, as Prometheus reads them",
                    "security": [{"key": []}],
                    "responses": {"200": text, "401": failures["401"]},
                }
            },
            "/openapi.json": {"get": {"summary": "This schema", "responses": {"200": schema}}},
        },
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schema_reference(name: str) -> Mapping[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _describe_response(description: str, name: str) -> dict[str, Any]:
    return {"description": description, "content": {JSON_TYPE: {"schema": _schema_reference(name)}}}
