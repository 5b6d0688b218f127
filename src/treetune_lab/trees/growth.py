"""One problem's tree while it grows: what is there of it, and what to sample next."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from treetune.columns import TokenIds, joined
from treetune.inference.base import Completion, Request, SamplingParams
from treetune.rollouts.answers import before_stop, is_decided, steps_of, with_unfinished
from treetune.rollouts.context import RolloutContext
from treetune.seeds import derive_seed
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Fork, Grade, Problem, Segment, Trajectory
from treetune_lab.trees.branching import Branches, Branching

UNGRADED = Grade(reward=0.0, outcome="no_answer")


@dataclass(frozen=True)
class _Asked:
    """A request of this round, and the branches that its samples are for, in their order."""

    request: Request
    begun: tuple[Branches, ...]


@dataclass
class Growth:
    """`answers` are those of all rounds that are whole, their segments still uncut. A round's answers are put
    in the order in which they were asked for, so that it does not matter in which they come.

    `most_tokens` bounds what may be sampled: there are no branches that could exceed it if they were as long
    as they may be.
    """

    context: RolloutContext
    problem: Problem
    prompt_ids: TokenIds
    sampling: SamplingParams
    branching: Branching
    samples: int
    most_tokens: int | None
    unfinished_reward: float | None
    answers: list[Trajectory] = field(default_factory=list)
    sampled_tokens: int = 0
    _round: int = -1
    _asked: list[_Asked] = field(default_factory=list)
    _received: dict[int, list[Completion]] = field(default_factory=dict)
    _grades: list[dict[int, list[Future[Grade]]]] = field(default_factory=list)
    """Of each round by the number of the request."""

    def begin(self) -> list[Request]:
        place = (self.context.iteration, self.problem.id, "rollout")
        seed = derive_seed(self.context.seed, *place)
        request = Request(self.prompt_ids, seed=seed, n=self.samples, sampling=self.sampling)
        return self._ask([_Asked(request, ())])

    def receive(self, number: int, completions: list[Completion]) -> list[Request]:
        """What to sample after the answers to this round's request of that number: nothing before all of the
        round are there."""
        begun = self._beginnings(self._asked[number])
        self._received[number] = completions
        self._grades[-1][number] = [
            self._submitted(begun_ids, completion)
            for (_, begun_ids), completion in zip(begun, completions, strict=True)
        ]
        if len(self._received) < len(self._asked):
            return []
        for place, asked in enumerate(self._asked):
            for (branch, begun_ids), one in zip(self._beginnings(asked), self._received[place], strict=True):
                self._add(branch, begun_ids, one)
        return self._ask(self._requests(self._affordable(self.branching.branches(self.answers, self._round))))

    def tree(self) -> Tree:
        """Once nothing is asked any more. Waits for grades."""
        grades = [
            future.result()
            for of_round in self._grades
            for number in range(len(of_round))
            for future in of_round[number]
        ]
        answers = [
            replace(
                answer,
                segments=segments,
                grade=with_unfinished(grade, answer.finish_reason, self.unfinished_reward),
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
        """One for each distinct state: answers may begin alike by chance."""
        by_state: dict[bytes, list[Branches]] = {}
        for one in wanted:
            begun_ids = self.answers[one.sample].response_ids[: one.tokens]
            by_state.setdefault(begun_ids.tobytes(), []).append(one)
        asked = []
        for branches in by_state.values():
            begun_ids = self.answers[branches[0].sample].response_ids[: branches[0].tokens]
            state = repr(tuple(begun_ids.tolist()))
            place = (self.context.iteration, self.problem.id, state, "tree", self._round)
            request = Request(
                prompt_ids=joined([self.prompt_ids, begun_ids]),
                seed=derive_seed(self.context.seed, *place),
                n=sum(one.further for one in branches),
                sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(begun_ids)),
            )
            asked.append(_Asked(request, tuple(branches)))
        return asked

    def _affordable(self, wanted: Sequence[Branches]) -> list[Branches]:
        if self.most_tokens is None:
            return list(wanted)
        costs = accumulate(one.further * (self.sampling.max_tokens - one.tokens) for one in wanted)
        left = self.most_tokens - self.sampled_tokens
        return [one for one, cost in zip(wanted, costs, strict=True) if cost <= left]

    def _beginnings(self, asked: _Asked) -> list[tuple[Branches | None, TokenIds]]:
        """Of each sample of a request what it goes on from."""
        if not asked.begun:
            return [(None, joined([]))] * asked.request.n
        return [
            (one, self.answers[one.sample].response_ids[: one.tokens])
            for one in asked.begun
            for _ in range(one.further)
        ]

    def _submitted(self, begun_ids: TokenIds, completion: Completion) -> Future[Grade]:
        text = self.context.codec.decode(joined([begun_ids, completion.token_ids]))
        decided = is_decided(completion.finish_reason, self.unfinished_reward)
        said = before_stop(text, self.sampling.stop)
        return self.context.grader.submit(said, self.problem, decided=decided)

    def _add(self, branch: Branches | None, begun_ids: TokenIds, completion: Completion) -> None:
        self.sampled_tokens += len(completion.token_ids)
        response_ids = joined([begun_ids, completion.token_ids])
        text = self.context.codec.decode(response_ids)
        own = (completion.segment(),)
        begun = () if branch is None else _begun(self.answers[branch.sample].segments, branch.tokens)
        self.answers.append(
            Trajectory(
                problem=self.problem,
                sample=len(self.answers),
                prompt_ids=self.prompt_ids,
                segments=begun + own,
                finish_reason=completion.finish_reason,
                text=text,
                grade=UNGRADED,
                step_ends=steps_of(self.context, self.problem, response_ids, text, self.sampling.stop),
                fork=None if branch is None else Fork(branch.sample, branch.tokens),
            )
        )


def _begun(segments: Sequence[Segment], tokens: int) -> tuple[Segment, ...]:
    """The first `tokens` tokens."""
    found = []
    for segment in segments:
        own = min(tokens, len(segment.token_ids))
        if own:
            found.append(_part(segment, 0, own))
        tokens -= own
    return tuple(found)


def _part(segment: Segment, start: int, end: int) -> Segment:
    """The seconds of a request are those of what it sampled last."""
    whole = end == len(segment.token_ids)
    return replace(
        segment,
        token_ids=segment.token_ids[start:end],
        logprobs=None if segment.logprobs is None else segment.logprobs[start:end],
        seconds=segment.seconds if whole else None,
    )


def cut_at_forks(answers: Sequence[Trajectory]) -> list[tuple[Segment, ...]]:
    """The segments of each answer, whose last one is what was sampled for it, with a cut wherever any answer
    forks off from it: so that what answers share are whole segments."""
    found: list[tuple[Segment, ...]] = []
    for answer in answers:
        begins = 0 if answer.fork is None else answer.fork.tokens
        own = answer.segments[-1]
        forks = {
            one.fork.tokens - begins
            for one in answers
            if one.fork is not None and one.fork.sample == answer.sample
        }
        ends = sorted({0, *forks, len(own.token_ids)})
        pieces = tuple(_part(own, start, end) for start, end in pairwise(ends))
        found.append((() if answer.fork is None else _begun(found[answer.fork.sample], begins)) + pieces)
    return found
