"""A reader sees a file or a folder whole or not at all, and an error leaves what was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from treetune.store.files import replace_folder, whole_file, whole_folder, write_json, write_text


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"old": True}, durable=durable)

    def write_half() -> None:
        with whole_file(path, durable=durable) as file:
            file.write('{"new": ')
            file.flush()
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_half()
    assert path.read_text() == '{\n "old": true\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_the_old_bytes_until_the_new_ones_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    write_text(path, "old – ö")
    with whole_file(path, "wb") as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == "old – ö".encode()
    assert path.read_bytes() == b"new"


def test_a_private_file_is_its_owners_alone(tmp_path: Path) -> None:
    write_json(tmp_path / "key", "secret", private=True)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def folder_of(place: Path, names: tuple[str, ...], text: str) -> Path:
    place.mkdir()
    for name in names:
        (place / name).write_text(text)
    return place


def contents(place: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.iterdir()}


def test_a_folder_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "0002", ("old", "both"), "old")
    replace_folder(folder_of(tmp_path / ".0002.partial", ("new", "both"), "new"), place)
    assert contents(place) == {"new": "new", "both": "new"}
    assert list(tmp_path.iterdir()) == [place]


def test_a_folder_that_was_not_finished_leaves_the_old_one(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "weights", ("old",), "old")

    def write_half() -> None:
        with whole_folder(place) as beside:
            (beside / "new").write_text("half")
            raise RuntimeError("struck")

    with pytest.raises(RuntimeError, match="struck"):
        write_half()
    assert contents(place) == {"old": "old"}
    assert list(tmp_path.iterdir()) == [place]
    with whole_folder(place) as beside:
        (beside / "new").write_text("new")
        assert contents(place) == {"old": "old"}
    assert contents(place) == {"new": "new"}
