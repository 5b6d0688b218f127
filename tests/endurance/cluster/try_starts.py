"""Starts a run on two machines that can't do it together, and shows what each of them says.

    sudo .venv/bin/python tests/endurance/cluster/try_starts.py [--only folder code …]

Each start has one fault: a folder that isn't shared, other code, another configuration, closed ports, a
machine that does not come. It has to end with one message that names the machine. The last has none: host
names that lead to a loopback address, as Debian's /etc/hosts has them, do no harm.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from machines import ROOT, Machine, enclosed, machines, missing
from try_runs import KINDS

TOOLS = {"ip": "iproute2", "unshare": "util-linux", "ps": "procps"}
FIREWALL = {"iptables": "iptables"}
"""For one of the faults."""

NAMES = ("node1", "node2")
DEADLINE_S = 600.0


@dataclass
class Start:
    """The command on each machine, as scripts/slurm/job.sh gives it, and what both have printed."""

    shared: Path
    machines: list[Machine]
    environment: dict[str, dict[str, str]] = field(default_factory=dict)
    """Further variables, by machine."""

    def run(self, *names: str, deadline_of_ranks: int = 120) -> tuple[list[int], str]:
        """Exit codes and output."""
        folder = self.shared / "experiments"
        hostfile, log = self.shared / "hostfile", self.shared / "output"
        hostfile.write_text("".join(f"{name} slots=1\n" for name in NAMES))
        log.write_text("")
        tools = Path(sys.executable).parent
        started = []
        for number, machine in enumerate(self.machines):
            if machine.name not in names:
                continue
            variables = {
                "PATH": f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin",
                "APP_DIRECTORY": str(folder),
                "OMP_NUM_THREADS": "1",
                **self.environment.get(machine.name, {}),
            }
            command = [
                "env",
                "-i",
                f"--chdir={ROOT}",
                *(f"{name}={value}" for name, value in variables.items()),
            ]
            command += ["deepspeed", "--quiet", "--no_local_rank", "--no_ssh", f"--node_rank={number}"]
            command += [f"--hostfile={hostfile}", "--master_addr=node1", "--master_port=29500"]
            command += ["src/treetune/main.py", "--configs", KINDS["supervised"].configs, "--override"]
            command += [f"{{iterations: 1, rank_deadline: {deadline_of_ranks}}}", "run_iteration_loop"]
            started.append(machine.start(*command, log=log))
        try:
            codes = [process.wait(DEADLINE_S) for process in started]
        except subprocess.TimeoutExpired:
            codes = []
        return codes, log.read_text(errors="replace")


def folder(start: Start) -> tuple[list[int], str]:
    own = start.shared / "own"
    own.mkdir()
    start.machines[1].run("mount", "--bind", str(own), str(start.shared / "experiments"))
    return start.run(*NAMES)


def code(start: Start) -> tuple[list[int], str]:
    place, changed = ROOT / "src/treetune/seeds.py", start.shared / "seeds.py"
    changed.write_text(place.read_text() + "# changed\n")
    start.machines[1].run("mount", "--bind", str(changed), str(place))
    return start.run(*NAMES)


def configuration(start: Start) -> tuple[list[int], str]:
    start.environment["node2"] = {"APP_SEED": "7"}
    return start.run(*NAMES)


def ports(start: Start) -> tuple[list[int], str]:
    rule = "iptables --append INPUT --in-interface eth0 --protocol tcp --syn --jump DROP"
    start.machines[1].run(*rule.split())
    return start.run(*NAMES)


def absent(start: Start) -> tuple[list[int], str]:
    return start.run("node1", deadline_of_ranks=15)


def first(start: Start) -> tuple[list[int], str]:
    return start.run("node2", deadline_of_ranks=15)


def interface(start: Start) -> tuple[list[int], str]:
    start.environment["node2"] = {"GLOO_SOCKET_IFNAME": "ib0"}
    return start.run(*NAMES, deadline_of_ranks=15)


def loopback(start: Start) -> tuple[list[int], str]:
    for machine in start.machines:
        hosts = start.shared / f"hosts-{machine.name}"
        others = [f"{one.address} {one.name}\n" for one in start.machines if one is not machine]
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n{''.join(others)}")
        machine.run("mount", "--bind", str(hosts), "/etc/hosts")
    return start.run(*NAMES)


@dataclass(frozen=True)
class Fault:
    """What is wrong, and the words that have to come; none where the run has to do its work."""

    arrange: Callable[[Start], tuple[list[int], str]]
    what: str
    told: str


FAULTS = {
    "folder": Fault(
        folder, "the second machine has a folder of its own", "node2 doesn't see what node1 writes"
    ),
    "code": Fault(code, "one file of the code differs", "node2 has other code of treetune than node1"),
    "configuration": Fault(
        configuration, "`APP_SEED` on one alone", "node2 has another configuration than node1"
    ),
    "ports": Fault(ports, "a firewall on the second machine", "node1 can't reach node2 at 10.77.0.2 (eth0)"),
    "absent": Fault(
        absent, "the second machine isn't started", "no rank of another machine has come to node1"
    ),
    "first": Fault(
        first, "the first machine isn't started", "on node2 can't reach the first rank at node1:29500"
    ),
    "interface": Fault(interface, "an interface that isn't there", "node2 has no network interface ib0"),
    "loopback": Fault(loopback, "each host's own name is 127.0.1.1, as on Debian", ""),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    options = parser.parse_args()
    if lacking := missing(TOOLS | (FIREWALL if "ports" in options.only else {})):
        print(f"try_starts.py: {lacking}", file=sys.stderr)
        return 2
    shared = enclosed()
    bad = 0
    for name in options.only:
        fault = FAULTS[name]
        place = shared / name
        (place / "experiments").mkdir(parents=True)
        with machines(NAMES, place) as made:
            codes, printed = fault.arrange(Start(place, list(made.values())))
        said = [line.strip() for line in printed.splitlines() if fault.told and fault.told in line]
        ended_well = bool(codes) and not any(codes)
        right = ended_well if not fault.told else bool(codes) and all(codes) and len(said) == 1
        bad += not right
        print(f"| {fault.what} | {said[0] if said else 'runs' if ended_well else 'nothing'} |", flush=True)
        if not right:
            print(f"exit codes {codes}\n{printed[-4000:]}", file=sys.stderr, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
