"""The commands `run_analyzers` and `compare_analyses`."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treetune.config.build import build
from treetune.lab.analyzers.figures import save_figure
from treetune.processes import lifetime
from treetune.runtime.analysis import STATES, Analyzer, read_result, write_result
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.runtime.directory import RESULT, ExperimentDirectory
from treetune.runtime.manifest import refuse_changed_settings
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.store.files import replace_folder, write_json

JOURNAL_NAME = "journal"

PlainSettings = Mapping[str, Any]


def run_analyzers(config: Runtime, plain: PlainSettings) -> int:
    """Writes ``analyses/<name>/`` for every analyzer of an experiment, and returns the exit code.

    An analyzer that fails, for example because a checkpoint is missing, is reported at the end, and the exit
    code is 1; the others are carried out. Finished analyses with the same settings are kept. An interrupted
    analysis resumes: its requests that were answered are not sampled again. The command works in a single
    process; the engine may use several GPUs.
    """
    assert isinstance(config, PolicyIteration)
    lifetime.exit_on_signals()
    lifetime.end_with_launcher()
    directory = ExperimentDirectory.of(config)
    _refuse_unusable(config, directory, plain)
    config.model.check_at_start()  # before anything heavy is imported
    failed: dict[str, str] = {}  # messages by the analyzer's label
    pending: list[tuple[Analyzer, PlainSettings, list[int]]] = []
    # An analyzer that the configuration names twice with the same settings is carried out once.
    settings_by_analyzer = dict(zip(config.analyzers, plain["analyzers"], strict=True))
    for analyzer, settings in settings_by_analyzer.items():
        with _collect_failure(analyzer, failed):
            # The numbers of finished iterations whose weights are analysed.
            points = analyzer.points(config, directory)
            if _is_done(directory, analyzer, settings, points):
                print(f"{directory.analysis_folder(analyzer.label)} is done")
            else:
                pending.append((analyzer, settings, points))
    if pending:
        needs_engine = any(analyzer.needs_engine for analyzer, *_ in pending)
        with (
            Session.open(config, plain, "analysis") as session,
            PolicyServer.start(session, needs_engine=needs_engine) as server,
            RunResources.open(session, server) as resources,
        ):
            for analyzer, settings, points in pending:
                with _collect_failure(analyzer, failed):
                    _analyse(resources, analyzer, settings, points)
    for label, message in failed.items():
        print(f"{label}: {message}")
    return 1 if failed else 0


def _refuse_unusable(config: PolicyIteration, directory: ExperimentDirectory, plain: PlainSettings) -> None:
    """Raises ValueError where nothing can be analysed: the configuration has no analyzers, there are several
    processes, or the folder has no run of this configuration."""
    if not config.analyzers:
        raise ValueError(
            "the experiment has no analyzers: append some to --configs, e.g."
            " --configs EXPERIMENT.jsonnet,configs/analyzers/value_accuracy.jsonnet"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("run_analyzers needs a single process: start it with --ranks 1")
    if not directory.config_file.is_file():
        raise ValueError(f"{directory.path} has no experiment: train it with `treetune run` first")
    refuse_changed_settings(directory.path, plain, config)


@contextmanager
def _collect_failure(analyzer: Analyzer, failed: dict[str, str]) -> Iterator[None]:
    """Adds the message of an analyzer's failure to `failed`, so that the next analyzer is carried out."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        failed[analyzer.label] = str(error) or type(error).__name__


def _is_done(
    directory: ExperimentDirectory, analyzer: Analyzer, settings: PlainSettings, points: list[int]
) -> bool:
    if not directory.is_analysed(analyzer.label):
        return False
    result = read_result(directory.analysis_folder(analyzer.label))
    return (result["settings"], result["points"]) == (settings, points)


def _analyse(resources: RunResources, analyzer: Analyzer, settings: PlainSettings, points: list[int]) -> None:
    """Carries out one analysis. Its folder appears when it is finished.

    `points` are the numbers of finished iterations whose weights are analysed.
    """
    session = resources.session
    began = time.monotonic()
    folder = session.directory.analysis_folder(analyzer.label)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    findings = analyzer.analyse(resources, points, unfinished / JOURNAL_NAME)
    result = {
        "analyzer": analyzer.type_name,
        "experiment": session.config.experiment_name,
        "settings": settings,
        "points": points,
        "seconds": round(time.monotonic() - began, 1),
        "numbers": findings.numbers,
    }
    # The journal is only needed to resume. It is by far the largest file.
    shutil.rmtree(unfinished / JOURNAL_NAME, ignore_errors=True)
    save_figure(analyzer.draw({session.config.experiment_name: result}), unfinished)
    write_result(unfinished, result, findings.states, STATES)
    replace_folder(unfinished, folder)
    session.console.say(f"{analyzer.label}: {folder} ({result['seconds']:.0f} s)")


def compare_analyses(name: str, experiments: Sequence[str], output: Path) -> Path:
    """Draws an analysis of several experiments in one figure, and writes their numbers next to it.

    Args:
        name: The analysis, such as "value_accuracy".
        experiments: ``DIRECTORY`` or ``LABEL=DIRECTORY``; the default label is the experiment's name. The
            states of experiments with the same label, such as the seeds of a method, are pooled; a problem
            counts as the same problem in all of them.
        output: The path of the figure without a suffix, such as ``figures/value_accuracy``.

    Returns:
        `output`.

    Raises:
        ValueError: An experiment doesn't have this analysis, the analyses are by different analyzers, or
            experiments with the same label have different settings.
    """
    folders_by_label: dict[str, list[Path]] = {}
    for text in experiments:
        label, _, experiment = text.rpartition("=")
        folder = _folder_of_analysis(Path(experiment), name)
        if not label:
            label = _read_registered_result(folder)["experiment"]
        folders_by_label.setdefault(label, []).append(folder)

    result_by_label = {label: _pool_results(label, folders) for label, folders in folders_by_label.items()}
    analyzer_names = sorted({result["analyzer"] for result in result_by_label.values()})
    if len(analyzer_names) != 1:
        raise ValueError(
            f"analyses {name!r} of different kinds can't be drawn in one figure: {', '.join(analyzer_names)}"
        )

    [analyzer_name] = analyzer_names
    analyzer_class: Any = Analyzer.parts_by_name()[analyzer_name]  # its type is `type`, which has no `draw`
    output.parent.mkdir(parents=True, exist_ok=True)
    save_figure(analyzer_class.draw(result_by_label), output.parent, output.name)
    write_json(output.with_name(f"{output.name}.json"), result_by_label)
    return output


def _folder_of_analysis(experiment: Path, name: str) -> Path:
    """Returns the folder of an experiment's analysis. Raises ValueError if the analysis has no result."""
    directory = ExperimentDirectory(experiment)
    folder = directory.analysis_folder(name)
    if directory.is_analysed(name):
        return folder
    raise ValueError(
        f"{experiment} has no analysis {name!r} ({folder / RESULT} is missing; it has:"
        f" {', '.join(directory.analyses()) or 'none'}): run `treetune run_analyzers` first"
    )


def _read_registered_result(folder: Path) -> dict[str, Any]:
    """Reads the result of an analysis. Raises ValueError if its analyzer isn't registered."""
    result = read_result(folder)
    if result["analyzer"] not in Analyzer.parts_by_name():
        registered = ", ".join(sorted(Analyzer.parts_by_name()))
        raise ValueError(
            f"{folder} is by the analyzer {result['analyzer']!r}, which is not registered: {registered}"
        )
    return result


def _pool_results(label: str, folders: Sequence[Path]) -> Mapping[str, Any]:
    """Returns one result of several analyses by one analyzer with the same settings: the numbers of all their
    states together."""
    results = [_read_registered_result(folder) for folder in folders]
    if len(results) == 1:
        return results[0]
    if any(result["settings"] != results[0]["settings"] for result in results):
        raise ValueError(
            f"the analyses with the name {label!r} have different settings"
            f" ({', '.join(map(str, folders))}): give them different names, or analyse them with the same"
            " settings"
        )
    rows = []
    for folder in folders:
        rows += [json.loads(line) for line in (folder / STATES).read_text().splitlines()]
    points: set[int] = set()
    for result in results:
        points |= set(result["points"])
    settings = results[0]["settings"]
    return {
        "analyzer": results[0]["analyzer"],
        "experiment": [result["experiment"] for result in results],
        "settings": settings,
        "points": sorted(points),
        "numbers": build(Analyzer, settings).summarise(rows),
    }
