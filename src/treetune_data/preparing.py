"""Carries `prepare_data` and `filter_data` out: rows in, rule after rule, Parquet and a summary out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from treetune.runtime.console import Console
from treetune.seeds import derive_seed
from treetune.store.files import write_json
from treetune.tasks.base import Split
from treetune.tasks.sources import InFiles, Source, files_matching
from treetune_data.filter_data import FilterData
from treetune_data.prepare_data import VERSION, PrepareData
from treetune_data.rows import content_hash
from treetune_data.rules.base import Rows, Rule
from treetune_data.stages import (
    ROWS,
    Chosen,
    Read,
    Stages,
    alone,
    file_hashes,
    table,
    write_dropped,
    write_rows,
)
from treetune_data.templates import NoValue
from treetune_domains.domain_rows import DATA_SOURCE, EXTRA_INFO, domain_of, read_domain_rows, row_key

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
    """How a folder of rows is made: `identity` is what decides on the rows that are read, `reasons` are those
    not to take one in, and `divided` says into which file each goes that the rules leave."""

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
