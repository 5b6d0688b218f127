"""Programs that want out of their sandbox, beyond their limits, or a verdict that they have not earned.

A program that gets what it should not prints ESCAPED and what it got. What else it could do to the machine is
looked for from outside, with a `Trap`.
"""

from __future__ import annotations

import contextlib
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
"""A file for each kind, with lines of three dashes between programs. Their first lines are their names."""


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
    for file in sorted(_WRITTEN.iterdir()):
        for code in file.read_text(encoding="utf-8").split("---\n"):
            yield HostileProgram(file.stem.replace("_", " "), code.partition("\n")[0].lstrip("# "), code)
    for name, number in _CALLS.items():
        yield HostileProgram("system calls", name, _CALL.format(name=name, number=number))
    for path in _FILES:
        yield HostileProgram("files", f"reads {path}", _READ.format(path=path))
    for path in _PLACES:
        yield HostileProgram("writing outside", f"writes to {path}", _WRITE.format(path=path))
    for family, name in _FAMILIES.items():
        yield HostileProgram("network", f"a socket of the family {name}", _SOCKET.format(family=family))


_CALLS = {  # on x86-64
    "mount": 165, "umount2": 166, "unshare": 272, "setns": 308, "pivot_root": 155, "chroot": 161,
    "ptrace": 101, "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425, "userfaultfd": 323,
    "keyctl": 250, "add_key": 248, "memfd_create": 319, "shmget": 29, "init_module": 175,
    "kexec_load": 246, "reboot": 169, "swapon": 167,
    "open_by_handle_at": 304, "process_vm_readv": 310, "personality": 135, "iopl": 172, "sethostname": 170,
    "syslog": 103, "pidfd_getfd": 438, "fsopen": 430, "quotactl": 179,
}  # fmt: skip
_CALL = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
if platform.machine() == "x86_64":
    flags = 0x10000000 if {number} in (272, 165) else 0
    found = libc.syscall({number}, flags, 0, 0, 0, 0, 0)
    if found >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        print("ESCAPED: {name}", found, errno.errorcode.get(ctypes.get_errno()))
"""

_FILES = (
    "$SECRET", "$HOME", "$HOME/.bashrc", "$HOME/.ssh", "$HOME/.netrc", "/etc/shadow", "/etc/passwd",
    "/etc/hostname", "/proc/1/environ", "/proc/self/environ", "/proc/$PID/environ",
    "/proc/$PID/root$SECRET", "/proc/self/root$SECRET", "/proc/kcore", "/proc/sys/kernel/core_pattern",
    "/proc/self/maps", "/sys/kernel", "/dev/mem", "/dev/sda", "/dev/kmsg", "/dev/vsock",
    "/var/run/docker.sock", "./../$SECRET", "/tmp/../../$SECRET", "/run", "/var/log", "/home", "/mnt",
    "/opt", "/srv",
)  # fmt: skip
_READ = """
import os
path = "{path}"
try:
    found = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(9999)
    # Folders on the way to Python are there, and hold nothing else.
    if not os.path.isdir(path) or set(found) - {{".pyenv", ".local", "miniconda3", "conda"}}:
        print("ESCAPED: read", path, found)
except OSError as error:
    print(error)
"""

_FOLDERS = ("usr/lib", "etc", "root", "dev", "dev/null", "sys", "home", "var", "run", "packages")
_PLACES = (
    "$OUTSIDE/file", "$SECRET", "/file", "/boot.py", "/proc/sys/kernel/core_pattern",
    *(f"/{folder}/file" for folder in _FOLDERS),
)  # fmt: skip
_WRITE = """
import os
for flags in (os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_APPEND, os.O_RDWR):
    try:
        os.write(os.open("{path}", flags, 0o666), b"hostile")
        print("ESCAPED: wrote {path}")
    except OSError as error:
        print(error)
for how in (os.remove, os.mkdir, os.rmdir):
    try:
        how("{path}")
        print("ESCAPED: changed {path}")
    except OSError as error:
        print(error)
"""

_FAMILIES = {
    2: "INET",
    10: "INET6",
    16: "NETLINK",
    17: "PACKET",
    31: "BLUETOOTH",
    38: "ALG",
    40: "VSOCK",
    44: "XDP",
}
_SOCKET = """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
    for protocol in (0, 1, 3, 6, 17, 255):
        try:
            socket.socket({family}, kind, protocol)
            print("ESCAPED: a socket")
        except OSError as error:
            pass
"""

FORGED_GOLDS = (
    '{"inputs": ["2", "3"], "outputs": ["4", "9"]}',
    '{"functional": "assert f(2) == 4\\nassert f(3) == 9"}',
    '{"functional": "assert abs(f(2) - 4) < 1e-6\\nassert 8.5 <= f(3) <= 9.5"}',
    '{"inputs": [[2], [3]], "outputs": [4, 9], "fn_name": "f"}',
    '{"pytest": "from solution import f\\ndef test_f():\\n    assert f(2) == 4\\n    assert f(3) == 9"}',
)
"""Tests that programs of the kind ``forging`` want to pass without computing a square."""
