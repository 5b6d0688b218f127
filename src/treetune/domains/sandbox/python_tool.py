"""Python as a tool: code in, text out, in the sandbox."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Ge
from typing_extensions import override

from treetune.domains.sandbox.base import KilledBy, ProgramLimits, Sandbox
from treetune.domains.sandbox.bubblewrap import Bubblewrap, Started
from treetune.domains.sandbox.inside import source
from treetune.domains.sandbox.served import ask, end, framed

_LINE_BYTES = 64
"""More than the line before an answer and the line about what was left out of it have."""

_CPU_SHARE = 20
"""The processor time of a session, in deadlines of one call: threads may go on between calls."""


@dataclass(frozen=True, kw_only=True)
class PythonTool:
    """Runs a model's code and returns the text that it is answered with: what the code printed, the value of
    its last line where that is an expression, or the traceback.

        >>> PythonTool(sandbox=choose_sandbox()).run("x = 6\\nx * 7")
        '42\\n'
    """

    sandbox: Sandbox = field(default_factory=Bubblewrap)
    """The sandbox that runs the code."""
    limits: ProgramLimits = field(default_factory=lambda: ProgramLimits(seconds=5.0))
    """Limits of each call."""
    most_bytes: Annotated[int, Ge(100)] = 4000
    """Bytes that are kept of a longer text, its beginning and its end."""

    def run(self, code: str) -> str:
        """Runs it in a sandbox of its own: nothing stays from call to call. Raises SandboxUnavailable."""
        outcome = self.sandbox.run(self._console(), stdin=_framed(code).decode(), limits=self.limits)
        if outcome.killed_by is not None:
            return _stopped(outcome.killed_by, self.limits)
        _, _, text = outcome.stdout.partition("\n")
        return text[: self.most_bytes + _LINE_BYTES] if outcome.stdout else _ENDED

    def session(self) -> PythonSession:
        """Returns one sandbox for many calls, in which names stay defined. Close it, or use it in a `with`
        statement.

        Raises ValueError where the sandbox is another than bubblewrap.
        """
        if not isinstance(self.sandbox, Bubblewrap):
            name = type(self.sandbox).__name__
            raise ValueError(
                f"a Python session needs the sandbox bubblewrap; {name} forgets all after each call"
            )
        return PythonSession(self, self.sandbox)

    def _console(self) -> str:
        return source("console").replace("MOST = 4000", f"MOST = {self.most_bytes}", 1)


class PythonSession(AbstractContextManager["PythonSession"]):
    """A Python console in a sandbox, begun with the first call. A call at a time, from the thread that began
    it.

    A call that takes longer than the deadline, or more than another limit, ends the console: the text says
    so, and the next call finds a new one, without the names of before.

    A pickled session holds the calls since then, and a copy runs them again before its first one. So names
    are as they were where code is not up to chance or the clock.
    """

    def __init__(self, tool: PythonTool, sandbox: Bubblewrap) -> None:
        self._tool = tool
        self._sandbox = sandbox
        self._started: Started | None = None
        self._calls: list[str] = []
        """What the console has run, or is to run again before anything else."""

    def run(self, code: str) -> str:
        """Runs Python code and returns what it printed, and the value of its last line. Names stay defined.

        Args:
            code: The code to run.
        """
        missed: list[str] = []
        if self._started is None:
            missed, self._calls = self._calls, []
        return [self._run(call) for call in (*missed, code)][-1]

    def _run(self, code: str) -> str:
        """Raises SandboxUnavailable."""
        limits = self._tool.limits
        try:
            if self._started is None:
                all_calls = replace(limits, cpu_seconds=limits.seconds * _CPU_SHARE)
                self._started = Started(
                    self._sandbox, self._tool._console(), {}, all_calls, stdin=subprocess.PIPE
                )
            most = self._tool.most_bytes + _LINE_BYTES
            text, killed_by = ask(self._started, _framed(code), limits, most)
        except BaseException:
            self.close()
            raise
        if text is not None:
            self._calls.append(code)
            return text.decode(errors="replace")
        self.close()
        self._calls = []
        return _stopped(killed_by, limits) if killed_by else _ENDED

    @override
    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_started": None, "_calls": list(self._calls)}

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the console and all that it started; the next call begins another one, which runs the calls
        so far again. Safe to call twice."""
        started, self._started = self._started, None
        if started is None:
            return
        end(started)

    @override
    def __exit__(self, *error: object) -> None:
        self.close()


_ENDED = "[the code ended the interpreter]\n"


def _framed(code: str) -> bytes:
    return framed(code.encode(errors="replace"))


def _stopped(killed_by: KilledBy, limits: ProgramLimits) -> str:
    passed = {
        "time": f"it ran for more than {limits.seconds:g} s",
        "memory": f"it took more than {limits.memory_mib} MiB of memory",
        "processes": f"it started more than {limits.processes} processes",
        "output": "it printed too much",
    }
    return f"[the code was stopped: {passed[killed_by]}]\n"
