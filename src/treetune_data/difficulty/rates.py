"""How often a model was right about each row, as `estimate_difficulty` leaves it and others read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treetune.store.files import whole_file
from treetune_domains.domain_rows import row_key

RATES_FILE = "rates.parquet"

BINS: tuple[tuple[str, float, float], ...] = (
    ("impossible", 0.0, 0.0),
    ("very hard", 0.0, 0.2),
    ("hard", 0.2, 0.4),
    ("medium", 0.4, 0.6),
    ("easy", 0.6, 0.8),
    ("very easy", 0.8, 1.0),
    ("perfect", 1.0, 1.0),
)
"""Name, and where a bin begins and ends: each has its beginning, those of 0 and 1 alone come first."""


def bin_of(correct: int, answers: int) -> str:
    """The name of the bin of so many right answers of so many. In whole numbers: 0.6 is easy, whatever
    3 / 5 comes to."""
    assert 0 <= correct <= answers > 0
    if correct == 0:
        return "impossible"
    if correct == answers:
        return "perfect"
    return BINS[1 + correct * 5 // answers][0]


@dataclass(frozen=True)
class RowRate:
    """What came of a row. `occurrence` counts rows with the same `key`, which have answers of their own.

    `answers` were graded, `correct` of them right, `unfinished` of them cut off; `unavailable` more could not
    be graded, and count nowhere else. `pass_rate` and `mean_reward` are None where none was graded.
    """

    index: int
    key: str
    occurrence: int
    data_source: str
    answers: int
    correct: int
    pass_rate: float | None
    mean_reward: float | None
    mean_tokens: float | None
    unfinished: int
    unavailable: int


class Rates:
    """Rates by what is asked: rows that ask the same have one, of all their answers together."""

    def __init__(self, rows: Iterable[RowRate]) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        for row in rows:
            correct, answers = self._counts.get(row.key, (0, 0))
            self._counts[row.key] = correct + row.correct, answers + row.answers

    @staticmethod
    def read(path: Path) -> Rates:
        """Raises ValueError for a file that holds no rates."""
        return Rates(read_rates(path))

    def of(self, row: Mapping[str, Any]) -> float | None:
        """None where the row isn't there, or none of its answers could be graded."""
        correct, answers = self._counts.get(row_key(row), (0, 0))
        return correct / answers if answers else None


def read_rates(path: Path) -> Iterator[RowRate]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    if not path.is_file():
        raise ValueError(
            f"there are no rates in {path} (looked for in {Path.cwd()}): estimate_difficulty writes"
            f" {RATES_FILE} into its output when all shards are done"
        )
    try:
        rows = parquet.read_table(path).to_pylist()
        found = [RowRate(**row) for row in rows]
    except (pa.ArrowException, OSError, TypeError) as error:
        raise ValueError(f"{path} holds no rates of estimate_difficulty: {error}") from error
    yield from found


def write_rates(path: Path, rows: Iterable[RowRate]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    text, whole, number = pa.string(), pa.int64(), pa.float64()
    schema = pa.schema(
        {
            "index": whole,
            "key": text,
            "occurrence": whole,
            "data_source": text,
            "answers": whole,
            "correct": whole,
            "pass_rate": number,
            "mean_reward": number,
            "mean_tokens": number,
            "unfinished": whole,
            "unavailable": whole,
        }
    )
    with whole_file(path, "wb") as file:
        parquet.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema), file)
