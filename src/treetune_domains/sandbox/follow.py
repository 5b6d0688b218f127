"""Follows a program from its start to its end: takes what it prints, and ends it at its limits."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

from treetune_domains.sandbox.base import KilledBy, Limits
from treetune_domains.sandbox.usage import Usage

LOOK_SECONDS = 0.02
"""How often memory, processes and processor time are looked at. A core fills some 40 MiB meanwhile."""

_READ_BYTES = 1 << 16


class Followed(NamedTuple):
    stdout: bytes
    stderr: bytes
    killed_by: KilledBy | None


def follow(
    process: subprocess.Popen[bytes],
    *,
    limits: Limits,
    start: float,
    usage: Callable[[], Usage],
    kill: Callable[[], None],
) -> Followed:
    """Until the process has ended, by itself or by `kill`; it is reaped, its pipes are closed.

    `start` is when its time began (`time.monotonic`). `kill` ends it and all that it started.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    printed = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    most = limits.output_kib * 1024
    killed_by: KilledBy | None = None
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            for descriptor in printed:
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            look = start + LOOK_SECONDS
            while killed_by is None:
                ready = [key.fd for key, _ in selector.select(max(0.0, look - time.monotonic()))]
                if ended in ready:
                    break
                for descriptor in ready:
                    if not _take(descriptor, printed[descriptor], most):
                        selector.unregister(descriptor)
                    elif len(printed[descriptor]) > most:
                        killed_by = "output"
                now = time.monotonic()
                if killed_by is None and now >= look:
                    killed_by = passed(limits, now - start, usage())
                    look = min(now + LOOK_SECONDS, start + limits.seconds)
    finally:
        kill()
        process.wait()
        os.close(ended)
        # Whoever held the other ends is dead: what is in the pipes is all that there will be.
        for descriptor, text in printed.items():
            while len(text) <= most and _take(descriptor, text, most, once=True):
                pass
        process.stdout.close()
        process.stderr.close()
    if killed_by is None and any(len(text) > most for text in printed.values()):
        killed_by = "output"
    if killed_by is None and process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        killed_by = "time"
    stdout, stderr = (bytes(text[:most]) for text in printed.values())
    return Followed(stdout, stderr, killed_by)


def passed(limits: Limits, seconds: float, usage: Usage) -> KilledBy | None:
    """Which limit is passed after so many seconds, if any."""
    if seconds >= limits.seconds:
        return "time"
    if limits.cpu_seconds is not None and usage.cpu_seconds > limits.cpu_seconds:
        return "time"
    if usage.memory > limits.memory_mib * 2**20:
        return "memory"
    if usage.tasks > limits.processes + 1:  # the first process of a namespace is not the program's
        return "processes"
    return None


def _take(descriptor: int, text: bytearray, most: int, once: bool = False) -> bool:
    """What is in the pipe, a little more than `most` bytes at most. Whether more may come; with `once`,
    whether there was anything."""
    try:
        while len(text) <= most:
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                return False
            text += data
            if once:
                return True
    except BlockingIOError:
        return not once
    return True
