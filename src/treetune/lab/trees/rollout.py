"""Sampled trees: answers that branch off from each other (rollout `tree`).

SPO-tree (Guo et al., arXiv:2505.23564), TreePO (Li et al., arXiv:2508.17445) and TreeRL (Hou et al.,
arXiv:2506.11902) sample such trees. They differ in where trees branch, which the rollout's `branching` says.
Each problem's tree grows in its own coroutine::

    round 0    n answers from the prompt ────── sampled ── submitted to the grader
    round 1    branches of these answers ────── sampled ── submitted to the grader
    ...        until the branching asks for no more; then the tree waits for its grades

All trees grow at the same time, and none waits for another. The credit `tree` (`treetune.credit.trees`)
gives advantages to their nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, NamedTuple

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import (
    Answers,
    CreditForTrees,
    Experiment,
    Feature,
    Finding,
    Need,
    OneLine,
    SampledAnswers,
)
from treetune.engine.programs import result_of
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.lab.trees.branching import Branches, Branching
from treetune.rollouts.answers import (
    UNGRADED,
    CountedSamples,
    SampledRollout,
    apply_unfinished_reward,
    cut_at_stop,
    is_decided,
    measure_trees,
    rank_share,
    split_steps,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean, pool_columns
from treetune.rollouts.numbers import Number, NumberGroup, declare_group
from treetune.seeds import derive_seed
from treetune.tasks.mixed import task_of
from treetune.tree import Sharing, Tree, trees_of
from treetune.vocabulary import (
    Fork,
    Grade,
    Metrics,
    Problem,
    Segment,
    TokenIds,
    Trajectory,
    are_sampled,
    concatenate,
)

declare_group(
    NumberGroup(
        "tree",
        {
            "answers": Number("answers of a tree"),
            "nodes": Number("nodes of a tree: stretches of tokens between branchings"),
            "depth": Number("branchings on the longest way through a tree"),
            "tokens": Number("sampled tokens of a tree"),
            "tokens_of_chains": Number("tokens of a tree's answers, had each been sampled from the prompt"),
            "shared": Number(
                "share of answers' tokens that weren't sampled for them", share=True, label="shared"
            ),
        },
    )
)


def tree_metrics(context: RolloutContext, trees: Sequence[Tree]) -> Metrics:
    """Returns the means of the metrics ``tree/…`` over the trees of all ranks.

    ``tree/tokens_of_chains`` is the number of tokens that a tree's answers would have cost without sharing.
    ``tree/shared`` is 1 − tokens / tokens_of_chains, computed from the two means.

    Collective: every rank must call it.
    """
    names = ("answers", "nodes", "depth", "tokens", "tokens_of_chains")
    columns: dict[str, list[float]] = {name: [] for name in names}
    for tree in trees:
        sharing = Sharing.of(tree)
        tokens_of_answers = [int(are_sampled(leaf.segments).sum()) for leaf in tree.leaves]
        columns["answers"].append(len(tree.leaves))
        columns["nodes"].append(len(sharing.leaves_below))  # an entry for each stretch between branchings
        stretches_of_longest_path = max(map(len, sharing.paths))
        columns["depth"].append(stretches_of_longest_path - 1)  # between two stretches is a branching
        columns["tokens"].append(tree.sampled_tokens)
        columns["tokens_of_chains"].append(sum(tokens_of_answers))
    means = {f"tree/{name}": mean(values) for name, values in pool_columns(context, "trees", columns).items()}
    return means | {"tree/shared": 1 - means["tree/tokens"] / means["tree/tokens_of_chains"]}


NEEDS_OF_TREES = (
    Need(CreditForTrees(), "its answers share tokens, which are trained once"),
    Need(Answers(2), "branches are compared", "set the rollout's samples to 2 or more"),
)


def check_shared_tokens(experiment: Experiment) -> Iterable[Finding]:
    """Yields findings on parts of an experiment that can't handle answers that share tokens."""
    if not experiment.selection.keeps_groups:
        yield Finding(
            "the selection drops some of a problem's answers, and with them tokens that the others share",
            "$.selection.type",
            "choose 'all' or 'mixed_groups'",
        )
    objective = experiment.trainer.objective
    if objective.needs_whole_sequences:
        yield Finding(
            "the objective needs whole answers, and tokens that answers share are trained in one of them"
            " alone",
            "$.trainer.objective.type",
            "choose one that looks at tokens, such as 'ppo'",
        )
    elif objective.aggregation == "sequence":
        yield Finding(
            "aggregation 'sequence' would weigh tokens by the number of trained tokens of their answer,"
            " and tokens that it shares with an earlier answer are not trained in it",
            "$.trainer.objective.aggregation",
            "choose 'token' or 'constant'",
        )


@Rollout.register("tree")
@dataclass(frozen=True, kw_only=True)
class TreeRollout(SampledRollout):
    """Samples `samples` answers to each problem from its prompt, and round by round further answers that
    branch off from answers of the tree, as `branching` says. Every answer is trained on. Tokens that answers
    share are sampled once and trained once. Each problem's tree grows by itself, without waiting for other
    problems.

    The metrics ``tree/…`` are means over trees: answers, nodes, depth, sampled tokens, the tokens that the
    tree's answers would have cost without sharing, and the share of these tokens that sharing saved.
    """

    samples: Annotated[int, Gt(0)] = 4
    """The number of answers that are sampled from each problem's prompt."""
    branching: Branching
    """The rule that says where trees branch, and into how many answers."""
    most_tokens: Annotated[int, Gt(0)] | None = None
    """The largest number of tokens that are sampled for a problem. The first branch of a round that could
    exceed it at full length is left out, and so are all that follow it in the round. How many are left out
    depends on the lengths of the answers so far, so an unbiased branching becomes slightly biased where the
    bound matters. null: there is no bound."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Temperature of sampling, and of the log-probs in training."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, and stay in it."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        tokens_before_branches = self.samples * self.max_tokens
        if self.most_tokens is not None and self.most_tokens <= tokens_before_branches:
            raise ValueError(
                f"most_tokens is {self.most_tokens}, and {self.samples} answers of max_tokens ="
                f" {self.max_tokens} may take {tokens_before_branches}, which leaves no tokens for branches:"
                " raise it, or leave it out"
            )

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return SampledAnswers(), Answers(self.samples), OneLine()  # each answer by itself has no threads

    needs = NEEDS_OF_TREES

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        yield from check_shared_tokens(experiment)

    @override
    def most_answers(self, problems: int) -> int:
        return problems * self.branching.most_answers(self.samples)

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        assert context.engine is not None, "a rollout that samples needs an engine"
        prompts = self.encode_prompts(context, problems)
        counted_samples = CountedSamples(context)
        growing_trees = []
        for problem in rank_share(context, problems):
            prompt_ids = prompts[problem.id]
            # In a mixture of tasks, the problem's task has its own stop strings and its own budget. A long
            # prompt leaves fewer tokens of the context for the answer.
            sampling = task_of(context.task, problem).adjust_sampling(self.sampling)
            max_tokens = context.settings.token_budget(prompt_ids, sampling.max_tokens)
            sampling = replace(sampling, max_tokens=max_tokens)
            growing_trees.append(_GrowingTree(context, problem, prompt_ids, sampling, self, counted_samples))

        async def grow_all() -> list[Tree]:
            return await asyncio.gather(*(tree.grow() for tree in growing_trees))

        trees, metrics = measure_trees(context, context.engine.run(grow_all()))
        return trees, metrics | tree_metrics(context, trees)


class _BranchSample(NamedTuple):
    """A sample that a round requests: the branch from which it continues, and the tokens before the branch.

    Example: two answers that begin with the first 12 tokens of answer 3 are two `_BranchSample`, both with
    ``branch=Branches(sample=3, tokens=12, further=2)``.
    """

    branch: Branches | None
    """None: the answer begins at the prompt."""
    prefix_ids: TokenIds
    """The response tokens before the branch."""


class _RoundRequest(NamedTuple):
    """A request of a round, and what its `n` samples are for, in their order."""

    request: Request
    samples: tuple[_BranchSample, ...]


class _SubmittedSample(NamedTuple):
    """The completion of a sample, whose answer has been submitted to the grader, and its future grade."""

    branch_sample: _BranchSample
    completion: Completion
    grade: Future[Grade]


@dataclass
class _GrowingTree:
    """A problem's tree while it grows. `grow` samples it."""

    context: RolloutContext
    problem: Problem
    prompt_ids: TokenIds
    sampling: SamplingParams
    rollout: TreeRollout
    counted_samples: CountedSamples
    answers: list[Trajectory] = field(default_factory=list)
    """The answers of all finished rounds, without grades. `cut_at_forks` cuts their segments only when the
    tree is complete."""
    sampled_tokens: int = 0
    """Tokens that were sampled for the tree so far."""

    async def grow(self) -> Tree:
        """Samples round by round until the branching asks for no more, and returns the graded tree."""
        grades: list[Future[Grade]] = []
        requests = [self._first_request()]
        round_number = 0
        while requests:
            # `gather` keeps the order of the requests, so the order in which samples arrive does not matter.
            samples_of_requests = await asyncio.gather(*(self._sample(request) for request in requests))
            for submitted_samples in samples_of_requests:
                for submitted in submitted_samples:
                    self._add_answer(submitted)
                    grades.append(submitted.grade)
            answers = self.answers
            # Most branchings don't read grades: then the tree grows on while its answers are graded.
            if self.rollout.branching.needs_grades:
                answers = await self._wait_for_grades(grades)
            branches = self.rollout.branching.branches(answers, round_number)
            requests = self._make_requests(branches, round_number)
            round_number += 1
        graded_answers = await self._wait_for_grades(grades)
        # The nodes of a tree are whole segments. So the segments are cut where other answers fork off.
        cut_answers = []
        for answer, segments in zip(graded_answers, cut_at_forks(graded_answers), strict=True):
            cut_answers.append(replace(answer, segments=segments))
        (tree,) = trees_of(cut_answers)  # all answers are to one problem, so they make one tree
        return tree

    async def _wait_for_grades(self, grades: Sequence[Future[Grade]]) -> list[Trajectory]:
        """Waits for the grades of all answers so far, and returns the answers with them."""
        graded = []
        for answer, future in zip(self.answers, grades, strict=True):
            grade = await result_of(future)
            grade = apply_unfinished_reward(grade, answer.finish_reason, self.rollout.unfinished_reward)
            graded.append(replace(answer, grade=grade))
        return graded

    async def _sample(self, round_request: _RoundRequest) -> list[_SubmittedSample]:
        """Samples the answers of a request, and submits each to the grader when the request is answered."""
        submitted_samples = []
        completions = await self.counted_samples.sample(round_request.request)
        for branch_sample, completion in zip(round_request.samples, completions, strict=True):
            # The whole answer is decoded at once: a character may consist of tokens before and after the
            # branch.
            text = self.context.codec.decode(concatenate([branch_sample.prefix_ids, completion.token_ids]))
            # If the answer gets `unfinished_reward` anyway, it is `decided`: no judge is asked about it.
            grade = self.context.grader.submit(
                cut_at_stop(text, self.sampling.stop),
                self.problem,
                decided=is_decided(completion.finish_reason, self.rollout.unfinished_reward),
            )
            submitted_samples.append(_SubmittedSample(branch_sample, completion, grade))
        return submitted_samples

    def _first_request(self) -> _RoundRequest:
        """Returns the request for the answers that begin at the prompt."""
        seed = derive_seed(self.context.seed, self.context.iteration, self.problem.id, "rollout")
        request = Request(self.prompt_ids, seed=seed, n=self.rollout.samples, sampling=self.sampling)
        no_tokens = concatenate([])  # an empty array: these answers have no tokens before a branch
        return _RoundRequest(request, (_BranchSample(None, no_tokens),) * request.n)

    def _make_requests(self, branches: Sequence[Branches], round_number: int) -> list[_RoundRequest]:
        """Returns the requests of a round: one for each state from which answers branch.

        A state is the tokens with which an answer begins. Two answers may begin with the same tokens by
        chance, and branch at the same place. The seed of a request derives from the state's tokens. So
        separate requests for these two branches would get the same samples, whereas one request for both gets
        different samples.
        """
        samples_by_state: dict[bytes, list[_BranchSample]] = {}
        for branch in self._affordable_branches(branches):
            prefix_ids = self.answers[branch.sample].response_ids[: branch.tokens]
            samples = samples_by_state.setdefault(prefix_ids.tobytes(), [])
            samples += [_BranchSample(branch, prefix_ids)] * branch.further  # one for each new answer
        requests = []
        for samples in samples_by_state.values():
            prefix_ids = samples[0].prefix_ids
            state = repr(tuple(prefix_ids.tolist()))  # as text: seeds are derived from numbers and texts
            # The round is in the key: a state that branches again in a later round must get other samples.
            key = (self.context.iteration, self.problem.id, state, "tree", round_number)
            request = Request(
                prompt_ids=concatenate([self.prompt_ids, prefix_ids]),
                seed=derive_seed(self.context.seed, *key),
                n=len(samples),
                sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(prefix_ids)),
            )
            requests.append(_RoundRequest(request, tuple(samples)))
        return requests

    def _affordable_branches(self, branches: Sequence[Branches]) -> Sequence[Branches]:
        """Returns the first of these branches, as many as `most_tokens` allows.

        Each new answer counts with the largest length that it may have.
        """
        if self.rollout.most_tokens is None:
            return branches
        tokens_left = self.rollout.most_tokens - self.sampled_tokens
        affordable = []
        for branch in branches:
            tokens_of_an_answer = self.sampling.max_tokens - branch.tokens  # after the branch's prefix
            tokens_left -= branch.further * tokens_of_an_answer
            if tokens_left < 0:
                break
            affordable.append(branch)
        return affordable

    def _add_answer(self, submitted: _SubmittedSample) -> None:
        """Adds the completion as an answer, with the tokens before its branch and without its grade."""
        completion = submitted.completion
        branch, prefix_ids = submitted.branch_sample
        self.sampled_tokens += len(completion.token_ids)
        response_ids = concatenate([prefix_ids, completion.token_ids])
        text = self.context.codec.decode(response_ids)
        prefix = () if branch is None else _cut_prefix(self.answers[branch.sample].segments, branch.tokens)
        self.answers.append(
            Trajectory(
                problem=self.problem,
                sample=len(self.answers),
                prompt_ids=self.prompt_ids,
                segments=(*prefix, completion.segment()),
                finish_reason=completion.finish_reason,
                text=text,
                grade=UNGRADED,
                step_ends=split_steps(self.context, self.problem, response_ids, text, self.sampling.stop),
                fork=None if branch is None else Fork(branch.sample, branch.tokens),
            )
        )


def _cut_prefix(segments: Sequence[Segment], tokens: int) -> tuple[Segment, ...]:
    """Returns the segments of the first `tokens` tokens. The last of them is cut where these tokens end."""
    prefix = []
    remaining_tokens = tokens
    for segment in segments:
        count = min(remaining_tokens, len(segment.token_ids))
        if count:
            prefix.append(_cut_segment(segment, 0, count))
        remaining_tokens -= count
    return tuple(prefix)


def _cut_segment(segment: Segment, start: int, end: int) -> Segment:
    """Returns a segment of the tokens from `start` to `end` of a segment.

    Only the part with the last token keeps the seconds of the request. A sum over all parts of a segment then
    counts them once.
    """
    is_last = end == len(segment.token_ids)
    return replace(
        segment,
        token_ids=segment.token_ids[start:end],
        logprobs=None if segment.logprobs is None else segment.logprobs[start:end],
        seconds=segment.seconds if is_last else None,
    )


def cut_at_forks(answers: Sequence[Trajectory]) -> list[tuple[Segment, ...]]:
    """Returns the segments of each answer, cut wherever another answer forks off. After that, answers share
    whole segments.

    Example: answer 0 has one segment of 40 tokens, and answer 1 forks off after 12. Then the segments of
    answer 0 have 12 and 28 tokens, and the first of them is also the first of answer 1.
    """
    segments_of_answers: list[tuple[Segment, ...]] = []
    for answer in answers:
        # The last segment was sampled for this answer. It begins where the answer forks off. The segments
        # before it were sampled for other answers.
        sampled = answer.segments[-1]
        sampled_from = 0 if answer.fork is None else answer.fork.tokens
        cuts = {0, len(sampled.token_ids)}
        for other in answers:
            if other.fork is not None and other.fork.sample == answer.sample:
                assert other.fork.tokens >= sampled_from, "an answer branches after its own fork"
                cuts.add(other.fork.tokens - sampled_from)
        parts = tuple(_cut_segment(sampled, start, end) for start, end in pairwise(sorted(cuts)))
        if answer.fork is None:
            segments_of_answers.append(parts)
        else:
            # The answer that it forks from comes earlier, and has a cut at the fork already.
            shared = _cut_prefix(segments_of_answers[answer.fork.sample], sampled_from)
            segments_of_answers.append(shared + parts)
    return segments_of_answers
