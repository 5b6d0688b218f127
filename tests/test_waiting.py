"""OpenMP's threads sleep soon while they wait, in every process of a run, unless the user has said otherwise.

OMP_DISPLAY_ENV has libgomp print what it took from the environment when it was loaded: a variable that
is set after PyTorch was imported does not show there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from treetune.waiting import VARIABLES_OF_SHORT_WAITS, WAITING_VARIABLES, wait_briefly

SOURCES = Path(__file__).parents[1] / "src"
OTHER_DEFAULT = "4711"


def spin_count_of(*arguments: str, **environment: str) -> str | None:
    """Returns the turns of the waiting loop that OpenMP has in a Python process; None where PyTorch's OpenMP
    isn't libgomp."""
    inherited = {name: text for name, text in os.environ.items() if name not in WAITING_VARIABLES}
    inherited |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(SOURCES), **environment}
    done = subprocess.run(
        [sys.executable, *arguments], env=inherited, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    return told[0] if told else None


@pytest.fixture(scope="module")
def libgomp() -> None:
    if spin_count_of("-c", "import torch", GOMP_SPINCOUNT=OTHER_DEFAULT) != OTHER_DEFAULT:
        pytest.skip("PyTorch's OpenMP isn't libgomp here")


@pytest.mark.usefixtures("libgomp")
@pytest.mark.parametrize(
    "imports",
    [
        "import treetune.main, treetune.runtime.commands",  # a command, and a rank
        "import treetune.runtime.commands",  # a program of one's own
        "import treetune.lab.commands, torch",
        "import treetune.processes.worker, torch",  # graders
    ],
)
def test_the_policy_is_there_before_openmp_is_loaded(imports: str) -> None:
    assert spin_count_of("-c", imports) == VARIABLES_OF_SHORT_WAITS["GOMP_SPINCOUNT"]


@pytest.mark.usefixtures("libgomp")
def test_processes_that_a_run_starts_have_it_too() -> None:
    program = "import treetune.main, subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'])"
    assert spin_count_of("-c", program) == VARIABLES_OF_SHORT_WAITS["GOMP_SPINCOUNT"]


@pytest.mark.usefixtures("libgomp")
def test_a_users_own_number_wins() -> None:
    program = "import treetune.runtime.commands"
    assert spin_count_of("-c", program, GOMP_SPINCOUNT=OTHER_DEFAULT) == OTHER_DEFAULT


@pytest.mark.parametrize("choice", WAITING_VARIABLES)
def test_nothing_is_added_to_a_users_choice(choice: str) -> None:
    environment = {choice: "ACTIVE"}
    wait_briefly(environment)
    assert environment == {choice: "ACTIVE"}


def test_where_nothing_is_chosen_threads_spin_shortly() -> None:
    environment = {"OMP_NUM_THREADS": "2"}
    wait_briefly(environment)
    assert environment == {"OMP_NUM_THREADS": "2"} | VARIABLES_OF_SHORT_WAITS
