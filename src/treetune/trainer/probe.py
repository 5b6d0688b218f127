"""Verifies before training that the trainer computes the same log-probs as the model itself.

The trainer runs a model in its own way: the backbone in training mode, rows padded or packed, the head on a
few positions at a time. A user may train any architecture of transformers, and for some of them one of these
steps was wrong. So the trainer's log-probs of a few short rows are compared with the model's own at the
start. That takes a few short forward passes, leaves the random state as it was, and changes no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treetune.architectures import probe_rows
from treetune.models.logprobs import ModelInputs, probe_limit
from treetune.models.lora import refusing_idle_adapters
from treetune.trainer.base import Trainer
from treetune.trainer.deepspeed_model import DeepSpeedModel
from treetune.trainer.ranks import Ranks
from treetune.trainer.scoring import Scorer
from treetune.trainer.tokens import Row, Sequences, content_hash_of

PROBE_LENGTHS = (12, 23, 17)
"""The lengths of the rows. Each group of ranks gets a row of each length, so that every group has several
rows in a batch."""


def refuse_wrong_trainer_logprobs(policy: DeepSpeedModel, settings: Trainer, ranks: Ranks) -> None:
    """Refuses a model of which the trainer computes other log-probs than the model itself. Collective.

    Raises:
        ValueError: The log-probs of the same tokens differ by more than rounding explains: between two
            computations, or between the trainer and the model's own forward pass, or between a row alone and
            rows together in the configured layout.
    """
    model: Any = policy.module.model
    name = type(model).__name__
    dtype = next(parameter.dtype for parameter in policy.module.parameters())
    limit = probe_limit(dtype, ranks.device)
    data_parallel_size = ranks.world_size // settings.sequence_parallel_size
    rows = [torch.tensor(row) for row in probe_rows(model.config, PROBE_LENGTHS)]
    scorer = Scorer(settings, ranks, temperature=1.0)

    def compute_alone(by_model_itself: bool = False) -> Tensor:
        """Returns the log-probs of all tokens but the first of each row, each row by itself on every rank."""
        return torch.cat(
            [_logprobs_of_row(policy, row_T.to(ranks.device), by_model_itself) for row_T in rows]
        )

    # The random state stays as it was, so that the probe doesn't change the training.
    gpus = [ranks.device] if ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        with refusing_idle_adapters(model):  # one pass is enough to see which layers the model calls
            alone_N = compute_alone()
        again_N = compute_alone()
        _refuse_large_gap(
            alone_N - again_N,
            limit,
            f"{name} computes different log-probs of the same tokens each time, so that it has randomness in"
            " training mode (dropout, noise, skipped layers) that was not turned off",
            "set it to 0 in the model's config.json",
        )
        # With sequence parallelism, the model's own forward pass doesn't work: its attention needs all ranks.
        if settings.sequence_parallel_size == 1:
            _refuse_large_gap(
                alone_N - compute_alone(by_model_itself=True),
                limit,
                f"the trainer's log-probs differ from those of {name}'s own forward pass, which the trainer"
                " doesn't reproduce",
                "train another architecture, or report this one",
            )
        # With a copy for each group of ranks, every group has several rows in a batch.
        together_N = scorer.logprobs(policy, _make_sequences(rows, copies=data_parallel_size))
        _refuse_large_gap(
            together_N - alone_N.repeat(data_parallel_size),
            limit,
            f"{name}'s log-probs of a row depend on the other rows of its batch (trainer.layout"
            f" {settings.layout!r})",
            "set trainer.layout to 'padded'"
            if settings.layout != "padded"
            else "set trainer.sequences_per_micro_batch to 1, so that each row is alone",
        )


def _logprobs_of_row(policy: DeepSpeedModel, row_T: Tensor, by_model_itself: bool) -> Tensor:
    """Returns the log-probs of all tokens of a row but the first, as the trainer computes them, or with
    `by_model_itself` as the model's own forward pass does."""
    predicting = torch.arange(len(row_T) - 1, device=row_T.device)
    inputs = ModelInputs(
        input_ids_BT=row_T[None],
        positions_N=predicting,
        labels_N=row_T[1:],
        max_positions=len(predicting),
    )
    with torch.no_grad():
        logprobs_N, *_ = policy(inputs, temperature=1.0, whole=by_model_itself)
    return logprobs_N.float().cpu()


def _refuse_large_gap(gap_N: Tensor, limit: float, problem: str, remedy: str) -> None:
    """Raises ValueError if the mean gap exceeds the limit."""
    gap = float(gap_N.abs().mean())
    if not gap <= limit:  # NaN is refused, too
        raise ValueError(
            f"{problem}: they differ by {gap:.2g} nats a token in the mean, and rounding explains {limit:g}."
            f" Remedy: {remedy}"
        )


def _make_sequences(rows: Sequence[Tensor], copies: int) -> Sequences:
    """Returns several copies of the rows as sequences, of which all tokens but the first are trained.

    All sequences belong to one problem, since the layout 'tree' merges the rows of a problem. So the probe
    covers this merging, too.
    """
    sequences = Sequences.empty()
    for number in range(copies * len(rows)):
        row_T = rows[number % len(rows)]
        predicting = torch.arange(len(row_T) - 1)  # the tokens that predict a trained one: all but the last
        # The number makes the hash of each copy different, since rows with equal hashes are computed once.
        content_hash = content_hash_of(row_T.numpy(), predicting.numpy()) + number.to_bytes(4, "little")
        start = sequences.starts[-1]
        row = Row(
            length=len(row_T),
            trained=len(predicting),
            start=start,
            sequence=number,
            content_hash=content_hash,
            token_ids=row_T,
            predicting=predicting,
        )
        sequences.rows.append(row)
        sequences.starts.append(start + len(predicting))
        sequences.first_rows.append(number + 1)  # each sequence has one row
        sequences.rewards.append(0.0)
        sequences.early_rewards.append([])
        sequences.scores.append(0.0)
        sequences.groups.append("probe")
        sequences.domains.append("")
    return sequences
