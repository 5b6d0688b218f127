"""Scores answers one after the other in the sandbox. No answer can affect the process that scores another.

    outside                    the server                          a child
    ───────                    ──────────                          ───────
    starts the sandbox ──────► imports the library, replies
    sends a request ─────────► imports what the problem needs,
                               forks a child if there is none ───► takes limits, closes all but its pipes
                               sends it the request ─────────────► makes the scorer, scores, writes the score
                               waits until its deadline
    reads the reply ◄───────── sends what the child wrote ◄───────
                               kills the child, unless it has
                               only compared the answer

A child is a fork of a process that has never scored an answer. It scores further answers only if its scoring
function is proven to only compare (`comparing`), and if the answer was not late and didn't try to execute
code. There is only one child at a time, so children can't affect each other. They can't start processes,
which would outlive them, and can't write to files. If a child leaves a file, even an empty one, the server
ends, and the next answer gets a new sandbox.

Requests and replies are JSON after a line with the number of bytes.
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

from treetune.domains.sandbox.inside.reading import refuse_code, replace_eval_and_exec

TYPE_CHECKING = False  # not from `typing`, whose import takes as long as all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

    ScoreFunction = Callable[[str], float]
    """Scores an answer. If it raises, the reply contains the error."""
    MakeScore = Callable[[Any], tuple[ScoreFunction, bool]]
    """Returns the function that scores answers to a problem, and whether it is proven to only compare
    them."""

_SIGKILL = 9
_ANSWERS_OF_A_CHILD = 2000
"""The number of answers after which a child is replaced, in case its memory grows."""
_LINE_BYTES = 4096
"""The most bytes of the line that a child writes for an answer."""
_ERROR_CHARACTERS = 300
"""The number of characters of an error that are reported."""
_WRITABLE_FOLDERS = (".", "/dev/shm")
"""The folders in which an answer could leave a file for another one."""
_OUT_OF_MEMORY = {"raised": "MemoryError"}


def serve(prepare: Callable[[], MakeScore], package: str, seconds: float, confined: bool) -> None:
    """Answers requests until there are no more.

    Args:
        prepare: Returns the function that makes a problem's scorer. That function may import more of the
            library.
        package: The name of the library. In its modules, functions that execute texts are replaced
            (`replace_eval_and_exec`).
        seconds: The deadline for an answer.
        confined: Whether this is a sandbox with its own files and processes.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    # A library that reads or prints something must not touch the requests and replies.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    if confined:
        sys.path.remove(os.getcwd())  # an answer could leave a module there
    try:
        make_score = prepare()
    except BaseException as error:
        _write_reply(replies, {"failed": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]})
        return
    _write_reply(replies, {"ready": True})
    descriptors = (requests.fileno(), replies)
    server = _Server(make_score, package, seconds, confined, server_descriptors=descriptors)
    while (request := _next_request(requests)) is not None:
        _write_reply(replies, server.answer(request))
        if confined and any(os.listdir(folder) for folder in _WRITABLE_FOLDERS):
            return  # an answer has left a file, which another one could find


def _empty_work_folder() -> None:
    """Removes files and folders that libraries made while they were imported, such as caches.

    `serve` would take them for those of an answer.
    """
    for entry in os.scandir("."):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _next_request(requests: BinaryIO) -> bytes | None:
    length = requests.readline()
    return requests.read(int(length)) if length else None


def _write_reply(replies: int, reply: Any) -> None:
    """Writes a reply to a descriptor, in as many parts as the pipe takes."""
    body = json.dumps(reply).encode()
    data = b"%d\n%b" % (len(body), body)
    while data:
        data = data[os.write(replies, data) :]


class _Server:
    """Answers requests by means of children, of which there is one at a time."""

    def __init__(
        self,
        make_score: MakeScore,
        package: str,
        seconds: float,
        confined: bool,
        server_descriptors: tuple[int, ...],
    ) -> None:
        """`server_descriptors` are for requests to the server and its replies. Each child closes them. See
        `serve` for the other arguments."""
        self._make_score = make_score
        self._package = package
        self._seconds = seconds
        self._confined = confined
        self._server_descriptors = server_descriptors
        self._child: _Child | None = None

    def answer(self, request: bytes) -> dict[str, Any]:
        """Returns the reply to a request: that of `_ask_child`, or ``{"failed": "…"}`` if there is no scorer
        for the problem."""
        modules_before = len(sys.modules)
        try:
            # A scorer is made here only for its imports, which all further children then have. A child makes
            # its own scorer. `only_compares` says whether the scorer is proven to do nothing but compare the
            # answer.
            _, only_compares = self._make_score(json.loads(request)["problem"])
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}
        if len(sys.modules) > modules_before:
            self._end_child()  # it doesn't have the new imports
            self._prepare_imports()
        reply = self._ask_child(request)
        result = reply.get("result")
        # A child scores further answers only if this answer can't have changed it.
        has_only_compared = only_compares and isinstance(result, dict) and "refused" not in result
        child = self._child  # None if it has crashed
        if child is not None and (not has_only_compared or child.answer_count >= _ANSWERS_OF_A_CHILD):
            self._end_child()
        return reply

    def _prepare_imports(self) -> None:
        """Prepares the modules that were imported so far for the children that are forked from now on."""
        replace_eval_and_exec(self._package)  # replaces `eval` and `exec` in the library's modules
        gc.collect()
        gc.freeze()  # otherwise a collection in a child would copy all pages of memory
        if self._confined:
            _empty_work_folder()  # a file of a library's import would look like one that an answer has left

    def _ask_child(self, request: bytes) -> dict[str, Any]:
        """Scores an answer in a child. Returns ``{"result": {"score": 0.5}}``, or how it failed."""
        has_scored_others = self._child is not None
        reply = self._ask_child_once(request)
        # A child that has scored other answers may have ended since then, or have no memory left. This isn't
        # due to the present answer, which therefore gets a new child.
        if has_scored_others and ("crashed" in reply or reply.get("result") == _OUT_OF_MEMORY):
            self._end_child()
            reply = self._ask_child_once(request)
        return reply

    def _ask_child_once(self, request: bytes) -> dict[str, Any]:
        """Scores an answer in the present child, or in a new one if there is none."""
        if self._child is None:
            self._child = _Child(self._make_score, self._server_descriptors)
        line, is_late = self._child.ask(request, time.monotonic() + self._seconds)
        if is_late:
            return {"late": True}
        try:
            return {"result": json.loads(line)}
        except ValueError:  # the child ended within the line, or before it
            return {"crashed": os.waitstatus_to_exitcode(self._end_child())}

    def _end_child(self) -> int:
        """Ends the child, if there is one, and returns its wait status."""
        child, self._child = self._child, None
        return 0 if child is None else child.end()


class _Child:
    """A process that scores answers, and the server's ends of its pipes."""

    def __init__(self, make_score: MakeScore, server_descriptors: tuple[int, ...]) -> None:
        child_requests, self._requests = os.pipe()
        self._results, child_results = os.pipe()
        self.answer_count = 0
        self._process = os.fork()
        if self._process == 0:
            try:
                for descriptor in (*server_descriptors, self._requests, self._results):
                    os.close(descriptor)
                _score_requests(make_score, child_requests, child_results)
            finally:
                os._exit(1)  # the status only matters if there is no result
        os.close(child_requests)
        os.close(child_results)

    def ask(self, request: bytes, deadline: float) -> tuple[bytes, bool]:
        """Sends the child a request to score an answer. Returns the child's line, and whether the child
        missed the deadline.

        The line is incomplete if the child has ended or is late.
        """
        self.answer_count += 1
        data = b"%d\n%b" % (len(request), request)
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except BrokenPipeError:  # the child has ended
            return b"", False
        line = b""
        while len(line) <= _LINE_BYTES:  # a malicious answer could make the child write without end
            ready, _, _ = select.select([self._results], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return line, True
            data = os.read(self._results, _LINE_BYTES)
            line += data
            if not data or line.endswith(b"\n"):
                break
        return line, False

    def end(self) -> int:
        """Kills the child, and returns its wait status."""
        os.close(self._requests)
        os.close(self._results)
        os.kill(self._process, _SIGKILL)
        return os.waitpid(self._process, 0)[1]


def _score_requests(make_score: MakeScore, requests: int, results: int) -> None:
    """Scores answers in the child until the server closes the pipe.

    `requests` and `results` are the descriptors of the child's ends of the two pipes.
    """
    # An answer must neither start processes nor write files.
    for name in ("RLIMIT_NPROC", "RLIMIT_FSIZE"):
        resource.setrlimit(getattr(resource, name), (0, 0))
    refusals = refuse_code()  # a list that grows when an answer tries to execute code
    with os.fdopen(requests, "rb") as file:
        while (request := _next_request(file)) is not None:
            task = json.loads(request)
            score, _ = make_score(task["problem"])
            result: dict[str, Any]
            try:
                result = {"score": float(score(task["answer"]))}
            except MemoryError:
                result = dict(_OUT_OF_MEMORY)  # a copy, since "refused" may be added
            except Exception as error:
                result = {"raised": repr(error)[:_ERROR_CHARACTERS]}
            if refusals:
                result["refused"] = refusals[0]
            # The line fits into the pipe's buffer, so one write is enough.
            os.write(results, json.dumps(result).encode()[: _LINE_BYTES - 1] + b"\n")
