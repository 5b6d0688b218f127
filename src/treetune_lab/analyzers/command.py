"""The command `run_analyzers`: every analyzer of an experiment, one after the other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treetune.processes import lifetime
from treetune.runtime.analysis import RESULT, STATES, Analyzer, read_result, write_result
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.manifest import refuse_another
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.sampler import Sampler
from treetune.runtime.session import Session
from treetune.store.files import replace_folder
from treetune_lab.analyzers.figures import save

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
    directory = ExperimentDirectory(Path(config.directory) / config.experiment_name)
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
        raise ValueError("run_analyzers works in one process: start it with --num_gpus=1")
    stored = directory.path / "config.json"
    if not stored.is_file():
        raise ValueError(f"{directory.path} holds no experiment: run_iteration_loop makes it")
    refuse_another(directory.path, plain, config)


@contextmanager
def _noted(analyzer: Analyzer, failed: dict[str, str]) -> Iterator[None]:
    """What goes wrong with one analyzer is the matter of this one alone."""
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
    """One analysis, and its folder, which comes into being whole."""
    started, session = time.monotonic(), sampler.session
    place = session.directory.analysis(analyzer.label)
    unfinished = place.with_name(f".{place.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    findings = analyzer.analyse(sampler, points, unfinished / JOURNAL)
    result = {
        "analyzer": analyzer.type_name,
        "experiment": session.config.experiment_name,
        "settings": settings,
        "points": points,
        "seconds": round(time.monotonic() - started, 1),
        "numbers": findings.numbers,
    }
    # Its own journal goes with it: the states hold what was found, and it is by far the largest.
    shutil.rmtree(unfinished / JOURNAL, ignore_errors=True)
    save(analyzer.draw({session.config.experiment_name: result}), unfinished)
    write_result(unfinished, result, findings.states, STATES)
    replace_folder(unfinished, place)
    session.console.say(f"{analyzer.label}: {place} ({result['seconds']:.0f} s)")
