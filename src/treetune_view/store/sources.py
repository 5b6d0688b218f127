"""The files of an experiment that hold answers: of iterations, with their credit, and of evaluations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treetune.rollouts.storage import SIGNALS
from treetune_view.store.catalogue import Run, stat_of

Kind = Literal["iteration", "evaluation"]


@dataclass(frozen=True)
class Source:
    """One file of answers. `number` counts as people do: the iteration from 1, for an evaluation the finished
    iterations. `label` is the evaluation's set, `episodes` the credit beside the answers and `signals` what
    the trainer said of their tokens, where these are there.

    An iteration on demonstrations has episodes alone: they are its answers.
    """

    kind: Kind
    number: int
    label: str
    path: Path
    episodes: Path | None
    signals: Path | None = None

    @property
    def name(self) -> str:
        """In addresses: ``i4``, ``e4-test``."""
        return f"i{self.number}" if self.kind == "iteration" else f"e{self.number}-{self.label}"

    @property
    def things(self) -> str:
        """What it holds."""
        return "demonstrations" if self.path == self.episodes else "answers"

    @property
    def words(self) -> str:
        if self.kind == "iteration":
            return f"iteration {self.number}"
        return f"{self.label} after {self.number} iterations"

    @property
    def mark(self) -> str:
        """Another one as soon as one of its files is another."""
        parts = [stat_of(path) for path in self.files]
        return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()

    @property
    def size(self) -> int:
        """Bytes on disk; 0 for what has gone meanwhile."""
        return sum(path.stat().st_size for path in self.files if path.is_file())

    @property
    def files(self) -> list[Path]:
        return [path for path in (self.path, self.episodes, self.signals) if path is not None]


def sources(run: Run, left_out: list[Path] | None = None) -> list[Source]:
    """All that there are now, iterations first, each in their order. Those with a file that is a symbolic
    link out of the folders are `left_out`."""
    found = [*_iterations(run.path / "iterations"), *_evaluations(run.path / "evaluations")]
    links = [path for one in found for path in one.files if not run.follows(path)]
    if left_out is not None:
        left_out += links
    return [one for one in found if not links or not {*links}.intersection(one.files)]


def _iterations(folder: Path) -> Iterator[Source]:
    for place in _numbered(folder):
        answers, episodes = place / "trajectories.arrow", place / "episodes.arrow"
        has_credit = episodes.is_file()
        if answers.is_file() or has_credit:
            number = int(place.name) + 1
            path = answers if answers.is_file() else episodes
            signals = place / SIGNALS
            yield Source(
                "iteration",
                number,
                "",
                path,
                episodes if has_credit else None,
                signals if has_credit and signals.is_file() else None,
            )


def _evaluations(folder: Path) -> Iterator[Source]:
    for place in _numbered(folder):
        for answers in sorted(place.glob("*/answers.jsonl")):
            yield Source("evaluation", int(place.name), answers.parent.name, answers, None)


def _numbered(folder: Path) -> list[Path]:
    found = [place for place in folder.glob("[0-9]*") if place.name.isdecimal()]
    return sorted(found, key=lambda place: int(place.name))
