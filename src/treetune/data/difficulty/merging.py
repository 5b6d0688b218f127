"""Merges the results of all shards into rates by row, rows with their rate, a histogram and a summary."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.data.difficulty.shard import (
    ANSWERS_FILE,
    GRADES_FILE,
    WITHOUT_ANSWER,
    RowOfInput,
    input_rows,
    shard_folder,
)
from treetune.data.pipelines import EstimateDifficulty
from treetune.domains.domain_rows import DATA_SOURCE, DomainRow, domain_of, write_parquet
from treetune.runtime.console import Console
from treetune.store.files import write_atomically, write_json
from treetune.store.journal import read_journal

RATES_FILE = "rates.parquet"

PASS_RATE_BINS: tuple[tuple[str, float, float], ...] = (
    ("impossible", 0.0, 0.0),
    ("very hard", 0.0, 0.2),
    ("hard", 0.2, 0.4),
    ("medium", 0.4, 0.6),
    ("easy", 0.6, 0.8),
    ("very easy", 0.8, 1.0),
    ("perfect", 1.0, 1.0),
)
"""The bins of pass rates: name, lower and upper end. Rates of exactly 0 and of exactly 1 have bins of their
own. Each other bin contains its lower end and not its upper end: a rate of 0.2 is hard."""


def bin_of(correct: int, answers: int) -> str:
    """Returns the name of the bin for `correct` of `answers`.

    Example: 3 of 5 are ``"easy"``, the bin that begins at 0.6.
    """
    assert 0 <= correct <= answers > 0
    if correct == 0:
        return "impossible"
    if correct == answers:
        return "perfect"
    # Five bins of equal width come after "impossible". Whole numbers decide between them, since a quotient of
    # floats may lie on either side of a bin's end, such as 0.6.
    fifth = correct * 5 // answers
    name, _, _ = PASS_RATE_BINS[1 + fifth]
    return name


@dataclass(frozen=True)
class RowRate:
    """The counts of a row's answers.

    `key` is a hash of the row's content, and `occurrence` is the number of earlier rows with the same key.
    Rows with the same key have separate answers. `answers` is the number of graded answers: `correct` of them
    are right, and `unfinished` of them were cut off. `unavailable` further answers could not be graded, and
    count nowhere else. `pass_rate` and `mean_reward` are None if no answer was graded; `mean_tokens` is None
    if no number of tokens is known.
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


def read_rates(path: Path) -> Iterator[RowRate]:
    """Yields the rows of a file of pass rates. Raises ValueError if the file is missing or holds no rates."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    if not path.is_file():
        raise ValueError(
            f"there are no rates in {path} (looked for in {Path.cwd()}): estimate_difficulty writes"
            f" {RATES_FILE} into its output when all shards are done"
        )
    try:
        rows = [RowRate(**row) for row in parquet.read_table(path).to_pylist()]
    except (pa.ArrowException, OSError, TypeError) as error:
        raise ValueError(f"{path} holds no rates of estimate_difficulty: {error}") from error
    yield from rows


def rates_by_key(path: Path) -> dict[str, float]:
    """Returns pass rates by the rows' keys, which are equal for rows with the same content. Rows with equal
    keys share a rate, over the answers of all of them. Keys without a graded answer are left out."""
    counts: dict[str, tuple[int, int]] = {}  # correct answers and all answers, by key
    for row in read_rates(path):
        correct, answers = counts.get(row.key, (0, 0))
        counts[row.key] = correct + row.correct, answers + row.answers
    return {key: correct / answers for key, (correct, answers) in counts.items() if answers}


def write_rates(path: Path, rows: Iterable[RowRate]) -> None:
    """Writes the rates as a Parquet file, which `read_rates` reads."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    # `field.type` is a text such as "float | None", because of `from __future__ import annotations`.
    types = {"str": pa.string(), "int": pa.int64(), "float | None": pa.float64()}
    schema = pa.schema({field.name: types[str(field.type)] for field in fields(RowRate)})
    with write_atomically(path, "wb") as file:
        parquet.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema), file)


def merge(pipeline: EstimateDifficulty, source: Path, output: Path, console: Console) -> int:
    """Writes the results of finished shards, and returns 1 if answers are left that could not be graded."""
    # The line of each graded answer, by the row's number and by the number of the sample.
    grade_lines: defaultdict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    outcomes: Counter[str] = Counter()
    answers = asked_twice = 0
    for shard in range(pipeline.shards):
        folder = shard_folder(output, shard)
        question_counts = Counter(
            (line["row"], line["sample"]) for line in read_journal(folder / ANSWERS_FILE)
        )
        answers += len(question_counts)
        asked_twice += sum(count - 1 for count in question_counts.values())
        for line in read_journal(folder / GRADES_FILE):
            # An answer has two grades if two jobs worked on the shard at the same time. The first one counts.
            lines_of_row = grade_lines[line["row"]]
            if line["sample"] not in lines_of_row:
                lines_of_row[line["sample"]] = line
                outcomes[line["outcome"]] += 1
    rates = [
        _count_answers(row, grade_lines[row.index], pipeline.answers.samples) for row in input_rows(source)
    ]

    def with_rates() -> Iterator[DomainRow]:
        """Yields the source's rows, each with its pass rate if it has one."""
        for input_row, rate in zip(input_rows(source), rates, strict=True):
            # The source may have the rates of an earlier estimate in this column. They are removed, also from
            # rows that get no new rate.
            row = {name: value for name, value in input_row.row.items() if name != pipeline.column}
            yield row if rate.pass_rate is None else row | {pipeline.column: rate.pass_rate}

    write_rates(output / RATES_FILE, rates)
    # `write_parquet` goes through the rows twice, and each time they are read from the source anew.
    write_parquet(output / "rows.parquet", _Repeatable(with_rates))
    summary = _summarize(rates, outcomes, answers, asked_twice)
    summary["without_answer"] = _count_without_answer(grade_lines)
    _draw_histogram(summary["bins"], output)
    write_json(output / "summary.json", summary)
    for line in _describe_summary(summary, output, pipeline.column):
        console.say(line)
    return 1 if summary["unavailable"] else 0


@dataclass(frozen=True)
class _Repeatable(Iterable[DomainRow]):
    """Rows that can be gone through more than once."""

    rows: Callable[[], Iterator[DomainRow]]

    @override
    def __iter__(self) -> Iterator[DomainRow]:
        return self.rows()


def _count_answers(
    row: RowOfInput, grade_by_sample: Mapping[int, Mapping[str, Any]], samples: int
) -> RowRate:
    """Returns the counts of a row for which `samples` answers were asked.

    Args:
        grade_by_sample: The lines of the journal of grades, by the number of the sample.
    """
    grades = [grade for grade in grade_by_sample.values() if grade["outcome"] not in WITHOUT_ANSWER]
    tokens = [grade["tokens"] for grade in grades if grade["tokens"] is not None]
    answers = len(grades)
    correct = sum(bool(grade["correct"]) for grade in grades)
    return RowRate(
        index=row.index,
        key=row.key,
        occurrence=row.occurrence,
        data_source=row.row[DATA_SOURCE],
        answers=answers,
        correct=correct,
        pass_rate=correct / answers if answers else None,
        mean_reward=math.fsum(grade["reward"] for grade in grades) / answers if answers else None,
        mean_tokens=sum(tokens) / len(tokens) if tokens else None,
        unfinished=sum(not grade["complete"] for grade in grades),
        unavailable=samples - len(grade_by_sample),  # answers that could not be graded have no line
    )


def _summarize(
    rates: Sequence[RowRate], outcomes: Counter[str], answers: int, asked_twice: int
) -> dict[str, Any]:
    """Returns the counts and the mean pass rates of all rows, and of each data source.

    Args:
        rates: The counts of each row, also of rows without a graded answer.
        outcomes: The number of grades with each outcome.
        answers: The number of answers.
        asked_twice: The number of answers to questions that had an answer already.
    """
    # A row without a graded answer has no pass rate, and counts in no mean.
    rated_rows = [row for row in rates if row.answers]
    rows_by_source: dict[str, list[RowRate]] = {}
    for row in rates:
        rows_by_source.setdefault(row.data_source, []).append(row)
    sources = {}
    for source, rows in sorted(rows_by_source.items()):
        rated_of_source = [row for row in rows if row.answers]
        sources[source] = {
            "domain": domain_of(source),
            "rows": len(rows),
            "pass_rate": _mean_pass_rate(rated_of_source),
            "bins": _count_by_bin(rated_of_source),
        }
    return {
        "rows": len(rates),
        "answers": answers,
        "asked_twice": asked_twice,
        "pass_rate": _mean_pass_rate(rated_rows),
        "bins": _count_by_bin(rated_rows),
        "outcomes": dict(sorted(outcomes.items())),
        "without_a_rate": len(rates) - len(rated_rows),
        # Answers that could not be graded, and answers that were cut off
        "unavailable": sum(row.unavailable for row in rates),
        "unfinished": sum(row.unfinished for row in rates),
        "sources": sources,
    }


def _count_without_answer(grade_lines: Mapping[int, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns an entry for each outcome of questions without an answer (`WITHOUT_ANSWER`): the number of
    questions with this outcome, the numbers of their rows, and the message on the first question."""
    entries: dict[str, dict[str, Any]] = {}
    for row, line_by_sample in sorted(grade_lines.items()):
        for _, line in sorted(line_by_sample.items()):
            if line["outcome"] not in WITHOUT_ANSWER:
                continue
            entry = entries.setdefault(
                line["outcome"], {"answers": 0, "rows": [], "first": line.get("message", "")}
            )
            entry["answers"] += 1
            if row not in entry["rows"]:
                entry["rows"].append(row)
    return entries


def _mean_pass_rate(rows: Sequence[RowRate]) -> float | None:
    """Returns the mean pass rate; None without rows."""
    return math.fsum(row.correct / row.answers for row in rows) / len(rows) if rows else None


def _count_by_bin(rows: Sequence[RowRate]) -> dict[str, int]:
    """Returns the number of rows in each bin of pass rates, in the order of the bins."""
    rows_by_bin = Counter(bin_of(row.correct, row.answers) for row in rows)
    return {name: rows_by_bin[name] for name, _, _ in PASS_RATE_BINS}


def _describe_summary(summary: dict[str, Any], output: Path, column: str) -> list[str]:
    """Returns the lines of the summary for the user, with a histogram of the pass rates."""
    mean = "–" if summary["pass_rate"] is None else f"{summary['pass_rate']:.3f}"
    lines = [f"{summary['rows']:,} rows, {summary['answers']:,} answers, mean pass rate {mean}", ""]
    lines += text_histogram(summary["bins"])
    lines.append("")
    if summary["without_a_rate"]:
        lines.append(f"{summary['without_a_rate']} rows have no rate: none of their answers could be graded")
    for outcome, counts in summary["without_answer"].items():
        rows = ", ".join(map(str, counts["rows"][:SHOWN_ROWS]))
        note_on_more = (
            f" and {len(counts['rows']) - SHOWN_ROWS} more" if len(counts["rows"]) > SHOWN_ROWS else ""
        )
        note_on_first = f"; the first: {counts['first']}" if counts["first"] else ""
        lines.append(
            f"{counts['answers']:,} of {summary['answers']:,} answers are {outcome} and count in no rate"
            f" (rows {rows}{note_on_more}){note_on_first}"
        )
    if summary["unavailable"]:
        lines.append(
            f"{summary['unavailable']} answers could not be graded; the same command grades them again, and"
            " asks for nothing anew"
        )
    if summary["unfinished"]:
        lines.append(f"{summary['unfinished']:,} answers were cut off at max_tokens")
    lines.append(f"{output / 'rows.parquet'} has the rows with {column}; {output / RATES_FILE} the counts")
    return lines


SHOWN_ROWS = 10

LONGEST_BAR = 40
"""Characters of the longest bar."""


def text_histogram(bins: dict[str, int]) -> list[str]:
    """Returns a line for each bin: its name, its span, its number of rows, their share, and a bar."""
    total, largest_count = sum(bins.values()), max(bins.values(), default=0)
    lines = []
    for name, low, high in PASS_RATE_BINS:
        count = bins[name]
        span = f"{low:.1f}" if low == high else f"{low:.1f}–{high:.1f}"
        share = count / total if total else 0.0
        bar = "█" * (round(LONGEST_BAR * count / largest_count) if largest_count else 0)
        lines.append(f"{name:<10} {span:<8} {count:>8,} {share:>6.1%}  {bar}".rstrip())
    return lines


def _draw_histogram(bins: dict[str, int], output: Path) -> None:
    """Draws the numbers of rows by bin into histogram.svg and histogram.png."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)  # becomes the figure's canvas, which draws without a display
    axes = figure.subplots()
    bars = axes.bar(list(bins), list(bins.values()), color="#2f6fde")
    axes.bar_label(bars, labels=[f"{count:,}" for count in bins.values()], fontsize=8)
    axes.set_ylabel("rows")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=8)
    # The SVG gets no date and no random ids, so that the same rates give the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "difficulty", "svg.fonttype": "path"}):
        figure.savefig(output / "histogram.svg", metadata={"Date": None})
    figure.savefig(output / "histogram.png", dpi=160)
