"""Python as a tool: code in, text out, in the sandbox."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Ge
from typing_extensions import override

from treetune.domains.sandbox.base import KilledBy, ProgramLimits, Sandbox
from treetune.domains.sandbox.bubblewrap import Bubblewrap, ConfinedProgram
from treetune.domains.sandbox.inside import read_source
from treetune.domains.sandbox.served import ask_program, end_program, frame_request

_LINE_BYTES = 64
"""An upper bound for the bytes of the line before a reply and of the line within it that says how much was
left out."""

_CALLS_IN_CPU_LIMIT = 20
"""The limit of a whole session's processor time, in multiples of one call's deadline. It is limited because
threads may run between calls."""


@dataclass(frozen=True, kw_only=True)
class PythonTool:
    """Runs a model's code and returns the text that the model reads: what the code printed, then the value of
    the last line if that is an expression, or the traceback.

        >>> PythonTool(sandbox=choose_sandbox()).run("x = 6\\nx * 7")
        '42\\n'
    """

    sandbox: Sandbox = field(default_factory=Bubblewrap)
    """The sandbox that runs the code."""
    limits: ProgramLimits = field(default_factory=lambda: ProgramLimits(seconds=5.0))
    """Limits of each call."""
    most_bytes: Annotated[int, Ge(100)] = 4000
    """The most bytes of a text that is returned whole. Of a longer text the middle is left out."""

    def run(self, code: str) -> str:
        """Runs code in a new sandbox, without the names of earlier calls. Raises SandboxUnavailable."""
        outcome = self.sandbox.run(self._console(), stdin=_encode_code(code).decode(), limits=self.limits)
        if outcome.killed_by is not None:
            return _message_of_kill(outcome.killed_by, self.limits)
        _, _, text = outcome.stdout.partition("\n")  # without the line that has the reply's length
        # A reply has at most `most_bytes` of output and, if something was left out, a line that says so, for
        # which `_LINE_BYTES` has room. So the slice keeps a whole reply. It only cuts what the code may have
        # written in addition.
        return text[: self.most_bytes + _LINE_BYTES] if outcome.stdout else _MESSAGE_OF_END

    def session(self) -> PythonSession:
        """Returns one sandbox for many calls, in which names stay defined. Close it, or use it in a `with`
        statement.

        Raises ValueError if the sandbox isn't bubblewrap.
        """
        if not isinstance(self.sandbox, Bubblewrap):
            name = type(self.sandbox).__name__
            raise ValueError(
                f"a Python session needs the sandbox bubblewrap; {name} keeps no names from call to call"
            )
        return PythonSession(self, self.sandbox)

    def _console(self) -> str:
        """Returns the program that runs the model's code: `inside/console.py`."""
        limit = f"MOST_REPLY_BYTES = {self.most_bytes}"
        return read_source("console").replace("MOST_REPLY_BYTES = 4000", limit, 1)


class PythonSession(AbstractContextManager["PythonSession"]):
    """A Python console in a sandbox, which begins with the first call. All calls come from one thread.

    A call that exceeds a limit ends the console. The text that it returns says so, and the next call gets a
    new console, in which earlier names aren't defined.

    A pickled session holds the calls that its console has run. A copy runs them again before its own first
    call. So names have the same values in the copy, if the code depends neither on chance nor on the clock.
    """

    _program: ConfinedProgram | None = None
    """The console; None until the first call, also in a copy. The default is an attribute of the class,
    because sessions that earlier versions have pickled lack the attribute."""

    def __init__(self, tool: PythonTool, sandbox: Bubblewrap) -> None:
        self._tool = tool
        self._sandbox = sandbox
        self._calls: list[str] = []
        """The calls that the console has run, or that a new one has to run again first."""

    def run(self, code: str) -> str:
        """Runs Python code and returns what it printed, and the value of its last line. Names stay defined.

        Args:
            code: The code to run.
        """
        if self._program is None:
            # There may be earlier calls if the console was closed, or if this session is a copy. The new
            # console runs them again, so that their names are defined. `_run_call` adds each to `_calls`.
            earlier_calls, self._calls = self._calls, []
            for call in earlier_calls:
                self._run_call(call)
        return self._run_call(code)

    def _run_call(self, code: str) -> str:
        """Runs one call, in a new console if there is none. Raises SandboxUnavailable."""
        limits = self._tool.limits
        try:
            if self._program is None:
                # One program runs all calls, so its processor time is limited to that of several calls.
                limits_of_session = replace(limits, cpu_seconds=limits.seconds * _CALLS_IN_CPU_LIMIT)
                self._program = ConfinedProgram(
                    self._sandbox, self._tool._console(), {}, limits_of_session, stdin=subprocess.PIPE
                )
            # Bytes of a reply: its text, the line before it, and the line that says what was left out.
            most_bytes = self._tool.most_bytes + _LINE_BYTES
            text, killed_by = ask_program(self._program, _encode_code(code), limits, most_bytes)
        except BaseException:  # e.g. an interrupt, after which the console's state isn't known
            self.close()
            raise
        if text is not None:
            self._calls.append(code)
            return text.decode(errors="replace")
        # The code has ended the console, or exceeded a limit. The next call gets a new console without the
        # names so far: `run` finds no earlier calls that it would have to run again.
        self.close()
        self._calls = []
        return _message_of_kill(killed_by, limits) if killed_by else _MESSAGE_OF_END

    @override
    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_program": None, "_calls": list(self._calls)}

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the console and all that it started. The next call begins another one, which runs the calls so
        far again. Safe to call twice."""
        program, self._program = self._program, None
        if program is not None:
            end_program(program)

    @override
    def __exit__(self, *error: object) -> None:
        self.close()


_MESSAGE_OF_END = "[the code ended the interpreter]\n"
"""The text that the model reads if there is no reply, and no limit was exceeded."""


def _encode_code(code: str) -> bytes:
    return frame_request(code.encode(errors="replace"))


def _message_of_kill(killed_by: KilledBy, limits: ProgramLimits) -> str:
    reasons = {
        "time": f"it ran for more than {limits.seconds:g} s",
        "memory": f"it took more than {limits.memory_mib} MiB of memory",
        "processes": f"it started more than {limits.processes} processes",
        "output": "it printed too much",
    }
    return f"[the code was stopped: {reasons[killed_by]}]\n"
