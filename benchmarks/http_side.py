"""Measures the HTTP side of a server that treetune starts, with an engine core that needs no model.

    python benchmarks/http_side.py --output docs/results

`benchmarks.stub_core` takes the place of what computes, and answers 80,000 tokens a second. All else is
treetune's own server and client. Measured are wall seconds, and CPU seconds of this process (the client in a
rank), of the API process and of the engine core, for each million tokens. Next to them is vLLM's own
``LLM.generate`` with the same core. There are two shapes: a rollout (8 answers of 256 tokens, with log-probs)
and Monte-Carlo continuations (9 answers of 192 tokens from each state, without). CPU seconds hardly depend on
what else the machine does; wall seconds do.
"""

from __future__ import annotations

import os
import random
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

from benchmarks import pairs  # noqa: E402
from benchmarks.peers import Child, digest_samples  # noqa: E402
from benchmarks.stub_core import RATE  # noqa: E402
from treetune.engine.base import EngineLaunch  # noqa: E402
from treetune.engine.engine import VllmEngine  # noqa: E402
from treetune.engine.guard import find_descendants  # noqa: E402
from treetune.engine.launch import ServerLaunch  # noqa: E402
from treetune.engine.requests import Request, SamplingParams  # noqa: E402
from treetune.engine.server import close_servers, make_servers  # noqa: E402
from treetune.engine.settings import VllmSettings  # noqa: E402
from treetune.models.policy_files import write_for_engine  # noqa: E402
from treetune.models.sources import TinyModel  # noqa: E402
from treetune.vocabulary import token_array  # noqa: E402

VOCABULARY = 20_000
"""The ids have as many digits as those of a real vocabulary, so that messages are as long."""
ALPHABET = "".join(chr(0x4E00 + index) for index in range(VOCABULARY))
CONTEXT = 1024
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Shape:
    """A kind of requests."""

    prompt_tokens: int
    n: int
    """Samples of each request."""
    max_tokens: int
    reads_logprobs: bool


SHAPES = {
    "rollout": Shape(prompt_tokens=150, n=8, max_tokens=256, reads_logprobs=True),
    "continuations": Shape(prompt_tokens=350, n=9, max_tokens=192, reads_logprobs=False),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = pairs.make_parser(__doc__, "http_side", repeats=3)
    parser.add_argument("--rate", type=float, default=80_000.0, help="tokens a second of the engine core")
    parser.add_argument("--prompts", type=int, default=128, help="requests of each shape")
    options = parser.parse_args(arguments)
    os.environ[RATE] = str(options.rate)
    # The server imports the stub.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights = folder / "weights"
        write_tiny_model(weights)
        stub = ("--distributed-executor-backend", "benchmarks.stub_core.StubExecutor")
        settings = VllmSettings(replicas=1, omp_threads=1, extra_arguments=stub)
        engine_launch = EngineLaunch(weights, folder, seed=0, context_length=CONTEXT)
        launch = ServerLaunch(settings, engine_launch)
        command = launch.command(weights, port=0)
        offline_settings = {"arguments": command[command.index("--host") :], "core": True}
        servers = make_servers(launch, folder / "server.log", None)
        try:
            with Child("offline_vllm", offline_settings, environment=launch.environment(folder)) as offline:
                offline.wait_ready(deadline=DEADLINE_S)
                engine = VllmEngine(settings, engine_launch, servers)
                engine.wait_ready()
                for name, shape in SHAPES.items():
                    requests = draw_requests(options.prompts, shape)
                    results[name] = measure(engine, offline, requests, options.repeats)
                engine.close()
        finally:
            close_servers(servers)
    report = {
        **pairs.describe_machine(),
        "rate": options.rate,
        "prompts": options.prompts,
        "shapes": results,
    }
    pairs.publish(write_page(report), report, options.output, "http_side")


def write_tiny_model(folder: Path) -> None:
    """Writes the model that the server loads and never runs."""
    source = TinyModel(layers=1, hidden_size=32, heads=1, intermediate_size=32, context_length=CONTEXT)
    model = source.load_model(0, lambda: ALPHABET)
    tokenizer = source.load_tokenizer(lambda: ALPHABET)
    write_for_engine(dict(model.named_parameters()), model.config, tokenizer, folder)


def draw_requests(count: int, shape: Shape) -> list[Request]:
    """Returns requests with random prompts."""
    generator = random.Random(0)
    sampling = SamplingParams(shape.max_tokens)
    requests = []
    for _ in range(count):
        prompt_ids = token_array([generator.randrange(2, VOCABULARY) for _ in range(shape.prompt_tokens)])
        seed = generator.randrange(1 << 32)
        request = Request(prompt_ids, seed, shape.n, sampling, reads_logprobs=shape.reads_logprobs)
        requests.append(request)
    return requests


def measure(engine: VllmEngine, offline: Child, requests: list[Request], repeats: int) -> dict[str, Any]:
    """Has the server and ``LLM.generate`` answer the requests in turns."""
    (replica,) = engine._replicas
    server = replica.server.wait_until_ready()
    requests_of_offline = [request_as_json(request) for request in requests]
    cpu_seconds: dict[str, list[float]] = {"client": [], "HTTP": [], "core": []}
    digests = set()

    def ask_server(turn: int) -> None:
        before = read_cpu_seconds(server.url)
        results = engine.generate(requests)
        for part, seconds in read_cpu_seconds(server.url).items():
            cpu_seconds[part].append(seconds - before[part])
        samples = [completion.token_ids for completions in results for completion in completions]
        digests.add(digest_samples(samples))

    def ask_offline(turn: int) -> float:
        answer = offline.ask({"requests": requests_of_offline}, deadline=DEADLINE_S)
        digests.add(answer["digest"])
        return answer["seconds"]

    sides = {"ours": pairs.time_calls(ask_server), "LLM.generate": ask_offline}
    seconds = pairs.take_turns(sides, repeats)
    both = zip(seconds["ours"], seconds["LLM.generate"], strict=True)
    return {
        "requests": len(requests),
        # The stub ends no answer before its limit.
        "tokens": sum(request.n * request.sampling.max_tokens for request in requests),
        "seconds": {name: median(seconds_of_turns) for name, seconds_of_turns in seconds.items()},
        "ratio": median(offline_seconds / our_seconds for our_seconds, offline_seconds in both),
        # Without the turn that warms up.
        "cpu": {part: median(seconds_of_turns[1:]) for part, seconds_of_turns in cpu_seconds.items()},
        "same_tokens": len(digests) == 1,
        "raw": {"seconds": seconds, "cpu": cpu_seconds},
    }


def request_as_json(request: Request) -> dict[str, Any]:
    """Returns a request as `offline_vllm` reads it."""
    return {
        "prompt_ids": request.prompt_ids.tolist(),
        "sampling": {
            "n": request.n,
            "seed": request.seed,
            "max_tokens": request.sampling.max_tokens,
            "temperature": 1.0,
            "logprobs": 0 if request.reads_logprobs else None,
        },
    }


def read_cpu_seconds(url: str) -> dict[str, float]:
    """Returns the CPU seconds so far of this process, of the engine core of the server at `url`, and of all
    other processes of the server."""
    port = url.rpartition(":")[2].encode()
    command_lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in find_descendants(os.getpid())}
    pids_with_port = [pid for pid, line in command_lines.items() if b"--port\0" + port + b"\0" in line]
    server = pids_with_port[-1]  # the first ones started it, with its command line in theirs
    seconds = {"client": time.process_time(), "HTTP": 0.0, "core": 0.0}
    for pid in (server, *find_descendants(server)):
        # Fields are counted after the name, which is in parentheses and may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user_ticks, system_ticks = int(fields[11]), int(fields[12])
        part = "core" if command_lines[pid].startswith(b"VLLM::EngineCore") else "HTTP"
        seconds[part] += (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")
    return seconds


def write_page(report: dict[str, Any]) -> str:
    """Returns the page in Markdown."""
    lines = [
        "# The HTTP side of a server",
        "",
        f"An engine core without a model that answers {report['rate']:,.0f} tokens a second;"
        f" {report['cores']} cores ({report['processor']}), load {report['load']:.1f} at the end. Made by"
        " `python benchmarks/http_side.py --output docs/results`. Seconds for each million tokens.",
        "",
        "| shape | tokens | wall | CPU: client | API process | engine core | `LLM.generate`, wall | speed to"
        " it | same tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in report["shapes"].items():
        seconds = [result["seconds"]["ours"], *result["cpu"].values(), result["seconds"]["LLM.generate"]]
        seconds_per_million = [number / result["tokens"] * 1e6 for number in seconds]
        cells = [
            name,
            f"{result['tokens']:,}",
            *(f"{number:.1f}" for number in seconds_per_million),
            f"{result['ratio']:.2f}",
            "yes" if result["same_tokens"] else "**no**",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
