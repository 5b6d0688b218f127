"""Batches of an Arrow stream one by one, in any order, and of each only the columns that are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.rollouts.storage import REMEDY
from treetune.store.checksums import verify_once

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Layout:
    """Where the batches of a stream lie: `ends[k]` is the byte behind batch k, `rows[k]` how many rows come
    before it and `rows[-1]` all of them. The schema ends at `head`."""

    head: int
    ends: tuple[int, ...]
    rows: tuple[int, ...]

    def batch_of(self, row: int) -> int:
        import bisect

        return bisect.bisect_right(self.rows, row) - 1


class Batches:
    """Reads batches where they lie. Raises ValueError for a file that isn't what the layout is of."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.layout = path, layout

    def read(self, number: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Batch `number`; of its columns those that are named, in the file's order."""
        import pyarrow as pa

        verify_once(self.path, REMEDY)
        layout = self.layout
        begin = layout.ends[number - 1] if number else layout.head
        with self.path.open("rb") as file:
            head = file.read(layout.head)
            file.seek(begin)
            body = file.read(layout.ends[number] - begin)
        options = pa.ipc.IpcReadOptions(use_threads=False)
        if columns is not None:
            names = pa.ipc.read_schema(pa.py_buffer(head)).names
            options.included_fields = [names.index(name) for name in columns if name in names]
        try:
            with pa.ipc.open_stream(pa.py_buffer(head + body), options=options) as reader:
                batch = reader.read_next_batch()
            batch.validate(full=True)  # of an earlier version, without a checksum
            return batch
        except (pa.ArrowInvalid, OSError, StopIteration) as error:
            raise ValueError(f"{self.path} is no longer what it was, or is damaged ({error})") from error


def walk(path: Path, columns: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Each batch with the columns that are named (as far as there are any), and the byte behind it.

    The first that is given is the schema, with the byte where the first batch begins. Raises ValueError for
    a file that isn't whole, or isn't as it was written.
    """
    import pyarrow as pa

    verify_once(path, REMEDY)
    with path.open("rb") as file:
        try:
            with pa.ipc.open_stream(file) as reader:
                names = reader.schema.names
            metadata = reader.schema.metadata or {}
            file.seek(0)
            options = pa.ipc.IpcReadOptions(
                use_threads=False, included_fields=[names.index(name) for name in columns if name in names]
            )
            with pa.ipc.open_stream(file, options=options) as reader:
                yield reader.schema, file.tell()
                count = 0
                for batch in reader:
                    batch.validate(full=True)
                    count += batch.num_rows
                    yield batch, file.tell()
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} is not a whole Arrow file ({error})") from error
    if b"rows" in metadata and count != int(metadata[b"rows"]):
        raise ValueError(f"{path} is cut short: {count} of {int(metadata[b'rows'])} rows")
