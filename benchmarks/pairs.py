"""Paired measurements: all sides in turn, again and again, and the ratio within each turn; and their page.

Machines are noisy and drift; what a turn's sides have in common cancels in their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

Side = Callable[[int], float]
"""Does the work of turn i (from 0) and says how many seconds of it count."""


@dataclass(frozen=True)
class Measurement:
    """Rates (`unit`) of both sides, one per turn, and what else is worth knowing.

    The ratio is ours / theirs: above 1 we are faster.
    """

    unit: str
    ours: list[float]
    theirs: list[float]
    what: dict[str, str]
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        return {
            "unit": self.unit,
            "ours": median(self.ours),
            "theirs": median(self.theirs),
            "ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
            "repeats": len(ratios),
            "what": self.what,
            "details": self.details,
            "raw": {"ours": self.ours, "theirs": self.theirs},
        }


def timed(work: Callable[[int], Any]) -> Side:
    """A side whose whole call counts."""

    def side(turn: int) -> float:
        start = time.perf_counter()
        work(turn)
        return time.perf_counter() - start

    return side


def in_turns(sides: Mapping[str, Side], repeats: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each side in each turn; `warm_up` turns go before and don't count.

    Every other turn goes through the sides backwards, so that none is always the one behind another.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-warm_up, repeats):
        order = list(sides) if turn % 2 == 0 else list(reversed(sides))
        for name in order:
            took = sides[name](turn + warm_up)
            if turn >= 0:
                seconds[name].append(took)
        shown = "  ".join(f"{name} {seconds[name][-1]:.2f} s" for name in sides if seconds[name])
        print(f"  {'warm-up' if turn < 0 else f'{turn + 1}/{repeats}  {shown}'}", file=sys.stderr, flush=True)
    return seconds


def rates(amount: float, seconds: list[float]) -> list[float]:
    return [amount / one for one in seconds]


def arguments_of(words: str | None, name: str, repeats: int) -> argparse.ArgumentParser:
    """With `output`, a folder for the pages called `name`, and `repeats`, the number of turns."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"for {name}.md and {name}.json")
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def machine() -> dict[str, Any]:
    """What it is, and how busy it is now."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def publish(text: str, numbers: dict[str, Any], output: Path | None, name: str) -> None:
    """Prints the page, and writes it and its numbers where that was asked for."""
    print(text)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / f"{name}.md").write_text(text)
        (output / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
