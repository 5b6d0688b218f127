"""A run that is killed twice has a single run of W&B and whole event files of TensorBoard.

Every iteration is there exactly once, with the numbers of `metrics.jsonl`, and so is every table of answers
that was due. Iterations that are trained again after a kill add nothing. `tests/runtime` has the same of
single sinks, without a run.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.support.fork_server import ROOT, start_forked
from treetune.runtime.directory import ExperimentDirectory

pytestmark = pytest.mark.slow

ITERATIONS = 6
DEADLINE_S = 600.0
NAMES = {"actor/entropy": "train/entropy", "reward/std": "episodes/reward_std"}

PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.support.small_run import small, train
from treetune.runtime.base import Checkpoints
from treetune.runtime.mirrors import Mirrors
from treetune.runtime.sinks import TensorboardSink, WandbSink

names = {"actor/entropy": "train/entropy", "reward/std": "episodes/reward_std"}
sinks = (
    WandbSink(further_names=names, answers_every=2, answers=3),
    TensorboardSink(further_names=names),
)
log = Mirrors.log


def run(killed_in, is_mirrored):
    def log_and_die(self, iteration, metrics):
        if iteration != killed_in or is_mirrored:
            log(self, iteration, metrics)
        if iteration == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)

    Mirrors.log = log_and_die
    train(small(Path(sys.argv[1]), iterations=6, checkpoints=Checkpoints(every=2), sinks=sinks))


# Killed after the point of iteration 2 was sent, and before that of iteration 3 was.
for killed_in, is_mirrored in ((2, True), (3, False), (None, True)):
    child = os.fork()
    if not child:
        run(killed_in, is_mirrored)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code != (0 if killed_in is None else -signal.SIGKILL):
        sys.exit(f"the start that is killed in {killed_in} ended with {code}")
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> ExperimentDirectory:
    """A finished run that was killed twice."""
    base = tmp_path_factory.mktemp("mirrored")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "NETRC": str(base / "no-netrc"),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    program, output = base / "program.py", base / "output"
    program.write_text(PROGRAM)
    with output.open("wb") as file:
        process = start_forked([str(base)], program=program, cwd=ROOT, environment=environment, output=file)
    assert process.wait(DEADLINE_S) == 0, output.read_text()
    return ExperimentDirectory(base / "small")


def records_of_wandb(directory: ExperimentDirectory) -> list[Any]:
    """Returns the records of all offline files, the first process's first, as `wandb sync` reads them."""
    from wandb.proto.wandb_internal_pb2 import Record

    from treetune.runtime.sinks import _records_in

    files = sorted(
        directory.path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime
    )
    return [Record.FromString(content) for file in files for content in _records_in(file.read_bytes())]


def points_of_wandb(directory: ExperimentDirectory) -> list[dict[str, Any]]:
    """Returns the logged points. W&B stores a table as several keys, such as ``answers/path``."""
    points = []
    for record in records_of_wandb(directory):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            points.append({"/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return points


def test_wandb_has_one_run_with_every_iteration_once(directory: ExperimentDirectory) -> None:
    ids = {record.run.run_id for record in records_of_wandb(directory) if record.HasField("run")}
    assert len(ids) == 1
    assert ids == {json.loads((directory.path / "mirrors.json").read_text())["wandb"]["id"]}
    points = points_of_wandb(directory)
    assert [point["_step"] for point in points] == list(range(ITERATIONS))
    rows = {row["iteration"]: row for row in directory.read_metrics()}
    for point in points:
        row = rows[point["_step"]]
        for name in ("train/loss", "episodes/reward", "episodes/reward_std", "iteration"):
            assert point[name] == row[name]
        for name, metric in NAMES.items():
            assert point[name] == row[metric]


def test_wandb_has_every_table_of_answers_once(directory: ExperimentDirectory) -> None:
    points = points_of_wandb(directory)
    paths = {point["_step"]: point["answers/path"] for point in points if "answers/path" in point}
    assert list(paths) == [1, 3, 5]
    for step, path in paths.items():
        files = list(directory.path.glob(f"wandb/offline-run-*/files/{path}"))
        assert files
        content = json.loads(files[0].read_text())
        rows = [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
        assert len(rows) == 3 and {row["iteration"] for row in rows} == {step}


def test_tensorboard_has_every_number_of_every_iteration_once(directory: ExperimentDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    rows = {row["iteration"]: row for row in directory.read_metrics()}
    assert list(rows) == list(range(ITERATIONS))
    names = {name for row in rows.values() for name in row}
    assert names | NAMES.keys() == set(events.Tags()["scalars"])
    for name in names | NAMES.keys():
        metric = NAMES.get(name, name)
        steps = [event.step for event in events.Scalars(name)]
        assert len(steps) == len(set(steps))
        assert {i for i, row in rows.items() if metric in row} <= set(steps)
        if metric.startswith(("train/", "episodes/", "credit/")):  # others are times, say
            for event in events.Scalars(name):
                assert event.value == pytest.approx(rows[event.step][metric], rel=1e-5)
