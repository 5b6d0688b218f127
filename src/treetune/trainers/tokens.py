"""The trained tokens of an iteration, as flat tensors, and the tensors that models run on.

A sequence is prompt + response. The token at position t is predicted at t-1, so only those
positions need a log-prob, and every quantity per token (log-probs, advantages, values) is kept for
trained tokens alone: N of them, sequence after sequence, whatever the batches look like.

What is counted and what is run are two things. Losses, minibatches and metrics count sequences: one
per episode. Models run rows: one per sequence, or, where an answer has threads, one for each part of
it that was sampled in one go, behind all that it was sampled after.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treetune.trainers.batching import Unit
from treetune.tree import training_rows
from treetune.vocabulary import Episode, Stretch, TokenIds


@dataclass(frozen=True)
class Row:
    """What a model runs over, of the sequence number `sequence`: so many tokens (`length`), of which so many
    are `trained`. Rows of one `likeness` have the same tokens, of which the same are trained."""

    length: int
    trained: int
    start: int
    """Where its trained tokens begin among the iteration's."""
    sequence: int
    likeness: bytes
    tokens: tuple[Tensor, Tensor] | None
    """None where this rank doesn't run it."""

    @property
    def end(self) -> int:
        return self.start + self.trained

    @property
    def token_ids(self) -> Tensor:
        """int64."""
        return self._tokens[0]

    @property
    def predicting(self) -> Tensor:
        """Positions (in the row) whose next token is trained, int64."""
        return self._tokens[1]

    @property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        assert self.tokens is not None, f"a row of sequence {self.sequence} is run here and was not kept"
        return self.tokens


@dataclass(frozen=True)
class Sequences:
    """All sequences of an iteration. `starts[i]:starts[i+1]` are sequence i's trained tokens, and
    `rows[first_rows[i]:first_rows[i+1]]` what is run for them, in their order."""

    rows: list[Row]
    first_rows: list[int]
    starts: list[int]
    rewards: list[float]
    rewards_on_the_way: list[list[tuple[int, float]]]
    """What of a sequence's reward is earned before its end: on which of its trained tokens, and how much."""
    scores: list[float]
    groups: list[str]
    """The problem that each answers."""
    domains: list[str]
    """Of the problems; empty texts where they have none."""

    @staticmethod
    def of(episodes: Iterable[Episode], kept: Container[int] | None = None) -> Sequences:
        """With the tokens of the rows in `kept`; None: of all."""
        rows: list[Row] = []
        first_rows, starts = [0], [0]
        rewards: list[float] = []
        on_the_way: list[list[tuple[int, float]]] = []
        scores: list[float] = []
        groups: list[str] = []
        domains: list[str] = []
        for number, episode in enumerate(episodes):
            start = starts[-1]
            for token_ids, predicting in _rows(episode):
                rows.append(_row(token_ids, predicting, start, number, kept is None or len(rows) in kept))
                start = rows[-1].end
            if start == starts[-1]:
                raise ValueError(f"episode {episode.trajectory} has no token to train on")
            starts.append(start)
            first_rows.append(len(rows))
            rewards.append(episode.reward)
            on_the_way.append(_on_the_way(episode))
            scores.append(episode.score)
            groups.append(episode.group)
            domains.append(episode.domain)
        return Sequences(rows, first_rows, starts, rewards, on_the_way, scores, groups, domains)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [row.length for row in self.rows]

    @property
    def n_tokens(self) -> int:
        return self.starts[-1]

    def trained_tokens(self, index: int) -> int:
        return self.starts[index + 1] - self.starts[index]

    def rows_of(self, unit: Unit) -> Unit:
        """The rows of some sequences, sequence after sequence."""
        return tuple(row for i in unit for row in range(self.first_rows[i], self.first_rows[i + 1]))

    def flat_index(self, rows: Sequence[int]) -> Tensor:
        """Where the trained tokens of these rows lie in the iteration's flat tensors."""
        return torch.cat([torch.arange(self.rows[i].start, self.rows[i].end) for i in rows])

    def first_alike(self) -> list[int]:
        """For every row the first one with the same tokens, of which the same are trained."""
        places: dict[bytes, int] = {}
        return [places.setdefault(row.likeness, index) for index, row in enumerate(self.rows)]

    def once(self) -> list[Unit]:
        """The rows of each sequence but for those that are like earlier ones."""
        first = self.first_alike()
        units = [tuple(row for row in self.rows_of((i,)) if first[row] == row) for i in range(len(self))]
        return [unit for unit in units if unit]


def likeness_of(token_ids: TokenIds, predicting: np.ndarray) -> bytes:
    """Equal for rows with the same tokens, of which the same are trained."""
    likeness = hashlib.blake2b(len(token_ids).to_bytes(8, "little"), digest_size=16)
    likeness.update(np.ascontiguousarray(token_ids))
    likeness.update(np.ascontiguousarray(predicting))
    return likeness.digest()


def _row(token_ids: TokenIds, predicting: np.ndarray, start: int, sequence: int, kept: bool) -> Row:
    likeness = likeness_of(token_ids, predicting)
    tokens = torch.from_numpy(token_ids.astype(np.int64)), torch.from_numpy(predicting)
    length, trained = len(token_ids), len(predicting)
    return Row(length, trained, start, sequence, likeness, tokens if kept else None)


def _on_the_way(episode: Episode) -> list[tuple[int, float]]:
    """A step's reward is earned on its last trained token."""
    if not episode.step_rewards:
        return []
    trained_before = np.cumsum(episode.trained)
    steps = zip(episode.step_ends[:-1], episode.step_rewards[:-1], strict=True)
    return [(int(trained_before[end - 1]) - 1, reward) for end, reward in steps]


def _rows(episode: Episode) -> Iterator[tuple[TokenIds, np.ndarray]]:
    """Token ids and predicting positions of each row of an episode; see `training_rows`.

    Raises ValueError where the stretches don't make up the response.
    """
    stretches = episode.stretches or (Stretch(len(episode.response_ids), ()),)
    ends = [0, *(stretch.end for stretch in stretches)]
    if ends[-1] != len(episode.response_ids) or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(
            f"episode {episode.trajectory} has stretches that end at {ends[1:]}, and"
            f" {len(episode.response_ids)} response tokens: each has to end behind the one before, and the"
            " last at the response's end"
        )
    parts = [
        (stretch.branch, episode.response_ids[begin:end], episode.trained[begin:end])
        for stretch, (begin, end) in zip(stretches, itertools.pairwise(ends), strict=True)
    ]
    yield from training_rows(episode.prompt_ids, parts)


def units_of(episodes: Collection[Episode], in_pairs: bool) -> list[Unit]:
    """Which sequences belong together. Raises ValueError where pairs are needed and there are others."""
    if not in_pairs:
        return [(index,) for index in range(len(episodes))]
    sides = [(episode.pair, episode.chosen, episode.trajectory) for episode in episodes]
    for index, (pair, chosen, trajectory) in enumerate(sides):
        partner = sides[index ^ 1][0] if index ^ 1 < len(sides) else None
        if pair is None or partner != pair or chosen is not (index % 2 == 0):
            raise ValueError(
                f"episode {trajectory} is not one of a pair, better answer first, and the objective"
                " compares answers: choose the selection 'preference_pairs'"
            )
    return [(index, index + 1) for index in range(0, len(sides), 2)]


def flat_of_trained(
    episodes: Iterable[Episode], values: Callable[[Episode], np.ndarray | None]
) -> Tensor | None:
    """One float32 per trained token from one value per response token; None if any episode has none."""
    rows = []
    for episode in episodes:
        row = values(episode)
        if row is None:
            return None
        rows.append(row[episode.trained].astype(np.float32))
    return torch.from_numpy(np.concatenate(rows))
