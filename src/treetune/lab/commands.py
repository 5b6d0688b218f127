"""Commands that examine runs: analyses, replay, first differences, certificates, forks, and the arena."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from treetune.cli.command import Argument, Command, built, evaluated, files_of, import_own_parts, say
from treetune.cli.experiments import load_experiment

if TYPE_CHECKING:
    from treetune.config.jsonnet import Config
    from treetune.runtime.base import PolicyIteration


def run_analyzers(options: argparse.Namespace) -> int:
    config, root = load_experiment(options)
    from treetune.lab.analyzers.command import run_analyzers

    return run_analyzers(root, config.data)


def compare_analyses(options: argparse.Namespace) -> int:
    import treetune.parts  # noqa: F401  (registers the analyzers)
    from treetune.lab.analyzers.command import compare_analyses

    for text in options.experiments:
        import_own_parts(Path(text.rpartition("=")[2]))
    figure = compare_analyses(options.analysis, options.experiments, options.output)
    say(f"{figure}.png, .svg and .json")
    return 0


def bisect_runs(options: argparse.Namespace) -> int:
    from treetune.lab.analyzers.first_difference import first_difference

    difference = first_difference(options.first, options.second)
    if difference is None:
        say("the runs are the same in all files that both have")
        return 0
    say(str(difference))
    return 1


def _stored(experiment: Path, files: Sequence[str] = (), overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration that a run has stored, followed by files and overrides."""
    from treetune.config.jsonnet import load

    stored = experiment / "config.json"
    if not stored.is_file():
        raise ValueError(f"{experiment} has no experiment: {stored} is missing")
    return load([str(stored.resolve()), *files], overrides, environment_keys=())


def _built(config: Config, command: str, experiment: Path, folders: Sequence[str] = ()) -> PolicyIteration:
    """Builds the experiment of a configuration.

    Users' modules are searched in `folders`, and in the folders where the run in `experiment` found them."""
    from treetune.runtime.directory import ExperimentDirectory
    from treetune.runtime.manifest import read_manifest

    recorded = read_manifest(ExperimentDirectory(experiment)).get("own_folders", ())
    return cast("PolicyIteration", built(config, command, "an experiment", [*folders, *recorded]))


def replay(options: argparse.Namespace) -> int:
    from treetune.config.errors import ConfigIssue
    from treetune.exceptions import ConfigError

    own = _stored(options.experiment)
    other = _stored(options.experiment, files_of(options), options.override or ())
    from treetune.config.explain import Explanation
    from treetune.lab.analyzers.replay import REPLACEABLE, describe_result, replay

    keys = {**own.data, **other.data}.keys() - {"imports"}  # imports alone change no result
    changed = [key for key in sorted(keys) if own.data.get(key) != other.data.get(key)]
    not_replaceable = [key for key in changed if key not in REPLACEABLE]
    if not_replaceable:
        raise ConfigError(
            [
                ConfigIssue(
                    f"a replay uses the stored answers, and {not_replaceable[0]} would have changed them",
                    not_replaceable[0],
                    remedy=f"override only {', '.join(REPLACEABLE)}, and `imports` for your own components",
                )
            ]
        )
    folders = list(map(str, Explanation(other).folders))
    roots = [_built(config, "replay", options.experiment, folders) for config in (own, other)]
    result = replay(
        options.experiment.resolve(),
        options.iteration,
        roots[0],
        own.data,
        roots[1] if changed else None,
        options.exact,
    )
    if os.environ.get("RANK", "0") == "0":
        for line in describe_result(result):
            say(line)
    return 0


def certify(options: argparse.Namespace) -> int:
    root = _built(_stored(options.experiment), "certify", options.experiment)
    from treetune.lab.certificates import certify

    say(f"{certify(options.experiment, root)}")
    return 0


def verify(options: argparse.Namespace) -> int:
    run = (options.experiment or options.certificate.parent).resolve()
    config = _stored(run)
    root = _built(config, "verify", run)
    from treetune.lab.certificates import verify

    for line in verify(options.certificate, root, config.data, run, options.iteration, options.exact):
        if os.environ.get("RANK", "0") == "0":
            say(line)
    return 0


def fork(options: argparse.Namespace) -> int:
    changed = options.override or ()
    config = evaluated(options) if options.configs else _stored(options.experiment, (), changed)
    root = _built(config, "fork", options.experiment)
    from treetune.lab.fork import fork

    say(f"{fork(options.experiment, options.iteration, root, config.data)}")
    return 0


def arena(options: argparse.Namespace) -> int:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.lab.arena.scores import run_arena

    run_arena(
        options.modules, options.languages, options.output, options.seed, options.problems, options.against
    )
    return 0


def credit_worth(options: argparse.Namespace) -> int:
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


EXPERIMENT = Argument("experiment", {"type": Path, "metavar": "EXPERIMENT_DIR"})
EXACT = Argument(
    "--exact",
    {
        "action": "store_true",
        "help": "where the optimiser's state was deleted, compute it from the episodes of all earlier"
        " iterations: slow, but bit-identical",
    },
)

COMMANDS = (
    Command(
        "run_analyzers",
        run_analyzers,
        "carry out the analyzers of an experiment; resumes",
        "Carries out the experiment's `analyzers`, and writes numbers, a figure and single states to"
        " analyses/ in its folder.",
        ("treetune run_analyzers --configs quickstart/vineppo.jsonnet,analyzers/value_accuracy.jsonnet",),
        in_ranks=True,
    ),
    Command(
        "compare_analyses",
        compare_analyses,
        "draw an analysis of several experiments in one figure",
        "Draws an analysis of several experiments in one figure. Experiments with the same LABEL, such as"
        " the seeds of a method, are pooled.",
        (
            "treetune compare_analyses value_accuracy VinePPO=experiments/quickstart/vineppo"
            " PPO=experiments/quickstart/ppo --output value_accuracy",
        ),
        (
            Argument("analysis", {"metavar": "NAME", "help": "such as value_accuracy"}),
            Argument("experiments", {"nargs": "+", "metavar": "[LABEL=]DIR"}),
            Argument(
                "--output",
                {"type": Path, "required": True, "metavar": "PATH", "help": "without a suffix"},
            ),
        ),
    ),
    Command(
        "bisect_runs",
        bisect_runs,
        "find the first difference between two runs: iteration, phase and number",
        "Compares the files of two runs in the order in which they were written: answers, credit, metrics,"
        " weights, trainer's state, evaluations. Numbers that depend on time are ignored. The exit code is 1"
        " if they differ.",
        ("treetune bisect experiments/quickstart/vineppo experiments/again/vineppo",),
        (
            Argument("first", {"type": Path, "metavar": "EXPERIMENT_DIR"}),
            Argument("second", {"type": Path, "metavar": "EXPERIMENT_DIR"}),
        ),
    ),
    Command(
        "replay",
        replay,
        "train an iteration's stored answers again with another credit, selection or objective",
        "Trains an iteration again from its stored answers and weights, as it was and as --override has it:"
        " compares advantages, norms and the cosine of gradients and steps. Only continuations that another"
        " credit needs in addition are sampled. --configs is appended to the stored configuration, before"
        " --override. For bit-identical results of a run with several ranks, start it with the same launcher"
        " and as many ranks.",
        (
            "treetune --override \"{credit: {type: 'group'}}\" replay experiments/quickstart/vineppo"
            " --iteration 1",
        ),
        (
            EXPERIMENT,
            Argument("--iteration", {"type": int, "required": True, "metavar": "N", "help": "from 1"}),
            EXACT,
        ),
    ),
    Command(
        "certify",
        certify,
        "write hashes of a run's inputs and results, for others to verify",
        "Writes certificate.json into the run's folder: hashes of configuration, data, code and versions, and"
        " the chain of checksums of every iteration's answers, episodes and weights.",
        ("treetune certify experiments/quickstart/vineppo",),
        (EXPERIMENT,),
    ),
    Command(
        "verify",
        verify,
        "compare a run with its certificate, and train one of its iterations again",
        "Compares the files of EXPERIMENT_DIR (the certificate's folder, or the parts of it that are needed)"
        " with the certificate, and trains an iteration again from its stored answers. Reports whether the"
        " weights are bit-identical, or else the first tensor that differs. A difference that another"
        " processor or number of threads explains is not a failure.",
        ("treetune verify experiments/quickstart/vineppo/certificate.json",),
        (
            Argument("certificate", {"type": Path, "metavar": "CERTIFICATE"}),
            Argument("experiment", {"type": Path, "nargs": "?", "metavar": "EXPERIMENT_DIR"}),
            Argument("--iteration", {"type": int, "metavar": "N", "help": "from 1 (default: at random)"}),
            EXACT,
        ),
    ),
    Command(
        "fork",
        fork,
        "create an experiment that continues from a run's state, with the same problems and seeds",
        "Creates the folder of the experiment that --configs describes, or of the run's own experiment with"
        " --override, which must set another experiment_name. Its state is the run's after N iterations, and"
        " run_iteration_loop continues it. Branches draw the same problems and sample with the same seeds.",
        (
            "treetune --override \"{experiment_name+: '_grpo', credit: {type: 'group'}}\""
            " fork experiments/quickstart/vineppo --iteration 8",
        ),
        (
            EXPERIMENT,
            Argument("--iteration", {"type": int, "metavar": "N", "help": "default: the newest state"}),
        ),
    ),
    Command(
        "arena",
        arena,
        "measure how much a credit method reduces the noise of the gradient, and at what cost",
        "Scores the credit methods and value estimators that each MODULE registers, or all of this package,"
        " on toy languages with exact values. RLOO with eight answers is 1. An estimator takes two minutes.",
        ("treetune arena my_estimator", "treetune arena --output docs/results"),
        (
            Argument(
                "modules", {"nargs": "*", "metavar": "MODULE", "help": "such as my_package.my_estimator"}
            ),
            Argument("--languages", {"nargs": "+", "metavar": "NAME", "help": "by default all"}),
            Argument(
                "--problems",
                {
                    "type": int,
                    "default": 1000,
                    "metavar": "N",
                    "help": "the most problems, with eight answers each",
                },
            ),
            Argument("--seed", {"type": int, "default": 1, "metavar": "N"}),
            Argument(
                "--output", {"type": Path, "metavar": "DIR", "help": "for arena.md, its data and figures"}
            ),
            Argument(
                "--against",
                {
                    "type": Path,
                    "metavar": "FILE",
                    "help": "an arena.json of another seed, to compare the ranks",
                },
            ),
        ),
    ),
    Command(
        "credit_worth",
        credit_worth,
        "find which credit method pays off for a run",
        "Assigns the credit of eleven methods to answers of the run's last checkpoint. Reports how much each"
        " reduces the noise of the gradient, how many tokens it samples, and whether that pays off at the"
        " run's measured cost of training. Nothing is trained.",
        ("treetune --configs configs/quickstart/vineppo.jsonnet credit_worth",),
        in_ranks=True,
    ),
)
