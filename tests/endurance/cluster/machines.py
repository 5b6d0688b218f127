"""Simulated machines: several on one computer, which share a file system and a network and nothing else.

A machine is a set of Linux namespaces: its own network interface, host name, processes, /tmp and /dev/shm.
All of them are inside of outer namespaces that `enclosed` makes and that have no other network. When the
command ends, however it ends, the kernel removes processes, interfaces and mounts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
INSIDE = "TREETUNE_CLUSTER"
"""The variable that has the name of the shared folder for programs in the outer namespaces."""

NETWORK = "10.77.0"
PATIENCE_S = 30.0
PR_SET_PDEATHSIG = 1
POLL_S = 0.05

# The first process of a machine, which only becomes the parent of processes whose parent has ended.
INIT = "trap : TERM; while :; do sleep 1000 & wait; done"


@dataclass
class Machine:
    """A machine, named by its host name; `shared` is the folder that all machines see."""

    name: str
    address: str
    shared: Path
    mounts: dict[str, Path] = field(default_factory=dict)
    """Folders and files that are mounted over others, by the path over which they are mounted."""
    init: subprocess.Popen[bytes] | None = None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def switch_on(self, hosts: Mapping[str, str]) -> None:
        """Starts it, with an interface on the bridge; `hosts` are all names with their addresses."""
        assert self.init is None
        private = self.shared / "machines" / self.name
        private.mkdir(parents=True, exist_ok=True)
        names = "".join(f"{address} {name}\n" for name, address in hosts.items())
        (private / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        # The shared folders may lie below /tmp, and each machine has a /tmp of its own: they are kept below
        # /run while the new /tmp is mounted.
        below_tmp = [folder for folder in (self.shared, ROOT) if folder.is_relative_to("/tmp")]
        keep, put_back = "", ""
        for number, folder in enumerate(below_tmp):
            keep += f"mkdir /run/{number} && mount --bind {folder} /run/{number}\n"
            put_back += f"mkdir -p {folder} && mount --move /run/{number} {folder}\n"
        mounts = "\n".join(f"mount --bind {source} {target}" for target, source in self.mounts.items())
        script = f"""set -e
            hostname {self.name}
            mount --make-rprivate /
            mount -t tmpfs tmpfs /run
            {keep}
            mount -t tmpfs tmpfs /tmp
            mount -t tmpfs tmpfs /dev/shm
            {put_back}
            mount --bind {private}/hosts /etc/hosts
            {mounts}
            : >{private}/up
            {INIT}"""
        with contextlib.suppress(FileNotFoundError):
            (private / "up").unlink()
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (private / "log").open("ab") as log:
            self.init = subprocess.Popen(
                ["unshare", *namespaces, "bash", "-c", script],
                stdin=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until((private / "up").exists, f"the machine {self.name}")
        _run(*f"ip link add {self.link} type veth peer name eth0 netns {self.pid}".split())
        _run(*f"ip link set {self.link} master bridge up".split())
        for arguments in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            self.run("ip", *arguments.split())

    @property
    def link(self) -> str:
        """The name of the outer end of its network interface."""
        return f"to-{self.address.rpartition('.')[2]}"

    @property
    def pid(self) -> int:
        """The id of its first process, as seen from outside."""
        assert self.init is not None
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        return int(children[0])

    def _enter(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--ipc", "--mount", "--pid", *command]

    def run(
        self, *command: str, check: bool = True, deadline_s: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the machine to its end."""
        done = subprocess.run(
            self._enter(command), capture_output=True, text=True, timeout=deadline_s, check=False, cwd="/"
        )
        if check and done.returncode:
            raise RuntimeError(
                f"{self.name}: {' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done

    def start(
        self, *command: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command on the machine that goes on, such as a daemon."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                self._enter(command), stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd="/",
                env=None if environment is None else dict(environment), start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def processes(self, text: str) -> list[int]:
        """Finds the processes on the machine whose command line has a text, by their ids there."""
        listed = self.run("ps", "-eo", "pid=,args=").stdout.splitlines()
        return [int(line.split()[0]) for line in listed if text in line and " ps " not in line]

    def kill(self, text: str) -> int:
        """Sends SIGKILL to all processes whose command line has a text, and returns their number."""
        pids = self.processes(text)
        if pids:
            self.run("kill", "-KILL", *map(str, pids), check=False)
        return len(pids)

    def switch_off(self) -> None:
        """Ends the machine as a power cut does: all processes and the interface are gone at once."""
        if self.init is None:
            return
        with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):
            os.kill(self.pid, signal.SIGKILL)
        self.init.wait(PATIENCE_S)
        self.init = None
        with contextlib.suppress(RuntimeError):  # the kernel may have deleted it already
            _run("ip", "link", "delete", self.link)
        for process in self.started:
            process.wait(PATIENCE_S)
        self.started.clear()


@contextmanager
def machines(
    names: Sequence[str], shared: Path, mounts: Mapping[str, Path] | None = None
) -> Iterator[dict[str, Machine]]:
    """Switches machines on, and off at the end of the block. All have the `mounts`."""
    hosts = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
    by_name = {name: Machine(name, address, shared, dict(mounts or {})) for name, address in hosts.items()}
    _run("ip", "link", "add", "bridge", "type", "bridge")
    _run("ip", "link", "set", "bridge", "up")
    try:
        for machine in by_name.values():
            machine.switch_on(hosts)
        yield by_name
    finally:
        for machine in by_name.values():
            machine.switch_off()
        _run("ip", "link", "delete", "bridge")


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = PATIENCE_S) -> None:
    """Waits for a condition; raises TimeoutError after `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} has not come within {deadline_s:.0f} s")
        time.sleep(POLL_S)


def missing(tools: Mapping[str, str]) -> str | None:
    """Says what this computer lacks to make machines with these tools; None if nothing.

    Args:
        tools: The Debian package of each program that is needed.
    """
    lacking = sorted(
        {package for tool, package in tools.items() if shutil.which(tool, path=_search()) is None}
    )
    if lacking:
        return f"install {' '.join(lacking)} (apt-get install --no-install-recommends …)"
    if os.geteuid() != 0:
        return "only root makes namespaces with networks of their own"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


def enclosed() -> Path:
    """Starts this command again in outer namespaces, and ends with its exit code. A script calls this first.

    Returns:
        In the outer namespaces, the shared folder, which is deleted at the end.
    """
    if INSIDE in os.environ:
        _run("ip", "link", "set", "lo", "up")
        return Path(os.environ[INSIDE])
    folder = tempfile.mkdtemp(prefix="treetune-cluster-")
    # The standard error of unshare itself, which has harmless messages, is dropped; the command's is kept.
    command = ["bash", "-c", 'exec 3>&2 2>/dev/null; exec unshare "$@"', "unshare"]
    command += ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["bash", "-c", 'exec 2>&3 3>&-; exec "$@"', "inside", sys.executable, *sys.argv]
    inside = subprocess.Popen(
        command,
        env=os.environ | {INSIDE: folder, "TMPDIR": "/tmp"},
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
        code = inside.wait()
    except KeyboardInterrupt:
        code = 130
    finally:
        inside.kill()  # its children are killed by the kernel
        inside.wait()
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


def _end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, even by SIGKILL; the folder then stays."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _search() -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
