"""What a replay made of stored answers, beside the run's own step: as numbers, rows and words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treetune.vocabulary import Episode, Metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What one variant did: its episodes, the gradient of its whole loss, and what training changed.

    `gradient` and `change` are flat, float64 and float32; `metrics` are those of credit and of training.
    `same_as_run` says whether the weights are the run's own after the iteration, to the bit; None where
    nobody can tell. `unlike_record` are the numbers of training, the gradient's norm among them, that are
    others than the run recorded, to the digits that it did; None where it recorded none.
    """

    episodes: Sequence[Episode]
    gradient: Tensor
    change: Tensor
    metrics: Metrics
    same_as_run: bool | None
    unlike_record: Sequence[str] | None
    sampled_tokens: int


def compared(steps: Mapping[str, Step]) -> dict[str, Any]:
    """Norms of gradients and of changes, cosines between the two variants, and how alike advantages are."""
    own, other = steps["own"], steps.get("other")
    result: dict[str, Any] = {
        name: {
            "episodes": len(step.episodes),
            "gradient_norm": float(step.gradient.norm()),
            "change_norm": float(step.change.norm()),
            "same_as_run": step.same_as_run,
            "unlike_record": step.unlike_record,
            "sampled_tokens": step.sampled_tokens,
            "metrics": {
                key: value for key, value in step.metrics.items() if key.startswith(("train/", "credit/"))
            },
        }
        for name, step in steps.items()
    }
    if other is not None:
        result["cosine_of_gradients"] = _cosine(own.gradient, other.gradient)
        result["cosine_of_changes"] = _cosine(own.change.double(), other.change.double())
        result["correlation_of_advantages"] = _correlation(own.episodes, other.episodes)
    return result


def _cosine(one: Tensor, other: Tensor) -> float | None:
    length = float(one.norm()) * float(other.norm())
    return float(one @ other) / length if length else None


def _correlation(one: Sequence[Episode], other: Sequence[Episode]) -> float | None:
    """Of the advantages of tokens that both train."""
    import numpy as np

    from treetune_lab.analyzers.statistics import correlation

    theirs = {episode.trajectory: episode.advantages for episode in other}
    pairs = [
        (episode.advantages[episode.trained], advantages[episode.trained])
        for episode in one
        if episode.advantages is not None and (advantages := theirs.get(episode.trajectory)) is not None
    ]
    if not pairs:
        return None
    found = correlation(*(np.concatenate(side) for side in zip(*pairs, strict=True)))
    return None if math.isnan(found) else found


def side_by_side(steps: Mapping[str, Step]) -> Iterator[dict[str, Any]]:
    """A row for each answer that any variant trains: what each gives the steps of the first that has it."""
    of_variants = {name: {e.trajectory: e for e in step.episodes} for name, step in steps.items()}
    for trajectory in dict.fromkeys(key for episodes in of_variants.values() for key in episodes):
        having = {name: found[trajectory] for name, found in of_variants.items() if trajectory in found}
        first = next(iter(having.values()))
        starts = (0, *first.step_ends[:-1])
        yield {
            "answer": trajectory,
            "reward": first.reward,
            "text": first.text,
            "step_ends": list(first.step_ends),
            "advantages": {
                name: None
                if episode.advantages is None
                else [float(episode.advantages[start]) for start in starts]
                for name, episode in having.items()
            },
            "values": {
                name: None if episode.step_values is None else [float(value) for value in episode.step_values]
                for name, episode in having.items()
            },
        }


SAME = {
    True: "the weights after it are the run's own, to the bit",
    False: "the weights after it are others than the run's",
    None: "whether the weights after it are the run's own can't be told, for want of a state or a checkpoint",
}


def in_words(result: Mapping[str, Any]) -> Iterator[str]:
    """What the command prints."""
    for name in ("own", "other"):
        if name in result:
            one = result[name]
            yield (
                f"{name:5}  {one['episodes']} episodes  gradient {one['gradient_norm']:.6g}  change of the"
                f" weights {one['change_norm']:.6g}  {one['sampled_tokens']} tokens sampled"
            )
    yield f"own    {_recorded(result['own']['unlike_record'])}; {SAME[result['own']['same_as_run']]}"
    if "other" in result:
        for key, words in (
            ("cosine_of_gradients", "cosine of the gradients"),
            ("cosine_of_changes", "cosine of the changes"),
            ("correlation_of_advantages", "correlation of the advantages"),
        ):
            value = result[key]
            yield f"{words}: {'none to be told' if value is None else f'{value:.4f}'}"
    yield f"answer by answer: {result['folder']}/advantages.jsonl"


def _recorded(unlike: Sequence[str] | None) -> str:
    if unlike is None:
        return "the run recorded no numbers of this training"
    if unlike:
        return f"others than the run recorded are {', '.join(unlike)}"
    return "the gradient's norm and all numbers of training are those that the run recorded"
