"""Samples answers with parallel threads (rollout `parallel_threads`), and finds their states for Monte-Carlo
credit.

`fork_join` writes an answer as lines: the main line, and one for each thread. This module sends each request
of a line to the engine, with a seed that derives from the answer's seed and the request's position in the
answer. All answers are tasks of one asyncio program, and so are the threads of an answer::

    answer 0    main line ── fork ──┬── thread 1 ──┬── join ── main line ── graded
                                    └── thread 2 ──┘
    answer 1    main line ── fork ──┬── thread 1 ...         at the same time

This is ThreadWeaver's rollout. With `stragglers` and `malformed` set to ``go_on``, it behaves like
ThreadWeaver's public training code.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

import treetune.threads.numbers  # noqa: F401  (declares the numbers that are counted here)
from treetune.contracts import Answers, Experiment, Feature, Finding, Forks, Need, OneLine, SampledAnswers
from treetune.credit.states.base import AnswerPrefix, StateRule, StepRows
from treetune.credit.states.whole_answers import WholeAnswers
from treetune.engine.programs import result_of
from treetune.engine.requests import Completion, Request
from treetune.rollouts.answers import (
    UNGRADED,
    Announcer,
    GrowingRollout,
    Start,
    apply_unfinished_reward,
    is_decided,
    split_steps,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.single_turn import sample_each_in_one_turn
from treetune.seeds import derive_seed
from treetune.tasks.base import Task
from treetune.tasks.mixed import MixedTask, task_of
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
    concatenate,
    logprob_array,
)

TAGS_OF_ROLLOUT = ("<Parallel>", "</Parallel>", "<Outlines>", "</Outlines>", "<Thread>", "</Thread>")
"""The tags that a rollout injects, or stops at."""


@Rollout.register("parallel_threads")
@dataclass(frozen=True, kw_only=True)
class ParallelThreads(GrowingRollout):
    """Samples `samples` answers to each problem, each of which forks into threads where the policy writes
    outlines, and joins them again (ThreadWeaver; see `fork_join`).

    All answers are sampled in one asyncio program. The engine serves answers that have begun before answers
    that have not (see `engine.programs`), so that few answers are unfinished at a time.

    Injected text counts towards `max_tokens`, and the tokens that are left at a fork are shared equally among
    the threads. If the policy ends its text inside a thread, the whole answer ends as soon as the other
    threads have ended. Each of the `EVENTS` is counted: ``threads/<event>`` is its mean number in an answer.
    """

    parallel: bool = True
    """False is the sequential baseline: an answer is one completion, in which tags are text."""
    max_depth: Annotated[int, Gt(0)] = 1
    """The largest depth of blocks within each other. A block is a fork with its threads. Deeper lists of
    outlines are plain text."""
    max_threads: Annotated[int, Gt(0)] = 50
    """The largest number of threads of a block; further outlines open none."""
    max_blocks: Annotated[int, Gt(0)] = 16
    """The largest number of forks of an answer."""
    thread_tokens: Annotated[int, Gt(0)] | None = None
    """The number of tokens at which a thread is a straggler; null: its share of the tokens that are left at
    the fork. It has no effect if `stragglers` is ``go_on``. The limit is in tokens, not in seconds, so that
    the same command gives the same answers."""
    stragglers: Stragglers = "truncate"
    """The treatment of stragglers. ``truncate`` closes them, and ``drop`` leaves them out of the answer.
    ``go_on`` lets a thread use its whole share, and ends the answer when the share is used up (as
    published)."""
    malformed: Malformed = "end"
    """Whether a block without a readable outline ends the answer (``end``) or not (``go_on``, as
    published)."""
    conclusion: bool = False
    """Whether a join injects ``<Conclusion>``, so that the policy writes a conclusion of the block."""

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        structure = Forks() if self.parallel else OneLine()
        return SampledAnswers(), Answers(self.samples), structure

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        # None if these tokens are not known before the tokenizer is loaded.
        single_tokens = experiment.model.single_tokens()
        if self.parallel and single_tokens is not None and not single_tokens.issuperset(TAGS_OF_ROLLOUT):
            yield Finding(
                "the rollout needs the tags of threads as single tokens, and the model's tokenizer does not"
                " have them",
                "$.model.added_tokens",
                "append configs/models/thread_tokens.jsonnet to --configs, or start from weights that were"
                " trained with them",
            )
        if self.parallel:
            yield from self._check_stop_strings(experiment.task)

    def _check_stop_strings(self, task: Task) -> Iterable[Finding]:
        """Yields a warning if a domain of a mixture has stop strings: an answer with threads ignores them."""
        stop_strings: set[str] = set()
        for domain_task in task.parts() if isinstance(task, MixedTask) else ():
            stop_strings.update(domain_task.adjust_sampling(self.sampling).stop)
        if stop_strings:
            yield Finding(
                f"the stop strings {sorted(stop_strings)} of the domains end no answer with threads: set"
                " the stop of each domain to [], or choose the rollout 'single_turn'",
                "$.task.domains",
                level="warning",
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
        glue = Glue.of(context.codec, self.conclusion)  # the text that is injected at forks and joins
        announcer = Announcer(context, len(starts))
        return await asyncio.gather(*(self._answer(context, start, glue, announcer) for start in starts))

    async def answers_without_threads(
        self, context: RolloutContext, starts: Sequence[Start], blocks: Sequence[int]
    ) -> list[Trajectory]:
        """Samples and grades one answer from each start, as `answers` does, but leaves some threads out.

        Shapley credit asks for such answers: what would the answer have earned without this thread?

        Args:
            context: The context of the phase.
            starts: The answers so far. Each ends with the threads of a block (a fork with its threads) on the
                main text. A thread of these blocks that has no segment in the start is left out.
            blocks: For each start, the number of the block with which it ends, counted from 0 on the main
                text.
        """
        # The glue has the tokens that are injected between the samples, such as the header of a thread.
        glue = Glue.of(context.codec, self.conclusion)
        announcer = Announcer(context, len(starts))
        tasks = []
        for start, block in zip(starts, blocks, strict=True):
            tasks.append(self._answer(context, start, glue, announcer, complete_blocks=block + 1))
        return await asyncio.gather(*tasks)

    async def _answer(
        self,
        context: RolloutContext,
        start: Start,
        glue: Glue,
        announcer: Announcer,
        complete_blocks: int = 0,
    ) -> Trajectory:
        """Samples and grades one answer, which may begin with given segments (`start.segments`).

        Args:
            context: The context of the phase.
            start: The answer's problem, prompt and seed, and the segments that it begins with.
            glue: The tokens that are injected between the samples, such as the header of a thread.
            announcer: Announces the answer when it is graded.
            complete_blocks: The number of blocks (forks with their threads) on the main text, from the first
                one on, that get no further threads: in them, a thread without a segment in `start.segments`
                is left out.
        """
        assert context.engine is not None, "a rollout that samples needs an engine"
        engine = context.engine
        sampled_before = _segments_by_request(start.segments)

        def is_left_out(branch: Branch) -> bool:
            # A branch leads from the main text to a thread: a pair (block, thread) for each fork on the way.
            block_on_main_text, _ = branch[0]
            has_segment = (branch, 0) in sampled_before  # the first sample of the thread
            return block_on_main_text < complete_blocks and not has_segment

        async def sample(line: LineRequest) -> Completion:
            """Returns the completion of a line's request, from the given segments or from the engine."""
            # A line is the main text or a thread. `branch` names it, and `turn` counts its samples from 0.
            segment = sampled_before.get((line.branch, line.turn))
            if segment is not None:
                # This answer continues another answer, and begins with some of its segments. `fork_join`
                # requests these segments like all others, and gets the completions that they were made of. So
                # it builds the same lines again.
                return _completion(segment, line, context.codec)
            # Seeds are derived from numbers and strings, so the branch is written as a string.
            seed = derive_seed(start.seed, repr(line.branch), line.turn)
            request = Request(
                line.context_ids,
                seed=seed,
                n=1,
                sampling=replace(self.sampling, max_tokens=line.max_tokens, stop_ids=line.stop_ids),
                priority=context.settings.priority,
                reads_logprobs=context.settings.reads_logprobs,
            )
            (completion,) = await engine.sample(request)
            return completion

        max_tokens = task_of(context.task, start.problem).adjust_sampling(self.sampling).max_tokens
        budget = context.settings.token_budget(start.prompt_ids, max_tokens)
        fork_join = ForkJoin(glue, self, sample, start.prompt_ids, budget, is_left_out)
        await fork_join.write()
        answer = self._trajectory(context, start, fork_join)
        # If the answer gets `unfinished_reward` anyway, it is `decided`: no judge is asked about it.
        decided = is_decided(answer.finish_reason, self.unfinished_reward)
        grade = await result_of(context.grader.submit(answer.text, start.problem, decided=decided))
        answer = replace(
            answer, grade=apply_unfinished_reward(grade, answer.finish_reason, self.unfinished_reward)
        )
        await announcer.announce(answer)
        return answer

    def _trajectory(self, context: RolloutContext, start: Start, fork_join: ForkJoin) -> Trajectory:
        """Returns the answer that `fork_join` has written, without its grade."""
        segments = fork_join.segments
        response_ids = concatenate([segment.token_ids for segment in segments])
        text = context.codec.decode(response_ids)
        if len(segments) == 1:  # an answer without threads has the task's steps
            ends = split_steps(context, start.problem, response_ids, text)
        else:  # each segment is a step
            ends = tuple(itertools.accumulate(len(segment.token_ids) for segment in segments))
        return Trajectory(
            problem=start.problem,
            sample=0,  # `GrowingRollout.run` numbers the answers
            prompt_ids=start.prompt_ids,
            segments=segments,
            finish_reason=fork_join.finish_reason,
            text=text,
            grade=UNGRADED,
            step_ends=ends,
            numbers={f"threads/{event}": float(fork_join.events[event]) for event in EVENTS},
        )


def _completion(segment: Segment, line: LineRequest, codec: TextCodec) -> Completion:
    """Returns the completion that a segment was made of.

    A segment does not have the reason why its sampling ended, so its last token decides: a token that stops
    the line or ends the text means ``stop``, and any other means ``length``.
    """
    stopped = segment.token_ids[-1] in (*line.stop_ids, *codec.end_ids)
    reason: FinishReason = "stop" if stopped else "length"
    # The segments with which a continuation begins have no log-probs. Zeros in their place do no harm, since
    # continuations are only graded and never trained on.
    logprobs = [0.0] * len(segment.token_ids) if segment.logprobs is None else segment.logprobs
    # For the same reason, 0 does no harm as the version of a segment that has none.
    policy_version = 0 if segment.policy_version is None else segment.policy_version
    return Completion(segment.token_ids, logprob_array(logprobs), reason, policy_version)


@StateRule.register("threads")
@dataclass(frozen=True, kw_only=True)
class ThreadStates(WholeAnswers):
    """States of answers with threads. There is a state before each sample of an answer. Samples are the main
    text up to a fork, each thread, and the text after the join. (In training rows every segment is a step,
    also an injected one: see `step_rows`.)

    A state is the first i samples of an answer, in the order of the joined answer's text: main text, thread
    1, thread 2, text after the join. A continuation of a state keeps these samples, and samples everything
    else again. For example, after the end of thread 1 it samples thread 2 and the text after the join.

    The advantage of thread 1 is then V(after thread 1) − V(before thread 1). For both values, thread 2 and
    the text after the join are sampled again; for the second one, thread 1 is, too. So the advantage compares
    the thread with the other threads that could have been sampled in its place. The state before a thread
    doesn't depend on the thread's text, so the gradient stays unbiased. A thread that was dropped is not a
    part of the answer, and every continuation samples it again.
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
        return True  # where a state lies depends only on the tokens before it: the previous sample's end

    @override
    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        # A state lies where the sample before it ends. Text that is injected between two samples comes after
        # the state. The first state is that of the prompt. No state follows the last sample.
        ends_of_samples = []
        end = 0
        for segment in trajectory.segments:
            end += len(segment.token_ids)
            if segment.origin == "sampled":
                ends_of_samples.append(end)
        return (0, *ends_of_samples[:-1])

    @override
    def step_rows(
        self,
        trajectory: Trajectory,
        advantages: Sequence[float],
        values: Sequence[float],
        errors: Sequence[float],
    ) -> StepRows:
        """Returns the advantage, the value and its error of each step of an answer.

        In an answer with threads, each segment is a step. An injected segment has the advantage 0, and the
        value of the state before the next sample.

        An answer without threads is a single segment, which may have several steps. There is only the state
        of the prompt, and all steps have the advantage, the value and the error of this state.

        Args:
            trajectory: The answer.
            advantages: The advantage of each sampled segment. There is one state before each of them.
            values: The value of each state.
            errors: The standard error of each value.
        """
        ends = trajectory.step_ends
        if len(trajectory.segments) == 1:
            # The lists have one element each, for the only state, and it is repeated for each step.
            steps = len(ends)
            return StepRows(ends, list(advantages) * steps, list(values) * steps, list(errors) * steps)
        advantages_of_steps, values_of_steps, errors_of_steps = [], [], []
        sample = 0  # the number of the next sample
        for segment in trajectory.segments:
            is_sampled = segment.origin == "sampled"
            advantages_of_steps.append(advantages[sample] if is_sampled else 0.0)
            if sample < len(values):
                values_of_steps.append(values[sample])
                errors_of_steps.append(errors[sample])
            else:
                # Text that is injected after the last sample: the reward is certain by then.
                values_of_steps.append(trajectory.reward)
                errors_of_steps.append(0.0)
            if is_sampled:
                sample += 1
        return StepRows(ends, advantages_of_steps, values_of_steps, errors_of_steps)

    @override
    def state_seed(self, context: RolloutContext, prefix: AnswerPrefix, purpose: str) -> int:
        # The seed derives only from the sampled segments, since they determine the injected ones.
        samples = [segment for segment in prefix.segments if segment.origin == "sampled"]
        state = repr(tuple((segment.branch, tuple(segment.token_ids.tolist())) for segment in samples))
        return derive_seed(context.seed, context.iteration, prefix.problem.id, state, f"thread {purpose}")


def _segments_by_request(segments: Sequence[Segment]) -> dict[tuple[Branch, int], Segment]:
    """Returns the sampled segments by their requests. The key is the branch of a segment, and its number
    among the samples of this branch."""
    samples_on: Counter[Branch] = Counter()
    by_request = {}
    for segment in segments:
        if segment.origin == "sampled":
            by_request[segment.branch, samples_on[segment.branch]] = segment
            samples_on[segment.branch] += 1
    return by_request
