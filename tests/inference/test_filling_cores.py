"""On a CPU an engine has as many servers as fill the cores that the run may use, as far as memory goes."""

from __future__ import annotations

import os

import pytest

from treetune.inference.settings import GIB, VllmSettings, host_memory, servers_that_fill


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("threads", "cache", "environment", "memory", "servers"),
    [
        (1, 1, {}, 256, 8),
        (1, 1, {}, 24, 3),
        (1, 1, {}, 4, 1),
        (1, 5, {}, 64, 4),
        (4, 1, {}, 256, 4),
        (32, 1, {}, 256, 1),
        (1, 1, {"OMP_NUM_THREADS": "2"}, 256, 2),
        (1, 1, {"OMP_NUM_THREADS": "1"}, 256, 1),
        (1, 1, {"OMP_NUM_THREADS": "many"}, 256, 8),
        (1, 1, {"WORLD_SIZE": "1"}, 256, 8),
        (1, 1, {"WORLD_SIZE": "2"}, 256, 1),
    ],
)
def test_servers_are_as_many_as_cores_memory_and_other_runs_leave_room_for(
    cores: None, threads: int, cache: int, environment: dict[str, str], memory: int, servers: int
) -> None:
    assert servers_that_fill(threads, cache, environment, memory=memory * GIB) == servers


def test_an_engine_on_a_cpu_fills_the_cores_unless_it_is_told_otherwise(
    cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    room = host_memory() // 2 // (4 * GIB)
    assert VllmSettings().replicas_on("cpu") == max(1, min(2, room))
    assert VllmSettings(replicas=1).replicas_on("cpu") == 1
    assert VllmSettings(replicas=5).replicas_on("cpu") == 5
    assert VllmSettings(omp_threads=2).replicas_on("cpu") == 1
    assert VllmSettings(servers="per_rank").replicas_on("cpu") == 1
    assert VllmSettings().replicas_on("cuda") == 1
    assert VllmSettings(devices=(0, 1)).replicas_on("cuda") == 2


def test_servers_that_fill_the_cores_have_a_thread_each(cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treetune.inference.settings.host_memory", lambda: 1024 * GIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    assert (VllmSettings().replicas_on("cpu"), VllmSettings().threads(1)) == (6, 1)
