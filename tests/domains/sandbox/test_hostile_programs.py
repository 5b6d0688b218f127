"""Promises of the sandbox about hostile programs:

* none leaves the sandbox, passes its limits or leaves a process, and a trap would notice it;
* programs end with the process that runs them;
* the sandbox works for a user who is not root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import annotated_types
import pytest
import typing_extensions

import treetune
from tests.support.hostile_programs import COUNT, HostileProgram, Trap, hostile_programs
from treetune.domains.sandbox import bubblewrap
from treetune.domains.sandbox.base import ProgramLimits
from treetune.domains.sandbox.bubblewrap import Bubblewrap, ConfinedProgram, uids_of_programs
from treetune.domains.sandbox.program import UnsafeLocal, find_descendants

SAMPLE = [program for program in hostile_programs(seed=11) if program.kind != "forging"][:30]
"""A sample; tests/endurance/hostile.py programs runs them all."""

LIMITS = ProgramLimits(seconds=1, memory_mib=128, disk_mib=8, output_kib=64)


def test_there_are_as_many_hostile_programs_as_documented_and_all_can_be_compiled() -> None:
    programs = hostile_programs()
    assert len({(program.kind, program.name) for program in programs}) == len(programs) >= COUNT
    for program in programs:
        compile(program.code.replace("$PORT", "1").replace("$PID", "1"), program.name, "exec")


@pytest.mark.parametrize("program", SAMPLE, ids=lambda program: f"{program.kind}: {program.name}")
def test_a_hostile_program_reaches_nothing_and_leaves_nothing(
    sandbox: Bubblewrap, program: HostileProgram, tmp_path: Path
) -> None:
    # Tests before this one may have left servants of graders in sandboxes, which end with this process at the
    # latest.
    before, programs_before = set(find_descendants(os.getpid())), _processes_of_programs()
    with Trap(tmp_path).set() as trap:
        outcome = sandbox.run(trap.code(program), stdin="in\n", limits=LIMITS)
        assert trap.faults(outcome.stdout + outcome.stderr) == []
    assert set(find_descendants(os.getpid())) <= before
    assert _processes_of_programs() <= programs_before


def test_a_trap_notices_what_a_program_without_a_sandbox_gets(tmp_path: Path) -> None:
    with Trap(tmp_path).set() as trap:
        for code in ("print(open('$SECRET').read())", "open('$OUTSIDE/file', 'w')", "print('ESCAPED: x')"):
            outcome = UnsafeLocal().run(trap.code(HostileProgram("", "", code)))
            assert trap.faults(outcome.stdout)
            for file in (tmp_path / "outside").iterdir():
                file.unlink()
        reach = "import socket; socket.create_connection(('127.0.0.1', $PORT)).recv(1)"
        UnsafeLocal().run(trap.code(HostileProgram("", "", reach)), limits=ProgramLimits(seconds=1))
        assert trap.faults("") == ["it reached AF_INET"]


def test_memory_and_processor_time_are_counted_over_all_processes(sandbox: Bubblewrap) -> None:
    fill = "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (40 << 20)\ntime.sleep(60)"
    assert sandbox.run(fill, limits=ProgramLimits(seconds=20, memory_mib=128)).killed_by == "memory"
    spin = "import os\nfor _ in range(2): os.fork()\nwhile True: pass"
    assert sandbox.run(spin, limits=ProgramLimits(seconds=30, cpu_seconds=1)).killed_by == "time"


LASTING = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(600)"
GRADER = f"""
import subprocess, time
from treetune.domains.sandbox.bubblewrap import Bubblewrap, ConfinedProgram
from treetune.domains.sandbox.base import ProgramLimits
started = ConfinedProgram(Bubblewrap(), {LASTING!r}, {{}}, ProgramLimits(), stdin=subprocess.DEVNULL)
print(started.process.pid, flush=True)
time.sleep(600)
"""


def test_a_program_ends_with_the_process_that_ran_it(sandbox: Bubblewrap) -> None:
    # The process that grades is killed meanwhile, so that it can't end the program.
    with subprocess.Popen([sys.executable, "-c", GRADER], stdout=subprocess.PIPE) as grader:
        assert grader.stdout is not None
        monitor = int(grader.stdout.readline())
        while len(pids := [monitor, *find_descendants(monitor)]) < 4:
            time.sleep(0.01)
        grader.kill()
    for _ in range(1000):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.01)
    pytest.fail("programs outlived the process that graded them")


def test_a_session_is_ended_with_what_it_started(sandbox: Bubblewrap) -> None:
    started = ConfinedProgram(sandbox, LASTING, {}, ProgramLimits(), stdin=subprocess.DEVNULL)
    pids = find_descendants(started.process.pid)
    started.kill()
    started.process.communicate()
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def _processes_of_programs() -> set[str]:
    """Returns the ids of the processes whose user is one of this process's sandboxed programs."""
    uids = uids_of_programs()
    return {entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and _owner(entry) in uids}


def _owner(entry: Path) -> int:
    try:
        return entry.stat().st_uid
    except OSError:
        return -1


@pytest.mark.parametrize(("more", "uids"), [(256, 256), (255, 0), (1, 0), (0, 0)])
def test_programs_get_only_user_numbers_that_are_mapped(
    more: int, uids: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may map only some of the 256 numbers. Programs with one of the others would not start."""
    first_uid = (1 << 30) + os.getpid() * 256
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(bubblewrap, "_mapped_uids", lambda: range(first_uid + more))
    assert len(uids_of_programs()) == uids
    assert all(bubblewrap._choose_uid() in range(1, first_uid + more) for _ in range(300))


# The sandbox of a user who is not root

NOBODY = 65534
PYTHON = "/usr/bin/python3"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder that every user can read."""
    path = Path(tempfile.mkdtemp(prefix="sandbox-of-a-user-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user runs all other tests of the sandbox")
def test_the_sandbox_works_for_a_user_who_is_not_root(sandbox: Bubblewrap, folder: Path) -> None:
    new_enough = [PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if not Path(PYTHON).exists() or subprocess.run(new_enough).returncode:
        pytest.skip(f"needs a {PYTHON} of 3.11 or later, that any user can run")
    shutil.copy(typing_extensions.__file__, folder)
    for package in (treetune, annotated_types):
        assert package.__file__ is not None
        source = Path(package.__file__).parent
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    done = subprocess.run(
        [PYTHON, "-c", Path(__file__).with_name("unprivileged_user.txt").read_text()],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "held\n", done.stderr
