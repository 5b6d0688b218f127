"""The trained tokens of an iteration, as flat tensors, and the rows that models run on.

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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treetune.tree import training_rows
from treetune.vocabulary import Episode, Stretch, TokenIds

Unit = tuple[int, ...]
"""Indices that belong together: of one sequence or the two of a pair, of rows that run at once, of a tree."""


@dataclass(frozen=True)
class Row:
    """An input of a model: `length` tokens of the sequence number `sequence`, of which `trained` are
    trained."""

    length: int
    trained: int
    start: int
    """Where its trained tokens begin among the iteration's."""
    sequence: int
    likeness: bytes
    """Equal for rows with the same tokens, of which the same are trained."""
    token_ids: Tensor
    """Prompt and response, int64; None where this rank doesn't run the row."""
    predicting: Tensor
    """Positions (in the row) whose next token is trained, int64; None with `token_ids`."""

    @property
    def end(self) -> int:
        return self.start + self.trained


@dataclass(frozen=True)
class Sequences:
    """All sequences of an iteration. `starts[i]:starts[i+1]` are sequence i's trained tokens, and
    `rows[first_rows[i]:first_rows[i+1]]` the rows that are run for it, in their order."""

    rows: list[Row]
    first_rows: list[int]
    starts: list[int]
    rewards: list[float]
    early_rewards: list[list[tuple[int, float]]]
    """The parts of a sequence's reward that are earned before its end: on which of its trained tokens, and
    how much."""
    scores: list[float]
    groups: list[str]
    """The problem that each answers."""
    domains: list[str]
    """The problems' domains; empty texts where they have none."""

    @staticmethod
    def of(episodes: Iterable[Episode], kept: Container[int] | None = None) -> Sequences:
        """The episodes' sequences, with the tokens of the rows in `kept`; None: of all."""
        result = Sequences([], [0], [0], [], [], [], [], [])
        for number, episode in enumerate(episodes):
            start = result.starts[-1]
            for token_ids, predicting in _rows(episode):
                tokens: tuple[Any, Any] = None, None
                if kept is None or len(result.rows) in kept:
                    tokens = torch.from_numpy(token_ids.astype(np.int64)), torch.from_numpy(predicting)
                likeness = likeness_of(token_ids, predicting)
                row = Row(len(token_ids), len(predicting), start, number, likeness, *tokens)
                result.rows.append(row)
                start = row.end
            if start == result.starts[-1]:
                raise ValueError(f"episode {episode.trajectory} has no token to train on")
            early: list[tuple[int, float]] = []
            if episode.step_rewards:  # a step's reward is earned on its last trained token
                trained_before = np.cumsum(episode.trained)
                steps = zip(episode.step_ends[:-1], episode.step_rewards[:-1], strict=True)
                early = [(int(trained_before[end - 1]) - 1, reward) for end, reward in steps]
            result.starts.append(start)
            result.first_rows.append(len(result.rows))
            result.rewards.append(episode.reward)
            result.early_rewards.append(early)
            result.scores.append(episode.score)
            result.groups.append(episode.group)
            result.domains.append(episode.domain)
        return result

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def n_tokens(self) -> int:
        return self.starts[-1]

    def rows_of(self, unit: Unit) -> Unit:
        """The rows of some sequences, sequence after sequence."""
        return tuple(row for i in unit for row in range(self.first_rows[i], self.first_rows[i + 1]))

    def flat_index(self, rows: Sequence[int]) -> Tensor:
        """The indices of these rows' trained tokens in the iteration's flat tensors."""
        return torch.cat([torch.arange(self.rows[i].start, self.rows[i].end) for i in rows])

    def first_alike(self) -> list[int]:
        """The first row, for each, with the same tokens, of which the same are trained."""
        first: dict[bytes, int] = {}
        return [first.setdefault(row.likeness, index) for index, row in enumerate(self.rows)]

    def once(self) -> list[Unit]:
        """The rows of each sequence without those that are like earlier ones."""
        first = self.first_alike()
        units = [tuple(row for row in self.rows_of((i,)) if first[row] == row) for i in range(len(self))]
        return [unit for unit in units if unit]


def likeness_of(token_ids: TokenIds, predicting: np.ndarray) -> bytes:
    """A hash, equal for rows with the same tokens, of which the same are trained."""
    # The length keeps the two arrays apart. A hash and not the tokens: ranks exchange it for rows they don't
    # hold.
    likeness = hashlib.blake2b(len(token_ids).to_bytes(8, "little"), digest_size=16)
    likeness.update(np.ascontiguousarray(token_ids))
    likeness.update(np.ascontiguousarray(predicting))
    return likeness.digest()


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
    """The sequences that belong together. Raises ValueError where pairs are needed and there are others."""
    if not in_pairs:
        return [(index,) for index in range(len(episodes))]
    # Read once: stored episodes come from a file, and hold all of their tokens.
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
    """Returns one float32 per trained token from one value per response token; None if any episode has
    none."""
    rows = []
    for episode in episodes:
        row = values(episode)
        if row is None:
            return None
        rows.append(row[episode.trained].astype(np.float32))
    return torch.from_numpy(np.concatenate(rows))
