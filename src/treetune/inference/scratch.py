"""The folder of a server's sockets and temporary files: gone with the server, or with the next start."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "treetune-engine-"
_OWNER = "owner"
_SOCKET_BYTES = 107
"""Of a Unix socket's path, at most (Linux)."""
_NAME_BYTES = len(_PREFIX) + 8 + 2 + len("00000000-0000-0000-0000-000000000000")
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
    """A new one, which is this process's. Those of processes that were killed with all of theirs go."""
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"{_PREFIX}*"):
        owner = _read(left / _OWNER)
        if owner is not None and owner != _named(int(owner.split()[0])):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    (folder / _OWNER).write_text(_named(os.getpid()) or "")
    return folder


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


def _named(pid: int) -> str | None:
    """The process, told from all others that had or will have its number; None where there is none."""
    stat = _read(Path(f"/proc/{pid}/stat"))
    return None if stat is None else f"{pid} {stat.rpartition(')')[2].split()[19]}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text() or None
    except OSError:
        return None
