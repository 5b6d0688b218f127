"""Packages that one grader, tool or rule alone needs, and that the default set-up leaves out."""

from __future__ import annotations

from importlib.util import find_spec


def missing_extras(user: str, *modules: str) -> list[str]:
    """Returns which of these modules `user` lacks, with the remedy; nothing where all are installed."""
    absent = [module for module in modules if find_spec(module) is None]
    if not absent:
        return []
    return [
        f"{', '.join(absent)}, which {user} needs and the default set-up leaves out:"
        " ./scripts/setup.sh --extras installs it (requirements-extras.txt)"
    ]
