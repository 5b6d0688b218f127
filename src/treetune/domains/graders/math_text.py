r"""Normalises the text of an answer to a mathematical problem.

It removes formatting (``\left``, ``\,``, ``\dfrac``, colours, full-width digits, dollars) and keeps the
content. Before this, `math_endings` finds the answer. After this, `math_answers` reads it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

from treetune.tasks.graders.extraction import find_boxes, find_braces

_ASCII_SIGNS = {
    "−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "＋": "+", "．": ".", "，": ",", "％": "%", "／": "/",
    "⁄": "/", "＝": "=", "＄": "$", "（": "(", "）": ")", "［": "[", "］": "]", "×": r"\times ",
    "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"^\circ ", "′": "'", "’": "'", "θ": r"\theta ", "∓": r"\mp ", "⟨": r"\langle ",
    "⟩": r"\rangle ", "ℝ": r"\mathbb{R}", "½": r"\frac{1}{2}", "α": r"\alpha ", "β": r"\beta ",
    "√": r"\sqrt ", "✓": "", "✔": "", "✅": "", "∎": "", "☐": "", "□": "", "■": "", "。": ".", "、": ",",
    "：": ":", "；": ";", "＜": "<", "＞": ">", "｛": "{", "｝": "}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}", "∀": r"\forall ", "∖": r"\setminus ", "⊤": r"\top ", "ø": r"\emptyset ",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "",
}  # fmt: skip
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

# All patterns below are searched in every answer, and most answers match none of them. Therefore each pattern
# comes with a text that all its matches contain (`needs`). This text is searched first, which takes a tenth
# of the time.


class _Rewriting(NamedTuple):
    r"""The replacement of one notation by another.

    ``_Rewriting("\\tag", …)`` is skipped if the text doesn't contain ``\tag``.
    """

    needs: str
    """A text that every match of the pattern contains."""
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]

    def apply(self, text: str) -> str:
        return self.pattern.sub(self.replacement, text) if self.needs in text else text


def _rewriting(needs: str, pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> _Rewriting:
    return _Rewriting(needs, re.compile(pattern), replacement)


# Formatting around a group: \textcolor{red}{5}, \fcolorbox{red}{blue}{5}, \underline{5}, \mathbf{5}
_FORMATTING_OF_A_GROUP = re.compile(
    r"""\\(?:
          (?:textcolor|colorbox) \s* \{[^{}]{0,40}\}
        | fcolorbox \s* \{[^{}]{0,40}\} \s* \{[^{}]{0,40}\}
        | color \s* \{[^{}]{0,40}\} (?=\s*\{)
        | u?underline | uline | ensuremath | emph | fbox | boxed | mbox | hbox | pmb | mathbf | boldsymbol
        | bm | textbf | mathrm | text | textit | mathit | hl | highlight | bold | displaystyle
    ) \s* \{""",
    re.VERBOSE,
)
# Formatting without any meaning. Some of the other commands (\text, \mathbf) turn letters into words.
_MEANINGLESS_FORMATTING = re.compile(
    r"\\(?:textcolor|colorbox|fcolorbox|color|u?underline|uline|ensuremath|emph|fbox|boxed|pmb|hl)"
)
_MOST_FORMATTED_GROUPS = 12
"""The most formatted groups that are looked at in an answer."""

_TEXT_COMMAND = r"\\(?:mathrm|mathit|mathbf|mathsf|text|textrm|textit|operatorname\*?|rm) ?"


def _constant_with_space(match: re.Match[str]) -> str:
    r"""Returns the constant of ``\mathrm{i}`` or ``\mathrm{e}`` with a space before it."""
    return " " + (match[1] or match[2])


_SIZES_SPACES_AND_RELATIONS = [
    # \left( 1 \right.   \displaystyle   \bigl(   \sum\limits
    _rewriting(
        "\\",
        r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|(?:no)?limits|rm|bf|it)(?![A-Za-z])\.?",
        "",
    ),
    # 1 \quad 2   1\ 2   1\;2 (but the "\\ " of a matrix's row stays)
    _rewriting("\\", r"\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|(?<!\\)\\[ ;:>]", " "),
    # 1~2
    _rewriting("~", r"~", " "),
    # 12,\! 000
    _rewriting(",\\!", r",\\!\s*(?=\d{3})", ","),
    # x\!   12\,000
    _rewriting("\\", r"(?<!\\)\\!|(?<!\\)\\,(?=\d{3})", ""),
    # 3\,cm
    _rewriting("\\,", r"(?<!\\)\\,", " "),
    # 5\checkmark   \color{red} 5   x = 1 \tag{3}
    _rewriting(
        "\\",
        r"\\(?:checkmark|blacksquare|hfill|newline|large|Large|LARGE|huge|Huge|normalsize|centering)(?![A-Za-z])"
        r"|\\color ?\{[^{}]{0,40}\}|\\tag\*?\{[^{}]{0,20}\}", " ",
    ),
    # 5 \square, the end of a proof
    _rewriting("\\", r"\\(?:square|Box|qed)\s*\Z", ""),
    # \mathbb R
    _rewriting("\\", r"\\(?:mathbb|Bbb) ?([A-Z])(?![A-Za-z])", r"\\mathbb{\1}"),
    # \mathbf{R}   \R   \reals
    _rewriting("\\", r"\\mathbf ?\{ ?R ?\}|\\(?:R|reals)(?![A-Za-z])", r"\\mathbb{R}"),
    # x >= 1   x => 1
    _rewriting("=", r"(?<![<>=])>=|=>(?!=)", r"\\ge "),
    # x <= 1   x =< 1
    _rewriting("=", r"(?<![<>=])<=|=<(?!=)", r"\\le "),
    # x != 1   x \not= 1
    _rewriting("=", r"!=|\\not ?=", r"\\ne "),
    # \hspace{1cm}   \phantom{0}   \label{a}
    _rewriting(
        "\\", r"\\[hv]space\*?\{[^{}]{0,20}\}|\\phantom\{[^{}]{0,20}\}|\\label\{[^{}]{0,20}\}", ""
    ),
    # 4{:}30
    _rewriting("{:}", r"(?<=\d)\{:\}(?=\d)", ":"),
    # x := 5
    _rewriting(":=", r":=", "="),
    # 0.333...
    _rewriting("...", r"\.\.\.", r"\\dots "),
    # 4 p.m.   4 P. M.
    _rewriting(".", r"(?<![A-Za-z])([aApP])\. ?[mM](?:\.|(?![A-Za-z]))", r"\1m"),
]  # fmt: skip

_LATEX_COMMAND = re.compile(r"\\([A-Za-z]+)")
_PLAIN_COMMANDS = {
    "tfrac": r"\frac", "dfrac": r"\frac", "cfrac": r"\frac", "sfrac": r"\frac", "nicefrac": r"\frac",
    "xfrac": r"\frac", "flatfrac": r"\frac",
    "tbinom": r"\binom", "dbinom": r"\binom",
    "leq": r"\le", "leqslant": r"\le", "leqq": r"\le", "geq": r"\ge", "geqslant": r"\ge", "geqq": r"\ge",
    "neq": r"\ne", "lt": "<", "gt": ">",
    "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]",
    "varnothing": r"\emptyset",
    "ldots": r"\dots", "cdots": r"\dots", "dotsc": r"\dots", "dotsb": r"\dots",
}  # fmt: skip
"""Commands with a simpler equivalent."""

_FONTS_AND_NOTATION = [
    # \{ \}, the empty set
    _rewriting("\\{", r"\\\{\s*\\\}", r"\\emptyset"),
    # \mathrm{ln} 2   \operatorname{sin} x
    _rewriting(
        "\\",
        _TEXT_COMMAND + r"\{ ?(sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan"
        r"|sinh|cosh|tanh|pi|gcd|lcm|det) ?\}",
        r"\\\1 ",
    ),
    # 4\mathrm{i}: an upright e or i next to something is the constant; alone it may be a label.
    _rewriting(
        "\\",
        _TEXT_COMMAND + r"\{ ?([ei]) ?\}(?=.)|(?<=.)" + _TEXT_COMMAND + r"\{ ?([ei]) ?\}",
        _constant_with_space,
    ),
    # \mathrm{e}   \mathrm{C}(5,2)
    _rewriting("\\", r"\\(?:mathrm|operatorname\*?|mathit) ?\{ ?([eiCP]) ?\}", r" \1"),
    # \mathrm{cm}, \textbf{yes} and the like are \text
    _rewriting(
        "\\",
        r"\\(?:mathrm|mathit|mathbf|mathsf|textbf|textit|textrm|textsf|texttt|textsc|textup|textnormal|mbox"
        r"|hbox|operatorname\*?|bm|boldsymbol)(?=\s*\{)",
        r"\\text",
    ),
    # x > 1 \land x < 2   x < 1 \lor x > 2
    _rewriting("\\", r"\\(?:land|wedge)(?![A-Za-z])", r"\\text{ and }"),
    _rewriting("\\", r"\\(?:lor|vee)(?![A-Za-z])", r"\\text{ or }"),
    # 12{,}000
    _rewriting("{,}", r"\{,\}", ","),
    # 90^{\circ}   90^\circ   90\degree
    _rewriting(
        "\\",
        r"\^\s*\{\s*\\(?:circ|degree)\s*\}|\^\s*\\(?:circ|degree)(?![A-Za-z])|\\degree(?![A-Za-z])",
        r"^\\circ ",
    ),
    # \begin{array}{cc} … \end{array}
    _rewriting("\\begin{array}", r"\\begin\{array\}\s*\{[^{}]{0,20}\}", r"\\begin{matrix}"),
    _rewriting("\\end{array}", r"\\end\{array\}", r"\\end{matrix}"),
    # \begin{align*} … \end{align*}
    _rewriting(
        "\\", r"\\(?:begin|end)\{(?:align|aligned|gather|gathered|equation|split)\*?\}", " "
    ),
    # {}^{10}C_{3}   {}_{10}C_3
    _rewriting(
        "C", r"(?:\{ ?\})? ?[_^] ?\{? ?(\d{1,9}) ?\}? ?C ?_ ?\{? ?(\d{1,9}) ?\}?", r"\\binom{\1}{\2}"
    ),
    # 10C3
    _rewriting(
        "C", r"(?<![\dA-Za-z.])(\d{1,9}) ?C ?(\d{1,9})(?![\dA-Za-z.])", r"\\binom{\1}{\2}"
    ),
    # x**2
    _rewriting("**", r"\*\*", "^"),
    # 5 \text{ . }
    _rewriting("\\text", r"\\text ?\{[ .,]*\}", " "),
    # 25\text{^\circ C}   25^\circ\text{C}
    _rewriting("\\text", r"\\text ?\{ ?(\^\\circ ?)([CF]?) ?\}", r"\1\2"),
    _rewriting("\\text", r"\^\\circ ?\\text ?\{ ?([CF]) ?\}", r"^\\circ \1"),
    # 1.2 x 10^5   1.2 \text{x} 10^5
    _rewriting("10", r"(?<=\d) ?(?:\\text ?\{ ?[x*] ?\}|x) ?(?=10 ?\^)", r"\\times "),
    # 3 \text{ times } 4
    _rewriting("\\text", r"(?<=\d) ?\\text ?\{ ?(?:x|times) ?\} ?(?=\d)", r"\\times "),
    # 5 \frac{\text{m}}{\text{s}^2}
    _rewriting(
        "\\frac",
        r"\\frac ?\{ ?\\text ?\{([^{}]{1,30})\} ?\} ?\{ ?\\text ?\{([^{}]{1,30})\} ?(\^ ?\{?\d\}?)? ?\}",
        r"\\text{\1/\2}\3",
    ),
    # The final answer is: 5   \text{Answer: } 5
    _rewriting(
        "nswer",
        r"\A ?(?:\\text ?\{ ?)?(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is ?:?| ?:) ?\}?",
        "",
    ),
]  # fmt: skip

# \[ 5 \], but not the row's end with its distance, \\[2pt], nor an interval's bracket before a digit
_DISPLAY_BRACKETS = re.compile(r"\\\[(?!\d)|(?<!\\)\\\]")
_ROW_END_AT_THE_END = re.compile(r"\\\\(?=\s*\Z)")
# A backslash at the end of the text. It was the command "\ " for a space, and the removal of white space at
# the end has left its backslash.
_BACKSLASH_AT_THE_END = re.compile(r"(?<!\\)\\\Z")


def normalise_notation(text: str) -> str:
    """Returns the normalised text: with ASCII signs, simple commands and single spaces, and without dollars
    and a full stop at the end.

    The order of the steps matters: each rewriting reads the notation that the earlier ones leave.
    """
    # The signs come first, because every later pattern is written for ASCII.
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
        text = _SUBSCRIPT.sub(lambda match: "_{" + match[0].translate(_SUBSCRIPTS) + "}", text)
        text = "".join(map(_to_ascii, text))
    # Colours and fonts around groups are removed next, since they would separate what the patterns below look
    # for.
    if "\\" in text:
        text = _remove_formatting_of_groups(text)
        text = _take_content_of_a_box(text)
    # Sizes and spaces follow, which may be between any two signs. After that commands get their simple names,
    # since the patterns for fonts and notation know only the simple ones (``\frac`` and not ``\dfrac``).
    for rewriting in _SIZES_SPACES_AND_RELATIONS:
        text = rewriting.apply(text)
    if "\\" in text:
        text = _LATEX_COMMAND.sub(lambda command: _PLAIN_COMMANDS.get(command[1], command[0]), text)
    for rewriting in _FONTS_AND_NOTATION:
        text = rewriting.apply(text)
    # An escaped dollar is a currency, and any other one only begins or ends a formula.
    text = text.replace("\\$", "USD ").replace("$", " ").replace("\\%", "%")
    if "\\" in text:
        text = text.replace("\\(", " ").replace("\\)", " ")
        text = _DISPLAY_BRACKETS.sub(" ", text)
        text = _ROW_END_AT_THE_END.sub(" ", text)
    # White space and punctuation are removed last, since every step above may leave spaces at the ends.
    text = " ".join(text.split()).strip(' *`"').rstrip(" .,;:")
    return _BACKSLASH_AT_THE_END.sub("", text).strip()


def _take_content_of_a_box(text: str) -> str:
    """Returns the content of a text that is only a box, or a box in a box. Returns any other text as it
    is."""
    while True:
        boxes = find_boxes(text)
        if len(boxes) != 1:
            return text
        [box] = boxes
        if (box.start, box.end) != (0, len(text)):
            return text
        text = box.content.strip()


def _remove_formatting_of_groups(text: str) -> str:
    r"""Removes colours, underlines and a font around a formula. A font around letters remains."""
    position = 0
    # The number of groups is bounded, since an answer may be hostile.
    for _ in range(_MOST_FORMATTED_GROUPS):
        opening = _FORMATTING_OF_A_GROUP.search(text, position)
        if opening is None:
            break
        closing = find_braces(text).get(opening.end() - 1)
        if closing is None:  # an unclosed brace: the group stays as it is
            position = opening.end()
            continue
        content = text[opening.end() : closing]
        # Letters may be a word, whose font says that it is text: \text{cm} stays, and \mathbf{5} becomes 5.
        # Content that begins with a command, such as \frac, counts as a formula in spite of its letters.
        has_letters = re.search(r"[A-Za-z]", content) is not None
        may_be_word = has_letters and not content.lstrip().startswith("\\")
        is_formula = not may_be_word and re.search(r"[\d\\]", content) is not None
        if is_formula or _MEANINGLESS_FORMATTING.match(opening[0]):
            text = f"{text[: opening.start()]} {content} {text[closing + 1 :]}"
            position = opening.start()  # the content may begin with a formatted group
        else:
            position = opening.end()
    return text


def _to_ascii(character: str) -> str:
    r"""Returns a character's notation in ASCII: ``-`` for a dash, ``5`` for a fullwidth or Arabic 5,
    ``\frac{3}{4}`` for ¾. Letters and other characters stay."""
    if character in _ASCII_SIGNS:
        return _ASCII_SIGNS[character]
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if unicodedata.decomposition(character).startswith("<fraction>"):
        numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("⁄")
        return rf"\frac{{{numerator}}}{{{denominator}}}"
    return character
