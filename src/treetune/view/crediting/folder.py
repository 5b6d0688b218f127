"""The folder with the credited answers of a log: an experiment whose iterations are the files of the log.

    config.json                  the settings of the credit, and the names of the log's files
    metrics.jsonl                a line for each credited file
    tokens.arrow                 the text of each token
    iterations/0009/             a file of the log, such as verl's 10.jsonl
      trajectories.arrow           its answers, as an iteration of a run stores them
      episodes.arrow               their values and advantages
      credited.json                written last: how many rows got credit, the reasons of the others, the cost
      journal/                     every continuation that was sampled, so none is sampled again

The viewer, the report and `treetune.open` read it as they read a run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.credit.library.limits import CreditCost
from treetune.engine.base import Engine
from treetune.engine.journal import JournaledEngine
from treetune.rollouts.storage import TOKENS, write_episodes, write_tokens, write_trajectories
from treetune.runtime.directory import EPISODES, JOURNALS, TRAJECTORIES, ExperimentDirectory, metrics_row
from treetune.runtime.manifest import describe_command
from treetune.store.checksums import config_hash, read_record, seal_record, write_record
from treetune.store.files import write_json, write_text
from treetune.view.crediting.log import LoggedFile
from treetune.view.experiment import CREDITED_LOG
from treetune.view.store.folders import stat_of
from treetune.vocabulary import Episode, Metrics, TextCodec, Trajectory

RECORD_FILE = "credited.json"
"""The name of the file with the `CreditedFile` in an iteration's folder. If it is there, the log's file is
credited."""

KEYS_THAT_MAY_CHANGE = ("iterations", "titles", "experiment_name", "directory")
"""Keys of the configuration that may differ when the folder is continued."""


@dataclass(frozen=True)
class CreditedFile:
    """The result for a file of the log.

    Example: ``CreditedFile("10.jsonl", [1764450000, 81920], rows=512, credited=509,
    reasons={"without a reward": 3}, cost=CreditCost(4581, 91620, 31.0))``.
    """

    name: str
    """The file's path below the log."""
    stat: list[int]
    """The time of the file's last change in nanoseconds, and its size."""
    rows: int
    """The number of all rows."""
    credited: int
    """The number of rows with credit."""
    reasons: Mapping[str, int]
    """The number of rows without credit, by the reason."""
    cost: CreditCost
    metrics: Metrics = field(default_factory=dict)


class CreditedFolder:
    """The folder with credited answers that a command writes, and that a later start continues.

    `path` is the folder, and `log` is the folder of the log.
    """

    def __init__(self, path: Path, log: Path) -> None:
        self.path, self._log = path, log
        self.directory = ExperimentDirectory(path)

    def hold_lock(self) -> AbstractContextManager[None]:
        """Holds the folder's lock during a `with` block. Raises ValueError if another process has the
        lock."""
        return self.directory.locked()

    def begin(self, config: Mapping[str, Any]) -> None:
        """Writes the configuration.

        Raises:
            ValueError: The folder has other contents than a credited log, or one with other settings.
        """
        path = self.directory.config_file
        if path.is_file():
            stored = read_record(path, "delete the folder, and credit the log again")
            changed = describe_changes(stored, config)
            if changed:
                raise ValueError(
                    f"{self.path} was credited with other settings: {'; '.join(changed)}. Choose another"
                    " folder with --output"
                )
        elif any(entry.name != ".lock" for entry in self.path.iterdir()):  # `hold_lock` writes .lock
            raise ValueError(f"{self.path} is not empty: choose another folder with --output")
        # The configuration is the first file of the folder. If the command were killed after it had written
        # another file first, the next start would refuse the folder as not empty.
        write_json(path, config)
        manifest = {"config": config_hash(config), "seed": config["seed"], "command": describe_command()}
        write_record(self.directory.manifest_file, manifest)

    def write_tokens(self, codec: TextCodec, count: int) -> None:
        """Writes the texts of the first `count` tokens of the vocabulary, for the viewer, if they are not
        there yet."""
        if count and not (self.path / TOKENS).is_file():
            write_tokens(self.path / TOKENS, codec, count)

    def folder_of(self, file: LoggedFile) -> Path:
        """Returns the folder of a file's iteration."""
        return self.directory.iteration_folder(file.number - 1)

    def read_results(self, files: Sequence[LoggedFile]) -> dict[int, CreditedFile]:
        """Returns the results for the files that are already credited, by the number of each file's
        iteration, counted from 1."""
        results = {}
        for file in files:
            result = self._read_result(file)
            if result is not None:
                results[file.number] = result
        return results

    def _read_result(self, file: LoggedFile) -> CreditedFile | None:
        """Returns the stored result for a file. Returns None if the file isn't credited yet, or has changed
        since then."""
        path = self.folder_of(file) / RECORD_FILE
        if not path.is_file():
            return None
        record = read_record(path, "delete it, and the same command credits the file again")
        cost = CreditCost(**record["cost"])
        result = CreditedFile(**{**record, "cost": cost})
        # `stat` is the time of the file's last change and its size, when the file was credited.
        is_same = result.name == self.name_of(file) and result.stat == time_and_size_of(file)
        return result if is_same else None

    def name_of(self, file: LoggedFile) -> str:
        """Returns the file's path below the log."""
        return str(file.path.relative_to(self._log))

    def write(
        self,
        file: LoggedFile,
        result: CreditedFile,
        trajectories: Sequence[Trajectory],
        episodes: Sequence[Episode],
        codec: TextCodec | None,
    ) -> None:
        """Stores the answers of a file of the log with their credit, as a run stores an iteration."""
        folder = self.folder_of(file)
        iteration = file.number - 1  # on disk, iterations count from 0
        # If the file has changed since it was credited, the folder has the results of its former contents.
        # So the record is deleted before the other files, and written after them. Without a record, the next
        # call credits the file again.
        for name in (RECORD_FILE, TRAJECTORIES, EPISODES):
            (folder / name).unlink(missing_ok=True)
        if trajectories:
            write_trajectories(folder / TRAJECTORIES, trajectories, iteration)
            write_episodes(folder / EPISODES, episodes, codec, iteration)
        write_record(folder / RECORD_FILE, asdict(result))

    def write_metrics(self, results: Mapping[int, CreditedFile]) -> None:
        """Writes a line of metrics for each credited file.

        `results` has the results by the numbers of iterations, which count from 1.
        """
        lines = []
        for number, result in sorted(results.items()):
            # The line's time is `stat[0]`, the time of the log file's last change in nanoseconds. With the
            # present time instead, the lines would differ each time that they are written.
            row = metrics_row(number - 1, result.stat[0] / 1e9, result.metrics)
            lines.append(json.dumps(seal_record(row)) + "\n")
        write_text(self.directory.metrics_file, "".join(lines))


def time_and_size_of(file: LoggedFile) -> list[int]:
    """Returns the time of the file's last change in nanoseconds, and its size in bytes."""
    stat = stat_of(file.path)
    assert isinstance(stat, tuple), "a file that was just found"
    return [stat[0], stat[1]]  # a list, as a record gives it back


def describe_changes(stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Returns a message for each setting that differs: ["seed was 0 and is 1"].

    Settings in `KEYS_THAT_MAY_CHANGE` are not compared. If `stored` isn't the configuration of a credited
    log, the only message says so.
    """
    if stored.get("type") != CREDITED_LOG:
        return [f"it holds a configuration of type {stored.get('type')!r}, not a credited log"]
    config_as_json = json.loads(json.dumps(config))  # tuples become lists, as in the stored configuration
    changes = []
    for name in config_as_json:
        if name not in KEYS_THAT_MAY_CHANGE and stored.get(name) != config_as_json[name]:
            changes.append(
                f"{name} was {json.dumps(stored.get(name))} and is {json.dumps(config_as_json[name])}"
            )
    return changes


class FileJournal(JournaledEngine):
    """Stores the samples of one file of the log in its iteration's folder, and reads them from there.

    A journal stores continuations with the version of the policy. The viewer looks for an answer's
    continuations under the version that sampled the answer or, if the answer has no version, under the number
    of its iteration. Answers of a log have none, so the version here is the iteration's number.
    """

    def __init__(self, engine: Engine, folder: Path, iteration: int) -> None:
        super().__init__(engine, folder / JOURNALS / "credit-0.jsonl")
        self._iteration = iteration

    @property
    @override
    def version(self) -> int:  # type: ignore[override]  # an attribute of other engines
        return self._iteration
