"""Commands that work on files of rows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from treetune.cli.command import PATH, Command, Options, build_root, evaluate_configuration, say

if TYPE_CHECKING:
    from treetune.config.layers import Config
    from treetune.tasks.base import Task


def _build_task(options: Options) -> Task:
    """Returns the configuration's task. The rest of the configuration isn't built: ``{task: …}`` is
    enough."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.build import build
    from treetune.config.explain import Explanation
    from treetune.config.imports import import_parts
    from treetune.tasks.base import Task

    config = evaluate_configuration(options)
    explanation = Explanation(config)
    import_parts(config.data, explanation)
    return build(Task, config.data.get("task"), explanation, key=("task",))


def create_experiment(options: Options) -> int:
    """Creates the folder of an experiment. Only its name may be asked for; all else has a default."""
    if options.name is None:
        if not sys.stdin.isatty():
            raise ValueError("stdin is not a terminal: pass --name, the experiment's name and folder")
        options.name = input("name of the experiment and its folder: ").strip()
    from treetune.data.new_experiment import make_experiment

    for line in make_experiment(options):
        say(line)
    return 0


def score_responses(options: Options) -> int:
    """Grades the responses in a file, prints the counts, and returns the exit code."""
    from treetune.data import scoring
    from treetune.runtime.console import Console

    task = _build_task(options)
    console = Console(None, visible=True)
    with contextlib.closing(console), console.phase("grading", "responses") as show:
        scored = scoring.score_responses(
            task, options.input, options.output,
            steps=options.steps, workers=options.workers, deadline=options.deadline, progress=show,
        )  # fmt: skip
    say(str(scored))
    return 0


def export_rows(options: Options) -> int:
    """Writes the problems of a split as rows, prints their number, and returns the exit code."""
    from treetune.domains import routed_rows

    row_count = routed_rows.export_rows(_build_task(options), options.split, options.output)
    say(f"{row_count} problems: {options.output}")
    return 0


def carry_out(options: Options) -> int:
    """Carries out `prepare_data`, `filter_data` or `make_threads`, and returns the exit code."""
    config, pipeline = _build_pipeline(options)
    from treetune.data import making_threads, preparing

    functions: dict[str, Callable[..., int]] = {
        "prepare_data": preparing.prepare,
        "filter_data": preparing.filter_rows,
        "make_threads": making_threads.make_threads,
    }
    return functions[options.command](pipeline, options.input, options.output, config.data)


def _build_pipeline(options: Options) -> tuple[Config, Any]:
    """Returns the configuration, and the pipeline that it describes. Raises ConfigError if the pipeline
    belongs to another command."""
    from treetune.config.errors import ConfigIssue
    from treetune.config.explain import Explanation
    from treetune.exceptions import ConfigError
    from treetune.processes import lifetime
    from treetune.tasks.sources import files_matching

    config = evaluate_configuration(options)
    pipeline = build_root(config, options.command, "a data pipeline")
    if config.data["type"] != options.command:
        issue = ConfigIssue(
            f"this configuration is of a pipeline of type {config.data['type']!r}",
            key="type",
            source=Explanation(config).source(("type",)),
            remedy=f"the command {config.data['type']} carries it out",
        )
        raise ConfigError([issue])
    options.log_file = options.output / "logs" / "run.log"  # `main` writes a failure's traceback there
    if options.input is not None:
        files_matching(options.input)  # raises ValueError if there are none
    lifetime.exit_on_signals()  # signals raise Stopped from here on, so that the pipeline ends its processes
    return config, pipeline


def estimate_difficulty(options: Options) -> int:
    """Estimates the difficulty of all rows, or with --shard of the rows of one shard. Returns the exit code.

    Without --shard, the command starts a job for each shard, and watches the jobs. A job is the same command
    with --shard.
    """
    from treetune.data.difficulty.shard import FAILURE_FILE, shard_folder, work_on_shard
    from treetune.data.difficulty.watching import USER_ERROR, refuse_other_estimate, run_jobs
    from treetune.runtime.rank_launcher import MAIN_PROGRAM
    from treetune.store.files import write_json

    if options.shard is None:
        config, pipeline = _build_pipeline(options)
        configuration = []
        for text in options.configs or ():
            configuration += ["--configs", text]
        for text in options.override or ():
            configuration += ["--override", text]
        paths = ["--input", str(options.input), "--output", str(options.output)]
        # `run_jobs` puts the number of the shard at the end of the command.
        job = [sys.executable, str(MAIN_PROGRAM), *configuration, options.command, *paths, "--shard"]
        return run_jobs(pipeline, options.input, options.output, config.data, job)
    folder = shard_folder(options.output, options.shard)
    try:
        _, pipeline = _build_pipeline(options)
        if not 0 <= options.shard < pipeline.shards:
            raise ValueError(f"--shard is {options.shard}, and there are shards 0 to {pipeline.shards - 1}")
        refuse_other_estimate(pipeline, options.input, options.output)
        return work_on_shard(pipeline, options.input, options.output, options.shard)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        # The command that watches the jobs reads this file. On a cluster, it can't see what a job prints.
        code = USER_ERROR if isinstance(error, ValueError) else 1
        write_json(folder / FAILURE_FILE, {"code": code, "message": str(error) or type(error).__name__})
        raise


def _input_option(
    help_text: str = "Parquet or JSON lines; a pattern for several", required: bool = True
) -> click.Option:
    return click.Option(["--input"], required=required, type=PATH, metavar="FILE", help=help_text)


def _output_option(help_text: str, kind: str = "DIR") -> click.Option:
    return click.Option(["--output"], required=True, type=PATH, metavar=kind, help=help_text)


OPTIONS_OF_NEW_EXPERIMENTS = (
    click.Option(["--name"], metavar="NAME", help="name of the experiment and its folder"),
    click.Option(
        ["--data"],
        default="addition_chain",
        metavar="FILE|TASK",
        help="your rows (.jsonl, .csv, .parquet), or a task of configs/tasks; default: addition_chain",
    ),
    click.Option(
        ["--model"],
        default="tiny",
        metavar="MODEL",
        help="tiny (random weights), a name in configs/models, a folder, or owner/name; default: tiny",
    ),
    click.Option(
        ["--method"],
        default="grpo",
        metavar="METHOD",
        help="sft, vineppo, ppo, grpo, rloo, restem, dpo_positive, or a name in configs/presets;"
        " default: grpo",
    ),
    click.Option(
        ["--hardware"],
        metavar="KIND",
        help="gpu, cpu, or in_process (a CPU without a server); default: what this machine has",
    ),
    click.Option(
        ["--fields"], metavar="PROBLEM,ANSWER", help="names of your rows' fields; default: the likeliest"
    ),
)

COMMANDS = (
    Command(
        "new",
        create_experiment,
        "create an experiment folder for your own data",
        "Creates a folder with a configuration that holds everything to edit, a README with the next commands"
        " and, for your own rows, train.jsonl, test.jsonl and a reward function. Prints which fields it took"
        " for problem and answer, and grades three answers before anything is trained. It asks for a name"
        " only if --name is missing.",
        (
            "treetune new --name sums --data rows.csv",
            "treetune new --name words --data rows.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --hardware gpu",
        ),
        OPTIONS_OF_NEW_EXPERIMENTS,
    ),
    Command(
        "score_responses",
        score_responses,
        "grade a JSON-lines file of answers with a task's grader; resumes",
        "Rows have `problem`, `gold` and `response`; for a mixture also a `domain`, and for the task 'rows' a"
        " `data_source`. `reward`, `extracted`, `outcome` and `seconds` are added to them. The configuration"
        " needs no more than a task.",
        (
            "treetune score_responses --configs configs/tasks/math.jsonnet --input answers.jsonl"
            " --output graded.jsonl",
        ),
        (
            _input_option("problem, gold, response"),
            _output_option("the graded rows", "FILE"),
            click.Option(["--steps"], is_flag=True, help="add the offsets of step boundaries"),
            click.Option(["--workers"], type=int, metavar="N", help="grader processes; default: 2"),
            click.Option(["--deadline"], type=float, default=10.0, metavar="SECONDS", help="default: 10"),
        ),
        takes_files=True,
    ),
    Command(
        "export_rows",
        export_rows,
        "write a task's problems as Parquet rows for verl or the task 'rows'",
        "Rows have `data_source`, `prompt`, `ability`, `reward_model` and `extra_info`. The configuration"
        " needs no more than a task.",
        (
            "treetune export_rows --configs configs/tasks/math.jsonnet --split train --output"
            " data/math_train.parquet",
        ),
        (
            click.Option(
                ["--split"],
                type=click.Choice(("train", "validation", "test")),
                default="train",
                help="default: train",
            ),
            _output_option("the Parquet file", "FILE"),
        ),
        takes_files=True,
    ),
    Command(
        "prepare_data",
        carry_out,
        "prepare a data set: map, filter, deduplicate, decontaminate, split; resumes",
        "Reads a data set from the Hugging Face hub, Parquet or JSON lines, maps its rows to the common"
        " schema and applies rules: lengths, duplicates, contamination by test sets, reference solutions that"
        " fail. Writes Parquet, every removed row with its reason, and how many rows each rule removed.",
        (
            "treetune prepare_data --configs data/math__dapo.jsonnet --output data/dapo",
            "treetune prepare_data --configs configs/data/math__dapo.jsonnet --input a_part.jsonl --output"
            " data/a_part",
        ),
        (
            _input_option("read this instead of the configuration's source", required=False),
            _output_option("rows by split, summary, reasons"),
        ),
        takes_files=True,
    ),
    Command(
        "estimate_difficulty",
        estimate_difficulty,
        "estimate each row's pass rate by a model, here or on SLURM; resumes",
        "Samples answers to each row, grades them and writes pass rates, bins and a histogram. It cuts the"
        " rows into shards, starts a job for each (a process, or a task of a SLURM array), restarts jobs that"
        " died, and merges the results.",
        (
            "treetune estimate_difficulty --configs configs/data_pipelines/estimate_difficulty.jsonnet"
            " --input data/math__dapo/train.parquet --output data/math__dapo_difficulty",
        ),
        (
            _input_option(),
            _output_option("rates, histogram, answers"),
            click.Option(["--shard"], type=int, metavar="N", help="work on this shard only, as a job does"),
        ),
        takes_files=True,
    ),
    Command(
        "filter_data",
        carry_out,
        "filter rows by difficulty, length or quotas; resumes",
        "Applies rules to rows: pass rates of a weak and a strong model, lengths, quotas by domain, and every"
        " other rule of prepare_data. Reports how many rows each rule removed.",
        (
            "treetune filter_data --configs configs/data_pipelines/filter_data.jsonnet --input"
            " data/math__dapo/train.parquet --output data/math__dapo_filtered",
        ),
        (_input_option(), _output_option("rows.parquet, summary, reasons")),
        takes_files=True,
    ),
    Command(
        "make_threads",
        carry_out,
        "turn solutions into parallel ones with a language model; resumes",
        "Asks an OpenAI-compatible endpoint which parts of a solution are independent of each other. Input"
        " rows have `problem` and `solution`; threads.jsonl has them with an additional `parallel_solution`.",
        (
            "treetune make_threads --configs configs/data_pipelines/make_threads.jsonnet --input"
            " solutions.jsonl --output data/parallel",
        ),
        (_input_option("rows with solutions"), _output_option("rows, records, costs")),
        takes_files=True,
    ),
)
