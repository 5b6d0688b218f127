"""Value estimators, and what they work on: answers, their states, and continuations on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Answers, Finding, Need
from treetune.engine.base import SamplingParams
from treetune.rollouts.base import CriticSettings
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.rollouts.values import (
    AnswerPrefix,
    Budget,
    ContinuationPlan,
    EarlyContinuations,
    Estimate,
    FixedBudget,
    StateRule,
)
from treetune.tree import State, Tree, sharing_of
from treetune.vocabulary import Metrics, Problem, Segment, TokenIds, Trajectory

T = TypeVar("T")

# Estimates of states, each distinct one once, the work shared by the ranks


class ProblemStates(NamedTuple):
    """States of one problem that are to be valued."""

    problem: Problem
    prompt_ids: TokenIds
    paths: Sequence[Sequence[Segment]]
    states: Sequence[tuple[int, int]]
    """The index of a path, and how many of its tokens belong to the state."""

    def without_logprobs(self) -> ProblemStates:
        """Returns the same without what nobody needs to continue a state, as ranks send it to each other."""
        paths = []
        for path in self.paths:
            paths.append([replace(segment, logprobs=None) for segment in path])
        return self._replace(paths=paths)

    def prefixes(self) -> Iterator[AnswerPrefix]:
        for path, length in self.states:
            yield AnswerPrefix.of(self.problem, self.prompt_ids, self.paths[path], length)


def estimates(
    context: RolloutContext,
    wanted: Sequence[ProblemStates],
    rule: StateRule,
    plan: ContinuationPlan,
    balanced: bool = True,
) -> tuple[list[list[Estimate]], list[Estimate]]:
    """Returns the estimates of this rank's states, in their order, and those of all ranks' distinct states.

    An estimate does not depend on the rank that makes it. The work is `balanced` over the ranks, or else each
    state stays with the first rank that has it, where it was begun early. Collective.
    """
    gathered = context.ranks.exchange("value-states", [problem.without_logprobs() for problem in wanted])
    of_ranks = [(rank, problem) for rank, of_rank in enumerate(gathered) for problem in of_rank]
    of_ranks.sort(key=lambda rank_and_problem: rank_and_problem[1].problem.id)
    distinct: dict[bytes, AnswerPrefix] = {}
    ranks: dict[bytes, int] = {}  # the rank that continues each distinct state
    for rank, problem in of_ranks:
        # Neighbours in this order share most of their tokens, so that dealing them out like cards gives
        # every rank about the same work.
        for prefix in sorted(problem.prefixes(), key=_big_endian_ids):
            key = prefix.key
            if key not in distinct:
                distinct[key] = prefix
                ranks[key] = len(ranks) % context.ranks.world_size if balanced else rank
    local = [prefix for key, prefix in distinct.items() if ranks[key] == context.ranks.rank]
    made = context.ranks.exchange("value-estimates", rule.estimate(context, local, plan))
    in_order = [iter(estimates_of_rank) for estimates_of_rank in made]
    by_key = {key: next(in_order[rank]) for key, rank in ranks.items()}
    of_wanted = [[by_key[prefix.key] for prefix in problem.prefixes()] for problem in wanted]
    return of_wanted, list(by_key.values())


def _big_endian_ids(prefix: AnswerPrefix) -> bytes:
    """Returns the ids as bytes that sort as the ids do."""
    return prefix.token_ids.astype(">i4").tobytes()


def check_continuations(samples: int, temperature: float, key: str = "temperature") -> Iterator[Finding]:
    """Returns a finding where all continuations of a state would be the same one."""
    if temperature == 0:
        same = f"{samples} continuations are" if samples > 1 else "a continuation is"
        yield Finding(
            f"{same} sampled at temperature 0, so that all of them earn the same",
            key,
            "sample above 0, or choose a credit without continuations, such as 'group'",
        )


# Values along answers


class Value(NamedTuple):
    """The value of a state to one answer."""

    value: float
    """What the steps before the state have brought about."""
    variance: float
    """Of the value as an estimate."""
    samples: int = 1
    """Rewards of which it is the mean."""
    baseline: float | None = None
    """The number that the steps behind the state are compared with, if it is another than the value. It must
    not depend on what the answer did from there on; then its bias is none of the gradient's."""

    @property
    def baseline_or_value(self) -> float:
        return self.value if self.baseline is None else self.baseline


StepValues = list[Value | None]
"""Values before each step of an answer; None where there is no value, and so no boundary: the step and the
one before it are credited as one. Where the first is None, nothing is known of the answer."""


def mean_of(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> Value | None:
    """Returns their mean, with the variance of a mean of so many binomial rewards between `low` and `high`.

    The share in it is shrunk towards one half, as if one more had earned `high` and one more `low` (Laplace):
    equal rewards don't say that there is no noise.
    """
    if not rewards:
        return None
    width = high - low
    share = (sum((reward - low) / width for reward in rewards) + 1) / (len(rewards) + 2)
    share = min(max(share, 0.0), 1.0)
    variance = share * (1 - share) * width**2 / len(rewards)
    return Value(mean(rewards), variance, len(rewards))


class AnswerState(NamedTuple):
    """A state as one answer has it: all that stands before one of its steps.

    Example: the state before the second step of an answer, the third one of the iteration's first tree. It
    begins with nine tokens, which lie in the tree's node 4::

        AnswerState(tree=0, leaf=2, length=9, state=State(problem='train/17', node=4, offset=9))
    """

    tree: int
    """Index of the tree among those that are valued."""
    leaf: int
    """Index of the answer among the leaves of its tree."""
    length: int
    """Tokens of the answer that belong to the state."""
    state: State
    """Equal for all answers that begin alike."""


class ValuedAnswer(NamedTuple):
    """An answer that is valued, and its states: one before each of its steps, the prompt first."""

    tree: Tree
    leaf: int
    states: Sequence[AnswerState]

    @property
    def trajectory(self) -> Trajectory:
        return self.tree.leaves[self.leaf]

    @property
    def reward(self) -> float:
        return self.tree.leaves[self.leaf].reward


@dataclass
class Valuation:
    """The answers that credit values: those of this rank's trees, and the continuations of their states so
    far."""

    context: RolloutContext
    trees: Sequence[Tree]
    rule: StateRule
    sampling: SamplingParams
    samples: int
    """Continuations that a state usually has."""
    max_states: int | None = None
    """Bounds the states of an answer."""
    answers: list[ValuedAnswer] = field(init=False)
    """The answers of all trees, tree after tree. Values are lists with one entry for each of them."""
    estimates: dict[State, Estimate] = field(default_factory=dict)
    """By the states of these trees that were continued."""
    all_estimates: list[Estimate] = field(default_factory=list)
    """All ranks' estimates."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of all ranks' states, from estimators."""

    def __post_init__(self) -> None:
        self.answers = []
        for number, tree in enumerate(self.trees):
            for leaf, answer in enumerate(tree.leaves):
                starts = self.rule.step_starts(answer)[: self.max_states]
                states = [AnswerState(number, leaf, start, tree.state(leaf, start)) for start in starts]
                self.answers.append(ValuedAnswer(tree, leaf, states))

    @property
    def states(self) -> Iterator[AnswerState]:
        """Yields the states of all answers, answer after answer."""
        for answer in self.answers:
            yield from answer.states

    def by_tree(self, of_answers: Sequence[T]) -> list[Sequence[T]]:
        """Returns what there is one of for each answer, in a list for each tree."""
        by_tree = []
        first = 0
        for tree in self.trees:
            by_tree.append(of_answers[first : first + len(tree.leaves)])
            first += len(tree.leaves)
        return by_tree

    def sample(
        self, wanted: Iterable[AnswerState], budget: Budget | None = None, balanced: bool = True
    ) -> None:
        """Samples continuations of those of these states that have none yet: `samples` of each, or what the
        budget says. The work is `balanced` over the ranks, or else each state stays where it is. Collective.
        """
        missing: list[dict[State, AnswerState]] = [{} for _ in self.trees]
        for wanted_state in wanted:
            if wanted_state.state not in self.estimates:
                missing[wanted_state.tree].setdefault(wanted_state.state, wanted_state)
        local, of_all = estimates(
            self.context,
            [
                ProblemStates(
                    tree.problem,
                    tree.prompt_ids,
                    [leaf.segments for leaf in tree.leaves],
                    [(first.leaf, first.length) for first in of_tree.values()],
                )
                for tree, of_tree in zip(self.trees, missing, strict=True)
            ],
            self.rule,
            ContinuationPlan(budget or FixedBudget(self.samples), self.sampling),
            balanced,
        )
        for of_tree, tree_estimates in zip(missing, local, strict=True):
            self.estimates.update(zip(of_tree, tree_estimates, strict=True))
        self.all_estimates += of_all

    def sample_first(self, estimator: ValueEstimator) -> None:
        """Samples the continuations that the estimator wants of each answer whatever the others are. Where
        credit is pipelined, they were sampled when the answer came. Collective.
        """
        first: list[AnswerState] = []
        for answer in self.answers:
            first += [answer.states[index] for index in estimator.first_states(len(answer.states))]
        not_begun = self.context.find(EarlyContinuations) is None
        self.sample(first, estimator.budget(self.samples), balanced=not_begun)

    def on_any_rank(self, condition: bool) -> bool:
        """Returns whether it is true on any rank. Collective."""
        return any(holds for (holds,) in self.context.ranks.exchange("value-waves", [condition]))

    def value(self, state: State) -> Value | None:
        """Returns the mean reward of the state's continuations; None where there are none."""
        estimate = self.estimates.get(state)
        return None if estimate is None else mean_of(estimate.rewards)

    def values(self) -> list[StepValues]:
        """Returns `value` of every state, answer by answer."""
        return [[self.value(at.state) for at in answer.states] for answer in self.answers]

    def sibling_rewards(self) -> dict[AnswerState, list[float]]:
        """Returns what the other answers earned that went through each state of an answer."""
        shared = [shared_tokens(tree) for tree in self.trees]
        rewards = {}
        for at in self.states:
            rewards[at] = list(rewards_below(self.trees[at.tree], shared[at.tree], at.leaf, at.length))
        return rewards

    def values_with(self, others: Mapping[AnswerState, Sequence[float]]) -> list[StepValues]:
        """Returns the means of what each state's continuations and `others` earned, answer by answer."""
        values: list[StepValues] = []
        for answer in self.answers:
            step_values: StepValues = []
            for at in answer.states:
                estimate = self.estimates.get(at.state)
                continued = () if estimate is None else estimate.rewards
                step_values.append(mean_of([*continued, *others[at]]))
            values.append(step_values)
        return values


def rewards_below(tree: Tree, shared: list[list[int]], leaf: int, length: int) -> Iterator[float]:
    """Yields what the other answers earned that begin with the first `length` tokens of an answer.

    Where answers grew out of each other, those that also share what follows there depend on what the answer
    did there, and are left out; of every other branch it is the mean, weighted by what its answers reach.
    """
    alike = [other for other in range(len(tree.leaves)) if shared[leaf][other] >= length]
    if not tree.forked:
        yield from (tree.leaves[other].reward for other in alike if other != leaf)
        return
    sharing = sharing_of(tree)
    branches: dict[int, list[int]] = {}
    for other in alike:
        branches.setdefault(sharing.branch_at(other, length), []).append(other)
    branches.pop(sharing.branch_at(leaf, length), None)
    for leaves in branches.values():
        reached = [sharing.reach[sharing.paths[other][-1]] for other in leaves]
        yield mean([tree.leaves[other].reward for other in leaves], reached)


def shared_tokens(tree: Tree) -> list[list[int]]:
    """Returns how many tokens each pair of a tree's answers begins with alike. Answers in one line."""
    import numpy as np

    ids = [leaf.response_ids for leaf in tree.leaves]
    shared = [[0] * len(ids) for _ in ids]
    for first in range(len(ids)):
        for second in range(first + 1, len(ids)):
            length = min(len(ids[first]), len(ids[second]))
            differ = np.flatnonzero(ids[first][:length] != ids[second][:length])
            shared[first][second] = shared[second][first] = int(differ[0]) if len(differ) else length
    return shared


# Estimators


class ValueEstimator(Registrable):
    """Finds the values of states."""

    to_declare = ("unbiased",)

    unbiased: bool
    """Whether the mean of an estimate over all that could have been sampled is the state's value, and the
    expectation of the gradient so the policy gradient."""

    learns_from_others: bool = False
    """Whether values of one problem depend on what was sampled of others."""

    @property
    def continues(self) -> bool:
        """True where it samples continuations."""
        return True

    @property
    def critic_settings(self) -> CriticSettings | None:
        """Settings of the critic that it asks; None where it asks none."""
        return None

    def budget(self, samples: int) -> Budget:
        """Returns how often a state is continued, which usually has so many continuations."""
        return FixedBudget(samples)

    def first_states(self, states: int) -> Sequence[int]:
        """Returns which of an answer's so many states, numbered from the prompt on, it continues with that
        budget whatever the other answers are and whatever continuations earned.

        `Valuation.sample_first` samples these, and a run may do so as soon as the answer is graded, while
        others are still sampled. None by default: for estimators that have to see all answers first, or
        sample nothing.
        """
        return ()

    def values(self, valuation: Valuation) -> list[StepValues]:
        """Returns the values of each of `Valuation.answers`, one for each of its states. Collective."""
        raise NotImplementedError


@ValueEstimator.register("continuations")
@dataclass(frozen=True, kw_only=True)
class FreshContinuations(ValueEstimator):
    """The mean reward of `samples` fresh continuations (Kazemnejad et al., arXiv:2410.01679, section 4).

    With `count_siblings`, the other answers to the problem that went through a state count as continuations
    of it, which they are: they cost nothing. An answer's own reward stays out, so that its values don't
    depend on what it did next. Unbiased with and without."""

    unbiased = True

    count_siblings: bool = False

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        more = Need(Answers(2), "count_siblings counts the other answers", "set it to false")
        return (more,) if self.count_siblings else ()

    @override
    def first_states(self, states: int) -> Sequence[int]:
        return range(states)

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        valuation.sample_first(self)
        if not self.count_siblings:
            return valuation.values()
        return valuation.values_with(valuation.sibling_rewards())
