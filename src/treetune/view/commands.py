"""Commands that show experiments in a browser, in a terminal, and as a report."""

from __future__ import annotations

import os
from pathlib import Path

import click

from treetune.cli.command import PATH, Command, Options, import_own_parts, say


def view(options: Options) -> int:
    import treetune.parts  # noqa: F401  (components declare the titles of their numbers)
    from treetune.view.app import serve

    paths = [Path(path) for path in options.paths] or [Path("experiments")]
    token = options.token or os.environ.get("TREETUNE_VIEWER_TOKEN")
    serve(
        paths,
        say,
        options.port,
        token=token,
        read_only=options.read_only,
        host=options.host,
        base_url=options.base_url,
    )
    return 0


def watch(options: Options) -> int:
    from treetune.view.terminal import watch

    folders = [Path(folder) for folder in options.folders] or [Path("experiments")]
    watch(folders, name=options.run, metrics=options.metric or (), once=options.once)
    return 0


def report(options: Options) -> int:
    import treetune.parts  # noqa: F401  (components declare the titles of their numbers)
    from treetune.exceptions import ConfigError
    from treetune.view.report.write import write_report

    for directory in options.experiments:
        try:
            import_own_parts(Path(directory))
        except ConfigError as error:  # the experiment can be shown without the user's own components
            say(f"{directory}: {error}; numbers that only these components declare are left out")
    say(str(write_report([Path(directory) for directory in options.experiments], options.output)))
    return 0


COMMANDS = (
    Command(
        "view",
        view,
        "browse experiments in a browser, also while they run",
        "Serves a web application on this machine and prints its address. It shows all experiments and data"
        " sets below the folders, and the data files that are named. It follows running experiments, and"
        " writes nothing but your notes on answers. Through SSH: ssh -N -L 6680:127.0.0.1:6680 MACHINE.",
        (
            "treetune view experiments",
            "treetune view experiments/quickstart /scratch/others --port 7000",
            "treetune view experiments data data/guru/math__dapo/train.parquet",
        ),
        (
            click.Argument(["paths"], nargs=-1, metavar="[FOLDER_OR_FILE]...", help="default: experiments"),
            click.Option(["--port"], type=int, metavar="N", help="default: 6680, or the next free one"),
            click.Option(["--token"], metavar="WORD", help="default: TREETUNE_VIEWER_TOKEN, else your own"),
            click.Option(["--host"], default="127.0.0.1", help="such as 0.0.0.0 in a container"),
            click.Option(["--base-url"], default="", metavar="URL", help="its address behind a proxy"),
            click.Option(["--read-only"], is_flag=True, help="don't write notes either"),
        ),
    ),
    Command(
        "watch",
        watch,
        "follow experiments in a terminal",
        "Lists all experiments below the folders, and shows one with its curves, time by phase, events and a"
        " few answers. It refreshes every two seconds. ? shows the keys. It changes nothing.",
        (
            "treetune watch experiments",
            "treetune watch experiments --run quickstart/vineppo --metric train/kl --metric train/entropy",
            "treetune watch experiments --once",
        ),
        (
            click.Argument(["folders"], nargs=-1, metavar="[FOLDER]...", help="default: experiments"),
            click.Option(["--run"], metavar="NAME", help="open this experiment, as the list names it"),
            click.Option(["--metric"], multiple=True, metavar="NAME", help="show its curve; can be repeated"),
            click.Option(["--once"], is_flag=True, help="print one page and end"),
        ),
    ),
    Command(
        "report",
        report,
        "write one self-contained HTML file about experiments",
        "Writes a page with the curves, times by phase and answers (coloured by advantage) of one or several"
        " experiments. The page needs no network.",
        ("treetune report experiments/quickstart/vineppo experiments/quickstart/grpo --output report.html",),
        (
            click.Argument(["experiments"], nargs=-1, required=True, metavar="EXPERIMENT_DIR..."),
            click.Option(
                ["--output"], type=PATH, metavar="FILE", help="default: in the first experiment's folder"
            ),
        ),
    ),
)
