"""The nouns of the project, as plain frozen data.

Every room speaks in these types and in no others of its own for the same thing. The file imports
nothing heavy, so that configuration, tasks and tests can use it without torch.

What there is of every token (ids, log-probs, masks, advantages) is a NumPy array, from the engine's answer
to the trainer and to disk, and often a view of a buffer that many share: never write into one. Types that
hold such columns take any sequence for them, and are equal where their numbers are.

A problem grows a tree of text: an answer (`Trajectory`) is a path of `Segment`s from the prompt to
a graded leaf; a `Step` is the part of an answer between two boundaries; an `Episode` is a training
row cut out of the tree.
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
"""Another number of each token, of shape [T]: log-probs (float32 where the engine's are, else float64),
advantages (float64), masks (bool)."""


def token_array(token_ids: Sequence[int] | TokenIds) -> TokenIds:
    """Returns them as int32 of shape [T]; an array of that kind is not copied."""
    import numpy as np

    return np.asarray(token_ids, np.int32)


def joined(parts: Sequence[TokenIds]) -> TokenIds:
    """Returns the arrays one after the other; a single one is not copied."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def logprob_array(values: Sequence[float] | Column) -> Column:
    """Returns an array of shape [T]: float32 where that loses nothing, as with what vLLM sends."""
    import numpy as np

    if isinstance(values, np.ndarray) and values.dtype == np.float32:
        return values
    wide = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    return narrow if np.array_equal(narrow, wide, equal_nan=True) else wide


class Columnar:
    """Dataclasses with columns: equal where all that is compared is, columns by their numbers."""

    @override
    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            _alike(getattr(self, one.name), getattr(other, one.name))
            for one in fields(self)  # type: ignore[arg-type]
            if one.compare
        )

    __hash__ = None  # type: ignore[assignment]

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _alike(one: Any, other: Any) -> bool:
    if hasattr(one, "dtype") or hasattr(other, "dtype"):
        import numpy as np

        # Not a number is alike only where it stands at the same places.
        both = one is not None and other is not None
        return both and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return bool(one == other)


FinishReason = Literal["stop", "length"]
"""Why sampling ended: an end token or stop string, or the budget of tokens."""

GradeOutcome = Literal["ok", "no_answer", "timeout", "error", "unavailable"]
"""``unavailable``: what grades was not there (the judge is down), so nobody knows what the answer is worth.
All others are about the answer, ``timeout`` and ``error`` too: it made the grader hang or crash."""

CORRECT_SCORE = 1.0
"""An answer that scores this or more is correct, wherever correct answers are told from others: in shares,
selections, pairs and reports. A grader may give less to what is wrong, and more than it to what is correct,
as some published recipes do; shares of correct answers don't change with that."""


@dataclass(frozen=True)
class Message:
    """A turn of a conversation; `role` is ``system``, ``user``, ``assistant`` or ``tool``."""

    role: str
    content: str


@dataclass(frozen=True)
class TextCodec:
    """Text to token ids and back; the one tokenizer of the run.

    `encode` adds no special tokens, `decode` drops them. Token ids are the truth: text that came
    from them is a view, and is not encoded again.

    `frame` is what a model needs around a problem's text (a chat template), `begin` the ids before
    all of it (the beginning of text, or nothing). `conversation` does for a problem's messages what `frame`
    does for a text; None where the model has no chat template. `eos_id` ends an answer that is written for
    the model; each of `end_ids`, which are `eos_id` alone where left out, ends an answer that it samples.
    `turn_frame` is what a chat has between two turns of the model, around what is said there (a text, or
    messages of the template's role ``tool``); None without a chat, and so is `with_tools`: the same codec,
    whose prompts offer tools by their JSON schemas. `decode_all` shows special tokens, too. What `frame` and
    `conversation` return has marks for text of a problem that looks like a control token: `encode` makes
    ordinary tokens of it, and `unmark` the text that people read.
    """

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int] | TokenIds], str]
    eos_id: int
    end_ids: tuple[int, ...] = ()
    frame: Callable[[str], str] = str
    begin: tuple[int, ...] = ()
    conversation: Callable[[Sequence[Message]], str] | None = None
    turn_frame: Callable[[str | Sequence[Mapping[str, str]]], str] | None = None
    decode_all: Callable[[Sequence[int] | TokenIds], str] | None = None
    with_tools: Callable[[Sequence[Mapping[str, Any]]], TextCodec] | None = None
    unmark: Callable[[str], str] = str

    def __post_init__(self) -> None:
        if self.eos_id not in self.end_ids:
            object.__setattr__(self, "end_ids", (self.eos_id, *self.end_ids))

    def framed(self, asked: str | Problem) -> str:
        """Returns the text of a whole prompt, up to where the answer begins.

        Raises ValueError for a conversation where the model has no chat template.
        """
        return self.unmark(self._marked(asked))

    def _marked(self, asked: str | Problem) -> str:
        """Returns the text of a whole prompt for `encode`."""
        if isinstance(asked, str):
            return self.frame(asked)
        if asked.as_is:
            return asked.prompt
        if not asked.messages:
            return self.frame(asked.prompt)
        if self.conversation is None:
            raise ValueError(
                f"problem {asked.id!r} is a conversation of {len(asked.messages)} messages, and model.chat is"
                " null: set it to {}, for the model's own chat template"
            )
        return self.conversation(asked.messages)

    def encode_prompt(self, asked: str | Problem) -> TokenIds:
        """Returns the ids of the whole prompt for a text or a problem. Every prompt becomes ids here."""
        framed = self._marked(asked)
        ids = tuple(self.encode(framed))
        if isinstance(asked, Problem) and asked.as_is and ids[: len(self.begin)] == self.begin:
            return token_array(ids)  # it was written with the beginning of text
        return token_array((*self.begin, *ids) if framed else ())

    def encode_answer(self, asked: str | Problem, answer: str) -> TokenIds:
        """Returns the ids that would follow the prompt of `asked` for `answer`, without an end token.

        Prompt and answer are encoded together where that leaves the prompt's ids as they are, as
        they are when a model samples: some tokenizers put a space before whatever begins a text.
        """
        framed = self._marked(asked)
        alone, together = tuple(self.encode(framed)), tuple(self.encode(framed + answer))
        starts_alike = together[: len(alone)] == alone
        return token_array(together[len(alone) :] if starts_alike else self.encode(answer))


@dataclass(frozen=True)
class Problem:
    """A row of a task: what the model is asked and what would be right.

    `id` is unique within the task and stable over runs (``train/17``): seeds derive from it. `domain` is the
    kind of problem that metrics are also taken by; empty where there is but one.

    Where a row has a conversation, `messages` are it, and `prompt` is a text of it for readers and graders. A
    prompt that is `as_is` is given to the model without a chat template. `transcript` is of the answer to be
    graded, where that has several turns: its text, and each turn's messages and environment's reward.
    `is_thought_open` says that the whole prompt ends within a thought, in which the answer begins.
    """

    id: str
    prompt: str
    gold: str
    data: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    messages: tuple[Message, ...] = ()
    as_is: bool = False
    transcript: tuple[str, Sequence[Sequence[Mapping[str, Any]]], Sequence[float]] | None = None
    is_thought_open: bool = False


@dataclass(frozen=True)
class Grade:
    """A grader's verdict. `reward` is 0.0 unless `outcome` is ``ok``, or the grader was told otherwise;
    the outcome says why. `numbers` are what else was counted: tests that passed, cells that are right.

    Where nothing `is_known`, the reward means nothing: such an answer is left out of all that is learnt and
    measured, and counted. `step_rewards` are parts of the reward, turn by turn, where a grader tells them.
    """

    reward: float
    outcome: GradeOutcome
    extracted: str | None = None
    seconds: float = 0.0
    message: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
    step_rewards: tuple[float, ...] = ()

    @property
    def is_known(self) -> bool:
        return self.outcome != "unavailable"

    @property
    def correct(self) -> bool:
        return self.is_known and self.reward >= CORRECT_SCORE


Branch = tuple[tuple[int, int], ...]
"""Where in a tree of threads a part of an answer lies: (block, thread) from the outermost block inwards,
blocks counted from 0 within the thread that holds them, threads from 0 in the order of their outlines.
Empty outside of all blocks, so in every answer without threads."""


def sees(branch: Branch, earlier: Branch) -> bool:
    """Returns whether a part on `branch` was written in sight of an `earlier` part of the answer.

    Threads of one block don't see each other. A thread sees all that came before its block; what comes
    behind a block sees all of its threads.
    """
    for (block, thread), (other_block, other_thread) in zip(branch, earlier):
        if block != other_block:
            return True
        if thread != other_thread:
            return False
    return True


@dataclass(frozen=True, eq=False)
class Segment(Columnar):
    """Token ids that entered an answer together, either sampled by the policy or injected.

    `logprobs` (one per token, of the distribution that was really sampled from) and
    `policy_version` (0 for the start weights, i+1 after iteration i) belong to sampled segments, and so
    do `seconds`, which the engine took for the request. What a segment was sampled after is the prompt
    and the earlier segments that its `branch` `sees`. `snapshot` is the state of the environment that said an
    injected one, where that is gone on with from a copy.
    """

    token_ids: TokenIds
    origin: Literal["sampled", "injected"] = "sampled"
    logprobs: Column | None = None
    policy_version: int | None = None
    branch: Branch = ()
    seconds: float | None = field(default=None, compare=False)
    snapshot: bytes | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self._set("token_ids", token_array(self.token_ids))
        if self.logprobs is not None:
            self._set("logprobs", logprob_array(self.logprobs))


def are_sampled(segments: Sequence[Segment]) -> Column:
    """Returns whether each of their tokens was sampled: bool of shape [T]."""
    import numpy as np

    return np.repeat(
        np.array([segment.origin == "sampled" for segment in segments], np.bool_),
        np.array([len(segment.token_ids) for segment in segments], np.int64),
    )


@dataclass(frozen=True)
class Stretch:
    """Response tokens up to `end` (from the end of the stretch before) that entered an answer together,
    on one branch."""

    end: int
    branch: Branch


class Fork(NamedTuple):
    """The branch point of an answer that grew out of another one to the same problem: that one's `sample`,
    and how many of its response tokens they share. These were sampled once."""

    sample: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Trajectory(Columnar):
    """An answer to a problem.

    `text` is the decoded response without special tokens: a view for graders and people. It holds
    all that was sampled, so the stop string too where one ended it; graders are not shown that.
    `step_ends` are token offsets into the response, strictly rising, the last one equal to its
    length: step i covers tokens ``[step_ends[i-1], step_ends[i])`` (with 0 before the first).

    `score` is the grader's verdict and says what was correct; `reward`, which credit is about, adds the
    `bonus` that shaping gave (negative for a penalty). `numbers` are what was counted and measured of it, by
    ``group/name`` (see `rollouts.numbers`); seconds may be among them, so answers are compared without.

    Where steps earn something by themselves (turns that an environment rewards), `step_rewards` are what each
    of them earned; they add up to the score. Empty where all of it is earned at the end.

    An answer that grew out of another (rollout ``tree``) has its `fork`, and a segment of it ends there.
    """

    problem: Problem
    sample: int
    prompt_ids: TokenIds
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    text: str
    grade: Grade
    step_ends: tuple[int, ...]
    bonus: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict, compare=False)
    step_rewards: tuple[float, ...] = ()
    fork: Fork | None = None

    def __post_init__(self) -> None:
        self._set("prompt_ids", token_array(self.prompt_ids))

    @property
    def id(self) -> str:
        return f"{self.problem.id}#{self.sample}"

    @cached_property
    def response_ids(self) -> TokenIds:
        return joined([segment.token_ids for segment in self.segments])

    @property
    def score(self) -> float:
        return self.grade.reward

    @property
    def reward(self) -> float:
        return self.score + self.bonus

    @property
    def unfinished(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, eq=False)
class Episode(Columnar):
    """A training row. All columns but `prompt_ids` have one entry per response token.

    `reward` is what credit was given for, shaping included; `score` (the reward where left out) is the
    grader's verdict alone, by which selections tell correct answers from others.

    `trained` marks the tokens that the loss may touch (sampled ones); `advantages` is None where the trainer
    computes them (`gae`) or none are needed (`mle`). `behaviour_logprobs` are the engine's. `step_ends`,
    `step_values` (of the state *before* each step) and their standard errors `step_errors` are kept for
    reports and analyses; the error is infinite for a step that is credited as one with the one before it,
    whose value it repeats. Where answers are compared, `pair` numbers the comparison and `chosen` says
    whether this is its better answer; the two are neighbours, the better one first.

    Where the answer has threads, `stretches` are its segments, and say what each token was sampled after;
    empty where every token was sampled after all before it. `domain` is the problem's. `step_rewards` are the
    trajectory's, where there are any: what the reward is more than their sum is earned at the end.
    `continuations` are kept for readers: by how many response tokens a state has, what each earned that was
    sampled from there, in their order; None for one that nobody could grade.
    """

    prompt_ids: TokenIds
    response_ids: TokenIds
    trained: Column
    reward: float
    group: str
    trajectory: str
    policy_version: int
    finish_reason: FinishReason = "stop"
    advantages: Column | None = None
    behaviour_logprobs: Column | None = None
    step_ends: tuple[int, ...] = ()
    step_values: tuple[float, ...] | None = None
    text: str = ""
    pair: int | None = None
    chosen: bool | None = None
    score: float = None  # type: ignore[assignment]  # filled in below: a row always has one
    stretches: tuple[Stretch, ...] = ()
    domain: str = ""
    step_rewards: tuple[float, ...] = ()
    step_errors: tuple[float, ...] | None = None
    continuations: Mapping[int, tuple[float | None, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import numpy as np

        if self.score is None:
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
"""Names such as ``episodes/reward`` or ``train/kl``; values are numbers that JSON can hold."""
