"""Serve a scripted endpoint on this machine, which answers all that is asked of one solution."""

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
"""Answers by the question; together they make PARALLEL of SOLUTION."""

_TASKS = {"1": "steps", "2": "substeps", "3": "groups", "4": "subgroups", "5": "ranges", "6": "check"}


def question_of(message: str) -> str:
    """Return the key in `ANSWERS` of the question that a request's last message asks."""
    tasks = re.findall(r"Task (\d) of 6", message)
    if tasks:
        return _TASKS[tasks[-1]]
    if "<part>" in message:
        hidden, part = message.split("<hidden>")[1].split("<part>")
        return f"references {_thread_number(part)}<-{_thread_number(hidden)}"
    return "outlines"


def _thread_number(thread: str) -> int:
    for number, title in enumerate(["Multiples of 6", "Multiples of 15", "Multiples of both"], 1):
        if title in thread:
            return number
    raise AssertionError(f"no thread of the solution: {thread}")


Fault = Callable[[web.Request], Any]
"""A function, or a coroutine, that responds in place of the answer."""


class Endpoint:
    """Answer by a script, record each request, and respond by a fault where one is set.

    `faults` are used up one by one by requests for that question, and those of "any" by all requests.
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
        """Count how often each request was sent."""
        return Counter(json.dumps(body, sort_keys=True) for body in self.asked)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        chat = request.path.endswith("/chat/completions")
        if chat:
            last_message = body["messages"][-1]["content"]
        else:
            last_message = body["prompt"].rpartition("\n\nUser:\n")[2]
        question = question_of(last_message)
        self.asked.append(body)
        self.questions[question] += 1
        self.keys.add(request.headers.get("Authorization"))
        for faults in (self.faults.get(question), self.faults.get("any")):
            if faults:
                response = faults.pop(0)(request)
                return await response if asyncio.iscoroutine(response) else response
        text = self.answers[question]
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        answer = {"choices": [{"index": 0, "finish_reason": "stop", **content}], "usage": self.usage}
        return web.json_response(answer)


class Served(Protocol):
    """An object that answers requests; `serving` sets its `url`."""

    url: str

    async def handle(self, request: web.Request) -> web.StreamResponse: ...


E = TypeVar("E", bound=Served)


@contextmanager
def serving(endpoint: E) -> Iterator[E]:
    """Serve an endpoint in a thread until the block ends."""
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
