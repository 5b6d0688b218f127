"""Checks, joins and installs what scripts/gpu/pack.sh packed, on a machine without a network.

    python3 unpack.py                              # every pack of this script's folder, into unpacked/
    python3 unpack.py --what wheels --venv .venv   # the wheels alone, and install them into .venv

It needs Python 3.11 or newer and pip, and nothing else. A second call keeps what the first one made.

A pack, such as `wheels`, is a manifest and its pieces:

    wheels.json    the names, sizes and SHA-256 sums of the pieces, and of the files in them
    wheels.000     the pieces in order, joined, are a tar archive of these files
    wheels.001
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BLOCK = 2**20  # bytes that are read at a time
MARK = ".unpacked"  # the file in a folder that unpack.py has made, and may replace


@dataclass(frozen=True)
class Entry:
    """A piece, or a file of a pack, such as ``Entry("wheels.000", 67108864, "9f86d0…")``."""

    name: str
    size: int
    sha256: str

    @staticmethod
    def of(path: Path) -> Entry:
        """Describes a file that exists."""
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Entry(path.name, path.stat().st_size, sha256)


@dataclass(frozen=True)
class Manifest:
    """The pieces of a pack, and the files in them."""

    pack: str
    limit: int
    """Most bytes of a piece."""
    pieces: tuple[Entry, ...]
    files: tuple[Entry, ...]
    python: str | None = None
    """The version of Python that wheels were packed for, such as ``3.12``; null for other files."""

    @staticmethod
    def path(folder: Path, pack: str) -> Path:
        return folder / f"{pack}.json"

    @staticmethod
    def read(folder: Path, pack: str) -> Manifest:
        """Raises ValueError if the pack's manifest is missing or cannot be read."""
        path = Manifest.path(folder, pack)
        if not path.is_file():
            raise ValueError(f"{path} is missing. It lists the pieces of the pack {pack}: copy it too.")
        try:
            content = json.loads(path.read_text())
            pieces = tuple(Entry(**piece) for piece in content["pieces"])
            files = tuple(Entry(**file) for file in content["files"])
            return Manifest(content["pack"], content["limit"], pieces, files, content["python"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a manifest of scripts/gpu/pack.sh ({error}): copy it again"
            ) from error

    def write(self, folder: Path) -> None:
        path = Manifest.path(folder, self.pack)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def find_fault(folder: Path, piece: Entry, pieces: Sequence[Entry]) -> str | None:
    """Returns what is wrong with a piece in `folder`; None if it is the one that the manifest describes."""
    path = folder / piece.name
    if not path.is_file():
        return f"{piece.name} is missing (one of {len(pieces)} pieces)"
    seen = Entry.of(path)
    if seen.sha256 == piece.sha256:
        return None
    for other in pieces:
        if other.sha256 == seen.sha256:
            return f"{piece.name} holds the bytes of {other.name}"
    if seen.size != piece.size:
        return f"{piece.name} has {seen.size:,} bytes instead of {piece.size:,}"
    return f"{piece.name} has the SHA-256 sum {seen.sha256[:12]}… instead of {piece.sha256[:12]}…"


def check_pieces(folder: Path, manifest: Manifest) -> None:
    """Raises ValueError that names each piece which is missing or differs from the manifest."""
    faults = [find_fault(folder, piece, manifest.pieces) for piece in manifest.pieces]
    messages = [fault for fault in faults if fault is not None]
    if messages:
        listed = "; ".join(messages)
        raise ValueError(
            f"The pack {manifest.pack} in {folder} is not whole: {listed}. Copy these pieces again."
        )


class JoinedPieces(io.RawIOBase):
    """Reads pieces one after the other, as one file, without a copy on disk."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self._paths = list(paths)
        self._piece: io.BufferedReader | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._piece is not None or self._paths:
            if self._piece is None:
                self._piece = self._paths.pop(0).open("rb")
            count = self._piece.readinto(buffer)
            if count:
                return count
            self._piece.close()
            self._piece = None
        return 0


def holds_files(folder: Path, files: Sequence[Entry]) -> bool:
    """Tells whether `folder` has all the files, with the right contents."""
    paths = [(folder / file.name, file) for file in files]
    sizes_agree = all(path.is_file() and path.stat().st_size == file.size for path, file in paths)
    return sizes_agree and all(Entry.of(path) == file for path, file in paths)


def join_pack(folder: Path, pack: str, target: Path) -> Manifest:
    """Writes the files of a pack to `target`/<pack>, and keeps them if they are there already.

    Raises:
        ValueError: if the manifest or a piece is missing or damaged.
    """
    manifest = Manifest.read(folder, pack)
    files_folder = target / pack
    if holds_files(files_folder, manifest.files):
        print(f"{pack}: {files_folder} has all {len(manifest.files)} files already")
        return manifest
    check_pieces(folder, manifest)

    # The folder appears under its name when it is whole.
    unfinished = target / f".{pack}.unfinished"
    if files_folder.exists() and not (files_folder / MARK).is_file():
        raise ValueError(
            f"{files_folder} exists and was not made by unpack.py: choose another folder with --into"
        )
    for leftover in (unfinished, files_folder):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / MARK).touch()
    joined = io.BufferedReader(JoinedPieces([folder / piece.name for piece in manifest.pieces]), BLOCK)
    with joined, tarfile.open(fileobj=joined, mode="r|") as archive:
        # Python has filters since 3.11.4. The pieces have the hashes of what pack.py wrote in any case.
        options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(unfinished, **options)
    if not holds_files(unfinished, manifest.files):
        raise ValueError(
            f"The files of {pack} differ from those of {Manifest.path(folder, pack)}: pack them again."
        )
    unfinished.rename(files_folder)
    print(f"{pack}: {len(manifest.files)} files in {files_folder}")
    return manifest


def install_wheels(wheels: Path, manifest: Manifest, venv: Path) -> None:
    """Installs the wheels into a virtual environment, which is made if it does not exist.

    The environment also sees the packages of the Python that runs this script, such as its PyTorch. A package
    that is in both is taken from the environment.

    Raises:
        ValueError: if the wheels are for another version of Python, or pip does not install them.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest.python != version:
        raise ValueError(
            f"The wheels were packed for Python {manifest.python}, and this is Python {version}: pack them"
            f" again with --python {version}, or run unpack.py with Python {manifest.python}."
        )
    record = venv / "unpacked.json"
    content = json.dumps([asdict(file) for file in manifest.files])
    if record.is_file() and record.read_text() == content:
        print(f"wheels: {venv} has them already")
        return
    python = venv / "bin/python"
    if not python.exists():
        # Without pip: on some systems venv can't install it, and the pip of this Python can install into the
        # environment.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    # Not `--system-site-packages`: if this Python is itself in a virtual environment, that would show the
    # packages of its base Python.
    packages = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(packages, "packages_of_this_machine.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    files = sorted(str(wheels / file.name) for file in manifest.files if file.name.endswith(".whl"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    # The pack is complete (--no-deps). An interrupted installation is repeated as a whole
    # (--force-reinstall). Without bytecode and cache it is faster and smaller.
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--force-reinstall",
    ]
    done = subprocess.run([*pip, *options, *files], check=False, env={**os.environ, "PIP_NO_CACHE_DIR": "1"})
    if done.returncode != 0:
        raise ValueError(f"pip did not install the wheels into {venv}; its message is above")
    record.write_text(content)
    print(f"wheels: {len(files)} packages installed into {venv}")


def packs_in(folder: Path) -> list[str]:
    """Returns the names of the packs whose manifests are in `folder`. Other JSON files are left out."""
    packs = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError:
            packs.append(path.stem)  # a damaged manifest, perhaps: `Manifest.read` reports it
            continue
        if isinstance(content, dict) and content.get("pack") == path.stem:
            packs.append(path.stem)
    return packs


def main(arguments: Sequence[str] | None = None) -> int:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", type=Path, default=here, dest="folder", help="the folder of the pieces")
    parser.add_argument("--what", nargs="+", metavar="PACK", help="packs, such as wheels; default: all")
    parser.add_argument("--into", type=Path, default=Path("unpacked"), help="where the files are written")
    parser.add_argument(
        "--venv", type=Path, help="the virtual environment that the wheels are installed into"
    )
    options = parser.parse_args(arguments)

    packs = options.what or packs_in(options.folder)
    if not packs:
        parser.error(f"{options.folder} has no manifest, such as wheels.json")
    try:
        for pack in packs:
            manifest = join_pack(options.folder, pack, options.into)
            if pack == "wheels" and options.venv is not None:
                install_wheels(options.into / pack, manifest, options.venv)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"unpack.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
