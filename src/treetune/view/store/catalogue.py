"""The store from which all pages read: the experiments below the viewer's folders, and the data sets.

Values that are read from an experiment are kept until its fingerprint changes (`Store.read_once`). Data sets
are those below the folders, those that are named on the command line, and those that configurations of
experiments name.
"""

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
    folders_below,
    is_experiment,
    leads_out,
    links_in,
    parts_of_fingerprint,
    short_hash,
)
from treetune.view.store.foreign import holds_answers
from treetune.view.store.foreign.layout import group_by_run
from treetune.view.store.readers import (
    DATA_SET_ENDINGS,
    ESTIMATE_FILE,
    SPLIT_FILE,
    SPLITS_FILE,
    DataSet,
    kind_of_data_set,
)
from treetune.view.text import make_writable

if TYPE_CHECKING:
    from treetune.view.notes import Notes
    from treetune.view.store.tables import DataSetTable

LOOK_AGAIN_S = 2.0
"""The age in seconds from which on a list of experiments or data sets is made again."""

ANSWERS_LOOK_AGAIN_S = 0.3
"""The age in seconds from which on the list of an experiment's files of answers is made again."""

MOST_OPEN_TABLES = 8
"""The most data sets that are kept open."""

T = TypeVar("T")


class Store:
    """The experiments below folders, and data sets. Safe for several threads.

    The viewer writes only people's notes into an experiment, and with `read_only` not even notes.

    Args:
        folders: folders with experiments below them.
        cache: the folder for the indexes of answers.
        look_again_s: the age in seconds from which on the lists of experiments and data sets are made again.
        files: data sets that were named on the command line; they may be outside of the folders.
        read_only: refuses to write notes.

    Raises ValueError for a folder that is not a directory, and for a file that is not a data set.
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
                    f"{folder} is not a directory: give one that contains experiments, such as experiments"
                )
        self.folders, self.cache = [folder.resolve() for folder in folders], cache
        self.read_only = read_only
        self._look_again_s = look_again_s
        self._lock = threading.Lock()
        self._links: dict[Path, None] = {}  # links that lead out of the folders, each once
        self._runs: Mapping[str, Run] = {}
        self._listed_at = -float("inf")
        self._answers: dict[Run, AnswerStore] = {}
        self._notes: dict[Run, Notes] = {}
        self.data = DataSets(self, files, look_again_s)
        self._cached: dict[tuple[str, str], tuple[str, Any]] = {}
        """(fingerprint of the experiment, value) by (kind of value, name of the experiment)."""

    # Experiments

    def runs(self) -> list[Run]:
        """Returns all experiments below the folders, by name."""
        with self._lock:
            if time.monotonic() - self._listed_at > self._look_again_s:
                self._runs = {run.name: run for run in self._find()}
                self._listed_at = time.monotonic()
            return list(self._runs.values())

    def run(self, name: str) -> Run:
        """Returns the experiment of that name. Raises NotThere if there is none."""
        runs = {run.name: run for run in self.runs()}
        if name not in runs:
            existing = f"; there are {', '.join(sorted(runs)[:20])}" if runs else ""
            where = ", ".join(map(str, self.folders))
            raise NotThere(f"there is no experiment {name!r} below {where}{existing}")
        return runs[name]

    @property
    def left_out(self) -> list[Path]:
        """The symbolic links that were not followed, because they lead out of the folders, and still
        exist."""
        return [path for path in [*self._links] if path.is_symlink()]

    def may_follow(self, path: Path) -> bool:
        """Returns whether a path may be read: not if it is a symbolic link that leads out of the folders.

        Such a link is remembered, so that pages can name the links that were not followed (`left_out`).
        """
        if not leads_out(path, self.folders):
            return True
        self._links[path] = None  # a dictionary as an ordered set
        return False

    def _find(self) -> Iterator[Run]:
        """Yields all experiments below the folders."""
        for folder in self.folders:
            # An experiment is left out as a whole if it has a symbolic link to a file outside of the folders.
            # The files in folders of iterations aren't checked here, because there may be thousands:
            # `find_sources` checks each. The tuples in `experiments` are empty: only runs of other programs
            # need a list of their files.
            experiments: dict[Path, tuple[Path, ...]] = {}
            # For each folder, its files with answers of another program's run.
            foreign_files: dict[Path, tuple[Path, ...]] = {}
            for path, entries in folders_below(folder, is_experiment, self.may_follow):
                if is_experiment(entries):
                    if all(map(self.may_follow, links_in(path))):
                        experiments[path] = ()
                elif files := self._foreign_answers(path, entries):
                    foreign_files[path] = files
            files_by_path = group_by_run(foreign_files, folder) | experiments
            for path in sorted(files_by_path):
                # A file name may be bytes that are not valid text. `make_writable` makes it valid UTF-8.
                name = make_writable(self._name_of(path, folder))
                yield Run(name, path, tuple(self.folders), files_by_path[path])

    def _name_of(self, path: Path, folder: Path) -> str:
        """Returns the name of an experiment: its path below the folder.

        If the viewer has several folders, the name begins with the folder.
        """
        parts = []
        if len(self.folders) > 1:
            names = [other.name for other in self.folders]
            is_ambiguous = names.count(folder.name) > 1
            parts.append(str(folder) if is_ambiguous else folder.name)
        if path != folder:
            parts.append(path.relative_to(folder).as_posix())
        return "/".join(parts) or folder.name

    def _foreign_answers(self, folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
        """Returns the files among a folder's entries `names` that have answers of another program's run."""
        paths = [folder / name for name in names if not name.startswith(".")]
        return tuple(path for path in paths if self.may_follow(path) and holds_answers(path))

    # What is read of an experiment

    def experiment(self, run: Run) -> StoredExperiment:
        """Returns the experiment as it was read: configuration, manifest, metrics and evaluations.

        Raises ValueError if the folder has none of them.
        """
        return self.read_once("experiment", run, lambda: read_experiment(run.path))

    def status(self, run: Run) -> RunProgress:
        """Returns the experiment's status. Raises ValueError if the folder has nothing that can be read."""
        return self.read_once("status", run, lambda: status_of(self.experiment(run)))

    def answers(self, run: Run) -> AnswerStore:
        """Returns the experiment's answers."""
        with self._lock:
            if run not in self._answers:
                # New answers are looked for at least as often as new experiments.
                look_again_s = min(self._look_again_s, ANSWERS_LOOK_AGAIN_S)
                self._answers[run] = AnswerStore(run, self.cache, look_again_s)
            return self._answers[run]

    def notes(self, run: Run) -> Notes:
        """Returns the notes on the experiment's answers."""
        from treetune.view.notes import Notes

        answers = self.answers(run)
        with self._lock:
            return self._notes.setdefault(run, Notes(run, answers))

    def read_once(self, kind: str, run: Run, read: Callable[[], T]) -> T:
        """Returns the result of `read`, which is called again only when the experiment has changed.

        `kind` is a name for what is read, such as "status".
        """
        fingerprint = self.fingerprint([run])
        cached = self._cached.get((kind, run.name))
        if cached is not None and cached[0] == fingerprint:
            return cached[1]
        value = read()
        self._cached[kind, run.name] = (fingerprint, value)
        return value

    def fingerprint(self, runs: Sequence[Run]) -> str:
        """Returns a text that changes whenever anything of these experiments may have changed."""
        return short_hash([(run.name, *parts_of_fingerprint(run)) for run in runs])


class DataSets:
    """The data sets of a store: the `files` of the command line, and those that are found.

    The list of data sets is made again when it is older than `look_again_s` seconds. Raises ValueError for a
    file that is not a data set.
    """

    def __init__(self, store: Store, files: Sequence[Path], look_again_s: float) -> None:
        for file in files:
            if not file.is_file():
                raise ValueError(f"there is no file or folder {file} (looked for in {Path.cwd()})")
            if kind_of_data_set(file) is None:
                raise ValueError(
                    f"{file} is not a data set: give Parquet (.parquet), JSON lines (.jsonl), a W&B table"
                    " (.table.json) or a folder"
                )
        self._store, self._files, self._look_again_s = store, list(files), look_again_s
        self._lock = threading.Lock()
        self._listed_at, self._sets = -float("inf"), dict[str, DataSet]()
        self._open: OrderedDict[str, tuple[str, DataSetTable]] = OrderedDict()
        """(fingerprint of the files, table) of the data sets that are open, by name, the least recently used
        first."""

    def all(self) -> list[DataSet]:
        """Returns all data sets: first those of the command line, then those below the folders, and then
        those that configurations of experiments name."""
        with self._lock:
            if time.monotonic() - self._listed_at > self._look_again_s:
                sets: dict[str, DataSet] = {}
                paths: set[Path] = set()
                for name, path, origin in self._find():
                    kind = kind_of_data_set(path)
                    if kind is not None and path.resolve() not in paths:
                        paths.add(path.resolve())
                        distinct_name = name if name not in sets else str(path.resolve())
                        # A file name may be bytes that are not valid text. This makes it valid UTF-8.
                        unique_name = make_writable(distinct_name)
                        sets[unique_name] = DataSet(unique_name, path, kind, origin)
                self._sets, self._listed_at = sets, time.monotonic()
            return list(self._sets.values())

    def find_data_set(self, name: str) -> DataSet:
        """Returns the data set of that name. Raises NotThere if there is none.

        Addresses have names of data sets instead of paths, so that no address can make the viewer read any
        other file.
        """
        with self._lock:
            data = self._sets.get(name)
        if data is not None and data.path.exists():  # found without a walk through all folders
            return data
        sets = {data.name: data for data in self.all()}
        if name not in sets:
            existing = f"; there are {', '.join([*sets][:20])}" if sets else ""
            raise NotThere(f"there is no data set {name!r}{existing}")
        return sets[name]

    def table(self, data: DataSet) -> DataSetTable:
        """Returns a data set as a table for queries. Raises ValueError if it can't be read."""
        from treetune.view.store.tables import DataSetTable

        fingerprint = data.fingerprint
        with self._lock:
            opened = self._open.get(data.name)
            if opened is not None and opened[0] == fingerprint:
                self._open.move_to_end(data.name)
                return opened[1]
        for path in data.files():
            # `data.path` itself needs no check: it was checked when it was found, or is from the command
            # line.
            if path != data.path and not self._store.may_follow(path):
                raise ValueError(
                    f"{path} is a symbolic link to a file outside of the viewer's folders: it is not followed"
                )
        table = DataSetTable(data)
        with self._lock:
            self._open[data.name] = fingerprint, table
            while len(self._open) > MOST_OPEN_TABLES:
                self._open.popitem(last=False)
        return table

    def _find(self) -> Iterator[tuple[str, Path, str]]:
        """Yields (name, path, origin) of everything that may be a data set.

        The origin is a text such as "below /scratch".
        """
        for file in self._files:
            yield str(file), file.absolute(), "named on the command line"
        has_several_folders = len(self._store.folders) > 1
        for folder in self._store.folders:
            for path in sorted(_data_below(folder, self._store.may_follow)):
                parts = [folder.name] if has_several_folders or path == folder else []
                if path != folder:
                    parts.append(path.relative_to(folder).as_posix())
                yield "/".join(parts), path, f"below {folder}"
        for run in self._store.runs():
            named = self._store.read_once("data", run, functools.partial(self._named_by, run))
            for name, path in named:
                splits = _folders_of_splits(path) if (path / SPLITS_FILE).is_file() else [path]
                for split in splits:
                    if split.exists():
                        split_name = name if split == path else f"{name}/{split.name}"
                        yield split_name, split, f"named by {run.name}"

    def _named_by(self, run: Run) -> list[tuple[str, Path]]:
        """Returns (name, path) of each data set that an experiment's configuration names.

        Relative names start at the folder in which the experiment's command ran.
        """
        from treetune.tasks.sources import files_matching

        try:
            experiment = self._store.experiment(run)
        except (ValueError, OSError):  # the list of experiments shows the message
            return []
        folder = Path((experiment.command or {}).get("folder", Path.cwd()))
        named_data_sets = []
        for name in dict.fromkeys(_data_in_config(experiment.config)):
            path = folder / name
            try:
                paths = [path] if path.is_dir() else files_matching(path)
            except ValueError:  # it isn't on this disk
                continue
            for match in paths:  # several if the name is a pattern
                name_of_match = name if match == path else str(match)
                named_data_sets.append((name_of_match, match))
        return named_data_sets


def _data_in_config(config: Any) -> Iterator[str]:
    """Yields the files and folders that the tasks of a configuration read."""
    if isinstance(config, Mapping):
        if config.get("type") == "disk" and isinstance(config.get("path"), str):
            yield config["path"]
        for split in ("train", "validation", "test"):
            value = config.get(split)
            names = value if isinstance(value, list) else [value]
            yield from (name for name in names if isinstance(name, str) and name.endswith(DATA_SET_ENDINGS))
        for value in config.values():
            yield from _data_in_config(value)
    elif isinstance(config, list):
        for value in config:
            yield from _data_in_config(value)


def _data_below(folder: Path, may_follow: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields the paths of the data sets below a folder, without those in experiments.

    Paths for which `may_follow` is false are left out.
    """

    def is_whole(names: Container[str]) -> bool:
        """Returns whether a folder is an experiment, or has the file that marks a data set."""
        return is_experiment(names) or any(name in names for name in (ESTIMATE_FILE, SPLITS_FILE, SPLIT_FILE))

    for path, entries in folders_below(folder, is_whole, may_follow):
        if is_experiment(entries):
            continue
        if ESTIMATE_FILE in entries or SPLIT_FILE in entries:
            yield path  # an estimate of difficulty, or a single saved split
        elif SPLITS_FILE in entries:  # a saved data set with several splits
            yield from _folders_of_splits(path)
        else:
            for name, entry in entries.items():
                is_data = not name.startswith(".") and name.endswith(DATA_SET_ENDINGS) and entry.is_file()
                if is_data and may_follow(path / name):
                    yield path / name


def _folders_of_splits(folder: Path) -> list[Path]:
    """Returns the folders of a saved data set's splits. Names that lead out of its folder are left out."""
    try:
        names = json.loads((folder / SPLITS_FILE).read_text())["splits"]
    except (OSError, ValueError, LookupError, TypeError):  # unreadable, or not what `datasets` writes there
        return []
    plain_names = [name for name in names if isinstance(name, str) and name == Path(name).name]
    return [folder / name for name in plain_names if name != ".."]  # because Path("..").name is ".."
