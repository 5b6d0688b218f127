"""One server process: begun under its guard, on a free port, and ended with everything below it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from treetune.inference import guard, key, scratch
from treetune.inference.client import Address
from treetune.inference.launch import LOOPBACK, Launch

END_S = 30.0
"""How long an ended server, its guard included, may take to be gone."""


class Process:
    """One server process under its guard, on a free port and with a new key, or those that are given. `given`
    is what is put into its environment besides."""

    def __init__(
        self,
        launch: Launch,
        weights: Path,
        log: Path,
        *,
        port: int | None = None,
        server_key: str | None = None,
        given: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self.port = port or free_port()
        self.url = f"http://{launch.host}:{self.port}"
        self.key = server_key or secrets.token_urlsafe(32)
        folder = scratch.make()
        command = launch.command(weights, self.port)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(f"\n=== {time.strftime('%F %T')} {' '.join(command)}\n".encode())
            file.flush()
            self.log_start = file.tell()
            watcher = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(folder)]
            # A session of its own: Ctrl-C in the terminal is ours to handle, not the server's.
            self._guard = subprocess.Popen(
                [*watcher, *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=launch.environment(folder) | {key.VARIABLE: self.key, **(given or {})},
                start_new_session=True,
                bufsize=0,
            )
        self._scratch = folder

    def address(self, epoch: int = 0) -> Address:
        return Address(self.url, epoch, self.key)

    def pid(self) -> int | None:
        """The server's own, which the guard started first; None once it is gone."""
        try:
            return min(psutil.Process(self._guard.pid).children(), key=lambda one: one.create_time()).pid
        except (psutil.Error, ValueError):
            return None

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._guard.poll()

    def end(self, *, at_once: bool = False) -> None:
        """Ends the server and everything below it, and waits for that."""
        if self._guard.poll() is None:
            assert self._guard.stdin is not None
            with contextlib.suppress(OSError):
                self._guard.stdin.write(guard.END_NOW if at_once else b"q")
            try:
                self._guard.wait(END_S)
            except subprocess.TimeoutExpired:
                # The session's leader is the guard: its process group is the server's and nobody else's.
                os.killpg(self._guard.pid, signal.SIGKILL)
                self._guard.wait(END_S)
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def log_text(self) -> str:
        """What this start has written, as far as the end of it matters."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self.log_start, file.seek(0, os.SEEK_END) - 200_000))
            return file.read().decode(errors="replace")
        return ""


def free_port() -> int:
    """A port of this machine's loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def listens(port: int, host: str = LOOPBACK) -> bool:
    """Whether somebody listens on this port, of this machine's loopback or another of its addresses."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
