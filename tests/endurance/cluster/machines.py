"""Machines of our own making: several on one computer, which share a file system, a network and nothing else.

A machine is a set of Linux namespaces: its own network interface, host name, processes, /tmp and /dev/shm.
All of them are inside of outer namespaces that `enclosed` makes, which have no way to any other network: what
happens here reaches nobody, and when the command ends, however it ends, the kernel takes processes,
interfaces and mounts away.
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
"""Names the shared folder in the environment of what runs in the outer namespaces."""

NETWORK = "10.77.0"
PATIENCE_S = 30.0
PR_SET_PDEATHSIG = 1
POLL_S = 0.05

# The first process of a machine. It has nothing to do but to be the parent of those who lost theirs.
INIT = "trap : TERM; while :; do sleep 1000 & wait; done"


@dataclass
class Machine:
    """One of them, named by its host name; `shared` is the folder that all of them see."""

    name: str
    address: str
    shared: Path
    mounts: dict[str, Path] = field(default_factory=dict)
    """What it has in another place's stead: what is shared, or its own."""
    init: subprocess.Popen[bytes] | None = None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def switch_on(self, hosts: Mapping[str, str]) -> None:
        """Starts it, with an interface on the bridge; `hosts` are all names with their addresses."""
        assert self.init is None
        private = self.shared / "machines" / self.name
        private.mkdir(parents=True, exist_ok=True)
        names = "".join(f"{address} {name}\n" for name, address in hosts.items())
        (private / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        # What all of them see may lie below /tmp, which each has one of its own of.
        seen = [place for place in (self.shared, ROOT) if place.is_relative_to("/tmp")]
        keep = "\n".join(f"mkdir /run/{n} && mount --bind {place} /run/{n}" for n, place in enumerate(seen))
        put = "\n".join(f"mkdir -p {place} && mount --move /run/{n} {place}" for n, place in enumerate(seen))
        mounts = "\n".join(f"mount --bind {what} {place}" for place, what in self.mounts.items())
        script = f"""set -e
            hostname {self.name}
            mount --make-rprivate /
            mount -t tmpfs tmpfs /run
            {keep}
            mount -t tmpfs tmpfs /tmp
            mount -t tmpfs tmpfs /dev/shm
            {put}
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
        for words in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            self.run("ip", *words.split())

    @property
    def link(self) -> str:
        """The outer end of its cable."""
        return f"to-{self.address.rpartition('.')[2]}"

    @property
    def pid(self) -> int:
        """Of its first process, as seen from outside."""
        assert self.init is not None
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()
        return int(children[0])

    def _enter(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--ipc", "--mount", "--pid", *command]

    def run(
        self, *command: str, check: bool = True, deadline_s: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        """A command on it, to its end."""
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
        """A command that goes on, as a daemon does."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                self._enter(command), stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd="/",
                env=None if environment is None else dict(environment), start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def processes(self, words: str) -> list[int]:
        """Those on it whose command line has these words, by their ids there."""
        listed = self.run("ps", "-eo", "pid=,args=").stdout.splitlines()
        return [int(line.split()[0]) for line in listed if words in line and " ps " not in line]

    def kill(self, words: str) -> int:
        """SIGKILL to all processes with these words; how many there were."""
        found = self.processes(words)
        if found:
            self.run("kill", "-KILL", *map(str, found), check=False)
        return len(found)

    def switch_off(self) -> None:
        """As a power cut: all of its processes are gone at once, its interface with them."""
        if self.init is None:
            return
        with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):
            os.kill(self.pid, signal.SIGKILL)
        self.init.wait(PATIENCE_S)
        self.init = None
        with contextlib.suppress(RuntimeError):  # it goes with the machine, at once or a moment later
            _run("ip", "link", "delete", self.link)
        for process in self.started:
            process.wait(PATIENCE_S)
        self.started.clear()


@contextmanager
def machines(
    names: Sequence[str], shared: Path, mounts: Mapping[str, Path] | None = None
) -> Iterator[dict[str, Machine]]:
    """Machines of these names, switched on; off at the end of the block. All have the `mounts`."""
    hosts = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
    made = {name: Machine(name, address, shared, dict(mounts or {})) for name, address in hosts.items()}
    _run("ip", "link", "add", "bridge", "type", "bridge")
    _run("ip", "link", "set", "bridge", "up")
    try:
        for machine in made.values():
            machine.switch_on(hosts)
        yield made
    finally:
        for machine in made.values():
            machine.switch_off()
        _run("ip", "link", "delete", "bridge")


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = PATIENCE_S) -> None:
    """Raises TimeoutError when it hasn't come by then."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} has not come within {deadline_s:.0f} s")
        time.sleep(POLL_S)


def missing(tools: Mapping[str, str]) -> str | None:
    """What this computer lacks to make machines with these tools and their packages; None for nothing."""
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
    """Called first: starts this command again in outer namespaces, with a folder that is deleted when it has
    ended, and ends with its exit code. Inside: that folder."""
    if INSIDE in os.environ:
        _run("ip", "link", "set", "lo", "up")
        return Path(os.environ[INSIDE])
    folder = tempfile.mkdtemp(prefix="treetune-cluster-")
    # unshare itself complains, of nothing that matters, on its standard error.
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
    """SIGKILL to this process when its parent is gone, even by SIGKILL; the folder then stays."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _search() -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
