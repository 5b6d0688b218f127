"""Mathematics, code, tables and bold type of a model's text, as HTML that loads nothing and leads nowhere.

All else stays as it was written, line by line: in a calculation, Markdown's other marks mean something else
(``12*3``, ``#### 72``, ``- 5``). markdown-it writes only what its own rules make, and escapes all else.
Mathematics is marked for KaTeX, which the browser runs on it, formula by formula.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from treetune_view.report.text import visible

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markupsafe import Markup

LONGEST_FORMULA = 2000
"""Characters; what is longer stays text."""

DEEPEST_FORMULA = 20
"""Groups within groups of a formula: hundreds of them end a browser's tab. What is deeper stays text."""

_DEFINES = re.compile(
    r"\\(?:[gex]?def|let|futurelet|global|long|(?:re)?newcommand|providecommand)(?![a-zA-Z])"
)
"""A formula that defines something can grow without end in the browser: it stays text."""

_GROUPS = re.compile(r"\\\\|\\[{}]|[{}]|\\(?:left|right|begin|end)(?![a-zA-Z])")

_MATH = re.compile(
    r"\$\$(?P<a>.+?)\$\$|\\\[(?P<b>.+?)\\\]|\\\((?P<c>.+?)\\\)"
    r"|\$(?P<d>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)|(?P<e>\\boxed\{[^{}\n]*\})",
    re.DOTALL,
)


def rendered(text: str) -> Markup:
    """The text as HTML."""
    from markupsafe import Markup

    return Markup(_markdown().render(visible(text)))


@functools.cache
def _markdown() -> MarkdownIt:
    from markdown_it import MarkdownIt

    made = MarkdownIt("zero").enable(["fence", "code", "table", "backticks", "emphasis"])
    made.inline.ruler.at("emphasis", _bold)
    made.inline.ruler.before("escape", "mathematics", _mathematics)
    made.add_render_rule("mathematics", _formula)
    for name in ("th_open", "td_open"):
        made.add_render_rule(name, _cell)
    return made


def _bold(state: StateInline, silent: bool) -> bool:
    """Two stars around words, not within one: ``2**3`` is a power, and one star a product."""
    from markdown_it.rules_inline.state_inline import Delimiter

    if silent or state.src[state.pos] != "*":
        return False
    found = state.scanDelims(state.pos, False)
    for _ in range(found.length):
        state.push("text", "", 0).content = "*"
        if found.length == 2:
            place = len(state.tokens) - 1
            state.delimiters.append(
                Delimiter(ord("*"), found.length, place, -1, found.can_open, found.can_close)
            )
    state.pos += found.length
    return True


def _mathematics(state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] not in "$\\" or state.src[max(0, state.pos - 1)] == "\\" != state.src[state.pos]:
        return False
    found = _MATH.match(state.src, state.pos, state.posMax)
    if found is None or not _is_harmless(found[0]):
        return False
    if not silent:
        token = state.push("mathematics", "", 0)
        token.content = next(group for group in found.groups() if group is not None)
        token.meta = {"display": found["a"] is not None or found["b"] is not None}
    state.pos = found.end()
    return True


def _is_harmless(formula: str) -> bool:
    if len(formula) > LONGEST_FORMULA or _DEFINES.search(formula):
        return False
    depth = 0
    for sign in _GROUPS.findall(formula):
        if sign in ("{", "\\left", "\\begin"):
            depth += 1
        elif sign in ("}", "\\right", "\\end"):
            depth -= 1
        if depth > DEEPEST_FORMULA:
            return False
    return True


def _cell(renderer: Any, tokens: Any, place: int, options: Any, env: Any) -> str:
    """A cell of a table, without the style that says how its column is aligned: pages forbid styles."""
    tokens[place].attrs.pop("style", None)
    return renderer.renderToken(tokens, place, options, env)


def _formula(_: Any, tokens: Any, place: int, options: Any, env: Any) -> str:
    from html import escape

    display = " data-display" if tokens[place].meta["display"] else ""
    return f'<span class="formula"{display}>{escape(tokens[place].content)}</span>'
