r"""The answer in a response to a mathematical problem, in one plain way of writing.

What only dresses a formula (``\left``, ``\,``, ``\dfrac``, full-width digits, dollars) is taken off;
what it says stays. Reading it is `math_answers`'s business.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from treetune.tasks.latex import boxes

LONGEST = 2000
"""Characters of an answer that are looked at: no data set has one of 500."""

_TOLD = re.compile(r"(?:answer|solution)s?\s*(?:is|are|:|=)\s*:?\s*", re.IGNORECASE)
_DISPLAY = re.compile(r"\s*(\$\$?|\\\(|\\\[)(.*?)(\$\$?|\\\)|\\\])", re.DOTALL)

_SAME = {
    "−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "＋": "+", "．": ".", "，": ",", "％": "%", "／": "/",
    "⁄": "/", "＝": "=", "＄": "$", "（": "(", "）": ")", "［": "[", "］": "]", "×": r"\times ",
    "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "√": r"\sqrt ", "°": r"^\circ ", "′": "'", "’": "'", "θ": r"\theta ", "∓": r"\mp ", "⟨": r"\langle ",
    "⟩": r"\rangle ", "ℝ": r"\mathbb{R}", "½": r"\frac{1}{2}", "α": r"\alpha ", "β": r"\beta ",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "",
}  # fmt: skip
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_DRESS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), into)
    for pattern, into in (
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|(?:no)?limits|rm|bf|it)(?![A-Za-z])\.?", ""),
        (r"\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|(?<!\\)\\[ ;:>]|~", " "),
        (r",\\!\s*(?=\d{3})", ","),
        (r"(?<!\\)\\!|(?<!\\)\\,(?=\d{3})", ""),
        (r"(?<!\\)\\,", " "),
        (r"\\[hv]space\*?\{[^{}]{0,20}\}|\\phantom\{[^{}]{0,20}\}|\\label\{[^{}]{0,20}\}", ""),
        (r"\\(?:[tdcs]frac|nicefrac|xfrac|flatfrac)(?![A-Za-z])", r"\\frac"),
        (r"(?<=\d)\{:\}(?=\d)", ":"),
        (r":=", "="),
        (r"\.\.\.", r"\\dots "),
        (r"(?<![A-Za-z])([aApP])\. ?[mM](?:\.|(?![A-Za-z]))", r"\1m"),
        (r"\\[td]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leq|leqslant|leqq)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geq|geqslant|geqq)(?![A-Za-z])", r"\\ge"),
        (r"\\(?:neq)(?![A-Za-z])", r"\\ne"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\(?:varnothing)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\(?:ldots|cdots|dotsc|dotsb)(?![A-Za-z])", r"\\dots"),
        (r"\\(?:mathrm|mathit|mathbf|mathsf|textbf|textit|textrm|textsf|texttt|textsc|textup|textnormal|mbox|hbox|operatorname\*?|bm|boldsymbol)(?=\s*\{)",
         r"\\text"),
        (r"\\(?:land|wedge)(?![A-Za-z])", r"\\text{ and }"),
        (r"\\(?:lor|vee)(?![A-Za-z])", r"\\text{ or }"),
        (r"\{,\}", ","),
        (r"\^\s*\{\s*\\(?:circ|degree)\s*\}|\^\s*\\(?:circ|degree)(?![A-Za-z])|\\degree(?![A-Za-z])",
        r"^\\circ "),
        (r"\\begin\{array\}\s*\{[^{}]{0,20}\}", r"\\begin{matrix}"),
        (r"\\end\{array\}", r"\\end{matrix}"),
        (r"\\(?:begin|end)\{(?:align|aligned|gather|gathered|equation|split)\*?\}", " "),
        (r"\*\*", "^"),
    )
]  # fmt: skip


def given_answer(response: str, gold_parts: int = 1) -> str | None:
    r"""The answer that a response settles on, as written, or None.

    It stands in the last ``\boxed{…}``; where the gold has several parts and the last paragraph as
    many boxes, in all of these. Without a box, it is what follows the last "answer is" on its line.
    """
    found = boxes(response)
    if found:
        last = [box for box in found if "\n\n" not in response[box[1] : found[-1][0]]]
        if (
            gold_parts > 1
            and len(last) >= gold_parts
            and not re.search(r",|\\text\{|\bor\b|\band\b", found[-1][2])
        ):
            return ", ".join(content for _, _, content in last[-gold_parts:])
        return found[-1][2].strip() or None
    tail = response[-LONGEST:]
    told = [match.end() for match in _TOLD.finditer(tail)]
    if not told:
        return None
    rest = tail[told[-1] :]
    shown = _DISPLAY.match(rest)
    if shown and not rest[shown.end() :].partition("\n")[0].strip(" .*"):
        return shown[2].strip() or None
    line = next((line for line in map(str.strip, rest.split("\n")) if line), "")
    return _sentence(line) or None


def _sentence(line: str) -> str:
    """Up to the full stop that ends it; one in a number or an abbreviation does not."""
    end = re.search(r"\.(?=\s+[A-Z])", line)
    return (line[: end.start()] if end else line).strip()


def gold_answer(gold: str) -> str:
    """The answer in a gold as it stands in a data set: a worked solution with a box, or a bare answer."""
    found = boxes(gold)
    if found:
        return found[-1][2].strip()
    told = re.split(r"[Tt]he (?:final )?answer is:?\s*", gold)
    return told[-1].strip()


def undressed(text: str) -> str:
    """One way of writing: ASCII signs, plain commands, single spaces, no dollars, no full stop."""
    if not text.isascii():
        text = _in_ascii(text)
    while (inner := boxes(text)) and len(inner) == 1 and inner[0][:2] == (0, len(text)):
        text = inner[0][2].strip()
    for pattern, into in _DRESS:
        text = pattern.sub(into, text)
    text = (
        text.replace("\\$", "USD ")
        .replace("$", " ")
        .replace("\\%", "%")
        .replace("\\(", " ")
        .replace("\\)", " ")
    )
    text = re.sub(r"\\\[(?!\d)|(?<!\\)\\\]", " ", text)
    text = re.sub(r"\\\\(?=\s*\Z)", " ", text)
    text = re.sub(r"\s+", " ", text).strip(' *`"').rstrip(" .,;:")
    # Of a blank that was written as a backslash and a space, the space is gone.
    return re.sub(r"(?<!\\)\\\Z", "", text).strip()


def _in_ascii(text: str) -> str:
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT.sub(lambda match: "_{" + match[0].translate(_SUBSCRIPTS) + "}", text)
    return "".join(map(_character, text))


def _character(character: str) -> str:
    if character in _SAME:
        return _SAME[character]
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if unicodedata.decomposition(character).startswith("<fraction>"):
        above, _, below = unicodedata.normalize("NFKC", character).partition("⁄")
        return rf"\frac{{{above}}}{{{below}}}"
    return character
