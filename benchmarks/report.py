"""What scripts that measure in turns share: arguments, words about the machine, where the page goes."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any


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
