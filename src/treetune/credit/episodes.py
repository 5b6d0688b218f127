"""Training rows: from a graded answer to an `Episode`, which every credit returns for each answer.

    trajectory (segments, steps, reward)  ──  make_episode  ──>  episode (ids, mask, advantages, log-probs)

Example: an answer of two steps, which end after tokens 2 and 5, with the step advantages ``[0.25, -0.5]``,
becomes a row with ``advantages=[0.25, 0.25, -0.5, -0.5, -0.5]``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean, pool_columns
from treetune.vocabulary import (
    Column,
    Episode,
    Metrics,
    Segment,
    SegmentSpan,
    Trajectory,
    are_sampled,
    concatenate,
)


def make_episode(
    context: RolloutContext,
    trajectory: Trajectory,
    step_advantages: Sequence[float] | None = None,
    step_values: Sequence[float] | None = None,
    step_errors: Sequence[float] | None = None,
) -> Episode:
    """Returns the training row of an answer; every token of step i gets `step_advantages[i]`.

    Injected tokens are not trained; their behaviour log-prob is 0. The policy version is the oldest one that
    sampled a part of the answer. For answers that were not sampled (demonstrations), it is the present one,
    which has the number of the iteration.

    Args:
        context: The context of the credit phase.
        trajectory: The answer.
        step_advantages: One advantage for each step; None where the trainer makes the advantages, or none
            are needed.
        step_values: The value of the state before each step, for the viewer and analyses.
        step_errors: The standard errors of `step_values`.
    """
    import numpy as np

    ends, response_ids = trajectory.step_ends, trajectory.response_ids
    assert ends[-1:] == (len(response_ids),), f"{trajectory.id}: steps don't cover the response"
    advantages: Column | None = None
    if step_advantages is not None:
        tokens_of_steps = np.diff(ends, prepend=0)
        advantages = np.repeat(np.array(step_advantages, np.float64), tokens_of_steps)
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
        stretches=_list_stretches(trajectory.segments),  # empty if the answer has no parallel threads
        step_rewards=trajectory.step_rewards,
        domain=trajectory.problem.domain,
    )


def _behaviour_logprobs(trajectory: Trajectory) -> Column | None:
    """Returns the log-prob with which each token was sampled; 0 for injected tokens.

    Returns None if a segment that is not injected has no log-probs, as in demonstrations.
    """
    import numpy as np

    logprobs_of_segments: list[Column] = []
    for segment in trajectory.segments:
        if segment.origin == "injected":
            logprobs_of_segments.append(np.zeros(len(segment.token_ids), np.float32))
        elif segment.logprobs is not None:
            logprobs_of_segments.append(segment.logprobs)
        else:
            return None
    logprobs = concatenate(logprobs_of_segments)
    assert len(logprobs) == len(trajectory.response_ids), f"{trajectory.id}: a log-prob per token"
    return logprobs


def _list_stretches(segments: Sequence[Segment]) -> tuple[SegmentSpan, ...]:
    """Returns for each segment its end in the response, and its thread (`branch`).

    Threads are parts of an answer that were sampled in parallel, and didn't see each other. For an answer
    without threads, which is sampled from left to right, returns an empty tuple.
    """
    if not any(segment.branch for segment in segments):
        return ()
    ends = itertools.accumulate(len(segment.token_ids) for segment in segments)
    return tuple(SegmentSpan(end, segment.branch) for end, segment in zip(ends, segments, strict=True))


def make_scoring_row(answer: Trajectory) -> Episode:
    """Returns the row that a model runs over to score an answer. It is not trained on."""
    return Episode(
        prompt_ids=answer.prompt_ids,
        response_ids=answer.response_ids,
        trained=are_sampled(answer.segments),
        reward=answer.reward,
        group=answer.problem.id,
        trajectory=answer.id,
        policy_version=0,  # any number would do, since only training reads it
    )


def whole_answer_episodes(
    context: RolloutContext, trajectories: Sequence[Trajectory], advantages: Iterable[float]
) -> tuple[list[Episode], Metrics]:
    """Returns episodes in which all tokens of an answer share one advantage, and metrics. Collective."""
    episodes = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        step_advantages = [advantage] * len(trajectory.step_ends)
        episodes.append(make_episode(context, trajectory, step_advantages))
    return episodes, advantage_metrics(context, episodes)


def advantage_metrics(context: RolloutContext, episodes: Sequence[Episode]) -> Metrics:
    """Returns the mean, the standard deviation and the share of zeros of the advantages over all ranks'
    trained tokens. Collective."""
    import numpy as np

    # Neighbouring tokens usually have the same advantage, since all tokens of a step do. Ranks exchange runs
    # of equal advantages with their lengths, not single tokens, so that the message stays small.
    local_advantages: list[float] = []
    local_lengths: list[int] = []
    for episode in episodes:
        assert episode.advantages is not None
        trained = episode.advantages[episode.trained]
        # A run begins where the difference from the token before is not zero. The difference from NaN is
        # NaN, so that the first token begins a run, too.
        run_starts = np.flatnonzero(np.diff(trained, prepend=np.nan))
        local_advantages += trained[run_starts].tolist()
        local_lengths += np.diff(run_starts, append=len(trained)).tolist()
    columns = pool_columns(
        context, "credit-metrics", {"advantage": local_advantages, "tokens": local_lengths}
    )
    advantages, tokens = columns["advantage"], columns["tokens"]
    if not advantages:
        return {}
    centre = mean(advantages, tokens)
    squares = [(advantage - centre) ** 2 for advantage in advantages]
    zeros = [float(advantage == 0.0) for advantage in advantages]
    return {
        "credit/advantage_mean": centre,
        "credit/advantage_std": math.sqrt(mean(squares, tokens)),
        "credit/advantage_zero": mean(zeros, tokens),
    }
