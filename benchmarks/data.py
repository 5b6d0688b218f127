"""The way of an iteration's tokens: from the engine's answers to trainer tensors and to disk, and back.

No model and no engine: the answers are made up, and everything that handles them is the run's own code, on
one rank as if there were another. `SECONDS` and `BYTES` are what it aims at.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treetune.credit.grpo import Group
from treetune.engine.base import Engine
from treetune.engine.journal import JournaledEngine, completions_of_row
from treetune.engine.requests import Completion, OnResult, Request
from treetune.rollouts.context import AnswerSettings, RolloutContext
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.storage import (
    episodes_from_bytes,
    episodes_to_bytes,
    read_episodes,
    read_trajectories,
    write_episodes,
    write_trajectories,
)
from treetune.seeds import derive_seed
from treetune.store.journal import read_rows
from treetune.tasks.base import Task
from treetune.tasks.steps import ends_of_lines
from treetune.trainer.tokens import Sequences, flat_of_trained
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import Grade, Problem, TextCodec

SIZES = (100_000, 1_000_000, 10_000_000)
LENGTH, SAMPLES, STEP, VOCABULARY = 8_000, 8, 40, 32_000
"""Tokens of an answer, answers to a problem, tokens between two ends of lines, tokens of the tokenizer."""
SECONDS, BYTES = 1.0, 60.0
"""A million tokens in at most so long, and a token in at most so many bytes on disk."""


@dataclass(frozen=True, kw_only=True)
class Lines(Task):
    def step_boundaries(self, response: str) -> list[int]:
        return ends_of_lines(response)


class MadeUp(Engine):
    """Answers of `LENGTH` tokens, made before the clock runs."""

    version = 0

    def __init__(self, problems: Sequence[Problem]) -> None:
        seeds = [derive_seed(0, 0, problem.id, "rollout") + i for problem in problems for i in range(SAMPLES)]
        self._rows = {seed: _made_up(seed) for seed in seeds}

    def generate(
        self, requests: Sequence[Request], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        answers = []
        for index, request in enumerate(requests):
            rows = [self._rows.pop(request.seed + i) for i in range(request.n)]
            answers.append([Completion(ids, logprobs, "stop", 0) for ids, logprobs in rows])
            assert on_result is not None
            on_result(index, answers[-1])
        return answers


def _made_up(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """As rare words are rare, and a line ends now and then."""
    draw = np.random.default_rng(seed)
    token_ids = np.minimum(draw.zipf(1.3, LENGTH), VOCABULARY - 2).astype(np.int32)
    token_ids[STEP::STEP] = 0  # the end of a line
    return token_ids, -draw.exponential(0.4, LENGTH).astype(np.float32)


class Graders:
    """Every other answer is correct."""

    def __init__(self) -> None:
        self._count = 0

    def submit(self, response: str, problem: Problem, **how: object) -> Future[Grade]:
        self._count += 1
        grade: Future[Grade] = Future()
        grade.set_result(Grade(float(self._count % 2), "ok", response[-2:]))
        return grade


def codec() -> TextCodec:
    """A byte-level tokenizer of made-up words."""
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = {"Ċ": 0}
    while len(words) < VOCABULARY:
        words.setdefault("Ġ" + "".join(draw.choice(letters, draw.integers(2, 7))), len(words))
    backend = Tokenizer(models.BPE(words, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()

    def decode(token_ids: Any) -> str:
        return str(backend.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True))

    return TextCodec(encode=lambda text: (1, 2, 3), decode=decode, eos_id=VOCABULARY - 1)


@dataclass
class Clock:
    """Seconds of the wall and of the processor, by what was done."""

    wall: dict[str, float] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        gc.collect()
        begun = time.perf_counter(), time.process_time()
        yield
        self.wall[name] = time.perf_counter() - begun[0]
        self.processor[name] = time.process_time() - begun[1]


def measure(tokens: int, folder: Path, text: TextCodec) -> dict[str, Any]:
    """One size, once through."""
    count = -(-tokens // (LENGTH * SAMPLES))
    problems = [Problem(id=f"train/{i}", prompt="a question", gold="") for i in range(count)]
    clock = Clock()
    context = RolloutContext(
        task=Lines(),
        engine=JournaledEngine(MadeUp(problems), folder / "journal.jsonl"),
        grader=Graders(),  # type: ignore[arg-type]
        codec=text,
        seed=0,
        iteration=0,
        settings=AnswerSettings(LENGTH + 100),
    )
    rollout = SingleTurn(samples=SAMPLES, max_tokens=LENGTH)
    with clock.of("answers to trees, text and journal"):
        trees, _ = rollout.run(context, problems)
    count = sum(len(answer.response_ids) for answer in answers_of(trees))
    with clock.of("text (the tokenizer's own part of it)"):
        for answer in answers_of(trees):
            text.decode(answer.response_ids)
    with clock.of("write trajectories"):
        write_trajectories(folder / "trajectories.arrow", answers_of(trees))
    with clock.of("credit"):
        episodes, _ = Group().assign(context, trees)
    with clock.of("hand to another rank"):
        episodes = episodes_from_bytes(episodes_to_bytes(episodes))
    with clock.of("write episodes"):
        write_episodes(folder / "episodes.arrow", episodes, text)
    with clock.of("trainer tensors"):
        sequences = Sequences.of(episodes)
        flat_of_trained(episodes, lambda e: e.advantages)
        flat_of_trained(episodes, lambda e: e.behaviour_logprobs)
    assert sequences.n_tokens == count
    del trees, episodes, sequences, context
    with clock.of("read journal"):
        known = [completions_of_row(row) for row in read_rows(folder / "journal.jsonl")]
    assert len(known) == len(problems)
    del known
    with clock.of("read trajectories"):
        read = trees_of(read_trajectories(folder / "trajectories.arrow"))
    assert sum(len(answer.response_ids) for answer in answers_of(read)) == count
    del read
    with clock.of("read episodes"):
        assert sum(len(episode.response_ids) for episode in read_episodes(folder / "episodes.arrow")) == count
    return {
        "tokens": count,
        "wall": clock.wall,
        "processor": clock.processor,
        "bytes": {
            name: (folder / name).stat().st_size
            for name in ("journal.jsonl", "trajectories.arrow", "episodes.arrow")
        },
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main(sizes: Sequence[int], say: Callable[[str], object]) -> list[dict[str, Any]]:
    """All sizes, each in a process of its own, so that the peak of memory is its own."""
    found = []
    for tokens in sizes:
        say(f"data: {tokens:,} tokens")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found.append(process.submit(_measured, tokens).result())
    return found


def _measured(tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="treetune-data-") as folder:
        measure(1, Path(folder), codec())  # what libraries take when they are first used
    with tempfile.TemporaryDirectory(prefix="treetune-data-") as folder:
        return measure(tokens, Path(folder), codec())


def _seconds(names: Sequence[str], one: dict[str, Any]) -> str:
    return f"{sum(one['processor'][name] for name in names) / one['tokens'] * 1e6:.3f}"


def _share(name: str, one: dict[str, Any]) -> str:
    return f"{one['bytes'][name] / one['tokens']:.1f}"


def table(found: Sequence[dict[str, Any]]) -> str:
    """For people, in Markdown: seconds of a processor for a million tokens, by what is done."""
    once = "text (the tokenizer's own part of it)"
    names = [name for name in found[0]["processor"] if name != once]
    lines = [
        "| seconds of a processor per million tokens | "
        + " | ".join(f"{one['tokens']:,} tokens" for one in found)
        + " |",
        "|---|" + "---:|" * len(found),
    ]

    def row(name: str, of: Callable[[dict[str, Any]], str]) -> None:
        lines.append(f"| {name} | " + " | ".join(map(of, found)) + " |")

    for name in names:
        row(name, partial(_seconds, [name]))
    row(f"**all of it** (aim: {SECONDS:g})", lambda one: f"**{_seconds(names, one)}**")
    row(f"of that {once}", partial(_seconds, [once]))
    row(
        "all of it by the wall", lambda one: f"{sum(one['wall'][n] for n in names) / one['tokens'] * 1e6:.3f}"
    )
    for name in found[0]["bytes"]:
        row(f"bytes of a token in {name}", lambda one, name=name: f"{one['bytes'][name] / one['tokens']:.1f}")  # type: ignore[misc]
    row(
        f"**all three** (aim: {BYTES:g})", lambda one: f"**{sum(one['bytes'].values()) / one['tokens']:.1f}**"
    )
    row("memory at most, GiB", lambda one: f"{one['peak_gib']:.2f}")
    return "\n".join(lines)
