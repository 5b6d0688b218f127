"""A real SLURM cluster on machines of our own making: munge, a controller, a daemon on each node."""

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
"""What has to be there, and the Debian package that brings it."""

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
"""A node's one "GPU" is a number that SLURM counts: it stands for the node's cores, which train here. A job
that was requeued may start when the credentials of its last start have expired (`cred_expire`, seconds): not
before SLURM has killed what is left of that start (after 30 s)."""


@dataclass
class Cluster:
    """What a user of the cluster sees on its login node, and what may befall its nodes."""

    machines: dict[str, Machine]
    folder: Path

    @property
    def head(self) -> Machine:
        return self.machines[HEAD]

    @property
    def environment(self) -> dict[str, str]:
        """Of whoever works here: nothing of the computer's but where its programs are."""
        kept = {
            name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ
        }
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start_daemon(self, node: str) -> None:
        self._start(self.machines[node], "slurmd", "-D", "-N", node)

    def switch_on(self, node: str) -> None:
        """After it was switched off."""
        machine = self.machines[node]
        machine.switch_on({name: one.address for name, one in self.machines.items()})
        self._start_munge(machine)
        self.start_daemon(node)

    def do(self, *command: str, check: bool = True, **environment: str) -> str:
        """A command on the login node; its standard output."""
        words = [f"{name}={value}" for name, value in (self.environment | environment).items()]
        return self.head.run("env", "-i", *words, *command, check=check).stdout.strip()

    def state(self, job: str) -> str:
        """Such as PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, NODE_FAIL."""
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
        words = self.do("scontrol", "--oneliner", "show", "job", job, check=False).split()
        return dict(word.partition("=")[::2] for word in words)

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

    def _start(self, machine: Machine, daemon: str, *words: str) -> None:
        log = self.folder / f"{daemon}-{machine.name}.log"
        machine.start(
            daemon, *words, "-f", str(self.folder / "slurm.conf"), log=log, environment=self.environment
        )  # fmt: skip


@contextmanager
def cluster(nodes: int, shared: Path) -> Iterator[Cluster]:
    """A login node and so many others, all of them idle; gone at the end of the block."""
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
    with machines([HEAD, *names], shared) as made:
        found = Cluster(made, folder)
        for machine in made.values():
            found._start_munge(machine)
        found._start(found.head, "slurmctld", "-D")
        for name in names:
            found.start_daemon(name)
        wait_until(lambda: sorted(found.idle()) == names, "an idle node of each name")
        yield found
