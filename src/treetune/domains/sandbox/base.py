"""The sandbox: it runs programs that a model wrote, under limits, and removes all traces of them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

from annotated_types import Ge, Gt

from treetune.config.registrable import Registrable

KilledBy = Literal["time", "memory", "output", "processes"]
"""The limit that a killed program had exceeded."""


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """The resources that a program may use. A program that uses more is killed, with all that it started."""

    seconds: Annotated[float, Gt(0)] = 10.0
    """Wall time from its start."""
    cpu_seconds: Annotated[float, Gt(0)] | None = None
    """Processor time of all its processes together; null: only `seconds` limits it."""
    memory_mib: Annotated[int, Ge(32)] = 512
    """Memory of all its processes together, without the files in the work folder."""
    processes: Annotated[int, Ge(4)] = 32
    """The most processes and threads at a time, the program itself included."""
    files: Annotated[int, Ge(16)] = 128
    """The most files that each process may have open."""
    disk_mib: Annotated[int, Ge(1)] = 64
    """The largest size of the work folder, and of a single file."""
    output_kib: Annotated[int, Ge(1)] = 4096
    """The largest size of its standard output, and also of its standard error."""


@dataclass(frozen=True, kw_only=True)
class ProgramOutcome:
    """The end of a program.

    Example: a program that printed 42, and one that ran for too long::

        ProgramOutcome(stdout="42\\n", stderr="", exit=0, killed_by=None, seconds=0.03)
        ProgramOutcome(stdout="", stderr="", exit=None, killed_by="time", seconds=10.01)
    """

    stdout: str
    stderr: str
    exit: int | None
    """The exit status; negative for the signal that ended the program, and None if the sandbox killed it."""
    killed_by: KilledBy | None
    """The limit for which the sandbox killed the program; None if it didn't."""
    seconds: float
    """Wall time from the program's start to its end."""

    @property
    def ok(self) -> bool:
        return self.exit == 0


@dataclass(frozen=True)
class ResourceUsage:
    """The resources that a program and all that it started use at a moment."""

    memory: int
    """Bytes."""
    tasks: int
    """Processes and threads."""
    cpu_seconds: float


class RunningProgram(Protocol):
    """A running program. The process that started it writes to its standard input, and reads from its
    standard output."""

    process: subprocess.Popen[bytes]

    def usage(self) -> ResourceUsage:
        """Measures what the program and all that it started use."""

    def kill(self) -> None:
        """Ends the program and all that it started. Safe to call twice."""


class Sandbox(Registrable):
    """Runs Python programs. Sub-classes are frozen dataclasses, which can be pickled, and are safe to use
    from several threads.

    Arguments and results of `run` are the same for all sandboxes. The docstring of each says which harm it
    prevents.

    A sandbox has no `check`. A part may hold a sandbox that its other settings don't use, so only the `check`
    of the part yields the messages of `missing` (by `report_missing`).
    """

    isolation: ClassVar[Literal["process", "service"]] = "process"
    """The place where graders that use this sandbox are called. ``process``: in worker processes, each with
    one program at a time. ``service``: in threads that wait for a server."""

    has_own_processes: ClassVar[bool] = False
    """Whether its programs see only processes and files of their own."""

    @property
    def concurrency(self) -> int:
        """The most programs that the threads of a ``service`` sandbox may run at a time."""
        return 1

    def missing(self) -> Sequence[str]:
        """Returns a message for each thing that keeps the sandbox from working on this machine, with its
        remedy. A trial run shows whether the sandbox works."""
        raise NotImplementedError

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: ProgramLimits | None = None,
    ) -> ProgramOutcome:
        """Runs a Python program and returns how it ended, whatever the program did.

        Args:
            code: The program.
            stdin: Its standard input.
            files: Texts by file name, which are written to its work folder.
            limits: The resources that it may use; None: the default limits.

        Raises:
            SandboxUnavailable: The program could not be started.
        """
        raise NotImplementedError

    @property
    def can_begin(self) -> bool:
        """Whether the sandbox implements `begin`."""
        return type(self).begin is not Sandbox.begin

    def begin(self, code: str, limits: ProgramLimits) -> RunningProgram:
        """Starts a Python program that runs until it is killed, or until this process ends.

        The program can import the packages that are installed next to this one.

        Raises:
            SandboxUnavailable: The program could not be started.
            ValueError: The sandbox implements only `run`.
        """
        raise ValueError(
            f"{type(self).__name__} can only run programs to their end: use the sandbox 'bubblewrap'"
        )
