"""vLLM's two routes for token ids in and token ids out, with log-probs and without, in turns on one server.

    python benchmarks/token_routes.py --output docs/results

The same requests over ``/v1/completions`` (with ``return_token_ids``) and ``/inference/v1/generate`` (no
text is made), log-probs of the sampled tokens asked for or not. Tokens and log-probs are compared to the
bit. CPU seconds of the server's HTTP side, of the process that computes and of the client are what a route
costs, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks import report  # noqa: E402
from benchmarks.pairs import in_turns, timed  # noqa: E402
from benchmarks.replicas import MODELS, cpu_seconds, end, processes, requests, start, words, write_weights  # noqa: E402
from treetune.inference.base import Request  # noqa: E402
from treetune.inference.client import Address, Client, RequestPart, payload  # noqa: E402

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Route:
    name: str
    path: str
    logprobs: bool

    def body(self, request: Request) -> dict[str, Any]:
        completions = payload(RequestPart(0, 0, request.n, request), 0)
        if self.path == "/v1/completions":
            if not self.logprobs:
                del completions["logprobs"], completions["return_tokens_as_token_ids"]
            return completions
        same = ("model", "priority", "cache_salt")
        params = ("n", "seed", "max_tokens", "temperature", "top_p", "top_k")
        sampling = {name: completions[name] for name in params} | {"detokenize": False}
        if self.logprobs:
            sampling["logprobs"] = 0
        return {name: completions[name] for name in same} | {
            "token_ids": completions["prompt"],
            "sampling_params": sampling,
        }

    def answers(self, answer: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
        found = []
        for choice in sorted(answer["choices"], key=lambda one: one["index"]):
            logprobs = choice.get("logprobs") or {}
            if self.path == "/v1/completions":
                found.append((choice["token_ids"], logprobs.get("token_logprobs") or []))
            else:
                content = logprobs.get("content") or []
                found.append((choice["token_ids"], [one["logprob"] for one in content]))
        return found


ROUTES = tuple(
    Route(f"`{path}`, {'log-probs' if logprobs else 'none'}", path, logprobs)
    for logprobs in (True, False)
    for path in ("/v1/completions", "/inference/v1/generate")
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = report.arguments_of(__doc__, "token_routes", repeats=5).parse_args(arguments)
    model = MODELS[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = write_weights(model, folder / "weights")
        servers = start(model, weights, folder / "server.log", 1, 1, ["--enable-scale-out"])
        try:
            found = measure(servers[0].ready(), requests(model), options.repeats)
        finally:
            end(servers)
    about = {**report.machine(), **found}
    report.publish(page(about), about, options.output, "token_routes")


def measure(address: Address, asked: Sequence[Request], repeats: int) -> dict[str, Any]:
    client = Client()
    server, core = processes(address.url)
    answers: dict[str, list[list[tuple[list[int], list[float]]]]] = {}
    spent: dict[str, list[tuple[float, float, float]]] = {route.name: [] for route in ROUTES}

    def side(route: Route) -> Any:
        def work(turn: int) -> None:
            before = cpu_seconds(server), cpu_seconds(core), time.process_time()
            answers[route.name] = client.run(wave(client, address, route, asked), TIMEOUT_S)
            after = cpu_seconds(server), cpu_seconds(core), time.process_time()
            spent[route.name].append(tuple(b - a for a, b in zip(before, after, strict=True)))  # type: ignore[arg-type]

        return timed(work)

    seconds = in_turns({route.name: side(route) for route in ROUTES}, repeats)
    client.close()
    base = answers[ROUTES[0].name]
    routes = []
    for route in ROUTES:
        its = answers[route.name]
        tokens_same = [[ids for ids, _ in one] for one in its] == [[ids for ids, _ in one] for one in base]
        routes.append(
            {
                "name": route.name,
                "raw": seconds[route.name],
                "spent": spent[route.name],
                "same_tokens": tokens_same,
                "same_logprobs": its == base if route.logprobs else None,
            }
        )
    tokens = sum(len(ids) for one in base for ids, _ in one)
    return {"requests": len(asked), "tokens": tokens, "repeats": repeats, "routes": routes}


def page(about: dict[str, Any]) -> str:
    lines = [
        "# Routes for token ids",
        "",
        f"{about['requests']} requests, {about['tokens']:,} tokens, a model of {MODELS[0].name}, one server"
        f" with one thread on {about['cores']} cores ({about['processor']}), load {about['load']:.1f} at the"
        " end. Made by `python benchmarks/token_routes.py --output docs/results`."
        f" Medians of {about['repeats']} turns; others' load hardly changes CPU seconds.",
        "",
        "| route | seconds | speed to the first | CPU: HTTP side | computing | client | same tokens |"
        " same log-probs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = about["routes"][0]["raw"]
    for route in about["routes"]:
        ratio = median(a / b for a, b in zip(first, route["raw"], strict=True))
        http, computing, ours = (median(one[part] for one in route["spent"]) for part in range(3))
        logprobs = route["same_logprobs"]
        lines.append(
            f"| {route['name']} | {median(route['raw']):.2f} | {ratio:.2f} | {http:.2f} |"
            f" {computing:.2f} | {ours:.2f} | {words(route['same_tokens'])} |"
            f" {'–' if logprobs is None else words(logprobs)} |"
        )
    return "\n".join([*lines, ""])


async def wave(
    client: Client, address: Address, route: Route, asked: Sequence[Request]
) -> list[list[tuple[list[int], list[float]]]]:
    answers = await asyncio.gather(
        *(client.ask(address, route.path, route.body(one), TIMEOUT_S) for one in asked)
    )
    return [route.answers(answer) for answer in answers]


if __name__ == "__main__":
    main()
