"""Carries `prepare_data` and `filter_data` out: rows in, rule after rule, Parquet and a summary out.

Each stage is a file that says what it was made of, and appears when the stage is done. A command that is
killed goes on behind the last one; a changed rule begins anew from its own place on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from treetune.runtime.console import Console
from treetune.seeds import derive_seed
from treetune.store.files import whole_file, write_json
from treetune.tasks.base import Split
from treetune.tasks.sources import InFiles, Source, files_matching
from treetune_cluster.jobs import one_at_work
from treetune_data.making_threads import content_hash
from treetune_data.pipelines import VERSION, FilterData, PrepareData
from treetune_data.rules.base import Numbered, Rows, Rule, RuleContext, Verdict
from treetune_data.templates import NoValue
from treetune_domains.domain_rows import (
    DATA_SOURCE,
    EXTRA_INFO,
    Row,
    domain_of,
    read_domain_rows,
    row_key,
    write_parquet,
)

ROWS = "rows.jsonl"


@dataclass(frozen=True)
class Read:
    """A row that was read, or in its place why there is none: a reason and what it says more."""

    place: str
    split: str
    row: Row | None = None
    rule: str = ""
    why: str = ""


@dataclass(frozen=True)
class Stage:
    """The summary of a rule."""

    rule: str
    rows: int
    dropped: Mapping[str, str]
    """The reasons by the row's number, or its place where it has no number."""
    told: Mapping[str, Any]


class Stages:
    """The rows of a folder and what rules have said of them so far."""

    def __init__(self, folder: Path, console: Console, seed: int) -> None:
        self._folder, self._console, self._seed = folder / "work", console, seed
        self._id = ""
        self._gone: set[int] = set()
        self._columns: dict[str, dict[int, Any]] = {}
        self.stages: list[Stage] = []
        self.total = 0

    def read(self, found: Iterator[Read], identity: str, rules: Sequence[str]) -> None:
        """Takes the rows in, unless they are here already; `rules` names the reasons to have none, in the
        order in which the summary tells them."""
        self._id = identity
        record = self._record("read.json")
        if record is None:
            (self._folder / "read.json").unlink(missing_ok=True)
            kept = 0
            left_out: list[tuple[str, str, str]] = []
            with (
                self._console.phase("reading", "rows") as progress,
                whole_file(self._folder / ROWS) as file,
            ):
                for done, one in enumerate(found):
                    if done % 256 == 0:
                        progress(done, 0)
                    if one.row is None:
                        left_out.append((one.rule, one.place, one.why))
                        continue
                    kept += 1
                    file.write(json.dumps([one.place, one.split, one.row]) + "\n")
            record = {"id": identity, "kept": kept, "left_out": left_out}
            write_json(self._folder / "read.json", record)
        self.total = record["kept"] + len(record["left_out"])
        rows = self.total
        for rule in rules:
            dropped = {place: why for name, place, why in record["left_out"] if name == rule}
            count = sum(name == rule for name, _, _ in record["left_out"])
            self.stages.append(Stage(rule, rows, dropped, {}))
            rows -= count
        self._kept = record["kept"]

    def judge(self, rule: Rule, number: int) -> None:
        """Carries a rule out, unless what it says is here already."""
        read = [_file_hash(path) for path in rule.reads()]
        self._id = content_hash([self._id, rule.label, repr(rule), read, self._seed])
        name = f"rule-{number:02d}.json"
        record = self._record(name)
        rows = self.rows()
        if record is None:
            with self._console.phase(rule.label, "rows") as progress:
                context = RuleContext(self._folder, self._seed, progress, self._console.say)
                verdict = rule.judge(rows, context)
            record = {"id": self._id, **_as_json(verdict)}
            write_json(self._folder / name, record)
        self.stages.append(Stage(rule.label, len(rows), record["dropped"], record["told"]))
        self._gone |= {int(number) for number in record["dropped"]}
        for column, values in record["columns"].items():
            own = self._columns.setdefault(column, {})
            own.update({int(number): value for number, value in values.items()})

    def rows(self) -> Rows:
        return _Left(self._folder / ROWS, self._kept, frozenset(self._gone), self._columns)

    def _record(self, name: str) -> dict[str, Any] | None:
        """A stage's file, where it was made of what it would be made of now."""
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


class _Left(Rows):
    def __init__(
        self, file: Path, total: int, gone: frozenset[int], columns: Mapping[str, Mapping[int, Any]]
    ) -> None:
        self._file, self._total, self._gone, self._columns = file, total, gone, columns

    def __len__(self) -> int:
        return self._total - len(self._gone)

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


class Chosen:
    """Rows that go into one file: those whose file `files` says so. With `splits`, rows say that they are of
    the split of that name."""

    def __init__(self, rows: Rows, files: Mapping[int, str], wanted: str, splits: bool) -> None:
        self._rows, self._files, self._wanted, self._splits = rows, files, wanted, splits

    def __iter__(self) -> Iterator[Row]:
        for one in self._rows:
            if self._files.get(one.number) == self._wanted:
                split = {"split": self._wanted} if self._splits else {}
                yield one.row | {EXTRA_INFO: {**one.row[EXTRA_INFO], **split}}


def write_rows(path: Path, rows: Chosen) -> None:
    write_parquet(path, rows)


def write_dropped(path: Path, stages: Sequence[Stage], rows_file: Path) -> None:
    """Every row that went, with its place, the rule and why."""
    by_number = {
        number: (stage.rule, why)
        for stage in stages
        for number, why in stage.dropped.items()
        if number.isdigit()
    }
    with whole_file(path) as file:
        for stage in stages:
            for place, why in stage.dropped.items():
                if not place.isdigit():
                    file.write(json.dumps({"place": place, "rule": stage.rule, "why": why}) + "\n")
        with rows_file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if str(number) in by_number:
                    rule, why = by_number[str(number)]
                    file.write(json.dumps({"place": json.loads(line)[0], "rule": rule, "why": why}) + "\n")


def table(stages: Sequence[Stage], total: int) -> list[str]:
    """Returns how many rows each rule took, for a person."""
    rows = [("rule", "rows", "dropped", "left"), ("read", "", "", f"{total:,}")]
    for stage in stages:
        gone = len(stage.dropped)
        rows.append((stage.rule, f"{stage.rows:,}", f"{gone:,}", f"{stage.rows - gone:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def alone(folder: Path, command: str) -> AbstractContextManager[None]:
    """Holds a folder for one command at a time, on this machine. Raises ValueError for another."""
    message = f"another {command} is at work in {folder}: wait for it, or name another output"
    return one_at_work(folder / ".lock", message)


def file_hashes(paths: Sequence[Path]) -> list[str]:
    return [_file_hash(path) for path in paths]


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "dropped": {str(number): why for number, why in verdict.dropped.items()},
        "told": dict(verdict.told),
        "columns": {
            name: {str(number): value for number, value in values.items()}
            for name, values in verdict.columns.items()
        },
    }


BAD_ROWS, EXPAND = "bad rows", "expand"
ALL = "rows"
"""The file of what is not cut into splits."""


def prepare(pipeline: PrepareData, source: Path | None, output: Path, config: dict[str, Any]) -> int:
    """See `DataPipeline.run`; a `source` that is given takes the place of the configuration's."""
    chosen = pipeline.source if source is None else InFiles(train=str(source))
    splits = ordered(pipeline.splits if source is None else ("train",))
    files: list[str] = []
    if isinstance(chosen, InFiles):
        files = file_hashes([file for split in splits for file in chosen.files(split)])
    made_of = {name: value for name, value in vars(pipeline).items() if name not in _DECIDED_LATER}
    identity = content_hash([VERSION, repr(made_of), pipeline.code(), repr(chosen), splits, files])
    reasons = [BAD_ROWS, *([EXPAND] if pipeline.expand else []), *(one.name for one in pipeline.filters)]

    def read() -> Iterator[Read]:
        return _read(pipeline, chosen, splits)

    def divided(rows: Rows) -> Mapping[int, str]:
        return _splits(pipeline, rows)

    made = _Making("prepare_data", identity, reasons, read, pipeline.rules, divided, pipeline.seed)
    return _make(made, output, config)


def filtered(pipeline: FilterData, source: Path, output: Path, config: dict[str, Any]) -> int:
    """See `DataPipeline.run`."""
    identity = content_hash([VERSION, file_hashes(files_matching(source))])

    def read() -> Iterator[Read]:
        for place, row in read_domain_rows(source):
            yield Read(place, str(row[EXTRA_INFO].get("split", "train")), row)

    def divided(rows: Rows) -> Mapping[int, str]:
        return dict.fromkeys((one.number for one in rows), ALL)

    made = _Making("filter_data", identity, (), read, pipeline.rules, divided, pipeline.seed)
    return _make(made, output, config)


_DECIDED_LATER = ("rules", "hold_out", "sample", "source", "splits")
"""Settings that no row depends on when it is read."""


@dataclass(frozen=True)
class _Making:
    """The making of a folder of rows: `identity` is what decides on the rows that are read, `reasons` are
    those not to take one in, and `divided` says into which file each goes that the rules leave."""

    command: str
    identity: str
    reasons: Sequence[str]
    read: Callable[[], Iterator[Read]]
    rules: Sequence[Rule]
    divided: Callable[[Rows], Mapping[int, str]]
    seed: int


def _make(making: _Making, output: Path, config: dict[str, Any]) -> int:
    with alone(output, making.command):
        console = Console(output / "logs" / "run.log", visible=True)
        try:
            write_json(output / "config.json", config)
            stages = Stages(output, console, making.seed)
            stages.read(making.read(), making.identity, making.reasons)
            for number, rule in enumerate(making.rules):
                stages.judge(rule, number)
            _write(stages, making.divided(stages.rows()), output, console)
        finally:
            console.close()
    return 0


def _write(stages: Stages, files: Mapping[int, str], output: Path, console: Console) -> None:
    rows = stages.rows()
    names = sorted(set(files.values()))
    if not names:
        for line in table(stages.stages, stages.total):
            console.say(line)
        raise ValueError("no row is left: the table above says which rule took them")
    write_dropped(output / "dropped.jsonl", stages.stages, output / "work" / ROWS)
    with console.phase("writing", "files") as progress:
        for done, name in enumerate(names):
            progress(done, len(names))
            write_rows(output / f"{name}.parquet", Chosen(rows, files, name, name != ALL))
    sources = Counter(one.row[DATA_SOURCE] for one in rows if one.number in files)
    domains = Counter[str]()
    for source, count in sources.items():
        domains[domain_of(source)] += count
    summary = {
        "read": stages.total,
        "rules": [
            {
                "rule": stage.rule,
                "rows": stage.rows,
                "dropped": len(stage.dropped),
                "left": stage.rows - len(stage.dropped),
                **stage.told,
            }
            for stage in stages.stages
        ],
        "files": {f"{name}.parquet": sum(one == name for one in files.values()) for name in names},
        "sources": dict(sorted(sources.items())),
        "domains": dict(sorted(domains.items())),
    }
    write_json(output / "summary.json", summary)
    for line in [*table(stages.stages, stages.total), ""]:
        console.say(line)
    for stage in stages.stages:
        told = {name: value for name, value in stage.told.items() if value not in ({}, 0, None)}
        for name, value in told.items():
            if name != "matching_rows":
                console.say(f"{stage.rule}: {name.replace('_', ' ')}: {_in_words(value)}")
    for name, count in summary["files"].items():  # type: ignore[attr-defined]
        console.say(f"{count:,} rows in {output / name}")
    console.say(f"each row that went, with its reason, is in {output / 'dropped.jsonl'}")


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return str(value)


def ordered(splits: Sequence[Split]) -> list[Split]:
    """Test before validation before train."""
    return [name for name in reversed(get_args(Split)) if name in splits]


def _read(pipeline: PrepareData, source: Source, splits: Sequence[Split]) -> Iterator[Read]:
    number = 0
    for split in splits:
        for place, fields in source.rows(split):
            try:
                made = pipeline.rows_of(fields)
            except (NoValue, ValueError) as error:
                if pipeline.bad_rows == "stop":
                    raise ValueError(f"{place}: {error}; put it right, or set bad_rows to 'drop'") from error
                yield Read(place, split, rule=BAD_ROWS, why=str(error))
                number += 1
                continue
            for part, one in enumerate(made):
                where = place if len(made) == 1 else f"{place}#{part}"
                if isinstance(one, str):
                    yield Read(where, split, rule=one, why=one)
                else:
                    info = {"index": number, **one[EXTRA_INFO]}
                    yield Read(where, split, one | {EXTRA_INFO: info})
            number += 1


def _splits(pipeline: PrepareData, rows: Rows) -> dict[int, str]:
    """The split of each row: its own, or the one that it is held out for; not in it, if it isn't drawn."""
    order: dict[str, list[tuple[int, int]]] = {}
    for one in rows:
        key = derive_seed(pipeline.seed, row_key(one.row), "split")
        order.setdefault(one.split, []).append((key, one.number))
    for drawn in order.values():
        drawn.sort()
    for split in ("test", "validation"):
        wanted = pipeline.hold_out.get(split, 0)
        train = order.get("train", [])
        if wanted >= len(train) > 0 or (wanted and not train):
            raise ValueError(
                f"hold_out asks for {wanted} rows for {split}, and there are {len(train)} to train on: hold"
                " out fewer"
            )
        if wanted:
            order[split] = [*order.get(split, []), *train[:wanted]]
            order["train"] = train[wanted:]
    for split, wanted in pipeline.sample.items():
        order[split] = order.get(split, [])[:wanted]
    return {number: split for split, drawn in order.items() for _, number in drawn}
