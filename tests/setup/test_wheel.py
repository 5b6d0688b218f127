"""Promises of the wheel: it has code, configurations and examples, works with the packages that it declares
(without torch and vLLM), and its declarations admit the versions of the lock files.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.setup.test_without_extras import bare_python, with_requirements
from tests.style.test_lock_files import pins

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = [canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]]
COMMANDS = (
    "--version",
    "list_parts",
    "check --config-only --configs configs/quickstart/vineppo.jsonnet",
    "--configs configs/quickstart/grpo.jsonnet print_config",
    "--configs configs/tables/quickstart_methods.jsonnet check_config",
    "--configs configs/polIter_rho1bSft2_vineppo_MATH.jsonnet plan --gpus 4 --memory 80",
    "--configs examples/own_parts/rank.jsonnet check --config-only",
    "schema",
    "new --name first --data addition_chain --model tiny --method vineppo --hardware in_process",
    "new --name mine --data rows.csv --model tiny --method grpo --hardware in_process",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the files in git, since setuptools leaves files where it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    subprocess.run(["tar", "cf", source / "all.tar", "-T", "-"], cwd=ROOT, input=names.stdout, check=True)
    subprocess.run(["tar", "xf", "all.tar"], cwd=source, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", target, source], check=True, capture_output=True)
    return next(target.glob("*.whl"))


def test_the_wheel_has_code_configurations_and_examples_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    configurations = [path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*sonnet")]
    assert {f"treetune/{name}" for name in configurations} <= {*names}
    pages = [
        path for kind in ("templates", "assets") for path in (ROOT / "src/treetune/view" / kind).rglob("*")
    ]
    assert {path.relative_to(ROOT / "src").as_posix() for path in pages if path.is_file()} <= {*names}
    assert "treetune/examples/one_file/vineppo.py" in names
    strange = [name for name in names if not re.match(r"treetune(_[a-z]+)?(/|-[\d.]+\.dist-info/)", name)]
    assert not strange and not [name for name in names if "/tests/" in name or "__pycache__" in name]


def run_treetune(python: Path, arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "treetune.main", *arguments.split()]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_wheel_works_with_the_packages_that_it_declares_and_nothing_else(
    wheel: Path, tmp_path: Path
) -> None:
    python, site = bare_python(tmp_path / "env", with_requirements(list(BASE)))
    assert not (site / "torch").exists() and not (site / "vllm").exists()
    zipfile.ZipFile(wheel).extractall(site)
    rows = "".join(f"{number} + 1?,{number + 1}\n" for number in range(20))
    (tmp_path / "rows.csv").write_text("question,answer\n" + rows)
    for command in COMMANDS:
        done = run_treetune(python, command, tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    done = run_treetune(python, "--configs configs/quickstart/sft.jsonnet run_iteration_loop", tmp_path)
    assert done.returncode == 2 and "pip install 'treetune[cpu]'" in done.stderr


@pytest.mark.parametrize("lock", ["requirements.txt", "requirements-cpu.txt"])
def test_the_declared_requirements_admit_the_versions_of_the_lock_files(lock: str) -> None:
    extras = PROJECT["optional-dependencies"]
    extra_of_device = extras["cpu" if "cpu" in lock else "cuda"]
    pinned = pins(lock) | pins("requirements-extras.txt") | pins("requirements-docs.txt")
    declared = (
        PROJECT["dependencies"] + extra_of_device + extras["training"] + extras["graders"] + extras["docs"]
    )
    for requirement in map(Requirement, declared):
        if requirement.name != "treetune":
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), requirement
