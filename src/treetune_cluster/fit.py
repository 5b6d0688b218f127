"""Whether a run fits the machine that it is started on, before any process is."""

from __future__ import annotations

import os
import sys

from treetune.config.errors import FoundByAllRanks
from treetune.runtime.base import PolicyIteration
from treetune_cluster.planning.machine import here
from treetune_cluster.planning.plan import Plan
from treetune_cluster.planning.words import verdict_of


def refuse_what_does_not_fit(config: PolicyIteration) -> None:
    """Raises ValueError with what doesn't fit and the smallest change that helps: what the ranks of a machine
    find alike, one of them says. Where the model's sizes aren't known, or nvidia-smi says nothing, the first
    rank says that nobody has looked."""
    if not config.plan.check:
        return
    try:
        plan = Plan.of(config, here(started=True))
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"note: whether the run fits this machine wasn't checked: {error}", file=sys.stderr)
        return
    if not plan.fits:
        raise _kind(plan.machine.nodes)(
            f"{plan.machine.words}: {verdict_of(plan)}\n"
            "  the command `plan` shows all of it; the numbers are estimates, and with"
            " --override '{plan: {check: false}}' the run starts without them"
        )


def _kind(machines: int) -> type[ValueError]:
    """Of this rank's error. Machines may be smaller than the first rank's: on each of them one speaks."""
    rank, of_machine = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    return ValueError if machines > 1 and rank != "0" and of_machine == "0" else FoundByAllRanks
