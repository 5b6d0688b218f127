"""Markdown and mathematics are rendered; what would lead elsewhere or harm the browser stays text."""

import pytest

from treetune.viewer.rendering import DEEPEST_FORMULA, rendered


def test_markdown_and_mathematics_are_marked_up() -> None:
    made = rendered("**So** $x_1 < 2$ and \\(a_b\\).\n\n\\[\nx^2\n\\]\n\n- \\boxed{4}")

    assert "<strong>So</strong>" in made
    assert '<span class="formula">x_1 &lt; 2</span>' in made and '<span class="formula">a_b</span>' in made
    assert '<span class="formula" data-display>' in made
    assert '<li><span class="formula">\\boxed{4}</span></li>' in made


def test_prices_are_no_formula() -> None:
    assert "formula" not in rendered("it costs $5 and $7, or $ 8 $")


@pytest.mark.parametrize(
    "text",
    [
        "[a](javascript:x)", "![a](http://a/b.png)", "<http://a/>", "<img src=x>", "http://a/ www.a.b",
        "[r]: http://a/\n\n[r]",
    ],
)  # fmt: skip
def test_nothing_leads_elsewhere(text: str) -> None:
    made = rendered(text)

    assert not any(sign in made for sign in ("<a", "<img", "href", "src=x>")) or "&lt;" in made
    assert "<a" not in made and "<img" not in made


@pytest.mark.parametrize(
    "formula",
    [
        r"\def\x#1{\x{#1#1}}\x{a}",
        r"\newcommand{\y}{\y\y}\y",
        r"\sqrt{" * (DEEPEST_FORMULA + 1) + "x" + "}" * (DEEPEST_FORMULA + 1),
        r"\left(" * (DEEPEST_FORMULA + 1) + "x" + r"\right)" * (DEEPEST_FORMULA + 1),
        "x" * 5000,
    ],
)
def test_formulas_that_grow_without_end_stay_text(formula: str) -> None:
    assert "formula" not in rendered(f"${formula}$")


def test_braces_that_are_written_are_no_groups() -> None:
    assert "formula" in rendered("$" + r"\{" * 50 + "$")


def test_tables_have_no_styles() -> None:
    assert "<td>1</td>" in rendered("| a |\n|:-:|\n| 1 |")
