"""The HTTP side of the managed server, measured with an engine core that answers 80,000 tokens a second.

    python benchmarks/http_side.py --output docs/results

The project's own server and client, with `benchmarks.stub_core` in place of what computes: wall seconds, and
CPU seconds of this process (the client in a rank), of the API process and of the engine core, for each
million tokens. Beside it vLLM's own ``LLM.generate`` on the same core. Two shapes: a rollout (8 answers of
256 tokens, with log-probs) and Monte-Carlo continuations (9 answers of 192 tokens from each state, without).
CPU seconds hardly depend on what else the machine does; wall seconds do.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks import pairs  # noqa: E402
from benchmarks.peers import Child, digest  # noqa: E402
from benchmarks.stub_core import RATE  # noqa: E402
from treetune.engine.base import EngineLaunch  # noqa: E402
from treetune.engine.engine import VllmEngine  # noqa: E402
from treetune.engine.guard import descendants  # noqa: E402
from treetune.engine.launch import ServerLaunch  # noqa: E402
from treetune.engine.requests import Request, SamplingParams  # noqa: E402
from treetune.engine.server import close_servers, servers_of  # noqa: E402
from treetune.engine.settings import VllmSettings  # noqa: E402
from treetune.models.policy_files import write_for_engine  # noqa: E402
from treetune.models.sources import TinyModel  # noqa: E402
from treetune.vocabulary import token_array  # noqa: E402

ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))
"""As many characters, so that ids have as many digits as those of a real vocabulary."""
CONTEXT = 1024
SHAPES = {
    "rollout": {"prompt": 150, "n": 8, "max_tokens": 256, "reads_logprobs": True},
    "continuations": {"prompt": 350, "n": 9, "max_tokens": 192, "reads_logprobs": False},
}
DEADLINE_S = 600.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = pairs.arguments_of(__doc__, "http_side", repeats=3)
    parser.add_argument("--rate", type=float, default=80_000.0, help="tokens a second of the engine core")
    parser.add_argument("--prompts", type=int, default=128, help="requests of each shape")
    options = parser.parse_args(arguments)
    os.environ[RATE] = str(options.rate)
    # The server imports the stub.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    source = TinyModel(layers=1, hidden_size=32, heads=1, intermediate_size=32, context_length=CONTEXT)
    model = source.load_model(0, lambda: ALPHABET)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = folder / "weights"
        tokenizer = source.load_tokenizer(lambda: ALPHABET)
        write_for_engine(dict(model.named_parameters()), model.config, tokenizer, weights)
        stub = ("--distributed-executor-backend", "benchmarks.stub_core.StubExecutor")
        settings = VllmSettings(replicas=1, omp_threads=1, extra_arguments=stub)
        run = EngineLaunch(weights, folder, seed=0, context_length=CONTEXT)
        launch = ServerLaunch(settings, run)
        command = launch.command(weights, port=0)
        bare = {"arguments": command[command.index("--host") :], "core": True}
        servers = servers_of(launch, folder / "server.log", None)
        try:
            with Child("offline_vllm", bare, environment=launch.environment(folder)) as offline:
                offline.wait_ready(deadline=DEADLINE_S)
                engine = VllmEngine(settings, run, servers)
                engine.wait_ready()
                found = {
                    shape: measure(engine, offline, requests(options.prompts, **about), options.repeats)
                    for shape, about in SHAPES.items()
                }
                engine.close()
        finally:
            close_servers(servers)
    about = {**pairs.machine(), "rate": options.rate, "prompts": options.prompts, "shapes": found}
    pairs.publish(page(about), about, options.output, "http_side")


def requests(prompts: int, *, prompt: int, n: int, max_tokens: int, reads_logprobs: bool) -> list[Request]:
    draws = random.Random(0)
    sampling = SamplingParams(max_tokens)
    return [
        Request(
            token_array([draws.randrange(2, 20_000) for _ in range(prompt)]),
            draws.randrange(1 << 32),
            n,
            sampling,
            reads_logprobs=reads_logprobs,
        )
        for _ in range(prompts)
    ]


def measure(engine: VllmEngine, offline: Child, asked: list[Request], repeats: int) -> dict[str, Any]:
    (server,) = [one.server.ready() for one in engine._replicas]
    spent: dict[str, list[float]] = {"client": [], "HTTP": [], "core": []}
    digests = set()
    plain = [
        {
            "prompt_ids": one.prompt_ids.tolist(),
            "sampling": {
                "n": one.n,
                "seed": one.seed,
                "max_tokens": one.sampling.max_tokens,
                "temperature": 1.0,
                "logprobs": 0 if one.reads_logprobs else None,
            },
        }
        for one in asked
    ]

    def ours(turn: int) -> None:
        before = cpu_seconds(server.url)
        answers = engine.generate(asked)
        for part, seconds in cpu_seconds(server.url).items():
            spent[part].append(seconds - before[part])
        digests.add(digest(one.token_ids for completions in answers for one in completions))

    def theirs(turn: int) -> float:
        answer = offline.ask({"requests": plain}, deadline=DEADLINE_S)
        digests.add(answer["digest"])
        return answer["seconds"]

    seconds = pairs.in_turns({"ours": pairs.timed(ours), "LLM.generate": theirs}, repeats)
    tokens = sum(one.n * one.sampling.max_tokens for one in asked)
    return {
        "requests": len(asked),
        "tokens": tokens,
        "seconds": {name: median(its) for name, its in seconds.items()},
        "ratio": median(b / a for a, b in zip(seconds["ours"], seconds["LLM.generate"], strict=True)),
        "cpu": {part: median(its[1:]) for part, its in spent.items()},
        "same_tokens": len(digests) == 1,
        "raw": {"seconds": seconds, "cpu": spent},
    }


def cpu_seconds(url: str) -> dict[str, float]:
    """CPU seconds so far: of this process, of the engine core, and of all else of the server there."""
    port = url.rpartition(":")[2].encode()
    below = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())}
    server = [pid for pid, line in below.items() if b"--port\0" + port + b"\0" in line][-1]
    found = {"client": time.process_time(), "HTTP": 0.0, "core": 0.0}
    for pid in (server, *descendants(server)):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        part = "core" if below[pid].startswith(b"VLLM::EngineCore") else "HTTP"
        found[part] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


def page(about: dict[str, Any]) -> str:
    lines = [
        "# The HTTP side of a server",
        "",
        f"An engine core without a model that answers {about['rate']:,.0f} tokens a second;"
        f" {about['cores']} cores ({about['processor']}), load {about['load']:.1f} at the end. Made by"
        " `python benchmarks/http_side.py --output docs/results`. Seconds for each million tokens.",
        "",
        "| shape | tokens | wall | CPU: client | API process | engine core | `LLM.generate`, wall | speed to"
        " it | same tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, its in about["shapes"].items():
        of_a_million = 1e6 / its["tokens"]
        figures = [its["seconds"]["ours"], *its["cpu"].values(), its["seconds"]["LLM.generate"]]
        shown = " | ".join(f"{of_a_million * one:.1f}" for one in figures)
        same = "yes" if its["same_tokens"] else "**no**"
        lines.append(f"| {name} | {its['tokens']:,} | {shown} | {its['ratio']:.2f} | {same} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
