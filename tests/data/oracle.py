"""Serve a model whose answers are right with a known chance, and depend on the request's seed alone."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

from aiohttp import web

from treetune.domains.domain_rows import domain_row
from treetune.seeds import derived_random


class Oracle:
    """Answer ``a+b`` rightly with the chance a/9, drawn by the request's seed.

    `asked` counts requests by prompt and seed; `seconds` is the time of an answer; `down` makes every answer
    an error; `finish` is the reason for which answers end.
    """

    def __init__(self) -> None:
        self.url = ""
        self.begin()

    def begin(self) -> None:
        """Forget all requests and settings."""
        self.asked: Counter[tuple[str, int]] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.seconds, self.down = 0.0, False
        self.finish = "stop"

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.down:
            return web.Response(status=500, text="down")
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        self.asked[prompt, body["seed"]] += 1
        self.bodies.append(body)
        await asyncio.sleep(self.seconds)
        summands = re.search(r"(\d+)\+(\d+)", prompt)
        assert summands is not None
        a, b = int(summands[1]), int(summands[2])
        is_right = derived_random(body["seed"], "oracle").random() < a / 9
        answer = a + b if is_right else a + b + 1
        text = f"thinking…\n#{answer}" if self.finish == "stop" else f"thinking… It may be {answer}, but"
        choice = {"message": {"content": text}, "text": text, "finish_reason": self.finish}
        usage = {"prompt_tokens": 5, "completion_tokens": len(text)}
        return web.json_response({"choices": [choice], "usage": usage})


def sums(count: int) -> list[dict[str, Any]]:
    """Make rows without ids that ask for ``a+b``; every tenth row equals the one before it."""
    rows = []
    for number in range(count):
        distinct = number - 1 if number % 10 == 9 else number
        a, b = distinct % 10, distinct // 10 + 1
        rows.append(domain_row("math__sums", f"{a}+{b}=?", str(a + b)))
    return rows
