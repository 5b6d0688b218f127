"""A model behind an address that is right as often as it says, whoever asks in whichever order."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

from aiohttp import web

from treetune.domains.domain_rows import domain_row
from treetune.seeds import derived_random


class Oracle:
    """Answers ``a+b`` rightly with the chance a/9, drawn by the request's seed. `asked` counts requests by
    prompt and seed; `seconds` is what an answer takes; `down` makes it answer nothing but errors; `finish` is
    the reason that answers end for."""

    def __init__(self) -> None:
        self.url = ""
        self.begin()

    def begin(self) -> None:
        """As if nobody had asked yet."""
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
        found = re.search(r"(\d+)\+(\d+)", prompt)
        assert found is not None
        one, other = int(found[1]), int(found[2])
        right = derived_random(body["seed"], "oracle").random() < one / 9
        said = one + other + (0 if right else 1)
        text = f"thinking…\n#{said}" if self.finish == "stop" else f"thinking… It may be {said}, but"
        choice = {"message": {"content": text}, "text": text, "finish_reason": self.finish}
        usage = {"prompt_tokens": 5, "completion_tokens": len(text)}
        return web.json_response({"choices": [choice], "usage": usage})


def sums(count: int) -> list[dict[str, Any]]:
    """Rows that ask for ``a+b``; every tenth is the same as the one before it, and none has an id."""
    rows = []
    for number in range(count):
        place = number - 1 if number % 10 == 9 else number
        one, other = place % 10, place // 10 + 1
        rows.append(domain_row("math__sums", f"{one}+{other}=?", str(one + other)))
    return rows
