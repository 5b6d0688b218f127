"""Mirrors of the metrics (W&B, trackio, TensorBoard). `metrics.jsonl` is the source; a run goes on without
its mirrors.

A mirror that is opened gets the points of `metrics.jsonl` that it lacks: those that a kill kept from it, or
all if it was switched on late. It gets no point twice. Facts that a mirror can't tell (the id of its run, the
first iteration that it lacks) are in `mirrors.json`, beside the manifest.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.files import write_text
from treetune.vocabulary import Metrics

logger = logging.getLogger(__name__)

RECORD = "mirrors.json"
"""Beside the manifest: by the kind of a mirror, its run and the first iteration that it lacks."""


class Sink(Registrable):
    """A mirror of the metrics. `open` may fail; a sink that fails later is dropped with a warning."""

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        """Opens the mirror. Returns the handle that `log` and `close` get: here, one with W&B's `log` and
        `finish`."""
        raise NotImplementedError

    def first_missing(self, handle: Any) -> int | None:
        """Returns the first iteration that the mirror lacks, from which on it gets the points that are there
        already; None if it gets none of them."""
        return None

    def log(self, handle: Any, iteration: int, metrics: Metrics) -> None:
        handle.log(dict(metrics), step=iteration)

    def close(self, handle: Any) -> None:
        handle.finish()


@dataclass
class _MirrorState:
    """A mirror's entry in `mirrors.json`, which later processes of the run read."""

    directory: Path
    kind: str
    values: dict[str, Any]

    @staticmethod
    def read(directory: Path, kind: str, **same: Any) -> _MirrorState:
        """Returns the mirror's entry, or a new one with `same` alone.

        It is a new one if there is none, or if that is of another run, which differs in one of `same`.
        """
        try:
            values = json.loads((directory / RECORD).read_text())[kind]
            is_same = all(values.get(name) == value for name, value in same.items())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            values, is_same = {}, False
        return _MirrorState(directory, kind, values if is_same else dict(same))

    def write(self, **values: Any) -> None:
        self.values |= values
        path = self.directory / RECORD
        try:
            entries = json.loads(path.read_text())
        except (OSError, ValueError):
            entries = {}
        entries = entries | {self.kind: self.values}
        write_text(path, json.dumps(entries, indent=1, sort_keys=True) + "\n")


class _CountedRun:
    """A run of W&B or trackio that remembers the first iteration that it lacks: both refuse earlier steps."""

    def __init__(self, run: Any, kept: _MirrorState, first_missing: int) -> None:
        self._run, self._kept, self.first_missing = run, kept, first_missing

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if step < self.first_missing:  # an iteration that is done again after a kill
            return
        self._run.log(metrics, step=step)
        self.first_missing = step + 1
        self._kept.write(first_missing=self.first_missing)

    def finish(self) -> None:
        self._run.finish()


@Sink.register("trackio")
@dataclass(frozen=True, kw_only=True)
class TrackioSink(Sink):
    """Trackio (`pip install trackio`): on this machine, where `trackio show` finds it."""

    project: str = "treetune"
    """The project's name there."""

    @override
    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        trackio = import_module("trackio")  # in no lock file
        kept = _MirrorState.read(directory, "trackio", project=self.project, name=name)
        # trackio knows runs by their names alone. A run of this name that this directory did not begin
        # belongs to another directory, and is not continued.
        was_begun_here = "first_missing" in kept.values
        belongs_to_another = not was_begun_here and name in _trackio_runs(trackio, self.project)
        resume = "never" if belongs_to_another else "allow"
        run = trackio.init(project=self.project, name=name, config=dict(config), resume=resume, embed=False)
        # trackio writes in the background, so after a kill only it knows which steps it has.
        first_missing = getattr(run, "_next_step", kept.values.get("first_missing", 0))
        kept.write(first_missing=first_missing)
        return _CountedRun(run, kept, first_missing)

    @override
    def first_missing(self, handle: _CountedRun) -> int:
        return handle.first_missing


def _trackio_runs(trackio: Any, project: str) -> set[str]:
    """Returns the names of a project's runs; none where this version of trackio doesn't tell them."""
    if not hasattr(trackio, "Api"):
        return set()
    try:
        return {run.name for run in trackio.Api().runs(project)}
    except ValueError:  # the project's first run
        return set()


@Sink.register("wandb")
@dataclass(frozen=True, kw_only=True)
class WandbSink(Sink):
    """Weights & Biases: offline unless someone is logged in. A run that goes on is the same run there, by the
    id in `mirrors.json`; `WANDB_RUN_ID` names another one."""

    project: str = "treetune"
    """The project's name there."""
    entity: str | None = None
    """User or team; null: the default of the user who is logged in."""

    @override
    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        import wandb

        netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        logged_in = os.environ.get("WANDB_API_KEY") or (netrc.is_file() and "wandb.ai" in netrc.read_text())
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in else "offline")
        identity = {"project": self.project, "entity": self.entity, "name": name}
        if chosen := os.environ.get("WANDB_RUN_ID"):
            identity["id"] = chosen
        kept = _MirrorState.read(directory, "wandb", **identity)
        kept.values.setdefault("id", secrets.token_hex(4))
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=name,
            dir=str(directory),
            config=dict(config),
            id=kept.values["id"],
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
        )
        # Online, the server knows which steps it has. Offline, only the files of the last process tell.
        starting_step = getattr(run, "starting_step", None)
        if mode == "online" and starting_step is not None:
            first_missing = starting_step
        else:
            first_missing = _first_missing_offline(directory, kept.values)
        folder = Path(str(getattr(run, "dir", ""))).parent
        where = str(folder.relative_to(directory)) if folder.is_relative_to(directory) else None
        kept.write(began=first_missing, first_missing=first_missing, folder=where)
        return _CountedRun(run, kept, first_missing)

    @override
    def first_missing(self, handle: _CountedRun) -> int:
        return handle.first_missing


def _first_missing_offline(directory: Path, kept: Mapping[str, Any]) -> int:
    """Returns the first iteration that the files of earlier processes lack.

    A kill loses points that W&B had not written yet, so its file tells which are there. If the file is gone,
    it was synchronised and deleted, and every point that was logged counts as there.
    """
    folder = kept.get("folder")
    files = list((directory / folder).glob("run-*.wandb")) if folder else []
    if not files:
        return kept.get("first_missing", 0)
    last_written = -1
    for file in files:
        last_written = max(last_written, max(_steps_in(file), default=-1))
    return max(kept.get("began", 0), last_written + 1)


WANDB_BEGINNING, WANDB_BLOCK, WANDB_CHUNK = 7, 32768, struct.Struct("<IHB")
"""Of W&B's file, a log in LevelDB's form: bytes before the first chunk, of a block, and a chunk's head
(checksum, length, kind)."""
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
"""Kinds of chunks: a record by itself, and the parts of one that spans blocks."""


def _steps_in(file: Path) -> Iterator[int]:
    """Yields the steps of the points in a file of W&B, as far as it was written."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records_in(file.read_bytes()):
        try:
            record = Record.FromString(content)
        except DecodeError:  # the end of a file that was torn
            return
        if record.WhichOneof("record_type") != "history":
            continue
        for item in record.history.item:
            if "_step" in (item.key, *item.nested_key):
                yield int(float(item.value_json))


def _records_in(content: bytes) -> Iterator[bytes]:
    """Yields the records of a log in LevelDB's form, up to the first chunk that is damaged or torn."""
    position = WANDB_BEGINNING
    record = b""
    while position + WANDB_CHUNK.size <= len(content):
        left_in_block = WANDB_BLOCK - position % WANDB_BLOCK
        if left_in_block < WANDB_CHUNK.size:  # too little room for a chunk's head: zeros
            position += left_in_block
            continue
        _, length, kind = WANDB_CHUNK.unpack_from(content, position)
        position += WANDB_CHUNK.size
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or position + length > len(content):
            return
        chunk = content[position : position + length]
        record = chunk if kind in (_WHOLE, _FIRST) else record + chunk
        if kind in (_WHOLE, _LAST):
            yield record
        position += length


@dataclass
class _EventFiles:
    """A writer of TensorBoard's event files, beside the files of earlier processes."""

    writer: Any
    points: dict[str, set[int]]
    """The steps that all files have, by the metric's name."""


@Sink.register("tensorboard")
@dataclass(frozen=True, kw_only=True)
class TensorboardSink(Sink):
    """Event files under ``tensorboard/`` in the experiment."""

    further_names: Mapping[str, str] = field(default_factory=dict)
    """Names under which metrics are written as well, each with the metric's own name: for dashboards of
    another program. Metrics that a run doesn't record are left out."""

    @override
    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = directory / "tensorboard"
        points = _points_in(folder)
        return _EventFiles(SummaryWriter(str(folder)), points)

    @override
    def first_missing(self, handle: _EventFiles) -> int:
        return 0  # `log` leaves out each point that is there

    @override
    def log(self, handle: _EventFiles, iteration: int, metrics: Metrics) -> None:
        names = {key: key for key in metrics} | dict(self.further_names)
        for name, key in names.items():
            steps = handle.points.setdefault(name, set())
            if key in metrics and iteration not in steps:
                handle.writer.add_scalar(name, metrics[key], iteration, walltime=metrics.get("wall_time"))
                steps.add(iteration)
        handle.writer.flush()  # or a kill would lose the points of two minutes

    @override
    def close(self, handle: _EventFiles) -> None:
        handle.writer.close()


def _points_in(folder: Path) -> dict[str, set[int]]:
    """Returns the steps of all points in event files by name; the end of a torn file is left out."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    points: dict[str, set[int]] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for content in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(content)
            for value in event.summary.value:
                points.setdefault(value.tag, set()).add(event.step)
    return points


class Mirrors:
    """The sinks of one run. Only the experiment directory is the source; these may fail.

    Each gets the points of the first `done` iterations that it lacks (of all, where that is None).
    """

    def __init__(
        self,
        sinks: tuple[Sink, ...],
        directory: Path,
        name: str,
        config: Mapping[str, Any],
        done: int | None = None,
    ) -> None:
        self._open: list[tuple[Sink, Any]] = []
        rows = _rows_of(directory, done) if sinks else {}
        for sink in sinks:
            try:
                handle = sink.open(directory, name, config)
                first_missing = sink.first_missing(handle)
                if first_missing is not None:
                    for iteration, row in rows.items():
                        if iteration >= first_missing:
                            sink.log(handle, iteration, row)
                self._open.append((sink, handle))
            except Exception as error:  # a mirror must not end a run, whatever a vendor's library raises
                logger.warning("%s is off for this run: %s", type(sink).__name__, error)

    def log(self, iteration: int, metrics: Metrics) -> None:
        for sink, handle in list(self._open):
            try:
                sink.log(handle, iteration, metrics)
            except Exception as error:  # as above
                logger.warning("%s is off from here on: %s", type(sink).__name__, error)
                self._open.remove((sink, handle))

    def close(self) -> None:
        for sink, handle in self._open:
            try:
                sink.close(handle)
            except Exception as error:  # as above
                logger.warning("%s did not close: %s", type(sink).__name__, error)
        self._open = []


def _rows_of(directory: Path, done: int | None) -> dict[int, Metrics]:
    """Returns the rows of `metrics.jsonl` by iteration, in order: the first `done`, or all if that is None.

    If an iteration was done twice, the last row counts. Damaged lines are left out: the run reports them.
    """
    rows = {int(row["iteration"]): row for row in ExperimentDirectory(directory).read_metrics([])}
    return {iteration: rows[iteration] for iteration in sorted(rows) if done is None or iteration < done}
