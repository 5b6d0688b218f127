"""Commands that show experiments: in a browser, in a terminal, and as a report."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from treetune.cli.command import Argument, Command, import_own_parts, say


def view(options: argparse.Namespace) -> int:
    import treetune.parts  # noqa: F401  (registers them: numbers of answers are known by their parts)
    from treetune.view.app import serve

    paths = [Path(path) for path in options.paths] or [Path("experiments")]
    token = options.token or os.environ.get("TREETUNE_VIEWER_TOKEN")
    given = {name: getattr(options, name) for name in ("read_only", "host", "base_url")}
    serve(paths, say, options.port, token=token, **given)
    return 0


def watch(options: argparse.Namespace) -> int:
    from treetune.view.terminal import watch

    folders = [Path(folder) for folder in options.folders] or [Path("experiments")]
    watch(folders, name=options.run, metrics=options.metric or (), once=options.once)
    return 0


def report(options: argparse.Namespace) -> int:
    import treetune.parts  # noqa: F401  (registers them: numbers of answers are known by their parts)
    from treetune.exceptions import ConfigError
    from treetune.view.report.write import write_report

    for directory in options.experiments:
        try:
            import_own_parts(Path(directory))
        except ConfigError as error:  # what an experiment recorded can be read without its parts
            say(f"{directory}: {error}; numbers that only these parts know are left out")
    say(str(write_report([Path(directory) for directory in options.experiments], options.output)))
    return 0


COMMANDS = (
    Command(
        "view",
        view,
        "look into experiments in a browser, also while they run",
        "Serves a web application on this machine alone, and prints its address. It shows all experiments"
        " below the folders, reads what they write as it comes, and writes nothing but the notes that you put"
        " on answers. Data sets below the folders are shown as well, and those whose files are given. Through"
        " SSH: ssh -N -L 6680:127.0.0.1:6680 MACHINE.",
        (
            "treetune view experiments",
            "treetune view experiments/quickstart /scratch/others --port 7000",
            "treetune view experiments data data/guru/math__dapo/train.parquet",
        ),
        (
            Argument("paths", {"nargs": "*", "metavar": "FOLDER_OR_FILE", "help": "default: experiments"}),
            Argument("--port", {"type": int, "metavar": "N", "help": "default: 6680, or the next free one"}),
            Argument("--token", {"metavar": "WORD", "help": "default: TREETUNE_VIEWER_TOKEN, else your own"}),
            Argument("--host", {"default": "127.0.0.1", "help": "such as 0.0.0.0 in a container"}),
            Argument("--base-url", {"default": "", "metavar": "URL", "help": "its address behind a proxy"}),
            Argument("--read-only", {"action": "store_true", "help": "write no notes either"}),
        ),
    ),
    Command(
        "watch",
        watch,
        "how experiments stand, in a terminal; one of them closely",
        "Shows all experiments below the folders, and of one its curves, its time by phase, what happened and"
        " a few answers; again every two seconds, while runs go on, are killed and resumed. ? shows the keys."
        " It reads and changes nothing.",
        (
            "treetune watch experiments",
            "treetune watch experiments --run quickstart/vineppo --metric train/kl --metric train/entropy",
            "treetune watch experiments --once",
        ),
        (
            Argument("folders", {"nargs": "*", "metavar": "FOLDER", "help": "default: experiments"}),
            Argument("--run", {"metavar": "NAME", "help": "open this experiment, as the list names it"}),
            Argument("--metric", {"action": "append", "metavar": "NAME", "help": "its curve; repeatable"}),
            Argument("--once", {"action": "store_true", "help": "print one page and end"}),
        ),
    ),
    Command(
        "report",
        report,
        "one self-contained HTML file about experiments",
        "Curves, time by phase, and answers coloured by advantage, of one or several experiments side by"
        " side. The page needs no network.",
        ("treetune report experiments/quickstart/vineppo experiments/quickstart/grpo --output report.html",),
        (
            Argument("experiments", {"nargs": "+", "metavar": "EXPERIMENT_DIR"}),
            Argument("--output", {"type": Path, "metavar": "FILE", "help": "default: in the first one"}),
        ),
    ),
)
