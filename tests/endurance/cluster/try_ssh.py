"""Runs the small experiment by DeepSpeed's launcher over ssh, on machines made on the spot, and strikes it.

    sudo .venv/bin/python tests/endurance/cluster/try_ssh.py [--nodes 2] [--kind supervised] [--only rank …]

The command is the documents': `deepspeed --hostfile …` on the first machine. It is struck in the third
iteration; then nothing may be left on any machine, and the same command has to end with the undisturbed run's
weights, to the bit. Prints a row for each. Needs root and the packages that it names.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from machines import Machine, enclosed, machines, wait_until
from small_run import KINDS, ROOT, RUN_DEADLINE_S, Outcome, SmallRun, asked, problem_of

TOOLS = {
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "pdsh": "pdsh",
    "ip": "iproute2",
    "unshare": "util-linux",
    "ps": "procps",
}
BLOWS = {
    "rank": "the last rank, `kill -9`",
    "command": "the `deepspeed` command, `kill -9`",
    "interrupt": "Ctrl-C",
}
GONE_WITHIN_S = 90.0

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


@dataclass
class Run(SmallRun):
    """The command that starts the experiment, and what came of it."""

    nodes: list[Machine]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """As the documents say, on the first machine."""
        self.base.mkdir(exist_ok=True)
        tools = Path(sys.executable).parent
        hostfile, variables = self.base / "hostfile", self.base / "variables"
        hostfile.write_text("".join(f"{machine.name} slots=1\n" for machine in self.nodes))
        everywhere = {
            "APP_DIRECTORY": str(self.base),
            "APP_EXPERIMENT_NAME": self.name,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        variables.write_text("".join(f"{name}={value}\n" for name, value in everywhere.items()))
        here: Mapping[str, str] = everywhere | {"DS_ENV_FILE": str(variables), "HOME": str(self.base)}
        words = [f"{name}={value}" for name, value in here.items()]
        command = ["deepspeed", f"--hostfile={hostfile}", "--quiet", "--no_local_rank"]
        command += ["src/treetune/main.py", "--configs", self.kind.configs, "run_iteration_loop"]
        log = self.base / f"{self.name}.output"
        self.process = self.nodes[0].start("env", "-i", f"--chdir={ROOT}", *words, *command, log=log)

    def ended(self) -> int:
        """The command's exit code."""
        assert self.process is not None
        return self.process.wait(RUN_DEADLINE_S)

    def reach(self) -> None:
        """Returns in the iteration that is struck."""

        def half_way() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"the command ended before it was struck:\n{self.log()}"
            return self.is_half_way()

        wait_until(half_way, "the iteration that is struck", RUN_DEADLINE_S)

    def blow(self, name: str) -> None:
        if name == "rank":
            assert self.nodes[-1].kill("src/treetune/main.py --configs"), "there was no rank"
        else:
            number = signal.SIGKILL if name == "command" else signal.SIGINT
            (launcher,) = self.nodes[0].processes("deepspeed --hostfile")
            self.nodes[0].run("kill", f"-{number}", str(launcher))

    def left(self) -> list[str]:
        """What is still there, by machine."""
        return [
            f"{words} on {machine.name}"
            for machine in self.nodes
            for words in ("main.py", "vllm.entrypoints", "VLLM::EngineCore", "deepspeed.launcher")
            if machine.processes(words)
        ]

    def log(self) -> str:
        """The end of what the command has printed."""
        return (self.base / f"{self.name}.output").read_text(errors="replace")[-3000:]


def strike(run: Run, name: str, undisturbed: Run) -> Outcome:
    """Starts the run, strikes it, looks what is left, and gives the command again."""
    started, became, problem = time.monotonic(), "", ""
    try:
        run.start()
        run.reach()
        run.blow(name)
        code = run.ended()
        became = f"ends with {code}"
        struck = time.monotonic()
        wait_until(lambda: not run.left(), "the end of all processes", GONE_WITHIN_S)
        became += f", all gone after {time.monotonic() - struck:.0f} s"
        run.start()
        code = run.ended()
        became += f"; the same command again: {code}"
        assert code == 0, run.log()
        run.assert_same(undisturbed)
    except (AssertionError, TimeoutError, RuntimeError) as error:
        problem = problem_of(error)
        print(f"{error}\n{run.left()}\n{run.log()}", file=sys.stderr, flush=True)
        for machine in run.nodes:
            for words in ("deepspeed", "main.py", "vllm", "VLLM"):
                machine.kill(words)
    return Outcome(len(run.nodes), BLOWS[name], became, problem, time.monotonic() - started)


def main() -> int:
    options = asked(__doc__, TOOLS, list(BLOWS))
    kind = KINDS[options.kind]
    shared = enclosed()
    outcomes = []
    with reachable(options.nodes, shared) as nodes:
        whole = Run(shared / "experiments", "undisturbed", kind, nodes)
        started = time.monotonic()
        whole.start()
        code = whole.ended()
        assert code == 0, f"the undisturbed run ended with {code}:\n{whole.log()}"
        outcomes.append(
            Outcome(options.nodes, "nothing", f"ends with {code}", "", time.monotonic() - started)
        )
        print(outcomes[-1].row(), flush=True)
        for name in options.only:
            outcomes.append(strike(Run(shared / "experiments", name, kind, nodes), name, whole))
            print(outcomes[-1].row(), flush=True)
    return 1 if any(one.problem for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
