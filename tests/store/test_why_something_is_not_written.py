"""What keeps a file from being written is told as what it is, with what helps."""

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
from treetune.store.files import own_folder, why_not_written, write_text


def told(number: int, path: Path) -> str:
    return why_not_written(OSError(number, os.strerror(number), str(path)), path)


def test_a_disk_without_inodes_is_not_told_as_one_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no room left" in told(errno.ENOSPC, tmp_path / "x")
    full = SimpleNamespace(f_files=1000, f_favail=0, f_bavail=2**20, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    for error in (OSError(errno.ENOSPC, "No space"), RuntimeError("PytorchStreamWriter failed")):
        assert "has no inodes left, 1000 are used" in why_not_written(error, tmp_path)


def test_quotas_limits_on_files_and_missing_rights_are_told_as_such(tmp_path: Path) -> None:
    assert "your quota" in told(errno.EDQUOT, tmp_path / "x")
    assert "raise `ulimit -f`" in told(errno.EFBIG, tmp_path / "x")
    assert "can't be written by this user" in told(errno.EROFS, tmp_path / "x")
    assert "raise `ulimit -f`" in why_not_written(RuntimeError("I/O error (os error 27)"), tmp_path)


def test_a_file_in_a_folders_place_and_a_dangling_link_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(OSError) as found:
        write_text(tmp_path / "file" / "run" / "x", "")
    assert f"{tmp_path / 'file'} is a file where a folder belongs" in why_not_written(found.value, tmp_path)
    with pytest.raises(OSError) as found:
        own_folder(tmp_path / "link")
    assert f"is a link to {tmp_path / 'gone'}, which isn't there" in why_not_written(found.value, tmp_path)


@pytest.mark.parametrize(
    ("override", "command", "words"),
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
def test_the_command_line_tells_what_can_not_be_in_one_message(
    tmp_path: Path, override: str, command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    given = ["--configs", "configs/quickstart/grpo.jsonnet", "--override"]
    code = main([*given, override.replace("%s", str(tmp_path)), command])
    assert code == 2 if command == "check_config" else code != 0
    assert re.search(words, capsys.readouterr().err)


def test_an_endless_configuration_is_ended_with_its_name(tmp_path: Path) -> None:
    """In a process with another thread, too."""
    (tmp_path / "right.jsonnet").write_text("{ seed: 1 }")
    (tmp_path / "endless.jsonnet").write_text("{ seed: std.foldl(function(a, b) a, std.range(1, 1e15), 1) }")
    program = (
        "import sys, threading, time, treetune.config.jsonnet as j; j.DEADLINE_S = 3.0\n"
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
    told = " ".join(done.stderr.split())
    assert told.count("endless.jsonnet: evaluating it has taken") == told.count("without an end") == 2
    assert "right.jsonnet" not in told
