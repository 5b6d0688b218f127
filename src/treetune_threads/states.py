"""Where states lie in answers with threads, and how an answer goes on from one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from treetune.contracts import Forks, Need
from treetune.inference.base import SamplingParams
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.values.base import Beginning, StateRule, Steps
from treetune.rollouts.values.whole_answers import WholeAnswers
from treetune.seeds import derive_seed
from treetune.vocabulary import Branch, Segment, Trajectory
from treetune_threads.parallel_threads import Fixed, ParallelThreads, Start


@StateRule.register("threads")
@dataclass(frozen=True, kw_only=True)
class ThreadStates(WholeAnswers[Start]):
    """An answer's samples are its steps: the main text up to a fork, each thread, the text from the join on.

    A state is the first i samples of an answer in its joined order. Gone on from there, an answer has them as
    they are and everything else written anew: behind a thread's end, the threads after it and what follows
    the join. Threads don't see their siblings, so what a thread adds, V(with it) − V(without), compares it
    with what else would have been written in its place; and since no state before it depends on its text, the
    gradient stays unbiased. A thread that was dropped is written anew with the rest: it is no part of the
    answer.
    """

    needs = (
        Need(
            Forks(),
            "it values the threads of answers",
            "choose the rollout 'parallel_threads' (with parallel true), or the states 'step_boundaries'",
        ),
    )

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        ends = accumulate(len(segment.token_ids) for segment in trajectory.segments)
        of_samples = [end for end, one in zip(ends, trajectory.segments) if one.origin == "sampled"]
        return (0, *of_samples[:-1])

    def laid_out(
        self,
        trajectory: Trajectory,
        advantages: Sequence[float],
        values: Sequence[float],
        errors: Sequence[float],
    ) -> Steps:
        """Segments are steps where there are threads; an injected one has the value of the sample behind."""
        if len(trajectory.segments) == 1:
            steps = len(trajectory.step_ends)
            return Steps(
                trajectory.step_ends, list(advantages) * steps, list(values) * steps, list(errors) * steps
            )
        of_segments, value_of, error_of = [], [], []
        place = 0
        for segment in trajectory.segments:
            sampled = segment.origin == "sampled"
            of_segments.append(advantages[place] if sampled else 0.0)
            value_of.append(values[place] if place < len(values) else trajectory.reward)
            error_of.append(errors[place] if place < len(errors) else 0.0)
            place += sampled
        return Steps(trajectory.step_ends, of_segments, value_of, error_of)

    def writer(self, context: RolloutContext, sampling: SamplingParams) -> ParallelThreads:
        rollout = context.get(Rollout)
        assert isinstance(rollout, ParallelThreads), "checked with the configuration"
        return replace(rollout, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)

    def start(self, context: RolloutContext, beginning: Beginning, again: int, purpose: str) -> Start:
        """Writing the answer from there on. The seed derives from the state alone, whoever comes by it."""
        problem, prompt_ids, segments = beginning
        samples = [segment for segment in segments if segment.origin == "sampled"]
        known = tuple((segment.branch, tuple(segment.token_ids.tolist())) for segment in samples)
        seed = derive_seed(context.seed, context.iteration, problem.id, repr(known), f"thread {purpose}")
        return Start(problem, prompt_ids, derive_seed(seed, again), _fixed(samples))


def _fixed(samples: Sequence[Segment]) -> Fixed:
    """By the calls that they came from."""
    turns: Counter[Branch] = Counter()
    fixed = {}
    for segment in samples:
        fixed[segment.branch, turns[segment.branch]] = segment
        turns[segment.branch] += 1
    return fixed
