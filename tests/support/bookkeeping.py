"""An OpenAI-compatible server that adds numbers and keeps book of what it is asked, in a process of its
own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treetune.seeds import derived_random


class Book:
    """Answers additions, rightly as often as the last digit of the first number says, by the request's seed.
    What was asked is written to a file before it is answered."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a")

    async def answer(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        prompt = body["messages"][-1]["content"]
        self._file.write(json.dumps([prompt, body["seed"]]) + "\n")
        self._file.flush()
        await asyncio.sleep(0.02)
        one, other = map(int, re.findall(r"\d+", prompt))
        right = derived_random(body["seed"], "answer").random() < one % 10 / 9
        text = f"{one + other + (0 if right else 1)}\n#{one + other + (0 if right else 1)}"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(text)}
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": usage})


def serve(port: int, file: Path) -> None:
    from aiohttp import web

    app = web.Application()
    app.router.add_post("/v1/chat/completions", Book(file).answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


class Address:
    """The server as a process that can be killed and started again."""

    def __init__(self, book: Path) -> None:
        self.book = book
        book.unlink(missing_ok=True)
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = int(one.getsockname()[1])
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", __name__, str(self.port), str(self.book)]
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path})
        for _ in range(600):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise RuntimeError("the address did not come up")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def asked(self) -> Counter[str]:
        return Counter(self.book.read_text().splitlines())


@contextmanager
def address(book: Path) -> Iterator[Address]:
    made = Address(book)
    try:
        yield made
    finally:
        made.kill()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
