"""Runs the small experiment on simulated machines, a rank on each, and kills or cancels it.

    sudo .venv/bin/python tests/endurance/cluster/try_runs.py slurm [--nodes 2] [--kind supervised]
    sudo .venv/bin/python tests/endurance/cluster/try_runs.py ssh [--nodes 2] [--only rank …]

On a real SLURM cluster, `scripts/slurm/submit.sh` queues it as a user would; over ssh, DeepSpeed's launcher
starts it with a hostfile, as the documents say. Each fault comes in the third iteration, after the first
checkpoint. The run is resumed by SLURM or by the same command, and has to end with the undisturbed run's
weights, to the bit; over ssh, no process may be left on any machine before the resume. The script prints a
row for each fault. It needs root and the packages that it names. Allow three minutes a fault on two idle
cores.
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
FAULT_AFTER = 2
"""The checkpoint after which the fault comes."""


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
    """A run of the experiment, with a name of its own, on the given machines."""

    base: Path
    name: str
    kind: Kind
    machines: Any
    good: ClassVar[str]
    """The state of a run that has reached its end."""

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.base / self.name)

    def start(self) -> None:
        """Starts or resumes the run, as the documents say."""
        raise NotImplementedError

    def state(self) -> str:
        """Returns how the run ended; empty while it goes on."""
        raise NotImplementedError

    def cause_fault(self, name: str) -> tuple[str, str]:
        """Causes a fault, and returns a description of what happened, and how the run ended."""
        raise NotImplementedError

    def log(self) -> str:
        """Returns the end of its output."""
        raise NotImplementedError

    def clear(self) -> None:
        """Ends all processes of a run that went wrong."""

    def settle(self) -> None:
        """Waits until the machines are idle again."""

    def wait_for_end(self) -> str:
        wait_until(lambda: bool(self.state()), f"the end of {self.name}", RUN_DEADLINE_S)
        return self.state()

    def reach(self) -> None:
        """Waits until the iteration of the fault has begun and, with a server, has sampled answers."""

        def is_there() -> bool:
            assert not self.state(), f"it ended with {self.state()} before the fault:\n{self.log()}"
            journals = (self.directory.iteration_folder(FAULT_AFTER) / "journal").glob("rollout-*.jsonl")
            has_sampled = any(path.stat().st_size for path in journals) or self.kind is KINDS["supervised"]
            return FAULT_AFTER in self.directory.checkpoints() and has_sampled

        wait_until(is_there, "the iteration of the fault", RUN_DEADLINE_S)

    def assert_same(self, undisturbed: Run) -> None:
        """Asserts that both runs have the same weights, and this one each iteration's metrics once."""
        checkpoint = self.directory.checkpoint_folder(self.kind.iterations)
        weights = checkpoint / "policy" / "model.safetensors"
        expected_checkpoint = undisturbed.directory.checkpoint_folder(self.kind.iterations)
        expected = expected_checkpoint / "policy" / "model.safetensors"
        assert weights.read_bytes() == expected.read_bytes(), "the weights differ from the undisturbed run's"
        iterations = [row["iteration"] for row in self.directory.read_metrics()]
        assert iterations == list(range(self.kind.iterations)), f"metrics.jsonl: iterations {iterations}"


class OnSlurm(Run):
    """A run that is queued as a SLURM job; `job` is the id of the newest one."""

    machines: Cluster
    good = "COMPLETED"
    job = ""
    faults: ClassVar = {
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

    def cause_fault(self, name: str) -> tuple[str, str]:
        slurm, last = self.machines, self.machines.machines[self.machines.nodes_of(self.job)[-1]]
        command_lines = {
            "rank": "src/treetune/main.py --configs",
            "server": "VLLM::EngineCore",
            "daemon": "slurmd -D",
        }
        if name in command_lines:
            assert last.kill(command_lines[name]), f"there was no {name}"
        elif name == "node":
            last.switch_off()
        else:
            slurm.do(*(["scancel"] if name == "scancel" else ["scontrol", "requeue"]), self.job)
        if name in ("requeue", "daemon", "node"):  # after these, SLURM starts the same job again
            wait_until(lambda: slurm.restarts(self.job) > 0, "a new start", NEW_START_WITHIN_S)
        if name == "daemon":
            slurm.start_daemon(last.name)
        elif name == "node":
            slurm.switch_on(last.name)
        state = self.wait_for_end()
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
    """A run that the `deepspeed` command starts over ssh."""

    machines: list[Machine]
    good = "0"
    process: subprocess.Popen[bytes]
    faults: ClassVar = {
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
        assignments = [f"{name}={value}" for name, value in here.items()]
        command = ["deepspeed", f"--hostfile={hostfile}", "--quiet", "--no_local_rank"]
        command += ["src/treetune/main.py", "--configs", self.kind.configs, "run_iteration_loop"]
        log = self.base / f"{self.name}.output"
        self.process = self.machines[0].start("env", "-i", f"--chdir={ROOT}", *assignments, *command, log=log)

    def state(self) -> str:
        return "" if self.process.poll() is None else str(self.process.returncode)

    def cause_fault(self, name: str) -> tuple[str, str]:
        if name == "rank":
            assert self.machines[-1].kill("src/treetune/main.py --configs"), "there was no rank"
        else:
            (launcher,) = self.machines[0].processes("deepspeed --hostfile")
            number = signal.SIGKILL if name == "command" else signal.SIGINT
            self.machines[0].run("kill", f"-{number}", str(launcher))
        code, ended_at = self.wait_for_end(), time.monotonic()
        texts = ("main.py", "vllm_server", "vllm.entrypoints", "VLLM::EngineCore", "deepspeed.launcher")

        def all_gone() -> bool:
            return not any(machine.processes(text) for machine in self.machines for text in texts)

        wait_until(all_gone, "the end of all processes", GONE_WITHIN_S)
        return (
            f"ends with {code}, all gone after {time.monotonic() - ended_at:.0f} s",
            f"{code}, after a fault",
        )

    def log(self) -> str:
        return (self.base / f"{self.name}.output").read_text(errors="replace")[-3000:]

    def clear(self) -> None:
        for machine in self.machines:
            for text in ("deepspeed", "main.py", "vllm", "VLLM"):
                machine.kill(text)


SSH_SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
ListenAddress {address}
PidFile /run/sshd.pid
"""
SSH_CLIENT = """\
Host *
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known_hosts
"""


@contextmanager
def reachable(nodes: int, shared: Path) -> Iterator[list[Machine]]:
    """Switches on machines that reach each other over ssh, with new keys, and ends them after the block."""
    folder = shared / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    names = [f"node{number}" for number in range(1, nodes + 1)]
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"{name} {key}\n" for name in names))
    (folder / "client").write_text(SSH_CLIENT.format(folder=folder))
    with machines(names, shared, {"/etc/ssh/ssh_config": folder / "client"}) as by_name:
        for machine in by_name.values():
            settings = folder / f"server-{machine.name}"
            settings.write_text(SSH_SERVER.format(folder=folder, address=machine.address))
            machine.run("mkdir", "-p", "/run/sshd")
            log = folder / f"server-{machine.name}.log"
            machine.start("/usr/sbin/sshd", "-D", "-e", "-f", str(settings), log=log)
        first = by_name["node1"]
        for name in names:
            wait_until(
                lambda name=name: not first.run("ssh", name, "true", check=False).returncode, f"ssh to {name}"
            )
        yield list(by_name.values())


SSH_TOOLS = {"sshd": "openssh-server", "ssh-keygen": "openssh-client", "pdsh": "pdsh", "ip": "iproute2"}
WAYS: dict[str, tuple[type[Any], Mapping[str, str], Any]] = {
    "slurm": (OnSlurm, TOOLS, cluster),
    "ssh": (OverSsh, SSH_TOOLS | {"unshare": "util-linux", "ps": "procps"}, reachable),
}


def print_row(machines: int, fault: str, outcome: str, problem: str, started: float) -> None:
    same = f"**no**: {problem}" if problem else "yes"
    print(f"| {machines} | {fault} | {outcome} | {same} | {time.monotonic() - started:.0f} |", flush=True)


def run_with_fault(run: Run, name: str, undisturbed: Run) -> tuple[str, str]:
    """Starts the run, causes a fault, resumes the run, and returns the outcome and the problem, if any."""
    outcome = ""
    try:
        run.start()
        run.reach()
        outcome, end = run.cause_fault(name)
        if end != run.good:
            run.start()
            end = run.wait_for_end()
            outcome += f"; the same command again: {end}"
        assert end == run.good, run.log()
        run.assert_same(undisturbed)
    except (AssertionError, TimeoutError, RuntimeError) as error:
        print(f"{error}\n{run.log()}", file=sys.stderr, flush=True)
        run.clear()
        return outcome, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return outcome, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("way", choices=list(WAYS))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="some of the faults")
    parser.add_argument("--kind", choices=list(KINDS), default="vineppo", help="supervised starts no server")
    options = parser.parse_args()
    make_run, tools, open_machines = WAYS[options.way]
    # A supervised run has no server.
    possible = [name for name in make_run.faults if (options.kind, name) != ("supervised", "server")]
    names = options.only or possible
    if unknown := set(names) - make_run.faults.keys():
        parser.error(f"no fault is called {', '.join(unknown)}; there are {', '.join(make_run.faults)}")
    if lacking := missing(tools):
        parser.exit(2, f"{parser.prog}: {lacking}\n")
    shared, problems = enclosed(), []
    opened: AbstractContextManager[Any] = open_machines(options.nodes, shared)
    with opened as nodes:
        started = time.monotonic()
        undisturbed: Run = make_run(shared / "experiments", "undisturbed", KINDS[options.kind], nodes)
        undisturbed.start()
        end = undisturbed.wait_for_end()
        assert end == undisturbed.good, f"the undisturbed run ended with {end}:\n{undisturbed.log()}"
        print_row(options.nodes, "nothing", end, "", started)
        for name in names:
            started = time.monotonic()
            run: Run = make_run(shared / "experiments", name, KINDS[options.kind], nodes)
            outcome, problem = run_with_fault(run, name, undisturbed)
            print_row(options.nodes, make_run.faults[name], outcome, problem, started)
            problems += [problem] if problem else []
            run.settle()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
