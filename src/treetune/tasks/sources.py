"""Sources of rows: files, and Hugging Face data sets on disk or from the hub."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from treetune.config.registrable import Registrable
from treetune.tasks.base import NoSplit, Split

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
    """Files of rows, ``.parquet`` or ``.jsonl``: each split is a path or a pattern (``data/*.parquet``, read
    in the order of names), relative to the working directory."""

    train: str | None = None
    validation: str | None = None
    test: str | None = None

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
        raise ValueError(f"there is no file {pattern} (looked for in {Path.cwd()})")
    return files


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yields the rows of a ``.parquet`` or ``.jsonl`` file, each with its place.

    Of a Parquet file only `columns` are read (None: all), a few rows at a time; its nulls are keys that a row
    doesn't have, and are left out. Raises ValueError for a file that isn't there or can't be read.
    """
    if path.suffix in (".jsonl", ".json"):
        yield from json_lines(path)
    elif path.suffix != ".parquet":
        raise ValueError(f"{path} should end in .parquet or .jsonl")
    else:
        with _parquet(path) as file:
            names = [name for name in file.schema_arrow.names if columns is None or name in columns]
            in_json, number = _json_fields(file), 0
            for batch in file.iter_batches(ROW_GROUP, columns=names):
                for row in batch.to_pylist():
                    yield f"{path}[{number}]", _as_written(row, in_json)
                    number += 1


def count_rows(path: Path) -> int:
    """Returns how many rows a Parquet or JSON-lines file has. Raises as `read_rows` does."""
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return int(file.metadata.num_rows)
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
        raise ValueError(f"there is no file {path} (looked for in {Path.cwd()})")
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
        left = number
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if left < count:
                for batch in file.iter_batches(ROW_GROUP, row_groups=[group]):
                    if left < batch.num_rows:
                        return _as_written(batch.slice(left, 1).to_pylist()[0], _json_fields(file))
                    left -= batch.num_rows
            left -= count
    raise ValueError(f"{path} has no row {number}")


def _json_fields(file: Any) -> Mapping[str, Sequence[str]]:
    """Returns which fields hold JSON text, by their column."""
    return json.loads((file.schema_arrow.metadata or {}).get(JSON_FIELDS, b"{}"))


def _as_written(row: dict[str, Any], in_json: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns a row without nulls, and with its fields of JSON text decoded."""

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_nulls(one) for name, one in value.items() if one is not None}
        return [without_nulls(one) for one in value] if isinstance(value, list) else value

    row = without_nulls(row)
    for column, names in in_json.items():
        values = row.get(column, {}) if column else row
        values.update({name: json.loads(values[name]) for name in names if name in values})
    return row


def _rows(splits: Mapping[str, Any], name: str, where: str) -> Iterator[Row]:
    if name not in splits:
        raise ValueError(f"{where} has no split {name!r}: it has {', '.join(map(repr, splits))}")
    for number, row in enumerate(splits[name]):
        yield f"{where}[{name}][{number}]", row


def json_lines(path: Path) -> Iterator[Row]:
    """Yields every line of a JSON-lines file that is not blank; the place is ``file:line``.

    Raises ValueError for a file that is not there and for a line that is no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path} (looked for in {Path.cwd()})")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not a line of JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place}: a row must be a JSON object, not {type(row).__name__}")
            yield place, row
