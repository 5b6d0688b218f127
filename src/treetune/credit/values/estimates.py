"""Estimates the values of states from continuations. Each distinct state is continued once, by one rank.

    every rank's states ── exchange ──> the distinct states of all ranks, in one order
                                        each is given to one rank ── StateRule.estimate ──> estimates
    every rank's estimates <── exchange ── estimates

An estimate does not depend on the rank that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from treetune.credit.states.base import AnswerPrefix, ContinuationPlan, Estimate, StateRule
from treetune.rollouts.context import RolloutContext
from treetune.vocabulary import Problem, Segment, TokenIds


class StateOfPath(NamedTuple):
    """A state of an answer: the first tokens of the answer's path, which is the list of its segments."""

    path: int
    """The index of the path in `ProblemStates.paths`."""
    length: int
    """The number of response tokens in the state; 0 for the prompt."""


class ProblemStates(NamedTuple):
    """States of one problem that are to be valued.

    Example: of an answer of two segments with 6 tokens each, the states after 0 and after 9 tokens::

        ProblemStates(
            problem,
            prompt_ids,
            paths=[[first, second]],
            states=[StateOfPath(path=0, length=0), StateOfPath(path=0, length=9)],
        )
    """

    problem: Problem
    prompt_ids: TokenIds
    paths: Sequence[Sequence[Segment]]
    """The segments of each answer."""
    states: Sequence[StateOfPath]

    def without_logprobs(self) -> ProblemStates:
        """Returns the same states, with segments that have no log-probs. No continuation needs log-probs, and
        without them the messages between ranks are smaller."""
        paths = []
        for segments_of_answer in self.paths:
            paths.append([replace(segment, logprobs=None) for segment in segments_of_answer])
        return self._replace(paths=paths)

    def prefixes(self) -> Iterator[AnswerPrefix]:
        """Yields each state as a prompt with the first tokens of an answer, in the order of `states`."""
        for state in self.states:
            yield AnswerPrefix.of(self.problem, self.prompt_ids, self.paths[state.path], state.length)


def estimate_states(
    context: RolloutContext,
    problems: Sequence[ProblemStates],
    rule: StateRule,
    plan: ContinuationPlan,
    balanced: bool = True,
) -> tuple[list[list[Estimate]], list[Estimate]]:
    """Continues the states of all ranks, and returns their estimates. Collective.

    Args:
        context: The context of the phase.
        problems: The states of this rank, by problem.
        rule: The rule that continues them.
        plan: How often, and with which sampling parameters, each state is continued.
        balanced: True: the states are distributed evenly over the ranks. False: each state is continued on
            the first rank that has it, since `EarlyContinuations` may have begun its continuations there.

    Returns:
        The estimates of this rank's states, one list for each of `problems`, in the order of their states;
        and the estimates of all ranks' distinct states.
    """
    ranks = context.ranks
    problems_by_rank = ranks.exchange("value-states", [problem.without_logprobs() for problem in problems])
    rank_of_key, prefix_of_key = _assign_to_ranks(problems_by_rank, ranks.world_size, balanced)
    local_prefixes = [prefix for key, prefix in prefix_of_key.items() if rank_of_key[key] == ranks.rank]
    local_estimates = rule.estimate(context, local_prefixes, plan)
    estimates_by_rank = ranks.exchange("value-estimates", local_estimates)

    # Each key takes the next estimate of its rank, since each rank has estimated its keys in the order of
    # `rank_of_key`. Example: if the ranks of the keys a, b, c are 0, 1, 0, then rank 0 has returned the
    # estimates of a and c, and rank 1 that of b.
    upcoming_by_rank = [iter(estimates_of_rank) for estimates_of_rank in estimates_by_rank]
    estimate_of_key = {key: next(upcoming_by_rank[rank]) for key, rank in rank_of_key.items()}
    estimates_by_problem = []
    for problem in problems:
        estimates_by_problem.append([estimate_of_key[prefix.key] for prefix in problem.prefixes()])
    return estimates_by_problem, list(estimate_of_key.values())


def _assign_to_ranks(
    problems_by_rank: Sequence[Sequence[ProblemStates]], world_size: int, balanced: bool
) -> tuple[dict[bytes, int], dict[bytes, AnswerPrefix]]:
    """Assigns each distinct state to a rank. Returns two dictionaries by the keys of the states: the ranks,
    and the states.

    All ranks compute the same dictionaries, in the same order. With `balanced`, the states are assigned to
    the ranks in turn; without it, each state to the first rank that has it.
    """
    # The states of each problem, and the rank that has them.
    ranks_and_states: list[tuple[int, ProblemStates]] = []
    for rank, problems_of_rank in enumerate(problems_by_rank):
        ranks_and_states += [(rank, problem_states) for problem_states in problems_of_rank]
    ranks_and_states.sort(key=lambda rank_and_states: rank_and_states[1].problem.id)
    rank_of_key: dict[bytes, int] = {}
    prefix_of_key: dict[bytes, AnswerPrefix] = {}
    for rank, problem_states in ranks_and_states:
        # Assigning the states in turn balances the work: neighbours in the order of their token ids share
        # most of their tokens, so they are about equally far from the end of an answer.
        for prefix in sorted(problem_states.prefixes(), key=_sortable_ids):
            key = prefix.key
            if key not in prefix_of_key:
                prefix_of_key[key] = prefix
                rank_of_key[key] = len(rank_of_key) % world_size if balanced else rank
    return rank_of_key, prefix_of_key


def _sortable_ids(prefix: AnswerPrefix) -> bytes:
    """Returns the state's token ids as bytes that sort as the ids do: with the high byte of each id first."""
    return prefix.token_ids.astype(">i4").tobytes()
