"""SandboxFusion: programs run by one or several servers that somebody else has started."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, MinLen

from treetune.domains.sandbox.base import Outcome, ProgramLimits, Sandbox, SandboxUnavailable

log = logging.getLogger(f"treetune.{__name__}")  # a run logs what is below "treetune"

_SPARE_SECONDS = 15.0
"""What a server may take beside the program's time, to find room for it and to answer."""

_REST_SECONDS = 10.0
"""How long an address that failed is asked only where no other is left."""


@Sandbox.register("sandbox_fusion")
@dataclass(frozen=True, kw_only=True)
class SandboxFusion(Sandbox):
    """Programs go to servers of SandboxFusion (``POST /run_code``), to the one that has the fewest of ours at
    work. One that fails is left alone for a while, and its program goes to another; where all fail, `rounds`
    times, the answer stays without a verdict.

    The limits of a program there are the server's matter: its memory, disk and network, and whether
    programs of one request can look into each other.
    """

    addresses: Annotated[tuple[str, ...], MinLen(1)]
    """Such as ``http://10.0.0.1:8080``."""
    rounds: Annotated[int, Ge(1)] = 2
    programs: Annotated[int, Ge(1)] = 32
    """That are at work at a time, at all addresses together."""

    isolation: ClassVar[Literal["process", "service"]] = "service"

    def __post_init__(self) -> None:
        for address in self.addresses:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"addresses should be such as http://10.0.0.1:8080, not {address!r}")

    @property
    def concurrency(self) -> int:
        return self.programs

    def missing(self) -> Sequence[str]:
        try:
            outcome = self.run("print(6 * 7)", limits=ProgramLimits(seconds=20))
        except SandboxUnavailable as error:
            return (str(error),)
        if outcome.stdout != "42\n":
            return (f"SandboxFusion did not run a trial program: {outcome.stderr.strip()[-500:]}",)
        return ()

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: ProgramLimits | None = None,
    ) -> Outcome:
        limits = limits or ProgramLimits()
        sent = {name: text.encode(errors="replace") for name, text in (files or {}).items()}
        request = {
            "language": "python",
            "code": code,
            "stdin": stdin,
            "files": {name: base64.b64encode(data).decode() for name, data in sent.items()},
            "run_timeout": limits.seconds,
            "memory_limit_MB": limits.memory_mib,
        }
        failures: list[str] = []
        for _ in range(self.rounds):
            left = list(self.addresses)
            while left:
                address = _SERVERS.take(left)
                left.remove(address)
                start = time.monotonic()
                fine = False
                try:
                    outcome = _run(address, request, limits, start)
                    fine = True
                    return outcome
                except (OSError, ValueError) as error:  # broken connections, and answers that aren't any
                    failures.append(f"{address}: {error}")
                finally:
                    _SERVERS.give_back(address, fine)
        raise SandboxUnavailable("no server of SandboxFusion ran the program: " + "; ".join(failures))


@dataclass
class _Servers:
    """The programs that this process has at work at each address, and the addresses that failed lately."""

    busy: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    resting: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, addresses: Sequence[str]) -> str:
        """Chooses the address to ask: not one that failed lately if there is another, then the least busy."""
        with self.lock:
            now = time.monotonic()
            address = min(
                addresses,
                key=lambda one: (
                    self.resting.get(one, 0) > now,
                    self.busy.get(one, 0),
                    self.served.get(one, 0),
                ),
            )
            self.busy[address] = self.busy.get(address, 0) + 1
            self.served[address] = self.served.get(address, 0) + 1
            return address

    def give_back(self, address: str, fine: bool) -> None:
        with self.lock:
            self.busy[address] -= 1
            if fine:
                self.resting.pop(address, None)
            else:
                if address not in self.resting:
                    log.warning("SandboxFusion at %s fails; others are asked first", address)
                self.resting[address] = time.monotonic() + _REST_SECONDS


_SERVERS = _Servers()


def _run(address: str, request: Mapping[str, Any], limits: ProgramLimits, start: float) -> Outcome:
    """Raises OSError (of urllib too) and ValueError."""
    sent = urllib.request.Request(
        f"{address.rstrip('/')}/run_code",
        data=json.dumps(request).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(sent, timeout=limits.seconds + _SPARE_SECONDS) as response:
        answer = json.load(response)
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        message = answer.get("message") if isinstance(answer, dict) else answer
        raise ValueError(f"the server says {str(message)[:300]!r}")
    run = answer.get("run_result")
    if not isinstance(run, dict):
        raise ValueError(f"the server gives no result: {str(answer.get('message'))[:300]!r}")
    stdout, stderr = str(run.get("stdout") or ""), str(run.get("stderr") or "")
    most = limits.output_kib * 1024
    status = run.get("status")
    if status not in ("Finished", "TimeLimitExceeded"):
        raise ValueError(f"the server's result is {status!r}: {stderr[-300:]!r}")
    killed_by: Literal["time", "output"] | None = "time" if status == "TimeLimitExceeded" else None
    if killed_by is None and max(len(stdout), len(stderr)) > most:
        killed_by = "output"
    return Outcome(
        stdout=stdout[:most],
        stderr=stderr[:most],
        exit=None if killed_by else int(run.get("return_code") or 0),
        killed_by=killed_by,
        seconds=time.monotonic() - start,
    )
