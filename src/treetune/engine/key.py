"""The middleware of a server: a request must carry the server's key, and may name the weights that it means.

On a loopback address every user of the machine can connect, and the development routes that exchange weights
run any method of the engine. vLLM's own key guards the routes below ``/v1`` and leaves these open.

A server that several runs could reach, or that is started anew by hand, may have other weights than a client
believes. The client that brings weights in gives them a name; a request for samples may name them too, and is
answered with 409 if the server has others, at the beginning or by the end. Standard library only.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

VARIABLE = "TREETUNE_SERVER_KEY"
"""The variable of the server's key: other users can't read its environment, unlike its command line."""

DESCRIPTION = "TREETUNE_SERVER_DESCRIPTION"
"""The variable of the server's settings, as JSON, for clients that reach it by its address."""

ROUTE = "/treetune/weights"
"""Answers with the server's description and the name of its weights; ``?are=NAME`` gives them another one
first."""

NAMED_WEIGHTS = "X-Treetune-Weights"
"""Header with the name of the weights that a request means."""

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
App = Callable[[Mapping[str, Any], Any, Send], Awaitable[None]]


def header(key: str, weights: str = "") -> dict[str, str]:
    """Returns the headers of a request: the key, and the name of the weights if it means some."""
    named = {NAMED_WEIGHTS: weights} if weights else {}
    return {"Authorization": f"Bearer {key}", **named}


class ServerDescription:
    """The description of a server process, and the name of its weights: empty until a client names them."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.process, self.weights = secrets.token_hex(8), ""
        self._description = json.loads(environment.get(DESCRIPTION, "{}"))

    def describe(self, query: str) -> bytes:
        """Returns the answer of `ROUTE`."""
        if (names := parse_qs(query, keep_blank_values=True).get("are")) is not None:
            self.weights = names[0]
        return json.dumps(
            {"process": self.process, "weights": self.weights, "started": self._description}
        ).encode()

    def refusal(self, meant: str | None) -> bytes | None:
        """Returns an error message if a request means other weights than the server has, else None."""
        if meant is None or meant == self.weights:
            return None
        return f"this server has the weights {self.weights!r}, not {meant!r}".encode()


class KeyRequired:
    """ASGI middleware that answers 401 to requests without the key of the environment."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = header(os.environ[VARIABLE])["Authorization"].encode()
        self._served = ServerDescription()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            await respond(send, 401, b"this server asks for a key")
        elif scope.get("path") == ROUTE:
            await respond(send, 200, self._served.describe(scope["query_string"].decode()))
        elif (meant := headers.get(NAMED_WEIGHTS.lower().encode())) is None:
            await self._app(scope, receive, send)
        else:
            await self._sample_from(meant.decode(), scope, receive, send)

    async def _sample_from(self, meant: str, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        if refusal := self._served.refusal(meant):
            await respond(send, 409, refusal)
            return
        refused = False

        async def checked(message: Mapping[str, Any]) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and (refusal := self._served.refusal(meant)):
                refused = True
                await respond(send, 409, refusal)
            elif not refused:
                await send(message)

        await self._app(scope, receive, checked)


async def respond(send: Send, status: int, body: bytes) -> None:
    """Answers an ASGI request."""
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})
