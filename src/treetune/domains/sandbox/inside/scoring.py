"""Scores answers one after the other inside of the sandbox, each in a process of its own.

    outside                    the server                          a child for each answer
    ───────                    ──────────                          ───────────────────────
    starts the sandbox ──────► imports the library, replies
    sends a request ─────────► makes the scorer (without
                               the answer), forks ───────────────────► takes limits, closes all but its pipe,
                               waits until its deadline            scores, writes the score, ends
    takes the reply ◄───────── says what the child wrote ◄──────── (or is killed)

A child is a copy of a process that has never executed an answer. It can start no process, so that nothing of
it is there when it has ended, and can write no byte to a file. Where one leaves as much as an empty file, the
server ends: the next answer has another sandbox.

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
    MakeScore = Callable[[Any], Score]
    """Makes the function that scores answers to one problem."""

_SIGKILL = 9
_REPLY_BYTES = 4096
_MESSAGE = 300
_LEFT_IN = (".", "/dev/shm")


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
    while (request := _next_request(requests)) is not None:
        scored = _scored(make_score, request, package, seconds, confined, replies, requests.fileno())
        _reply(replies, scored)
        if confined and any(os.listdir(folder) for folder in _LEFT_IN):
            return


def _empty_work_folder() -> None:
    """Removes what libraries have made there while they were imported, such as folders of caches."""
    for entry in os.scandir("."):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _next_request(requests: BinaryIO) -> Any:
    length = requests.readline()
    return json.loads(requests.read(int(length))) if length else None


def _reply(replies: int, reply: Any) -> None:
    body = json.dumps(reply).encode()
    data = b"%d\n%b" % (len(body), body)
    while data:
        data = data[os.write(replies, data) :]


def _scored(
    make_score: MakeScore,
    request: Any,
    package: str,
    seconds: float,
    confined: bool,
    replies: int,
    requests: int,
) -> dict[str, Any]:
    modules = len(sys.modules)
    try:
        score = make_score(request["problem"])
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:_MESSAGE]}
    if len(sys.modules) > modules:
        teach(package)
        gc.collect()
        gc.freeze()  # or else a collection in a child would copy every page
        if confined:
            _empty_work_folder()
    verdict_read, verdict_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for descriptor in (replies, requests, verdict_read):
                os.close(descriptor)
            _be_the_child(score, request["answer"], verdict_write)
        finally:
            os._exit(1)  # also after a success: the status counts only where there is no verdict
    os.close(verdict_write)
    text, is_late = _read_until(verdict_read, time.monotonic() + seconds)
    os.close(verdict_read)
    os.kill(child, _SIGKILL)
    _, status = os.waitpid(child, 0)
    if is_late:
        return {"late": True}
    try:
        told = json.loads(text)
    except ValueError:
        return {"crashed": os.waitstatus_to_exitcode(status)}
    return {"told": told}


def _read_until(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """Returns what a child wrote until it closed its pipe, or ended, and whether the deadline came first."""
    text = b""
    while len(text) <= _REPLY_BYTES:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return text, True
        data = os.read(descriptor, _REPLY_BYTES)
        if not data:
            break
        text += data
    return text, False


def _be_the_child(score: Score, answer: str, verdict: int) -> None:
    for name in ("RLIMIT_NPROC", "RLIMIT_FSIZE"):
        resource.setrlimit(getattr(resource, name), (0, 0))
    refused = refuse_code()
    told: dict[str, Any]
    try:
        told = {"score": float(score(answer))}
    except MemoryError:
        told = {"raised": "MemoryError"}
    except Exception as error:
        told = {"raised": repr(error)[:_MESSAGE]}
    if refused:
        told["refused"] = refused[0]
    # At most what a pipe's buffer holds, so that one write is enough.
    os.write(verdict, json.dumps(told).encode()[:_REPLY_BYTES])
