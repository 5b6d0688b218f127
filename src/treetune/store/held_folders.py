"""Makes folders in /dev/shm and /tmp that belong to a living process, and deletes those of dead ones.

A process holds a folder by a lock on the file ``held`` in it, which the kernel releases when the process
ends, however it ends. `sweep` deletes the folders whose lock it can get.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "treetune-"
"""The beginning of the names of these folders."""
MEMORY = Path("/dev/shm")
MEETING = "TREETUNE_MEETING"
"""The environment variable with the folder in which the ranks of `treetune run` meet; its name is random."""
_LOCK = "held"


def new_in_memory() -> Path:
    """Makes a folder in memory that this process holds, for this user alone, with a random name."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY))
    hold(folder)
    return folder


def hold(folder: Path) -> None:
    """Keeps `sweep` from deleting a folder for as long as this process lives.

    A lock works for processes in other PID namespaces (containers) that share the folder, where a process id
    would mean nothing.
    """
    # The file is locked before it gets its name, so that no sweep finds it unlocked. The descriptor is
    # never closed, because that would release the lock.
    unnamed = folder / f".{_LOCK}"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)


def sweep() -> None:
    """Deletes the folders of this user's dead processes, in memory and in the folder for temporary files."""
    for base in {Path(tempfile.gettempdir()), MEMORY}:
        for folder in base.glob(f"{PREFIX}*"):
            try:
                is_abandoned = _is_abandoned(folder)
            except OSError:  # locked by a living process, deleted meanwhile, or not readable by this user
                continue
            if is_abandoned:
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Returns whether a dead process of this user held the folder.

    Raises:
        OSError: A living process holds it (BlockingIOError), or it has no lock file.
    """
    status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        return False
    # Another user may have put a named pipe or a link there: never wait for one, never follow one.
    descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    finally:
        os.close(descriptor)
