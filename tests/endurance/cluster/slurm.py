"""A real SLURM cluster on simulated machines: munge, a controller, and a daemon on each node."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from machines import Machine, machines, wait_until

TOOLS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "ps": "procps",
}
"""The programs that are needed, with their Debian packages."""

HEAD = "head"
NODE_LOST_AFTER_S = 10
MUNGE_SOCKET = "/run/munge.socket"

SETTINGS = """\
ClusterName=treetune
SlurmctldHost={head}
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=40
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmdTimeout={lost_after}
SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=2
ReturnToService=2
JobRequeue=1
NodeName={nodes} CPUS=2 RealMemory=16000 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""The one "GPU" of a node is only a number for SLURM: the run trains on the node's cores. A requeued job
may start when the credentials of its last start have expired (`cred_expire`, in seconds), and by then SLURM
has killed all processes of that start (after 30 s)."""


@dataclass
class Cluster:
    """A cluster as a user of its login node sees it, whose nodes can be switched off and on."""

    machines: dict[str, Machine]
    folder: Path

    @property
    def head(self) -> Machine:
        return self.machines[HEAD]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user of the cluster; it has only the paths of the computer's programs."""
        kept = {
            name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ
        }
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start_daemon(self, node: str) -> None:
        self._start(self.machines[node], "slurmd", "-D", "-N", node)

    def switch_on(self, node: str) -> None:
        """Switches a node on again, with its daemons."""
        machine = self.machines[node]
        machine.switch_on({name: other.address for name, other in self.machines.items()})
        self._start_munge(machine)
        self.start_daemon(node)

    def do(self, *command: str, check: bool = True, **environment: str) -> str:
        """Runs a command on the login node, and returns its standard output."""
        variables = [f"{name}={value}" for name, value in (self.environment | environment).items()]
        return self.head.run("env", "-i", *variables, *command, check=check).stdout.strip()

    def state(self, job: str) -> str:
        """Returns the state of a job, such as PENDING, RUNNING, COMPLETED, FAILED, CANCELLED or NODE_FAIL."""
        return self._job(job).get("JobState", "GONE")

    def restarts(self, job: str) -> int:
        return int(self._job(job).get("Restarts", "0"))

    def nodes_of(self, job: str) -> list[str]:
        listed = self._job(job).get("NodeList", "")
        return (
            self.do("scontrol", "show", "hostnames", listed).split() if listed not in ("", "(null)") else []
        )

    def idle(self) -> list[str]:
        return self.do("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()

    def _job(self, job: str) -> Mapping[str, str]:
        fields = self.do("scontrol", "--oneliner", "show", "job", job, check=False).split()
        return dict(field.partition("=")[::2] for field in fields)

    def _start_munge(self, machine: Machine) -> None:
        machine.start(
            "munged", "--foreground", "--force", f"--socket={MUNGE_SOCKET}",
            f"--key-file={self.folder}/munge.key",
            "--pid-file=/run/munged.pid", "--seed-file=/run/munge.seed", "--log-file=/run/munged.log",
            log=self.folder / f"munged-{machine.name}.log",
        )  # fmt: skip
        wait_until(
            lambda: not machine.run("test", "-S", MUNGE_SOCKET, check=False).returncode,
            f"munge on {machine.name}",
        )

    def _start(self, machine: Machine, daemon: str, *options: str) -> None:
        log = self.folder / f"{daemon}-{machine.name}.log"
        machine.start(
            daemon, *options, "-f", str(self.folder / "slurm.conf"), log=log, environment=self.environment
        )  # fmt: skip


@contextmanager
def cluster(nodes: int, shared: Path) -> Iterator[Cluster]:
    """Starts a login node and `nodes` others, waits until they are idle, and ends them after the block."""
    names = [f"node{number}" for number in range(1, nodes + 1)]
    folder = shared / "slurm"
    (folder / "state").mkdir(parents=True)
    listed = f"node[1-{nodes}]"
    settings = SETTINGS.format(
        head=HEAD, socket=MUNGE_SOCKET, folder=folder, lost_after=NODE_LOST_AFTER_S, nodes=listed
    )
    (folder / "slurm.conf").write_text(settings)
    (folder / "gres.conf").write_text(f"NodeName={listed} Name=gpu File=/dev/null\n")
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    with machines([HEAD, *names], shared) as by_name:
        slurm = Cluster(by_name, folder)
        for machine in by_name.values():
            slurm._start_munge(machine)
        slurm._start(slurm.head, "slurmctld", "-D")
        for name in names:
            slurm.start_daemon(name)
        wait_until(lambda: sorted(slurm.idle()) == names, "an idle node of each name")
        yield slurm
