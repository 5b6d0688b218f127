"""The merged results of all shards: rates by row, rows with their rate, bins, a picture, a summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treetune.runtime.console import Console
from treetune.store.files import whole_file, write_json
from treetune.store.journal import read_rows
from treetune_data.difficulty.shard import (
    ANSWERS,
    GRADES,
    NOT_ASKED,
    RowOfInput,
    input_rows,
    shard_folder,
)
from treetune_data.pipelines import EstimateDifficulty
from treetune_domains.domain_rows import DATA_SOURCE, Row, domain_of, row_key, write_parquet

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
    """The counts of a row's answers. `occurrence` counts rows with the same `key`, which have answers of
    their own.

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


BAR = 40
"""Characters of the longest bar."""


@dataclass
class _Graded:
    """The grades of a row, by the number of the answer."""

    rewards: dict[int, float] = field(default_factory=dict)
    correct: set[int] = field(default_factory=set)
    tokens: dict[int, int] = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)
    not_asked: bool = False

    def add(self, line: dict[str, Any]) -> None:
        sample = line["sample"]
        if line["outcome"] == NOT_ASKED:
            self.not_asked = True
            return
        if sample in self.rewards:
            return
        self.rewards[sample] = line["reward"]
        if line["correct"]:
            self.correct.add(sample)
        if line["tokens"] is not None:
            self.tokens[sample] = line["tokens"]
        if not line["complete"]:
            self.unfinished.add(sample)


def merge(pipeline: EstimateDifficulty, source: Path, output: Path, console: Console) -> int:
    """Writes the results of finished shards; 1 if answers are left that could not be graded."""
    graded: dict[int, _Graded] = {}
    outcomes: Counter[str] = Counter()
    answers = asked_twice = 0
    for shard in range(pipeline.shards):
        folder = shard_folder(output, shard)
        places = Counter((line["row"], line["sample"]) for line in read_rows(folder / ANSWERS))
        answers += len(places)
        asked_twice += sum(count - 1 for count in places.values())
        for line in read_rows(folder / GRADES):
            graded.setdefault(line["row"], _Graded()).add(line)
            outcomes[line["outcome"]] += 1
    rates = [
        _rate(one, graded.get(one.index, _Graded()), pipeline.answers.samples) for one in input_rows(source)
    ]
    write_rates(output / RATES_FILE, rates)
    write_parquet(output / "rows.parquet", _WithRate(source, rates, pipeline.column))
    summary = _summary(rates, outcomes, answers, asked_twice)
    _draw(summary["bins"], output)
    write_json(output / "summary.json", summary)
    for words in _in_words(summary, output, pipeline.column):
        console.say(words)
    return 1 if summary["unavailable"] else 0


class _WithRate:
    """The rows with their rate in a column; without one, where there is none."""

    def __init__(self, source: Path, rates: Sequence[RowRate], column: str) -> None:
        self._source, self._rates, self._column = source, rates, column

    def __iter__(self) -> Iterator[Row]:
        for one, rate in zip(input_rows(self._source), self._rates, strict=True):
            row = {name: value for name, value in one.row.items() if name != self._column}
            yield row if rate.pass_rate is None else row | {self._column: rate.pass_rate}


def _rate(one: RowOfInput, graded: _Graded, samples: int) -> RowRate:
    answers = len(graded.rewards)
    order = sorted(graded.rewards)
    tokens = [graded.tokens[sample] for sample in order if sample in graded.tokens]
    return RowRate(
        index=one.index,
        key=one.key,
        occurrence=one.occurrence,
        data_source=one.row[DATA_SOURCE],
        answers=answers,
        correct=len(graded.correct),
        pass_rate=len(graded.correct) / answers if answers else None,
        mean_reward=math.fsum(graded.rewards[sample] for sample in order) / answers if answers else None,
        mean_tokens=sum(tokens) / len(tokens) if tokens else None,
        unfinished=len(graded.unfinished),
        unavailable=0 if graded.not_asked else samples - answers,
    )


def _summary(
    rates: Sequence[RowRate], outcomes: Counter[str], answers: int, asked_twice: int
) -> dict[str, Any]:
    rated = [row for row in rates if row.answers]
    by_source: dict[str, list[RowRate]] = {}
    for row in rates:
        by_source.setdefault(row.data_source, []).append(row)
    return {
        "rows": len(rates),
        "answers": answers,
        "asked_twice": asked_twice,
        "pass_rate": _mean(rated),
        "bins": _bins(rated),
        "outcomes": dict(sorted(outcomes.items())),
        "without_a_rate": len(rates) - len(rated),
        "unavailable": sum(row.unavailable for row in rates),
        "unfinished": sum(row.unfinished for row in rates),
        "sources": {
            source: {
                "domain": domain_of(source),
                "rows": len(rows),
                "pass_rate": _mean([row for row in rows if row.answers]),
                "bins": _bins([row for row in rows if row.answers]),
            }
            for source, rows in sorted(by_source.items())
        },
    }


def _mean(rows: Sequence[RowRate]) -> float | None:
    return math.fsum(row.correct / row.answers for row in rows) / len(rows) if rows else None


def _bins(rows: Sequence[RowRate]) -> dict[str, int]:
    found = Counter(bin_of(row.correct, row.answers) for row in rows)
    return {name: found[name] for name, _, _ in BINS}


def _in_words(summary: dict[str, Any], output: Path, column: str) -> list[str]:
    mean = "–" if summary["pass_rate"] is None else f"{summary['pass_rate']:.3f}"
    lines = [f"{summary['rows']:,} rows, {summary['answers']:,} answers, mean pass rate {mean}", ""]
    lines += text_histogram(summary["bins"])
    lines.append("")
    if summary["without_a_rate"]:
        lines.append(f"{summary['without_a_rate']} rows have no rate: none of their answers could be graded")
    if summary["unavailable"]:
        lines.append(
            f"{summary['unavailable']} answers could not be graded; the same command grades them again, and"
            " asks for nothing anew"
        )
    if summary["unfinished"]:
        lines.append(f"{summary['unfinished']:,} answers were cut off at max_tokens")
    lines.append(f"{output / 'rows.parquet'} has the rows with {column}; {output / RATES_FILE} the counts")
    return lines


def text_histogram(bins: dict[str, int]) -> list[str]:
    total, most = sum(bins.values()), max(bins.values(), default=0)
    lines = []
    for name, low, high in BINS:
        count = bins[name]
        span = f"{low:.1f}" if low == high else f"{low:.1f}–{high:.1f}"
        share = count / total if total else 0.0
        bar = "█" * (round(BAR * count / most) if most else 0)
        lines.append(f"{name:<10} {span:<8} {count:>8,} {share:>6.1%}  {bar}".rstrip())
    return lines


def _draw(bins: dict[str, int], output: Path) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bars = axes.bar(list(bins), list(bins.values()), color="#2f6fde")
    axes.bar_label(bars, labels=[f"{count:,}" for count in bins.values()], fontsize=8)
    axes.set_ylabel("rows")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=8)
    # Without dates and random names, the same rates are the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "difficulty", "svg.fonttype": "path"}):
        figure.savefig(output / "histogram.svg", metadata={"Date": None})
    figure.savefig(output / "histogram.png", dpi=160)
