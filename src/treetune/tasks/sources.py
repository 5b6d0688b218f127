"""Where the rows of a task in natural language come from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from treetune.config.registrable import Registrable
from treetune.tasks.base import Split

Row = tuple[str, dict[str, Any]]
"""A place to name in errors (``data/math[train][17]``, ``train.jsonl:18``), and what stands there."""


@dataclass(frozen=True, kw_only=True)
class Source(Registrable):
    """Rows of a data set. `train`, `validation` and `test` are its own names of the splits; null
    says that it has none."""

    train: str | None = "train"
    validation: str | None = "validation"
    test: str | None = "test"

    def rows(self, split: Split) -> Iterator[Row]:
        """Raises ValueError for a data set or a split that is not there."""
        raise NotImplementedError

    def name_of(self, split: Split) -> str:
        """What the data set calls a split. Raises ValueError where it has none."""
        name = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        if name is None:
            raise ValueError(f"the task has no {split} split: name it under {split!r} of its source")
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
    """A data set of the Hugging Face hub, by `name` and `revision` (a commit or a tag: what is
    measured today is measured tomorrow); `subset` where it has several. Fetched once and cached."""

    name: Annotated[str, MinLen(1)]
    revision: Annotated[str, MinLen(1)]
    subset: str | None = None

    def rows(self, split: Split) -> Iterator[Row]:
        name = self.name_of(split)
        from datasets import load_dataset

        try:
            splits = load_dataset(self.name, self.subset, revision=self.revision)
        except Exception as error:  # of many kinds: no network, no such name, no such revision
            raise ValueError(
                f"the data set {self.name} (revision {self.revision}) cannot be fetched: {error}. "
                "Without a network, fetch it elsewhere, save it with save_to_disk and name its folder: "
                "source: {type: 'disk', path: …}"
            ) from error
        yield from _rows(splits, name, self.name)


def _rows(splits: Mapping[str, Any], name: str, where: str) -> Iterator[Row]:
    if name not in splits:
        raise ValueError(f"{where} has no split {name!r}: it has {', '.join(map(repr, splits))}")
    for number, row in enumerate(splits[name]):
        yield f"{where}[{name}][{number}]", row


def json_lines(path: Path) -> Iterator[Row]:
    """Every line of a JSON-lines file that is not blank; the place is ``file:line``.

    Raises ValueError for a file that is not there and for a line that is no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path} (looked for in {Path.cwd()})")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{number}"
                yield place, _object(line, place)


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not a line of JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row must be a JSON object, not {type(row).__name__}")
    return row
