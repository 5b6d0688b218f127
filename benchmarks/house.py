"""Figures of the house, as tables in Markdown.

python benchmarks/house.py             what a reader has to take in, package by package
python benchmarks/house.py --core      what the core alone needs of an installation, beside the whole
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from packaging.utils import canonicalize_name  # noqa: E402

from tests.setup.test_core_alone import core_distributions  # noqa: E402
from tests.support import house  # noqa: E402


def size(one: Distribution) -> int:
    """Returns the bytes of a distribution's files."""
    paths = [Path(str(one.locate_file(file))) for file in one.files or ()]
    return sum(path.stat().st_size for path in paths if path.is_file())


def core() -> None:
    sizes = {canonicalize_name(one.metadata["Name"]): size(one) for one in distributions()}
    needed = core_distributions()
    print("| installed | distributions | MB |\n|---|---:|---:|")
    for name, names in (("what the core needs", needed), ("all that is here", sizes)):
        print(f"| {name} | {len(names)} | {sum(sizes[one] for one in names) / 1e6:,.0f} |")


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
    core() if "--core" in sys.argv else main()
