"""The sandbox: a program that nobody trusts runs there under limits, and is gone afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol

from annotated_types import Ge, Gt

from treetune.config.registrable import Registrable

if TYPE_CHECKING:
    from treetune.domains.sandbox.program import ResourceUsage

KilledBy = Literal["time", "memory", "output", "processes"]


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """The resources that a program may use. A program that takes more is killed, with all that it started."""

    seconds: Annotated[float, Gt(0)] = 10.0
    """Wall time from its start."""
    cpu_seconds: Annotated[float, Gt(0)] | None = None
    """Processor time of all its processes together; None: as much as `seconds` allow."""
    memory_mib: Annotated[int, Ge(32)] = 512
    """Memory of all its processes together, beside the work folder."""
    processes: Annotated[int, Ge(4)] = 32
    """Processes and threads at a time, its own included."""
    files: Annotated[int, Ge(16)] = 128
    """Files that each process may have open."""
    disk_mib: Annotated[int, Ge(1)] = 64
    """Room in the work folder, and the largest file."""
    output_kib: Annotated[int, Ge(1)] = 4096
    """What it may print, standard output and error each."""


@dataclass(frozen=True, kw_only=True)
class ProgramOutcome:
    """The end of a program. `exit` is its exit status, negative for the signal that ended it; None where the
    sandbox killed it, and `killed_by` then says at which limit. `seconds` is the wall time of all of it."""

    stdout: str
    stderr: str
    exit: int | None
    killed_by: KilledBy | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.exit == 0


class RunningProgram(Protocol):
    """A program at work that is talked to through its standard input and output."""

    process: subprocess.Popen[bytes]

    def usage(self) -> ResourceUsage:
        """Measures what the program and all that it started use."""

    def kill(self) -> None:
        """Ends it, and all that it started. Safe to call twice."""


class Sandbox(Registrable):
    """Runs Python programs. Sub-classes are frozen dataclasses, picklable, and safe to use from threads.

    Arguments and results of `run` are the same for all of them; the docstring of each says from what it
    keeps a program.
    """

    isolation: ClassVar[Literal["process", "service"]] = "process"
    """The place where graders that use it are called: in worker processes, a program each at a time, or in
    threads that wait for a server."""

    has_own_processes: ClassVar[bool] = False
    """Whether its programs see no processes and no files but their own."""

    @property
    def concurrency(self) -> int:
        """Programs that such threads may have at work at a time."""
        return 1

    def missing(self) -> Sequence[str]:
        """Names what keeps it from working here, each with the remedy; found by a trial run, not by a
        guess."""
        raise NotImplementedError

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: ProgramLimits | None = None,
    ) -> ProgramOutcome:
        """Runs a Python program, with `files` (by name) beside it in its work folder.

        Raises SandboxUnavailable where the program could not be started at all. Whatever the program itself
        does is in the outcome.
        """
        raise NotImplementedError

    @property
    def can_begin(self) -> bool:
        """Returns whether it has `begin`."""
        return type(self).begin is not Sandbox.begin

    def begin(self, code: str, limits: ProgramLimits) -> RunningProgram:
        """Begins a Python program that goes on until it is killed, or this process ends. It can import what
        is installed beside this package.

        Raises SandboxUnavailable where the program could not be started, and ValueError where the sandbox
        runs whole programs alone.
        """
        raise ValueError(f"{type(self).__name__} runs whole programs alone: use the sandbox 'bubblewrap'")
