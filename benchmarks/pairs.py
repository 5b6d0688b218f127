"""Paired measurements: two or more sides take turns, and are compared within each turn. Also writes pages of
results.

Machines are noisy, and their speed drifts. What is common to the sides of a turn cancels in their ratio.
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
"""Does the work of a turn, whose number (from 0) it gets, and returns how many seconds of it count."""


@dataclass(frozen=True)
class Measurement:
    """The rates of both sides, one for each turn. The ratio is ours / theirs: above 1, ours is faster."""

    unit: str
    """The unit of the rates, such as ``tokens/s``."""
    ours: list[float]
    theirs: list[float]
    what: dict[str, str]
    """What each side does, in words."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further numbers, such as how many tokens there were."""

    def as_json(self) -> dict[str, Any]:
        ratios = [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]
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


def time_calls(work: Callable[[int], Any]) -> Side:
    """Returns a side that calls `work`, and whose whole call counts."""

    def side(turn: int) -> float:
        start = time.perf_counter()
        work(turn)
        return time.perf_counter() - start

    return side


def take_turns(sides: Mapping[str, Side], repeats: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Returns the seconds of each side in each turn, without those of the warm-up.

    Every other turn goes through the sides in reverse order, so that no side always follows the same other
    side.

    Args:
        sides: The sides by name.
        repeats: The number of turns that count.
        warm_up: The number of turns before them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(-warm_up, repeats):
        order = names if turn % 2 == 0 else names[::-1]
        for name in order:
            seconds_of_side = sides[name](turn + warm_up)
            if turn >= 0:
                seconds[name].append(seconds_of_side)
        if turn < 0:
            progress = "warm-up"
        else:
            measured = "  ".join(f"{name} {seconds[name][-1]:.2f} s" for name in names)
            progress = f"{turn + 1}/{repeats}  {measured}"
        print(f"  {progress}", file=sys.stderr, flush=True)
    return seconds


def compute_rates(amount: float, seconds: list[float]) -> list[float]:
    """Returns the amount per second in each turn."""
    return [amount / seconds_of_turn for seconds_of_turn in seconds]


# Pages of results


def make_parser(description: str | None, page: str, repeats: int) -> argparse.ArgumentParser:
    """Returns a parser with the options ``--output``, for the folder of the page, and ``--repeats``.

    Args:
        description: What ``--help`` prints first.
        page: The page's file name without its ending.
        repeats: The default number of turns.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"for {page}.md and {page}.json")
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def describe_machine() -> dict[str, Any]:
    """Returns the machine's processor and its present load."""
    return {
        "processor": read_processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def read_processor_name() -> str:
    """Returns the name of the processor, such as ``AMD EPYC 9B14``."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def publish(text: str, numbers: dict[str, Any], output: Path | None, name: str) -> None:
    """Prints a page. Writes it and its numbers to the folder `output`, if there is one."""
    print(text)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / f"{name}.md").write_text(text)
        (output / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
