"""`treetune watch`, the viewer in a terminal.

Promises that these tests hold:

* The pages show a run's state, curves and answers, live, and fit the terminal.
* Keys open and choose; no text of a model or a name moves the cursor or changes a colour.
* The terminal is restored, also after a signal.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.view.recorded import begin_run, record_iteration, recorded_run, trajectory
from treetune.rollouts.storage import write_trajectories
from treetune.view.store import Store
from treetune.view.terminal import TerminalView, draw_bar, keys_in, plot, watch

MAIN = Path(__file__).resolve().parents[2] / "src" / "treetune" / "main.py"


def view_of(folder: Path, width: int = 80, *metrics: str) -> TerminalView:
    plain: dict[str, Any] = {"markup": False, "highlight": False, "color_system": None}
    console = Console(file=StringIO(), width=width, height=24, **plain)
    return TerminalView(Store([folder], folder / "no cache", look_again_s=0.0), console, metrics)


def text_of(shown: TerminalView, *, frame: bool = False) -> str:
    with shown.console.capture() as captured:
        shown.console.print(shown.frame() if frame else shown.page())
    return captured.get()


def test_a_curve_that_rises_goes_from_the_lowest_left_to_the_highest_right() -> None:
    lines = plot([[(1.0, 0.0), (2.0, 1.0)]], 4, 2, braille=False)
    assert lines == ["  **", "**  "]
    top, bottom = plot([[(1.0, 0.0), (2.0, 1.0)]], 4, 2)
    assert [len(top), len(bottom)] == [4, 4]
    assert bottom[0] != "⠀" and top[-1] != "⠀" and top[0] == bottom[-1] == "⠀"


@pytest.mark.parametrize("curve", [[(3.0, 5.0)], [(1.0, 2.0), (9.0, 2.0)], [(0.0, 0.0)]])
def test_a_curve_without_extent_is_drawn(curve: list[tuple[float, float]]) -> None:
    lines = plot([curve], 6, 3)
    assert [len(line) for line in lines] == [6, 6, 6]
    assert set("".join(lines)) != {"⠀"}


@pytest.mark.parametrize("braille", [True, False])
def test_a_bar_shows_every_share_above_0_and_is_never_too_long(braille: bool) -> None:
    lengths = [len(draw_bar(share, 10, braille=braille)) for share in (0.0, 1e-6, 0.3, 0.999, 1.0)]
    assert lengths[0] == 0 and lengths[1] == 1 and max(lengths) == 10 and lengths == sorted(lengths)


@pytest.mark.parametrize("width", [24, 46, 80, 140])
def test_pages_stay_within_the_terminal(tmp_path: Path, width: int) -> None:
    recorded_run(tmp_path / ("a long name of a folder " * 2) / "vineppo")
    shown = view_of(tmp_path, width)
    for keys in ([], ["open"], ["answers"], ["help"]):
        for key in keys:
            shown.press(key)
        lines = text_of(shown, frame=True).splitlines()
        assert len(lines) == 24
        assert max(map(len, lines)) <= width


def test_the_list_and_the_page_of_an_experiment_show_state_and_accuracy(tmp_path: Path) -> None:
    recorded_run(tmp_path / "one")
    begin_run(tmp_path / "two")
    shown = view_of(tmp_path, 120)
    everything = text_of(shown)
    assert re.search(r"one +✓ finished +3/3 .* \d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", everything)
    assert re.search(r"two +\S waiting +0/3", everything)
    shown.press("open")
    page = text_of(shown)
    essentials = (
        "pass@1 on validation",
        "95 % interval",
        "higher is better",
        "time by phase",
        "answers of iter",
    )
    assert [essential for essential in essentials if essential not in page] == []


def test_the_page_of_a_fork_names_the_run_that_it_was_forked_from(tmp_path: Path) -> None:
    directory = recorded_run(tmp_path / "run")
    origin = {"run": "experiments/base", "after": 2, "config": "0123abcd"}
    directory.manifest_file.write_text(json.dumps({"continued": [], "forked": origin}))
    shown = view_of(tmp_path)
    shown.press("open")
    assert "forked from experiments/base after iteration 2\n" in text_of(shown)


def test_new_iterations_and_the_state_of_a_run_are_shown_live(tmp_path: Path) -> None:
    directory = begin_run(tmp_path / "run")
    record_iteration(directory, 0)
    shown = view_of(tmp_path)
    assert "1/3" in text_of(shown)
    record_iteration(directory, 1)
    with directory.locked():
        assert re.search(r"running +2/3", text_of(shown))
    assert re.search(r"stopped +2/3", text_of(shown))


def test_the_chosen_experiment_stays_chosen_when_another_comes(tmp_path: Path) -> None:
    for name in ("b", "c"):
        begin_run(tmp_path / name)
    shown = view_of(tmp_path)
    text_of(shown, frame=True)
    shown.press("down")
    begin_run(tmp_path / "a")
    assert re.search(r"› c ", text_of(shown, frame=True))
    shown.press("open")
    assert shown.open_run is not None and shown.open_run.name == "c"


def test_control_characters_and_markup_of_a_model_are_shown_as_text(tmp_path: Path) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07 \x9b31m [bold]x[/bold] :smile: \u202etxt\r\x00 end"
    directory = begin_run(tmp_path / "run\x1b[31m")
    record_iteration(directory, 0)
    write_trajectories(directory.iteration_folder(0) / "trajectories.arrow", [trajectory(0, 0, hostile)])
    shown = view_of(tmp_path, 200)
    for keys in (["open"], ["answers"], ["back"]):
        for key in keys:
            shown.press(key)
        text = text_of(shown)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    shown.press("open")
    assert "␛[2J␛]0;title␇ ⟨U+009B⟩31m [bold]x[/bold] :smile: ⟨RLO⟩txt␍␀ end" in text_of(shown)


def test_damaged_answers_are_a_line_that_names_them(tmp_path: Path) -> None:
    recorded_run(tmp_path / "good")
    directory = begin_run(tmp_path / "torn")
    record_iteration(directory, 0)
    (directory.iteration_folder(0) / "trajectories.arrow").write_bytes(b"nothing")
    shown = view_of(tmp_path, 120)
    assert "good" in text_of(shown)
    shown.press("next")
    assert "can't be read" in text_of(shown)


def test_a_metric_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run")
    shown = view_of(tmp_path, 100, "train/kll")
    shown.press("open")
    with pytest.raises(ValueError, match=r"no metric 'train/kll'; available: .*seconds/total"):
        text_of(shown)
    assert "no metric" in text_of(shown, frame=True), "while it is watched, it says so"


def test_a_metric_that_never_changes_takes_one_line(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run")
    shown = view_of(tmp_path, 100, "train/learning_rate")
    shown.press("open")
    lines = text_of(shown).splitlines()
    title = next(number for number, line in enumerate(lines) if "train/learning_rate" in line)
    assert lines[title + 1].strip() == "always 0.0002, 1 to 3"


def test_keys_that_come_together_all_count() -> None:
    assert keys_in(b"jj\x1b[B\x1b[5~q") == ["down", "down", "down", "page up", "quit"]
    assert keys_in(b"\x1b") == ["back"]
    assert keys_in(b"\xffz\x1b[99~") == []


def test_without_a_terminal_the_message_names_the_option_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_run(tmp_path / "run")
    with pytest.raises(ValueError, match="use --once"):
        watch([tmp_path], name=None, metrics=(), once=False)
    with pytest.raises(ValueError, match=r"no experiment 'runn'.*; there are run"):
        watch([tmp_path], name="runn", metrics=(), once=True)


@pytest.mark.parametrize("leave", [b"q", signal.SIGTERM])
def test_the_terminal_is_restored_at_the_end_and_after_a_signal(
    tmp_path: Path, leave: bytes | signal.Signals
) -> None:
    recorded_run(tmp_path / "run")
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHONPATH": str(MAIN.parents[1])}
    process = subprocess.Popen(
        [sys.executable, str(MAIN), "watch", str(tmp_path)],
        stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    output, deadline = b"", time.monotonic() + 120

    def read_until(expected: bytes) -> None:
        nonlocal output
        while expected not in output:
            ready, _, _ = select.select([ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "no output in time"
            output += os.read(ours, 65536)

    read_until(b"? help")
    if isinstance(leave, bytes):
        os.write(ours, leave)
    else:
        process.send_signal(leave)
    read_until(b"\x1b[?1049l")
    assert process.wait(60) == (0 if isinstance(leave, bytes) else 128 + signal.SIGTERM)
    # It enters the alternate screen, and leaves it at the end.
    assert output.index(b"\x1b[?1049h") < output.index(b"\x1b[?1049l")
    os.close(ours)
