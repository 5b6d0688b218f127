"""Promises of writing files and folders:

* a reader sees a file or a folder complete or not at all, and a write that fails leaves the old one;
* the reason why a file can't be written (no room, no inodes, a quota, a limit, a right, a link) is told
  with its remedy;
* the command line tells an impossible directory, seed or name in one message.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from treetune.main import main
from treetune.store.files import (
    make_folder_atomically,
    make_private_folder,
    replace_folder,
    why_not_written,
    write_atomically,
    write_json,
    write_text,
)


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"old": True}, durable=durable)

    def write_half() -> None:
        with write_atomically(path, durable=durable) as file:
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
    with write_atomically(path, "wb") as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == "old – ö".encode()
    assert path.read_bytes() == b"new"


def test_a_private_file_is_its_owners_alone(tmp_path: Path) -> None:
    write_json(tmp_path / "key", "secret", private=True)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def make_folder(folder: Path, names: tuple[str, ...], content: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(content)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_new_folder_replaces_an_older_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "0002", ("old", "both"), "old")
    replace_folder(make_folder(tmp_path / ".0002.partial", ("new", "both"), "new"), folder)
    assert contents(folder) == {"new": "new", "both": "new"}
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_folder(tmp_path / "0002", ("old",), "old")
    new = make_folder(tmp_path / ".0002.partial", ("new",), "new")
    rename = Path.rename

    def fail_for_new(path: Path, target: Path) -> Path:
        if path == new:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(OSError, match="Input/output error"):
        replace_folder(new, old)
    assert contents(old) == {"old": "old"}
    assert sorted(tmp_path.iterdir()) == [new, old]


@pytest.mark.parametrize("stops", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_an_older_folder_is_kept_if_it_cannot_be_moved_back_either(
    stops: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "0002", ("old",), "old")
    new = make_folder(tmp_path / ".0002.partial", ("new",), "new")
    rename = Path.rename

    def fail_after_first(path: Path, target: Path) -> Path:
        if path == folder:
            return rename(path, target)
        raise stops

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail_after_first)
        with pytest.raises(type(stops)):
            replace_folder(new, folder)
    (old,) = tmp_path.glob(".0002.*.old")
    assert contents(old) == {"old": "old"}
    replace_folder(new, folder)
    assert contents(folder) == {"new": "new"}
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_under_the_name_of_the_older_one_does_not_prevent_a_replacement(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "0002", ("old",), "old")
    make_folder(tmp_path / f".0002.{os.getpid()}.old", ("older",), "older")
    replace_folder(make_folder(tmp_path / ".0002.partial", ("new",), "new"), folder)
    assert contents(folder) == {"new": "new"}
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_was_not_finished_leaves_the_old_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "weights", ("old",), "old")

    def write_half() -> None:
        with make_folder_atomically(folder) as beside:
            (beside / "new").write_text("half")
            raise RuntimeError("struck")

    with pytest.raises(RuntimeError, match="struck"):
        write_half()
    assert contents(folder) == {"old": "old"}
    assert list(tmp_path.iterdir()) == [folder]
    with make_folder_atomically(folder) as beside:
        (beside / "new").write_text("new")
        assert contents(folder) == {"old": "old"}
    assert contents(folder) == {"new": "new"}


def test_a_folder_that_a_killed_process_of_the_same_number_has_left_is_replaced(tmp_path: Path) -> None:
    """In containers, a new process often has the number of the killed one."""
    with make_folder_atomically(tmp_path / "weights") as beside:
        name_beside = beside
    name_beside.mkdir()
    (name_beside / "half").write_text("half")
    with make_folder_atomically(tmp_path / "weights") as beside:
        assert beside == name_beside
        (beside / "new").write_text("new")
    assert contents(tmp_path / "weights") == {"new": "new"}


# Reasons why a file can't be written


def reason(number: int, path: Path) -> str:
    return why_not_written(OSError(number, os.strerror(number), str(path)), path)


def test_a_disk_without_inodes_is_told_apart_from_one_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no space left" in reason(errno.ENOSPC, tmp_path / "x")
    full = SimpleNamespace(f_files=1000, f_favail=0, f_bavail=2**20, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    for error in (OSError(errno.ENOSPC, "No space"), RuntimeError("PytorchStreamWriter failed")):
        assert "has no inodes left, 1000 are used" in why_not_written(error, tmp_path)


def test_quotas_limits_on_files_and_missing_rights_are_told_by_name(tmp_path: Path) -> None:
    assert "your quota" in reason(errno.EDQUOT, tmp_path / "x")
    assert "raise `ulimit -f`" in reason(errno.EFBIG, tmp_path / "x")
    assert "can't be written by this user" in reason(errno.EROFS, tmp_path / "x")
    assert "raise `ulimit -f`" in why_not_written(RuntimeError("I/O error (os error 27)"), tmp_path)


def test_a_file_in_a_folders_place_and_a_dangling_link_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(OSError) as error:
        write_text(tmp_path / "file" / "run" / "x", "")
    assert f"{tmp_path / 'file'} is a file where a folder belongs" in why_not_written(error.value, tmp_path)
    with pytest.raises(OSError) as error:
        make_private_folder(tmp_path / "link")
    assert f"is a link to {tmp_path / 'gone'}, which doesn't exist" in why_not_written(error.value, tmp_path)


@pytest.mark.parametrize(
    ("override", "command", "message"),
    [
        ("{ directory: '%s/file' }", "clean_up_checkpoints", "is a file where a folder"),
        ("{ directory: '%s/link' }", "clean_up_checkpoints", "is a link to"),
        # Whole numbers that Jsonnet can't hold; the second one comes out of it as 2**53.
        ("{ seed: 9007199254740993000 }", "check_config", r"seed: 900719925474099(.|\n)*beyond 2\*\*53"),
        ("{ seed: 9007199254740993 }", "check_config", r"seed: 900719925474099(.|\n)*beyond 2\*\*53"),
        # An experiment that would never be listed
        ("{ experiment_name: '.hidden' }", "check_config", "begins with a dot"),
        ("{ experiment_name: 'methods/.hidden' }", "check_config", "begins with a dot"),
    ],
)
def test_the_command_line_tells_an_impossible_setting_in_one_message(
    tmp_path: Path, override: str, command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    arguments = ["--configs", "configs/quickstart/grpo.jsonnet", "--override"]
    code = main([*arguments, override.replace("%s", str(tmp_path)), command])
    assert code == 2 if command == "check_config" else code != 0
    assert re.search(message, capsys.readouterr().err)


def test_an_endless_configuration_is_ended_with_its_name(tmp_path: Path) -> None:
    """The second evaluation runs in a process with another thread, where the deadline works otherwise."""
    (tmp_path / "right.jsonnet").write_text("{ seed: 1 }")
    (tmp_path / "endless.jsonnet").write_text("{ seed: std.foldl(function(a, b) a, std.range(1, 1e15), 1) }")
    program = (
        "import sys, threading, time, treetune.config.layers as j; j.EVALUATION_DEADLINE_S = 3.0\n"
        "from treetune.main import main\n"
        "words = ['--configs', 'right.jsonnet,endless.jsonnet', 'check_config']\n"
        "first = main(words)\n"
        "threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
        "sys.exit(first + main(words))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 + 2
    messages = " ".join(done.stderr.split())
    assert messages.count("endless.jsonnet: evaluating it took more than") == 2
    assert messages.count("endless loop") == 2
    assert "right.jsonnet" not in messages
