"""Machines that share a file system: what one writes into its memory, another doesn't see.

Two machines made of Linux namespaces, each with the launcher and a rank, have what can't be tried with
threads; `tests/endurance/cluster` has more: all wrong starts, runs that are struck on a SLURM cluster and
over ssh.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.small_run import small
from treetune.engine.settings import VllmSettings
from treetune.exceptions import MachinesDiffer
from treetune.runtime import several_machines
from treetune.runtime.policy_server import refuse_unreachable_server
from treetune.runtime.several_machines import (
    MachineFacts,
    MachineView,
    describe_machine_differences,
    refuse_machines_that_differ,
)
from treetune.runtime.weights_folder import make_weights_folder
from treetune.trainer.ranks import Meeting


def rank(*machines: str, number: int = 0) -> Any:
    """A rank on ``machines[number]``."""
    return SimpleNamespace(
        rank=number, is_first=number == 0, barrier=lambda name: None, machines=lambda: list(machines)
    )


def weights_folders(
    experiment: Path, purpose: str, *machines: str, in_memory: bool = True
) -> list[tuple[Path, Path, bool]]:
    """What `weights_folder` returns to each rank. Ranks are threads, which exchange what they made."""
    everyones: dict[int, Any] = {}
    all_are_there = threading.Barrier(len(machines), timeout=60)

    def of_rank(number: int) -> tuple[Path, Path, bool]:
        def exchange(name: str, own: Any) -> list[Any]:
            everyones[number] = own
            all_are_there.wait()
            return [everyones[other] for other in range(len(machines))]

        ranks = rank(*machines, number=number)
        ranks.exchange = exchange
        return make_weights_folder(experiment, purpose, ranks, in_memory)

    with ThreadPoolExecutor(len(machines)) as threads:
        return list(threads.map(of_rank, range(len(machines))))


@pytest.mark.parametrize("purpose", ["run", "evaluation-0"])
def test_each_machine_has_weights_in_its_memory_and_all_meet_beside_the_experiment(
    tmp_path: Path, purpose: str
) -> None:
    memory = Path("/dev/shm")
    of_each = weights_folders(tmp_path, purpose, "a", "a", "b", "b")
    folders, meetings, writes = zip(*of_each, strict=True)
    assert writes == (True, False, True, False), "the first rank of each machine"
    assert folders[0] == folders[1] != folders[2] == folders[3], "machines may be containers on one"
    assert {folder.parent for folder in folders} == {memory} and all(folder.is_dir() for folder in folders)
    assert len({*meetings}) == 1 and meetings[0].parent == tmp_path and meetings[0].is_dir()
    ((alone, meeting, writes_alone),) = weights_folders(tmp_path, purpose, "a")
    assert (alone.parent, meeting, writes_alone) == (memory, alone, True)
    shared = weights_folders(tmp_path, purpose, "a", "b", in_memory=False)
    assert [one[:2] for one in shared] == 2 * [(meetings[0], meetings[0])], "a folder that all see"
    assert [one[2] for one in shared] == [True, False]
    for folder in {*folders, alone}:
        shutil.rmtree(folder)


def test_one_server_for_ranks_on_several_machines_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path, engine=VllmSettings(servers="one"))
    with pytest.raises(ValueError, match=r"on 2 machines \(a, b\)\. .* set it to 'per_rank'"):
        refuse_unreachable_server(config, rank("b", "a"))
    refuse_unreachable_server(config, rank("a", "a"))
    apart = small(tmp_path, engine=VllmSettings(servers="per_rank"))
    refuse_unreachable_server(apart, rank("b", "a"))


# What machines must have alike, and see of each other

FIRST = MachineFacts(
    machine=0,
    name="node1",
    interface="eth0",
    address="10.0.0.1",
    port=4000,
    clock=1000.0,
    code="aaaa",
    own_modules={"mine": "1"},
    python="3.12.1",
    packages={"torch": "2.13.0", "vllm": "0.32.0"},
    configuration="cccc",
)
SECOND = replace(FIRST, machine=1, name="node2", address="10.0.0.2", clock=1002.0)
PLACE = Path("/scratch/experiments/small")


def found(second: MachineFacts = SECOND, *views: MachineView) -> list[str]:
    """With two ranks on the second machine."""
    return describe_machine_differences(
        [FIRST, second, second], views or (MachineView(), MachineView(), MachineView()), PLACE
    )


def test_machines_that_are_alike_and_see_each_other_are_let_through() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"code": "bbbb"},
            "node2 has other code of treetune than node1: use one checkout, or the same commit",
        ),
        (
            {"own_modules": {"mine": "2"}},
            "node2 has another mine, which the configuration imports, than node1",
        ),
        ({"own_modules": {}}, "node2 has another mine"),
        ({"python": "3.11.7"}, "node2 has Python 3.11.7, and node1 3.12.1"),
        (
            {"packages": {"torch": "2.13.0", "vllm": "0.33.0"}},
            "node2 has vllm 0.33.0, and node1 0.32.0: run ./scripts/setup.sh",
        ),
        ({"packages": {"torch": "2.13.0"}}, "node2 has vllm none, and node1 0.32.0"),
        ({"configuration": "dddd"}, "node2 has another configuration than node1: use the same files"),
        ({"clock": 905.0}, "node2 has a clock that differs by -95 s from node1's"),
        ({"name": "node1"}, "node1 is the name of two machines: give each another host name"),
    ],
)
def test_what_a_machine_has_otherwise_is_told_once_with_its_name(change: dict[str, Any], told: str) -> None:
    (line,) = found(replace(SECOND, **change))
    assert line.startswith(told)


def test_what_a_machine_does_not_see_or_reach_is_told_with_both_names() -> None:
    blind = MachineView(unseen=(0,))
    deaf = MachineView(unreached=((0, "timed out"),))
    assert found(SECOND, MachineView(), blind, deaf) == [
        f"node2 doesn't see what node1 writes into {PLACE}: it must be a folder of one file system that all"
        " machines have there (APP_DIRECTORY)",
        "node2 can't reach node1 at 10.0.0.1 (eth0): timed out; set GLOO_SOCKET_IFNAME and"
        " NCCL_SOCKET_IFNAME (SOCKET_IFNAME for scripts/slurm/submit.sh) to the interface that reaches the"
        " others, and open all ports between the machines",
    ]


def test_all_the_others_have_one_deadline_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on while this process sleeps, and only then."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(several_machines, "time", clock)
    marks = {number: tmp_path / f"mark {number}" for number in range(1, 6)}
    marks[2].touch()
    assert several_machines._find_unseen(marks) == (1, 3, 4, 5)
    assert sum(slept) < several_machines.SEEN_WITHIN_S + 1


@pytest.mark.parametrize("shared", [True, False])
def test_all_ranks_look_and_say_the_same(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads stand for two machines, which have one folder or each its own."""
    from tests.support.tiny_trainer import free_port

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that it is as it was afterwards
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setattr(several_machines, "SEEN_WITHIN_S", 0.5)
    names = iter(["node1", "node2"])
    own: dict[int, str] = {}
    monkeypatch.setattr(
        several_machines.platform, "node", lambda: own.setdefault(threading.get_ident(), next(names))
    )
    port, said, meetings = str(free_port()), {}, {}

    def machine(rank: int) -> None:
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        meetings[rank] = Meeting.join(environment | {"CROSS_SIZE": "2", "CROSS_RANK": str(rank)}, 30)
        try:
            directory = tmp_path / ("both" if shared else str(rank))
            refuse_machines_that_differ(meetings[rank], directory, {"seed": 1})
        except MachinesDiffer as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=machine, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not list(tmp_path.rglob(".machine-*")), "what was written to be seen is taken away"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo", "NCCL takes the interface that was looked at"
    if shared:
        assert said == {}
    else:
        assert len(set(said.values())) == 2, "the folder's name is each machine's own here"
        for text in said.values():
            lines = text.splitlines()
            assert lines[0] == "the 2 machines can't do this run together:"
            assert all("doesn't see what node" in line for line in lines[1:]) and len(lines) == 3


# Machines of our own making

FOLDER = Path(__file__).parents[2] / "tests/endurance/cluster"
LACKING = 2
"""The exit code of a script that can't make machines here."""
NOT_HERE = "no machines can be made here:"


@pytest.mark.slow
def test_code_that_machines_do_not_have_alike_ends_the_start_with_their_names() -> None:
    command = [sys.executable, str(FOLDER / "try_starts.py"), "--only", "code"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == LACKING and done.stderr.startswith("try_starts.py: "):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node2 has other code of treetune than node1" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_of_the_machines_stays_when_their_maker_is_ended(tmp_path: Path, number: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import signal, sys, time; sys.path.insert(0, {str(FOLDER)!r})\n"
        "from machines import enclosed, machines, missing\n"
        # A shell has what it starts with `&` ignore Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
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
