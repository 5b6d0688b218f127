"""Trains one iteration with given settings and writes the weights; tests run it on one or two ranks.

Several settings, each with its own file, share one start of the processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

PAIR_TO_SCORE = ((1, 2, 3), (4, 5, 6, 7))


def build_objective(type: str, **settings: Any) -> Any:
    """The objective that a configuration would choose."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.objectives.base import Objective
    from treetune.objectives.teacher import Teacher

    if "teacher" in settings:
        settings["teacher"] = Teacher(**settings["teacher"])
    return Objective.parts_by_name()[type](**settings)


def distributions_of(trainer: Any, rows: Any) -> list[float]:
    """Returns, for each row, sums of the distributions that a credit may ask of the trainer."""
    import numpy as np
    import torch

    from treetune.trainer.tokens import Sequences

    sequences = Sequences.of(rows)
    columns = list(trainer.distributions(sequences))
    if trainer.settings.sequence_parallel_size == 1:
        positions = [np.flatnonzero(row.trained) for row in rows]
        columns.append(trainer.group_divergences(sequences, torch.from_numpy(np.concatenate(positions))))
        if trainer.reference is not None:
            columns += trainer.reference_distances(sequences)
    starts = sequences.starts
    return [
        float(values_N[start:end].double().sum())
        for values_N in columns
        for start, end in itertools.pairwise(starts)
    ]


def update(settings: dict[str, Any], out: Path, ranks: Any) -> None:
    from safetensors.torch import save_file

    from tests.support.tiny_trainer import (
        critic_of,
        episodes,
        paired_episodes,
        threaded_episodes,
        tiny_model,
        with_teacher_prompts,
    )
    from treetune.credit.gae import Gae
    from treetune.credit.literature.prime import Prime
    from treetune.credit.reward_models import RewardModelSettings
    from treetune.engine.requests import Completion, Request, SamplingParams
    from treetune.models import logprobs
    from treetune.models.lora import Lora
    from treetune.objectives.further_inputs import TeacherObjective
    from treetune.rollouts.storage import write_episodes
    from treetune.runtime.generation import wait_for_stored_episodes
    from treetune.trainer import core
    from treetune.trainer.base import Trainer
    from treetune.trainer.core import PolicyTrainer
    from treetune.trainer.tokens import Sequences

    logprobs.LOGITS_PER_CHUNK = settings.pop("logits_per_chunk", 2**24)
    credit: Gae | Prime | None = Gae() if settings.pop("gae", False) else None
    if settings.pop("prime", False):
        credit = Prime(reward_model=RewardModelSettings(learning_rate=1e-2))
    sequences_of_rank = core.sequences_of_rank
    if settings.pop("keeps_all", False):
        core.sequences_of_rank = lambda episodes, *_, **__: Sequences.of(episodes)
    hears_answers = settings.pop("heard", False)
    model = settings.pop("model", {})
    objective = build_objective(**settings.pop("objective"))
    threads = settings.pop("threads", False)
    rows = [row for row, _ in threaded_episodes()] if threads else episodes(16)
    if objective.needs_pairs:
        rows = paired_episodes(of=rows)
    if isinstance(objective, TeacherObjective):
        rows = with_teacher_prompts(rows)
    if (correct := settings.pop("correct", None)) is not None:
        rows = [dataclasses.replace(row, score=float(i < correct)) for i, row in enumerate(rows)]
    if "lora" in settings:
        settings["lora"] = Lora(**settings["lora"])

    if settings.pop("stored", False):
        path = out.with_suffix(".arrow")
        if ranks.is_first:
            write_episodes(path, rows)
        rows = wait_for_stored_episodes(ranks, path)  # type: ignore[assignment]

    def trainer() -> PolicyTrainer:
        return PolicyTrainer(
            Trainer(objective=objective, **settings),
            lambda: tiny_model(**model),
            ranks=ranks,
            seed=0,
            temperature=0.8,
            iterations=2,
            **critic_of(credit),
        )

    first = trainer()
    if hears_answers and first.prefetch is not None:
        for row in list(rows)[ranks.rank :: 3]:  # each rank hears of other answers, and some reach no rank
            request = Request(row.prompt_ids, 0, 1, SamplingParams(20))
            first.prefetch.on_result(request, [Completion(row.response_ids, None, "stop", 0)])
    metrics: dict[str, Any] = first.train(0, rows)
    metrics["scores"] = first.score([PAIR_TO_SCORE], temperature=0.7)[0]
    metrics["distributions"] = distributions_of(first, rows)
    weights = {name: tensor.float().cpu().clone() for name, tensor in first.weights().items()}
    weights |= {
        f"critic.{name}": tensor.float().cpu().clone() for name, tensor in first.critic_weights().items()
    }
    weights |= {
        f"reward_model.{name}": tensor.float().cpu().clone()
        for name, tensor in first.reward_model_weights().items()
    }
    if ranks.is_first:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, out)
        out.with_suffix(".json").write_text(json.dumps(metrics))
    core.sequences_of_rank = sequences_of_rank
    ranks.barrier("written")


def main() -> None:
    from treetune.trainer.ranks import Ranks

    ranks = Ranks.join(deadline_s=120)
    everyone = range(ranks.world_size)
    greetings = ranks.hand_out("greetings", [f"{ranks.rank} to {other}" for other in everyone])
    assert greetings == [f"{other} to {ranks.rank}" for other in everyone]
    for settings, out in zip(json.loads(sys.argv[1]), sys.argv[2:], strict=True):
        update(settings, Path(out), ranks)
    ranks.leave()


if __name__ == "__main__":
    main()
