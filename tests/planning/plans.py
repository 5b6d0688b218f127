"""Plans of shipped configurations, with changes."""

from __future__ import annotations

import json
from typing import Any

from tests.support.shipped import ROOT, experiment_of
from treetune.runtime.base import PolicyIteration
from treetune.runtime.machine import Machine, described_machine
from treetune_cluster.commands import start_shape
from treetune_cluster.planning.plan import Plan


def experiment(name: str, *overrides: str | dict[str, Any]) -> PolicyIteration:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in overrides]
    return experiment_of(f"{ROOT}/configs/{name}", *texts)


def plan(name: str, *overrides: str | dict[str, Any], machine: Machine | None = None) -> Plan:
    """On a machine with eight GPUs of 80 GiB, unless another is given."""
    root = experiment(name, *overrides)
    return Plan.of(root, machine or described_machine(8, 80), shape=start_shape(root))
