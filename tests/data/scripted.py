"""A scripted endpoint on this machine, and a solution whose parallel form is known."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aiohttp import web

KEY = "sk-test-0123456789abcdef"

PROBLEM = "How many of the numbers from 1 to 200 are divisible by 6 or by 15?"
DATA = Path(__file__).parent
SOLUTION, PARALLEL = ((DATA / f"{name}.txt").read_text() for name in ("solution", "parallel_solution"))
ANSWERS: dict[str, str] = json.loads((DATA / "scripted_answers.json").read_text())
"""By what is asked; together they make PARALLEL of SOLUTION."""

_TASKS = {"1": "steps", "2": "substeps", "3": "groups", "4": "subgroups", "5": "ranges", "6": "check"}


def question(text: str) -> str:
    """Which of `ANSWERS` a request is for, by its last message."""
    task = re.findall(r"Task (\d) of 6", text)
    if task:
        return _TASKS[task[-1]]
    if "<part>" in text:
        hidden, part = text.split("<hidden>")[1].split("<part>")
        place = ["Multiples of 6", "Multiples of 15", "Multiples of both"]
        found = [next(i for i, words in enumerate(place, 1) if words in piece) for piece in (part, hidden)]
        return f"references {found[0]}<-{found[1]}"
    return "outlines"


Fault = Callable[[web.Request], Any]
"""Gives a response in place of the answer; may be a coroutine."""


class Endpoint:
    """Answers by script, counts what it is asked, misbehaves when told to.

    `faults` are taken one by one by requests for that question; `before` is called for each request.
    """

    def __init__(self) -> None:
        self.url = ""
        self.answers: dict[str, str] = dict(ANSWERS)
        self.usage: Any = {"prompt_tokens": 1000, "completion_tokens": 100}
        self.faults: dict[str, list[Fault]] = {}
        self.asked: list[dict[str, Any]] = []
        self.questions: Counter[str] = Counter()
        self.keys: set[str | None] = set()

    def texts(self) -> Counter[str]:
        """How often each request was sent."""
        return Counter(json.dumps(body, sort_keys=True) for body in self.asked)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        chat = request.path.endswith("/chat/completions")
        last = body["messages"][-1]["content"] if chat else body["prompt"]
        name = question(last if chat else last.rpartition("\n\nUser:\n")[2])
        self.asked.append(body)
        self.questions[name] += 1
        self.keys.add(request.headers.get("Authorization"))
        for waiting in (self.faults.get(name), self.faults.get("any")):
            if waiting:
                response = waiting.pop(0)(request)
                return await response if asyncio.iscoroutine(response) else response
        text = self.answers[name]
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        answer = {"choices": [{"index": 0, "finish_reason": "stop", **said}], "usage": self.usage}
        return web.json_response(answer)


class Served(Protocol):
    """What answers requests; `url` is set to where."""

    url: str

    async def handle(self, request: web.Request) -> web.StreamResponse: ...


E = TypeVar("E", bound=Served)


@contextmanager
def serving(endpoint: E) -> Iterator[E]:
    """Serves in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/{path:.*}", endpoint.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield endpoint
    finally:
        asyncio.run_coroutine_threadsafe(_stop(runner), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _stop(runner: web.AppRunner) -> None:
    await runner.cleanup()
    hanging = asyncio.all_tasks() - {asyncio.current_task()}
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


def status(code: int, text: str = "", **headers: str) -> Fault:
    return lambda request: web.Response(status=code, text=text, headers=headers)


async def hang(request: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()
