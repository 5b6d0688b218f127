"""Compares the machines of a run, and checks that they see each other, before the ranks talk."""

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
from treetune.runtime.machine import versions
from treetune.store.checksums import config_hash
from treetune.store.files import own_folder
from treetune.trainer.ranks import Meeting

SEEN_WITHIN_S = 30.0
"""How long a file may take from one machine to another, over a network file system."""

CONNECT_WITHIN_S = 10.0
CLOCKS_WITHIN_S = 60.0

SOCKETS = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (SOCKET_IFNAME for scripts/slurm/submit.sh)"


@dataclass(frozen=True)
class Facts:
    """Facts of one rank's machine, for comparison with the others'."""

    machine: int
    name: str
    interface: str
    address: str
    port: int
    clock: float
    """Seconds since 1970."""
    code: str
    """A hash of the sources."""
    own_modules: Mapping[str, str]
    python: str
    packages: Mapping[str, str]
    configuration: str
    """A hash of what the configuration computes."""


@dataclass(frozen=True)
class MachineView:
    """The other machines as one rank sees them, by their numbers."""

    unseen: tuple[int, ...] = ()
    """Whose files it doesn't see."""
    unreached: tuple[tuple[int, str], ...] = ()
    """Whom it can't connect to, and why."""


def refuse_machines_that_differ(
    meeting: Meeting, directory: Path, plain: Mapping[str, Any], *, share: bool = False
) -> None:
    """Checks that all machines of a run can do it together in `directory`: that they have the same code and
    configuration, see each other's files there, and reach each other. Raises MachinesDiffer on every rank,
    with everything that is wrong. Collective.

    Sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where they aren't set, to the interface by which the
    machines reach each other. `share` makes the directory readable for other users.
    """
    if meeting.machines == 1:
        return
    interface, address = meeting.interface()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # NCCL would choose by itself, and wait for the deadline on a bridge of virtual machines. "=" has it take
    # this name alone, and not every one that begins so.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    token = meeting.exchange("token", secrets.token_hex(8))[0]
    with _listening(address, meeting.world_size) as port, _marked(directory, token, meeting, share):
        local_facts = _facts(meeting.machine, (interface, address, port), plain)
        facts = [Facts(**fields) for fields in meeting.exchange("facts", asdict(local_facts))]
        local_view = _view(meeting.machine, facts, directory, token)
        views = []
        for fields in meeting.exchange("views", asdict(local_view)):  # through JSON, which has no tuples
            unreached = tuple((number, why) for number, why in fields["unreached"])
            views.append(MachineView(tuple(fields["unseen"]), unreached))
        # The marks and the ports stay until here, when every rank has looked at all others.
    lines_of_differences = differences(facts, views, directory)
    if lines_of_differences:
        # All ranks raise. They meet before: the store ends with the first rank, and others may still read it.
        with contextlib.suppress(RuntimeError):
            meeting.exchange("told", True)
        lines = "\n".join(f"  {line}" for line in lines_of_differences)
        raise MachinesDiffer(f"the {meeting.machines} machines can't do this run together:\n{lines}")


def differences(facts: Sequence[Facts], views: Sequence[MachineView], directory: Path) -> list[str]:
    """Returns what is wrong, a line for each thing, which begins with the machine's name.

    `facts` and `views` are in rank order. Machines are compared with the first rank's machine."""
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
                f"{name} can't reach {other.name} at {other.address} ({other.interface}): {why}; name the"
                f" interface that reaches the others with {SOCKETS}, and let them use all ports between them"
            )
        lines += [f"{name} {line}" for line in _unlike(rank_facts, first)]
    names = list(name_by_machine.values())
    for name in names:
        if names.count(name) > 1:
            lines.append(f"{name} is the name of two machines: give each a host name of its own")
    return list(dict.fromkeys(lines))  # once, though every rank of a machine says it


def _facts(machine: int, place: tuple[str, str, int], plain: Mapping[str, Any]) -> Facts:
    """Returns this rank's facts; `place` is the interface, address and port where it listens."""
    return Facts(
        machine,
        platform.node(),
        *place,
        clock=time.time(),
        code=_code(),
        own_modules=own_modules(),
        python=platform.python_version(),
        packages=versions(),
        configuration=config_hash(plain),
    )


def _view(machine: int, facts: Sequence[Facts], directory: Path, token: str) -> MachineView:
    """Looks at the other machines, each by its first rank."""
    others = {one.machine: one for one in reversed(facts) if one.machine != machine}
    unseen = _unseen({number: _mark(directory, token, number) for number in others})
    # All at once, as one wrong interface may keep them all from here.
    with ThreadPoolExecutor(len(others)) as threads:
        reached = threads.map(lambda one: _unreached(one.address, one.port), others.values())
        unreached = tuple((n, why) for n, why in zip(others, reached, strict=True) if why is not None)
    return MachineView(unseen, unreached)


def _unlike(one: Facts, first: Facts) -> Iterator[str]:
    """Yields what a machine has that differs from the first machine's."""
    if one.code != first.code:
        yield f"has other code of treetune than {first.name}: use one checkout, or the same commit"
    for name in sorted(first.own_modules.keys() | one.own_modules.keys()):
        if one.own_modules.get(name) != first.own_modules.get(name):
            yield f"has another {name}, which the configuration imports, than {first.name}: use one copy"
    if one.python != first.python:
        yield f"has Python {one.python}, and {first.name} {first.python}: set both up alike"
    for name in sorted(first.packages.keys() | one.packages.keys()):
        there, here = first.packages.get(name, "none"), one.packages.get(name, "none")
        if there != here:
            yield f"has {name} {here}, and {first.name} {there}: run ./scripts/setup.sh on both"
    if one.configuration != first.configuration:
        yield (
            f"has another configuration than {first.name}: the same files, --override and APP_… variables"
            " belong on all machines (DeepSpeed's ssh launcher takes variables from .deepspeed_env)"
        )
    if abs(one.clock - first.clock) > CLOCKS_WITHIN_S:
        away = one.clock - first.clock
        yield f"has a clock that is {away:+.0f} s off {first.name}'s: set both by one (NTP)"


def _code() -> str:
    """Returns a hash of all sources of this package."""
    digest = hashlib.blake2b()
    folder = Path(treetune.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:DIGITS_OF_HASH]


def _mark(directory: Path, token: str, machine: int) -> Path:
    return directory / f".machine-{machine}-{token}"


@contextmanager
def _marked(directory: Path, token: str, meeting: Meeting, share: bool) -> Iterator[None]:
    """Keeps a file of this machine in the directory, for the other machines to see. Its name is new in every
    run: a network file system may remember for a while that a file of this name wasn't there."""
    mark = _mark(directory, token, meeting.machine)
    own_folder(directory, share=share)
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def _unseen(marks: Mapping[int, Path]) -> tuple[int, ...]:
    """Returns the machines whose mark hasn't come within one deadline for all."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while away := tuple(number for number, path in marks.items() if not path.exists()):
        if time.monotonic() > deadline:
            return away
        time.sleep(0.2)
    return ()


@contextmanager
def _listening(address: str, backlog: int) -> Iterator[int]:
    """Gives a port of this rank's that others can connect to; the kernel answers them."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=backlog) as server:
        yield server.getsockname()[1]


def _unreached(address: str, port: int) -> str | None:
    """Returns why there is no connection; None where there is one."""
    try:
        socket.create_connection((address, port), CONNECT_WITHIN_S).close()
    except OSError as error:
        return str(error)
    return None
