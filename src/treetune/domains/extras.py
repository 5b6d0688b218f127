"""Packages that only one grader, tool or rule needs. The default set-up doesn't install them."""

from __future__ import annotations

from importlib.util import find_spec


def missing_extras(user: str, *modules: str) -> list[str]:
    """Returns a list with one message: which modules aren't installed that `user` (such as "the tool search")
    needs, and how to install them. The list is empty if all are installed."""
    absent = [module for module in modules if find_spec(module) is None]
    if not absent:
        return []
    return [
        f"{', '.join(absent)}, which {user} needs and the default set-up leaves out:"
        " ./scripts/setup.sh --extras installs it (requirements-extras.txt)"
    ]
