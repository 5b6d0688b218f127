"""What a model wrote is text to every grader: nothing of it is executed, unpickled or filled in outside the
sandbox, and no inline grader hangs on it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.domains.code_grading import needs_sandbox

ROOT = Path(__file__).parents[3]
INSIDE = ROOT / "src/treetune/domains/sandbox/inside"

RUNS_TEXT = {"eval", "exec", "compile", "sympify", "parse_expr", "lambdify", "unsafe_load", "full_load"}
UNPICKLES = {("pickle", "loads"), ("pickle", "load"), ("marshal", "loads"), ("marshal", "load")}

ALLOWED = {
    ("src/treetune/processes/pool.py", "pickle.loads"): "what our own worker wrote",
    ("src/treetune/processes/worker.py", "pickle.loads"): "what the run wrote",
    ("src/treetune/tasks/graders/conformance.py", "pickle.loads"): "the grader itself",
    ("src/treetune/domains/environments/worlds.py", "pickle.loads"): "an environment's state, made by us",
}
"""Places outside the sandbox that turn bytes into objects, and whose bytes they are."""


def test_no_module_outside_the_sandbox_runs_text() -> None:
    places = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        if not path.is_relative_to(INSIDE):
            calls = _calls_that_run(ast.parse(path.read_text(encoding="utf-8")))
            places |= {(str(path.relative_to(ROOT)), call) for call in calls}
    assert places == ALLOWED.keys()


def _calls_that_run(tree: ast.Module) -> set[str]:
    calls = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNS_TEXT:
            calls.add(node.func.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if (module, node.func.attr) in UNPICKLES or node.func.attr in RUNS_TEXT - {"eval", "compile"}:
                calls.add(f"{module}.{node.func.attr}")
    return calls


@needs_sandbox
def test_no_grader_runs_a_hostile_answer(tmp_path: Path) -> None:
    report = _watched(tmp_path, "attacks")
    assert report.pop("evaluates"), "the watch doesn't see a grader that evaluates answers"
    assert {"math", "minerva", "countdown", "cruxeval", "livebench"} <= report.keys()
    assert {name: faults for name, faults in report.items() if faults} == {}


def test_inline_graders_end_on_long_answers(tmp_path: Path) -> None:
    report = _watched(tmp_path, "long")
    assert {"final_answer", "multiple_choice", "exact_match", "livebench"} <= report.keys()
    assert {name: late for name, late in report.items() if late} == {}


def _watched(folder: Path, what: str) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "tests.domains.sandbox.answers_under_watch", str(folder), what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.fail(done.stderr[-3000:])
    report: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return report
