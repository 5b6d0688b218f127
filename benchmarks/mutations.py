"""How much wrong code the tests catch: mutations of src, each tried by the tests that reach its module.

    python benchmarks/mutations.py --number 300 --seed 1 --out outcomes.json [--tests COMMIT]

A mutation changes one place in a function: an operator, a bound, a constant, a condition, a statement that
goes, what is returned. Their order is by a hash of their names, without line numbers: nearly the same where
other code changes. Code and tests are those of commits, in a copy of the tree. Tests that fail without a
mutation are left out. A command that was stopped goes on from its file of outcomes.
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
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES, SECONDS = 12, 120
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "not server and not slow", "-p", "no:cacheprovider"]
FAILED = r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$"

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
    collected = set(re.findall(r"^(tests/.+?\.py)::", pytest(root, 600, "--collect-only")[1], re.M))
    tests = [name for name, path in files.items() if str(path) in collected and ".style." not in name]

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


def pytest(root: Path, seconds: int, *options: str) -> tuple[int, str]:
    """Returns the exit code, -9 where the time is over, and what was printed. Writes no stale bytecode."""
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["timeout", "--signal=KILL", str(seconds), *PYTEST, f"--basetemp={root.parent}/temp", *options]
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(command, cwd=root, env=environment, stdout=output, stderr=output, check=False)
        output.seek(0)
        return done.returncode, output.read()


def tried(root: Path, mutation: dict[str, Any], options: Sequence[str]) -> dict[str, Any]:
    """Returns a mutation, and whether these tests caught it."""
    content, started = (path := root / mutation["file"]).read_bytes(), time.monotonic()
    path.write_bytes(content[: mutation["first"]] + mutation["after"].encode() + content[mutation["last"] :])
    code, output = pytest(root, SECONDS, "-x", *options)
    path.write_bytes(content)
    by, seconds = re.findall(FAILED, output, re.M)[:1], round(time.monotonic() - started, 1)
    return {**mutation, "caught": code not in (0, 5), "by": by, "code": code, "seconds": seconds}


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    survived = [one for one in outcomes if not one["caught"]]
    n, caught, z = len(outcomes), len(outcomes) - len(survived), 1.96
    half = z * math.sqrt(caught * len(survived) / n + z * z / 4)
    low, high = ((caught + z * z / 2 + side) / (n + z * z) for side in (-half, half))  # Wilson's interval
    head = "| mutations | caught | by time | survived | share caught | 95 % interval |\n|" + "---:|" * 6
    late = sum(one["code"] == -9 for one in outcomes)
    row = f"| {n} | {caught} | {late} | {len(survived)} | {caught / n:.1%} | {low:.1%} to {high:.1%} |\n"
    lines = [f"* {one['file']}:{one['line']}: {one['before']}  ->  {one['after']}" for one in survived]
    return "\n".join([head, row, *sorted(lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", default="HEAD", metavar="COMMIT", help="whose tests are tried")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="a JSON file of outcomes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "tree"
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(root)], check=True)
        shutil.rmtree(root / "tests")
        commit = subprocess.check_output(["git", "rev-parse", options.tests], cwd=ROOT, text=True).strip()
        subprocess.run(["git", "checkout", "--quiet", commit, "--", "tests"], cwd=root, check=True)
        print(table(list(outcomes(root, options.number, options.seed, options.out))))


def outcomes(root: Path, number: int, seed: int, out: Path) -> Iterator[dict[str, Any]]:
    """Yields each mutation that is drawn, whether it was caught and by which test."""
    every = itertools.chain.from_iterable(mutations(path, root) for path in root.glob("src/**/*.py"))
    order = {hashlib.sha256(f"{seed} {one['name']}".encode()).digest(): one for one in every}
    draw, chosen = [order[drawn] for drawn in sorted(order)[:number]], choice(root)
    known = json.loads(out.read_text()) if out.is_file() else {"seconds": {}, "failing": [], "outcomes": {}}
    seconds, tried_before = known["seconds"], known["outcomes"]
    wanted = {file for one in draw if one["name"] not in tried_before for file in chosen[one["file"]]}
    if files := sorted(wanted - seconds.keys()):
        _, output = pytest(root, 7200, "--durations=0", "--continue-on-collection-errors", *files)
        known["failing"] += re.findall(FAILED, output, re.M)
        seconds |= dict.fromkeys(files, 0.0)
        for figure, file in re.findall(r"^([\d.]+)s \w+ +(\S+?\.py)::", output, re.M):
            seconds[file] += float(figure)
    print(len(seconds), "files of tests; these fail without a mutation:", known["failing"], flush=True)
    for one in draw:
        if one["name"] not in tried_before:
            until_now = itertools.accumulate(seconds[file] for file in chosen[one["file"]])
            tests = [file for file, spent in zip(chosen[one["file"]], until_now) if spent < SECONDS / 2]
            outcome = tried(root, one, [*tests, *(f"--deselect={test}" for test in known["failing"])])
            print("caught" if outcome["caught"] else "survived", one["name"], *outcome["by"], flush=True)
            tried_before[one["name"]] = {**outcome, "tests": tests}
            out.write_text(json.dumps(known, indent=1))
        yield tried_before[one["name"]]


if __name__ == "__main__":
    main()
