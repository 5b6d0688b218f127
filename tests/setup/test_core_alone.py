"""Without the optional libraries, those of the extras, every part is known and a run trains the same bits."""

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
    """Names of what `pip install 'treetune[cpu]'` installs: what pyproject.toml requires, without the extras
    of graders, tools and documents, and what that requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["training"], *extras["cpu"]]
    return with_requirements([Requirement(requirement).name for requirement in requirements])


def with_requirements(todo: list[str]) -> set[str]:
    """Names of installed distributions, and of what they require."""
    needed: set[str] = set()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in needed or name == "treetune":
            continue
        try:
            found = distribution(name)
        except ModuleNotFoundError:  # an optional requirement, or one of another platform
            continue
        needed.add(name)
        requirements = map(Requirement, found.requires or ())
        todo += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return needed


def top_files(one: Distribution) -> set[str]:
    """The names in site-packages that a distribution has put there."""
    tops = {file.parts[0] for file in one.files or ()}
    return {top for top in tops if top not in {"..", "__pycache__"} and (SITE / top).exists()}


def bare_python(folder: Path, distributions: set[str]) -> tuple[Path, Path]:
    """Returns a Python that knows these distributions of ours and nothing else, and its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    for name in distributions:
        for top in top_files(distribution(name)):
            if not (site / top).exists():
                (site / top).symlink_to(SITE / top)
    return folder / "bin/python", site


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, and a Python that knows the required libraries and nothing else."""
    folder = tmp_path_factory.mktemp("core")
    python, _ = bare_python(folder / "env", required_distributions())
    shutil.copytree(
        ROOT / "src/treetune", folder / "src/treetune", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "configs").symlink_to(ROOT / "configs")
    return python


def commands(work: Path) -> list[list[str]]:
    """Returns the commands of small runs of the quickstart."""
    overrides = {name: ["--override", SMALL % work, "--override", small] for name, small in RUNS.items()}
    return [
        ["--configs", f"configs/quickstart/{name}.jsonnet", *changes, "run_iteration_loop"]
        for name, changes in overrides.items()
    ]


def digests_of_weights(work: Path) -> dict[str, str]:
    """Returns the digests of the weights that the runs have ended with."""
    weights = {
        name: work / "quickstart" / name / "checkpoints/0001/policy/model.safetensors" for name in RUNS
    }
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in weights.items()}


@pytest.mark.slow
def test_without_the_extras_the_quickstart_trains_to_the_same_bits(bare: Path, tmp_path: Path) -> None:
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    run_each_with(bare, bare.parents[2] / "src", commands(alone))
    run_each(*commands(whole))
    assert digests_of_weights(alone) == digests_of_weights(whole)


def test_without_the_extras_all_parts_are_known(bare: Path) -> None:
    main = ("src/treetune/main.py", "list_parts")
    alone = subprocess.run(
        [bare, bare.parents[2] / main[0], main[1]], capture_output=True, text=True, check=True
    )
    whole = subprocess.run(
        [sys.executable, ROOT / main[0], main[1]], capture_output=True, text=True, check=True
    )
    assert alone.stdout == whole.stdout
    assert "multi_turn" in alone.stdout
    missing = subprocess.run([bare, "-c", "import reasoning_gym"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in missing.stderr, "the comparison says nothing"
