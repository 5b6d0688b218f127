"""Sources of rows: files, and Hugging Face data sets on disk or from the hub."""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen
from typing_extensions import override

from treetune.config.errors import nearest
from treetune.config.layers import CONFIGS
from treetune.config.registrable import Registrable
from treetune.exceptions import NoSplit
from treetune.tasks.base import Split
from treetune.tasks.row_values import plain_value, refuse_unclear_nulls, restored_integers, whole_fields

Row = tuple[str, dict[str, Any]]
"""A place to name in errors (``data/math[train][17]``, ``train.jsonl:18``), and what stands there."""

ROW_GROUP = 1000
"""Rows of a Parquet file that are in memory at a time."""

JSON_FIELDS = b"treetune.json"
"""In a Parquet file's metadata: which fields hold JSON text, by their column ("" for columns themselves)."""


@dataclass(frozen=True, kw_only=True)
class Source(Registrable):
    """Rows of a data set."""

    train: str | None = "train"
    """The data set's own name of its train split; null: it has none."""
    validation: str | None = "validation"
    """The name of its validation split; null: it has none."""
    test: str | None = "test"
    """The name of its test split; null: it has none."""

    def rows(self, split: Split) -> Iterator[Row]:
        """Yields the rows of a split. Raises ValueError for a data set or a split that is not there."""
        raise NotImplementedError

    def name_of(self, split: Split) -> str:
        """Returns the data set's name of a split. Raises NoSplit where it has none."""
        name = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        if name is None:
            raise NoSplit(f"the task has no {split} split: name it under {split!r} of its source")
        return name


@Source.register("disk")
@dataclass(frozen=True, kw_only=True)
class OnDisk(Source):
    """A Hugging Face ``DatasetDict`` in the folder `path`, as ``save_to_disk`` writes it.

    The VinePPO paper's own data come like that.
    """

    path: Annotated[str, MinLen(1)]

    def columns(self, split: Split) -> list[str] | None:
        """Returns the columns of a split, as the folder says them; None where it doesn't. Raises NoSplit."""
        record = Path(self.path) / self.name_of(split) / "dataset_info.json"
        try:
            features = json.loads(record.read_text(encoding="utf-8")).get("features")
        except (OSError, ValueError):  # reported when the split is read
            return None
        return list(features) if isinstance(features, dict) else None

    @override
    def rows(self, split: Split) -> Iterator[Row]:
        name = self.name_of(split)
        folder = Path(self.path)
        if not folder.is_dir():
            raise ValueError(f"there is no data set in {folder} (looked for in {Path.cwd()})")
        if not (folder / "dataset_dict.json").is_file():
            raise ValueError(
                f"{folder} is no data set with splits: it has no dataset_dict.json, which "
                "DatasetDict.save_to_disk writes"
            )
        from datasets import load_from_disk

        try:
            splits = load_from_disk(str(folder))
        except Exception as error:  # of many kinds: a torn file, a format of another version
            raise ValueError(f"the data set in {folder} cannot be read: {error}") from error
        yield from _rows(splits, name, self.path)


@Source.register("hub")
@dataclass(frozen=True, kw_only=True)
class OnHub(Source):
    """A data set of the Hugging Face hub. It is fetched once and cached."""

    name: Annotated[str, MinLen(1)]
    """The repository on the hub."""
    revision: Annotated[str, MinLen(1)]
    """A commit or a tag, so that tomorrow's measurement has today's rows."""
    subset: str | None = None
    """One of several configurations of the data set."""
    files: Mapping[str, str] | None = field(default=None, hash=False)
    """A pattern in its repository for each split, where the data set has no splits of its own."""

    @override
    def rows(self, split: Split) -> Iterator[Row]:
        name = self.name_of(split)
        from datasets import load_dataset

        if self.files is not None and name not in self.files:
            raise ValueError(f"files of {self.name} has no pattern for its split {name!r}: add one")
        try:
            # One split at a time: files of another may have other columns.
            chosen = {} if self.files is None else {"data_files": {name: self.files[name]}}
            splits = load_dataset(self.name, self.subset, revision=self.revision, **chosen)
        except Exception as error:  # of many kinds: no network, no such name, no such revision
            raise ValueError(
                f"the data set {self.name} (revision {self.revision}) cannot be fetched: {error}. "
                "Without a network, fetch it elsewhere, save it with save_to_disk and name its folder: "
                "source: {type: 'disk', path: …}"
            ) from error
        yield from _rows(splits, name, self.name)


@Source.register("files")
@dataclass(frozen=True, kw_only=True)
class InFiles(Source):
    """Files of rows, ``.parquet``, ``.jsonl`` or ``.json``: each split is a path or a pattern
    (``data/*.parquet``, read in the order of names), relative to the working directory."""

    train: str | None = None
    validation: str | None = None
    test: str | None = None

    @override
    def rows(self, split: Split) -> Iterator[Row]:
        for path in self.files(split):
            yield from read_rows(path)

    def files(self, split: Split) -> list[Path]:
        """Returns the files of a split. Raises ValueError where there is none."""
        return files_matching(self.name_of(split))


def files_matching(pattern: str | Path) -> list[Path]:
    """Returns a file, or all that match a pattern (``data/*/train.parquet``), in the order of their names.
    Raises ValueError where there is none."""
    files = [Path(pattern)] if Path(pattern).is_file() else sorted(map(Path, glob.glob(str(pattern))))
    if not files:
        raise ValueError(no_such_file(Path(pattern)))
    return files


FETCHED = ("gsm8k", "math", "college_math", "olympiadbench", "paper")
"""The folders below data/ that scripts/download_and_prepare_datasets.sh makes."""


def no_such_file(path: Path) -> str:
    """Returns the message about a file of rows that isn't there, with what may have been meant."""
    message = f"there is no file {path} (looked for in {Path.cwd()})"
    try:
        neighbours = [file.stem for file in path.parent.iterdir() if file.suffix == path.suffix]
    except OSError:
        neighbours = []
    if near := nearest(path.stem, neighbours):
        return f"{message}: did you mean {path.with_name(near[0] + path.suffix)}?"
    if path.parts[:1] == ("data",) and path.parts[1] in FETCHED:
        return (
            f"{message}: run ./scripts/download_and_prepare_datasets.sh in a checkout of treetune, and start"
            " the experiment there"
        )
    pipeline = f"data/{path.parent.name}.jsonnet"
    if path.parts[:1] == ("data",) and (CONFIGS / pipeline).is_file():
        return f"{message}: make it with `treetune prepare_data {pipeline} --output {path.parent}`"
    return message


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yields the rows of a ``.parquet`` or ``.jsonl`` file, each with its place.

    Of a Parquet file only `columns` are read (None: all), a few rows at a time; a null in a column is a key
    that the row doesn't have, and is left out. Nulls within objects stay. Raises ValueError for a file that
    isn't there or can't be read, and for one whose golds may mean two things (`refuse_unclear_nulls`).
    """
    if path.suffix in (".jsonl", ".json"):
        yield from json_lines(path)
    elif path.suffix != ".parquet":
        raise ValueError(f"{path} should end in .parquet, .jsonl or .json")
    else:
        with _parquet(path) as file:
            names = [name for name in file.schema_arrow.names if columns is None or name in columns]
            reading = _Reading(file, names, str(path))
            number = 0
            for batch in file.iter_batches(ROW_GROUP, columns=names):
                for row in reading.rows(batch, number):
                    yield f"{path}[{number}]", row
                    number += 1


def count_rows(path: Path) -> int:
    """Returns how many rows a Parquet or JSON-lines file has. Raises as `read_rows` does."""
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return int(file.metadata.num_rows)
    if is_array(path):
        return sum(1 for _ in _array_rows(path))
    return sum(1 for line in path.read_bytes().splitlines() if line.strip())


def values_of(path: Path, column: str) -> list[str]:
    """Returns the different texts in a column, in the order of their appearance. Raises as `read_rows`
    does."""
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            if column not in file.schema_arrow.names:
                return []
            values = file.read([column])[column].unique().to_pylist()
    else:
        values = list(dict.fromkeys(row[column] for _, row in json_lines(path) if column in row))
    return [value for value in values if isinstance(value, str)]


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Opens the file. Raises ValueError for one that isn't there or can't be read."""
    if not path.is_file():
        raise ValueError(no_such_file(path))
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} can't be read as Parquet: {error}") from error


def parquet_row(path: Path, number: int) -> dict[str, Any]:
    """Returns one row of a Parquet file, counted from 0, as `read_rows` does; those before it aren't read.
    Raises ValueError for a file that can't be read or has no such row."""
    with _parquet(path) as file:
        reading = _Reading(file, file.schema_arrow.names, str(path))
        offset = number  # of the row, counted from the group or batch that is looked at
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if offset < count:
                for batch in file.iter_batches(ROW_GROUP, row_groups=[group]):
                    if offset < batch.num_rows:
                        return next(reading.rows(batch.slice(offset, 1), number))
                    offset -= batch.num_rows
            offset -= count
    raise ValueError(f"{path} has no row {number}")


class _Reading:
    """How rows of an open Parquet file become what was written: which of its fields hold JSON text, and which
    of its floats were whole numbers."""

    def __init__(self, file: Any, names: Sequence[str], where: str) -> None:
        """Raises ValueError where golds are objects with nulls that may be missing keys."""
        self._where = where
        self._in_json: Mapping[str, Sequence[str]] = json.loads(
            (file.schema_arrow.metadata or {}).get(JSON_FIELDS, b"{}")
        )
        self._whole: dict[str, dict[str, Any]] = {}
        schema = file.schema_arrow
        for name in names:
            # Only the floats are read: beside them an object may hold gigabytes of tests.
            if floats := _float_paths(schema.field(name).type, name):
                self._whole[name] = whole_fields(file.read(floats)[name])
        for name, gold in GOLDS.items():
            if name in names and _holds_objects(_field_type(schema.field(name).type, gold)):
                import pyarrow.compute as compute

                column = file.read([f"{name}.{gold}"])[name]
                refuse_unclear_nulls(compute.struct_field(column, gold), f"{name}.{gold}", where)

    def rows(self, batch: Any, first: int) -> Iterator[dict[str, Any]]:
        """Yields the rows of a batch, of which the first has the number `first`. Raises ValueError."""
        import pyarrow as pa

        columns = [
            restored_integers(column, self._whole.get(name, {}))
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        table = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
        try:
            rows = table.to_pylist(maps_as_pydicts="strict")
        except (ValueError, KeyError, OverflowError) as error:  # a date beyond Python's, a key of a map twice
            last = first + batch.num_rows - 1
            raise ValueError(f"{self._where}[{first}] to [{last}] can't be read: {error}") from error
        for number, values in enumerate(rows, start=first):
            row = {name: plain_value(value) for name, value in values.items() if value is not None}
            for column, names in self._in_json.items():
                holder = row.get(column, {}) if column else row
                try:
                    decoded = {
                        name: json.loads(holder[name]) for name in names if holder.get(name) is not None
                    }
                except ValueError as error:
                    fault = f"what should be JSON text in {column or 'a column'} is none"
                    raise ValueError(f"{self._where}[{number}]: {fault}: {error}") from error
                holder.update(decoded)
            yield row


GOLDS = {"reward_model": "ground_truth"}
"""Columns of objects, and the field of each that says what is right: its nulls decide about grades."""


def _float_paths(kind: Any, path: str) -> list[str]:
    """Returns the paths of all floats in a type, but for those in lists, as Parquet names columns."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        paths: list[str] = []
        for field in kind:
            paths += _float_paths(field.type, f"{path}.{field.name}")
        return paths
    return [path] if pa.types.is_float64(kind) else []


def _holds_objects(kind: Any) -> bool:
    """Returns whether values of a type are objects, or lists of these."""
    import pyarrow as pa

    if kind is None:
        return False
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_objects(kind.value_type)
    return bool(pa.types.is_struct(kind))


def _field_type(kind: Any, name: str) -> Any:
    import pyarrow as pa

    return kind.field(name).type if pa.types.is_struct(kind) and name in kind.names else None


def _rows(splits: Mapping[str, Any], name: str, where: str) -> Iterator[Row]:
    """Yields the rows of a Hugging Face data set's split. Raises ValueError."""
    if name not in splits:
        raise ValueError(f"{where} has no split {name!r}: it has {', '.join(map(repr, splits))}")
    dataset = splits[name]
    if hasattr(dataset, "with_format"):
        dataset = dataset.with_format(None)  # a saved one may be in the format of numpy or PyTorch
    table: Any = getattr(dataset, "data", None)
    whole: dict[str, dict[str, Any]] = {}
    for column in () if table is None else table.column_names:
        kind = table.schema.field(column).type
        if _float_paths(kind, column):
            whole[column] = whole_fields(table.column(column))
        gold = GOLDS.get(column)
        if gold is not None and _holds_objects(_field_type(kind, gold)):
            import pyarrow.compute as compute

            golds = compute.struct_field(table.column(column), gold)
            refuse_unclear_nulls(golds, f"{column}.{gold}", f"{where}[{name}]")
    for number, row in enumerate(dataset):
        yield f"{where}[{name}][{number}]", plain_value(_with_integers(row, whole))


def _with_integers(value: Any, whole: Mapping[str, Any]) -> Any:
    """Returns a value whose floats are whole numbers where `whole_fields` says so."""
    if not whole or value is None:
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else int(value)
    return {name: _with_integers(inner, whole.get(name, {})) for name, inner in value.items()}


def json_lines(path: Path) -> Iterator[Row]:
    """Yields every line of a JSON-lines file that is not blank; the place is ``file:line``. A file that is
    one JSON array of objects gives these; the place is ``file[number]``, counted from 0.

    Raises ValueError for a file that is not there, and for a line or an element that is no JSON object.
    """
    if not path.is_file():
        raise ValueError(no_such_file(path))
    if is_array(path):
        yield from _array_rows(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if not line.strip():
                continue
            file_and_line = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                remedy = ""
                if line.strip() == b"{":
                    remedy = (
                        "; the file is one JSON object over several lines, and rows are one object a line"
                    )
                raise ValueError(f"{file_and_line}: not a line of JSON: {error}{remedy}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{file_and_line}: a row must be a JSON object, not {type(row).__name__}")
            yield file_and_line, row


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def is_array(path: Path) -> bool:
    """Returns whether a file begins as one JSON array of objects."""
    with path.open("rb") as file:
        beginning = file.read(4096).removeprefix(BYTE_ORDER_MARK)
    return re.match(rb"\s*\[\s*[{\]]", beginning) is not None


def _array_rows(path: Path) -> Iterator[Row]:
    """Yields the objects of a file that is one JSON array."""
    try:
        rows = json.loads(path.read_bytes().removeprefix(BYTE_ORDER_MARK))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} begins as one JSON array, and can't be read as that: {error}; rows are one array of"
            " objects, or one object a line"
        ) from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ValueError(f"{path}[{number}]: a row of the array must be a JSON object, not {kind}")
        yield f"{path}[{number}]", row
