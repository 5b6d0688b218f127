"""The default sandbox: bubblewrap, which hides the network, the machine's files and other processes."""

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

from treetune.domains.sandbox.base import ProgramLimits, ProgramOutcome, ResourceUsage, Sandbox
from treetune.domains.sandbox.program import (
    BOOT_FILE,
    PYTHON_FLAGS,
    START_SECONDS,
    find_descendants,
    follow_program,
    measure_usage,
    read_only_descriptor,
    resource_limits,
    start_program,
    wait_until_readable,
)
from treetune.exceptions import SandboxUnavailable

WORK_FOLDER = "/work"
"""The work folder: the current folder, HOME and TMPDIR. Only this and /dev/shm are writable."""

_PACKAGES_FOLDER = "/packages"
"""The folder from which programs import the packages that are installed next to this one."""
_SHARED_MEMORY_MIB = 16
"""The size of /dev/shm."""

_END_SECONDS = 30.0
"""The longest time that the kernel may take to end a namespace that was killed."""

_FILE_BYTES = 4096
"""The memory that each file of a program counts as. It is more than the kernel takes for an empty file."""

_FIRST_UID = 1 << 30
"""Programs run with user numbers from this one on. Systems give such high numbers to no user."""
_UIDS_OF_A_PROCESS = 256
"""How many user numbers there are for the programs of one process. The programs use them in turn."""
_PROGRAM_COUNT = itertools.count()
"""Counts the programs that this process has started."""


@Sandbox.register("bubblewrap")
@dataclass(frozen=True, kw_only=True)
class Bubblewrap(Sandbox):
    """Runs programs under bubblewrap (`bwrap`, Linux).

    A program has no network, no /proc, and a read-only root folder that holds only this process's Python and
    the system's libraries. It has its own environment, processes, host name and shared memory, and doesn't
    see those of the machine. A filter refuses dangerous system calls.

    The limits apply to all of a program's processes together. When `run` returns, all of them are dead. If
    this process is root, programs run with an unused user number. If it isn't, they run in a user namespace.
    """

    packages: bool = False
    """Lets programs import the packages that are installed next to this one (numpy, pytest, …)."""
    has_own_processes: ClassVar[bool] = True

    @override
    def missing(self) -> Sequence[str]:
        return _find_missing(self)

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

        def run_once() -> ProgramOutcome:
            # surrogatepass: texts from JSON may contain half a character ("\ud83d"), which is no valid UTF-8.
            stdin_fd = read_only_descriptor(stdin.encode(errors="surrogatepass"))
            try:
                program = ConfinedProgram(self, code, files or {}, limits, stdin=stdin_fd)
            finally:
                os.close(stdin_fd)
            start = time.monotonic()
            return follow_program(program.process, limits, start, program.usage, program.kill)

        # If the program fails to start, or is ended by SIGKILL, the machine may be the cause, e.g. because it
        # lacks memory. So the program is run once more.
        with contextlib.suppress(SandboxUnavailable):
            outcome = run_once()
            if outcome.exit != -signal.SIGKILL:
                return outcome
        return run_once()

    @override
    def begin(self, code: str, limits: ProgramLimits) -> ConfinedProgram:
        return ConfinedProgram(replace(self, packages=True), code, {}, limits, stdin=subprocess.PIPE)


class ConfinedProgram:
    """A program that is about to begin in a new sandbox.

    It ends when `kill` is called, and when the thread that made this object ends for any reason.
    """

    def __init__(
        self, sandbox: Bubblewrap, code: str, files: Mapping[str, str], limits: ProgramLimits, *, stdin: int
    ) -> None:
        """Starts the program. `stdin` is a descriptor, or `subprocess.PIPE`.

        Raises SandboxUnavailable.
        """
        self._init_fd = -1
        """A descriptor of the namespace's first process; -1 if it isn't open yet, or is closed."""
        open_fds: set[int] = set()  # descriptors that are only needed until the program begins

        def close(descriptor: int) -> None:
            open_fds.remove(descriptor)
            os.close(descriptor)

        def open_first_process() -> None:
            """Opens a descriptor of the sandbox's first process, and then lets this process run."""
            close(info_write)  # so that the pipe ends when bubblewrap ends
            self._init_pid = _read_process_number(info_read)  # 0 if bubblewrap has failed
            if self._init_pid:
                # If the process has ended already, `start_program` raises with its error message.
                with contextlib.suppress(ProcessLookupError):
                    self._init_fd = os.pidfd_open(self._init_pid)
            close(hold_write)  # now bubblewrap lets the first process run

        try:
            filter_fd = read_only_descriptor(system_call_filter())
            open_fds.add(filter_fd)
            # Bubblewrap writes the number of its first process to one pipe, and holds that process back until
            # the other pipe is closed. Meanwhile `open_first_process` opens a descriptor of the process. The
            # number would not be enough, because it may belong to another process after the program's end.
            info_read, info_write = os.pipe()
            open_fds |= {info_read, info_write}
            hold_read, hold_write = os.pipe()
            open_fds |= {hold_read, hold_write}
            command = _sandbox_command(sandbox.packages, limits.disk_mib, filter_fd, info_write, hold_read)
            self.process = start_program(
                command,
                code,
                files,
                _limits_of_each_process(limits),
                work=WORK_FOLDER,
                path=[WORK_FOLDER, _PACKAGES_FOLDER] if sandbox.packages else [WORK_FOLDER],
                uid=_choose_uid(),
                stdin=stdin,
                descriptors=(filter_fd, info_write, hold_read),
                on_start=open_first_process,
            )
        except FileNotFoundError as error:
            raise SandboxUnavailable(_NOT_INSTALLED) from error
        except BaseException:
            if self._init_fd >= 0:
                os.close(self._init_fd)
            raise
        finally:
            # `open_first_process` closes some of the descriptors. If it wasn't called, for example because
            # the machine has no room for another process, all of them are closed here.
            for descriptor in open_fds:
                os.close(descriptor)

    def usage(self) -> ResourceUsage:
        """Measures the memory, the CPU time and the number of the program's processes.

        Each file counts as `_FILE_BYTES` of memory. The disk's size does not limit the number of empty files:
        they take memory of the kernel, but no room on the disk.
        """
        usage = measure_usage(find_descendants(self.process.pid))
        try:
            disks = [
                os.statvfs(f"/proc/{self._init_pid}/root{folder}") for folder in (WORK_FOLDER, "/dev/shm")
            ]
        except OSError:  # the first process of the sandbox has ended
            return usage
        file_count = sum(disk.f_files - disk.f_ffree for disk in disks)
        return replace(usage, memory=usage.memory + file_count * _FILE_BYTES)

    def kill(self) -> None:
        """Ends all processes of the program, and returns when they have ended. Safe to call twice."""
        if self._init_fd < 0:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
        # The first process of a namespace ends after all others in it. Bubblewrap (`self.process`) runs
        # outside of the namespace, waits for this first process, and then ends too. It isn't killed at once:
        # without it, the namespace's first process would become a zombie of the machine's first process.
        has_ended = wait_until_readable(self._init_fd, _END_SECONDS)
        os.close(self._init_fd)
        self._init_fd = -1
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        if not has_ended:
            raise RuntimeError(f"programs in a sandbox did not end in {_END_SECONDS:g} s after being killed")


def _read_process_number(info_fd: int) -> int:
    """Reads the number of the sandbox's first process, which bubblewrap writes as ``{"child-pid": 4711}``.

    Returns:
        The number; 0 if bubblewrap ends before it has written it, or writes nothing for START_SECONDS.
    """
    text = b""
    # One read may give only the beginning of the text.
    while b"}" not in text:
        if not wait_until_readable(info_fd, START_SECONDS):
            return 0
        data = os.read(info_fd, 4096)
        if not data:  # the end of the pipe
            return 0
        text += data
    return int(json.loads(text)["child-pid"])


def _sandbox_command(packages: bool, disk_mib: int, filter_fd: int, info_fd: int, hold_fd: int) -> list[str]:
    """Returns the command that starts boot.py in a sandbox, without boot.py's arguments.

    Args:
        packages: Whether programs can import the packages that are installed next to this one.
        disk_mib: The size of the work folder.
        filter_fd: The descriptor from which bubblewrap reads the filter of system calls.
        info_fd: The descriptor to which it writes the number of the sandbox's first process.
        hold_fd: The end of a pipe. The sandbox's first process begins when the other end is closed.
    """
    # If bwrap isn't installed, the start of this command raises FileNotFoundError.
    return [
        *(shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--as-pid-1"),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox"),
        # boot.py becomes another user if this process is root, and needs two capabilities for that.
        *(
            ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
            if os.geteuid() == 0
            else ("--unshare-user",)
        ),
        *_root_folder(),
        *(("--ro-bind", sysconfig.get_path("purelib"), _PACKAGES_FOLDER) if packages else ()),
        *("--ro-bind", str(BOOT_FILE), "/boot.py"),
        *("--perms", "1777", "--size", str(disk_mib << 20), "--tmpfs", WORK_FOLDER),
        *("--symlink", WORK_FOLDER, "/tmp"),
        # /dev/stdin usually leads to /proc, which is missing here. `inside/cases.py` writes inputs to .stdin.
        *("--symlink", f"{WORK_FOLDER}/.stdin", "/dev/stdin"),
        *("--perms", "1777", "--size", str(_SHARED_MEMORY_MIB << 20), "--tmpfs", "/dev/shm"),
        *("--remount-ro", "/", "--chdir", "/"),
        *("--seccomp", str(filter_fd), "--info-fd", str(info_fd), "--block-fd", str(hold_fd)),
        *("--", os.path.realpath(sys.executable), *PYTHON_FLAGS, "/boot.py"),
    ]


@cache
def _root_folder() -> tuple[str, ...]:
    """Returns the options that make the root folder: Python and its libraries, at their usual paths."""
    prefix = Path(sys.base_prefix)
    # On many systems /lib is a link to /usr/lib. Then the sandbox gets a link, too.
    system_libraries = [Path("/usr/lib"), Path("/usr/lib64"), Path("/lib"), Path("/lib64")]
    python_libraries = [prefix / "lib", prefix / "lib64"]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch and Path("/usr/lib", multiarch).is_dir():
        # On Debian and its relatives, the other folders of /usr/lib belong to programs.
        system_libraries[0] = Path("/usr/lib", multiarch)
        if prefix == Path("/usr"):
            python_libraries = [Path(sysconfig.get_path("stdlib"))]
    files = [Path(os.path.realpath(sys.executable)), Path("/etc/ld.so.cache"), Path("/usr/share/zoneinfo")]
    bound_paths = [path for path in (*system_libraries, *python_libraries, *files) if path.exists()]
    options: list[str] = []
    # By default bubblewrap gives a parent folder the permissions that it has outside of the sandbox. Then the
    # program's user couldn't read a Python in root's home. So the parents are made here, with permissions for
    # everybody. Except for what is bound, they are empty.
    parents = {Path("/dev")}
    for path in bound_paths:
        parents |= set(path.parents)
    for folder in sorted(parents - {Path("/")}):
        options += ["--perms", "0755", "--dir", str(folder)]
    for path in dict.fromkeys(bound_paths):
        # A link such as /lib leads to a folder that the sandbox has. Of any other link, --ro-bind takes the
        # target.
        if path.is_symlink() and path in system_libraries:
            options += ["--symlink", os.readlink(path), str(path)]
        else:
            options += ["--ro-bind", str(path), str(path)]
    # An empty folder is mounted over each folder with packages that are installed for all users.
    for name in ("site-packages", "dist-packages"):
        folder = Path(sysconfig.get_path("stdlib"), name)
        if folder.is_dir():
            options += ["--size", "4096", "--tmpfs", str(folder), "--remount-ro", str(folder)]
    for device in ("null", "random", "urandom"):
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return tuple(options)


def _choose_uid() -> int | None:
    """Returns the user number for the next program; None if this process is not root, or if only one number
    is mapped.

    The kernel counts processes by user number. So each running program needs a user number that no other
    process uses.
    """
    if os.geteuid() != 0:
        return None
    count = next(_PROGRAM_COUNT)
    uids = uids_of_programs()
    if uids:
        return uids[count % len(uids)]
    # This process is in a container that maps few user numbers. The first of them may be root's. The
    # programs use the last thousand of the others, which no user has.
    highest_uids = _mapped_uids()[1:][-1000:]
    if not highest_uids:
        return None  # there is no other number: programs run as for a user who is not root
    return highest_uids[-1 - count % len(highest_uids)]


def uids_of_programs() -> range:
    """Returns the user numbers of this process's programs. The range is empty unless this process is root and
    all of the numbers are mapped."""
    first_uid = _FIRST_UID + os.getpid() * _UIDS_OF_A_PROCESS  # so that no two processes share a number
    uids = range(first_uid, first_uid + _UIDS_OF_A_PROCESS)
    mapped = _mapped_uids()
    if os.geteuid() != 0 or uids[0] not in mapped or uids[-1] not in mapped:
        return range(0)
    return uids


@cache
def _mapped_uids() -> range:
    """Returns the largest range of user numbers in the user namespace of this process."""
    largest = range(0)
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first_uid, _, count = map(int, line.split())
        if count > len(largest):
            largest = range(first_uid, first_uid + count)
    return largest


def _limits_of_each_process(limits: ProgramLimits) -> dict[str, int]:
    """Returns the limits that the kernel applies to each process. The number of processes is among them only
    if the kernel counts the processes of each program separately."""
    by_name = resource_limits(limits)
    kernel = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if os.geteuid() == 0:
        # The kernel counts processes by user number, and each program has its own (`_choose_uid`).
        by_name["RLIMIT_NPROC"] = limits.processes
    elif kernel >= (5, 14):
        # These kernels count the processes of a user namespace, its first process included. Older kernels
        # count all processes of the user on the machine, so a limit would keep programs from starting. On
        # older kernels, only `follow_program` enforces the limit.
        by_name["RLIMIT_NPROC"] = limits.processes + 1
    return by_name


_NOT_INSTALLED = "bubblewrap (bwrap) is not installed: `apt install bubblewrap`, or your system's equivalent"
_NO_NAMESPACES = (
    "bubblewrap is not allowed to create namespaces here. On a machine of your own: "
    "`sysctl kernel.unprivileged_userns_clone=1`, `sysctl user.max_user_namespaces=10000`, "
    "on Ubuntu 24.04 and later "
    "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`. In Docker: `--cap-add SYS_ADMIN --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined`"
)


@cache
def _find_missing(sandbox: Bubblewrap) -> tuple[str, ...]:
    """Returns the messages of `Sandbox.missing`. They are cached, so that the trial program runs only once in
    this process."""
    if sys.platform != "linux":
        return ("the sandbox needs Linux",)
    if shutil.which("bwrap") is None:
        return (_NOT_INSTALLED,)
    try:
        outcome = sandbox.run("print(6 * 7)", limits=ProgramLimits(seconds=60))
    except (SandboxUnavailable, OSError, ValueError) as error:  # ValueError: see `system_call_filter`
        remedy = f". {_NO_NAMESPACES}" if re.search("namespace|permitted|denied", str(error)) else ""
        return (f"{error}{remedy}",)
    if outcome.stdout != "42\n":
        return (f"a trial program did not run in the sandbox: {outcome.stderr.strip()[-500:]}",)
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return (
            "this kernel has no /proc/PID/task/PID/children (CONFIG_PROC_CHILDREN), which is needed to"
            " measure memory",
        )
    return ()


def choose_sandbox() -> Sandbox:
    """Returns a sandbox that works on this machine, as a trial run has shown.

    It never returns `unsafe_local`, which a user has to choose by name. Raises SandboxUnavailable, with the
    remedy, if there is no sandbox.
    """
    sandbox = Bubblewrap()
    reasons = sandbox.missing()
    if reasons:
        raise SandboxUnavailable(reasons[0])
    return sandbox


# The filter of system calls, for the kernel (seccomp). Namespaces hide the machine. The filter refuses what
# they don't cover: kernel interfaces with a history of escapes, networks without a namespace (vsock), memory
# that belongs to no process (System V and anonymous shared memory, memfd), and access to other processes.

_X86_64, _AARCH64 = "x86_64", "aarch64"
_AUDIT_ARCH = {_X86_64: 0xC000003E, _AARCH64: 0xC00000B7}

# System call: its numbers on x86-64 and on 64-bit ARM (None where it doesn't exist), as in the kernel's
# tables arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_REFUSED_CALLS: dict[str, tuple[int | None, int | None]] = {
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
"""MAP_SHARED and MAP_ANONYMOUS."""
_AF_UNIX = 1
"""The family of sockets between processes of one machine."""
_TYPE_INTO_TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX."""
_FIRST_X32_CALL = 0x40000000
"""Linux on x86-64 has the calls of its x32 interface from this number on."""

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
"""Results of the filter: the call is allowed, the process is killed, or the call fails. The number of the
error is added to the last one."""

# Operations of the classic Berkeley packet filter.
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
"""Offsets in the description of a call that the filter reads (`struct seccomp_data`)."""
_ARGUMENT_BYTES = 8


class _Instruction(NamedTuple):
    """An instruction of the filter.

    Example: skip the next instruction unless the loaded value is 101: ``_Instruction(_IF_EQUAL, 0, 1, 101)``.
    """

    code: int
    true: int
    """Instructions to skip if a condition holds."""
    false: int
    """Instructions to skip if it doesn't."""
    value: int


@cache
def system_call_filter() -> bytes:
    """Returns the filter for this machine's processor.

    Raises ValueError for a processor whose system calls aren't listed.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise ValueError(
            f"the sandbox filters the system calls of x86_64 and aarch64, not those of {machine}"
        )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _filter_instructions(machine))


def _filter_instructions(machine: str) -> list[_Instruction]:
    """Returns the filter's program. It reads the number of a system call, and ends with the first result
    whose condition holds: the process is killed, or the call is refused with an error. If no condition holds,
    the call is allowed."""
    column = 0 if machine == _X86_64 else 1  # the place of this machine's number in each pair of call numbers
    program = [
        _Instruction(_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        # Another architecture's calls have other numbers, which this filter would misread.
        *_return_unless(_IF_EQUAL, _AUDIT_ARCH[machine], _KILL),
        _Instruction(_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    if machine == _X86_64:
        # From this number on, the same calls have other numbers, which the filter doesn't list.
        program += _return_if(_IF_AT_LEAST, _FIRST_X32_CALL, _KILL)
    for numbers in _REFUSED_CALLS.values():
        number = numbers[column]
        if number is not None:  # this machine has the call
            program += _return_if(_IF_EQUAL, number, _ERRNO | errno.EPERM)
    # The flags of clone3 are in memory, which a filter can't read. Without clone3 libraries use `clone`.
    program += _return_if(_IF_EQUAL, _CLONE3[column], _ERRNO | errno.ENOSYS)
    refuse_namespaces = _return_if(_IF_ANY_BIT, _NEW_NAMESPACES, _ERRNO | errno.EPERM)
    program += _check_argument(_CLONE[column], argument=0, rules=refuse_namespaces)
    refuse_other_sockets = _return_unless(_IF_EQUAL, _AF_UNIX, _ERRNO | errno.EACCES)
    program += _check_argument(_SOCKET[column], argument=0, rules=refuse_other_sockets)
    refuse_shared_memory = [
        _Instruction(_AND, 0, 0, _SHARED_ANONYMOUS),
        *_return_if(_IF_EQUAL, _SHARED_ANONYMOUS, _ERRNO | errno.EPERM),
    ]
    program += _check_argument(_MMAP[column], argument=3, rules=refuse_shared_memory)
    # A program may not write input into its terminal, as if somebody typed it (ioctl's request TIOCSTI).
    refuse_typing: list[_Instruction] = []
    for request in _TYPE_INTO_TERMINAL:
        refuse_typing += _return_if(_IF_EQUAL, request, _ERRNO | errno.EPERM)
    program += _check_argument(_IOCTL[column], argument=1, rules=refuse_typing)
    # A process may change its own limits (process number 0), and no other's.
    refuse_other_processes = _return_unless(_IF_EQUAL, 0, _ERRNO | errno.EPERM)
    program += _check_argument(_PRLIMIT[column], argument=0, rules=refuse_other_processes)
    return [*program, _Instruction(_RETURN, 0, 0, _ALLOW)]


def _return_if(test: int, value: int, result: int) -> list[_Instruction]:
    """Returns instructions that end the filter with a result if the loaded value passes the test."""
    return [_Instruction(test, 0, 1, value), _Instruction(_RETURN, 0, 0, result)]


def _return_unless(test: int, value: int, result: int) -> list[_Instruction]:
    """Returns instructions that end the filter with a result if the loaded value does not pass the test."""
    return [_Instruction(test, 1, 0, value), _Instruction(_RETURN, 0, 0, result)]


def _check_argument(call_number: int, argument: int, rules: list[_Instruction]) -> list[_Instruction]:
    """Returns instructions that apply rules to an argument of one system call, and allow the call if no rule
    refuses it. The call's first argument is `argument` 0.

    The filter reads 32 bits at a time. So the rules get the lower half of the argument, which has everything
    that they test.
    """
    load_argument = _Instruction(_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET + _ARGUMENT_BYTES * argument)
    allow = _Instruction(_RETURN, 0, 0, _ALLOW)
    body = [load_argument, *rules, allow]
    # A call with another number skips the whole body.
    is_this_call = _Instruction(_IF_EQUAL, true=0, false=len(body), value=call_number)
    return [is_this_call, *body]
