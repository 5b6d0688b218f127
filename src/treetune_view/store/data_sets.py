"""Which data sets are known: below the folders, named on the command line, named by experiments."""

from __future__ import annotations

import functools
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treetune_view.exports.evaluations import writable
from treetune_view.store.catalogue import NotThere, Run, Store, folders_below, is_experiment, stat_of

if TYPE_CHECKING:
    from treetune_view.store.tables import Table

Kind = Literal["parquet", "lines", "saved", "table", "estimate"]
"""Parquet; JSON lines; a split that ``save_to_disk`` wrote; a W&B table's JSON; what `estimate_difficulty`
found."""

OPEN = 8
"""Data sets of which is kept what was read of them."""

ESTIMATE, SPLITS, SPLIT = "estimate.json", "dataset_dict.json", "dataset_info.json"
"""Files that say what a folder is: of `estimate_difficulty`, of a saved data set, of one split of it."""

_TABLE = re.compile(rb'\s*\{\s*"(?:_type|columns|column_types|ncols)"')
"""How a W&B table begins."""


@dataclass(frozen=True)
class DataSet:
    """One of them, by its name in addresses. `known_from` says in words why it may be read."""

    name: str
    path: Path
    kind: Kind
    known_from: str

    @property
    def mark(self) -> str:
        """Another one as soon as a file of it is another."""
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
    """What a file or a folder holds; None for no data set."""
    if path.is_dir():
        if (path / ESTIMATE).is_file():
            return "estimate"
        return "saved" if (path / SPLIT).is_file() and (path / "state.json").is_file() else None
    if path.suffix == ".parquet":
        return "parquet"
    if path.suffix == ".jsonl":
        return "lines"
    if path.suffix == ".json":
        return "table" if _begins_as_table(path, stat_of(path)) else None
    return None


class DataSets:
    """Of a store. `files` were named on the command line. What lies below the folders may be `look_again_s`
    old. Raises ValueError for a file that holds no rows."""

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
        """By where they are known from, then by name."""
        with self._lock:
            if time.monotonic() - self._looked > self._look_again_s:
                self._known = self._find()
                self._looked = time.monotonic()
            return list(self._known.values())

    def one(self, name: str) -> DataSet:
        """The data set of that name: no other file is read, whatever an address says. Raises NotThere."""
        with self._lock:
            found = self._known.get(name)
        if found is None or not found.path.exists():  # or else no folder need be looked through
            everything = {one.name: one for one in self.all()}
            found = everything.get(name)
        if found is None:
            there = ", ".join([*everything][:20])
            raise NotThere(f"there is no data set {name!r} {f'; there are {there}' if there else ''}".strip())
        return found

    def table(self, data: DataSet) -> Table:
        """Its rows, to be asked. Raises ValueError for what can't be read."""
        from treetune_view.store.tables import Table

        mark = data.mark
        with self._lock:
            known = self._open.get(data.name)
            if known is not None and known[0] == mark:
                self._open.move_to_end(data.name)
                return known[1]
        for path in data.files():
            # Files that are data sets themselves were chosen by their place, or named.
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

    def _find(self) -> dict[str, DataSet]:
        found: dict[str, DataSet] = {}
        paths: set[Path] = set()
        for one in (*self._named(), *self._below(), *self._configured()):
            path = one.path.resolve()
            if path in paths:
                continue
            paths.add(path)
            name = writable(one.name if one.name not in found else str(path))
            found[name] = DataSet(name, one.path, one.kind, one.known_from)
        return found

    def _named(self) -> Iterator[DataSet]:
        for file in self._files:
            if (kind := kind_of(file)) is not None:
                yield DataSet(str(file), file.absolute(), kind, "named on the command line")

    def _below(self) -> Iterator[DataSet]:
        several = len(self._store.folders) > 1
        for folder in self._store.folders:
            for path in sorted(_below(folder, self._store.follows)):
                if (kind := kind_of(path)) is not None:
                    below = path.relative_to(folder).as_posix()
                    parts = [folder.name] if several or below == "." else []
                    name = "/".join([*parts, *([below] if below != "." else [])])
                    yield DataSet(name, path, kind, f"below {folder}")

    def _configured(self) -> Iterator[DataSet]:
        for run in self._store.runs():
            for name, path in self._store.known("data", run, functools.partial(self._of, run)):
                for place in _splits(path) if (path / SPLITS).is_file() else [path]:
                    own = name if place == path else f"{name}/{place.name}"
                    if place.exists() and (kind := kind_of(place)) is not None:
                        yield DataSet(own, place, kind, f"named by {run.name}")

    def _of(self, run: Run) -> list[tuple[str, Path]]:
        """What an experiment's configuration names, and where that lies: paths are relative to the folder of
        its command."""
        from treetune_view.store.origins import command_of

        try:
            one = self._store.experiment(run)
        except (ValueError, OSError):  # the list of experiments says so
            return []
        folder = Path((command_of(one.manifest) or {}).get("folder", Path.cwd()))
        return [
            (name if str(path) == str(folder / name) else str(path), path)
            for name in dict.fromkeys(named_in(one.config))
            for path in _matching(folder, name)
        ]


def named_in(config: Any) -> Iterator[str]:
    """Files and folders that tasks of a configuration read: those of splits, and of data sets on disk."""
    if isinstance(config, Mapping):
        if config.get("type") == "disk" and isinstance(config.get("path"), str):
            yield config["path"]
        for split in ("train", "validation", "test"):
            given = config.get(split)
            names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
            yield from (name for name in names if isinstance(name, str) and name.endswith(_ENDINGS))
        for value in config.values():
            yield from named_in(value)
    elif isinstance(config, list):
        for value in config:
            yield from named_in(value)


_ENDINGS = (".parquet", ".jsonl", ".json")


def _matching(folder: Path, name: str) -> Iterator[Path]:
    from treetune.tasks.sources import files_matching

    path = folder / name
    if path.is_dir():
        yield path
        return
    try:
        yield from files_matching(path)
    except ValueError:  # it isn't on this disk
        return


def _below(folder: Path, follows: Callable[[Path], bool]) -> Iterator[Path]:
    for place, found in folders_below(folder, _is_whole, follows):
        if is_experiment(found):
            continue
        if ESTIMATE in found or SPLIT in found:
            yield place
        elif SPLITS in found:
            yield from _splits(place)
        else:
            files = [place / name for name, entry in found.items() if _is_file_of_rows(name, entry)]
            yield from filter(follows, files)


def _is_whole(names: Container[str]) -> bool:
    return is_experiment(names) or ESTIMATE in names or SPLITS in names or SPLIT in names


def _is_file_of_rows(name: str, entry: os.DirEntry[str]) -> bool:
    return not name.startswith(".") and name.endswith(_ENDINGS) and entry.is_file()


def _splits(folder: Path) -> list[Path]:
    """The splits of a saved data set, which lie in it."""
    try:
        names = json.loads((folder / SPLITS).read_text())["splits"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [folder / name for name in names if isinstance(name, str) and name == Path(name).name != ".."]


@functools.lru_cache(maxsize=4096)
def _begins_as_table(path: Path, _: object) -> bool:
    """Asked again only when the file is another."""
    try:
        with path.open("rb") as file:
            return _TABLE.match(file.read(200)) is not None
    except OSError:
        return False
