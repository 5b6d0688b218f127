"""Difficulty of two thousand rows in four shards, two of them killed and a server too; a filter; training.

    python tests/endurance/difficulty_endurance.py [--rows N] [--work DIR] [--only address] [--output FILE]

Two thousand additions are written in the schema of many domains, and their difficulty is estimated twice,
each time undisturbed and with SIGKILL for the jobs of two shards and for a server. First at an address of
this script's own, whose server keeps book of what it is asked; then on vLLM servers, with a tiny model that
learned a little addition, whose engine process is killed. Told are: whether both gave the same bytes, how
often each answer was asked for, what the filter took, and a few iterations of training on the rows that are
left.

`--only address` leaves the servers and the training out, and takes two minutes; all takes some twenty on two
idle cores. A folder that is there already is gone on with.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.bookkeeping import Address, address  # noqa: E402
from treetune.inference.guard import descendants  # noqa: E402
from treetune_data.difficulty.merging import text_histogram  # noqa: E402
from treetune_data.difficulty.shard import (  # noqa: E402
    ANSWERS,
    DONE,
    PROGRESS,
    shard_folder,
)

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
CONCURRENCY = 8


def run(*words: str, **environment: str) -> None:
    subprocess.run([sys.executable, str(MAIN), *words], check=True, env={**os.environ, **environment})


@dataclass(frozen=True)
class Killed:
    """Whom SIGKILL met, and how much of the shard's answers were there."""

    what: str
    shard: int
    answered: int
    total: int


# Estimates


def estimate(work: Path, output: Path, policy: dict[str, Any]) -> list[str]:
    config = {
        "type": "estimate_difficulty",
        "task": {"type": "rows", "routes": ROUTES},
        "policy": policy,
        "answers": {"samples": SAMPLES, "max_tokens": 24, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "shards": SHARDS,
        "jobs": {"type": "local", "at_once": 2},
    }
    file = work / f"{output.name}.jsonnet"
    file.write_text(json.dumps(config, indent=1))
    words = ["--configs", str(file), "estimate_difficulty", "--input", str(work / "rows.parquet")]
    return [*words, "--output", str(output)]


def at_address(port: int) -> dict[str, Any]:
    one = {"base_url": f"http://127.0.0.1:{port}/v1", "model": "scripted", "concurrency": CONCURRENCY}
    return {"type": "endpoint", "addresses": [{**one, "retries": 10, "backoff": 0.5, "give_up_after": 100}]}


def served(work: Path) -> dict[str, Any]:
    engine = {"type": "vllm", "omp_threads": 1, "max_num_seqs": 64, "max_concurrency": 64}
    return {
        "type": "served",
        "model": {"type": "pretrained", "name_or_path": str(policy(work))},
        "engine": {**engine, "prefix_caching": False, "start_timeout": 900.0},
        "context_length": 96,
    }


def policy(work: Path) -> Path:
    return work / "experiments" / "quickstart" / "sft" / "checkpoints" / f"{SFT_ITERATIONS:04d}" / "policy"


def disturbed(words: list[str], output: Path, kill_server: Callable[[int], None]) -> list[Killed]:
    """The command, with the jobs of shards 0 and 1 killed, then the server of shard 2."""
    record = output.with_name(f"{output.name}_killed.json")
    if record.is_file():
        return [Killed(**one) for one in json.loads(record.read_text())]
    killed: list[Killed] = []
    with subprocess.Popen([sys.executable, str(MAIN), *words]) as command:
        for shard, what in ((0, "job"), (1, "job"), (2, "server")):
            answered, total = wait_for_a_part(output, shard, command)
            job = job_of(command.pid, shard)
            if what == "job":
                os.kill(job, signal.SIGKILL)
            else:
                kill_server(job)
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


def kill_engine_below(job: int) -> None:
    for pid in descendants(job):
        if _words(pid) and _words(pid)[0].startswith("VLLM::EngineCore"):
            os.kill(pid, signal.SIGKILL)
            return
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


def written_twice(output: Path) -> int:
    """Answers that stand more than once in the journals."""
    twice = 0
    for shard in range(SHARDS):
        lines = (shard_folder(output, shard) / ANSWERS).read_text().splitlines()
        places = Counter((row["row"], row["sample"]) for row in map(json.loads, lines))
        twice += sum(count - 1 for count in places.values())
    return twice


def digests(output: Path) -> dict[str, str]:
    return {name: hashlib.sha256((output / name).read_bytes()).hexdigest()[:16] for name in COMPARED}


# The three parts


def part_at_an_address(work: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("address_undisturbed", "address_disturbed"):
        output = work / name
        if _json(work / f"{name}.json"):
            found[name] = _json(work / f"{name}.json")
            continue
        with address(work / f"{name}.book") as server:
            words = estimate(work, output, at_address(server.port))
            killed: list[Killed] = []
            if name.endswith("undisturbed"):
                run(*words)
            else:

                def kill_and_start(job: int, server: Address = server) -> None:
                    server.kill()
                    time.sleep(2.0)
                    server.start()

                killed = disturbed(words, output, kill_and_start)
            asked = server.asked()
        found[name] = {
            **described(output, killed),
            "asked": sum(asked.values()),
            "asked_twice": sum(count - 1 for count in asked.values()),
        }
        (work / f"{name}.json").write_text(json.dumps(found[name]))
    return found


def part_on_servers(work: Path) -> dict[str, Any]:
    if not policy(work).is_dir():
        words = ["--configs", str(ROOT / "configs/quickstart/sft.jsonnet")]
        changes = ["--override", ADDITION % 2500, "--override", SFT]
        run(*words, *changes, "run_iteration_loop", APP_DIRECTORY=str(work / "experiments"))
    found = {}
    for name in ("undisturbed", "disturbed"):
        words = estimate(work, work / name, served(work))
        killed: list[Killed] = []
        if name == "undisturbed":
            run(*words)
        else:
            killed = disturbed(words, work / name, kill_engine_below)
        found[name] = described(work / name, killed)
    return found


def described(output: Path, killed: list[Killed]) -> dict[str, Any]:
    return {
        "summary": _json(output / "summary.json"),
        "killed": [vars(one) for one in killed],
        "written_twice": written_twice(output),
        "digests": digests(output),
    }


def filtered(work: Path, rates: Path) -> dict[str, Any]:
    rule = {"type": "pass_rates", "strong": str(rates), "weak": str(rates), "low": 0.0, "high": 1.0}
    file = work / "filter.jsonnet"
    file.write_text(json.dumps({"type": "filter_data", "rules": [rule]}, indent=1))
    output = work / f"{rates.name}_filtered"
    words = ["--configs", str(file), "filter_data", "--input", str(work / "rows.parquet")]
    run(*words, "--output", str(output))
    return _json(output / "summary.json")


def trained(work: Path) -> list[float]:
    """The mean rewards of a few iterations of GRPO on the rows that are left."""
    task = {
        "type": "rows",
        "train": [str(work / "undisturbed_filtered" / "rows.parquet")],
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
    return [json.loads(line)["episodes/reward"] for line in lines]


# The page


def compared(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    kills = [
        f"| {kill['what']} of shard {kill['shard']} | {kill['answered']:,} of {kill['total']:,} |"
        for kill in other["killed"]
    ]
    counted = [
        f"| {words} | {one[key]:,} | {other[key]:,} |"
        for key, words in (
            ("asked", "requests that the server was sent"),
            ("asked_twice", "of them for an answer that had been asked for before"),
            ("written_twice", "answers that stand in the journals twice"),
        )
        if key in one
    ]
    return [
        "| SIGKILL met | answers of the shard that were there |",
        "|---|---|",
        *kills,
        "",
        "| | undisturbed | disturbed |",
        "|---|---|---|",
        f"| answers | {one['summary']['answers']:,} | {other['summary']['answers']:,} |",
        *counted,
        *(f"| SHA-256 of {name} | {one['digests'][name]} | {other['digests'][name]} |" for name in COMPARED),
        "",
        f"Mean pass rate {one['summary']['pass_rate']:.3f}; bins:",
        "",
        "```",
        *text_histogram(one["summary"]["bins"]),
        "```",
        "",
    ]


def table_of(took: dict[str, Any]) -> list[str]:
    rules = [
        f"| {rule['rule']} | {rule['rows']:,} | {rule['dropped']:,} | {rule['left']:,} |"
        for rule in took["rules"]
    ]
    return ["| rule | rows | dropped | left |", "|---|---|---|---|", *rules, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "difficulty")
    parser.add_argument("--only", choices=["address"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    addition = ["--configs", str(ROOT / "configs/tasks/addition_chain.jsonnet")]
    changes = ["--override", ADDITION % arguments.rows]
    run(*addition, *changes, "export_rows", "--split", "train", "--output", str(work / "rows.parquet"))
    pairs = []
    command = f"python tests/endurance/difficulty_endurance.py --rows {arguments.rows}"
    command += f" --only {arguments.only}" if arguments.only else ""
    page = [
        "# Difficulty, with two shards and a server killed",
        "",
        f"`{command}`, on {os.cpu_count()} cores of {platform.machine()}: additions of two two-digit",
        f"numbers, {SAMPLES} answers to each row, {SHARDS} shards, two jobs side by side. What a job had",
        "asked for and not yet written when it or its server died is asked for again, with the same seed: at",
        "most what it has under way.",
        "",
        "## At an address whose server keeps book",
        "",
        f"Each job has {CONCURRENCY} requests under way.",
        "",
    ]
    found = part_at_an_address(work)
    pairs.append((found["address_undisturbed"], found["address_disturbed"]))
    page += compared(*pairs[-1])
    page += ["`filter_data`, with this model in both roles: rows that it never or always solves go.", ""]
    page += table_of(filtered(work, work / "address_undisturbed"))
    if arguments.only != "address":
        found = part_on_servers(work)
        pairs.append((found["undisturbed"], found["disturbed"]))
        page += ["## On vLLM servers, with a model of 0.9 million weights that learned some additions", ""]
        page += compared(*pairs[-1])
        page += ["`filter_data`, as above:", "", *table_of(filtered(work, work / "undisturbed"))]
        rewards = ", ".join(f"{reward:.3f}" for reward in trained(work))
        page += [
            "GRPO on the rows that are left (task `rows`), 64 of them an iteration with 8 answers each: mean",
            f"reward {rewards}.",
            "",
        ]
    else:
        page += ["Not run here: the same on vLLM servers, and training on the rows that are left.", ""]
    text = "\n".join(page)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)
    for one, other in pairs:
        if one["digests"] != other["digests"]:
            sys.exit("two estimates of the same rows differ")
        if one["written_twice"] or other["written_twice"]:
            sys.exit("an answer stands in the journals twice")


if __name__ == "__main__":
    main()
