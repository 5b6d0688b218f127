"""Folders outside of the experiment that a process holds as long as it lives, and the sweep of those left."""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "treetune-"
MEMORY = Path("/dev/shm")
_ENGINE = f"{PREFIX}engine-"
_LOCK = "held"
_SOCKET_BYTES = 107
"""Of a Unix socket's path, at most (Linux)."""
_NAME_BYTES = len(_ENGINE) + 8 + 2 + len("00000000-0000-0000-0000-000000000000")
"""Below the folder of temporary files: the server's folder, and a socket of vLLM's in it."""


def refuse_long_paths() -> None:
    """Raises ValueError where sockets can't have the paths that they would get."""
    place = os.fsencode(tempfile.gettempdir())
    most = _SOCKET_BYTES - _NAME_BYTES
    if len(place) > most:
        raise ValueError(
            f"the folder for temporary files is {os.fsdecode(place)}, {len(place)} bytes long: the engine's"
            f" sockets lie there, and Linux allows their paths {_SOCKET_BYTES} bytes. Set TMPDIR to a folder"
            f" of at most {most}, such as /tmp"
        )


def make() -> Path:
    """Makes a folder for a server's sockets and temporary files, held by this process."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=_ENGINE))
    hold(folder)
    return folder


def hold(folder: Path) -> None:
    """Keeps `sweep` away from a folder of this user's for as long as this process lives.

    The kernel gives the lock up when the process ends, however it ends, and it is seen from every PID
    namespace that shares the folder.
    """
    unnamed = folder / f".{_LOCK}"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)  # locked before anybody finds it; never closed


def sweep() -> None:
    """Deletes what dead processes of this user left in the folder for temporary files and in memory."""
    for base in {Path(tempfile.gettempdir()), MEMORY}:
        for folder in base.glob(f"{PREFIX}*"):
            try:
                left = _is_left(folder)
            except OSError:  # gone meanwhile, or nothing that this user may look into
                continue
            if left:
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Whether a process of this user held it and is dead. What others put there is never waited for."""
    about = folder.lstat()
    if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode):
        return False
    descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody lives
        return True
    finally:
        os.close(descriptor)


def variables(folder: Path) -> dict[str, str]:
    """What puts a server's files there."""
    before = tempfile.gettempdir()
    return {
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder),
        # What PyTorch compiles is kept where it would be without a folder of the server's own.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or str(Path(before) / f"torchinductor_{getpass.getuser()}"),
    }
