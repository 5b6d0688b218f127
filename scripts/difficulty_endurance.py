"""Difficulty of two thousand rows in four shards, two of them killed and a server too; a filter; training.

    python scripts/difficulty_endurance.py [--rows N] [--work DIR] [--output docs/results/difficulty.md]

A tiny model learns a little addition, two thousand rows of additions are written in the schema of many
domains, and its difficulty for them is estimated twice on real servers: undisturbed, and with SIGKILL for the
jobs of two shards and for the engine process of a third one's server. Told are: whether both gave the same
bytes, how often each answer was asked for, what the filter took, and a few iterations of training on the rows
that are left. Some twenty minutes on two idle cores; a folder that is there already is gone on with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from treetune.data_pipeline.difficulty.merging import text_histogram  # noqa: E402
from treetune.data_pipeline.difficulty.shard import (  # noqa: E402
    ANSWERS,
    DONE,
    PROGRESS,
    shard_folder,
)
from treetune.inference.guard import descendants  # noqa: E402

MAIN = ROOT / "src" / "treetune" / "main.py"
SHARDS, SAMPLES, ITERATIONS = 4, 8, 8
COMPARED = ("rates.parquet", "rows.parquet", "summary.json", "histogram.svg", "histogram.png")
ADDITION = "{task+: {count: 2, digits: 2, train_size: %d}}"
SFT_ITERATIONS = 10
SFT = (
    f"{{iterations: {SFT_ITERATIONS}, problems_per_iteration: 2500, evaluation: {{sets: []}},"
    f" checkpoints: {{every: {SFT_ITERATIONS}}}}}"
)
ROUTES = {"": {"type": "final_answer", "marker": "#"}}
PATIENCE_S = 1800.0


def run(*words: str, **environment: str) -> None:
    subprocess.run([sys.executable, str(MAIN), *words], check=True, env={**os.environ, **environment})


@dataclass(frozen=True)
class Killed:
    """Whom SIGKILL met, and how much of the shard's answers were there."""

    what: str
    shard: int
    answered: int
    total: int


def estimate(work: Path, name: str) -> list[str]:
    config = {
        "type": "estimate_difficulty",
        "task": {"type": "rows", "routes": ROUTES},
        "policy": {
            "type": "served",
            "model": {"type": "pretrained", "name_or_path": str(policy(work))},
            "engine": {
                "type": "vllm",
                "omp_threads": 1,
                "max_num_seqs": 64,
                "max_concurrency": 64,
                "prefix_caching": False,
                "start_timeout": 900.0,
            },
            "context_length": 96,
        },
        "answers": {"samples": SAMPLES, "max_tokens": 24, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "shards": SHARDS,
        "jobs": {"type": "local", "at_once": 2},
    }
    file = work / "estimate.jsonnet"
    file.write_text(json.dumps(config, indent=1))
    words = ["--configs", str(file), "estimate_difficulty", "--input", str(work / "rows.parquet")]
    return [*words, "--output", str(work / name)]


def policy(work: Path) -> Path:
    return work / "experiments" / "quickstart" / "sft" / "checkpoints" / f"{SFT_ITERATIONS:04d}" / "policy"


def disturbed(work: Path) -> list[Killed]:
    """The command, with the jobs of shards 0 and 1 killed, then the server of shard 2."""
    output, record = work / "disturbed", work / "killed.json"
    if record.is_file():
        return [Killed(**one) for one in json.loads(record.read_text())]
    killed: list[Killed] = []
    with subprocess.Popen([sys.executable, str(MAIN), *estimate(work, output.name)]) as command:
        for shard, what in ((0, "job"), (1, "job"), (2, "server")):
            answered, total = wait_for_a_part(output, shard, command)
            job = job_of(command.pid, shard)
            victim = job if what == "job" else engine_below(job)
            os.kill(victim, signal.SIGKILL)
            killed.append(Killed(what, shard, answered, total))
            print(f"{what} of shard {shard} killed after {answered} of {total} answers", flush=True)
    if command.returncode:
        sys.exit(f"the command ended with code {command.returncode}")
    record.write_text(json.dumps([vars(one) for one in killed]))
    return killed


def wait_for_a_part(output: Path, shard: int, command: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Until some of the shard's answers are there, and not all."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and command.poll() is None:
        folder = shard_folder(output, shard)
        total = _json(folder / PROGRESS).get("total", 0)
        path = folder / ANSWERS
        answered = path.read_bytes().count(b"\n") if path.is_file() else 0
        if (folder / DONE).is_file():
            sys.exit(f"shard {shard} was done before it could be disturbed: take more rows")
        if total and answered > total // 8:
            return answered, total
        time.sleep(0.02)
    sys.exit(f"shard {shard} answered nothing")


def job_of(command: int, shard: int) -> int:
    for pid in descendants(command):
        words = _words(pid)
        if "--shard" in words and words[words.index("--shard") + 1] == str(shard):
            return pid
    sys.exit(f"no job works on shard {shard}")


def engine_below(job: int) -> int:
    for pid in descendants(job):
        if _words(pid) and _words(pid)[0].startswith("VLLM::EngineCore"):
            return pid
    sys.exit("no engine process runs below the job")


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def asked_twice(output: Path) -> int:
    """Answers that stand more than once in the journals."""
    twice = 0
    for shard in range(SHARDS):
        lines = (shard_folder(output, shard) / ANSWERS).read_text().splitlines()
        places = Counter((row["row"], row["sample"]) for row in map(json.loads, lines))
        twice += sum(count - 1 for count in places.values())
    return twice


def digests(output: Path) -> dict[str, str]:
    return {name: hashlib.sha256((output / name).read_bytes()).hexdigest()[:16] for name in COMPARED}


def filtered(work: Path) -> dict[str, Any]:
    rates = str(work / "undisturbed")
    rule = {"type": "pass_rates", "strong": rates, "weak": rates, "low": 0.0, "high": 1.0}
    file = work / "filter.jsonnet"
    file.write_text(json.dumps({"type": "filter_data", "rules": [rule]}, indent=1))
    output = work / "filtered"
    words = ["--configs", str(file), "filter_data", "--input", str(work / "rows.parquet")]
    run(*words, "--output", str(output))
    return _json(output / "summary.json")


def trained(work: Path) -> list[dict[str, Any]]:
    """The metrics of a few iterations of GRPO on the rows that are left."""
    task = {
        "type": "rows",
        "train": [str(work / "filtered" / "rows.parquet")],
        "routes": ROUTES,
        "steps": {"type": "lines"},
    }
    changes = {
        "experiment_name": "difficulty/grpo",
        "task": task,
        "model": {"type": "pretrained", "name_or_path": str(policy(work))},
        "iterations": ITERATIONS,
        "evaluation": {"sets": []},
        "checkpoints": {"every": ITERATIONS},
    }
    words = ["--configs", str(ROOT / "configs/quickstart/grpo.jsonnet"), "--override", json.dumps(changes)]
    words += ["--override", "{trainer+: {schedule+: {steps: 2}}}"]
    run(*words, "run_iteration_loop", APP_DIRECTORY=str(work / "experiments"))
    lines = (work / "experiments" / "difficulty" / "grpo" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def report(work: Path, rows: int, killed: list[Killed]) -> str:
    undisturbed, disturbed_ = work / "undisturbed", work / "disturbed"
    one, other = digests(undisturbed), digests(disturbed_)
    summary = _json(undisturbed / "summary.json")
    took = _json(work / "filtered" / "summary.json")
    metrics = (work / "experiments" / "difficulty" / "grpo" / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["episodes/reward"] for line in metrics]
    kills = [
        f"| {kill.what} of shard {kill.shard} | {kill.answered:,} of {kill.total:,} |" for kill in killed
    ]
    rules = [
        f"| {rule['rule']} | {rule['rows']:,} | {rule['dropped']:,} | {rule['left']:,} |"
        for rule in took["rules"]
    ]
    return "\n".join(
        [
            "# Difficulty, with two shards and a server killed",
            "",
            f"`python scripts/difficulty_endurance.py --rows {rows}`, on {os.cpu_count()} cores of"
            f" {platform.machine()}: additions of two two-digit numbers, a model of 0.9 million weights",
            f"that learned some of them, {SAMPLES} answers to each row, {SHARDS} shards, two jobs side by"
            " side, each with a vLLM server.",
            "",
            "| SIGKILL met | answers of the shard that were there |",
            "|---|---|",
            *kills,
            "",
            "| | undisturbed | disturbed |",
            "|---|---|---|",
            f"| answers | {summary['answers']:,} | {_json(disturbed_ / 'summary.json')['answers']:,} |",
            f"| answers that stand in the journals twice | {asked_twice(undisturbed)} |"
            f" {asked_twice(disturbed_)} |",
            *(f"| SHA-256 of {name} | {one[name]} | {other[name]} |" for name in COMPARED),
            "",
            "What a job had sampled and not yet written when it died was sampled again, to the same tokens:",
            f"seeds come from the row and the answer. Mean pass rate {summary['pass_rate']:.3f}; bins:",
            "",
            "```",
            *text_histogram(summary["bins"]),
            "```",
            "",
            "`filter_data`, with this model in both roles: rows that it never or always solves go.",
            "",
            "| rule | rows | dropped | left |",
            "|---|---|---|---|",
            *rules,
            "",
            "GRPO on the rows that are left (task `rows`), 64 of them an iteration with 8 answers each: mean",
            "reward " + ", ".join(f"{reward:.3f}" for reward in rewards) + ".",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "difficulty")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not policy(work).is_dir():
        words = ["--configs", str(ROOT / "configs/quickstart/sft.jsonnet")]
        changes = ["--override", ADDITION % 2500, "--override", SFT]
        run(*words, *changes, "run_iteration_loop", APP_DIRECTORY=str(work / "experiments"))
    addition = ["--configs", str(ROOT / "configs/tasks/addition_chain.jsonnet")]
    changes = ["--override", ADDITION % arguments.rows]
    run(*addition, *changes, "export_rows", "--split", "train", "--output", str(work / "rows.parquet"))
    run(*estimate(work, "undisturbed"))
    killed = disturbed(work)
    filtered(work)
    trained(work)
    text = report(work, arguments.rows, killed)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)
    if digests(work / "undisturbed") != digests(work / "disturbed"):
        sys.exit("the two estimates differ")
    if asked_twice(work / "undisturbed") or asked_twice(work / "disturbed"):
        sys.exit("an answer was asked for twice")


if __name__ == "__main__":
    main()
