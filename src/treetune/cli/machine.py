"""Commands about the machine and this installation."""

from __future__ import annotations

import argparse
import platform

from treetune.cli.command import Command


def doctor(options: argparse.Namespace) -> int:
    from treetune.runtime.doctor import run

    return run()


def version() -> str:
    """What a report of a fault should begin with."""
    import treetune
    from treetune.runtime.manifest import code_commit

    commit = code_commit()
    words = [f"treetune {treetune.__version__}", f"Python {platform.python_version()}"]
    return ", ".join([*words, f"commit {commit}"] if commit else words)


COMMANDS = (
    Command(
        "doctor",
        doctor,
        "is this machine fit: versions, memory, ports, one sampled token",
        "Looks at versions, memory, ports and the compiler, and samples one token with the engine. It takes"
        " half a minute.",
        ("treetune doctor",),
    ),
)
