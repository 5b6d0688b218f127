"""A model's code is answered with what it printed, its last value or its error, whatever it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from treetune_domains.sandbox.base import Limits
from treetune_domains.sandbox.bubblewrap import Bubblewrap
from treetune_domains.sandbox.program import UnsafeLocal
from treetune_domains.sandbox.python_tool import PythonSession, PythonTool


@pytest.fixture(scope="module")
def tool(sandbox: Bubblewrap) -> PythonTool:
    return PythonTool(sandbox=sandbox, limits=Limits(seconds=3, memory_mib=128), most_bytes=200)


@pytest.fixture
def session(tool: PythonTool) -> Iterator[PythonSession]:
    with tool.session() as session:
        yield session


ANSWERS = {
    "its last value": ("x = 6\nx * 7", "42\n"),
    "what it printed before": ("print(1)\n'a'", "1\n'a'\n"),
    "nothing": ("x = 1", ""),
    "no None": ("print()", "\n"),
    "what a process of it printed": ("import os\nif os.fork() == 0: os._exit(0)\n_ = os.wait()\n1", "1\n"),
    "no code at all": ("", ""),
    "its end": ("import sys; sys.exit('so')", "SystemExit: so\n"),
    "letters": ("print('日本')", "日本\n"),
}


@pytest.mark.parametrize(("code", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_code_is_answered_with(tool: PythonTool, code: str, answer: str) -> None:
    assert tool.run(code) == answer


@pytest.mark.parametrize("code", ["1 / 0", "1 +", "raise ValueError('ü')", "def f(): f()\nf()"])
def test_an_error_is_answered_with_its_traceback_and_nothing_of_ours(tool: PythonTool, code: str) -> None:
    answer = tool.run(code)
    assert "Error" in answer
    assert "boot.py" not in answer
    assert "main.py" not in answer


def test_of_a_long_text_the_beginning_and_the_end_are_kept(tool: PythonTool) -> None:
    answer = tool.run("print('a' * 1000 + 'b' * 1000)")
    assert answer.startswith("a" * 100)
    assert answer.endswith("b" * 99 + "\n")
    assert "1801 bytes left out" in answer


STOPPED = {
    "loop": ("while True: pass", "more than 3 s"),
    "leave": ("import os; os._exit(0)", "ended the interpreter"),
    "fill": (
        "import os, time\nos.fork(), os.fork()\nx = b'x' * (50 << 20)\ntime.sleep(9)",
        "more than 128 MiB",
    ),
}


@pytest.mark.parametrize(("code", "answer"), STOPPED.values(), ids=STOPPED)
def test_code_that_passes_a_limit_is_answered_too(tool: PythonTool, code: str, answer: str) -> None:
    said = tool.run(code)
    assert said.startswith("[the code ") and answer in said


def test_names_stay_in_a_session(session: PythonSession) -> None:
    assert session.run("x = 2\ndef f(y): return x * y") == ""
    assert session.run("f(3)") == "6\n"
    assert "ZeroDivisionError" in session.run("1 / 0")
    assert session.run("import os; open('a', 'w').write('b')") == "1\n"
    assert session.run("open('a').read(), x") == "('b', 2)\n"


def test_a_session_goes_on_after_a_call_that_was_stopped(session: PythonSession) -> None:
    session.run("x = 2")
    for code, answer in STOPPED.values():
        said = session.run(code)
        assert said.startswith("[the code ") and answer in said
        assert session.run("1 + 1") == "2\n"
    assert "NameError" in session.run("x")


def test_code_that_writes_into_the_channel_spoils_its_own_answer_alone(session: PythonSession) -> None:
    flood = (
        "import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'x' * 99999)\n    except OSError: pass"
    )
    assert session.run(flood) == "[the code ended the interpreter]\n"
    assert session.run("1") == "1\n"


def test_without_bubblewrap_every_call_stands_alone() -> None:
    tool = PythonTool(sandbox=UnsafeLocal())
    assert tool.run("1 + 1") == "2\n"
    with pytest.raises(ValueError, match="forgets all"):
        tool.session()
