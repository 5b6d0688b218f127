"""The sandbox that a run uses: bubblewrap, without a network, without the machine's files."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from treetune_domains.sandbox.base import Limits, Outcome, Sandbox, SandboxUnavailable
from treetune_domains.sandbox.follow import follow
from treetune_domains.sandbox.program import (
    BOOT,
    PYTHON_FLAGS,
    START_SECONDS,
    outcome_of,
    read_only,
    resource_limits,
    setup_of,
    start,
    wait_for,
)
from treetune_domains.sandbox.seccomp import refusals
from treetune_domains.sandbox.usage import Usage, descendants, usage_of

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
    """Whether programs can import what is installed beside this package (numpy, pytest, …)."""

    def missing(self) -> Sequence[str]:
        return _missing(self)

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        limits = limits or Limits()
        given = read_only(stdin.encode(errors="surrogatepass"))
        try:
            started = Started(self, code, files or {}, limits, stdin=given)
        finally:
            os.close(given)
        begin = time.monotonic()
        followed = follow(started.process, limits=limits, start=begin, usage=started.usage, kill=started.kill)
        return outcome_of(followed, started.process.returncode, time.monotonic() - begin)


class Started:
    """A program that is about to begin in a sandbox of its own. It ends when `kill` is called, and when the
    thread ends that made this, however that happens."""

    def __init__(
        self, sandbox: Bubblewrap, code: str, files: Mapping[str, str], limits: Limits, *, stdin: int
    ) -> None:
        """`stdin` is a descriptor, or `subprocess.PIPE`. Raises SandboxUnavailable."""
        path = [WORK, _PACKAGES] if sandbox.packages else [WORK]
        setup = setup_of(code, files, _resource_limits(limits), work=WORK, path=path, uid=_uid())
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
            self.process = start(command, setup, work=WORK, stdin=stdin, descriptors=passed, meet=meet)
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

    def usage(self) -> Usage:
        """Files count as memory as well: empty ones fill no disk."""
        used = usage_of(descendants(self.process.pid))
        try:
            rooms = [os.statvfs(f"/proc/{self._first}/root{place}") for place in (WORK, "/dev/shm")]
        except OSError:  # it has ended
            return used
        files = sum(room.f_files - room.f_ffree for room in rooms)
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
    """The process that bubblewrap names there; 0 where it ends before it names one."""
    said = b""
    while b"}" not in said:
        data = os.read(info, 4096) if wait_for(info, START_SECONDS) else b""
        if not data:
            return 0
        said += data
    return int(json.loads(said)["child-pid"])


def _command(packages: bool, disk_mib: int, refused: int, info: int, hold: int) -> list[str]:
    """What starts boot.py in a sandbox, up to its arguments."""
    return [
        *(_bwrap() or "bwrap", "--die-with-parent", "--new-session", "--as-pid-1"),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--hostname", "sandbox"),
        # Root gives up what it is in boot.py. In a user namespace there is nothing to give up.
        *(
            ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
            if _is_root()
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
        *("--", _executable(), *PYTHON_FLAGS, "/boot.py"),
    ]


@cache
def _root() -> tuple[str, ...]:
    """Python and the libraries that it is linked to, in places where they are outside too."""
    prefix = Path(sys.base_prefix)
    libraries = [Path("/usr/lib"), Path("/usr/lib64"), Path("/lib"), Path("/lib64")]
    own = [prefix / "lib", prefix / "lib64"]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch and Path("/usr/lib", multiarch).is_dir():
        # Debian and its kin: what else lies in /usr/lib is programs'.
        libraries[0] = Path("/usr/lib", multiarch)
        own = [Path(sysconfig.get_path("stdlib"))] if prefix == Path("/usr") else own
    files = [Path(_executable()), Path("/etc/ld.so.cache"), Path("/usr/share/zoneinfo")]
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


def _executable() -> str:
    return os.path.realpath(sys.executable)


def _is_root() -> bool:
    return os.geteuid() == 0


def _uid() -> int | None:
    """Whom programs run as where this is root: a number that no user has and no other program at this time,
    since the kernel counts processes by it."""
    if not _is_root():
        return None
    count = next(_COUNT)
    own, mapped = uids_of_programs(), _mapped_uids()
    # In a container that maps few: the highest ones, which nobody has either.
    return own[count % len(own)] if own else mapped[-1 - count % min(1000, len(mapped) - 1)]


def uids_of_programs() -> range:
    """The users that this process's programs run as where it is root; none otherwise."""
    first = _FIRST_UID + (os.getpid() << 8)
    return range(first, first + 256) if _is_root() and first in _mapped_uids() else range(0)


@cache
def _mapped_uids() -> range:
    """The largest range of user numbers of the user namespace that this runs in."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    first, _, count = max((tuple(map(int, line.split())) for line in lines), key=lambda entry: entry[2])
    return range(first, first + count)


def _resource_limits(limits: Limits) -> dict[str, int]:
    found = resource_limits(limits)
    if _is_root():
        found["RLIMIT_NPROC"] = limits.processes
    elif _kernel() >= (5, 14):
        # Counted in the user namespace, to which the first process belongs as well. Older kernels count all
        # that the user runs anywhere, so that a limit would keep programs from starting: there, what is
        # looked at from outside has to do.
        found["RLIMIT_NPROC"] = limits.processes + 1
    return found


@cache
def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


_NOT_INSTALLED = "bubblewrap (bwrap) is not installed: `apt install bubblewrap`, or the like of your system"
_NO_NAMESPACES = (
    "bubblewrap may not make namespaces here. On a machine of your own: "
    "`sysctl kernel.unprivileged_userns_clone=1`, `sysctl user.max_user_namespaces=10000`, "
    "on Ubuntu 24.04 and later "
    "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`. In Docker: `--cap-add SYS_ADMIN --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined`"
)


def _bwrap() -> str | None:
    return shutil.which("bwrap")


@cache
def _missing(sandbox: Bubblewrap) -> tuple[str, ...]:
    if sys.platform != "linux":
        return ("the sandbox needs Linux",)
    if _bwrap() is None:
        return (_NOT_INSTALLED,)
    try:
        outcome = sandbox.run("print(6 * 7)", limits=Limits(seconds=60))
    except (SandboxUnavailable, OSError, ValueError) as error:
        remedy = f". {_NO_NAMESPACES}" if re.search("namespace|permitted|denied", str(error)) else ""
        return (f"{error}{remedy}",)
    if outcome.stdout != "42\n":
        return (f"a trial program did not run in the sandbox: {outcome.stderr.strip()[-500:]}",)
    if not _counts_children():
        return (
            "this kernel has no /proc/PID/task/PID/children (CONFIG_PROC_CHILDREN), by which memory is "
            "counted",
        )
    return ()


def _counts_children() -> bool:
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")
