"""The style checks, as pre-commit runs them, on the whole tree."""

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


def run(tool: str, *arguments: str) -> None:
    """Raises with the tool's own words."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
    done = subprocess.run(
        [TOOLS / tool, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{tool} {' '.join(arguments)}\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", "--no-cache", ".")


def test_every_file_is_formatted() -> None:
    run("ruff", "format", "--check", "--diff", "--no-cache", ".")


def test_mypy_finds_nothing() -> None:
    run("mypy")


def test_rooms_import_only_what_lies_below_them() -> None:
    run("lint-imports", "--no-cache")


@pytest.mark.parametrize("path", SHELL, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_parse_and_can_be_started(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK), f"chmod +x {path}"


def test_the_shell_scripts_are_known() -> None:
    names = {str(path.relative_to(ROOT)) for path in SHELL}
    assert {"run.sh", "scripts/setup.sh", "scripts/test.sh", ".ci/run"} <= names


FOREIGN = {
    # A letter in brackets is that letter: so the pattern doesn't name what nobody shall name.
    "a package registry's host": re.compile(
        r"(?:p[y]pi|p[y]thonhosted)\.(?:org|io|python)|registry\.n[p]mjs|crate[s]\.io"
    ),
    "a place on somebody's machine": re.compile(r"(?<![\w.$}])/(?:home|work|root|Users|mnt|opt)/\w"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_no_tracked_file_names(what: str) -> None:
    found = []
    for path in TRACKED:
        if path == Path(__file__) or path.suffix in {".png", ".arrow", ".safetensors", ".woff2"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if FOREIGN[what].search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, f"{what}:\n" + "\n".join(found)


def test_the_package_and_scripts_import_neither_tests_nor_benchmarks() -> None:
    """What tests and benchmarks both need is tests.support."""
    wrong = []
    outside = {"scripts", "tests", "benchmarks"}
    for folder, others in (("scripts", outside), ("tests", {"scripts"}), ("src", outside)):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                wrong += [f"{path}: {name}" for name in names if name.partition(".")[0] in others]
    assert wrong == []
