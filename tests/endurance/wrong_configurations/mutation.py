"""What a wrong configuration is, and the shipped ones that it is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SFT, GRPO, PPO = "quickstart/sft.jsonnet", "quickstart/grpo.jsonnet", "quickstart/ppo.jsonnet"
VINEPPO, RLOO, DAPO = "quickstart/vineppo.jsonnet", "quickstart/rloo.jsonnet", "quickstart/dapo.jsonnet"
RESTEM, DPO = "quickstart/restem.jsonnet", "quickstart/dpo_positive.jsonnet"
SPO = "quickstart/spo_3_1.jsonnet"
REINFORCE = "quickstart/reinforce_pp.jsonnet"
THREADS = "threadweaver/tiny/rl_parallel_published.jsonnet"
COUNTDOWN = "countdown/tiny_grpo.jsonnet"
PAPER = "polIter_rho1bSft2_vineppo_MATH.jsonnet"
TABLE = "tables/quickstart_methods.jsonnet"
MECHANICAL = (VINEPPO, DAPO, DPO, COUNTDOWN)
"""What keys, types, names and numbers are changed in: every kind of part is in one of them."""


@dataclass(frozen=True)
class Mutation:
    """One wrong configuration. `files` are texts that are configurations of their own, by name."""

    kind: str
    label: str
    configs: str
    overrides: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)


def override(path: Sequence[str], value: str) -> str:
    """``{trainer+: {learning_rate: …}}``."""
    text = value
    for depth, name in enumerate(reversed(path)):
        text = f"{{{json.dumps(name)}{'+' if depth else ''}: {text}}}"
    return text
