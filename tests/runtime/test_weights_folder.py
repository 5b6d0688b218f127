"""Nobody can plant anything where a run makes its folders, and a killed run's folders don't stay."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treetune.runtime.weights_folder import SHARED_MEMORY, make_weights_folder, read_name_file
from treetune.store import held_folders
from treetune.store.files import remove_folder
from treetune.trainer.ranks import _make_private_folder

ALONE: Any = SimpleNamespace(
    machines=lambda: ["here"],
    rank=0,
    is_first=True,
    barrier=lambda name: None,
    exchange=lambda name, own: [own],
)
DEADLINE_S = 30.0


def within_the_deadline(work: Callable[[], Any]) -> Any:
    """Returns what `work` returns; fails where it waits for somebody who never comes."""
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.append(work()), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "it waits for ever"
    return returned[0]


def test_the_name_of_the_folder_in_memory_can_not_be_guessed(tmp_path: Path) -> None:
    first, *_ = make_weights_folder(tmp_path, "run", ALONE)
    shutil.rmtree(first)
    second, *_ = make_weights_folder(tmp_path, "run", ALONE)
    try:
        assert first != second and {first.parent, second.parent} == {SHARED_MEMORY}
        assert stat.S_IMODE(second.stat().st_mode) == 0o700
    finally:
        shutil.rmtree(second)


def test_the_next_start_deletes_what_a_killed_run_left_before_it_held_its_folder(tmp_path: Path) -> None:
    first, *_ = make_weights_folder(tmp_path, "run", ALONE)
    (first / "held").unlink()  # killed before: no sweep knows whose the folder is
    second, *_ = make_weights_folder(tmp_path, "run", ALONE)
    try:
        assert not first.exists() and second.is_dir()
    finally:
        shutil.rmtree(second)


@pytest.mark.parametrize("name", ["/etc", "/dev/shm/../tmp", "/dev/shm/others", "", "treetune-1\0"])
def test_a_remembered_name_that_is_no_folder_of_ours_is_not_deleted(tmp_path: Path, name: str) -> None:
    remembered = tmp_path / "remembered"
    remembered.write_text(name)
    assert read_name_file(remembered) is None


def test_a_named_pipe_where_a_run_wants_its_folder_holds_nothing_up(tmp_path: Path) -> None:
    folder, *_ = make_weights_folder(tmp_path, "run", ALONE, in_memory=False)
    remove_folder(folder)
    os.mkfifo(folder)
    again, *_ = within_the_deadline(lambda: make_weights_folder(tmp_path, "run", ALONE, in_memory=False))
    assert again == folder and folder.is_dir()


def test_a_pipe_that_is_called_like_a_runs_folder_holds_no_start_up(tmp_path: Path) -> None:
    planted = SHARED_MEMORY / f"{held_folders.FOLDER_PREFIX}planted-{os.getpid()}"
    os.mkfifo(planted)
    try:
        folder, *_ = within_the_deadline(lambda: make_weights_folder(tmp_path, "run", ALONE))
        shutil.rmtree(folder)
    finally:
        planted.unlink()


def test_a_pipe_in_place_of_the_lock_of_a_folder_holds_no_start_up() -> None:
    folder = Path(tempfile.mkdtemp(prefix=held_folders.FOLDER_PREFIX, dir=SHARED_MEMORY))
    os.mkfifo(folder / "held")
    try:
        within_the_deadline(held_folders.delete_abandoned_folders)
        assert (folder / "held").is_fifo(), "nobody can say whose it is"
    finally:
        shutil.rmtree(folder)


def test_ranks_refuse_to_meet_in_what_is_no_folder_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv(held_folders.MEETING_VARIABLE, str(pipe))
    with pytest.raises(ValueError, match="through which the ranks communicate"):
        _make_private_folder("1", 1)
