"""Uses what a page of the viewer has to click, open and choose, and says what doesn't answer."""

from __future__ import annotations

from treetune.testing.browser import Browser

MOST_LINKS, MOST_OPTIONS = 25, 4
"""Of a page that are followed; options of a list that are chosen, the first ones."""

LINKS = """
const [most] = arguments;
const found = new Map();
for (const link of document.querySelectorAll('main a[href], nav a[href]')) {
  const place = new URL(link.getAttribute('href'), location.href);  // also of links in drawings
  if (place.origin !== location.origin) { found.set(place.href, 'leads elsewhere'); continue; }
  place.hash = '';
  if (found.size < most && !found.has(place.href)) found.set(place.href, null);
}
return (async () => {
  const wrong = [];
  for (const [address, words] of found) {
    const status = words || (await fetch(address)).status;
    if (status !== 200) wrong.push(`${address}: ${status}`);
  }
  return wrong;
})();
"""

CHOICES = """
const [most] = arguments;
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const lists = () => [...document.querySelectorAll('form[data-instant] select')];
const PROBLEMS = ["This can't be shown", 'The viewer failed', 'Gone'];
async function quiet() {  // until the page has answered: its mark is empty meanwhile
  for (let i = 0; i < 300; i++) { await pause(100); if (document.body.dataset.mark) return true; }
  return false;
}
return (async () => {
  const wrong = [], names = lists().map((one) => one.name);
  for (const details of document.querySelectorAll('main details')) details.open = true;
  for (const name of names) {
    const field = () => lists().find((one) => one.name === name);
    for (const option of [...(field()?.options || [])].map((one) => one.value).slice(0, most)) {
      const select = field();
      if (!select || select.value === option) continue;
      select.value = option;
      select.dispatchEvent(new Event('input', { bubbles: true }));
      select.dispatchEvent(new Event('change', { bubbles: true }));
      await pause(100);
      if (!(await quiet())) wrong.push(`${name} = ${option}: the page does not answer`);
      const title = document.querySelector('h1')?.textContent;
      if (PROBLEMS.includes(title)) wrong.push(`${name} = ${option}: ${title}`);
    }
  }
  return wrong;
})();
"""


def unanswered(page: Browser) -> list[str]:
    """Links of the page that lead to no page, and lists whose options it can't show. Everything that opens is
    opened. The page is another one afterwards."""
    return [*page.script(LINKS, MOST_LINKS), *page.script(CHOICES, MOST_OPTIONS)]
