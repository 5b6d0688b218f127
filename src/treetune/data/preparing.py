"""Carries `prepare_data` and `filter_data` out: rows in, rule after rule, Parquet and a summary out.

Each stage is a file that says what it was made of, and appears when the stage is done. A command that is
killed goes on behind the last one; a changed rule begins anew from its own place on.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from typing_extensions import override

from treetune.cluster.jobs import one_at_work
from treetune.data.making_threads import content_hash
from treetune.data.pipelines import VERSION, FilterData, PrepareData
from treetune.data.rules.base import Numbered, Rows, Rule, RuleContext
from treetune.domains.domain_rows import (
    DATA_SOURCE,
    EXTRA_INFO,
    Row,
    domain_of,
    read_domain_rows,
    row_key,
    write_parquet,
)
from treetune.exceptions import MissingField
from treetune.runtime.console import Console
from treetune.seeds import derive_seed
from treetune.store.files import whole_file, write_json
from treetune.tasks.base import Split
from treetune.tasks.sources import InFiles, Source, files_matching

ROWS = "rows.jsonl"
BAD_ROWS, EXPAND = "bad rows", "expand"
ALL = "rows"
"""The file of rows that are not cut into splits."""
DECIDED_LATER = ("rules", "hold_out", "sample", "source", "splits")
"""Settings that no row depends on when it is read."""

Read = tuple[str, str, Row | tuple[str, str]]
"""Place and split of a row that was read, and the row, or in its place a reason for none, with details."""


def prepare(pipeline: PrepareData, source: Path | None, output: Path, config: dict[str, Any]) -> int:
    """Makes rows of a data set and lets rules go over them; `config` is the evaluated configuration, for the
    record. A `source` that is given takes the place of the configuration's. Returns the exit code. Raises
    ValueError for a wrong input.
    """
    chosen = pipeline.source if source is None else InFiles(train=str(source))
    splits = ordered(pipeline.splits if source is None else ("train",))
    files: list[str] = []
    if isinstance(chosen, InFiles):
        files = file_hashes([file for split in splits for file in chosen.files(split)])
    made_of = {name: value for name, value in vars(pipeline).items() if name not in DECIDED_LATER}
    identity = content_hash([VERSION, repr(made_of), pipeline.code(), repr(chosen), splits, files])
    reasons = [BAD_ROWS, *([EXPAND] if pipeline.expand else []), *(one.name for one in pipeline.filters)]
    return _carry_out(
        pipeline,
        output,
        config,
        identity,
        reasons,
        lambda: _read(pipeline, chosen, splits),
        lambda rows: _splits(pipeline, rows),
    )


def filtered(pipeline: FilterData, source: Path, output: Path, config: dict[str, Any]) -> int:
    """Lets rules go over the rows of `source`, as `prepare` does."""
    identity = content_hash([VERSION, file_hashes(files_matching(source))])
    return _carry_out(
        pipeline,
        output,
        config,
        identity,
        (),
        lambda: (
            (place, str(row[EXTRA_INFO].get("split", "train")), row)
            for place, row in read_domain_rows(source)
        ),
        lambda rows: dict.fromkeys((one.number for one in rows), ALL),
    )


def _carry_out(
    pipeline: PrepareData | FilterData,
    output: Path,
    config: dict[str, Any],
    identity: str,
    reasons: Sequence[str],
    read: Callable[[], Iterator[Read]],
    divide: Callable[[Rows], Mapping[int, str]],
) -> int:
    """Makes a folder of rows: `identity` decides on the rows that are read, `reasons` are those not to take
    one in, and `divide` says into which file each row goes that the rules leave."""
    with alone(output, "prepare_data" if isinstance(pipeline, PrepareData) else "filter_data"):
        console = Console(output / "logs" / "run.log", visible=True)
        try:
            write_json(output / "config.json", config)
            stages = _Stages(output / "work", console, pipeline.seed)
            stages.read(read, identity, reasons)
            for number, rule in enumerate(pipeline.rules):
                stages.judge(rule, number)
            _write(stages, divide(stages.rows()), output, console)
        finally:
            console.close()
    return 0


@dataclass(frozen=True)
class _Stage:
    """The result of a rule. `dropped` are the reasons by the row's number, or by its place where it has
    none; `details` are for the summary."""

    rule: str
    rows: int
    dropped: Mapping[str, str]
    details: Mapping[str, Any]


class _Stages:
    """The rows of a folder and the results of rules so far."""

    def __init__(self, folder: Path, console: Console, seed: int) -> None:
        self._folder, self._console, self._seed = folder, console, seed
        self._id = ""
        self._gone: set[int] = set()
        self._columns: dict[str, dict[int, Any]] = {}
        self.stages: list[_Stage] = []
        self.total = 0

    def read(self, read: Callable[[], Iterator[Read]], identity: str, rules: Sequence[str]) -> None:
        """Takes the rows in, unless they are here already; `rules` names the reasons to have none, in the
        order of the summary."""
        self._id = identity
        record = self._record("read.json")
        if record is None:
            (self._folder / "read.json").unlink(missing_ok=True)
            kept = 0
            left_out: list[tuple[str, str, str]] = []
            phase = self._console.phase("reading", "rows")
            with phase as progress, whole_file(self._folder / ROWS) as file:
                for done, (place, split, row) in enumerate(read()):
                    if done % 256 == 0:
                        progress(done, 0)
                    if isinstance(row, tuple):
                        rule, why = row
                        left_out.append((rule, place, why))
                    else:
                        kept += 1
                        file.write(json.dumps([place, split, row]) + "\n")
            record = {"id": identity, "kept": kept, "left_out": left_out}
            write_json(self._folder / "read.json", record)
        self._kept = record["kept"]
        self.total = rows = self._kept + len(record["left_out"])
        for rule in rules:
            found = [(place, why) for name, place, why in record["left_out"] if name == rule]
            self.stages.append(_Stage(rule, rows, dict(found), {}))
            rows -= len(found)

    def judge(self, rule: Rule, number: int) -> None:
        """Carries a rule out, unless its result is here already."""
        self._id = content_hash([self._id, rule.label, repr(rule), file_hashes(rule.reads()), self._seed])
        name = f"rule-{number:02d}.json"
        record = self._record(name)
        rows = self.rows()
        if record is None:
            with self._console.phase(rule.label, "rows") as progress:
                context = RuleContext(self._folder, self._seed, progress, self._console.say)
                verdict = rule.judge(rows, context)
            record = {
                "id": self._id,
                "dropped": {str(row): why for row, why in verdict.dropped.items()},
                "told": dict(verdict.details),
                "columns": {
                    column: {str(row): value for row, value in values.items()}
                    for column, values in verdict.columns.items()
                },
            }
            write_json(self._folder / name, record)
        self.stages.append(_Stage(rule.label, len(rows), record["dropped"], record["told"]))
        self._gone |= {int(row) for row in record["dropped"]}
        for column, values in record["columns"].items():
            self._columns.setdefault(column, {}).update({int(row): one for row, one in values.items()})

    def rows(self) -> Rows:
        return _Left(self._folder / ROWS, self._kept, frozenset(self._gone), self._columns)

    def _record(self, name: str) -> dict[str, Any] | None:
        """Returns a stage's file, where it was made of what it would be made of now."""
        path = self._folder / name
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{path} can't be read ({error}): delete it") from error
        if record.get("id") != self._id or not (self._folder / ROWS).is_file():
            return None
        return dict(record)

    def write_dropped(self, path: Path) -> None:
        """Writes every row that went, with its place, the rule and why."""
        dropped = [(key, stage.rule, why) for stage in self.stages for key, why in stage.dropped.items()]
        by_number = {key: (rule, why) for key, rule, why in dropped if key.isdigit()}
        with whole_file(path) as file, (self._folder / ROWS).open(encoding="utf-8") as lines:
            for place, rule, why in dropped:
                if not place.isdigit():
                    file.write(json.dumps({"place": place, "rule": rule, "why": why}) + "\n")
            for number, line in enumerate(lines):
                if str(number) in by_number:
                    rule, why = by_number[str(number)]
                    file.write(json.dumps({"place": json.loads(line)[0], "rule": rule, "why": why}) + "\n")

    def table(self) -> list[str]:
        """Returns how many rows each rule took, for a person."""
        rows = [("rule", "rows", "dropped", "left"), ("read", "", "", f"{self.total:,}")]
        for stage in self.stages:
            gone = len(stage.dropped)
            rows.append((stage.rule, f"{stage.rows:,}", f"{gone:,}", f"{stage.rows - gone:,}"))
        first, *widths = (max(map(len, column)) for column in zip(*rows))
        return [
            "  ".join([rule.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths))])
            for rule, *cells in rows
        ]


class _Left(Rows):
    """The rows of a file but for those that are `gone`, with further `columns`."""

    def __init__(
        self, file: Path, total: int, gone: frozenset[int], columns: Mapping[str, Mapping[int, Any]]
    ) -> None:
        self._file, self._total, self._gone, self._columns = file, total, gone, columns

    @override
    def __len__(self) -> int:
        return self._total - len(self._gone)

    @override
    def __iter__(self) -> Iterator[Numbered]:
        with self._file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number in self._gone:
                    continue
                place, split, row = json.loads(line)
                for column, values in self._columns.items():
                    if number in values:
                        row[column] = values[number]
                yield Numbered(number, place, split, row)


@dataclass(frozen=True)
class _OneFile:
    """The rows that go into the file `name`. Rows of a split's file say that they are of that split."""

    rows: Rows
    files: Mapping[int, str]
    name: str

    def __iter__(self) -> Iterator[Row]:
        split = {} if self.name == ALL else {"split": self.name}
        for one in self.rows:
            if self.files.get(one.number) == self.name:
                yield one.row | {EXTRA_INFO: {**one.row[EXTRA_INFO], **split}}


def _write(stages: _Stages, files: Mapping[int, str], output: Path, console: Console) -> None:
    rows = stages.rows()
    names = sorted(set(files.values()))
    if not names:
        for line in stages.table():
            console.say(line)
        raise ValueError("no row is left: the table above says which rule took them")
    stages.write_dropped(output / "dropped.jsonl")
    with console.phase("writing", "files") as progress:
        for done, name in enumerate(names):
            progress(done, len(names))
            write_parquet(output / f"{name}.parquet", _OneFile(rows, files, name))
    sources = Counter(one.row[DATA_SOURCE] for one in rows if one.number in files)
    domains = Counter[str]()
    for source, count in sources.items():
        domains[domain_of(source)] += count
    in_files = {f"{name}.parquet": sum(one == name for one in files.values()) for name in names}
    summary = {
        "read": stages.total,
        "rules": [
            {
                "rule": stage.rule,
                "rows": stage.rows,
                "dropped": len(stage.dropped),
                "left": stage.rows - len(stage.dropped),
                **stage.details,
            }
            for stage in stages.stages
        ],
        "files": in_files,
        "sources": dict(sorted(sources.items())),
        "domains": dict(sorted(domains.items())),
    }
    write_json(output / "summary.json", summary)
    for line in [*stages.table(), ""]:
        console.say(line)
    for stage in stages.stages:
        for name, value in stage.details.items():
            if name != "matching_rows" and value not in ({}, 0, None):
                shown = str(value)
                if isinstance(value, Mapping):
                    shown = ", ".join(f"{key} {count}" for key, count in value.items())
                console.say(f"{stage.rule}: {name.replace('_', ' ')}: {shown}")
    for name, count in in_files.items():
        console.say(f"{count:,} rows in {output / name}")
    console.say(f"each row that went, with its reason, is in {output / 'dropped.jsonl'}")


def ordered(splits: Sequence[Split]) -> list[Split]:
    """Returns test before validation before train."""
    return [name for name in reversed(get_args(Split)) if name in splits]


def _read(pipeline: PrepareData, source: Source, splits: Sequence[Split]) -> Iterator[Read]:
    number = 0
    for split in splits:
        for place, fields in source.rows(split):
            try:
                made = pipeline.rows_of(fields)
            except (MissingField, ValueError) as error:
                if pipeline.bad_rows == "stop":
                    raise ValueError(f"{place}: {error}; put it right, or set bad_rows to 'drop'") from error
                yield place, split, (BAD_ROWS, str(error))
                number += 1
                continue
            for part, one in enumerate(made):
                where = place if len(made) == 1 else f"{place}#{part}"
                if isinstance(one, str):
                    yield where, split, (one, one)
                else:
                    yield where, split, one | {EXTRA_INFO: {"index": number, **one[EXTRA_INFO]}}
            number += 1


def _splits(pipeline: PrepareData, rows: Rows) -> dict[int, str]:
    """Returns each row's split: its own, or the one that it is held out for; none, if it isn't drawn."""
    order: dict[str, list[tuple[int, int]]] = {}
    for one in rows:
        key = derive_seed(pipeline.seed, row_key(one.row), "split")
        order.setdefault(one.split, []).append((key, one.number))
    for drawn in order.values():
        drawn.sort()
    for split in ("test", "validation"):
        count = pipeline.hold_out.get(split, 0)
        train = order.get("train", [])
        if count >= len(train) > 0 or (count and not train):
            raise ValueError(
                f"hold_out asks for {count} rows for {split}, and there are {len(train)} to train on: hold"
                " out fewer"
            )
        if count:
            order[split] = [*order.get(split, []), *train[:count]]
            order["train"] = train[count:]
    for split, count in pipeline.sample.items():
        order[split] = order.get(split, [])[:count]
    return {number: split for split, drawn in order.items() for _, number in drawn}


def alone(folder: Path, command: str) -> AbstractContextManager[None]:
    """Holds a folder for one command at a time, on this machine. Raises ValueError for another."""
    message = f"another {command} is at work in {folder}: wait for it, or name another output"
    return one_at_work(folder / ".lock", message)


def file_hashes(paths: Sequence[Path]) -> list[str]:
    """Returns the files' hashes. Raises ValueError for one that can't be read."""
    hashes = []
    for path in paths:
        try:
            with path.open("rb") as file:
                hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}") from error
    return hashes
