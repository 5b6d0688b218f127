"""The small experiment on several machines: how far it is, and whether it ended as an undisturbed one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from treetune.runtime.directory import ExperimentDirectory  # noqa: E402

CONFIGS = "src/treetune/testing/small.jsonnet,src/treetune/testing/several_machines.jsonnet"
ITERATIONS = 4
STRUCK = 2
"""The iteration that is struck, counted from 0: the one after the first checkpoint."""
RUN_DEADLINE_S = 1500.0


@dataclass
class SmallRun:
    """The experiment under a name of its own."""

    base: Path
    name: str

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.base / self.name)

    def is_sampling(self) -> bool:
        """Whether answers of the iteration that is struck have come."""
        journals = (self.directory.iteration(STRUCK) / "journal").glob("rollout-*.jsonl")
        return any(path.stat().st_size for path in journals)

    def policy(self) -> bytes:
        return (self.directory.checkpoint(ITERATIONS) / "policy" / "model.safetensors").read_bytes()

    def assert_same(self, undisturbed: SmallRun) -> None:
        """The same weights, each iteration's metrics once."""
        assert self.policy() == undisturbed.policy(), "the weights differ from the undisturbed run's"
        iterations = [row["iteration"] for row in self.directory.read_metrics()]
        assert iterations == list(range(ITERATIONS)), f"metrics.jsonl has the iterations {iterations}"


@dataclass(frozen=True)
class Outcome:
    """A row of a table: what befell the run, and what became of it."""

    machines: int
    what: str
    became: str
    problem: str
    seconds: float

    def row(self) -> str:
        same = "yes" if not self.problem else f"**no**: {self.problem}"
        return f"| {self.machines} | {self.what} | {self.became} | {same} | {self.seconds:.0f} |"


def problem_of(error: Exception) -> str:
    """Its first line, for a table."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
