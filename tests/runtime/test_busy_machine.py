"""A run beside others says so, and its threads sleep while they wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys

from treetune.runtime import busy
from treetune.runtime.busy import (
    WAIT_POLICY,
    cores_at_work_for_others,
    heed_others,
    processes_below,
    root_of_the_run,
)


def test_beside_others_threads_sleep_while_they_wait_and_that_is_said():
    environment: dict[str, str] = {}
    said = heed_others(1.2, 2, environment)
    assert "1.2 of 2 cores" in said
    assert environment == {WAIT_POLICY: "PASSIVE"}


def test_somebodys_own_choice_is_left():
    environment = {WAIT_POLICY: "ACTIVE"}
    assert "ACTIVE" in heed_others(1.2, 2, environment)
    assert environment == {WAIT_POLICY: "ACTIVE"}


def test_on_a_quiet_machine_nothing_is_said_or_changed():
    environment: dict[str, str] = {}
    assert heed_others(0.2, 2, environment) is None
    assert environment == {}


def test_others_are_counted_in_cores_without_the_run_itself(monkeypatch):
    monkeypatch.setattr(busy, "LOOKED_FOR_S", 0.0)
    second = os.sysconf("SC_CLK_TCK")
    everyone, own = iter([50 * second, 57 * second]), iter([10 * second, 13 * second])
    clock = iter([100.0, 102.0])
    others = cores_at_work_for_others(lambda: next(everyone), lambda: next(own), lambda: next(clock))
    assert others == 2.0  # of seven seconds of work in two seconds, the run did three


def test_all_ranks_of_a_launcher_and_what_they_start_are_one_run():
    rank = "import subprocess; child = subprocess.Popen(['cat']); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sibling:
        grandchild = int(sibling.stdout.readline())
        found = processes_below(os.getpid())
        sibling.stdin.close()
    assert {os.getpid(), sibling.pid, grandchild} <= found
    assert os.getppid() not in found


def test_a_rank_counts_from_its_launcher_and_a_single_process_from_itself():
    assert root_of_the_run({"LOCAL_RANK": "0"}) == os.getppid()
    assert root_of_the_run({}) == os.getpid()
