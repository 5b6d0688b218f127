"""Programs that want out of their sandbox, or beyond their limits, get neither, and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.hostile_programs import COUNT, HostileProgram, Trap, hostile_programs
from treetune_domains.sandbox.base import Limits
from treetune_domains.sandbox.bubblewrap import Bubblewrap, Started, uids_of_programs
from treetune_domains.sandbox.program import descendants

SAMPLE = [one for one in hostile_programs(seed=11) if one.kind != "forging"][:30]
"""A sample; tests/endurance/hostile.py programs runs them all."""

LIMITS = Limits(seconds=1, memory_mib=128, disk_mib=8, output_kib=64)


def test_there_are_as_many_as_are_spoken_of_and_all_can_be_compiled() -> None:
    programs = hostile_programs()
    assert len({(one.kind, one.name) for one in programs}) == len(programs) >= COUNT
    for one in programs:
        compile(one.code.replace("$PORT", "1").replace("$PID", "1"), one.name, "exec")


@pytest.mark.parametrize("program", SAMPLE, ids=lambda one: f"{one.kind}: {one.name}")
def test_a_hostile_program_gets_nothing(sandbox: Bubblewrap, program: HostileProgram, tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    with Trap(tmp_path).set() as trap:
        outcome = sandbox.run(trap.code(program), stdin="in\n", limits=LIMITS)
        assert trap.faults(outcome.stdout + outcome.stderr) == []
    assert set(descendants(os.getpid())) == before
    assert not any(_owner(entry) in uids_of_programs() for entry in Path("/proc").iterdir())


def test_a_trap_notices_what_a_program_without_a_sandbox_gets(tmp_path: Path) -> None:
    from treetune_domains.sandbox.program import UnsafeLocal

    with Trap(tmp_path).set() as trap:
        for code in ("print(open('$SECRET').read())", "open('$OUTSIDE/file', 'w')", "print('ESCAPED: x')"):
            outcome = UnsafeLocal().run(trap.code(HostileProgram("", "", code)))
            assert trap.faults(outcome.stdout)
            for file in (tmp_path / "outside").iterdir():
                file.unlink()
        reach = "import socket; socket.create_connection(('127.0.0.1', $PORT)).recv(1)"
        UnsafeLocal().run(trap.code(HostileProgram("", "", reach)), limits=Limits(seconds=1))
        assert trap.faults("") == ["it reached AF_INET"]


def test_memory_is_counted_over_all_processes(sandbox: Bubblewrap) -> None:
    code = "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (40 << 20)\ntime.sleep(60)"
    assert sandbox.run(code, limits=Limits(seconds=20, memory_mib=128)).killed_by == "memory"


def test_processor_time_is_counted_over_all_processes(sandbox: Bubblewrap) -> None:
    code = "import os\nfor _ in range(2): os.fork()\nwhile True: pass"
    assert sandbox.run(code, limits=Limits(seconds=30, cpu_seconds=1)).killed_by == "time"


def test_a_program_ends_with_the_thread_that_ran_it(sandbox: Bubblewrap) -> None:
    import subprocess
    import sys
    import time

    # The process that grades is killed in the middle: nobody is left who could end the program.
    script = (
        "import os, sys\nfrom treetune_domains.sandbox.bubblewrap import Bubblewrap, Started\n"
        "from treetune_domains.sandbox.base import Limits\nimport subprocess\n"
        "code = 'import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(600)'\n"
        "started = Started(Bubblewrap(), code, {}, Limits(), stdin=subprocess.DEVNULL)\n"
        "print(started.process.pid, flush=True)\nimport time; time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as grader:
        assert grader.stdout is not None
        monitor = int(grader.stdout.readline())
        while len(pids := [monitor, *descendants(monitor)]) < 4:
            time.sleep(0.01)
        grader.kill()
    for _ in range(1000):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.01)
    pytest.fail("programs outlived the process that graded them")


def test_a_session_is_ended_with_what_it_started(sandbox: Bubblewrap) -> None:
    import subprocess

    code = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(600)"
    started = Started(sandbox, code, {}, Limits(), stdin=subprocess.DEVNULL)
    pids = descendants(started.process.pid)
    started.kill()
    started.process.communicate()
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def _owner(entry: Path) -> int:
    try:
        return entry.stat().st_uid
    except OSError:
        return -1
