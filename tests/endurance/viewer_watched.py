#!/usr/bin/env python
"""Watches a run in the viewer while it is killed and resumed: does a page ever show a wrong number?

    python tests/endurance/viewer_watched.py [--kills 3] [--seed 1] [--output FILE.md]

The small experiment (VinePPO, an evaluation after each iteration) is a real run that samples in its own
process (`treetune.engine.in_process`), and is killed with `kill -9` at random instants. Meanwhile, two
windows of Chromium show its curves and its answers and are read every second. When the run has ended, every
number that was read is compared with the run's records of the iteration that the page named. The script
marks both windows at the start: a page that is loaded anew loses the mark. The exit code is 1 if anything
is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.browser import MISSING, Browser, browser  # noqa: E402
from tests.support.experiment_runs import Experiment  # noqa: E402
from tests.support.forked_runs import ForkedRun  # noqa: E402
from tests.support.started_viewer import started_viewer  # noqa: E402
from treetune.rollouts.storage import read_episodes, read_trajectories  # noqa: E402
from treetune.runtime.directory import ExperimentDirectory  # noqa: E402
from treetune.store.checksums import read_record  # noqa: E402
from treetune.view.charts import format_number  # noqa: E402
from treetune.view.curves import USUAL_CURVES  # noqa: E402

ITERATIONS = 16
OVERRIDE = f"""{{
  iterations: {ITERATIONS},
  rollout+: {{ samples: 4 }},
  credit+: {{ samples: 2 }},
  evaluation: {{
    every: 1,
    rollout: {{ type: 'single_turn', max_tokens: 32, samples: 2 }},
    sets: [{{ split: 'validation', problems: 10, while_training: true }}],
  }},
}}"""
REWARD = ("reward of the sampled answers", ("episodes/reward",))
EVERY_S = 1.0
LONGEST_START_S, LONGEST_RUN_S = 300.0, 1500.0

READ_CURVES = """return {
  marked: window.marked === true,
  state: document.querySelector('.state')?.innerText.trim().split(' ').pop() || '',
  text: document.querySelector('main').innerText,
  charts: [...document.querySelectorAll('[data-chart]')].map((figure) => ({
    ...JSON.parse(figure.dataset.chart),
    legend: [...figure.querySelectorAll('.u-legend .u-value')].map((value) => value.textContent),
  })),
}"""
READ_ANSWERS = """return {
  marked: window.marked === true,
  rows: [...document.querySelectorAll('table.answers tbody tr[data-href]')].map((row) => ({
    address: row.dataset.href,
    score: row.querySelector('.verdict')?.innerText.trim() || '',
    numbers: Object.fromEntries(
      [...row.querySelectorAll('[data-label]')].map((cell) => [cell.dataset.label, cell.innerText.trim()])),
  })),
}"""


class ShownNumber(NamedTuple):
    """A number on a page, with its iteration: exact (a float), or in the digits that the page shows (a str).

    Example: ``ShownNumber('top', 'pass@1', 3, '0.750')``.
    """

    page: str
    name: str
    iteration: int
    value: float | str


@dataclass
class Watch:
    """The two windows, and everything that was read from them so far."""

    curves: Browser
    answers: Browser
    readings: int = 0
    shown: set[ShownNumber] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    state: str = ""
    done: int = 0
    taken_back: list[str] = field(default_factory=list)
    """Decreases of the number of iterations. A kill between an iteration's metrics and its checkpoint makes
    the run do the iteration again, with the same numbers."""
    before: dict[tuple[str, str, int], float] = field(default_factory=dict)
    """The metrics at each kill. An iteration that is done again may lack the canary's number, since the first
    iteration of a start syncs no weights."""

    def look(self) -> None:
        """Reads both pages once."""
        self.readings += 1
        curves, answers = self.curves.script(READ_CURVES), self.answers.script(READ_ANSWERS)
        if not (curves["marked"] and answers["marked"]):
            self.wrong.append("a page was loaded anew")
        self.state = curves["state"]
        self.shown |= {*numbers_of_curves(curves), *numbers_of_answers(answers)}
        done = re.search(r"(\d+) of \d+ iterations", curves["text"])
        if done:
            if int(done[1]) < self.done:
                self.taken_back.append(f"{self.done} to {done[1]}")
            self.done = int(done[1])

    def until(self, condition: Callable[[], bool], longest_s: float, what: str) -> None:
        """Reads both pages every second until `condition` is true."""
        deadline, next_reading = time.monotonic() + longest_s, 0.0
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"no {what} within {longest_s:.0f} s")
            if time.monotonic() >= next_reading:
                next_reading = time.monotonic() + EVERY_S
                self.look()
            time.sleep(0.01)
        self.look()


def numbers_of_curves(page: Mapping[str, Any]) -> Iterator[ShownNumber]:
    """Yields the points of all curves, their last points from the legends, and pass@1 at the top."""
    for chart in page["charts"]:
        for line in chart["lines"]:
            name = f"{chart['title']}: {line['name']}" if len(chart["lines"]) > 1 else chart["title"]
            for kind in ("y", "low", "high"):
                for x, value in zip(line["x"], line[kind] or ()):
                    if value is not None:
                        yield ShownNumber("curves", f"{name}, {kind}", int(x), value)
        legend = chart["legend"]
        if len(chart["lines"]) == 1 and len(legend) >= 2 and legend[0].isdigit():
            value = legend[1].partition(" ")[0]
            yield ShownNumber("legend", f"{chart['title']}, y", int(legend[0]), value)
    for value, iteration in re.findall(
        r"pass@1 on validation\s+([\d.]+)[^\n]*?after (\d+) iter", page["text"]
    ):
        yield ShownNumber("top", "pass@1", int(iteration), value)


def numbers_of_answers(page: Mapping[str, Any]) -> Iterator[ShownNumber]:
    """Yields the score, the length and the mean advantage of each answer in the list."""
    for row in page["rows"]:
        query = {key: values[0] for key, values in parse_qs(urlsplit(row["address"]).query).items()}
        iteration = int(query["source"].removeprefix("i"))
        yield ShownNumber("answers", f"{query['answer']}, score", iteration, row["score"].split()[-1])
        for name in ("tokens", "advantage mean"):
            if row["numbers"].get(name):
                yield ShownNumber("answers", f"{query['answer']}, {name}", iteration, row["numbers"][name])


def recorded_metrics(directory: ExperimentDirectory) -> dict[tuple[str, str, int], float]:
    """Reads ``metrics.jsonl``, and returns its numbers by page, name and iteration."""
    numbers = dict[tuple[str, str, int], float]()
    rows, recorded_keys = [], set[str]()
    for row in directory.read_metrics():
        finite = {}
        for key, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                finite[key] = value
        rows.append(finite)
        recorded_keys |= finite.keys()
    for row in rows:
        after = row["iteration"] + 1
        for title, keys in (REWARD, *USUAL_CURVES):
            title = title.replace("in grey", "dashed")
            keys_of_chart = [key for key in keys if key in recorded_keys]
            for key in keys_of_chart:
                if key in row:
                    name = f"{title}: {key.split('/', 1)[1]}" if len(keys_of_chart) > 1 else title
                    numbers["curves", f"{name}, y", after] = row[key]
                    numbers["legend", f"{name}, y", after] = row[key]
    return numbers


def records(experiment: Experiment) -> dict[tuple[str, str, int], float]:
    """Reads all numbers of a run from its files, without the viewer, by page, name and iteration."""
    directory = experiment.directory
    numbers = recorded_metrics(directory)
    for path in directory.path.glob("evaluations/*/validation/summary.json"):
        summary = read_record(path, "carry the run out anew")
        after = int(path.parent.parent.name)
        for kind, key in (("y", "pass_at_1"), ("low", "ci_low"), ("high", "ci_high")):
            numbers["curves", f"pass@1 on validation, {kind}", after] = summary[key]
        numbers["legend", "pass@1 on validation, y", after] = summary["pass_at_1"]
        numbers["top", "pass@1", after] = summary["pass_at_1"]
    for iteration in range(ITERATIONS):
        folder = directory.iteration_folder(iteration)
        for trajectory in read_trajectories(folder / "trajectories.arrow"):
            assert trajectory.grade.is_known
            numbers["answers", f"{trajectory.id}, score", iteration + 1] = trajectory.grade.reward
            numbers["answers", f"{trajectory.id}, tokens", iteration + 1] = len(trajectory.response_ids)
        for episode in read_episodes(folder / "episodes.arrow"):
            assert episode.advantages is not None
            trained = [float(advantage) for advantage in episode.advantages[episode.trained]]
            mean = math.fsum(trained) / len(trained)
            numbers["answers", f"{episode.trajectory}, advantage mean", iteration + 1] = mean
    return numbers


def wrong_numbers(shown: set[ShownNumber], recorded: Mapping[tuple[str, str, int], float]) -> list[str]:
    """Describes the numbers of pages that differ from the records of their iteration."""
    wrong = []
    for on_page in shown:
        value = recorded.get((on_page.page, on_page.name, on_page.iteration))
        if value is None:
            wrong.append(f"{on_page}: no record has it")
        elif isinstance(on_page.value, str):  # in the digits that the page shows
            digits = f"{value:.3f}" if on_page.page == "top" else format_number(value)
            is_near = on_page.page == "legend" and math.isclose(float(on_page.value), value, rel_tol=6e-3)
            if on_page.value != digits and not is_near:
                wrong.append(f"{on_page}: the records have {value!r}, {digits}")
        elif on_page.value != value:
            wrong.append(f"{on_page}: the records have {value!r}")
    return sorted(wrong)


def run_and_kill(run: ForkedRun, watch: Watch, seconds: float) -> str:
    """Starts the run, kills it after `seconds` of work, and waits until the page shows that it has stopped.

    Returns:
        A row of the page's table.

    Raises:
        SystemExit: If the run ends before it is killed.
    """
    recorded = len(recorded_iterations(run))
    process, begun = run.start(), time.monotonic()
    watch.until(lambda: watch.state == "running", LONGEST_START_S, "running run on the page")
    running = time.monotonic() - begun
    watch.until(
        lambda: len(recorded_iterations(run)) > recorded or has_ended(process), LONGEST_START_S, "iteration"
    )
    kill_at = time.monotonic() + seconds
    watch.until(lambda: time.monotonic() >= kill_at or has_ended(process), LONGEST_RUN_S, "kill")
    if has_ended(process):
        raise SystemExit("the run ended before all kills were done: give fewer --kills")
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    killed_at, recorded = time.monotonic(), len(recorded_iterations(run))
    watch.before |= recorded_metrics(run.experiment.directory)
    watch.until(lambda: watch.state == "stopped", LONGEST_START_S, "stopped run on the page")
    return f"| {seconds:.1f} | {recorded} | {running:.1f} | {time.monotonic() - killed_at:.1f} |"


def recorded_iterations(run: ForkedRun) -> list[Path]:
    return list(run.experiment.directory.path.glob("iterations/*/metrics.json"))


def has_ended(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="seed of the instants")
    parser.add_argument("--within", type=float, default=6.0, help="seconds of work in which a run is killed")
    parser.add_argument("--output", type=Path, help="also write the page there")
    options = parser.parse_args()
    if MISSING:
        parser.error(MISSING)
    import deepspeed  # noqa: F401  (once, for all processes that are forked off)
    import transformers  # noqa: F401

    begun, draw = time.monotonic(), random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="viewer-watched-") as folder:
        run = ForkedRun(Experiment(Path(folder, "experiments")), [OVERRIDE])
        run.experiment.base.mkdir()
        first = run.start()
        # The pages can only be opened on an experiment: the run is killed after its first iteration.
        wait_until(lambda: bool(recorded_iterations(run)) or has_ended(first))
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        with (
            started_viewer([run.experiment.base], Path(folder, "cache")) as address,
            browser() as curves,
            browser() as answers,
        ):
            watch = Watch(curves, answers)
            open_pages(watch, address)
            rows = []
            for _ in range(options.kills):
                seconds = draw.uniform(0, options.within)
                rows.append(run_and_kill(run, watch, seconds))
                print(rows[-1], flush=True)
            process = run.start()
            watch.until(lambda: has_ended(process), LONGEST_RUN_S, "end of the run")
            run.end(process)
            watch.until(lambda: watch.state == "finished", LONGEST_START_S, "finished run on the page")
            watch.until(lambda: watch.done == ITERATIONS, 30, f"{ITERATIONS} iterations on the page")
            faults = curves.faults() + answers.faults()
            curves.open("about:blank")
            answers.open("about:blank")
        recorded = watch.before | records(run.experiment)
    wrong = [*watch.wrong, *faults, *wrong_numbers(watch.shown, recorded)]
    counts = Counter(on_page.page for on_page in watch.shown)
    text = PAGE.format(
        **vars(options),
        iterations=ITERATIONS,
        readings=watch.readings,
        minutes=(time.monotonic() - begun) / 60,
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        rows="\n".join(f"| {number} {row}" for number, row in enumerate(rows, 1)),
        verdict=f"**Wrong**: {'; '.join(wrong[:20])}" if wrong else GOOD,
        taken_back="; ".join(watch.taken_back) or "none",
        **{name: counts[name] for name in ("curves", "legend", "top", "answers")},
    )
    if options.output:
        options.output.write_text(text)
    print("\n" + text)
    return 1 if wrong else 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_START_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"no iteration within {LONGEST_START_S:.0f} s")
        time.sleep(0.01)


def open_pages(watch: Watch, address: str) -> None:
    origin = address.partition("/?")[0]
    answers = "/answers?run=small&of=iterations&size=200"
    for window, path in ((watch.curves, "/run?run=small"), (watch.answers, answers)):
        window.open(address)
        window.open(origin + path)
        window.wait("document.querySelector('main').innerText.length > 0")
        window.script("window.marked = true")


PAGE = """# A run watched in the viewer while it was killed and resumed

`python tests/endurance/viewer_watched.py --kills {kills} --seed {seed}`: the small experiment
(`tests/support/small.jsonnet`: VinePPO) with {iterations} iterations and an evaluation after each,
sampled by the run's own process in place of a server; `kill -9` at {kills} instants drawn at random. Two
windows of Chromium, one on its curves and one on all answers of its iterations, were read {readings} times,
about once a second. {minutes:.0f} minutes on {cores} cores beside other work, Python {python}, CPU.

| kill | seconds of work | iterations recorded | page showed running after, s | stopped after, s |
|---:|---:|---:|---:|---:|
{rows}

Different numbers that were on the pages at some time: {curves} points of curves and bounds of intervals,
{legend} in legends, {top} pass@1 at the top of the page, {answers} scores, lengths and mean advantages of
answers. Each was compared with the final records of the iteration that the page named: points exactly, the
others in the digits that the page shows.

{verdict}

Finished iterations that a start did again, since the kill came between their metrics and their checkpoint:
{taken_back}.
"""
GOOD = """None was wrong, and neither page was loaded anew. There was no error in the console, and
no request to another machine."""


if __name__ == "__main__":
    sys.exit(main())
