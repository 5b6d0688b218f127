"""Languages of turns: small conversations of a policy and an environment, all of which can be enumerated.

In each turn the policy chooses an action in a state. The environment replies: it shows an observation, pays a
reward, and moves to another state or ends the answer. Policy and environment are tables, so that values,
advantages and gradients are known exactly.

Example: in `decisive_turn(0)`, the action of the first turn is right with probability 0.25. The environment
shows 1 after a right action and 2 after a wrong one. The two later turns change nothing, and the last one
earns 1 if the first was right::

    start ──┬── action 0 ── shows 1 ── "right, turn 1" ── … ── reward 1
            └── action 1 ── shows 2 ── "wrong, turn 1" ── … ── reward 0

An answer is written with one token for an action (1 + action, sampled) and one for an observation (100 +
observation, injected).

Shapes. In the names of arrays, K stands for the turns of an answer and P for the policy's logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treetune.vocabulary import Fork, Grade, Problem, Segment, Trajectory, logprob_array, token_array

FIRST_ACTION_ID = 1
FIRST_OBSERVATION_ID = 100
TOKENS_OF_TURN = 2
"""Tokens of a turn that isn't the last: an action and an observation."""
PROMPT_ID = 50


class Reply(NamedTuple):
    """A possible reply of the environment. Example: ``Reply(0.5, observation=1, reward=1.0, state="2")``."""

    probability: float
    observation: int
    reward: float = 0.0
    state: str | None = None
    """The next state; None ends the answer, and the observation isn't shown."""


class PlayedTurn(NamedTuple):
    """A turn of an answer. Example: ``PlayedTurn("start", action=0, reply=Reply(1.0, 1, 0.0, "middle"))``."""

    state: str
    action: int
    reply: Reply


class PlayedAnswer(NamedTuple):
    """An answer, or the rest of one from a state on, and its probability from there."""

    turns: tuple[PlayedTurn, ...]
    probability: float

    @property
    def reward(self) -> float:
        """The sum of the rewards of all turns."""
        return sum(turn.reply.reward for turn in self.turns)

    def return_from(self, turn: int) -> float:
        """Returns the sum of the rewards of this turn and the later ones."""
        return sum(played.reply.reward for played in self.turns[turn:])


Distribution = dict[float, float]
"""Probabilities by number. Example, for the reward of an answer: ``{0.0: 0.75, 1.0: 0.25}``."""


@dataclass(frozen=True, eq=False)
class TurnTable:
    """A language of turns.

    The policy's parameters are a logit for each action in each state. An answer that is in the same state
    several times uses the same logits each time.
    """

    policy: Mapping[str, tuple[float, ...]]
    """The probability of each action, by state."""
    replies: Mapping[tuple[str, int], tuple[Reply, ...]]
    """The possible replies to an action in a state."""
    max_turns: int
    """The number of turns after which an answer ends, in whichever state it is."""
    start: str = "start"

    # Answers

    @cached_property
    def answers(self) -> list[PlayedAnswer]:
        """All possible answers."""
        return self.continuations_from(self.start, self.max_turns)

    def continuations_from(self, state: str | None, turns_left: int) -> list[PlayedAnswer]:
        """Returns all ways in which an answer may continue from a state with `turns_left` turns left.

        The state None is the end of the answer, from which the only continuation has no turns."""
        if state is None or turns_left == 0:
            return [PlayedAnswer((), 1.0)]
        continuations = []
        for turn, probability in self.next_turns(state):
            for later in self.continuations_from(turn.reply.state, turns_left - 1):
                continuations.append(PlayedAnswer((turn, *later.turns), probability * later.probability))
        return continuations

    def next_turns(self, state: str) -> list[tuple[PlayedTurn, float]]:
        """Returns all turns that may follow in a state, with their probabilities."""
        turns = []
        for action, chance in enumerate(self.policy[state]):
            for reply in self.replies[state, action]:
                turns.append((PlayedTurn(state, action, reply), chance * reply.probability))
        return turns

    # Exact values

    def value(self, state: str | None, turns_left: int) -> float:
        """Returns the expected sum of the rewards from a state on."""
        return sum(reward * chance for reward, chance in self.returns(state, turns_left).items())

    def returns(self, state: str | None, turns_left: int) -> Distribution:
        """Returns the distribution of the sum of the rewards from a state on."""
        key = (state, turns_left)
        if key not in self._returns_by_state:
            distribution: Distribution = {}
            for later in self.continuations_from(state, turns_left):
                distribution[later.reward] = distribution.get(later.reward, 0.0) + later.probability
            self._returns_by_state[key] = distribution
        return self._returns_by_state[key]

    @cached_property
    def _returns_by_state(self) -> dict[tuple[str | None, int], Distribution]:
        """What `returns` has computed so far, by state and turns left: every group asks for the same ones."""
        return {}

    def expected_turns(self, state: str | None, turns_left: int) -> float:
        """Returns the expected number of turns from a state on."""
        continuations = self.continuations_from(state, turns_left)
        return sum(len(later.turns) * later.probability for later in continuations)

    def true_advantage(self, turn: PlayedTurn, turns_left: int) -> float:
        """Returns Q(state, action) − V(state). `turns_left` counts the turns that are left before the turn.

        The environment's reply is not the policy's choice, so its luck is not part of the advantage.
        """
        action_value = 0.0
        for reply in self.replies[turn.state, turn.action]:
            action_value += reply.probability * (reply.reward + self.value(reply.state, turns_left - 1))
        return action_value - self.value(turn.state, turns_left)

    def true_advantages(self, turns: Sequence[PlayedTurn]) -> NDArray[np.float64]:
        """Returns the true advantage of each turn of an answer."""
        return np.array(
            [self.true_advantage(turn, self.max_turns - number) for number, turn in enumerate(turns)]
        )

    # Gradients

    @cached_property
    def _logits_of_state(self) -> dict[str, slice]:
        """The indices of each state's logits among the policy's P logits (each action of each state)."""
        slices, first = {}, 0
        for state, chances in self.policy.items():
            slices[state] = slice(first, first + len(chances))
            first += len(chances)
        return slices

    def scores_KP(self, turns: Sequence[PlayedTurn]) -> NDArray[np.float64]:
        """Returns ∇ log π of each turn's action: a row over the policy's P logits for each of the K turns.

        The policy is a softmax. At the logits of the turn's state, a row is minus the probabilities, plus 1
        at the action's logit. At the logits of other states, a row is 0.
        """
        n_logits = sum(len(chances) for chances in self.policy.values())
        scores_KP = np.zeros((len(turns), n_logits))
        for number, turn in enumerate(turns):
            logits = self._logits_of_state[turn.state]
            scores_KP[number, logits] = -np.array(self.policy[turn.state])
            scores_KP[number, logits.start + turn.action] += 1
        return scores_KP

    @cached_property
    def true_gradient(self) -> NDArray[np.float64]:
        """The gradient of the expected reward by the policy's P logits.

        By the policy gradient theorem: the expected sum of advantage times score over an answer's K turns.
        """
        gradient_P = np.zeros(sum(len(chances) for chances in self.policy.values()))
        for answer in self.answers:
            advantages_K = self.true_advantages(answer.turns)
            gradient_P += answer.probability * (advantages_K @ self.scores_KP(answer.turns))
        return gradient_P

    # What credits take

    def trajectory(
        self, turns: Sequence[PlayedTurn], problem: str = "0", sample: int = 0, fork: Fork | None = None
    ) -> Trajectory:
        """Returns an answer as rollouts make it, with a token for each action and each observation.

        Example: the actions 0 and 1, with the observation 1 between them, are the tokens 1, 101 and 2.
        """
        segments: list[Segment] = []
        step_ends: list[int] = []
        tokens = 0
        for number, turn in enumerate(turns):
            logprob = float(np.log(self.policy[turn.state][turn.action]))
            action_ids = token_array([FIRST_ACTION_ID + turn.action])
            segments.append(
                Segment(action_ids, "sampled", logprobs=logprob_array([logprob]), policy_version=0)
            )
            tokens += 1
            if number < len(turns) - 1:  # nothing is sampled after the last turn, so its reply isn't shown
                observation_ids = token_array([FIRST_OBSERVATION_ID + turn.reply.observation])
                segments.append(Segment(observation_ids, "injected"))
                tokens += 1
            step_ends.append(tokens)
        rewards = tuple(turn.reply.reward for turn in turns)
        return Trajectory(
            problem=Problem(problem, prompt="?", gold=""),
            sample=sample,
            prompt_ids=token_array([PROMPT_ID]),
            segments=tuple(segments),
            finish_reason="stop",
            text="",
            grade=Grade(sum(rewards), "ok"),
            step_ends=tuple(step_ends),
            # As in `Trajectory.step_rewards`: empty if the whole reward is earned at the end.
            step_rewards=rewards if any(rewards[:-1]) else (),
            fork=fork,
        )


# The languages


def decisive_turn(decisive: int, turns: int = 3, right: float = 0.25) -> TurnTable:
    """Returns a language in which the action of one turn decides, and the other actions change nothing.

    A language is a policy and an environment, both given as tables. `decisive` is the number of the turn,
    from 0. Its action is right with probability `right`. The environment shows whether the answer is
    undecided (0), right (1) or wrong (2) so far.
    """
    policy: dict[str, tuple[float, ...]] = {}
    replies: dict[tuple[str, int], tuple[Reply, ...]] = {}
    undecided, right_so_far, wrong_so_far = 0, 1, 2  # the observations, the second field of `Reply`
    names = ("undecided", "right", "wrong")
    for number in range(turns):
        # The observations that the environment may have shown before this turn.
        shown_before = (undecided,) if number <= decisive else (right_so_far, wrong_so_far)
        for observation in shown_before:
            state = "start" if number == 0 else f"{names[observation]}, turn {number}"
            policy[state] = (right, 1 - right) if number == decisive else (0.5, 0.5)
            for action in (0, 1):
                shown_observation = observation
                if number == decisive:
                    shown_observation = right_so_far if action == 0 else wrong_so_far
                if number == turns - 1:
                    reply = Reply(1.0, shown_observation, reward=float(shown_observation == right_so_far))
                else:
                    reply = Reply(
                        1.0, shown_observation, state=f"{names[shown_observation]}, turn {number + 1}"
                    )
                replies[state, action] = (reply,)
    return TurnTable(policy, replies, turns)


def corridor(turns: int = 3) -> TurnTable:
    """Returns a language in which states recur: a corridor of three places.

    A language is a policy and an environment, both given as tables. The policy walks to the right (action 0)
    or to the left (1). The last place earns 1 and ends the answer. The environment shows the place.
    """
    policy = {"start": (0.5, 0.5), "middle": (0.5, 0.5)}
    # A reply of the environment is `Reply(probability, observation, …)`.
    to_start, to_middle = Reply(1.0, 0, state="start"), Reply(1.0, 1, state="middle")
    replies = {
        ("start", 0): (to_middle,),
        ("start", 1): (to_start,),  # a wall
        ("middle", 0): (Reply(1.0, 2, reward=1.0),),
        ("middle", 1): (to_start,),
    }
    return TurnTable(policy, replies, turns)


def unreliable_tool() -> TurnTable:
    """Returns a language in which the same observation follows two different actions, and luck remains.

    A language is a policy and an environment, both given as tables. The first turn chooses a good tool
    (action 0) or a bad tool (1). Both tools show the same result. The second turn trusts the result (action
    0) or not. Trust is right with probability 0.9 after the good tool and 0.6 after the bad tool.
    """
    policy = {"start": (0.5, 0.5), "good": (0.5, 0.5), "bad": (0.5, 0.5)}
    # The replies of the environment to each action: `Reply(probability, observation, …)`.
    replies: dict[tuple[str, int], tuple[Reply, ...]] = {
        ("start", 0): (Reply(1.0, 0, state="good"),),
        ("start", 1): (Reply(1.0, 0, state="bad"),),
    }
    for state, right in (("good", 0.9), ("bad", 0.6)):
        replies[state, 0] = (Reply(right, 0, reward=1.0), Reply(1 - right, 0))
        replies[state, 1] = (Reply(1 - right, 0, reward=1.0), Reply(right, 0))
    return TurnTable(policy, replies, 2)


def agreement(same: float = 0.75) -> TurnTable:
    """Returns a language in which the second action earns 1 if it is the same as the first.

    A language is a policy and an environment, both given as tables. The policy repeats its first action with
    probability `same`; with 0.5, the second action ignores the first. The environment always shows 0.
    """
    policy = {"start": (0.5, 0.5), "after 0": (same, 1 - same), "after 1": (1 - same, same)}
    # The replies of the environment to each action: `Reply(probability, observation, …)`.
    replies: dict[tuple[str, int], tuple[Reply, ...]] = {}
    for first in (0, 1):
        replies["start", first] = (Reply(1.0, 0, state=f"after {first}"),)
        for second in (0, 1):
            replies[f"after {first}", second] = (Reply(1.0, 0, reward=float(first == second)),)
    return TurnTable(policy, replies, 2)


def further_turns(turns: int = 3, goes_on: float = 0.8, earns: float = 0.5) -> TurnTable:
    """Returns a language in which the policy decides how many turns an answer has.

    A language is a policy and an environment, both given as tables. Action 0 takes another turn, action 1
    ends the answer. Each turn earns 1 with probability `earns`, and the environment shows what the turn
    earned. The last turn has one action, since the answer must end. `TurnLanguage` of
    `treetune.lab.arena.turns` is the same language.
    """
    policy: dict[str, tuple[float, ...]] = {}
    # The replies of the environment to each action: `Reply(probability, observation, …)`.
    replies: dict[tuple[str, int], tuple[Reply, ...]] = {}
    for number in range(turns):
        state = "start" if number == 0 else f"turn {number}"
        is_last = number == turns - 1
        policy[state] = (1.0,) if is_last else (goes_on, 1 - goes_on)
        for action in range(len(policy[state])):
            next_state = None if is_last or action == 1 else f"turn {number + 1}"
            replies[state, action] = (
                Reply(earns, 1, reward=1.0, state=next_state),
                Reply(1 - earns, 0, reward=0.0, state=next_state),
            )
    return TurnTable(policy, replies, turns)


def turn_tables() -> dict[str, TurnTable]:
    """Returns the languages (policy and environment) of the page docs/results/turn_credits.md, by name."""
    return {
        "first turn decides": decisive_turn(0),
        "last turn decides": decisive_turn(2),
        "corridor": corridor(),
        "unreliable tool": unreliable_tool(),
        "agreement": agreement(),
        "further turns": further_turns(),
    }
