"""Commands that run an experiment, and those that read what it wrote."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from treetune.cli.command import Argument, Command, built, evaluated, files_of, say

if TYPE_CHECKING:
    from treetune.config.jsonnet import Config
    from treetune.runtime.base import PolicyIteration, Runtime

VINEPPO = "--configs configs/quickstart/vineppo.jsonnet"


def run_experiment(options: argparse.Namespace) -> int:
    config, root = _experiment(options)
    from treetune.runtime.commands import run

    return run(options.command, root, config.data, options)


def run_ranks(options: argparse.Namespace) -> int:
    """Starts `options.what` on this machine's ranks. A wrong configuration is told before there are any."""
    from treetune.runtime import front_door

    _experiment(options)
    nodes = options.nodes.split(",") if options.nodes else ["localhost"]
    if not 0 <= options.node_rank < len(nodes):
        raise ValueError(f"--node_rank is {options.node_rank}, and --nodes names {len(nodes)}: count from 0")
    if len(nodes) > 1 and not options.master_port:
        raise ValueError("several nodes need the same --master_port, a free one of the first node's")
    ranks = front_door.ranks_here(options.num_gpus)
    if ranks * len(nodes) == 1:  # a launcher would be two more processes that import torch
        os.environ.setdefault("OMP_NUM_THREADS", front_door.threads_each(1))
        options.command = options.what
        return run_analyzers(options) if options.what == "run_analyzers" else run_experiment(options)
    words = [word for one in options.configs or () for word in ("--configs", one)]
    words += [word for one in options.override or () for word in ("--override", one)]
    words += ["--debug"] if options.debug else []
    return front_door.start_ranks(
        [*words, options.what], ranks, nodes, options.node_rank, options.master_port or 0
    )


def run_analyzers(options: argparse.Namespace) -> int:
    config, root = _experiment(options)
    from treetune.analyzers.command import run_analyzers

    return run_analyzers(root, config.data)


def report(options: argparse.Namespace) -> int:
    import treetune.parts  # noqa: F401  (registers them: numbers of answers are known by their parts)
    from treetune.config.errors import ConfigError
    from treetune.reports.html import write_report

    for directory in options.experiments:
        try:
            _import_own_parts(Path(directory))
        except ConfigError as error:  # what an experiment recorded can be read without its parts
            say(f"{directory}: {error}; numbers that only these parts know are left out")
    say(str(write_report([Path(directory) for directory in options.experiments], options.output)))
    return 0


def compare_analyses(options: argparse.Namespace) -> int:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.analyzers.compare import compare_analyses

    for text in options.experiments:
        _import_own_parts(Path(text.rpartition("=")[2]))
    drawn = compare_analyses(options.analysis, options.experiments, options.output)
    say(f"{drawn}.png, .svg and .json")
    return 0


def bisect_runs(options: argparse.Namespace) -> int:
    from treetune.analyzers.first_difference import first_difference

    found = first_difference(options.first, options.second)
    say("the runs are the same, as far as both have it" if found is None else str(found))
    return 0 if found is None else 1


def replay(options: argparse.Namespace) -> int:
    from treetune.config.errors import ConfigError, ConfigIssue
    from treetune.config.jsonnet import load

    stored = options.experiment / "config.json"
    if not stored.is_file():
        raise ValueError(f"{options.experiment} holds no experiment: there is no {stored}")
    files = [str(stored.resolve())]
    own = load(files, environment_keys=())
    other = load([*files, *files_of(options)], options.override or (), environment_keys=())
    from treetune.analyzers.replay import REPLACEABLE, replay
    from treetune.analyzers.replayed import in_words
    from treetune.config.explain import Explanation
    from treetune.runtime.directory import ExperimentDirectory
    from treetune.runtime.manifest import read_manifest

    keys = {**own.data, **other.data}.keys() - {"imports"}  # they make parts known, and decide nothing
    changed = [key for key in sorted(keys) if own.data.get(key) != other.data.get(key)]
    if strange := [key for key in changed if key not in REPLACEABLE]:
        raise ConfigError(
            [
                ConfigIssue(
                    f"a replay works on the answers as they are; {strange[0]} decides which these were",
                    strange[0],
                    remedy=f"override {', '.join(REPLACEABLE)} alone, with `imports` for parts of your own",
                )
            ]
        )
    recorded = read_manifest(ExperimentDirectory(options.experiment)).get("own_folders", ())
    beside = [*map(str, Explanation(other).folders), *recorded]
    roots = [cast("PolicyIteration", built(one, "replay", "an experiment", beside)) for one in (own, other)]
    result = replay(
        options.experiment.resolve(),
        options.iteration,
        roots[0],
        own.data,
        roots[1] if changed else None,
        options.exact,
    )
    if os.environ.get("RANK", "0") == "0":
        for line in in_words(result):
            say(line)
    return 0


def _import_own_parts(experiment: Path) -> None:
    """Those of the user that its configuration imports, found from here."""
    from treetune.config.imports import import_parts

    stored = experiment / "config.json"
    import_parts(json.loads(stored.read_text()) if stored.is_file() else {})


def _experiment(options: argparse.Namespace) -> tuple[Config, Runtime]:
    config = evaluated(options)
    root = built(config, options.command, "an experiment")
    options.log_file = log_file(config)
    return config, cast("Runtime", root)


def log_file(config: Config) -> Path | None:
    """Where a run of this configuration writes its log, for the traceback of a failure."""
    directory, name = config.data.get("directory", "experiments"), config.data.get("experiment_name")
    return Path(directory) / name / "logs" / "run.log" if name else None


IN_RANKS = (
    "run_iteration_loop",
    "run_evaluation",
    "run_evaluation_on_baseline",
    "only_generate_episodes",
    "run_analyzers",
)

COMMANDS = (
    Command(
        "run",
        run_ranks,
        "start a command of an experiment on all GPUs of this machine; its exit code is the run's",
        "Starts the ranks of a command (run_iteration_loop, unless another is named) through DeepSpeed's node"
        " launcher: one for each GPU, or one on a CPU. Signals are passed on. The exit code is 0 only if all"
        " ranks came to their end. On several machines, start it on each with the same --nodes.",
        (
            f"treetune run {VINEPPO}",
            f"treetune run {VINEPPO} run_evaluation --num_gpus 2",
            f"treetune run {VINEPPO} --nodes n1,n2 --node_rank 1 --master_port 29500",
        ),
        (
            Argument(
                "what", {"nargs": "?", "default": IN_RANKS[0], "choices": IN_RANKS, "metavar": "COMMAND"}
            ),
            Argument(
                "--num_gpus", {"type": int, "metavar": "N", "help": "ranks here (default: NUM_GPUS, all)"}
            ),
            Argument("--nodes", {"metavar": "A,B,…", "help": "all machines; ranks meet on the first"}),
            Argument("--node_rank", {"type": int, "default": 0, "metavar": "I", "help": "which one this is"}),
            Argument("--master_port", {"type": int, "metavar": "PORT", "help": "where ranks meet"}),
        ),
    ),
    Command(
        "run_iteration_loop",
        run_experiment,
        "train: sample, credit, train, sync, as often as the experiment says; resumes",
        "Trains the experiment and measures it. The same command continues an interrupted run where it was."
        " `treetune run` starts it on several GPUs.",
        (
            f"treetune {VINEPPO} run_iteration_loop",
            f"treetune {VINEPPO} --override '{{trainer+: {{learning_rate: 3e-6}}}}' run_iteration_loop",
        ),
    ),
    Command(
        "run_evaluation",
        run_experiment,
        "evaluate every checkpoint of an experiment, finished or running",
        "Measures all evaluation sets on every checkpoint, and follows a run that is still going on."
        " Several of these commands, also on several machines, share the work.",
        (f"treetune {VINEPPO} run_evaluation",),
    ),
    Command(
        "run_evaluation_on_baseline",
        run_experiment,
        "evaluate the model that the experiment starts from",
        "Measures all evaluation sets on the start weights, as checkpoint 0.",
        (f"treetune {VINEPPO} run_evaluation_on_baseline",),
    ),
    Command(
        "only_generate_episodes",
        run_experiment,
        "one iteration's episodes, without training",
        "Samples and credits the next iteration's episodes and leaves them in the experiment's folder. The"
        " next run_iteration_loop trains on them.",
        (f"treetune {VINEPPO} only_generate_episodes",),
    ),
    Command(
        "clean_up_checkpoints",
        run_experiment,
        "delete what only resuming needs; the policies stay",
        "Deletes the checkpoints that `checkpoints` in the configuration doesn't keep, and says which.",
        (f"treetune {VINEPPO} --override '{{checkpoints: {{keep_every: 5}}}}' clean_up_checkpoints",),
    ),
    Command(
        "check_finished",
        run_experiment,
        "whether a run has all of its iterations; for scripts",
        "Ends with another code than 0 where iterations are still to come. DeepSpeed's own command ends with"
        " 0 when a part of it was killed; `treetune run` doesn't.",
        (f"treetune {VINEPPO} check_finished",),
    ),
    Command(
        "run_analyzers",
        run_analyzers,
        "numbers and figures about an experiment, by the analyzers on its right; resumes",
        "Carries out the experiment's `analyzers` and writes numbers, a figure and the states that they are"
        " of to analyses/ in its folder.",
        (
            "treetune --configs configs/quickstart/vineppo.jsonnet,configs/analyzers/value_accuracy.jsonnet"
            " run_analyzers",
        ),
    ),
    Command(
        "report",
        report,
        "one self-contained HTML file about experiments",
        "Curves, time by phase, and answers coloured by advantage, of one or several experiments side by"
        " side. The page needs no network.",
        ("treetune report experiments/quickstart/vineppo experiments/quickstart/grpo --output report.html",),
        (
            Argument("experiments", {"nargs": "+", "metavar": "EXPERIMENT_DIR"}),
            Argument(
                "--output",
                {"type": Path, "metavar": "FILE", "help": "default: report.html in the first one"},
            ),
        ),
    ),
    Command(
        "compare_analyses",
        compare_analyses,
        "one figure of an analysis of several experiments",
        "Draws one analysis of several experiments in one figure. Experiments that have the same LABEL,"
        " such as a method's seeds, are taken together.",
        (
            "treetune compare_analyses value_accuracy VinePPO=experiments/quickstart/vineppo"
            " PPO=experiments/quickstart/ppo --output value_accuracy",
        ),
        (
            Argument("analysis", {"metavar": "NAME", "help": "such as value_accuracy"}),
            Argument("experiments", {"nargs": "+", "metavar": "[LABEL=]EXPERIMENT_DIR"}),
            Argument(
                "--output",
                {"type": Path, "required": True, "metavar": "PATH", "help": "without an ending"},
            ),
        ),
    ),
    Command(
        "bisect_runs",
        bisect_runs,
        "where two runs part: the first iteration, phase and number that differs",
        "Compares what two runs wrote, in the order in which they wrote it: answers, credit, metrics,"
        " weights, trainer's state, evaluations. Numbers that a clock decides are left out. The exit code is"
        " 1 where they differ.",
        ("treetune bisect_runs experiments/quickstart/vineppo experiments/again/vineppo",),
        (
            Argument("first", {"type": Path, "metavar": "EXPERIMENT_DIR"}),
            Argument("second", {"type": Path, "metavar": "EXPERIMENT_DIR"}),
        ),
    ),
    Command(
        "replay",
        replay,
        "an iteration's stored answers with another credit, selection or objective",
        "Trains one iteration again, as it was and as --override has it, from the stored answers and the"
        " weights of then: advantages side by side, norms and cosine of the gradients and of the steps. Only"
        " what another credit needs beyond what is stored is sampled. What --configs names goes on the right"
        " of the stored configuration, before --override. The bits of a run of several ranks come from as"
        " many: start it with the launcher, as the run was.",
        (
            "treetune --override \"{credit: {type: 'group'}}\" replay experiments/quickstart/vineppo"
            " --iteration 1",
        ),
        (
            Argument("experiment", {"type": Path, "metavar": "EXPERIMENT_DIR"}),
            Argument("--iteration", {"type": int, "required": True, "metavar": "N", "help": "from 1"}),
            Argument(
                "--exact",
                {
                    "action": "store_true",
                    "help": "where the optimiser's state of then is gone, make it again from the episodes of"
                    " the iterations before: dear, and to the bit",
                },
            ),
        ),
    ),
)
