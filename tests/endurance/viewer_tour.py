#!/usr/bin/env python
"""Opens every page of the viewer in Chromium, wide and narrow, light and dark, and says what is wrong.

    python tests/endurance/viewer_tour.py experiments data --output /scratch/tour      # any that have answers
    python tests/endurance/viewer_tour.py experiments --output /scratch/tour --running   # one that runs now

A picture of each view goes to the output, and a table, `tour.md`: errors in the console, requests that leave
127.0.0.1, pages wider than the window, text whose contrast is below 4.5, headings that leave out a level,
controls without a name, a focus that isn't seen, links that lead nowhere, options of lists that a page can't
show. With `--running` each page is looked at for as long as it asks again twice. Ends with exit code 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.browser import MISSING, Browser, browser  # noqa: E402
from tests.support.clicking import unanswered  # noqa: E402
from tests.support.looking import unseen_focus, wrong_with  # noqa: E402
from tests.support.started_viewer import started_viewer  # noqa: E402
from tests.support.tour import DOWNLOADED, STATES, Place, Stop, place_of, stops  # noqa: E402
from treetune.view.pages import PAGES  # noqa: E402

WIDTHS, THEMES = (1400, 420), ("light", "dark")
ASKED_AGAIN_S = 4.5
"""More than twice as long as a page waits before it asks for itself again."""


@dataclass
class Seen:
    """What was found of one view, by width and theme; seconds until it was there first."""

    stop: Stop
    seconds: float
    faults: dict[str, list[str]] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of experiments or data")
    parser.add_argument("--output", type=Path, required=True, help="where pictures and the table go")
    parser.add_argument("--running", action="store_true", help="look at an experiment that runs now")
    parser.add_argument("--cache", type=Path, help="the viewer's own files; default: a new folder")
    parser.add_argument("--only", default="", help="views whose name has this in it")
    options = parser.parse_args(arguments)
    if MISSING:
        parser.error(MISSING)
    options.output.mkdir(parents=True, exist_ok=True)
    stay_s = ASKED_AGAIN_S if options.running else 0.3  # what is drawn and morphed after a page is there
    with (
        tempfile.TemporaryDirectory(prefix="tour-") as made,
        started_viewer(options.folders, options.cache or Path(made)) as address,
        browser() as window,
    ):
        window.open(address)
        origin = address.partition("/?")[0]
        place = place_of(window, origin, ("running",) if options.running else STATES)
        chosen = [stop for stop in stops(place) if options.only in stop.name]
        if not chosen:
            parser.error(f"no view's name has {options.only!r} in it")
        found = list[Seen]()
        for stop in chosen:
            found.append(look(window, origin, stop, options.output, stay_s))
            text = page(place, found, options.running)
            (options.output / "tour.md").write_text(text)  # what was seen is there however the tour ends
        window.open("about:blank")
    print(text)
    return 1 if any(own for one in found for own in one.faults.values()) else 0


def look(window: Browser, origin: str, stop: Stop, output: Path, stay_s: float) -> Seen:
    """At both widths in both themes, and with Tab in the first."""
    begun = time.monotonic()
    stop.visit(window, origin)
    seen = Seen(stop, time.monotonic() - begun)
    for width in WIDTHS:
        for theme in THEMES:
            stop.visit(window, origin, width=width, dark=theme == "dark")
            time.sleep(stay_s)
            own = (
                wrong_with(window) if window.script("return document.querySelector('main') !== null") else []
            )
            window.picture(output / f"{file_name(stop.name)}_{width}_{theme}.png")
            if theme == "light" and window.script("return document.querySelector('main') !== null"):
                own += unseen_focus(window)
            if (width, theme) == (WIDTHS[0], THEMES[0]):
                own += unanswered(window)
            seen.faults[f"{width} {theme}"] = own + window.faults()
    print(f"{stop.name}: {seen.seconds:.1f} s, {sum(map(len, seen.faults.values()))} faults", flush=True)
    return seen


def file_name(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def page(place: Place, found: Sequence[Seen], running: bool) -> str:
    columns = [f"{width} {theme}" for width in WIDTHS for theme in THEMES]
    lines = [
        f"`{place.run}`{', which ran meanwhile' if running else ''}, answer `{place.answer}` of"
        f" `{place.source}`; beside it `{place.other}`. Faults of each view by pixels and theme:",
        "",
        f"| view | page | there after, s | {' | '.join(columns)} |",
        "|---|---|---:|" + "---:|" * len(columns),
    ]
    for one in found:
        counts = " | ".join(str(len(one.faults[column])) for column in columns)
        lines.append(f"| {one.stop.name} | `{one.stop.page}` | {one.seconds:.1f} | {counts} |")
    lines.append("")
    for one in found:
        words = dict.fromkeys(f"{own}" for faults in one.faults.values() for own in faults)
        lines += [f"* {one.stop.name}: {text}" for text in words]
    if not any(own for one in found for own in one.faults.values()):
        lines.append("Nothing was found wrong.")
    seen = {one.stop.page for one in found}
    if missed := [page.path for page in PAGES if page.path not in seen | DOWNLOADED]:
        lines.append(f"There was nothing to show on {', '.join(missed)}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
