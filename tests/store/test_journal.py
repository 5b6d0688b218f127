"""Promises of journals:

* after a cut anywhere, all complete rows before the cut are read, and new rows start on a new line;
* malformed lines hide no other row, and no flipped bit gives another row;
* an exclusive journal has one writer, and a full disk is told by name and costs one row.
"""

from __future__ import annotations

import errno
import json
import random
import tempfile
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.exceptions import Damaged
from treetune.store.journal import Journal, read_journal, sealed_line, unseal_line

KEYS = st.text("0123456789abcdef", min_size=1, max_size=4)
ENTRIES = st.dictionaries(KEYS, st.none() | st.integers() | st.text(max_size=5), max_size=6)


def rows_of(entries: dict[str, Any]) -> list[Any]:
    """Half of the rows are lists, half are objects."""
    numbered = enumerate(entries.items())
    return [[key, value] if i % 2 else {"key": key, "value": value} for i, (key, value) in numbered]


def key_of(row: Any) -> str:
    return row["key"] if isinstance(row, dict) else row[0]


@given(ENTRIES, st.data(), st.booleans())
def test_a_file_that_is_cut_anywhere_has_all_complete_rows_before_the_cut(
    entries: dict[str, Any], data: st.DataObject, asks_first: bool
) -> None:
    rows = rows_of(entries)
    lines = [sealed_line(json.dumps(row)).encode() for row in rows]
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    complete_rows = sum(len(b"".join(lines[: number + 1])) <= cut for number in range(len(lines)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(content[:cut])
        assert list(read_journal(path)) == rows[:complete_rows]
        # A row that is appended next begins on a new line.
        with Journal(path) as journal:
            if asks_first:
                assert journal.get("next") is None
            journal.add(["next", 1], ["next", 2])
            assert journal.get("next") == ["next", 2]
            assert [journal.get(key_of(row)) for row in rows] == rows[:complete_rows] + [None] * (
                len(rows) - complete_rows
            )
        assert path.read_bytes().startswith(b"".join(lines[:complete_rows]) + b'{"crc32"')
        assert list(read_journal(path)) == [*rows[:complete_rows], ["next", 1], ["next", 2]]


@given(ENTRIES, st.lists(st.binary(max_size=20), max_size=3), st.randoms(use_true_random=False))
def test_malformed_lines_hide_no_row(
    entries: dict[str, Any], malformed: list[bytes], order: random.Random
) -> None:
    # Zeros and unprintable bytes, as a machine that crashed may leave behind.
    malformed_lines = [b"\0\xff" + line.translate(None, b"\r\n") + b"\n" for line in malformed]
    lines = [sealed_line(json.dumps(row)).encode() for row in rows_of(entries)] + malformed_lines
    order.shuffle(lines)
    damaged: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(b"".join(lines))
        assert {key_of(row) for row in read_journal(path, damaged)} == set(entries)
        assert damaged == [number for number, line in enumerate(lines, 1) if line in malformed_lines]
        journal = Journal(path)
        assert sorted(journal) == sorted(entries)
        assert [journal.get(key_of(row)) for row in rows_of(entries)] == rows_of(entries)


@given(st.data())
def test_no_flipped_bit_gives_another_row(data: st.DataObject) -> None:
    line = bytearray(sealed_line('["key",[1,2]]').encode())
    bit = data.draw(st.integers(0, 8 * (len(line) - 1) - 1))
    line[bit // 8] ^= 1 << bit % 8
    try:
        row = json.loads(unseal_line(bytes(line)))
    except (Damaged, ValueError):
        return
    assert row == ["key", [1, 2]]


def test_rows_of_earlier_versions_and_of_other_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text('["a",1]\n{"key": "b", "correct": true}\n\n["torn"')
    journal = Journal(tmp_path / "new.jsonl", [tmp_path / "old.jsonl", tmp_path / "none.jsonl"])
    assert list(journal) == ["a", "b"]
    assert (journal.get("a"), journal.get("b")) == (["a", 1], {"key": "b", "correct": True})
    assert not journal.path.exists(), "no file is made before the first row"
    journal.add(["a", 2])
    assert journal.get("a") == ["a", 2], "the last row counts"
    assert (tmp_path / "old.jsonl").read_text().endswith('["torn"'), "other files are left as they are"


def test_rows_that_are_not_flushed_yet_are_found_and_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, flush_s=1000.0)
    journal.add(["a", 1])
    assert path.read_bytes() == b""
    assert journal.get("a") == ["a", 1]
    journal.add(["b", 2])
    journal.close()
    journal.add(["c", 3])  # a closed journal opens its file again
    journal.close()
    assert list(read_journal(path)) == [["a", 1], ["b", 2], ["c", 3]]
    assert journal.get("c") == ["c", 3]


def test_a_plain_journal_is_json_lines(tmp_path: Path) -> None:
    with Journal(tmp_path / "rows.jsonl", without_checksums=True) as journal:
        journal.add({"row": 1}, {"row": 2})
    assert (tmp_path / "rows.jsonl").read_text() == '{"row":1}\n{"row":2}\n'


def test_a_second_process_at_an_exclusive_journal_is_refused(tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "j.jsonl", exclusive=True),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        Journal(tmp_path / "j.jsonl", exclusive=True)
    Journal(tmp_path / "j.jsonl", exclusive=True).close()


def test_a_journal_that_cannot_be_read_is_told_by_name_and_does_not_stay_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j.jsonl"

    def fail(file: FileIO) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("treetune.store.journal._end_of_last_line", fail)
        # The error is kept in a name, since its traceback would keep an open file open, too.
        with pytest.raises(OSError, match=r"Input/output error: .*j.jsonl") as failure:
            Journal(path, exclusive=True)
    Journal(path, exclusive=True).close()
    assert failure.value.errno == errno.EIO


def test_a_full_disk_is_told_by_name_and_the_incomplete_row_is_cut_off_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.add(["a", 1])

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: memoryview) -> int:
            if len(data) < 5:
                raise OSError(28, "No space left on device")
            return self.file.write(data[: len(data) // 2])

        def close(self) -> None:
            self.file.close()

    assert journal.get("a") == ["a", 1], "the index exists before the row is lost"
    monkeypatch.setattr(journal, "_file", Full(journal._file))
    with pytest.raises(OSError, match=r"No space left on device: .*journal.jsonl"):
        journal.add(["b", 2])
    assert not path.read_bytes().endswith(b"\n")
    assert journal.get("b") is None, "the row is lost"
    journal.add(["c", 3])
    assert [journal.get(key) for key in "abc"] == [["a", 1], None, ["c", 3]]
    assert list(read_journal(path)) == [["a", 1], ["c", 3]]
