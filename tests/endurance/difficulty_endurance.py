"""Difficulty of two thousand rows in four shards, two of them killed and a server too; a filter; training.

    python tests/endurance/difficulty_endurance.py [--rows N] [--work DIR] [--only address] [--output FILE]

Two thousand additions are written in the schema of many domains, and their difficulty is estimated twice,
each time undisturbed and with SIGKILL for the jobs of two shards and for a server. First at an address of
this script's own, whose server keeps book of what it is asked; then on vLLM servers, with a tiny model that
learned a little addition, whose engine process is killed. Both have to give the same bytes, and no answer
may stand in the journals twice. Then the filter takes rows away, and a model trains on those that are left.

`--only address` leaves the servers and the training out, and takes two minutes; all takes some twenty on two
idle cores. A folder that is there already is gone on with.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from treetune.data.difficulty.merging import text_histogram  # noqa: E402
from treetune.data.difficulty.shard import ANSWERS, DONE, PROGRESS, shard_folder  # noqa: E402
from treetune.seeds import derived_random  # noqa: E402

MAIN = ROOT / "src" / "treetune" / "main.py"
SHARDS, SAMPLES, ITERATIONS, SFT_ITERATIONS, CONCURRENCY = 4, 8, 8, 10, 8
COMPARED = ("rates.parquet", "rows.parquet", "summary.json", "histogram.svg", "histogram.png")
ADDITION = "{task+: {count: 2, digits: 2, train_size: %d}}"
SFT = (
    f"{{iterations: {SFT_ITERATIONS}, problems_per_iteration: 2500, evaluation: {{sets: []}},"
    f" checkpoints: {{every: {SFT_ITERATIONS}}}}}"
)
ROUTES = {"": {"type": "final_answer", "marker": "#"}}
PATIENCE_S = 1800.0
COUNTS = {
    "asked": "requests that the server was sent",
    "asked_twice": "of them for an answer that had been asked for before",
    "written_twice": "answers that stand in the journals twice",
}


def run(*words: str, **environment: str) -> None:
    subprocess.run([sys.executable, str(MAIN), *words], check=True, env={**os.environ, **environment})


def read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


class Address:
    """An OpenAI-compatible server that adds numbers, rightly as often as the last digit of the first says, by
    the request's seed. It writes down what it is asked before it answers; a process that can be killed."""

    def __init__(self, book: Path, port: int) -> None:
        self.book, self.port = book, port
        book.unlink(missing_ok=True)
        self.start()

    def start(self) -> None:
        words = [sys.executable, __file__, "--serve", str(self.port), "--work", str(self.book)]
        self.process = subprocess.Popen(words)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @staticmethod
    def serve(port: int, book: Path) -> None:
        from aiohttp import web

        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            prompt = body["messages"][-1]["content"]
            with book.open("a") as file:
                file.write(json.dumps([prompt, body["seed"]]) + "\n")
            await asyncio.sleep(0.02)
            one, other = map(int, re.findall(r"\d+", prompt))
            is_right = derived_random(body["seed"], "answer").random() < one % 10 / 9
            text = f"{one + other + (not is_right)}\n#{one + other + (not is_right)}"
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(text)}
            choice = {"message": {"content": text}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": usage})

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        web.run_app(app, host="127.0.0.1", port=port, print=None)


def estimate(work: Path, output: Path, policy: dict[str, Any], address: Address | None, strike: bool) -> dict:
    """Estimates, undisturbed or with the jobs of shards 0 and 1 killed and then the server of shard 2."""
    record = work / f"{output.name}.json"
    if found := read(record):
        return found
    config = work / f"{output.name}.jsonnet"
    settings = {
        "type": "estimate_difficulty",
        "task": {"type": "rows", "routes": ROUTES},
        "policy": policy,
        "answers": {"samples": SAMPLES, "max_tokens": 24, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "shards": SHARDS,
        "jobs": {"type": "local", "at_once": 2},
    }
    config.write_text(json.dumps(settings, indent=1))
    words = ["--configs", str(config), "estimate_difficulty", "--input", str(work / "rows.parquet")]
    killed = []
    with subprocess.Popen([sys.executable, str(MAIN), *words, "--output", str(output)]) as command:
        for shard, what in ((0, "job"), (1, "job"), (2, "server")) if strike else ():
            answered, total = wait_for_a_part(output, shard, command)
            job = child(psutil.Process(command.pid), f"--shard {shard}")
            if what == "job":
                job.kill()
            elif address:
                address.kill()
                time.sleep(2.0)
                address.start()
            else:
                child(job, "VLLM::EngineCore").kill()
            killed.append(f"| {what} of shard {shard} | {answered:,} of {total:,} |")
            print(killed[-1], flush=True)
    if command.returncode:
        sys.exit(f"the command ended with code {command.returncode}")
    journals = [(shard_folder(output, shard) / ANSWERS).read_text().splitlines() for shard in range(SHARDS)]
    written = Counter((row["row"], row["sample"]) for lines in journals for row in map(json.loads, lines))
    asked = Counter(address.book.read_text().splitlines()) if address else Counter[str]()
    found = {
        "summary": read(output / "summary.json"),
        "killed": killed,
        "written_twice": written.total() - len(written),
        "digests": {name: hashlib.sha256((output / name).read_bytes()).hexdigest()[:16] for name in COMPARED},
    }
    if address:
        found |= {"asked": asked.total(), "asked_twice": asked.total() - len(asked)}
    record.write_text(json.dumps(found))
    return found


def child(parent: psutil.Process, words: str) -> psutil.Process:
    for one in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if words in " ".join(one.cmdline()):
                return one
    sys.exit(f"no process below {parent.pid} has {words!r}")


def wait_for_a_part(output: Path, shard: int, command: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Until some of the shard's answers are there, and not all."""
    deadline, folder = time.monotonic() + PATIENCE_S, shard_folder(output, shard)
    while time.monotonic() < deadline and command.poll() is None:
        total, path = read(folder / PROGRESS).get("total", 0), folder / ANSWERS
        answered = path.read_bytes().count(b"\n") if path.is_file() else 0
        if (folder / DONE).is_file():
            sys.exit(f"shard {shard} was done before it could be disturbed: take more rows")
        if total and answered > total // 8:
            return answered, total
        time.sleep(0.02)
    sys.exit(f"shard {shard} answered nothing")


def compared(whole: dict[str, Any], struck: dict[str, Any], filtered: dict[str, Any]) -> str:
    """A part of the page. Raises SystemExit where two estimates differ."""
    rows = [("answers", whole["summary"]["answers"], struck["summary"]["answers"])]
    rows += [(words, whole[key], struck[key]) for key, words in COUNTS.items() if key in whole]
    rows += [(f"SHA-256 of {name}", whole["digests"][name], struck["digests"][name]) for name in COMPARED]
    rules = [[rule[key] for key in ("rule", "rows", "dropped", "left")] for rule in filtered["rules"]]
    text = "\n".join(
        [
            "| SIGKILL met | answers of the shard that were there |\n|---|---|",
            *struck["killed"],
            "\n| | undisturbed | disturbed |\n|---|---|---|",
            *(f"| {name} | {one} | {other} |" for name, one, other in rows),
            f"\nMean pass rate {whole['summary']['pass_rate']:.3f}; bins:\n\n```",
            *text_histogram(whole["summary"]["bins"]),
            "```\n\n`filter_data`, with this model in both roles: rows that it never or always solves go.\n",
            "| rule | rows | dropped | left |\n|---|---|---|---|",
            *(f"| {' | '.join(map(str, rule))} |" for rule in rules),
        ]
    )
    if whole["digests"] != struck["digests"] or whole["written_twice"] or struck["written_twice"]:
        sys.exit(f"two estimates of the same rows differ, or an answer stands in a journal twice:\n{text}")
    return text


def filtered(work: Path, rates: Path) -> dict[str, Any]:
    rule = {"type": "pass_rates", "strong": str(rates), "weak": str(rates), "low": 0.0, "high": 1.0}
    file, output = work / "filter.jsonnet", work / f"{rates.name}_filtered"
    file.write_text(json.dumps({"type": "filter_data", "rules": [rule]}, indent=1))
    words = ["--configs", str(file), "filter_data", "--input", str(work / "rows.parquet")]
    run(*words, "--output", str(output))
    return read(output / "summary.json")


def at_an_address(work: Path, port: int) -> str:
    address = Address(work / "book", port)
    one = {"base_url": f"http://127.0.0.1:{port}/v1", "model": "scripted", "concurrency": CONCURRENCY}
    policy = {"type": "endpoint", "addresses": [one | {"retries": 10, "backoff": 0.5, "give_up_after": 100}]}
    try:
        whole = estimate(work, work / "address_undisturbed", policy, address, strike=False)
        address.book.unlink(missing_ok=True)
        struck = estimate(work, work / "address_disturbed", policy, address, strike=True)
    finally:
        address.kill()
    return compared(whole, struck, filtered(work, work / "address_undisturbed"))


def on_servers(work: Path) -> str:
    """And a few iterations of GRPO on the rows that are left."""
    experiments = {"APP_DIRECTORY": str(work / "experiments")}
    model = work / "experiments" / "quickstart" / "sft" / "checkpoints" / f"{SFT_ITERATIONS:04d}" / "policy"
    if not model.is_dir():
        words = ["--configs", str(ROOT / "configs/quickstart/sft.jsonnet"), "--override", ADDITION % 2500]
        run(*words, "--override", SFT, "run_iteration_loop", **experiments)
    engine = {"type": "vllm", "omp_threads": 1, "max_num_seqs": 64, "max_concurrency": 64}
    trained = {"type": "pretrained", "name_or_path": str(model)}
    policy = {
        "type": "served",
        "model": trained,
        "engine": {**engine, "prefix_caching": False, "start_timeout": 900.0},
        "context_length": 96,
    }
    whole, struck = (
        estimate(work, work / name, policy, None, strike=name == "disturbed")
        for name in ("undisturbed", "disturbed")
    )
    text = compared(whole, struck, filtered(work, work / "undisturbed"))
    rows = {"type": "rows", "train": [str(work / "undisturbed_filtered" / "rows.parquet")], "routes": ROUTES}
    changes = {
        "experiment_name": "difficulty/grpo",
        "task": rows | {"steps": {"type": "lines"}},
        "model": trained,
        "iterations": ITERATIONS,
        "evaluation": {"sets": []},
        "checkpoints": {"every": ITERATIONS},
    }
    words = ["--configs", str(ROOT / "configs/quickstart/grpo.jsonnet"), "--override", json.dumps(changes)]
    run(*words, "--override", "{trainer+: {schedule+: {steps: 2}}}", "run_iteration_loop", **experiments)
    lines = (work / "experiments" / "difficulty" / "grpo" / "metrics.jsonl").read_text().splitlines()
    rewards = ", ".join(f"{json.loads(line)['episodes/reward']:.3f}" for line in lines)
    return f"{text}\n\nGRPO on the rows that are left (task `rows`), 64 an iteration: mean reward {rewards}."


PAGE = """# Difficulty, with two shards and a server killed

`python tests/endurance/difficulty_endurance.py --rows {rows}`, on {cores} cores of {machine}: additions of
two two-digit numbers, {samples} answers to each row, {shards} shards, two jobs side by side. What a job had
asked for and not yet written when it or its server died is asked for again, with the same seed: at most what
it has under way.

## At an address whose server keeps book

Each job has {concurrency} requests under way.

{address}

## On vLLM servers, with a model of 0.9 million weights that learned some additions

{servers}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "difficulty")
    parser.add_argument("--port", type=int, default=18700, help="of the address")
    parser.add_argument("--only", choices=["address"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return Address.serve(options.serve, options.work)
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    words = ["--configs", str(ROOT / "configs/tasks/addition_chain.jsonnet"), "--override"]
    words += [ADDITION % options.rows, "export_rows", "--split", "train"]
    run(*words, "--output", str(work / "rows.parquet"))
    text = PAGE.format(
        rows=options.rows,
        cores=os.cpu_count(),
        machine=platform.machine(),
        samples=SAMPLES,
        shards=SHARDS,
        concurrency=CONCURRENCY,
        address=at_an_address(work, options.port),
        servers="Not run here." if options.only else on_servers(work),
    )
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
