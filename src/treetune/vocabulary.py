"""The nouns of the project, as plain frozen data.

Every room speaks in these types and in no others of its own for the same thing. The file imports
nothing heavy, so that configuration, tasks and tests can use it without torch.

A problem grows a tree of text: an answer (`Trajectory`) is a path of `Segment`s from the prompt to
a graded leaf; a `Step` is the part of an answer between two boundaries; an `Episode` is a training
row cut out of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

TokenIds = tuple[int, ...]

FinishReason = Literal["stop", "length"]
"""Why sampling ended: an end token or stop string, or the budget of tokens."""

GradeOutcome = Literal["ok", "no_answer", "timeout", "error"]

FULL_REWARD = 1.0
"""What earns this or more is right. A grader may give less to what is wrong, and more than it to
what is right, as some published recipes do; shares of right answers don't change with that."""


@dataclass(frozen=True)
class TextCodec:
    """Text to token ids and back; the one tokenizer of the run.

    `encode` adds no special tokens, `decode` drops them. Token ids are the truth: text that came
    from them is a view, and is not encoded again.

    `frame` is what a model needs around a problem's text (a chat template), `begin` the ids before
    all of it (the beginning of text, or nothing). `eos_id` ends an answer that is written for the
    model; each of `end_ids`, which are `eos_id` alone where left out, ends an answer that it samples.
    """

    encode: Callable[[str], TokenIds]
    decode: Callable[[Sequence[int]], str]
    eos_id: int
    end_ids: TokenIds = ()
    frame: Callable[[str], str] = str
    begin: TokenIds = ()

    def __post_init__(self) -> None:
        if self.eos_id not in self.end_ids:
            object.__setattr__(self, "end_ids", (self.eos_id, *self.end_ids))

    def encode_prompt(self, prompt: str) -> TokenIds:
        """What the model is given when it is asked `prompt`. Every prompt becomes ids here."""
        framed = self.frame(prompt)
        return self.begin + self.encode(framed) if framed else ()

    def encode_answer(self, prompt: str, answer: str) -> TokenIds:
        """The ids that would follow `prompt` for `answer`, without an end token.

        Prompt and answer are encoded together where that leaves the prompt's ids as they are, as
        they are when a model samples: some tokenizers put a space before whatever begins a text.
        """
        framed = self.frame(prompt)
        alone, together = self.encode(framed), self.encode(framed + answer)
        return together[len(alone) :] if together[: len(alone)] == alone else self.encode(answer)


@dataclass(frozen=True)
class Problem:
    """One row of a task: what the model is asked and what would be right.

    `id` is unique within the task and stable over runs (``train/17``): seeds derive from it.
    """

    id: str
    prompt: str
    gold: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grade:
    """A grader's verdict. `reward` is 0.0 unless `outcome` is ``ok``, or the grader was told otherwise;
    the outcome says why."""

    reward: float
    outcome: GradeOutcome
    extracted: str | None = None
    seconds: float = 0.0
    message: str | None = None

    @property
    def right(self) -> bool:
        return self.reward >= FULL_REWARD


Branch = tuple[tuple[int, int], ...]
"""Where in a tree of threads a part of an answer lies: (block, thread) from the outermost block inwards,
blocks counted from 0 within the thread that holds them, threads from 0 in the order of their outlines.
Empty outside of all blocks, so in every answer without threads."""


def sees(branch: Branch, earlier: Branch) -> bool:
    """Whether what is on `branch` was written in sight of an `earlier` part of the answer.

    Threads of one block don't see each other. A thread sees all that came before its block; what comes
    behind a block sees all of its threads.
    """
    for (block, thread), (other_block, other_thread) in zip(branch, earlier):
        if block != other_block:
            return True
        if thread != other_thread:
            return False
    return True


@dataclass(frozen=True)
class Segment:
    """Token ids that entered an answer together, either sampled by the policy or injected.

    `logprobs` (one per token, of the distribution that was really sampled from) and
    `policy_version` (0 for the start weights, i+1 after iteration i) belong to sampled segments, and so
    do `seconds`, which the engine took for the request. What a segment was sampled after is the prompt
    and the earlier segments that its `branch` `sees`.
    """

    token_ids: TokenIds
    origin: Literal["sampled", "injected"] = "sampled"
    logprobs: tuple[float, ...] | None = None
    policy_version: int | None = None
    branch: Branch = ()
    seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Stretch:
    """Response tokens up to `end` (from the end of the stretch before) that entered an answer together,
    on one branch."""

    end: int
    branch: Branch


@dataclass(frozen=True)
class Trajectory:
    """One answer to one problem.

    `text` is the decoded response without special tokens: a view for graders and people. It holds
    all that was sampled, so the stop string too where one ended it; graders are not shown that.
    `step_ends` are token offsets into the response, strictly rising, the last one equal to its
    length: step i covers tokens ``[step_ends[i-1], step_ends[i])`` (with 0 before the first).

    `score` is the grader's verdict and says what was right; `reward`, which credit is about, adds the
    `bonus` that shaping gave (negative for a penalty). `numbers` are what was counted and measured of it, by
    ``group/name`` (see `episode_generators.numbers`); seconds may be among them, so answers are compared
    without.
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

    @property
    def id(self) -> str:
        return f"{self.problem.id}#{self.sample}"

    @property
    def response_ids(self) -> TokenIds:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def score(self) -> float:
        return self.grade.reward

    @property
    def reward(self) -> float:
        return self.score + self.bonus

    @property
    def unfinished(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Episode:
    """One training row. All tuples but `prompt_ids` have one entry per response token.

    `reward` is what credit was given for, shaping included; `score` (the reward where left out) is
    the grader's verdict alone, by which selections tell right from wrong.

    `trained` marks the tokens that the loss may touch (sampled ones); `advantages` is None where
    the trainer computes them (`gae`) or none are needed (`mle`). `behaviour_logprobs` are the
    engine's. `step_ends` and `step_values` (value of the state *before* each step) are kept for
    reports and analyses. Where answers are compared, `pair` numbers the comparison and `chosen` says
    whether this is its better answer; the two are neighbours, the better one first.

    Where the answer has threads, `stretches` are its segments, and say what each token was sampled
    after; empty where every token was sampled after all before it.
    """

    prompt_ids: TokenIds
    response_ids: TokenIds
    trained: tuple[bool, ...]
    reward: float
    group: str
    trajectory: str
    policy_version: int
    finish_reason: FinishReason = "stop"
    advantages: tuple[float, ...] | None = None
    behaviour_logprobs: tuple[float, ...] | None = None
    step_ends: tuple[int, ...] = ()
    step_values: tuple[float, ...] | None = None
    text: str = ""
    pair: int | None = None
    chosen: bool | None = None
    score: float = None  # type: ignore[assignment]  # filled in below: a row always has one
    stretches: tuple[Stretch, ...] = ()

    def __post_init__(self) -> None:
        if self.score is None:
            object.__setattr__(self, "score", self.reward)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


Metrics = dict[str, float]
"""Names such as ``episodes/reward`` or ``train/kl``; values are numbers that JSON can hold."""
