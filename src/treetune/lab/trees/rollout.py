"""Answers that grow out of each other: the rollout is a tree."""

from __future__ import annotations

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
from treetune.lab.trees.branching import Branches, Branching
from treetune.rollouts.answers import (
    UNGRADED,
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
        growing = []
        for problem in rank_share(context, problems):
            prompt_ids, sampling = prompts[problem.id], context.task.of(problem).sampling(self.sampling)
            max_tokens = context.settings.token_budget(prompt_ids, sampling.max_tokens)
            growing.append(
                _GrowingTree(context, problem, prompt_ids, replace(sampling, max_tokens=max_tokens), self)
            )
        owners: list[tuple[_GrowingTree, int]] = []  # of each request: its tree, and its number in the round
        done = total = 0

        def noted(tree: _GrowingTree, requests: list[Request]) -> list[Request]:
            nonlocal total
            owners.extend((tree, number) for number in range(len(requests)))
            total += sum(request.n for request in requests)
            return requests

        def on_result(index: int, completions: list[Completion]) -> list[Request]:
            nonlocal done
            tree, number = owners[index]
            done += len(completions)
            further = noted(tree, tree.receive(number, completions))
            context.log.progress(done, total)
            return further

        requests = [request for tree in growing for request in noted(tree, tree.begin())]
        if requests:
            context.engine.generate(requests, on_result)
        trees, metrics = measured_trees(context, [tree.tree() for tree in growing])
        return trees, metrics | tree_metrics(context, trees)


class _Asked(NamedTuple):
    """A request of a round, and the branches that its samples are for, in their order; none for the first
    request, whose samples begin at the prompt."""

    request: Request
    branches: tuple[Branches, ...]


@dataclass
class _GrowingTree:
    """The tree of a problem while it grows.

    `answers` are those of all finished rounds, their segments still uncut. A round's answers are put in the
    order in which they were requested, so that it does not matter in which they come.
    """

    context: RolloutContext
    problem: Problem
    prompt_ids: TokenIds
    sampling: SamplingParams
    rollout: TreeRollout
    answers: list[Trajectory] = field(default_factory=list)
    sampled_tokens: int = 0
    _round: int = -1
    _asked: list[_Asked] = field(default_factory=list)
    _received: dict[int, list[Completion]] = field(default_factory=dict)
    _grades: list[dict[int, list[Future[Grade]]]] = field(default_factory=list)
    """By round and number of the request."""

    def begin(self) -> list[Request]:
        key = (self.context.iteration, self.problem.id, "rollout")
        seed = derive_seed(self.context.seed, *key)
        request = Request(self.prompt_ids, seed=seed, n=self.rollout.samples, sampling=self.sampling)
        return self._ask([_Asked(request, ())])

    def receive(self, number: int, completions: list[Completion]) -> list[Request]:
        """Takes the answers to this round's request of that number. Returns the next round's requests once
        all of the round are there."""
        self._received[number] = completions
        self._grades[-1][number] = [
            self._submit(prefix_ids, completion)
            for (_, prefix_ids), completion in zip(
                self._prefixes(self._asked[number]), completions, strict=True
            )
        ]
        if len(self._received) < len(self._asked):
            return []
        for number, asked in enumerate(self._asked):
            for (branch, prefix_ids), completion in zip(
                self._prefixes(asked), self._received[number], strict=True
            ):
                self._add(branch, prefix_ids, completion)
        return self._ask(self._requests(self.rollout.branching.branches(self.answers, self._round)))

    def tree(self) -> Tree:
        """Returns the tree, once nothing is requested any more. Waits for grades."""
        grades = [
            future.result()
            for of_round in self._grades
            for number in range(len(of_round))
            for future in of_round[number]
        ]
        unfinished_reward = self.rollout.unfinished_reward
        answers = [
            replace(
                answer,
                segments=segments,
                grade=with_unfinished(grade, answer.finish_reason, unfinished_reward),
            )
            for answer, segments, grade in zip(self.answers, cut_at_forks(self.answers), grades, strict=True)
        ]
        (tree,) = trees_of(answers)
        return tree

    def _ask(self, asked: list[_Asked]) -> list[Request]:
        self._round += 1
        self._asked, self._received = asked, {}
        self._grades.append({})
        return [one.request for one in asked]

    def _requests(self, wanted: Sequence[Branches]) -> list[_Asked]:
        """Returns one request for each distinct state: answers may begin alike by chance."""
        if self.rollout.most_tokens is not None:
            costs = accumulate(one.further * (self.sampling.max_tokens - one.tokens) for one in wanted)
            left = self.rollout.most_tokens - self.sampled_tokens
            wanted = [one for one, cost in zip(wanted, costs, strict=True) if cost <= left]
        by_state: dict[bytes, list[Branches]] = {}
        for one in wanted:
            prefix_ids = self.answers[one.sample].response_ids[: one.tokens]
            by_state.setdefault(prefix_ids.tobytes(), []).append(one)
        asked = []
        for branches in by_state.values():
            prefix_ids = self.answers[branches[0].sample].response_ids[: branches[0].tokens]
            state = repr(tuple(prefix_ids.tolist()))
            key = (self.context.iteration, self.problem.id, state, "tree", self._round)
            request = Request(
                prompt_ids=joined([self.prompt_ids, prefix_ids]),
                seed=derive_seed(self.context.seed, *key),
                n=sum(one.further for one in branches),
                sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(prefix_ids)),
            )
            asked.append(_Asked(request, tuple(branches)))
        return asked

    def _prefixes(self, asked: _Asked) -> list[tuple[Branches | None, TokenIds]]:
        """Returns for each sample of a request its branch, and the tokens that it continues."""
        if not asked.branches:
            return [(None, joined([]))] * asked.request.n
        return [
            (one, self.answers[one.sample].response_ids[: one.tokens])
            for one in asked.branches
            for _ in range(one.further)
        ]

    def _submit(self, prefix_ids: TokenIds, completion: Completion) -> Future[Grade]:
        text = self.context.codec.decode(joined([prefix_ids, completion.token_ids]))
        decided = is_decided(completion.finish_reason, self.rollout.unfinished_reward)
        graded_text = before_stop(text, self.sampling.stop)
        return self.context.grader.submit(graded_text, self.problem, decided=decided)

    def _add(self, branch: Branches | None, prefix_ids: TokenIds, completion: Completion) -> None:
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
        forks = {
            one.fork.tokens - begins
            for one in answers
            if one.fork is not None and one.fork.sample == answer.sample
        }
        ends = sorted({0, *forks, len(last.token_ids)})
        pieces = tuple(_part(last, start, end) for start, end in pairwise(ends))
        cut.append((() if answer.fork is None else _prefix(cut[answer.fork.sample], begins)) + pieces)
    return cut
