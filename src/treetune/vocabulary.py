"""Defines the nouns of the project as plain frozen data.

=============  ==========================================================================
`Message`      a turn of a conversation
`TextCodec`    text to token ids and back
`Problem`      a row of a task: a prompt and its reference answer
`Transcript`   an answer of several turns, as its grader sees it
`Grade`        a grader's verdict on an answer
`Branch`       the thread of an answer that some tokens belong to
`Segment`      token ids that entered an answer together, sampled or injected
`Fork`         the point where an answer branched off from another one
`Trajectory`   an answer: the segments from the prompt to its end, and their grade
`Episode`      a training row: an answer's tokens with their advantages
`Metrics`      numbers of an iteration by name
=============  ==========================================================================

The life of one answer, in these nouns::

    Problem "train/17"
       │  rollout: sample a Segment, perhaps inject one, sample the next …
       ▼
    Trajectory "train/17#3"  =  prompt_ids + (Segment, Segment, …) + Grade
       │  credit: one advantage for each response token
       ▼
    Episode                  =  prompt_ids, response_ids, trained, advantages

Every package uses these types and defines no other type for the same thing. The file imports nothing heavy,
so that configuration, tasks and tests can use it without torch.

A column with an entry for each token (ids, log-probs, masks, advantages) is a NumPy array on its whole way:
from the engine's answer to the trainer and to disk. It is often a view of a buffer that other objects share,
so never write into one. Types that hold columns accept any sequence for them, and two objects are equal if
their numbers are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from treetune.overriding import override

if TYPE_CHECKING:
    import numpy as np

TokenIds: TypeAlias = "np.ndarray"
"""Token ids: int32 of shape [T]."""
Column: TypeAlias = "np.ndarray"
"""A number for each token, shape [T]: log-probs (float32 or float64), advantages (float64), masks (bool)."""


def token_array(token_ids: Sequence[int] | TokenIds) -> TokenIds:
    """Returns the ids as an int32 array, shape [T]. Does not copy an int32 array."""
    import numpy as np

    return np.asarray(token_ids, np.int32)


def concatenate(parts: Sequence[TokenIds]) -> TokenIds:
    """Concatenates the arrays. Does not copy a single array."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def logprob_array(values: Sequence[float] | Column) -> Column:
    """Returns the values as an array, shape [T]: float32 if that is exact, else float64.

    vLLM computes log-probs in float32 and sends them as JSON numbers, so they usually fit.
    """
    import numpy as np

    if isinstance(values, np.ndarray) and values.dtype == np.float32:
        return values
    doubles = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):  # a value that is too large becomes infinite, which is then not exact
        floats = doubles.astype(np.float32)
    is_exact = np.array_equal(floats, doubles, equal_nan=True)
    return floats if is_exact else doubles


class Columnar:
    """Base of dataclasses with columns: compares arrays number by number.

    The `__eq__` of a dataclass would ask ``array == array`` for one truth value, which NumPy refuses.
    """

    @override
    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        compared = [field.name for field in fields(self) if field.compare]  # type: ignore[arg-type]
        return all(_are_equal(getattr(self, name), getattr(other, name)) for name in compared)

    __hash__ = None  # type: ignore[assignment]

    def _set(self, name: str, value: Any) -> None:
        """Sets an attribute of a frozen dataclass, which only `__post_init__` may do."""
        object.__setattr__(self, name, value)


def _are_equal(first: Any, second: Any) -> bool:
    """Compares two values of a field, either of which may be an array or None."""
    if not (hasattr(first, "dtype") or hasattr(second, "dtype")):  # neither is an array
        return bool(first == second)
    if first is None or second is None:
        return False
    import numpy as np

    # NaN equals NaN at the same index. `equal_nan` raises TypeError for arrays that cannot hold NaN.
    return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")


FinishReason = Literal["stop", "length"]
"""The reason why sampling ended: ``stop`` is an end token or a stop string, ``length`` the token limit."""

GradeOutcome = Literal["ok", "no_answer", "timeout", "error", "unavailable"]
"""The result of grading.

``unavailable`` is about the grader: it could not be reached (the judge is down), and the reward is unknown.
All other outcomes are about the answer: ``timeout`` and ``error`` mean that it made the grader hang or crash.
"""

CORRECT_SCORE = 1.0
"""The lowest score of a correct answer, in shares, selections, pairs and reports.

Some published recipes score wrong answers below 0 or correct ones above 1. The share of correct answers does
not depend on that.
"""


@dataclass(frozen=True)
class Message:
    """A turn of a conversation; `role` is ``system``, ``user``, ``assistant`` or ``tool``.

    Example::

        Message(role="user", content="How much is 2 + 3?")
    """

    role: str
    content: str


@dataclass(frozen=True)
class TextCodec:
    """Converts text to token ids and back. A run has exactly one.

    Text that was decoded from token ids is for graders and people. It is never encoded again, because
    tokenizers may split it differently from the way the model sampled it.

    A problem's text may look like a control token (``<|im_end|>``). `frame` and `conversation` mark such
    text, `encode` turns marked text into ordinary tokens, and `unmark` removes the marks for people.

    Example: a model with ChatML frames ``2 + 3?`` as::

        codec.whole_prompt("2 + 3?")  == "<|im_start|>user\\n2 + 3?<|im_end|>\\n<|im_start|>assistant\\n"
        codec.end_ids           == (151645, 151643)    # <|im_end|>, <|endoftext|>
    """

    encode: Callable[[str], Sequence[int]]
    """Returns the ids of a text. Adds no special token, such as one for the beginning of text."""
    decode: Callable[[Sequence[int] | TokenIds], str]
    """Returns the text of ids, without special tokens."""
    eos_id: int
    """The token that ends an answer in training data (demonstrations)."""
    end_ids: tuple[int, ...] = ()
    """The tokens that each end a sampled answer; `eos_id` is always among them."""
    frame: Callable[[str], str] = str
    """Returns a problem's text within the chat template. Without a chat, returns the text unchanged."""
    begin: tuple[int, ...] = ()
    """The ids at the beginning of every prompt (the beginning of text, or none)."""
    conversation: Callable[[Sequence[Message]], str] | None = None
    """Returns the prompt of a problem's messages, which the chat template renders. None without a chat."""
    turn_frame: Callable[[str | Sequence[Mapping[str, str]]], str] | None = None
    """Returns the text that stands between two turns of the model, made of a user's text or of tool messages.
    None without a chat."""
    decode_all: Callable[[Sequence[int] | TokenIds], str] | None = None
    """Returns the text of ids with special tokens."""
    with_tools: Callable[[Sequence[Mapping[str, Any]]], TextCodec] | None = None
    """Takes the JSON schemas of tools, and returns a codec like this one whose prompts offer the tools. None
    without a chat."""
    unmark: Callable[[str], str] = str
    """Removes the marks of text that looks like a control token."""

    def __post_init__(self) -> None:
        if self.eos_id not in self.end_ids:
            object.__setattr__(self, "end_ids", (self.eos_id, *self.end_ids))

    def whole_prompt(self, problem: str | Problem) -> str:
        """Returns the text of the whole prompt, up to the beginning of the answer.

        Raises:
            ValueError: The problem is a conversation, and the model has no chat template.
        """
        # In the prompt for `encode`, text of the problem that looks like a control token (`<|im_end|>`) is
        # marked, so that it becomes ordinary tokens. The prompt that this method returns has no marks.
        return self.unmark(self._marked_prompt(problem))

    def _marked_prompt(self, problem: str | Problem) -> str:
        """Returns the text of the whole prompt for `encode`.

        `frame` and `conversation` mark text of the problem that looks like a control token, and `encode`
        turns marked text into ordinary tokens. The prompt of a problem that is used `as_is` has no marks.
        """
        if isinstance(problem, str):
            return self.frame(problem)
        if problem.as_is:  # the model gets this prompt without a chat template
            return problem.prompt
        if not problem.messages:
            return self.frame(problem.prompt)
        if self.conversation is None:
            raise ValueError(
                f"problem {problem.id!r} is a conversation of {len(problem.messages)} messages, and"
                " model.chat is null: set it to {}, for the model's own chat template"
            )
        return self.conversation(problem.messages)

    def encode_prompt(self, problem: str | Problem) -> TokenIds:
        """Returns the token ids of the whole prompt. All prompts are encoded here.

        A prompt begins with the ids `begin`: the token for the beginning of text, if the model has one.
        """
        text = self._marked_prompt(problem)
        if not text:
            return token_array(())  # without `begin`: rollouts and engines refuse a prompt of no tokens
        ids = tuple(self.encode(text))
        if isinstance(problem, Problem) and problem.as_is and ids[: len(self.begin)] == self.begin:
            return token_array(ids)  # the problem's own text begins with `begin` already
        return token_array((*self.begin, *ids))

    def encode_answer(self, problem: str | Problem, answer: str) -> TokenIds:
        """Returns the ids of `answer` as they would follow the problem's prompt, without an end token."""
        prompt = self._marked_prompt(problem)
        prompt_ids = tuple(self.encode(prompt))
        # Some tokenizers put a space before the first word of a text, so an answer that is encoded alone may
        # get other ids than the model would sample after the prompt.
        ids = tuple(self.encode(prompt + answer))
        if ids[: len(prompt_ids)] == prompt_ids:
            return token_array(ids[len(prompt_ids) :])
        # A token spans the border between prompt and answer, and the prompt's ids must stay as they are.
        return token_array(self.encode(answer))


class Transcript(NamedTuple):
    """An answer of several turns, as its grader sees it.

    Example: the policy asks a calculator and then answers::

        Transcript(
            text="2*21=\n42\nThe answer is 42.",
            turns=[
                [{"role": "assistant", "content": "2*21="}, {"role": "tool", "content": "42"}],
                [{"role": "assistant", "content": "The answer is 42."}],
            ],
            rewards=[0.0, 0.0],
        )
    """

    text: str
    """The text of the whole answer, with the replies in it."""
    turns: Sequence[Sequence[Mapping[str, Any]]]
    """For each turn, its messages: first the policy's, then the replies to it."""
    rewards: Sequence[float]
    """The environment's reward for each turn."""


@dataclass(frozen=True)
class Problem:
    """A row of a task: the prompt and its reference answer.

    Example::

        Problem(id="train/17", prompt="How much is 2 + 3?", gold="5", domain="addition")
    """

    id: str
    """Unique within the task and stable over runs, because seeds are derived from it."""
    prompt: str
    """The text of the problem. For a conversation (`messages`), the conversation as one text, for people and
    graders."""
    gold: str
    """The reference answer."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row, for graders and environments."""
    domain: str = ""
    """The kind of problem, for metrics by domain; empty if the task has only one kind."""
    messages: tuple[Message, ...] = ()
    """The conversation that the model continues; empty if the problem is only the text `prompt`."""
    as_is: bool = False
    """True if the model gets `prompt` without a chat template."""
    transcript: Transcript | None = None
    """The answer's turns. Only set in the copy of the problem that a grader gets with an answer of several
    turns."""
    is_thought_open: bool = False
    """True if the prompt ends inside a thought (``<think>``). The answer then begins inside this thought."""


@dataclass(frozen=True)
class Grade:
    """A grader's verdict on an answer.

    Example: a right answer, one that could not be read, and one whose judge was down::

        Grade(reward=1.0, outcome="ok", extracted="5")
        Grade(reward=0.0, outcome="no_answer", message="no \\boxed{} in the answer")
        Grade(reward=0.0, outcome="unavailable", message="judge: connection refused")
    """

    reward: float
    """0.0 unless the outcome is ``ok`` or the grader's settings say otherwise; meaningless if not
    `is_known`."""
    outcome: GradeOutcome
    extracted: str | None = None
    """The answer that the grader read out of the text."""
    seconds: float = 0.0
    message: str | None = None
    """The reason of the outcome, for people."""
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Further counts, such as tests that passed."""
    step_rewards: tuple[float, ...] = ()
    """The parts of the reward by turn, if the grader gives them."""

    @property
    def is_known(self) -> bool:
        """False if the grader was unavailable. Training and evaluation leave such an answer out and count
        it."""
        return self.outcome != "unavailable"

    @property
    def correct(self) -> bool:
        return self.is_known and self.reward >= CORRECT_SCORE


Branch = tuple[tuple[int, int], ...]
"""The thread that a part of an answer belongs to: pairs (block, thread), from the outermost block inwards.

A block is a place where an answer splits into parallel threads. Blocks are counted from 0 within the thread
that contains them, threads from 0 in the order of their outlines.

Example: the second thread of the first block is ``((0, 1),)``; the first thread of a block inside it is
``((0, 1), (0, 0))``. Text outside all blocks is on ``()``, and so is every answer without threads.
"""


def sees(branch: Branch, earlier: Branch) -> bool:
    """Returns whether text on `branch` was sampled with an `earlier` part of the answer in its context.

    At a block, an answer splits into parallel threads. A branch names a thread by pairs (block, thread), from
    the outermost block inwards; ``()`` is the text outside all blocks.

    A thread sees everything before its block, but not the other threads of its block. Text after a block
    sees all threads of the block.

    Example::

        sees(((0, 1),), ())           == True     # a thread sees the text before its block
        sees(((0, 1),), ((0, 0),))    == False    # but not its sibling thread
        sees((), ((0, 0),))           == True     # the text after the block sees its threads
        sees(((1, 0),), ((0, 0),))    == True     # and so does a thread of a later block
    """
    for (block, thread), (earlier_block, earlier_thread) in zip(branch, earlier):
        if block != earlier_block:
            return True
        if thread != earlier_thread:
            return False
    # One branch contains the other.
    return True


@dataclass(frozen=True, eq=False)
class Segment(Columnar):
    """Token ids that entered an answer together: sampled by the policy, or injected (a tool's reply).

    The context of a segment is the prompt and the earlier segments that its `branch` `sees`.

    Example: the model calls a calculator, and the result is injected::

        Segment([501, 17, 502], "sampled", logprobs=[-0.1, -1.2, -0.3], policy_version=4)
        Segment([88, 20], "injected")
    """

    token_ids: TokenIds
    origin: Literal["sampled", "injected"] = "sampled"
    logprobs: Column | None = None
    """The log-prob of each sampled token, under the distribution that the engine sampled from (with its
    temperature and top-p)."""
    policy_version: int | None = None
    """The weights that sampled it: 0 for the start weights, i + 1 for those after iteration i."""
    branch: Branch = ()
    seconds: float | None = field(default=None, compare=False)
    """Seconds that the engine took for the request."""
    snapshot: bytes | None = field(default=None, compare=False)
    """The state of the environment after it injected the segment, if continuations start from copies."""

    def __post_init__(self) -> None:
        self._set("token_ids", token_array(self.token_ids))
        if self.logprobs is not None:
            self._set("logprobs", logprob_array(self.logprobs))


def are_sampled(segments: Sequence[Segment]) -> Column:
    """Returns a mask of the tokens that were sampled, shape [T]."""
    import numpy as np

    is_sampled = np.array([segment.origin == "sampled" for segment in segments], np.bool_)
    lengths = np.array([len(segment.token_ids) for segment in segments], np.int64)
    return np.repeat(is_sampled, lengths)


@dataclass(frozen=True)
class SegmentSpan:
    """The response tokens of a segment, as offsets: from the `end` of the previous stretch, or 0, to `end`.

    Example: three tokens before a block, and two threads of four tokens::

        (SegmentSpan(3, ()), SegmentSpan(7, ((0, 0),)), SegmentSpan(11, ((0, 1),)))
    """

    end: int
    branch: Branch


class Fork(NamedTuple):
    """The point where an answer branched off from another answer to the same problem.

    Example: an answer with ``Fork(sample=2, tokens=40)`` shares its first 40 response tokens with answer 2.
    These tokens were sampled once.
    """

    sample: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Trajectory(Columnar):
    """An answer to a problem, with its grade.

    Example: the answer ``2 + 3 = 5`` in one segment and two steps, right, with a penalty for its length::

        Trajectory(
            problem=Problem("train/17", "How much is 2 + 3?", "5"),
            sample=3,                          # the fourth answer to this problem: its id is "train/17#3"
            prompt_ids=[12, 7, 40],
            segments=(Segment([20, 31, 21, 9, 25, 2], logprobs=[…], policy_version=4),),
            finish_reason="stop",
            text="2 + 3 = 5",
            grade=Grade(reward=1.0, outcome="ok", extracted="5"),
            step_ends=(4, 6),                  # tokens 0 to 3, and 4 and 5
            bonus=-0.1,                        # so its score is 1.0 and its reward 0.9
        )
    """

    problem: Problem
    sample: int
    """The number of the answer among the answers to its problem, from 0."""
    prompt_ids: TokenIds
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    text: str
    """The decoded response without special tokens. If a stop string ended the response, the text contains it;
    graders get the text before the stop string."""
    grade: Grade
    step_ends: tuple[int, ...]
    """Token offsets into the response, strictly rising; the last is its length. Step i is the tokens
    ``[step_ends[i-1], step_ends[i])``, with 0 before the first."""
    bonus: float = 0.0
    """The sum of the bonuses that shaping adds to the score; negative for a penalty."""
    numbers: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Counts and measurements by ``group/name`` (see `rollouts.numbers`). `==` ignores them, since some are
    seconds, which differ each time."""
    step_rewards: tuple[float, ...] = ()
    """The reward of each step, if an environment rewards turns; they add up to the score. Empty if the whole
    score is earned at the end."""
    fork: Fork | None = None
    """The point where it branched off from another answer (rollout ``tree``). A segment ends at this
    point."""

    def __post_init__(self) -> None:
        self._set("prompt_ids", token_array(self.prompt_ids))

    @property
    def id(self) -> str:
        return f"{self.problem.id}#{self.sample}"

    @cached_property
    def response_ids(self) -> TokenIds:
        return concatenate([segment.token_ids for segment in self.segments])

    @property
    def score(self) -> float:
        """The grader's reward, which says whether the answer is correct."""
        return self.grade.reward

    @property
    def reward(self) -> float:
        """The reward that credit assigns to tokens: the score plus the bonus of shaping."""
        return self.score + self.bonus

    @property
    def unfinished(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, eq=False)
class Episode(Columnar):
    """A training row: an answer's tokens with their advantages.

    Example: the answer ``2 + 3 = 5`` of `Trajectory`, right where half of its group were::

        Episode(
            prompt_ids=[12, 7, 40],
            response_ids=[20, 31, 21, 9, 25, 2],
            trained=[True] * 6,                # all of them were sampled
            reward=0.9,
            score=1.0,
            group="train/17",                  # the problem's id
            trajectory="train/17#3",
            policy_version=4,
            advantages=[0.4] * 6,              # 0.9 less the group's mean reward of 0.5
            behaviour_logprobs=[-0.1, -1.2, -0.3, -0.0, -0.2, -0.0],
            step_ends=(4, 6),
            step_values=(0.5, 0.8),            # V(prompt) and V(prompt, first step)
        )
    """

    prompt_ids: TokenIds
    response_ids: TokenIds
    trained: Column
    """True for the tokens that the loss is computed on, shape [T]. Injected tokens are never trained."""
    reward: float
    """The reward that credit assigns to tokens, with the bonus of shaping."""
    group: str
    """The id of the problem."""
    trajectory: str
    """The id of the answer."""
    policy_version: int
    finish_reason: FinishReason = "stop"
    advantages: Column | None = None
    """The advantage of each response token, shape [T]. None if the trainer computes them (`gae`), or if the
    loss needs none (`mle`)."""
    behaviour_logprobs: Column | None = None
    """The engine's log-probs, shape [T]; None if the answer was not sampled."""
    step_ends: tuple[int, ...] = ()
    """As in `Trajectory`."""
    step_values: tuple[float, ...] | None = None
    """The value of the state *before* each step, for reports and analyses."""
    text: str = ""
    pair: int | None = None
    """The number of the comparison in preference learning. Its two rows are neighbours, the better one
    first."""
    chosen: bool | None = None
    """True for the better row of a `pair`."""
    score: float = None  # type: ignore[assignment]  # `__post_init__` sets it
    """The grader's reward, by which selections tell correct answers from others. If it is left out, it is
    `reward`."""
    stretches: tuple[SegmentSpan, ...] = ()
    """The segments of an answer with threads. Their branches determine which earlier tokens were in a token's
    context when it was sampled. Empty if each token was sampled after all tokens before it."""
    domain: str = ""
    step_rewards: tuple[float, ...] = ()
    """The rewards of steps, as in `Trajectory`. What `reward` has beyond their sum is earned at the end."""
    step_errors: tuple[float, ...] | None = None
    """The standard error of each of `step_values`. It is infinite for a step that is credited together with
    the step before it, and so only repeats the earlier step's value."""
    continuations: Mapping[int, tuple[float | None, ...]] = field(default_factory=dict)
    """The rewards of the continuations that were sampled from states of the answer. The key is the number of
    response tokens before a state. A continuation that could not be graded has None in place of a reward.
    Training does not use them: they are kept for people who read the rows.

    Example: ``{4: (1.0, 0.0, None)}`` for three continuations from the state after 4 tokens."""
    critic_prompt_ids: TokenIds | None = None
    """The prompt that the critic sees, if it isn't the policy's (`CriticSettings.template`)."""
    teacher_prompt_ids: TokenIds | None = None
    """The privileged prompt that the teacher sees (objective `distribution_distillation`); None if the answer
    has no teacher."""

    def __post_init__(self) -> None:
        import numpy as np

        if self.critic_prompt_ids is not None:
            self._set("critic_prompt_ids", token_array(self.critic_prompt_ids))
        if self.teacher_prompt_ids is not None:
            self._set("teacher_prompt_ids", token_array(self.teacher_prompt_ids))
        if self.score is None:  # the caller left the score out
            self._set("score", self.reward)
        self._set("prompt_ids", token_array(self.prompt_ids))
        self._set("response_ids", token_array(self.response_ids))
        self._set("trained", np.asarray(self.trained, np.bool_))
        if self.advantages is not None:
            self._set("advantages", np.asarray(self.advantages, np.float64))
        if self.behaviour_logprobs is not None:
            self._set("behaviour_logprobs", logprob_array(self.behaviour_logprobs))

    @property
    def correct(self) -> bool:
        return self.score >= CORRECT_SCORE


Metrics = dict[str, float]
"""Numbers that JSON can hold, by names with a group.

Example: ``{"episodes/reward": 0.62, "train/kl": 0.0013}``.
"""
