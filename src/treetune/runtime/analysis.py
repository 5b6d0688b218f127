"""Defines analyzers, which read the files of an experiment, and the files of their results.

The analyzers themselves are in `treetune.lab`, which may import this package, while this package may not
import `treetune.lab`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Finding
from treetune.runtime.directory import RESULT
from treetune.store.checksums import digest_of, read_record, verify_once, write_record
from treetune.store.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ONE_LINE_REMEDY = "leave the analysis out, or set the rollout's parallel to false"
"""The remedy for an analysis that needs answers without parallel threads (the feature `OneLine`)."""

STATES, ADVANTAGES = "states.jsonl", "advantages.jsonl"
"""In the folder of an analysis: the states from which an analyzer computed its numbers; the answers of a
replay with their advantages."""

ANALYSE_AGAIN_REMEDY = "delete its folder, and run the analysis again"


def write_result(
    folder: Path, result: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], name: str
) -> None:
    """Writes the rows of an analysis into the file `name`, and its numbers (`result`) into ``result.json``,
    which also holds the digest of the file of rows."""
    with write_atomically(folder / name) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    # The result is written last, since an analysis with a result counts as finished.
    write_record(folder / RESULT, {**result, "digests": {name: digest_of(folder / name)}})


def read_result(folder: Path) -> dict[str, Any]:
    """Returns the result of an analysis.

    Raises:
        Damaged: The result, or the file of the rows, is not as it was written.
        FileNotFoundError: There is no result.
    """
    result = read_record(folder / RESULT, ANALYSE_AGAIN_REMEDY)
    for name, digest in result.pop("digests", {}).items():  # earlier versions wrote no digests
        verify_once(folder / name, ANALYSE_AGAIN_REMEDY, digest)
    return result


@dataclass(frozen=True)
class Findings:
    """The results of an analysis, in JSON's types.

    Example: ``Findings({"accuracy": 0.83}, [{"state": "train/17#0@2", "value": 0.5, "estimate": 0.25}, …])``.
    """

    numbers: Mapping[str, Any]
    states: Sequence[Mapping[str, Any]] = ()
    """The states, or answers, from which the numbers were computed, an object for each."""


class Analyzer(Registrable):
    """An analysis of an experiment.

    A *point* is a number of finished iterations. It stands for the weights after these iterations (0: the
    start weights), and for the answers that these weights have sampled, which are in the iteration of the
    same number, counted from 0.
    """

    name: str | None
    """The name of the folder in ``analyses``; null: the analyzer's type."""
    needs_engine: bool = False

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        if self.name is not None and (
            self.name.startswith(".") or "/" in self.name or not self.name.isprintable()
        ):
            yield Finding(
                f"{self.name!r} can't be the name of a folder", "name", "give a plain name, without '/'"
            )

    @property
    def type_name(self) -> str:
        return self.registered_name() or type(self).__name__

    @property
    def label(self) -> str:
        return self.name or self.type_name

    def points(self, config: Any, directory: Any) -> list[int]:
        """Returns the points (numbers of finished iterations) to analyse, in ascending order.

        The command calls this method before PyTorch is imported, to report a mistake at once. So the method
        must import nothing slow.

        Raises:
            ValueError: The experiment doesn't have the files that the analysis needs.
        """
        raise NotImplementedError

    def analyse(self, resources: Any, points: Sequence[int], work: Path) -> Findings:
        """Analyses the points (numbers of finished iterations).

        Args:
            resources: Has the session and, with `needs_engine`, an engine.
            work: A folder for files that an interrupted analysis needs again, such as journals of requests.

        Raises:
            ValueError: The experiment doesn't have the files that the analysis needs.
        """
        raise NotImplementedError

    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Computes the numbers of an analysis from the states (`Findings.states`) of several experiments
        together. Raises ValueError if the analyzer can't do that."""
        raise ValueError(f"analyses by {self.type_name} can't be combined: give each another name")

    @staticmethod
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        """Returns one figure of the results of one or several experiments.

        Args:
            results: The content of each experiment's ``result.json``, by the experiment's name.
        """
        raise NotImplementedError
