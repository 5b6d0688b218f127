"""How much wrong code the tests catch: mutations of src, each tried by the tests that reach its module.

    python benchmarks/mutations.py --number 300 --seed 1 --out outcomes.json [--tests COMMIT]

A mutation changes one place in a function: an operator, a bound, a constant, a condition, a statement that
goes, what is returned. Their order is by a hash of their names, without line numbers: nearly the same where
other code changes. Code and tests are those of commits, in a copy of the tree.

All tests run once with a mark before each statement that will be changed, which says who runs it; a process
that can't import the mark (a sandbox's) says nothing. These tests are tried, the quickest first, until one
fails or a budget of CPU seconds is spent: who reads "survived" knows that none of them caught it, and not
what the whole suite would. A test that fails is tried without the mutation as well, and left out from then on
if it fails there. A command that was stopped goes on from its file of outcomes.
"""

from __future__ import annotations

import argparse
import ast
import collections
import hashlib
import itertools
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
HANGS_AFTER_S, HANGS_AFTER_CPU_S = 300, 120
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "not server and not slow", "-p", "no:cacheprovider"]
SPENT = """
import os
def pytest_runtest_teardown(item, nextitem):
    if sum(os.times()[:4]) > float(os.environ["CPU_SECONDS"]):
        item.session.shouldstop = "the budget is spent"
"""
MARK = """
import os
seen = set()
def reached(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (number, test) not in seen:
        seen.add((number, test))
        with open({hits!r}, "a") as file:
            file.write(f"{{number}} {{test}}\\n")
"""
REACHED = "__import__('mutation_mark').reached({number})"
PASSED = (0, 2, 5)  # all of them; all until the budget was spent; there are none
FAILED = r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$"  # and no line of a log

PAIRS = [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)]
PAIRS += [(ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)]
SWAPS = dict([*PAIRS, *((b, a) for a, b in PAIRS), (ast.FloorDiv, ast.Mult), (ast.Mod, ast.Mult)])
TEXTS = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, str)  # their + and % aren't arithmetic
LOG = re.compile(r"(log|logger|logging|warnings|print)\b")
NOT_CODE = (ast.JoinedStr, ast.Assert, ast.arguments, ast.pattern, ast.FunctionDef, ast.AsyncFunctionDef)


def mutations(path: Path, root: Path) -> Iterator[dict[str, Any]]:
    """Yields every mutation of a file's functions: the bytes from first to last, and what replaces them."""
    content, file = path.read_bytes(), path.relative_to(root).as_posix()
    starts = list(itertools.accumulate(map(len, content.splitlines(keepends=True)), initial=0))
    seen: collections.Counter[str] = collections.Counter()
    for function in ast.walk(ast.parse(content)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node, after in itertools.chain.from_iterable(map(changes, parts(function.body))):
                first = starts[node.lineno - 1] + node.col_offset
                last = starts[node.end_lineno - 1] + node.end_col_offset
                before = content[first:last].decode()
                name = f"{file}: {function.name}: {before} -> {after}"
                seen[name] += 1
                change = {"before": before, "after": after, "first": first, "last": last}
                yield {"name": f"{name} ({seen[name]})", "file": file, "line": node.lineno, **change}


def parts(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields the nodes to change: no texts, types, logs, nor checks of what only a bug could break."""
    for node in nodes:
        is_log = isinstance(node, ast.Expr) and LOG.match(ast.unparse(node))
        if not isinstance(node, NOT_CODE) and not is_log and getattr(node, "arg", "") != "strict":
            yield node
            without = [node.exc] if isinstance(node, ast.Raise) else [getattr(node, "annotation", None)]
            yield from parts(child for child in ast.iter_child_nodes(node) if child not in without)


def changes(node: Any) -> Iterator[tuple[Any, str]]:
    """Yields what to replace, and by which text."""

    def other(**fields: Any) -> tuple[ast.AST, str]:
        return node, f"({ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), **fields}))})"

    match node:
        case ast.BinOp() | ast.BoolOp() if type(node.op) in SWAPS:
            if not any(isinstance(getattr(one, "value", one), TEXTS) for one in ast.iter_child_nodes(node)):
                yield other(op=SWAPS[type(node.op)]())
        case ast.Compare(ops=[*ops, last]):
            yield other(ops=[*ops, SWAPS[type(last)]()])
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int() | float()):
            yield from ((node, f"({node.value + step})") for step in (1, -1))
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield node, "return None"
        case (
            ast.Expr(value=ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom())
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            | (ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break())
        ):
            yield node, "pass"
    for test in [*getattr(node, "ifs", []), *filter(None, [getattr(node, "test", None)])]:
        if not isinstance(test, ast.UnaryOp | ast.Constant | ast.Compare):
            yield test, f"(not ({ast.unparse(test)}))"


def reaching(root: Path, drawn: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns the tests that run the statement of each mutation, the quickest first: from one run of all of
    them with a mark before each of these statements."""
    hits, times = root.parent / "hits", root.parent / "times.xml"
    originals = {root / one["file"]: (root / one["file"]).read_bytes() for one in drawn}
    (root.parent / "mutation_mark.py").write_text(MARK.format(hits=str(hits)))
    for path, content in originals.items():
        lines = content.decode().splitlines(keepends=True)
        of_file = [(number, one) for number, one in enumerate(drawn) if root / one["file"] == path]
        places = [(statement_at(content, one["first"]), number) for number, one in of_file]
        for place, number in sorted(places, reverse=True):
            indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
            lines.insert(place, f"{indent}{REACHED.format(number=number)}\n")
        path.write_text("".join(lines))
    pytest(root, 10**6, f"-n{os.cpu_count()}", "--maxfail=10000", f"--junitxml={times}", hours=1)
    for path, content in originals.items():
        path.write_bytes(content)
    seconds = collections.defaultdict[str, float](float)
    for case in ElementTree.parse(times).iter("testcase") if times.is_file() else ():
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[f"{file}::{case.attrib['name']}"] += float(case.attrib["time"])
    found: dict[str, set[str]] = {one["name"]: set() for one in drawn}
    for line in hits.read_text().splitlines() if hits.is_file() else ():
        at, test = line.split(" ", 1)
        found[drawn[int(at)]["name"]].add(test)
    return {name: sorted(tests, key=lambda test: (seconds[test], test)) for name, tests in found.items()}


def statement_at(content: bytes, offset: int) -> int:
    """Returns the line, counted from 0, of the innermost statement there that begins a line of its own."""
    lines = content.decode().splitlines(keepends=True)
    starts = list(itertools.accumulate((len(line.encode()) for line in lines), initial=0))
    found = 0
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            line, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            begins = lines[line][: node.col_offset].isspace() and not lines[line].lstrip().startswith("elif ")
            if begins and starts[line] <= offset <= starts[last] + (node.end_col_offset or 0):
                found = max(found, line)
    return found


def pytest(root: Path, cpu_seconds: int, *options: str, hours: int = 0) -> tuple[int, list[str]]:
    """Returns the exit code, and the first test that failed, if any did. It ends after `hours`."""
    path = os.pathsep.join([str(root / "src"), str(root.parent)])
    environment = os.environ | {"PYTHONPATH": path, "CPU_SECONDS": str(cpu_seconds), "OMP_NUM_THREADS": "1"}
    limits = ["prlimit", f"--cpu={HANGS_AFTER_CPU_S + 3600 * hours}"]
    limits += ["timeout", "--signal=KILL", str(HANGS_AFTER_S + 3600 * hours)]
    command = [*limits, *PYTEST, "-x", "-p", "spent", *options]
    with tempfile.TemporaryFile("w+") as output:
        command.append(f"--basetemp={root.parent}/temp")
        done = subprocess.run(command, cwd=root, env=environment, stdout=output, stderr=output, check=False)
        output.seek(0)
        return done.returncode, re.findall(FAILED, output.read(), re.M)[:1]


def tried(
    root: Path, mutation: dict[str, Any], tests: Sequence[str], failing: list[str], cpu_seconds: int
) -> dict[str, Any]:
    """Returns a mutation, and whether these tests caught it; adds to `failing` what fails without it."""
    path = root / mutation["file"]
    content, begun = path.read_bytes(), cpu_of_children()
    changed = content[: mutation["first"]] + mutation["after"].encode() + content[mutation["last"] :]
    while True:
        options = [*tests, *(f"--deselect={test}" for test in failing)]
        path.write_bytes(changed)
        code, by = pytest(root, cpu_seconds, *options)
        path.write_bytes(content)
        is_caught = bool(by) or code not in PASSED
        if not is_caught or pytest(root, cpu_seconds, *(by or options))[0] in PASSED:
            break
        if not by:
            raise RuntimeError(f"{tests} end with {code} where nothing is changed: mend them first")
        failing += by
    spent = round(cpu_of_children() - begun, 1)
    return {**mutation, "caught": is_caught, "by": by, "code": code, "cpu_seconds": spent}


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    survived = [one for one in outcomes if not one["caught"]]
    n, caught, z = len(outcomes), len(outcomes) - len(survived), 1.96
    half = z * math.sqrt(caught * len(survived) / n + z * z / 4)
    low, high = ((caught + z * z / 2 + side) / (n + z * z) for side in (-half, half))  # Wilson's interval
    columns = ["mutations", "caught", "by time", "survived", "share caught", "95 % interval", "CPU s each"]
    late = sum(one["code"] in (-9, -24, 137, 152) for one in outcomes)
    seconds = sum(one["cpu_seconds"] for one in outcomes) / n
    share = [f"{caught / n:.1%}", f"{low:.1%} to {high:.1%}", f"{seconds:.0f}"]
    head = f"| {' | '.join(columns)} |\n|" + "---:|" * len(columns)
    row = f"| {' | '.join(map(str, [n, caught, late, len(survived), *share]))} |\n"
    lines = [f"* {one['file']}:{one['line']}: {one['before']}  ->  {one['after']}" for one in survived]
    return "\n".join([head, row, *sorted(lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu-seconds", type=int, default=20, help="of the tests of one mutation")
    parser.add_argument("--tests", default="HEAD", metavar="COMMIT", help="whose tests are tried")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="a JSON file of outcomes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "tree"
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(root)], check=True)
        shutil.rmtree(root / "tests")
        commit = subprocess.check_output(["git", "rev-parse", options.tests], cwd=ROOT, text=True).strip()
        subprocess.run(["git", "checkout", "--quiet", commit, "--", "tests"], cwd=root, check=True)
        (root.parent / "spent.py").write_text(SPENT)
        # Bytecode that holds its source's hash: a mutation may be as long as what it replaces, and as old.
        hashed = ["compileall", "-q", "--invalidation-mode", "checked-hash", "src"]
        subprocess.run([sys.executable, "-m", *hashed], cwd=root, check=True)
        print(table(list(outcomes(root, options))))


def outcomes(root: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields each mutation that is drawn, whether it was caught and by which test."""
    every = itertools.chain.from_iterable(mutations(path, root) for path in root.glob("src/**/*.py"))
    order = {hashlib.sha256(f"{options.seed} {one['name']}".encode()).digest(): one for one in every}
    draw = [order[drawn] for drawn in sorted(order)[: options.number]]
    known: dict[str, Any] = {"failing": [], "outcomes": {}}
    known |= json.loads(options.out.read_text()) if options.out.is_file() else {}
    if any(one["name"] not in known.setdefault("tests", {}) for one in draw):
        known["tests"] |= reaching(root, draw)
    for one in draw:
        if one["name"] not in known["outcomes"]:
            tests = known["tests"][one["name"]]
            outcome = tried(root, one, tests, known["failing"], options.cpu_seconds) if tests else None
            outcome = outcome or {**one, "caught": False, "by": [], "code": 5, "cpu_seconds": 0.0}
            print("caught" if outcome["caught"] else "survived", one["name"], *outcome["by"], flush=True)
            known["outcomes"][one["name"]] = outcome
            options.out.write_text(json.dumps(known, indent=1))
        yield known["outcomes"][one["name"]]


if __name__ == "__main__":
    main()
