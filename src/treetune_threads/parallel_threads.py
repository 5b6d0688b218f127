"""Answers that open parallel threads: each is a tree of calls, and all trees are sampled at once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated

from annotated_types import Gt

import treetune_threads.numbers  # noqa: F401  (declares what is counted here)
from treetune.contracts import Answers, Experiment, Feature, Finding, Forks, Need, OneLine, SampledAnswers
from treetune.inference.base import Completion, Request, SamplingParams
from treetune.rollouts.answers import (
    Growth,
    SampledRollout,
    encoded_prompt,
    is_decided,
    rank_share,
    steps_of,
    with_unfinished,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import AnswerObserver, RolloutContext
from treetune.rollouts.metrics import trajectory_metrics
from treetune.rollouts.numbers import measured
from treetune.rollouts.single_turn import sample_answers
from treetune.rollouts.states import WholeAnswers
from treetune.rollouts.values import Beginning, StateRule, Steps
from treetune.seeds import derive_seed
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import (
    Branch,
    FinishReason,
    Grade,
    Metrics,
    Problem,
    Segment,
    TextCodec,
    TokenIds,
    Trajectory,
    joined,
    logprob_array,
)
from treetune_threads.fork_join import (
    EVENTS,
    Call,
    ForkJoin,
    Glue,
    Limits,
    Malformed,
    Stragglers,
)

Fixed = Mapping[tuple[Branch, int], Segment]
"""Calls of an answer (branch, turn) that need not be sampled, since it is known what came of them."""


SPOKEN_TAGS = ("<Parallel>", "</Parallel>", "<Outlines>", "</Outlines>", "<Thread>", "</Thread>")
"""Those that a rollout injects or looks out for."""


@dataclass(frozen=True)
class Start:
    """An answer to be sampled: to which problem, with which seed, and what of it is there already."""

    problem: Problem
    prompt_ids: TokenIds
    seed: int
    fixed: Fixed


@Rollout.register("parallel_threads")
@dataclass(frozen=True, kw_only=True)
class ParallelThreads(SampledRollout):
    """`samples` answers to each problem, which fork into threads where the policy writes outlines, and
    join them again (ThreadWeaver; see `fork_join`). All calls of all answers are in flight together, and
    what follows from a call goes before answers that have not begun, so that few are ever half done.

    The joined answer has at most `max_tokens`, injected text included. What is left of it at a fork is
    shared equally among the threads. A thread that comes to `thread_tokens` (None: to its share) is a
    straggler: ``truncate`` closes it where it is, ``drop`` leaves it out of the answer, ``go_on`` lets
    it use its share, and the answer ends with it once that is used up (as published). The rule is about
    tokens and not about seconds, so that the same command gives the same answers.

    Outlines beyond `max_threads` open none; answers fork `max_blocks` times at most and nest
    `max_depth` deep (an outline list deeper down is plain text). A block without a readable outline
    ends the answer, unless `malformed` is ``go_on`` (as published). `conclusion` makes a join begin the
    text that concludes a block. An end of text inside a thread ends the answer once its siblings have
    come in. Each of these `EVENTS` is counted: ``threads/<event>`` is its number per answer.

    `parallel` false is the sequential baseline: one completion to an answer, in which tags are text.
    """

    parallel: bool = True
    max_depth: Annotated[int, Gt(0)] = 1
    max_threads: Annotated[int, Gt(0)] = 50
    max_blocks: Annotated[int, Gt(0)] = 16
    thread_tokens: Annotated[int, Gt(0)] | None = None
    stragglers: Stragglers = "truncate"
    """What becomes of a thread that comes to `thread_tokens`: it ends there, is left out, or goes on."""
    malformed: Malformed = "end"
    conclusion: bool = False

    @property
    def gives(self) -> tuple[Feature, ...]:
        return SampledAnswers(), Answers(self.samples), Forks() if self.parallel else OneLine()

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thread_tokens is not None and self.thread_tokens >= self.max_tokens:
            raise ValueError(
                f"thread_tokens is {self.thread_tokens}, which no thread reaches in an answer of max_tokens ="
                f" {self.max_tokens}: lower it, or leave it out"
            )

    @property
    def sampler(self) -> Rollout:
        return self

    @property
    def limits(self) -> Limits:
        return Limits(
            max_depth=self.max_depth,
            max_threads=self.max_threads,
            max_blocks=self.max_blocks,
            thread_tokens=self.thread_tokens,
            stragglers=self.stragglers,
            malformed=self.malformed,
            conclusion=self.conclusion,
        )

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        # All prompts, not this rank's only: if one does not fit, no rank is left waiting for another.
        for problem in problems:
            encoded_prompt(context, problem, self._budget(context, problem), self.max_prompt_tokens)
        share = rank_share(context, problems)
        if self.parallel:
            starts = [
                Start(
                    problem,
                    encoded_prompt(context, problem, self._budget(context, problem), self.max_prompt_tokens),
                    derive_seed(context.seed, context.iteration, problem.id, "threads", sample),
                    {},
                )
                for problem in share
                for sample in range(self.samples)
            ]
            trees = trees_of(
                replace(answer, sample=place % self.samples)
                for place, answer in enumerate(self.answers(context, starts))
            )
        else:
            trees = sample_answers(
                context,
                share,
                samples=self.samples,
                sampling=self.sampling,
                unfinished_reward=self.unfinished_reward,
                max_prompt_tokens=self.max_prompt_tokens,
            )
        trees = measured(trees, context.codec)
        return trees, trajectory_metrics(context, answers_of(trees))

    def answers(self, context: RolloutContext, starts: Sequence[Start]) -> list[Trajectory]:
        """One graded answer from each start, in their order; `sample` is 0 in all of them.

        The seed of a call is derived from its start's and from its place in the answer, so that an
        answer does not depend on what else is sampled, nor on the order in which anything comes in.
        """
        assert context.engine is not None, "a rollout that samples needs an engine"
        growth = self.growing(context, starts)
        if growth.requests:
            context.engine.generate(growth.requests, growth.on_result)
        return growth.answers()

    def growing(self, context: RolloutContext, starts: Sequence[Start]) -> Growth:
        """The same, for whoever has the engine."""
        observer = context.find(AnswerObserver)
        glue, limits = Glue.of(context.codec, self.conclusion), self.limits
        growing: dict[int, ForkJoin] = {}
        grown: dict[int, tuple[Trajectory, Future[Grade]]] = {}
        # The request number i is `asked[i]`: (which start, which call).
        asked: list[tuple[int, Call] | None] = []

        def sampled(place: int, calls: list[Call]) -> list[Request]:
            """The requests for these calls, with what is known of them already received."""
            answer, start, unknown = growing[place], starts[place], list[Call]()
            while calls:
                call = calls.pop()
                known = start.fixed.get((call.branch, call.turn))
                if known is None:
                    unknown.append(call)
                else:
                    calls += answer.receive(call, _completion(known, call, context.codec))
            if answer.done:
                finished(place)
            unknown.sort(key=lambda call: call.branch)
            asked.extend((place, call) for call in unknown)
            return [self._request(context, start, call) for call in unknown]

        def finished(place: int) -> None:
            answer, start = growing.pop(place), starts[place]
            trajectory = self._trajectory(context, start, answer)
            decided = is_decided(trajectory.finish_reason, self.unfinished_reward)
            grade = context.grader.submit(trajectory.text, start.problem, decided=decided)
            grown[place] = trajectory, grade
            if observer is not None:
                observer.observe(trajectory, grade)
            context.log.progress(len(grown), len(starts))

        def on_result(index: int, completions: list[Completion]) -> list[Request]:
            place_and_call = asked[index]
            assert place_and_call is not None, "every request is reported once"
            asked[index] = None  # its context is as long as the answer
            place, call = place_and_call
            return sampled(place, growing[place].receive(call, completions[0]))

        def graded() -> list[Trajectory]:
            assert len(grown) == len(starts), "the engine reports every request"
            return [
                replace(
                    trajectory,
                    grade=with_unfinished(grade.result(), trajectory.finish_reason, self.unfinished_reward),
                )
                for trajectory, grade in (grown[place] for place in range(len(starts)))
            ]

        requests = []
        for place, start in enumerate(starts):
            budget = context.settings.token_budget(start.prompt_ids, self._budget(context, start.problem))
            growing[place] = ForkJoin(glue, limits, start.prompt_ids, budget)
            requests += sampled(place, growing[place].begin())
        return Growth(requests, on_result, graded)

    def _budget(self, context: RolloutContext, problem: Problem) -> int:
        return context.task.of(problem).sampling(self.sampling).max_tokens

    def _request(self, context: RolloutContext, start: Start, call: Call) -> Request:
        return Request(
            prompt_ids=call.context_ids,
            seed=derive_seed(start.seed, repr(call.branch), call.turn),
            n=1,
            sampling=replace(self.sampling, max_tokens=call.max_tokens, stop_ids=call.stop_ids),
            reads_logprobs=context.settings.reads_logprobs,
        )

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
            grade=Grade(reward=0.0, outcome="no_answer"),  # until it has been graded
            step_ends=ends,
            numbers={f"threads/{event}": float(answer.events[event]) for event in EVENTS},
        )


def _completion(known: Segment, call: Call, codec: TextCodec) -> Completion:
    """What the engine had answered when the segment was sampled."""
    stopped = known.token_ids[-1] in (*call.stop_ids, *codec.end_ids)
    reason: FinishReason = "stop" if stopped else "length"
    # Where it is only gone on from, nobody asks how likely it was.
    logprobs = [0.0] * len(known.token_ids) if known.logprobs is None else known.logprobs
    return Completion(known.token_ids, logprob_array(logprobs), reason, known.policy_version or 0)


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
