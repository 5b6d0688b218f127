"""Plans of shipped configurations, with changes."""

from __future__ import annotations

import json
from typing import Any, cast

import treetune.parts  # noqa: F401  (registers them)
from tests.support.shipped import ROOT
from treetune.config.build import build
from treetune.config.explain import Explanation
from treetune.config.jsonnet import load
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.runtime.machine import Machine, described_machine
from treetune_cluster.commands import start_shape
from treetune_cluster.planning.plan import Plan


def experiment(name: str, *overrides: str | dict[str, Any]) -> PolicyIteration:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in overrides]
    config = load([str(ROOT / "configs" / f"{name}.jsonnet")], texts, environment_keys=())
    return cast("PolicyIteration", build(Runtime, config.data, Explanation(config)))


def plan(name: str, *overrides: str | dict[str, Any], machine: Machine | None = None) -> Plan:
    """On a machine with eight GPUs of 80 GiB, unless another is given."""
    root = experiment(name, *overrides)
    return Plan.of(root, machine or described_machine(8, 80), shape=start_shape(root))
