"""Commands that run an experiment, and those that read what it wrote."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from treetune.cli.command import Command, Options, build_root, evaluate_configuration
from treetune.cli.completion import complete_rank_commands

if TYPE_CHECKING:
    from treetune.config.layers import Config
    from treetune.runtime.base import Runtime
    from treetune.runtime.directory import ExperimentDirectory

EXAMPLE_OPTIONS = "--configs configs/quickstart/vineppo.jsonnet"


def run_experiment(options: Options) -> int:
    """Carries out a command of `treetune.runtime` in this process."""
    config, root = load_experiment(options)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    # The other commands, such as `check_finished`, run in one process and need no PyTorch.
    if is_first_rank and options.commands[options.command].in_ranks:
        if options.command == "run_iteration_loop":
            _check_start(config, root)
        # The imports take ten seconds, in which a terminal would show nothing.
        print("the configuration is fine; loading PyTorch", file=sys.stderr, flush=True)
    from treetune.runtime.commands import run

    return run(options.command, root, config.data, options)


def run_ranks(options: Options) -> int:
    """Starts the command `options.what` in this machine's ranks. A wrong configuration is reported before any
    rank starts."""
    from treetune.runtime import rank_launcher
    from treetune.runtime.directory import ExperimentDirectory

    in_ranks = [command.name for command in options.commands.values() if command.in_ranks]
    if options.what == "evaluate":  # the only short name of a command that runs in ranks
        options.what = "run_evaluation"
    if options.what not in in_ranks:
        directory = ExperimentDirectory(Path(options.what))
        if directory.config_file.is_file() and directory.manifest_file.is_file():
            raise ValueError(
                f"`treetune run` can't start {options.what!r}: it is the folder of an experiment, which"
                f" `{continue_command(directory)}` continues"
            )
        raise ValueError(
            f"`treetune run` can't start {options.what!r}: it starts {', '.join(in_ranks)}; configuration"
            " files end in .jsonnet, .json or .yaml"
        )
    nodes = options.nodes.split(",") if options.nodes else ["localhost"]
    if not 0 <= options.node_rank < len(nodes):
        raise ValueError(
            f"--node_rank is {options.node_rank}, and --nodes names {len(nodes)} machines, counted from 0"
        )
    if len(nodes) > 1 and not options.master_port:
        raise ValueError("--master_port is missing: give all machines the same free port of the first one")
    ranks = rank_launcher.count_ranks_here(options.num_gpus, options.ranks)
    if ranks * len(nodes) == 1:
        # The command runs in this process. With a launcher, there would be two more processes that import
        # torch: the launcher and the rank.
        os.environ.setdefault("OMP_NUM_THREADS", rank_launcher.threads_per_process(1))
        options.command = options.what
        return options.commands[options.what].run(options)
    # A mistake is reported here, and not in each rank.
    config, root = load_experiment(options)
    if options.what == "run_iteration_loop":
        _check_start(config, root)
    arguments: list[str] = []
    for names in options.configs or ():
        arguments += ["--configs", names]
    for override in options.override or ():
        arguments += ["--override", override]
    if options.debug:
        arguments.append("--debug")
    return rank_launcher.start_ranks(
        [*arguments, options.what], ranks, nodes, options.node_rank, options.master_port or 0
    )


def continue_command(directory: ExperimentDirectory) -> str:
    """Returns the shell command that continues an experiment with the configuration in its folder."""
    return shlex.join(["treetune", "run", "--configs", str(directory.config_file)])


def load_experiment(options: Options) -> tuple[Config, Runtime]:
    """Returns the evaluated configuration of a command line, and the experiment that is built from it. Raises
    ConfigError."""
    config = evaluate_configuration(options)
    root = build_root(config, options.command, "an experiment")
    directory = _directory_of(config)
    if directory is not None:
        options.log_file = directory.run_log  # `main` writes the traceback of a failure there
    return config, cast("Runtime", root)


def _check_start(config: Config, root: Runtime) -> None:
    """Raises an error if a run of this configuration can't start, as far as this is known without PyTorch.

    Raises:
        FolderRefused: The experiment's folder holds a run with another configuration.
        ConfigError: A new run needs files, models or GPUs that aren't here. A run that is continued may need
            fewer of them, so they are not looked for.
    """
    directory = _directory_of(config)
    if directory is not None and directory.manifest_file.exists():
        from treetune.runtime.base import PolicyIteration
        from treetune.runtime.manifest import refuse_other_configuration

        assert isinstance(root, PolicyIteration)
        refuse_other_configuration(directory, root, config.data)
        return
    from treetune.config.explain import Explanation
    from treetune.config.remedies import issues_of_this_machine
    from treetune.exceptions import ConfigError

    issues_of_machine = issues_of_this_machine(root, Explanation(config))
    if issues_of_machine:
        raise ConfigError(issues_of_machine, "missing on this machine")


def _directory_of(config: Config) -> ExperimentDirectory | None:
    """Returns the directory of a run of this configuration; None for a configuration without a name."""
    from treetune.runtime.directory import ExperimentDirectory

    directory, name = config.data.get("directory", "experiments"), config.data.get("experiment_name")
    return ExperimentDirectory(Path(directory) / name) if name else None


COMMANDS = (
    Command(
        "run",
        run_ranks,
        "train an experiment on this machine's GPUs, or on its CPU; resumes",
        "Starts one process (a rank) for each GPU, or one on a CPU, through DeepSpeed's node launcher. The"
        " ranks train the experiment, or carry out COMMAND. The same command continues an interrupted run."
        " Signals are passed on to the ranks, and the exit code is 0 only if all of them finish. On several"
        " machines, run it on each with the same --nodes.",
        (
            f"treetune run {EXAMPLE_OPTIONS}",
            "treetune run quickstart/vineppo.jsonnet evaluate --num_gpus 2",
            f"treetune run {EXAMPLE_OPTIONS} --nodes n1,n2 --node_rank 1 --master_port 29500",
        ),
        (
            click.Argument(
                ["what"],
                required=False,
                default="run_iteration_loop",
                metavar="[COMMAND]",
                help="such as evaluate or run_analyzers; default: train",
                shell_complete=complete_rank_commands,
            ),
            click.Option(
                ["--num_gpus"], type=int, metavar="N", help="GPUs of this machine to use; default: all"
            ),
            click.Option(
                ["--ranks"],
                type=int,
                metavar="N",
                help="processes on this machine, also on a CPU; default: NUM_GPUS, else one for each GPU",
            ),
            click.Option(["--nodes"], metavar="A,B,…", help="names of all machines, this one included"),
            click.Option(
                ["--node_rank"],
                type=int,
                default=0,
                metavar="I",
                help="this machine's place among --nodes, from 0",
            ),
            click.Option(
                ["--master_port"],
                type=int,
                metavar="PORT",
                help="port of the first machine, where ranks connect",
            ),
        ),
        takes_files=True,
    ),
    Command(
        "run_iteration_loop",
        run_experiment,
        "train in this process alone; `treetune run` uses all GPUs; resumes",
        "Trains the experiment and evaluates it, in this process. DeepSpeed's launcher may start it on"
        " several GPUs, as `treetune run` does. The same command continues an interrupted run.",
        (
            f"treetune run_iteration_loop {EXAMPLE_OPTIONS}",
            f"treetune run_iteration_loop {EXAMPLE_OPTIONS}"
            " --override '{trainer+: {learning_rate: 3e-6}}'",
        ),
        in_ranks=True,
        takes_files=True,
    ),
    Command(
        "run_evaluation",
        run_experiment,
        "evaluate every checkpoint of an experiment, finished or running",
        "Runs all evaluation sets on every checkpoint, and follows a run that is still training. Several of"
        " these commands, also on several machines, share the work.",
        (f"treetune evaluate {EXAMPLE_OPTIONS}",),
        in_ranks=True,
        takes_files=True,
    ),
    Command(
        "run_evaluation_on_baseline",
        run_experiment,
        "evaluate the model that the experiment starts from",
        "Runs all evaluation sets on the start weights, as checkpoint 0.",
        (f"treetune run_evaluation_on_baseline {EXAMPLE_OPTIONS}",),
        in_ranks=True,
        takes_files=True,
    ),
    Command(
        "only_generate_episodes",
        run_experiment,
        "sample the next iteration's answers without training on them",
        "Samples the answers of the next iteration, computes their credit and stores the episodes in the"
        " experiment's folder. The next `treetune run` trains on them.",
        (f"treetune only_generate_episodes {EXAMPLE_OPTIONS}",),
        in_ranks=True,
        takes_files=True,
    ),
    Command(
        "clean_up_checkpoints",
        run_experiment,
        "delete the checkpoints that the configuration doesn't keep",
        "Deletes the checkpoints that `checkpoints` in the configuration doesn't keep, and prints how many it"
        " deleted and which it kept.",
        (f"treetune clean_up_checkpoints {EXAMPLE_OPTIONS} --override '{{checkpoints: {{keep_every: 5}}}}'",),
        takes_files=True,
    ),
    Command(
        "check_finished",
        run_experiment,
        "test whether a run has finished all of its iterations; for scripts",
        "The exit code is 0 if all iterations are done, and 2 otherwise. DeepSpeed's own launcher, unlike"
        " `treetune run`, exits with 0 even if one of its processes was killed.",
        (f"treetune check_finished {EXAMPLE_OPTIONS}",),
        takes_files=True,
    ),
)
