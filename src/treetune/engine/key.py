"""Guards a server's requests: each must carry the server's key, and may name the weights that it expects.

*The key.* Every user of the machine can connect to a loopback address, and vLLM's routes for new weights run
any method of the engine. vLLM's own key protects only the routes below ``/v1``.

*The name of the weights.* A server that several runs can reach, or that somebody has started again, may have
other weights than a client believes. So the client that sends weights gives them a name, and a request for
samples may carry the name that it expects::

    client                                            server
      GET /treetune/weights?are=step-7   ──────────►  its weights are called step-7 from here on
      POST /v1/completions               ──────────►  samples
           X-Treetune-Weights: step-7
      POST /v1/completions               ──────────►  409, at once, or instead of the answer if the weights
           X-Treetune-Weights: step-6                 were replaced while it sampled

This file uses only the standard library, since vLLM's process imports it.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

KEY_VARIABLE = "TREETUNE_SERVER_KEY"
"""The environment variable with the server's key. Other users can read a process's command line, but not its
environment."""

DESCRIPTION_VARIABLE = "TREETUNE_SERVER_DESCRIPTION"
"""The environment variable with the server's settings as JSON, for clients that know only its address."""

WEIGHTS_ROUTE = "/treetune/weights"
"""The route that answers with the server's description and the name of its weights. With ``?are=NAME`` it
sets the name first."""

WEIGHTS_HEADER = "X-Treetune-Weights"
"""The header with the name of the weights that a request expects."""

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
App = Callable[[Mapping[str, Any], Any, Send], Awaitable[None]]


def key_header(key: str, weights: str = "") -> dict[str, str]:
    """Returns the headers of a request: the key and, if the request expects named weights, their name."""
    weights_header = {WEIGHTS_HEADER: weights} if weights else {}
    return {"Authorization": f"Bearer {key}", **weights_header}


class ServerDescription:
    """The description of a server process, and the name of its weights, which is empty until a client names
    them."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.process = secrets.token_hex(8)  # identifies the process to clients
        self.weights = ""
        self._description = json.loads(environment.get(DESCRIPTION_VARIABLE, "{}"))

    def describe(self, query: str) -> bytes:
        """Returns the answer of `WEIGHTS_ROUTE`. The query ``are=step-7`` ("the weights are step-7") sets the
        weights' name first."""
        # The name may be empty. The server then refuses every request that expects named weights.
        if (names := parse_qs(query, keep_blank_values=True).get("are")) is not None:
            self.weights = names[0]
        return json.dumps(
            {"process": self.process, "weights": self.weights, "started": self._description}
        ).encode()

    def refusal(self, expected: str | None) -> bytes | None:
        """Returns an error message if a request expects other weights than the server has, else None."""
        if expected is None or expected == self.weights:
            return None
        return f"this server has the weights {self.weights!r}, not {expected!r}".encode()


class KeyRequired:
    """ASGI middleware that answers 401 to requests without the key of the environment."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._authorization = key_header(os.environ[KEY_VARIABLE])["Authorization"].encode()
        self._server = ServerDescription()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        """Answers requests without the key or for `WEIGHTS_ROUTE`, and passes the others on to vLLM's app."""
        if scope["type"] == "lifespan":  # the start and the end of the server, which no client sends
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._authorization):
            await respond(send, 401, b"this server asks for a key")
        elif scope.get("path") == WEIGHTS_ROUTE:
            await respond(send, 200, self._server.describe(scope["query_string"].decode()))
        elif (expected := headers.get(WEIGHTS_HEADER.lower().encode())) is None:
            await self._app(scope, receive, send)
        else:  # `expected` is the name of the weights that the request expects
            await self._answer_from(expected.decode(), scope, receive, send)

    async def _answer_from(self, expected: str, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        """Answers a request that expects the weights with the name `expected`.

        The answer is 409 if the server has other weights already, or gets others while it samples.
        """
        if refusal := self._server.refusal(expected):
            await respond(send, 409, refusal)
            return
        await self._app(scope, receive, _SendUnlessReplaced(self._server, expected, send))


class _SendUnlessReplaced:
    """Sends the messages of an answer. If the server has other weights than the request expects when the
    answer begins, sends 409 in place of the whole answer."""

    def __init__(self, server: ServerDescription, expected: str, send: Send) -> None:
        self._server, self._expected, self._send = server, expected, send
        self._is_refused = False

    async def __call__(self, message: Mapping[str, Any]) -> None:
        """Sends a message of the answer. If the server has other weights than the request expects when the
        answer begins, sends 409 instead, and none of the answer's messages."""
        begins_answer = message["type"] == "http.response.start"
        if begins_answer and (refusal := self._server.refusal(self._expected)):
            self._is_refused = True
            await respond(self._send, 409, refusal)
        elif not self._is_refused:
            await self._send(message)


async def respond(send: Send, status: int, body: bytes) -> None:
    """Answers an ASGI request."""
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})
