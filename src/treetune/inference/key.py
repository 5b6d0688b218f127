"""Runs in the server: whoever asks it for anything must know its key.

On a loopback address every user of the machine can connect, and the development routes that exchange weights
run any method of the engine. vLLM's own key guards the routes below ``/v1`` and leaves these open.
Standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

VARIABLE = "TREETUNE_SERVER_KEY"
"""Holds the key in the server's environment, which other users can't read, unlike its command line."""

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
App = Callable[[Mapping[str, Any], Any, Send], Awaitable[None]]


def header(key: str) -> dict[str, str]:
    """What a request must carry."""
    return {"Authorization": f"Bearer {key}"}


class KeyRequired:
    """ASGI middleware that answers 401 to requests without the key of the environment."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = header(os.environ[VARIABLE])["Authorization"].encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "lifespan":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"this server asks for a key"})
                return
        await self._app(scope, receive, send)
