"""What becomes of a run whose judge is down, answers nonsense, or is killed: small real runs, one a fault.

    python scripts/judge_faults.py [--work DIR] [--only minute nonsense …] [--output docs/results/judge.md]

Each is the quickstart's GRPO made small: a vLLM server samples, and a stand-in behind an OpenAI-compatible
address judges (`tests.support.stand_in_judge`), in a process of its own that is struck in the middle of
iteration 3. In the last one the judge is a second vLLM server of the run's, with a tiny model of random
weights, which is killed. Allow two minutes a run on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from treetune.checksums import row_of  # noqa: E402

DEADLINE_S = 1500.0
DOWN_S = 60.0
ANSWERS, ITERATIONS, STRUCK, MIDST = 96, 4, 3, 20
"""Answers of an iteration, iterations of a run, and the iteration in which the judge is struck, after so many
questions (equal answers are asked about once)."""

SFT = """{
  directory: '%(work)s',
  iterations: 4,
  problems_per_iteration: 3200,
  checkpoints: { every: 4 },
  evaluation+: { sets: [] },
}"""
SMALL = """{
  directory: '%(work)s',
  experiment_name: '%(name)s',
  rollout+: { samples: 4, unfinished_reward: null },
  iterations: 4,
  problems_per_iteration: 24,
  checkpoints: { every: 1 },
  evaluation+: { sets: [] },
  trainer+: { schedule+: { may_outlast_training: true } },
}"""
STAND_IN = """{ task+: { grader: {
  type: 'judge',
  endpoint: { base_url: '%(url)s', model: 'stand-in', concurrency: 8, temperature: 0%(more)s },
  rule: { type: 'final_answer' },
} } }"""
MANAGED = """{
  task+: { grader: {
    type: 'judge',
    prompt: '{problem} {gold} {response}',
    verdict_pattern: '([0-9a-z])',
    scores: { [c]: if std.member('0123456789abc', c) then 1 else 0
              for c in std.stringChars('0123456789abcdefghijklmnopqrstuvwxyz') },
    rule: { type: 'final_answer' },
  } },
  engines+: { judge: {
    model: '%(model)s',
    server: { type: 'vllm', max_num_seqs: 32, max_num_batched_tokens: 2048, start_timeout: 900 },
    context_length: 512,
    concurrency: 8,
    max_tokens: 16,
    temperature: 1,
  } },
}"""
IMPATIENT = ", retries: 1, backoff: 1, give_up_after: 4"


class StandIn:
    """The judge's process, which can be struck and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.mood, self.record = folder / "mood", folder / "asked.jsonl"
        self.mood.write_text("well")
        self.record.write_text("")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.start()

    def start(self) -> None:
        words = ["--port", self.port, "--mood", self.mood, "--record", self.record, "--delay", 0.1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.stand_in_judge", *map(str, words)],
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        )

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    @property
    def count(self) -> int:
        return self.record.read_bytes().count(b"\n")

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]


@dataclass
class Run:
    """An experiment's folder, and the command that makes it."""

    name: str
    work: Path
    overrides: list[str]
    codes: list[int] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.work / self.name

    def start(self) -> subprocess.Popen[bytes]:
        tools = Path(sys.executable).parent
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        line = [str(tools / "deepspeed"), "--no_local_rank", "--num_gpus=1", f"--master_port={port}"]
        line += [str(ROOT / "src/treetune/main.py"), "--configs", "configs/quickstart/grpo.jsonnet"]
        if self.name == "quickstart/sft":
            line[-1] = "configs/quickstart/sft.jsonnet"
        for one in self.overrides:
            line += ["--override", one]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("APP_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        environment["PATH"] = f"{tools}{os.pathsep}{environment['PATH']}"
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / f"{self.name.replace('/', '_')}.output").open("ab") as file:
            return subprocess.Popen(
                [*line, "run_iteration_loop"], cwd=ROOT, env=environment, stdout=file, stderr=file
            )

    def finish(self, process: subprocess.Popen[bytes]) -> int:
        self.codes.append(process.wait(DEADLINE_S))
        return self.codes[-1]

    def rows(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def said(self, pattern: str) -> list[str]:
        log = (self.path / "logs" / "run.log").read_text()
        return [line.split(" ", 3)[3] for line in log.splitlines() if re.search(pattern, line)]

    def weights(self) -> str:
        files = sorted((self.path / "checkpoints").glob("*/policy/*.safetensors"))
        return hashlib.blake2b(files[-1].read_bytes(), digest_size=8).hexdigest() if files else "none"


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode} before {what}")
        if time.monotonic() > end:
            raise RuntimeError(f"waited in vain for {what}")
        time.sleep(0.02)


@dataclass
class Result:
    """What became of one run."""

    fault: str
    run: Run
    asked: int
    twice: int
    notes: str = ""


# The faults


def struck(judge: StandIn, run: Run, process: subprocess.Popen[bytes]) -> None:
    """Returns in the middle of the iteration that is struck."""
    before = run.path / "iterations" / f"{STRUCK - 2:04d}" / "metrics.json"
    until(before.is_file, process, "iteration 2 is done")
    wanted = judge.count + MIDST
    until(lambda: judge.count >= wanted, process, "the judge is at work on iteration 3")


def undisturbed(judge: StandIn, run: Run, process: subprocess.Popen[bytes]) -> str:
    run.finish(process)
    return ""


def minute(judge: StandIn, run: Run, process: subprocess.Popen[bytes]) -> str:
    struck(judge, run, process)
    judge.kill()
    time.sleep(DOWN_S)
    judge.start()
    run.finish(process)
    return ""


def nonsense(judge: StandIn, run: Run, process: subprocess.Popen[bytes]) -> str:
    struck(judge, run, process)
    judge.mood.write_text("nonsense")
    done = run.path / "iterations" / f"{STRUCK - 1:04d}" / "trajectories.arrow"
    until(done.is_file, process, "iteration 3 has been sampled")
    judge.mood.write_text("well")
    run.finish(process)
    return ""


def killed(judge: StandIn, run: Run, process: subprocess.Popen[bytes]) -> str:
    struck(judge, run, process)
    judge.kill()
    first = run.finish(process)
    output = (run.work / f"{run.name}.output").read_text()
    ending = [line for line in output.splitlines() if "could not be graded" in line][-1].strip()
    judge.start()
    run.finish(run.start())
    return f"without a judge iteration 4 ends the run with exit code {first}: {ending[:300]}"


def kill(which: Callable[[str], bool], process: subprocess.Popen[bytes]) -> None:
    """Those below the run whose command lines are such, at once."""
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if which(" ".join(one.cmdline())):
                one.kill()


def run_killed(judge: StandIn, run: Run, process: subprocess.Popen[bytes]) -> str:
    struck(judge, run, process)
    kill(lambda words: "guard.py" not in words, process)
    process.kill()
    process.wait()
    before = len(judge.asked)
    run.finish(run.start())
    return f"the run was killed when {before} questions had been asked, and given again"


@contextmanager
def stand_in(folder: Path) -> Iterator[StandIn]:
    judge = StandIn(folder)
    try:
        yield judge
    finally:
        judge.kill()


FAULTS: dict[str, tuple[str, Callable[[StandIn, Run, subprocess.Popen[bytes]], str], str]] = {
    "undisturbed": ("none", undisturbed, ""),
    "minute": ("`kill -9`, back after 60 s; retries as they are by default", minute, ""),
    "killed": ("`kill -9`, not back before the run has ended; one retry after 1 s", killed, IMPATIENT),
    "nonsense": ("answers nonsense for the rest of iteration 3", nonsense, ""),
    "impatient": ("`kill -9`, back after 60 s; one retry after 1 s", minute, IMPATIENT),
    "run_killed": ("the run itself is killed, not the judge", run_killed, ""),
}
ALL = ("undisturbed", "minute", "killed", "managed", "nonsense", "impatient", "run_killed")


def strike(name: str, work: Path) -> Result:
    words, fault, more = FAULTS[name]
    with stand_in(work / f"{name}-judge") as judge:
        run = Run(
            name, work, [SMALL % {"work": work, "name": name}, STAND_IN % {"url": judge.url, "more": more}]
        )
        notes = fault(judge, run, run.start())
        questions = Counter(json.dumps(body["messages"]) for body in judge.asked if body["mood"] == "well")
        twice = sum(count - 1 for count in questions.values())
        return Result(words, run, len(judge.asked), twice, notes)


def managed(work: Path) -> Result:
    model = work / "judge-model"
    if not model.is_dir():
        write_judge(model)
    run = Run("managed", work, [SMALL % {"work": work, "name": "managed"}, MANAGED % {"model": model}])
    process = run.start()
    sampled = run.path / "iterations" / f"{STRUCK - 2:04d}" / "trajectories.arrow"
    until(sampled.is_file, process, "iteration 2 has been sampled")
    # The run's own command names the model as well.
    kill(lambda words: str(model) in words and "main.py" not in words and "guard.py" not in words, process)
    run.finish(process)
    starts = (run.path / "logs" / "judge.log").read_text().count("\n=== ")
    journal = [
        json.loads(row_of(line)) for file in run.path.glob("judge/*.jsonl") for line in file.open("rb")
    ]
    twice = len(journal) - len({row["key"] for row in journal})
    words = "`kill -9` of the run's own judge server, a tiny model of random weights, after iteration 2"
    return Result(words, run, len(journal), twice, f"the judge's server was started {starts} times")


def write_judge(folder: Path) -> None:
    """A tiny model of random weights, whose tokenizer takes every byte, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from treetune.models.export import write_policy
    from treetune.models.sources import TinyModel

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", chat_template=template
    )
    stand_in_alphabet = "".join(chr(0x4E00 + i) for i in range(len(letters)))
    source = TinyModel(layers=2, hidden_size=64, heads=2, context_length=512)
    model = source.load_model(0, lambda: stand_in_alphabet)
    write_policy(dict(model.named_parameters()), model.config, tokenizer, folder)


# The page


def page(results: list[Result], reference: str) -> str:
    lines = [
        "# A judge that fails",
        "",
        f"`scripts/judge_faults.py` on {platform.machine()}, {os.cpu_count()} cores. Each row is a run of"
        f" {ITERATIONS} iterations of {ANSWERS} answers of the quickstart's GRPO, with a real vLLM server for"
        f" the policy. The judge is struck in the middle of iteration {STRUCK}.",
        "",
        "| what happens to the judge | exit codes | iterations done | answers left out | asked | asked twice"
        " | agreement with the rule | weights as undisturbed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        rows = one.run.rows()
        lost = [f"{round(row.get('episodes/unavailable', 0) * ANSWERS)}" for row in rows]
        agreement = [row["judge/agreement"] for row in rows if "judge/agreement" in row]
        lines.append(
            f"| {one.fault} | {', '.join(map(str, one.run.codes))} | {len(rows)} | {' + '.join(lost)} |"
            f" {one.asked} | {one.twice} | {sum(agreement) / max(1, len(agreement)):.2f} |"
            f" {'yes' if one.run.weights() == reference else 'no'} |"
        )
    lines += [
        "",
        "Answers left out are those of iterations 1 + 2 + 3 + 4. Equal answers are asked about once. *Asked"
        " twice* counts questions that got a verdict and were asked again.",
        "",
        "## What the log says",
        "",
    ]
    for one in results:
        said = one.run.said("could not be graded|are left out")
        if said or one.notes:
            lines += [f"**{one.fault}**", ""]
            lines += [f"    {line}" for line in said]
            lines += ["", f"{one.notes[:1].upper()}{one.notes[1:]}.", ""] if one.notes else [""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/judge_faults"))
    parser.add_argument("--only", nargs="*", choices=ALL)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/judge.md")
    options = parser.parse_args()
    work = options.work.resolve()
    sft = Run("quickstart/sft", work, [SFT % {"work": work}])
    if not list((sft.path / "checkpoints").glob("*/policy")) and sft.finish(sft.start()):
        sys.exit(f"the start model could not be made: see {work}")
    results = []
    for name in options.only or ALL:
        print(f"{time.strftime('%T')} {name}", flush=True)
        results.append(managed(work) if name == "managed" else strike(name, work))
        rows = results[-1].run.rows()
        print(results[-1].run.codes, [row.get("episodes/unavailable") for row in rows], flush=True)
        options.output.write_text(page(results, Run("undisturbed", work, []).weights()))


if __name__ == "__main__":
    main()
