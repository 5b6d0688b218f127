"""Answers that grow out of each other: the rollout is a tree."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
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
from treetune.engine.base import Completion, Request, SamplingParams
from treetune.engine.programs import result_of
from treetune.lab.trees.branching import Branches, Branching
from treetune.rollouts.answers import (
    UNGRADED,
    CountedSamples,
    SampledRollout,
    before_stop,
    is_decided,
    measured_trees,
    rank_share,
    steps_of,
    with_unfinished,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean, pooled
from treetune.rollouts.numbers import Number, NumberGroup, declare
from treetune.seeds import derive_seed
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Fork, Grade, Metrics, Problem, Segment, TokenIds, Trajectory, joined

declare(
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
    """Means over all ranks' trees; ``tree/shared`` is 1 − tokens / tokens_of_chains of all. Collective."""
    columns: dict[str, list[float]] = {name: [] for name in ("answers", "nodes", "depth", "tokens")}
    columns["tokens_of_chains"] = []
    for tree in trees:
        columns["answers"].append(len(tree.leaves))
        columns["nodes"].append(len(tree.nodes))
        columns["depth"].append(max(map(len, tree.paths)) - 1)
        columns["tokens"].append(sum(len(node.segment.token_ids) for node in tree.nodes))
        columns["tokens_of_chains"].append(sum(len(leaf.response_ids) for leaf in tree.leaves))
    means = {f"tree/{name}": mean(values) for name, values in pooled(context, "trees", columns).items()}
    return means | {"tree/shared": 1 - means["tree/tokens"] / means["tree/tokens_of_chains"]}


@Rollout.register("tree")
@dataclass(frozen=True, kw_only=True)
class TreeRollout(SampledRollout):
    """`samples` answers to each problem from its prompt, and round by round further ones that begin as an
    answer does up to where the tree branches, as `branching` says. Every answer is trained on, and what
    answers share was sampled once and is trained once. A problem's tree grows as soon as its own answers are
    there, whatever the others do.

    ``tree/…`` are means over trees: answers, nodes, depth, sampled tokens, tokens of as many answers from the
    prompt, and the share of these that didn't have to be sampled.
    """

    samples: Annotated[int, Gt(0)] = 4
    """Answers from the prompt."""
    branching: Branching
    """The rule that says where trees branch, and into how many answers."""
    most_tokens: Annotated[int, Gt(0)] | None = None
    """Bounds what is sampled for a problem: there are no branches that could exceed it if they were as long
    as they may be. What is affordable depends on how long answers came out, which makes even fair branches a
    little unfair where the bound bites. None: there is no bound."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Of sampling, and of the log-probs in training."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, and stay in it."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.samples * self.max_tokens
        if self.most_tokens is not None and self.most_tokens <= least:
            raise ValueError(
                f"most_tokens is {self.most_tokens}, and {self.samples} answers of max_tokens ="
                f" {self.max_tokens} may take {least}, so that no tree would branch: raise it, or leave it"
                " out"
            )

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return SampledAnswers(), Answers(self.samples), OneLine()

    needs = (
        Need(CreditForTrees(), "its answers share tokens, which are trained once"),
        Need(Answers(2), "branches are compared", "set the rollout's samples to 2 or more"),
    )

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        if not experiment.selection.keeps_groups:
            yield Finding(
                "the selection leaves out some of a problem's answers, and with them tokens that the others"
                " share",
                "$.selection.type",
                "choose 'all' or 'mixed_groups'",
            )
        objective = experiment.trainer.objective
        if objective.needs_whole_sequences:
            yield Finding(
                "the objective looks at whole answers, and what they share is trained in one of them alone",
                "$.trainer.objective.type",
                "choose one that looks at tokens, such as 'ppo'",
            )
        elif objective.aggregation == "sequence":
            yield Finding(
                "aggregation 'sequence' would weigh tokens by how many are trained in their answer, which is"
                " only what it doesn't share with an earlier one",
                "$.trainer.objective.aggregation",
                "choose 'token' or 'constant'",
            )

    @override
    def most_answers(self, problems: int) -> int:
        return problems * self.branching.most_answers(self.samples)

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        assert context.engine is not None, "a rollout that samples needs an engine"
        prompts = self.encoded_prompts(context, problems)
        counted = CountedSamples(context)
        growing = []
        for problem in rank_share(context, problems):
            prompt_ids, sampling = prompts[problem.id], context.task.of(problem).sampling(self.sampling)
            max_tokens = context.settings.token_budget(prompt_ids, sampling.max_tokens)
            sampling = replace(sampling, max_tokens=max_tokens)
            growing.append(_GrowingTree(context, problem, prompt_ids, sampling, self, counted))

        async def grow_all() -> list[Tree]:
            return await asyncio.gather(*(tree.grow() for tree in growing))

        trees, metrics = measured_trees(context, context.engine.run(grow_all()))
        return trees, metrics | tree_metrics(context, trees)


class _BranchSample(NamedTuple):
    """A sample that a round asks for: the branch, and the beginning that the answer shares with another.

    Example: two answers that begin with the first 12 tokens of answer 3 are two of these, both with
    ``branch=Branches(sample=3, tokens=12, further=2)``.
    """

    branch: Branches | None
    """None: the answer begins at the prompt."""
    prefix_ids: TokenIds
    """The response tokens before the branch."""


class _RoundRequest(NamedTuple):
    """A request of a round, and what each of its samples is for, in their order."""

    request: Request
    samples: tuple[_BranchSample, ...]


class _GradedLater(NamedTuple):
    """What came back for one sample, and the grade that it will have."""

    sample: _BranchSample
    completion: Completion
    grade: Future[Grade]


@dataclass
class _GrowingTree:
    """The tree of a problem while it grows."""

    context: RolloutContext
    problem: Problem
    prompt_ids: TokenIds
    sampling: SamplingParams
    rollout: TreeRollout
    counted: CountedSamples
    answers: list[Trajectory] = field(default_factory=list)
    """Those of all finished rounds, ungraded, their segments still uncut."""
    sampled_tokens: int = 0

    async def grow(self) -> Tree:
        """Samples round by round until the branching asks for nothing more, and returns the graded tree."""
        grades: list[Future[Grade]] = []
        requests, round_number = [self._first_request()], 0
        while requests:
            # In the order of the requests, so that it does not matter in which their samples come.
            for samples in await asyncio.gather(*(self._sample(request) for request in requests)):
                for graded_later in samples:
                    self._add(graded_later)
                    grades.append(graded_later.grade)
            branches = self.rollout.branching.branches(self.answers, round_number)
            requests = self._requests(branches, round_number)
            round_number += 1
        unfinished_reward = self.rollout.unfinished_reward
        answers = []
        for answer, segments, grade in zip(self.answers, cut_at_forks(self.answers), grades, strict=True):
            known = with_unfinished(await result_of(grade), answer.finish_reason, unfinished_reward)
            answers.append(replace(answer, segments=segments, grade=known))
        (tree,) = trees_of(answers)
        return tree

    async def _sample(self, asked: _RoundRequest) -> list[_GradedLater]:
        """Samples, and hands each answer to the grader as soon as it is there."""
        samples = []
        for sample, completion in zip(asked.samples, await self.counted.sample(asked.request), strict=True):
            text = self.context.codec.decode(joined([sample.prefix_ids, completion.token_ids]))
            grade = self.context.grader.submit(
                before_stop(text, self.sampling.stop),
                self.problem,
                decided=is_decided(completion.finish_reason, self.rollout.unfinished_reward),
            )
            samples.append(_GradedLater(sample, completion, grade))
        return samples

    def _first_request(self) -> _RoundRequest:
        """Returns the request for the answers that begin at the prompt."""
        seed = derive_seed(self.context.seed, self.context.iteration, self.problem.id, "rollout")
        request = Request(self.prompt_ids, seed=seed, n=self.rollout.samples, sampling=self.sampling)
        return _RoundRequest(request, (_BranchSample(None, joined([])),) * request.n)

    def _requests(self, branches: Sequence[Branches], round_number: int) -> list[_RoundRequest]:
        """Returns one request for each distinct state: answers may begin alike by chance."""
        by_state: dict[bytes, list[_BranchSample]] = {}
        for branch in self._affordable(branches):
            prefix_ids = self.answers[branch.sample].response_ids[: branch.tokens]
            samples = by_state.setdefault(prefix_ids.tobytes(), [])
            samples += [_BranchSample(branch, prefix_ids)] * branch.further
        requests = []
        for samples in by_state.values():
            prefix_ids = samples[0].prefix_ids
            state = repr(tuple(prefix_ids.tolist()))
            key = (self.context.iteration, self.problem.id, state, "tree", round_number)
            request = Request(
                prompt_ids=joined([self.prompt_ids, prefix_ids]),
                seed=derive_seed(self.context.seed, *key),
                n=len(samples),
                sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(prefix_ids)),
            )
            requests.append(_RoundRequest(request, tuple(samples)))
        return requests

    def _affordable(self, branches: Sequence[Branches]) -> Sequence[Branches]:
        """Returns the first of these branches, as many as `most_tokens` allows if each answer becomes as long
        as it may be."""
        if self.rollout.most_tokens is None:
            return branches
        costs = accumulate(branch.further * (self.sampling.max_tokens - branch.tokens) for branch in branches)
        left = self.rollout.most_tokens - self.sampled_tokens
        return [branch for branch, cost in zip(branches, costs, strict=True) if cost <= left]

    def _add(self, graded_later: _GradedLater) -> None:
        (branch, prefix_ids), completion, _ = graded_later
        self.sampled_tokens += len(completion.token_ids)
        response_ids = joined([prefix_ids, completion.token_ids])
        text = self.context.codec.decode(response_ids)
        prefix = () if branch is None else _prefix(self.answers[branch.sample].segments, branch.tokens)
        self.answers.append(
            Trajectory(
                problem=self.problem,
                sample=len(self.answers),
                prompt_ids=self.prompt_ids,
                segments=(*prefix, completion.segment()),
                finish_reason=completion.finish_reason,
                text=text,
                grade=UNGRADED,
                step_ends=steps_of(self.context, self.problem, response_ids, text, self.sampling.stop),
                fork=None if branch is None else Fork(branch.sample, branch.tokens),
            )
        )


def _prefix(segments: Sequence[Segment], tokens: int) -> tuple[Segment, ...]:
    """Returns the segments of the first `tokens` tokens."""
    parts = []
    for segment in segments:
        count = min(tokens, len(segment.token_ids))
        if count:
            parts.append(_part(segment, 0, count))
        tokens -= count
    return tuple(parts)


def _part(segment: Segment, start: int, end: int) -> Segment:
    """Returns a part of a segment. The seconds of a request go to what it sampled last."""
    whole = end == len(segment.token_ids)
    return replace(
        segment,
        token_ids=segment.token_ids[start:end],
        logprobs=None if segment.logprobs is None else segment.logprobs[start:end],
        seconds=segment.seconds if whole else None,
    )


def cut_at_forks(answers: Sequence[Trajectory]) -> list[tuple[Segment, ...]]:
    """Returns the segments of each answer, whose last one is what was sampled for it, with a cut wherever any
    answer forks off from it, so that answers share whole segments."""
    cut: list[tuple[Segment, ...]] = []
    for answer in answers:
        begins = 0 if answer.fork is None else answer.fork.tokens
        last = answer.segments[-1]
        forks = set()
        for other in answers:
            if other.fork is not None and other.fork.sample == answer.sample:
                forks.add(other.fork.tokens - begins)
        ends = sorted({0, *forks, len(last.token_ids)})
        pieces = tuple(_part(last, start, end) for start, end in pairwise(ends))
        cut.append((() if answer.fork is None else _prefix(cut[answer.fork.sample], begins)) + pieces)
    return cut
