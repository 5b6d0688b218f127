"""Commands that work on files of rows."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

from treetune.cli.command import Argument, Command, built, evaluated, say

if TYPE_CHECKING:
    from treetune.data_pipeline.base import DataPipeline


def score_responses(options: argparse.Namespace) -> int:
    """Needs a task alone, so that ``{task: …}`` is enough of a configuration."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.build import build
    from treetune.config.explain import Explanation
    from treetune.config.imports import import_parts
    from treetune.runtime.console import Console
    from treetune.tasks.base import Task
    from treetune.tasks.scoring import score_responses

    config = evaluated(options)
    explanation = Explanation(config)
    import_parts(config.data, explanation)
    task = build(Task, config.data.get("task"), explanation, key=("task",))
    console = Console(None, visible=True)
    with contextlib.closing(console), console.phase("grading", "responses") as show:
        scored = score_responses(
            task, options.input, options.output,
            steps=options.steps, workers=options.workers, deadline=options.deadline, progress=show,
        )  # fmt: skip
    say(str(scored))
    return 0


def run_pipeline(options: argparse.Namespace) -> int:
    from treetune.config.errors import ConfigError, ConfigIssue
    from treetune.config.explain import Explanation
    from treetune.runtime import lifeline

    config = evaluated(options)
    root = built(config, options.command, "a data pipeline")
    if config.data["type"] != options.command:
        issue = ConfigIssue(
            f"this configuration is of a pipeline of type {config.data['type']!r}",
            key="type",
            source=Explanation(config).source(("type",)),
            remedy=f"the command {config.data['type']} carries it out",
        )
        raise ConfigError([issue])
    options.log_file = options.output / "logs" / "run.log"
    if options.input is not None and not options.input.is_file():
        raise ValueError(f"there is no file {options.input} (looked for in {Path.cwd()})")
    lifeline.exit_on_signals()
    return cast("DataPipeline", root).run(options.input, options.output, config.data)


COMMANDS = (
    Command(
        "score_responses",
        score_responses,
        "grade a JSON-lines file of answers with a task's grader; resumes",
        "Rows have `problem`, `gold` and `response`, and come out with `reward`, `extracted`, `outcome` and"
        " `seconds`. A configuration with a task is enough.",
        (
            "treetune --configs configs/tasks/math.jsonnet score_responses --input answers.jsonl"
            " --output graded.jsonl",
        ),
        (
            Argument(
                "--input",
                {"type": Path, "required": True, "metavar": "FILE", "help": "problem, gold, response"},
            ),
            Argument(
                "--output", {"type": Path, "required": True, "metavar": "FILE", "help": "the graded rows"}
            ),
            Argument("--steps", {"action": "store_true", "help": "also the offsets between the steps"}),
            Argument("--workers", {"type": int, "metavar": "N", "help": "grader processes; default: 2"}),
            Argument(
                "--deadline",
                {"type": float, "default": 10.0, "metavar": "SECONDS", "help": "default: 10"},
            ),
        ),
    ),
    Command(
        "prepare_data",
        run_pipeline,
        "make rows of a data set: map, filter, find duplicates and test problems, split; resumes",
        "Reads a data set from the Hugging Face hub, Parquet or JSON lines, makes rows of the schema of it"
        " and lets rules go over them: lengths, duplicates, contamination by test sets, reference solutions"
        " that fail. Writes Parquet, every row that went with its reason, and how many rows each rule took.",
        (
            "treetune --configs configs/data/math__dapo.jsonnet prepare_data --output data/math__dapo",
            "treetune --configs configs/data/math__dapo.jsonnet prepare_data --input a_part.jsonl --output"
            " data/a_part",
        ),
        (
            Argument(
                "--input",
                {"type": Path, "metavar": "FILE", "help": "read this in place of the configuration's source"},
            ),
            Argument(
                "--output",
                {"type": Path, "required": True, "metavar": "DIR", "help": "rows by split, summary, reasons"},
            ),
        ),
    ),
    Command(
        "filter_data",
        run_pipeline,
        "keep rows by difficulty, length or quotas, and say what each rule took; resumes",
        "Lets rules go over rows of the schema: pass rates of a weak and a strong model, lengths, quotas by"
        " domain, and every other rule of prepare_data.",
        (
            "treetune --configs configs/data_pipelines/filter_data.jsonnet filter_data --input"
            " data/math__dapo/train.parquet --output data/math__dapo_filtered",
        ),
        (
            Argument(
                "--input",
                {"type": Path, "required": True, "metavar": "FILE", "help": "rows, Parquet or JSON lines"},
            ),
            Argument(
                "--output",
                {"type": Path, "required": True, "metavar": "DIR", "help": "rows.parquet, summary, reasons"},
            ),
        ),
    ),
    Command(
        "make_threads",
        run_pipeline,
        "turn solutions into parallel ones with a language model's help; resumes",
        "Asks an OpenAI-compatible endpoint which parts of a solution don't need each other. Rows have"
        " `problem` and `solution`, and come out in threads.jsonl with `parallel_solution` beside them.",
        (
            "treetune --configs configs/data_pipelines/make_threads.jsonnet make_threads --input"
            " solutions.jsonl --output data/parallel",
        ),
        (
            Argument(
                "--input",
                {"type": Path, "required": True, "metavar": "FILE", "help": "rows with solutions"},
            ),
            Argument(
                "--output",
                {"type": Path, "required": True, "metavar": "DIR", "help": "rows, records, costs"},
            ),
        ),
    ),
)
