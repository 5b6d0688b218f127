"""The system calls that a program in the sandbox is refused, as a filter for the kernel (seccomp).

Namespaces hide the machine; the filter closes what they leave open: kernel interfaces with a history of
escapes, networks that no namespace holds (vsock), memory that belongs to no process (System V and
anonymous shared memory, memfd), and looking into other processes.
"""

from __future__ import annotations

import errno
import platform
import struct
from functools import cache
from typing import NamedTuple

_X86_64, _AARCH64 = "x86_64", "aarch64"
_AUDIT_ARCH = {_X86_64: 0xC000003E, _AARCH64: 0xC00000B7}

# System call: its numbers on x86-64 and on 64-bit ARM (None where it doesn't exist), as in the kernel's
# tables arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # memory and queues that outlive or belong to no process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "userfaultfd": (323, 282),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the kernel itself
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
}
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
    """The filter for this machine. Raises ValueError for a processor whose system calls aren't listed."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise ValueError(f"the sandbox knows the system calls of x86_64 and aarch64, not those of {machine}")
    return b"".join(struct.pack("=HBBI", *one) for one in _instructions(machine))


def _instructions(machine: str) -> list[_Instruction]:
    place = 0 if machine == _X86_64 else 1
    program = [
        _Instruction(_LOAD, 0, 0, _ARCHITECTURE),
        # Calls of another architecture have other numbers: nothing here would hold for them.
        *_unless(_IF_EQUAL, _AUDIT_ARCH[machine], _KILL),
        _Instruction(_LOAD, 0, 0, _NUMBER),
    ]
    if machine == _X86_64:
        program += _if(_IF_AT_LEAST, _X32, _KILL)
    for numbers in _REFUSED.values():
        number = numbers[place]
        if number is not None:
            program += _if(_IF_EQUAL, number, _ERRNO | errno.EPERM)
    # Its flags lie in memory, where no filter can look; without it libraries use `clone`.
    program += _if(_IF_EQUAL, _CLONE3[place], _ERRNO | errno.ENOSYS)
    program += _where(_CLONE[place], 0, _if(_IF_ANY_BIT, _NEW_NAMESPACES, _ERRNO | errno.EPERM))
    program += _where(_SOCKET[place], 0, _unless(_IF_EQUAL, _AF_UNIX, _ERRNO | errno.EACCES))
    shared = [
        _Instruction(_AND, 0, 0, _SHARED_ANONYMOUS),
        *_if(_IF_EQUAL, _SHARED_ANONYMOUS, _ERRNO | errno.EPERM),
    ]
    program += _where(_MMAP[place], 3, shared)
    typing = [one for request in _TYPE_INTO_TERMINAL for one in _if(_IF_EQUAL, request, _ERRNO | errno.EPERM)]
    program += _where(_IOCTL[place], 1, typing)
    # Limits of the caller alone.
    program += _where(_PRLIMIT[place], 0, _unless(_IF_EQUAL, 0, _ERRNO | errno.EPERM))
    return [*program, _Instruction(_RETURN, 0, 0, _ALLOW)]


def _if(test: int, value: int, then: int) -> list[_Instruction]:
    return [_Instruction(test, 0, 1, value), _Instruction(_RETURN, 0, 0, then)]


def _unless(test: int, value: int, then: int) -> list[_Instruction]:
    return [_Instruction(test, 1, 0, value), _Instruction(_RETURN, 0, 0, then)]


def _where(number: int, argument: int, rules: list[_Instruction]) -> list[_Instruction]:
    """Rules on the lower half of an argument (from 0) of one system call; what passes them is allowed."""
    body = [_Instruction(_LOAD, 0, 0, 16 + 8 * argument), *rules, _Instruction(_RETURN, 0, 0, _ALLOW)]
    return [_Instruction(_IF_EQUAL, 0, len(body), number), *body]
