"""Programs in a sandbox that answer one request after the other, and scorers of libraries among them.

A message is a line with the number of its bytes, and the bytes: ``b"5\\nhello"``. The processes::

    a grader's worker (here)       the sandbox: one program       a child of it, for an answer
    ────────────────────────       ────────────────────────       ────────────────────────────
    _start ───────── program ────► imports the library, once
          ◄── ready, or "failed" ─
    score ────────── request ────► inside/scoring.py: serve
      │                              forks, or takes a child
      │                              that is still clean ───────► reads the answer, scores it
      │ waits in `ask_program`               waits for the child ◄─────── score, or what it raised
      ◄───────── reply ──────────────┘

`LibraryScorer` holds a lock, so only one answer is in the sandbox at a time. `serve` waits for the child as
long as an answer may take. Then it kills the child, and replies that the answer was late. `ask_program` waits
`_SPARE_SECONDS` longer, and checks the limits of time and memory every `MEASURE_EVERY_SECONDS`. If the
sandbox has exceeded a limit, or its pipe ends, the sandbox is ended, and the answer is scored once more in a
new one. The first reply, after the library's import, may take `_START_SECONDS`.
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
from treetune.domains.sandbox.program import MEASURE_EVERY_SECONDS, exceeded_limit
from treetune.exceptions import SandboxUnavailable

_HEADER_BYTES = 64
"""An upper bound for the line before a reply."""


def frame_request(body: bytes) -> bytes:
    """Returns a request as it is sent: the number of its bytes, a newline, and the bytes."""
    return b"%d\n%b" % (len(body), body)


def ask_program(
    running: RunningProgram, request: bytes, limits: ProgramLimits, most_bytes: int
) -> tuple[bytes | None, KilledBy | None]:
    """Sends a request to a program, and waits for its reply.

    Returns:
        (reply, None) for a reply of at most `most_bytes` bytes, (None, limit) if the program exceeded a
        limit, and (None, None) if it gave no reply for another reason.
    """
    assert running.process.stdin is not None
    assert running.process.stdout is not None
    request_fd, reply_fd = running.process.stdin.fileno(), running.process.stdout.fileno()
    os.set_blocking(request_fd, False)
    os.set_blocking(reply_fd, False)
    start = time.monotonic()
    received = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(reply_fd, selectors.EVENT_READ)
        if request:
            selector.register(request_fd, selectors.EVENT_WRITE)
        next_measurement = start + MEASURE_EVERY_SECONDS
        while True:
            seconds_left = max(0.0, next_measurement - time.monotonic())
            for key, _ in selector.select(seconds_left):
                if key.fd == request_fd:
                    try:
                        request = request[os.write(request_fd, request) :]  # what is still unsent
                    except BrokenPipeError:  # the program has ended
                        return None, None
                    if not request:
                        selector.unregister(request_fd)
                else:
                    data = os.read(reply_fd, 1 << 16)
                    received += data
                    # The program has ended, or its reply is too long.
                    if not data or len(received) > most_bytes + _HEADER_BYTES:
                        return None, None
            reply = _read_reply(received)
            if reply is not None:
                return reply, None
            now = time.monotonic()
            if now >= next_measurement:
                killed_by = exceeded_limit(limits, now - start, running.usage())
                if killed_by is not None:
                    return None, killed_by
                next_measurement = min(now + MEASURE_EVERY_SECONDS, start + limits.seconds)


def _read_reply(data: bytearray) -> bytes | None:
    """Returns the body of a reply, ``hello`` of ``5\\nhello``. Returns None while the reply is incomplete,
    and for data that isn't a reply."""
    length, newline, body = bytes(data).partition(b"\n")
    # Nine digits suffice for every reply. A malicious program may write any number of them.
    if not newline or not length.isdigit() or len(body) < int(length[:9]):
        return None
    return body


def end_program(running: RunningProgram) -> None:
    """Ends a program and all that it started. Safe to call twice."""
    running.kill()
    running.process.wait()
    for pipe in (running.process.stdin, running.process.stdout, running.process.stderr):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # part of a request is still unsent
            pipe.close()


# Scorers of libraries

_START_SECONDS = 120.0
"""Time for a library's import, on a busy machine."""

_SPARE_SECONDS = 60.0
"""Time in addition to an answer's limit, in which the library may import what it needs for a problem. If
there is no reply then, the sandbox has failed."""

_REPLY_BYTES = 1 << 16
"""The most bytes of a reply."""
_LIFETIME_CPU_SECONDS = 1e7
"""The limit of processor time for all answers that a sandbox scores: in effect none. Each answer has its own
limit of time."""


@dataclass(frozen=True, kw_only=True)
class LibraryScore:
    """The result of scoring an answer.

    Example: a score, and the end of a scorer that failed::

        LibraryScore(score=0.5)
        LibraryScore(score=None, message="the scorer raised KeyError")
    """

    score: float | None
    """None if the answer took too long, ended the process that scored it, or made the scorer raise."""
    message: str | None = None
    """The reason why there is no score, or a warning about the answer."""
    is_late: bool = False
    """Whether scoring the answer took too long."""
    has_crashed: bool = False
    """Whether the process that scored the answer, or the sandbox, ended."""


class LibraryScorer:
    """Scores answers by a library that is imported once, in a sandbox.

    Answers are read as values and never executed (`inside/reading.py`). No process that scores an answer
    holds anything of another answer: either the process is new, or it is proven to have only compared its
    earlier answers (`inside/scoring.py`).

    The sandbox begins with the first answer, or with `prepare`, and ends with this process. The object is
    safe to use from several threads, and scores one answer at a time.
    """

    def __init__(self, sandbox: Sandbox, limits: ProgramLimits, score_module: str, package: str) -> None:
        """Makes a scorer. The sandbox begins later.

        Args:
            sandbox: The kind of sandbox.
            limits: The limits of scoring one answer.
            score_module: The name of the module that knows the library, such as "reasoning_gym_scores". Its
                function `prepare` makes the scoring functions. The module is in the folder `sandbox/inside`.
                The code in this folder runs in the sandbox.
            package: The name by which the library is imported, such as "reasoning_gym".
        """
        self._sandbox = sandbox
        self._limits = limits
        self._score_module = score_module
        self._package = package
        self._running: RunningProgram | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Starts the sandbox and imports the library.

        Raises SandboxUnavailable if there is no sandbox, or the library can't be imported in it.
        """
        with self._lock:
            self._start_sandbox()

    def score(self, answer: str, problem: Mapping[str, Any]) -> LibraryScore:
        """Scores an answer. `problem` must be JSON data in the form that the score module reads.

        Raises SandboxUnavailable if the sandbox failed for a reason that isn't the answer's.
        """
        request = frame_request(json.dumps({"problem": problem, "answer": answer}).encode())
        # The sandbox ends a late answer at its deadline. The spare time is for what a library imports for a
        # problem.
        limits = replace(self._limits, seconds=self._limits.seconds + _SPARE_SECONDS)
        with self._lock:
            # Try twice, because an earlier answer, or the machine, may have ended the sandbox.
            for _ in range(2):
                running = self._start_sandbox()
                reply, killed_by = self._ask_or_close(running, request, limits)
                if reply is not None:
                    return _read_score(json.loads(reply))
            limit = f" ({killed_by})" if killed_by else ""
            return LibraryScore(score=None, message=f"it ended the sandbox{limit}", has_crashed=True)

    def close(self) -> None:
        """Ends the sandbox. The next answer begins another one."""
        running, self._running = self._running, None
        if running is not None:
            end_program(running)

    def _start_sandbox(self) -> RunningProgram:
        """Returns the running sandbox. If there is none, begins one and imports the library in it.

        Raises SandboxUnavailable if no sandbox can begin, or the library can't be imported in it.
        """
        if self._running is not None and self._running.process.poll() is None:
            return self._running
        self.close()
        # Programs in a sandbox can't import treetune. So the program first makes these modules, which are
        # files in the folder `inside`. Then it can import them by their full names.
        program = bundle(self._score_module, "reading", "comparing", "scoring")
        # True where programs see no processes and no files but their own.
        confined = self._sandbox.has_own_processes
        # The program has all names of the score module, such as `prepare`, which makes the scoring functions.
        call = (
            f"\nfrom treetune.domains.sandbox.inside.scoring import serve"
            f"\nserve(prepare, {self._package!r}, {self._limits.seconds!r}, {confined!r})"
        )
        # The limits for all answers that this sandbox scores together. Each answer has its own limit of time,
        # so there is in effect no limit of processor time.
        all_answers = replace(self._limits, cpu_seconds=_LIFETIME_CPU_SECONDS)
        self._running = self._sandbox.begin(program + call, all_answers)
        # The request is empty, because the program sends its first reply unasked, when it is ready.
        first_reply, killed_by = self._ask_or_close(
            self._running, b"", replace(self._limits, seconds=_START_SECONDS)
        )
        status = {"failed": killed_by or "it ended"} if first_reply is None else json.loads(first_reply)
        if "failed" in status:
            self.close()
            raise SandboxUnavailable(
                f"{self._package} could not be imported in the sandbox: {status['failed']}"
            )
        return self._running

    def _ask_or_close(
        self, running: RunningProgram, request: bytes, limits: ProgramLimits
    ) -> tuple[bytes | None, KilledBy | None]:
        """Calls `ask_program`, and ends the sandbox if it gives no reply."""
        try:
            reply, killed_by = ask_program(running, request, limits, _REPLY_BYTES)
        except BaseException:  # e.g. at the deadline: the next request must not get this one's reply
            self.close()
            raise
        if reply is None:
            self.close()
        return reply, killed_by


@lru_cache(maxsize=8)
def shared_scorer(sandbox: Sandbox, limits: ProgramLimits, score_module: str, package: str) -> LibraryScorer:
    """Makes a scorer, which ends with this process. Later calls with the same settings return the same scorer
    from the cache, which holds the eight newest ones."""
    new_scorer = LibraryScorer(sandbox, limits, score_module, package)
    atexit.register(new_scorer.close)
    return new_scorer


def _read_score(reply: Mapping[str, Any]) -> LibraryScore:
    """Reads the reply to an answer: ``{"result": {"score": 0.5}}``, ``{"result": {"raised": "KeyError"}}``,
    ``{"late": true}``, ``{"crashed": -9}`` or ``{"failed": "…"}``.

    Raises SandboxUnavailable for ``failed``: no scorer could be made, which is not the answer's fault.
    """
    if "failed" in reply:
        raise SandboxUnavailable(f"no scorer could be made for this problem: {reply['failed']}")
    if "late" in reply:
        return LibraryScore(score=None, message="not done at the deadline", is_late=True)
    if "crashed" in reply:
        status = reply["crashed"]
        return LibraryScore(score=None, message=f"its process ended with {status}", has_crashed=True)
    result = reply["result"]
    # A malicious answer may have written this itself. So only the keys below are used, and only as data.
    if not isinstance(result, dict):
        return LibraryScore(score=None, message="its process returned no score", has_crashed=True)
    # "refused" names what the answer tried and Python refused, such as "exec", the execution of code.
    refusal = f"it wanted more than to be read ({result['refused']})" if "refused" in result else None
    score = result.get("score")
    if isinstance(score, float):
        return LibraryScore(score=score, message=refusal)
    return LibraryScore(score=None, message=f"the scorer raised {result.get('raised')}")
