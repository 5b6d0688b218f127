"""The base of rules, which look at rows, one after the other or all together, and name those that go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.domains.domain_rows import Row


@dataclass(frozen=True)
class Numbered:
    """A row and its number among all that were read; `place` is where it was read from, and `split` the part
    of the data set that it is for."""

    number: int
    place: str
    split: str
    row: Row


class Rows(Iterable[Numbered]):
    """Rows that are still there; they can be gone through more than once."""

    def __len__(self) -> int:
        raise NotImplementedError

    @override
    def __iter__(self) -> Iterator[Numbered]:
        raise NotImplementedError


@dataclass(frozen=True)
class Verdict:
    """The result of a rule: the numbers of the rows that go, each with why, what else the summary should say,
    and columns that rows get, by name and number."""

    dropped: Mapping[int, str]
    details: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class RuleContext:
    """The services that a rule gets. `folder` is for what must outlive a killed process; `progress` gets
    rows done and rows in all; `say` shows a line."""

    folder: Path
    seed: int
    progress: Callable[[int, int], None]
    say: Callable[[str], None]


class Rule(Registrable):
    """A reason for a row to go. `name` is what the summary calls it, its type where left out."""

    name: str | None

    @property
    def label(self) -> str:
        return self.name or next(name for name, part in Rule.registered().items() if part is type(self))

    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        """Returns the rows that go. The same rows give the same answer, however often it was begun before.
        Raises ValueError for rows that it can't judge."""
        raise NotImplementedError

    def reads(self) -> Sequence[Path]:
        """Files whose content matters to it."""
        return ()
