"""The command line: ``treetune --configs a.jsonnet,b.jsonnet COMMAND``.

The same file is what DeepSpeed's launcher starts on every rank. Nothing heavy is imported before
the configuration has been found to be right.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if __name__ == "__main__" and sys.path[:1] == [os.path.dirname(os.path.realpath(__file__))]:
    # Started as a script: this folder would hide other people's packages called `models` or `config`.
    sys.path[0] = os.path.dirname(sys.path[0])

if TYPE_CHECKING:
    from treetune.config.explain import Explanation, Setting
    from treetune.config.jsonnet import Config
    from treetune.config.registrable import Registrable
    from treetune.data_pipeline.base import DataPipeline
    from treetune.runtime.base import Runtime
    from treetune.tables.base import Table
    from treetune.tables.runs import Plan
    from treetune.tables.settings import Reproduction

USER_ERROR, FAILURE, INTERRUPTED, CLOSED_PIPE = 2, 1, 130, 141

FIRST_RANK_SPEAKS_WITHIN_S = 5.0
"""The launcher kills all ranks as soon as one has ended: the others leave the first one time to speak."""

RUN_COMMANDS = {
    "run_iteration_loop": "train: sample, credit, train, sync, as often as the experiment says; resumes",
    "run_evaluation": "evaluate every checkpoint of an experiment, finished or running",
    "run_evaluation_on_baseline": "evaluate the model that the experiment starts from",
    "only_generate_episodes": "one iteration's episodes, without training",
    "clean_up_checkpoints": "delete what only resuming needs; the policies stay",
    "run_analyzers": "numbers and figures about an experiment, by the analyzers on its right; resumes",
}


TABLE_COMMANDS = ("make_table", "reproduce_table")
REPRODUCTION = "reproduction"
"""The type of tables that `reproduce_table` knows how to run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 2 for a user's mistake, 1 for a failure."""
    options = _parser().parse_args(arguments)
    try:
        return _dispatch(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except _ClosedPipe:
        return CLOSED_PIPE
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("treetune"):
            raise
        print(
            f"{error.name} is not installed for {sys.executable}: run ./scripts/setup.sh, then"
            " `source .venv/bin/activate`",
            file=sys.stderr,
        )
        return USER_ERROR
    except ValueError as error:
        return _failed(error, USER_ERROR, options)
    except (OSError, RuntimeError, MemoryError) as error:
        return _failed(error, FAILURE, options)


def _dispatch(options: argparse.Namespace) -> int:
    command = options.command
    if command == "doctor":
        from treetune.runtime.doctor import run as doctor

        return doctor()
    if command == "report":
        from treetune.reports.html import write_report

        _say(str(write_report([Path(directory) for directory in options.experiments], options.output)))
        return 0
    if command == "compare_analyses":
        import treetune.parts  # noqa: F401  (registers them)
        from treetune.analyzers.compare import compare_analyses

        drawn = compare_analyses(options.analysis, options.experiments, options.output)
        _say(f"{drawn}.png, .svg and .json")
        return 0
    config = _load(options)
    if command == "print_config":
        _say(json.dumps(config.data, indent=2, ensure_ascii=False))
        return 0
    if command == "explain_config":
        return _explain(config, options.key)
    if command == "score_responses":
        return _score(config, options)
    root = _build(config, command)
    if command == "check_config":
        _check_deeper(root)
        _say(f"fine: {config.data['type']} {config.data.get('experiment_name', '')}".rstrip())
        return 0
    if command == "make_threads":
        options.log_file = options.output / "logs" / "run.log"
        return cast("DataPipeline", root).run(options.input, options.output, config.data)
    options.log_file = _log_file(config)
    if command in TABLE_COMMANDS:
        return _table(root, options)
    if command == "run_analyzers":
        from treetune.analyzers.command import run_analyzers

        return run_analyzers(cast("Runtime", root), config.data)
    from treetune.runtime.commands import run

    return run(command, cast("Runtime", root), config.data, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treetune",
        description="Reinforcement learning for language models, one Jsonnet configuration per experiment.",
        epilog="APP_* environment variables are std.extVar('APP_…') in a configuration; APP_SEED, "
        "APP_DIRECTORY and APP_EXPERIMENT_NAME set its root keys seed, directory and experiment_name.",
        allow_abbrev=False,
    )
    _add_shared(parser, default=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, words: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        _add_shared(command, default=argparse.SUPPRESS)
        return command

    for name, words in RUN_COMMANDS.items():
        add(name, words)
    add("print_config", "the evaluated configuration as JSON")
    add("check_config", "every mistake of the configuration at once")
    explain = add("explain_config", "a key's value and every file that sets it, in order")
    explain.add_argument("key", metavar="KEY.PATH", help="such as trainer.learning_rate")
    score = add("score_responses", "grade a JSON-lines file of answers with a task's grader; resumes")
    score.add_argument("--input", type=Path, required=True, metavar="FILE", help="problem, gold, response")
    score.add_argument("--output", type=Path, required=True, metavar="FILE", help="the graded rows")
    score.add_argument("--steps", action="store_true", help="also the offsets between the steps")
    score.add_argument("--workers", type=int, metavar="N", help="grader processes; default: 2")
    score.add_argument("--deadline", type=float, default=10.0, metavar="SECONDS", help="default: 10")
    threads = add("make_threads", "turn solutions into parallel ones with a language model's help; resumes")
    threads.add_argument("--input", type=Path, required=True, metavar="FILE", help="rows with solutions")
    threads.add_argument("--output", type=Path, required=True, metavar="DIR", help="rows, records, costs")
    table = add("make_table", "write a table, with intervals, from what its experiments left; runs nothing")
    reproduce = add("reproduce_table", "run what a table lacks, seed by seed, and write the table; resumes")
    reproduce.add_argument(
        "--plan", action="store_true", help="show runs and what they may cost; run nothing"
    )
    reproduce.add_argument("--launch-lines", action="store_true", help="print a command line per missing run")
    reproduce.add_argument("--slurm", type=Path, metavar="FILE", help="write missing runs as a SLURM array")
    for one in (table, reproduce):
        one.add_argument(
            "--output", type=Path, metavar="DIR", help="copy the files of the table there as well"
        )
    report = add("report", "one self-contained HTML file about experiments")
    report.add_argument("experiments", nargs="+", metavar="EXPERIMENT_DIR")
    report.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first one")
    compare = add("compare_analyses", "one figure of an analysis of several experiments")
    compare.add_argument("analysis", metavar="NAME", help="such as value_accuracy")
    compare.add_argument("experiments", nargs="+", metavar="[LABEL=]EXPERIMENT_DIR")
    compare.add_argument("--output", type=Path, required=True, metavar="PATH", help="without an ending")
    add("doctor", "is this machine fit: versions, memory, ports, one sampled token")
    return parser


def _add_shared(parser: argparse.ArgumentParser, default: Any) -> None:
    """Options that may stand before or after the command. (SUPPRESS: the later does not undo the earlier.)"""
    after = "_after" if default is argparse.SUPPRESS else ""
    parser.add_argument(
        "--configs", action="append", metavar="A,B,…", dest=f"configs{after}", default=default,
        help="Jsonnet files, added from left to right; looked for here, then in configs/",
    )  # fmt: skip
    parser.add_argument(
        "--override", action="append", metavar="'{…}'", dest=f"override{after}", default=default,
        help="one more Jsonnet object on the right; repeatable",
    )  # fmt: skip
    parser.add_argument("--debug", action="store_true", default=default or False, help="show tracebacks")
    # What DeepSpeed's launcher adds unless told --no_local_rank; the rank is read from the environment.
    parser.add_argument("--local_rank", "--local-rank", default=default, help=argparse.SUPPRESS)


def _load(options: argparse.Namespace) -> Config:
    from treetune.config.jsonnet import ENVIRONMENT_KEYS, load
    from treetune.config.schema import keys_of

    names = [*(options.configs or ()), *getattr(options, "configs_after", ())]
    configs = [name.strip() for text in names for name in text.split(",") if name.strip()]
    overrides = [*(options.override or ()), *getattr(options, "override_after", ())]
    config = load(configs, overrides)
    family = _family(config)
    if family is _families()[0]:
        return config
    # A table has no seed of its own: the environment's is for the experiments.
    keys = keys_of(family.registered()[config.data["type"]])
    return load(configs, overrides, environment_keys=[key for key in ENVIRONMENT_KEYS if key in keys])


def _families() -> tuple[type[Registrable], type[Registrable]]:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.runtime.base import Runtime
    from treetune.tables.base import Table

    return Runtime, Table


def _pipelines() -> type[Registrable]:
    from treetune.data_pipeline.base import DataPipeline

    return DataPipeline


def _family(config: Config) -> type[Registrable]:
    """The family of a configuration's root: a table or a data pipeline where `type` says so."""
    experiment, table = _families()
    others = (family for family in (table, _pipelines()) if config.data.get("type") in family.registered())
    return next(others, experiment)


def _build(config: Config, command: str) -> Registrable:
    from treetune.config.build import build
    from treetune.config.errors import ConfigError, ConfigIssue
    from treetune.config.explain import Explanation

    family = _family(config)
    experiment, table = _families()
    words = {experiment: "an experiment", table: "a table", _pipelines(): "a data pipeline"}
    right = table if command in TABLE_COMMANDS else _pipelines() if command == "make_threads" else experiment
    if family is not right and command != "check_config":
        issue = ConfigIssue(
            f"{command} works on {words[right]}, and this configuration is {words[family]}",
            key="type",
            source=Explanation(config).source(("type",)),
            remedy="run_iteration_loop trains an experiment; make_table makes a table; make_threads carries"
            " out a data pipeline",
        )
        raise ConfigError([issue])
    if command == "reproduce_table" and config.data.get("type") != REPRODUCTION:
        issue = ConfigIssue(
            f"reproduce_table runs tables of type {REPRODUCTION!r}, and this is one of type"
            f" {config.data['type']!r}",
            key="type",
            source=Explanation(config).source(("type",)),
            remedy="make_table fills it from experiments that have been run",
        )
        raise ConfigError([issue])
    return build(family, config.data, Explanation(config))


def _table(root: Registrable, options: argparse.Namespace) -> int:
    """Runs what a table lacks where that is asked for, and writes the table."""
    from treetune.config.jsonnet import shown

    command = shlex.join(["python", shown(Path(__file__).resolve()), *sys.argv[1:]])
    if options.command == "make_table":
        from treetune.reports.tables.write import make_table

        return make_table(cast("Table", root), command, options.output)
    from treetune.reports.tables.write import copy, write_runs_table
    from treetune.sweeps.command import run

    def show(plan: Plan) -> None:
        copy(write_runs_table(plan, command), options.output)

    return run(cast("Reproduction", root), options, show)


def _check_deeper(root: Registrable) -> None:
    """A table that runs experiments is right if they are."""
    from treetune.tables.base import Table

    if isinstance(root, Table):
        root.check()


def _score(config: Config, options: argparse.Namespace) -> int:
    """Needs a task alone, so that ``{task: …}`` is enough of a configuration."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.build import build
    from treetune.config.explain import Explanation
    from treetune.config.imports import import_parts
    from treetune.tasks.base import Task
    from treetune.tasks.scoring import score_responses

    explanation = Explanation(config)
    import_parts(config.data, explanation)
    task = build(Task, config.data.get("task"), explanation, key=("task",))
    scored = score_responses(
        task, options.input, options.output,
        steps=options.steps, workers=options.workers, deadline=options.deadline,
    )  # fmt: skip
    _say(str(scored))
    return 0


def _explain(config: Config, name: str) -> int:
    from treetune.config.build import keys_at
    from treetune.config.errors import ConfigError, ConfigIssue, dotted, nearest
    from treetune.config.explain import MISSING, Explanation, key_paths
    from treetune.config.imports import import_parts

    path = tuple(name.split("."))
    explanation = Explanation(config)
    import_parts(config.data, explanation)
    value, settings = explanation.value(path), explanation.settings(path)
    siblings = keys_at(_family(config), config.data, path[:-1])
    declared = siblings.get(path[-1])
    if value is not MISSING:
        _say(f"{name} = {_as_text(value)}")
    elif declared and not declared.required:
        _say(f"{name} = {_as_text(declared.default)}  (the default: nothing sets it)")
    elif settings:
        _say(f"{name} is not set: what set it was replaced by {explanation.source(path[:-1])}")
    elif declared:
        _say(f"{name} is not set, and has no default")
    else:
        known = {*key_paths(config.data), *((*path[:-1], sibling) for sibling in siblings)}
        near = nearest(name, sorted(map(dotted, known)), count=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "print_config shows all of them"
        raise ConfigError([ConfigIssue("there is no such key", name, remedy=remedy)])
    for line in _places(explanation, settings):
        _say(line)
    return 0


def _places(explanation: Explanation, settings: Sequence[Setting]) -> list[str]:
    width = max((len(setting.place) for setting in settings), default=0)
    return [f"  {setting.place:<{width}}  {_as_text(setting.value)}" for setting in settings]


def _as_text(value: Any) -> str:
    from treetune.config.explain import COMPUTED, as_plain

    return repr(value) if value is COMPUTED else json.dumps(value, ensure_ascii=False, default=as_plain)


class _ClosedPipe(Exception):
    """Nobody reads our standard output any more, as after ``| head``."""


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError as error:
        # The interpreter flushes once more at exit: into nothing, then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _ClosedPipe from error


def _failed(error: Exception, code: int, options: argparse.Namespace) -> int:
    """One message on standard error; the traceback for those who ask, and for the log."""
    from treetune.config.errors import ConfigError

    rank = int(os.environ.get("RANK", "0"))
    if isinstance(error, ConfigError):
        if rank == 0:  # every rank reads the same configuration: one message is enough
            print(error, file=sys.stderr)
            if options.debug:
                traceback.print_exception(error)
        else:
            time.sleep(FIRST_RANK_SPEAKS_WITHIN_S)
        return code
    where = f"[rank {rank}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    log_file: Path | None = getattr(options, "log_file", None)
    text = "".join(traceback.format_exception(error))
    print(f"{where}{options.command} failed: {str(error) or type(error).__name__}", file=sys.stderr)
    if options.debug:
        print(text, file=sys.stderr)
    elif log_file is not None and log_file.is_file():
        with log_file.open("a", encoding="utf-8") as file:
            file.write(text)
        print(f"{where}the traceback is at the end of {log_file}", file=sys.stderr)
    else:
        print(f"{where}--debug shows the traceback", file=sys.stderr)
    return code


def _log_file(config: Config) -> Path | None:
    """Where a run of this configuration writes its log, for the traceback of a failure."""
    directory, name = config.data.get("directory", "experiments"), config.data.get("experiment_name")
    return Path(directory) / name / "logs" / "run.log" if name else None


if __name__ == "__main__":
    sys.exit(main())
