"""The small experiment on several machines: how far it is, and whether it ended as an undisturbed one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from machines import ROOT, missing

sys.path.insert(0, str(ROOT / "src"))

from treetune.runtime.directory import ExperimentDirectory

RUN_DEADLINE_S = 1500.0


@dataclass(frozen=True)
class Kind:
    """An experiment, and the checkpoint after which it is struck."""

    configs: str
    iterations: int
    struck_after: int = 2


KINDS = {
    "vineppo": Kind("tests/support/small.jsonnet,tests/support/several_machines.jsonnet", 4),
    "supervised": Kind("tests/support/small_supervised.jsonnet", 6),
}
"""`vineppo` has a server on each machine, `supervised` none."""


@dataclass
class SmallRun:
    """The experiment under a name of its own."""

    base: Path
    name: str
    kind: Kind

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.base / self.name)

    def is_half_way(self) -> bool:
        """Whether it is in the iteration that is struck, and among its answers where any are sampled."""
        directory, iteration = self.directory, self.kind.struck_after
        journals = list((directory.iteration(iteration) / "journal").glob("rollout-*.jsonl"))
        sampled = any(path.stat().st_size for path in journals)
        return iteration in directory.checkpoints() and (sampled or self.kind is KINDS["supervised"])

    def policy(self) -> bytes:
        place = self.directory.checkpoint(self.kind.iterations) / "policy" / "model.safetensors"
        return place.read_bytes()

    def assert_same(self, undisturbed: SmallRun) -> None:
        """The same weights, each iteration's metrics once."""
        assert self.policy() == undisturbed.policy(), "the weights differ from the undisturbed run's"
        iterations = [row["iteration"] for row in self.directory.read_metrics()]
        assert iterations == list(range(self.kind.iterations)), (
            f"metrics.jsonl has the iterations {iterations}"
        )


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


def asked(words: str | None, tools: Mapping[str, str], blows: Sequence[str]) -> argparse.Namespace:
    """The arguments of a script of these words. Ends it with 2 where it can make no machines."""
    parser = argparse.ArgumentParser(description=(words or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=blows, default=blows)
    parser.add_argument("--kind", choices=list(KINDS), default="vineppo", help="supervised starts no server")
    options = parser.parse_args()
    if lacking := missing(tools):
        parser.exit(2, f"{parser.prog}: {lacking}\n")
    return options


def problem_of(error: Exception) -> str:
    """Its first line, for a table."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
