"""Answers that open parallel threads: each is a tree of calls, and all trees are sampled at once."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

import treetune.threads.numbers  # noqa: F401  (declares what is counted here)
from treetune.contracts import Answers, Experiment, Feature, Finding, Forks, Need, OneLine, SampledAnswers
from treetune.credit.states.base import AnswerPrefix, StateRule, StepRows
from treetune.credit.states.whole_answers import WholeAnswers
from treetune.engine.base import Completion, Request
from treetune.engine.programs import result_of
from treetune.rollouts.answers import (
    UNGRADED,
    Announcer,
    GrowingRollout,
    Start,
    is_decided,
    steps_of,
    with_unfinished,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.single_turn import sample_each_in_one_turn
from treetune.seeds import derive_seed
from treetune.tasks.base import Task
from treetune.threads.fork_join import (
    EVENTS,
    ForkJoin,
    Glue,
    LineRequest,
    Malformed,
    Stragglers,
)
from treetune.tree import Tree
from treetune.vocabulary import (
    Branch,
    FinishReason,
    Metrics,
    Problem,
    Segment,
    TextCodec,
    Trajectory,
    joined,
    logprob_array,
)

SPOKEN_TAGS = ("<Parallel>", "</Parallel>", "<Outlines>", "</Outlines>", "<Thread>", "</Thread>")
"""Those that a rollout injects or looks out for."""


@Rollout.register("parallel_threads")
@dataclass(frozen=True, kw_only=True)
class ParallelThreads(GrowingRollout):
    """`samples` answers to each problem, which fork into threads where the policy writes outlines, and
    join them again (ThreadWeaver; see `fork_join`). All calls of all answers are in flight together, and
    what follows from a call goes before answers that have not begun, so that few are ever half done.

    Injected text counts towards `max_tokens`; what is left of them at a fork is shared equally among the
    threads. An end of text inside a thread ends the answer once its siblings have come in. Each of the
    `EVENTS` is counted: ``threads/<event>`` is its number per answer.
    """

    parallel: bool = True
    """False is the sequential baseline: one completion to an answer, in which tags are text."""
    max_depth: Annotated[int, Gt(0)] = 1
    """Blocks within each other at most; an outline list deeper down is plain text."""
    max_threads: Annotated[int, Gt(0)] = 50
    """Threads of a block at most; outlines beyond them open none."""
    max_blocks: Annotated[int, Gt(0)] = 16
    """Forks of an answer at most."""
    thread_tokens: Annotated[int, Gt(0)] | None = None
    """Tokens from which on a thread is a straggler; None: its share. The rule is about tokens and not about
    seconds, so that the same command gives the same answers."""
    stragglers: Stragglers = "truncate"
    """What becomes of stragglers: ``truncate`` closes them where they are, ``drop`` leaves them out of the
    answer, ``go_on`` lets them use their share, and the answer ends with them once that is used up (as
    published)."""
    malformed: Malformed = "end"
    """Whether a block without a readable outline ends the answer, or not (``go_on``, as published)."""
    conclusion: bool = False
    """Whether a join begins the text that concludes a block."""

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return SampledAnswers(), Answers(self.samples), Forks() if self.parallel else OneLine()

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        single = experiment.model.single_tokens()
        if self.parallel and single is not None and not single.issuperset(SPOKEN_TAGS):
            yield Finding(
                "the rollout needs the tags of threads as single tokens, and the model's tokenizer has none"
                " such",
                "$.model.added_tokens",
                "put configs/models/thread_tokens.jsonnet on the right, or start from weights that were"
                " trained with them",
            )

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thread_tokens is not None and self.thread_tokens >= self.max_tokens:
            raise ValueError(
                f"thread_tokens is {self.thread_tokens}, which no thread reaches in an answer of max_tokens ="
                f" {self.max_tokens}: lower it, or leave it out"
            )

    seed_name = "threads"

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        if self.parallel:
            return super().run(context, problems)
        return sample_each_in_one_turn(self, context, problems)

    @override
    async def answers(self, context: RolloutContext, starts: Sequence[Start]) -> list[Trajectory]:
        glue, announcer = Glue.of(context.codec, self.conclusion), Announcer(context, len(starts))
        return await asyncio.gather(*(self._answer(context, start, glue, announcer) for start in starts))

    async def _answer(
        self, context: RolloutContext, start: Start, glue: Glue, announcer: Announcer
    ) -> Trajectory:
        assert context.engine is not None, "a rollout that samples needs an engine"
        engine, sampled_before = context.engine, _segments_by_request(start.segments)

        async def sample(line: LineRequest) -> Completion:
            segment = sampled_before.get((line.branch, line.turn))
            if segment is not None:
                return _completion(segment, line, context.codec)
            request = Request(
                line.context_ids,
                seed=derive_seed(start.seed, repr(line.branch), line.turn),
                n=1,
                sampling=replace(self.sampling, max_tokens=line.max_tokens, stop_ids=line.stop_ids),
                priority=context.settings.priority,
                reads_logprobs=context.settings.reads_logprobs,
            )
            (completion,) = await engine.sample(request)
            return completion

        max_tokens = context.task.of(start.problem).sampling(self.sampling).max_tokens
        budget = context.settings.token_budget(start.prompt_ids, max_tokens)
        fork_join = ForkJoin(glue, self, sample, start.prompt_ids, budget)
        await fork_join.write()
        answer = self._trajectory(context, start, fork_join)
        decided = is_decided(answer.finish_reason, self.unfinished_reward)
        grade = await result_of(context.grader.submit(answer.text, start.problem, decided=decided))
        answer = replace(answer, grade=with_unfinished(grade, answer.finish_reason, self.unfinished_reward))
        await announcer.announce(answer)
        return answer

    def _trajectory(self, context: RolloutContext, start: Start, answer: ForkJoin) -> Trajectory:
        segments = answer.segments
        response_ids = joined([segment.token_ids for segment in segments])
        text = context.codec.decode(response_ids)
        if len(segments) == 1:
            ends = steps_of(context, start.problem, response_ids, text)
        else:
            ends = tuple(itertools.accumulate(len(segment.token_ids) for segment in segments))
        return Trajectory(
            problem=start.problem,
            sample=0,
            prompt_ids=start.prompt_ids,
            segments=segments,
            finish_reason=answer.finish_reason,
            text=text,
            grade=UNGRADED,
            step_ends=ends,
            numbers={f"threads/{event}": float(answer.events[event]) for event in EVENTS},
        )


def _completion(segment: Segment, line: LineRequest, codec: TextCodec) -> Completion:
    """Returns what the engine had answered when the segment was sampled."""
    stopped = segment.token_ids[-1] in (*line.stop_ids, *codec.end_ids)
    reason: FinishReason = "stop" if stopped else "length"
    # Where it is only gone on from, nobody asks how likely it was.
    logprobs = [0.0] * len(segment.token_ids) if segment.logprobs is None else segment.logprobs
    return Completion(segment.token_ids, logprob_array(logprobs), reason, segment.policy_version or 0)


@StateRule.register("threads")
@dataclass(frozen=True, kw_only=True)
class ThreadStates(WholeAnswers):
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

    @override
    def looks_back(self, task: Task) -> bool:
        return True

    @override
    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        ends = accumulate(len(segment.token_ids) for segment in trajectory.segments)
        ends_of_samples = [
            end for end, segment in zip(ends, trajectory.segments) if segment.origin == "sampled"
        ]
        return (0, *ends_of_samples[:-1])

    @override
    def step_rows(
        self,
        trajectory: Trajectory,
        advantages: Sequence[float],
        values: Sequence[float],
        errors: Sequence[float],
    ) -> StepRows:
        """Segments are steps where there are threads; an injected one has the value of the sample behind."""
        ends = trajectory.step_ends
        if len(trajectory.segments) == 1:
            return StepRows(
                ends, list(advantages) * len(ends), list(values) * len(ends), list(errors) * len(ends)
            )
        of_segments, value_of, error_of = [], [], []
        sample = 0
        for segment in trajectory.segments:
            sampled = segment.origin == "sampled"
            of_segments.append(advantages[sample] if sampled else 0.0)
            value_of.append(values[sample] if sample < len(values) else trajectory.reward)
            error_of.append(errors[sample] if sample < len(errors) else 0.0)
            sample += sampled
        return StepRows(ends, of_segments, value_of, error_of)

    @override
    def state_seed(self, context: RolloutContext, prefix: AnswerPrefix, purpose: str) -> int:
        samples = [segment for segment in prefix.segments if segment.origin == "sampled"]
        state = repr(tuple((segment.branch, tuple(segment.token_ids.tolist())) for segment in samples))
        return derive_seed(context.seed, context.iteration, prefix.problem.id, state, f"thread {purpose}")


def _segments_by_request(segments: Sequence[Segment]) -> dict[tuple[Branch, int], Segment]:
    """Returns the sampled segments by the requests (branch, turn) that they were sampled for."""
    turns: Counter[Branch] = Counter()
    by_request = {}
    for segment in segments:
        if segment.origin == "sampled":
            by_request[segment.branch, turns[segment.branch]] = segment
            turns[segment.branch] += 1
    return by_request
