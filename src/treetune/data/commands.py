"""Commands that work on files of rows."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.cli.command import Argument, Command, built, evaluated, say

if TYPE_CHECKING:
    from treetune.config.jsonnet import Config
    from treetune.tasks.base import Task


def _task_of(options: argparse.Namespace) -> Task:
    """Returns the configuration's task. The rest of the configuration isn't built: ``{task: …}`` is
    enough."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.build import build
    from treetune.config.explain import Explanation
    from treetune.config.imports import import_parts
    from treetune.tasks.base import Task

    config = evaluated(options)
    explanation = Explanation(config)
    import_parts(config.data, explanation)
    return build(Task, config.data.get("task"), explanation, key=("task",))


def new(options: argparse.Namespace) -> int:
    for name, (about, default) in QUESTIONS.items():
        if getattr(options, name) is None:
            try:
                setattr(options, name, input(f"{name}: {about} [{default}] ").strip() or default)
            except EOFError:
                raise ValueError(f"nobody answers here: give --{name}, {about}") from None
    from treetune.data.new_experiment import make

    for line in make(options):
        say(line)
    return 0


def score_responses(options: argparse.Namespace) -> int:
    from treetune.data.scoring import score_responses
    from treetune.runtime.console import Console

    task = _task_of(options)
    console = Console(None, visible=True)
    with contextlib.closing(console), console.phase("grading", "responses") as show:
        scored = score_responses(
            task, options.input, options.output,
            steps=options.steps, workers=options.workers, deadline=options.deadline, progress=show,
        )  # fmt: skip
    say(str(scored))
    return 0


def export_rows(options: argparse.Namespace) -> int:
    from treetune.domains.routed_rows import export_rows

    written = export_rows(_task_of(options), options.split, options.output)
    say(f"{written} problems: {options.output}")
    return 0


def carry_out(options: argparse.Namespace) -> int:
    """Carries out `prepare_data`, `filter_data` or `make_threads`, and returns the exit code."""
    config, root = _pipeline(options)
    from treetune.data import making_threads, preparing

    functions: dict[str, Callable[..., int]] = {
        "prepare_data": preparing.prepare,
        "filter_data": preparing.filter_rows,
        "make_threads": making_threads.work,
    }
    return functions[options.command](root, options.input, options.output, config.data)


def _pipeline(options: argparse.Namespace) -> tuple[Config, Any]:
    """Returns the configuration, and the pipeline that it describes. Raises ConfigError where the pipeline is
    that of another command."""
    from treetune.config.errors import ConfigIssue
    from treetune.config.explain import Explanation
    from treetune.exceptions import ConfigError
    from treetune.processes import lifetime
    from treetune.tasks.sources import files_matching

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
    if options.input is not None:
        files_matching(options.input)
    lifetime.exit_on_signals()
    return config, root


def estimate_difficulty(options: argparse.Namespace) -> int:
    """The command, and with --shard one of the jobs that it starts."""
    from treetune.data.difficulty.shard import FAILURE, shard_folder, work_on_shard
    from treetune.data.difficulty.watching import estimate, refuse_another
    from treetune.runtime.front_door import MAIN
    from treetune.store.files import write_json

    if options.shard is None:
        config, root = _pipeline(options)
        configuration = []
        for text in options.configs or ():
            configuration += ["--configs", text]
        for text in options.override or ():
            configuration += ["--override", text]
        paths = ["--input", str(options.input), "--output", str(options.output)]
        # The number of a job's shard is put at its end.
        job = [sys.executable, str(MAIN), *configuration, options.command, *paths, "--shard"]
        return estimate(root, options.input, options.output, config.data, job)
    folder = shard_folder(options.output, options.shard)
    try:
        _, root = _pipeline(options)
        if not 0 <= options.shard < root.shards:
            raise ValueError(f"--shard is {options.shard}, and there are shards 0 to {root.shards - 1}")
        refuse_another(root, options.input, options.output)
        return work_on_shard(root, options.input, options.output, options.shard)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        # For the command that watches: on a cluster, nobody else hears it.
        code = 2 if isinstance(error, ValueError) else 1
        write_json(folder / FAILURE, {"code": code, "message": str(error) or type(error).__name__})
        raise


def _input(
    help_text: str = "Parquet or JSON lines; a pattern for several", required: bool = True
) -> Argument:
    settings = {"type": Path, "metavar": "FILE", "help": help_text}
    return Argument("--input", settings | ({"required": True} if required else {}))


def _output(help_text: str, kind: str = "DIR") -> Argument:
    return Argument("--output", {"type": Path, "required": True, "metavar": kind, "help": help_text})


QUESTIONS = {
    "name": ("the experiment's name and folder", "first"),
    "data": ("a task of configs/tasks, or rows of yours: FILE.jsonl, .csv or .parquet", "addition_chain"),
    "model": ("tiny (random weights), one of configs/models, a folder, a name on the hub", "tiny"),
    "method": ("sft, vineppo, ppo, grpo, rloo, restem, dpo_positive, one of configs/presets", "vineppo"),
    "hardware": ("in_process (a CPU, no server), cpu or gpu", "in_process"),
}
"""What `new` asks, each with the answer that an empty line gives."""

COMMANDS = (
    Command(
        "new",
        new,
        "a folder with an experiment of your own: asks five things",
        "Asks for what the options don't say, and writes a folder: configurations, a README with the next"
        " commands and, for rows of yours, train.jsonl, test.jsonl and a reward function. It says which"
        " fields it took for problem and gold, and grades three answers before anything is trained.",
        ("treetune new", "treetune new --name sums --data rows.csv --model tiny --method grpo"),
        (
            *(Argument(f"--{name}", {"help": about}) for name, (about, _) in QUESTIONS.items()),
            Argument("--fields", {"metavar": "PROBLEM,GOLD", "help": "of your rows; default: the likeliest"}),
        ),
    ),
    Command(
        "score_responses",
        score_responses,
        "grade a JSON-lines file of answers with a task's grader; resumes",
        "Rows have `problem`, `gold` and `response`, for a mixture also a `domain` and for the task 'rows' a"
        " `data_source`. They come out with `reward`, `extracted`, `outcome` and `seconds`. A configuration"
        " with a task is enough.",
        (
            "treetune --configs configs/tasks/math.jsonnet score_responses --input answers.jsonl"
            " --output graded.jsonl",
        ),
        (
            _input("problem, gold, response"),
            _output("the graded rows", "FILE"),
            Argument("--steps", {"action": "store_true", "help": "also the offsets between the steps"}),
            Argument("--workers", {"type": int, "metavar": "N", "help": "grader processes; default: 2"}),
            Argument(
                "--deadline", {"type": float, "default": 10.0, "metavar": "SECONDS", "help": "default: 10"}
            ),
        ),
    ),
    Command(
        "export_rows",
        export_rows,
        "write a task's problems as Parquet rows that verl reads, and so does the task 'rows'",
        "Rows have `data_source`, `prompt`, `ability`, `reward_model` and `extra_info`. A configuration with"
        " a task is enough.",
        (
            "treetune --configs configs/tasks/math.jsonnet export_rows --split train --output"
            " data/math_train.parquet",
        ),
        (
            Argument(
                "--split",
                {"choices": ("train", "validation", "test"), "default": "train", "help": "default: train"},
            ),
            _output("the Parquet file", "FILE"),
        ),
    ),
    Command(
        "prepare_data",
        carry_out,
        "make rows of a data set: map, filter, find duplicates and test problems, split; resumes",
        "Reads a data set from the Hugging Face hub, Parquet or JSON lines, makes rows of the schema of it"
        " and lets rules go over them: lengths, duplicates, contamination by test sets, reference solutions"
        " that fail. Writes Parquet, every row that went with its reason, and how many rows each rule took.",
        (
            "treetune --configs data/math__dapo.jsonnet prepare_data --output data/dapo",
            "treetune --configs configs/data/math__dapo.jsonnet prepare_data --input a_part.jsonl --output"
            " data/a_part",
        ),
        (
            _input("read this in place of the configuration's source", required=False),
            _output("rows by split, summary, reasons"),
        ),
    ),
    Command(
        "estimate_difficulty",
        estimate_difficulty,
        "how often a model is right about each row: many jobs, here or on SLURM; resumes",
        "Samples answers to each row of the schema, has them graded and writes pass rates, bins and a"
        " histogram. It cuts the rows into shards, starts a job for each (a process, or a task of a SLURM"
        " array), watches them, starts those again that died, and puts the results together.",
        (
            "treetune --configs configs/data_pipelines/estimate_difficulty.jsonnet estimate_difficulty"
            " --input data/math__dapo/train.parquet --output data/math__dapo_difficulty",
        ),
        (
            _input(),
            _output("rates, histogram, answers"),
            Argument(
                "--shard", {"type": int, "metavar": "N", "help": "work on this shard alone, as a job does"}
            ),
        ),
    ),
    Command(
        "filter_data",
        carry_out,
        "keep rows by difficulty, length or quotas, and say what each rule took; resumes",
        "Lets rules go over rows of the schema: pass rates of a weak and a strong model, lengths, quotas by"
        " domain, and every other rule of prepare_data.",
        (
            "treetune --configs configs/data_pipelines/filter_data.jsonnet filter_data --input"
            " data/math__dapo/train.parquet --output data/math__dapo_filtered",
        ),
        (_input(), _output("rows.parquet, summary, reasons")),
    ),
    Command(
        "make_threads",
        carry_out,
        "turn solutions into parallel ones with a language model's help; resumes",
        "Asks an OpenAI-compatible endpoint which parts of a solution don't need each other. Rows have"
        " `problem` and `solution`, and come out in threads.jsonl with `parallel_solution` beside them.",
        (
            "treetune --configs configs/data_pipelines/make_threads.jsonnet make_threads --input"
            " solutions.jsonl --output data/parallel",
        ),
        (_input("rows with solutions"), _output("rows, records, costs")),
    ),
)
