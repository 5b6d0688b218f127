"""Makes folders in /dev/shm and /tmp that belong to a living process, and deletes those of dead ones.

A process holds a folder by a lock on the file ``held`` in it, which the kernel releases when the process
ends, however it ends. `delete_abandoned_folders` deletes the folders whose lock it can get.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

FOLDER_PREFIX = "treetune-"
"""The beginning of the names of these folders."""
SHARED_MEMORY = Path("/dev/shm")
MEETING_VARIABLE = "TREETUNE_MEETING"
"""The environment variable with the path of the folder in which the ranks of `treetune run` meet. The
folder's name is random."""
_LOCK_NAME = "held"
_NOTES_OF_SHARED_MEMORY = "shared_memory"
"""The file in a server's folder with the names and inodes of the server's files in /dev/shm
(`treetune.engine.guard`)."""


def make_folder_in_memory() -> Path:
    """Makes a folder in memory with a random name. Only this user may use it.
    `delete_abandoned_folders` leaves it alone as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=SHARED_MEMORY))
    hold_folder(folder)
    return folder


def hold_folder(folder: Path) -> None:
    """Locks a file in the folder for as long as this process lives. `delete_abandoned_folders` leaves
    such a folder alone.

    A lock works for processes in other PID namespaces (containers) that share the folder, where a process id
    would mean nothing.
    """
    # The file is locked before it gets its name, so that no other process finds it unlocked. The descriptor
    # is never closed, because that would release the lock.
    unnamed = folder / f".{_LOCK_NAME}"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK_NAME)


def delete_abandoned_folders() -> None:
    """Deletes the folders of this user's dead processes, in memory and in the folder for temporary files, and
    the memory that the servers of dead processes shared."""
    for base in {Path(tempfile.gettempdir()), SHARED_MEMORY}:
        for folder in base.glob(f"{FOLDER_PREFIX}*"):
            try:
                is_abandoned = _is_abandoned(folder)
            except OSError:  # locked by a living process, deleted meanwhile, or not readable by this user
                continue
            if is_abandoned:
                _delete_shared_memory(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _delete_shared_memory(folder: Path) -> None:
    """Deletes the files in memory that the folder's notes name, if it has notes.

    The name of such a file (``psm_08ac79c1``) doesn't show who made it. The inode does: another program's
    file of the same name has another inode.
    """
    notes = folder / _NOTES_OF_SHARED_MEMORY
    if notes.is_symlink() or not notes.is_file():
        return
    for line in notes.read_text(errors="replace").splitlines():
        name, _, inode = line.partition(" ")
        path = SHARED_MEMORY / Path(name).name  # in this folder, whatever the notes say
        try:
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and str(status.st_ino) == inode:
                path.unlink()
        except OSError:  # deleted already, or another user's
            continue


def _is_abandoned(folder: Path) -> bool:
    """Returns whether the folder belonged to a process of this user that is dead: its lock file, which the
    process had locked, is unlocked now.

    Raises:
        OSError: A living process has locked the file (BlockingIOError), or there is no such file.
    """
    status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        return False
    # Another user may have put a named pipe or a link there: never wait for the pipe, never follow the link.
    descriptor = os.open(folder / _LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    finally:
        os.close(descriptor)
