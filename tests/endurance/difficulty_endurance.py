"""Estimates difficulty in four shards while two jobs and a server are killed; then filters and trains.

    python tests/endurance/difficulty_endurance.py [--rows N] [--work DIR] [--only address] [--output FILE]

Two thousand additions are written in the schema of many domains. Their difficulty is estimated in two ways:
first by a server of this script, which writes down every request; then by vLLM servers, with a tiny model
that has learnt a little addition. Each way is done undisturbed, and with SIGKILL for the jobs of two shards
and for a server (of vLLM, its engine process). Both have to give the same bytes, and no answer may be in
the journals twice. Then the filter drops rows, and a model trains on the others.

`--only address` leaves the vLLM servers and the training out, and takes two minutes; all takes some twenty
on two idle cores. A work folder that exists is continued.
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
from treetune.data.difficulty.shard import ANSWERS_FILE, DONE_FILE, PROGRESS_FILE, shard_folder  # noqa: E402
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


def run(*arguments: str, **environment: str) -> None:
    subprocess.run([sys.executable, str(MAIN), *arguments], check=True, env={**os.environ, **environment})


def read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


class Address:
    """An OpenAI-compatible server in a process of its own, which adds numbers, sometimes wrongly.

    The last digit of the first number says how often it is right; the request's seed decides. It writes
    each request into `book` before it answers.
    """

    def __init__(self, book: Path, port: int) -> None:
        self.book, self.port = book, port
        book.unlink(missing_ok=True)
        self.start()

    def start(self) -> None:
        command = [sys.executable, __file__, "--serve", str(self.port), "--work", str(self.book)]
        self.process = subprocess.Popen(command)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @staticmethod
    def serve(port: int, book: Path) -> None:
        from aiohttp import web

        async def answer_request(request: web.Request) -> web.Response:
            body = await request.json()
            prompt = body["messages"][-1]["content"]
            with book.open("a") as file:
                file.write(json.dumps([prompt, body["seed"]]) + "\n")
            await asyncio.sleep(0.02)
            first, second = map(int, re.findall(r"\d+", prompt))
            is_right = derived_random(body["seed"], "answer").random() < first % 10 / 9
            answer = first + second if is_right else first + second + 1
            text = f"{answer}\n#{answer}"
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(text)}
            choice = {"message": {"content": text}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": usage})

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer_request)
        web.run_app(app, host="127.0.0.1", port=port, print=None)


def estimate(work: Path, output: Path, policy: dict[str, Any], address: Address | None, kills: bool) -> dict:
    """Estimates the difficulty; with `kills`, two jobs and the server of a third are killed meanwhile."""
    record = work / f"{output.name}.json"
    if earlier := read(record):
        return earlier
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
    arguments = ["--configs", str(config), "estimate_difficulty", "--input", str(work / "rows.parquet")]
    victims = ((0, "job"), (1, "job"), (2, "server")) if kills else ()
    killed = []
    with subprocess.Popen([sys.executable, str(MAIN), *arguments, "--output", str(output)]) as command:
        for shard, victim in victims:
            answered, total = wait_for_some_answers(output, shard, command)
            job = child(psutil.Process(command.pid), f"--shard {shard}")
            if victim == "job":
                job.kill()
            elif address:
                address.kill()
                time.sleep(2.0)
                address.start()
            else:
                child(job, "VLLM::EngineCore").kill()
            killed.append(f"| {victim} of shard {shard} | {answered:,} of {total:,} |")
            print(killed[-1], flush=True)
    if command.returncode:
        sys.exit(f"the command ended with code {command.returncode}")
    written = Counter[tuple[int, int]]()
    for shard in range(SHARDS):
        for line in (shard_folder(output, shard) / ANSWERS_FILE).read_text().splitlines():
            answer = json.loads(line)
            written[answer["row"], answer["sample"]] += 1
    asked = Counter(address.book.read_text().splitlines()) if address else Counter[str]()
    result = {
        "summary": read(output / "summary.json"),
        "killed": killed,
        "written_twice": written.total() - len(written),
        "digests": {name: hashlib.sha256((output / name).read_bytes()).hexdigest()[:16] for name in COMPARED},
    }
    if address:
        result |= {"asked": asked.total(), "asked_twice": asked.total() - len(asked)}
    record.write_text(json.dumps(result))
    return result


def child(parent: psutil.Process, text: str) -> psutil.Process:
    """Finds the process below `parent` whose command line has a text."""
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if text in " ".join(process.cmdline()):
                return process
    sys.exit(f"no process below {parent.pid} has {text!r}")


def wait_for_some_answers(output: Path, shard: int, command: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Waits until a shard has some of its answers, and returns how many, and how many it will have."""
    deadline, folder = time.monotonic() + PATIENCE_S, shard_folder(output, shard)
    while time.monotonic() < deadline and command.poll() is None:
        total, path = read(folder / PROGRESS_FILE).get("total", 0), folder / ANSWERS_FILE
        answered = path.read_bytes().count(b"\n") if path.is_file() else 0
        if (folder / DONE_FILE).is_file():
            sys.exit(f"shard {shard} was done before it could be disturbed: take more rows")
        if total and answered > total // 8:
            return answered, total
        time.sleep(0.02)
    sys.exit(f"shard {shard} answered nothing")


def compare(whole: dict[str, Any], disturbed: dict[str, Any], filtered: dict[str, Any]) -> str:
    """Compares two estimates and returns their part of the page; raises SystemExit if they differ."""
    rows = [("answers", whole["summary"]["answers"], disturbed["summary"]["answers"])]
    for key, name in COUNTS.items():
        if key in whole:
            rows.append((name, whole[key], disturbed[key]))
    for name in COMPARED:
        rows.append((f"SHA-256 of {name}", whole["digests"][name], disturbed["digests"][name]))
    rules = [[rule[key] for key in ("rule", "rows", "dropped", "left")] for rule in filtered["rules"]]
    text = "\n".join(
        [
            "| killed | answers of the shard by then |\n|---|---|",
            *disturbed["killed"],
            "\n| | undisturbed | disturbed |\n|---|---|---|",
            *(f"| {name} | {undisturbed} | {killed} |" for name, undisturbed, killed in rows),
            f"\nMean pass rate {whole['summary']['pass_rate']:.3f}; bins:\n\n```",
            *text_histogram(whole["summary"]["bins"]),
            "```\n\n`filter_data`, with this model in both roles: it drops rows with the rates 0 and 1.\n",
            "| rule | rows | dropped | left |\n|---|---|---|---|",
            *(f"| {' | '.join(map(str, rule))} |" for rule in rules),
        ]
    )
    if whole["digests"] != disturbed["digests"] or whole["written_twice"] or disturbed["written_twice"]:
        sys.exit(f"two estimates of the same rows differ, or an answer is in a journal twice:\n{text}")
    return text


def filter_rows(work: Path, rates: Path) -> dict[str, Any]:
    rule = {"type": "pass_rates", "strong": str(rates), "weak": str(rates), "low": 0.0, "high": 1.0}
    file, output = work / "filter.jsonnet", work / f"{rates.name}_filtered"
    file.write_text(json.dumps({"type": "filter_data", "rules": [rule]}, indent=1))
    arguments = ["--configs", str(file), "filter_data", "--input", str(work / "rows.parquet")]
    run(*arguments, "--output", str(output))
    return read(output / "summary.json")


def estimate_at_an_address(work: Path, port: int) -> str:
    address = Address(work / "book", port)
    endpoint = {
        "base_url": f"http://127.0.0.1:{port}/v1",
        "model": "scripted",
        "concurrency": CONCURRENCY,
        "retries": 10,
        "backoff": 0.5,
        "give_up_after": 100,
    }
    policy = {"type": "endpoint", "addresses": [endpoint]}
    try:
        whole = estimate(work, work / "address_undisturbed", policy, address, kills=False)
        address.book.unlink(missing_ok=True)
        disturbed = estimate(work, work / "address_disturbed", policy, address, kills=True)
    finally:
        address.kill()
    return compare(whole, disturbed, filter_rows(work, work / "address_undisturbed"))


def estimate_on_servers(work: Path) -> str:
    """Estimates on vLLM servers, and trains with GRPO for a few iterations on the rows that are left."""
    experiments = {"APP_DIRECTORY": str(work / "experiments")}
    model = work / "experiments" / "quickstart" / "sft" / "checkpoints" / f"{SFT_ITERATIONS:04d}" / "policy"
    if not model.is_dir():
        arguments = ["--configs", str(ROOT / "configs/quickstart/sft.jsonnet")]
        arguments += ["--override", ADDITION % 2500, "--override", SFT, "run_iteration_loop"]
        run(*arguments, **experiments)
    engine = {"type": "vllm", "omp_threads": 1, "max_num_seqs": 64, "max_concurrency": 64}
    trained = {"type": "pretrained", "name_or_path": str(model)}
    policy = {
        "type": "served",
        "model": trained,
        "engine": {**engine, "prefix_caching": False, "start_timeout": 900.0},
        "context_length": 96,
    }
    whole = estimate(work, work / "undisturbed", policy, None, kills=False)
    disturbed = estimate(work, work / "disturbed", policy, None, kills=True)
    text = compare(whole, disturbed, filter_rows(work, work / "undisturbed"))
    rows = {"type": "rows", "train": [str(work / "undisturbed_filtered" / "rows.parquet")], "routes": ROUTES}
    changes = {
        "experiment_name": "difficulty/grpo",
        "task": rows | {"steps": {"type": "lines"}},
        "model": trained,
        "iterations": ITERATIONS,
        "evaluation": {"sets": []},
        "checkpoints": {"every": ITERATIONS},
    }
    arguments = [
        "--configs",
        str(ROOT / "configs/quickstart/grpo.jsonnet"),
        "--override",
        json.dumps(changes),
    ]
    arguments += ["--override", "{trainer+: {schedule+: {steps: 2}}}", "run_iteration_loop"]
    run(*arguments, **experiments)
    lines = (work / "experiments" / "difficulty" / "grpo" / "metrics.jsonl").read_text().splitlines()
    rewards = ", ".join(f"{json.loads(line)['episodes/reward']:.3f}" for line in lines)
    return f"{text}\n\nGRPO on the rows that are left (task `rows`), 64 an iteration: mean reward {rewards}."


PAGE = """# Difficulty, with two shards and a server killed

`python tests/endurance/difficulty_endurance.py --rows {rows}`, on {cores} cores of {machine}: additions of
two two-digit numbers, {samples} answers to each row, {shards} shards, two jobs at a time. Requests whose
answer a job had not written when it or its server died are sent again, with the same seed: at most as many as
it has under way.

## At an address whose server records its requests

Each job has {concurrency} requests under way.

{address}

## On vLLM servers, with a model of 0.9 million weights that has learnt some additions

{servers}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "difficulty")
    parser.add_argument("--port", type=int, default=18700, help="port of the address")
    parser.add_argument("--only", choices=["address"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return Address.serve(options.serve, options.work)
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    arguments = ["--configs", str(ROOT / "configs/tasks/addition_chain.jsonnet"), "--override"]
    arguments += [ADDITION % options.rows, "export_rows", "--split", "train"]
    run(*arguments, "--output", str(work / "rows.parquet"))
    text = PAGE.format(
        rows=options.rows,
        cores=os.cpu_count(),
        machine=platform.machine(),
        samples=SAMPLES,
        shards=SHARDS,
        concurrency=CONCURRENCY,
        address=estimate_at_an_address(work, options.port),
        servers="Not run here." if options.only else estimate_on_servers(work),
    )
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
