"""Seconds of a weight sync by shared memory and by files, in paired turns on one server.

    python benchmarks/weight_transfer.py --output docs/results

Each turn brings the same weights of a trainer into the same live server three times: in chunks through shared
memory, through a folder beside the experiment (on disk, synced), and as one file in /dev/shm that is written
before it is read, which was the only way before. Without the canary, which is the same for all. The server
and the trainer are real; the weights are random: a model of the quickstart's size, and one of a hundred
million. Takes about five minutes on two idle cores.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks import pairs as report  # noqa: E402
from benchmarks.pairs import in_turns  # noqa: E402
from treetune.credit.grpo import Group  # noqa: E402
from treetune.engine.settings import Engines, VllmSettings  # noqa: E402
from treetune.models.policy_files import write_for_engine  # noqa: E402
from treetune.models.sources import TinyModel  # noqa: E402
from treetune.objectives.mle import MaximumLikelihood  # noqa: E402
from treetune.rollouts.selection import All  # noqa: E402
from treetune.rollouts.single_turn import SingleTurn  # noqa: E402
from treetune.runtime.base import PolicyIteration  # noqa: E402
from treetune.runtime.policy_server import PolicyServer  # noqa: E402
from treetune.runtime.session import Session  # noqa: E402
from treetune.runtime.training import make_trainer  # noqa: E402
from treetune.runtime.weights_folder import WeightsFolder  # noqa: E402
from treetune.tasks.arithmetic import AdditionChain  # noqa: E402
from treetune.trainer.base import Trainer  # noqa: E402

MODELS = {
    "tiny": TinyModel(context_length=128),
    "large": TinyModel(layers=12, hidden_size=768, heads=12, intermediate_size=2560, context_length=128),
}
CHUNKS, FOLDER, ONE_FILE = "shared memory, in chunks", "files on disk", "one file in /dev/shm"


def main(arguments: Sequence[str] | None = None) -> None:
    options = report.arguments_of(__doc__, "weight_transfer", repeats=7).parse_args(arguments)
    found = []
    for (
        name,
        source,
    ) in MODELS.items():  # each in a process of its own: a second session can't have ranks again
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawned) as pool:
            found.append(pool.submit(measure, name, source, options.repeats).result())
    about = {**report.machine(), "models": found}
    report.publish(page(about), about, options.output, "weight_transfer")


def measure(name: str, source: TinyModel, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as base:
        config = experiment(name, source, Path(base))
        with Session.open(config, {}) as session, PolicyServer.start(session, trains=True) as server:
            engine, chunked = server.engine, server.folder
            assert engine is not None and chunked is not None
            trainer = make_trainer(session)
            server.ready()
            on_disk = WeightsFolder(session, None, in_memory=False)
            numbers = iter(range(1, 10_000))

            def by_chunks(turn: int) -> float:
                version = next(numbers)
                seconds = engine.load(
                    chunked.of(version), version, chunks=chunked.send(trainer, version)
                ).seconds
                chunked.keep_only(version)
                return seconds

            def by_folder(turn: int) -> float:
                version, before = next(numbers), time.perf_counter()
                for _ in on_disk.send(trainer, version):
                    pass
                engine.load(on_disk.of(version), version)
                seconds = time.perf_counter() - before
                on_disk.keep_only(version)
                return seconds

            def by_one_file(turn: int) -> float:
                version, before = next(numbers), time.perf_counter()
                place, tokenizer = chunked.of(version), session.model.tokenizer
                write_for_engine(trainer.weights(), trainer.model.config, tokenizer, place)
                engine.load(place, version)
                seconds = time.perf_counter() - before
                chunked.keep_only(version)
                return seconds

            try:
                sides = {CHUNKS: by_chunks, FOLDER: by_folder, ONE_FILE: by_one_file}
                seconds = in_turns(sides, repeats)
            finally:
                on_disk.remove()
            parameters = sum(weight.numel() for weight in trainer.model.parameters())
    return {"name": name, "parameters": parameters, "raw": seconds}


def experiment(name: str, source: TinyModel, base: Path) -> PolicyIteration:
    return PolicyIteration(
        task=AdditionChain(count=3, digits=2, train_size=20, validation_size=4, test_size=4),
        model=source,
        engines=Engines(
            policy=VllmSettings(replicas=1, start_timeout=600.0, weight_transfer="shared_memory")
        ),
        rollout=SingleTurn(samples=2, max_tokens=12),
        credit=Group(),
        selection=All(),
        trainer=Trainer(objective=MaximumLikelihood(), learning_rate=1e-3, measure_kl=False),
        iterations=1,
        problems_per_iteration=4,
        context_length=128,
        experiment_name=name,
        directory=str(base),
    )


def page(about: dict[str, Any]) -> str:
    lines = [
        "# Weights into the live server, by shared memory and by files",
        "",
        f"`python benchmarks/weight_transfer.py --output docs/results`, {about['cores']} cores, load of the"
        f" machine {about['load']:.1f} at the end. Medians over paired turns; the ratio is that within each"
        " turn. Other work shared the cores where the load says so: the ratios count, and they are noisy.",
        "",
        "| weights | way | seconds | to one file in /dev/shm |",
        "|---|---|---|---|",
    ]
    for model in about["models"]:
        whole = model["raw"][ONE_FILE]
        for name, seconds in model["raw"].items():
            ratio = median([a / b for a, b in zip(seconds, whole, strict=True)])
            size = f"{model['parameters'] / 1e6:.1f} million, float32"
            lines.append(f"| {size} | {name} | {median(seconds):.2f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
