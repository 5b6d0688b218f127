"""The answers of 1, 2 and 4 servers: whether they are the same, how fast they come, what a killed one costs.

    python benchmarks/replicas.py --output docs/results

Four servers of one model are started, with one thread each. Engines of one, two and all four of them answer
the same requests in turns, so that load from elsewhere hits all alike. Token ids and log-probs are compared
to the bit. Then a server of two is killed with SIGKILL while it samples. Then the same with one and two of
them beside one server that has as many threads as there are cores. Two models of random weights: of the
quickstart's size, whose steps are short, and a larger one, whose steps are arithmetic. Takes about ten
minutes on two idle cores.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
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

from benchmarks import pairs as report  # noqa: E402
from benchmarks.pairs import in_turns, timed  # noqa: E402
from treetune.engine.base import Completion, EngineLaunch, Request, SamplingParams  # noqa: E402
from treetune.engine.engine import VllmEngine  # noqa: E402
from treetune.engine.guard import descendants  # noqa: E402
from treetune.engine.journal import JournaledEngine  # noqa: E402
from treetune.engine.launch import ServerLaunch  # noqa: E402
from treetune.engine.server import Server, close_servers, servers_of  # noqa: E402
from treetune.engine.settings import VllmSettings  # noqa: E402
from treetune.models.policy_files import write_for_engine  # noqa: E402
from treetune.models.sources import TinyModel  # noqa: E402
from treetune.vocabulary import token_array  # noqa: E402

ALPHABET = "0123456789+=#\n abcdefghijklmnopqrstuvwxyz"
CONTEXT = 256
COUNTS = 1, 2, 4
"""Servers of the engines that are compared."""


@dataclass(frozen=True)
class Model:
    name: str
    source: TinyModel
    requests: int
    max_tokens: int
    blocks: int
    """Of a server's cache, so that four fit into a small machine."""


MODELS = (
    Model("0.9 million parameters", TinyModel(context_length=CONTEXT), 64, 64, 1024),
    Model(
        "19 million parameters",
        TinyModel(layers=6, hidden_size=512, heads=8, intermediate_size=1408, context_length=CONTEXT),
        32,
        32,
        400,
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.arguments_of(__doc__, "replicas", repeats=5)
    parser.add_argument("--models", type=int, default=len(MODELS), help="so many of the models")
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    found = [measure(model, cores, options.repeats) for model in MODELS[: options.models]]
    about = {**report.machine(), "models": found}
    report.publish(page(about), about, options.output, "replicas")


def measure(model: Model, cores: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        weights = write_weights(model, folder / "weights")
        asked, most = requests(model), max(COUNTS)
        single = start(model, weights, folder / "server.log", most, 1)
        stack.callback(close_servers, single)
        engines = {f"{n} server{'s' * (n > 1)}": engine(single[:n]) for n in COUNTS}
        replicas, first = compare(engines, asked, repeats)
        killed = kill_one(engines["2 servers"], asked, first, folder / "journal.jsonl")
        threads = None
        if cores > 1:
            close_servers(single[2:])
            threaded = start(model, weights, folder / "threaded.log", 1, cores)
            stack.callback(close_servers, threaded)
            del engines[f"{most} servers"]
            threads, _ = compare({**engines, f"1 server, {cores} threads": engine(threaded)}, asked, repeats)
    return {
        "name": model.name,
        "requests": len(asked),
        "tokens": sum(len(one.token_ids) for completions in first for one in completions),
        "replicas": replicas,
        "threads": threads,
        "killed": killed,
    }


def compare(
    engines: dict[str, VllmEngine], asked: list[Request], repeats: int
) -> tuple[dict[str, Any], list[list[Completion]]]:
    """What each engine takes for the same requests, in turns, and whether its answers are the first one's."""
    answers: dict[str, list[list[Completion]]] = {}

    computing: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}

    def side(name: str) -> Any:
        def work(turn: int) -> None:
            before = computed(engines[name])
            answers[name] = engines[name].generate(asked)
            after = computed(engines[name])
            computing[name].append((after[0] - before[0], after[1] - before[1]))

        return timed(work)

    seconds = in_turns({name: side(name) for name in engines}, repeats)
    base, *_ = engines
    sides = {
        name: {
            "seconds": median(its),
            "to_one": median([a / b for a, b in zip(seconds[base], its, strict=True)]),
            "same_tokens": same(answers[base], answers[name], "token_ids"),
            "same_logprobs": same(answers[base], answers[name], "logprobs"),
            "cores_cpu": median(core for core, _ in computing[name]),
            "others_cpu": median(others for _, others in computing[name]),
            "raw": its,
        }
        for name, its in seconds.items()
    }
    return sides, answers[base]


def computed(engine: VllmEngine) -> tuple[float, float]:
    """CPU seconds so far: of the processes that compute, and of their HTTP sides and this process."""
    cores, others = 0.0, time.process_time()
    for one in engine._replicas:
        server, core = processes(one.server.ready().url)
        cores += cpu_seconds(core)
        others += cpu_seconds(server)
    return cores, others


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def write_weights(model: Model, folder: Path) -> Path:
    loaded = model.source.load_model(0, lambda: ALPHABET)
    tokenizer = model.source.load_tokenizer(lambda: ALPHABET)
    write_for_engine(dict(loaded.named_parameters()), loaded.config, tokenizer, folder)
    return folder


def start(
    model: Model, weights: Path, log: Path, replicas: int, threads: int, further: Sequence[str] = ()
) -> list[Server]:
    """Servers of that many threads each, when all are there."""
    extra = ("--num-gpu-blocks-override", str(model.blocks), *further)
    settings = VllmSettings(replicas=replicas, omp_threads=threads, extra_arguments=extra)
    launch = ServerLaunch(settings, EngineLaunch(weights, log.parent, seed=0, context_length=CONTEXT))
    servers = servers_of(launch, log, None)
    for one in servers:
        one.ready()
    return servers


def engine(servers: Sequence[Server]) -> VllmEngine:
    launch = EngineLaunch(Path(), Path(), seed=0, context_length=CONTEXT)
    return VllmEngine(VllmSettings(), launch, servers)


def requests(model: Model) -> list[Request]:
    draws = random.Random(0)
    return [
        Request(
            token_array([draws.randrange(4, 40) for _ in range(24)]),
            draws.randrange(1 << 48),
            4,
            SamplingParams(draws.choice((model.max_tokens // 4, model.max_tokens // 2, model.max_tokens))),
        )
        for _ in range(model.requests)
    ]


def same(one: list[list[Completion]], other: list[list[Completion]], column: str) -> bool:
    def whole(answers: list[list[Completion]]) -> list[bytes]:
        return [getattr(c, column).tobytes() for completions in answers for c in completions]

    return whole(one) == whole(other)


def kill_one(
    engine: VllmEngine, asked: list[Request], expected: list[list[Completion]], journal: Path
) -> dict[str, Any]:
    """One of the engine's servers is killed after a tenth of the answers."""
    engine.wait_ready()
    reported: list[int] = []
    _, victim = processes(engine._replicas[0].server.ready().url)
    restarts = engine.restarts

    def on_result(index: int, completions: list[Completion]) -> None:
        reported.append(index)
        if len(reported) == max(1, len(asked) // 10):
            os.kill(victim, signal.SIGKILL)

    answers = JournaledEngine(engine, journal).generate(asked, on_result)
    engine.wait_ready()
    lines = journal.read_text().splitlines()
    return {
        "same_tokens": same(expected, answers, "token_ids"),
        "same_logprobs": same(expected, answers, "logprobs"),
        "reported": len(reported),
        "reported_once": sorted(reported) == list(range(len(asked))),
        "lines_in_the_journal": len(lines),
        "restarts": engine.restarts - restarts,
    }


def processes(url: str) -> tuple[int, int]:
    """The server there, and the process that computes for it."""
    port = url.rpartition(":")[2].encode()
    (server,) = [pid for pid in descendants(os.getpid()) if b"--port\0" + port + b"\0" in title(pid)][-1:]
    (core,) = [pid for pid in descendants(server) if title(pid).startswith(b"VLLM::EngineCore")]
    return server, core


def title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def page(about: dict[str, Any]) -> str:
    lines = [
        "# Replicas: engines of 1, 2 and 4 servers",
        "",
        f"{about['cores']} cores ({about['processor']}), load {about['load']:.1f} at the end: what is above"
        " the number of cores was others' work. Made by `python benchmarks/replicas.py --output"
        " docs/results`.",
        "",
    ]
    for model in about["models"]:
        killed = model["killed"]
        lines += [
            f"## {model['name'].capitalize()}: {model['requests']} requests, {model['tokens']:,} tokens",
            "",
            "| engine | seconds | speed to 1 server, 1 thread | CPU seconds: computing | HTTP, client |"
            " same tokens | same log-probs, to the bit |",
            "|---|---|---|---|---|---|---|",
            *rows(model["replicas"]),
            *(
                ["| *in a second comparison* | | | | | | |", *rows(model["threads"])]
                if model["threads"]
                else []
            ),
            "",
            f"One of two servers killed with `kill -9` after a tenth of the answers: same tokens"
            f" {words(killed['same_tokens'])}, same log-probs {words(killed['same_logprobs'])};"
            f" {killed['reported']} of {model['requests']} answers reported, each once:"
            f" {words(killed['reported_once'])}; {killed['lines_in_the_journal']} lines in the journal;"
            f" servers started anew: {killed['restarts']}.",
            "",
        ]
    return "\n".join(lines)


def rows(sides: dict[str, Any]) -> list[str]:
    return [
        f"| {name} | {side['seconds']:.2f} | {side['to_one']:.2f} | {side['cores_cpu']:.2f} |"
        f" {side['others_cpu']:.2f} | {words(side['same_tokens'])} |"
        f" {words(side['same_logprobs'])} |"
        for name, side in sides.items()
    ]


def words(is_so: bool) -> str:
    return "yes" if is_so else "**no**"


if __name__ == "__main__":
    main()
