"""Promises of packing and unpacking wheels for a machine without a network:

* a pack is split into pieces below a limit, and joined to the same files; complete pieces aren't written
  again;
* damaged and missing pieces and manifests are named, and nothing is written;
* the pack has all requirements that the machine lacks, and never a package of its PyTorch.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts/gpu"))

import pack  # noqa: E402
import unpack  # noqa: E402

LIMIT = 16 * 1024


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Write two files of 20,000 and 30,000 bytes."""
    folder = tmp_path / "files"
    folder.mkdir()
    paths = [folder / "first.whl", folder / "second.whl"]
    for number, path in enumerate(paths, start=2):
        path.write_bytes(bytes(index * number % 251 for index in range(10_000 * number)))
    return paths


@pytest.fixture
def packed(tmp_path: Path, files: list[Path]) -> Path:
    """Pack these files, and return the folder of the pack."""
    folder = tmp_path / "packed"
    folder.mkdir()
    pack.write_pack(folder, "wheels", files, LIMIT)
    return folder


def unpack_into_folder(packed: Path, tmp_path: Path) -> int:
    return unpack.main(["--from", str(packed), "--into", str(tmp_path / "unpacked")])


def test_pieces_are_below_the_limit_and_give_the_same_files(
    packed: Path, files: list[Path], tmp_path: Path
) -> None:
    pieces = sorted(packed.glob("wheels.0*"))

    assert [piece.stat().st_size for piece in pieces[:-1]] == [LIMIT] * 3
    assert 0 < pieces[-1].stat().st_size <= LIMIT
    assert unpack_into_folder(packed, tmp_path) == 0
    for file in files:
        assert (tmp_path / "unpacked/wheels" / file.name).read_bytes() == file.read_bytes()


def test_complete_pieces_are_kept_and_missing_ones_are_written_again(packed: Path, files: list[Path]) -> None:
    complete_piece, missing_piece = packed / "wheels.000", packed / "wheels.001"
    content, written_at = missing_piece.read_bytes(), complete_piece.stat().st_mtime_ns

    pack.write_pack(packed, "wheels", files, LIMIT)
    assert complete_piece.stat().st_mtime_ns == written_at

    missing_piece.unlink()
    pack.write_pack(packed, "wheels", files, LIMIT)
    assert missing_piece.read_bytes() == content


def test_fewer_files_leave_no_piece_of_the_earlier_pack(packed: Path, files: list[Path]) -> None:
    pack.write_pack(packed, "wheels", files[:1], 2 * LIMIT)
    assert [path.name for path in sorted(packed.glob("wheels.0*"))] == ["wheels.000"]


def test_files_that_are_joined_already_need_no_pieces(packed: Path, tmp_path: Path) -> None:
    assert unpack_into_folder(packed, tmp_path) == 0
    for piece in packed.glob("wheels.0*"):
        piece.unlink()
    assert unpack_into_folder(packed, tmp_path) == 0

    (tmp_path / "unpacked/wheels/first.whl").write_bytes(b"damaged")
    assert unpack_into_folder(packed, tmp_path) == 1


def test_a_folder_that_unpack_did_not_make_is_not_replaced(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "unpacked/wheels/notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")

    assert unpack_into_folder(packed, tmp_path) == 1
    assert "was not made by unpack.py" in capsys.readouterr().err
    assert notes.read_text() == "mine"


def test_other_json_files_are_no_manifests(packed: Path, tmp_path: Path) -> None:
    (packed / "metrics.json").write_text("[1, 2]")
    assert unpack.packs_in(packed) == ["wheels"]


def test_wheels_for_another_python_are_not_installed(
    tmp_path: Path, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pack.write_pack(tmp_path, "wheels", files, LIMIT, "3.9")
    venv = tmp_path / "venv"

    code = unpack.main(["--from", str(tmp_path), "--into", str(tmp_path / "unpacked"), "--venv", str(venv)])

    assert code == 1 and not venv.exists()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    message = capsys.readouterr().err
    assert f"packed for Python 3.9, and this is Python {version}: pack them again with" in message


def truncate_piece(packed: Path) -> None:
    piece = packed / "wheels.001"
    piece.write_bytes(piece.read_bytes()[:100])


def replace_piece_by_another(packed: Path) -> None:
    (packed / "wheels.001").write_bytes((packed / "wheels.002").read_bytes())


def remove_piece(packed: Path) -> None:
    (packed / "wheels.001").unlink()


def flip_a_bit_of_piece(packed: Path) -> None:
    piece = packed / "wheels.001"
    content = bytearray(piece.read_bytes())
    content[5] ^= 1
    piece.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate_piece, "wheels.001 has 100 bytes instead of 16,384."),
        (replace_piece_by_another, "wheels.001 holds the bytes of wheels.002."),
        (remove_piece, "wheels.001 is missing (one of 4 pieces)."),
        (flip_a_bit_of_piece, "wheels.001 has the SHA-256 sum "),
    ],
)
def test_a_damaged_piece_is_named_and_nothing_is_written(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, message: str
) -> None:
    damage(packed)

    assert unpack_into_folder(packed, tmp_path) == 1
    printed = capsys.readouterr().err
    assert f"The pack wheels in {packed} is not whole: {message}" in printed
    assert "Copy these pieces again." in printed
    assert not (tmp_path / "unpacked/wheels").exists()


def test_all_damaged_pieces_are_named_at_once(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truncate_piece(packed)
    (packed / "wheels.003").unlink()
    assert unpack_into_folder(packed, tmp_path) == 1
    printed = capsys.readouterr().err
    assert "wheels.001 has 100 bytes" in printed and "wheels.003 is missing" in printed


def test_a_missing_or_broken_manifest_is_named(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = packed / "wheels.json"
    manifest.write_text("{")
    assert unpack_into_folder(packed, tmp_path) == 1
    assert f"{manifest} is not a manifest of scripts/gpu/pack.sh" in capsys.readouterr().err

    manifest.unlink()
    assert unpack.main(["--from", str(packed), "--what", "wheels", "--into", str(tmp_path)]) == 1
    assert f"{manifest} is missing" in capsys.readouterr().err


def wheel(name: str, *requirements: str) -> pack.Wheel:
    return pack.Wheel(Path(f"{name}.whl"), name, tuple(map(Requirement, requirements)))


def test_requirements_that_the_machine_lacks_are_packed_and_nothing_else() -> None:
    wheels = {
        "vllm": wheel("vllm", "numba==0.65.0", "numpy", "torch==2.13.0", 'av; extra == "audio"'),
        "numba": wheel("numba", "numpy<2.5"),
        "numpy": wheel("numpy"),
        "tqdm": wheel("tqdm"),
        "av": wheel("av"),
    }
    requirements = [Requirement("vllm"), Requirement("tqdm>=4")]

    def names(installed: dict[str, str]) -> list[str]:
        versions = {name: Version(version) for name, version in installed.items()}
        return [chosen.name for chosen in pack.choose_wheels(wheels, requirements, versions, "3.12")]

    assert names({}) == ["numba", "numpy", "tqdm", "vllm"]
    assert names({"numpy": "2.3.5", "tqdm": "4.70"}) == ["numba", "vllm"]
    assert names({"numpy": "2.5.2", "tqdm": "3.0"}) == ["numba", "numpy", "tqdm", "vllm"]


def test_extras_of_a_requirement_are_packed() -> None:
    wheels = {
        "vllm": wheel("vllm", "fastapi[standard]>=0.1"),
        "fastapi": wheel("fastapi", 'uvicorn[standard]; extra == "standard"', 'orjson; extra == "all"'),
        "uvicorn": wheel("uvicorn", "h11", 'uvloop; extra == "standard" and sys_platform != "win32"'),
        "h11": wheel("h11"),
        "uvloop": wheel("uvloop"),
        "orjson": wheel("orjson"),
    }
    chosen = pack.choose_wheels(wheels, [Requirement("vllm"), Requirement("fastapi")], {}, "3.12")
    assert [wheel.name for wheel in chosen] == ["fastapi", "h11", "uvicorn", "uvloop", "vllm"]


def test_packages_of_the_machines_pytorch_are_never_packed() -> None:
    pins = pack.pins_to_download()
    assert {"vllm", "trl", "deepspeed", "transformers", "liger-kernel"} <= set(pins)
    refused = ("torch", "triton", "nvidia-", "cuda-", "flashinfer", "tilelang")
    assert [name for name in pins if name.startswith(refused)] == []
    assert all("--hash=sha256:" in text and not text.endswith("\\\n") for text in pins.values())


def test_a_stripped_wheel_has_no_unused_kernels_and_pip_installs_it(tmp_path: Path) -> None:
    path = tmp_path / "vllm-1.0-py3-none-any.whl"
    contents = {
        "vllm/__init__.py": "",
        "vllm/_C.abi3.so": "used",
        "vllm/_moe_C.abi3.so": "unused",
        "vllm-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 1.0\n",
        "vllm-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*contents, "vllm-1.0.dist-info/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**contents, "vllm-1.0.dist-info/RECORD": record}.items():
            archive.writestr(name, content)

    stripped = pack.strip_wheel(path, tmp_path / "stripped")

    with zipfile.ZipFile(stripped) as archive:
        names = set(archive.namelist())
        listed = archive.read("vllm-1.0.dist-info/RECORD").decode()
    assert names == set(contents) - {"vllm/_moe_C.abi3.so"} | {"vllm-1.0.dist-info/RECORD"}
    assert "_moe_C" not in listed and "vllm/_C.abi3.so" in listed
    target = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(target),
    ]
    subprocess.run([*pip, str(stripped)], check=True)
    assert (target / "vllm/_C.abi3.so").read_text() == "used"


@pytest.mark.parametrize(("text", "count"), [("64M", 64 * 2**20), ("100", 100), ("2G", 2**31)])
def test_sizes_have_units(text: str, count: int) -> None:
    assert pack.bytes_of(text) == count


@pytest.mark.parametrize("text", ["64MB", "0M", "-1", "M"])
def test_other_sizes_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pack.main([str(tmp_path), f"--limit={text}"])
    assert "is not a size: write 64M, for example" in capsys.readouterr().err
