"""The data sets that are known: below the folders, named on the command line, named by experiments."""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treetune_view.store.folders import NotThere, Run, folders_below, is_experiment, stat_of
from treetune_view.text import writable

if TYPE_CHECKING:
    from treetune_view.store.catalogue import Store
    from treetune_view.store.tables import Table

Kind = Literal["parquet", "lines", "saved", "table", "estimate"]
"""Parquet; JSON lines; a split that ``save_to_disk`` wrote; a W&B table's JSON; what `estimate_difficulty`
found."""

OPEN = 8
"""Data sets whose rows are kept open."""

ESTIMATE, SPLITS, SPLIT = "estimate.json", "dataset_dict.json", "dataset_info.json"
"""Files that say what a folder is: of `estimate_difficulty`, of a saved data set, of one split of it."""

_ENDINGS = (".parquet", ".jsonl", ".json")
_TABLE = re.compile(rb'\s*\{\s*"(?:_type|columns|column_types|ncols)"')
"""The beginning of a W&B table."""


@dataclass(frozen=True)
class DataSet:
    """A data set, by its name in addresses. `known_from` says why it may be read."""

    name: str
    path: Path
    kind: Kind
    known_from: str

    @property
    def mark(self) -> str:
        """Another text as soon as a file of it is another."""
        return repr([(str(path), stat_of(path)) for path in self.files()])

    @property
    def size(self) -> int:
        """Bytes on disk; 0 for what has gone meanwhile."""
        return sum(path.stat().st_size for path in self.files() if path.is_file())

    def files(self) -> list[Path]:
        if self.kind == "estimate":
            return [*sorted(self.path.glob("shards/*/*.jsonl")), *sorted(self.path.glob("*.parquet"))]
        return sorted(self.path.glob("*.arrow")) if self.kind == "saved" else [self.path]


def kind_of(path: Path) -> Kind | None:
    """Returns what a file or a folder holds; None for no data set."""
    if path.is_dir():
        if (path / ESTIMATE).is_file():
            return "estimate"
        return "saved" if (path / SPLIT).is_file() and (path / "state.json").is_file() else None
    if path.suffix == ".json":
        return "table" if _begins_as_table(path, stat_of(path)) else None
    kinds: dict[str, Kind] = {".parquet": "parquet", ".jsonl": "lines"}
    return kinds.get(path.suffix)


@functools.lru_cache(maxsize=4096)
def _begins_as_table(path: Path, _: object) -> bool:
    """Reads the file again only when it is another."""
    try:
        with path.open("rb") as file:
            return _TABLE.match(file.read(200)) is not None
    except OSError:
        return False


class DataSets:
    """The data sets of a store. `files` were named on the command line. What lies below the folders may be
    `look_again_s` old. Raises ValueError for a file that holds no rows."""

    def __init__(self, store: Store, files: Sequence[Path], look_again_s: float) -> None:
        for file in files:
            if not file.is_file():
                raise ValueError(f"there is no file or folder {file} (looked for in {Path.cwd()})")
            if kind_of(file) is None:
                raise ValueError(
                    f"{file} is no data set: give Parquet (.parquet), JSON lines (.jsonl), the JSON of a W&B"
                    " table, or a folder"
                )
        self._store, self._files, self._look_again_s = store, list(files), look_again_s
        self._lock = threading.Lock()
        self._looked, self._known = -float("inf"), dict[str, DataSet]()
        self._open: OrderedDict[str, tuple[str, Table]] = OrderedDict()

    def all(self) -> list[DataSet]:
        """Returns all, those of the command line first, then those below folders, then those of
        experiments."""
        with self._lock:
            if time.monotonic() - self._looked > self._look_again_s:
                known: dict[str, DataSet] = {}
                paths: set[Path] = set()
                for name, path, known_from in self._find():
                    kind = kind_of(path)
                    if kind is not None and path.resolve() not in paths:
                        paths.add(path.resolve())
                        own_name = writable(name if name not in known else str(path.resolve()))
                        known[own_name] = DataSet(own_name, path, kind, known_from)
                self._known, self._looked = known, time.monotonic()
            return list(self._known.values())

    def one(self, name: str) -> DataSet:
        """Returns the data set of that name: no other file is read, whatever an address says. Raises
        NotThere."""
        with self._lock:
            data = self._known.get(name)
        if data is None or not data.path.exists():  # or else no folder need be looked through
            everything = {one.name: one for one in self.all()}
            data = everything.get(name)
        if data is None:
            there = ", ".join([*everything][:20])
            raise NotThere(f"there is no data set {name!r} {f'; there are {there}' if there else ''}".strip())
        return data

    def table(self, data: DataSet) -> Table:
        """Returns its rows, to be asked. Raises ValueError for what can't be read."""
        from treetune_view.store.tables import Table

        mark = data.mark
        with self._lock:
            known = self._open.get(data.name)
            if known is not None and known[0] == mark:
                self._open.move_to_end(data.name)
                return known[1]
        for path in data.files():
            # Files that are data sets themselves were chosen by their path, or named.
            if path != data.path and not self._store.follows(path):
                raise ValueError(
                    f"{path} is a symbolic link that leads out of the folder: it is not followed"
                )
        table = Table(data)
        with self._lock:
            self._open[data.name] = mark, table
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
        return table

    def _find(self) -> Iterator[tuple[str, Path, str]]:
        """Yields the name, the path and the origin of whatever may be a data set."""
        for file in self._files:
            yield str(file), file.absolute(), "named on the command line"
        several = len(self._store.folders) > 1
        for folder in self._store.folders:
            for path in sorted(_below(folder, self._store.follows)):
                below = path.relative_to(folder).as_posix()
                parts = [folder.name] if several or below == "." else []
                yield "/".join([*parts, *([below] if below != "." else [])]), path, f"below {folder}"
        for run in self._store.runs():
            for name, path in self._store.known("data", run, functools.partial(self._named_by, run)):
                for split in _splits(path) if (path / SPLITS).is_file() else [path]:
                    if split.exists():
                        yield name if split == path else f"{name}/{split.name}", split, f"named by {run.name}"

    def _named_by(self, run: Run) -> list[tuple[str, Path]]:
        """Returns what an experiment's configuration names, and where that lies: paths are relative to the
        folder of its command."""
        from treetune.tasks.sources import files_matching
        from treetune_view.store.origins import command_of

        try:
            one = self._store.experiment(run)
        except (ValueError, OSError):  # the list of experiments says so
            return []
        folder = Path((command_of(one.manifest) or {}).get("folder", Path.cwd()))
        named = []
        for name in dict.fromkeys(_names_in(one.config)):
            try:
                paths = [folder / name] if (folder / name).is_dir() else files_matching(folder / name)
            except ValueError:  # it isn't on this disk
                continue
            named += [(name if str(path) == str(folder / name) else str(path), path) for path in paths]
        return named


def _names_in(config: Any) -> Iterator[str]:
    """Yields files and folders that tasks of a configuration read: of splits, and of data sets on disk."""
    if isinstance(config, Mapping):
        if config.get("type") == "disk" and isinstance(config.get("path"), str):
            yield config["path"]
        for split in ("train", "validation", "test"):
            given = config.get(split)
            names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
            yield from (name for name in names if isinstance(name, str) and name.endswith(_ENDINGS))
    values = config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else ()
    for value in values:
        yield from _names_in(value)


def _below(folder: Path, follows: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields files and folders of rows below a folder, but for those within experiments."""

    def is_whole(names: Container[str]) -> bool:
        return is_experiment(names) or any(name in names for name in (ESTIMATE, SPLITS, SPLIT))

    for path, entries in folders_below(folder, is_whole, follows):
        if is_experiment(entries):
            continue
        if ESTIMATE in entries or SPLIT in entries:
            yield path
        elif SPLITS in entries:
            yield from _splits(path)
        else:
            for name, entry in entries.items():
                if not name.startswith(".") and name.endswith(_ENDINGS) and entry.is_file():
                    yield from filter(follows, [path / name])


def _splits(folder: Path) -> list[Path]:
    """Returns the splits of a saved data set, which lie in it."""
    try:
        names = json.loads((folder / SPLITS).read_text())["splits"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [folder / name for name in names if isinstance(name, str) and name == Path(name).name != ".."]
