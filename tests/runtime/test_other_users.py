"""Promises to a user who shares a machine, tried as the user `nobody`:

* nobody else reads a run unless it is shared, its weights, its servers' files and keys, or asks its server;
* a folder that another user has made first is an error and isn't used.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.stubs import Stub, below
from treetune.engine.launch import make_scratch_folder
from treetune.runtime.weights_folder import make_weights_folder
from treetune.store.files import make_new_private_folder, make_private_folder

NOBODY = 65534


def as_nobody(work: Callable[[], Any]) -> Any:
    """Call `work` in a process of the user `nobody`, and return its result or the name of its exception."""
    if os.geteuid() != 0:
        pytest.skip("only root can try as another user")
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                result: Any = work()
            except Exception as error:
                result = type(error).__name__
            os.write(writing, json.dumps(result).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        output = file.read()
    os.waitpid(child, 0)
    return json.loads(output)


def reader_of(path: Path) -> Callable[[], str]:
    return lambda: path.read_text()


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Make a folder that every user can enter, which pytest's folders are not."""
    mask = os.umask(0o022)
    try:
        with tempfile.TemporaryDirectory(prefix="treetune-tests-") as name:
            folder = Path(name)
            folder.chmod(0o755)
            (folder / "control").write_text("seen")
            if os.geteuid() == 0:
                assert as_nobody(reader_of(folder / "control")) == "seen", (
                    f"{folder} can't be reached, whatever its mode is: set TMPDIR to another place"
                )
            yield folder
    finally:
        os.umask(mask)


def test_a_run_is_read_by_its_owner_alone_unless_it_is_shared(public_folder: Path) -> None:
    for name in ("private", "shared"):
        make_private_folder(public_folder / name, share=name == "shared")
        (public_folder / name / "episodes").write_text("answers")
    assert as_nobody(reader_of(public_folder / "private" / "episodes")) == "PermissionError"
    assert as_nobody(reader_of(public_folder / "shared" / "episodes")) == "answers"


@pytest.mark.parametrize(("before", "share", "after"), [
    (0o755, False, 0o700), (0o700, True, 0o755),
    (0o3775, False, 0o3700), (0o2700, True, 0o2755),
])  # fmt: skip
def test_a_resumed_run_is_as_private_as_its_configuration_now_says(
    before: int, share: bool, after: int, public_folder: Path
) -> None:
    folder = public_folder / "experiment"
    folder.mkdir()
    folder.chmod(before)
    make_private_folder(folder, share=share)
    assert stat.S_IMODE(folder.stat().st_mode) == after


def test_the_umask_is_respected_and_never_changed(
    monkeypatch: pytest.MonkeyPatch, public_folder: Path
) -> None:
    """Another thread may make a file meanwhile, and a changed umask would apply to it."""
    (public_folder / "experiment").mkdir(mode=0o700)
    os.umask(0o027)
    with monkeypatch.context() as patch:
        patch.delattr("os.umask")
        make_private_folder(public_folder / "experiment", share=True)
    assert stat.S_IMODE((public_folder / "experiment").stat().st_mode) == 0o750


def test_nobody_else_reads_the_weights_that_the_engine_is_given(public_folder: Path) -> None:
    ranks: Any = SimpleNamespace(
        machines=lambda: ["here"],
        rank=0,
        is_first=True,
        barrier=lambda name: None,
        exchange=lambda name, own: [own],
    )
    folder, _, _ = make_weights_folder(public_folder / "experiment", "run", ranks)
    try:
        (folder / "server.json").write_text("key")
        assert as_nobody(reader_of(folder / "server.json")) == "PermissionError"
        assert as_nobody(lambda: os.listdir(folder)) == "PermissionError"
    finally:
        shutil.rmtree(folder)


def test_nobody_else_reads_a_servers_temporary_files(
    monkeypatch: pytest.MonkeyPatch, public_folder: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(public_folder))
    folder = make_scratch_folder()
    assert as_nobody(lambda: os.listdir(folder)) == "PermissionError"


def test_nobody_else_asks_a_server_or_reads_its_key(public_folder: Path) -> None:
    engine = (stub := Stub(public_folder)).start()
    try:
        address = engine._replicas[0].server.wait_until_ready()
        processes = below(os.getpid())

        def status_of_request() -> str:
            """Ask the server by a socket, since this user can't load the package's modules."""
            with socket.socket() as connection:
                connection.settimeout(10)
                connection.connect(("127.0.0.1", int(address.url.rpartition(":")[2])))
                connection.sendall(b"POST /collective_rpc HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
                return connection.recv(100).split()[1].decode()

        def files_with_key() -> list[str]:
            """List the files in which this user can read the key."""
            names = ("cmdline", "environ", "status", "comm")
            files = [Path(f"/proc/{pid}/{name}") for pid in processes for name in names]
            return [str(file) for file in [*files, stub.log] if address.key.encode() in text_of(file)]

        assert as_nobody(status_of_request) == "401"
        assert as_nobody(files_with_key) == []
        assert any(address.key.encode() in text_of(Path(f"/proc/{pid}/environ")) for pid in processes)
    finally:
        engine.close()


def text_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_folder_that_somebody_else_made_first_is_an_error_and_not_used(public_folder: Path) -> None:
    (public_folder / "weights").mkdir()
    with pytest.raises(ValueError, match="exists already, belongs to user"):
        make_new_private_folder(public_folder / "weights")
