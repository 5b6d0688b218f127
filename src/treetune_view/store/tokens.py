"""One answer token by token: ids, texts, numbers that are known of each; its steps with their credit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treetune.rollouts.storage import TOKENS, read_tokens
from treetune.vocabulary import Branch, Episode, Trajectory, are_sampled
from treetune_view.report.answer_steps import Step, steps_of
from treetune_view.store.batches import walk
from treetune_view.store.catalogue import stat_of
from treetune_view.store.whole_answers import Answer


@dataclass(frozen=True)
class Tokens:
    """Columns of one entry per response token. `numbers` are those that can be shown and coloured by, by
    name; NaN where a token has none. `texts` are None where the experiment stored no texts of tokens."""

    ids: np.ndarray
    texts: Sequence[str] | None
    sampled: np.ndarray
    steps: Sequence[Step]
    branches: Sequence[Branch]
    versions: Sequence[int | None]
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.ids)


OF_CREDIT = "advantage of credit"
"""As it is stored, where ``advantage`` is what was made of it."""


def tokens_of(run: Path, answer: Answer, config: Mapping[str, Any]) -> Tokens | None:
    """With the advantages that trained, as far as the run's `config` and what is stored say these. None for
    an answer of which only the text is stored, as evaluations'."""
    trajectory, episode = answer.trajectory, own_episode(answer)
    if trajectory is None and episode is None:
        return None
    ids = trajectory.response_ids if trajectory is not None else episode.response_ids  # type: ignore[union-attr]
    numbers: dict[str, np.ndarray] = {}
    if episode is not None and episode.advantages is not None:
        given = np.where(episode.trained, episode.advantages, np.nan)
        trained = _normalised(given, answer, episode, config)
        numbers |= {"advantage": given} if trained is None else {"advantage": trained, OF_CREDIT: given}
    logprobs = _logprobs(trajectory, episode)
    if logprobs is not None:
        numbers["log-prob"] = logprobs
    if episode is not None:
        numbers |= _signals(answer, episode)
    return Tokens(
        ids=ids,
        texts=texts_of(run, ids),
        sampled=are_sampled(trajectory.segments) if trajectory is not None else episode.trained,  # type: ignore[union-attr]
        steps=_steps(trajectory, episode),
        branches=_by_token(trajectory, lambda segment: segment.branch) or [()] * len(ids),
        versions=_by_token(trajectory, lambda segment: segment.policy_version) or [None] * len(ids),
        numbers=numbers,
    )


def _normalised(
    given: np.ndarray, answer: Answer, episode: Episode, config: Mapping[str, Any]
) -> np.ndarray | None:
    """Advantages as `trainers.preparation` normalises them; None where it doesn't, or where they have a KL
    penalty, which is not stored."""
    trainer = config.get("trainer") or {}
    objective, how = trainer.get("objective") or {}, trainer.get("advantage_normalisation")
    penalised = objective.get("kl_placement", "loss") != "loss" and objective.get("kl_coef") != 0
    path = answer.source.episodes
    if how not in ("whiten", "scale") or penalised or path is None:
        return None
    everything = _spreads(path, stat_of(path))
    domains = [episode.domain] if trainer.get("normalise_by_domain") else list(everything)
    count, total, squares = np.sum([everything[one] for one in domains], axis=0)
    if count < 2:
        return None
    mean = total / count
    deviation = np.sqrt(max(0.0, squares - count * mean**2) / (count - 1) + 1e-8)
    return ((given - (mean if how == "whiten" else 0.0)) / deviation).astype(np.float32)


@functools.lru_cache(maxsize=64)
def _spreads(path: Path, stat: object) -> dict[str, tuple[int, float, float]]:
    """Of each domain's trained tokens: how many, the sum of their advantages, and that of the squares."""
    from treetune.rollouts.rows import rows_of

    found: dict[str, tuple[int, float, float]] = {}
    walking = walk(path, ["advantages", "trained", "domain"])
    next(walking)
    for batch, _ in walking:
        domains = batch["domain"].to_pylist() if "domain" in batch.schema.names else [""] * batch.num_rows
        for domain, row, trained in zip(
            domains, rows_of(batch["advantages"]), rows_of(batch["trained"]), strict=True
        ):
            if row is not None and trained is not None:
                own = row[trained.astype(bool)].astype(float)
                count, total, squares = found.get(domain, (0, 0.0, 0.0))
                found[domain] = count + len(own), total + own.sum(), squares + (own**2).sum()
    return found


def _signals(answer: Answer, episode: Episode) -> dict[str, np.ndarray]:
    """What the trainer said of the episode's tokens; NaN for those that it was not asked about."""
    said = dict(zip(map(id, answer.episodes), answer.signals, strict=False)).get(id(episode))
    if said is None:
        return {}
    own = {"entropy": said.entropies, "gap": said.gaps, "trainer's log-prob": said.logprobs}
    numbers = {}
    for name, values in own.items():
        if values is not None:
            numbers[name] = np.full(len(episode.trained), np.nan, values.dtype)
            numbers[name][episode.trained] = values
    return numbers


def own_episode(answer: Answer) -> Episode | None:
    """The training row that has the answer's tokens; None where none has."""
    if answer.trajectory is None:
        return answer.episodes[0] if answer.episodes else None
    ids = answer.trajectory.response_ids
    return next((one for one in answer.episodes if np.array_equal(one.response_ids, ids)), None)


def texts_of(run: Path, ids: np.ndarray) -> list[str] | None:
    """Of each token its text, empty for a special one; None where the experiment stored no texts."""
    known = all_texts(run)
    return known and [known[one] if one < len(known) else "" for one in ids.tolist()]


def all_texts(run: Path) -> list[str] | None:
    """The text of every token; None where the experiment stored none, or it is damaged, as its page says."""
    path = run / TOKENS
    stat = stat_of(path)
    try:
        return None if stat is None else _token_texts(path, stat)
    except ValueError:
        return None


@functools.lru_cache(maxsize=2)
def _token_texts(path: Path, stat: object) -> list[str]:
    return read_tokens(path)


def _logprobs(trajectory: Trajectory | None, episode: Episode | None) -> np.ndarray | None:
    """The engine's, in the precision in which they are stored; NaN for what was injected."""
    if trajectory is not None:
        kinds = [one.logprobs.dtype for one in trajectory.segments if one.logprobs is not None]
        if not kinds:
            return None
        parts = [
            np.full(len(one.token_ids), np.nan, kinds[0]) if one.logprobs is None else one.logprobs
            for one in trajectory.segments
        ]
        return np.concatenate(parts)
    if episode is None or episode.behaviour_logprobs is None:
        return None
    return np.where(episode.trained, episode.behaviour_logprobs, np.nan)


def _by_token(trajectory: Trajectory | None, of: Any) -> list[Any]:
    if trajectory is None:
        return []
    return [of(segment) for segment in trajectory.segments for _ in range(len(segment.token_ids))]


def _steps(trajectory: Trajectory | None, episode: Episode | None) -> list[Step]:
    """Those of credit where it has some, else the answer's."""
    ends = (episode.step_ends if episode is not None else ()) or (trajectory.step_ends if trajectory else ())
    source = episode if episode is not None else trajectory
    assert source is not None
    length, earned = len(source.response_ids), source.step_rewards
    if episode is None or episode.advantages is None:
        return steps_of(length, ends, earned=earned)
    return steps_of(
        length,
        ends,
        earned=earned,
        advantages=episode.advantages.tolist(),
        reward=episode.reward,
        own_ends=episode.step_ends,
        values=episode.step_values,
        errors=episode.step_errors,
    )
