"""A run beside others says so, and its threads sleep while they wait for each other."""

from __future__ import annotations

from treetune.runtime.busy import WAIT_POLICY, cores_at_work_for_others, heed_others


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


def test_others_are_counted_in_cores():
    assert cores_at_work_for_others() >= 0
