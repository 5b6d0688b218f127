"""The sandbox that a run uses: bubblewrap, without a network, without the machine's files."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

from typing_extensions import override

from treetune.domains.sandbox.base import ProgramLimits, ProgramOutcome, Sandbox
from treetune.domains.sandbox.program import (
    BOOT,
    PYTHON_FLAGS,
    START_SECONDS,
    ResourceUsage,
    descendants,
    follow,
    read_only,
    resource_limits,
    start,
    usage_of,
    wait_for,
)
from treetune.exceptions import SandboxUnavailable

WORK = "/work"
"""The work folder: the current one, HOME and TMPDIR. Nothing else can be written to, but /dev/shm."""

_PACKAGES = "/packages"
_SHARED_MEMORY_MIB = 16

_END_SECONDS = 30.0
"""How long the kernel may take to end a namespace that was killed."""

_FILE_BYTES = 4096
"""More than the kernel's memory for a file, so that a hundred thousand are too many."""

_FIRST_UID = 1 << 30
_COUNT = itertools.count()  # of programs that this process started


@Sandbox.register("bubblewrap")
@dataclass(frozen=True, kw_only=True)
class Bubblewrap(Sandbox):
    """Runs programs under bubblewrap (`bwrap`, Linux): no network, a read-only root that holds the Python
    that runs this and the system's libraries and nothing else, an empty environment, no /proc, its own
    processes, host name and shared memory, and a filter of system calls.

    The limits hold for all of a program's processes together. When `run` returns, every one of them is dead.
    Where this process is root, programs run as a user that nobody is; else in a user namespace.
    """

    packages: bool = False
    """Lets programs import what is installed beside this package (numpy, pytest, …)."""
    has_own_processes: ClassVar[bool] = True

    @override
    def missing(self) -> Sequence[str]:
        return _missing(self)

    @override
    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: ProgramLimits | None = None,
    ) -> ProgramOutcome:
        limits = limits or ProgramLimits()

        def once() -> ProgramOutcome:
            given = read_only(stdin.encode(errors="surrogatepass"))
            try:
                started = Started(self, code, files or {}, limits, stdin=given)
            finally:
                os.close(given)
            begin = time.monotonic()
            return follow(started.process, limits, begin, started.usage, started.kill)

        # Killed once, before or after its start, may be the machine's doing, such as a lack of memory.
        with contextlib.suppress(SandboxUnavailable):
            outcome = once()
            if outcome.exit != -signal.SIGKILL:
                return outcome
        return once()

    @override
    def begin(self, code: str, limits: ProgramLimits) -> Started:
        return Started(replace(self, packages=True), code, {}, limits, stdin=subprocess.PIPE)


class Started:
    """A program that is about to begin in a sandbox of its own. It ends when `kill` is called, and when the
    thread ends that made this, however that happens."""

    def __init__(
        self, sandbox: Bubblewrap, code: str, files: Mapping[str, str], limits: ProgramLimits, *, stdin: int
    ) -> None:
        """`stdin` is a descriptor, or `subprocess.PIPE`. Raises SandboxUnavailable."""
        refused = read_only(refusals())
        # Bubblewrap says which its first process is, and holds that one back until it is held on to here: a
        # number alone would be another process's as soon as a program has ended.
        (info, info_write), (hold, go) = os.pipe(), os.pipe()
        self._init = -1

        def meet() -> None:
            os.close(info_write)
            self._first = _process_in(info)
            if self._first:
                with contextlib.suppress(ProcessLookupError):  # what it found wrong is told below
                    self._init = os.pidfd_open(self._first)
            os.close(go)

        open_ones = [refused, info, hold]
        try:
            command = _command(sandbox.packages, limits.disk_mib, refused, info_write, hold)
            passed = (refused, info_write, hold)
            self.process = start(
                command,
                code,
                files,
                _resource_limits(limits),
                work=WORK,
                path=[WORK, _PACKAGES] if sandbox.packages else [WORK],
                uid=_uid(),
                stdin=stdin,
                descriptors=passed,
                meet=meet,
            )
        except FileNotFoundError as error:
            open_ones += [info_write, go]
            raise SandboxUnavailable(_NOT_INSTALLED) from error
        except BaseException:
            if self._init >= 0:
                os.close(self._init)
            raise
        finally:
            for descriptor in open_ones:
                os.close(descriptor)

    def usage(self) -> ResourceUsage:
        """Measures what it uses. Files count as memory as well: empty ones fill no disk."""
        used = usage_of(descendants(self.process.pid))
        try:
            disks = [os.statvfs(f"/proc/{self._first}/root{folder}") for folder in (WORK, "/dev/shm")]
        except OSError:  # it has ended
            return used
        files = sum(disk.f_files - disk.f_ffree for disk in disks)
        return replace(used, memory=used.memory + files * _FILE_BYTES)

    def kill(self) -> None:
        """Ends it all, and returns when nothing of it is left. Safe to call twice."""
        if self._init < 0:
            return
        with contextlib.suppress(ProcessLookupError):  # when it has ended by itself
            signal.pidfd_send_signal(self._init, signal.SIGKILL)
        # The first process of a namespace ends after all others in it. Bubblewrap, outside, waits for it and
        # ends too: killed as well, it would leave a zombie to whoever is the first process of the machine.
        ended = wait_for(self._init, _END_SECONDS)
        os.close(self._init)
        self._init = -1
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        if not ended:
            raise RuntimeError(f"programs in a sandbox did not end in {_END_SECONDS:g} s after being killed")


def _process_in(info: int) -> int:
    """Reads which process bubblewrap names there; 0 where it ends before it names one."""
    text = b""
    while b"}" not in text:
        data = os.read(info, 4096) if wait_for(info, START_SECONDS) else b""
        if not data:
            return 0
        text += data
    return int(json.loads(text)["child-pid"])


def _command(packages: bool, disk_mib: int, refused: int, info: int, hold: int) -> list[str]:
    """Returns the command that starts boot.py in a sandbox, up to its arguments."""
    return [
        *(shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--as-pid-1"),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox"),
        # Root gives up what it is in boot.py. In a user namespace there is nothing to give up.
        *(
            ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
            if os.geteuid() == 0
            else ("--unshare-user",)
        ),
        *_root(),
        *(("--ro-bind", sysconfig.get_path("purelib"), _PACKAGES) if packages else ()),
        *("--ro-bind", str(BOOT), "/boot.py"),
        *("--perms", "1777", "--size", str(disk_mib << 20), "--tmpfs", WORK, "--symlink", WORK, "/tmp"),
        # Without /proc this can't be what it is elsewhere; what runs programs on many inputs puts them there.
        *("--symlink", f"{WORK}/.stdin", "/dev/stdin"),
        *("--perms", "1777", "--size", str(_SHARED_MEMORY_MIB << 20), "--tmpfs", "/dev/shm"),
        *("--remount-ro", "/", "--chdir", "/"),
        *("--seccomp", str(refused), "--info-fd", str(info), "--block-fd", str(hold)),
        *("--", os.path.realpath(sys.executable), *PYTHON_FLAGS, "/boot.py"),
    ]


@cache
def _root() -> tuple[str, ...]:
    """Binds Python and the libraries that it is linked to, where they are outside too."""
    prefix = Path(sys.base_prefix)
    libraries = [Path("/usr/lib"), Path("/usr/lib64"), Path("/lib"), Path("/lib64")]
    own = [prefix / "lib", prefix / "lib64"]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch and Path("/usr/lib", multiarch).is_dir():
        # Debian and its kin: what else lies in /usr/lib is programs'.
        libraries[0] = Path("/usr/lib", multiarch)
        own = [Path(sysconfig.get_path("stdlib"))] if prefix == Path("/usr") else own
    files = [Path(os.path.realpath(sys.executable)), Path("/etc/ld.so.cache"), Path("/usr/share/zoneinfo")]
    bound = [path for path in (*libraries, *own, *files) if path.exists()]
    # Bubblewrap makes what lies above as closed as it is outside: a Python in root's home couldn't be read by
    # the nobody that programs run as. Nothing else of that home is there.
    above = {parent for path in bound for parent in path.parents} | {Path("/dev")}
    binds: list[str] = []
    for folder in sorted(above - {Path("/")}):
        binds += ["--perms", "0755", "--dir", str(folder)]
    for path in dict.fromkeys(bound):
        link = path.is_symlink() and path in libraries
        binds += ["--symlink", os.readlink(path), str(path)] if link else ["--ro-bind", str(path), str(path)]
    # What is installed for everybody is nothing that Python needs.
    for name in ("site-packages", "dist-packages"):
        if (installed := Path(sysconfig.get_path("stdlib"), name)).is_dir():
            binds += ["--size", "4096", "--tmpfs", str(installed), "--remount-ro", str(installed)]
    for device in ("null", "random", "urandom"):
        binds += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return tuple(binds)


def _uid() -> int | None:
    """Returns the user that a program runs as where this is root: a number that no user has and no other
    program at this time, since the kernel counts processes by it."""
    if os.geteuid() != 0:
        return None
    count = next(_COUNT)
    own, mapped = uids_of_programs(), _mapped_uids()
    # In a container that maps few: the highest ones, which nobody has either.
    return own[count % len(own)] if own else mapped[-1 - count % min(1000, len(mapped) - 1)]


def uids_of_programs() -> range:
    """Returns the users that this process's programs run as where it is root; none otherwise."""
    first = _FIRST_UID + (os.getpid() << 8)
    return range(first, first + 256) if os.geteuid() == 0 and first in _mapped_uids() else range(0)


@cache
def _mapped_uids() -> range:
    """Returns the largest range of user numbers of the user namespace that this runs in."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    first, _, count = max((tuple(map(int, line.split())) for line in lines), key=lambda entry: entry[2])
    return range(first, first + count)


def _resource_limits(limits: ProgramLimits) -> dict[str, int]:
    each = resource_limits(limits)
    kernel = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if os.geteuid() == 0:
        each["RLIMIT_NPROC"] = limits.processes
    elif kernel >= (5, 14):
        # Counted in the user namespace, to which the first process belongs as well. Older kernels count all
        # that the user runs anywhere, so that a limit would keep programs from starting: there, what is
        # looked at from outside has to do.
        each["RLIMIT_NPROC"] = limits.processes + 1
    return each


_NOT_INSTALLED = "bubblewrap (bwrap) is not installed: `apt install bubblewrap`, or the like of your system"
_NO_NAMESPACES = (
    "bubblewrap may not make namespaces here. On a machine of your own: "
    "`sysctl kernel.unprivileged_userns_clone=1`, `sysctl user.max_user_namespaces=10000`, "
    "on Ubuntu 24.04 and later "
    "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`. In Docker: `--cap-add SYS_ADMIN --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined`"
)


@cache
def _missing(sandbox: Bubblewrap) -> tuple[str, ...]:
    if sys.platform != "linux":
        return ("the sandbox needs Linux",)
    if shutil.which("bwrap") is None:
        return (_NOT_INSTALLED,)
    try:
        outcome = sandbox.run("print(6 * 7)", limits=ProgramLimits(seconds=60))
    except (SandboxUnavailable, OSError, ValueError) as error:
        remedy = f". {_NO_NAMESPACES}" if re.search("namespace|permitted|denied", str(error)) else ""
        return (f"{error}{remedy}",)
    if outcome.stdout != "42\n":
        return (f"a trial program did not run in the sandbox: {outcome.stderr.strip()[-500:]}",)
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return (
            "this kernel has no /proc/PID/task/PID/children (CONFIG_PROC_CHILDREN), by which memory is "
            "counted",
        )
    return ()


def choose_sandbox() -> Sandbox:
    """Returns the sandbox of this machine, seen to work by a trial run. Never none: `unsafe_local` has to be
    named.

    Raises SandboxUnavailable with the remedy where there is no sandbox.
    """
    sandbox = Bubblewrap()
    for reason in sandbox.missing():
        raise SandboxUnavailable(reason)
    return sandbox


# The system calls that a program is refused, as a filter for the kernel (seccomp). Namespaces hide the
# machine; the filter closes what they leave open: kernel interfaces with a history of escapes, networks that
# no namespace holds (vsock), memory that belongs to no process (System V and anonymous shared memory, memfd),
# and looking into other processes.

_X86_64, _AARCH64 = "x86_64", "aarch64"
_AUDIT_ARCH = {_X86_64: 0xC000003E, _AARCH64: 0xC00000B7}

# System call: its numbers on x86-64 and on 64-bit ARM (None where it doesn't exist), as in the kernel's
# tables arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # memory and queues that outlive or belong to no process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmctl": (31, 195),
    "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "userfaultfd": (323, 282),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41),
    "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # the kernel itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "personality": (135, 92), "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "sethostname": (170, 161), "setdomainname": (171, 162), "fanotify_init": (300, 262),
    "inotify_init": (253, None), "inotify_init1": (294, 26),
}  # fmt: skip
_CLONE3 = (435, 435)
_CLONE = (56, 220)
_SOCKET = (41, 198)
_MMAP = (9, 222)
_IOCTL = (16, 29)
_PRLIMIT = (302, 261)

_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_SHARED_ANONYMOUS = 0x21
_AF_UNIX = 1
_TYPE_INTO_TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX."""
_X32 = 0x40000000

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

# Operations of the classic Berkeley packet filter.
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER, _ARCHITECTURE = 0, 4


class _Instruction(NamedTuple):
    code: int
    true: int
    false: int
    value: int


@cache
def refusals() -> bytes:
    """Returns the filter for this machine. Raises ValueError for a processor whose system calls aren't
    listed."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise ValueError(f"the sandbox knows the system calls of x86_64 and aarch64, not those of {machine}")
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(machine))


def _instructions(machine: str) -> list[_Instruction]:
    column = 0 if machine == _X86_64 else 1
    program = [
        _Instruction(_LOAD, 0, 0, _ARCHITECTURE),
        # Calls of another architecture have other numbers: nothing here would hold for them.
        *_unless(_IF_EQUAL, _AUDIT_ARCH[machine], _KILL),
        _Instruction(_LOAD, 0, 0, _NUMBER),
    ]
    if machine == _X86_64:
        program += _if(_IF_AT_LEAST, _X32, _KILL)
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += _if(_IF_EQUAL, number, _ERRNO | errno.EPERM)
    # Its flags lie in memory, where no filter can look; without it libraries use `clone`.
    program += _if(_IF_EQUAL, _CLONE3[column], _ERRNO | errno.ENOSYS)
    program += _where(_CLONE[column], 0, _if(_IF_ANY_BIT, _NEW_NAMESPACES, _ERRNO | errno.EPERM))
    program += _where(_SOCKET[column], 0, _unless(_IF_EQUAL, _AF_UNIX, _ERRNO | errno.EACCES))
    shared = [
        _Instruction(_AND, 0, 0, _SHARED_ANONYMOUS),
        *_if(_IF_EQUAL, _SHARED_ANONYMOUS, _ERRNO | errno.EPERM),
    ]
    program += _where(_MMAP[column], 3, shared)
    typing = [one for request in _TYPE_INTO_TERMINAL for one in _if(_IF_EQUAL, request, _ERRNO | errno.EPERM)]
    program += _where(_IOCTL[column], 1, typing)
    # Limits of the caller alone.
    program += _where(_PRLIMIT[column], 0, _unless(_IF_EQUAL, 0, _ERRNO | errno.EPERM))
    return [*program, _Instruction(_RETURN, 0, 0, _ALLOW)]


def _if(test: int, value: int, then: int) -> list[_Instruction]:
    return [_Instruction(test, 0, 1, value), _Instruction(_RETURN, 0, 0, then)]


def _unless(test: int, value: int, then: int) -> list[_Instruction]:
    return [_Instruction(test, 1, 0, value), _Instruction(_RETURN, 0, 0, then)]


def _where(number: int, argument: int, rules: list[_Instruction]) -> list[_Instruction]:
    """Applies rules to the lower half of an argument (from 0) of one system call; what passes them is
    allowed."""
    body = [_Instruction(_LOAD, 0, 0, 16 + 8 * argument), *rules, _Instruction(_RETURN, 0, 0, _ALLOW)]
    return [_Instruction(_IF_EQUAL, 0, len(body), number), *body]
