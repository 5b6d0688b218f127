"""Measures how an iteration's tokens are handled: from the engine's answers to trainer tensors, to disk, and
back.

There is no model and no engine: the answers are made up. All that handles them is the code of a run, on one
rank, including the exchange with another rank. `SECONDS_AIM` and `BYTES_AIM` are the aims.
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
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typing_extensions import override

from treetune.credit.grpo import Group
from treetune.engine.base import Engine
from treetune.engine.journal import JournaledEngine, completions_of_row
from treetune.engine.requests import Completion, Deferred, OnResult, Request
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
from treetune.store.journal import read_journal
from treetune.tasks.base import Task
from treetune.tasks.steps import ends_of_lines
from treetune.trainer.tokens import Sequences, flatten_trained
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import Grade, Problem, TextCodec

SIZES = (100_000, 1_000_000, 10_000_000)
"""Tokens of an iteration that are measured by default."""
LENGTH = 8_000
"""Tokens of an answer."""
SAMPLES = 8
"""Answers to a problem."""
LINE = 40
"""Tokens of a line."""
VOCABULARY = 32_000
"""Tokens of the tokenizer."""
SECONDS_AIM = 1.0
"""The aim for a million tokens."""
BYTES_AIM = 60.0
"""The aim for the size of a token on disk."""

DECODING = "text (the tokenizer's own part of it)"
"""The step that is measured once more on its own: the first step includes it."""
FILES = ("journal.jsonl", "trajectories.arrow", "episodes.arrow")

SizeResult = dict[str, Any]
"""The result for a number of tokens, such as ``{"tokens": 128000, "wall": {"credit": 0.01, …}, "processor":
{"credit": 0.01, …}, "bytes": {"journal.jsonl": 1234, …}, "peak_gib": 0.6}``."""


# A run's parts with made-up answers


@dataclass(frozen=True, kw_only=True)
class Lines(Task):
    """A task whose answers have a step for each line."""

    @override
    def step_boundaries(self, response: str) -> list[int]:
        return ends_of_lines(response)


class MadeUpEngine(Engine):
    """An engine whose answers are made before the clock runs."""

    version = 0

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._samples: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for problem in problems:
            first_seed = derive_seed(0, 0, problem.id, "rollout")  # as the rollout derives it
            for seed in range(first_seed, first_seed + SAMPLES):
                self._samples[seed] = make_up_sample(seed)

    @override
    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results = []
        for index, request in enumerate(requests):
            assert isinstance(request, Request), "single answers wait for nothing"
            completions = []
            for seed in range(request.seed, request.seed + request.n):
                token_ids, logprobs = self._samples.pop(seed)
                completions.append(Completion(token_ids, logprobs, "stop", 0))
            results.append(completions)
            assert on_result is not None
            on_result(index, completions)
        return results


def make_up_sample(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids with Zipf's distribution and line ends, and log-probs."""
    generator = np.random.default_rng(seed)
    token_ids = np.minimum(generator.zipf(1.3, LENGTH), VOCABULARY - 2).astype(np.int32)
    token_ids[LINE::LINE] = 0  # the end of a line
    logprobs = -generator.exponential(0.4, LENGTH).astype(np.float32)
    return token_ids, logprobs


class AlternatingGrader:
    """Grades every other answer as correct."""

    def __init__(self) -> None:
        self._answers = 0

    def submit(self, response: str, problem: Problem, **options: object) -> Future[Grade]:
        self._answers += 1
        grade: Future[Grade] = Future()
        grade.set_result(Grade(float(self._answers % 2), "ok", response[-2:]))
        return grade


def make_codec() -> TextCodec:
    """Returns a codec with a byte-level tokenizer of made-up words."""
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    ids_of_words = {"Ċ": 0}  # in byte-level tokenizers, Ċ is the end of a line, and Ġ a space
    while len(ids_of_words) < VOCABULARY:
        word = "Ġ" + "".join(generator.choice(letters, generator.integers(2, 7)))
        ids_of_words.setdefault(word, len(ids_of_words))
    tokenizer = Tokenizer(models.BPE(ids_of_words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    def decode(token_ids: Any) -> str:
        return str(tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True))

    return TextCodec(encode=lambda text: (1, 2, 3), decode=decode, eos_id=VOCABULARY - 1)


# The measurement


@dataclass
class Clock:
    """Seconds of each step."""

    wall: dict[str, float] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measures a block as the step `name`."""
        gc.collect()
        wall_start, processor_start = time.perf_counter(), time.process_time()
        yield
        self.wall[name] = time.perf_counter() - wall_start
        self.processor[name] = time.process_time() - processor_start


def measure_steps(tokens: int, folder: Path, codec: TextCodec) -> SizeResult:
    """Takes each step once with about so many tokens, and returns the seconds and bytes of each.

    Objects are deleted as soon as they are not needed, so that the peak of memory is that of a run.
    """
    tokens_of_problem = LENGTH * SAMPLES
    n_problems = -(-tokens // tokens_of_problem)  # rounded up
    problems = [Problem(id=f"train/{index}", prompt="a question", gold="") for index in range(n_problems)]
    context = RolloutContext(
        task=Lines(),
        engine=JournaledEngine(MadeUpEngine(problems), folder / "journal.jsonl"),
        grader=AlternatingGrader(),  # type: ignore[arg-type]
        codec=codec,
        seed=0,
        iteration=0,
        settings=AnswerSettings(LENGTH + 100),
    )
    rollout = SingleTurn(samples=SAMPLES, max_tokens=LENGTH)
    clock = Clock()
    with clock.measure("answers to trees, text and journal"):
        trees, _ = rollout.run(context, problems)
    count = sum(len(answer.response_ids) for answer in answers_of(trees))
    with clock.measure(DECODING):
        for answer in answers_of(trees):
            codec.decode(answer.response_ids)
    with clock.measure("write trajectories"):
        write_trajectories(folder / "trajectories.arrow", answers_of(trees))
    with clock.measure("credit"):
        episodes, _ = Group().assign(context, trees)
    with clock.measure("hand to another rank"):
        episodes = episodes_from_bytes(episodes_to_bytes(episodes))
    with clock.measure("write episodes"):
        write_episodes(folder / "episodes.arrow", episodes, codec)
    with clock.measure("trainer tensors"):
        sequences = Sequences.of(episodes)
        flatten_trained(episodes, lambda episode: episode.advantages)
        flatten_trained(episodes, lambda episode: episode.behaviour_logprobs)
    assert sequences.n_tokens == count
    del trees, episodes, sequences, context

    with clock.measure("read journal"):
        journaled = [completions_of_row(row) for row in read_journal(folder / "journal.jsonl")]
    assert len(journaled) == len(problems)
    del journaled
    with clock.measure("read trajectories"):
        read_trees = trees_of(read_trajectories(folder / "trajectories.arrow"))
    assert sum(len(answer.response_ids) for answer in answers_of(read_trees)) == count
    del read_trees
    with clock.measure("read episodes"):
        read_tokens = sum(len(episode.response_ids) for episode in read_episodes(folder / "episodes.arrow"))
    assert read_tokens == count
    return {
        "tokens": count,
        "wall": clock.wall,
        "processor": clock.processor,
        "bytes": {name: (folder / name).stat().st_size for name in FILES},
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def measure_size(tokens: int) -> SizeResult:
    """Measures a number of tokens, after a warm-up in which libraries take what they take once."""
    with tempfile.TemporaryDirectory(prefix="treetune-data-") as folder:
        measure_steps(1, Path(folder), make_codec())
    with tempfile.TemporaryDirectory(prefix="treetune-data-") as folder:
        return measure_steps(tokens, Path(folder), make_codec())


def measure_sizes(sizes: Sequence[int], report: Callable[[str], object]) -> list[SizeResult]:
    """Measures each size in a process of its own, since the peak of memory is that of a whole process."""
    results = []
    for tokens in sizes:
        report(f"data: {tokens:,} tokens")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            results.append(process.submit(measure_size, tokens).result())
    return results


# The table


def make_table(results: Sequence[SizeResult]) -> str:
    """Returns a table in Markdown, of the seconds for a million tokens and the bytes of a token."""
    steps = [name for name in results[0]["processor"] if name != DECODING]
    heads = [f"{result['tokens']:,} tokens" for result in results]
    lines = [
        f"| seconds of a processor per million tokens | {' | '.join(heads)} |",
        "|---|" + "---:|" * len(results),
    ]

    def add_row(name: str, cell: Callable[[SizeResult], str]) -> None:
        cells = [cell(result) for result in results]
        lines.append(f"| {name} | {' | '.join(cells)} |")

    def seconds_cell(clock: str, names: Sequence[str]) -> Callable[[SizeResult], str]:
        return lambda result: f"{seconds_per_million(result, clock, names):.3f}"

    def bytes_cell(names: Sequence[str]) -> Callable[[SizeResult], str]:
        return lambda result: f"{bytes_per_token(result, names):.1f}"

    def bold(cell: Callable[[SizeResult], str]) -> Callable[[SizeResult], str]:
        return lambda result: f"**{cell(result)}**"

    for name in steps:
        add_row(name, seconds_cell("processor", [name]))
    add_row(f"**all of it** (aim: {SECONDS_AIM:g})", bold(seconds_cell("processor", steps)))
    add_row(f"of that {DECODING}", seconds_cell("processor", [DECODING]))
    add_row("all of it by the wall", seconds_cell("wall", steps))
    for name in FILES:
        add_row(f"bytes of a token in {name}", bytes_cell([name]))
    add_row(f"**all three** (aim: {BYTES_AIM:g})", bold(bytes_cell(FILES)))
    add_row("memory at most, GiB", lambda result: f"{result['peak_gib']:.2f}")
    return "\n".join(lines)


def seconds_per_million(result: SizeResult, clock: str, steps: Sequence[str]) -> float:
    """Returns the seconds of some steps for a million tokens, by the clock ``processor`` or ``wall``."""
    seconds: float = sum(result[clock][step] for step in steps)
    return seconds / result["tokens"] * 1e6


def bytes_per_token(result: SizeResult, files: Sequence[str]) -> float:
    size: float = sum(result["bytes"][name] for name in files)
    return size / result["tokens"]
