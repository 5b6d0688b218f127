"""Programs of ours that run inside of the sandbox. Nothing else of the package is there."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def source(name: str) -> str:
    """The text of one of them."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


@cache
def files(*names: str) -> Mapping[str, str]:
    """Those that another one imports, by the paths at which it finds them."""
    return {f"treetune/sandbox/inside/{name}.py": source(name) for name in names}
