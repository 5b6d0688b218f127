"""Commands that write what an experiment measured in forms that other tools read."""

from __future__ import annotations

import argparse
from pathlib import Path

from treetune.cli.command import Argument, Command, say


def export_evaluation(options: argparse.Namespace) -> int:
    from treetune.exports.evaluations import chosen_evaluation
    from treetune.exports.inspect_log import write_inspect_log
    from treetune.exports.parquet import write_parquet

    writers = {".eval": write_inspect_log, ".json": write_inspect_log, ".parquet": write_parquet}
    write = writers.get(options.output.suffix)
    if write is None:
        raise ValueError(f"{options.output} must end in one of {', '.join(writers)}, which says its format")
    evaluation = chosen_evaluation(options.experiment, options.set, options.iteration)
    written = write(evaluation, options.output)
    say(f"{written} answers of {evaluation.label} after iteration {evaluation.iteration}: {options.output}")
    return 0


COMMANDS = (
    Command(
        "export_evaluation",
        export_evaluation,
        "an evaluation as a log of Inspect or as Parquet",
        "Writes the answers of one evaluation with their grades, as a log that `inspect view` and"
        " `inspect_ai.log.read_eval_log` read (.eval, or .json), or as Parquet. The file goes in whole.",
        (
            "treetune export_evaluation experiments/quickstart/vineppo --output vineppo.eval",
            "treetune export_evaluation experiments/quickstart/vineppo --set test --iteration 8"
            " --output vineppo.parquet",
        ),
        (
            Argument("experiment", {"type": Path, "metavar": "EXPERIMENT_DIR"}),
            Argument("--set", {"metavar": "NAME", "help": "of the evaluation; default: the only one"}),
            Argument(
                "--iteration",
                {"type": int, "metavar": "N", "help": "after so many iterations; default: the newest"},
            ),
            Argument(
                "--output",
                {
                    "type": Path,
                    "required": True,
                    "metavar": "FILE",
                    "help": "its ending is the format: .eval, .json or .parquet",
                },
            ),
        ),
    ),
)
