"""Gradients of stored episodes in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from treetune.credit.base import Credit
from treetune.credit.reinforce import Outcome
from treetune.lab.analyzers.stored import StoredModels
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.seeds import derive_seed
from treetune.trainer.base import Trainer
from treetune.trainer.batches import Minibatch, micro_batches
from treetune.trainer.preparation import prepare, scores_old_logprobs
from treetune.trainer.tokens import Sequences, Unit
from treetune.trainer.update import micro_batch_loss
from treetune.vocabulary import Episode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from treetune.runtime.console import Progress
    from treetune.runtime.session import Session


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


SKETCH = 4096
"""Numbers that a gradient is projected to. Squared lengths keep their expectation, and are off by 2 %."""


def problem_gradients(
    session: Session, point: int, credits: Sequence[Sequence[Episode]], seed: int, show: Progress
) -> NDArray[np.float32]:
    """Returns the policy's gradient of each problem's episodes with each credit of the same answers,
    [credits, problems, `SKETCH`], in the problems' order: of the mean of Σ advantage × log-prob, without
    clipping, penalties or normalisation.

    Every gradient is projected by the same random signs and bins (Charikar et al. 2002, "Finding frequent
    items in data streams"), so that those of other credits are compared with it.
    """
    import torch

    settings = replace(
        session.config.trainer, objective=ClippedPolicyGradient(), advantage_normalisation="none"
    )
    losses = [Loss(session, point, episodes, settings, Outcome()) for episodes in credits]
    sequences, models = losses[0].sequences, losses[0].models
    parameters, scorer = list(models.policy.parameters()), models.scorer
    draws, size = torch.Generator(), sum(one.numel() for one in parameters)
    draws.manual_seed(derive_seed(seed, "sketch") % 2**63)
    bins_D = torch.randint(SKETCH, (size,), generator=draws)
    signs_D = torch.randint(2, (size,), generator=draws, dtype=torch.int8) * 2 - 1
    of_problem: dict[str, list[Unit]] = {}
    for index, episode in enumerate(credits[0]):
        of_problem.setdefault(episode.group, []).append((index,))
    sketches_CPS = torch.zeros(len(credits), len(of_problem), SKETCH)
    for number, members in enumerate(of_problem.values()):
        minibatch = Minibatch.of(sequences, members, settings.objective)
        for batch in micro_batches(
            sequences, minibatch.units, scorer.settings, scorer.ranks, keep_units=False
        ):
            logprobs_N, *_ = models.policy(batch.inputs, scorer.temperature)
            for loss, sketch_S in zip(losses, sketches_CPS[:, number], strict=True):
                assert loss.tensors.advantages_N is not None
                weights_N = -(minibatch.weights_N * loss.tensors.advantages_N)[batch.flat_index_N]
                weights_N = weights_N.to(logprobs_N)
                parts = torch.autograd.grad(logprobs_N, parameters, weights_N, retain_graph=True)
                gradient_D = torch.cat([part.flatten().double().cpu() for part in parts])
                own_S = torch.zeros(SKETCH, dtype=torch.float64)
                sketch_S += own_S.index_add_(0, bins_D, gradient_D * signs_D)
        show(number + 1, len(of_problem))
    return sketches_CPS.numpy()
