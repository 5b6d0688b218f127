"""Programs without a sandbox, for those who say so."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treetune_domains.sandbox.base import Limits, Outcome, Sandbox
from treetune_domains.sandbox.follow import follow
from treetune_domains.sandbox.program import (
    BOOT,
    PYTHON_FLAGS,
    outcome_of,
    read_only,
    resource_limits,
    setup_of,
    start,
)
from treetune_domains.sandbox.usage import descendants, usage_of


@Sandbox.register("unsafe_local")
@dataclass(frozen=True, kw_only=True)
class UnsafeLocal(Sandbox):
    """No sandbox: programs run as you, see your files and your network, and can harm whatever you can.

    The limits hold as far as they do without a namespace: deadline, memory, output, open files, size of a
    file. A program that wants to outlives them. For programs that you trust, on machines that you can lose.
    """

    def missing(self) -> Sequence[str]:
        return ()

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        limits = limits or Limits()
        command = [sys.executable, *PYTHON_FLAGS, str(BOOT)]
        given = read_only(stdin.encode(errors="surrogatepass"))
        with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as work:
            path = [work, *(folder for folder in sys.path if folder.endswith("-packages"))]
            setup = setup_of(code, files or {}, resource_limits(limits), work=work, path=path, uid=None)
            try:
                process = start(command, setup, work=work, stdin=given)
            finally:
                os.close(given)
            begin = time.monotonic()

            def kill() -> None:
                for pid in (process.pid, *descendants(process.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

            followed = follow(
                process,
                limits=limits,
                start=begin,
                usage=lambda: usage_of([process.pid, *descendants(process.pid)]),
                kill=kill,
            )
            return outcome_of(followed, process.returncode, time.monotonic() - begin)
