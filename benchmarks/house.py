"""What a reader has to take in, package by package, as a table in Markdown: python benchmarks/house.py"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from tests.support import house  # noqa: E402


def main() -> None:
    packages = sorted({name.partition(".")[0] for name in house.trees()})
    columns = list(house.counts(packages[0]))
    print("| package |", " | ".join(columns), "|")
    print("|---|" + "---:|" * len(columns))
    for package in packages:
        print(f"| {package} |", " | ".join(f"{count:,}" for count in house.counts(package).values()), "|")
    whole = house.counts()
    print("| **all** |", " | ".join(f"{whole.pop(column):,}" for column in columns), "|\n")
    found, documented = house.headless()
    whole["docstrings without a head"] = len(found)
    whole["docstrings"] = documented
    for name, count in whole.items():
        print(f"* {name}: {count:,}")
    print("* circles of files:", ", ".join(str(len(circle)) for circle in house.circles()))


if __name__ == "__main__":
    main()
