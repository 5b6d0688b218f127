"""Prepares text that models wrote for a page, in which invisible characters become visible and neither markup
nor links have an effect.

Templates escape everything; `visible` replaces characters that do harm without being markup. `rendered` sets
mathematics, code, tables and bold type, and leaves everything else as it was written, line by line: in a
calculation, Markdown's other marks mean something else (``12*3``, ``#### 72``, ``- 5``). markdown-it escapes
all text. Formulas are marked, and KaTeX renders each of them in the browser.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markupsafe import Markup

CHARACTERS_SHOWN = 20_000
"""The number of characters of a text that a page shows at first."""

MOST_SHOWN_MARKS = 4
"""The most combining marks (accents, vowel points) that are shown on a character. Hundreds of marks would
cover other lines."""

LONGEST_FORMULA = 2000
"""The most characters of a formula; a longer one stays text."""

DEEPEST_FORMULA = 20
"""The deepest nesting of groups in a formula, because hundreds crash a browser's tab. A formula with deeper
nesting stays text."""

# The usual abbreviations of invisible characters.
_NAME_BY_CHARACTER = {
    "\u061c": "ALM", "\u200b": "ZWSP", "\u200c": "ZWNJ", "\u200d": "ZWJ", "\u200e": "LRM", "\u200f": "RLM",
    "\u202a": "LRE", "\u202b": "RLE", "\u202c": "PDF", "\u202d": "LRO", "\u202e": "RLO", "\u2028": "LS",
    "\u2029": "PS", "\u2060": "WJ", "\u2066": "LRI", "\u2067": "RLI", "\u2068": "FSI", "\u2069": "PDI",
    "\ufeff": "BOM", "\u00ad": "SHY",
}  # fmt: skip
# Characters outside of the ranges that can always be seen. `_show_character` decides which of them are
# replaced.
_PERHAPS_INVISIBLE = re.compile(
    r"[^\n\t\x20-\x7e\u00a1-\u00ac\u00ae-\u060f\u0620-\u200a\u2010-\u2027\u2030-\u205f\u2070-\ud7ff]"
)

_MACRO_DEFINITION = re.compile(
    r"\\(?:[gex]?def|let|futurelet|global|long|(?:re)?newcommand|providecommand)(?![a-zA-Z])"
)
"""Commands that define a macro. A formula with one stays text, because a macro can make it grow without end
in the browser."""

# What opens or closes a group of a formula. Escaped braces and backslashes are matched so that they aren't
# taken for a group.
_GROUP_BOUNDARY = re.compile(r"\\\\|\\[{}]|[{}]|\\(?:left|right|begin|end)(?![a-zA-Z])")

# The content of a formula. Its length is limited, so the search for the end of a formula that isn't closed
# doesn't go on to the end of the text.
_FORMULA_CONTENT = rf".{{1,{LONGEST_FORMULA}}}?"
_FORMULA = re.compile(
    rf"\$\$(?P<a>{_FORMULA_CONTENT})\$\$|\\\[(?P<b>{_FORMULA_CONTENT})\\\]|\\\((?P<c>{_FORMULA_CONTENT})\\\)"
    r"|\$(?P<d>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)|(?P<e>\\boxed\{[^{}\n]*\})",
    re.DOTALL,
)


def make_visible(text: object) -> str:
    """Returns a text with its invisible characters made visible.

    These are controls, direction marks, zero-width characters and surrogates: "a\\u200bb" becomes
    "a⟨ZWSP⟩b". If a character has more than `MOST_SHOWN_MARKS` combining marks, the further marks are
    replaced by their number: "⟨96 more marks⟩".
    """
    characters = str(text)
    if not characters.isascii():
        # A heap is a run of more combining marks than are shown.
        characters = _pattern_of_heaps().sub(
            lambda heap: f"{heap[1]}⟨{len(heap[2]):,} more marks⟩", characters
        )
    return _PERHAPS_INVISIBLE.sub(_show_character, characters)


def _show_character(match: re.Match[str]) -> str:
    """Returns what is shown for a character that `_PERHAPS_INVISIBLE` matched, which may be the character
    itself."""
    character = match[0]
    if character in _NAME_BY_CHARACTER:
        return f"⟨{_NAME_BY_CHARACTER[character]}⟩"
    code = ord(character)
    # Unicode has pictures of these controls, such as ␀.
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    # Shown by number: other controls, format characters (tags among them), surrogates, characters that aren't
    # assigned or are private, and separators of lines and paragraphs.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"):
        return f"⟨U+{code:04X}⟩"
    return character


@functools.cache
def _pattern_of_heaps() -> re.Pattern[str]:
    """Returns a pattern for a heap: more combining marks in a row than are shown.

    Its first group has the marks that are shown, and its second group has the further ones.
    """
    marks = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Mn", "Me")]
    # Consecutive codes become ranges, so that the pattern is short. The last mark has no next code (-1).
    ranges, begin = [], marks[0]
    for code, next_code in zip(marks, [*marks[1:], -1], strict=True):
        if next_code != code + 1:
            ranges.append(f"{chr(begin)}-{chr(code)}")
            begin = next_code
    mark = f"[{''.join(ranges)}]"
    return re.compile(f"({mark}{{{MOST_SHOWN_MARKS}}})({mark}+)")


def ends_in_a_heap(text: str) -> bool:
    """Returns whether the last character of a text has more combining marks than are shown."""
    return not text.isascii() and any(heap.end() == len(text) for heap in _pattern_of_heaps().finditer(text))


def cut_text(text: str, max_characters: int = CHARACTERS_SHOWN) -> tuple[str, int]:
    """Returns the first `max_characters` characters of a text, and how many characters were left out."""
    return text[:max_characters], max(0, len(text) - max_characters)


def one_line(text: str, max_characters: int = 200) -> str:
    """Returns the beginning of a text on one line, for a table. Ends of lines and tabs are shown as signs."""
    beginning = make_visible(text[: max_characters + 1]).replace("\n", " ↵ ").replace("\t", " ⇥ ")
    return beginning[:max_characters] + "…" if len(text) > max_characters else beginning


def one_line_with_end(text: str, max_characters: int = 200) -> str:
    """Returns a text on one line, for a table. If it has more than `max_characters` characters, its middle is
    left out.

    The end is kept, because prompts with solved examples begin alike and differ at their ends.
    """
    if len(text) <= max_characters:
        return one_line(text, max_characters)
    half = max_characters // 2
    return f"{one_line(text[:half], half)} … {one_line(text[-half:], half)}"


def make_writable(text: str) -> str:
    """Returns a text in which U+FFFD replaces each lone surrogate (half a character).

    Models write lone surrogates, and UTF-8 can't encode them.
    """
    # In UTF-16, two matching halves that follow each other are one whole character, so only lone halves are
    # replaced.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def render_markdown(text: str) -> Markup:
    """Returns a text as HTML, in which mathematics, code, tables and bold type are set."""
    from markupsafe import Markup

    return Markup(_make_markdown_renderer().render(make_visible(text)))


@functools.cache
def _make_markdown_renderer() -> MarkdownIt:
    """Returns a renderer of the part of Markdown whose marks don't mean something else in a calculation."""
    from markdown_it import MarkdownIt

    def render_cell(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        # markdown-it aligns a column by a `style` attribute, which the pages' security policy forbids.
        tokens[index].attrs.pop("style", None)
        return renderer.renderToken(tokens, index, options, env)

    def render_formula(_: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        display = " data-display" if tokens[index].meta["display"] else ""
        return f'<span class="formula"{display}>{escape(tokens[index].content)}</span>'

    # "zero" has no rules except those for plain text. Only the rules that are listed here are added to it.
    markdown = MarkdownIt("zero").enable(["fence", "code", "table", "backticks", "emphasis"])
    markdown.inline.ruler.at("emphasis", _read_stars)
    # Formulas are read before code and stars. `escape` isn't enabled, and only marks this position.
    markdown.inline.ruler.before("escape", "mathematics", _read_formula)
    markdown.add_render_rule("mathematics", render_formula)
    for name in ("th_open", "td_open"):
        markdown.add_render_rule(name, render_cell)
    return markdown


def _read_stars(state: StateInline, silent: bool) -> bool:
    """Reads stars as markdown-it's own rule does, but only ``**`` at the ends of words makes bold type.

    A single star is a product, and ``**`` within a word is a power, as in ``2**3``.
    """
    from markdown_it.rules_inline.state_inline import Delimiter

    if silent or state.src[state.pos] != "*":  # as markdown-it's own rule, it reads nothing when silent
        return False
    stars = state.scanDelims(state.pos, canSplitWord=False)
    for _ in range(stars.length):
        # Each star is a token of text at first. Where two opening delimiters meet two closing ones,
        # markdown-it replaces them by bold type later.
        state.push("text", "", 0).content = "*"
        if stars.length == 2:
            token_index = len(state.tokens) - 1
            no_partner = -1  # none yet
            delimiter = Delimiter(
                ord("*"), stars.length, token_index, no_partner, stars.can_open, stars.can_close
            )
            state.delimiters.append(delimiter)
    state.pos += stars.length
    return True


def _read_formula(state: StateInline, silent: bool) -> bool:
    """Reads a formula at markdown-it's present position, and returns whether there is one.

    With `silent`, it moves past the formula without adding a token.
    """
    character = state.src[state.pos]
    if character not in "$\\":
        return False
    is_after_backslash = state.pos > 0 and state.src[state.pos - 1] == "\\"
    if character == "$" and is_after_backslash:  # an escaped dollar sign
        return False
    match = _FORMULA.match(state.src, state.pos, state.posMax)
    if match is None or not _is_harmless(match[0]):
        return False
    if not silent:
        token = state.push("mathematics", "", 0)
        token.content = next(group for group in match.groups() if group is not None)
        # The groups a and b are formulas in $$…$$ and \[…\], which get lines of their own.
        token.meta = {"display": match["a"] is not None or match["b"] is not None}
    state.pos = match.end()
    return True


def _is_harmless(formula: str) -> bool:
    """Returns whether KaTeX may render a formula: it is short, defines nothing, and isn't nested deeply."""
    if len(formula) > LONGEST_FORMULA or _MACRO_DEFINITION.search(formula):
        return False
    depth = 0
    for sign in _GROUP_BOUNDARY.findall(formula):
        if sign in ("{", "\\left", "\\begin"):
            depth += 1
        elif sign in ("}", "\\right", "\\end"):
            depth -= 1
        if depth > DEEPEST_FORMULA:
            return False
    return True
