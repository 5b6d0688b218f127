"""Commands that run an experiment, and those that read what it wrote."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from treetune.cli.command import Argument, Command, built, evaluated

if TYPE_CHECKING:
    from treetune.config.jsonnet import Config
    from treetune.runtime.base import Runtime

VINEPPO = "--configs configs/quickstart/vineppo.jsonnet"


def run_experiment(options: argparse.Namespace) -> int:
    config, root = load_experiment(options)
    from treetune.runtime.commands import run

    return run(options.command, root, config.data, options)


def run_ranks(options: argparse.Namespace) -> int:
    """Starts `options.what` on this machine's ranks; a wrong configuration ends it before there are any."""
    from treetune.runtime import front_door

    in_ranks = [command.name for command in options.commands.values() if command.in_ranks]
    options.what = {"evaluate": "run_evaluation"}.get(options.what, options.what)
    if options.what not in in_ranks:
        raise ValueError(f"{options.what!r} is no command that runs in ranks: {', '.join(in_ranks)} are")
    load_experiment(options)
    nodes = options.nodes.split(",") if options.nodes else ["localhost"]
    if not 0 <= options.node_rank < len(nodes):
        raise ValueError(f"--node_rank is {options.node_rank}, and --nodes names {len(nodes)}: count from 0")
    if len(nodes) > 1 and not options.master_port:
        raise ValueError("several nodes need the same --master_port, a free one of the first node's")
    ranks = front_door.ranks_here(options.num_gpus)
    if ranks * len(nodes) == 1:  # a launcher would be two more processes that import torch
        os.environ.setdefault("OMP_NUM_THREADS", front_door.threads_each(1))
        options.command = options.what
        return options.commands[options.what].run(options)
    arguments: list[str] = []
    for names in options.configs or ():
        arguments += ["--configs", names]
    for override in options.override or ():
        arguments += ["--override", override]
    if options.debug:
        arguments.append("--debug")
    return front_door.start_ranks(
        [*arguments, options.what], ranks, nodes, options.node_rank, options.master_port or 0
    )


def load_experiment(options: argparse.Namespace) -> tuple[Config, Runtime]:
    config = evaluated(options)
    root = built(config, options.command, "an experiment")
    options.log_file = log_file(config)
    return config, cast("Runtime", root)


def log_file(config: Config) -> Path | None:
    """Returns the log file of a run of this configuration, which gets the traceback of a failure."""
    directory, name = config.data.get("directory", "experiments"), config.data.get("experiment_name")
    return Path(directory) / name / "logs" / "run.log" if name else None


COMMANDS = (
    Command(
        "run",
        run_ranks,
        "train an experiment on this machine's GPUs, or on its CPU; resumes",
        "Starts the ranks of a command (run_iteration_loop, unless another is named) through DeepSpeed's node"
        " launcher: one for each GPU, or one on a CPU. Signals are passed on. The exit code is 0 only if all"
        " ranks came to their end. On several machines, start it on each with the same --nodes.",
        (
            f"treetune run {VINEPPO}",
            f"treetune run {VINEPPO} evaluate --num_gpus 2",
            f"treetune run {VINEPPO} --nodes n1,n2 --node_rank 1 --master_port 29500",
        ),
        (
            Argument(
                "what",
                {"nargs": "?", "default": "run_iteration_loop", "metavar": "COMMAND"},
                completes="rank_commands",
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
        in_ranks=True,
    ),
    Command(
        "run_evaluation",
        run_experiment,
        "measure every checkpoint of an experiment, finished or running",
        "Measures all evaluation sets on every checkpoint, and follows a run that is still going on."
        " Several of these commands, also on several machines, share the work.",
        (f"treetune evaluate {VINEPPO}",),
        in_ranks=True,
    ),
    Command(
        "run_evaluation_on_baseline",
        run_experiment,
        "evaluate the model that the experiment starts from",
        "Measures all evaluation sets on the start weights, as checkpoint 0.",
        (f"treetune {VINEPPO} run_evaluation_on_baseline",),
        in_ranks=True,
    ),
    Command(
        "only_generate_episodes",
        run_experiment,
        "one iteration's episodes, without training",
        "Samples and credits the next iteration's episodes and leaves them in the experiment's folder. The"
        " next run_iteration_loop trains on them.",
        (f"treetune {VINEPPO} only_generate_episodes",),
        in_ranks=True,
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
)
