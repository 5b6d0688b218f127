"""A run beside others says so, and its threads sleep while they wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from treetune.runtime import machine
from treetune.runtime.machine import (
    WAIT_POLICY,
    cores_at_work_for_others,
    processes_of_the_run,
    wait_policy_beside,
)


def test_beside_others_threads_sleep_while_they_wait_and_that_is_said():
    environment: dict[str, str] = {}
    said = wait_policy_beside(1.2, 2, environment)
    assert said is not None and "1.2 of 2 cores" in said
    assert environment == {WAIT_POLICY: "PASSIVE"}


def test_somebodys_own_choice_is_left():
    environment = {WAIT_POLICY: "ACTIVE"}
    assert "ACTIVE" in (wait_policy_beside(1.2, 2, environment) or "")
    assert environment == {WAIT_POLICY: "ACTIVE"}


def test_on_a_quiet_machine_nothing_is_said_or_changed():
    environment: dict[str, str] = {}
    assert wait_policy_beside(0.2, 2, environment) is None
    assert environment == {}


def test_others_are_counted_in_cores_without_the_run_itself(monkeypatch: pytest.MonkeyPatch):
    everyone, own, clock = iter([50.0, 57.0]), iter([10.0, 13.0]), iter([100.0, 102.0])
    monkeypatch.setattr(machine, "_seconds_of_cores", lambda: next(everyone))
    monkeypatch.setattr(machine, "_seconds_of_the_run", lambda: next(own))
    still = SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: next(clock))
    monkeypatch.setattr(machine, "time", still)
    assert cores_at_work_for_others() == 2.0  # of seven seconds of work in two seconds, the run did three


def test_work_of_this_process_is_the_runs_and_on_these_cores():
    before = machine._seconds_of_the_run()
    sum(i * i for i in range(3_000_000))
    assert before < machine._seconds_of_the_run() <= machine._seconds_of_cores()


def test_all_ranks_of_a_launcher_and_what_they_start_are_one_run():
    rank = "import subprocess; child = subprocess.Popen(['cat']); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sibling:
        assert sibling.stdin is not None and sibling.stdout is not None
        grandchild = int(sibling.stdout.readline())
        found = {process.pid for process in processes_of_the_run({})}
        sibling.stdin.close()
    assert {os.getpid(), sibling.pid, grandchild} <= found
    assert os.getppid() not in found


def test_a_rank_counts_from_its_launcher():
    assert processes_of_the_run({"LOCAL_RANK": "0"})[0] == psutil.Process(os.getppid())


@pytest.mark.parametrize("error", [PermissionError("/proc/stat"), psutil.AccessDenied(1)])
def test_where_proc_says_nothing_others_do_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception):
    def refuse() -> float:
        raise error

    monkeypatch.setattr(machine, "_seconds_of_cores", refuse)
    assert cores_at_work_for_others() == 0.0
