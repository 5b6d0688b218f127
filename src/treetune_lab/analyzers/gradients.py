"""Gradients of stored episodes in plain PyTorch: their noise, and those of single problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from treetune.rollouts.base import Credit
from treetune.rollouts.credit import Outcome
from treetune.rollouts.storage import read_episodes
from treetune.seeds import derive_seed, derived_random
from treetune.trainers.base import Trainer
from treetune.trainers.batches import Minibatch, micro_batches
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
from treetune.trainers.preparation import prepare, scores_old_logprobs
from treetune.trainers.tokens import Sequences, Unit, units_of
from treetune.trainers.update import micro_batch_loss
from treetune.vocabulary import Episode
from treetune_lab.analyzers.stored import StoredModels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from treetune.runtime.session import Session


@dataclass
class GradientSums:
    """Adds up minibatches' gradients; keeps their sum and the sum of their squared norms.

    With M independent minibatches of B episodes each and gradients g:

    * ``variance``: (Σ|g|² − |Σg|²/M) / (M − 1), the trace of the covariance of one g, unbiased;
    * ``squared_norm``: |Σg|²/M² − variance/M, the squared norm of the expected gradient, unbiased (and
      so below 0 at times, where it drowns in the noise);
    * ``noise_scale``: B · variance / squared_norm, the number of episodes at which noise and signal
      are equally large (McCandlish et al., arXiv:1812.06162, eq. 2.9); None where the norm drowned;
    * ``cosine``: (|Σg|² − Σ|g|²) / ((M − 1) · Σ|g|²), how alike two minibatches' gradients are.
    """

    batch_size: int
    count: int = 0
    squares: float = 0.0
    total: list[Tensor] = field(default_factory=list)

    def add(self, gradients: list[Tensor]) -> None:
        """Adds one minibatch's gradients, a tensor for each parameter."""
        import torch

        self.count += 1
        self.squares += sum(float(g.double().square().sum()) for g in gradients)
        if not self.total:
            self.total = [torch.zeros_like(g, dtype=torch.float64) for g in gradients]
        for sum_, gradient in zip(self.total, gradients, strict=True):
            sum_ += gradient

    def numbers(self) -> dict[str, float | None]:
        """The statistics above. Raises ValueError for fewer than two minibatches."""
        if self.count < 2:
            raise ValueError(f"{self.count} minibatches tell nothing about a variance: take smaller ones")
        m = self.count
        of_sum = sum(float(t.square().sum()) for t in self.total)
        variance = (self.squares - of_sum / m) / (m - 1)
        squared_norm = of_sum / m**2 - variance / m
        return {
            "minibatches": float(m),
            "variance": variance,
            "squared_norm": squared_norm,
            "relative_variance": variance / squared_norm if squared_norm > 0 else None,
            "noise_scale": self.batch_size * variance / squared_norm if squared_norm > 0 else None,
            "cosine": (of_sum - self.squares) / ((m - 1) * self.squares) if self.squares > 0 else None,
        }


def gradient_sums(
    session: Session,
    point: int,
    minibatch_size: int,
    minibatches: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[GradientSums, list[dict[str, Any]]]:
    """Sums over minibatches of the episodes of iteration `point`, and one row for each minibatch.

    Raises ValueError where the episodes were not sampled by the weights after `point` iterations.
    """
    path = session.directory.iteration(point) / "episodes.arrow"
    episodes = read_episodes(path)
    versions = {episode.policy_version for episode in episodes}
    if versions != {point}:
        raise ValueError(
            f"{path} holds episodes of the policy versions {sorted(versions)}, and not of the weights after"
            f" {point} iterations alone: their gradient at these weights would be another"
        )
    loss = Loss(session, point, episodes)
    order = units_of(episodes, in_pairs=loss.settings.objective.needs_pairs)
    derived_random(seed, point, "gradients").shuffle(order)
    starts = range(0, len(order) - minibatch_size + 1, minibatch_size)
    chosen = [order[start : start + minibatch_size] for start in starts][:minibatches]
    sums, rows = GradientSums(minibatch_size), []
    for number, minibatch in enumerate(chosen):
        value, gradients = loss.gradients(minibatch)
        sums.add(gradients)
        rows.append(
            {
                "checkpoint": point,
                "episodes": [episodes[i].trajectory for unit in minibatch for i in unit],
                "loss": value,
                "gradient_norm": sum(float(g.double().square().sum()) for g in gradients) ** 0.5,
            }
        )
        progress(number + 1, len(chosen))
    return sums, rows


class Loss:
    """The experiment's objective on some of an iteration's episodes, as its first minibatch would
    meet it: with advantages normalised over the whole iteration, and the policy its own old policy.
    """

    def __init__(
        self,
        session: Session,
        point: int,
        episodes: Sequence[Episode],
        settings: Trainer | None = None,
        credit: Credit | None = None,
    ) -> None:
        self.settings, credit = settings or session.config.trainer, credit or session.config.credit
        self.models = StoredModels(session, point, session.temperature)
        self.sequences = Sequences.of(episodes)
        without_kl = replace(self.settings, measure_kl=False)
        leaves_values = credit.leaves_values_to_trainer
        self.tensors = prepare(
            without_kl,
            episodes,
            self.sequences,
            self.models,
            scores_old=scores_old_logprobs(without_kl, several_steps=False),
            critic=leaves_values,
            from_values=credit.from_values if leaves_values else None,
        )
        self.tensors.old_logprobs_N = None  # the ratio is 1, and not 1 up to rounding

    def gradients(self, members: Sequence[Unit]) -> tuple[float, list[Tensor]]:
        """Returns the mean loss over these sequences, and the policy's gradients of it by parameter."""
        objective, scorer, policy = self.settings.objective, self.models.scorer, self.models.policy
        policy.zero_grad(set_to_none=True)
        minibatch = Minibatch.of(self.sequences, members, objective)
        total = 0.0
        if minibatch.units:
            units, whole = minibatch.units, minibatch.keep_units
            settings, ranks = scorer.settings, scorer.ranks
            for batch in micro_batches(self.sequences, units, settings, ranks, keep_units=whole):
                loss, _, _ = micro_batch_loss(
                    policy,
                    objective,
                    minibatch,
                    batch,
                    self.tensors,
                    temperature=scorer.temperature,
                    entropy_coef=objective.entropy_coef,
                    device=scorer.ranks.device,
                )
                loss.backward()
                total += float(loss.detach())
        return total, [p.grad for p in policy.parameters() if p.grad is not None]

    def flat_gradient(self, members: Sequence[Unit]) -> Tensor:
        """Returns the policy's gradient of the mean loss over these sequences as one vector, in float64."""
        import torch

        _, parts = self.gradients(members)
        return torch.cat([part.detach().flatten().double().cpu() for part in parts])


SKETCH = 4096
"""Numbers that a gradient is projected to. Squared lengths keep their expectation, and are off by 2 %."""


def problem_gradients(
    session: Session, point: int, episodes: Sequence[Episode], seed: int
) -> NDArray[np.float32]:
    """Returns the policy's gradient of each problem's episodes, [problems, `SKETCH`], in the problems' order:
    of the mean of Σ advantage × log-prob, without clipping, penalties or normalisation.

    Every gradient is projected by the same random signs and bins (Charikar et al. 2002, "Finding frequent
    items in data streams"), so that those of other credits are compared with it.
    """
    import torch

    settings = replace(
        session.config.trainer, objective=ClippedPolicyGradient(), advantage_normalisation="none"
    )
    loss = Loss(session, point, episodes, settings, Outcome())
    of_problem: dict[str, list[tuple[int, ...]]] = {}
    for index, episode in enumerate(episodes):
        of_problem.setdefault(episode.group, []).append((index,))
    bins_D = signs_D = None
    rows = []
    for members in of_problem.values():
        gradient_D = loss.flat_gradient(members)
        if bins_D is None or signs_D is None:
            draws = torch.Generator().manual_seed(derive_seed(seed, "sketch") % 2**63)
            bins_D = torch.randint(SKETCH, gradient_D.shape, generator=draws)
            signs_D = torch.randint(2, gradient_D.shape, generator=draws, dtype=torch.int8) * 2 - 1
        rows.append(torch.zeros(SKETCH, dtype=torch.float64).index_add_(0, bins_D, gradient_D * signs_D))
    return torch.stack(rows).float().numpy()
