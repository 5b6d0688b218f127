"""A server on this machine with the hub's routes for an upload, which stores what it receives."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_a_token_that_no_log_may_hold"


@dataclass
class Hub:
    """The received `files` by name, and the `requests` as method and path."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def stand_in_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append(f"{self.command} {self.path}")
            status, value = self._value(body)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST

        def _value(self, body: bytes) -> tuple[int, Any]:
            path = self.path.partition("?")[0]
            if path.startswith("/blobs/"):
                hub.blobs[path.removeprefix("/blobs/")] = body
                return 200, {}
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return 401, {"error": "not you"}
            if path == "/api/repos/create":
                hub.created.append(json.loads(body))
                return 409, {"error": "it is there already", "url": f"{hub.address}/me/tiny"}
            if path == "/api/validate-yaml":
                return 200, {"errors": [], "warnings": []}
            if "/preupload/" in path:
                return 200, {"files": [_mode(file["path"]) for file in json.loads(body)["files"]]}
            if path.endswith("/info/lfs/objects/batch"):
                objects = [_upload(blob, hub.address) for blob in json.loads(body)["objects"]]
                return 200, {"transfer": "basic", "objects": objects}
            if "/commit/" in path:
                for line in map(json.loads, body.splitlines()):
                    self._keep(line["key"], line["value"])
                url = f"{hub.address}/me/tiny/commit/1"
                return 200, {"commitUrl": url, "commitOid": "1", "success": True}
            return 404, {"error": f"no {path}"}

        def _keep(self, key: str, value: dict[str, Any]) -> None:
            if key == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                hub.files[value["path"]] = hub.blobs[value["oid"]]

    def _mode(path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(".safetensors") else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _upload(blob: dict[str, Any], address: str) -> dict[str, Any]:
        return {**blob, "actions": {"upload": {"href": f"{address}/blobs/{blob['oid']}"}}}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
