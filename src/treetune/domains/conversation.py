"""The state machine of an answer of several turns, without an engine and without an environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from treetune.domains.environments.base import Turn
from treetune.engine.base import Completion
from treetune.rollouts.answers import before_stop
from treetune.tasks.thoughts import opening_at_end
from treetune.vocabulary import FinishReason, GradeOutcome, Segment, TextCodec, TokenIds, joined, token_array

EVENTS = {
    "cut": "turns that came to turn_tokens",
    "observations_cut": "observations that were cut",
    "turns_spent": "ends for want of turns",
    "tokens_spent": "ends for want of tokens",
}
"""The events that are counted while an answer grows, with their descriptions."""

END_OF_HEAD = b"\n"

OPENING_TOKENS = 32
"""Tokens at the end of a text that hold a tag which opens a thought, be each a character, and the white space
behind it."""


class TurnLimits(NamedTuple):
    """The bounds of an answer: see the rollout `multi_turn`."""

    turn_tokens: int
    max_turns: int
    observation_characters: int
    stop: tuple[str, ...]
    reads_specials: bool = False


class NextTurn(NamedTuple):
    """The turn that an answer needs now.

    Example: the second turn, behind a prompt of two tokens, a turn of two and an observation of one::

        NextTurn(number=1, context_ids=array([7, 8, 31, 32, 90]), max_tokens=59)
    """

    number: int
    context_ids: TokenIds
    """All before it: the prompt's tokens, turns and observations."""
    max_tokens: int


@dataclass(eq=False)
class Conversation:
    """An answer of at most `budget` tokens after `prompt_ids`.

    `next_turn` is what to sample next, or None once it has ended; in turn it takes the completion of that
    turn (`take_completion`) and the environment's answer to the last of its `actions` (`take_turn`).
    """

    codec: TextCodec
    frame: Callable[[str], str] | None
    """The text between turns, around an observation; None: that of the model's chat."""
    limits: TurnLimits
    prompt_ids: TokenIds
    budget: int
    actions: tuple[str, ...] = ()
    """The policy's text of each turn so far, as the environment reads it."""
    turns: list[Turn] = field(default_factory=list)
    observed: list[list[dict[str, str]]] = field(default_factory=list)
    """The messages that the policy read behind each turn."""
    segments: list[Segment] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    finish: FinishReason | None = None
    environment_seconds: float = 0.0
    """Seconds that it waited for its environment."""

    @property
    def next_turn(self) -> NextTurn | None:
        if self.finish is not None:
            return None
        max_tokens = min(self.limits.turn_tokens, self._free_tokens)
        context_ids = joined([self.prompt_ids, *(segment.token_ids for segment in self.segments)])
        return NextTurn(len(self.actions), context_ids, max_tokens)

    def take_completion(self, completion: Completion) -> bool:
        """Returns whether the environment is to be asked: not where the answer came to its last token."""
        spent = len(completion.token_ids) == self._free_tokens
        self._write(completion.segment())
        if completion.finish_reason == "length" and spent:
            self._end("length", "tokens_spent")
            return False
        self.events["cut"] += completion.finish_reason == "length"
        return True

    def take_turn(self, turn: Turn, snapshot: tuple[int, bytes] | None = None) -> None:
        """Takes the environment's turn; `snapshot` is its state, to continue from here again, behind the
        number of actions that led there.

        Raises ValueError for an observation that the tokenizer has no tokens for.
        """
        self.turns.append(turn)
        if turn.done:
            self._end("stop")
            return
        if len(self.turns) == self.limits.max_turns:
            self._end("length", "turns_spent")
            return
        most = self.limits.observation_characters
        texts = [text for _, _, text in turn.results] or [turn.observation]
        self.events["observations_cut"] += any(len(text) > most for text in texts)
        said = [
            {"role": "tool", "name": tool, "tool_call_id": call, "content": text[:most]}
            for tool, call, text in turn.results
        ]
        observation = turn.observation[:most]
        last = int(self.segments[-1].token_ids[-1])
        injected = between(self.codec, said or observation, last, self.frame)
        if len(injected) >= self._free_tokens:
            self._end("length", "tokens_spent")
            return
        self.observed.append(said or [{"role": "user", "content": observation}])
        if len(injected):
            packed = None
            if snapshot is not None:
                actions_done, state = snapshot
                rewards = [earlier_turn.reward for earlier_turn in self.turns]
                packed = json.dumps([actions_done, rewards, self.observed]).encode() + END_OF_HEAD + state
            self.segments.append(Segment(injected, origin="injected", snapshot=packed))

    def replay(self, segments: Sequence[Segment], turns: Sequence[Turn]) -> None:
        """Plays segments that are there already once more; `turns` are what followed on the sampled ones.

        Raises ValueError where they follow no more: the environment says something else now.
        """
        sampled = [segment for segment in segments if segment.origin == "sampled"]
        for segment, turn in zip(sampled, turns):
            self._write(segment)
            if turn.outcome != "ok":  # lost on the way: not this answer's doing
                self.segments = list(segments)
                self.turns.append(replace(turn, outcome="unavailable"))
                self._end("stop")
                return
            self.take_turn(turn)
        token_ids = joined([segment.token_ids for segment in self.segments]).tolist()
        if token_ids != joined([segment.token_ids for segment in segments]).tolist():
            raise ValueError(
                "the environment says something else when an answer is played again, so that credit can't go"
                " on from its middle: let it draw from its seed alone, or say again = 'copy' or 'never'"
            )
        self.segments = list(segments)

    def restore(self, segments: Sequence[Segment]) -> None:
        """Takes over segments that are there already, the last of which has a snapshot."""
        rewards, self.observed, _ = unpacked(segments)
        for segment in segments:
            if segment.origin == "sampled":
                self._write(segment)
        self.segments = list(segments)
        self.turns = [Turn(reward=reward) for reward in rewards]

    def transcript(self, message: Callable[[str], dict[str, Any]]) -> tuple[str, list[Any], list[float]]:
        """Returns a problem's `transcript`; `message` makes one of what the policy wrote."""
        turns = []
        for action, observed in zip(self.actions, [*self.observed, []], strict=True):
            policy_message, results = message(action), iter(observed)
            for call in policy_message.get("tool_calls", ()):
                fitting = (result for result in results if result.get("name") == call["function"]["name"])
                call["id"] = next(fitting, {}).get("tool_call_id", call["id"])
            turns.append([policy_message, *observed])
        text = self.codec.decode(joined([segment.token_ids for segment in self.segments]))
        return text, turns, self.rewards

    @property
    def step_ends(self) -> tuple[int, ...]:
        """The ends of its steps, which are turns with the observation that follows them."""
        ends = accumulate(len(segment.token_ids) for segment in self.segments)
        following = [*self.segments[1:], None]
        return tuple(end for end, after in zip(ends, following) if after is None or after.origin == "sampled")

    @property
    def rewards(self) -> list[float]:
        """The reward of each turn by itself; 0 for a last one that was cut off."""
        earned = [turn.reward for turn in self.turns]
        return earned + [0.0] * (len(self.step_ends) - len(earned))

    @property
    def outcome(self) -> GradeOutcome:
        return self.turns[-1].outcome if self.turns else "ok"

    @property
    def _free_tokens(self) -> int:
        return self.budget - sum(len(segment.token_ids) for segment in self.segments)

    def _write(self, segment: Segment) -> None:
        before_ids = self.segments[-1].token_ids if self.segments else self.prompt_ids
        self.segments.append(segment)
        self.actions = (*self.actions, action_of(self.codec, before_ids, segment, self.limits))

    def _end(self, reason: FinishReason, event: str | None = None) -> None:
        self.finish = reason
        if event is not None:
            self.events[event] += 1


def actions_of(
    codec: TextCodec, prompt_ids: TokenIds, segments: Sequence[Segment], limits: TurnLimits
) -> tuple[str, ...]:
    """Returns the texts of the sampled turns among `segments` as the environment reads them."""
    actions = []
    before_ids = prompt_ids
    for segment in segments:
        if segment.origin == "sampled":
            actions.append(action_of(codec, before_ids, segment, limits))
        before_ids = segment.token_ids
    return tuple(actions)


def action_of(codec: TextCodec, before_ids: TokenIds, segment: Segment, limits: TurnLimits) -> str:
    """Returns the text of a sampled turn as the environment reads it: where what stands before it, the prompt
    or the text between turns, opened a thought, it begins with the tag that did."""
    decode_all = codec.decode_all or codec.decode  # tags of thoughts may be special tokens
    opening = opening_at_end(decode_all(before_ids[-OPENING_TOKENS:]))
    if not limits.reads_specials or codec.decode_all is None:
        text = codec.decode(segment.token_ids)
    else:
        text = codec.decode_all([token for token in segment.token_ids.tolist() if token not in codec.end_ids])
    return opening + before_stop(text, limits.stop)


def between(
    codec: TextCodec,
    observation: str | Sequence[Mapping[str, str]],
    last: int,
    frame: Callable[[str], str] | None = None,
) -> TokenIds:
    """Returns the ids between two turns, the first of which ended with the token `last`.

    Between them stands the observation: a text, or messages with the results of tools. The end of the first
    turn is not put behind it again. `frame` is used in place of what a chat has there, and for texts alone.
    Raises ValueError for a chat template that several turns can't be put together from, and for text that the
    tokenizer has no tokens for.
    """
    if frame is not None and isinstance(observation, str):
        return token_array(codec.encode(frame(observation)))
    assert codec.turn_frame is not None, "a model without a chat has a frame"
    ids = token_array(codec.encode(codec.turn_frame(observation)))
    return ids[1:] if len(ids) and ids[0] == last == codec.eos_id else ids


def unpacked(segments: Sequence[Segment]) -> tuple[list[float], list[Any], tuple[int, bytes] | None]:
    """Returns the rewards on the way to where these segments end, what the policy read there, and the
    snapshot; none where they carry no copies."""
    snapshot = segments[-1].snapshot if segments else None
    if snapshot is None:
        return [], [], None
    head, _, state = snapshot.partition(END_OF_HEAD)
    done, rewards, *observed = json.loads(head)  # what was read isn't in those of earlier versions
    return rewards, observed[0] if observed else [[]] * len(rewards), (done, state)
