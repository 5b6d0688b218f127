"""Runs the small experiment on machines made on the spot, a rank on each, and strikes it.

    sudo .venv/bin/python tests/endurance/cluster/try_runs.py slurm [--nodes 2] [--kind supervised]
    sudo .venv/bin/python tests/endurance/cluster/try_runs.py ssh [--nodes 2] [--only rank …]

On a real SLURM cluster, `scripts/slurm/submit.sh` queues it as a user would; over ssh, DeepSpeed's launcher
starts it with a hostfile, as the documents say. It is struck in its third iteration, after its first
checkpoint, goes on by SLURM's own means or by the same line again, and has to end with the undisturbed
run's weights, to the bit; over ssh, nothing may be left on any machine in between. Prints a row for each.
Needs root and the packages that it names. Allow three minutes a blow on two idle cores.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from machines import ROOT, Machine, enclosed, machines, missing, wait_until
from slurm import TOOLS, Cluster, cluster

sys.path.insert(0, str(ROOT / "src"))

from treetune.runtime.directory import ExperimentDirectory

RUN_DEADLINE_S, NEW_START_WITHIN_S, GONE_WITHIN_S = 1500.0, 180.0, 90.0
STRUCK_AFTER = 2
"""The checkpoint after which a run is struck."""


class Kind(NamedTuple):
    configs: str
    iterations: int


KINDS = {
    "vineppo": Kind("tests/support/small.jsonnet,tests/support/several_machines.jsonnet", 4),
    "supervised": Kind("tests/support/small_supervised.jsonnet", 6),
}
"""`vineppo` has a server on each machine, `supervised` none."""


@dataclass
class Run:
    """The experiment under a name of its own, on what `machines` lends."""

    base: Path
    name: str
    kind: Kind
    machines: Any
    good: ClassVar[str]
    """How a run ends that came to its end."""

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.base / self.name)

    def start(self) -> None:
        """As the documents say."""
        raise NotImplementedError

    def state(self) -> str:
        """How the run ended; nothing while it goes on."""
        raise NotImplementedError

    def strike(self, name: str) -> tuple[str, str]:
        """Strikes the run. Returns what became of it in words, and how it ended."""
        raise NotImplementedError

    def log(self) -> str:
        """The end of what it has printed."""
        raise NotImplementedError

    def clear(self) -> None:
        """Ends what is left of a run that went wrong."""

    def settle(self) -> None:
        """Waits until the machines are as before."""

    def ended(self) -> str:
        wait_until(lambda: bool(self.state()), f"the end of {self.name}", RUN_DEADLINE_S)
        return self.state()

    def reach(self) -> None:
        """Returns in the iteration that is struck, and among its answers where any are sampled."""

        def half_way() -> bool:
            assert not self.state(), f"it ended with {self.state()} before it was struck:\n{self.log()}"
            journals = (self.directory.iteration(STRUCK_AFTER) / "journal").glob("rollout-*.jsonl")
            sampled = any(path.stat().st_size for path in journals) or self.kind is KINDS["supervised"]
            return STRUCK_AFTER in self.directory.checkpoints() and sampled

        wait_until(half_way, "the iteration that is struck", RUN_DEADLINE_S)

    def assert_same(self, undisturbed: Run) -> None:
        """The same weights, each iteration's metrics once."""
        place = Path("policy", "model.safetensors")
        own, whole = (one.directory.checkpoint(self.kind.iterations) / place for one in (self, undisturbed))
        assert own.read_bytes() == whole.read_bytes(), "the weights differ from the undisturbed run's"
        iterations = [row["iteration"] for row in self.directory.read_metrics()]
        assert iterations == list(range(self.kind.iterations)), f"metrics.jsonl: iterations {iterations}"


class OnSlurm(Run):
    """The jobs that an experiment is queued as; the newest of them."""

    machines: Cluster
    good = "COMPLETED"
    job = ""
    blows: ClassVar = {
        "scancel": "`scancel`",
        "requeue": "`scontrol requeue`",
        "rank": "the last rank, `kill -9`",
        "server": "the last vLLM server's engine, `kill -9`",
        "daemon": "the last node's `slurmd`, `kill -9`",
        "node": "the last node, with all that is on it",
    }

    def start(self) -> None:
        self.job = self.machines.do(
            "bash", str(ROOT / "scripts/slurm/submit.sh"), self.kind.configs, "run_iteration_loop",
            NODES=str(len(self.machines.machines) - 1), GPUS_PER_NODE="1", CPUS_PER_NODE="1", MEMORY="4G",
            TIME="60", APP_DIRECTORY=str(self.base), APP_EXPERIMENT_NAME=self.name,
        )  # fmt: skip

    def state(self) -> str:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY")
        state = self.machines.state(self.job)
        return state if state in ends else ""

    def strike(self, name: str) -> tuple[str, str]:
        slurm, last = self.machines, self.machines.machines[self.machines.nodes_of(self.job)[-1]]
        killed = {
            "rank": "src/treetune/main.py --configs",
            "server": "VLLM::EngineCore",
            "daemon": "slurmd -D",
        }
        if name in killed:
            assert last.kill(killed[name]), f"there was no {name}"
        elif name == "node":
            last.switch_off()
        else:
            slurm.do(*(["scancel"] if name == "scancel" else ["scontrol", "requeue"]), self.job)
        if name in ("requeue", "daemon", "node"):  # SLURM answers with a new start of the same job
            wait_until(lambda: slurm.restarts(self.job) > 0, "a new start", NEW_START_WITHIN_S)
        if name == "daemon":
            slurm.start_daemon(last.name)
        elif name == "node":
            slurm.switch_on(last.name)
        state = self.ended()
        return (f"queued again by SLURM: {state}" if slurm.restarts(self.job) else state), state

    def log(self) -> str:
        log = self.base / "logs" / f"slurm-{self.job}.out"
        return log.read_text(errors="replace")[-3000:] if self.job else ""

    def clear(self) -> None:
        self.machines.do("scancel", self.job, check=False)

    def settle(self) -> None:
        nodes = len(self.machines.machines) - 1
        wait_until(lambda: len(set(self.machines.idle())) == nodes, "idle nodes", NEW_START_WITHIN_S)


class OverSsh(Run):
    """The command that starts the experiment, and what came of it."""

    machines: list[Machine]
    good = "0"
    process: subprocess.Popen[bytes]
    blows: ClassVar = {
        "rank": "the last rank, `kill -9`",
        "command": "the `deepspeed` command, `kill -9`",
        "interrupt": "Ctrl-C",
    }

    def start(self) -> None:
        self.base.mkdir(exist_ok=True)
        hostfile, variables = self.base / "hostfile", self.base / "variables"
        hostfile.write_text("".join(f"{machine.name} slots=1\n" for machine in self.machines))
        everywhere = {
            "APP_DIRECTORY": str(self.base),
            "APP_EXPERIMENT_NAME": self.name,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        variables.write_text("".join(f"{name}={value}\n" for name, value in everywhere.items()))
        here: Mapping[str, str] = everywhere | {"DS_ENV_FILE": str(variables), "HOME": str(self.base)}
        words = [f"{name}={value}" for name, value in here.items()]
        command = ["deepspeed", f"--hostfile={hostfile}", "--quiet", "--no_local_rank"]
        command += ["src/treetune/main.py", "--configs", self.kind.configs, "run_iteration_loop"]
        log = self.base / f"{self.name}.output"
        self.process = self.machines[0].start("env", "-i", f"--chdir={ROOT}", *words, *command, log=log)

    def state(self) -> str:
        return "" if self.process.poll() is None else str(self.process.returncode)

    def strike(self, name: str) -> tuple[str, str]:
        if name == "rank":
            assert self.machines[-1].kill("src/treetune/main.py --configs"), "there was no rank"
        else:
            (launcher,) = self.machines[0].processes("deepspeed --hostfile")
            number = signal.SIGKILL if name == "command" else signal.SIGINT
            self.machines[0].run("kill", f"-{number}", str(launcher))
        code, struck = self.ended(), time.monotonic()
        words = ("main.py", "vllm.entrypoints", "VLLM::EngineCore", "deepspeed.launcher")

        def all_gone() -> bool:
            return not any(machine.processes(one) for machine in self.machines for one in words)

        wait_until(all_gone, "the end of all processes", GONE_WITHIN_S)
        return f"ends with {code}, all gone after {time.monotonic() - struck:.0f} s", f"{code}, struck"

    def log(self) -> str:
        return (self.base / f"{self.name}.output").read_text(errors="replace")[-3000:]

    def clear(self) -> None:
        for machine in self.machines:
            for words in ("deepspeed", "main.py", "vllm", "VLLM"):
                machine.kill(words)


SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
ListenAddress {address}
PidFile /run/sshd.pid
"""
CLIENT = """\
Host *
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known_hosts
"""


@contextmanager
def reachable(nodes: int, shared: Path) -> Iterator[list[Machine]]:
    """Machines that let each other in, with keys made for them; gone at the end of the block."""
    folder = shared / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    names = [f"node{number}" for number in range(1, nodes + 1)]
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"{name} {key}\n" for name in names))
    (folder / "client").write_text(CLIENT.format(folder=folder))
    with machines(names, shared, {"/etc/ssh/ssh_config": folder / "client"}) as made:
        for machine in made.values():
            settings = folder / f"server-{machine.name}"
            settings.write_text(SERVER.format(folder=folder, address=machine.address))
            machine.run("mkdir", "-p", "/run/sshd")
            log = folder / f"server-{machine.name}.log"
            machine.start("/usr/sbin/sshd", "-D", "-e", "-f", str(settings), log=log)
        first = made["node1"]
        for name in names:
            wait_until(
                lambda name=name: not first.run("ssh", name, "true", check=False).returncode, f"ssh to {name}"
            )
        yield list(made.values())


SSH_TOOLS = {"sshd": "openssh-server", "ssh-keygen": "openssh-client", "pdsh": "pdsh", "ip": "iproute2"}
WAYS: dict[str, tuple[type[Any], Mapping[str, str], Any]] = {
    "slurm": (OnSlurm, TOOLS, cluster),
    "ssh": (OverSsh, SSH_TOOLS | {"unshare": "util-linux", "ps": "procps"}, reachable),
}


def row(machines: int, what: str, became: str, problem: str, started: float) -> None:
    same = f"**no**: {problem}" if problem else "yes"
    print(f"| {machines} | {what} | {became} | {same} | {time.monotonic() - started:.0f} |", flush=True)


def tried(run: Run, name: str, undisturbed: Run) -> tuple[str, str]:
    """Starts the run, strikes it and lets it go on. Returns what became of it, and what is wrong."""
    became = ""
    try:
        run.start()
        run.reach()
        became, end = run.strike(name)
        if end != run.good:
            run.start()
            end = run.ended()
            became += f"; the same line again: {end}"
        assert end == run.good, run.log()
        run.assert_same(undisturbed)
    except (AssertionError, TimeoutError, RuntimeError) as error:
        print(f"{error}\n{run.log()}", file=sys.stderr, flush=True)
        run.clear()
        return became, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return became, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("way", choices=list(WAYS))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="some of the blows")
    parser.add_argument("--kind", choices=list(KINDS), default="vineppo", help="supervised starts no server")
    options = parser.parse_args()
    make, tools, lent = WAYS[options.way]
    names = options.only or [name for name in make.blows if (options.kind, name) != ("supervised", "server")]
    if unknown := set(names) - make.blows.keys():
        parser.error(f"no blow is called {', '.join(unknown)}; there are {', '.join(make.blows)}")
    if lacking := missing(tools):
        parser.exit(2, f"{parser.prog}: {lacking}\n")
    shared, problems = enclosed(), []
    within: AbstractContextManager[Any] = lent(options.nodes, shared)
    with within as made:
        started = time.monotonic()
        whole: Run = make(shared / "experiments", "undisturbed", KINDS[options.kind], made)
        whole.start()
        end = whole.ended()
        assert end == whole.good, f"the undisturbed run ended with {end}:\n{whole.log()}"
        row(options.nodes, "nothing", end, "", started)
        for name in names:
            started = time.monotonic()
            run: Run = make(shared / "experiments", name, KINDS[options.kind], made)
            became, problem = tried(run, name, whole)
            row(options.nodes, make.blows[name], became, problem, started)
            problems += [problem] if problem else []
            run.settle()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
