"""Log-probs and values by models that are not being trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treetune.models.inputs import ModelInputs
from treetune.models.logprobs import CriticModule, PolicyModule
from treetune.trainers.scoring import Scored, Scorer
from treetune.trainers.tokens import Sequences
from treetune_lab.analyzers.sources import critic_at, policy_at

if TYPE_CHECKING:
    from treetune.runtime.session import Session
    from treetune.vocabulary import TokenIds

SEQUENCES_AT_ONCE = 64


class StoredModels:
    """The models of an experiment after `point` iterations, for the stages of the trainer's preparation.

    Each is loaded when it is first asked. They run as in training on one rank, in the layout that any
    model takes.
    """

    def __init__(self, session: Session, point: int, temperature: float) -> None:
        settings = session.config.trainer
        self.session, self.point = session, point
        self.objective = settings.objective
        alone = replace(settings, layout="padded", sequence_parallel_size=1, tensor_parallel_size=1)
        self.scorer = Scorer(alone, session.ranks, temperature)

    @cached_property
    def policy(self) -> PolicyModule:
        terms = self.objective.terms if self.objective.has_terms else None
        return PolicyModule(policy_at(self.session, self.point), terms=terms)

    def policy_logprobs(self, sequences: Sequences) -> Tensor:
        return self.scorer.logprobs(self.policy, sequences)

    def old_logprobs(self, sequences: Sequences) -> Scored:
        """No analysis compares them with the engine's."""
        return self.scorer.scored(self.policy, sequences, nucleus=None)

    def ref_logprobs(self, sequences: Sequences) -> Tensor:
        return self.scorer.logprobs(PolicyModule(policy_at(self.session, 0)), sequences)

    def values(self, sequences: Sequences) -> Tensor:
        return self.scorer.values(critic_at(self.session, self.point), sequences)


def state_values(critic: CriticModule, device: torch.device, states: Sequence[TokenIds]) -> list[float]:
    """The critic's value of each state, given as all tokens up to it (prompt included)."""
    order = sorted(range(len(states)), key=lambda i: len(states[i]))
    values = [0.0] * len(states)
    with torch.no_grad():
        for start in range(0, len(order), SEQUENCES_AT_ONCE):
            own = order[start : start + SEQUENCES_AT_ONCE]
            rows = [torch.from_numpy(states[i].astype("int64")) for i in own]
            # Padded on the right: under causal attention no state sees what stands behind it.
            input_ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            lengths_B = torch.tensor([len(row) for row in rows])
            last_B = torch.arange(len(rows)) * input_ids_BT.shape[1] + lengths_B - 1
            found_B = critic(ModelInputs(input_ids_BT.to(device), last_B.to(device))).cpu()
            for i, value in zip(own, found_B.tolist(), strict=True):
                values[i] = value
    return values
