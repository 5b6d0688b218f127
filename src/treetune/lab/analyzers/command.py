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
from treetune.lab.analyzers.figures import save
from treetune.processes import lifetime
from treetune.runtime.analysis import RESULT, STATES, Analyzer, read_result, write_result
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.manifest import refuse_another
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.sampler import Sampler
from treetune.runtime.session import Session
from treetune.store.files import replace_folder, write_json

JOURNAL = "journal"

Plain = Mapping[str, Any]


def run_analyzers(root: Runtime, plain: Plain) -> int:
    """Writes ``analyses/<name>/`` for every analyzer; the exit code.

    An analyzer whose experiment lacks something says so, and the others go on; the exit code is
    then 1. What was analysed with the same settings already is left as it is; what was interrupted
    goes on from the requests that were answered. One process; the engine may be as large as it likes.
    """
    assert isinstance(root, PolicyIteration)
    config = root
    lifetime.exit_on_signals()
    lifetime.end_with_launcher()
    directory = ExperimentDirectory.of(config)
    _require(config, directory, plain)
    config.model.require()  # before anything heavy is imported
    failed: dict[str, str] = {}
    due: list[tuple[Analyzer, Plain, list[int]]] = []
    for analyzer, settings in dict(zip(config.analyzers, plain["analyzers"], strict=True)).items():
        with _noted(analyzer, failed):
            points = analyzer.points(config, directory)
            if _is_done(directory, analyzer, settings, points):
                print(f"{directory.analysis(analyzer.label)} is done")
            else:
                due.append((analyzer, settings, points))
    if due:
        engine = any(analyzer.needs_engine for analyzer, *_ in due)
        with (
            Session.open(config, plain, "analysis") as session,
            PolicyServer.start(session, needed=engine) as server,
            Sampler.open(session, server) as sampler,
        ):
            for analyzer, settings, points in due:
                with _noted(analyzer, failed):
                    _analyse(sampler, analyzer, settings, points)
    for label, message in failed.items():
        print(f"{label}: {message}")
    return 1 if failed else 0


def _require(config: PolicyIteration, directory: ExperimentDirectory, plain: Plain) -> None:
    if not config.analyzers:
        raise ValueError(
            "the experiment has no analyzers: put some on its right, e.g."
            " --configs EXPERIMENT.jsonnet,configs/analyzers/value_accuracy.jsonnet"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("run_analyzers works in one process: start it with --ranks 1")
    stored = directory.path / "config.json"
    if not stored.is_file():
        raise ValueError(f"{directory.path} holds no experiment: train it with `treetune run` first")
    refuse_another(directory.path, plain, config)


@contextmanager
def _noted(analyzer: Analyzer, failed: dict[str, str]) -> Iterator[None]:
    """Notes the failure of one analyzer, so that the others go on."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        failed[analyzer.label] = str(error) or type(error).__name__


def _is_done(directory: ExperimentDirectory, analyzer: Analyzer, settings: Plain, points: list[int]) -> bool:
    path = directory.analysis(analyzer.label) / RESULT
    if not path.is_file():
        return False
    result = read_result(path.parent)
    return (result["settings"], result["points"]) == (settings, points)


def _analyse(sampler: Sampler, analyzer: Analyzer, settings: Plain, points: list[int]) -> None:
    """Carries out one analysis. Its folder appears when it is finished."""
    session = sampler.session
    began = time.monotonic()
    folder = session.directory.analysis(analyzer.label)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    findings = analyzer.analyse(sampler, points, unfinished / JOURNAL)
    result = {
        "analyzer": analyzer.type_name,
        "experiment": session.config.experiment_name,
        "settings": settings,
        "points": points,
        "seconds": round(time.monotonic() - began, 1),
        "numbers": findings.numbers,
    }
    # The journal only serves to resume. It is by far the largest file, and the states have its results.
    shutil.rmtree(unfinished / JOURNAL, ignore_errors=True)
    save(analyzer.draw({session.config.experiment_name: result}), unfinished)
    write_result(unfinished, result, findings.states, STATES)
    replace_folder(unfinished, folder)
    session.console.say(f"{analyzer.label}: {folder} ({result['seconds']:.0f} s)")


def compare_analyses(name: str, experiments: Sequence[str], output: Path) -> Path:
    """Draws the analysis `name` of several experiments (``DIRECTORY`` or ``NAME=DIRECTORY``) in one
    figure, and keeps their numbers beside it; the path of the figure without its ending.

    Experiments of one NAME, such as a method's seeds, are taken together: their states are one
    sample, in which a problem stays one problem.

    Raises ValueError for an experiment without this analysis, and for analyses by different
    analyzers, or of one name with different settings.
    """
    folders: dict[str, list[Path]] = {}
    for text in experiments:
        label, _, experiment = text.rpartition("=")
        folder = Path(experiment) / "analyses" / name
        if not (folder / RESULT).is_file():
            existing = sorted(path.parent.name for path in Path(experiment).glob(f"analyses/*/{RESULT}"))
            raise ValueError(
                f"{experiment} has no analysis {name!r} ({folder / RESULT} is missing; there:"
                f" {', '.join(existing) or 'none'}): run_analyzers makes it"
            )
        folders.setdefault(label or _read(folder)["experiment"], []).append(folder)
    results = {label: _pool(label, folders_of_label) for label, folders_of_label in folders.items()}
    kinds = sorted({result["analyzer"] for result in results.values()})
    if len(kinds) != 1:
        raise ValueError(f"analyses {name!r} of different kinds don't go into one figure: {', '.join(kinds)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    save(Analyzer.registered()[kinds[0]].draw(results), output.parent, output.name)  # type: ignore[attr-defined]
    write_json(output.with_name(f"{output.name}.json"), results)
    return output


def _read(folder: Path) -> dict[str, Any]:
    result = read_result(folder)
    if result["analyzer"] not in Analyzer.registered():
        known = ", ".join(sorted(Analyzer.registered()))
        raise ValueError(f"{folder} is by the analyzer {result['analyzer']!r}, which isn't here: {known}")
    return result


def _pool(label: str, folders: Sequence[Path]) -> Mapping[str, Any]:
    """Returns one result of several analyses by one analyzer with the same settings."""
    results = [_read(folder) for folder in folders]
    if len(results) == 1:
        return results[0]
    if any(result["settings"] != results[0]["settings"] for result in results):
        raise ValueError(
            f"the analyses that are to be taken together as {label!r} have different settings"
            f" ({', '.join(map(str, folders))}): give them different names, or analyse them alike"
        )
    rows = []
    for folder in folders:
        rows += [json.loads(line) for line in (folder / STATES).read_text().splitlines()]
    settings = results[0]["settings"]
    return {
        "analyzer": results[0]["analyzer"],
        "experiment": [result["experiment"] for result in results],
        "settings": settings,
        "points": sorted({point for result in results for point in result["points"]}),
        "numbers": build(Analyzer, settings).summarise(rows),
    }
