"""Finds the folders of experiments, and computes fingerprints, which change whenever files do."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treetune.models.policy_files import CHECKPOINTS
from treetune.rollouts.storage import TOKENS
from treetune.runtime.directory import (
    ANALYSES,
    CONFIG,
    EVALUATIONS,
    ITERATIONS,
    LOGS,
    MANIFEST,
    METRICS,
    NOTES,
    RESULT,
    SUMMARY,
    ExperimentDirectory,
)

MOST_FOLDER_LEVELS = 8
"""The number of levels below a folder that are searched for experiments and data sets."""

LEVELS_READ_BY_FOLDER = {LOGS: 3, EVALUATIONS: 3, ANALYSES: 2, ITERATIONS: 1, NOTES: 1}
"""The folders of an experiment in which `links_in` looks for symbolic links, with the number of levels."""

ENTRIES_OF_EXPERIMENT = (ITERATIONS, CHECKPOINTS, EVALUATIONS, METRICS, MANIFEST)
"""A folder is an experiment's if it has `config.json` and at least one of these names. The folder of a model,
which has a `config.json` as well, has none of them."""


@dataclass(frozen=True)
class Run:
    """An experiment on disk.

    Example: `Run("quickstart/ppo", Path("/scratch/quickstart/ppo"), (Path("/scratch"),))`.
    """

    name: str
    """The name in addresses: the path below one of the viewer's folders."""
    path: Path
    folders: tuple[Path, ...] = ()
    """The viewer's folders."""
    files: tuple[Path, ...] = ()
    """The files of answers, for a run of another program; empty for an experiment of treetune."""

    def may_follow(self, path: Path) -> bool:
        """Returns whether a path in the experiment may be read: not if it leads out of the viewer's folders.

        Without viewer's folders, it must not lead out of the experiment's folder.
        """
        return not leads_out(path, self.folders or (self.path.resolve(),))

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.path)


def is_experiment(names: Container[str]) -> bool:
    """Returns whether a folder that has the entries `names` is an experiment's."""
    return CONFIG in names and any(name in names for name in ENTRIES_OF_EXPERIMENT)


def leads_out(path: Path, folders: Sequence[Path]) -> bool:
    """Returns whether a path is a symbolic link to a file outside of all the folders.

    The viewer doesn't follow such links. Anyone who can write into a folder could otherwise make it show any
    file that its user can read.
    """
    return path.is_symlink() and not any(path.resolve().is_relative_to(folder) for folder in folders)


def links_in(experiment: Path) -> Iterator[Path]:
    """Yields the symbolic links in an experiment's folder, down to the levels that `LEVELS_READ_BY_FOLDER`
    allows."""
    # The folders that are still to be read: (name of the experiment's direct subfolder that it is in, or ""
    # for the experiment itself; path; number of levels below the experiment).
    unread = [("", experiment, 0)]
    while unread:
        top_name, folder, depth = unread.pop()
        try:
            with os.scandir(folder) as scanned:
                entries = list(scanned)
        except OSError:  # it was deleted meanwhile, or is not a folder
            continue
        for entry in entries:
            name = top_name or entry.name
            if entry.is_symlink() and name != CHECKPOINTS:  # nothing is read from checkpoints
                yield Path(entry.path)
            if depth < LEVELS_READ_BY_FOLDER.get(name, 0) and entry.is_dir():
                unread.append((name, Path(entry.path), depth + 1))


def folders_below(
    folder: Path, is_whole: Callable[[Container[str]], bool], may_follow: Callable[[Path], bool]
) -> Iterator[tuple[Path, Mapping[str, os.DirEntry[str]]]]:
    """Yields (path, entries by name) of a folder and of the folders below it.

    It does not descend into a folder whose entries satisfy `is_whole` (an experiment or a data set), into a
    hidden folder, or into a folder for which `may_follow` is false.
    """
    unread = [(folder, 0)]
    while unread:
        path, depth = unread.pop()
        try:
            with os.scandir(path) as scanned:
                entries = {entry.name: entry for entry in scanned}
            yield path, entries
            if depth < MOST_FOLDER_LEVELS and not is_whole(entries):
                for name, entry in entries.items():
                    if not name.startswith(".") and entry.is_dir() and may_follow(path / name):
                        unread.append((path / name, depth + 1))
        except OSError:  # it was deleted meanwhile, or may not be read
            continue


def parts_of_fingerprint(run: Run) -> list[object]:
    """Returns stats of files, and whether the experiment runs: one of them changes when the experiment does.

    Files of older iterations are left out: there may be thousands, and they are never written again.
    """
    directory, parts = run.directory, [stat_of(file) for file in run.files]
    try:
        parts.append(directory.is_running())
    except OSError as error:  # its lock can't be read, which must not keep others from being listed
        parts.append(str(error))
    records = (directory.config_file, directory.manifest_file, run.path / TOKENS, directory.metrics_file)
    parts += [stat_of(path) for path in (*records, directory.run_log, run.path / ITERATIONS)]
    parts += [stat_of(directory.analysis_folder(label) / RESULT) for label in directory.analyses()]
    iterations = directory.iterations()
    if iterations:
        newest = iterations[-1]
        parts.append((newest, stat_of(directory.iteration_folder(newest))))
    for number, label in directory.evaluations():
        parts.append((number, label, stat_of(directory.evaluation_folder(number, label) / SUMMARY)))
    return parts


def stat_of(path: Path) -> object:
    """Returns (time of the last change in nanoseconds, size, inode) of a file; None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def short_hash(*parts: object) -> str:
    """Returns a short hash of values, by their `repr`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
