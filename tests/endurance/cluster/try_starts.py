"""Starts a run on two simulated machines that can't do it together, and checks the message.

    sudo .venv/bin/python tests/endurance/cluster/try_starts.py [--only folder code …]

Each start has one fault: a folder that isn't shared, other code, another configuration, closed ports, or a
machine that is missing. It has to end with one message that names the machine. The last start has no fault:
host names with a loopback address, as in Debian's /etc/hosts, must do no harm.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from machines import ROOT, Machine, enclosed, machines, missing
from try_runs import KINDS

TOOLS = {"ip": "iproute2", "unshare": "util-linux", "ps": "procps"}
FIREWALL = {"iptables": "iptables"}
"""Needed for the fault of closed ports."""

NAMES = ("node1", "node2")
DEADLINE_S = 600.0


FAULTS = {
    "folder": ("the second machine has a folder of its own", "node2 doesn't see what node1 writes"),
    "code": ("one file of the code differs", "node2 has other code of treetune than node1"),
    "configuration": ("`APP_SEED` on one alone", "node2 has another configuration than node1"),
    "ports": ("a firewall on the second machine", "node1 can't reach node2 at 10.77.0.2 (eth0)"),
    "absent": ("the second machine isn't started", "no rank of another machine has connected to node1"),
    "first": ("the first machine isn't started", "on node2 can't reach the first rank at node1:29500"),
    "interface": ("an interface that isn't there", "node2 has no network interface ib0"),
    "loopback": ("each host's own name is 127.0.1.1, as on Debian", ""),
}
"""A description of each fault, and the text of the message; empty if the run has to succeed."""


def cause_fault(fault: str, shared: Path, first: Machine, second: Machine) -> dict[str, str]:
    """Causes a fault, and returns further environment variables of the second machine."""

    def mount(machine: Machine, source: Path, target: Path | str) -> None:
        machine.run("mount", "--bind", str(source), str(target))

    if fault == "folder":
        (shared / "own").mkdir()
        mount(second, shared / "own", shared / "experiments")
    elif fault == "code":
        original, changed = ROOT / "src/treetune/seeds.py", shared / "seeds.py"
        changed.write_text(original.read_text() + "# changed\n")
        mount(second, changed, original)
    elif fault == "ports":
        rule = "iptables --append INPUT --in-interface eth0 --protocol tcp --syn --jump DROP"
        second.run(*rule.split())
    elif fault == "loopback":
        for machine, other in ((first, second), (second, first)):
            hosts = shared / f"hosts-{machine.name}"
            line_of_other = f"{other.address} {other.name}\n"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n{line_of_other}")
            mount(machine, hosts, "/etc/hosts")
    variables = {"configuration": {"APP_SEED": "7"}, "interface": {"GLOO_SOCKET_IFNAME": "ib0"}}
    return variables.get(fault, {})


def start_on_each(fault: str, shared: Path, machines: list[Machine]) -> tuple[list[int], str]:
    """Starts the run on each machine, as scripts/slurm/job.sh does, and returns exit codes and all output."""
    variables_of_second = cause_fault(fault, shared, *machines)
    hostfile, log = shared / "hostfile", shared / "output"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in NAMES))
    log.write_text("")
    deadline = 15 if fault in ("absent", "first", "interface") else 120
    left_out = {"absent": "node2", "first": "node1"}.get(fault)
    processes = []
    for number, machine in enumerate(machines):
        if machine.name != left_out:
            variables = {
                "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
                "APP_DIRECTORY": str(shared / "experiments"),
                "OMP_NUM_THREADS": "1",
                **(variables_of_second if number else {}),
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
            command += [f"{{iterations: 1, rank_deadline: {deadline}}}", "run_iteration_loop"]
            processes.append(machine.start(*command, log=log))
    try:
        codes = [process.wait(DEADLINE_S) for process in processes]
    except subprocess.TimeoutExpired:
        codes = []
    return codes, log.read_text(errors="replace")


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
        description, expected = FAULTS[name]
        (shared / name / "experiments").mkdir(parents=True)
        with machines(NAMES, shared / name) as by_name:
            codes, printed = start_on_each(name, shared / name, list(by_name.values()))
        messages = [line.strip() for line in printed.splitlines() if expected and expected in line]
        has_succeeded = bool(codes) and not any(codes)
        if expected:
            is_right = bool(codes) and all(codes) and len(messages) == 1
        else:
            is_right = has_succeeded
        bad += not is_right
        outcome = messages[0] if messages else "runs" if has_succeeded else "nothing"
        print(f"| {description} | {outcome} |", flush=True)
        if not is_right:
            print(f"exit codes {codes}\n{printed[-4000:]}", file=sys.stderr, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
