"""The trained tokens of an iteration, as flat tensors, and the tensors that models run on.

A sequence is prompt + response. The token at position t is predicted at t-1, so only those
positions need a log-prob, and every quantity per token (log-probs, advantages, values) is kept for
trained tokens alone: N of them, sequence after sequence, whatever the batches look like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treetune.trainers.batching import Layout, Unit
from treetune.vocabulary import Episode


@dataclass(frozen=True)
class Sequences:
    """All sequences of an iteration. `starts[i]:starts[i+1]` are sequence i's trained tokens."""

    token_ids: list[Tensor]
    predicting: list[Tensor]
    """Positions (in the sequence) whose next token is trained, int64."""
    starts: list[int]
    rewards: list[float]
    scores: list[float]

    @staticmethod
    def of(episodes: Sequence[Episode]) -> Sequences:
        token_ids, predicting, starts = [], [], [0]
        for episode in episodes:
            trained = torch.tensor(episode.trained, dtype=torch.bool).nonzero().squeeze(-1)
            if not len(trained):
                raise ValueError(f"episode {episode.trajectory} has no token to train on")
            token_ids.append(torch.tensor(episode.prompt_ids + episode.response_ids))
            predicting.append(trained + len(episode.prompt_ids) - 1)
            starts.append(starts[-1] + len(trained))
        rewards, scores = [e.reward for e in episodes], [e.score for e in episodes]
        return Sequences(token_ids, predicting, starts, rewards, scores)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.token_ids]

    @property
    def n_tokens(self) -> int:
        return self.starts[-1]

    def trained_tokens(self, index: int) -> int:
        return self.starts[index + 1] - self.starts[index]

    def flat_index(self, indices: Sequence[int]) -> Tensor:
        """Where the trained tokens of these sequences lie in the iteration's flat tensors."""
        return torch.cat([torch.arange(self.starts[i], self.starts[i + 1]) for i in indices])

    def first_alike(self) -> list[int]:
        """For every sequence the first one with the same tokens, of which the same are trained."""
        places: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        return [
            places.setdefault((tuple(ids.tolist()), tuple(predicting.tolist())), index)
            for index, (ids, predicting) in enumerate(zip(self.token_ids, self.predicting, strict=True))
        ]


def units_of(episodes: Sequence[Episode], in_pairs: bool) -> list[Unit]:
    """Which rows run together. Raises ValueError where pairs are needed and there are others."""
    if not in_pairs:
        return [(index,) for index in range(len(episodes))]
    for index, episode in enumerate(episodes):
        partner = episodes[index ^ 1] if index ^ 1 < len(episodes) else None
        if (
            partner is None
            or episode.pair is None
            or partner.pair != episode.pair
            or episode.chosen is not (index % 2 == 0)
        ):
            raise ValueError(
                f"episode {episode.trajectory} is not one of a pair, better answer first, and the objective"
                " compares answers: choose the selection 'preference_pairs'"
            )
    return [(index, index + 1) for index in range(0, len(episodes), 2)]


def flat_of_trained(
    episodes: Sequence[Episode], values: Callable[[Episode], Sequence[float] | None]
) -> Tensor | None:
    """One float32 per trained token from one value per response token; None if any episode has none."""
    rows = []
    for episode in episodes:
        row = values(episode)
        if row is None:
            return None
        rows.append(torch.tensor(row, dtype=torch.float32)[torch.tensor(episode.trained)])
    return torch.cat(rows)


@dataclass(frozen=True)
class MicroBatch:
    """What a model runs on at once.

    `flat_N` are the places of its trained tokens in the iteration's flat tensors. A dummy
    (`real` false) repeats a sequence of its rank's so that all ranks run equally often; its
    results are dropped and its loss weighs nothing.
    """

    input_ids_BT: Tensor
    position_ids_BT: Tensor | None
    positions_N: Tensor
    labels_N: Tensor
    flat_N: Tensor
    trained_tokens: tuple[int, ...]
    """How many each of its sequences has."""
    real: bool = True
    most_positions: int = 0
    """The largest number of trained tokens that any rank has at this turn."""
    share: float = 1.0
    """What this rank's loss on it counts: one over the ranks that run it together; 0 of a dummy's."""


def micro_batch(
    sequences: Sequences,
    indices: Sequence[int],
    layout: Layout,
    real: bool,
    device: torch.device,
    ranks: int = 1,
    most_positions: int = 0,
) -> MicroBatch:
    """The tensors of one micro-batch, which so many `ranks` run together, while others have others.

    ``padded``: right padding and no attention mask. Under causal attention no real token sees a
    token to its right, so the padding never matters. ``packed``: one row, with position ids that
    start again at every sequence, from which transformers keeps them apart.
    """
    rows = [sequences.token_ids[i] for i in indices]
    lengths = torch.tensor([len(row) for row in rows])
    if layout == "padded":
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        position_ids = None
        offsets = torch.arange(len(rows)) * input_ids.shape[1]
    else:
        input_ids = torch.cat(rows)[None]
        position_ids = torch.cat([torch.arange(len(row)) for row in rows])[None]
        offsets = lengths.cumsum(0) - lengths
    predicting = [sequences.predicting[i] for i in indices]
    return MicroBatch(
        input_ids_BT=input_ids.to(device),
        position_ids_BT=None if position_ids is None else position_ids.to(device),
        positions_N=torch.cat([p + offset for p, offset in zip(predicting, offsets, strict=True)]).to(device),
        labels_N=torch.cat([row[p + 1] for row, p in zip(rows, predicting, strict=True)]).to(device),
        flat_N=sequences.flat_index(indices),
        trained_tokens=tuple(sequences.trained_tokens(i) for i in indices),
        real=real,
        most_positions=most_positions,
        share=real / ranks,
    )
