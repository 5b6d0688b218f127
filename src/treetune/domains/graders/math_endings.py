r"""Finds the final answer in a response to a mathematical problem, and the answer in a gold.

The answer is in the last box or ``<answer>``. If the response has neither, the answer follows the last
"answer is", "Final Answer" or "答案：".
"""

from __future__ import annotations

import json
import re
from typing import Any

from treetune.tasks.graders.extraction import OPENING_TAG, Box, find_boxes, last_between

MOST_CHARACTERS_OF_ANSWER = 2000
"""The greatest length of an answer, in characters. No data set has an answer of 500."""

# Text between boxes that are parts of one answer: ", ", " \\text{ and } ", "$, $x_2 = "
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;&.*]|\\[()\[\],;:!\\]|\\q?quad(?![a-z])|\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|(?<![a-z])(?:and|or)(?![a-z])"
    r"|(?:[A-Za-z]|\\[a-z]{2,8})(?:_\{?\w\}?)?\s*=)*"
)
# x = and x_1 = $ at the end of the text before a box
_NAME_BEFORE = re.compile(r"((?:[A-Za-z]|\\[a-z]{2,8})(?:_\{?\w\}?)?)\s*=\s*[$\s]*\Z")
_LONGEST_NAME_BEFORE_BOX = 30
"""The number of characters before a box in which a name such as ``x_1 = $`` is searched."""
_LONGEST_GAP_BETWEEN_BOXES = 80
"""The most characters between two boxes that are parts of one answer."""
MOST_JOINED_BOXES = 60
"""The most boxes that are joined to one answer."""

# **58** and __58__, but not the powers of x**2 * y**2
_BOLD_TEXT = re.compile(r"(?<![\w)\]}*])(\*\*|__)(?=[^\s*])([^*\n]{1,200}?)(?<=\S)\1(?![\w*])")
# Texts before an answer, one kind in each line: "The answer to part (b) is ", "the solutions are ", a heading
# "## Final Answer", Chinese and Japanese, other languages.
_ANSWER_MARKER = re.compile(
    r"\banswers?\b[^.,\n:：=]{0,40}?(?:\b(?:is|are|be|equals)\b|[:：=])\s*[:：]?\s*"
    r"|solutions?\s*(?:is|are|[:：=])\s*[:：]?\s*"
    r"|^(?:[#>]|[^\S\n])*+(?:(?:the|my)\s+)?(?:final\s+)?answer\s*$"
    r"|答案\s*(?:就?是|为|為|应为)?\s*[:：]?\s*|答え\s*は?\s*[:：]?\s*|(?<!\w)答\s*[:：]\s*"
    r"|(?<!\w)(?:ответ|réponse|respuesta|antwort|resposta|risposta|정답|답)[^\S\n]*(?:est|es|ist|é|è|은|는)?\s*[:：]?\s*",
    re.IGNORECASE | re.MULTILINE,
)
# The full stop of a sentence, not of a number or an abbreviation
_END_OF_SENTENCE = re.compile(r"\.(?=\s+[A-Z])|。")
# "The answer is not 5"
_DENIAL = re.compile(r"\bnot\b|n't\b|\bnever\b|\bcannot\b", re.IGNORECASE)
# $58$, $$58$$, \(58\), \[58\] directly after a marker
_FORMULA_IN_DELIMITERS = re.compile(r"\s*(?:\$\$?|\\\(|\\\[)(?P<formula>.*?)(?:\$\$?|\\\)|\\\])", re.DOTALL)
# "therefore, simply " before an answer
_LEADING_WORDS = re.compile(
    r"\A(?:(?:therefore|thus|hence|then|so|simply|indeed|just|clearly|exactly|equal\s+to|given\s+by|that)\b[,:]?\s*)+",
    re.IGNORECASE,
)
# "The number of ways is 58"
_SENTENCE_WITH_ANSWER = re.compile(r"\A[A-Za-z]{2,}\b.*\s(?:is|are|equals)\s+(?P<end>.+)\Z")
# ", because it is even" up to the end of the line
_REASON_AT_END = re.compile(r"(?:,|(?<!\s))\s++(?:because|since)\b.*\Z", re.IGNORECASE)
# The text before the answer in golds of some data sets
_ANNOUNCEMENT_OF_GOLD = re.compile(r"[Tt]he (?:final )?answer is:?\s*")


def find_answer(response: str, gold_parts: int = 1) -> str | None:
    r"""Returns the final answer of a response as it is written; None if there is none.

    Args:
        response: The text of the model.
        gold_parts: The number of answers that the gold lists. If it lists N > 1 answers, the last N boxes of
            a paragraph can be the answer together, with any words between them.
    """
    boxes = find_boxes(response)
    start_of_last_box = boxes[-1].start if boxes else -1
    tagged_at = response.rfind(OPENING_TAG)
    # The later of a box and an <answer> counts.
    if start_of_last_box > tagged_at:
        return _read_boxes(response, boxes, gold_parts) or None
    if tagged_at >= 0:
        tagged = last_between(response[tagged_at:], unclosed=True)
        # Within the tags there may be a sentence ("The answer is 5"). A long text there isn't an answer.
        if tagged and len(tagged) <= MOST_CHARACTERS_OF_ANSWER:
            return find_answer(tagged, gold_parts) or _strip_bold(tagged)
    if boxes:  # before an <answer> that is empty or too long
        return _read_boxes(response, boxes, gold_parts) or None
    return _answer_after_marker(response)


def find_gold(gold: str) -> str:
    """Returns the answer in a gold, which may be a solution with a box, a JSON list, or only the answer."""
    if boxes := find_boxes(gold):
        return _join_boxes(gold, boxes)
    items = json_list(gold)
    if items is not None:
        return ", ".join(items)
    # The golds of some data sets say "The answer is" before the answer.
    return _ANNOUNCEMENT_OF_GOLD.split(gold)[-1].strip()


def json_list(gold: str) -> list[str] | None:
    """Returns the items of a gold that is a JSON list. Returns None for any other gold.

    Two ascending integers such as ``[3, 5]`` aren't a list of answers, but a closed interval.
    """
    text = gold.strip()
    if not (text.startswith("[") and text.endswith("]")) or len(text) > MOST_CHARACTERS_OF_ANSWER:
        return None
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_interval = (
        len(items) == 2
        and all(isinstance(item, int) and not isinstance(item, bool) for item in items)
        and items[0] < items[1]
    )
    if not items or is_interval:
        return None
    return [_text_of_item(item) for item in items]


def _text_of_item(item: Any) -> str:
    """Returns an item of a JSON list as the text of an answer: ``(1, 2)`` for [1, 2], ``true`` for True."""
    if isinstance(item, list):
        return f"({', '.join(_text_of_item(part) for part in item)})"
    return item if isinstance(item, str) else json.dumps(item)


def _read_boxes(response: str, boxes: list[Box], gold_parts: int) -> str:
    r"""Returns the answer in the last box, or in the last boxes if they are parts of one answer.

    If the gold lists two answers, ``The roots are \boxed{1}, which is simple, and \boxed{2}.`` gives ``1,
    2``, although there are words between its boxes. If the last box lists several answers itself, it is the
    whole answer.

    Args:
        response: The text of the model.
        boxes: All boxes of the text.
        gold_parts: The number of answers that the gold lists (see `find_answer`).
    """
    joined = _join_boxes(response, boxes)
    last_box = boxes[-1]
    if joined != last_box.content.strip():
        return joined  # several boxes directly after each other
    last_paragraph = response.rfind("\n\n", 0, last_box.start)
    contents_in_paragraph = [box.content for box in boxes[-gold_parts:] if box.start > last_paragraph]
    # A comma, "or", "and" or any \text{…} counts as a sign that the last box lists several answers itself.
    lists_several_answers = re.search(r",|\\text\{|\bor\b|\band\b", last_box.content)
    if gold_parts > 1 and len(contents_in_paragraph) == gold_parts and not lists_several_answers:
        return ", ".join(contents_in_paragraph)
    return joined


def _join_boxes(text: str, boxes: list[Box]) -> str:
    """Returns the content of the last box, together with those of preceding boxes that are separated from it
    only by commas, names or "and"."""
    first = len(boxes) - 1
    while first > 0 and len(boxes) - first < MOST_JOINED_BOXES:
        gap = text[boxes[first - 1].end : boxes[first].start]
        # A box on the next line, without any word before it, repeats or corrects the previous one.
        replaces_previous = "\n" in gap and not gap.strip(" \n\r\t$.*")
        is_separate = (
            len(gap) > _LONGEST_GAP_BETWEEN_BOXES or "\n\n" in gap or _BETWEEN_BOXES.fullmatch(gap) is None
        )
        if replaces_previous or is_separate:
            break
        first -= 1
    contents: list[str] = []
    names: list[str] = []
    for box in boxes[first:]:
        name = _NAME_BEFORE.search(text[max(0, box.start - _LONGEST_NAME_BEFORE_BOX) : box.start])
        names.append(name[1] if name is not None else "")
        contents.append(box.content.strip())
    if len(set(contents)) == 1:
        return contents[0]  # one box, or the same answer again
    if all(names) and len(set(names)) == len(names):  # x = \boxed{1}, y = \boxed{2} is "x = 1, y = 2"
        contents = [f"{name} = {content}" for name, content in zip(names, contents, strict=True)]
    return ", ".join(contents)


def _answer_after_marker(response: str) -> str | None:
    r"""Returns the answer after the last marker: ``58`` of "The answer is 58, because 2 · 29 = 58."

    None if there is no marker, or nothing after it.
    """
    ending = _strip_bold(response[-MOST_CHARACTERS_OF_ANSWER:])
    # "The answer is not 5" states no answer.
    markers = [match for match in _ANSWER_MARKER.finditer(ending) if not _DENIAL.search(match[0])]
    if not markers:
        return None
    after_marker = ending[markers[-1].end() :]
    # A formula directly after the marker is the answer if nothing follows it in its line. It may itself have
    # several lines, as in \[ … \].
    match = _FORMULA_IN_DELIMITERS.match(after_marker)
    if match:
        after_formula = after_marker[match.end() :].partition("\n")[0]
        if not after_formula.strip(" .*。"):
            return match["formula"].strip() or None
    # If there is no such formula, the answer is in the first sentence of the first line that isn't empty.
    line = next((line for line in map(str.strip, after_marker.split("\n")) if line), "")
    end = _END_OF_SENTENCE.search(line)
    sentence = line[: end.start()] if end else line
    # Removes "therefore, simply" before the answer, and ", because …" after it.
    answer = _REASON_AT_END.sub("", _LEADING_WORDS.sub("", sentence.strip(" #>")))
    # The heading "Final Answer" may be followed by "The number of ways is 58".
    statement = _SENTENCE_WITH_ANSWER.match(answer)
    if statement is not None and not _DENIAL.search(answer):
        answer = _LEADING_WORDS.sub("", statement["end"])
    return answer.strip() or None


def _strip_bold(text: str) -> str:
    """Removes Markdown's asterisks around a phrase, but not those of ``x**2``."""
    return _BOLD_TEXT.sub(r"\2", text)
