"""Runs the small experiment on a real SLURM cluster made on the spot, a rank on each machine, and strikes it.

    sudo .venv/bin/python tests/endurance/cluster/try_slurm.py [--nodes 2] [--kind supervised]
        [--only scancel node …]

`scripts/slurm/submit.sh` queues it as a user would. It is struck in its third iteration, after its first
checkpoint, goes on by SLURM's own means or by the same line again, and has to end with the undisturbed run's
weights, to the bit. Prints a row for each. Needs root and the packages that it names. Allow three minutes a
blow on two idle cores.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from machines import Machine, enclosed, wait_until
from slurm import TOOLS, Cluster, cluster
from small_run import KINDS, ROOT, RUN_DEADLINE_S, Outcome, SmallRun, asked, problem_of

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY")
NEW_START_WITHIN_S = 180.0


@dataclass
class Run(SmallRun):
    """The jobs that an experiment is queued as; the newest of them."""

    cluster: Cluster
    nodes: int
    job: str = ""

    def submit(self) -> None:
        """As the documents say, from the login node."""
        self.job = self.cluster.do(
            "bash", str(ROOT / "scripts/slurm/submit.sh"), self.kind.configs, "run_iteration_loop",
            NODES=str(self.nodes), GPUS_PER_NODE="1", CPUS_PER_NODE="1", MEMORY="4G", TIME="60",
            APP_DIRECTORY=str(self.base), APP_EXPERIMENT_NAME=self.name,
        )  # fmt: skip

    def ended(self) -> str:
        """The job's state, once it has ended."""
        wait_until(
            lambda: self.cluster.state(self.job) in ENDED, f"the end of job {self.job}", RUN_DEADLINE_S
        )
        return self.cluster.state(self.job)

    def reach(self) -> None:
        """Returns in the iteration that is struck."""

        def half_way() -> bool:
            state = self.cluster.state(self.job)
            assert state not in ENDED, f"job {self.job} is {state} before it was struck:\n{self.log()}"
            return self.is_half_way()

        wait_until(half_way, "the iteration that is struck", RUN_DEADLINE_S)

    def last_node(self) -> Machine:
        return self.cluster.machines[self.cluster.nodes_of(self.job)[-1]]

    def log(self) -> str:
        """The end of what its job has printed."""
        return (self.base / "logs" / f"slurm-{self.job}.out").read_text(errors="replace")[-3000:]


def scancel(run: Run) -> None:
    run.cluster.do("scancel", run.job)


def requeue(run: Run) -> None:
    run.cluster.do("scontrol", "requeue", run.job)


def rank(run: Run) -> None:
    assert run.last_node().kill("src/treetune/main.py --configs"), "there was no rank"


def server(run: Run) -> None:
    assert run.last_node().kill("VLLM::EngineCore"), "there was no engine"


def daemon(run: Run) -> None:
    """What the daemon had started goes on without it."""
    assert run.last_node().kill("slurmd -D"), "there was no daemon"


def node(run: Run) -> None:
    run.last_node().switch_off()


BLOWS: dict[str, tuple[Callable[[Run], None], str]] = {
    "scancel": (scancel, "`scancel`"),
    "requeue": (requeue, "`scontrol requeue`"),
    "rank": (rank, "the last rank, `kill -9`"),
    "server": (server, "the last vLLM server's engine, `kill -9`"),
    "daemon": (daemon, "the last node's `slurmd`, `kill -9`"),
    "node": (node, "the last node, with all that is on it"),
}
QUEUED_AGAIN = ("requeue", "daemon", "node")
"""What SLURM answers with a new start of the same job."""


def strike(run: Run, name: str, undisturbed: Run) -> Outcome:
    """Queues the run, strikes it, and lets it go on: by the same line again where SLURM doesn't."""
    blow, what = BLOWS[name]
    started, became, problem = time.monotonic(), "", ""
    try:
        run.submit()
        run.reach()
        struck = run.last_node().name
        blow(run)
        if name in QUEUED_AGAIN:
            wait_until(lambda: run.cluster.restarts(run.job) > 0, "a new start", NEW_START_WITHIN_S)
        if name == "daemon":
            run.cluster.start_daemon(struck)
        elif name == "node":
            run.cluster.switch_on(struck)
        state = run.ended()
        restarts = run.cluster.restarts(run.job)
        became = f"queued again by SLURM: {state}" if restarts else state
        if state != "COMPLETED":
            run.submit()
            state = run.ended()
            became += f"; the same line again: {state}"
        assert state == "COMPLETED", run.log()
        run.assert_same(undisturbed)
    except (AssertionError, TimeoutError, RuntimeError) as error:
        problem = problem_of(error)
        print(f"{error}\n{run.log() if run.job else ''}", file=sys.stderr, flush=True)
        run.cluster.do("scancel", run.job, check=False)
    return Outcome(run.nodes, what, became, problem, time.monotonic() - started)


def main() -> int:
    options = asked(__doc__, TOOLS, list(BLOWS))
    kind = KINDS[options.kind]
    shared = enclosed()
    outcomes = []
    with cluster(options.nodes, shared) as made:
        whole = Run(shared / "experiments", "undisturbed", kind, made, options.nodes)
        started = time.monotonic()
        whole.submit()
        state = whole.ended()
        assert state == "COMPLETED", f"the undisturbed run is {state}:\n{whole.log()}"
        outcomes.append(Outcome(options.nodes, "nothing", state, "", time.monotonic() - started))
        print(outcomes[-1].row(), flush=True)
        for name in options.only if options.kind == "vineppo" else [n for n in options.only if n != "server"]:
            outcomes.append(strike(Run(shared / "experiments", name, kind, made, options.nodes), name, whole))
            print(outcomes[-1].row(), flush=True)
            wait_until(lambda: len(set(made.idle())) == options.nodes, "idle nodes", NEW_START_WITHIN_S)
    return 1 if any(one.problem for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
