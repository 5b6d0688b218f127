"""One answer of several turns, as a state machine without an engine and without an environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from treetune.inference.base import Completion
from treetune.rollouts.answers import before_stop
from treetune.vocabulary import FinishReason, GradeOutcome, Segment, TextCodec, TokenIds, joined, token_array
from treetune_domains.environments.base import Turn

EVENTS = {
    "cut": "turns that came to turn_tokens",
    "observations_cut": "observations that were cut",
    "turns_spent": "ends for want of turns",
    "tokens_spent": "ends for want of tokens",
}
"""What is counted of an answer while it grows, and in words."""


@dataclass(frozen=True)
class Limits:
    """See the rollout `multi_turn`."""

    turn_tokens: int
    max_turns: int
    observation_characters: int
    stop: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """A request that an answer needs now: its turn number `turn`, after `context_ids` (the prompt's
    included)."""

    turn: int
    context_ids: TokenIds
    max_tokens: int


@dataclass(eq=False)
class Conversation:
    """One answer of at most `budget` tokens after `prompt_ids`.

    `call` is what to sample next, or None once it has ended; in turn it is told what was `said` (what was
    sampled for the call) and what was `heard` (the environment's answer to `actions`).
    """

    codec: TextCodec
    frame: Callable[[str], str] | None
    """What stands between turns, around an observation; None: what the model's chat has there."""
    limits: Limits
    prompt_ids: TokenIds
    budget: int
    actions: tuple[str, ...] = ()
    """What the policy wrote in each turn so far, as the environment reads it."""
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    finish: FinishReason | None = None

    @property
    def call(self) -> Call | None:
        if self.finish is not None:
            return None
        room = min(self.limits.turn_tokens, self._room)
        return Call(len(self.actions), joined([self.prompt_ids, *(s.token_ids for s in self.segments)]), room)

    def said(self, completion: Completion) -> bool:
        """Whether the environment is to be asked: not where the answer came to its last token in a turn."""
        spent = len(completion.token_ids) == self._room
        self._written(completion.segment())
        if completion.finish_reason == "length" and spent:
            self._end("length", "tokens_spent")
            return False
        self.events["cut"] += completion.finish_reason == "length"
        return True

    def again(self, begun: Sequence[Segment], turns: Sequence[Turn]) -> None:
        """Comes to the end of segments that are there already, which `turns` had followed on.

        Raises ValueError where they follow no more: the environment says something else now.
        """
        sampled = [segment for segment in begun if segment.origin == "sampled"]
        for segment, turn in zip(sampled, turns):
            self._written(segment)
            if turn.outcome != "ok":  # lost on the way: not this answer's doing
                self.segments = list(begun)
                self.turns.append(replace(turn, outcome="unavailable"))
                self._end("stop")
                return
            self.heard(turn)
        now = joined([segment.token_ids for segment in self.segments]).tolist()
        if now != joined([segment.token_ids for segment in begun]).tolist():
            raise ValueError(
                "the environment says something else when an answer is played again, so that credit can't go"
                " on from its middle: let it draw from its seed alone, or say again = 'copy' or 'never'"
            )
        self.segments = list(begun)

    def copied(self, begun: Sequence[Segment], rewards: Sequence[float]) -> None:
        """Comes to the end of segments that are there already, in whose turns so much was earned."""
        for segment in begun:
            if segment.origin == "sampled":
                self._written(segment)
        self.segments = list(begun)
        self.turns = [Turn(reward=reward) for reward in rewards]

    def heard(self, turn: Turn, snapshot: bytes | None = None) -> None:
        """`snapshot` is the environment's state, to go on from here again.

        Raises ValueError for an observation that the tokenizer has no tokens for.
        """
        self.turns.append(turn)
        if turn.done:
            self._end("stop")
            return
        if len(self.turns) == self.limits.max_turns:
            self._end("length", "turns_spent")
            return
        observation = turn.observation[: self.limits.observation_characters]
        self.events["observations_cut"] += len(observation) < len(turn.observation)
        last = int(self.segments[-1].token_ids[-1])
        injected = between(self.codec, observation, last, self.frame)
        if len(injected) >= self._room:
            self._end("length", "tokens_spent")
            return
        if len(injected):
            self.segments.append(Segment(injected, origin="injected", snapshot=snapshot))

    @property
    def step_ends(self) -> tuple[int, ...]:
        """A step is a turn, with the observation that follows it."""
        ends = list(accumulate(len(segment.token_ids) for segment in self.segments))
        following = [*self.segments[1:], None]
        return tuple(end for end, after in zip(ends, following) if after is None or after.origin == "sampled")

    @property
    def rewards(self) -> list[float]:
        """What each turn earned by itself; the last one may have earned nothing, where it was cut off."""
        earned = [turn.reward for turn in self.turns]
        return earned + [0.0] * (len(self.step_ends) - len(earned))

    @property
    def outcome(self) -> GradeOutcome:
        return self.turns[-1].outcome if self.turns else "ok"

    @property
    def _room(self) -> int:
        return self.budget - sum(len(segment.token_ids) for segment in self.segments)

    def _written(self, segment: Segment) -> None:
        self.segments.append(segment)
        text = self.codec.decode(segment.token_ids)
        self.actions = (*self.actions, before_stop(text, self.limits.stop))

    def _end(self, reason: FinishReason, event: str | None = None) -> None:
        self.finish = reason
        if event is not None:
            self.events[event] += 1


def between(codec: TextCodec, text: str, last: int, frame: Callable[[str], str] | None = None) -> TokenIds:
    """The ids between two turns, the first of which ended with the token `last`, for what is said there.

    The end of that turn is not put behind it again. `frame` is used in place of what a chat has there.
    Raises ValueError for a chat template that several turns can't be put together from, and for text
    that the tokenizer has no tokens for.
    """
    around = frame or codec.turn_frame
    assert around is not None, "a model without a chat is told what stands between turns"
    ids = token_array(codec.encode(around(text)))
    return ids[1:] if frame is None and len(ids) and ids[0] == last == codec.eos_id else ids


END_OF_HEAD = b"\n"


def packed(rewards: Sequence[float], snapshot: tuple[int, bytes]) -> bytes:
    """`snapshot` is the number of actions that led to the state, and the state itself."""
    done, state = snapshot
    return json.dumps([done, list(rewards)]).encode() + END_OF_HEAD + state


def unpacked(begun: Sequence[Segment]) -> tuple[list[float], tuple[int, bytes] | None]:
    """The rewards and the snapshot of where these segments end; none where they carry no copies."""
    snapshot = begun[-1].snapshot if begun else None
    if snapshot is None:
        return [], None
    head, _, state = snapshot.partition(END_OF_HEAD)
    done, rewards = json.loads(head)
    return rewards, (done, state)
