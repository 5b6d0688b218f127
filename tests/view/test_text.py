"""Rendered answers.

The tests hold that mathematics, code and tables are marked up, that calculations stay as written, and that
links, images and endless formulas stay text.
"""

import pytest
from markupsafe import Markup, escape

from treetune.view.text import DEEPEST_FORMULA, one_line_with_end, render_markdown


def test_a_long_prompt_is_cut_in_its_middle() -> None:
    assert one_line_with_end("short\ntext", 10) == "short ↵ text"
    examples = "What is 1 + 2?\n3\n" * 20
    shown = one_line_with_end(f"{examples}What is 4 + 5?", 60)
    assert shown.startswith("What is 1 + 2? ↵ 3") and shown.endswith("What is 4 + 5?")
    assert " … " in shown and "\n" not in shown


def test_mathematics_and_bold_type_are_marked_up() -> None:
    html = render_markdown("**So** $x_1 < 2$ and \\(a_b\\).\n\n\\[\nx^2\n\\]\n\n- \\boxed{4}")

    assert "<strong>So</strong>" in html
    assert '<span class="formula">x_1 &lt; 2</span>' in html and '<span class="formula">a_b</span>' in html
    assert '<span class="formula" data-display>' in html
    assert '<p>- <span class="formula">\\boxed{4}</span></p>' in html


@pytest.mark.parametrize(
    "text",
    [
        "12*3 = 36, 12*3*2 = 72", "2**3 + 4**2 = 24", "2 *3 + 4* 2", "a_1 _b_ __init__", "~~5~~",
        "#### 72", "# 72", "so it is\n====", "3 apples\n---", "- 5\n+ 7\n* 2", "  12\n-  5\n=  7",
        "4. 5\n7) 8", "> 5", r"\$5 and \$x$ and \% \, \{", "&lt; &amp; &#42;", "a\\b",
    ],
)  # fmt: skip
def test_a_calculation_comes_out_as_it_was_written(text: str) -> None:
    html = render_markdown(f"First:\n{text}\nand on")

    assert html == Markup(f"<p>First:\n{escape(text)}\nand on</p>\n").replace("&#34;", "&quot;")
    assert "**" not in render_markdown("**12*3** is **36**") and "12*3" in render_markdown(
        "**12*3** is **36**"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[a](javascript:x)", "![a](http://a/b.png)", "<http://a/>", "<img src=x>", "http://a/ www.a.b",
        "[r]: http://a/\n\n[r]",
    ],
)  # fmt: skip
def test_links_and_images_stay_text(text: str) -> None:
    html = render_markdown(text)

    assert not any(sign in html for sign in ("<a", "<img", "href", "src=x>")) or "&lt;" in html
    assert "<a" not in html and "<img" not in html


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
    assert "formula" not in render_markdown(f"${formula}$")


def test_prices_are_no_formula_escaped_braces_are_no_groups_and_tables_have_no_styles() -> None:
    assert "formula" not in render_markdown("it costs $5 and $7, or $ 8 $")
    assert "formula" in render_markdown("$" + r"\{" * 50 + "$")
    assert "<td>1</td>" in render_markdown("| a |\n|:-:|\n| 1 |")
