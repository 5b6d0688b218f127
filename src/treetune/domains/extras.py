"""Packages that only one grader, tool or rule needs. The default set-up doesn't install them."""

from __future__ import annotations

from importlib.util import find_spec


def missing_extras(user: str, *modules: str) -> list[str]:
    """Returns a message with the modules that `user` needs and that aren't installed, and the remedy."""
    absent = [module for module in modules if find_spec(module) is None]
    if not absent:
        return []
    return [
        f"{', '.join(absent)}, which {user} needs and the default set-up leaves out:"
        " ./scripts/setup.sh --extras installs it (requirements-extras.txt)"
    ]
