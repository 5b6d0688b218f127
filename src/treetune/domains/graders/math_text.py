r"""One plain way of writing an answer to a mathematical problem.

Dress alone (``\left``, ``\,``, ``\dfrac``, colours, full-width digits, dollars) is taken off; content stays.
Reading it is the business of `math_answers`, finding it that of `math_endings`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from treetune.tasks.graders.extraction import boxes, braces

_SAME = {
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

_UPRIGHT = r"\\(?:mathrm|mathit|mathbf|mathsf|text|textrm|textit|operatorname\*?|rm) ?"
_DRESSING = re.compile(
    r"\\(?:(?:textcolor|colorbox)\s*\{[^{}]{0,40}\}|fcolorbox\s*\{[^{}]{0,40}\}\s*\{[^{}]{0,40}\}"
    r"|color\s*\{[^{}]{0,40}\}(?=\s*\{)|u?underline|uline|ensuremath|emph|fbox|boxed|mbox|hbox|pmb|mathbf|boldsymbol|bm"
    r"|textbf|mathrm|text|textit|mathit|hl|highlight|bold|displaystyle)\s*\{"
)
_ALWAYS_DRESS = re.compile(
    r"\\(?:textcolor|colorbox|fcolorbox|color|u?underline|uline|ensuremath|emph|fbox|boxed|pmb|hl)"
)
_DEEPEST_DRESS = 12


def _constant(match: re.Match[str]) -> str:
    """Makes ``4\\mathrm{i}`` a number: an upright e or i beside something is the constant."""
    return " " + (match[1] or match[2])


_DRESS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), into)
    for pattern, into in (
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|(?:no)?limits|rm|bf|it)(?![A-Za-z])\.?", ""),
        (r"\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|(?<!\\)\\[ ;:>]|~", " "),
        (r",\\!\s*(?=\d{3})", ","),
        (r"(?<!\\)\\!|(?<!\\)\\,(?=\d{3})", ""),
        (r"(?<!\\)\\,", " "),
        (r"\\(?:checkmark|blacksquare|hfill|newline|large|Large|LARGE|huge|Huge|normalsize|centering)(?![A-Za-z])"
         r"|\\color ?\{[^{}]{0,40}\}|\\tag\*?\{[^{}]{0,20}\}", " "),
        (r"\\(?:square|Box|qed)\s*\Z", ""),
        (r"\\(?:mathbb|Bbb) ?([A-Z])(?![A-Za-z])", r"\\mathbb{\1}"),
        (r"\\mathbf ?\{ ?R ?\}|\\(?:R|reals)(?![A-Za-z])", r"\\mathbb{R}"),
        (r"(?<![<>=])>=|=>(?!=)", r"\\ge "),
        (r"(?<![<>=])<=|=<(?!=)", r"\\le "),
        (r"!=|\\not ?=", r"\\ne "),
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
        (_UPRIGHT + r"\{ ?(sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan|"
         r"sinh|cosh|tanh|pi|gcd|lcm|det) ?\}", r"\\\1 "),
        (_UPRIGHT + r"\{ ?([ei]) ?\}(?=.)|(?<=.)" + _UPRIGHT + r"\{ ?([ei]) ?\}", _constant),
        (r"\\(?:mathrm|operatorname\*?|mathit) ?\{ ?([eiCP]) ?\}", r" \1"),
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
        (r"(?:\{ ?\})? ?[_^] ?\{? ?(\d{1,9}) ?\}? ?C ?_ ?\{? ?(\d{1,9}) ?\}?", r"\\binom{\1}{\2}"),
        (r"(?<![\dA-Za-z.])(\d{1,9}) ?C ?(\d{1,9})(?![\dA-Za-z.])", r"\\binom{\1}{\2}"),
        (r"\*\*", "^"),
        (r"\\text ?\{[ .,]*\}", " "),
        (r"\\text ?\{ ?(\^\\circ ?)([CF]?) ?\}", r"\1\2"),
        (r"\^\\circ ?\\text ?\{ ?([CF]) ?\}", r"^\\circ \1"),
        (r"(?<=\d) ?(?:\\text ?\{ ?[x*] ?\}|x) ?(?=10 ?\^)", r"\\times "),
        (r"(?<=\d) ?\\text ?\{ ?(?:x|times) ?\} ?(?=\d)", r"\\times "),
        (r"\\frac ?\{ ?\\text ?\{([^{}]{1,30})\} ?\}"
         r" ?\{ ?\\text ?\{([^{}]{1,30})\} ?(\^ ?\{?\d\}?)? ?\}", r"\\text{\1/\2}\3"),
        (r"\A ?(?:\\text ?\{ ?)?(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is ?:?| ?:) ?\}?", ""),
    )
]  # fmt: skip


def undressed(text: str) -> str:
    """Returns one way of writing: ASCII signs, plain commands, single spaces, no dollars, no full stop."""
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
        text = _SUBSCRIPT.sub(lambda match: "_{" + match[0].translate(_SUBSCRIPTS) + "}", text)
        text = "".join(map(_character, text))
    text = _undress_groups(text)
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


def _undress_groups(text: str) -> str:
    r"""Takes off colours, underlines and a font around a formula; a font around letters stays."""
    position = 0
    for _ in range(_DEEPEST_DRESS):
        dressing = _DRESSING.search(text, position)
        if dressing is None:
            break
        closing = braces(text).get(dressing.end() - 1)
        if closing is None:
            position = dressing.end()
            continue
        content = text[dressing.end() : closing]
        is_formula = not re.search(r"[A-Za-z]", content) or content.lstrip().startswith("\\")
        if _ALWAYS_DRESS.match(dressing[0]) or (is_formula and re.search(r"[\d\\]", content)):
            text = f"{text[: dressing.start()]} {content} {text[closing + 1 :]}"
            position = dressing.start()
        else:
            position = dressing.end()
    return text


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
