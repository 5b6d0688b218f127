"""Mirrors of the metrics: W&B, trackio and TensorBoard.

`metrics.jsonl` is the source. A mirror that is opened gets those points of `metrics.jsonl` that it lacks: all
earlier ones if the mirror was switched on late, or those that it didn't get because the run was killed. It
gets no point twice. To know which points a mirror has, a run keeps the id of the mirror's run and its first
missing iteration in `mirrors.json`, next to the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.store.files import write_text
from treetune.vocabulary import Metrics

MIRRORS_RECORD = "mirrors.json"
"""The file next to the manifest that has an entry for each kind of mirror: its run and its first missing
iteration. Example: ``{"wandb": {"id": "3fa1c0de", "project": "treetune", "first_missing": 12, …}}``."""


WANDB_ENDS_WITHIN_S = 30.0
"""The longest that W&B may take to end its process after it has given up an upload."""

WANDB_KILLED = 255
"""The exit code with which W&B itself reports a Ctrl-C, and shows a run as killed (wandb's
sdk/lib/exit_hooks.py)."""

ANSWER_COLUMNS = (
    "problem",
    "prompt",
    "gold",
    "text",
    "reward",
    "outcome",
    "extracted",
    "finish_reason",
    "tokens",
)
"""The columns of W&B's table of answers, in addition to the iteration."""


CLOSING_S = 180.0
"""The longest that a sink may take to close, unless its `closing_s` says otherwise."""


class Sink(Registrable):
    """A mirror of the metrics. A sink that fails, or that doesn't return in time, is switched off with a
    warning, and the run continues. All calls of a sink come from one thread, which isn't the main thread."""

    closing_s: float = CLOSING_S
    """The longest that `close` may take, in seconds."""

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        """Opens the mirror, and returns the handle that `log` and `close` get. The methods below expect one
        with the methods of W&B's run, `log` and `finish`."""
        raise NotImplementedError

    def first_missing(self, handle: Any) -> int | None:
        """Returns the first iteration that is missing in the mirror, which then gets the points from that
        iteration on. Returns None if the mirror gets no points of earlier iterations."""
        return None

    def log(self, handle: Any, iteration: int, metrics: Metrics) -> None:
        handle.log(dict(metrics), step=iteration)

    def close(self, handle: Any) -> None:
        handle.finish()

    def close_failed(self, handle: Any, exit_code: int, *, is_preempted: bool) -> None:
        """Closes the mirror of a run that hasn't reached its end. Called in place of `close`, which it calls
        unless the mirror's service shows how a run has ended.

        Args:
            exit_code: 128 + the number of the signal that has ended the run; 1 for a failure.
            is_preempted: Whether a signal other than Ctrl-C has stopped the run, which may go on later.
        """
        self.close(handle)


@dataclass
class _MirrorState:
    """A mirror's entry in `mirrors.json`, which later processes of the run read."""

    directory: Path
    mirror: str
    values: dict[str, Any]

    @staticmethod
    def read(directory: Path, mirror: str, **identity: Any) -> _MirrorState:
        """Returns the entry of a mirror (a copy of the metrics at W&B or trackio) in `mirrors.json`.

        Returns a new entry, which has only `identity`, if the file has no entry for the mirror, or if the
        entry belongs to another run of the mirror.

        Args:
            mirror: The key of the mirror's entry, such as "wandb".
            identity: The values by which the mirror's run is recognised, such as its project and name.
        """
        try:
            values = json.loads((directory / MIRRORS_RECORD).read_text())[mirror]
            is_same_run = all(values.get(name) == value for name, value in identity.items())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            # There is no file or no entry yet, or the file has another content: the mirror begins anew.
            values, is_same_run = {}, False
        return _MirrorState(directory, mirror, values if is_same_run else dict(identity))

    def write(self, **values: Any) -> None:
        """Changes values of the entry, and writes it into `mirrors.json`. Other mirrors' entries stay."""
        self.values |= values
        path = self.directory / MIRRORS_RECORD
        try:
            entries = json.loads(path.read_text())
        except (OSError, ValueError):  # no file yet, or one that isn't JSON and is replaced
            entries = {}
        if not isinstance(entries, dict):  # it has another content, and is replaced, too
            entries = {}
        entries = entries | {self.mirror: self.values}
        write_text(path, json.dumps(entries, indent=1, sort_keys=True) + "\n")


class _CountedRun:
    """A run of W&B or trackio that remembers its first missing iteration, since both refuse earlier steps."""

    def __init__(self, run: Any, state: _MirrorState, first_missing: int) -> None:
        self._run, self._state, self.first_missing = run, state, first_missing
        self.directory = state.directory
        """The experiment's folder."""
        self.folder = state.directory / (state.values.get("folder") or "")
        """The folder of the mirror's own files, if it is known, and else that of the experiment."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Logs the metrics of a step that the mirror doesn't have yet, and records that it has them now."""
        if step < self.first_missing:  # an iteration that is done again after a kill
            return
        self._run.log(metrics, step=step)
        self.first_missing = step + 1
        self._state.write(first_missing=self.first_missing)

    def finish(self, **arguments: Any) -> None:
        self._run.finish(**arguments)

    def mark_preempting(self) -> None:
        """Tells W&B that the run stops, and may go on later."""
        self._run.mark_preempting()


@Sink.register("trackio")
@dataclass(frozen=True, kw_only=True)
class TrackioSink(Sink):
    """Trackio (`pip install trackio`), on this machine. `trackio show` displays it."""

    project: str = "treetune"
    """The project's name there."""

    @override
    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        trackio = import_module("trackio")  # not among this project's dependencies
        state = _MirrorState.read(directory, "trackio", project=self.project, name=name)
        # trackio knows runs only by their names. If a run of this name exists before the first process of
        # this directory, it belongs to another directory. This directory's run then gets another name, and
        # keeps it.
        is_first_process = "first_missing" not in state.values  # each process writes it below
        if is_first_process and name in _trackio_runs(trackio, self.project):
            digest = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=4).hexdigest()
            state.values["run"] = f"{name}-{digest}"
        # `embed` is False, since a notebook would otherwise show the dashboard below the cell.
        run = trackio.init(
            project=self.project,
            name=state.values.get("run", name),
            config=dict(config),
            resume="allow",
            embed=False,
        )
        # trackio writes in the background, so after a kill only it knows which steps it has.
        first_missing = getattr(run, "_next_step", state.values.get("first_missing", 0))
        state.write(first_missing=first_missing)
        return _CountedRun(run, state, first_missing)

    @override
    def first_missing(self, handle: _CountedRun) -> int:
        return handle.first_missing


def _trackio_runs(trackio: Any, project: str) -> set[str]:
    """Returns the names of a project's runs; none if this version of trackio can't list them."""
    if not hasattr(trackio, "Api"):
        return set()
    try:
        return {run.name for run in trackio.Api().runs(project)}
    except ValueError:  # the project's first run
        return set()


@Sink.register("wandb")
@dataclass(frozen=True, kw_only=True)
class WandbSink(Sink):
    """Weights & Biases: offline unless a user is logged in. A resumed run continues the same run of W&B,
    whose id is in `mirrors.json`; `WANDB_RUN_ID` chooses another one. If the environment has WANDB_RUN_ID or
    WANDB_API_KEY, a run has this sink by default; with WANDB_MODE=disabled it has not. W&B shows a run as
    failed after an error, killed after a Ctrl-C, and preempted after another signal."""

    project: str = "treetune"
    """The project's name there."""
    entity: str | None = None
    """User or team; null: the default of the user who is logged in."""
    further_names: Mapping[str, str] = field(default_factory=dict)
    """Further names under which metrics are logged, for dashboards of other programs. Each has the metric's
    name as its value: ``{"actor/entropy": "train/entropy"}``. Metrics that a run doesn't record are left
    out."""
    answers_every: Annotated[int, Gt(0)] | None = None
    """A table of answers is logged after every so many iterations; null: never. The answers leave this
    machine if W&B is online."""
    answers: Annotated[int, Gt(0)] = 32
    """Most answers of such a table: the first ones of the iteration, in the order of its problems."""
    finish_timeout: Annotated[float, Gt(0)] = 300.0
    """The longest that the end of the run waits, in seconds, until W&B has uploaded everything. What is
    missing then is on this machine, and `wandb sync` uploads it."""

    @property
    @override
    def closing_s(self) -> float:  # type: ignore[override]
        # W&B gives up by itself after `finish_timeout`. It needs a while to end its process then.
        return self.finish_timeout + WANDB_ENDS_WITHIN_S

    @override
    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        import wandb

        netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        logged_in = os.environ.get("WANDB_API_KEY") or (netrc.is_file() and "wandb.ai" in netrc.read_text())
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in else "offline")
        identity = {"project": self.project, "entity": self.entity, "name": name}
        if run_id := os.environ.get("WANDB_RUN_ID"):
            identity["id"] = run_id
        state = _MirrorState.read(directory, "wandb", **identity)
        # A new run gets a random id. A resumed run has its id from its last process.
        state.values.setdefault("id", secrets.token_hex(4))
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=name,
            dir=str(directory),
            config=dict(config),
            id=state.values["id"],
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            settings=self._settings(),
        )
        # The first iteration that W&B doesn't have yet. Online, the server knows it. Offline, the files of
        # the run's last process tell it.
        starting_step = getattr(run, "starting_step", None)
        if mode == "online" and starting_step is not None:
            first_missing = starting_step
        else:
            # `state` is still that of the last process, with the folder of its files.
            first_missing = _first_missing_offline(directory, state.values)
        files_folder = Path(str(getattr(run, "dir", "")))  # a subfolder of the run's folder
        folder = files_folder.parent
        relative_folder = str(folder.relative_to(directory)) if folder.is_relative_to(directory) else None
        # From here on, `state` describes this process. Each logged iteration raises `first_missing`, while
        # `began` stays.
        state.write(began=first_missing, first_missing=first_missing, folder=relative_folder)
        return _CountedRun(run, state, first_missing)

    def _settings(self) -> Any:
        """Returns W&B's settings, with which it gives up an upload that doesn't end. Without them, it waits
        for the network for ever, also in its handler at the exit of the interpreter."""
        import wandb

        settings = {"finish_timeout": self.finish_timeout, "finish_timeout_raises": True}
        # Earlier versions of W&B don't have these settings.
        known_settings = wandb.Settings.model_fields
        return wandb.Settings(**{name: value for name, value in settings.items() if name in known_settings})

    @override
    def close(self, handle: _CountedRun) -> None:
        self._finish(handle, exit_code=0)

    @override
    def close_failed(self, handle: _CountedRun, exit_code: int, *, is_preempted: bool) -> None:
        if is_preempted:
            # W&B shows a run as preempted if it is marked so and its exit code isn't 0.
            handle.mark_preempting()
        if exit_code == 128 + signal.SIGINT:
            exit_code = WANDB_KILLED  # with the code of a Ctrl-C, W&B shows the run as killed, and not failed
        self._finish(handle, exit_code)

    def _finish(self, handle: _CountedRun, exit_code: int) -> None:
        try:
            handle.finish(exit_code=exit_code)
        except TimeoutError as error:
            raise TimeoutError(
                f"W&B has not uploaded everything within {self.finish_timeout:g} s (finish_timeout of the"
                f" sink). `wandb sync {handle.folder}` uploads the missing points"
            ) from error

    @override
    def log(self, handle: _CountedRun, iteration: int, metrics: Metrics) -> None:
        values: dict[str, Any] = dict(metrics)
        for name, key in self.further_names.items():
            if key in metrics:
                values[name] = metrics[key]
        is_due = self.answers_every is not None and (iteration + 1) % self.answers_every == 0
        # The mirror has the points and tables of earlier iterations.
        if is_due and iteration >= handle.first_missing:
            table = self._table_of_answers(handle.directory, iteration)
            if table is not None:
                values["answers"] = table
        handle.log(values, step=iteration)

    def _table_of_answers(self, directory: Path, iteration: int) -> Any:
        """Returns W&B's table of an iteration's first answers; None if they aren't stored."""
        import wandb

        # Imported here, since pyarrow isn't needed without tables.
        from treetune.rollouts.storage import answer_row, read_trajectories
        from treetune.runtime.directory import TRAJECTORIES, ExperimentDirectory

        file = ExperimentDirectory(directory).iteration_folder(iteration) / TRAJECTORIES
        if not file.is_file():
            return None
        rows = []
        for trajectory in read_trajectories(file)[: self.answers]:
            answer = answer_row(trajectory)
            rows.append([iteration, *(answer[column] for column in ANSWER_COLUMNS)])
        return wandb.Table(columns=["iteration", *ANSWER_COLUMNS], data=rows)

    @override
    def first_missing(self, handle: _CountedRun) -> int:
        return handle.first_missing


def _first_missing_offline(directory: Path, values: Mapping[str, Any]) -> int:
    """Returns the first iteration that is missing in the files of the run's last process.

    A kill loses points that W&B had not written yet. So W&B's files are read to see which points they have.
    If the files are gone, they were synchronised and then deleted, and no point that was logged is missing.

    Args:
        values: The mirror's entry in `mirrors.json`.
    """
    folder = values.get("folder")
    files = list((directory / folder).glob("run-*.wandb")) if folder else []
    if not files:
        return values.get("first_missing", 0)
    steps = [step for file in files for step in _steps_in(file)]
    last_written = max(steps, default=-1)
    # The last process has logged from iteration `began` on. If it was killed before W&B wrote a point, its
    # files have none, and `began` is still the first missing one.
    return max(values.get("began", 0), last_written + 1)


def with_mirrors_of_environment(
    sinks: tuple[Sink, ...], environment: Mapping[str, str] = os.environ
) -> tuple[Sink, ...]:
    """Returns the configured sinks, and W&B's in addition if the environment names a run or a key of W&B."""
    is_wanted = environment.get("WANDB_RUN_ID") or environment.get("WANDB_API_KEY")
    is_configured = any(isinstance(sink, WandbSink) for sink in sinks)
    if not is_wanted or is_configured or environment.get("WANDB_MODE") == "disabled":
        return sinks
    return (*sinks, WandbSink())


# W&B's file is a log in LevelDB's form.
WANDB_HEADER = 7
"""The bytes before the first chunk."""
WANDB_BLOCK = 32768
"""The bytes of a block."""
WANDB_CHUNK_HEAD = struct.Struct("<IHB")
"""The head of a chunk: checksum, length, kind."""
WHOLE_CHUNK, FIRST_CHUNK, MIDDLE_CHUNK, LAST_CHUNK = 1, 2, 3, 4
"""Kinds of chunks: a record by itself, and the parts of one that spans blocks."""


def _steps_in(file: Path) -> Iterator[int]:
    """Yields the steps of the points in one of W&B's files.

    If a kill has cut the file short, the steps end before the damaged record.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records_in(file.read_bytes()):
        try:
            record = Record.FromString(content)
        except DecodeError:  # the file was cut short
            return
        if record.WhichOneof("record_type") != "history":  # a record of this type is a point of the metrics
            continue
        for item in record.history.item:
            # W&B writes a name either as a text (`key`) or as a path (`nested_key`).
            if "_step" in (item.key, *item.nested_key):
                yield int(float(item.value_json))  # in JSON, 3 may also be written as 3.0


def _records_in(content: bytes) -> Iterator[bytes]:
    """Yields the records of a log in LevelDB's form, up to the first chunk that is cut short or of an unknown
    kind. Checksums aren't compared."""
    position = WANDB_HEADER
    record = b""
    while position + WANDB_CHUNK_HEAD.size <= len(content):
        remaining_bytes = WANDB_BLOCK - position % WANDB_BLOCK
        if remaining_bytes < WANDB_CHUNK_HEAD.size:  # the block's end is too short for a head, and is zeros
            position += remaining_bytes
            continue
        _checksum, length, chunk_kind = WANDB_CHUNK_HEAD.unpack_from(content, position)
        position += WANDB_CHUNK_HEAD.size
        is_known_kind = chunk_kind in (WHOLE_CHUNK, FIRST_CHUNK, MIDDLE_CHUNK, LAST_CHUNK)
        if not is_known_kind or position + length > len(content):
            return
        chunk = content[position : position + length]
        begins_record = chunk_kind in (WHOLE_CHUNK, FIRST_CHUNK)
        record = chunk if begins_record else record + chunk
        if chunk_kind in (WHOLE_CHUNK, LAST_CHUNK):
            yield record
        position += length


@dataclass
class _EventFiles:
    """A writer of TensorBoard's event files, and the steps that the files of all processes have."""

    writer: Any
    steps_by_name: dict[str, set[int]]
    """The steps whose points the files have, by the metric's name."""


@Sink.register("tensorboard")
@dataclass(frozen=True, kw_only=True)
class TensorboardSink(Sink):
    """Event files under ``tensorboard/`` in the experiment."""

    further_names: Mapping[str, str] = field(default_factory=dict)
    """Further names under which metrics are written, for dashboards of other programs. Each has the metric's
    name as its value: ``{"actor/entropy": "train/entropy"}``. Metrics that a run doesn't record are left
    out."""

    @override
    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = directory / "tensorboard"
        steps_by_name = _steps_in_event_files(folder)  # `log` writes no point a second time
        return _EventFiles(SummaryWriter(str(folder)), steps_by_name)

    @override
    def first_missing(self, handle: _EventFiles) -> int:
        return 0  # `log` leaves out each point that the files have

    @override
    def log(self, handle: _EventFiles, iteration: int, metrics: Metrics) -> None:
        # Each metric is written under its key, and perhaps under a further name, too.
        key_by_name = {key: key for key in metrics} | dict(self.further_names)
        for name, key in key_by_name.items():
            steps = handle.steps_by_name.setdefault(name, set())
            # After a kill, an iteration may be done again, and its points are written already.
            if key in metrics and iteration not in steps:
                handle.writer.add_scalar(name, metrics[key], iteration, walltime=metrics.get("wall_time"))
                steps.add(iteration)
        handle.writer.flush()  # or a kill would lose the points of two minutes

    @override
    def close(self, handle: _EventFiles) -> None:
        handle.writer.close()


def _steps_in_event_files(folder: Path) -> dict[str, set[int]]:
    """Returns the steps of all points in the event files, by the metric's name. The damaged end of a file is
    left out."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    steps_by_name: dict[str, set[int]] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for content in RawEventFileLoader(str(file)).Load():  # it ends before a damaged end
            event = Event.FromString(content)
            for value in event.summary.value:
                steps_by_name.setdefault(value.tag, set()).add(event.step)
    return steps_by_name
