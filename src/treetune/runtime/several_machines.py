"""Checks, before the ranks of several machines communicate, that the machines can do a run together.

Every rank does the same::

    what it does                                           what it waits for, and how long
    ───────────────────────────────────────────────        ─────────────────────────────────────────
    finds the interface to the other machines, if          on the first machine: an address of another
      GLOO_SOCKET_IFNAME is not set                          machine's rank, `rank_deadline`
    exchanges a token for the names of the marks           all ranks, `rank_deadline`
    listens on a port; writes a mark into the folder       nothing
    exchanges facts: code, configuration, port, …          all ranks, `rank_deadline`
    looks for the marks of the other machines              all marks, SEEN_WITHIN_S together
    connects to a port of each other machine,              the kernel there, CONNECT_WITHIN_S
      each in a thread
    exchanges the problems that it has seen                all ranks, `rank_deadline`
    closes its port, deletes the mark                      nothing
    continues, or raises MachinesDiffer                    before it raises: all ranks, `rank_deadline`

A rank that died is missing in the next exchange, where all others raise RuntimeError. A mark may then stay in
the folder. It doesn't matter, since the next start uses another name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import treetune
from treetune.config.folders import DIGITS_OF_HASH, own_modules
from treetune.exceptions import MachinesDiffer
from treetune.runtime.machine import read_versions
from treetune.store.checksums import config_hash
from treetune.store.files import make_private_folder
from treetune.trainer.ranks import Meeting

SEEN_WITHIN_S = 30.0
"""The longest that a network file system may take to show a new file on another machine."""

CONNECT_WITHIN_S = 10.0
"""The longest that a connection to another machine may take."""
CLOCKS_WITHIN_S = 60.0
"""The largest accepted difference between clocks."""

SOCKET_VARIABLES = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (SOCKET_IFNAME for scripts/slurm/submit.sh)"


@dataclass(frozen=True)
class MachineFacts:
    """Facts of one rank's machine, for comparison with the others'."""

    machine: int
    """The machine's number, which all of its ranks share."""
    name: str
    """The machine's host name."""
    interface: str
    address: str
    port: int
    """The port on which this rank listens, at `address` of the network interface `interface`."""
    clock: float
    """Seconds since 1970."""
    code: str
    """A hash of the sources."""
    own_modules: Mapping[str, str]
    """A hash of each of the user's modules, by the module's name."""
    python: str
    packages: Mapping[str, str]
    configuration: str
    """A hash of what the configuration computes."""


@dataclass(frozen=True)
class MachineView:
    """The problems of one rank with other machines, by the machines' numbers."""

    unseen: tuple[int, ...] = ()
    """The machines whose files this rank doesn't see."""
    unreached: tuple[tuple[int, str], ...] = ()
    """The machines to which it can't connect, each with the reason."""


def refuse_machines_that_differ(
    meeting: Meeting, directory: Path, plain: Mapping[str, Any], *, share: bool = False
) -> None:
    """Checks that all machines of a run have the same code and configuration, see each other's files in
    `directory`, and can connect to each other. Collective.

    Sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if they aren't set, to the interface that reaches the
    other machines.

    Args:
        meeting: Exchanges values between all ranks.
        directory: The run's folder.
        plain: The evaluated configuration of this rank's machine.
        share: Makes the directory readable for other users.

    Raises:
        MachinesDiffer: On every rank, with all differences.
    """
    if meeting.machines == 1:
        return
    interface, address = meeting.find_interface()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # NCCL's own choice may be a bridge of virtual machines, on which it would wait until the deadline. After
    # "=", NCCL takes exactly this name, and not all names that begin so.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    # Each machine keeps a file, its mark, in the folder, and the others look for it. All use the first rank's
    # token in the names of the marks.
    token = meeting.exchange("token", secrets.token_hex(8))[0]
    with _listen(address, meeting.world_size) as port, _keep_mark(directory, token, meeting, share):
        local_facts = _gather_facts(meeting.machine, (interface, address, port), plain)
        facts = [MachineFacts(**fields) for fields in meeting.exchange("facts", asdict(local_facts))]
        local_view = _view_others(meeting.machine, facts, directory, token)
        views = []
        for fields in meeting.exchange("views", asdict(local_view)):  # JSON has turned tuples into lists
            unreached = tuple((number, why) for number, why in fields["unreached"])
            views.append(MachineView(tuple(fields["unseen"]), unreached))
        # The marks and ports are needed until here, when every rank has looked for all others.
    lines_of_differences = describe_machine_differences(facts, views, directory)
    if lines_of_differences:
        # All ranks raise, and their processes end. The first rank's process may hold the values that
        # `meeting` exchanges. So each rank waits here until all ranks have read the views. If the wait fails,
        # the differences are reported nevertheless.
        with contextlib.suppress(RuntimeError):
            meeting.exchange("all know the differences", True)
        lines = "\n".join(f"  {line}" for line in lines_of_differences)
        raise MachinesDiffer(f"the {meeting.machines} machines can't do this run together:\n{lines}")


def describe_machine_differences(
    facts: Sequence[MachineFacts], views: Sequence[MachineView], directory: Path
) -> list[str]:
    """Returns a line for each difference between the first rank's machine and another one.

    There are also lines on files that a machine doesn't see, and on machines that it can't reach. Each line
    begins with the name of the machine with the problem.

    Args:
        facts: The facts of each rank's machine, in rank order.
        views: The problems of each rank with other machines, in rank order.
    """
    first = facts[0]
    name_by_machine = {fact.machine: fact.name for fact in facts}
    lines: list[str] = []
    for rank_facts, view in zip(facts, views, strict=True):
        name = rank_facts.name
        for machine in view.unseen:
            lines.append(
                f"{name} doesn't see what {name_by_machine[machine]} writes into {directory}: it must be a"
                " folder of one file system that all machines have there (APP_DIRECTORY)"
            )
        for machine, why in view.unreached:
            other = next(fact for fact in facts if fact.machine == machine)
            lines.append(
                f"{name} can't reach {other.name} at {other.address} ({other.interface}): {why}; set"
                f" {SOCKET_VARIABLES} to the interface that reaches the others, and open all ports between"
                " the machines"
            )
        lines += [f"{name} {line}" for line in _describe_differences_from_first(rank_facts, first)]
    names = list(name_by_machine.values())
    for name in names:
        if names.count(name) > 1:
            lines.append(f"{name} is the name of two machines: give each another host name")
    return list(dict.fromkeys(lines))  # every rank of a machine reports the same


def _gather_facts(machine: int, listens_at: tuple[str, str, int], plain: Mapping[str, Any]) -> MachineFacts:
    """Returns this rank's facts.

    Args:
        machine: The number of the rank's machine.
        listens_at: The interface, address and port where the rank listens: ``("eth0", "10.0.0.4", 41873)``.
        plain: The evaluated configuration, of which the facts have a hash.
    """
    interface, address, port = listens_at
    return MachineFacts(
        machine=machine,
        name=platform.node(),
        interface=interface,
        address=address,
        port=port,
        clock=time.time(),
        code=_hash_sources(),
        own_modules=own_modules(),
        python=platform.python_version(),
        packages=read_versions(),
        configuration=config_hash(plain),
    )


def _view_others(machine: int, facts: Sequence[MachineFacts], directory: Path, token: str) -> MachineView:
    """Looks for the marks of the other machines, and connects to the first rank of each.

    A mark is a file that each machine keeps in `directory`, to show that all see the same folder.
    """
    others: dict[int, MachineFacts] = {}  # of the first rank of each other machine
    for facts_of_rank in facts:
        if facts_of_rank.machine != machine:
            others.setdefault(facts_of_rank.machine, facts_of_rank)
    unseen = _find_unseen({number: _mark_file(directory, token, number) for number in others})
    # All connections are tried at the same time, since with a wrong interface each fails only at its
    # deadline.
    with ThreadPoolExecutor(len(others)) as threads:
        errors = threads.map(lambda other: _connection_error(other.address, other.port), others.values())
        unreached = []
        for number, error in zip(others, errors, strict=True):
            if error is not None:
                unreached.append((number, error))
    return MachineView(unseen, tuple(unreached))


def _describe_differences_from_first(facts: MachineFacts, first: MachineFacts) -> Iterator[str]:
    """Yields the differences between a machine and the first machine, without the machine's name."""
    if facts.code != first.code:
        yield f"has other code of treetune than {first.name}: use one checkout, or the same commit"
    for name in sorted(first.own_modules.keys() | facts.own_modules.keys()):
        if facts.own_modules.get(name) != first.own_modules.get(name):
            yield f"has another {name}, which the configuration imports, than {first.name}: use one copy"
    if facts.python != first.python:
        yield f"has Python {facts.python}, and {first.name} {first.python}: install the same version on both"
    for name in sorted(first.packages.keys() | facts.packages.keys()):
        first_version, version = first.packages.get(name, "none"), facts.packages.get(name, "none")
        if first_version != version:
            yield f"has {name} {version}, and {first.name} {first_version}: run ./scripts/setup.sh on both"
    if facts.configuration != first.configuration:
        yield (
            f"has another configuration than {first.name}: use the same files, --override and APP_… variables"
            " on all machines (DeepSpeed's ssh launcher takes variables from .deepspeed_env)"
        )
    difference_s = facts.clock - first.clock
    if abs(difference_s) > CLOCKS_WITHIN_S:
        yield f"has a clock that differs by {difference_s:+.0f} s from {first.name}'s: synchronise both (NTP)"


def _hash_sources() -> str:
    """Returns a hash of all sources of this package."""
    digest = hashlib.blake2b()
    folder = Path(treetune.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:DIGITS_OF_HASH]


def _mark_file(directory: Path, token: str, machine: int) -> Path:
    """Returns the file that shows whether other machines see what this machine writes into the directory."""
    return directory / f".machine-{machine}-{token}"


@contextmanager
def _keep_mark(directory: Path, token: str, meeting: Meeting, share: bool) -> Iterator[None]:
    """Keeps a file of this machine in the directory during a block, so that other machines can look for it.
    Its name is new in every run, since a network file system may remember for a while that a file didn't
    exist."""
    mark = _mark_file(directory, token, meeting.machine)
    make_private_folder(directory, share=share)
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def _find_unseen(marks: Mapping[int, Path]) -> tuple[int, ...]:
    """Returns the machines whose marks have not appeared before the deadline, which all marks share.

    A mark is a file by which other machines see that they share a folder. `marks` has the path of each
    machine's mark.
    """
    deadline = time.monotonic() + SEEN_WITHIN_S
    while True:
        missing = tuple(number for number, path in marks.items() if not path.exists())
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.2)


@contextmanager
def _listen(address: str, backlog: int) -> Iterator[int]:
    """Listens on a port during a block, so that other ranks can connect; the kernel accepts the
    connections."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=backlog) as server:
        yield server.getsockname()[1]


def _connection_error(address: str, port: int) -> str | None:
    """Connects to a port. Returns the reason if that fails; None if it succeeds."""
    try:
        socket.create_connection((address, port), CONNECT_WITHIN_S).close()
    except OSError as error:
        return str(error)
    return None
