#!/usr/bin/env python
"""How quick the viewer is on a million synthetic answers: makes a folder of them, asks a viewer, measures.

    python benchmarks/viewer_bench.py make /scratch/million            # under 1 GB
    python benchmarks/viewer_bench.py measure /scratch/million         # starts a viewer, waits for its index
    python benchmarks/viewer_bench.py make /scratch/long --iterations 5 --different 1 --tokens 16000
    python benchmarks/viewer_bench.py runs /scratch/runs               # 200 runs; 8 × 20,000 iterations

The answers are made of sentences from a pool, with token ids, log-probs and advantages that go with them,
and are written in the format of a run; ten iterations are made, and each is there ten times. What is
measured is the time from a request to the last byte of its answer.
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
from collections.abc import Callable
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import numpy as np

ITERATIONS, PER_ITERATION, TOKENS_EACH = 100, 10_000, 500
SENTENCE, SENTENCES, VOCABULARY = 20, 200, 32_000
SAMPLES = 8
DIFFERENT = 10
"""Iterations that are made where nothing else is said; the others are copies of these."""
TIMES = 5
LONGEST_INDEX_S = 3600
ON_A_PAGE = 50
"""Answers on a page of the viewer, as it is."""
RARE = "zyzzyva"


def make(folder: Path, iterations: int, different: int = DIFFERENT, tokens: int = TOKENS_EACH) -> None:
    """An experiment of `iterations` × `PER_ITERATION` answers of so many tokens."""
    import pyarrow as pa

    from treetune.rollouts import rows as columns
    from treetune.store.checksums import SealingFile, write_record
    from treetune.store.files import whole_file
    from treetune.vocabulary import Episode, Grade, Problem, Segment, Trajectory

    random = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(random.choice(letters, random.integers(1, 7))) for _ in range(VOCABULARY)]
    ids = random.zipf(1.3, (SENTENCES, SENTENCE)) % VOCABULARY
    ids = ids.astype(np.int32)
    texts = [" ".join(words[i] for i in row) + ".\n" for row in ids]
    logprobs = np.round(-random.exponential(0.5, (SENTENCES, SENTENCE)), 3).astype(np.float32)
    in_each = tokens // SENTENCE
    ends = np.arange(SENTENCE, tokens + 1, SENTENCE)

    example = Trajectory(
        Problem("p", "", ""), 0, ids[0], (Segment(ids[0], logprobs=logprobs[0], policy_version=0),), "stop",
        "",
        Grade(0.0, "ok", numbers={"tests_passed": 1.0}), (SENTENCE,), numbers={"lines/count": 25.0},
    )  # fmt: skip
    credited = Episode(
        ids[0], ids[0], [True] * SENTENCE, 0.0, "p", "p#0", 0, advantages=logprobs[0].astype(float),
        behaviour_logprobs=logprobs[0], step_ends=(SENTENCE,), step_values=(0.5,),
    )  # fmt: skip
    kinds = {
        "trajectories": columns.trajectory_schema([example]),
        "episodes": columns.episode_schema([credited], None),
    }
    kinds["episodes"] = kinds["episodes"].append(pa.field("prompt", pa.string()))
    options = pa.ipc.IpcWriteOptions(compression="zstd")

    def lists(values: np.ndarray, each: int, kind: Any) -> Any:
        count = len(values) // each
        offsets = pa.array(np.arange(count + 1) * each, pa.int32())
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind.value_type), type=kind)

    def batch(kind: str, start: int, count: int, iteration: int) -> Any:
        schema = kinds[kind]
        draw = np.random.default_rng([iteration, start])
        chosen = draw.integers(0, SENTENCES, (count, in_each))
        said = ["".join(texts[i] for i in row) for row in chosen]
        if start == 0:
            said[3] += f"{RARE} {iteration}"
        numbers = np.arange(start, start + count)
        problem = [f"train/{number // SAMPLES}" for number in numbers]
        names = [f"{one}#{number % SAMPLES}" for one, number in zip(problem, numbers)]
        score = (draw.random(count) < 0.2 + 0.6 * iteration / iterations).astype(float)
        reason = np.where(draw.random(count) < 0.05, "length", "stop").tolist()
        flat_ids, flat_logprobs = ids[chosen].reshape(-1), logprobs[chosen].reshape(-1)
        prompts = [f"What is {number} + {iteration}?" for number in numbers // SAMPLES]
        step_values = np.round(draw.random((count, in_each)), 1)
        advantages = np.diff(np.concatenate([step_values, score[:, None]], axis=1), axis=1)
        made: dict[str, Any] = {}
        if kind == "trajectories":
            segment = schema.field("segments").type.value_type
            own = {
                "token_ids": lists(flat_ids, tokens, segment.field("token_ids").type),
                "origin": pa.array(["sampled"] * count),
                "logprobs": lists(flat_logprobs, tokens, segment.field("logprobs").type),
                "policy_version": pa.array([iteration] * count, pa.int64()),
                "branch": columns.branches([()] * count),
                "seconds": pa.array([1.0] * count, pa.float64()),
            }
            parts = [own[field.name] for field in segment]
            made["segments"] = columns.nested(
                [1] * count, pa.StructArray.from_arrays(parts, fields=list(segment))
            )
            made["problem"] = [
                {"id": one, "prompt": prompt, "gold": "0", "data": "{}"}
                for one, prompt in zip(problem, prompts)
            ]
            made["sample"] = numbers % SAMPLES
            made["prompt_ids"] = [[1, 2, 3]] * count
            made["grade"] = [
                {"reward": x, "outcome": "ok", "extracted": str(x), "seconds": 0.0, "message": None,
                 "numbers": [("tests_passed", 10 * x)]} for x in score
            ]  # fmt: skip
            made["bonus"] = np.zeros(count)
            made["numbers"] = [[("lines/count", 25.0)]] * count
        else:
            made["prompt_ids"] = [[1, 2, 3]] * count
            made["response_ids"] = lists(flat_ids, tokens, columns.IDS)
            made["trained"] = lists(np.ones(count * tokens, bool), tokens, columns.MASK)
            made |= {
                "reward": score,
                "score": score,
                "group": problem,
                "trajectory": names,
                "prompt": prompts,
            }
            made["policy_version"] = [iteration] * count
            made["advantages"] = lists(np.repeat(advantages.reshape(-1), SENTENCE), tokens, columns.NUMBERS)
            made["behaviour_logprobs"] = lists(flat_logprobs, tokens, schema.field("behaviour_logprobs").type)
            made["step_values"] = lists(step_values.reshape(-1), in_each, columns.NUMBERS)
            made |= {"pair": [None] * count, "chosen": [None] * count, "stretches": [[]] * count}
        made |= {"finish_reason": reason, "text": said}
        made["step_ends"] = lists(np.tile(ends, count), in_each, columns.IDS)
        arrays = [v if isinstance(v := made[f.name], pa.Array) else pa.array(v, f.type) for f in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "type": "policy_iteration", "experiment_name": folder.name, "iterations": iterations, "seed": 1,
        "credit": {"type": "monte_carlo"}, "trainer": {"objective": {"type": "ppo"}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rows = []
    for iteration in range(iterations):
        place = folder / "iterations" / f"{iteration:04d}"
        for kind, schema in kinds.items():
            if iteration >= different:
                place.mkdir(parents=True, exist_ok=True)
                same = folder / "iterations" / f"{iteration % different:04d}" / f"{kind}.arrow"
                shutil.copyfile(same, place / f"{kind}.arrow")
                continue
            described = schema.with_metadata({"treetune": kind, "rows": str(PER_ITERATION)})
            with whole_file(place / f"{kind}.arrow", "wb", durable=False) as file:
                sealing = SealingFile(file)
                with pa.ipc.new_stream(sealing, described, options=options) as writer:
                    for start in range(0, PER_ITERATION, 1024):
                        count = min(1024, PER_ITERATION - start)
                        writer.write_batch(
                            batch(kind, start, count, iteration).replace_schema_metadata(described.metadata)
                        )
                sealing.seal()
        rows.append({"iteration": iteration, "wall_time": 1.7e9 + 60 * iteration, "seconds/total": 60.0,
                     "episodes/reward": 0.2 + 0.6 * iteration / iterations})  # fmt: skip
        write_record(place / "metrics.json", rows[-1])
        print(f"\riteration {iteration + 1} of {iterations}", end="", file=sys.stderr, flush=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(file=sys.stderr)


METRICS = """episodes/reward episodes/unfinished episodes/response_tokens train/loss train/kl train/entropy
train/grad_norm train/clip_fraction train/learning_rate train/steps engine/tokens_per_second
engine/logprob_gap_mean engine/logprob_gap_max engine/canary_gap engine/canary_mean_gap rollout/sampled_tokens
credit/value_tokens credit/advantage_zero seconds/generation seconds/credit seconds/training seconds/sync
seconds/commit seconds/other seconds/total"""


def make_runs(folder: Path) -> None:
    """Experiments with metrics and evaluations alone: 200 of 100 iterations, and 8 of 20,000."""
    from treetune.store.checksums import sealed, write_record

    names = METRICS.split()
    runs = [(f"many/method_{k // 5}/seed_{k % 5}", k % 5, k // 5, 100) for k in range(200)]
    for name, seed, kind, iterations in [*runs, *((f"long/run_{k}", k, k, 20_000) for k in range(8))]:
        path, random = folder / name, np.random.default_rng([seed, kind])
        path.mkdir(parents=True)
        config = {
            "type": "policy_iteration", "experiment_name": name, "iterations": iterations, "seed": seed,
            "credit": {"type": ("monte_carlo", "group", "rloo", "gae")[kind % 4]},
            "trainer": {"learning_rate": 1e-6 * (1 + kind % 5), "objective": {"type": "ppo"}},
        }  # fmt: skip
        (path / "config.json").write_text(json.dumps(config))
        steps = random.normal(size=(iterations, len(names))).cumsum(0)
        values = np.abs(steps) / np.sqrt(np.arange(1, iterations + 1))[:, None]
        with (path / "metrics.jsonl").open("w") as file:
            for i, row in enumerate(values.tolist()):
                own = {"iteration": i, "wall_time": 1.7e9 + i, **dict(zip(names, row))}
                file.write(json.dumps(sealed(own)) + "\n")
        for done in range(0, iterations + 1, iterations // 4):
            place = path / "evaluations" / f"{done:04d}" / "test"
            place.mkdir(parents=True)
            write_record(place / "summary.json", {"pass_at_1": float(random.random()), "n_problems": 500})


def _measure_runs(asking: Asking, folder: Path, cache: Path) -> None:
    eight = [f"long/run_{k}" for k in range(8)]
    grouped = {"group": "credit.type", "column": ["seed", "sampled tokens of answers"]}
    questions: dict[str, tuple[str, dict[str, Any]]] = {
        "experiments: 208": ("/", {}),
        "grouped by a key, with two more columns": ("/", grouped),
        "grouped by all but the seed": ("/", {"group": "setting"}),
        "curves of 8 × 20,000 iterations": ("/run", {"run": eight}),
        "the same over sampled tokens": ("/run", {"run": eight, "over": "sampled tokens"}),
        "the same over seconds": ("/run", {"run": eight, "over": "seconds in iterations"}),
        "one metric of them": ("/run", {"run": eight, "metric": "train/kl"}),
    }
    print(f"Load of the machine's {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}.\n")
    print("| what | first look, of processor time | seconds: median, slowest of 5 | of processor time |")
    print("|---|---|---|---|")
    for words, (path, query) in questions.items():
        first = asking.seconds(path, **query)[1]
        seconds, computed = zip(*(asking.seconds(path, **query) for _ in range(TIMES)))
        measured = f"{statistics.median(seconds):.2f}, {max(seconds):.2f} | {statistics.median(computed):.2f}"
        print(f"| {words} | {first:.2f} | {measured} |", flush=True)


def measure(folder: Path, cache: Path, ask: Callable[[Asking, Path, Path], None]) -> None:
    """Prints a table in Markdown."""
    command = [sys.executable, str(Path(__file__).parents[1] / "src/treetune/main.py"), "view", str(folder)]
    environment = {**os.environ, "TREETUNE_VIEWER_CACHE": str(cache)}
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as viewer:
        try:
            assert viewer.stdout is not None
            address = re.match(r"(http://[^/]+)/\?token=(\S+)", viewer.stdout.readline())
            assert address, "the viewer said no address"
            print(f"The viewer answers {time.monotonic() - started:.1f} s after its start.\n")
            opener = build_opener(HTTPCookieProcessor(CookieJar()))
            ask(Asking(opener, address[1], address[2], viewer.pid), folder, cache)
            status = Path(f"/proc/{viewer.pid}/status").read_text()
            memory = dict(re.findall(r"^(Vm\w+):\s+(\d+) kB", status, re.M))
            print(f"\nMemory of the viewer: {int(memory['VmHWM']) / 2**10:.0f} MiB at most (VmHWM).")
        finally:
            viewer.terminate()


@dataclass(frozen=True)
class Asking:
    opener: OpenerDirector
    origin: str
    token: str
    process: int

    def seconds(self, path: str, **query: Any) -> tuple[float, float]:
        """From the request to the last byte of its answer; and of processor time, over all cores."""
        query["token"] = self.token
        address = f"{self.origin}{path}?{urlencode(query, doseq=True)}"
        began, computed = time.monotonic(), self._computed()
        with self.opener.open(address, timeout=600) as answer:
            answer.read()
        return time.monotonic() - began, self._computed() - computed

    def _computed(self) -> float:
        times = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _measure(asking: Asking, folder: Path, cache: Path) -> None:
    files = len(list(folder.glob("iterations/*/trajectories.arrow")))
    name, everything = folder.name, {"run": folder.name, "of": "everything"}
    had_index = len(list(cache.glob("*/*/about.json"))) == files
    began = time.monotonic()
    first = asking.seconds("/answers", **everything)
    while (made := len(list(cache.glob("*/*/about.json")))) < files:
        if time.monotonic() - began > LONGEST_INDEX_S:
            sys.exit(f"only {made} of {files} indexes were made in {LONGEST_INDEX_S} s")
        time.sleep(1)
    print(f"Load of the machine's {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}.\n")
    print("| what | seconds: median, slowest of 5 | of processor time |\n|---|---|---|")
    if not had_index:
        print(f"| page of answers, when none has an index | {first[0]:.2f} | {first[1]:.2f} |")
        print(f"| index of all answers, in the background | {time.monotonic() - began:.0f} | |")
    one = {"run": name, "source": f"i{min(57, files)}", "answer": "train/777#3"}
    questions: dict[str, tuple[str, dict[str, Any]]] = {
        "experiments": ("/", {}),
        "curves": ("/run", {"run": name}),
        "first page of answers": ("/answers", everything),
        "the last page": ("/answers", {**everything, "page": files * PER_ITERATION // ON_A_PAGE}),
        "filter: wrong and cut off": ("/answers", {**everything, "verdict": "wrong", "unfinished": "1"}),
        "filter: a number": ("/answers", {**everything, "where": "advantage_least < -0.9"}),
        "sort by a number": ("/answers", {**everything, "sort": "logprob_least"}),
        "filter and sort": ("/answers", {**everything, "verdict": "wrong", "sort": "advantage_least"}),
        "search: a word that 100 answers have": ("/answers", {**everything, "search": RARE}),
        "search: two letters that most have": ("/answers", {**everything, "search": "an"}),
        "search: a word that none has": ("/answers", {**everything, "search": "no such word"}),
        "one answer, among those to its problem": ("/answer", one),
        "one answer, in a list of all": ("/answer", {**one, **everything}),
        "its credit": ("/answer", {**one, "as": "credit"}),
        "problems of an iteration": ("/problems", {"run": name, "of": one["source"]}),
        "problems of everything": ("/problems", everything),
        "histograms above all answers": ("/answers/histograms", everything),
    }
    for words, (path, query) in questions.items():
        seconds, computed = zip(*(asking.seconds(path, **query) for _ in range(TIMES)))
        measured = f"{statistics.median(seconds):.2f}, {max(seconds):.2f} | {statistics.median(computed):.2f}"
        print(f"| {words} | {measured} |", flush=True)


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
        make(options.folder, options.iterations, options.different, options.tokens)
        return
    if options.what == "runs" and not options.folder.exists():
        make_runs(options.folder)
    cache = options.cache or options.folder.with_name(f"{options.folder.name}.index")
    measure(options.folder, cache, _measure_runs if options.what == "runs" else _measure)


if __name__ == "__main__":
    main()
