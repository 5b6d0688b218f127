"""Commands that look into what a run did: analyses, replay, where two runs part, certificates, forks."""

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
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.lab.analyzers.command import compare_analyses

    for text in options.experiments:
        import_own_parts(Path(text.rpartition("=")[2]))
    drawn = compare_analyses(options.analysis, options.experiments, options.output)
    say(f"{drawn}.png, .svg and .json")
    return 0


def bisect_runs(options: argparse.Namespace) -> int:
    from treetune.lab.analyzers.first_difference import first_difference

    found = first_difference(options.first, options.second)
    say("the runs are the same, as far as both have it" if found is None else str(found))
    return 0 if found is None else 1


def _stored(experiment: Path, files: Sequence[str] = (), overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration that a run has stored, with files and overrides on its right."""
    from treetune.config.jsonnet import load

    stored = experiment / "config.json"
    if not stored.is_file():
        raise ValueError(f"{experiment} holds no experiment: there is no {stored}")
    return load([str(stored.resolve()), *files], overrides, environment_keys=())


def _built(config: Config, command: str, experiment: Path, beside: Sequence[str] = ()) -> PolicyIteration:
    """Returns the experiment of a configuration, whose parts are looked for where the run found them, too."""
    from treetune.runtime.directory import ExperimentDirectory
    from treetune.runtime.manifest import read_manifest

    recorded = read_manifest(ExperimentDirectory(experiment)).get("own_folders", ())
    return cast("PolicyIteration", built(config, command, "an experiment", [*beside, *recorded]))


def replay(options: argparse.Namespace) -> int:
    from treetune.config.errors import ConfigIssue
    from treetune.exceptions import ConfigError

    own = _stored(options.experiment)
    other = _stored(options.experiment, files_of(options), options.override or ())
    from treetune.config.explain import Explanation
    from treetune.lab.analyzers.replay import REPLACEABLE, describe_result, replay

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
    beside = list(map(str, Explanation(other).folders))
    roots = [_built(one, "replay", options.experiment, beside) for one in (own, other)]
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

    if code := run_analyzers(root, config.data):
        return code
    for line in describe_worth(ExperimentDirectory.of(cast("PolicyIteration", root))):
        say(line)
    return 0


EXPERIMENT = Argument("experiment", {"type": Path, "metavar": "EXPERIMENT_DIR"})
EXACT = Argument(
    "--exact",
    {
        "action": "store_true",
        "help": "where the optimiser's state of then is gone, make it again from the episodes of the"
        " iterations before: dear, and to the bit",
    },
)

COMMANDS = (
    Command(
        "run_analyzers",
        run_analyzers,
        "numbers and figures about an experiment, by the analyzers on its right; resumes",
        "Carries out the experiment's `analyzers` and writes numbers, a figure and the states that they are"
        " of to analyses/ in its folder.",
        ("treetune run_analyzers --configs quickstart/vineppo.jsonnet,analyzers/value_accuracy.jsonnet",),
        in_ranks=True,
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
            Argument("experiments", {"nargs": "+", "metavar": "[LABEL=]DIR"}),
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
        ("treetune bisect experiments/quickstart/vineppo experiments/again/vineppo",),
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
            EXPERIMENT,
            Argument("--iteration", {"type": int, "required": True, "metavar": "N", "help": "from 1"}),
            EXACT,
        ),
    ),
    Command(
        "certify",
        certify,
        "hashes of all that a run rests on and of what it made, for others to verify",
        "Writes certificate.json into the run's folder: hashes of configuration, data, code and versions, and"
        " the chain of checksums of every iteration's answers, episodes and weights.",
        ("treetune certify experiments/quickstart/vineppo",),
        (EXPERIMENT,),
    ),
    Command(
        "verify",
        verify,
        "hold a run against its certificate, and train one of its iterations again",
        "Compares the files of EXPERIMENT_DIR (the certificate's folder, or the parts of it that are needed)"
        " with the certificate, trains an iteration again from its stored answers, and says that the weights"
        " are the same bits, or names the first tensor that differs and how far. A difference that another"
        " processor or number of threads explains is no failure.",
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
        "another experiment that goes on from a run's state, with the same problems and seeds",
        "Makes the folder of the experiment that --configs describes, or of the run's own with --override"
        " on its right, which needs another experiment_name. Its state is the run's after N iterations;"
        " run_iteration_loop goes on there. Branches draw the same problems and sample by the same seeds.",
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
        "how much noise a credit takes out of the gradient, and at what cost",
        "Scores the credits and value estimators that each MODULE registers, or all that are shipped, on"
        " languages whose truth is known. RLOO with eight answers is 1. An estimator takes two minutes.",
        ("treetune arena my_estimator", "treetune arena --output docs/results"),
        (
            Argument(
                "modules", {"nargs": "*", "metavar": "MODULE", "help": "such as my_package.my_estimator"}
            ),
            Argument("--languages", {"nargs": "+", "metavar": "NAME", "help": "by default all"}),
            Argument(
                "--problems",
                {"type": int, "default": 1000, "metavar": "N", "help": "at most, with eight answers each"},
            ),
            Argument("--seed", {"type": int, "default": 1, "metavar": "N"}),
            Argument(
                "--output", {"type": Path, "metavar": "DIR", "help": "for arena.md, its data and figures"}
            ),
            Argument(
                "--against",
                {"type": Path, "metavar": "FILE", "help": "an arena.json of another seed: do ranks agree?"},
            ),
        ),
    ),
    Command(
        "credit_worth",
        credit_worth,
        "which credit is worth its tokens for a run, by its gain, its cost and the price of training",
        "Gives answers of the run's last checkpoint the credit of eleven methods. Says how much noise each"
        " takes out of the gradient, what it samples for that, and what that is worth where training a token"
        " costs as much as it did in the run. Nothing is trained.",
        ("treetune --configs configs/quickstart/vineppo.jsonnet credit_worth",),
        in_ranks=True,
    ),
)
