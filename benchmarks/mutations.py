"""Measures how many mistakes in the code the tests find, by mutations of src.

    python benchmarks/mutations.py --number 300 --seed 1 --out outcomes.json [--tests COMMIT]

A mutation changes one place in a function: an operator, a bound, a constant, a condition or a returned value,
or it removes a statement. Mutations are ordered by a hash of their names, which have no line numbers. So the
order stays nearly the same when other code changes. Code and tests are those of commits, in a copy of the
tree.

First, all tests run once, with a mark before each statement that will be changed. The mark records which test
runs the statement; in a process that cannot import the mark, such as a sandbox, it records nothing. For each
mutation, the tests that run its statement are then tried, the quickest first, until one fails or a budget of
CPU seconds is spent. "Survived" means that none of them found the mutation within the budget; the whole suite
might. A test that fails is also tried without the mutation. If it fails there, it is left out from then on.
The same command continues an interrupted one, from its file of outcomes.
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
HANGS_AFTER_S = 300
HANGS_AFTER_CPU_S = 120
ALL_TESTS_HOURS = 1
"""The additional time of the run of all tests."""
UNLIMITED_CPU_S = 10**6
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "not server and not slow", "-p", "no:cacheprovider"]

# A plugin of pytest that ends the run when the budget is spent.
BUDGET_PLUGIN = "spent"
BUDGET_CODE = """
import os
def pytest_runtest_teardown(item, nextitem):
    if sum(os.times()[:4]) > float(os.environ["CPU_SECONDS"]):
        item.session.shouldstop = "the budget is spent"
"""
# A module that records the tests which run a marked statement, and the mark that is put before the statement.
MARK_MODULE = "mutation_mark"
MARK_CODE = """
import os
seen = set()
def reached(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (number, test) not in seen:
        seen.add((number, test))
        with open({hits!r}, "a") as file:
            file.write(f"{{number}} {{test}}\\n")
"""
MARK = "__import__('mutation_mark').reached({number})"

# Exit codes of pytest.
ALL_PASSED, STOPPED, NO_TESTS = 0, 2, 5
PASSED = (ALL_PASSED, STOPPED, NO_TESTS)
"""No test failed: all passed, or all until the budget was spent, or there are none."""
TIMED_OUT = (-9, -24, 137, 152)
"""Exit codes if `timeout` or `prlimit` ended the run: SIGKILL and SIGXCPU, as Python or a shell has them."""
FAILED_TEST = r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$"
"""A line of pytest's summary; a line of a log has no test after such a word."""

NORMAL_QUANTILE = 1.96
"""A 95 % interval has this many standard errors on each side."""

SWAPPED_PAIRS: list[tuple[Any, Any]] = [
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.And, ast.Or),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
]
SWAPS: dict[Any, Any] = {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
"""The operators by which a mutation replaces others."""
for first_operator, second_operator in SWAPPED_PAIRS:
    SWAPS |= {first_operator: second_operator, second_operator: first_operator}
TEXTS = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, str)
"""Operands whose + and % are no arithmetic."""
LOG = re.compile(r"(log|logger|logging|warnings|print)\b")
"""The code of a call that writes a log."""
NOT_CODE = (ast.JoinedStr, ast.Assert, ast.arguments, ast.pattern, ast.FunctionDef, ast.AsyncFunctionDef)


Mutation = dict[str, Any]
"""A change of the code, such as ``{"name": "src/treetune/seeds.py: derive_seed: a + b -> (a - b) (1)",
"file": "src/treetune/seeds.py", "line": 12, "before": "a + b", "after": "(a - b)", "first": 301,
"last": 306}``. The bytes from `first` to before `last` are replaced."""
Outcome = dict[str, Any]
"""A mutation with its result: whether it was ``caught``, ``by`` which test, pytest's exit ``code``, and the
``cpu_seconds`` of the tests."""


# Mutations


def find_mutations(path: Path, root: Path) -> Iterator[Mutation]:
    """Yields every mutation of a file's functions."""
    content = path.read_bytes()
    file = path.relative_to(root).as_posix()
    line_starts = [0, *itertools.accumulate(len(line) for line in content.splitlines(keepends=True))]
    # Equal changes of functions with the same name are told apart by their numbers.
    times_seen: collections.Counter[str] = collections.Counter()
    for function in ast.walk(ast.parse(content)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for part in find_changeable_nodes(function.body):
            for node, after in find_changes(part):
                first = line_starts[node.lineno - 1] + node.col_offset
                last = line_starts[node.end_lineno - 1] + node.end_col_offset
                before = content[first:last].decode()
                name = f"{file}: {function.name}: {before} -> {after}"
                times_seen[name] += 1
                yield {
                    "name": f"{name} ({times_seen[name]})",
                    "file": file,
                    "line": node.lineno,
                    "before": before,
                    "after": after,
                    "first": first,
                    "last": last,
                }


def find_changeable_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields nodes and all nodes below them, without texts, types, logs, and checks of what only a bug could
    break."""
    for node in nodes:
        is_log = isinstance(node, ast.Expr) and LOG.match(ast.unparse(node)) is not None
        is_strict_keyword = getattr(node, "arg", "") == "strict"  # such as that of zip
        if isinstance(node, NOT_CODE) or is_log or is_strict_keyword:
            continue
        yield node
        # The text of an exception, or a type.
        left_out = node.exc if isinstance(node, ast.Raise) else getattr(node, "annotation", None)
        children = [child for child in ast.iter_child_nodes(node) if child is not left_out]
        yield from find_changeable_nodes(children)


def find_changes(node: Any) -> Iterator[tuple[Any, str]]:
    """Yields each change of a node: the node that is replaced (itself or one below it), and the new code."""
    match node:
        case ast.BinOp() | ast.BoolOp() if type(node.op) in SWAPS:
            operands = [getattr(child, "value", child) for child in ast.iter_child_nodes(node)]
            if not any(isinstance(operand, TEXTS) for operand in operands):
                yield node, unparse_with(node, op=SWAPS[type(node.op)]())
        case ast.Compare(ops=[*ops, last]):
            yield node, unparse_with(node, ops=[*ops, SWAPS[type(last)]()])
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int() | float() as number):
            yield node, f"({number + 1})"
            yield node, f"({number - 1})"
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield node, "return None"
        case (
            ast.Expr(value=ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom())
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            | (ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break())
        ):
            yield node, "pass"
    # Conditions of comprehensions, of statements and of conditional expressions.
    conditions = [*getattr(node, "ifs", [])]
    condition = getattr(node, "test", None)
    if condition is not None:
        conditions.append(condition)
    for condition in conditions:
        # Other changes negate these already.
        if not isinstance(condition, ast.UnaryOp | ast.Constant | ast.Compare):
            yield condition, f"(not ({ast.unparse(condition)}))"


def unparse_with(node: ast.AST, **fields: Any) -> str:
    """Returns the code of a node with other fields."""
    changed = type(node)(**{**dict(ast.iter_fields(node)), **fields})
    return f"({ast.unparse(changed)})"


# The tests that run a statement


def find_tests(root: Path, mutations: Sequence[Mutation]) -> dict[str, list[str]]:
    """Runs all tests with a mark before the statement of each mutation.

    Returns:
        The tests that run a mutation's statement, the quickest first, by the mutation's name.
    """
    hits, report = root.parent / "hits", root.parent / "times.xml"
    (root.parent / f"{MARK_MODULE}.py").write_text(MARK_CODE.format(hits=str(hits)))
    originals = {}
    for mutation in mutations:
        path = root / mutation["file"]
        originals[path] = path.read_bytes()
    for path, content in originals.items():
        path.write_text(insert_marks(content, path.relative_to(root).as_posix(), mutations))
    options = [f"-n{os.cpu_count()}", "--maxfail=10000", f"--junitxml={report}"]
    run_pytest(root, UNLIMITED_CPU_S, *options, hours=ALL_TESTS_HOURS)
    for path, content in originals.items():
        path.write_bytes(content)

    seconds = read_seconds_of_tests(report)
    tests: dict[str, set[str]] = {mutation["name"]: set() for mutation in mutations}
    lines = hits.read_text().splitlines() if hits.is_file() else []
    for line in lines:
        number, test = line.split(" ", 1)
        tests[mutations[int(number)]["name"]].add(test)
    by_seconds = {}
    for name, tests_of_mutation in tests.items():
        by_seconds[name] = sorted(tests_of_mutation, key=lambda test: (seconds[test], test))
    return by_seconds


def insert_marks(content: bytes, file: str, mutations: Sequence[Mutation]) -> str:
    """Returns the code of a file with a mark before the statement of each of its mutations.

    Args:
        content: The code.
        file: The name of the file in the mutations.
        mutations: The mutations of all files. A mark has the index of its mutation.
    """
    lines = content.decode().splitlines(keepends=True)
    marks = []
    for number, mutation in enumerate(mutations):
        if mutation["file"] == file:
            marks.append((find_statement(content, mutation["first"]), number))
    # From the last line to the first, so that the numbers of earlier lines stay right.
    for line, number in sorted(marks, reverse=True):
        indent = lines[line][: len(lines[line]) - len(lines[line].lstrip())]
        lines.insert(line, f"{indent}{MARK.format(number=number)}\n")
    return "".join(lines)


def find_statement(content: bytes, offset: int) -> int:
    """Returns the line, counted from 0, of the innermost statement at a byte that begins its line."""
    lines = content.decode().splitlines(keepends=True)
    line_starts = [0, *itertools.accumulate(len(line.encode()) for line in lines)]
    innermost = 0
    for node in ast.walk(ast.parse(content)):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        line, last_line = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        # No statement can be put before an `elif`.
        is_elif = lines[line].lstrip().startswith("elif ")
        begins_line = lines[line][: node.col_offset].isspace() and not is_elif
        end = line_starts[last_line] + (node.end_col_offset or 0)
        if begins_line and line_starts[line] <= offset <= end:
            innermost = max(innermost, line)
    return innermost


def read_seconds_of_tests(report: Path) -> dict[str, float]:
    """Returns the seconds of each test from pytest's XML report; 0 for tests that it doesn't have."""
    seconds = collections.defaultdict[str, float](float)
    if report.is_file():
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.attrib["classname"].replace(".", "/") + ".py"
            seconds[f"{file}::{case.attrib['name']}"] += float(case.attrib["time"])
    return seconds


# Trying mutations


def run_pytest(root: Path, cpu_seconds: int, *options: str, hours: int = 0) -> tuple[int, list[str]]:
    """Runs tests until one fails.

    Args:
        root: The copy of the tree.
        cpu_seconds: The budget, after which no further test begins.
        options: Options of pytest, such as tests.
        hours: Time in addition to `HANGS_AFTER_S`, after which the run is ended.

    Returns:
        The exit code, and a list of the first test that failed, if any did.
    """
    path = os.pathsep.join([str(root / "src"), str(root.parent)])
    environment = os.environ | {"PYTHONPATH": path, "CPU_SECONDS": str(cpu_seconds), "OMP_NUM_THREADS": "1"}
    limits = ["prlimit", f"--cpu={HANGS_AFTER_CPU_S + 3600 * hours}"]
    limits += ["timeout", "--signal=KILL", str(HANGS_AFTER_S + 3600 * hours)]
    command = [*limits, *PYTEST, "-x", "-p", BUDGET_PLUGIN, *options, f"--basetemp={root.parent}/temp"]
    with tempfile.TemporaryFile("w+") as output:
        code = subprocess.run(
            command, cwd=root, env=environment, stdout=output, stderr=output, check=False
        ).returncode
        output.seek(0)
        return code, re.findall(FAILED_TEST, output.read(), re.M)[:1]


def try_mutation(
    root: Path, mutation: Mutation, tests: Sequence[str], failing: list[str], cpu_seconds: int
) -> Outcome:
    """Runs tests with a mutation.

    Args:
        root: The copy of the tree.
        mutation: The mutation.
        tests: The tests that run its statement, the quickest first.
        failing: Tests that fail without a mutation, and are left out. Newly found ones are added.
        cpu_seconds: The budget of the tests.

    Raises:
        RuntimeError: if the tests end with an error even without the mutation.
    """
    path = root / mutation["file"]
    content = path.read_bytes()
    changed = content[: mutation["first"]] + mutation["after"].encode() + content[mutation["last"] :]
    start = read_cpu_seconds_of_children()
    while True:
        options = [*tests, *(f"--deselect={test}" for test in failing)]
        path.write_bytes(changed)
        code, failed_tests = run_pytest(root, cpu_seconds, *options)
        path.write_bytes(content)
        is_caught = bool(failed_tests) or code not in PASSED
        if not is_caught:
            break
        code_without_mutation, _ = run_pytest(root, cpu_seconds, *(failed_tests or options))
        if code_without_mutation in PASSED:
            break
        if not failed_tests:
            raise RuntimeError(f"{tests} end with {code} where nothing is changed: mend them first")
        failing += failed_tests
    return {
        **mutation,
        "caught": is_caught,
        "by": failed_tests,
        "code": code,
        "cpu_seconds": round(read_cpu_seconds_of_children() - start, 1),
    }


def read_cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def try_mutations(root: Path, options: argparse.Namespace) -> Iterator[Outcome]:
    """Yields the outcome of each chosen mutation. Outcomes of an earlier call are read from ``--out``."""
    chosen = choose_mutations(root, options.number, options.seed)
    record: dict[str, Any] = {"failing": [], "outcomes": {}}
    if options.out.is_file():
        record |= json.loads(options.out.read_text())
    tests_of_mutations = record.setdefault("tests", {})
    if any(mutation["name"] not in tests_of_mutations for mutation in chosen):
        tests_of_mutations |= find_tests(root, chosen)
    for mutation in chosen:
        name = mutation["name"]
        if name not in record["outcomes"]:
            tests = tests_of_mutations[name]
            if tests:
                outcome = try_mutation(root, mutation, tests, record["failing"], options.cpu_seconds)
            else:  # no test runs the statement
                outcome = {**mutation, "caught": False, "by": [], "code": NO_TESTS, "cpu_seconds": 0.0}
            print("caught" if outcome["caught"] else "survived", name, *outcome["by"], flush=True)
            record["outcomes"][name] = outcome
            options.out.write_text(json.dumps(record, indent=1))
        yield record["outcomes"][name]


def choose_mutations(root: Path, number: int, seed: int) -> list[Mutation]:
    """Returns so many mutations of all files, the first ones in the order of a hash of seed and name."""
    by_hash = {}
    for path in root.glob("src/**/*.py"):
        for mutation in find_mutations(path, root):
            by_hash[hashlib.sha256(f"{seed} {mutation['name']}".encode()).digest()] = mutation
    return [by_hash[digest] for digest in sorted(by_hash)[:number]]


# The table


def make_table(outcomes: Sequence[Outcome]) -> str:
    """Returns the counts as a table in Markdown, and a list of the mutations that survived."""
    survived = [outcome for outcome in outcomes if not outcome["caught"]]
    tried, caught = len(outcomes), len(outcomes) - len(survived)
    low, high = wilson_interval(caught, tried)
    timed_out = sum(outcome["code"] in TIMED_OUT for outcome in outcomes)
    cpu_seconds = sum(outcome["cpu_seconds"] for outcome in outcomes) / tried
    columns = {
        "mutations": str(tried),
        "caught": str(caught),
        "by time": str(timed_out),
        "survived": str(len(survived)),
        "share caught": f"{caught / tried:.1%}",
        "95 % interval": f"{low:.1%} to {high:.1%}",
        "CPU s each": f"{cpu_seconds:.0f}",
    }
    head = f"| {' | '.join(columns)} |\n|" + "---:|" * len(columns)
    row = f"| {' | '.join(columns.values())} |\n"
    lines = []
    for outcome in survived:
        place = f"{outcome['file']}:{outcome['line']}"
        lines.append(f"* {place}: {outcome['before']}  ->  {outcome['after']}")
    return "\n".join([head, row, *sorted(lines)])


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a probability."""
    z = NORMAL_QUANTILE
    half_width = z * math.sqrt(successes * (trials - successes) / trials + z * z / 4)
    centre = successes + z * z / 2
    return (centre - half_width) / (trials + z * z), (centre + half_width) / (trials + z * z)


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
        copy_tree(root, options.tests)
        (root.parent / f"{BUDGET_PLUGIN}.py").write_text(BUDGET_CODE)
        print(make_table(list(try_mutations(root, options))))


def copy_tree(root: Path, commit_of_tests: str) -> None:
    """Clones this repository, with the tests of a commit, and compiles its code."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(root)], check=True)
    shutil.rmtree(root / "tests")
    commit = subprocess.check_output(["git", "rev-parse", commit_of_tests], cwd=ROOT, text=True).strip()
    subprocess.run(["git", "checkout", "--quiet", commit, "--", "tests"], cwd=root, check=True)
    # Bytecode that has the hash of its source: by size and time alone, Python might not notice a mutation.
    compileall = ["compileall", "-q", "--invalidation-mode", "checked-hash", "src"]
    subprocess.run([sys.executable, "-m", *compileall], cwd=root, check=True)


if __name__ == "__main__":
    main()
