"""Tells a model's thoughts from what it says behind them: the one reading of graders, judges, tools and
pipelines.

A response holds its thoughts in one of these ways:

* opened and closed: ``<think>six sevens</think> It is 42.`` says ``It is 42.``;
* opened by the prompt, as chat templates of reasoning models do: ``six sevens</think> It is 42.``;
* several: ``<think>a</think> One. <think>b</think> Two.`` says what stands behind the last, ``Two.``;
* opened and never closed, since the answer was cut off in it: ``<think>six sev`` says nothing.

A tag in quotes or backticks is a mention and opens or closes nothing. Before the first thought, only a tag at
the beginning of a line opens one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

THINK_END = "</think>"
"""The default of `think_end` settings. It stands for all pairs of `TAGS`."""


class Tags(NamedTuple):
    """The text that opens a thought (empty where nothing is known to), and those of which any closes it. The
    first of these also closes one that the prompt opened."""

    opening: str
    closings: tuple[str, ...]


TAGS = (
    Tags("<think>", ("</think>",)),  # DeepSeek-R1, Qwen3, GLM, MiniMax and most others
    Tags("<thinking>", ("</thinking>",)),
    Tags("<thought>", ("</thought>",)),  # EXAONE Deep
    Tags("<reasoning>", ("</reasoning>",)),
    Tags("<seed:think>", ("</seed:think>",)),  # Seed-OSS
    Tags("<longcat_think>", ("</longcat_think>",)),
    Tags("[THINK]", ("[/THINK]",)),  # Magistral
    Tags("◁think▷", ("◁/think▷",)),  # Kimi
    Tags("<|START_THINKING|>", ("<|END_THINKING|>",)),  # Command A
    Tags("<|begin_of_thought|>", ("<|end_of_thought|>",)),  # OpenThinker, Sky-T1
    Tags("<|channel>thought", ("<channel|>",)),  # Gemma 4
    # gpt-oss. Its analysis ends with its message, or where another channel begins.
    Tags(
        "<|channel|>analysis<|message|>",
        ("<|channel|>final<|message|>", "<|end|>", "<|channel|>commentary"),
    ),
)

# gpt-oss again, decoded without its special tokens: "analysisSix sevens.assistantfinalIt is 42."
_BARE_CHANNELS = re.compile(r"\A\s*analysis(?=\S).*assistantfinal", re.DOTALL)

_QUOTES = {"`": "`", "'": "'", '"': '"', "“": "”", "‘": "’", "«": "»"}


class SplitResponse(NamedTuple):
    """A response as `read_thoughts` tells it apart.

    ``<think>six sevens</think> It is 42.`` is
    ``SplitResponse("<think>six sevens</think>", " It is 42.", False)``.
    """

    thought: str
    """All up to where the answer begins; empty where there is no thought."""
    answer: str
    """The text behind the last thought; empty where that was cut off."""
    is_cut_off: bool
    """Whether the response ends within a thought."""


def read_thoughts(response: str, think_end: str = THINK_END, *, is_open: bool = False) -> SplitResponse:
    """Tells the thoughts of a response from what stands behind them, in time linear in it.

    Args:
        response: What the model wrote.
        think_end: The text that ends a thought, and its opening with it. The default reads all of `TAGS`.
        is_open: The prompt ends within a thought, so that the response begins in one.
    """
    if think_end == THINK_END and (bare := _BARE_CHANNELS.match(response)):
        return SplitResponse(bare[0], response[bare.end() :], False)
    pairs = _pairs(think_end)
    opened_by: Tags | None = None
    is_within = is_open
    thoughts = 0
    answer_start = 0
    for start, end in _tags(response, pairs):
        tag = response[start:end]
        closed = next((pair for pair in pairs if tag in pair.closings), None)
        if closed is not None:
            closes_prompts_thought = opened_by is None and tag == closed.closings[0]
            # Another model's tag within a thought is a part of its text.
            if opened_by is closed or closes_prompts_thought:
                is_within, opened_by = False, None
                answer_start = end
                thoughts += 1
        # Before the first thought a tag in the middle of a line is more likely one that is spoken of.
        elif not is_within and (thoughts or _begins_line(response, start)):
            is_within, opened_by = True, next(pair for pair in pairs if pair.opening == tag)
    if is_within:
        return SplitResponse(response, "", True)
    return SplitResponse(response[:answer_start], response[answer_start:], False)


def after_thought(response: str, think_end: str = THINK_END) -> str:
    """Returns what stands behind the last thought: all of a response without one, nothing of a response that
    was cut off in one that it opened itself."""
    return read_thoughts(response, think_end).answer


def opening_at_end(prompt: str) -> str:
    """Returns the tag with which a prompt ends that opens a thought, as chat templates of reasoning models
    do; an empty text where it ends with none."""
    ending = prompt.rstrip()
    return next((pair.opening for pair in TAGS if ending.endswith(pair.opening)), "")


def ends_in_thought(prompt: str) -> bool:
    """Returns whether a prompt ends with what opens a thought."""
    return bool(opening_at_end(prompt))


@lru_cache(maxsize=64)
def _pairs(think_end: str) -> tuple[Tags, ...]:
    """Returns the tags that a setting `think_end` means."""
    if think_end == THINK_END:
        return TAGS
    if (pair := next((pair for pair in TAGS if think_end in pair.closings), None)) is not None:
        return (pair,)
    # Tags of one's own: what ends <plan> is </plan>. Text without a slash has no opening that is known.
    opening = think_end.replace("/", "", 1) if "/" in think_end else ""
    return (Tags(opening, (think_end,)),)


@lru_cache(maxsize=64)
def _pattern(pairs: tuple[Tags, ...]) -> re.Pattern[str]:
    texts = {text for pair in pairs for text in (pair.opening, *pair.closings) if text}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _tags(text: str, pairs: tuple[Tags, ...]) -> Iterator[tuple[int, int]]:
    """Yields where tags begin and end that aren't merely spoken of."""
    for tag in _pattern(pairs).finditer(text):
        quote = _QUOTES.get(text[tag.start() - 1 : tag.start()])
        if quote is None or text[tag.end() : tag.end() + 1] != quote:
            yield tag.span()


def _begins_line(text: str, position: int) -> bool:
    """Returns whether nothing stands before a position on its line but spaces and special tokens, such as a
    beginning of text: ``<｜begin▁of▁sentence｜><think>``."""
    # Special tokens are short: 80 characters hold them.
    line = text[max(0, position - 80) : position].rpartition("\n")[2]
    return not re.sub(r"<[|｜][^<>\s]{1,40}[|｜]>(?:assistant)?|<s>", "", line).strip()
