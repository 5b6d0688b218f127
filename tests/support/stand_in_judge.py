"""A stand-in for a judge behind an OpenAI-compatible address, for tests and scripts.

    python -m tests.support.stand_in_judge --port 8123 --mood mood.txt --record asked.jsonl

It reads the question of the grader ``judge`` as that asks it where nothing else is set, and accepts answers
that end with the reference answer. What it does instead says a file, which is looked at with every request:
``down`` (HTTP 503), ``nonsense`` (a reply without a verdict), ``html`` (what is no reply), ``silent`` (none),
the number of an HTTP status, or ``well``.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SILENT_S = 3600.0

_GOLD, _ANSWER, _END = "Reference answer:\n", "\n\nAnswer to be compared:\n", "\n\nDoes the answer come"


class StandIn:
    """`mood` is what it does, a text or a file with one; each reply takes `delay` seconds. `asked` are the
    bodies of all requests, `keys` the keys that came with them."""

    def __init__(
        self, port: int = 0, mood: str | Path = "well", record: Path | None = None, delay: float = 0.0
    ) -> None:
        self.mood, self.record, self.delay = mood, record, delay
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.05)

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def reply(self, body: dict[str, Any], key: str) -> tuple[int, str]:
        """HTTP status and text."""
        mood = self.mood.read_text().strip() if isinstance(self.mood, Path) else self.mood
        with self._lock:
            self.asked.append(body)
            self.keys.append(key)
            if self.record is not None:
                with self.record.open("a") as file:
                    file.write(json.dumps({"time": time.time(), "mood": mood, **body}) + "\n")
        time.sleep(self.delay)
        if mood == "silent":
            self.closing.wait(SILENT_S)
        if mood == "down":
            return 503, f"nobody is here, {key}"
        if mood == "html":
            return 200, "<html>It works!</html>"
        if mood.isdecimal():
            return int(mood), f"no, {key}"
        messages = body.get("messages") or [{"content": body.get("prompt", "")}]
        question = "\n".join(message["content"] for message in messages)
        verdict = "I like turtles." if mood == "nonsense" else f"Well.\nVerdict: {_verdict(question)}"
        choice = {"message": {"content": verdict}, "text": verdict, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(question) // 4, "completion_tokens": len(verdict) // 4}
        return 200, json.dumps({"choices": [choice], "usage": usage})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                key = self.headers.get("Authorization", "").removeprefix("Bearer ")
                status, text = stand_in.reply(body, key)
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: Any) -> None:
                """Says nothing."""

        return Handler


def _verdict(question: str) -> str:
    gold = question.partition(_GOLD)[2].partition(_ANSWER)[0].strip()
    answer = question.partition(_ANSWER)[2].rpartition(_END)[0].strip()
    return "correct" if gold and answer.endswith(gold) else "incorrect"


@contextmanager
def stand_in_judge(mood: str | Path = "well") -> Iterator[StandIn]:
    """In a thread of this process."""
    judge = StandIn(mood=mood)
    thread = threading.Thread(target=judge.serve, name="stand-in judge", daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        judge.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mood", type=Path, required=True)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    StandIn(options.port, options.mood, options.record, options.delay).serve()


if __name__ == "__main__":
    main()
