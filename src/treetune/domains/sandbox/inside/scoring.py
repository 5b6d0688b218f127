"""Scores answers one after the other inside of the sandbox, in processes that hold nothing of other answers.

    outside                    the server                          a child
    ───────                    ──────────                          ───────
    starts the sandbox ──────► imports the library, replies
    sends a request ─────────► imports what the problem needs,
                               forks a child if there is none ───► takes limits, closes all but its pipes
                               hands it the request ─────────────► makes the scorer, scores, writes the score
                               waits until its deadline
    takes the reply ◄───────── says what the child wrote ◄────────
                               kills the child, unless it has
                               only compared the answer

A child is a copy of a process that has never scored an answer. One that scored by a function that is proven
to only compare (`comparing`) goes on with the next answer; any other ends with its answer. So do those that
were too late, or wanted more than to read. Two are never there at the same time, so that none can do anything
to another. They can start no process, so that nothing of them is there when they have ended, and can write no
byte to a file. Where one leaves as much as an empty file, the server ends: the next answer has another
sandbox.

Requests and replies are JSON below a line with the number of their bytes.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import shutil
import sys
import time

from treetune.domains.sandbox.inside.reading import refuse_code, teach

TYPE_CHECKING = False  # as from `typing`, which takes as long to import as all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

    Score = Callable[[str], float]
    """Scores an answer. What it raises is told."""
    MakeScore = Callable[[Any], tuple[Score, bool]]
    """Makes the function that scores answers to one problem, and says whether it is proven that this only
    compares them."""

_SIGKILL = 9
_ANSWERS_OF_A_CHILD = 2000
"""A child that lives on is replaced after so many, whatever its memory holds by then."""
_REPLY_BYTES = 4096
_MESSAGE = 300
_LEFT_IN = (".", "/dev/shm")
_OUT_OF_MEMORY = {"raised": "MemoryError"}


def serve(prepare: Callable[[], MakeScore], package: str, seconds: float, confined: bool) -> None:
    """Answers requests until there are no more.

    Args:
        prepare: Returns what makes scorers, which may import more of the library for each problem.
        package: The library's name, whose modules read texts as `reading` does.
        seconds: Deadline for one answer.
        confined: This is a sandbox with files and processes of its own.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    if confined:
        sys.path.remove(os.getcwd())  # an answer could leave a file there
    try:
        make_score = prepare()
    except BaseException as error:
        _reply(replies, {"failed": f"{type(error).__name__}: {error}"[:_MESSAGE]})
        return
    _reply(replies, {"ready": True})
    server = _Server(make_score, package, seconds, confined, (requests.fileno(), replies))
    while (request := _next_request(requests)) is not None:
        _reply(replies, server.answer(request))
        if confined and any(os.listdir(folder) for folder in _LEFT_IN):
            return


def _empty_work_folder() -> None:
    """Removes what libraries have made there while they were imported, such as folders of caches."""
    for entry in os.scandir("."):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _next_request(requests: BinaryIO) -> bytes | None:
    length = requests.readline()
    return requests.read(int(length)) if length else None


def _reply(replies: int, reply: Any) -> None:
    body = json.dumps(reply).encode()
    data = b"%d\n%b" % (len(body), body)
    while data:
        data = data[os.write(replies, data) :]


class _Server:
    """Has requests answered by children, one at a time."""

    def __init__(
        self,
        make_score: MakeScore,
        package: str,
        seconds: float,
        confined: bool,
        descriptors: tuple[int, ...],
    ) -> None:
        """`descriptors` are the server's own, which no child may hold."""
        self._make_score = make_score
        self._package = package
        self._seconds = seconds
        self._confined = confined
        self._descriptors = descriptors
        self._child: _Child | None = None
        self._has_scored_others = False

    def answer(self, request: bytes) -> dict[str, Any]:
        modules = len(sys.modules)
        try:
            _, only_compares = self._make_score(json.loads(request)["problem"])
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:_MESSAGE]}
        if len(sys.modules) > modules:
            self._end_child()  # it lacks what has been imported
            self._keep_imports()
        reply = self._asked(request)
        told = reply.get("told")
        has_only_compared = only_compares and isinstance(told, dict) and "refused" not in told
        if not has_only_compared or self._child is None or self._child.answers >= _ANSWERS_OF_A_CHILD:
            self._end_child()
        return reply

    def _keep_imports(self) -> None:
        teach(self._package)
        gc.collect()
        gc.freeze()  # or else a collection in a child would copy every page
        if self._confined:
            _empty_work_folder()

    def _asked(self, request: bytes) -> dict[str, Any]:
        reply = self._asked_once(request)
        # A process that has scored others may have ended between the two, or be full: that says nothing of
        # this answer.
        if self._has_scored_others and ("crashed" in reply or reply.get("told") == _OUT_OF_MEMORY):
            self._end_child()
            reply = self._asked_once(request)
        return reply

    def _asked_once(self, request: bytes) -> dict[str, Any]:
        self._has_scored_others = self._child is not None
        if self._child is None:
            self._child = _Child(self._make_score, self._descriptors)
        line, is_late = self._child.ask(request, time.monotonic() + self._seconds)
        if is_late:
            return {"late": True}
        try:
            return {"told": json.loads(line)}
        except ValueError:
            return {"crashed": os.waitstatus_to_exitcode(self._end_child())}

    def _end_child(self) -> int:
        child, self._child = self._child, None
        return 0 if child is None else child.end()


class _Child:
    """A process that scores answers, and the server's ends of its pipes."""

    def __init__(self, make_score: MakeScore, not_its: tuple[int, ...]) -> None:
        its_requests, self._requests = os.pipe()
        self._verdicts, its_verdicts = os.pipe()
        self.answers = 0
        self._process = os.fork()
        if self._process == 0:
            try:
                for descriptor in (*not_its, self._requests, self._verdicts):
                    os.close(descriptor)
                _be_the_child(make_score, its_requests, its_verdicts)
            finally:
                os._exit(1)  # also after a success: the status counts only where there is no verdict
        os.close(its_requests)
        os.close(its_verdicts)

    def ask(self, request: bytes, deadline: float) -> tuple[bytes, bool]:
        """Returns the line that it writes, or what there is of one where it ends, and whether the deadline
        came first."""
        self.answers += 1
        data = b"%d\n%b" % (len(request), request)
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except BrokenPipeError:  # it has ended
            return b"", False
        line = b""
        while len(line) <= _REPLY_BYTES:
            ready, _, _ = select.select([self._verdicts], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return line, True
            read = os.read(self._verdicts, _REPLY_BYTES)
            line += read
            if not read or line.endswith(b"\n"):
                break
        return line, False

    def end(self) -> int:
        """Kills it and returns how it ended."""
        os.close(self._requests)
        os.close(self._verdicts)
        os.kill(self._process, _SIGKILL)
        return os.waitpid(self._process, 0)[1]


def _be_the_child(make_score: MakeScore, requests: int, verdicts: int) -> None:
    for name in ("RLIMIT_NPROC", "RLIMIT_FSIZE"):
        resource.setrlimit(getattr(resource, name), (0, 0))
    refused = refuse_code()
    with os.fdopen(requests, "rb") as file:
        while (request := _next_request(file)) is not None:
            asked = json.loads(request)
            score, _ = make_score(asked["problem"])
            told: dict[str, Any]
            try:
                told = {"score": float(score(asked["answer"]))}
            except MemoryError:
                told = dict(_OUT_OF_MEMORY)
            except Exception as error:
                told = {"raised": repr(error)[:_MESSAGE]}
            if refused:
                told["refused"] = refused[0]
            # At most what a pipe's buffer holds, so that one write is enough.
            os.write(verdicts, json.dumps(told).encode()[: _REPLY_BYTES - 1] + b"\n")
