"""Computes gradients of stored episodes in plain PyTorch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.credit.base import Credit
from treetune.credit.gae import from_values_of
from treetune.credit.reinforce import Outcome
from treetune.credit.reward_models import RewardModelCredit
from treetune.lab.analyzers.stored import StoredModels
from treetune.objectives.further_inputs import TeacherObjective, teacher_of
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.seeds import derive_seed
from treetune.store.files import write_atomically
from treetune.trainer.base import Layout, Trainer
from treetune.trainer.batches import Minibatch, micro_batches
from treetune.trainer.preparation import prepare
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
    """The experiment's objective on episodes of an iteration, as at the first optimiser step of training.

    Advantages are normalised over the whole iteration, and all ratios to the old policy are 1.
    """

    def __init__(
        self,
        session: Session,
        point: int,
        episodes: Sequence[Episode],
        settings: Trainer | None = None,
        credit: Credit | None = None,
        layout: Layout = "padded",
    ) -> None:
        self.settings, credit = settings or session.config.trainer, credit or session.config.credit
        if isinstance(credit, RewardModelCredit):
            raise ValueError(
                f"the credit {credit.registered_name()!r} trains its reward model in the run, and the loss of"
                " a stored iteration can't be computed without training it again: analyse a run with another"
                " credit, such as 'rloo'"
            )
        teacher = teacher_of(self.settings.objective)
        if teacher is not None and teacher.weights == "average":
            raise ValueError(
                "the objective's teacher is a moving average of the policy's weights, which stored iterations"
                " don't have: analyse a run whose trainer.objective.teacher.weights is 'reference' or"
                " 'policy'"
            )
        self.models = StoredModels(session, point, session.temperature, layout)
        self.sequences = Sequences.of(episodes)
        # The KL to the start model is only a metric, and would load that model.
        without_kl = replace(self.settings, measure_kl=False)
        self.tensors = prepare(
            without_kl,
            episodes,
            self.sequences,
            self.models,
            scores_old=without_kl.scores_old_logprobs(several_steps=False),
            critic=credit.leaves_values_to_trainer,
            from_values=from_values_of(credit),
        )
        self.tensors.old_logprobs_N = None  # so that ratios are exactly 1, without rounding errors

    def gradients(self, units: Sequence[Unit]) -> tuple[float, list[Tensor]]:
        """Returns the loss over the units as one minibatch, and its gradient for each of the policy's
        parameters.

        Args:
            units: The units, each a sequence or a pair that the objective compares.
        """
        objective, scorer, policy = self.settings.objective, self.models.scorer, self.models.policy
        policy.zero_grad(set_to_none=True)
        minibatch = Minibatch.of(self.sequences, units, objective)
        total = 0.0
        # Without units there is nothing to learn: the objective gives all sequences the weight 0.
        if minibatch.units:
            teacher = self.models.teacher if isinstance(objective, TeacherObjective) else None
            batches = micro_batches(
                self.sequences,
                minibatch.units,
                scorer.settings,
                scorer.ranks,
                keep_units=minibatch.keep_units,
                with_teacher=teacher is not None,
            )
            for batch in batches:
                loss, _, _ = micro_batch_loss(
                    policy,
                    objective,
                    minibatch,
                    batch,
                    self.tensors,
                    temperature=scorer.temperature,
                    entropy_coef=objective.entropy_coef,
                    device=scorer.ranks.device,
                    teacher=teacher,
                )
                loss.backward()
                total += float(loss.detach())
        gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
        return total, gradients


SKETCH_SIZE = 4096
"""The size of a gradient's projection. The squared length of a projection has the gradient's squared length
as its expectation, and an error of 2 %."""


def problem_gradients(
    session: Session,
    point: int,
    credits: Sequence[Sequence[Episode]],
    seed: int,
    show: Progress,
    store: Path | None = None,
) -> NDArray[np.float32]:
    """Returns the projected policy gradient of each problem with each credit of the same answers.

    The gradient is that of the mean of Σ advantage × log-prob, without clipping, penalties or normalisation.
    All gradients are projected by the same random bins and signs, so that they can be compared (Charikar et
    al., "Finding frequent items in data streams", 2002).

    Args:
        credits: for each credit, the episodes of the same answers in the same order. The first credit must
            train every token that another credit trains.
        seed: the seed of the projection.
        store: a folder for the gradients of each problem with each credit, from which an interrupted call
            continues.

    Returns:
        An array of shape [credits, problems, `SKETCH_SIZE`], with problems in the order of their first
        answers. A row of `SKETCH_SIZE` numbers is the projection of a gradient, its sketch.
    """
    import torch

    settings = replace(
        session.config.trainer, objective=ClippedPolicyGradient(), advantage_normalisation="none"
    )
    # If answers are trained as prefix trees, then the prompt of a problem's answers is computed once.
    layout: Layout = "tree" if session.config.trainer.layout == "tree" else "padded"
    losses = []
    for episodes in credits:
        same_tokens = _with_trained_tokens_of(credits[0], episodes)
        # Some credits leave it to the trainer to compute advantages from a critic's values. With `Outcome`,
        # the advantages of the episodes are used.
        losses.append(Loss(session, point, same_tokens, settings, Outcome(), layout))
    n_parameters = sum(parameter.numel() for parameter in losses[0].models.policy.parameters())
    projection = Projection.draw(n_parameters, seed)
    # A unit is a tuple of the indices of episodes that the objective compares: here of a single episode.
    units_by_problem: dict[str, list[Unit]] = {}
    for index, episode in enumerate(credits[0]):
        units_by_problem.setdefault(episode.group, []).append((index,))

    sketches_CPS = torch.zeros(len(credits), len(units_by_problem), SKETCH_SIZE)
    for problem_index, units in enumerate(units_by_problem.values()):
        files: list[Path | None] = [None] * len(losses)
        if store is not None:
            # One file for each credit, so that another credit can be added to those that are stored.
            files = [store / f"{_hash_of_inputs(loss, units, point, seed)}.npy" for loss in losses]
        sketches_CPS[:, problem_index] = _sketch_problem(losses, units, projection, files)
        show(problem_index + 1, len(units_by_problem))
    return sketches_CPS.numpy()


def _sketch_problem(
    losses: Sequence[Loss], units: Sequence[Unit], projection: Projection, files: Sequence[Path | None]
) -> Tensor:
    """Returns a problem's projected gradient with each credit, [credits, `SKETCH_SIZE`].

    Args:
        losses: The loss with each credit.
        units: The problem's answers.
        projection: The projection of all gradients.
        files: A file for each credit. It is read if it is there, and else written. None: no file.
    """
    import numpy as np
    import torch

    sketches_CS = torch.zeros(len(losses), SKETCH_SIZE)
    missing_credits = []
    for credit_index, file in enumerate(files):
        if file is not None and file.is_file():
            sketches_CS[credit_index] = torch.from_numpy(np.load(file))
        else:
            missing_credits.append(credit_index)
    if missing_credits:
        sketches_CS[missing_credits] = _project_gradients(losses, missing_credits, units, projection)
    for credit_index in missing_credits:
        new_file = files[credit_index]
        if new_file is not None:
            with write_atomically(new_file, "wb") as out:
                np.save(out, sketches_CS[credit_index].numpy())
    return sketches_CS


@dataclass(frozen=True)
class Projection:
    """A random projection of gradients with D numbers to `SKETCH_SIZE` bins: each number of a gradient is
    added to one bin, with a sign."""

    bins_D: Tensor
    """The bin of each of the gradient's numbers, from 0."""
    signs_D: Tensor
    """The sign of each of the gradient's numbers: 1 or -1."""

    @staticmethod
    def draw(size: int, seed: int) -> Projection:
        """Draws bins and signs for gradients with `size` numbers."""
        import torch

        generator = torch.Generator()
        generator.manual_seed(derive_seed(seed, "sketch"))
        bins_D = torch.randint(SKETCH_SIZE, (size,), generator=generator)
        signs_D = torch.randint(2, (size,), generator=generator, dtype=torch.int8) * 2 - 1
        return Projection(bins_D, signs_D)

    def project(self, gradient: Sequence[Tensor]) -> Tensor:
        """Returns for each of `SKETCH_SIZE` bins the sum of the gradient's numbers in it, times their signs.

        The gradient is given in parts, one for each parameter. Projecting a part at a time needs less memory
        than projecting the whole gradient.
        """
        import torch

        sketch_S = torch.zeros(SKETCH_SIZE, dtype=torch.float64)
        start = 0
        for part in gradient:
            end = start + part.numel()
            signed_part = part.flatten().double().cpu() * self.signs_D[start:end]
            sketch_S.index_add_(0, self.bins_D[start:end], signed_part)
            start = end
        return sketch_S


def _project_gradients(
    losses: Sequence[Loss], indices: Sequence[int], units: Sequence[Unit], projection: Projection
) -> Tensor:
    """Returns the projected policy gradients of some of the losses over one problem's answers, shape
    [indices, `SKETCH_SIZE`].

    Args:
        losses: The losses with the different credits. They have the same policy and train the same tokens, so
            they differ only in their advantages.
        indices: The losses whose gradients are computed.
        units: The problem's answers.
    """
    import torch

    models, sequences = losses[0].models, losses[0].sequences
    scorer, policy = models.scorer, models.policy
    parameters = list(policy.parameters())
    minibatch = Minibatch.of(sequences, units, losses[0].settings.objective)
    sketches_LS = torch.zeros(len(indices), SKETCH_SIZE)
    for batch in micro_batches(sequences, minibatch.units, scorer.settings, scorer.ranks, keep_units=False):
        # One forward pass serves all losses: only the weights of the log-probs differ.
        logprobs_N, *_ = policy(batch.inputs, scorer.temperature)
        for row, index in enumerate(indices):
            advantages_N = losses[index].tensors.advantages_N
            assert advantages_N is not None
            # The minus makes it the gradient of a loss. All credits have it, so it doesn't matter when their
            # gradients are compared.
            weights_N = -(minibatch.weights_N * advantages_N)[batch.flat_index_N]
            weights_N = weights_N.to(logprobs_N)
            if weights_N.any():
                gradient = torch.autograd.grad(logprobs_N, parameters, weights_N, retain_graph=True)
                sketches_LS[row] += projection.project(gradient)
    return sketches_LS


def _with_trained_tokens_of(reference: Sequence[Episode], episodes: Sequence[Episode]) -> list[Episode]:
    """Returns the episodes, changed so that they train the same tokens as the reference.

    A token that only the reference trains gets the advantage 0. The gradient is then the same as if the token
    were not trained.
    """
    same_tokens = []
    for reference_episode, episode in zip(reference, episodes, strict=True):
        assert episode.advantages is not None
        trains_further_tokens = (episode.trained & ~reference_episode.trained).any()
        assert not trains_further_tokens, "the first credit trains all tokens that any of them trains"
        advantages = episode.advantages * episode.trained  # 0 where the episode doesn't train
        same_tokens.append(replace(episode, trained=reference_episode.trained, advantages=advantages))
    return same_tokens


def _hash_of_inputs(loss: Loss, units: Sequence[Unit], point: int, seed: int) -> str:
    """Returns a hash of what a problem's gradient with a credit depends on.

    The hash covers the tokens of the problem's answers, which of the tokens are trained, their advantages,
    the checkpoint's number `point`, and `seed`. It doesn't cover the weights themselves: hashes are only
    compared within a folder of the run's analysis.
    """
    assert loss.tensors.advantages_N is not None
    digest = hashlib.blake2b(repr((point, seed)).encode(), digest_size=12)
    starts = loss.sequences.starts
    for unit in units:
        [index] = unit  # the index of a single episode
        for row in loss.sequences.rows_of(unit):
            digest.update(loss.sequences.rows[row].content_hash)
        digest.update(loss.tensors.advantages_N[starts[index] : starts[index + 1]].numpy().tobytes())
    return digest.hexdigest()
