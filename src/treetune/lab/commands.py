"""Commands that examine runs: analyses, replay, first differences, certificates, forks, and the arena."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from treetune.cli.command import (
    PATH,
    Command,
    Options,
    WordsOption,
    build_root,
    evaluate_configuration,
    files_of,
    import_own_parts,
    say,
)
from treetune.cli.experiments import continue_command, load_experiment

if TYPE_CHECKING:
    from treetune.config.layers import Config
    from treetune.runtime.base import PolicyIteration


def run_analyzers(options: Options) -> int:
    config, root = load_experiment(options)
    from treetune.lab.analyzers.command import run_analyzers

    return run_analyzers(root, config.data)


def compare_analyses(options: Options) -> int:
    import treetune.parts  # noqa: F401  (registers the analyzers)
    from treetune.lab.analyzers.command import compare_analyses

    for text in options.experiments:
        _, _, folder = text.rpartition("=")  # DIR, or LABEL=DIR
        import_own_parts(Path(folder))
    figure = compare_analyses(options.analysis, options.experiments, options.output)
    say(f"{figure}.png, .svg and .json")
    return 0


def bisect_runs(options: Options) -> int:
    from treetune.lab.analyzers.first_difference import find_first_difference

    difference = find_first_difference(options.first, options.second)
    if difference is None:
        say("the runs are the same in all files that both have")
        return 0
    say(str(difference))
    return 1


def _stored_config(experiment: Path, files: Sequence[str] = (), overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration that a run has stored, followed by files and overrides.

    Environment variables such as APP_SEED change nothing: the stored configuration has their values."""
    from treetune.config.jsonnet import load
    from treetune.runtime.directory import ExperimentDirectory

    config_file = ExperimentDirectory(experiment).config_file
    if not config_file.is_file():
        raise ValueError(f"{experiment} has no experiment: {config_file} is missing")
    return load([str(config_file.resolve()), *files], overrides, environment_keys=())


def _build_experiment(
    config: Config, command: str, experiment: Path, folders: Sequence[str] = ()
) -> PolicyIteration:
    """Builds the experiment of a configuration.

    Users' modules are searched in `folders`, and in the folders where the run in `experiment` found them."""
    from treetune.runtime.directory import ExperimentDirectory
    from treetune.runtime.manifest import read_manifest

    recorded = read_manifest(ExperimentDirectory(experiment)).get("own_folders", ())
    return cast("PolicyIteration", build_root(config, command, "an experiment", [*folders, *recorded]))


def replay(options: Options) -> int:
    from treetune.config.errors import ConfigIssue
    from treetune.exceptions import ConfigError

    run_config = _stored_config(options.experiment)
    new_config = _stored_config(options.experiment, files_of(options), options.override or ())
    from treetune.config.explain import Explanation
    from treetune.lab.analyzers.replay import REPLACEABLE_KEYS, describe_result, replay

    # `imports` is left out, because imports alone change no result.
    keys = sorted({**run_config.data, **new_config.data}.keys() - {"imports"})
    changed_keys = [key for key in keys if run_config.data.get(key) != new_config.data.get(key)]
    not_replaceable = [key for key in changed_keys if key not in REPLACEABLE_KEYS]
    if not_replaceable:
        raise ConfigError(
            [
                ConfigIssue(
                    f"a replay uses the stored answers, and {not_replaceable[0]} would have changed them",
                    not_replaceable[0],
                    remedy=f"override only {', '.join(REPLACEABLE_KEYS)}, and `imports` for your own"
                    " components",
                )
            ]
        )
    # Modules of the user's parts may be beside the command's files, and the run doesn't know these folders.
    module_folders = [str(folder) for folder in Explanation(new_config).folders]
    run_experiment = _build_experiment(run_config, "replay", options.experiment, module_folders)
    new_experiment = _build_experiment(new_config, "replay", options.experiment, module_folders)
    result = replay(
        options.experiment.resolve(),
        options.iteration,
        run_experiment,
        run_config.data,
        new_experiment if changed_keys else None,
        options.exact,
    )
    if os.environ.get("RANK", "0") == "0":  # all ranks have the result, and one prints it
        for line in describe_result(result):
            say(line)
    return 0


def certify(options: Options) -> int:
    root = _build_experiment(_stored_config(options.experiment), "certify", options.experiment)
    from treetune.lab.certificates import certify

    certificate_file = certify(options.experiment, root)
    say(str(certificate_file))
    return 0


def verify(options: Options) -> int:
    run = (options.experiment or options.certificate.parent).resolve()
    config = _stored_config(run)
    root = _build_experiment(config, "verify", run)
    from treetune.lab.certificates import verify

    for line in verify(options.certificate, root, config.data, run, options.iteration, options.exact):
        if os.environ.get("RANK", "0") == "0":  # all ranks have the lines, and one prints them
            say(line)
    return 0


def fork(options: Options) -> int:
    # The branch's configuration: that of --configs, or else the run's own with --override.
    if options.configs:
        config = evaluate_configuration(options)
    else:
        config = _stored_config(options.experiment, overrides=options.override or ())
    root = _build_experiment(config, "fork", options.experiment)
    from treetune.lab.fork import fork
    from treetune.runtime.directory import ExperimentDirectory

    branch_folder = fork(options.experiment, options.iteration, root, config.data)
    say(str(branch_folder))
    # The command goes to standard error, so that scripts read the folder alone.
    command = continue_command(ExperimentDirectory(branch_folder))
    print(f"this command runs it: {command}", file=sys.stderr)
    return 0


def arena(options: Options) -> int:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.lab.arena.scores import run_arena

    run_arena(
        options.modules,
        options.methods,
        options.languages,
        options.output,
        options.seed,
        options.problems,
        options.against,
    )
    return 0


def credit_worth(options: Options) -> int:
    # This file replaces the experiment's analyzers by the one whose results `describe_worth` reads.
    options.configs = [*(options.configs or ()), "analyzers/credit_worth.jsonnet"]
    config, root = load_experiment(options)
    from treetune.lab.analyzers.command import run_analyzers
    from treetune.lab.arena.worth import describe_worth
    from treetune.runtime.directory import ExperimentDirectory

    exit_code = run_analyzers(root, config.data)
    if exit_code:
        return exit_code
    for line in describe_worth(ExperimentDirectory.of(cast("PolicyIteration", root))):
        say(line)
    return 0


EXPERIMENT_ARGUMENT = click.Argument(["experiment"], type=PATH, metavar="EXPERIMENT_DIR")
EXACT_OPTION = click.Option(
    ["--exact"],
    is_flag=True,
    help="if the optimiser's state was deleted, compute it again from the episodes of the earlier"
    " iterations: slow, but bit-identical",
)

COMMANDS = (
    Command(
        "run_analyzers",
        run_analyzers,
        "run an experiment's analyzers: numbers and figures about it; resumes",
        "Runs the `analyzers` of the configuration and writes their numbers, figures and the states that they"
        " looked at to analyses/ in the experiment's folder.",
        ("treetune run_analyzers --configs quickstart/vineppo.jsonnet,analyzers/value_accuracy.jsonnet",),
        in_ranks=True,
        takes_files=True,
    ),
    Command(
        "compare_analyses",
        compare_analyses,
        "draw one analysis of several experiments in one figure",
        "Draws one analysis of several experiments in one figure. Experiments with the same LABEL, such as"
        " the seeds of a method, are combined.",
        (
            "treetune compare_analyses value_accuracy VinePPO=experiments/quickstart/vineppo"
            " PPO=experiments/quickstart/ppo --output value_accuracy",
        ),
        (
            click.Argument(["analysis"], metavar="NAME", help="such as value_accuracy"),
            click.Argument(["experiments"], nargs=-1, required=True, metavar="[LABEL=]DIR..."),
            click.Option(
                ["--output"], required=True, type=PATH, metavar="PATH", help="without a file ending"
            ),
        ),
    ),
    Command(
        "bisect_runs",
        bisect_runs,
        "find the first difference between two runs",
        "Compares the files of two runs in the order in which they were written: answers, credit, metrics,"
        " weights, trainer's state, evaluations. Prints the first iteration, phase and number that differs;"
        " the exit code is then 1. Measured times are ignored.",
        ("treetune bisect experiments/quickstart/vineppo experiments/again/vineppo",),
        (
            click.Argument(["first"], type=PATH, metavar="EXPERIMENT_DIR"),
            click.Argument(["second"], type=PATH, metavar="EXPERIMENT_DIR"),
        ),
    ),
    Command(
        "replay",
        replay,
        "repeat an iteration with another credit, selection or objective",
        "Trains one iteration again from its stored answers and the weights that it began with, once as it"
        " was and once with the changes of --configs and --override. Prints advantages of both, and norms and"
        " cosine of their gradients and steps. It samples only what the other credit needs and the run didn't"
        " store. To repeat a run of several ranks exactly, start it with as many.",
        (
            "treetune replay experiments/quickstart/vineppo --iteration 1 --override"
            " \"{credit: {type: 'group'}}\"",
        ),
        (
            EXPERIMENT_ARGUMENT,
            click.Option(["--iteration"], required=True, type=int, metavar="N", help="from 1"),
            EXACT_OPTION,
        ),
        takes_files=True,
    ),
    Command(
        "certify",
        certify,
        "write hashes of a run's inputs and results, for others to verify",
        "Writes certificate.json into the run's folder: hashes of configuration, data, code and versions, and"
        " the chain of checksums of every iteration's answers, episodes and weights.",
        ("treetune certify experiments/quickstart/vineppo",),
        (EXPERIMENT_ARGUMENT,),
    ),
    Command(
        "verify",
        verify,
        "compare a run with its certificate, and train one iteration again",
        "Compares the files of EXPERIMENT_DIR (default: the certificate's folder) with the certificate, and"
        " trains an iteration again from its stored answers. Reports that the weights are bit-identical, or"
        " the first tensor that differs and by how much. A difference that another processor or number of"
        " threads explains is not a failure.",
        ("treetune verify experiments/quickstart/vineppo/certificate.json",),
        (
            click.Argument(["certificate"], type=PATH, metavar="CERTIFICATE"),
            click.Argument(["experiment"], required=False, type=PATH, metavar="[EXPERIMENT_DIR]"),
            click.Option(["--iteration"], type=int, metavar="N", help="from 1 (default: at random)"),
            EXACT_OPTION,
        ),
    ),
    Command(
        "fork",
        fork,
        "start another experiment from a run's state after some iteration",
        "Creates the folder of another experiment, which begins with the run's state after N iterations."
        " --configs describes it, or --override changes the run's own configuration; it needs another"
        " experiment_name. It prints the command that runs the fork. Forks of a run draw the same problems"
        " and sample with the same seeds.",
        (
            "treetune fork experiments/quickstart/vineppo --iteration 8 --override"
            " \"{experiment_name+: '_grpo', credit: {type: 'group'}}\"",
        ),
        (
            EXPERIMENT_ARGUMENT,
            click.Option(["--iteration"], type=int, metavar="N", help="default: the newest state"),
        ),
        takes_files=True,
    ),
    Command(
        "arena",
        arena,
        "benchmark credits: gradient noise and cost on toy tasks",
        "Scores the credits and value estimators that each MODULE registers, or all that are shipped, on toy"
        " languages with known exact values: its gain (RLOO with eight answers has 1), its cost, and how"
        " often it finds the step that decides. Each estimator takes two minutes.",
        ("treetune arena my_estimator", "treetune arena --output docs/results"),
        (
            click.Argument(
                ["modules"], nargs=-1, metavar="[MODULE]...", help="such as my_package.my_estimator"
            ),
            WordsOption(["--methods"], metavar="NAME", help="such as RLOO 'VinePPO K=3'; default: all"),
            WordsOption(["--languages"], metavar="NAME", help="default: all"),
            click.Option(
                ["--problems"],
                type=int,
                default=1000,
                metavar="N",
                help="problems at most, with eight answers each",
            ),
            click.Option(["--seed"], type=int, default=1, metavar="N"),
            click.Option(
                ["--output"],
                type=PATH,
                metavar="DIR",
                help="for arena.md, arena_steps.md, data and figures",
            ),
            click.Option(
                ["--against"],
                type=PATH,
                metavar="FILE",
                help="an arena.json of another seed, to compare ranks with",
            ),
        ),
    ),
    Command(
        "credit_worth",
        credit_worth,
        "find out which credit method pays off for a run",
        "Computes the credit of eleven methods for answers of the run's last checkpoint. Prints by how much"
        " each reduces the gradient's noise, how many tokens it samples for that, and the net gain at the"
        " run's own cost of training a token. Nothing is trained.",
        ("treetune credit_worth --configs configs/quickstart/vineppo.jsonnet",),
        in_ranks=True,
        takes_files=True,
    ),
)
