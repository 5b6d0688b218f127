"""The grader of questions with lettered options, such as GPQA and SuperGPQA."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from annotated_types import Le, MinLen
from typing_extensions import override

from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import find_boxes
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

_LONGEST_LINE_OF_LETTER = 100
"""Lines with so many characters or more are not tried as a line of only a letter and signs around it."""
_LONGEST_LABEL = 2000
"""The number of characters that are read of a text whose beginning may be a letter."""
_LONGEST_REMARK = 200
"""The number of characters before or after a choice in which another choice may revoke it."""

# \boxed, \text before a brace, and the signs of LaTeX, Markdown and quotations
_MARKUP = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|textit|mathit)\s?(?=\{)|[{}$*_`\"'“”‘’\[\]]")
_ASCII_OF_FULLWIDTH: dict[int, str] = {0xFF21 + index: chr(0x41 + index) for index in range(26)}
_ASCII_OF_FULLWIDTH |= {0xFF41 + index: chr(0x61 + index) for index in range(26)}
_ASCII_OF_FULLWIDTH |= {
    ord(wide): plain
    for wide, plain in zip("：（）．。，；！＝【】「」\u3000、", ":()..,;!=[][] ,", strict=True)
}
"""The plain form of each fullwidth letter and sign: A for ``Ａ``. Each plain form is a single character, so
the offsets in a text stay the same."""
# 答案是, 选择, 정답은, "Antwort: ", "Réponse est"
_ANSWER_IS_IN_OTHER_LANGUAGES = (
    r"(?:答案|答え|正解|选项|選項)[ \t*_]*(?:应该是|應該是|应为|為|为|是|选|選|は|:|=)"
    r"|(?:故|因此|所以|应|應|我)?(?:选择|選擇|选|選)|(?:정답|답)(?:은|는)?[ \t]*:?"
    r"|(?:\b(?:Antwort|Réponse|Respuesta|Resposta|Risposta|Ответ)\b|الإجابة|उत्तर)"
    r"[ \t*_]*(?:ist|est|es|é|:|—|–|-)"
)
# "The answer is therefore option B", "Final answer:\nB", "I choose B", "Option B is correct"
_ANSWER_IS = re.compile(
    r"(?:\b(?:answer|choice|option)\b[ \t*_]*(?:(?:is|(?:would|must|should) be)\b|[:=]|\n)"
    rf"|\bI (?:choose|pick|select)\b|{_ANSWER_IS_IN_OTHER_LANGUAGES})"
    r"[ \t*_:]*(?:(?:therefore|thus|hence|clearly)\b[ \t*_:]*)?(?:\n[ \t*_]*)?"
    r"(?:(?:option|choice|answer|the letter)\b[ \t*_:]*)?(?=(?P<answer>[^\n]{0,200}))"
    r"|\b(?:option|choice|answer) \(?(?P<letter>[A-Z])\)? is (?:the )?(?:correct|right|best)\b",
    re.IGNORECASE,
)
# b, (B), B.
_ONLY_A_LETTER = re.compile(r"\(?(?P<letter>[A-Za-z])\)?\s*[.,;:!]?\s*")
# The label of (B) Paris, B: Paris, Option B, B because …, B是, but not of "A dog"
_LABEL_OF_OPTION = re.compile(
    r"(?:option |choice )?"
    r"(?:\((?P<in_brackets>[A-Z])\)[.,:;]?|(?P<letter>[A-Z])"
    r"(?:[).:,;]|(?= (?:because|since|as|given)\b| [-–—] )|(?=[^\x00-\x7f])))(?=\s|$|[^\x00-\x7f])"
)
# "The correct answer" of the line "The correct answer B". A match can begin only at the first space of a run
# of spaces, and takes the whole run. (When each space was tried as the beginning, 20,000 spaces took 20
# seconds.)
_WORDS_BEFORE_LETTER = re.compile(
    r"(?<!\s)\s*+(?:the )?(?:(?:correct|right|final|best) )?(?:answer|option|choice)\s++(?=\W*[A-Z]\W*$)",
    re.IGNORECASE,
)
# <answer>B</answer>, also where it isn't closed
_ANSWER_TAG = re.compile(r"<answer>(?P<text>[^<]{0,2000})(?:</answer>|\Z)", re.IGNORECASE)
# A + B, B = C
_FORMULA_OF_LETTERS = re.compile(r"\s*[A-Za-z](?:\s*[-+*=^]\s*[A-Za-z\d]{1,20})+\s*")
_SIGN_OF_FORMULA = re.compile(r"[+=^<>|\\\d]|[A-Za-z]\s*[-*]\s*[A-Za-z]")
"""A box without a letter that has one of these signs contains a formula, and not a choice."""

# A letter that names an option, and neither the word I nor the article of "A dog"
_LETTER_OF_OPTION = r"(?:[B-HJ-Z](?![\w'’])|A(?![\w'’])(?! (?!is\b)[a-z])|I(?=\)|\W*$))"
_LETTER_OR_REFUSAL = re.compile(
    rf"(?<!\w){_LETTER_OF_OPTION}|\A\W*(?i:not|no|none|neither|all|any|both|either|un\w+)\b"
)
"""A letter, or the refusal to choose one. A statement without them, such as "the choice is the only one that
fits", doesn't count as a choice."""
_OTHER_CHOICE_IN_REMARK = re.compile(
    r"\A\W*(?:and\b\W*)?\(?[A-Z](?:[).,:;/]|$)|(?:[,/;&]|\band\b)\W*[A-Z]\)"
    r"|\b(?i:or|maybe|perhaps|possibly|probably|alternatively|wait|actually|rather)\b"
    r"(?:\W*\b(?:it|is|be|may|might|could|also|even|well|option|choice|answer|the|actually|maybe|rather)\b){0,6}"
    rf"\W*?{_LETTER_OF_OPTION}",
)
"""A remark after a choice that names another choice, such as "or C" in "B or C"."""
# The beginning of a reason, in which other options may be named
_BEGINNING_OF_REASON = re.compile(r"\b(?:because|since|[Bb]oth|[Ee]ither|[Nn]either)\b")
# The end of "B or the correct " and of "\boxed{B}, ", before another choice
_JOIN_BEFORE_CHOICE = re.compile(
    r"(?:\b(?:or|and)\b[^\w\n]*(?:(?:the|correct|right|best|final)\s+)*|\}[^\S\n]*[$,/&]*[^\S\n]*)\Z"
)


class _StatedChoice(NamedTuple):
    """A choice in a response: ``_StatedChoice(4, "B", " Paris")`` for "The answer is (B) Paris"."""

    start: int
    """The offset in the response."""
    letter: str | None
    """None for a choice without a letter, such as "none of these"."""
    text_after: str
    """The text after the letter, up to the end of the line."""


@Grader.register("multiple_choice")
@dataclass(frozen=True, kw_only=True)
class MultipleChoice(Grader):
    r"""Gives the reward 1 for a response that chooses the gold's letter. A response without a choice has the
    outcome ``no_answer``, and so has one that names several letters at once.

    After the last `think_end`, the choice is in a ``\boxed{…}``, in ``<answer>…</answer>``, the only letter
    of a line or of the whole response, or after "answer is", "Answer:", "Final answer:" or the like, also in
    some other languages. The last of several choices counts. A choice is a single letter (``b``, ``(B)``,
    ``**B.**``, ``\text{B}``), or a capital with its option (``B) Paris``, ``(B) Paris``, ``B: Paris``). A
    letter within a word doesn't count, nor does the first word of ``A dog``. Two joined letters (``B or C``,
    ``(B), maybe (C)``, ``B. Wait, C``) aren't a choice. The gold is a letter in one of these forms.
    """

    votes_by_value: ClassVar[bool] = True

    options: Annotated[int, Le(26)] = 10
    """The number of options. Later letters of the alphabet aren't choices."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    isolation: ClassVar[Isolation] = "inline"

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        text = response.translate(_ASCII_OF_FULLWIDTH)
        choices = [*self._find_in_boxes(text), *self._find_in_tags(text)]
        choice_in_line = self._find_letter_line(text)
        if choice_in_line is not None:
            choices.append(choice_in_line)
        choices += self._find_in_sentences(text)
        if not choices:
            return None
        choices.sort(key=lambda choice: choice.start)  # stable: the order above decides about equal offsets
        last = choices[-1]
        # "B, or maybe C": a remark with another letter revokes the choice. A reason may have other letters.
        text_after_choice = _MARKUP.sub("", last.text_after)
        remark = _BEGINNING_OF_REASON.split(text_after_choice)[0]
        for other_choice in _OTHER_CHOICE_IN_REMARK.finditer(remark):
            other_letter = re.findall("[A-Z]", other_choice[0])[-1]  # the C of "or maybe C"
            if other_letter != last.letter:
                return None
        # "answer is B or the correct answer is C": two joined choices aren't a choice.
        if len(choices) > 1:
            second_last = choices[-2]
            between = text[max(second_last.start, last.start - _LONGEST_REMARK) : last.start]
            if second_last.letter != last.letter and _JOIN_BEFORE_CHOICE.search(between):
                return None
        return last.letter

    def _find_in_boxes(self, text: str) -> Iterator[_StatedChoice]:
        r"""Yields the choices in ``\boxed{…}``. A formula such as ``A + B`` or ``12`` is no choice."""
        for box in find_boxes(text):
            if _FORMULA_OF_LETTERS.fullmatch(box.content):
                continue
            letter, text_after_letter = self._read_letter(box.content)
            text_after_box = text[box.end : box.end + _LONGEST_REMARK].partition("\n")[0]
            # "none of these" in a box is also a choice, without a letter.
            if letter or not _SIGN_OF_FORMULA.search(_MARKUP.sub("", box.content[:_LONGEST_LABEL])):
                yield _StatedChoice(box.start, letter, text_after_letter + text_after_box)

    def _find_in_tags(self, text: str) -> Iterator[_StatedChoice]:
        """Yields the choices in ``<answer>…</answer>``."""
        for tag in _ANSWER_TAG.finditer(text):
            letter, text_after_letter = self._read_letter(tag["text"])
            # "none of these" and "either B or C" don't begin with an option's letter. They are choices, too:
            # refusals to choose one option.
            if letter or _LETTER_OR_REFUSAL.search(tag["text"]):
                yield _StatedChoice(tag.start(), letter, text_after_letter)

    def _find_in_sentences(self, text: str) -> Iterator[_StatedChoice]:
        """Yields the choices of "The answer is B" and "Option B is correct"."""
        for match in _ANSWER_IS.finditer(text):
            if match["letter"]:  # "Option B is correct"
                letter, _ = self._read_letter(match["letter"])
                text_after = text[match.end() : match.end() + _LONGEST_REMARK].partition("\n")[0]
                yield _StatedChoice(match.start(), letter, text_after)
                continue
            # `match["answer"]` is the text after "The answer is", up to the end of the line.
            letter, text_after = self._read_letter(match["answer"])
            # "none of these" is a choice without a letter, and so is "either B or C", since it doesn't begin
            # with a letter. "the one that fits" is no choice.
            if letter or _LETTER_OR_REFUSAL.search(match["answer"]):
                yield _StatedChoice(match.start(), letter, text_after)

    def _find_letter_line(self, answer: str) -> _StatedChoice | None:
        """Returns the choice in the last line that is only a capital letter; None if there is no such line.

        If there are several such lines with different letters, the choice has no letter. An answer of only
        one line may also be a small letter, or a letter with its option (``B) Paris``).
        """
        lines = answer.splitlines()
        is_one_line = sum(bool(line.strip()) for line in lines) == 1
        if is_one_line and "<answer" not in answer and "boxed" not in answer:  # other methods read these two
            only_line = answer.strip()
            text = _WORDS_BEFORE_LETTER.sub("", only_line[:_LONGEST_LABEL])
            letter, text_after = self._read_letter(text)
            return None if letter is None else _StatedChoice(answer.index(only_line), letter, text_after)
        letter_lines: list[tuple[int, str]] = []
        position = 0
        lines_with_ends = answer.splitlines(keepends=True)
        for line, line_with_end in zip(lines, lines_with_ends, strict=True):
            start_of_line = position
            position += len(line_with_end)  # a line may end with two characters, \r\n
            if not line.strip() or len(line) >= _LONGEST_LINE_OF_LETTER or "boxed" in line:
                continue  # tested before the patterns below, since an answer may have 100,000 empty lines
            text = _WORDS_BEFORE_LETTER.sub("", line)  # without "The correct answer" before the letter
            only_letter = _ONLY_A_LETTER.fullmatch(_MARKUP.sub("", text).strip())
            letter, _ = self._read_letter(text)
            # `letter` is a capital, also for a line "b", which doesn't count.
            if letter is not None and only_letter is not None and only_letter["letter"] == letter:
                letter_lines.append((start_of_line, letter))
        if not letter_lines:
            return None
        letters = {letter for _, letter in letter_lines}
        last_start, last_letter = letter_lines[-1]
        return _StatedChoice(last_start, last_letter if len(letters) == 1 else None, "")

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold, _ = self._read_letter(problem.gold)
        if gold is None:
            raise ValueError(
                f"the gold {problem.gold[:100]!r} is not one of the first {self.options} letters"
            )
        return Grade(reward=float(extracted == gold), outcome="ok")

    def _read_letter(self, text: str) -> tuple[str | None, str]:
        """Returns the letter at the beginning of a text, and the text after it.

        ``**b**`` is ("B", ""), ``(B) Paris`` is ("B", " Paris"), and ``Paris`` is (None, "").
        """
        text = " ".join(_MARKUP.sub("", text[:_LONGEST_LABEL]).split())
        letter = text_after = ""
        if only_letter := _ONLY_A_LETTER.fullmatch(text):
            letter = only_letter["letter"].upper()
        elif label := _LABEL_OF_OPTION.match(text):
            letter = (label["in_brackets"] or label["letter"]).upper()  # (B) or B:
            text_after = text[label.end() :]
        is_option = letter != "" and ord(letter) - ord("A") < self.options
        return (letter if is_option else None), text_after
