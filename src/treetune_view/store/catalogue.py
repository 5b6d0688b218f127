"""Which experiments lie below the folders, and what is known of each, read again when files have changed."""

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
from treetune_view.exports.evaluations import writable
from treetune_view.report.experiment import Experiment, read_experiment

if TYPE_CHECKING:
    from treetune_view.store.answers import Answers
    from treetune_view.store.notes import Notes

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
    """What was asked for isn't there; the message says what is."""


@dataclass(frozen=True)
class Run:
    """An experiment: where it lies, and its name in addresses (its place below the folder that was given)."""

    name: str
    path: Path
    folders: tuple[Path, ...] = ()
    """Those that were given."""

    def follows(self, path: Path) -> bool:
        """Whether a file of it is read: see `leads_out`."""
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
        self._kept: dict[tuple[str, str], tuple[str, Any]] = {}

    # Experiments

    def runs(self) -> list[Run]:
        """All experiments below the folders, by name."""
        with self._lock:
            if time.monotonic() - self._looked > self._look_again_s:
                self._runs = {run.name: run for run in self._find()}
                self._looked = time.monotonic()
            return list(self._runs.values())

    def run(self, name: str) -> Run:
        """The experiment of that name. Raises NotThere."""
        found = {run.name: run for run in self.runs()}
        if name not in found:
            there = f"; there are {', '.join(sorted(found)[:20])}" if found else ""
            where = ", ".join(map(str, self.folders))
            raise NotThere(f"there is no experiment {name!r} below {where}{there}")
        return found[name]

    @property
    def left_out(self) -> list[Path]:
        """Symbolic links that were met and not followed, as they lead out of the folders."""
        return [path for path in [*self._links] if path.is_symlink()]

    def follows(self, path: Path) -> bool:
        """Whether it is looked into: see `leads_out`. What isn't is among `left_out` from now on."""
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
            for path in sorted(self._experiments(folder)):
                below = path.relative_to(folder).as_posix()
                name = "/".join(part for part in (beginning, "" if below == "." else below) if part)
                # A name may be bytes that are no text.
                yield Run(writable(name or folder.name), path, tuple(self.folders))

    def _experiments(self, folder: Path) -> Iterator[Path]:
        """Folders of experiments at or below one, but for those that are read through links that lead out.
        Files of iterations are looked at one by one (`sources`)."""
        for place, found in folders_below(folder, is_experiment, self.follows):
            if is_experiment(found) and all(map(self.follows, _links_in(place))):
                yield place

    # What is known of them

    def experiment(self, run: Run) -> Experiment:
        """Its configuration, manifest, metrics, evaluations. Raises ValueError for what is no experiment."""
        return self.known("experiment", run, lambda: read_experiment(run.path))

    def answers(self, run: Run) -> Answers:
        """Its sampled answers, to be asked."""
        from treetune_view.store.answers import Answers

        with self._lock:
            if run not in self._answers:
                self._answers[run] = Answers(run, self.cache, min(self._look_again_s, ANSWERS_LOOK_AGAIN_S))
            return self._answers[run]

    def notes(self, run: Run) -> Notes:
        """What people wrote on its answers."""
        from treetune_view.store.notes import Notes

        answers = self.answers(run)
        with self._lock:
            return self._notes.setdefault(run, Notes(run, answers))

    def known(self, what: str, run: Run, read: Callable[[], Value]) -> Value:
        """What `read` gives, kept until a file of the experiment changes. `what` names it."""
        mark = self.mark([run])
        kept = self._kept.get((what, run.name))
        if kept is not None and kept[0] == mark:
            return kept[1]
        value = read()
        self._kept[what, run.name] = (mark, value)
        return value

    def later(
        self, what: str, run: Run, make: Callable[[], Value], failed: Callable[[Exception], Value]
    ) -> Value | None:
        """As `known`, for what takes seconds: None until a thread has made it, which changes `made`. `failed`
        is what there is instead after an error."""
        mark = self.mark([run])
        with self._lock:
            kept = self._kept.get((what, run.name))
            if kept is not None and kept[0] == mark:
                return kept[1]
            self._kept[what, run.name] = (mark, None)
        threading.Thread(target=self._make, args=(what, run, mark, make, failed), daemon=True).start()
        return None

    def _make(
        self,
        what: str,
        run: Run,
        mark: str,
        make: Callable[[], Value],
        failed: Callable[[Exception], Value],
    ) -> None:
        try:
            value = make()
        except Exception as error:  # whatever it was, a page waits for an end
            value = failed(error)
        with self._lock:
            self._kept[what, run.name] = (mark, value)
            self.made += 1

    def mark(self, runs: Sequence[Run]) -> str:
        """Another one as soon as anything of these experiments may have changed."""
        parts = [(run.name, *_marks(run)) for run in runs]
        return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def is_experiment(names: Container[str]) -> bool:
    """Whether a folder that holds these names is an experiment's."""
    return "config.json" in names and any(name in names for name in INSIDE)


def leads_out(path: Path, folders: Sequence[Path]) -> bool:
    """Whether it is a symbolic link to what lies in none of the folders: it could be anybody's, anywhere."""
    return path.is_symlink() and not any(path.resolve().is_relative_to(folder) for folder in folders)


def _links_in(experiment: Path) -> Iterator[Path]:
    """Symbolic links in the folder of an experiment, as deep as anything of it is read."""
    left = [("", experiment, 0)]
    while left:
        top, place, depth = left.pop()
        try:
            with os.scandir(place) as entries:
                found = list(entries)
        except OSError:  # it went meanwhile, or is no folder
            continue
        for entry in found:
            name = top or entry.name
            if entry.is_symlink() and name != "checkpoints":
                yield Path(entry.path)
            if depth < READ_INTO.get(name, 0) and entry.is_dir():
                left.append((name, Path(entry.path), depth + 1))


def folders_below(
    folder: Path, is_whole: Callable[[Container[str]], bool], follows: Callable[[Path], bool]
) -> Iterator[tuple[Path, Mapping[str, os.DirEntry[str]]]]:
    """A folder and those below it, each with its entries; what lies inside of one `is_whole` is not looked
    into, nor what is hidden, nor links that are not to be followed."""
    left = [(folder, 0)]
    while left:
        place, depth = left.pop()
        try:
            with os.scandir(place) as entries:
                found = {entry.name: entry for entry in entries}
            yield place, found
            if depth < DEEPEST and not is_whole(found):
                left += [
                    (place / name, depth + 1)
                    for name, entry in found.items()
                    if not name.startswith(".") and entry.is_dir() and follows(place / name)
                ]
        except OSError:  # it went while it was looked at, or isn't ours to read
            continue


def _marks(run: Run) -> list[object]:
    """What changes with an experiment: size and time of its records and folders, and whether it runs."""
    path = run.path
    marks: list[object] = [_is_running(run)]
    marks += [
        stat_of(path / name)
        for name in ("config.json", "manifest.json", TOKENS, "metrics.jsonl", "logs/run.log")
    ]
    marks += [stat_of(result) for result in sorted(path.glob("analyses/*/result.json"))]
    iterations = path / "iterations"
    marks.append(stat_of(iterations))
    newest = max(_names(iterations), default=None)
    if newest is not None:
        marks.append((newest, stat_of(iterations / newest)))
    evaluations = path / "evaluations"
    for number in sorted(_names(evaluations)):
        for label in sorted(_names(evaluations / number)):
            marks.append((number, label, stat_of(evaluations / number / label / "summary.json")))
    return marks


def _is_running(run: Run) -> object:
    """Whether it runs, or why nobody can tell: one such experiment is no reason to list none."""
    try:
        return run.directory.is_running()
    except OSError as error:
        return str(error)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def stat_of(path: Path) -> object:
    """Time, size and number of a file; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
