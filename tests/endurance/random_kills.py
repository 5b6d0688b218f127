"""Kills processes of small real runs at random instants, and compares what they come to, bit for bit.

    python tests/endurance/random_kills.py [--kills 30] [--seed 1] [--only turns …] [--victims sandbox …]
        [--whole] [--output PAGE.md]

Each variant is run once undisturbed and once with blows: `kill -9` of one process among all that are below
`treetune run` (and itself), at an instant drawn from the undisturbed run's time. The command is then given
again, until the variant's blows have fallen and it ends. With `--whole` a blow is `kill -9` of every process
of the run, once in each of its three iterations. Looked at: the exit code (0 where the run came to its end
all the same, and only there), processes that are left 10 s later, and in the end weights, answers and what
lies in /dev/shm and TMPDIR. About half an hour on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

GONE_S = 10.0
DEADLINE_S = 900.0
SMALL = """{
  directory: '%(work)s',
  rollout+: { samples: 4, unfinished_reward: 0.5 },
  iterations: 3,
  problems_per_iteration: 8,
  checkpoints: { every: 1 },
  evaluation+: { sets: [], every: null },
  trainer+: { schedule+: { may_outlast_training: true } },
}"""
IN_PROCESS = "{ engines+: { policy: { type: 'in_process' } } }"
JUDGE = """{
  task+: { grader: {
    type: 'judge',
    prompt: '{problem} {gold} {response}',
    verdict_pattern: '([0-9a-z])',
    scores: { [c]: if std.member('0123456789abc', c) then 1 else 0
              for c in std.stringChars('0123456789abcdefghijklmnopqrstuvwxyz') },
    rule: { type: 'final_answer' },
  } },
  engines+: { judge: {
    model: '%(work)s/judge_model',
    server: { type: 'vllm', max_num_seqs: 32, max_num_batched_tokens: 2048, start_timeout: 900 },
    context_length: 512, concurrency: 8, max_tokens: 16, temperature: 0,
  } },
}"""
SFT = """{
  directory: '%(work)s',
  iterations: 2,
  problems_per_iteration: 320,
  evaluation+: { sets: [], every: null },
  trainer+: { schedule+: { may_outlast_training: true } },
}"""
VARIANTS: dict[str, tuple[str, ...]] = {
    "one step, two servers": (
        "configs/quickstart/vineppo.jsonnet,configs/runtimes/one_step_overlap.jsonnet",
        "{ rollout+: { max_tokens: 40 }, engines+: { policy+: { replicas: 2 } } }",
    ),
    "topped-up credit, 2 ranks": (
        "configs/quickstart/vineppo.jsonnet",
        "{ rollout+: { max_tokens: 40 },"
        " credit: { type: 'monte_carlo', samples: 3, values: { type: 'topped_up' } } }",
        IN_PROCESS,
    ),
    "mixture with code": ("configs/domains/tiny_grpo.jsonnet", IN_PROCESS),
    "turns": ("configs/multi_turn/maze.jsonnet", IN_PROCESS),
    "mcp": (
        "examples/own_parts/calculator_vineppo.jsonnet",
        "{ credit+: { samples: 2 }, rollout+: { environment+: { tools: [{ type: 'mcp', command:"
        " ['python', 'examples/own_parts/calculator_server.py', '%(work)s/%(name)s.calls'],"
        " variables: { PYTHONPATH: '%(sources)s' } }] } } }",
    ),
    "judge": ("configs/quickstart/grpo.jsonnet", "{ rollout+: { max_tokens: 40 } }", JUDGE, IN_PROCESS),
}
STARTS = {
    "quickstart": ("quickstart/sft", "configs/quickstart/sft.jsonnet", SFT),
    "domains": ("domains/tiny_sft", "configs/domains/tiny_sft.jsonnet", SFT),
    "own_parts": ("calculator/sft", "examples/own_parts/calculator_sft.jsonnet", "{ directory: '%(work)s' }"),
}
"""The experiments whose weights others begin with, by the folder of these."""


@dataclass(frozen=True)
class Blow:
    variant: str
    victim: str
    seconds: float
    code: int
    finished: bool
    left: str

    @property
    def honest(self) -> bool:
        return (self.code == 0) == self.finished

    def row(self) -> str:
        end = "went on to its end" if self.finished else "ended"
        return (
            f"| {self.variant} | {self.victim} | {self.seconds:.1f} | {end}, {self.code}"
            f"{'' if self.honest else ' (**not honest**)'} | {self.left or 'nothing'} |"
        )


def start(work: Path, name: str, configs: str, *overrides: str) -> subprocess.Popen:
    words = [sys.executable, str(ROOT / "src/treetune/main.py"), "--configs", configs]
    for text in overrides:
        words += ["--override", text % {"work": work, "name": name, "sources": ROOT / "src"}]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("APP_")} | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "APP_EXPERIMENT_NAME": name,
        "TMPDIR": str(work),
        "NUM_GPUS": "2" if "2_ranks" in name else "1",
    }
    with (work / f"{name.replace('/', '_')}.output").open("ab") as file:
        return subprocess.Popen(
            [*words, "run"], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )


def undisturbed(work: Path, name: str, given: tuple[str, ...]) -> None:
    """Runs it to its end. Raises SystemExit with what it said where that isn't reached."""
    if code := start(work, name, *given).wait():
        text = (work / f"{name.replace('/', '_')}.output").read_text()
        raise SystemExit(f"{name} ended with {code}:\n{text[-3000:]}")


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def described(process: psutil.Process) -> str:
    """What a process is, in words; empty where it is gone or isn't one to strike."""
    try:
        line = " ".join(process.cmdline())
        parent = process.ppid()
    except psutil.Error:
        return ""
    names = {
        "calculator_server.py": "MCP server",
        "bwrap": "sandbox",
        "VLLM::EngineCore": "engine",
        "vllm": "server",
        "processes.worker": "grader's worker",
        "environments": "environment",
        "launcher.launch": "node launcher",
        "guard": "guard",
        "main.py": "rank",
    }
    if line.endswith(" run") and parent == os.getpid():
        return "treetune run"
    return next((word for part, word in names.items() if part in line), line.split(" ")[0].rsplit("/")[-1])


def strike(
    work: Path,
    name: str,
    variant: str,
    given: tuple[str, ...],
    within: float,
    draw: Any,
    victims: Sequence[str] | None,
    iteration: int | None,
) -> Blow:
    """Starts the run, kills one of its processes, and waits for the end. No victim where it came to its end
    before the blow. With `victims`, the blow waits for a process of one of these kinds, and up to three
    seconds more: they aren't all struck while they start. With an `iteration`, it waits for that one to
    begin, and all processes are killed."""
    began = time.monotonic()
    run = start(work, name, *given)
    top = psutil.Process(run.pid)
    seconds = draw.uniform(0.2, 1.0) * within
    begun = work / name / f"iterations/{iteration or 0:04d}"
    lines = work / name / "metrics.jsonl"
    seen: dict[int, psutil.Process] = {}
    victim, met = "", False
    while run.poll() is None:
        with contextlib.suppress(psutil.Error):
            seen |= {one.pid: one for one in (top, *top.children(recursive=True))}
        if iteration is not None and not met:
            seconds = DEADLINE_S
            if begun.is_dir():
                whole = (work / name).with_name("undisturbed") / "metrics.jsonl"
                took = json.loads(whole.read_text().splitlines()[iteration])["seconds/total"]
                met, seconds = True, time.monotonic() - began + draw.uniform(0.0, 0.9) * took
        if not victim and time.monotonic() - began > seconds and iteration is not None:
            done = len(lines.read_text().splitlines()) if lines.is_file() else 0
            victim = f"all, in iteration {done}"
            for one in seen.values():
                with contextlib.suppress(psutil.Error):
                    one.kill()
        elif not victim and time.monotonic() - began > seconds:
            kinds: dict[str, list[psutil.Process]] = {}
            for one in seen.values():
                if alive(one) and (word := described(one)):
                    kinds.setdefault(word, []).append(one)
            if victims:
                kinds = {word: those for word, those in kinds.items() if word in victims}
                if kinds and not met:
                    met, seconds = True, time.monotonic() - began + draw.uniform(0.0, 3.0)
                    continue
            elif len(kinds) > 1 and draw.random() < 0.8:
                kinds.pop("treetune run", None)  # it is there all the time, others come and go
            if kinds:
                victim = draw.choice(sorted(kinds))  # each kind as often, however many there are
                draw.choice(sorted(kinds[victim], key=lambda one: one.pid)).kill()
        if time.monotonic() - began > DEADLINE_S:
            victim += " (hung)"
            run.send_signal(signal.SIGTERM)
            time.sleep(60)
            run.kill()
        time.sleep(0.01 if victims else 0.05)  # a sandbox lives for a moment
    ended = time.monotonic()
    while time.monotonic() - ended < GONE_S and any(alive(one) for one in seen.values()):
        time.sleep(0.1)
    left = Counter(described(one) or "?" for one in seen.values() if alive(one))
    for one in seen.values():
        if alive(one):
            one.kill()
    finished = (work / name / "checkpoints/0003").is_dir() and run.returncode == 0
    if not finished:
        finished = lines.is_file() and len(lines.read_text().splitlines()) == 3 and run.returncode == 0
    words = ", ".join(f"{count} {what}" for what, count in left.items())
    return Blow(variant, victim, seconds, run.returncode, finished, words)


def result(folder: Path) -> dict[str, Any]:
    """What must be the same: the last weights, and every iteration's answers with what they earned."""
    from treetune.rollouts.storage import read_episodes

    policy = sorted((folder / "checkpoints").glob("[0-9]*"))[-1] / "policy"
    episodes = {
        path.parent.name: [
            (e.trajectory, e.response_ids.tolist(), e.reward, e.advantages.tolist())
            for e in read_episodes(path)
        ]
        for path in sorted(folder.glob("iterations/*/episodes.arrow"))
    }
    return {
        "weights": hashlib.sha256((policy / "model.safetensors").read_bytes()).hexdigest(),
        "episodes": hashlib.sha256(json.dumps(episodes).encode()).hexdigest(),
        "iterations": [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").open()],
    }


def page(blows: list[Blow], same: dict[str, bool], folders: list[str], seed: int) -> str:
    wrong = [one for one in blows if not one.honest or one.left]
    return "\n".join(
        [
            "# Runs whose processes were killed at random instants",
            "",
            f"`python tests/endurance/random_kills.py --kills {len(blows)} --seed {seed}`: small real runs"
            " started by `treetune run`, each killed several times with `kill -9`: any one of its processes,"
            " each kind as often, or all at once, at a random instant.",
            "",
            f"**{len(blows) - len(wrong)} of {len(blows)} blows** ended with an honest exit code and nothing"
            f" left {GONE_S:.0f} s later. **{sum(same.values())} of {len(same)} variants** came to the"
            " undisturbed run's weights and episodes, to the bit. After the last start of each,"
            f" folders in /dev/shm and TMPDIR: {', '.join(folders) or 'none'}.",
            "",
            "| run | killed | after s | the command | left |",
            "|---|---|---:|---|---|",
            *(one.row() for one in blows),
            "",
            "| run | weights and episodes |",
            "|---|---|",
            *(f"| {name} | {'the same' if equal else '**different**'} |" for name, equal in same.items()),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="of the instants and the victims")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--victims", nargs="+", help="strike these kinds of processes alone, as the page calls them"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="kill all processes at once, once in each iteration (not --kills)",
    )
    parser.add_argument("--output", type=Path, help="also write the page there")
    options = parser.parse_args()
    blows, same, folders = list[Blow](), dict[str, bool](), list[str]()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        work = Path(folder)
        write_judge(work / "judge_model")
        for folder, (name, *start_of) in STARTS.items():
            if any(f"/{folder}/" in VARIANTS[variant][0] for variant in options.only):
                undisturbed(work, name, tuple(start_of))
        for number, variant in enumerate(options.only):
            given = (VARIANTS[variant][0], SMALL, *VARIANTS[variant][1:])
            began, draw = time.monotonic(), random.Random(f"{options.seed} {variant}")
            name = variant.replace(" ", "_").replace(",", "")
            undisturbed(work, f"{name}/undisturbed", given)
            within = time.monotonic() - began
            share = 3 if options.whole else len(range(number, options.kills, len(options.only)))
            while share:
                iteration = 3 - share if options.whole else None
                blow = strike(
                    work, f"{name}/killed", variant, given, within, draw, options.victims, iteration
                )
                if blow.victim:
                    share -= 1
                    blows.append(blow)
                    print(blow.row(), flush=True)
                if blow.finished and share:  # the next blow falls on a run that begins anew
                    same[variant] = same.get(variant, True) and result(work / name / "killed") == result(
                        work / name / "undisturbed"
                    )
                    shutil.rmtree(work / name / "killed")
            undisturbed(work, f"{name}/killed", given)
            equal = result(work / name / "killed") == result(work / name / "undisturbed")
            same[variant] = same.get(variant, True) and equal
            folders += [
                path.name for path in (*work.glob("treetune-*"), *Path("/dev/shm").glob("treetune-*"))
            ]
            print(f"{variant}: {'the same' if same[variant] else 'DIFFERENT'}", flush=True)
            for calls in sorted((work / name).glob("*.calls")):
                print(f"{calls.stem}: {len(calls.read_text().splitlines())} calls of the server", flush=True)
        if options.output:
            options.output.write_text(page(blows, same, folders, options.seed))
        if not all(same.values()):
            shutil.copytree(work, ROOT / "build/random_kills", dirs_exist_ok=True)
    return 0 if all(same.values()) and all(one.honest and not one.left for one in blows) else 1


def write_judge(folder: Path) -> None:
    """A tiny model of random weights, whose tokenizer takes every byte, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from treetune.models.policy_files import write_policy
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
    source = TinyModel(layers=2, hidden_size=64, heads=2, context_length=512)
    model = source.load_model(0, lambda: "".join(chr(0x4E00 + i) for i in range(len(letters))))
    write_policy(dict(model.named_parameters()), model.config, tokenizer, folder)


if __name__ == "__main__":
    sys.exit(main())
