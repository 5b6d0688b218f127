"""Carries out `prepare_data` and `filter_data`: reads rows, applies rule after rule, writes Parquet and a
summary.

Each stage writes a file when it is done, with a hash of all that it depends on. A command that was killed
resumes after the last finished stage; after a change of a rule, this rule and those after it are applied
anew. The files of the output folder:

    work/rows.jsonl                     the rows that were read, a line each; a row's number is its line's
    work/read.json                      their number, and the data that was not made into rows, with reasons
    work/rule-00.json, rule-01.json …   for each rule, the dropped rows with reasons, and the columns it adds
    train.parquet … or rows.parquet     the rows that are left
    dropped.jsonl                       every row that was left out or dropped, with the rule and the reason
    summary.json                        counts
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from typing_extensions import override

from treetune.cluster.jobs import one_at_work
from treetune.data.making_threads import content_hash
from treetune.data.pipelines import BAD_ROWS, EXPAND, VERSION_OF_ROWS, FilterData, PrepareData
from treetune.data.rules.base import NumberedRow, Rows, Rule, RuleContext
from treetune.domains.domain_rows import (
    DATA_SOURCE,
    EXTRA_INFO,
    DomainRow,
    domain_of,
    read_domain_rows,
    row_key,
    write_parquet,
)
from treetune.exceptions import MissingField
from treetune.runtime.console import Console
from treetune.seeds import derive_seed
from treetune.store.files import write_atomically, write_json
from treetune.tasks.base import Split
from treetune.tasks.sources import InFiles, Source, files_matching

ROWS_FILE = "rows.jsonl"
UNDIVIDED_ROWS = "rows"
"""The name of the one file of rows that are not divided into splits."""
DECIDED_LATER = ("rules", "hold_out", "sample", "source", "splits")
"""Settings that are left out of the hash of the settings in `prepare`. `rules`, `hold_out` and `sample` don't
change the rows that are read; the source and the splits that are really read are hashed separately."""


class LeftOut(NamedTuple):
    """Data that was not made into a row. `rule` is `BAD_ROWS`, `EXPAND` or the name of a filter, and `why`
    the reason."""

    rule: str
    why: str


class RowRead(NamedTuple):
    """The result of reading a row: its file and line (`location`), its split, and the row itself."""

    location: str
    split: str
    row: DomainRow | LeftOut


def prepare(pipeline: PrepareData, source: Path | None, output: Path, config: dict[str, Any]) -> int:
    """Makes rows of a data set, and applies the pipeline's rules, which drop rows. Returns the exit code.

    If `source` is given, it replaces the configuration's source, and all of its rows are of the train split.
    `config` is the evaluated configuration, which is kept in the output. Raises ValueError for a wrong input.
    """
    data_source = pipeline.source if source is None else InFiles(train=str(source))
    splits = order_splits(pipeline.splits if source is None else ("train",))
    files: list[Path] = []
    if isinstance(data_source, InFiles):
        for split in splits:
            files += data_source.files(split)
    hashes = file_hashes(files)
    # `identity` is a hash of all that the read rows depend on. The settings in `DECIDED_LATER` don't change
    # these rows, or are hashed by themselves.
    settings = {name: value for name, value in vars(pipeline).items() if name not in DECIDED_LATER}
    identity = content_hash(
        [VERSION_OF_ROWS, repr(settings), pipeline.code(), repr(data_source), splits, hashes]
    )
    # The reasons for which reading may leave out a row. Each reason gets a line in the summary.
    reasons = [BAD_ROWS]
    if pipeline.expand:
        reasons.append(EXPAND)
    reasons += [row_filter.name for row_filter in pipeline.filters]
    return _make_rows_folder(
        pipeline,
        output,
        config,
        identity,
        reasons,
        read_rows=lambda: _read_rows(pipeline, data_source, splits),
        divide=lambda rows: _choose_splits(pipeline, rows),
    )


def filter_rows(pipeline: FilterData, source: Path, output: Path, config: dict[str, Any]) -> int:
    """Applies the rules to the rows of `source`, as `prepare` does."""

    def read() -> Iterator[RowRead]:
        for location, row in read_domain_rows(source):
            # `prepare_data` writes the split into each row.
            yield RowRead(location, str(row[EXTRA_INFO].get("split", "train")), row)

    def into_one_file(rows: Rows) -> dict[int, str]:
        return {row.number: UNDIVIDED_ROWS for row in rows}

    identity = content_hash([VERSION_OF_ROWS, file_hashes(files_matching(source))])
    return _make_rows_folder(
        pipeline,
        output,
        config,
        identity,
        reasons=(),  # reading leaves out no row
        read_rows=read,
        divide=into_one_file,
    )


def _make_rows_folder(
    pipeline: PrepareData | FilterData,
    output: Path,
    config: dict[str, Any],
    identity: str,
    reasons: Sequence[str],
    read_rows: Callable[[], Iterator[RowRead]],
    divide: Callable[[Rows], Mapping[int, str]],
) -> int:
    """Makes a folder of rows, and returns the exit code.

    Args:
        identity: A hash of all that `read_rows` depends on. If it is the same, the rows are the same.
        reasons: All reasons for which `read_rows` may leave out a row (`LeftOut.rule`), in the order of the
            summary.
        divide: Is called with the rows that the rules leave. Returns the name of each row's file, by the
            row's number. Rows without a name are left out.
    """
    with locked_folder(output, "prepare_data" if isinstance(pipeline, PrepareData) else "filter_data"):
        console = Console(output / "logs" / "run.log", visible=True)
        try:
            write_json(output / "config.json", config)
            stages = _Stages(output / "work", console, pipeline.seed)
            stages.read(read_rows, identity, reasons)
            for number, rule in enumerate(pipeline.rules):
                stages.judge(rule, number)
            _write_files(stages, divide(stages.rows()), output, console)
        finally:
            console.close()
    return 0


@dataclass(frozen=True)
class _Stage:
    """The result of a rule, or of a reason for which data was left out when it was read."""

    rule: str
    rows: int
    """The number of rows before the rule was applied."""
    dropped: Sequence[tuple[str, str]]
    """The dropped rows: the row's number as text, and the reason. Data that was left out when it was read has
    its location, such as ``train.jsonl:17``, in place of a number. A location occurs twice if the file is
    read for two splits."""
    details: Mapping[str, Any]
    """Further entries of the summary."""


class _Stages:
    """The rows of a folder and the results of rules so far."""

    def __init__(self, folder: Path, console: Console, seed: int) -> None:
        self._folder, self._console, self._seed = folder, console, seed
        self._id = ""
        """A hash of all that the rows so far depend on. The hash after each stage is made from the hash
        before it."""
        self._dropped: set[int] = set()
        """Numbers of the rows that rules have dropped."""
        self._columns: dict[str, dict[int, Any]] = {}
        """The values of the columns that rules have added, by the column's name and the row's number."""
        self.stages: list[_Stage] = []
        self.total = 0
        """The number of rows that were read, those that were left out included."""

    def read(self, read_rows: Callable[[], Iterator[RowRead]], identity: str, reasons: Sequence[str]) -> None:
        """Reads the rows, unless an earlier command has read the same ones (with an equal `identity`).

        `reasons` are all reasons for which a row may be left out (`LeftOut.rule`), in the order of the
        summary. Each reason becomes a stage, like a rule.
        """
        self._id = identity
        record = self._read_record("read.json")
        if record is None:
            # Deleted first, so that no old record stays next to new rows if this command is killed.
            (self._folder / "read.json").unlink(missing_ok=True)
            kept_count = 0
            left_out: list[tuple[str, str, str]] = []
            phase = self._console.phase("reading", "rows")
            with phase as progress, write_atomically(self._folder / ROWS_FILE) as file:
                for index, (location, split, row) in enumerate(read_rows()):
                    if index % 256 == 0:
                        progress(index, 0)  # 0: the number of all rows isn't known yet
                    if isinstance(row, LeftOut):
                        left_out.append((row.rule, location, row.why))
                    else:
                        kept_count += 1
                        file.write(json.dumps([location, split, row]) + "\n")
            record = {"id": identity, "kept": kept_count, "left_out": left_out}
            write_json(self._folder / "read.json", record)
        self._kept_count = record["kept"]
        self.total = self._kept_count + len(record["left_out"])
        rows_before = self.total
        for reason in reasons:
            # These rows have no numbers, but locations.
            dropped = [(location, why) for rule, location, why in record["left_out"] if rule == reason]
            self.stages.append(_Stage(reason, rows_before, dropped, details={}))
            rows_before -= len(dropped)

    def judge(self, rule: Rule, number: int) -> None:
        """Applies a rule, unless an earlier command has applied the same one to the same rows."""
        # Includes the id of the stage before. So a changed rule makes the records of all later rules invalid.
        self._id = content_hash([self._id, rule.label, repr(rule), file_hashes(rule.reads()), self._seed])
        name = f"rule-{number:02d}.json"
        record = self._read_record(name)
        rows = self.rows()
        if record is None:
            with self._console.phase(rule.label, "rows") as progress:
                context = RuleContext(self._folder, self._seed, progress, self._console.say)
                verdict = rule.judge(rows, context)
            # JSON has only texts as keys, so the numbers of rows become texts.
            columns = {}
            for column, values in verdict.columns.items():
                columns[column] = {str(row): value for row, value in values.items()}
            record = {
                "id": self._id,
                "dropped": {str(row): why for row, why in verdict.dropped.items()},
                "told": dict(verdict.details),
                "columns": columns,
            }
            write_json(self._folder / name, record)
        details = record["told"]
        dropped = list(record["dropped"].items())
        self.stages.append(_Stage(rule.label, len(rows), dropped, details))
        self._dropped |= {int(row) for row in record["dropped"]}
        for column, values in record["columns"].items():
            self._columns.setdefault(column, {}).update({int(row): value for row, value in values.items()})

    def rows(self) -> Rows:
        """Returns the rows that no rule has dropped so far."""
        return _RowsLeft(self._folder / ROWS_FILE, self._kept_count, frozenset(self._dropped), self._columns)

    def _read_record(self, name: str) -> dict[str, Any] | None:
        """Returns the content of a stage's file. Returns None if there is no such file, if it was made with
        other rows or settings, or if the file of rows is missing."""
        path = self._folder / name
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{path} can't be read ({error}): delete it") from error
        if record.get("id") != self._id or not (self._folder / ROWS_FILE).is_file():
            return None
        return dict(record)

    def write_dropped(self, path: Path) -> None:
        """Writes a line for every row that was left out or dropped: its location, the rule and why.

        First come the rows that were left out when they were read, one reason after the other. Then come the
        rows that a rule dropped, in the order in which they were read.
        """
        rule_and_why: dict[int, tuple[str, str]] = {}
        with write_atomically(path) as file:
            for stage in self.stages:
                for number_or_location, why in stage.dropped:
                    if number_or_location.isdigit():  # the number of a row that a rule dropped
                        rule_and_why[int(number_or_location)] = stage.rule, why
                    else:
                        line = {"place": number_or_location, "rule": stage.rule, "why": why}
                        file.write(json.dumps(line) + "\n")
            with (self._folder / ROWS_FILE).open(encoding="utf-8") as rows:
                for number, row in enumerate(rows):
                    if number in rule_and_why:
                        location, *_ = json.loads(row)
                        rule, why = rule_and_why[number]
                        file.write(json.dumps({"place": location, "rule": rule, "why": why}) + "\n")

    def table(self) -> list[str]:
        """Returns the lines of a table, with the number of rows that each rule dropped."""
        rows = [("rule", "rows", "dropped", "left"), ("read", "", "", f"{self.total:,}")]
        for stage in self.stages:
            dropped = len(stage.dropped)
            rows.append((stage.rule, f"{stage.rows:,}", f"{dropped:,}", f"{stage.rows - dropped:,}"))
        first_width, *widths = (max(map(len, column)) for column in zip(*rows))
        lines = []
        for rule, *numbers in rows:
            cells = [number.rjust(width) for number, width in zip(numbers, widths)]
            lines.append("  ".join([rule.ljust(first_width), *cells]))
        return lines


class _RowsLeft(Rows):
    """The rows of a file without those that are `dropped`, with further `columns`."""

    def __init__(
        self, file: Path, total: int, dropped: frozenset[int], columns: Mapping[str, Mapping[int, Any]]
    ) -> None:
        self._file, self._total, self._dropped, self._columns = file, total, dropped, columns

    @override
    def __len__(self) -> int:
        return self._total - len(self._dropped)

    @override
    def __iter__(self) -> Iterator[NumberedRow]:
        """Yields the rows that no rule has dropped, with the columns that rules have added."""
        with self._file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number in self._dropped:
                    continue
                location, split, row = json.loads(line)
                for column, values in self._columns.items():
                    if number in values:
                        row[column] = values[number]
                yield NumberedRow(number, location, split, row)


@dataclass(frozen=True)
class _RowsOfFile:
    """The rows that go into the file `name`. In a split's file, each row's `extra_info.split` is that
    split."""

    rows: Rows
    file_by_number: Mapping[int, str]
    name: str

    def __iter__(self) -> Iterator[DomainRow]:
        # Each file has the name of its split, but for the one file of rows that are not divided
        # (`UNDIVIDED_ROWS`).
        split = {} if self.name == UNDIVIDED_ROWS else {"split": self.name}
        for numbered in self.rows:
            if self.file_by_number.get(numbered.number) == self.name:
                row = numbered.row
                yield row | {EXTRA_INFO: {**row[EXTRA_INFO], **split}}


def _write_files(stages: _Stages, file_by_number: Mapping[int, str], output: Path, console: Console) -> None:
    """Writes the files of rows, dropped.jsonl and summary.json, and shows the counts. Raises ValueError if no
    row is left."""
    rows = stages.rows()
    names = sorted(set(file_by_number.values()))
    if not names:
        for line in stages.table():
            console.say(line)
        raise ValueError("no row is left: the table above says which rule removed them")
    stages.write_dropped(output / "dropped.jsonl")
    with console.phase("writing", "files") as progress:
        for done, name in enumerate(names):
            progress(done, len(names))
            write_parquet(output / f"{name}.parquet", _RowsOfFile(rows, file_by_number, name))

    sources = Counter(row.row[DATA_SOURCE] for row in rows if row.number in file_by_number)
    domains = Counter[str]()
    for source, count in sources.items():
        domains[domain_of(source)] += count
    rows_by_name = Counter(file_by_number.values())
    in_files = {f"{name}.parquet": rows_by_name[name] for name in names}
    rules = []
    for stage in stages.stages:
        dropped = len(stage.dropped)
        counts = {"rows": stage.rows, "dropped": dropped, "left": stage.rows - dropped}
        rules.append({"rule": stage.rule, **counts, **stage.details})
    summary = {
        "read": stages.total,
        "rules": rules,
        "files": in_files,
        "sources": dict(sorted(sources.items())),
        "domains": dict(sorted(domains.items())),
    }
    write_json(output / "summary.json", summary)

    for line in [*stages.table(), ""]:
        console.say(line)
    for stage in stages.stages:
        for name, value in stage.details.items():
            if name == "matching_rows":  # the list may be long, and is in the summary's file
                continue
            if value in ({}, 0, None):  # there is nothing to tell
                continue
            value_text = str(value)
            if isinstance(value, Mapping):
                value_text = ", ".join(f"{key} {count}" for key, count in value.items())
            console.say(f"{stage.rule}: {name.replace('_', ' ')}: {value_text}")
    for name, count in in_files.items():
        console.say(f"{count:,} rows in {output / name}")
    console.say(f"all dropped rows, with reasons, are in {output / 'dropped.jsonl'}")


def order_splits(splits: Sequence[Split]) -> list[Split]:
    """Returns the splits in the order test, validation, train. Rules against duplicates keep the first of
    equal rows, so of equal rows in several splits, the one in the test split stays."""
    return [name for name in reversed(get_args(Split)) if name in splits]


def _read_rows(pipeline: PrepareData, source: Source, splits: Sequence[Split]) -> Iterator[RowRead]:
    """Yields all rows of these splits, made by the pipeline's templates.

    `extra_info.index` is the number of the row in the source, unless the row has an index already. If
    `expand` makes several rows of one row of the source, all of them have its number.
    """
    source_rows = ((split, location, fields) for split in splits for location, fields in source.rows(split))
    for index, (split, location, fields) in enumerate(source_rows):
        try:
            rows = pipeline.rows_of(fields)
        except (MissingField, ValueError) as error:
            if pipeline.bad_rows == "stop":
                raise ValueError(f"{location}: {error}; fix it, or set bad_rows to 'drop'") from error
            yield RowRead(location, split, LeftOut(rule=BAD_ROWS, why=str(error)))
            continue
        for part, row_or_filter in enumerate(rows):
            location_of_row = location if len(rows) == 1 else f"{location}#{part}"
            if isinstance(row_or_filter, str):
                # The name of the filter that leaves the row out. It is all that is said about the reason.
                yield RowRead(location_of_row, split, LeftOut(rule=row_or_filter, why=row_or_filter))
            else:
                extra_info = {"index": index, **row_or_filter[EXTRA_INFO]}
                yield RowRead(location_of_row, split, row_or_filter | {EXTRA_INFO: extra_info})


def _choose_splits(pipeline: PrepareData, rows: Rows) -> dict[int, str]:
    """Returns the split of each row, by the row's number.

    A row keeps its own split, unless `hold_out` takes the row for another split. A row that `sample` doesn't
    draw has no split.

    The order in which rows are drawn comes from the seed and each row's content. So it doesn't depend on the
    other rows, nor on the order in which they are read.
    """
    numbers_by_split: dict[str, list[int]] = {}
    random_keys: dict[int, int] = {}  # by the number of the row
    for row in rows:
        numbers_by_split.setdefault(row.split, []).append(row.number)
        random_keys[row.number] = derive_seed(pipeline.seed, row_key(row.row), "split")
    # Rows are drawn in the order of their keys, and equal rows in the order of their numbers.
    for numbers in numbers_by_split.values():
        numbers.sort(key=lambda number: (random_keys[number], number))
    for split in ("test", "validation"):
        count = pipeline.hold_out.get(split, 0)
        train = numbers_by_split.get("train", [])
        if count and count >= len(train):
            raise ValueError(
                f"hold_out asks for {count} rows for {split}, and there are {len(train)} to train on: hold"
                " out fewer"
            )
        if count:
            numbers_by_split[split] = [*numbers_by_split.get(split, []), *train[:count]]
            numbers_by_split["train"] = train[count:]
    for split, count in pipeline.sample.items():
        numbers_by_split[split] = numbers_by_split.get(split, [])[:count]
    split_by_number: dict[int, str] = {}
    for split, numbers in numbers_by_split.items():
        split_by_number |= dict.fromkeys(numbers, split)
    return split_by_number


def locked_folder(folder: Path, command: str) -> AbstractContextManager[None]:
    """Locks a folder for one command at a time, on this machine, during a block. Raises ValueError if another
    command has locked it."""
    message = f"another {command} is running in {folder}: wait for it, or name another output"
    return one_at_work(folder / ".lock", message)


def file_hashes(paths: Sequence[Path]) -> list[str]:
    """Returns the hash of each file's content. Raises ValueError for a file that can't be read."""
    hashes = []
    for path in paths:
        try:
            with path.open("rb") as file:
                hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}") from error
    return hashes
