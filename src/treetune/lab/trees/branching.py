"""Rules for where a problem's tree branches while it is sampled, and into how many answers.

A tree grows in rounds. It begins with independent answers from the prompt. Before each further round the rule
looks at all answers so far and names branch points; the rollout `tree` then samples whole answers from there:

    round 0    prompt ──────────────────────── answer 0
               the rule returns Branches(sample=0, tokens=12, further=2)
    round 1    prompt ──── 12 tokens ──┬────── answer 0
                                       ├────── answer 1
                                       └────── answer 2

SPO-tree (arXiv:2505.23564), TreePO (arXiv:2508.17445), TreeRL (arXiv:2506.11902), BranPO (arXiv:2602.03719)
and Tree-GRPO (arXiv:2509.21240) differ in these rules. The rollout `turn_tree` grows trees of answers of
several turns. It takes only the rules that have the key `states`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from annotated_types import Gt, MinLen
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.credit.states.base import StateRule
from treetune.seeds import derived_random
from treetune.vocabulary import Trajectory, concatenate


class Branches(NamedTuple):
    """A branch point of an answer, and how many further answers begin there.

    Example: ``Branches(sample=3, tokens=12, further=2)`` asks for two answers that begin with the first 12
    response tokens of answer 3.
    """

    sample: int
    """The number of the answer, `Trajectory.sample`."""
    tokens: int
    """The response tokens of this answer before the branch point."""
    further: int
    """How many further answers begin there. The answer itself isn't counted."""


class Branching(Registrable):
    """A rule for where a tree branches. Trees grow in rounds. A round samples all of its branches to the ends
    of their answers."""

    to_declare = ("unbiased",)

    unbiased: bool
    """Whether the tokens after a state have no influence on whether it branches. Then each answer through the
    state is a fair sample of what the policy does there. With the weights `Sharing.reach_weights`, a sum over
    the tree then has the expectation of a sum over independent answers."""
    needs_grades: ClassVar[bool] = False
    """Whether `branches` reads the grades of the answers. A tree then waits for them before it branches."""

    def most_answers(self, samples: int) -> int:
        """Returns the largest number of answers of a tree with `samples` answers from the prompt."""
        raise NotImplementedError

    def branches(self, answers: Sequence[Trajectory], round_number: int) -> list[Branches]:
        """Returns the branches to sample next; none when the tree is complete.

        The result must depend only on the arguments. Then a tree does not depend on the order in which its
        answers arrive.

        Args:
            answers: All answers so far, in the order of their `sample`. They have grades only if this rule
                for branching sets `needs_grades`.
            round_number: The number of the round, from 0 on.
        """
        raise NotImplementedError


def forks_along(answers: Sequence[Trajectory]) -> list[list[int]]:
    """Returns for each answer where its path from the prompt branches: response tokens, in rising order.

    A path branches where the answer forks off, and where others fork off from it. Example: if answer 1 begins
    with the first 12 tokens of answer 0, both paths branch there, and the result is ``[[12], [12]]``.

    Args:
        answers: All answers of the tree so far, in the order of their `sample`: ``answers[i].sample == i``.
            An answer forks from one of an earlier round, which has a smaller number.
    """
    forks_by_answer: list[list[int]] = []
    for answer in answers:
        forks = set()
        for other in answers:
            if other.fork is not None and other.fork.sample == answer.sample:
                forks.add(other.fork.tokens)
        if answer.fork is not None:
            forks.add(answer.fork.tokens)
            # The answer shares the branchings before its fork with the answer that it forked from. That
            # answer has a smaller number, so its list is there already.
            forks_of_parent = forks_by_answer[answer.fork.sample]
            for tokens in forks_of_parent:
                if tokens < answer.fork.tokens:
                    forks.add(tokens)
        forks_by_answer.append(sorted(forks))
    return forks_by_answer


def roots_of(answers: Sequence[Trajectory]) -> list[int]:
    """Returns for each answer the number of its root: the answer from the prompt that it grew from.

    An answer from the prompt is its own root. All other answers follow `fork` back to one.

    Args:
        answers: All answers of the tree so far, in the order of their `sample`.
    """
    roots: list[int] = []
    for answer in answers:
        roots.append(answer.sample if answer.fork is None else roots[answer.fork.sample])
    return roots


def next_states(rule: StateRule, answers: Sequence[Trajectory], round_number: int) -> list[tuple[int, int]]:
    """Returns the states to branch at next, each as the number of an answer and a length in response tokens.

    An answer branches in this round only if its path branched in each round before. It then branches at the
    rule's first state after its last branching, if this state is before the answer's end.
    """
    states = []
    for answer, branchings in zip(answers, forks_along(answers), strict=True):
        if len(branchings) != round_number:
            # The path has one branching for each earlier round. If one is missing, the answer had no state
            # left in that round, or got no branches there. It doesn't branch any more.
            continue
        last_branching = branchings[-1] if branchings else 0
        for start in rule.step_starts(answer):
            if last_branching < start < len(answer.response_ids):
                states.append((answer.sample, start))
                break
    return states


@Branching.register("at_states")
@dataclass(frozen=True, kw_only=True)
class AtStates(Branching):
    """SPO-tree's trees: every answer continues in ``ways[0]`` ways from its first state. Each resulting
    answer continues in ``ways[1]`` ways from its second state, and so on. An answer that ends before a state
    does not branch there.

    With `states` at every 600 tokens, six answers from the prompt and `ways` [6, 6] this is the tree of
    SPO-tree (Guo et al., arXiv:2505.23564). The paper samples each way only up to the next state. Here whole
    answers are sampled: an answer is itself one of the ways from each of its states, and only the other ways
    are added. The trees have the same distribution.
    """

    unbiased = True

    states: StateRule
    """The rule for the states at which an answer branches. The gradient is unbiased only if the position of a
    state depends on nothing but the tokens before it."""
    ways: Annotated[tuple[Annotated[int, Gt(1)], ...], MinLen(1)]
    """The number of ways in which an answer continues from its first state, from its second, …"""

    @override
    def most_answers(self, samples: int) -> int:
        return samples * math.prod(self.ways)

    @override
    def branches(self, answers: Sequence[Trajectory], round_number: int) -> list[Branches]:
        if round_number == len(self.ways):
            return []
        further = self.ways[round_number] - 1  # the answer itself is one of the ways
        states = next_states(self.states, answers, round_number)
        return [Branches(sample, tokens, further) for sample, tokens in states]


@Branching.register("up_to_width")
@dataclass(frozen=True, kw_only=True)
class UpToWidth(Branching):
    """TreePO's trees: a tree gets up to `width` answers. In each round, the answers that have not ended share
    equally the number of answers that are still missing. No answer continues in more than `most_ways` ways.

    Answers that end early leave their share to the others. Which answers have ended is known at the state, so
    the branches there depend on nothing after the state. With `states` at even distances these are TreePO's
    trees (Li et al., arXiv:2508.17445, section 3), without its early stops and without its restarts from
    random positions.
    """

    unbiased = True

    states: StateRule
    """The rule for the states at which an answer branches."""
    width: Annotated[int, Gt(1)]
    """The largest number of answers of a tree."""
    most_ways: Annotated[int, Gt(1)] = 2
    """The largest number of ways in which an answer continues from a state, itself included."""

    @override
    def most_answers(self, samples: int) -> int:
        return max(samples, self.width)

    @override
    def branches(self, answers: Sequence[Trajectory], round_number: int) -> list[Branches]:
        states = next_states(self.states, answers, round_number)
        if not states:
            return []
        missing_answers = max(self.width - len(answers), 0)
        # The states share the missing answers equally. The first `remainder` states get one more each.
        share, remainder = divmod(missing_answers, len(states))
        branches = []
        for index, (sample, tokens) in enumerate(states):
            further = share + 1 if index < remainder else share
            further = min(further, self.most_ways - 1)  # the answer itself is one of the ways
            if further:
                branches.append(Branches(sample, tokens, further))
        return branches


@Branching.register("last_states")
@dataclass(frozen=True, kw_only=True)
class LastStates(Branching):
    """BranPO's branching in the tail (Zhao et al., arXiv:2602.03719): each answer from the prompt continues
    in `ways` ways from each of its last `count` states. The prompt doesn't branch.

    This follows the paper's abstract and its public code, and differs from the code in two points. The code
    branches one to three steps before the end, depending on the accuracy of the group; here `count` is fixed.
    The code keeps a branch only if its reward differs from the answer's; here every branch is kept, since
    dropping branches by their reward adds a bias (docs/results/turn_credits.md).

    **Biased** where the number of states depends on the tokens after a state: then only at the end of the
    answer is it known which states are its last. In the small language of the tests, with states at every
    token, the error of the expected gradient of the credit `tree` is 25 % of the true gradient's length
    (cosine 0.992).
    """

    unbiased = False

    states: StateRule
    """The rule for the states at which an answer may branch."""
    count: Annotated[int, Gt(0)] = 1
    """How many of an answer's last states branch."""
    ways: Annotated[int, Gt(1)] = 2
    """The number of ways in which an answer continues from each of these states, itself included."""

    @override
    def most_answers(self, samples: int) -> int:
        return samples * (1 + self.count * (self.ways - 1))

    @override
    def branches(self, answers: Sequence[Trajectory], round_number: int) -> list[Branches]:
        if round_number > 0:
            return []
        branches = []
        for answer in answers:
            # The state at 0 is the prompt, which doesn't branch.
            starts = [start for start in self.states.step_starts(answer) if start > 0]
            for start in starts[-self.count :]:
                if start < len(answer.response_ids):
                    # The state continues in `ways` ways. The answer itself is one of them.
                    branches.append(Branches(answer.sample, start, self.ways - 1))
        return branches


@Branching.register("random_states")
@dataclass(frozen=True, kw_only=True)
class RandomStates(Branching):
    """Tree-GRPO's trees (Ji et al., arXiv:2509.21240, by its public code): branches at states that are drawn
    uniformly.

    Here a *tree* is one answer from the prompt with all answers that grew from it. In each of `rounds`
    rounds, each of these trees draws `draws` of its states, with replacement, and samples a further answer
    from each drawn state. The prompt is one of the states, and a state that answers share counts once. M
    answers from the prompt become M (1 + rounds · draws) answers.

    No seed is needed: a hash of the tree's tokens draws the states, so a restart draws the same ones.
    **Biased** for two reasons. How likely a state is drawn depends on the number of states after it. And a
    further answer from the prompt counts as much as one of the first `samples`. In a game of two turns, with
    one draw, the expected gradient of the credit `tree` has the right direction and 1.5 times the right
    length.
    """

    unbiased = False

    states: StateRule
    """The rule for the states at which a tree may branch, in addition to the prompt."""
    draws: Annotated[int, Gt(0)] = 2
    """The number of states of a tree that are drawn in a round."""
    rounds: Annotated[int, Gt(0)] = 1
    """The number of rounds of branching."""

    @override
    def most_answers(self, samples: int) -> int:
        return samples * (1 + self.rounds * self.draws)

    @override
    def branches(self, answers: Sequence[Trajectory], round_number: int) -> list[Branches]:
        if round_number == self.rounds:
            return []
        answers_by_root: dict[int, list[Trajectory]] = {}
        for answer, root in zip(answers, roots_of(answers), strict=True):
            answers_by_root.setdefault(root, []).append(answer)
        branches = []
        for root, answers_of_tree in answers_by_root.items():
            # Each state is the number of an answer and a length in response tokens. The first is the prompt.
            states = [(root, 0)]
            for answer in answers_of_tree:
                # The states up to the fork belong to the answer that it forked from, and are listed there.
                shared_tokens = 0 if answer.fork is None else answer.fork.tokens
                for start in self.states.step_starts(answer):
                    if shared_tokens < start < len(answer.response_ids):
                        states.append((answer.sample, start))
            # The tree's tokens take the place of a seed. They differ from iteration to iteration. A restarted
            # run has the same tokens, and so draws the same states.
            tokens_of_tree = repr([answer.response_ids.tolist() for answer in answers_of_tree])
            no_seed = 0
            draw = derived_random(no_seed, answers[root].id, tokens_of_tree, "random states", round_number)
            for sample, tokens in draw.choices(states, k=self.draws):
                branches.append(Branches(sample, tokens, further=1))
        return branches


class _Candidate(NamedTuple):
    """A position at which a tree may branch.

    `logprob` is the first field, so sorting puts the position with the smallest log-prob first."""

    logprob: float
    """The log-prob of the token after the position."""
    sample: int
    """The number of the answer with this token."""
    tokens: int
    """The answer's response tokens before the position."""


@Branching.register("least_sure")
@dataclass(frozen=True, kw_only=True)
class LeastSure(Branching):
    """TreeRL's entropy-guided search (Hou et al., arXiv:2506.11902, section 3.1): branches before the tokens
    that were sampled with the smallest probability. The paper, too, measures the uncertainty of a position by
    −log p of the token that was sampled there.

    Here a *tree* is one answer from the prompt with all answers that grew from it. In each of `rounds`
    rounds, each of these trees branches before its `positions` least probable tokens, into `ways` further
    answers each: M answers from the prompt become M (1 + rounds · positions · ways).

    A position branches only once. **Biased**: whether it branches depends on the token that was sampled there
    and on all other positions, so the answer with this token is not a fair sample of what follows. In the
    small language of the tests, the error of the expected gradient of the credit `tree` is 11 % of the true
    gradient's length (cosine 0.998).
    """

    unbiased = False

    positions: Annotated[int, Gt(0)] = 2
    """At how many positions a tree branches in a round. A position is the place before a token."""
    ways: Annotated[int, Gt(0)] = 2
    """The number of further answers at each of these positions. The answer that was there isn't counted."""
    rounds: Annotated[int, Gt(0)] = 1
    """The number of rounds of branching."""

    @override
    def most_answers(self, samples: int) -> int:
        return samples * (1 + self.rounds * self.positions * self.ways)

    @override
    def branches(self, answers: Sequence[Trajectory], round_number: int) -> list[Branches]:
        if round_number == self.rounds:
            return []
        # An answer's root is the answer from the prompt that it grew from. Each root has its own candidates.
        candidates_by_root: dict[int, list[_Candidate]] = {}
        for answer, root, branchings in zip(answers, roots_of(answers), forks_along(answers), strict=True):
            candidates = candidates_by_root.setdefault(root, [])
            # The tokens before the fork belong to the answer that it forked from. The first token after the
            # fork is left out, since the tree branches there already. Without a fork, the first token of the
            # answer is left out, since a branch before it would share nothing with the answer.
            shared_tokens = 0 if answer.fork is None else answer.fork.tokens
            # Every segment was sampled, and so has log-probs: the condition is for the type checker.
            logprobs = concatenate(
                [segment.logprobs for segment in answer.segments if segment.logprobs is not None]
            )
            # `tokens` is the number of response tokens before the token with this log-prob.
            for tokens, logprob in enumerate(logprobs.tolist()):
                if tokens > shared_tokens and tokens not in branchings:
                    candidates.append(_Candidate(logprob, answer.sample, tokens))
        branches = []
        for candidates in candidates_by_root.values():
            # Candidates sort by log-prob, the smallest first.
            for candidate in sorted(candidates)[: self.positions]:
                # `ways` doesn't count the answer that has this token.
                branches.append(Branches(candidate.sample, candidate.tokens, further=self.ways))
        return branches


@Branching.register("resets")
@dataclass(frozen=True, kw_only=True)
class ResetsOfWrongAnswers(Branching):
    """RRPO's resets (Samanta et al., arXiv:2605.25507, by its abstract): each wrong answer from the prompt
    continues from one of its states, drawn uniformly, in `ways` further answers. The credit `resets` trains
    only the further answers.

    No seed is needed: a hash of the answer's tokens draws the state, so a restart draws the same. Right
    answers, and those that could not be graded, don't branch. **Biased**: whether a state branches depends on
    what the answer earned after it.
    """

    unbiased = False
    needs_grades = True

    states: StateRule
    """The rule for the states from which an answer may continue. The prompt is one of them."""
    ways: Annotated[int, Gt(1)] = 4
    """The number of further answers for each wrong one. The wrong answer itself isn't counted."""

    @override
    def most_answers(self, samples: int) -> int:
        return samples * (1 + self.ways)

    @override
    def branches(self, answers: Sequence[Trajectory], round_number: int) -> list[Branches]:
        if round_number > 0:
            return []  # the further answers themselves don't branch
        branches = []
        for answer in answers:
            if answer.grade.correct or not answer.grade.is_known:
                continue
            starts = [start for start in self.states.step_starts(answer) if start < len(answer.response_ids)]
            # The answer's tokens take the place of a seed. They differ from iteration to iteration. A
            # restarted run has the same tokens, and so draws the same state.
            no_seed = 0
            draw = derived_random(no_seed, answer.id, repr(answer.response_ids.tolist()), "reset")
            # `ways` doesn't count the wrong answer itself.
            branches.append(Branches(answer.sample, draw.choice(starts), further=self.ways))
        return branches
