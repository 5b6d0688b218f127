"""The family of analyzers, which read what an experiment wrote. The analyzers themselves are in
`treetune.lab`, which may import this package and not the other way round."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Finding
from treetune.store.checksums import digest_of, read_record, verify_once, write_record
from treetune.store.files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ONE_LINE_REMEDY = "leave the analysis out, or set the rollout's parallel to false"

RESULT, STATES = "result.json", "states.jsonl"
"""The files of an analysis: its numbers and settings, and its states."""


ANALYSE_AGAIN = "delete its folder, and analyse again"


def write_result(
    folder: Path, result: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], name: str
) -> None:
    """Writes an analysis' rows into the file of that name, and its numbers, with the digest of that."""
    with whole_file(folder / name) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    write_record(folder / RESULT, {**result, "digests": {name: digest_of(folder / name)}})


def read_result(folder: Path) -> dict[str, Any]:
    """Returns the result of an analysis. Raises Damaged where that, or the file of its rows, isn't as it was
    written, and FileNotFoundError for none."""
    result = read_record(folder / RESULT, ANALYSE_AGAIN)
    for name, digest in result.pop("digests", {}).items():  # analyses of earlier versions have none
        verify_once(folder / name, ANALYSE_AGAIN, digest)
    return result


@dataclass(frozen=True)
class Findings:
    """The findings of an analysis: numbers, and the states (or answers) that they were taken from.

    Both are of JSON's types, the states one object per row.
    """

    numbers: Mapping[str, Any]
    states: Sequence[Mapping[str, Any]] = ()


class Analyzer(Registrable):
    """One question to an experiment. `name` is its folder in ``analyses``, its type where left out.

    A *point* is a number of finished iterations: the weights after them (0: the start weights), and
    what these weights sampled, which is kept in the iteration of the same number, counted from 0.
    """

    name: str | None
    needs_engine: bool = False

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        if self.name is not None and (
            self.name.startswith(".") or "/" in self.name or not self.name.isprintable()
        ):
            yield Finding(f"{self.name!r} is no name for a folder", "name", "give a plain one, without '/'")

    @property
    def type_name(self) -> str:
        return self.registered_name() or type(self).__name__

    @property
    def label(self) -> str:
        return self.name or self.type_name

    def points(self, config: Any, directory: Any) -> list[int]:
        """Returns the points that it would look at, rising. Imports nothing heavy.

        Raises ValueError saying what the experiment lacks.
        """
        raise NotImplementedError

    def analyse(self, sampler: Any, points: Sequence[int], work: Path) -> Findings:
        """Looks. `sampler` has the session, and an engine where `needs_engine` asks for one. `work` is a
        folder for what must outlive an interruption: journals of requests.

        Raises ValueError saying what the experiment lacks.
        """
        raise NotImplementedError

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the numbers out of the states alone, so that those of several experiments can be taken
        together. Raises ValueError where the states don't tell."""
        raise ValueError(f"analyses by {self.type_name} can't be taken together: give each its own name")

    @staticmethod
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        """Returns a figure of the numbers of one or several experiments, by name."""
        raise NotImplementedError
