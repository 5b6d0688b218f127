"""Programs of ours that run inside of the sandbox. Nothing else of the package is there."""

from functools import cache
from pathlib import Path


@cache
def source(name: str) -> str:
    """The text of one of them."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
