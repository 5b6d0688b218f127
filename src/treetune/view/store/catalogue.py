"""All that pages ask for: the experiments below the folders, read again when their files have changed, and
the data sets that are known: below the folders, named on the command line, named by experiments."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treetune.exceptions import NotThere
from treetune.view.experiment import RunProgress, StoredExperiment, read_experiment, status_of
from treetune.view.store.answers import AnswerStore
from treetune.view.store.folders import (
    Run,
    digest,
    folders_below,
    is_experiment,
    leads_out,
    links_in,
    marks_of,
)
from treetune.view.store.foreign import holds_answers
from treetune.view.store.foreign.layout import gathered
from treetune.view.store.readers import ENDINGS, ESTIMATE, SPLIT, SPLITS, DataSet, kind_of
from treetune.view.text import writable

if TYPE_CHECKING:
    from treetune.view.notes import Notes
    from treetune.view.store.tables import DataSetTable

LOOK_AGAIN_S = 2.0
"""How old a list of what lies below a folder may be."""

ANSWERS_LOOK_AGAIN_S = 0.3
"""The same for the files of an experiment's answers."""

OPEN = 8
"""Data sets whose rows are kept open."""

Value = TypeVar("Value")


class Store:
    """All that pages ask for. Safe for several threads. Only people's notes are ever written into an
    experiment (`pages.answer`), and none where it is `read_only`.

    `cache` is a folder for what is made from experiments to find their answers quickly. The list of
    experiments may be `look_again_s` old. `files` are data sets that lie elsewhere. Raises ValueError for a
    folder that is none, and for a file that holds no rows.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        cache: Path,
        look_again_s: float = LOOK_AGAIN_S,
        files: Sequence[Path] = (),
        *,
        read_only: bool = False,
    ) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise ValueError(
                    f"{folder} is no directory: give one that holds experiments, such as experiments"
                )
        self.folders, self.cache = [folder.resolve() for folder in folders], cache
        self.read_only = read_only
        self._look_again_s = look_again_s
        self._lock = threading.Lock()
        self._links: dict[Path, None] = {}
        self._runs: Mapping[str, Run] = {}
        self._looked = -float("inf")
        self._answers: dict[Run, AnswerStore] = {}
        self._notes: dict[Run, Notes] = {}
        self.data = DataSets(self, files, look_again_s)
        """Prepared data sets."""
        self._cached: dict[tuple[str, str], tuple[str, Any]] = {}

    # Experiments

    def runs(self) -> list[Run]:
        """Returns all experiments below the folders, by name."""
        with self._lock:
            if time.monotonic() - self._looked > self._look_again_s:
                self._runs = {run.name: run for run in self._find()}
                self._looked = time.monotonic()
            return list(self._runs.values())

    def run(self, name: str) -> Run:
        """Returns the experiment of that name. Raises NotThere."""
        runs = {run.name: run for run in self.runs()}
        if name not in runs:
            there = f"; there are {', '.join(sorted(runs)[:20])}" if runs else ""
            where = ", ".join(map(str, self.folders))
            raise NotThere(f"there is no experiment {name!r} below {where}{there}")
        return runs[name]

    @property
    def left_out(self) -> list[Path]:
        """Symbolic links that were met and not followed, as they lead out of the folders."""
        return [path for path in [*self._links] if path.is_symlink()]

    def follows(self, path: Path) -> bool:
        """Returns whether a path is looked into: see `leads_out`. What isn't is among `left_out` from now
        on."""
        if not leads_out(path, self.folders):
            return True
        self._links[path] = None
        return False

    def _find(self) -> Iterator[Run]:
        several = len(self.folders) > 1
        names = [folder.name for folder in self.folders]
        for folder in self.folders:
            twice = names.count(folder.name) > 1
            beginning = (str(folder) if twice else folder.name) if several else ""
            # Experiments that are read through links that lead out are left out; files of iterations are
            # looked at one by one (`sources`).
            experiments: dict[Path, tuple[Path, ...]] = {}
            others: dict[Path, tuple[Path, ...]] = {}
            for path, entries in folders_below(folder, is_experiment, self.follows):
                if is_experiment(entries):
                    if all(map(self.follows, links_in(path))):
                        experiments[path] = ()
                elif files := self._answers_in(path, entries):
                    others[path] = files
            found = gathered(others, folder) | experiments
            for path in sorted(found):
                below = path.relative_to(folder).as_posix()
                name = "/".join(part for part in (beginning, "" if below == "." else below) if part)
                # A name may be bytes that are no text.
                yield Run(writable(name or folder.name), path, tuple(self.folders), found[path])

    def _answers_in(self, folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
        """Returns the files of a folder that hold answers of somebody else's run."""
        paths = (folder / name for name in names if not name.startswith("."))
        return tuple(filter(holds_answers, filter(self.follows, paths)))

    # What is known of them

    def experiment(self, run: Run) -> StoredExperiment:
        """Returns its configuration, manifest, metrics, evaluations. Raises ValueError for what is no
        experiment."""
        return self.known("experiment", run, lambda: read_experiment(run.path))

    def status(self, run: Run) -> RunProgress:
        """Returns how it stands. Raises ValueError for a folder that holds nothing to read."""
        return self.known("status", run, lambda: status_of(self.experiment(run)))

    def answers(self, run: Run) -> AnswerStore:
        """Returns its sampled answers, to be asked."""
        with self._lock:
            if run not in self._answers:
                self._answers[run] = AnswerStore(
                    run, self.cache, min(self._look_again_s, ANSWERS_LOOK_AGAIN_S)
                )
            return self._answers[run]

    def notes(self, run: Run) -> Notes:
        """Returns what people wrote on its answers."""
        from treetune.view.notes import Notes

        answers = self.answers(run)
        with self._lock:
            return self._notes.setdefault(run, Notes(run, answers))

    def known(self, what: str, run: Run, read: Callable[[], Value]) -> Value:
        """Returns what `read` gives, cached until a file of the experiment changes. `what` names it."""
        mark = self.mark([run])
        cached = self._cached.get((what, run.name))
        if cached is not None and cached[0] == mark:
            return cached[1]
        value = read()
        self._cached[what, run.name] = (mark, value)
        return value

    def mark(self, runs: Sequence[Run]) -> str:
        """Returns another text as soon as anything of these experiments may have changed."""
        return digest([(run.name, *marks_of(run)) for run in runs])


class DataSets:
    """The data sets of a store. `files` were named on the command line. What lies below the folders may be
    `look_again_s` old. Raises ValueError for a file that holds no rows."""

    def __init__(self, store: Store, files: Sequence[Path], look_again_s: float) -> None:
        for file in files:
            if not file.is_file():
                raise ValueError(f"there is no file or folder {file} (looked for in {Path.cwd()})")
            if kind_of(file) is None:
                raise ValueError(
                    f"{file} is no data set: give Parquet (.parquet), JSON lines (.jsonl), a W&B table"
                    " (.table.json) or a folder"
                )
        self._store, self._files, self._look_again_s = store, list(files), look_again_s
        self._lock = threading.Lock()
        self._looked, self._known = -float("inf"), dict[str, DataSet]()
        self._open: OrderedDict[str, tuple[str, DataSetTable]] = OrderedDict()

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

    def table(self, data: DataSet) -> DataSetTable:
        """Returns its rows, to be asked. Raises ValueError for what can't be read."""
        from treetune.view.store.tables import DataSetTable

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
        table = DataSetTable(data)
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

        try:
            one = self._store.experiment(run)
        except (ValueError, OSError):  # the list of experiments says so
            return []
        folder = Path((one.command or {}).get("folder", Path.cwd()))
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
            yield from (name for name in names if isinstance(name, str) and name.endswith(ENDINGS))
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
                if not name.startswith(".") and name.endswith(ENDINGS) and entry.is_file():
                    yield from filter(follows, [path / name])


def _splits(folder: Path) -> list[Path]:
    """Returns the splits of a saved data set, which lie in it."""
    try:
        names = json.loads((folder / SPLITS).read_text())["splits"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [folder / name for name in names if isinstance(name, str) and name == Path(name).name != ".."]
