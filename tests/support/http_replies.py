"""A server on this machine that replies as it is told, byte by byte."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Written = tuple[int, str, dict[str, str]]
"""An HTTP status, a body, and headers."""


@dataclass
class Replies:
    """`reply` writes the reply to a request's body; `asked` are the bodies so far."""

    reply: Callable[[dict[str, Any]], Written]
    base_url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def replying(reply: Callable[[dict[str, Any]], Written]) -> Iterator[Replies]:
    replies = Replies(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            replies.asked.append(body)
            status, text, headers = replies.reply(body)
            data = text.encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    replies.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield replies
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def chat(content: Any, finish: str | None = "stop", **message: Any) -> str:
    return json.dumps({"choices": [{"message": {"content": content, **message}, "finish_reason": finish}]})


def error(code: Any = None, message: str = "no", **more: Any) -> str:
    return json.dumps({"error": {"message": message, "code": code, **more}})
