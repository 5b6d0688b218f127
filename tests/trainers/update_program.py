"""Trains one iteration under given settings and writes the weights: run by tests on 1 or 2 ranks."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path


def main() -> None:
    settings, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    from safetensors.torch import save_file

    from tests.trainers.helpers import episodes, paired_episodes, tiny_model
    from treetune.episode_generators.credit.gae import Gae
    from treetune.trainers.base import DeepSpeedTrainer
    from treetune.trainers.core import PolicyTrainer
    from treetune.trainers.objectives.ppo import ClippedPolicyGradient
    from treetune.trainers.objectives.preference import DpoPositive
    from treetune.trainers.objectives.spo import CorrectPaths
    from treetune.trainers.ranks import Ranks

    ranks = Ranks.join(deadline_s=120)
    gae = Gae() if settings.pop("gae", False) else None
    kinds = {"ppo": ClippedPolicyGradient, "dpo_positive": DpoPositive, "spo": CorrectPaths}
    name = settings.pop("kind", "ppo")
    rows = paired_episodes() if name == "dpo_positive" else episodes(16)
    if (correct := settings.pop("correct", None)) is not None:
        rows = [dataclasses.replace(row, score=float(i < correct)) for i, row in enumerate(rows)]
    objective = kinds[name](**settings.pop("objective", {}))
    trainer = PolicyTrainer(
        DeepSpeedTrainer(objective=objective, **settings),
        tiny_model,
        ranks=ranks,
        seed=0,
        temperature=0.8,
        iterations=2,
        gae=gae,
    )
    metrics = trainer.train(0, rows)
    weights = trainer.weights()
    if ranks.is_first:
        save_file({name: tensor.float().contiguous().clone() for name, tensor in weights.items()}, out)
        out.with_suffix(".json").write_text(json.dumps(metrics))
    ranks.barrier("written")
    ranks.leave()


if __name__ == "__main__":
    main()
