"""What `treetune view` needs before it answers: a port, and a folder that is its user's own."""

import os
import socket
import stat
from pathlib import Path

import pytest

from treetune_view.app import serve


def test_a_port_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREETUNE_VIEWER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"--port is 99999 and must be from 0 .any free one. to 65535"):
        serve([tmp_path], print, port=99_999)


def test_a_port_that_is_taken_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREETUNE_VIEWER_CACHE", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} can't be had .*Address already in use"):
            serve([tmp_path], print, port=port)


def test_a_port_that_may_not_be_had_is_not_called_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("TREETUNE_VIEWER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(ValueError, match=r"port 80 can't be had .*\(Permission denied\)"):
        serve([tmp_path], print, port=80)


def test_what_is_kept_of_experiments_is_for_their_reader_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "deep" / "cache"
    monkeypatch.setenv("TREETUNE_VIEWER_CACHE", str(cache))
    before = os.umask(0o022)
    try:
        with pytest.raises(ValueError, match="--port"):
            serve([tmp_path], print, port=99_999)
    finally:
        os.umask(before)

    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
