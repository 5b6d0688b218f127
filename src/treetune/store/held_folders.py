"""Folders outside of the experiment that a process holds as long as it lives, and the sweep of those left."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "treetune-"
"""Names of these folders begin with it."""
MEMORY = Path("/dev/shm")
MEETING = "TREETUNE_MEETING"
"""The variable that names the folder in which the ranks meet that `treetune run` starts: a random name."""
_LOCK = "held"


def new_in_memory() -> Path:
    """Makes a folder in memory that this process holds, with a random name that nobody can guess, and that
    nobody else can look into."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY))
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
    """Deletes the folders of dead processes of this user, in the folder for temporary files and in memory."""
    for base in {Path(tempfile.gettempdir()), MEMORY}:
        for folder in base.glob(f"{PREFIX}*"):
            try:
                is_left = _is_left(folder)
            except OSError:  # gone meanwhile, or nothing that this user may look into
                continue
            if is_left:
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Returns whether a process of this user held it and is dead. Never waits for what others put there."""
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
