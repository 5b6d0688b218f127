"""What keeps a file from being written is told as what it is, with what helps."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from treetune.main import main
from treetune.store.files import own_folder, why_not_written, write_text

QUICKSTART = ["--configs", "configs/quickstart/grpo.jsonnet"]


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


@pytest.mark.parametrize(("made", "words"), [("file", "is a file where a folder"), ("link", "is a link to")])
def test_the_command_line_tells_them_in_one_message(
    tmp_path: Path, made: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "experiments"
    place.write_text("") if made == "file" else place.symlink_to(tmp_path / "gone")
    given = [*QUICKSTART, "--override", f"{{ directory: '{place}' }}", "clean_up_checkpoints"]
    assert main(given) != 0
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("threads", [0, 1])
def test_an_endless_configuration_is_ended_with_its_name(tmp_path: Path, threads: int) -> None:
    (tmp_path / "right.jsonnet").write_text("{ seed: 1 }")
    (tmp_path / "endless.jsonnet").write_text("{ seed: std.foldl(function(a, b) a, std.range(1, 1e15), 1) }")
    program = (
        "import sys, threading, time, treetune.config.jsonnet as j; j.DEADLINE_S = 3.0\n"
        f"[threading.Thread(target=time.sleep, args=(30,), daemon=True).start() for _ in range({threads})]\n"
        "from treetune.main import main\n"
        "sys.exit(main(['--configs', 'right.jsonnet,endless.jsonnet', 'check_config']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert "endless.jsonnet: evaluating it has taken" in told and "without an end" in told
    assert "right.jsonnet" not in told


@pytest.mark.parametrize("seed", ["9007199254740993000", "9007199254740993"])
def test_whole_numbers_that_jsonnet_cannot_hold_are_refused(
    seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one comes out of Jsonnet as 2**53."""
    given = [*QUICKSTART, "--override", f"{{ seed: {seed} }}", "check_config"]
    assert main(given) == 2
    assert "seed: 900719925474099" in (err := capsys.readouterr().err) and "beyond 2**53" in err


@pytest.mark.parametrize("name", [".hidden", "methods/.hidden"])
def test_an_experiment_that_would_never_be_listed_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICKSTART, "--override", f"{{ experiment_name: '{name}' }}", "check_config"]) == 2
    assert "begins with a dot" in capsys.readouterr().err
