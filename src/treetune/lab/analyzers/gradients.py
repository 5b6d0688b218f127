"""Computes gradients of stored episodes in plain PyTorch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from treetune.store.files import whole_file
from treetune.trainer.base import Layout, Trainer
from treetune.trainer.batches import MicroBatch, Minibatch, micro_batches
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

    def gradients(self, members: Sequence[Unit]) -> tuple[float, list[Tensor]]:
        """Returns the loss over the units `members` as one minibatch, and its gradient for each of the
        policy's parameters."""
        objective, scorer, policy = self.settings.objective, self.models.scorer, self.models.policy
        policy.zero_grad(set_to_none=True)
        minibatch = Minibatch.of(self.sequences, members, objective)
        total = 0.0
        if minibatch.units:
            # `whole`: whether all rows of a unit (a sequence or a pair) must be in the same micro-batch.
            units, whole = minibatch.units, minibatch.keep_units
            settings, ranks = scorer.settings, scorer.ranks
            teacher = self.models.teacher if isinstance(objective, TeacherObjective) else None
            for batch in micro_batches(
                self.sequences,
                units,
                settings,
                ranks,
                keep_units=whole,
                with_teacher=teacher is not None,
            ):
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


SKETCH = 4096
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
        credits: for each credit, the episodes of the same answers in the same order. The first credit trains
            all tokens that any of them trains.
        seed: the seed of the projection.
        store: a folder for the gradients of each problem with each credit, from which an interrupted call
            continues.

    Returns:
        An array of shape [credits, problems, `SKETCH`], with problems in the order of their first answers. A
        row of `SKETCH` numbers is the projection of a gradient, its sketch.
    """
    import numpy as np
    import torch

    settings = replace(
        session.config.trainer, objective=ClippedPolicyGradient(), advantage_normalisation="none"
    )
    # If answers are trained as prefix trees, then the prompt of a problem's answers is computed once.
    layout: Layout = "tree" if session.config.trainer.layout == "tree" else "padded"
    losses = []
    for episodes in credits:
        same_tokens = _with_trained_tokens_of(credits[0], episodes)
        # `Outcome` leaves no values to the trainer, so the episodes' own advantages are used.
        losses.append(Loss(session, point, same_tokens, settings, Outcome(), layout))
    sequences, models = losses[0].sequences, losses[0].models
    parameters, scorer = list(models.policy.parameters()), models.scorer
    generator, size = torch.Generator(), sum(parameter.numel() for parameter in parameters)
    generator.manual_seed(derive_seed(seed, "sketch") % 2**63)
    bins_D = torch.randint(SKETCH, (size,), generator=generator)
    signs_D = torch.randint(2, (size,), generator=generator, dtype=torch.int8) * 2 - 1
    units_by_problem: dict[str, list[Unit]] = {}
    for index, episode in enumerate(credits[0]):
        units_by_problem.setdefault(episode.group, []).append((index,))
    sketches_CPS = torch.zeros(len(credits), len(units_by_problem), SKETCH)
    for number, members in enumerate(units_by_problem.values()):
        files = []  # one for each credit, so that another credit can be added to those that are stored
        for loss in losses:
            name = _digest(loss, members, point, seed)
            files.append(None if store is None else store / f"{name}.npy")
        missing = []
        for index, file in enumerate(files):
            if file is not None and file.is_file():
                sketches_CPS[index, number] = torch.from_numpy(np.load(file))
            else:
                missing.append(index)
        minibatch = Minibatch.of(sequences, members, settings.objective)
        batches: Iterator[MicroBatch] = iter(())
        if missing:
            batches = micro_batches(
                sequences, minibatch.units, scorer.settings, scorer.ranks, keep_units=False
            )
        for batch in batches:
            # One forward pass serves all credits: only the weights of the log-probs differ.
            logprobs_N, *_ = models.policy(batch.inputs, scorer.temperature)
            for index in missing:
                advantages_N = losses[index].tensors.advantages_N
                assert advantages_N is not None
                # The sign is that of a loss: the gradients of all credits point the opposite way.
                weights_N = -(minibatch.weights_N * advantages_N)[batch.flat_index_N]
                weights_N = weights_N.to(logprobs_N)
                if weights_N.any():
                    parts = torch.autograd.grad(logprobs_N, parameters, weights_N, retain_graph=True)
                    sketches_CPS[index, number] += _project(parts, bins_D, signs_D)
        for index in missing:
            file = files[index]
            if file is not None:
                with whole_file(file, "wb") as out:
                    np.save(out, sketches_CPS[index, number].numpy())
        show(number + 1, len(units_by_problem))
    return sketches_CPS.numpy()


def _with_trained_tokens_of(reference: Sequence[Episode], episodes: Sequence[Episode]) -> list[Episode]:
    """Returns the episodes, changed so that they train the same tokens as the reference.

    A token that only the reference trains gets the advantage 0. The gradient is then the same as if the token
    were not trained.
    """
    same_tokens = []
    for reference_episode, episode in zip(reference, episodes, strict=True):
        assert episode.advantages is not None
        has_others = (episode.trained & ~reference_episode.trained).any()
        assert not has_others, "the first credit trains all tokens that any of them trains"
        advantages = episode.advantages * episode.trained
        same_tokens.append(replace(episode, trained=reference_episode.trained, advantages=advantages))
    return same_tokens


def _project(parts: Sequence[Tensor], bins_D: Tensor, signs_D: Tensor) -> Tensor:
    """Returns the projection of a gradient: for each bin, the sum of the gradient's numbers in the bin, each
    times its sign.

    The gradient is given in parts, one for each parameter. Projecting a part at a time needs less memory than
    projecting the whole gradient."""
    import torch

    sketch_S = torch.zeros(SKETCH, dtype=torch.float64)
    start = 0
    for part in parts:
        end = start + part.numel()
        sketch_S.index_add_(0, bins_D[start:end], part.flatten().double().cpu() * signs_D[start:end])
        start = end
    return sketch_S


def _digest(loss: Loss, members: Sequence[Unit], point: int, seed: int) -> str:
    """Returns a hash of what a problem's gradient with a credit depends on.

    The hash covers the tokens of the problem's answers, which of the tokens are trained, their advantages,
    the checkpoint's number `point`, and `seed`. It doesn't cover the weights themselves.
    """
    assert loss.tensors.advantages_N is not None
    digest = hashlib.blake2b(repr((point, seed)).encode(), digest_size=12)
    starts = loss.sequences.starts
    for (index,) in members:  # a member is the index of a single episode
        for row in loss.sequences.rows_of((index,)):
            digest.update(loss.sequences.rows[row].content_hash)
        digest.update(loss.tensors.advantages_N[starts[index] : starts[index + 1]].numpy().tobytes())
    return digest.hexdigest()
