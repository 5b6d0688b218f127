#!/usr/bin/env python
"""Opens every page of the viewer in Chromium, wide and narrow, light and dark, and lists the faults.

    python tests/endurance/viewer_tour.py experiments data --output /scratch/tour      # any that have answers
    python tests/endurance/viewer_tour.py experiments --output /scratch/tour --running   # one that runs now

The output has a picture of each view, and a table of faults, `tour.md`: errors in the console, requests
that leave 127.0.0.1, pages wider than the window, text whose contrast is below 4.5, headings that skip a
level, controls without a name, an invisible focus, links that lead nowhere, and options of lists that a
page can't show. With `--running`, each page is watched until it has reloaded itself twice. The exit code is
1 if there is a fault.
"""

from __future__ import annotations

import argparse
import itertools
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
from tests.support.page_controls import find_unanswered_controls  # noqa: E402
from tests.support.page_faults import find_page_faults, find_unseen_focus  # noqa: E402
from tests.support.started_viewer import started_viewer  # noqa: E402
from tests.support.viewer_pages import DOWNLOADED, STATES, PageView, ShownData, find_shown_data, page_views  # noqa: E402
from treetune.view.pages import PAGES  # noqa: E402

WIDTHS, THEMES = (1400, 420), ("light", "dark")
TWO_RELOADS_S = 4.5
"""More than twice the time after which a page asks for itself again."""


@dataclass
class VisitedView:
    """The faults of a view, by width and theme, and the seconds until it was loaded."""

    page_view: PageView
    seconds: float
    faults: dict[str, list[str]] = field(default_factory=dict)

    @property
    def has_faults(self) -> bool:
        return any(self.faults.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of experiments or data")
    parser.add_argument("--output", type=Path, required=True, help="folder for pictures and the table")
    parser.add_argument("--running", action="store_true", help="look at an experiment that runs now")
    parser.add_argument("--cache", type=Path, help="the viewer's own files; default: a new folder")
    parser.add_argument("--only", default="", help="views whose name has this in it")
    options = parser.parse_args(arguments)
    if MISSING:
        parser.error(MISSING)
    options.output.mkdir(parents=True, exist_ok=True)
    # 0.3 s are for charts that are drawn after a page is loaded.
    stay_s = TWO_RELOADS_S if options.running else 0.3
    with (
        tempfile.TemporaryDirectory(prefix="tour-") as folder,
        started_viewer(options.folders, options.cache or Path(folder)) as address,
        browser() as window,
    ):
        window.open(address)
        origin = address.partition("/?")[0]
        shown = find_shown_data(window, origin, ("running",) if options.running else STATES)
        chosen = [page_view for page_view in page_views(shown) if options.only in page_view.name]
        if not chosen:
            parser.error(f"no view's name has {options.only!r} in it")
        views = list[VisitedView]()
        for page_view in chosen:
            views.append(visit(window, origin, page_view, options.output, stay_s))
            text = page(shown, views, options.running)
            # Written after each view, so that an aborted tour leaves its table.
            (options.output / "tour.md").write_text(text)
        window.open("about:blank")
    print(text)
    return 1 if any(view.has_faults for view in views) else 0


def visit(window: Browser, origin: str, page_view: PageView, output: Path, stay_s: float) -> VisitedView:
    """Opens a view at both widths in both themes; tries its focus in the light one, and its links once."""
    begun = time.monotonic()
    page_view.visit(window, origin)
    view = VisitedView(page_view, time.monotonic() - begun)
    for width in WIDTHS:
        for theme in THEMES:
            page_view.visit(window, origin, width=width, dark=theme == "dark")
            time.sleep(stay_s)
            has_main = window.script("return document.querySelector('main') !== null")
            faults = find_page_faults(window) if has_main else []
            window.picture(output / f"{file_name(page_view.name)}_{width}_{theme}.png")
            if theme == "light" and has_main:
                faults += find_unseen_focus(window)
            if (width, theme) == (WIDTHS[0], THEMES[0]):
                faults += find_unanswered_controls(window)
            view.faults[f"{width} {theme}"] = faults + window.faults()
    print(f"{page_view.name}: {view.seconds:.1f} s, {sum(map(len, view.faults.values()))} faults", flush=True)
    return view


def file_name(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def page(shown: ShownData, views: Sequence[VisitedView], running: bool) -> str:
    columns = [f"{width} {theme}" for width in WIDTHS for theme in THEMES]
    lines = [
        f"`{shown.run}`{', which ran meanwhile' if running else ''}, answer `{shown.answer}` of"
        f" `{shown.source}`; beside it `{shown.other}`. Faults of each view by width in pixels and theme:",
        "",
        f"| view | page | loaded after, s | {' | '.join(columns)} |",
        "|---|---|---:|" + "---:|" * len(columns),
    ]
    for view in views:
        counts = " | ".join(str(len(view.faults[column])) for column in columns)
        lines.append(f"| {view.page_view.name} | `{view.page_view.page}` | {view.seconds:.1f} | {counts} |")
    lines.append("")
    for view in views:
        distinct_faults = dict.fromkeys(itertools.chain.from_iterable(view.faults.values()))
        lines += [f"* {view.page_view.name}: {fault}" for fault in distinct_faults]
    if not any(view.has_faults for view in views):
        lines.append("There are no faults.")
    visited = {view.page_view.page for view in views}
    if missed := [page.path for page in PAGES if page.path not in visited | DOWNLOADED]:
        lines.append(f"There was nothing to show on {', '.join(missed)}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
