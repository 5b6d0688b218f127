"""The state of an answer of several turns, independent of the engine and the environment.

The rollout `multi_turn` alternates two calls until the answer has ended::

    turn = conversation.next_turn            (None: the answer has ended)
    conversation.take_completion(…)          what the policy wrote in this turn
    conversation.take_reply(…)               the environment's reply, which becomes injected tokens
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from treetune.domains.environments.base import Turn
from treetune.engine.requests import Completion
from treetune.rollouts.answers import cut_at_stop
from treetune.tasks.thoughts import opening_at_end
from treetune.vocabulary import (
    FinishReason,
    GradeOutcome,
    Segment,
    TextCodec,
    TokenIds,
    Transcript,
    concatenate,
    token_array,
)

EVENTS = {
    "cut": "turns that reached turn_tokens",
    "observations_cut": "observations that were cut",
    "turns_spent": "answers that ended because of max_turns",
    "tokens_spent": "answers that ended because of max_tokens",
}
"""The events that are counted for each answer, with their descriptions."""

END_OF_HEAD = b"\n"
"""The separator between the two parts of a segment's snapshot: the head, which is JSON in one line, and the
environment's state."""

OPENING_TOKENS = 32
"""The number of tokens at the end of a text in which a tag that opens a thought is searched. They suffice
even if each token is one character and white space follows the tag."""


class TurnLimits(NamedTuple):
    """The limits of an answer's turns. The rollout `multi_turn` explains the keys with the same names."""

    turn_tokens: int
    max_turns: int
    observation_characters: int
    stop: tuple[str, ...]
    reads_specials: bool = False
    """Whether the environment gets special tokens in the texts of turns."""


class NextTurn(NamedTuple):
    """The next turn that the policy has to write.

    Example: the second turn, after a prompt of two tokens, a turn of two and an observation of one::

        NextTurn(number=1, context_ids=array([7, 8, 31, 32, 90]), max_tokens=59)
    """

    number: int
    """The number of turns before it."""
    context_ids: TokenIds
    """All tokens before it: the prompt, turns and observations."""
    max_tokens: int


@dataclass(eq=False)
class Conversation:
    """An answer of several turns, from its prompt to its end."""

    codec: TextCodec
    frame: Callable[[str], str] | None
    """A function that turns an observation into the text between two turns; None: the model's chat template
    makes this text."""
    limits: TurnLimits
    prompt_ids: TokenIds
    budget: int
    """The most tokens of the answer, observations included."""
    actions: tuple[str, ...] = ()
    """The policy's text of each turn so far, as the environment gets it (see `action_of`)."""
    replies: list[Turn] = field(default_factory=list)
    """The environment's replies to the actions."""
    observed_messages: list[list[dict[str, str]]] = field(default_factory=list)
    """The messages that the policy read after each turn, a list for each turn that another turn followed or
    may follow. It is one message of the user, or a message for each result of a native call."""
    segments: list[Segment] = field(default_factory=list)
    """The answer's tokens: sampled turns, and injected observations between them."""
    events: Counter[str] = field(default_factory=Counter)
    """Counts of `EVENTS`."""
    finish: FinishReason | None = None
    """The reason of the answer's end; None while it continues."""
    environment_seconds: float = 0.0
    """Seconds that the answer waited for its environment."""

    @property
    def next_turn(self) -> NextTurn | None:
        """The turn to sample next; None after the answer's end."""
        if self.finish is not None:
            return None
        max_tokens = min(self.limits.turn_tokens, self._free_tokens)
        context_ids = concatenate([self.prompt_ids, *(segment.token_ids for segment in self.segments)])
        return NextTurn(len(self.actions), context_ids, max_tokens)

    def take_completion(self, completion: Completion) -> bool:
        """Adds a sampled turn, and returns whether the environment has to reply to it.

        If the turn was cut off because the answer's tokens are used up, the answer ends without a reply.
        """
        uses_all_tokens = len(completion.token_ids) == self._free_tokens
        self._add_turn(completion.segment())
        if completion.finish_reason == "length" and uses_all_tokens:
            self._end("length", "tokens_spent")
            return False
        self.events["cut"] += completion.finish_reason == "length"  # the turn reached its own limit
        return True

    def take_reply(self, reply: Turn, snapshot: tuple[int, bytes] | None = None) -> None:
        """Adds the environment's reply to the last action.

        Args:
            reply: The reply.
            snapshot: The number of actions so far and the environment's state after them, if the answer can
                be continued from here.

        Raises:
            ValueError: The tokenizer has no tokens for the observation.
        """
        self.replies.append(reply)
        if reply.done:
            self._end("stop")
            return
        if len(self.replies) == self.limits.max_turns:
            self._end("length", "turns_spent")
            return
        # The policy reads either the results of native calls or the observation.
        longest = self.limits.observation_characters
        texts = [text for _, _, text in reply.results] or [reply.observation]
        self.events["observations_cut"] += any(len(text) > longest for text in texts)
        results = [
            {"role": "tool", "name": tool, "tool_call_id": call, "content": text[:longest]}
            for tool, call, text in reply.results
        ]
        observation = reply.observation[:longest]
        last_token = int(self.segments[-1].token_ids[-1])
        injected_ids = encode_between_turns(self.codec, results or observation, last_token, self.frame)
        if len(injected_ids) >= self._free_tokens:  # no token would be left for the next turn
            self._end("length", "tokens_spent")
            return
        self.observed_messages.append(results or [{"role": "user", "content": observation}])
        if len(injected_ids):
            self.segments.append(Segment(injected_ids, origin="injected"))
        if snapshot is not None:
            # The snapshot is put on the last segment before the next turn. That is the observation, or the
            # turn itself if nothing is injected.
            action_count, state = snapshot
            rewards = [earlier_reply.reward for earlier_reply in self.replies]
            head = json.dumps([action_count, rewards, self.observed_messages]).encode()
            self.segments[-1] = replace(self.segments[-1], snapshot=head + END_OF_HEAD + state)

    def replay(self, segments: Sequence[Segment], replies: Sequence[Turn]) -> None:
        """Takes over segments of an earlier answer whose actions the environment has played again.

        Args:
            segments: The segments.
            replies: The environment's new replies to the sampled segments.

        Raises:
            ValueError: The new replies make other tokens than those of `segments`.
        """
        sampled = [segment for segment in segments if segment.origin == "sampled"]
        # The events of the replay have been counted for the earlier answer already, so they are dropped.
        events_before = self.events.copy()
        for segment, reply in zip(sampled, replies):  # a failed reply is the last one
            self._add_turn(segment)
            if reply.outcome != "ok":  # the environment failed in the replay, which isn't the answer's fault
                self.segments = list(segments)
                self.replies.append(replace(reply, outcome="unavailable"))
                self._end("stop")
                self.events = events_before
                return
            self.take_reply(reply)
        self.events = events_before
        token_ids = concatenate([segment.token_ids for segment in self.segments]).tolist()
        if token_ids != concatenate([segment.token_ids for segment in segments]).tolist():
            raise ValueError(
                "the environment replies differently when an answer is played again, so that credit can't"
                " continue from its middle: let it draw random numbers only from its seed, or set again to"
                " 'copy' or 'never'"
            )
        self.segments = list(segments)  # may hold snapshots, unlike the equal segments of `take_reply`

    def restore(self, segments: Sequence[Segment]) -> None:
        """Takes over segments of an earlier answer, the last of which has a snapshot."""
        unpacked = unpack_snapshot(segments)
        self.observed_messages = unpacked.observed_messages
        for segment in segments:
            if segment.origin == "sampled":
                self._add_turn(segment)
        self.segments = list(segments)  # with the observations, which `_add_turn` doesn't add
        # Of past replies only the rewards are needed.
        self.replies = [Turn(reward=reward) for reward in unpacked.rewards]

    def transcript(self, message: Callable[[str], dict[str, Any]]) -> Transcript:
        """Returns the answer as its grader sees it. `message` turns an action into a message of a chat (see
        `Environment.message`)."""
        turns = []
        messages_after_turns = [*self.observed_messages, []]  # after the last turn the policy read nothing
        for action, messages in zip(self.actions, messages_after_turns, strict=True):
            policy_message = message(action)
            # Each call gets the id of the next result of its tool. `results` is an iterator, so the search
            # continues after the result of the call before.
            results = iter(messages)
            for call in policy_message.get("tool_calls", ()):
                for result in results:
                    if result.get("name") == call["function"]["name"]:
                        call["id"] = result.get("tool_call_id", call["id"])
                        break
            turns.append([policy_message, *messages])
        text = self.codec.decode(concatenate([segment.token_ids for segment in self.segments]))
        return Transcript(text, turns, self.rewards)

    @property
    def step_ends(self) -> tuple[int, ...]:
        """The ends of the steps, as token offsets. A step is a turn with the observation after it."""
        ends_of_segments = accumulate(len(segment.token_ids) for segment in self.segments)
        # A step ends where the next turn begins, and at the end of the answer.
        next_segments = [*self.segments[1:], None]
        return tuple(
            end
            for end, next_segment in zip(ends_of_segments, next_segments)
            if next_segment is None or next_segment.origin == "sampled"
        )

    @property
    def rewards(self) -> list[float]:
        """The environment's reward of each turn. A last turn that was cut off has no reply, and the reward
        0."""
        rewards = [reply.reward for reply in self.replies]
        return rewards + [0.0] * (len(self.step_ends) - len(rewards))

    @property
    def outcome(self) -> GradeOutcome:
        """The outcome of the environment's last reply; ``ok`` if it hasn't replied."""
        return self.replies[-1].outcome if self.replies else "ok"

    @property
    def _free_tokens(self) -> int:
        """The number of tokens that the answer may still have."""
        return self.budget - sum(len(segment.token_ids) for segment in self.segments)

    def _add_turn(self, segment: Segment) -> None:
        """Adds a sampled turn, and its text to the actions."""
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
    """Returns the texts of the sampled turns among `segments`, as the environment gets them."""
    actions = []
    before_ids = prompt_ids
    for segment in segments:
        if segment.origin == "sampled":
            actions.append(action_of(codec, before_ids, segment, limits))
        before_ids = segment.token_ids
    return tuple(actions)


def action_of(codec: TextCodec, before_ids: TokenIds, segment: Segment, limits: TurnLimits) -> str:
    """Returns the text of a sampled turn, as the environment gets it (see `Environment.step`).

    The text ends before the first stop string. If the tokens before the turn (the prompt, or the text between
    turns) end with a tag that opens a thought, the text begins with this tag.
    """
    decode_all = codec.decode_all or codec.decode  # tags of thoughts may be special tokens
    opening = opening_at_end(decode_all(before_ids[-OPENING_TOKENS:]))
    if not limits.reads_specials or codec.decode_all is None:
        text = codec.decode(segment.token_ids)
    else:
        # Tags of calls may be special tokens, too. The tokens that end a turn are no part of the action.
        text = codec.decode_all([token for token in segment.token_ids.tolist() if token not in codec.end_ids])
    return opening + cut_at_stop(text, limits.stop)


def encode_between_turns(
    codec: TextCodec,
    observation: str | Sequence[Mapping[str, str]],
    last_token: int,
    frame: Callable[[str], str] | None = None,
) -> TokenIds:
    """Returns the token ids between two turns.

    Args:
        codec: Encodes text.
        observation: The observation: a text, or messages with the results of tools.
        last_token: The last token of the first of the two turns. If it is the end token, and the text between
            the turns begins with the end token, too, the result leaves the second of them out.
        frame: Turns an observation that is a text into the text between the turns. If it is None, or for
            messages, the model's chat template makes this text.

    Raises:
        ValueError: The chat template doesn't support several turns, or the tokenizer has no tokens for the
            text.
    """
    if frame is not None and isinstance(observation, str):
        return token_array(codec.encode(frame(observation)))
    assert codec.turn_frame is not None, "a model without a chat has a frame"
    ids = token_array(codec.encode(codec.turn_frame(observation)))
    return ids[1:] if len(ids) and ids[0] == last_token == codec.eos_id else ids


class UnpackedSnapshot(NamedTuple):
    """The contents of a segment's snapshot."""

    rewards: list[float]
    """The rewards of the turns so far."""
    observed_messages: list[Any]
    """The messages that the policy read after each of these turns."""
    environment: tuple[int, bytes] | None
    """The number of the environment's actions so far, and its state after them."""


def unpack_snapshot(segments: Sequence[Segment]) -> UnpackedSnapshot:
    """Returns the contents of the last segment's snapshot. If the segment has no snapshot, or there is no
    segment, the contents are two empty lists and None."""
    snapshot = segments[-1].snapshot if segments else None
    if snapshot is None:
        return UnpackedSnapshot([], [], None)
    head, _, state = snapshot.partition(END_OF_HEAD)
    contents = json.loads(head)
    if len(contents) == 2:  # from an earlier version, whose snapshots don't have the messages
        action_count, rewards = contents
        messages: list[Any] = [[]] * len(rewards)
    else:
        action_count, rewards, messages = contents
    return UnpackedSnapshot(rewards, messages, (action_count, state))
