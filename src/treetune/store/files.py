"""Writes files and folders that a reader sees whole or not at all: under another name, synced, then
renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal


def why_not_written(error: BaseException, path: Path) -> str:
    """Returns the cause of a failure to write below `path`, with a remedy. If the cause is unknown, returns
    the error's own message, with the free space and the limit of a file's size."""
    # Libraries in Rust put the number of the error into their message; others give none.
    match = re.search(r"os error (\d+)", str(error))
    error_number: int | None = None
    if isinstance(error, OSError):
        error_number = error.errno
    elif match:
        error_number = int(match[1])
    named_file = getattr(error, "filename", None)
    if isinstance(named_file, str | bytes):
        path = Path(os.fsdecode(named_file))
    path_and_parents = (path, *path.absolute().parents)
    nearest_folder = next(folder for folder in path_and_parents if folder.is_dir())
    space = os.statvfs(nearest_folder)
    free = f"{space.f_bavail * space.f_frsize / 2**20:.0f} MiB are free there"
    for part in path_and_parents:
        if part.is_symlink() and not part.exists():
            return (
                f"{part} is a link to {os.readlink(part)}, which doesn't exist: make it, or delete the link"
            )
        if part != path and part.is_file():
            return f"{part} is a file where a folder belongs: move it away"
    # Without free inodes the error is the same as on a full disk. Some file systems count no inodes:
    # their `f_files` is 0. Without an error number, inodes or space may be missing.
    if error_number in (errno.ENOSPC, None) and space.f_files and not space.f_favail:
        return (
            f"the file system of {nearest_folder} has no inodes left, {space.f_files} are used: delete small"
            " files (or folders of them), whatever their size"
        )
    if error_number == errno.EFBIG:
        return f"{path} would be larger than a file may be here: raise `ulimit -f`, or take another disk"
    if error_number == errno.EDQUOT:
        return f"your quota on the file system of {nearest_folder} is used up ({free}): see `quota -s`"
    if error_number == errno.EISDIR:
        return f"{path} is a folder where a file belongs: move it away"
    if error_number in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = os.strerror(error_number)
        return f"{path} can't be written by this user ({reason}): give another folder, or rights"
    if error_number == errno.ENOSPC or (error_number is None and not space.f_bavail):
        return f"there is no space left on the file system of {nearest_folder} ({free}): free some"
    if error_number == errno.ENOENT:
        return str(error)  # a missing folder has nothing to do with space
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    has_limit = largest != resource.RLIM_INFINITY
    limit = f", and a file may have {largest} bytes (raise `ulimit -f`)" if has_limit else ""
    return f"{error}; {free}{limit}"


@contextmanager
def write_atomically(
    path: Path, mode: Literal["w", "wb"] = "w", *, durable: bool = True, private: bool = False
) -> Iterator[IO[Any]]:
    """Opens a file under another name, and renames it to `path` at the end of the block; text is UTF-8.

    If the block raises, the earlier file stays.

    Args:
        durable: Whether the new file outlives a power cut. Without it, the file outlives only a killed
            process.
        private: Whether only the file's owner may read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_path(path)
    try:
        permissions = 0o600 if private else 0o666
        with open(
            partial,
            mode,
            encoding=None if mode == "wb" else "utf-8",
            opener=lambda name, flags: os.open(name, flags, permissions),
        ) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        sync_to_disk(path.parent)


def make_private_folder(path: Path, *, share: bool = False) -> None:
    """Makes a folder that only its owner may use or, with `share`, everyone whom the umask allows.

    The mode of an existing folder of this user is changed accordingly.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    permissions = 0o777 if share else 0o700
    try:
        path.mkdir(mode=permissions)
    except FileExistsError:
        status = path.stat()
        # The umask is read from /proc. os.umask can return it only by setting another umask, which would hold
        # for all threads.
        lines = Path("/proc/self/status").read_text().splitlines()
        umask = next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
        mode_before = stat.S_IMODE(status.st_mode)
        # The set-group-ID and sticky bits of a group's folder stay.
        special_bits = mode_before & ~0o777
        mode = special_bits | (permissions & ~umask)
        is_owner = status.st_uid == os.geteuid()  # only the owner may change the mode
        if is_owner and mode != mode_before:
            path.chmod(mode)


def make_new_private_folder(path: Path) -> None:
    """Makes a folder that only its owner may use. The caller has deleted what was at `path` before, as far as
    it could (`remove_folder`).

    Raises:
        ValueError: Something exists at `path` already. In a folder such as /dev/shm, any user may have put it
            there.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:
        raise ValueError(
            f"{path} exists already, belongs to user {path.lstat().st_uid}, and could not be deleted: have it"
            " deleted, or give the experiment another name (APP_EXPERIMENT_NAME)"
        ) from error


def remove_folder(path: Path) -> None:
    """Deletes a folder, or whatever another user has put in its place.

    Python's rmtree by itself would open the path, and wait for ever if the path is a named pipe.
    """
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if is_folder:
        shutil.rmtree(path, ignore_errors=True)
    else:
        # This user may not delete another user's file in /dev/shm or /tmp. Then the file stays, and
        # `make_new_private_folder` raises an error that names it.
        with contextlib.suppress(OSError):
            path.unlink()


def write_text(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        file.write(text)


def write_json(path: Path, value: Any, *, durable: bool = True, private: bool = False) -> None:
    with write_atomically(path, durable=durable, private=private) as file:
        file.write(json.dumps(value, indent=1) + "\n")


@contextmanager
def make_folder_atomically(path: Path) -> Iterator[Path]:
    """Makes a folder under another name, and renames it to `path` at the end of the block. An earlier folder
    at `path` is deleted then.

    If the block raises, the earlier folder stays.

    Yields:
        The folder under its other name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_path(path)
    try:
        # The name contains the number of this process. A killed process with the same number may have left
        # such a folder: containers often give the same numbers again.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        replace_folder(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(finished: Path, path: Path) -> None:
    """Renames a finished folder to `path`, and deletes the earlier one. If it can't be renamed, the earlier
    one stays at `path`."""
    # Synced before it is renamed. If it weren't, the new name might lead to files without content after a
    # power cut.
    for folder, _, names in os.walk(finished):
        for name in names:
            sync_to_disk(Path(folder, name))
        sync_to_disk(Path(folder))
    earlier_folder = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        if path.exists():
            path.rename(earlier_folder)
        try:
            finished.rename(path)
        except OSError:
            if earlier_folder.exists():
                earlier_folder.rename(path)
            raise
        sync_to_disk(path.parent)
    finally:
        shutil.rmtree(earlier_folder, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Writes a file's content, or the names in a folder, to the disk, so that it outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial_path(path: Path) -> Path:
    """Returns the name under which a file or folder is written until it is finished.

    The name is in the folder of `path`, since a file can be renamed only within its file system.
    """
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
