"""Seconds of an iteration of VinePPO: in two waves, pipelined, overlapping, and cheaper, in paired turns.

    python benchmarks/iteration_seconds.py --output docs/results

Each turn carries out the same iteration by all of them, on the same weights and the same problems: sampling,
grading, credit, one training step, weights into the engine. *Two waves* asks for continuations (K = 9) when
all answers are there, *pipelined* with each answer as soon as it is graded; *one step* is pipelined, and
samples while it trains on the answers of the turn before; the *cheap estimator* smooths over K = 3, pipelined
too. The learning rate is so small that no weight moves, so that all turns sample alike; that the first three
make the same rows, to the bit, is checked every time.

Answers are the quickstart's, all about equally long, and those of a model that ends with the same probability
after every token: most are short, few are six times as long. The latter once more with the server's prefix
cache on, which is off on a CPU by default: how often it helps, and whether the bits stay. Takes about ten
minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.pairs import (  # noqa: E402
    in_turns,
    machine,
    publish,
)
from benchmarks.setting import (  # noqa: E402
    TAIL_CONTEXT,
    TAIL_MEAN,
    TAIL_PROMPT,
    Setting,
    long_tailed_model,
    quick_start_model,
)
from treetune.runtime.base import PolicyIteration  # noqa: E402

CHECKPOINT = ROOT / "experiments/quickstart/sft/checkpoints/last/policy"
KINDS = ("short", "long-tailed", "cached")
"""Of answers, in the order in which `settings` has them."""
STILL = 1e-12
"""A learning rate at which no weight in float32 moves."""
BEFORE, AFTER, OVERLAP = "two waves, K = 9", "pipelined, K = 9", "one step, K = 9"
CHEAP = "pipelined, smoothed over K = 3"
PHASES = ("generation", "credit", "training", "sync")
COLUMNS = "| | seconds | to two waves | generation | credit | overlap | training | sync | tokens | states |"
STATES = 4
"""Of a long-tailed answer: one for each of its first lines."""


@dataclass(frozen=True)
class Answers:
    """What is measured on: its name, and the configuration with the model that writes such answers."""

    name: str
    words: str
    config: PolicyIteration
    repeats: int
    cached: bool = False
    """Whether the server keeps the keys and values of prefixes."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for iteration_seconds.md and .json")
    parser.add_argument("--checkpoint", type=Path, help=f"start model; default {CHECKPOINT} or a new one")
    parser.add_argument("--problems", type=int, default=32, help="of an iteration (default 32)")
    parser.add_argument("--samples", type=int, default=8, help="of each problem (default 8)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of short answers (default 5)")
    parser.add_argument("--long-repeats", type=int, default=3, help="of long-tailed ones (default 3)")
    parser.add_argument("--servers", type=int, help="of the engine (default: a server on each core)")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="kinds of answers")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="treetune-iterations-") as workspace:
        if not options.checkpoint:
            options.checkpoint = CHECKPOINT if CHECKPOINT.is_dir() else quick_start_model(Path(workspace))
        measured = []
        for place in (KINDS.index(kind) for kind in options.only):
            # DeepSpeed is begun once in a process.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                measured.append(process.submit(measure, place, options, workspace).result())
            # After each kind: one that fails takes none of the others away.
            about = {**machine(), "seconds": round(time.monotonic() - started), "measured": measured}
            publish(page(about), about, options.output, "iteration_seconds")


def settings(options: argparse.Namespace, workspace: str) -> Iterator[Answers]:
    folder = Path(workspace)
    setting = Setting(
        workspace=folder,
        checkpoint=options.checkpoint.resolve(),
        repeats=options.repeats,
        problems=options.problems,
        samples=options.samples,
    )
    still: dict[str, Any] = {"checkpoints": {"every": 1}, "trainer+": {"learning_rate": STILL}}
    if options.servers:
        still["engines+"] = {"policy+": {"replicas": options.servers}}
    short = setting.configuration("vineppo", _object(still | {"experiment_name": "short"}))
    yield Answers("short", "the quickstart's answers", short, options.repeats)
    tail = TAIL_CONTEXT - TAIL_PROMPT
    more = still | {
        "experiment_name": "long-tailed",
        "model": {
            "type": "pretrained",
            "name_or_path": str(long_tailed_model(short, folder / "models/long-tailed")),
        },
        "context_length": TAIL_CONTEXT,
        "rollout+": {"max_tokens": tail},
        "credit+": {"max_states": STATES},
    }
    words = f"lengths geometric with mean {TAIL_MEAN}, cut at {tail}; {STATES} states of an answer at most"
    long_tailed = setting.configuration("vineppo", _object(more))
    yield Answers("long-tailed", words, long_tailed, options.long_repeats)
    engines = replace(
        long_tailed.engines,
        policy=replace(long_tailed.engines.policy, prefix_caching=True),  # type: ignore[type-var]
    )
    cached = replace(long_tailed, engines=engines, experiment_name="long-tailed-cached")
    yield Answers("long-tailed, prefix cache on", words, cached, options.long_repeats, cached=True)


def measure(place: int, options: argparse.Namespace, workspace: str) -> dict[str, Any]:
    """All sides in turn, in one session with one engine, on the answers at this place of `settings`."""
    from treetune.credit.values.smoothed import Smoothed
    from treetune.runtime.loop import Lookahead
    from treetune.runtime.policy_server import PolicyServer
    from treetune.runtime.sampler import Sampler
    from treetune.runtime.session import Session
    from treetune.runtime.training import make_trainer

    answers = list(settings(options, workspace))[place]
    print(f"{answers.name}: {answers.words}", file=sys.stderr, flush=True)
    credit = replace(answers.config.credit, samples=9)  # type: ignore[type-var]
    credits = {
        BEFORE: replace(credit, pipelined=False),
        AFTER: credit,
        OVERLAP: credit,
        CHEAP: replace(credit, samples=3, values=Smoothed()),
    }
    with (
        Session.open(answers.config, {}) as session,
        PolicyServer.start(session, trains=True) as server,
        Sampler.open(session, server) as sampler,
        contextlib.ExitStack() as stack,
    ):
        trainer = make_trainer(session)
        server.ready()
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in credits}
        session.config = replace(answers.config, credit=credit, overlap="one_step")
        overlapping = stack.enter_context(Lookahead.open(sampler))
        trained: list[Any] = []

        def side(name: str) -> Callable[[int], float]:
            def work(turn: int) -> float:
                version = sum(map(len, found.values())) + 1
                overlap: Any = "one_step" if name == OVERLAP else "none"
                session.config = replace(answers.config, credit=credits[name], overlap=overlap)
                if name == OVERLAP:
                    one = _overlapping(overlapping, sampler, trainer, turn, version, trained)
                else:
                    one = _iteration(sampler, trainer, turn, version)
                found[name].append(one)
                return one["seconds"]

            return work

        in_turns({name: side(name) for name in credits}, answers.repeats)
        hit_rate = _hit_rate(server) if answers.cached else None
    for before, *others in zip(found[BEFORE], found[AFTER], found[OVERLAP], strict=True):
        if any(one["rows"] != before["rows"] for one in others):
            raise SystemExit(f"{answers.name}: pipelined, or overlapping, made other rows than two waves")
    sides = {name: _side(turns[1:], found[BEFORE][1:]) for name, turns in found.items()}
    lengths = found[BEFORE][-1]["lengths"]
    return {
        "name": answers.name,
        "words": answers.words,
        "answers": options.problems * options.samples,
        "lengths": {"mean": fmean(lengths), "median": median(lengths), "most": max(lengths)},
        "repeats": answers.repeats,
        "sides": sides,
        "hit_rate": hit_rate,
        "rows": [one["rows"] for one in found[BEFORE]],
    }


def _hit_rate(server: Any) -> float:
    """Of prompt tokens, the share that the servers had computed before."""
    from treetune.engine.key import header

    lines: list[str] = []
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for one in server.engine._replicas:
        address = one.server.ready()
        request = urllib.request.Request(f"{address.url}/metrics", headers=header(address.key))
        with direct.open(request, timeout=60) as response:
            lines += response.read().decode().splitlines()
    hits, queries = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:prefix_cache_{name}_total"))
        for name in ("hits", "queries")
    )
    return hits / queries if queries else 0.0


def _iteration(sampler: Any, trainer: Any, turn: int, version: int) -> dict[str, Any]:
    """As the loop runs one, but for evaluation and checkpoint; nothing of it is there from before."""
    from treetune.runtime.console import Clock
    from treetune.runtime.generation import generate

    shutil.rmtree(sampler.session.directory.iteration(turn), ignore_errors=True)
    clock = Clock()
    start = time.perf_counter()
    episodes, metrics = generate(sampler, turn, clock)
    with clock.phase("training"):
        trainer.train(turn, episodes)
    with clock.phase("sync"):
        sampler.server.offer(trainer, version)
        sampler.server.ready()
    seconds = time.perf_counter() - start
    return _told(
        seconds, clock, episodes, metrics, clock.tokens, metrics.get("credit/value_overlap_seconds", 0.0)
    )


def _overlapping(
    lookahead: Any, sampler: Any, trainer: Any, turn: int, version: int, trained: list[Any]
) -> dict[str, Any]:
    """As the loop runs one with an overlap of one step: samples this turn's answers, and trains on those of
    the turn before, which are `trained`."""
    from treetune.runtime.console import Clock

    shutil.rmtree(sampler.session.directory.iteration(turn), ignore_errors=True)
    clock, before = Clock(), sampler.server.engine.tokens
    start = time.perf_counter()
    with lookahead.generate_meanwhile(turn, clock):
        if trained:
            with clock.phase("training"):
                trainer.train(turn - 1, trained)
    with clock.phase("sync"):
        sampler.server.offer(trainer, version)
        sampler.server.ready()
    seconds = time.perf_counter() - start
    trained[:], metrics = lookahead.take_episodes(turn, clock)
    sampled = metrics["overlap/generation_seconds"] + metrics["overlap/credit_seconds"]
    tokens = {"all": sampler.server.engine.tokens - before}
    return _told(seconds, clock, trained, metrics, tokens, sampled - clock.seconds["generation"])


def _told(
    seconds: float, clock: Any, episodes: Sequence[Any], metrics: Any, tokens: dict[str, int], overlap: float
) -> dict[str, Any]:
    rows = hashlib.sha256()
    for one in episodes:
        rows.update(one.response_ids.tobytes() + one.advantages.tobytes() + one.behaviour_logprobs.tobytes())
    return {
        "seconds": seconds,
        "rows": rows.hexdigest(),
        "lengths": [len(one.response_ids) for one in episodes],
        "tokens": dict(tokens),
        "states": metrics["credit/value_states"],
        "overlap": overlap,
        **{phase: clock.seconds[phase] for phase in PHASES},
    }


def _side(turns: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> dict[str, Any]:
    shares = [one["seconds"] / other["seconds"] for one, other in zip(turns, before, strict=True)]
    numbers = ("seconds", "overlap", "states", *PHASES)
    return {
        **{name: median(one[name] for one in turns) for name in numbers},
        "tokens": median(sum(one["tokens"].values()) for one in turns),
        "share": {"median": median(shares), "least": min(shares), "most": max(shares)},
        "all": [one["seconds"] for one in turns],
    }


def page(report: dict[str, Any]) -> str:
    """For people, in Markdown."""
    lines = [
        "# Seconds of an iteration of VinePPO",
        "",
        f"`python benchmarks/iteration_seconds.py --output docs/results`, {report['seconds'] / 60:.0f}"
        f" minutes on {report['cores']} cores of {report['processor']}. Medians over turns; a ratio is that"
        " of one turn to two waves in the same turn. Generation lasts until the last answer is there, and"
        " credit goes on from then; overlap is the part of generation in which continuations were sampled"
        " too. With one step, generation is what training didn't hide of the next answers and their credit,"
        " and overlap what it hid.",
    ]
    for one in report["measured"]:
        lengths = one["lengths"]
        lines += [
            "",
            f"**{one['name'].capitalize()}**: {one['words']}. {one['answers']} answers of"
            f" {lengths['mean']:.0f} tokens on average (median {lengths['median']:.0f}, longest"
            f" {lengths['most']}), {one['repeats']} turns.{_cache(one, report)}",
            "",
            COLUMNS,
            "|---|" + "---:|" * 9,
        ]
        for name, side in one["sides"].items():
            share = side["share"]
            ratio = f"{share['median']:.2f} ({share['least']:.2f} to {share['most']:.2f})"
            lines.append(
                f"| {name} | {side['seconds']:.1f} | {ratio if name != BEFORE else '1'} |"
                f" {side['generation']:.1f} | {side['credit']:.1f} | {side['overlap']:.1f} |"
                f" {side['training']:.1f} | {side['sync']:.1f} | {side['tokens']:,.0f} |"
                f" {side['states']:,.0f} |"
            )
    return "\n".join(lines) + "\n"


def _cache(one: dict[str, Any], report: dict[str, Any]) -> str:
    """What is to be said of a prefix cache."""
    if one["hit_rate"] is None:
        return ""
    said = f" {one['hit_rate']:.0%} of prompt tokens were in the cache"
    for other in report["measured"]:
        if other["name"] == "long-tailed":
            word = "those without it" if other["rows"] == one["rows"] else "not those without it"
            said += f"; rows are {word} to the bit"
    return said + "."


def _object(keys: dict[str, Any]) -> str:
    """As Jsonnet; keys that end in + extend."""
    pairs = [
        (json.dumps(key.removesuffix("+")) + "+" * key.endswith("+"), value) for key, value in keys.items()
    ]
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in pairs) + "}"


if __name__ == "__main__":
    main()
