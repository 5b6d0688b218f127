"""Promises of an installation without the extras: every part is known, and a run ends with the same bits."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.many_runs import run_each, run_each_with

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_paths()["purelib"])
SMALL = """{
  directory: '%s',
  engines+: { policy: { type: 'in_process' } },
  iterations: 1,
  checkpoints: { every: 1 },
  evaluation+: { every: null, sets: [] },
  trainer+: { schedule+: { may_outlast_training: true } },
}"""
RUNS = {
    "sft": "{ problems_per_iteration: 128 }",
    "vineppo": "{ problems_per_iteration: 4,"
    " rollout+: { samples: 4, max_tokens: 40, unfinished_reward: 1.0 } }",
}


def required_distributions() -> set[str]:
    """Name all distributions that `pip install 'treetune[cpu]'` installs, without those of other extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["training"], *extras["cpu"]]
    return with_requirements([Requirement(requirement).name for requirement in requirements])


def with_requirements(names: list[str]) -> set[str]:
    """Name these installed distributions, and all that they require in turn."""
    needed: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name in needed or name == "treetune":
            continue
        try:
            installed = distribution(name)
        except ModuleNotFoundError:  # an optional requirement, or one of another platform
            continue
        needed.add(name)
        requirements = map(Requirement, installed.requires or ())
        names += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return needed


def top_files(installed: Distribution) -> set[str]:
    """Name the files and folders of site-packages that belong to a distribution."""
    tops = {file.parts[0] for file in installed.files or ()}
    return {top for top in tops if top not in {"..", "__pycache__"} and (SITE / top).exists()}


def bare_python(folder: Path, distributions: set[str]) -> tuple[Path, Path]:
    """Make a Python that has only these distributions of ours; return it and its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    for name in distributions:
        for top in top_files(distribution(name)):
            if not (site / top).exists():
                (site / top).symlink_to(SITE / top)
    return folder / "bin/python", site


@pytest.fixture(scope="module")
def python_without_extras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the sources beside a Python that has only the required libraries, and return this Python."""
    folder = tmp_path_factory.mktemp("core")
    python, _ = bare_python(folder / "env", required_distributions())
    shutil.copytree(
        ROOT / "src/treetune", folder / "src/treetune", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "configs").symlink_to(ROOT / "configs")
    return python


def commands_of_runs(folder: Path) -> list[list[str]]:
    """Return the commands of small runs of the quickstart."""
    commands = []
    for name, small in RUNS.items():
        overrides = ["--override", SMALL % folder, "--override", small]
        commands.append(["--configs", f"configs/quickstart/{name}.jsonnet", *overrides, "run_iteration_loop"])
    return commands


def digests_of_weights(folder: Path) -> dict[str, str]:
    """Return the digests of the weights that the runs have ended with."""
    digests = {}
    for name in RUNS:
        weights = folder / "quickstart" / name / "checkpoints/0001/policy/model.safetensors"
        digests[name] = hashlib.sha256(weights.read_bytes()).hexdigest()
    return digests


@pytest.mark.slow
def test_without_the_extras_the_quickstart_trains_to_the_same_bits(
    python_without_extras: Path, tmp_path: Path
) -> None:
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    run_each_with(python_without_extras, python_without_extras.parents[2] / "src", commands_of_runs(alone))
    run_each(*commands_of_runs(whole))
    assert digests_of_weights(alone) == digests_of_weights(whole)


def test_without_the_extras_all_parts_are_known(python_without_extras: Path) -> None:
    main = ("src/treetune/main.py", "list_parts")
    without_extras = subprocess.run(
        [python_without_extras, python_without_extras.parents[2] / main[0], main[1]],
        capture_output=True,
        text=True,
        check=True,
    )
    with_extras = subprocess.run(
        [sys.executable, ROOT / main[0], main[1]], capture_output=True, text=True, check=True
    )
    assert without_extras.stdout == with_extras.stdout
    assert "multi_turn" in without_extras.stdout
    missing = subprocess.run(
        [python_without_extras, "-c", "import reasoning_gym"], capture_output=True, text=True
    )
    assert "ModuleNotFoundError" in missing.stderr, "the comparison says nothing"
