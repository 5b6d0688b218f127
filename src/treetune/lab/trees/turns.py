"""Trees of turns: answers of several turns that branch off from each other (rollout `turn_tree`).

Tree-GRPO (Ji et al., arXiv:2509.21240) and BranPO (Zhao et al., arXiv:2602.03719) grow such trees for agents.
A branch begins after a turn and the environment's reply to it. The environment then has the state that it
had there::

    round 0    turn 1 ── reply ── turn 2 ── reply ── turn 3           answer 0, from the prompt
               the rule returns Branches(sample=0, tokens=…, further=1): after the first reply
    round 1    turn 1 ── reply ──┬── turn 2 ── reply ── turn 3        answer 0
                                 └── turn 2' ── …                     answer 1

All trees grow at the same time, each in its own coroutine, and none waits for another. The rollout
`multi_turn` samples the answers; `branching` says where trees branch; the credit `tree` gives advantages to
turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Experiment, Finding
from treetune.domains.multi_turn import MultiTurn, TurnStates, check_restorable, close_turn_journal
from treetune.lab.trees.branching import Branching
from treetune.lab.trees.rollout import NEEDS_OF_TREES, check_shared_tokens, tree_metrics
from treetune.rollouts.answers import Start, measure_trees, rank_share
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.seeds import derive_seed
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Fork, Metrics, Problem, Segment, TokenIds, Trajectory


@Rollout.register("turn_tree")
@dataclass(frozen=True, kw_only=True)
class TurnTree(MultiTurn):
    """Samples `samples` answers of several turns to each problem, as `multi_turn` does. Round by round it
    samples further answers, which branch off after a turn of another answer, as `branching` says (Tree-GRPO,
    arXiv:2509.21240; BranPO, arXiv:2602.03719). Every answer is trained on. Turns that answers share are
    sampled once. Each problem's tree grows by itself, without waiting for other problems.

    A branch begins in the state that the environment had after the turn where it branches off. The
    environment gets into this state by a copy, or by playing the turns again (`Environment.again`). All
    branches have the same random events, since the environment's seed derives from the problem. The limits of
    turns and tokens count from the prompt. Each branch has the whole deadline of an answer.

    The metrics ``tree/…`` are those of the rollout `tree`; observations don't count as sampled tokens. In the
    metrics ``turns/…``, the seconds and events of a turn that several answers share count only for the first
    of these answers.
    """

    samples: Annotated[int, Gt(0)] = 4
    """The number of answers that are sampled from each problem's prompt."""
    branching: Branching
    """The rule that says where trees branch, and into how many answers. Its `states` must be
    ``{type: 'turns'}``, since an environment has no state within a turn."""

    needs = NEEDS_OF_TREES

    @property
    @override
    def rollout_for_fixed_problems(self) -> Rollout:
        # The same settings without the tree: answers in evaluations, and continuations that credit samples,
        # don't branch.
        settings = {field.name: getattr(self, field.name) for field in fields(MultiTurn)}
        return MultiTurn(**settings)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        yield from check_shared_tokens(experiment)
        reason = "a branch begins where a turn begins, since an environment has no state within a turn"
        states = getattr(self.branching, "states", None)
        if states is None:
            yield Finding(
                f"{reason}, and this branching has no states",
                "branching.type",
                "choose one that has, such as {type: 'at_states', states: {type: 'turns'}, ways: [2]}",
            )
        elif not isinstance(states, TurnStates):
            yield Finding(
                f"{reason}, and the branching has other states",
                "branching.states.type",
                "set the branching's states to {type: 'turns'}",
            )
        yield from check_restorable(
            self.environments(experiment), "branching", "choose the rollout 'multi_turn'"
        )

    @override
    def most_answers(self, problems: int) -> int:
        return problems * self.branching.most_answers(self.samples)

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        assert context.engine is not None, "a rollout that samples needs an engine"
        prompts = self.encode_prompts(context, problems)
        answering = _CountedAnswers(self, context, self.limit_in_flight(context))

        async def grow_all() -> list[Tree]:
            growing = []
            for problem in rank_share(context, problems):
                growing.append(self._grow(answering, problem, prompts[problem.id]))
            return await asyncio.gather(*growing)

        try:
            trees, metrics = measure_trees(context, context.engine.run(grow_all()))
        finally:
            close_turn_journal(context)
        return trees, metrics | tree_metrics(context, trees)

    async def _grow(self, answering: _CountedAnswers, problem: Problem, prompt_ids: TokenIds) -> Tree:
        """Samples a problem's answers round by round until the branching asks for no more."""
        context = answering.context
        answers: list[Trajectory] = []
        # One entry for each answer to sample in this round. None: the answer begins at the prompt.
        forks: list[Fork | None] = [None] * self.samples
        round_number = 0
        while forks:
            starts = []
            for sample, fork in enumerate(forks, start=len(answers)):
                segments = () if fork is None else segments_before(answers[fork.sample], fork.tokens)
                # The number of the answer enters its seed: two answers that begin with the same tokens must
                # have different seeds. The rollout `multi_turn`, whose answers all begin at the prompt,
                # derives the same seeds for them.
                seed = derive_seed(context.seed, context.iteration, problem.id, self.seed_name, sample)
                starts.append(Start(problem, prompt_ids, seed, segments))
            # `gather` keeps the order of the starts, so the order in which answers end does not matter.
            new_answers = await asyncio.gather(*(answering.answer(start) for start in starts))
            for answer, fork in zip(new_answers, forks, strict=True):
                answers.append(replace(answer, sample=len(answers), fork=fork))
            forks = []
            for branch in self.branching.branches(answers, round_number):
                forks += [Fork(branch.sample, branch.tokens)] * branch.further
            round_number += 1
        (tree,) = trees_of(answers)  # all answers are to one problem, so they make one tree
        return tree


@dataclass
class _CountedAnswers:
    """Samples the answers of all trees, and shows in the run's log how many requested answers are done."""

    rollout: TurnTree
    context: RolloutContext
    in_flight: asyncio.Semaphore
    requested_answers: int = 0
    finished_answers: int = 0

    async def answer(self, start: Start) -> Trajectory:
        self.requested_answers += 1
        answer = await self.rollout.answer(self.context, start, self.in_flight)
        self.finished_answers += 1
        self.context.log.progress(self.finished_answers, self.requested_answers)
        return answer


def segments_before(answer: Trajectory, tokens: int) -> tuple[Segment, ...]:
    """Returns the segments of an answer's first `tokens` tokens. One of its segments must end there.

    The segments are returned whole and not copied, because the last one may hold a snapshot of the
    environment, from which the branch then begins.
    """
    segments: list[Segment] = []
    remaining_tokens = tokens
    for segment in answer.segments:
        if remaining_tokens <= 0:
            break
        segments.append(segment)
        remaining_tokens -= len(segment.token_ids)
    assert remaining_tokens == 0, f"{answer.id}: no segment ends after {tokens} tokens"
    return tuple(segments)
