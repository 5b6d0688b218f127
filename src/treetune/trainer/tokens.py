"""Holds the trained tokens of an iteration as flat tensors, and the rows that models compute.

A sequence is a prompt with its response. Only its N trained tokens need log-probs, advantages and values, so
these are flat tensors of shape [N], sequence after sequence, whatever the batches look like. The log-prob of
the token at position t comes from the logits at t - 1.

Losses, minibatches and metrics count sequences, one per episode. Models compute rows. A sequence has one row
or, if its answer has threads, one for each sampled part: everything that the part was sampled after, and the
part itself.

Example: two sequences, with 4 and 2 trained tokens. The second has two threads, so two rows::

    starts      0               4       6
    flat [N]    a0  a1  a2  a3  b0  b1
    rows        row 0           row 1: prompt + b0
                                    row 2: prompt + b1        first_rows = [0, 1, 3]
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from treetune.tree import training_rows
from treetune.vocabulary import Episode, SegmentSpan, TokenIds

Unit = tuple[int, ...]
"""Indices that belong together: of the one or two sequences that the objective compares, of the rows of a
micro-batch, or of the rows of a tree."""


@dataclass(frozen=True)
class Row:
    """An input of a model."""

    length: int
    """The number of tokens."""
    trained: int
    """The number of trained tokens."""
    start: int
    """The index of its first trained token in the flat tensors."""
    sequence: int
    """The number of its sequence."""
    content_hash: bytes
    """A hash that is equal for rows with the same tokens and the same trained tokens."""
    token_ids: Tensor
    """Prompt and response, int64; None if this rank doesn't compute the row."""
    predicting: Tensor
    """The positions in the row whose *next* token is trained, int64; None if `token_ids` are None."""

    @property
    def end(self) -> int:
        return self.start + self.trained


class EarlyReward(NamedTuple):
    """A part of a sequence's reward that is earned before its end."""

    token: int
    """The index of the last trained token before it is earned, among the sequence's trained tokens; -1 if it
    is earned before the first one."""
    reward: float


@dataclass(frozen=True)
class Sequences:
    """All sequences of an iteration.

    Sequence i has the trained tokens ``starts[i]:starts[i+1]`` and the rows
    ``rows[first_rows[i]:first_rows[i+1]]``.
    """

    rows: list[Row]
    first_rows: list[int]
    starts: list[int]
    rewards: list[float]
    """The reward of each sequence, with the bonus of shaping (`Episode.reward`)."""
    early_rewards: list[list[EarlyReward]]
    """For each sequence the parts of its reward that are earned before its end."""
    scores: list[float]
    """The grader's reward of each sequence (`Episode.score`)."""
    groups: list[str]
    """The problem of each sequence."""
    domains: list[str]
    """The problem's domain of each sequence; empty if it has none."""
    of_critic: Sequences | None = None
    """The same sequences as the critic sees them, if it has prompts of its own: the same trained tokens after
    other tokens. None: the critic has no prompts of its own (`critic_has_prompts` is False), or
    `sequences_of_rank` still has to make them."""
    critic_has_prompts: bool = False
    """Whether the critic has prompts of its own for some of the sequences."""
    of_teacher: Sequences | None = None
    """The same sequences as the teacher sees them: the same trained tokens after privileged prompts, with as
    many rows. None: no sequence has such a prompt."""

    @staticmethod
    def empty() -> Sequences:
        """Returns empty `Sequences`, to which sequences are appended."""
        return Sequences(
            rows=[],
            first_rows=[0],  # the first sequence begins at row 0
            starts=[0],  # and at trained token 0
            rewards=[],
            early_rewards=[],
            scores=[],
            groups=[],
            domains=[],
        )

    @staticmethod
    def of(episodes: Collection[Episode], rows_with_tokens: Container[int] | None = None) -> Sequences:
        """Makes the sequences of episodes.

        Args:
            rows_with_tokens: The numbers of the rows that hold their tokens; None for all. If only some rows
                hold them, `of_critic` is left to the caller, since this rank then computes other rows of the
                critic than of the policy.

        Raises:
            ValueError: An episode has no trained token.
        """
        sequences = Sequences.empty()
        critic_has_prompts = teacher_has_prompts = False
        for number, episode in enumerate(episodes):
            critic_has_prompts |= episode.critic_prompt_ids is not None
            teacher_has_prompts |= episode.teacher_prompt_ids is not None
            start = sequences.starts[-1]
            for token_ids, predicting in _split_into_rows(episode):
                has_tokens = rows_with_tokens is None or len(sequences.rows) in rows_with_tokens
                row = Row(
                    length=len(token_ids),
                    trained=len(predicting),
                    start=start,
                    sequence=number,
                    content_hash=content_hash_of(token_ids, predicting),
                    token_ids=torch.from_numpy(token_ids.astype(np.int64)) if has_tokens else None,
                    predicting=torch.from_numpy(predicting) if has_tokens else None,
                )
                sequences.rows.append(row)
                start = row.end
            # `_split_into_rows` yields only rows with a trained token, and here it yielded none.
            if start == sequences.starts[-1]:
                raise ValueError(f"episode {episode.trajectory} has no token to train on")
            sequences.starts.append(start)
            sequences.first_rows.append(len(sequences.rows))
            sequences.rewards.append(episode.reward)
            sequences.early_rewards.append(_early_rewards(episode))
            sequences.scores.append(episode.score)
            sequences.groups.append(episode.group)
            sequences.domains.append(episode.domain)
        if teacher_has_prompts:
            # The teacher runs over the same rows in the same micro-batches as the policy, so this rank needs
            # the tokens of the same rows.
            sequences = replace(
                sequences, of_teacher=Sequences.of(EpisodesOfTeacher(episodes), rows_with_tokens)
            )
        if not critic_has_prompts:
            return sequences
        of_critic = Sequences.of(EpisodesOfCritic(episodes)) if rows_with_tokens is None else None
        return replace(sequences, of_critic=of_critic, critic_has_prompts=True)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def n_tokens(self) -> int:
        return self.starts[-1]

    def rows_of(self, sequences: Unit) -> Unit:
        """Returns the numbers of the rows of the sequences with these numbers, sequence after sequence."""
        rows: list[int] = []
        for sequence in sequences:
            rows += range(self.first_rows[sequence], self.first_rows[sequence + 1])
        return tuple(rows)

    def flat_index(self, rows: Sequence[int]) -> Tensor:
        """Returns the indices of the rows' trained tokens in the flat tensors."""
        return torch.cat([torch.arange(self.rows[i].start, self.rows[i].end) for i in rows])

    def first_equal_rows(self) -> list[int]:
        """Returns for each row the first row of the same `content_hash`, which may be the row itself."""
        first_row_of_hash: dict[bytes, int] = {}
        first_equal = []
        for index, row in enumerate(self.rows):
            first_equal.append(first_row_of_hash.setdefault(row.content_hash, index))
        return first_equal

    def distinct_rows(self) -> list[Unit]:
        """Returns a unit for each sequence: its rows, without rows that are equal to an earlier row.

        A sequence has no unit if all of its rows are equal to earlier rows. Rows are equal if they have the
        same tokens and the same trained tokens.
        """
        first_equal = self.first_equal_rows()
        units = []
        for sequence in range(len(self)):
            unit = tuple(row for row in self.rows_of((sequence,)) if first_equal[row] == row)
            if unit:
                units.append(unit)
        return units


class _EpisodesOfModel(Collection[Episode], ABC):
    """Episodes as they are seen by a model that has prompts of its own for some of them.

    Like stored episodes, they are made again in every loop, so that they are never in memory as a whole.
    """

    def __init__(self, episodes: Collection[Episode]) -> None:
        self._episodes = episodes

    @abstractmethod
    def prompt_of(self, episode: Episode) -> TokenIds | None:
        """Returns the model's own prompt; None if it sees the policy's."""

    @override
    def __len__(self) -> int:
        return len(self._episodes)

    @override
    def __iter__(self) -> Iterator[Episode]:
        """Yields the episodes with the model's prompts in place of the policy's."""
        for episode in self._episodes:
            if episode.critic_prompt_ids is None and episode.teacher_prompt_ids is None:
                yield episode
                continue
            prompt_ids = self.prompt_of(episode)
            if prompt_ids is None:
                prompt_ids = episode.prompt_ids
            # The prompts of critic and teacher are dropped, since `Sequences.of` would make further sequences
            # for them.
            yield replace(episode, prompt_ids=prompt_ids, critic_prompt_ids=None, teacher_prompt_ids=None)

    @override
    def __contains__(self, episode: object) -> bool:
        return any(episode == other for other in self)


class EpisodesOfCritic(_EpisodesOfModel):
    """Episodes as the critic sees them: if an episode has a prompt for the critic, this prompt replaces the
    policy's."""

    @override
    def prompt_of(self, episode: Episode) -> TokenIds | None:
        return episode.critic_prompt_ids


class EpisodesOfTeacher(_EpisodesOfModel):
    """Episodes as the teacher sees them: if an episode has a privileged prompt, this prompt replaces the
    policy's."""

    @override
    def prompt_of(self, episode: Episode) -> TokenIds | None:
        return episode.teacher_prompt_ids


def content_hash_of(token_ids: TokenIds, predicting: np.ndarray) -> bytes:
    """Returns a hash that is equal for rows with the same tokens and the same trained tokens.

    The function returns a hash, because ranks exchange it to compare rows whose tokens they don't hold.

    Args:
        predicting: The positions whose next token is trained.
    """
    # The length is hashed first, since two different pairs of arrays may have the same bytes when they are
    # joined.
    digest = hashlib.blake2b(len(token_ids).to_bytes(8, "little"), digest_size=16)
    digest.update(np.ascontiguousarray(token_ids))
    digest.update(np.ascontiguousarray(predicting))
    return digest.digest()


def _early_rewards(episode: Episode) -> list[EarlyReward]:
    """Returns the rewards of all steps but the last. The rest of the sequence's reward is earned at its
    end."""
    if not episode.step_rewards:
        return []
    trained_so_far = np.cumsum(episode.trained)
    early = []
    for step_end, reward in zip(episode.step_ends[:-1], episode.step_rewards[:-1], strict=True):
        # The reward is earned at the last trained token up to the step's end: token -1 if there is none yet.
        n_trained = int(trained_so_far[step_end - 1])
        early.append(EarlyReward(token=n_trained - 1, reward=reward))
    return early


def _split_into_rows(episode: Episode) -> Iterator[tuple[TokenIds, np.ndarray]]:
    """Yields the token ids and the predicting positions of each row of an episode; see `training_rows`.

    A predicting position is one whose next token is trained. The episode's stretches are consecutive pieces
    of its response, each in one thread; without them, the whole response is one piece.

    Raises:
        ValueError: The stretches don't cover the response.
    """
    stretches = episode.stretches or (SegmentSpan(len(episode.response_ids), ()),)
    ends = [0, *(stretch.end for stretch in stretches)]
    # An empty stretch, which ends where it begins, is no error: it gets no row.
    is_in_order = all(begin <= end for begin, end in itertools.pairwise(ends))
    if ends[-1] != len(episode.response_ids) or not is_in_order:
        raise ValueError(
            f"episode {episode.trajectory} has stretches that end at {ends[1:]}, and"
            f" {len(episode.response_ids)} response tokens: each must end after the one before, and the last"
            " one at the end of the response"
        )
    parts = [
        (stretch.branch, episode.response_ids[begin:end], episode.trained[begin:end])
        for stretch, (begin, end) in zip(stretches, itertools.pairwise(ends), strict=True)
    ]
    yield from training_rows(episode.prompt_ids, parts)


def units_of(episodes: Collection[Episode], in_pairs: bool) -> list[Unit]:
    """Groups the sequences into units: single sequences, or the pairs that a preference objective compares.

    Raises:
        ValueError: Pairs are needed, and an episode is not half of one.
    """
    if not in_pairs:
        return [(index,) for index in range(len(episodes))]
    # Episodes are read once only: stored ones come from a file, with all of their tokens.
    pair_halves = [(episode.pair, episode.chosen, episode.trajectory) for episode in episodes]
    for index, (pair, chosen, trajectory) in enumerate(pair_halves):
        neighbour = index ^ 1  # 0 and 1, 2 and 3, …
        pair_of_neighbour = pair_halves[neighbour][0] if neighbour < len(pair_halves) else None
        is_chosen_expected = index % 2 == 0  # the first answer of a pair is the better one
        if pair is None or pair_of_neighbour != pair or chosen != is_chosen_expected:
            raise ValueError(
                f"episode {trajectory} is not one of a pair, better answer first, and the objective"
                " compares answers: choose the selection 'preference_pairs'"
            )
    return [(index, index + 1) for index in range(0, len(pair_halves), 2)]


def flatten_trained(
    episodes: Iterable[Episode], values: Callable[[Episode], np.ndarray | None]
) -> Tensor | None:
    """Returns the values of the trained tokens of all episodes, float32 of shape [N]. Returns None if an
    episode has no values.

    Args:
        values: Returns an episode's values, one for each response token, or None if it has none.
    """
    values_by_episode = []
    for episode in episodes:
        values_of_episode = values(episode)
        if values_of_episode is None:
            return None
        values_by_episode.append(values_of_episode[episode.trained].astype(np.float32))
    return torch.from_numpy(np.concatenate(values_by_episode))
