"""Promise of the exceptions: all of them are in one file, whose docstring shows their tree."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys

from tests.support.documents import ROOT
from treetune import exceptions

PACKAGE = ROOT / "src" / "treetune"
INDEPENDENT_MODULES = (
    "domains/sandbox/inside",  # nothing else of the package is in the sandbox
    "cluster/slurm.py",  # also a script that a login node's Python runs
    "domains/puzzles/reasoning_gym_maker.py",  # runs as a separate process
)
DEFINED = {
    name: value
    for name, value in vars(exceptions).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


def test_every_exception_stands_in_the_tree_below_its_base() -> None:
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (exceptions.__doc__ or "").splitlines():
        entry = re.match(r"(    [│ ├└─]*)([A-Z]\w+)(  |$)", line)
        if entry is None:
            continue
        depth, name = len(entry[1]), entry[2]
        above = [(indent, parent) for indent, parent in above if indent < depth]
        if above:
            parents[name] = above[-1][1]
        above.append((depth, name))
    assert parents == {name: kind.__base__.__name__ for name, kind in DEFINED.items() if kind.__base__}
    assert len(parents) > 30


def test_no_other_module_defines_an_exception_that_leaves_it() -> None:
    roots = {name for name, value in vars(builtins).items() if _is_exception(value)} | set(DEFINED)
    elsewhere = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name == "exceptions.py" or name.startswith(INDEPENDENT_MODULES):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                elsewhere += [f"{name}: {node.name}"] if bases & roots else []
    assert elsewhere == []


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def test_exceptions_import_nothing_else_of_the_package() -> None:
    script = (
        "import sys, treetune.exceptions\n"
        "print(*sorted(name for name in sys.modules if name.startswith('treetune')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.split() == ["treetune", "treetune.exceptions", "treetune.waiting"]
