"""How much wrong code the tests catch: mutations of src, each tried by the tests that reach its module.

    python benchmarks/mutations.py --number 300 --seed 1 --out outcomes.json [--tests COMMIT]

A mutation changes one place in a function: an operator, a bound, a constant, a condition, a statement that
goes, what is returned. Their order is by a hash of their names, without line numbers: nearly the same where
other code changes. Code and tests are those of commits, in a copy of the tree.

Of the files of tests those come first that are called as the module, then those that import it, those that
import who imports it, those of its room. The first failure ends a try, and so does a budget of CPU seconds:
who reads "survived" knows that nothing near caught it, and not what the whole suite would. A test that fails
is tried without the mutation as well, and left out from then on if it fails there. A command that was
stopped goes on from its file of outcomes.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES, HANGS_AFTER_S, HANGS_AFTER_CPU_S = 12, 300, 120
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "not server and not slow", "-p", "no:cacheprovider"]
SPENT = """
import os
def pytest_runtest_teardown(item, nextitem):
    if sum(os.times()[:4]) > float(os.environ["CPU_SECONDS"]):
        item.session.shouldstop = "the budget is spent"
"""
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


def imported(path: Path, module: str, files: Mapping[str, Path]) -> set[str]:
    """Returns the modules of ours that a file names: in imports, also for types, and in texts with dots."""
    named = set()
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Import():
                named |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                base = resolve_name("." * node.level + (node.module or ""), package)
                named |= {f"{base}.{alias.name}" for alias in node.names}
            case ast.Constant(value=str(text)) if re.fullmatch(r"treetune\w*(\.\w+)+", text):
                named.add(text)
    shortened = ([name.rsplit(".", cut)[0] for cut in range(3)] for name in named)
    return {next((name for name in names if name in files), "") for names in shortened} & set(files)


def choice(root: Path) -> dict[str, list[str]]:
    """Returns the files of tests to try for each file of src, the nearest first."""
    paths = [path.relative_to(root) for top in ("src", "tests") for path in root.glob(f"{top}/**/*.py")]
    names = [".".join(path.with_suffix("").parts).removeprefix("src.") for path in paths]
    files = {name.removesuffix(".__init__"): path for name, path in zip(names, paths)}
    imports = {module: imported(root / path, module, files) for module, path in files.items()}
    tests = [name for name, path in files.items() if path.name.startswith("test_") and ".style." not in name]

    def rank(module: str, test: str) -> tuple[bool, int, bool, int, str]:
        words = re.findall(r"[a-z]+", module)[1:]
        is_near = any(test.split(".")[1].startswith(word) for word in words)
        is_named = is_near and not {*words[-2:]}.isdisjoint(re.findall(r"[a-z]+", test.rpartition(".")[2]))
        reached = {module} & imports[test] or {one for one in imports[test] if module in imports[one]}
        steps = 0 if module in reached else 1 if reached else 2
        return not is_named, steps, not is_near, len(imports[test]), str(files[test])

    chosen = {}
    for module, path in files.items():
        ranks = sorted(rank(module, test) for test in tests)
        reaching = [test for _, steps, is_far, _, test in ranks if steps < 2 or not is_far]
        chosen[str(path)] = reaching[:MOST_FILES]
    return chosen


def pytest(root: Path, cpu_seconds: int, *options: str) -> tuple[int, list[str]]:
    """Returns the exit code, and the first test that failed, if any did."""
    path = os.pathsep.join([str(root / "src"), str(root.parent)])
    environment = os.environ | {"PYTHONPATH": path, "CPU_SECONDS": str(cpu_seconds), "OMP_NUM_THREADS": "1"}
    limits = ["prlimit", f"--cpu={HANGS_AFTER_CPU_S}", "timeout", "--signal=KILL", str(HANGS_AFTER_S)]
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
    draw, chosen = [order[drawn] for drawn in sorted(order)[: options.number]], choice(root)
    known: dict[str, Any] = {"failing": [], "outcomes": {}}
    known |= json.loads(options.out.read_text()) if options.out.is_file() else {}
    for one in draw:
        if one["name"] not in known["outcomes"]:
            tests = chosen[one["file"]]
            outcome = tried(root, one, tests, known["failing"], options.cpu_seconds) if tests else None
            outcome = outcome or {**one, "caught": False, "by": [], "code": 5, "cpu_seconds": 0.0}
            print("caught" if outcome["caught"] else "survived", one["name"], *outcome["by"], flush=True)
            known["outcomes"][one["name"]] = {**outcome, "tests": tests}
            options.out.write_text(json.dumps(known, indent=1))
        yield known["outcomes"][one["name"]]


if __name__ == "__main__":
    main()
