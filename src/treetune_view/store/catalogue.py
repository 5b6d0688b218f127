"""The experiments below the folders, and what is known of each, read again when files have changed."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treetune.rollouts.storage import TOKENS
from treetune.runtime.directory import ExperimentDirectory
from treetune_view.experiment import Experiment, Status, read_experiment, status_of
from treetune_view.text import writable

if TYPE_CHECKING:
    from treetune_view.notes import Notes
    from treetune_view.store.answers import Answers

LOOK_AGAIN_S = 2.0
"""How old a list of what lies below a folder may be."""

ANSWERS_LOOK_AGAIN_S = 0.3
"""The same for the files of an experiment's answers."""

DEEPEST = 8
"""Folders below one that was given which are looked into."""

READ_INTO = {"logs": 3, "evaluations": 3, "analyses": 2, "iterations": 1, "notes": 1}
"""Folders of an experiment that are read, and how many levels of them."""

INSIDE = ("iterations", "checkpoints", "evaluations", "metrics.jsonl", "manifest.json")
"""One of these beside a `config.json` makes a folder an experiment's; a model's has none of them."""

Value = TypeVar("Value")


class NotThere(LookupError):
    """Raised for an experiment, an answer or a data set that isn't there; the message says what is."""


@dataclass(frozen=True)
class Run:
    """An experiment: where it lies, its name in addresses (its path below the folder that was given), and the
    folders that were given."""

    name: str
    path: Path
    folders: tuple[Path, ...] = ()

    def follows(self, path: Path) -> bool:
        """Returns whether a file of it is read: see `leads_out`."""
        return not leads_out(path, self.folders or (self.path.resolve(),))

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.path)


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
        from treetune_view.store.data_sets import DataSets

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
        self._answers: dict[Run, Answers] = {}
        self._notes: dict[Run, Notes] = {}
        self.data = DataSets(self, files, look_again_s)
        """Prepared data sets."""
        self.made = 0
        """How much `later` has made."""
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
            paths = [
                path
                for path, entries in folders_below(folder, is_experiment, self.follows)
                if is_experiment(entries) and all(map(self.follows, _links_in(path)))
            ]
            for path in sorted(paths):
                below = path.relative_to(folder).as_posix()
                name = "/".join(part for part in (beginning, "" if below == "." else below) if part)
                # A name may be bytes that are no text.
                yield Run(writable(name or folder.name), path, tuple(self.folders))

    # What is known of them

    def experiment(self, run: Run) -> Experiment:
        """Returns its configuration, manifest, metrics, evaluations. Raises ValueError for what is no
        experiment."""
        return self.known("experiment", run, lambda: read_experiment(run.path))

    def status(self, run: Run) -> Status:
        """Returns how it stands. Raises ValueError for a folder that holds nothing to read."""
        return self.known("status", run, lambda: status_of(self.experiment(run)))

    def answers(self, run: Run) -> Answers:
        """Returns its sampled answers, to be asked."""
        from treetune_view.store.answers import Answers

        with self._lock:
            if run not in self._answers:
                self._answers[run] = Answers(run, self.cache, min(self._look_again_s, ANSWERS_LOOK_AGAIN_S))
            return self._answers[run]

    def notes(self, run: Run) -> Notes:
        """Returns what people wrote on its answers."""
        from treetune_view.notes import Notes

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

    def later(
        self, what: str, run: Run, make: Callable[[], Value], failed: Callable[[Exception], Value]
    ) -> Value | None:
        """Works as `known`, for what takes seconds: None until a thread has made it, which changes `made`.
        `failed` gives the value after an error."""
        mark = self.mark([run])
        with self._lock:
            cached = self._cached.get((what, run.name))
            if cached is not None and cached[0] == mark:
                return cached[1]
            self._cached[what, run.name] = (mark, None)

        def work() -> None:
            try:
                value = make()
            except Exception as error:  # whatever it was, a page waits for an end
                value = failed(error)
            with self._lock:
                self._cached[what, run.name] = (mark, value)
                self.made += 1

        threading.Thread(target=work, daemon=True).start()
        return None

    def mark(self, runs: Sequence[Run]) -> str:
        """Returns another text as soon as anything of these experiments may have changed."""
        return digest([(run.name, *_marks(run)) for run in runs])


def is_experiment(names: Container[str]) -> bool:
    """Returns whether a folder that holds these names is an experiment's."""
    return "config.json" in names and any(name in names for name in INSIDE)


def leads_out(path: Path, folders: Sequence[Path]) -> bool:
    """Returns whether a path is a symbolic link to what lies in none of the folders: it could be
    anybody's."""
    return path.is_symlink() and not any(path.resolve().is_relative_to(folder) for folder in folders)


def _links_in(experiment: Path) -> Iterator[Path]:
    """Yields symbolic links in the folder of an experiment, as deep as anything of it is read."""
    left = [("", experiment, 0)]
    while left:
        top, folder, depth = left.pop()
        try:
            with os.scandir(folder) as scanned:
                entries = list(scanned)
        except OSError:  # it went meanwhile, or is no folder
            continue
        for entry in entries:
            name = top or entry.name
            if entry.is_symlink() and name != "checkpoints":
                yield Path(entry.path)
            if depth < READ_INTO.get(name, 0) and entry.is_dir():
                left.append((name, Path(entry.path), depth + 1))


def folders_below(
    folder: Path, is_whole: Callable[[Container[str]], bool], follows: Callable[[Path], bool]
) -> Iterator[tuple[Path, Mapping[str, os.DirEntry[str]]]]:
    """Yields a folder and those below it, each with its entries; what lies inside of one `is_whole` is not
    looked into, nor what is hidden, nor links that are not to be followed."""
    left = [(folder, 0)]
    while left:
        path, depth = left.pop()
        try:
            with os.scandir(path) as scanned:
                entries = {entry.name: entry for entry in scanned}
            yield path, entries
            if depth < DEEPEST and not is_whole(entries):
                left += [
                    (path / name, depth + 1)
                    for name, entry in entries.items()
                    if not name.startswith(".") and entry.is_dir() and follows(path / name)
                ]
        except OSError:  # it went while it was looked at, or isn't ours to read
            continue


def _marks(run: Run) -> list[object]:
    """Returns what changes with an experiment: size and time of its records and folders, whether it runs."""

    def names_in(folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    path, marks = run.path, list[object]()
    try:
        marks.append(run.directory.is_running())
    except OSError as error:  # nobody can tell: one such experiment is no reason to list none
        marks.append(str(error))
    records = ("config.json", "manifest.json", TOKENS, "metrics.jsonl", "logs/run.log", "iterations")
    marks += [stat_of(path / name) for name in records]
    marks += [stat_of(result) for result in sorted(path.glob("analyses/*/result.json"))]
    marks += [
        (newest, stat_of(path / "iterations" / newest)) for newest in names_in(path / "iterations")[-1:]
    ]
    evaluations = path / "evaluations"
    for number in names_in(evaluations):
        for label in names_in(evaluations / number):
            marks.append((number, label, stat_of(evaluations / number / label / "summary.json")))
    return marks


def stat_of(path: Path) -> object:
    """Returns time, size and number of a file; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def digest(*parts: object) -> str:
    """Returns a short mark of anything that can be written down."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
