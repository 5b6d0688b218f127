"""The folders that experiments lie in, and marks that change with their files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treetune.rollouts.storage import TOKENS
from treetune.runtime.directory import ExperimentDirectory

DEEPEST = 8
"""Folders below one that was given which are looked into."""

READ_INTO = {"logs": 3, "evaluations": 3, "analyses": 2, "iterations": 1, "notes": 1}
"""Folders of an experiment that are read, and how many levels of them."""

INSIDE = ("iterations", "checkpoints", "evaluations", "metrics.jsonl", "manifest.json")
"""One of these beside a `config.json` makes a folder an experiment's; a model's has none of them."""


@dataclass(frozen=True)
class Run:
    """An experiment: where it lies, its name in addresses (its path below the folder that was given), and the
    folders that were given. Where it has `files`, it is somebody else's run, of which there are answers."""

    name: str
    path: Path
    folders: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()

    def follows(self, path: Path) -> bool:
        """Returns whether a file of it is read: see `leads_out`."""
        return not leads_out(path, self.folders or (self.path.resolve(),))

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.path)


def is_experiment(names: Container[str]) -> bool:
    """Returns whether a folder that holds these names is an experiment's."""
    return "config.json" in names and any(name in names for name in INSIDE)


def leads_out(path: Path, folders: Sequence[Path]) -> bool:
    """Returns whether a path is a symbolic link to what lies in none of the folders: it could be
    anybody's."""
    return path.is_symlink() and not any(path.resolve().is_relative_to(folder) for folder in folders)


def links_in(experiment: Path) -> Iterator[Path]:
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


def marks_of(run: Run) -> list[object]:
    """Returns what changes with an experiment: size and time of its records and folders, whether it runs."""

    def names_in(folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    path, marks = run.path, [stat_of(file) for file in run.files]
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
