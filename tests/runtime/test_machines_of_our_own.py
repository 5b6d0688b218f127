"""Two machines made of Linux namespaces, each with the launcher and a rank: what can't be tried with threads.

`tests/endurance/cluster` has more: all wrong starts, runs that are struck on a real SLURM cluster and over
ssh.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "tests/endurance/cluster"
LACKING = 2
"""The exit code of a script that can't make machines here."""
NOT_HERE = "no machines can be made here:"


@pytest.mark.slow
def test_a_folder_that_the_machines_do_not_share_ends_the_start_with_their_names() -> None:
    command = [sys.executable, str(FOLDER / "try_starts.py"), "--only", "folder"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == LACKING and done.stderr.startswith("try_starts.py: "):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node2 doesn't see what node1 writes into" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_of_the_machines_stays_when_their_maker_is_ended(tmp_path: Path, number: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys, time; sys.path.insert(0, {str(FOLDER)!r})\n"
        "from machines import enclosed, machines, missing\n"
        "if lacking := missing({'ip': 'iproute2', 'unshare': 'util-linux'}):\n"
        f"    sys.exit(print({NOT_HERE!r}, lacking))\n"
        "shared = enclosed()\n"
        "with machines(['a', 'b'], shared) as made:\n"
        "    print(made['b'].run('hostname').stdout.strip(), shared, flush=True)\n"
        "    time.sleep(600)\n"
    )
    maker = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None and maker.stderr is not None
    try:
        line = maker.stdout.readline()
        if line.startswith(NOT_HERE):
            pytest.skip(line.strip())
        assert line, maker.stderr.read()
        name, shared = line.split()
        assert name == "b"
        maker.send_signal(number)
        maker.wait(60)
        assert not Path(shared).exists()
        assert maker.stdout.read() == "", "the end of its output: nobody holds it any more"
    finally:
        maker.terminate()  # it takes its machines and their folder with it
        maker.communicate(timeout=60)
