"""Rows that go in, and how far each has come: a sidecar file per solution."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.tasks.rows import as_text, missing
from treetune.tasks.sources import json_lines


@dataclass(frozen=True)
class Solution:
    """A row of the input. `wrong` says why it is none."""

    number: int
    place: str
    row: dict[str, Any]
    problem: str
    text: str
    wrong: str | None

    @property
    def hash(self) -> str:
        return content_hash([self.problem, self.text])


def content_hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def solutions(source: Path, problem_field: str, solution_field: str) -> Iterator[Solution]:
    """The input's rows, one at a time. Raises ValueError for a line that is no JSON object."""
    for number, (place, row) in enumerate(json_lines(source)):
        wrong = missing(row, problem_field) or missing(row, solution_field)
        problem, text = ("", "") if wrong else (as_text(row[problem_field]), as_text(row[solution_field]))
        yield Solution(number, place, row, problem, text, wrong)


class Sidecars:
    """The files below ``solutions/``, a thousand in a folder."""

    def __init__(self, output: Path, settings: str) -> None:
        self._folder, self._settings = output / "solutions", settings

    def path(self, number: int) -> Path:
        return self._folder / f"{number // 1000:04d}" / f"{number:07d}.json"

    def heading(self, solution: Solution) -> dict[str, str]:
        """What a record begins with: of what it is, and made how."""
        return {"place": solution.place, "source": solution.hash, "settings": self._settings}

    def unanswered(self, solution: Solution) -> bool:
        """Whether the endpoint gave no answer when it was last worked on."""
        record = self._record(solution)
        return record is not None and record["outcome"] == "unanswered"

    def read(self, solution: Solution) -> dict[str, Any] | None:
        """How the solution ended; None where that is still open: it wasn't worked on, had no answer, or went
        another way, under other settings.

        Raises ValueError where another solution's end stands in its place.
        """
        record = self._record(solution)
        if record is None or record["outcome"] == "unanswered" or record["settings"] != self._settings:
            return None
        return record

    def _record(self, solution: Solution) -> dict[str, Any] | None:
        path = self.path(solution.number)
        try:
            record: dict[str, Any] = json.loads(path.read_text())
            known = record["source"], record["settings"], record["outcome"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no record of a solution ({error!r}): delete it") from error
        if known[0] != solution.hash:
            raise ValueError(
                f"{path} is of another solution than {solution.place}: name another output, or delete that"
                " file if the input was put right"
            )
        return record
