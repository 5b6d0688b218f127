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

from treetune.config import folders
from treetune.config.errors import nearest
from treetune.config.layers import CONFIGS_FOLDER, shorten_path
from treetune.config.registrable import Registrable
from treetune.exceptions import NoSplit
from treetune.tasks.base import Split
from treetune.tasks.row_values import find_integer_fields, plain_value, refuse_unclear_nulls, restore_integers

LocatedRow = tuple[str, dict[str, Any]]
"""The location of a row, which error messages name, and the row.

Example: ``("train.jsonl:18", {"question": "2 + 2 = ?", "answer": "4"})``.
"""

ROW_GROUP = 1000
"""The number of rows of a Parquet file that are in memory at a time."""

JSON_FIELDS = b"treetune.json"
"""A key of a Parquet file's metadata. Its value lists the fields with JSON text for each column:
``{"extra_info": ["tests"]}``. The fields listed under "" are whole columns."""


@dataclass(frozen=True, kw_only=True)
class Source(Registrable):
    """A source of rows: a data set with splits."""

    train: str | None = "train"
    """The data set's name for its train split; null: it has none."""
    validation: str | None = "validation"
    """The name of its validation split; null: it has none."""
    test: str | None = "test"
    """The name of its test split; null: it has none."""

    def rows(self, split: Split) -> Iterator[LocatedRow]:
        """Yields the rows of a split. Raises ValueError if the data set or the split doesn't exist."""
        raise NotImplementedError

    def name_of(self, split: Split) -> str:
        """Returns the data set's name for a split. Raises NoSplit if it has none."""
        name = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        if name is None:
            raise NoSplit(f"the task has no {split} split: name it under {split!r} of its source")
        return name


@Source.register("disk")
@dataclass(frozen=True, kw_only=True)
class OnDisk(Source):
    """A Hugging Face ``DatasetDict`` in the folder `path`, which ``save_to_disk`` has written.

    The VinePPO paper's data have this form.
    """

    path: Annotated[str, MinLen(1)]

    def columns(self, split: Split) -> list[str] | None:
        """Returns the names of a split's columns. Returns None if the folder doesn't list them. Raises
        NoSplit if the data set doesn't have the split."""
        record = Path(self.path) / self.name_of(split) / "dataset_info.json"
        try:
            features = json.loads(record.read_text(encoding="utf-8")).get("features")
        except (OSError, ValueError):  # reported when the split is read
            return None
        return list(features) if isinstance(features, dict) else None

    @override
    def rows(self, split: Split) -> Iterator[LocatedRow]:
        """Yields the rows of a split of the saved data set. Raises ValueError if it can't be read."""
        name = self.name_of(split)
        folder = Path(self.path)
        if not folder.is_dir():
            raise ValueError(f"there is no data set in {folder} (looked for in {Path.cwd()})")
        if not (folder / "dataset_dict.json").is_file():
            raise ValueError(
                f"{folder} is not a data set with splits: it has no dataset_dict.json, which "
                "DatasetDict.save_to_disk writes"
            )
        from datasets import load_from_disk

        try:
            splits = load_from_disk(str(folder))
        except Exception as error:  # many kinds, e.g. for a damaged file, or a format of another version
            raise ValueError(f"the data set in {folder} cannot be read: {error}") from error
        yield from _rows_of_split(splits, name, self.path)


@Source.register("hub")
@dataclass(frozen=True, kw_only=True)
class OnHub(Source):
    """A data set of the Hugging Face hub, which is fetched once and cached."""

    name: Annotated[str, MinLen(1)]
    """The repository on the hub."""
    revision: Annotated[str, MinLen(1)]
    """A commit or a tag of the repository, so that later measurements have the same rows."""
    subset: str | None = None
    """The configuration of the data set, if it has several."""
    files: Mapping[str, str] | None = field(default=None, hash=False)
    """A pattern of files in the repository for each split, if the data set has no splits of its own."""

    @override
    def rows(self, split: Split) -> Iterator[LocatedRow]:
        """Yields the rows of a split of the data set on the hub. Raises ValueError if it can't be fetched."""
        name = self.name_of(split)
        from datasets import load_dataset

        if self.files is not None and name not in self.files:
            raise ValueError(f"files of {self.name} has no pattern for its split {name!r}: add one")
        try:
            # Only the files of this split are loaded, since those of another split may have other columns.
            # Without `files`, the data set itself says which files it has.
            files_of_split = {} if self.files is None else {"data_files": {name: self.files[name]}}
            splits = load_dataset(self.name, self.subset, revision=self.revision, **files_of_split)
        except Exception as error:  # many kinds, e.g. without a network, or for an unknown name or revision
            raise ValueError(
                f"the data set {self.name} (revision {self.revision}) cannot be fetched: {error}. "
                "Without a network, fetch it elsewhere, save it with save_to_disk and name its folder: "
                "source: {type: 'disk', path: …}"
            ) from error
        yield from _rows_of_split(splits, name, self.name)


@Source.register("files")
@dataclass(frozen=True, kw_only=True)
class InFiles(Source):
    """Files of rows, ``.parquet``, ``.jsonl`` or ``.json``. Each split is a path or a pattern, relative to
    the working directory. The files of a pattern (``data/*.parquet``) are read in the order of their
    names."""

    train: str | None = None
    validation: str | None = None
    test: str | None = None

    @override
    def rows(self, split: Split) -> Iterator[LocatedRow]:
        for path in self.files(split):
            yield from read_rows(path)

    def files(self, split: Split) -> list[Path]:
        """Returns the files of a split. Raises ValueError if there are none."""
        return files_matching(self.name_of(split))


def files_matching(pattern: str | Path) -> list[Path]:
    """Returns a file, or all files that match a pattern (``data/*/train.parquet``), in the order of their
    names.

    Raises ValueError if there are none.
    """
    files = [Path(pattern)] if Path(pattern).is_file() else sorted(map(Path, glob.glob(str(pattern))))
    if not files:
        raise ValueError(describe_missing_file(Path(pattern)))
    return files


FETCHED = ("gsm8k", "math", "college_math", "olympiadbench", "paper")
"""The folders in data/ that scripts/download_and_prepare_datasets.sh makes."""


def describe_missing_file(path: Path) -> str:
    """Returns the message about a file of rows that doesn't exist. It names a file that may have been meant,
    or a command that makes the file."""
    message = f"there is no file {path} (looked for in {Path.cwd()})"
    # The import folders include those of the configuration files. A configuration may name rows relative to
    # its own folder, and be started from another folder.
    for folder in map(Path, folders.import_folders()):
        if (folder / path).is_file():
            return (
                f"{message}. There is one in {folder}, next to the configuration. Paths of rows are relative"
                f" to the working directory: start the command in {folder}, or write"
                f" {shorten_path(folder / path)!r}"
            )
    try:
        neighbours = [file.stem for file in path.parent.iterdir() if file.suffix == path.suffix]
    except OSError:  # its folder doesn't exist either
        neighbours = []
    if nearest_names := nearest(path.stem, neighbours):
        return f"{message}: did you mean {path.with_name(nearest_names[0] + path.suffix)}?"
    if path.parts[:1] != ("data",):
        return message
    # A script makes the folders `FETCHED` in data/. Other folders are made by a data pipeline with the same
    # name as the folder.
    if any(path.is_relative_to(f"data/{folder_name}") for folder_name in FETCHED):
        return (
            f"{message}: run ./scripts/download_and_prepare_datasets.sh in a checkout of treetune, and start"
            " the experiment there"
        )
    pipeline = f"data/{path.parent.name}.jsonnet"
    if (CONFIGS_FOLDER / pipeline).is_file():
        return f"{message}: make it with `treetune prepare_data {pipeline} --output {path.parent}`"
    return message


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[LocatedRow]:
    """Yields the rows of a ``.parquet``, ``.jsonl`` or ``.json`` file, each with its location.

    A Parquet file is read `ROW_GROUP` rows at a time, and only its `columns` (None: all). A null in a column
    means that the row doesn't have the key, so the yielded row lacks this key. Nulls within objects are kept.

    Raises ValueError for a file that doesn't exist or can't be read. Also raises ValueError if golds
    (reference answers) have nulls that probably stand for missing keys (`refuse_unclear_nulls`).
    """
    _refuse_other_files(path)
    if path.suffix != ".parquet":
        yield from read_json_lines(path)
    else:
        with _open_parquet(path) as file:
            names = [name for name in file.schema_arrow.names if columns is None or name in columns]
            decoder = _ParquetDecoder(file, names, str(path))
            number = 0
            for batch in file.iter_batches(ROW_GROUP, columns=names):
                for row in decoder.rows(batch, number):
                    yield f"{path}[{number}]", row
                    number += 1


def count_rows(path: Path) -> int:
    """Returns the number of rows of a file that `read_rows` reads.

    Raises ValueError for a file that doesn't exist or can't be read. The lines of a JSON-lines file are
    counted without reading the JSON in them.
    """
    _refuse_other_files(path)
    if path.suffix == ".parquet":
        with _open_parquet(path) as file:
            return int(file.metadata.num_rows)
    if is_json_array(path):
        return sum(1 for _ in _read_array_rows(path))
    # Not splitlines: a line of JSON may contain a carriage return as white space.
    return sum(1 for line in path.read_bytes().split(b"\n") if line.strip())


def distinct_texts(path: Path, column: str) -> list[str]:
    """Returns the different texts in a column of a file that `read_rows` reads. They are in the order of the
    first rows that have them. Values other than texts are left out.

    Raises ValueError for a file that doesn't exist or can't be read.
    """
    _refuse_other_files(path)
    if path.suffix == ".parquet":
        import pyarrow as pa

        with _open_parquet(path) as file:
            if column not in file.schema_arrow.names:
                return []
            values = file.read([column])[column]
            if pa.types.is_nested(values.type):  # lists and objects are not texts, and `unique` refuses them
                return []
            return [value for value in values.unique().to_pylist() if isinstance(value, str)]
    texts: dict[str, None] = {}  # a dictionary keeps the order
    for _, row in read_json_lines(path):
        value = row.get(column)
        if isinstance(value, str):
            texts[value] = None
    return list(texts)


def _refuse_other_files(path: Path) -> None:
    """Raises ValueError for a file that isn't of a known kind or doesn't exist."""
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise ValueError(f"{path} should end in .parquet, .jsonl or .json")
    if not path.is_file():
        raise ValueError(describe_missing_file(path))


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """Opens a Parquet file. Raises ValueError if it doesn't exist or can't be read."""
    if not path.is_file():
        raise ValueError(describe_missing_file(path))
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} can't be read as Parquet: {error}") from error


def parquet_row(path: Path, number: int) -> dict[str, Any]:
    """Returns the row with a number (counted from 0), as `read_rows` yields it, without reading earlier row
    groups.

    Raises ValueError for a file that can't be read or has no such row.
    """
    with _open_parquet(path) as file:
        decoder = _ParquetDecoder(file, file.schema_arrow.names, str(path))
        offset = number  # the row's number, counted from the beginning of the current group or batch
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if offset < count:
                for batch in file.iter_batches(ROW_GROUP, row_groups=[group]):
                    if offset < batch.num_rows:
                        return next(decoder.rows(batch.slice(offset, 1), number))
                    offset -= batch.num_rows
            offset -= count
    raise ValueError(f"{path} has no row {number}")


class _ParquetDecoder:
    """Restores the original rows from those of an open Parquet file: it decodes fields of JSON text, and
    turns floats that were whole numbers back into whole numbers."""

    def __init__(self, file: Any, names: Sequence[str], source: str) -> None:
        """Finds the fields of the columns `names` that have to be decoded.

        Raises ValueError if golds (reference answers) are objects, and their nulls are probably missing keys.
        """
        self._source = source
        # For each column, its fields that contain JSON text.
        self._json_fields: Mapping[str, Sequence[str]] = json.loads(
            (file.schema_arrow.metadata or {}).get(JSON_FIELDS, b"{}")
        )
        self._integer_fields: dict[str, dict[str, Any]] = {}
        """For each column, which of its floats were whole numbers (`find_integer_fields`)."""
        schema = file.schema_arrow
        for name in names:
            # Only the floats are read: other fields of a column of objects may be gigabytes of tests.
            float_paths = _float_paths(schema.field(name).type, name)
            if float_paths:
                self._integer_fields[name] = find_integer_fields(file.read(float_paths)[name])
        # For each column, the field of its objects that is a gold.
        for name, gold_field in GOLD_OF_COLUMN.items():
            if name in names and _holds_objects(_field_type(schema.field(name).type, gold_field)):
                import pyarrow.compute as compute

                column = file.read([f"{name}.{gold_field}"])[name]
                golds = compute.struct_field(column, gold_field)
                refuse_unclear_nulls(golds, f"{name}.{gold_field}", source)

    def rows(self, batch: Any, first_number: int) -> Iterator[dict[str, Any]]:
        """Yields the rows of a batch, whose first row has the number `first_number` in the file. Raises
        ValueError for a row that can't be read."""
        import pyarrow as pa

        # Floats that were whole numbers before a null made them floats (`_integer_fields`) become integers
        # again.
        columns = [
            restore_integers(column, self._integer_fields.get(name, {}))
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        table = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
        try:
            rows = table.to_pylist(maps_as_pydicts="strict")
        except (ValueError, KeyError, OverflowError) as error:  # e.g. a date beyond Python's, a repeated key
            last_number = first_number + batch.num_rows - 1
            raise ValueError(
                f"{self._source}[{first_number}] to [{last_number}] can't be read: {error}"
            ) from error
        for number, values in enumerate(rows, start=first_number):
            row = {name: plain_value(value) for name, value in values.items() if value is not None}
            # For each column, the names of its fields with JSON text. For the column "", these are the names
            # of whole columns (`JSON_FIELDS`).
            for column, names in self._json_fields.items():
                fields = row.get(column, {}) if column else row
                try:
                    for name in names:
                        if fields.get(name) is not None:
                            fields[name] = json.loads(fields[name])
                except ValueError as error:
                    fault = f"a field of {column or 'the row'} should be JSON text, and isn't"
                    raise ValueError(f"{self._source}[{number}]: {fault}: {error}") from error
            yield row


GOLD_OF_COLUMN = {"reward_model": "ground_truth"}
"""Columns of objects, and for each the field that is a gold. Nulls in golds affect grades."""


def _float_paths(arrow_type: Any, path: str) -> list[str]:
    """Returns the paths of the floats in a column's type, in Parquet's notation: ``extra_info.index``.

    It looks into objects, but not into lists. Nor does `find_integer_fields`, which needs the paths.
    """
    import pyarrow as pa

    if pa.types.is_struct(arrow_type):
        paths: list[str] = []
        for field in arrow_type:
            paths += _float_paths(field.type, f"{path}.{field.name}")
        return paths
    return [path] if pa.types.is_float64(arrow_type) else []


def _holds_objects(arrow_type: Any) -> bool:
    """Returns whether the values of a type are objects, or lists of objects."""
    import pyarrow as pa

    if arrow_type is None:
        return False
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return _holds_objects(arrow_type.value_type)
    return bool(pa.types.is_struct(arrow_type))


def _field_type(arrow_type: Any, name: str) -> Any:
    """Returns the type of the field `name` in a type of objects. Returns None if there is no such field, or
    if the type isn't one of objects."""
    import pyarrow as pa

    if not pa.types.is_struct(arrow_type) or name not in arrow_type.names:
        return None
    return arrow_type.field(name).type


def _rows_of_split(splits: Mapping[str, Any], name: str, source: str) -> Iterator[LocatedRow]:
    """Yields the rows of a split of a Hugging Face data set. Raises ValueError if there is no such split.

    Args:
        splits: The splits of the data set, by name.
        name: The data set's name for the split.
        source: The data set in messages.
    """
    if name not in splits:
        raise ValueError(f"{source} has no split {name!r}: it has {', '.join(map(repr, splits))}")
    # A split is a `datasets.Dataset`. A plain list of rows also works: it has neither a format nor a table.
    dataset = splits[name]
    if hasattr(dataset, "with_format"):
        dataset = dataset.with_format(None)  # a saved data set may be set to numpy's or PyTorch's format
    table: Any = getattr(dataset, "data", None)
    # For each column, the fields that were whole numbers before a null turned them into floats.
    integer_fields: dict[str, dict[str, Any]] = {}
    column_names = () if table is None else table.column_names
    for column in column_names:
        arrow_type = table.schema.field(column).type
        if _float_paths(arrow_type, column):
            integer_fields[column] = find_integer_fields(table.column(column))
        # The field of the column's objects that is a gold (a reference answer); None if no field is.
        gold_field = GOLD_OF_COLUMN.get(column)
        if gold_field is not None and _holds_objects(_field_type(arrow_type, gold_field)):
            import pyarrow.compute as compute

            golds = compute.struct_field(table.column(column), gold_field)
            refuse_unclear_nulls(golds, f"{column}.{gold_field}", f"{source}[{name}]")
    for number, row in enumerate(dataset):
        yield f"{source}[{name}][{number}]", plain_value(_restore_integers(row, integer_fields))


def _restore_integers(value: Any, integer_fields: Mapping[str, Any]) -> Any:
    """Returns a value with whole numbers in place of some floats.

    Args:
        integer_fields: The fields whose floats were whole numbers, nested like the value
            (`find_integer_fields`). It is empty if nothing has to be changed.
    """
    if not integer_fields or value is None:
        return value
    if isinstance(value, float):  # NaN stands for a missing number, and integers have no NaN
        return None if math.isnan(value) else int(value)
    return {name: _restore_integers(item, integer_fields.get(name, {})) for name, item in value.items()}


def read_json_lines(path: Path) -> Iterator[LocatedRow]:
    """Yields the object of each line of a JSON-lines file, with the location ``file:line``. Blank lines are
    skipped.

    If the file is one JSON array of objects, the objects of the array are yielded, with the location
    ``file[number]``, counted from 0.

    Raises ValueError if the file doesn't exist, and for a line or an element that isn't a JSON object.
    """
    if not path.is_file():
        raise ValueError(describe_missing_file(path))
    if is_json_array(path):
        yield from _read_array_rows(path)
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
                    remedy = "; the file has a JSON object over several lines: write each row in one line"
                raise ValueError(f"{file_and_line}: not a line of JSON: {error}{remedy}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{file_and_line}: a row must be a JSON object, not {type(row).__name__}")
            yield file_and_line, row


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def is_json_array(path: Path) -> bool:
    """Returns whether a file begins like a JSON array of objects."""
    with path.open("rb") as file:
        beginning = file.read(4096).removeprefix(BYTE_ORDER_MARK)
    return re.match(rb"\s*\[\s*[{\]]", beginning) is not None


def _read_array_rows(path: Path) -> Iterator[LocatedRow]:
    """Yields the objects of a file that is one JSON array."""
    try:
        rows = json.loads(path.read_bytes().removeprefix(BYTE_ORDER_MARK))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} begins like a JSON array, and can't be read as one: {error}; rows have to be an array of"
            " objects, or an object in each line"
        ) from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ValueError(f"{path}[{number}]: a row of the array must be a JSON object, not {kind}")
        yield f"{path}[{number}]", row
