#!/usr/bin/env python
"""Measures how quick the viewer is on a million synthetic answers.

    python benchmarks/viewer_bench.py make /scratch/million            # under 1 GB
    python benchmarks/viewer_bench.py measure /scratch/million         # starts a viewer, waits for its index
    python benchmarks/viewer_bench.py make /scratch/long --iterations 5 --different 1 --tokens 16000
    python benchmarks/viewer_bench.py runs /scratch/runs               # 200 runs; 8 × 20,000 iterations

The answers consist of sentences from a pool, with token ids, log-probs and advantages that go with them, and
are written in the format of a run. Ten iterations are made, and each is there ten times. What is measured is
the time from a request to the last byte of its answer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import numpy as np

ITERATIONS = 100
PER_ITERATION = 10_000
"""Answers of an iteration."""
SAMPLES = 8
"""Answers to a problem."""
TOKENS_EACH = 500
"""Tokens of an answer."""
DIFFERENT = 10
"""Iterations that are made by default; the others are copies of these."""
BATCH = 1024
"""Answers that are written at once."""
SENTENCE = 20
"""Tokens of a sentence."""
SENTENCES = 200
"""Sentences of the pool."""
VOCABULARY = 32_000
RARE = "zyzzyva"
"""A word that one answer of each iteration has."""

TIMES = 5
"""How often each page is asked for."""
LONGEST_INDEX_S = 3600
ON_A_PAGE = 50
"""Answers on a page of the viewer by default."""

Columns = dict[str, Any]
"""The columns of a batch by name: Arrow arrays, or values from which Arrow makes them."""


# Synthetic answers


@dataclass(frozen=True)
class Pool:
    """The sentences of which answers consist."""

    token_ids: np.ndarray
    """[sentences, tokens]"""
    logprobs: np.ndarray
    """[sentences, tokens]"""
    texts: list[str]

    @staticmethod
    def draw() -> Pool:
        generator = np.random.default_rng(0)
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        words = []
        for _ in range(VOCABULARY):
            words.append("".join(generator.choice(letters, generator.integers(1, 7))))
        token_ids = (generator.zipf(1.3, (SENTENCES, SENTENCE)) % VOCABULARY).astype(np.int32)
        logprobs = np.round(-generator.exponential(0.5, (SENTENCES, SENTENCE)), 3).astype(np.float32)
        texts = [" ".join(words[token_id] for token_id in sentence) + ".\n" for sentence in token_ids]
        return Pool(token_ids, logprobs, texts)


@dataclass(frozen=True)
class Answers:
    """A batch of answers of an iteration."""

    iteration: int
    tokens: int
    """Tokens of an answer."""
    numbers: np.ndarray
    """The numbers of the answers in their iteration, [answers]."""
    problems: list[str]
    """The id of each answer's problem."""
    prompts: list[str]
    scores: np.ndarray
    """[answers]"""
    finish_reasons: list[str]
    texts: list[str]
    token_ids: np.ndarray
    """The tokens of all answers, one after the other."""
    logprobs: np.ndarray
    step_values: np.ndarray
    """[answers, steps]; each sentence is a step."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def steps(self) -> int:
        """The steps of an answer."""
        return self.step_values.shape[1]

    @staticmethod
    def draw(pool: Pool, start: int, count: int, tokens: int, iteration: int, iterations: int) -> Answers:
        """Draws the answers number `start` to ``start + count - 1`` of an iteration. The same ones each time.

        Args:
            pool: The sentences.
            start: The number of the first answer.
            count: The number of answers.
            tokens: The tokens of an answer.
            iteration: The iteration, counted from 0.
            iterations: The number of all iterations. The later one is, the more answers are correct.
        """
        generator = np.random.default_rng([iteration, start])
        steps = tokens // SENTENCE
        sentences = generator.integers(0, SENTENCES, (count, steps))
        share_correct = 0.2 + 0.6 * iteration / iterations
        scores = (generator.random(count) < share_correct).astype(float)
        finish_reasons = np.where(generator.random(count) < 0.05, "length", "stop").tolist()
        step_values = np.round(generator.random((count, steps)), 1)
        texts = ["".join(pool.texts[sentence] for sentence in row) for row in sentences]
        if start == 0:
            texts[3] += f"{RARE} {iteration}"
        numbers = np.arange(start, start + count)
        return Answers(
            iteration=iteration,
            tokens=tokens,
            numbers=numbers,
            problems=[f"train/{number // SAMPLES}" for number in numbers],
            prompts=[f"What is {number // SAMPLES} + {iteration}?" for number in numbers],
            scores=scores,
            finish_reasons=finish_reasons,
            texts=texts,
            token_ids=pool.token_ids[sentences].reshape(-1),
            logprobs=pool.logprobs[sentences].reshape(-1),
            step_values=step_values,
        )


def make_schemas(pool: Pool) -> dict[str, Any]:
    """Returns the Arrow schemas of both kinds of files, as a run has them for answers like these."""
    import pyarrow as pa

    from treetune.rollouts import rows as columns
    from treetune.vocabulary import Episode, Grade, Problem, Segment, Trajectory

    token_ids, logprobs = pool.token_ids[0], pool.logprobs[0]
    trajectory = Trajectory(
        problem=Problem("p", "", ""),
        sample=0,
        prompt_ids=token_ids,
        segments=(Segment(token_ids, logprobs=logprobs, policy_version=0),),
        finish_reason="stop",
        text="",
        grade=Grade(0.0, "ok", numbers={"tests_passed": 1.0}),
        step_ends=(SENTENCE,),
        numbers={"lines/count": 25.0},
    )
    episode = Episode(
        prompt_ids=token_ids,
        response_ids=token_ids,
        trained=np.ones(SENTENCE, bool),
        reward=0.0,
        group="p",
        trajectory="p#0",
        policy_version=0,
        advantages=logprobs.astype(float),
        behaviour_logprobs=logprobs,
        step_ends=(SENTENCE,),
        step_values=(0.5,),
    )
    episode_schema = columns.episode_schema([episode], None)
    return {
        "trajectories": columns.trajectory_schema([trajectory]),
        "episodes": episode_schema.append(pa.field("prompt", pa.string())),
    }


def make_lists(values: np.ndarray, length: int, type_of_lists: Any) -> Any:
    """Returns an Arrow array of lists of equal length.

    Args:
        values: The values of all lists, one after the other.
        length: The length of each list.
        type_of_lists: The Arrow type.
    """
    import pyarrow as pa

    count = len(values) // length
    offsets = pa.array(np.arange(count + 1) * length, pa.int32())
    flat = pa.array(values, type_of_lists.value_type)
    return pa.ListArray.from_arrays(offsets, flat, type=type_of_lists)


def trajectory_columns(answers: Answers, schema: Any) -> Columns:
    """Returns the columns that only trajectories have."""
    import pyarrow as pa

    from treetune.rollouts import rows as columns

    count, tokens = len(answers), answers.tokens
    segment = schema.field("segments").type.value_type
    columns_of_segments = {
        "token_ids": make_lists(answers.token_ids, tokens, segment.field("token_ids").type),
        "origin": pa.array(["sampled"] * count),
        "logprobs": make_lists(answers.logprobs, tokens, segment.field("logprobs").type),
        "policy_version": pa.array([answers.iteration] * count, pa.int64()),
        "branch": columns.column_of_branches([()] * count),
        "seconds": pa.array([1.0] * count, pa.float64()),
    }
    segments = pa.StructArray.from_arrays(
        [columns_of_segments[field.name] for field in segment], fields=list(segment)
    )
    problems = []
    for problem, prompt in zip(answers.problems, answers.prompts, strict=True):
        problems.append({"id": problem, "prompt": prompt, "gold": "0", "data": "{}"})
    grades = []
    for score in answers.scores:
        grades.append(
            {
                "reward": score,
                "outcome": "ok",
                "extracted": str(score),
                "seconds": 0.0,
                "message": None,
                "numbers": [("tests_passed", 10 * score)],
            }
        )
    return {
        "segments": columns.nested_column([1] * count, segments),
        "problem": problems,
        "sample": answers.numbers % SAMPLES,
        "prompt_ids": [[1, 2, 3]] * count,
        "grade": grades,
        "bonus": np.zeros(count),
        "numbers": [[("lines/count", 25.0)]] * count,
    }


def episode_columns(answers: Answers, schema: Any) -> Columns:
    """Returns the columns that only episodes have."""
    from treetune.rollouts import rows as columns

    count, tokens = len(answers), answers.tokens
    trajectories = []
    for problem, number in zip(answers.problems, answers.numbers, strict=True):
        trajectories.append(f"{problem}#{number % SAMPLES}")
    # A step's advantage is the value after it minus the value before it; the score takes the last place.
    values_and_score = np.concatenate([answers.step_values, answers.scores[:, None]], axis=1)
    advantages_of_steps = np.diff(values_and_score, axis=1)
    advantages: np.ndarray = np.repeat(advantages_of_steps.reshape(-1), SENTENCE)
    type_of_logprobs = schema.field("behaviour_logprobs").type
    return {
        "prompt_ids": [[1, 2, 3]] * count,
        "response_ids": make_lists(answers.token_ids, tokens, columns.IDS_TYPE),
        "trained": make_lists(np.ones(count * tokens, bool), tokens, columns.MASK_TYPE),
        "reward": answers.scores,
        "score": answers.scores,
        "group": answers.problems,
        "trajectory": trajectories,
        "prompt": answers.prompts,
        "policy_version": [answers.iteration] * count,
        "advantages": make_lists(advantages, tokens, columns.NUMBERS_TYPE),
        "behaviour_logprobs": make_lists(answers.logprobs, tokens, type_of_logprobs),
        "step_values": make_lists(answers.step_values.reshape(-1), answers.steps, columns.NUMBERS_TYPE),
        "pair": [None] * count,
        "chosen": [None] * count,
        "stretches": [[]] * count,
    }


def make_batch(kind: str, answers: Answers, schema: Any) -> Any:
    """Returns answers as an Arrow batch of ``trajectories`` or ``episodes``."""
    import pyarrow as pa

    from treetune.rollouts import rows as columns

    if kind == "trajectories":
        values = trajectory_columns(answers, schema)
    else:
        values = episode_columns(answers, schema)
    ends = np.arange(SENTENCE, answers.tokens + 1, SENTENCE)
    values |= {
        "finish_reason": answers.finish_reasons,
        "text": answers.texts,
        "step_ends": make_lists(np.tile(ends, len(answers)), answers.steps, columns.IDS_TYPE),
    }
    arrays = []
    for field in schema:
        value = values[field.name]
        arrays.append(value if isinstance(value, pa.Array) else pa.array(value, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def write_batches(path: Path, batches: Iterator[Any], schema: Any) -> None:
    """Writes a file of trajectories or episodes as a run does."""
    import pyarrow as pa

    from treetune.store.checksums import SealingFile
    from treetune.store.files import write_atomically

    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with write_atomically(path, "wb", durable=False) as file:
        sealing = SealingFile(file)
        with pa.ipc.new_stream(sealing, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        sealing.seal()


def make_answers(folder: Path, iterations: int, different: int, tokens: int) -> None:
    """Writes an experiment with `PER_ITERATION` answers in each iteration.

    Args:
        folder: The folder of the experiment.
        iterations: The number of iterations.
        different: The number of iterations that are made; the others are copies of these.
        tokens: The tokens of an answer.
    """
    from treetune.runtime.directory import ITERATION_METRICS, ExperimentDirectory
    from treetune.store.checksums import write_record

    pool = Pool.draw()
    schemas = make_schemas(pool)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "type": "policy_iteration",
        "experiment_name": folder.name,
        "iterations": iterations,
        "seed": 1,
        "credit": {"type": "monte_carlo"},
        "trainer": {"objective": {"type": "ppo"}},
    }
    directory = ExperimentDirectory(folder)
    directory.config_file.write_text(json.dumps(config))

    def make_batches(kind: str, iteration: int) -> Iterator[Any]:
        for start in range(0, PER_ITERATION, BATCH):
            count = min(BATCH, PER_ITERATION - start)
            answers = Answers.draw(pool, start, count, tokens, iteration, iterations)
            yield make_batch(kind, answers, schemas[kind])

    rows = []
    for iteration in range(iterations):
        iteration_folder = directory.iteration_folder(iteration)
        for kind, schema in schemas.items():
            if iteration >= different:
                original = directory.iteration_folder(iteration % different) / f"{kind}.arrow"
                iteration_folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(original, iteration_folder / f"{kind}.arrow")
                continue
            with_metadata = schema.with_metadata({"treetune": kind, "rows": str(PER_ITERATION)})
            write_batches(iteration_folder / f"{kind}.arrow", make_batches(kind, iteration), with_metadata)
        row = {
            "iteration": iteration,
            "wall_time": 1.7e9 + 60 * iteration,
            "seconds/total": 60.0,
            "episodes/reward": 0.2 + 0.6 * iteration / iterations,
        }
        rows.append(row)
        write_record(iteration_folder / ITERATION_METRICS, row)
        print(f"\riteration {iteration + 1} of {iterations}", end="", file=sys.stderr, flush=True)
    directory.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(file=sys.stderr)


# Synthetic runs


METRICS = """episodes/reward episodes/unfinished episodes/response_tokens train/loss train/kl train/entropy
train/grad_norm train/clip_fraction train/learning_rate train/steps engine/tokens_per_second
engine/logprob_gap_mean engine/logprob_gap_max engine/canary_gap engine/canary_mean_gap rollout/sampled_tokens
credit/value_tokens credit/advantage_zero seconds/generation seconds/credit seconds/training seconds/sync
seconds/commit seconds/other seconds/total"""
"""The names of the metrics of synthetic runs."""


def make_runs(folder: Path) -> None:
    """Writes experiments that have metrics and evaluations alone: 200 of 100 iterations, 8 of 20,000."""
    for number in range(200):
        method, seed = divmod(number, 5)
        write_run(folder, f"many/method_{method}/seed_{seed}", seed, method, 100)
    for number in range(8):
        write_run(folder, f"long/run_{number}", number, number, 20_000)


def write_run(folder: Path, name: str, seed: int, method: int, iterations: int) -> None:
    """Writes an experiment with random metrics.

    Args:
        folder: The folder of all experiments.
        name: The name of the experiment.
        seed: The seed in its configuration.
        method: A number that decides about the other settings.
        iterations: The number of iterations.
    """
    from treetune.runtime.directory import SUMMARY, ExperimentDirectory
    from treetune.store.checksums import seal_record, write_record

    names = METRICS.split()
    generator = np.random.default_rng([seed, method])
    run_folder = folder / name
    run_folder.mkdir(parents=True)
    config = {
        "type": "policy_iteration",
        "experiment_name": name,
        "iterations": iterations,
        "seed": seed,
        "credit": {"type": ("monte_carlo", "group", "rloo", "gae")[method % 4]},
        "trainer": {"learning_rate": 1e-6 * (1 + method % 5), "objective": {"type": "ppo"}},
    }
    directory = ExperimentDirectory(run_folder)
    directory.config_file.write_text(json.dumps(config))
    # Random walks, divided by the root of their length.
    walks = generator.normal(size=(iterations, len(names))).cumsum(0)
    values = np.abs(walks) / np.sqrt(np.arange(1, iterations + 1))[:, None]
    with directory.metrics_file.open("w") as file:
        for iteration, values_of_iteration in enumerate(values.tolist()):
            row = {"iteration": iteration, "wall_time": 1.7e9 + iteration}
            row |= dict(zip(names, values_of_iteration, strict=True))
            file.write(json.dumps(seal_record(row)) + "\n")
    for iterations_before in range(0, iterations + 1, iterations // 4):
        evaluation = directory.evaluation_folder(iterations_before, "test")
        evaluation.mkdir(parents=True)
        write_record(evaluation / SUMMARY, {"pass_at_1": float(generator.random()), "n_problems": 500})


# Measurements


@dataclass(frozen=True)
class Page:
    """A page of the viewer, such as ``Page("/run", {"run": "million"})``."""

    path: str
    query: Mapping[str, Any]


@dataclass(frozen=True)
class Viewer:
    """A viewer that runs."""

    opener: OpenerDirector
    origin: str
    """Its address, such as ``http://127.0.0.1:8000``."""
    token: str
    pid: int

    def time_page(self, page: Page) -> tuple[float, float]:
        """Asks for a page.

        Returns:
            The seconds from the request to the last byte of its answer, and the viewer's seconds of processor
            time meanwhile, over all cores.
        """
        query = urlencode({**page.query, "token": self.token}, doseq=True)
        start, processor_start = time.monotonic(), self._read_processor_seconds()
        with self.opener.open(f"{self.origin}{page.path}?{query}", timeout=600) as answer:
            answer.read()
        return time.monotonic() - start, self._read_processor_seconds() - processor_start

    def time_page_repeatedly(self, page: Page) -> str:
        """Asks for a page `TIMES` times, and returns the cells of the table.

        These are the median and the largest of the seconds, and the median of processor time.
        """
        seconds, processor_seconds = [], []
        for _ in range(TIMES):
            wall, processor = self.time_page(page)
            seconds.append(wall)
            processor_seconds.append(processor)
        median, median_processor = statistics.median(seconds), statistics.median(processor_seconds)
        return f"{median:.2f}, {max(seconds):.2f} | {median_processor:.2f}"

    def _read_processor_seconds(self) -> float:
        # Fields are counted after the name, which is in parentheses and may contain spaces.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        user_ticks, system_ticks = int(fields[11]), int(fields[12])
        return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")


Measure = Callable[[Viewer, Path, Path], None]
"""Prints a table of measurements. Its arguments are the viewer, the folder and the viewer's cache."""


def start_viewer_and_measure(folder: Path, cache: Path, measure: Measure) -> None:
    """Starts a viewer, and prints its start time, the table and its memory, in Markdown."""
    command = [sys.executable, str(Path(__file__).parents[1] / "src/treetune/main.py"), "view", str(folder)]
    environment = {**os.environ, "TREETUNE_VIEWER_CACHE": str(cache)}
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            address = re.match(r"(http://[^/]+)/\?token=(\S+)", process.stdout.readline())
            assert address, "the viewer said no address"
            print(f"The viewer answers {time.monotonic() - start:.1f} s after its start.\n")
            opener = build_opener(HTTPCookieProcessor(CookieJar()))
            measure(Viewer(opener, address[1], address[2], process.pid), folder, cache)
            status = Path(f"/proc/{process.pid}/status").read_text()
            memory = dict(re.findall(r"^(Vm\w+):\s+(\d+) kB", status, re.M))
            print(f"\nMemory of the viewer: {int(memory['VmHWM']) / 2**10:.0f} MiB at most (VmHWM).")
        finally:
            process.terminate()


def measure_answers(viewer: Viewer, folder: Path, cache: Path) -> None:
    """Waits for the index of all answers, and measures pages of a run with many answers."""
    name = folder.name
    files = len(list(folder.glob("iterations/*/trajectories.arrow")))
    all_answers = {"run": name, "of": "everything"}
    first_page = Page("/answers", all_answers)
    had_index = count_indexes(cache) == files
    start = time.monotonic()
    seconds, processor_seconds = viewer.time_page(first_page)
    while count_indexes(cache) < files:
        if time.monotonic() - start > LONGEST_INDEX_S:
            sys.exit(f"only {count_indexes(cache)} of {files} indexes were made in {LONGEST_INDEX_S} s")
        time.sleep(1)
    print_load()
    print("| what | seconds: median, slowest of 5 | of processor time |\n|---|---|---|")
    if not had_index:
        print(f"| page of answers, when none has an index | {seconds:.2f} | {processor_seconds:.2f} |")
        print(f"| index of all answers, in the background | {time.monotonic() - start:.0f} | |")
    last_page = files * PER_ITERATION // ON_A_PAGE
    iteration = f"i{min(57, files)}"
    answer = {"run": name, "source": iteration, "answer": "train/777#3"}
    pages = {
        "experiments": Page("/", {}),
        "curves": Page("/run", {"run": name}),
        "first page of answers": first_page,
        "the last page": answers_page(all_answers, page=last_page),
        "filter: wrong and cut off": answers_page(all_answers, verdict="wrong", unfinished="1"),
        "filter: a number": answers_page(all_answers, where="advantage_least < -0.9"),
        "sort by a number": answers_page(all_answers, sort="logprob_least"),
        "filter and sort": answers_page(all_answers, verdict="wrong", sort="advantage_least"),
        "search: a word that 100 answers have": answers_page(all_answers, search=RARE),
        "search: two letters that most have": answers_page(all_answers, search="an"),
        "search: a word that none has": answers_page(all_answers, search="no such word"),
        "one answer, among those to its problem": Page("/answer", answer),
        "one answer, in a list of all": Page("/answer", {**answer, **all_answers}),
        "its credit": Page("/answer", {**answer, "as": "credit"}),
        "problems of an iteration": Page("/problems", {"run": name, "of": iteration}),
        "problems of everything": Page("/problems", all_answers),
        "histograms above all answers": Page("/answers/histograms", all_answers),
    }
    for title, page in pages.items():
        print(f"| {title} | {viewer.time_page_repeatedly(page)} |", flush=True)


def answers_page(answers: Mapping[str, Any], **query: Any) -> Page:
    """Returns a page of a list of answers, with further keys of the query."""
    return Page("/answers", {**answers, **query})


def count_indexes(cache: Path) -> int:
    """Returns the number of finished indexes."""
    return len(list(cache.glob("*/*/about.json")))


def measure_runs(viewer: Viewer, folder: Path, cache: Path) -> None:
    """Measures pages of many runs, and of long ones."""
    long_runs = [f"long/run_{number}" for number in range(8)]
    grouped = {"group": "credit.type", "column": ["seed", "sampled tokens of answers"]}
    pages = {
        "experiments: 208": Page("/", {}),
        "grouped by a key, with two more columns": Page("/", grouped),
        "grouped by all but the seed": Page("/", {"group": "setting"}),
        "curves of 8 × 20,000 iterations": curves_page(long_runs),
        "the same over sampled tokens": curves_page(long_runs, over="sampled tokens"),
        "the same over seconds": curves_page(long_runs, over="seconds in iterations"),
        "one metric of them": curves_page(long_runs, metric="train/kl"),
    }
    print_load()
    print("| what | first look, of processor time | seconds: median, slowest of 5 | of processor time |")
    print("|---|---|---|---|")
    for title, page in pages.items():
        _, first_processor_seconds = viewer.time_page(page)
        cells = viewer.time_page_repeatedly(page)
        print(f"| {title} | {first_processor_seconds:.2f} | {cells} |", flush=True)


def curves_page(runs: Sequence[str], **query: str) -> Page:
    """Returns the page with the curves of some runs, with further keys of the query."""
    return Page("/run", {"run": runs, **query})


def print_load() -> None:
    print(f"Load of the machine's {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}.\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("make", "measure", "runs"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=f"of {PER_ITERATION} answers each")
    parser.add_argument("--different", type=int, default=DIFFERENT, help="iterations that are no copies")
    parser.add_argument("--tokens", type=int, default=TOKENS_EACH, help="of an answer")
    parser.add_argument("--cache", type=Path, help="of the viewer's index; default: beside the folder")
    options = parser.parse_args()
    if options.what == "make":
        make_answers(options.folder, options.iterations, options.different, options.tokens)
        return
    if options.what == "runs" and not options.folder.exists():
        make_runs(options.folder)
    cache = options.cache or options.folder.with_name(f"{options.folder.name}.index")
    measure = measure_runs if options.what == "runs" else measure_answers
    start_viewer_and_measure(options.folder, cache, measure)


if __name__ == "__main__":
    main()
