"""Finds the links and lists of a page of the viewer that don't work."""

from __future__ import annotations

import time

from tests.support.browser import Browser

MOST_LINKS, MOST_OPTIONS = 8, 3
"""Of a page that are followed; options of a list that are chosen, the first ones."""

ADDRESSES = """
const places = [...document.querySelectorAll('nav a[href], main a[href]')].map(
  (link) => new URL(link.getAttribute('href'), location.href));  // also of links in drawings
for (const place of places) place.hash = '';
return [...new Set(places.map((place) => place.href))];
"""
STATUS = "return fetch(arguments[0]).then((answer) => answer.status);"

LISTS = """
for (const details of document.querySelectorAll('main details')) details.open = true;
return [...document.querySelectorAll('form[data-instant] select')].map(
  (one) => [one.name, [...one.options].map((option) => option.value)]);
"""
CHOOSE = """
const [name, option] = arguments;
const list = [...document.querySelectorAll('form[data-instant] select')].find((one) => one.name === name);
if (!list || list.value === option) return false;
list.value = option;
list.dispatchEvent(new Event('input', { bubbles: true }));
list.dispatchEvent(new Event('change', { bubbles: true }));
return true;
"""
PROBLEMS = ("This can't be shown", "The viewer failed", "Deleted")


def find_unanswered_controls(page: Browser) -> list[str]:
    """Returns the links of the page that lead to no page or elsewhere, and lists whose options it can't show.
    Everything that opens is opened. The page is another one afterwards."""
    origin = page.script("return location.origin")
    addresses = page.script(ADDRESSES)
    found = [f"{address} leads elsewhere" for address in addresses if not address.startswith(f"{origin}/")]
    for address in [one for one in addresses if one.startswith(f"{origin}/")][:MOST_LINKS]:
        status = page.script(STATUS, address)
        if status != 200:
            found.append(f"{address.removeprefix(origin)} answers {status}")
    for name, options in page.script(LISTS):
        for option in options[:MOST_OPTIONS]:
            if page.script(CHOOSE, name, option):
                time.sleep(
                    0.1
                )  # the form says what it says, and the page's mark is empty until it is answered
                page.wait("document.body.dataset.fingerprint")
                title = page.script("return document.querySelector('h1')?.textContent")
                if title in PROBLEMS:
                    found.append(f"{name} = {option}: {title}")
    return found
