"""Defines the base class of rules. A rule looks at rows, one after the other or all together, and names the
rows to drop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.domains.domain_rows import DomainRow


@dataclass(frozen=True)
class NumberedRow:
    """A row with its number."""

    number: int
    """The row's number among all rows that were read."""
    location: str
    """The file and line that the row was read from: ``train.jsonl:17``."""
    split: str
    row: DomainRow


class Rows(Iterable[NumberedRow]):
    """The rows that no earlier rule has dropped. They can be iterated over more than once."""

    def __len__(self) -> int:
        raise NotImplementedError

    @override
    def __iter__(self) -> Iterator[NumberedRow]:
        raise NotImplementedError


@dataclass(frozen=True)
class Verdict:
    """The result of a rule."""

    dropped: Mapping[int, str]
    """The rows to drop, by their numbers, each with the reason."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the summary."""
    columns: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    """The values of columns that are added to rows, by the column's name and the row's number."""


@dataclass(frozen=True)
class RuleContext:
    """The services that a rule gets."""

    folder: Path
    """The folder for files from which a killed command resumes."""
    seed: int
    progress: Callable[[int, int], None]
    """Shows progress: takes the rows that are done, and the number of rows."""
    say: Callable[[str], None]
    """Shows a line to the user."""


class Rule(Registrable):
    """A rule that drops rows. The summary calls it by its `name`, or by its type if it has no name."""

    name: str | None

    @property
    def label(self) -> str:
        return self.name or self.registered_name() or type(self).__name__

    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        """Returns the rows to drop. The result must be the same for the same rows, also after an
        interruption. Raises ValueError for rows that the rule can't judge."""
        raise NotImplementedError

    def reads(self) -> Sequence[Path]:
        """Returns the files on whose content the result depends."""
        return ()
