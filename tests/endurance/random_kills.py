"""Kills processes of small real runs at random instants, and compares their results, bit for bit.

    python tests/endurance/random_kills.py [--kills 30] [--seed 1] [--only turns …] [--victims sandbox …]
        [--whole] [--output PAGE.md]

Each variant is run once undisturbed and once with kills: `kill -9` of `treetune run` or of a process below
it, at an instant drawn from the undisturbed run's time. The command is then given again, until the
variant's kills are done and it ends. With `--whole`, every process of the run is killed, once in each of
its three iterations. The script compares the exit code (0 only where the run reached its end), the
processes that are left 10 s later, and at the end the weights, the answers, and the folders in /dev/shm and
TMPDIR. It takes about half an hour on two cores.
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
"""The experiments that train the start weights, by the folder of the variants that begin with them."""


@dataclass(frozen=True)
class Kill:
    """A kill of a run's process: the kind of process, the instant, and the end of the run.

    Example: ``Kill('turns', 'sandbox', 12.5, code=0, has_finished=True, processes_left='')``.
    """

    variant: str
    victim: str
    seconds: float
    code: int
    has_finished: bool
    processes_left: str

    @property
    def is_honest(self) -> bool:
        """Whether the exit code tells if the run reached its end."""
        return (self.code == 0) == self.has_finished

    def row(self) -> str:
        end = "went on to its end" if self.has_finished else "ended"
        return (
            f"| {self.variant} | {self.victim} | {self.seconds:.1f} | {end}, {self.code}"
            f"{'' if self.is_honest else ' (**not honest**)'} | {self.processes_left or 'nothing'} |"
        )


def start(work: Path, name: str, configs: str, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "src/treetune/main.py"), "--configs", configs]
    for text in overrides:
        command += ["--override", text % {"work": work, "name": name, "sources": ROOT / "src"}]
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
            [*command, "run"], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )


def run_to_end(work: Path, name: str, configs_and_overrides: tuple[str, ...]) -> None:
    """Runs an experiment to its end; raises SystemExit with its output if it fails."""
    if code := start(work, name, *configs_and_overrides).wait():
        text = (work / f"{name.replace('/', '_')}.output").read_text()
        raise SystemExit(f"{name} ended with {code}:\n{text[-3000:]}")


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def kind_of(process: psutil.Process) -> str:
    """Returns the kind of a process, such as ``engine``; empty if it is gone."""
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
    for part, kind in names.items():
        if part in line:
            return kind
    return line.split(" ")[0].rsplit("/")[-1]


def run_and_kill(
    work: Path,
    name: str,
    variant: str,
    configs_and_overrides: tuple[str, ...],
    undisturbed_seconds: float,
    draw: Any,
    victims: Sequence[str] | None,
    iteration: int | None,
) -> Kill:
    """Starts the run, kills one of its processes, and waits for the end.

    Args:
        victims: If given, the kill waits for a process of one of these kinds, and up to three seconds more,
            so that processes are not always killed while they start.
        iteration: If given, the kill waits for this iteration to begin, and kills all processes.

    Returns:
        The kill; its victim is empty if the run ended before the kill.
    """
    started = time.monotonic()
    run = start(work, name, *configs_and_overrides)
    top = psutil.Process(run.pid)
    kill_after_s = draw.uniform(0.2, 1.0) * undisturbed_seconds
    folder_of_iteration = work / name / f"iterations/{iteration or 0:04d}"
    metrics = work / name / "metrics.jsonl"
    processes: dict[int, psutil.Process] = {}
    victim = ""
    # Whether the instant was drawn again, after the iteration or the process was there.
    is_redrawn = False
    while run.poll() is None:
        with contextlib.suppress(psutil.Error):
            processes |= {process.pid: process for process in (top, *top.children(recursive=True))}
        if iteration is not None and not is_redrawn:
            kill_after_s = DEADLINE_S
            if folder_of_iteration.is_dir():
                undisturbed_metrics = (work / name).with_name("undisturbed") / "metrics.jsonl"
                row = json.loads(undisturbed_metrics.read_text().splitlines()[iteration])
                into_iteration_s = draw.uniform(0.0, 0.9) * row["seconds/total"]
                is_redrawn, kill_after_s = True, time.monotonic() - started + into_iteration_s
        is_due = not victim and time.monotonic() - started > kill_after_s
        if is_due and iteration is not None:
            done = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
            victim = f"all, in iteration {done}"
            for process in processes.values():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        elif is_due:
            by_kind: dict[str, list[psutil.Process]] = {}
            for process in processes.values():
                if is_alive(process) and (kind := kind_of(process)):
                    by_kind.setdefault(kind, []).append(process)
            if victims:
                by_kind = {kind: of_kind for kind, of_kind in by_kind.items() if kind in victims}
                if by_kind and not is_redrawn:
                    is_redrawn = True
                    kill_after_s = time.monotonic() - started + draw.uniform(0.0, 3.0)
                    continue
            elif len(by_kind) > 1 and draw.random() < 0.8:
                # It is there all the time, while others come and go.
                by_kind.pop("treetune run", None)
            if by_kind:
                # The kind is drawn first, so that kinds with many processes are not killed more often.
                victim = draw.choice(sorted(by_kind))
                draw.choice(sorted(by_kind[victim], key=lambda process: process.pid)).kill()
        if time.monotonic() - started > DEADLINE_S:
            victim += " (hung)"
            run.send_signal(signal.SIGTERM)
            time.sleep(60)
            run.kill()
        time.sleep(0.01 if victims else 0.05)  # some victims, such as a sandbox, live for a moment only
    ended = time.monotonic()
    while time.monotonic() - ended < GONE_S and any(map(is_alive, processes.values())):
        time.sleep(0.1)
    alive = [process for process in processes.values() if is_alive(process)]
    counts_left = Counter(kind_of(process) or "?" for process in alive)
    for process in alive:
        if is_alive(process):  # it may have ended with one that was killed before it
            process.kill()
    has_finished = (work / name / "checkpoints/0003").is_dir() and run.returncode == 0
    if not has_finished:
        has_all_metrics = metrics.is_file() and len(metrics.read_text().splitlines()) == 3
        has_finished = has_all_metrics and run.returncode == 0
    processes_left = ", ".join(f"{count} {kind}" for kind, count in counts_left.items())
    return Kill(variant, victim, kill_after_s, run.returncode, has_finished, processes_left)


def result(folder: Path) -> dict[str, Any]:
    """Returns digests of the last weights and of every iteration's answers and advantages."""
    from treetune.rollouts.storage import read_episodes

    policy = sorted((folder / "checkpoints").glob("[0-9]*"))[-1] / "policy"
    episodes = {}
    for path in sorted(folder.glob("iterations/*/episodes.arrow")):
        episodes[path.parent.name] = [
            (row.trajectory, row.response_ids.tolist(), row.reward, row.advantages.tolist())
            for row in read_episodes(path)
        ]
    return {
        "weights": hashlib.sha256((policy / "model.safetensors").read_bytes()).hexdigest(),
        "episodes": hashlib.sha256(json.dumps(episodes).encode()).hexdigest(),
        "iterations": [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").open()],
    }


def page(kills: list[Kill], same: dict[str, bool], folders: list[str], seed: int) -> str:
    wrong = [kill for kill in kills if not kill.is_honest or kill.processes_left]
    return "\n".join(
        [
            "# Runs whose processes were killed at random instants",
            "",
            f"`python tests/endurance/random_kills.py --kills {len(kills)} --seed {seed}`: small real runs"
            " started by `treetune run`, each killed several times with `kill -9`: any one of its processes,"
            " each kind as often, or all at once, at a random instant.",
            "",
            f"**{len(kills) - len(wrong)} of {len(kills)} kills** ended with an honest exit code and nothing"
            f" left {GONE_S:.0f} s later. **{sum(same.values())} of {len(same)} variants** came to the"
            " undisturbed run's weights and episodes, to the bit. After the last start of each,"
            f" folders in /dev/shm and TMPDIR: {', '.join(folders) or 'none'}.",
            "",
            "| run | killed | after s | the command | left |",
            "|---|---|---:|---|---|",
            *(kill.row() for kill in kills),
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
    parser.add_argument("--seed", type=int, default=1, help="seed of the instants and the victims")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--victims", nargs="+", help="kill only these kinds of processes, as the page calls them"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="kill all processes at once, once in each iteration (not --kills)",
    )
    parser.add_argument("--output", type=Path, help="also write the page there")
    options = parser.parse_args()
    kills, same, folders = list[Kill](), dict[str, bool](), list[str]()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        work = Path(folder)
        write_judge(work / "judge_model")
        for folder_of_variants, (name, *configs_and_overrides) in STARTS.items():
            if any(f"/{folder_of_variants}/" in VARIANTS[variant][0] for variant in options.only):
                run_to_end(work, name, tuple(configs_and_overrides))
        for number, variant in enumerate(options.only):
            experiment = (VARIANTS[variant][0], SMALL, *VARIANTS[variant][1:])
            began, draw = time.monotonic(), random.Random(f"{options.seed} {variant}")
            name = variant.replace(" ", "_").replace(",", "")
            run_to_end(work, f"{name}/undisturbed", experiment)
            seconds = time.monotonic() - began
            kills_left = 3 if options.whole else len(range(number, options.kills, len(options.only)))
            while kills_left:
                iteration = 3 - kills_left if options.whole else None
                kill = run_and_kill(
                    work, f"{name}/killed", variant, experiment, seconds, draw, options.victims, iteration
                )
                if kill.victim:
                    kills_left -= 1
                    kills.append(kill)
                    print(kill.row(), flush=True)
                if kill.has_finished and kills_left:
                    # The next kill needs a run that begins anew.
                    equal = result(work / name / "killed") == result(work / name / "undisturbed")
                    same[variant] = same.get(variant, True) and equal
                    shutil.rmtree(work / name / "killed")
            run_to_end(work, f"{name}/killed", experiment)
            equal = result(work / name / "killed") == result(work / name / "undisturbed")
            same[variant] = same.get(variant, True) and equal
            folders += [
                path.name for path in (*work.glob("treetune-*"), *Path("/dev/shm").glob("treetune-*"))
            ]
            print(f"{variant}: {'the same' if same[variant] else 'DIFFERENT'}", flush=True)
            for calls in sorted((work / name).glob("*.calls")):
                print(f"{calls.stem}: {len(calls.read_text().splitlines())} calls of the server", flush=True)
        if options.output:
            options.output.write_text(page(kills, same, folders, options.seed))
        if not all(same.values()):
            shutil.copytree(work, ROOT / "build/random_kills", dirs_exist_ok=True)
    all_are_right = all(kill.is_honest and not kill.processes_left for kill in kills)
    return 0 if all(same.values()) and all_are_right else 1


def write_judge(folder: Path) -> None:
    """Writes a tiny model with random weights, a tokenizer that takes every byte, and a chat template."""
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
