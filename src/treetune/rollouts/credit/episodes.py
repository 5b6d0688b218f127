"""From a trajectory and what its steps are worth to a training row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean, pooled
from treetune.vocabulary import Column, Episode, Metrics, Stretch, Trajectory, are_sampled, joined


def episode_of(
    context: RolloutContext,
    trajectory: Trajectory,
    step_advantages: Sequence[float] | None = None,
    step_values: Sequence[float] | None = None,
    step_errors: Sequence[float] | None = None,
) -> Episode:
    """The training row of an answer; every token of step i gets `step_advantages[i]`.

    Injected tokens are not trained; their behaviour log-prob reads 0. The policy version is the
    oldest that sampled any of it, or the present one where nobody did (demonstrations).
    """
    import numpy as np

    ends = trajectory.step_ends
    response_ids = trajectory.response_ids
    assert ends[-1:] == (len(response_ids),), f"{trajectory.id}: steps don't cover the response"
    advantages: Column | None = None
    if step_advantages is not None:
        advantages = np.repeat(np.array(step_advantages, np.float64), np.diff(ends, prepend=0))
    versions = [s.policy_version for s in trajectory.segments if s.policy_version is not None]
    return Episode(
        prompt_ids=trajectory.prompt_ids,
        response_ids=response_ids,
        trained=are_sampled(trajectory.segments),
        reward=trajectory.reward,
        score=trajectory.score,
        group=trajectory.problem.id,
        trajectory=trajectory.id,
        policy_version=min(versions, default=context.iteration),
        finish_reason=trajectory.finish_reason,
        advantages=advantages,
        behaviour_logprobs=_behaviour_logprobs(trajectory),
        step_ends=ends,
        step_values=None if step_values is None else tuple(step_values),
        step_errors=None if step_errors is None else tuple(step_errors),
        text=trajectory.text,
        stretches=_stretches(trajectory),
        step_rewards=trajectory.step_rewards,
        domain=trajectory.problem.domain,
    )


def _stretches(trajectory: Trajectory) -> tuple[Stretch, ...]:
    segments = trajectory.segments
    if not any(segment.branch for segment in segments):
        return ()
    ends = itertools.accumulate(len(segment.token_ids) for segment in segments)
    return tuple(Stretch(end, segment.branch) for end, segment in zip(ends, segments, strict=True))


def _behaviour_logprobs(trajectory: Trajectory) -> Column | None:
    import numpy as np

    parts: list[Column] = []
    for segment in trajectory.segments:
        if segment.origin == "injected":
            parts.append(np.zeros(len(segment.token_ids), np.float32))
        elif segment.logprobs is None:
            return None
        else:
            parts.append(segment.logprobs)
    logprobs = joined(parts)
    assert len(logprobs) == len(trajectory.response_ids), f"{trajectory.id}: a log-prob per token"
    return logprobs


def whole_answer(
    context: RolloutContext, trajectories: Sequence[Trajectory], advantages: Iterable[float]
) -> tuple[list[Episode], Metrics]:
    """Episodes in which all tokens of an answer share one advantage, and their metrics."""
    episodes = [
        episode_of(context, trajectory, [advantage] * len(trajectory.step_ends))
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
    ]
    return episodes, advantage_metrics(context, episodes)


def unlearnt(answer: Trajectory) -> Episode:
    """An answer as a model runs over it; nothing is learnt from it."""
    return Episode(
        prompt_ids=answer.prompt_ids,
        response_ids=answer.response_ids,
        trained=are_sampled(answer.segments),
        reward=answer.reward,
        group=answer.problem.id,
        trajectory=answer.id,
        policy_version=0,
    )


def advantage_metrics(context: RolloutContext, episodes: Sequence[Episode]) -> Metrics:
    """Mean, standard deviation and share of zeros of the advantages over all ranks' trained tokens.

    Collective.
    """
    import numpy as np

    advantages: list[float] = []
    tokens: list[float] = []
    for episode in episodes:
        assert episode.advantages is not None
        trained = episode.advantages[episode.trained]
        # Runs of one value, not tokens: what the ranks exchange stays small.
        begins = np.flatnonzero(np.diff(trained, prepend=np.nan))
        advantages += trained[begins].tolist()
        tokens += np.diff(begins, append=len(trained)).tolist()
    columns = pooled(context, "credit-metrics", {"advantage": advantages, "tokens": tokens})
    advantages, tokens = columns["advantage"], columns["tokens"]
    if not advantages:
        return {}
    centre = mean(advantages, tokens)
    return {
        "credit/advantage_mean": centre,
        "credit/advantage_std": math.sqrt(mean([(a - centre) ** 2 for a in advantages], tokens)),
        "credit/advantage_zero": mean([float(a == 0.0) for a in advantages], tokens),
    }


def groups_of(trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
    """Positions of the answers to each problem, problems in their order of appearance."""
    groups: dict[str, list[int]] = {}
    for position, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.problem.id, []).append(position)
    return groups
