"""Programs in a sandbox that are asked one thing after the other, and scorers of libraries among them.

Requests and replies are bytes below a line with their number.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from treetune.domains.sandbox.base import KilledBy, ProgramLimits, RunningProgram, Sandbox
from treetune.domains.sandbox.inside import bundle
from treetune.domains.sandbox.program import LOOK_SECONDS, passed
from treetune.exceptions import SandboxUnavailable

_HEADER_BYTES = 64
"""More than the line before a reply has."""


def framed(body: bytes) -> bytes:
    """Returns a request as it is sent."""
    return b"%d\n%b" % (len(body), body)


def ask(
    running: RunningProgram, request: bytes, limits: ProgramLimits, most: int
) -> tuple[bytes | None, KilledBy | None]:
    """Sends a request and returns the reply, `most` bytes at most. Where there is none, returns None and the
    limit that was passed, if it was one."""
    assert running.process.stdin is not None
    assert running.process.stdout is not None
    to, replies = running.process.stdin.fileno(), running.process.stdout.fileno()
    os.set_blocking(to, False)
    os.set_blocking(replies, False)
    begin = time.monotonic()
    received = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(replies, selectors.EVENT_READ)
        if request:
            selector.register(to, selectors.EVENT_WRITE)
        look = begin + LOOK_SECONDS
        while True:
            for key, _ in selector.select(max(0.0, look - time.monotonic())):
                if key.fd == to:
                    try:
                        request = request[os.write(to, request) :]
                    except BrokenPipeError:
                        return None, None
                    if not request:
                        selector.unregister(to)
                else:
                    data = os.read(replies, 1 << 16)
                    received += data
                    if not data or len(received) > most + _HEADER_BYTES:
                        return None, None
            reply = _whole_reply(received)
            if reply is not None:
                return reply, None
            now = time.monotonic()
            if now >= look:
                killed_by = passed(limits, now - begin, running.usage())
                if killed_by is not None:
                    return None, killed_by
                look = min(now + LOOK_SECONDS, begin + limits.seconds)


def _whole_reply(data: bytearray) -> bytes | None:
    """Returns a reply that is all there; None as long as some is missing, or for what is no reply at all."""
    length, line, body = bytes(data).partition(b"\n")
    if not line or not length.isdigit() or len(body) < int(length[:9]):
        return None
    return body


def end(running: RunningProgram) -> None:
    """Ends a program and all that it started. Safe to call twice."""
    running.kill()
    running.process.wait()
    for pipe in (running.process.stdin, running.process.stdout, running.process.stderr):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # what it was not sent, it won't get
            pipe.close()


# Scorers of libraries

_START_SECONDS = 120.0
"""Time for a library's import, on a machine that does much else."""

_SPARE_SECONDS = 60.0
"""Time beside an answer's own, for what a library imports for a problem. Later the server has failed."""

_REPLY_BYTES = 1 << 16
_LIFETIME_CPU_SECONDS = 1e7


@dataclass(frozen=True, kw_only=True)
class LibraryScore:
    """The end of a scoring. `score` is None where there is none: then the answer took too long (`is_late`),
    ended the process that scored it, or made the scorer raise, as `message` says."""

    score: float | None
    message: str | None = None
    is_late: bool = False
    has_crashed: bool = False


class LibraryScorer:
    """Scores answers by a library that is imported in a sandbox, once.

    What answers say is read as values and never executed (`inside/reading.py`). Each is scored in a process
    that holds nothing of another answer: a new one, or one that is proven to have only compared those before
    (`inside/scoring.py`).

    The sandbox begins with the first answer, or with `prepare`, and ends with this process. Safe to use from
    several threads, an answer at a time.
    """

    def __init__(self, sandbox: Sandbox, limits: ProgramLimits, scores: str, package: str) -> None:
        """`scores` is a module of `inside` with a function `prepare`, and `package` the library."""
        self._sandbox = sandbox
        self._limits = limits
        self._scores = scores
        self._package = package
        self._running: RunningProgram | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Starts the sandbox and imports the library.

        Raises SandboxUnavailable where there is no sandbox, or the library can't be imported there.
        """
        with self._lock:
            self._started()

    def score(self, answer: str, problem: Mapping[str, Any]) -> LibraryScore:
        """Scores an answer to a problem as the library's module takes it (JSON).

        Raises SandboxUnavailable where the sandbox didn't work, which says nothing of the answer.
        """
        request = framed(json.dumps({"problem": problem, "answer": answer}).encode())
        limits = replace(self._limits, seconds=self._limits.seconds + _SPARE_SECONDS)
        with self._lock:
            # Twice, because the sandbox before may have been ended by an answer before, or by the machine.
            for _ in range(2):
                running = self._started()
                reply, killed_by = self._ask(running, request, limits)
                if reply is not None:
                    return _scored(json.loads(reply))
            limit = f" ({killed_by})" if killed_by else ""
            return LibraryScore(score=None, message=f"it ended the sandbox{limit}", has_crashed=True)

    def close(self) -> None:
        """Ends the sandbox. The next answer begins another one."""
        running, self._running = self._running, None
        if running is not None:
            end(running)

    def _started(self) -> RunningProgram:
        if self._running is not None and self._running.process.poll() is None:
            return self._running
        self.close()
        program = bundle(self._scores, "reading", "comparing", "scoring")
        confined = self._sandbox.has_own_processes
        call = (
            f"\nfrom treetune.domains.sandbox.inside.scoring import serve"
            f"\nserve(prepare, {self._package!r}, {self._limits.seconds!r}, {confined!r})"
        )
        all_answers = replace(self._limits, cpu_seconds=_LIFETIME_CPU_SECONDS)
        self._running = self._sandbox.begin(program + call, all_answers)
        first, killed_by = self._ask(self._running, b"", replace(self._limits, seconds=_START_SECONDS))
        told = {"failed": killed_by or "it ended"} if first is None else json.loads(first)
        if "failed" in told:
            self.close()
            raise SandboxUnavailable(
                f"{self._package} could not be imported in the sandbox: {told['failed']}"
            )
        return self._running

    def _ask(
        self, running: RunningProgram, request: bytes, limits: ProgramLimits
    ) -> tuple[bytes | None, KilledBy | None]:
        try:
            reply, killed_by = ask(running, request, limits, _REPLY_BYTES)
        except BaseException:
            self.close()
            raise
        if reply is None:
            self.close()
        return reply, killed_by


@lru_cache(maxsize=8)
def scorer(sandbox: Sandbox, limits: ProgramLimits, scores: str, package: str) -> LibraryScorer:
    """Returns this process's scorer of such answers, which ends with it."""
    made = LibraryScorer(sandbox, limits, scores, package)
    atexit.register(made.close)
    return made


def _scored(reply: Mapping[str, Any]) -> LibraryScore:
    if "failed" in reply:
        raise SandboxUnavailable(f"no scorer could be made for this problem: {reply['failed']}")
    if "late" in reply:
        return LibraryScore(score=None, message="not done at the deadline", is_late=True)
    if "crashed" in reply:
        status = reply["crashed"]
        return LibraryScore(score=None, message=f"its process ended with {status}", has_crashed=True)
    told = reply["told"]
    # What the child wrote is data of an answer at worst: nothing of it is used but these.
    if not isinstance(told, dict):
        return LibraryScore(score=None, message="its process told no score", has_crashed=True)
    refused = f"it wanted more than to be read ({told['refused']})" if "refused" in told else None
    if isinstance(score := told.get("score"), float):
        return LibraryScore(score=score, message=refused)
    return LibraryScore(score=None, message=f"the scorer raised {told.get('raised')}")
