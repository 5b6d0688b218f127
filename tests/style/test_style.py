"""Promises of the whole tree: ruff, mypy and the contracts of imports find nothing, shell scripts parse, no
file names a package registry or a path of a machine, and the package imports neither tests nor benchmarks.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent

TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    if name and (ROOT / name).is_file()
]
SHELL = [path for path in TRACKED if path.read_bytes()[:64].splitlines()[:1] == [b"#!/usr/bin/env bash"]]


def run_tool(tool: str, *arguments: str) -> None:
    """Run a tool, and fail with its output if it finds something."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
    done = subprocess.run(
        [TOOLS / tool, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{tool} {' '.join(arguments)}\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing() -> None:
    run_tool("ruff", "check", "--no-cache", ".")


def test_every_file_is_formatted() -> None:
    run_tool("ruff", "format", "--check", "--diff", "--no-cache", ".")


def test_mypy_finds_nothing() -> None:
    run_tool("mypy")


def test_packages_import_only_packages_below_them() -> None:
    run_tool("lint-imports", "--no-cache")


@pytest.mark.parametrize("path", SHELL, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_parse_and_can_be_started(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK), f"chmod +x {path}"


def test_the_list_of_shell_scripts_has_the_main_ones() -> None:
    names = {str(path.relative_to(ROOT)) for path in SHELL}
    assert {"run.sh", "scripts/setup.sh", "scripts/test.sh", ".ci/run"} <= names


FOREIGN = {
    # A letter in brackets is the letter itself, so that these lines don't match their own patterns.
    "a package registry's host": re.compile(
        r"(?:p[y]pi|p[y]thonhosted)\.(?:org|io|python)|registry\.n[p]mjs|crate[s]\.io"
    ),
    "a place on somebody's machine": re.compile(r"(?<![\w.$}])/(?:home|work|root|Users|mnt|opt)/\w"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_no_tracked_file_names_a_registry_or_a_path_of_a_machine(kind: str) -> None:
    lines = []
    for path in TRACKED:
        if path == Path(__file__) or path.suffix in {".png", ".arrow", ".safetensors", ".woff2"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if FOREIGN[kind].search(line):
                lines.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not lines, f"{kind}:\n" + "\n".join(lines)


def test_the_package_and_scripts_import_neither_tests_nor_benchmarks() -> None:
    """Code that tests and benchmarks share is in tests.support."""
    wrong = []
    outside = {"scripts", "tests", "benchmarks"}
    for folder, forbidden in (("scripts", outside), ("tests", {"scripts"}), ("src", outside)):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                wrong += [f"{path}: {name}" for name in names if name.partition(".")[0] in forbidden]
    assert wrong == []
