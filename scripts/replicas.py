"""The answers of 1, 2 and 4 servers: whether they are the same, how fast they come, what a killed one costs.

    python scripts/replicas.py --output docs/results

Five servers of one model are started: four with one thread, and one with as many as there are cores. Engines
of one, two and four of the former and one of the latter answer the same requests in turns, so that load from
elsewhere hits all alike. Token ids and log-probs are compared to the bit. Then a server of two is killed with
SIGKILL while it samples. Two models of random weights: of the quickstart's size, whose steps are short, and a
larger one, whose steps are arithmetic. Takes about ten minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT / "src"))

from benchmarks.pairs import in_turns, timed  # noqa: E402

from treetune.inference.base import Completion, Request, SamplingParams  # noqa: E402
from treetune.inference.engine import VllmEngine  # noqa: E402
from treetune.inference.guard import descendants  # noqa: E402
from treetune.inference.journal import JournaledEngine  # noqa: E402
from treetune.inference.launch import Launch  # noqa: E402
from treetune.inference.ranks import RankFiles  # noqa: E402
from treetune.inference.server import Server, servers_of  # noqa: E402
from treetune.inference.settings import VllmSettings  # noqa: E402
from treetune.models.export import write_for_engine  # noqa: E402
from treetune.models.sources import TinyModel  # noqa: E402

ALPHABET = "0123456789+=#\n abcdefghijklmnopqrstuvwxyz"
CONTEXT = 256
MOST = 4
"""Servers of the largest engine."""


@dataclass(frozen=True)
class Model:
    name: str
    source: TinyModel
    requests: int
    max_tokens: int


MODELS = (
    Model("0.9 million parameters", TinyModel(context_length=CONTEXT), 96, 96),
    Model(
        "19 million parameters",
        TinyModel(layers=6, hidden_size=512, heads=8, intermediate_size=1408, context_length=CONTEXT),
        48,
        48,
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for replicas.md and .json")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    found = [measure(model, cores, options.repeats) for model in MODELS]
    about = {
        "processor": processor(),
        "cores": cores,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "models": found,
    }
    text = page(about)
    print(text)
    if options.output is not None:
        (options.output / "replicas.md").write_text(text)
        (options.output / "replicas.json").write_text(json.dumps(about, indent=1) + "\n")


def measure(model: Model, cores: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, engines_of(model, cores, Path(folder)) as engines:
        asked = requests(model)
        answers: dict[str, list[list[Completion]]] = {}

        def side(name: str) -> Any:
            return timed(lambda turn: answers.__setitem__(name, engines[name].generate(asked)))

        seconds = in_turns({name: side(name) for name in engines}, repeats)
        first = answers["1 server"]
        tokens = sum(len(one.token_ids) for completions in first for one in completions)
        sides = {
            name: {
                "seconds": median(its),
                "to_one": median([a / b for a, b in zip(seconds["1 server"], its, strict=True)]),
                "same_tokens": same(first, answers[name], "token_ids"),
                "same_logprobs": same(first, answers[name], "logprobs"),
                "raw": its,
            }
            for name, its in seconds.items()
        }
        killed = kill_one(engines["2 servers"], asked, first, Path(folder) / "journal.jsonl")
    return {"name": model.name, "requests": len(asked), "tokens": tokens, "sides": sides, "killed": killed}


@contextmanager
def engines_of(model: Model, cores: int, folder: Path) -> Iterator[dict[str, VllmEngine]]:
    """Engines of the same servers, by what they are: none of them is closed by itself."""
    loaded = model.source.load_model(0, lambda: ALPHABET)
    weights = folder / "weights"
    tokenizer = model.source.load_tokenizer(lambda: ALPHABET)
    write_for_engine(dict(loaded.named_parameters()), loaded.config, tokenizer, weights)
    single = start(VllmSettings(replicas=MOST, omp_threads=1), weights, folder / "server.log")
    threaded = start(VllmSettings(replicas=1, omp_threads=cores), weights, folder / "threaded.log")
    for one in (*single, *threaded):
        one.ready()
    engines = {f"{n} server{'s' * (n > 1)}": engine(single[:n]) for n in (1, 2, MOST)}
    engines[f"1 server, {cores} threads"] = engine(threaded)
    try:
        yield engines
    finally:
        for one in (*single, *threaded):
            one.begin_to_close()
        for one in engines.values():
            one.close()


def start(settings: VllmSettings, weights: Path, log: Path) -> list[Server]:
    launch = Launch(settings=settings, context_length=CONTEXT, seed=0, rank=0, world_size=1, device="cpu")
    return servers_of(launch, weights, log, None)


def engine(servers: Sequence[Server]) -> VllmEngine:
    ranks = RankFiles(0, 1, None, lambda name: None)
    return VllmEngine(VllmSettings(), servers, ranks, context_length=CONTEXT, device="cpu")


def requests(model: Model) -> list[Request]:
    draws = random.Random(0)
    return [
        Request(
            tuple(draws.randrange(4, 40) for _ in range(24)),
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
    victim = engine_core(engine._replicas[0].server.ready().url)
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


def engine_core(url: str) -> int:
    """The process that computes for the server there."""
    port = url.rpartition(":")[2].encode()
    (server,) = [pid for pid in descendants(os.getpid()) if b"--port\0" + port + b"\0" in title(pid)][-1:]
    (core,) = [pid for pid in descendants(server) if title(pid).startswith(b"VLLM::EngineCore")]
    return core


def title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def page(about: dict[str, Any]) -> str:
    lines = [
        "# Replicas: engines of 1, 2 and 4 servers",
        "",
        f"{about['cores']} cores ({about['processor']}), load {about['load']:.1f} at the end: what is above"
        " the number of cores was others' work. Made by `python scripts/replicas.py --output docs/results`.",
        "",
    ]
    for model in about["models"]:
        killed = model["killed"]
        lines += [
            f"## {model['name'].capitalize()}: {model['requests']} requests, {model['tokens']:,} tokens",
            "",
            "| engine | seconds | speed to 1 server, 1 thread | same tokens | same log-probs, to the bit |",
            "|---|---|---|---|---|",
            *(
                f"| {name} | {side['seconds']:.2f} | {side['to_one']:.2f} | {words(side['same_tokens'])} |"
                f" {words(side['same_logprobs'])} |"
                for name, side in model["sides"].items()
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


def words(is_so: bool) -> str:
    return "yes" if is_so else "**no**"


if __name__ == "__main__":
    main()
