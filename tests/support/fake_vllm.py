"""A small HTTP server in the test's own process with vLLM's public routes, and without a model.

Tokens and log-probs are those of `stub_server.sample`. The attributes say what kind of server it is, and
`replies` orders the next answers of the sampling routes, such as ``[503, 'cut', 'ok']``.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.stub_server import CONTEXT, read_weights, sample

ROUTES = ("/inference/v1/generate", "/v1/completions")


class FakeVllm:
    """A fake server; `url` is its address. Call `close` at the end."""

    def __init__(self, weights: str, port: int = 0) -> None:
        self.weights, self.weights_name = weights, "default"
        self.models = ["tiny"]
        self.key = ""
        self.dev_mode = self.token_route = self.processed_logprobs = self.returns_token_ids = True
        self.returns_scores = True
        self.max_model_len = CONTEXT
        self.replies: list[int | str] = []
        """The next answers of the sampling routes: HTTP statuses, or names of faults in `answer_samples`."""
        self.reload_lies = self.reload_fails = False
        self.tokenize: Callable[[str], list[int]] | None = None
        """Encodes a text; None: the server has no tokenizer."""
        self.is_certain = False
        """Whether the model gives token 1 the log-prob 0 before sampling parameters are applied."""
        self.probe_answer: dict[str, Any] | None = None
        """The answer to the samples that a client requests when it meets the server; None: a right one."""
        self.statuses: dict[str, list[int]] = {}
        """By path, the HTTP statuses of the next answers, before those that are right."""
        self.requests: list[dict[str, Any]] = []
        """The bodies of the requests for samples, with their path as ``path``."""
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *anything: object) -> None:
                pass

            def do_GET(self) -> None:
                fake.answer(self, None)

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                fake.answer(self, json.loads(self.rfile.read(size) or b"{}"))

        ThreadingHTTPServer.daemon_threads = True
        ThreadingHTTPServer.request_queue_size = 128
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        path = handler.path
        self.paths.append(path)
        self.headers.append(dict(handler.headers))
        guarded = path.startswith(("/v1", "/inference"))
        if guarded and self.key and handler.headers.get("Authorization") != f"Bearer {self.key}":
            return send(handler, 401, {"error": "Unauthorized"})
        if self.statuses.get(path):
            return send(handler, self.statuses[path].pop(0), {"error": "ordered by the test"})
        if path == "/v1/models":
            cards = [{"id": name, "root": name, "max_model_len": self.max_model_len} for name in self.models]
            return send(handler, 200, {"object": "list", "data": cards})
        if path == "/tokenize" and self.tokenize is not None:
            assert body is not None and body["add_special_tokens"] is False
            return send(handler, 200, {"tokens": self.tokenize(body["prompt"])})
        if path in ROUTES and (path != ROUTES[0] or self.token_route):
            assert body is not None
            return self.answer_samples(handler, path, body)
        if not self.dev_mode or (body is None and path != "/weight_info"):
            return send(handler, 404, {"detail": "Not Found"})
        if path == "/weight_info":
            return send(handler, 200, {"weight_version": self.weights_name})
        if path == "/update_weight_version":
            assert body is not None
            self.weights_name = body["new_version"]
            return send(handler, 200, {"success": True})
        if path == "/collective_rpc":
            assert body is not None
            if self.reload_fails:
                return send(handler, 500, {"error": "no such folder"})
            if not self.reload_lies:
                self.weights = read_weights(Path(body["kwargs"]["weights_path"]))
            return send(handler, 200, {"results": [None]})
        if path == "/reset_prefix_cache":
            return send(handler, 200, {"success": True})
        send(handler, 404, {"detail": "Not Found"})

    def answer_samples(self, handler: BaseHTTPRequestHandler, path: str, body: dict[str, Any]) -> None:
        parameters = body.get("sampling_params", body)
        is_probe = body["cache_salt"].startswith("probe-")
        reply: int | str = "ok"
        if is_probe and self.probe_answer is not None:
            return send(handler, 200, self.probe_answer)
        if not is_probe:
            self.requests.append({"path": path, **body})
            reply = self.replies.pop(0) if self.replies else "ok"
        if isinstance(reply, int):
            return send(handler, reply, {"error": f"status {reply}"})
        if reply == "cut":  # the connection is closed without an answer
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return None
        if reply == "hangs":
            time.sleep(30)
        if reply == "late 503":
            time.sleep(0.9)
            return send(handler, 503, {"error": "overloaded"})
        if reply == "no choices":
            return send(handler, 200, {"choices": []})
        if reply == "no JSON":
            return send(handler, 200, "<html>")
        if reply == "another form":
            return send(
                handler, 200, {"choices": [{"index": 0, "token_ids": [1], "logprobs": {"content": 7}}]}
            )
        prompt = body["token_ids" if path == ROUTES[0] else "prompt"]
        choices = []
        for index in range(parameters["n"]):
            ids, logprobs = sample(self.weights, prompt, parameters["seed"] + index, parameters["max_tokens"])
            if forced := parameters.get("allowed_token_ids"):
                ids = forced * len(ids)
                is_likely = self.processed_logprobs or (self.is_certain and forced == [1])
                logprobs = [0.0 if is_likely else -20.0] * len(ids)
            if reply == "null log-prob":
                logprobs[-1] = None  # type: ignore[call-overload]
            if reply == "forgets a log-prob":
                logprobs.pop()
            logprobs_object: dict[str, Any]
            if path == ROUTES[0]:
                logprobs_object = {"content": [{"token_id": i, "logprob": p} for i, p in zip(ids, logprobs)]}
            else:
                logprobs_object = {"token_logprobs": logprobs}
            choice = {
                "index": index,
                "token_ids": ids,
                "logprobs": logprobs_object,
                "finish_reason": "length",
            }
            if reply == "aborted":
                choice["finish_reason"] = "abort"
            if path == ROUTES[0]:
                name = "other" if reply == "other weights" else self.weights_name
                choice["weight_versions"] = [{"version": name, "start": 0, "end": len(ids)}]
            if not self.returns_token_ids:
                choice["token_ids"] = None
            choices.append(choice)
        if reply == "one sample too few":
            choices.pop()
        answer: dict[str, Any] = {"choices": choices[::-1]}
        if "prompt_logprobs" in parameters and self.returns_scores:
            scores = [None, *({str(token_id): {"logprob": -0.125 * token_id}} for token_id in prompt[1:])]
            if reply == "forgets a score":
                scores.pop()
            holder = answer if path == ROUTES[0] else choices[0]
            holder["prompt_logprobs"] = scores
        send(handler, 200, answer)


def send(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
    text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)
