"""Promises of the sandbox and of the Python console in it:

* an ordinary program runs as outside the sandbox, and the way in which a program ends is told;
* a sandbox that is missing or can't start says so, blames no program, and leaves no open files and
  processes;
* code in the console is answered with its output, its error or the limit that it passed, and a session
  keeps its names until a call is stopped.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.cases import cases
from tests.support.stubs import until
from treetune.domains.sandbox import bubblewrap, program
from treetune.domains.sandbox.base import ProgramLimits, ProgramOutcome
from treetune.domains.sandbox.bubblewrap import Bubblewrap, choose_sandbox
from treetune.domains.sandbox.inside import cases as inside
from treetune.domains.sandbox.program import UnsafeLocal
from treetune.domains.sandbox.python_tool import PythonSession, PythonTool
from treetune.exceptions import SandboxUnavailable

PROGRAMS = Path(__file__).with_name("programs.txt")
LONG_INPUT = ["reads all of its input", "import sys; print(len(sys.stdin.read()))", "x" * 200_000, "200000\n"]


@pytest.mark.parametrize(
    ("name", "code", "stdin", "stdout"),
    [*cases(PROGRAMS, "ordinary"), LONG_INPUT],
    ids=lambda value: value[:20],
)
def test_an_ordinary_program_runs(sandbox: Bubblewrap, name: str, code: str, stdin: str, stdout: str) -> None:
    outcome = sandbox.run(code, stdin=stdin, files={"helper.py": "NUMBER = 7"})
    assert (outcome.stdout, outcome.stderr, outcome.exit) == (stdout, "", 0)


def test_sets_of_strings_have_the_same_order_in_every_run(sandbox: Bubblewrap) -> None:
    code = "print({str(number) for number in range(100)})"
    assert len({sandbox.run(code).stdout for _ in range(3)}) == 1


@pytest.mark.parametrize(("name", "code", "exit", "killed_by"), cases(PROGRAMS, "ends"))
@pytest.mark.parametrize("runner_name", ["bubblewrap", "unsafe_local"])
def test_the_end_of_a_program_is_told(
    request: pytest.FixtureRequest,
    runner_name: str,
    name: str,
    code: str,
    exit: int | None,
    killed_by: str | None,
) -> None:
    runner = request.getfixturevalue("sandbox") if runner_name == "bubblewrap" else UnsafeLocal()
    outcome: ProgramOutcome = runner.run(code, limits=ProgramLimits(seconds=1, output_kib=64))
    assert (outcome.exit, outcome.killed_by) == (exit, killed_by)
    assert len(outcome.stdout) + len(outcome.stderr) <= 64 * 1024


def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treetune.domains.sandbox.bubblewrap.shutil.which", lambda *_, **__: None)
    monkeypatch.setattr(bubblewrap, "_find_missing", bubblewrap._find_missing.__wrapped__)
    with pytest.raises(SandboxUnavailable, match="apt install bubblewrap"):
        choose_sandbox()


def test_a_sandbox_that_cannot_start_says_so_and_blames_no_program(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubblewrap, "_root_folder", lambda: ("--ro-bind", "/not/there", "/a"))
    with pytest.raises(SandboxUnavailable, match="/not/there"):
        sandbox.run("print(1)")


def test_a_process_with_many_open_files_can_run_programs(sandbox: Bubblewrap) -> None:
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


def test_the_process_id_of_a_program_that_has_ended_stays_taken_until_it_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were it freed before the kill, another process could get the number and be killed."""
    is_unreaped: list[bool] = []

    def record_whether_unreaped(pid: int, number: int) -> None:
        is_unreaped.append(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)

    monkeypatch.setattr(inside.os, "kill", record_whether_unreaped)
    monkeypatch.setattr(inside.os, "killpg", record_whether_unreaped)
    output, write = os.pipe()
    pid = os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
    os.close(write)
    try:
        assert inside._follow_program(pid, output, seconds=60.0, most_bytes=100) == (0, False, b"")
    finally:
        os.close(output)
    assert is_unreaped == [True, True]
    with pytest.raises(ChildProcessError):  # it is reaped at the end
        os.waitpid(pid, os.WNOHANG)


class FailingStart(OSError):
    """A failure other than that bubblewrap is missing."""


@pytest.mark.parametrize("step", ["subprocess.Popen", "wait_until_readable"])
def test_a_program_that_cannot_start_leaves_no_open_files(
    step: str, sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FailingStart(errno.EAGAIN, "Resource temporarily unavailable")

    sandbox.run("1")  # fills the caches
    for module in ("program", "bubblewrap") if step == "wait_until_readable" else ("program",):
        monkeypatch.setattr(f"treetune.domains.sandbox.{module}.{step}", fail)
    files_before, children_before = os.listdir("/proc/self/fd"), psutil.Process().children()
    with pytest.raises(FailingStart):
        sandbox.run("1")
    assert os.listdir("/proc/self/fd") == files_before
    assert psutil.Process().children() == children_before


def start_with(starter: str, work: Path, on_start: Callable[[], None] = lambda: None) -> None:
    """Starts an empty program by a Python program in place of bubblewrap."""
    program.start_program(
        [sys.executable, "-c", starter],
        code="",
        files={},
        limits={},
        work=str(work),
        path=[],
        uid=None,
        stdin=subprocess.DEVNULL,
        on_start=on_start,
    )


def test_a_start_that_fails_leaves_no_process_that_the_command_has_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    starter = (
        "import pathlib, subprocess, time;"
        "child = subprocess.Popen(['sleep', '600']);"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid));"
        "time.sleep(600)"
    )
    children: list[psutil.Process] = []

    def fail_once_it_has_a_child() -> None:
        assert until(lambda: pid_file.is_file() and pid_file.read_text() != "", 60)
        children.append(psutil.Process(int(pid_file.read_text())))
        raise FailingStart(errno.EAGAIN, "Resource temporarily unavailable")

    with pytest.raises(FailingStart):
        start_with(starter, tmp_path, fail_once_it_has_a_child)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert children
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


# The console in which a model's code runs


@pytest.fixture(scope="module")
def tool(sandbox: Bubblewrap) -> PythonTool:
    return PythonTool(sandbox=sandbox, limits=ProgramLimits(seconds=2, memory_mib=128), most_bytes=200)


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
def test_code_is_answered_with_its_output(tool: PythonTool, code: str, answer: str) -> None:
    assert tool.run(code) == answer


@pytest.mark.parametrize("code", ["1 / 0", "1 +", "raise ValueError('ü')", "def f(): f()\nf()"])
def test_an_error_is_answered_with_a_traceback_without_our_files(tool: PythonTool, code: str) -> None:
    answer = tool.run(code)
    assert "Error" in answer and "boot.py" not in answer and "main.py" not in answer


def test_of_a_long_text_the_beginning_and_the_end_are_kept(tool: PythonTool) -> None:
    answer = tool.run("print('a' * 1000 + 'b' * 1000)")
    assert answer.startswith("a" * 100)
    assert answer.endswith("b" * 99 + "\n")
    assert "1801 bytes left out" in answer


STOPPED = {
    "loop": ("while True: pass", "more than 2 s"),
    "leave": ("import os; os._exit(0)", "ended the interpreter"),
    "fill": (
        "import os, time\nos.fork(), os.fork()\nx = b'x' * (50 << 20)\ntime.sleep(9)",
        "more than 128 MiB",
    ),
}


@pytest.mark.parametrize(("code", "answer"), STOPPED.values(), ids=STOPPED)
def test_code_that_passes_a_limit_is_answered_with_the_limit(
    tool: PythonTool, code: str, answer: str
) -> None:
    printed = tool.run(code)
    assert printed.startswith("[the code ") and answer in printed


def test_names_stay_in_a_session(session: PythonSession) -> None:
    assert session.run("x = 2\ndef f(y): return x * y") == ""
    assert session.run("f(3)") == "6\n"
    assert "ZeroDivisionError" in session.run("1 / 0")
    assert session.run("import os; open('a', 'w').write('b')") == "1\n"
    assert session.run("open('a').read(), x") == "('b', 2)\n"


def test_a_session_goes_on_after_a_call_that_was_stopped(session: PythonSession) -> None:
    session.run("x = 2")
    for code, answer in STOPPED.values():
        printed = session.run(code)
        assert printed.startswith("[the code ") and answer in printed
        assert session.run("1 + 1") == "2\n"
    assert "NameError" in session.run("x")


def test_code_that_writes_into_the_channel_spoils_its_own_answer_alone(session: PythonSession) -> None:
    flood = (
        "import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'x' * 99999)\n    except OSError: pass"
    )
    assert session.run(flood) == "[the code ended the interpreter]\n"
    assert session.run("1") == "1\n"


def test_without_bubblewrap_there_are_calls_and_no_sessions() -> None:
    tool = PythonTool(sandbox=UnsafeLocal())
    assert tool.run("1 + 1") == "2\n"
    with pytest.raises(ValueError, match="keeps no names"):
        tool.session()


def test_a_sandbox_that_leaves_a_process_behind_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that it leaves behind holds the pipe of errors open."""
    monkeypatch.setattr(program, "END_SECONDS", 0.5)
    pid_file = tmp_path / "pid"
    starter = (
        "import pathlib, subprocess, sys;"
        f"left = subprocess.Popen(['sleep', '600'], start_new_session=True);"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(left.pid));"
        "print('no namespaces here', file=sys.stderr)"
    )
    messages: list[str] = []

    def start() -> None:
        with pytest.raises(SandboxUnavailable) as refused:
            start_with(starter, tmp_path)
        messages.append(str(refused.value))

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(timeout=60)
    psutil.Process(int(pid_file.read_text())).kill()
    assert len(messages) == 1, "it waited for the process that was left behind"
    assert "did not start a program: no namespaces here" in messages[0]
