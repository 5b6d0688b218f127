"""Ordinary programs run in the sandbox as they do outside of it, and their end is told as it was."""

from __future__ import annotations

import pytest

from treetune_domains.sandbox.base import Limits, Outcome, SandboxUnavailable
from treetune_domains.sandbox.bubblewrap import Bubblewrap, choose
from treetune_domains.sandbox.program import UnsafeLocal

ORDINARY = {
    "reads its input": ("print(sum(map(int, input().split())))", "1 2 3\n", "6\n"),
    "reads all of its input": ("import sys; print(len(sys.stdin.read()))", "x" * 200_000, "200000\n"),
    "imports a file beside it": ("import helper; print(helper.NUMBER)", "", "7\n"),
    "writes a file and reads it": ("open('a', 'w').write('b'); print(open('/tmp/a').read())", "", "b\n"),
    "has many processes": (
        "import multiprocessing as m\n"
        "def f(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    with m.Pool(3) as pool: print(pool.map(f, range(4)))",
        "",
        "[0, 1, 4, 9]\n",
    ),
    "is asynchronous": ("import asyncio\nasync def f(): print(1)\nasyncio.run(f())", "", "1\n"),
    "defines dataclasses": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: int\nprint(A(1))",
        "",
        "A(b=1)\n",
    ),
    "recurses deeply": (
        "import sys; sys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(50_000))",
        "",
        "50000\n",
    ),
    "prints in any script": ("print('日本語 ü')", "", "日本語 ü\n"),
}


@pytest.mark.parametrize(("code", "stdin", "stdout"), ORDINARY.values(), ids=ORDINARY)
def test_an_ordinary_program_runs(sandbox: Bubblewrap, code: str, stdin: str, stdout: str) -> None:
    outcome = sandbox.run(code, stdin=stdin, files={"helper.py": "NUMBER = 7"})
    assert (outcome.stdout, outcome.stderr, outcome.exit) == (stdout, "", 0)


def test_sets_of_strings_come_in_the_same_order_every_time(sandbox: Bubblewrap) -> None:
    code = "print({str(number) for number in range(100)})"
    assert len({sandbox.run(code).stdout for _ in range(3)}) == 1


ENDS = {
    "an exit status": ("exit(3)", 3, None),
    "an exception": ("1 / 0", 1, None),
    "a syntax error": ("1 +", 1, None),
    "a crash": ("import ctypes; ctypes.string_at(0)", -11, None),
    "killing itself": ("import os; os.kill(os.getpid(), 9)", -9, None),
    "no time left": ("while True: pass", None, "time"),
    "no time left, asleep": ("import time; time.sleep(60)", None, "time"),
    "too much printed": ("while True: print('x' * 1000)", None, "output"),
    "too much printed as errors": (
        "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
        None,
        "output",
    ),
}


@pytest.mark.parametrize(("code", "exit", "killed_by"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("where", ["bubblewrap", "unsafe_local"])
def test_the_end_of_a_program_is_told(
    request: pytest.FixtureRequest, where: str, code: str, exit: int | None, killed_by: str | None
) -> None:
    found = request.getfixturevalue("sandbox") if where == "bubblewrap" else UnsafeLocal()
    outcome: Outcome = found.run(code, limits=Limits(seconds=1, output_kib=64))
    assert (outcome.exit, outcome.killed_by) == (exit, killed_by)
    assert len(outcome.stdout) + len(outcome.stderr) <= 64 * 1024


def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treetune_domains.sandbox.bubblewrap.shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("treetune_domains.sandbox.bubblewrap._missing", _uncached())
    with pytest.raises(SandboxUnavailable, match="apt install bubblewrap"):
        choose()


def _uncached() -> object:
    from treetune_domains.sandbox import bubblewrap

    return bubblewrap._missing.__wrapped__


def test_a_sandbox_that_cannot_start_says_so_and_blames_no_program(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "treetune_domains.sandbox.bubblewrap._root", lambda: ("--ro-bind", "/not/there", "/a")
    )
    with pytest.raises(SandboxUnavailable, match="/not/there"):
        sandbox.run("print(1)")


def test_a_process_with_many_open_files_can_run_programs(sandbox: Bubblewrap) -> None:
    import os
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip(f"this user may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert sandbox.run("print(1)").stdout == "1\n"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
