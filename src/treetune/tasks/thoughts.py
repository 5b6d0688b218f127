"""Separates a model's thoughts from its answer, for graders, judges, tools and pipelines.

Thoughts have one of these forms:

* opened and closed: in ``<think>six sevens</think> It is 42.`` the answer is ``It is 42.``;
* opened by the prompt, as chat templates of reasoning models do: ``six sevens</think> It is 42.``;
* several thoughts: in ``<think>a</think> One. <think>b</think> Two.`` the answer is the text after the last
  thought, ``Two.``;
* opened and never closed, because the response was cut off: ``<think>six sev`` has no answer.

A tag in quotes or backticks is only mentioned, and opens or closes nothing. A tag opens the first thought
only at the beginning of a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

THINK_END = "</think>"
"""The default of `think_end` settings. It stands for all pairs of `THOUGHT_TAGS`."""


class Tags(NamedTuple):
    """The tags that open and close a thought.

    Example: ``Tags("<think>", ("</think>",))``.
    """

    opening: str
    """The tag that opens a thought; empty if it isn't known."""
    closings: tuple[str, ...]
    """The tags that each close the thought. The first one also closes a thought that the prompt opened."""


THOUGHT_TAGS = (
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
    # gpt-oss. Its analysis ends with the message, or when another channel begins.
    Tags(
        "<|channel|>analysis<|message|>",
        ("<|channel|>final<|message|>", "<|end|>", "<|channel|>commentary"),
    ),
)

# gpt-oss again, decoded without its special tokens: "analysisSix sevens.assistantfinalIt is 42."
_BARE_CHANNELS = re.compile(r"\A\s*analysis(?=\S).*assistantfinal", re.DOTALL)

CLOSING_QUOTE = {"`": "`", "'": "'", '"': '"', "“": "”", "‘": "’", "„": "“", "«": "»"}
"""The quote or backtick that closes each opening one. A tag between the two is only mentioned."""


class SplitResponse(NamedTuple):
    """The thought and the answer of a response.

    ``<think>six sevens</think> It is 42.`` is
    ``SplitResponse("<think>six sevens</think>", " It is 42.", False)``.
    """

    thought: str
    """The text before the answer; empty if there is no thought."""
    answer: str
    """The text after the last thought; empty if the response was cut off in a thought."""
    is_cut_off: bool
    """Whether the response ends within a thought."""


def read_thoughts(response: str, think_end: str = THINK_END, *, is_open: bool = False) -> SplitResponse:
    """Separates the thoughts of a response from its answer, in time linear in the response.

    Args:
        response: The text that the model wrote.
        think_end: The text that ends a thought. It also determines the opening tag. The default stands for
            all pairs of `THOUGHT_TAGS`.
        is_open: Whether the response begins within a thought, which the prompt has opened.
    """
    # gpt-oss without its special tokens separates thoughts by bare words ("assistantfinal"). These words are
    # looked for only if the caller has chosen no tag.
    if think_end == THINK_END and (bare_thought := _BARE_CHANNELS.match(response)):
        return SplitResponse(bare_thought[0], response[bare_thought.end() :], is_cut_off=False)
    possible_tags = _tags_of_setting(think_end)
    open_tags: Tags | None = None
    is_in_thought = is_open
    closed_thoughts = 0
    answer_start = 0
    for start, end in _find_tags(response, possible_tags):
        tag = response[start:end]
        closed_tags = next((pair for pair in possible_tags if tag in pair.closings), None)
        if closed_tags is not None:
            # Without an open tag in the response, the prompt may have opened a thought, with an unknown tag.
            # So the first closing tag of any pair (`closings[0]`) ends it. This also holds if `is_open` is
            # False, since some callers don't know the prompt.
            closes_prompts_thought = open_tags is None and tag == closed_tags.closings[0]
            # Within a thought, another model's tag is only text.
            if open_tags is closed_tags or closes_prompts_thought:
                is_in_thought, open_tags = False, None
                answer_start = end
                closed_thoughts += 1
        # Before the first thought, a tag in the middle of a line is probably only mentioned.
        elif not is_in_thought and (closed_thoughts or _begins_line(response, start)):
            is_in_thought, open_tags = True, next(pair for pair in possible_tags if pair.opening == tag)
    if is_in_thought:
        return SplitResponse(response, "", is_cut_off=True)
    return SplitResponse(response[:answer_start], response[answer_start:], is_cut_off=False)


def after_thought(response: str, think_end: str = THINK_END) -> str:
    """Returns the text after the last thought of a response.

    Returns the whole response if it has no thought, and an empty text if it was cut off in a thought that it
    opened itself.
    """
    return read_thoughts(response, think_end).answer


def opening_at_end(prompt: str) -> str:
    """Returns the tag at the end of a prompt that opens a thought. Chat templates of reasoning models add
    such tags. Returns an empty text if there is none."""
    ending = prompt.rstrip()
    return next((pair.opening for pair in THOUGHT_TAGS if ending.endswith(pair.opening)), "")


def ends_in_thought(prompt: str) -> bool:
    """Returns whether a prompt ends with a tag that opens a thought."""
    return bool(opening_at_end(prompt))


@lru_cache(maxsize=64)
def _tags_of_setting(think_end: str) -> tuple[Tags, ...]:
    """Returns the pairs of tags that a setting `think_end` stands for.

    The default ``</think>`` stands for the pairs of all models, because it is a default for any model.
    """
    if think_end == THINK_END:
        return THOUGHT_TAGS
    for pair in THOUGHT_TAGS:
        if think_end in pair.closings:
            return (pair,)
    # A user's own tags: </plan> ends <plan>. A text without a slash has no known opening.
    opening = think_end.replace("/", "", 1) if "/" in think_end else ""
    return (Tags(opening, (think_end,)),)


@lru_cache(maxsize=64)
def _pattern_of_tags(pairs: tuple[Tags, ...]) -> re.Pattern[str]:
    """Returns a pattern that matches each tag of these pairs. Where two tags fit, it matches the longer
    one."""
    texts: set[str] = set()
    for pair in pairs:
        texts |= {pair.opening, *pair.closings}
    texts.discard("")  # a pair may have no opening tag
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _find_tags(text: str, pairs: tuple[Tags, ...]) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each tag that isn't in quotes."""
    for tag in _pattern_of_tags(pairs).finditer(text):
        quote = CLOSING_QUOTE.get(text[tag.start() - 1 : tag.start()])
        if quote is None or text[tag.end() : tag.end() + 1] != quote:
            yield tag.span()


def _begins_line(text: str, position: int) -> bool:
    """Returns whether a position has only spaces and special tokens before it in its line, as in
    ``<｜begin▁of▁sentence｜><think>``."""
    # Special tokens are short, so 80 characters are enough. gpt-oss writes the word "assistant" after a
    # special token: ``<|start|>assistant<|channel|>``.
    line = text[max(0, position - 80) : position].rpartition("\n")[2]
    return not re.sub(r"<[|｜][^<>\s]{1,40}[|｜]>(?:assistant)?|<s>", "", line).strip()
