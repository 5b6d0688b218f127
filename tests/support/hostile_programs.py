"""Programs that want out of their sandbox, beyond their limits, or a verdict that they have not earned.

A program that gets what it should not prints ESCAPED and what it got. What else it could do to the machine is
looked for from outside, with a `Trap`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

COUNT = 200

_WRITTEN = Path(__file__).parent / "hostile_code"
"""A file for each kind, with lines of three dashes between programs. Their first lines are their names. In
`each`, a program that is tried with many values: numbers of system calls on x86-64, paths, families."""


@dataclass(frozen=True)
class HostileProgram:
    """`kind` is what it is after; `code` may name what a `Trap` has set up, such as ``$SECRET``."""

    kind: str
    name: str
    code: str


@dataclass
class Trap:
    """What programs try to get at: a file and a variable with a secret, a folder to write to, a server, a
    process. `faults` says what of it they got."""

    folder: Path
    secret: str = field(default_factory=lambda: f"secret-{secrets.token_hex(8)}")
    contacts: list[str] = field(default_factory=list)
    _values: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def set(self) -> Iterator[Trap]:
        (self.folder / "secret").write_text(self.secret)
        (self.folder / "outside").mkdir(exist_ok=True)
        os.environ["HOSTILE_SECRET"] = self.secret
        with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(f"\0{self.secret[:12]}")
            unix.listen()
            self._values = {
                "SECRET": str(self.folder / "secret"),
                "OUTSIDE": str(self.folder / "outside"),
                "PORT": str(tcp.getsockname()[1]),
                "ABSTRACT": self.secret[:12],
                "PID": str(os.getpid()),
                "HOME": str(Path.home()),
            }
            for server in (tcp, unix):
                threading.Thread(target=self._accept, args=(server,), daemon=True).start()
            try:
                yield self
            finally:
                del os.environ["HOSTILE_SECRET"]

    def code(self, program: HostileProgram) -> str:
        return Template(program.code).safe_substitute(self._values)

    def faults(self, printed: str) -> list[str]:
        """What a program that printed this, and has ended, did that it should not."""
        found = [line for line in printed.splitlines() if "ESCAPED" in line][:3]
        if self.secret in printed:
            found.append("it read the secret")
        if list((self.folder / "outside").iterdir()):
            found.append("it wrote outside")
        if (self.folder / "secret").read_text() != self.secret:
            found.append("it changed a file outside")
        found += self.contacts
        return found

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept()
                self.contacts.append(f"it reached {server.family.name}")


def hostile_programs(seed: int = 0, count: int | None = None) -> Sequence[HostileProgram]:
    """All of them, or a sample, in an order that the seed says."""
    programs = list(_programs())
    assert len(programs) >= COUNT
    random.Random(seed).shuffle(programs)
    return programs if count is None else programs[:count]


def _programs() -> Iterator[HostileProgram]:
    for file in sorted(_WRITTEN.glob("*.txt")):
        for code in file.read_text(encoding="utf-8").split("---\n"):
            yield HostileProgram(file.stem.replace("_", " "), code.partition("\n")[0].lstrip("# "), code)
    for kind in ("system_calls", "files", "writing_outside", "network"):
        values, template = (_WRITTEN / f"each/{kind}.txt").read_text(encoding="utf-8").split("---\n")
        for name, _, value in (word.partition("=") for word in values.split()):
            code = Template(template).safe_substitute(NAME=name, VALUE=value or name)
            yield HostileProgram(kind.replace("_", " "), name, code)


FORGED_GOLDS = (
    '{"inputs": ["2", "3"], "outputs": ["4", "9"]}',
    '{"functional": "assert f(2) == 4\\nassert f(3) == 9"}',
    '{"functional": "assert abs(f(2) - 4) < 1e-6\\nassert 8.5 <= f(3) <= 9.5"}',
    '{"inputs": [[2], [3]], "outputs": [4, 9], "fn_name": "f"}',
    '{"pytest": "from solution import f\\ndef test_f():\\n    assert f(2) == 4\\n    assert f(3) == 9"}',
)
"""Tests that programs of the kind ``forging`` want to pass without computing a square."""

ORDINARY = [json.loads(line) for line in (_WRITTEN / "ordinary.jsonl").read_text().splitlines()]
"""Programs without guile: `code`, and what they print (`outputs`) for `inputs`."""
