"""The terminal: keys in, pages out, again every two seconds; or one page printed."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console, Group, RenderableType
from rich.text import Text

from treetune_view.store import NotThere, Run, Store
from treetune_view.terminal.experiments import experiments_table, reason, rows_of
from treetune_view.terminal.run import run_page
from treetune_view.terminal.words import shown

if TYPE_CHECKING:
    from rich.segment import Segment

REFRESH_S = 2.0
TERMINATED = 128 + signal.SIGTERM

KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"\x1b[5~": "page up", b"b": "page up", b"\x1b[6~": "page down", b" ": "page down",
    b"g": "top", b"G": "end", b"\x1b[H": "top", b"\x1b[F": "end",
    b"\r": "open", b"\n": "open", b"\x1b[C": "open", b"l": "open",
    b"\x1b": "back", b"\x7f": "back", b"\x1b[D": "back", b"h": "back",
    b"n": "next", b"p": "previous", b"a": "answers", b"q": "quit", b"\x04": "quit", b"?": "help",
}  # fmt: skip

_KEY = re.compile(rb"\x1b[\[O][0-9;]*[~A-Za-z]|.", re.DOTALL)

HELP = """\
↑ ↓ j k     choose; in one, scroll
Enter l →   open an experiment
Esc h ←     back to all of them
n p         the next, the one before
Space b     a page down, up
g G         to the top, to the end
a           answers whole, or a line each
q           leave"""


class Watch:
    """What is shown: all experiments or `open` one of them, `selected` and `top` (the first line)."""

    def __init__(self, store: Store, console: Console, metrics: Sequence[str]) -> None:
        self.store, self.console, self.metrics = store, console, metrics
        self.braille = (console.encoding or "").lower().startswith("utf")
        self.open: Run | None = None
        self.selected = self.top = 0
        self._listed: list[Run] = []
        self.whole = self.helping = False

    # What is there to see

    def page(self) -> RenderableType:
        """The whole page, as long as it is."""
        width = self.console.width
        if self.open is None:
            rows = rows_of(self.store)
            reasons = [shown(f"  {row.run.name}: ") + reason(row) for row in rows if reason(row)]
            return Group(experiments_table(rows, width), Text(), *reasons) if rows else self._nothing()
        return run_page(self.store, self.open, width, self.metrics, braille=self.braille, whole=self.whole)

    def frame(self) -> Group:
        """What fits: a heading, lines from `top` on, and the keys."""
        console = self.console
        room = max(1, console.height - 2)
        try:
            body = self._body(room)
        except (ValueError, OSError) as error:
            body = self._lines(shown(error, "red"))
        seen = body[self.top : self.top + room]
        more = f"  {self.top + 1}–{self.top + len(seen)} of {len(body)} lines" if len(body) > room else ""
        keys = (
            "Esc all · n next · a answers · q leave · ? keys"
            if self.open
            else "Enter open · q leave · ? keys"
        )
        heading = Text("treetune watch" + more, style="bold", no_wrap=True, overflow="ellipsis")
        footer = Text(keys, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(heading, *(_Line(line) for line in seen), *[Text("")] * (room - len(seen)), footer)

    def _body(self, room: int) -> list[list[Segment]]:
        if self.helping:
            return self._lines(Text(HELP))
        if self.open is not None:
            lines = self._lines(self.page())
            self.top = max(0, min(self.top, len(lines) - room))
            return lines
        rows = rows_of(self.store)
        self._list([row.run for row in rows])
        if not rows:
            return self._lines(self._nothing())
        lines = self._lines(experiments_table(rows, self.console.width, self.selected))
        # The head of the table stays, and the last lines say why the chosen one is as it is.
        said = self._lines(reason(rows[self.selected]))[:2] if room > 6 else []
        space = max(1, room - 1 - len(said))
        first = max(0, min(self.selected - space // 2, len(lines) - 1 - space))
        self.top = 0
        return [lines[0], *lines[1 + first : 1 + first + space], *said]

    def _lines(self, page: RenderableType) -> list[list[Segment]]:
        return self.console.render_lines(page, self.console.options.update(height=None), pad=False)

    def _nothing(self) -> Text:
        return shown(f"no experiment yet below {', '.join(map(str, self.store.folders))}")

    # What keys do

    def press(self, key: str) -> bool:
        """Whether it goes on."""
        if key == "quit":
            return False
        if self.helping or key == "help":
            self.helping = not self.helping
        elif key == "back":
            self.open, self.top = None, 0
        elif key == "answers":
            self.whole = not self.whole
        elif key == "open" and self.open is None:
            self._open(self.selected)
        elif key in ("next", "previous"):
            self._open(self.selected + (1 if key == "next" else -1))
        else:
            self._move(key)
        return True

    def _open(self, number: int) -> None:
        """What was shown under that number, also where others have come or gone since."""
        if not self._listed:
            self._list(self.store.runs())
        if self._listed:
            self.selected = number % len(self._listed)
            self.open, self.top = self._listed[self.selected], 0

    def _list(self, runs: Sequence[Run]) -> None:
        """The one that was chosen stays so, wherever it is now."""
        most = len(self._listed) - 1
        chosen = self._listed[min(self.selected, most)] if self._listed else None
        place = runs.index(chosen) if chosen in runs else self.selected
        self.selected, self._listed = max(0, min(place, len(runs) - 1)), list(runs)

    def _move(self, key: str) -> None:
        page = max(1, self.console.height - 3)
        steps = {"up": -1, "down": 1, "page up": -page, "page down": page, "top": -(10**6), "end": 10**6}
        if self.open is None:
            self.selected = max(0, self.selected + steps.get(key, 0))
        else:
            self.top = max(0, self.top + steps.get(key, 0))


class _Line:
    """A line that was laid out before."""

    def __init__(self, segments: list[Segment]) -> None:
        self.segments = segments

    def __rich_console__(self, *_: object) -> Iterator[Segment]:
        from rich.segment import Segment

        yield from self.segments
        yield Segment.line()


def watch(folders: Sequence[Path], *, name: str | None, metrics: Sequence[str], once: bool) -> None:
    """Until somebody leaves, or with `once` one page. Raises ValueError for what isn't there, and without
    `once` where there is no terminal."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not once and not (sys.stdin.isatty() and console.is_terminal and not console.is_dumb_terminal):
        raise ValueError("there is no terminal that pages can be shown in: --once prints one and ends")
    with TemporaryDirectory() as cache:  # nothing here makes an index of answers
        watched = Watch(Store(folders, Path(cache)), console, metrics)
        watched.open = _first(watched.store, name)
        if once:
            console.print(watched.page())
        else:
            _follow(watched)


def _first(store: Store, name: str | None) -> Run | None:
    """The experiment of that name; without one, the only folder where that is itself an experiment."""
    if name is not None:
        try:
            return store.run(name)
        except NotThere as error:
            raise ValueError(str(error)) from error
    runs = store.runs()
    return runs[0] if len(runs) == 1 and runs[0].path in store.folders else None


def _follow(watched: Watch) -> None:
    with _keys() as read, watched.console.screen(hide_cursor=True) as screen:
        size, keys = watched.console.size, list[str]()
        while all(watched.press(key) for key in keys):
            screen.update(watched.frame())
            keys = read(REFRESH_S)
            if watched.console.size != size:
                size = watched.console.size
                watched.console.clear()


def keys_in(data: bytes) -> list[str]:
    """The names of keys that came together; what is none is left out."""
    found = []
    for one in _KEY.findall(data):
        if one in KEYS:
            found.append(KEYS[one])
    return found


@contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """A function that waits at most so many seconds for keys and returns their names. The terminal is as it
    was afterwards, also after SIGTERM."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read(seconds: float) -> list[str]:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return []
        data = os.read(descriptor, 256)
        return keys_in(data) if data else ["quit"]  # the terminal has gone

    def leave(*_: object) -> NoReturn:
        sys.exit(TERMINATED)

    earlier = signal.signal(signal.SIGTERM, leave)
    try:
        tty.setcbreak(descriptor)
        yield read
    finally:
        signal.signal(signal.SIGTERM, earlier)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
