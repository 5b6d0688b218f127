"""Promises of docs/dev/reading.md: the files and names on the page exist, and it names every file whose
functions run in an iteration of VinePPO.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import MODULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/dev/reading.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


CORE_PATH = re.findall(r"^\d+\. `(src/[\w/.]+\.py)`", section("The core path"), re.MULTILINE)
OTHER_FILES = re.findall(r"`(src/[\w/.]+)`", section("Other files that an iteration runs"))
NAMES = re.findall(r"^\d+\. `([\w.]+)`, `([\w/.]+\.py)`", section("Call order"), re.MULTILINE)

TRACER = """
import importlib, inspect, json, sys, threading
for module in sys.argv[3].split(","):  # slower under a profile function: 9 s in place of 5
    importlib.import_module(module)
met = set()
def note(frame, event, _):
    of_a_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # and not the body of a class or a module
    if event == "call" and of_a_function and frame.f_code.co_filename.startswith(sys.argv[1]):
        met.add((frame.f_code.co_filename, frame.f_code.co_qualname))
from treetune.main import main
threading.setprofile(note)
sys.setprofile(note)
code = main(sys.argv[4:])
sys.setprofile(None)
json.dump(sorted(met), open(sys.argv[2], "w"))
sys.exit(code)
"""


def test_the_files_of_the_reading_order_exist() -> None:
    assert CORE_PATH
    missing = [path for path in CORE_PATH if not (ROOT / path).is_file()]
    assert not missing


def test_the_names_of_the_call_order_are_defined_in_the_files_that_the_page_says() -> None:
    assert NAMES
    for name, file in NAMES:
        nodes: list[ast.AST] = list(ast.parse((ROOT / "src/treetune" / file).read_text()).body)
        for step in name.split("."):
            definitions = [node for node in nodes if getattr(node, "name", None) == step]
            assert definitions, f"{file} has no {name}"
            nodes = list(getattr(definitions[0], "body", []))


@pytest.mark.slow
@pytest.mark.server
def test_an_iteration_runs_no_file_that_the_page_leaves_out(tmp_path: Path) -> None:
    """A process with a real server records each call of the package's functions, from `main` on."""
    program, met = tmp_path / "tracer.py", tmp_path / "met.json"
    program.write_text(TRACER)
    small = f"{{ directory: '{tmp_path}', iterations: 1 }}"
    libraries = ",".join(module for module in MODULES if not module.startswith("treetune"))
    command = [sys.executable, program, str(ROOT / "src"), met, libraries]
    command += ["--configs", "tests/support/small.jsonnet"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--override", small, "run_iteration_loop"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    files = {str(Path(file).relative_to(ROOT)) for file, _ in json.loads(met.read_text())}
    unknown = {file for file in files if not file.startswith((*CORE_PATH, *OTHER_FILES))}
    assert not unknown
    # Every file of the core path runs.
    assert not set(CORE_PATH) - files
