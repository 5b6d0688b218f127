"""`treetune watch` shows experiments in a terminal: a list with the status of each, or a page about one.

It reads the files again every two seconds, or prints a single page and ends. It writes nothing. All text from
files goes through `line_of` or `make_visible`, so that control characters and markup have no effect.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, NoReturn

from rich.console import Console, Group, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from treetune.exceptions import NotThere
from treetune.runtime.console import format_duration
from treetune.runtime.directory import verify_answers
from treetune.view.charts import Chart, axis_limits, format_number
from treetune.view.curves import (
    Bunch,
    chosen_charts,
    compare_with_plan,
    evaluation_charts,
    events_of,
    metric_names,
    phase_seconds,
    phase_totals,
    usual_charts,
)
from treetune.view.experiment import Accuracy, RunProgress, StoredExperiment
from treetune.view.store import Run, Store
from treetune.view.store.index import find_sources, read_batches
from treetune.view.text import cut_text, make_visible, one_line

REFRESH_S = 2.0
EXIT_CODE_OF_SIGTERM = 128 + signal.SIGTERM
"""The exit status after SIGTERM, by the convention of shells."""

# The bytes that terminals send for each key.
KEY_NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"\x1b[5~": "page up", b"b": "page up", b"\x1b[6~": "page down", b" ": "page down",
    b"g": "top", b"G": "end", b"\x1b[H": "top", b"\x1b[F": "end",
    b"\r": "open", b"\n": "open", b"\x1b[C": "open", b"l": "open",
    b"\x1b": "back", b"\x7f": "back", b"\x1b[D": "back", b"h": "back",
    b"n": "next", b"p": "previous", b"a": "answers", b"q": "quit", b"\x04": "quit", b"?": "help",
}  # fmt: skip

# A key: an escape sequence, such as that of an arrow, or else a single byte.
_KEY_PRESS = re.compile(rb"\x1b[\[O][0-9;]*[~A-Za-z]|.", re.DOTALL)

HELP_TEXT = """\
↑ ↓ j k     select an experiment, or scroll
Enter l →   open an experiment
Esc h ←     back to the list
n p         next, previous experiment
Space b     page down, up
g G         first, last line
a           full answers, or one line each
q           quit"""

SIGN_AND_COLOUR_BY_STATE = {
    "running": ("▶", "green"),
    "waiting": ("…", "yellow"),
    "stopped": ("✗", "red"),
    "finished": ("✓", "cyan"),
}
"""The sign and the colour of each state. The state's name is written next to the sign, for people who can't
tell signs or colours apart."""

LONGEST_LINE = 400
"""The most characters of a text on one line."""
LEAST_WIDTH_OF_MOST_COLUMNS, LEAST_WIDTH_OF_ALL_COLUMNS = 66, 110
"""Two widths in characters: a screen narrower than `LEAST_WIDTH_OF_MOST_COLUMNS` has only the most important
columns of the list, and one of at least `LEAST_WIDTH_OF_ALL_COLUMNS` has all."""
CURVE_HEIGHT = 4
"""The number of lines of a curve."""
LEAST_WIDTH_OF_TWO_CHARTS = 88
"""The least width, in characters, at which two charts are next to each other."""
MOST_SHOWN_CHARTS, MOST_SHOWN_EVENTS, MOST_SHOWN_ANSWERS = 4, 5, 5
"""The most charts, events and answers on an experiment's page."""
MOST_CHARACTERS_OF_ANSWER = 4000
"""The most characters that are shown of an answer if all its lines are shown."""

BETTER_TEXTS = {"up": "higher is better", "down": "lower is better", "": ""}

CODES_OF_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The number that each dot adds to the code of a braille character: four rows of two columns."""
CODE_WITHOUT_DOTS = 0x2800
"""The code of the braille character without dots."""

CurvePoints = Sequence[tuple[float, float]]
"""(x, y) by rising x."""


def line_of(text: object, style: str = "") -> Text:
    """Returns a text from a file as one line of at most `LONGEST_LINE` characters.

    Markup in it has no effect, and control characters are made visible.
    """
    return Text(one_line(str(text), LONGEST_LINE), style=style)


def _format_state(status: RunProgress) -> Text:
    sign, colour = SIGN_AND_COLOUR_BY_STATE[status.state]
    return Text(f"{sign} {status.state}", style=colour)


def _format_progress(status: RunProgress) -> str:
    planned_iterations = "?" if status.planned_iterations is None else status.planned_iterations
    return f"{status.finished_iterations}/{planned_iterations}"


def _format_accuracy(accuracy: Accuracy, *, bounds: bool = True) -> str:
    if not bounds or accuracy.low is None or accuracy.high is None:
        return f"{accuracy.value:.3f}"
    return f"{accuracy.value:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}]"


def _format_title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


# All experiments


def _read_statuses(store: Store) -> list[tuple[Run, RunProgress | str]]:
    """Returns (experiment, status) for each experiment, in the order of names.

    The status is a message if the experiment can't be read.
    """
    rows: list[tuple[Run, RunProgress | str]] = []
    for run in store.runs():
        if run.files:  # another program's run has no status
            continue
        try:
            rows.append((run, store.status(run)))
        except (ValueError, OSError) as error:
            rows.append((run, str(error)))
    return rows


def _experiments_table(
    rows: Sequence[tuple[Run, RunProgress | str]], width: int, selected: int | None = None
) -> Table:
    """Returns a table with a line for each experiment.

    The row number `selected` is marked by a sign and inverted colours; None marks no row.
    """
    is_narrow, is_wide = width < LEAST_WIDTH_OF_MOST_COLUMNS, width >= LEAST_WIDTH_OF_ALL_COLUMNS
    heads = ["state", "done"]
    if is_wide:
        heads.append("method")
    heads.append("pass@1")
    if not is_narrow:
        heads.append("left")
    rows_of_cells = []
    for _, status in rows:
        if isinstance(status, str):
            rows_of_cells.append([Text("! unreadable", style="red"), *[Text("")] * (len(heads) - 1)])
            continue
        cells = [_format_state(status), Text(_format_progress(status))]
        if is_wide:
            cells.append(line_of(status.method))
        cells.append(_accuracy_cell(status, bounds=not is_narrow, label=is_wide))
        if not is_narrow:
            cells.append(Text("" if status.seconds_left is None else format_duration(status.seconds_left)))
        rows_of_cells.append(cells)
    # The name gets the width that the other columns leave.
    width_of_cells = 0
    for i, head in enumerate(heads):
        widths = [len(head), *(cells[i].cell_len for cells in rows_of_cells)]
        width_of_cells += max(widths) + 1  # 1 for the space after the column
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("experiment", no_wrap=True)
    for head in heads:
        table.add_column(head, no_wrap=True, justify="right" if head in ("done", "left") else "left")
    for i, ((run, _), cells) in enumerate(zip(rows, rows_of_cells, strict=True)):
        if selected is None:
            mark = ""
        else:
            mark = "› " if i == selected else "  "
        name = line_of(run.name).plain
        room = max(10, width - width_of_cells - len(mark) - 1)  # 1 for the space after the name
        # The end of a name is kept, because names differ at their ends.
        shortened = name if len(name) <= room else f"…{name[1 - room :]}"
        table.add_row(Text(mark + shortened), *cells, style="reverse" if i == selected else "")
    return table


def _accuracy_cell(status: RunProgress, *, bounds: bool, label: bool) -> Text:
    """Returns the accuracy on the evaluation set called test or, without such a set, on the first set.

    Args:
        bounds: Whether the interval of the accuracy is shown.
        label: Whether the name of the set is shown.
    """
    # False is sorted before True, so the set called test comes first.
    accuracies = sorted(status.accuracies, key=lambda accuracy: accuracy.label != "test")
    if not accuracies:
        return Text("–", style="dim")
    cell = Text(_format_accuracy(accuracies[0], bounds=bounds))
    if label:
        cell += line_of(f" {accuracies[0].label}", "dim")
    return cell


def _format_reason(status: RunProgress | str) -> Text:
    """Returns the remark on an experiment's state: its last message, or the reason why it stopped or can't be
    read."""
    if isinstance(status, str):
        return line_of(status, "red")
    return line_of(status.why, "red" if status.state == "stopped" else "dim")


# One experiment


def run_page(
    store: Store,
    run: Run,
    width: int,
    metrics: Sequence[str] = (),
    *,
    braille: bool = True,
    whole: bool = False,
) -> RenderableType:
    """Returns a page about an experiment: status, curves, time by phase, events and a few answers.

    Args:
        store: the store of the experiment.
        run: the experiment.
        width: the width of the screen in characters.
        metrics: the metrics whose curves are drawn. If there are none, the first of the usual curves are.
        braille: draws curves with Unicode's braille patterns, and else with stars.
        whole: shows all lines of answers instead of the first.

    Raises:
        ValueError: The experiment's files can't be read, or a metric was not recorded.
    """
    experiment, status = store.experiment(run), store.status(run)
    parts = _status_lines(run, status)
    if experiment.forked is not None:
        origin, iteration = experiment.forked["run"], experiment.forked["after"]
        parts.append(line_of(f"forked from {origin} after iteration {iteration}", "dim"))
    charts = _charts_of(experiment, metrics)
    if charts:
        parts += [Text(), _grid_of_charts(charts, width, braille)]
    bars = phase_seconds(experiment)  # a bar for each iteration
    totals = phase_totals(bars)
    if totals:
        parts += [_format_title("time by phase"), _phase_times(totals, len(bars), width, braille)]
    rows_of_plan = compare_with_plan(experiment)
    if rows_of_plan:
        planned = Table.grid(padding=(0, 2, 0, 0))
        for row in (("", "planned", "measured", ""), *rows_of_plan):
            planned.add_row(*map(Text, row))
        parts += [_format_title("an iteration, planned and measured"), planned]
    events = events_of(experiment)[-MOST_SHOWN_EVENTS:]
    if events:
        parts.append(_format_title("last events"))
        parts += [line_of(f"after {event.x:.0f}: {event.text}") for event in events]
    try:
        title, answers = newest_answers(run, MOST_SHOWN_ANSWERS)
    except (ValueError, KeyError, OSError) as error:
        return Group(*parts, _format_title("answers"), line_of(f"can't be read: {error}", "red"))
    if answers:
        parts += [_format_title(title), *(_answer_text(answer, whole) for answer in answers)]
    return Group(*parts)


def _status_lines(run: Run, status: RunProgress) -> list[RenderableType]:
    """Returns the lines at the top of an experiment's page: its name, state, method and accuracies."""
    time_left = f", {format_duration(status.seconds_left)} left" if status.seconds_left is not None else ""
    parts: list[RenderableType] = [
        line_of(run.name, "bold"),
        _format_state(status) + line_of(f"  {_format_progress(status)} iterations{time_left}"),
    ]
    if status.why:
        parts.append(_format_reason(status))
    about = [status.method, f"seed {status.seed}" if status.seed is not None else ""]
    if status.wall_time is not None:
        about.append(f"last iteration {format_duration(max(0.0, time.time() - status.wall_time))} ago")
    parts.append(line_of(" · ".join(filter(None, about)), "dim"))
    for accuracy in status.accuracies:
        over = f" over {accuracy.problems} problems" if accuracy.problems else ""
        text = f"pass@1 on {accuracy.label} after {accuracy.iteration}: {_format_accuracy(accuracy)}"
        parts.append(line_of(f"{text} (95 % interval{over})" if accuracy.low is not None else text))
    return parts


def _grid_of_charts(charts: Sequence[Chart], width: int, braille: bool) -> Table:
    """Returns the charts in one column, or in two if the screen is wide."""
    columns = 2 if width >= LEAST_WIDTH_OF_TWO_CHARTS and len(charts) > 1 else 1
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for _ in range(columns):
        grid.add_column(ratio=1)
    room = width // columns - (2 if columns > 1 else 0)  # without the space between two columns
    cells = [_draw_chart(chart, room, braille) for chart in charts]
    for start in range(0, len(cells), columns):
        grid.add_row(*cells[start : start + columns])
    return grid


def _phase_times(totals: Mapping[str, float], iterations: int, width: int, braille: bool) -> Table:
    """Returns a row for each phase: its share of the time, its mean seconds, and a bar.

    Args:
        totals: The seconds of each phase in all iterations.
        iterations: The number of iterations.
        width: The width of the screen in characters.
        braille: Draws bars with Unicode's blocks, and else with "#".
    """
    times = Table.grid(padding=(0, 1, 0, 0))
    seconds_of_all = math.fsum(totals.values())
    for phase, seconds in totals.items():
        share = seconds / seconds_of_all
        mean_text = f"{format_number(seconds / iterations)} s each"
        times.add_row(
            Text(phase),
            Text(f"{share:4.0%}" if share >= 0.005 else " <1%"),
            Text(f"{mean_text:>12}"),
            # The bar gets the width that the other columns leave: they take 40 characters at most.
            Text(draw_bar(share, max(6, width - 40), braille=braille), no_wrap=True),
        )
    return times


def _charts_of(experiment: StoredExperiment, metrics: Sequence[str]) -> list[Chart]:
    """Returns charts of the metrics in `metrics` or, if it is empty, of accuracy and the first usual metrics.

    If `metrics` is empty, there are at most `MOST_SHOWN_CHARTS` charts. With many charts of accuracy the
    limit is higher, so that two other charts follow them. Raises ValueError for a metric that was not
    recorded.
    """
    bunches = [Bunch(experiment.name, colour=0, members=[experiment])]
    if not metrics:
        of_accuracy = evaluation_charts(bunches)
        most = max(MOST_SHOWN_CHARTS, len(of_accuracy) + 2)
        return [*of_accuracy, *usual_charts(bunches)][:most]
    recorded = metric_names([experiment])
    for name in metrics:
        if name not in recorded:
            available = ", ".join(recorded) or "none yet"
            raise ValueError(f"{experiment.name} has no metric {name!r}; available: {available}")
    return chosen_charts(bunches, metrics)


def _draw_chart(chart: Chart, width: int, braille: bool) -> Group:
    """Returns a chart: its title, its curves, and a line with its range of x and its last values.

    Infinite and missing values are left out of the curves. A chart whose values are all equal is one line of
    text.
    """
    drawn_curves = []
    for series in chart.series:
        curve = [(x, y) for x, y in series.points if math.isfinite(y)]
        if curve:
            drawn_curves.append(curve)
    has_several_curves = len(chart.series) > 1
    title_text = chart.title
    if has_several_curves:
        # After its colon, the title says which of the curves is dashed. That is left out, because curves of
        # characters have no dashes.
        title_text = title_text.partition(":")[0]
    title = line_of(title_text, "bold")
    if chart.better:
        title.append(f"  {BETTER_TEXTS[chart.better]}", style="dim")
    if not drawn_curves:
        return Group(title, Text("no finite values yet", style="dim"))
    first_x = min(curve[0][0] for curve in drawn_curves)
    last_x = max(curve[-1][0] for curve in drawn_curves)
    distinct_values: set[float] = set()
    for curve in drawn_curves:
        distinct_values |= {y for _, y in curve}
    if len(distinct_values) == 1 and first_x < last_x:
        # A flat line, such as the reward of demonstrations, isn't worth several lines of the screen.
        text = f"always {format_number(distinct_values.pop())}, {first_x:.0f} to {last_x:.0f}"
        return Group(title, Text(text, "dim"))
    low, high = _y_bounds(drawn_curves)
    labels = [format_number(high), *[""] * (CURVE_HEIGHT - 2), format_number(low)]
    margin = max(map(len, labels))
    width_of_curves = max(8, width - margin - 1)  # a space after the label
    dots = plot(drawn_curves, width_of_curves, CURVE_HEIGHT, braille=braille)
    lines = [Text(f"{label:>{margin}} {line}") for label, line in zip(labels, dots, strict=True)]
    last_values = []
    for series in chart.series:
        # The name of a curve is "experiment: metric". The experiment's name is already at the top of the
        # page.
        name = f"{series.name.rpartition(': ')[2]} " if has_several_curves else ""
        x, y = series.points[-1]
        bounds = series.interval.get(x)
        between = f" [{format_number(bounds[0])}, {format_number(bounds[1])}]" if bounds else ""
        last_values.append(f"{name}{format_number(y)}{between}")
    axis = f"{'':{margin}} {first_x:.0f} to {last_x:.0f}; last: {', '.join(last_values)}"
    return Group(title, *lines, line_of(axis, "dim"))


class NewestAnswer(NamedTuple):
    """An answer to show: ``NewestAnswer("test/4#0", 1.0, "ok", "The sum is 12.")``."""

    name: str
    score: float | None
    """None if the answer could not be graded."""
    outcome: str
    text: str


def _answer_text(answer: NewestAnswer, whole: bool) -> Text:
    """Returns an answer with its score.

    It is a single line that the screen may cut off. With `whole`, the answer's text has all its lines, up to
    `MOST_CHARACTERS_OF_ANSWER` characters.
    """
    score_text = "?" if answer.score is None else format_number(answer.score)
    remark = "" if answer.outcome in ("ok", "") else f" {answer.outcome}"
    head = line_of(f"{score_text:>4}{remark}  {answer.name}  ", "bold")
    if not whole:
        line = head + line_of(answer.text)
        line.no_wrap, line.overflow = True, "ellipsis"
        return line
    beginning, left_out = cut_text(answer.text, MOST_CHARACTERS_OF_ANSWER)
    ending = f"\n… and {left_out} more characters" if left_out else ""
    return head + Text(f"\n{make_visible(beginning)}{ending}\n")


def newest_answers(run: Run, most_answers: int) -> tuple[str, list[NewestAnswer]]:
    """Returns a title and at most `most_answers` answers of the newest iteration or, before the first
    iteration, of the newest evaluation.

    The answers are read from the beginning of the file, and the first answer to each problem is taken. Raises
    ValueError for a damaged file.
    """
    all_sources = find_sources(run)
    if not all_sources:
        return "", []
    iterations = [source for source in all_sources if source.kind == "iteration"]
    newest_source = (iterations or all_sources)[-1]
    # Only the beginning of the file is read: it usually has enough problems.
    if newest_source.kind == "evaluation":
        answers = _first_lines(newest_source.path)
    else:
        answers = _first_batch(newest_source.path)
    first_answers: dict[str, NewestAnswer] = {}
    for problem, answer in answers:
        first_answers.setdefault(problem, answer)
    title = f"{newest_source.content} of {newest_source.title}"
    return title, list(first_answers.values())[:most_answers]


def _first_lines(path: Path) -> Iterator[tuple[str, NewestAnswer]]:
    """Yields (problem, answer) for the first thousand lines of an evaluation's file."""
    verify_answers(path)
    with path.open(encoding="utf-8") as file:
        for line in islice(file, 1000):
            row = json.loads(line)
            name, outcome = f"{row['problem']}#{row['sample']}", row.get("outcome", "")
            yield row["problem"], NewestAnswer(name, row.get("reward"), outcome, row.get("text") or "")


def _first_batch(path: Path) -> Iterator[tuple[str, NewestAnswer]]:
    """Yields (problem, answer) for the rows in the first batch of an iteration's Arrow file.

    The file has trajectories or, if the iteration trained on demonstrations, episodes.
    """
    batches = read_batches(path, ["problem", "sample", "grade", "text", "group", "reward"])
    next(batches)  # the schema
    first_batch, _ = next(batches, (None, 0))
    if first_batch is None:  # the file has no rows
        return
    for row in first_batch.to_pylist():
        if "problem" in row:  # a trajectory
            problem, sample, outcome = row["problem"]["id"], row["sample"], row["grade"]["outcome"]
            score = None if outcome == "unavailable" else row["grade"]["reward"]
        else:  # an episode, whose `group` is the id of its problem
            problem, sample, outcome = row.get("group") or "", 0, ""
            score = row.get("reward")
        yield problem, NewestAnswer(f"{problem}#{sample}", score, outcome, row.get("text") or "")


# Curves of characters


def plot(curves: Sequence[CurvePoints], width: int, height: int, *, braille: bool = True) -> list[str]:
    """Draws all curves over shared axes, and returns `height` lines of `width` characters.

    With `braille`, curves are drawn with Unicode's braille patterns, which have eight dots to a character.
    Without it, they are drawn with stars. Neighbouring points of a curve are joined, and a single point is a
    dot. There must be at least one point, and all values must be finite.
    """
    dots_across, dots_down = (2, 4) if braille else (1, 1)
    columns, rows = width * dots_across, height * dots_down
    xs: list[float] = []
    for curve in curves:
        xs += [x for x, _ in curve]
    first_x, span = min(xs), max(xs) - min(xs)
    low, high = _y_bounds(curves)
    grid = [[False] * columns for _ in range(rows)]

    def dot_at(x: float, y: float) -> tuple[int, int]:
        """Returns the column and the row of the dot at a point."""
        column = round((x - first_x) / span * (columns - 1)) if span else columns // 2
        row = round((high - y) / (high - low) * (rows - 1))
        return column, row

    for curve in curves:
        dots = [dot_at(x, y) for x, y in curve]
        for start, end in zip(dots, dots[1:] or dots):  # a single dot is joined with itself
            for column, row in _dots_of_line(start, end):
                grid[row][column] = True
    if not braille:
        return ["".join("*" if has_dot else " " for has_dot in grid_row) for grid_row in grid]
    lines = []
    for top in range(0, rows, dots_down):
        characters = [_braille_character(grid, top, left) for left in range(0, columns, dots_across)]
        lines.append("".join(characters))
    return lines


def _dots_of_line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yields the column and the row of each dot of a straight line, both ends included.

    Example: from (0, 0) to (2, 1), the dots are (0, 0), (1, 0) and (2, 1).
    """
    (x, y), (to_x, to_y) = start, end
    steps = max(abs(to_x - x), abs(to_y - y), 1)
    for step in range(steps + 1):
        yield round(x + (to_x - x) * step / steps), round(y + (to_y - y) * step / steps)


def _braille_character(grid: Sequence[Sequence[bool]], top: int, left: int) -> str:
    """Returns the character with the dots of 4 × 2 cells of the grid, from row `top` and column `left` on."""
    code = CODE_WITHOUT_DOTS
    for row, codes_of_row in enumerate(CODES_OF_DOTS):
        for column, code_of_dot in enumerate(codes_of_row):
            if grid[top + row][left + column]:
                code += code_of_dot
    return chr(code)


def _y_bounds(curves: Sequence[CurvePoints]) -> tuple[float, float]:
    """Returns the limits of the y axis: the lowest and the highest value, without room around them, because
    there are only a few lines."""
    values: list[float] = []
    for curve in curves:
        values += [y for _, y in curve]
    low, high = min(values), max(values)
    return (low, high) if low < high else axis_limits(values)  # the axis of a single value needs some length


def draw_bar(share: float, width: int, *, braille: bool = True) -> str:
    """Returns a bar whose length is a share of `width`. Every share above 0 can be seen.

    With `braille`, the bar is drawn with Unicode's blocks, down to eighths of a character, and else with "#".
    """
    if share <= 0:
        return ""
    if not braille:
        return "#" * max(1, round(share * width))
    n_full, fraction = divmod(min(1.0, share) * width, 1)
    eighths = math.ceil(fraction * 8)  # rounded up, so that every share can be seen
    return "█" * int(n_full) + ("", *"▏▎▍▌▋▊▉█")[eighths]


# The screen


class TerminalView:
    """The state of the screen, which draws pages and handles keys.

    The screen shows the list of experiments, with the row `selected` marked, or the page of the experiment
    `open_run` from its line `top` on.
    """

    def __init__(self, store: Store, console: Console, metrics: Sequence[str]) -> None:
        self.store, self.console, self.metrics = store, console, metrics
        self.braille = (console.encoding or "").lower().startswith("utf")
        self.open_run: Run | None = None
        """The experiment whose page is shown; None if the list of experiments is shown."""
        self.selected = 0
        """The selected row of the list."""
        self.top = 0
        """The first line that is shown of a page."""
        self._listed: list[Run] = []
        """The experiments of the list as it was last drawn, by row."""
        self.shows_whole_answers = False
        """Whether a page has all lines of answers instead of the first."""
        self.shows_help = False
        """Whether the page of help is shown."""

    def page(self) -> RenderableType:
        """Returns the whole page, which may be longer than the screen."""
        width = self.console.width
        if self.open_run is not None:
            return run_page(
                self.store,
                self.open_run,
                width,
                self.metrics,
                braille=self.braille,
                whole=self.shows_whole_answers,
            )
        rows = _read_statuses(self.store)
        if not rows:
            return self._describe_no_experiments()
        reasons = []
        for run, status in rows:
            reason = _format_reason(status)
            if reason:
                reasons.append(line_of(f"  {run.name}: ") + reason)
        return Group(_experiments_table(rows, width), Text(), *reasons)

    def frame(self) -> Group:
        """Returns what the screen shows: a heading, as many lines as fit from `top` on, and the keys."""
        console = self.console
        room = max(1, console.height - 2)
        try:
            body = self._render_body(room)
        except (ValueError, OSError) as error:
            body = self._render_lines(line_of(error, "red"))
        visible_lines = body[self.top : self.top + room]
        position_text = (
            f"  {self.top + 1}–{self.top + len(visible_lines)} of {len(body)} lines"
            if len(body) > room
            else ""
        )
        keys = "Esc list · n next · a answers" if self.open_run else "Enter open"
        heading = Text("treetune watch" + position_text, style="bold", no_wrap=True, overflow="ellipsis")
        footer = Text(f"{keys} · q quit · ? help", style="dim", no_wrap=True, overflow="ellipsis")
        lines = (Segments([*line, Segment.line()]) for line in visible_lines)
        return Group(heading, *lines, *[Text("")] * (room - len(visible_lines)), footer)

    def _render_body(self, room: int) -> list[list[Segment]]:
        """Returns the lines between the heading and the keys.

        For the list of experiments, it returns only the lines that fit into `room`. For any other page it
        returns all lines, of which `frame` shows those from `top` on.
        """
        if self.shows_help:
            return self._render_lines(Text(HELP_TEXT))
        if self.open_run is not None:
            lines = self._render_lines(self.page())
            self.top = max(0, min(self.top, len(lines) - room))
            return lines
        rows = _read_statuses(self.store)
        self._update_list([run for run, _ in rows])
        if not rows:
            return self._render_lines(self._describe_no_experiments())
        table = self._render_lines(_experiments_table(rows, self.console.width, self.selected))
        heading, row_lines = table[0], table[1:]
        # The last lines give the reason for the state of the selected experiment. A screen of few lines
        # doesn't have them: it needs its lines for the list.
        reason: list[list[Segment]] = []
        if room > 6:
            _, status_of_selected = rows[self.selected]
            reason = self._render_lines(_format_reason(status_of_selected))[:2]
        n_shown = max(1, room - 1 - len(reason))  # 1 for the heading
        # The selected row is in the middle, except near the ends of the list.
        first_if_centred = self.selected - n_shown // 2
        first_of_last_rows = len(row_lines) - n_shown
        first = max(0, min(first_if_centred, first_of_last_rows))
        self.top = 0
        return [heading, *row_lines[first : first + n_shown], *reason]

    def _render_lines(self, page: RenderableType) -> list[list[Segment]]:
        """Returns the lines of a page at the screen's width, each as rich's segments."""
        return self.console.render_lines(page, self.console.options.update(height=None), pad=False)

    def _describe_no_experiments(self) -> Text:
        return line_of(f"no experiments yet in {', '.join(map(str, self.store.folders))}")

    def press(self, key: str) -> bool:
        """Handles a key (one of the values of `KEY_NAMES`). Returns False for "quit", and otherwise True."""
        # A page down moves by all lines but the heading, the keys, and one line that stays in view.
        lines_of_page = max(1, self.console.height - 3)
        # A step may lead beyond the last line, as that to the end does. Drawing the page corrects that.
        steps = {
            "up": -1,
            "down": 1,
            "page up": -lines_of_page,
            "page down": lines_of_page,
            "top": -(10**6),
            "end": 10**6,
        }
        if key == "quit":
            return False
        if self.shows_help or key == "help":  # while help is shown, any key hides it
            self.shows_help = not self.shows_help
        elif key == "back":
            self.open_run, self.top = None, 0
        elif key == "answers":
            self.shows_whole_answers = not self.shows_whole_answers
        elif key in ("next", "previous") or (key == "open" and self.open_run is None):
            # Opens the experiment in the selected row, or in the row after or before it. The rows are those
            # of the list that was last drawn, even if experiments have come or gone since.
            if not self._listed:
                self._update_list(self.store.runs())
            if self._listed:
                step_in_list = {"next": 1, "previous": -1}.get(key, 0)
                self.selected = (self.selected + step_in_list) % len(self._listed)
                self.open_run, self.top = self._listed[self.selected], 0
        elif self.open_run is None:
            self.selected = max(0, self.selected + steps.get(key, 0))
        else:
            self.top = max(0, self.top + steps.get(key, 0))
        return True

    def _update_list(self, runs: Sequence[Run]) -> None:
        """Replaces the list of runs. The selected run stays selected, even if it is in another row now."""
        selected_run = None
        if self._listed:
            last = len(self._listed) - 1
            selected_run = self._listed[min(self.selected, last)]
        row = runs.index(selected_run) if selected_run in runs else self.selected
        self.selected = max(0, min(row, len(runs) - 1))
        self._listed = list(runs)


def watch(folders: Sequence[Path], *, name: str | None, metrics: Sequence[str], once: bool) -> None:
    """Shows pages until the user quits, or with `once` prints a single page.

    Args:
        folders: Folders with experiments.
        name: The experiment that is open at first; None for the list.
        metrics: The metrics whose curves a page has; empty for the usual ones.
        once: Whether to print one page and end.

    Raises:
        ValueError: The experiment `name` doesn't exist, or input or output isn't a terminal and `once` isn't
            set.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack characters of answers
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not once and not (sys.stdin.isatty() and console.is_terminal and not console.is_dumb_terminal):
        raise ValueError("standard input or output is not a terminal: use --once to print a single page")
    # The store needs a folder for indexes of answers, but no page in a terminal makes an index.
    with TemporaryDirectory() as cache:
        store = Store(folders, Path(cache))
        view = TerminalView(store, console, metrics)
        runs = store.runs()
        if name is not None:
            try:
                view.open_run = store.run(name)
            except NotThere as error:
                raise ValueError(str(error)) from error
        elif len(runs) == 1 and runs[0].path in store.folders:  # the only folder is itself an experiment
            view.open_run = runs[0]
        if once:
            console.print(view.page())
            return
        with _reading_keys() as read, console.screen(hide_cursor=True) as screen:
            size = console.size
            keys: list[str] = []
            # `press` returns False for the key that quits. Without keys, `all` is true, and the page is only
            # drawn anew.
            while all(view.press(key) for key in keys):
                screen.update(view.frame())
                keys = read(REFRESH_S)
                if console.size != size:
                    size = console.size
                    console.clear()  # removes what the former size left at the edges


def keys_in(data: bytes) -> list[str]:
    """Returns the names of the keys in bytes from the terminal, without unknown keys.

    Example: ``keys_in(b"j\\x1b[A")`` is ``["down", "up"]``.
    """
    return [KEY_NAMES[key] for key in _KEY_PRESS.findall(data) if key in KEY_NAMES]


@contextmanager
def _reading_keys() -> Iterator[Callable[[float], list[str]]]:
    """Yields a function that waits for keys and returns their names, without the need to press Enter.

    The function's argument is the longest wait in seconds. At the end of the block, and also after SIGTERM,
    the terminal gets back the mode that it had before.
    """
    descriptor = sys.stdin.fileno()
    mode_before = termios.tcgetattr(descriptor)

    def read(seconds: float) -> list[str]:
        """Returns the keys that are pressed within some seconds; empty if there are none."""
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return []
        data = os.read(descriptor, 256)
        return keys_in(data) if data else ["quit"]  # no data: the terminal was closed

    def leave(*_: object) -> NoReturn:
        sys.exit(EXIT_CODE_OF_SIGTERM)

    earlier_handler = signal.signal(signal.SIGTERM, leave)
    try:
        tty.setcbreak(descriptor)
        yield read
    finally:
        signal.signal(signal.SIGTERM, earlier_handler)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, mode_before)
