"""The gradients that credit methods give batches of answers, held against the gradient by true advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from treetune.vocabulary import Column, Episode
from treetune_lab.analyzers.credit_measures import Truth

if TYPE_CHECKING:
    from torch import Tensor

    from treetune.runtime.session import Session


def against_true_ones(
    session: Session,
    point: int,
    truths: Sequence[Truth],
    by_method: Mapping[str, Sequence[Episode]],
    batch: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, float | None]]:
    """Of each method over batches of so many answers, problems whole where `batch` is a multiple of a group:

    * ``cosine``: the mean of the cosines between a batch's gradient and the one by true advantages of all
      answers of the other batches;
    * ``relative_variance``: the variance of a batch's gradient as a share of their mean's squared length;
    * ``true_cosine``: the cosine of true advantages themselves, which is not 1, since a batch is small.

    Gradients are those of Σ advantage × log-prob, without clipping, penalties or normalisation.
    """
    import torch

    true = [replace(one, advantages=_of_tokens(truth, one)) for truth, one in _paired(truths, by_method)]
    exact = _gradients(session, point, true, batch)
    whole = torch.stack(exact).sum(0)
    others = [whole - one for one in exact]
    best = _mean_cosine(exact, others)
    found: dict[str, dict[str, float | None]] = {}
    for name, episodes in by_method.items():
        own = _gradients(session, point, episodes, batch)
        found[name] = {
            "cosine": _mean_cosine(own, others),
            "relative_variance": _relative_variance(own),
            "true_cosine": best,
        }
        progress(len(found), len(by_method))
    return found


def _paired(
    truths: Sequence[Truth], by_method: Mapping[str, Sequence[Episode]]
) -> list[tuple[Truth, Episode]]:
    return list(zip(truths, next(iter(by_method.values())), strict=True))


def _of_tokens(truth: Truth, episode: Episode) -> Column:
    import numpy as np

    advantages: Column = np.repeat(truth.advantages, np.diff(truth.step_ends, prepend=0))
    assert len(advantages) == len(episode.response_ids)
    return advantages


def _gradients(session: Session, point: int, episodes: Sequence[Episode], batch: int) -> list[Tensor]:
    """Flat, in float64, one for each whole batch."""
    import torch

    from treetune.rollouts.credit.outcome import Outcome
    from treetune.trainers.objectives.ppo import ClippedPolicyGradient
    from treetune.trainers.tokens import Sequences
    from treetune_lab.analyzers.gradients import Loss
    from treetune_lab.analyzers.scoring import StoredModels

    settings = replace(
        session.config.trainer, objective=ClippedPolicyGradient(), advantage_normalisation="none"
    )
    sequences = Sequences.of(episodes)
    models = StoredModels(session, point, session.temperature)
    loss = Loss(models, settings, Outcome(), episodes, sequences)
    found = []
    for start in range(0, len(episodes) - batch + 1, batch):
        models.policy.zero_grad(set_to_none=True)
        loss.backward([(index,) for index in range(start, start + batch)])
        parts = [p.grad for p in models.policy.parameters() if p.grad is not None]
        found.append(torch.cat([part.detach().flatten().double().cpu() for part in parts]))
    if len(found) < 2:
        raise ValueError(
            f"{len(episodes)} answers make {len(found)} batches of {batch}, and gradients are compared"
            " between batches: take a smaller gradient_batch, or more problems"
        )
    return found


def _mean_cosine(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float | None:
    cosines = [
        float(one @ other) / length
        for one, other in zip(ones, others, strict=True)
        if (length := float(one.norm()) * float(other.norm()))
    ]
    return math.fsum(cosines) / len(cosines) if cosines else None


def _relative_variance(ones: Sequence[Tensor]) -> float | None:
    import torch

    stacked = torch.stack(list(ones))
    middle = stacked.mean(0)
    squared = float(middle @ middle)
    variance = float((stacked - middle).square().sum()) / (len(ones) - 1)
    return variance / squared if squared else None
