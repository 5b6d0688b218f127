"""Commands about tables of experiments."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, cast

import click

from treetune.cli.command import PATH, Command, Options, build_root, evaluate_configuration

if TYPE_CHECKING:
    from treetune.tables.runs import TableRuns
    from treetune.tables.settings import Reproduction, Table

REPRODUCTION = "reproduction"
"""The type of tables that `reproduce_table` knows how to run."""

OUTPUT_OPTION = click.Option(
    ["--output"], type=PATH, metavar="DIR", help="copy the files of the table there as well"
)


def write_table(options: Options) -> int:
    root = build_root(evaluate_configuration(options), options.command, "a table")
    from treetune.tables.write import make_table

    return make_table(cast("Table", root), _command_line(), options.output)


def reproduce_table(options: Options) -> int:
    from treetune.config.errors import ConfigIssue
    from treetune.config.explain import Explanation
    from treetune.exceptions import ConfigError

    config = evaluate_configuration(options)
    root = build_root(config, options.command, "a table")
    if config.data["type"] != REPRODUCTION:
        issue = ConfigIssue(
            f"reproduce_table runs tables of type {REPRODUCTION!r}, but this table's type is"
            f" {config.data['type']!r}",
            key="type",
            source=Explanation(config).source(("type",)),
            remedy="use make_table, which fills it from experiments that have been run",
        )
        raise ConfigError([issue])
    from treetune.tables.launch import run
    from treetune.tables.write import copy_files, write_runs_table

    def write(plan: TableRuns) -> None:
        copy_files(write_runs_table(plan, _command_line()), options.output)

    return run(cast("Reproduction", root), options, write)


def _command_line() -> str:
    from treetune.config.layers import shorten_path
    from treetune.runtime.rank_launcher import MAIN_PROGRAM

    return shlex.join(["python", shorten_path(MAIN_PROGRAM), *sys.argv[1:]])


EXAMPLE_TABLE = "--configs configs/tables/quickstart_methods.jsonnet"

COMMANDS = (
    Command(
        "make_table",
        write_table,
        "write a table of experiments with confidence intervals",
        "Writes a table from the results on disk, as Markdown, LaTeX, HTML, JSON and pictures. It runs no"
        " experiment.",
        (f"treetune make_table {EXAMPLE_TABLE}",),
        (OUTPUT_OPTION,),
        takes_files=True,
    ),
    Command(
        "reproduce_table",
        reproduce_table,
        "run a table's missing experiments, seed by seed, and write the table; resumes",
        "Runs the experiments that are missing for the table, one after the other, resumes those that were"
        " interrupted, continues after one that fails, and writes the table.",
        (
            f"treetune reproduce_table {EXAMPLE_TABLE} --plan",
            "treetune reproduce_table --configs configs/tables/vineppo_main.jsonnet --slurm jobs.sh",
        ),
        (
            click.Option(
                ["--plan"], is_flag=True, help="list the runs and their estimated hours; run nothing"
            ),
            click.Option(["--launch-lines"], is_flag=True, help="print a command line per missing run"),
            click.Option(["--slurm"], type=PATH, metavar="FILE", help="write missing runs as a SLURM array"),
            click.Option(
                ["--at-once"], type=int, default=1, metavar="N", help="run N at a time (only on a CPU)"
            ),
            OUTPUT_OPTION,
        ),
        takes_files=True,
    ),
)
