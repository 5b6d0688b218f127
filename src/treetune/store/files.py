"""Files and folders that a reader sees whole or not at all: written under another name, synced, renamed."""

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
    """Returns the cause of a failure to write below `path`, and the remedy; the error's own message if they
    aren't known."""
    # Libraries have messages of their own for it, and some have none.
    match = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
    name = getattr(error, "filename", None)
    path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else path
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    space = os.statvfs(there)
    free = f"{space.f_bavail * space.f_frsize / 2**20:.0f} MiB are free there"
    for step in (path, *path.absolute().parents):
        if step.is_symlink() and not step.exists():
            return f"{step} is a link to {os.readlink(step)}, which isn't there: make it, or delete the link"
        if step != path and step.is_file():
            return f"{step} is a file where a folder belongs: move it away"
    if number in (errno.ENOSPC, None) and space.f_files and not space.f_favail:
        return (
            f"the file system of {there} has no inodes left, {space.f_files} are used: delete small files"
            " (or folders of them), whatever their size"
        )
    if number == errno.EFBIG:
        return f"{path} would be larger than a file may be here: raise `ulimit -f`, or take another disk"
    if number == errno.EDQUOT:
        return f"your quota on the file system of {there} is used up ({free}): see `quota -s`"
    if number == errno.EISDIR:
        return f"{path} is a folder where a file belongs: move it away"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path} can't be written by this user ({os.strerror(number)}): give another folder, or rights"
    if number == errno.ENOSPC or (number is None and not space.f_bavail):
        return f"there is no room left on the file system of {there} ({free}): make room"
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limit = f", and a file may have {largest} bytes (raise `ulimit -f`)" if largest >= 0 else ""
    return f"{error}" if number == errno.ENOENT else f"{error}; {free}{limit}"


@contextmanager
def whole_file(
    path: Path, mode: Literal["w", "wb"] = "w", *, durable: bool = True, private: bool = False
) -> Iterator[IO[Any]]:
    """Gives a file to write into that takes the name `path` at the end of the block; text is UTF-8.

    An error in the block leaves the earlier file. With `durable`, the new one outlasts a power cut; without,
    a killed process only. Nobody else can read a `private` one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(path)
    try:
        mask = 0o600 if private else 0o666
        with open(
            beside,
            mode,
            encoding=None if mode == "wb" else "utf-8",
            opener=lambda name, flags: os.open(name, flags, mask),
        ) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def own_folder(path: Path, *, share: bool = False) -> None:
    """Makes a folder that nobody but its owner can look into; with `share`, whoever the umask lets. The mode
    of a folder that is there already, and is this user's, is changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    allowed = 0o777 if share else 0o700
    try:
        path.mkdir(mode=allowed)
    except FileExistsError:
        now = path.stat()
        # Linux tells the umask here: os.umask would have to set it, for all threads.
        lines = Path("/proc/self/status").read_text().splitlines()
        umask = next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
        # A group's folder keeps its set-group-ID and sticky bits.
        mode = stat.S_IMODE(now.st_mode) & ~0o777 | allowed & ~umask
        if now.st_uid == os.geteuid() and stat.S_IMODE(now.st_mode) != mode:
            path.chmod(mode)


def new_own_folder(path: Path) -> None:
    """Makes a folder that nobody but its owner can look into. Raises ValueError if something is there
    already: anyone may have put it into a folder such as /dev/shm."""
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:
        raise ValueError(
            f"{path} is there already, of user {path.lstat().st_uid}, and could not be deleted: have it"
            " deleted, or give the experiment another name (APP_EXPERIMENT_NAME)"
        ) from error


def remove_folder(path: Path) -> None:
    """Deletes what is at a path, be it a folder or something that somebody put in its place.

    Python's rmtree opens the path first, and waits for ever for the other end of a named pipe.
    """
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if is_folder:
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def write_text(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text)


def write_json(path: Path, value: Any, *, durable: bool = True, private: bool = False) -> None:
    with whole_file(path, durable=durable, private=private) as file:
        file.write(json.dumps(value, indent=1) + "\n")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Gives a folder to write into that takes the place of `path` at the end of the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(path)
    try:
        beside.mkdir()
        yield beside
        replace_folder(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def replace_folder(beside: Path, path: Path) -> None:
    """Renames a finished folder to `path`, and then deletes the earlier one."""
    # A rename may reach the disk before the content.
    for folder, _, names in os.walk(beside):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
    replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        if path.exists():
            path.rename(replaced)
        beside.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Makes a file's content, or the names in a folder, last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
