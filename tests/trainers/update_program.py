"""Trains one iteration under given settings and writes the weights: run by tests on 1 or 2 ranks.

Several settings, each with a file of its own, share one start of the processes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

PAIR_TO_SCORE = ((1, 2, 3), (4, 5, 6, 7))


def update(settings: dict[str, Any], out: Path, ranks: Any) -> None:
    import torch
    from safetensors.torch import save_file

    from tests.trainers.helpers import episodes, paired_episodes, tiny_model
    from treetune.episode_generators.credit.gae import Gae
    from treetune.models.lora import Lora
    from treetune.trainers.base import DeepSpeedTrainer
    from treetune.trainers.core import PolicyTrainer
    from treetune.trainers.objectives.ppo import ClippedPolicyGradient
    from treetune.trainers.objectives.preference import DpoPositive
    from treetune.trainers.objectives.spo import CorrectPaths

    gae = Gae() if settings.pop("gae", False) else None
    resumes = settings.pop("resumes", False)
    model = settings.pop("model", {})
    kinds = {"ppo": ClippedPolicyGradient, "dpo_positive": DpoPositive, "spo": CorrectPaths}
    kind = settings.pop("kind", "ppo")
    rows = paired_episodes() if kind == "dpo_positive" else episodes(16)
    if (correct := settings.pop("correct", None)) is not None:
        rows = [dataclasses.replace(row, score=float(i < correct)) for i, row in enumerate(rows)]
    objective = kinds[kind](**settings.pop("objective", {}))
    if "lora" in settings:
        settings["lora"] = Lora(**settings["lora"])

    def trainer() -> PolicyTrainer:
        return PolicyTrainer(
            DeepSpeedTrainer(objective=objective, **settings),
            lambda: tiny_model(**model),
            ranks=ranks,
            seed=0,
            temperature=0.8,
            iterations=2,
            gae=gae,
        )

    first = trainer()
    metrics: dict[str, Any] = first.train(0, rows)
    metrics["scores"] = first.score([PAIR_TO_SCORE], temperature=0.7)[0]
    weights = {name: tensor.float().cpu().clone() for name, tensor in first.weights().items()}
    weights |= {
        f"critic.{name}": tensor.float().cpu().clone() for name, tensor in first.critic_weights().items()
    }
    if ranks.is_first:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, out)
        out.with_suffix(".json").write_text(json.dumps(metrics))
    if resumes:
        first.save(out.with_suffix(".state"))
        first.train(1, rows)
        second = trainer()
        second.load(out.with_suffix(".state"))
        second.train(1, rows)
        one, other = first.weights(), second.weights()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    ranks.barrier("written")


def main() -> None:
    from treetune.trainers.ranks import Ranks

    ranks = Ranks.join(deadline_s=120)
    for settings, out in zip(json.loads(sys.argv[1]), sys.argv[2:], strict=True):
        update(settings, Path(out), ranks)
    ranks.leave()


if __name__ == "__main__":
    main()
