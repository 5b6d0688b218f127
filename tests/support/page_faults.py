"""Finds the faults of a page in a browser: parts that can't be read, reached or named."""

from __future__ import annotations

from pathlib import Path

from tests.support.browser import Browser

LEAST_CONTRAST = 4.5
"""Of text and what lies behind it, as WCAG 2.2 counts it (1.4.3, AA)."""

MOST_TABS = 250
"""Presses of Tab after which a page's end must be reached; longer pages are looked at so far."""

_LOOK = Path(__file__).with_name("page_faults.js").read_text()


def find_page_faults(page: Browser) -> list[str]:
    """Returns the faults of the page that is open: wider than the window, text with too little contrast,
    headings that leave out a level, controls without a name, ids that are there twice, figures that don't say
    what their band is."""
    found = [f"{page.overflow()} pixels wider than the window"] if page.overflow() > 0 else []
    return found + list(page.script(f"{_LOOK}\nreturn look(arguments[0]);", LEAST_CONTRAST))


def find_unseen_focus(page: Browser) -> list[str]:
    """Goes through the page with Tab, and returns the elements that get the focus and don't show it."""
    page.script(f"{_LOOK}\nwindow.focused = focused; document.activeElement.blur(); scrollTo(0, 0);")
    found, seen = list[str](), set[str]()
    for _ in range(MOST_TABS):
        page.type("\ue004")
        place, words, shown = page.script("return window.focused();")
        if place in seen or not place:
            break
        seen.add(place)
        if not shown:
            found.append(f"the focus isn't seen on {words}")
    return found if seen else ["nothing can be reached with Tab"]
