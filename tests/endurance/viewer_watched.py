#!/usr/bin/env python
"""Watches a run in the viewer while it is killed and goes on: does the page ever show a number that isn't so?

    python tests/endurance/viewer_watched.py [--kills 3] [--seed 1] [--output FILE.md]

The small experiment (VinePPO, an evaluation after each iteration) is carried out by a real run, which samples
by itself in place of a server (`treetune.engine.in_process`), and is killed with `kill -9` at random
instants. Two windows of Chromium show its curves and its answers meanwhile and are read every second: every
number of each reading is held against the records that lie there when the run has come to its end, for the
iteration that the page gave it for. What was marked in the windows at the start must be there to the end: a
page that is loaded anew loses it. Ends with exit code 1 if anything is wrong.
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
from tests.support.faults import Experiment  # noqa: E402
from tests.support.forked import Forked  # noqa: E402
from tests.support.started_viewer import started_viewer  # noqa: E402
from treetune.rollouts.storage import read_episodes, read_trajectories  # noqa: E402
from treetune.runtime.directory import ExperimentDirectory  # noqa: E402
from treetune.store.checksums import read_record  # noqa: E402
from treetune.view.charts import number  # noqa: E402
from treetune.view.curves import CURVES  # noqa: E402

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
  words: document.querySelector('main').innerText,
  charts: [...document.querySelectorAll('[data-chart]')].map((figure) => ({
    ...JSON.parse(figure.dataset.chart),
    said: [...figure.querySelectorAll('.u-legend .u-value')].map((one) => one.textContent),
  })),
}"""
READ_ANSWERS = """return {
  marked: window.marked === true,
  rows: [...document.querySelectorAll('table.answers tbody tr[data-href]')].map((row) => ({
    address: row.dataset.href,
    score: row.querySelector('.verdict')?.innerText.trim() || '',
    numbers: Object.fromEntries(
      [...row.querySelectorAll('[data-label]')].map((one) => [one.dataset.label, one.innerText.trim()])),
  })),
}"""


class Said(NamedTuple):
    """One number on a page: where, of which iteration, as the page has it; exactly, or in so many digits."""

    page: str
    name: str
    iteration: int
    value: float | str


@dataclass
class Watch:
    """What was read so far."""

    curves: Browser
    answers: Browser
    readings: int = 0
    said: set[Said] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    state: str = ""
    done: int = 0
    taken_back: list[str] = field(default_factory=list)
    """Iterations done, where the page had said more before: a blow between an iteration's metrics and its
    checkpoint has it done anew, to the same numbers."""
    before: dict[tuple[str, str, int], float] = field(default_factory=dict)
    """What metrics said at each blow. Of an iteration that is done anew they say all but the canary of a sync
    of weights: the first iteration of a start has none."""

    def look(self) -> None:
        """Reads both pages once."""
        self.readings += 1
        curves, answers = self.curves.script(READ_CURVES), self.answers.script(READ_ANSWERS)
        if not (curves["marked"] and answers["marked"]):
            self.wrong.append("a page was loaded anew")
        self.state = curves["state"]
        self.said |= {*_of_curves(curves), *_of_answers(answers)}
        done = re.search(r"(\d+) of \d+ iterations", curves["words"])
        if done:
            if int(done[1]) < self.done:
                self.taken_back.append(f"{self.done} to {done[1]}")
            self.done = int(done[1])

    def until(self, over: Callable[[], bool], longest_s: float, what: str) -> None:
        """Reads every second until then."""
        deadline, next_one = time.monotonic() + longest_s, 0.0
        while not over():
            if time.monotonic() > deadline:
                raise SystemExit(f"no {what} within {longest_s:.0f} s")
            if time.monotonic() >= next_one:
                next_one = time.monotonic() + EVERY_S
                self.look()
            time.sleep(0.01)
        self.look()


def _of_curves(read: Mapping[str, Any]) -> Iterator[Said]:
    """Points of all curves, the last of each as its legend has it, and pass@1 at the top."""
    for chart in read["charts"]:
        for line in chart["lines"]:
            name = f"{chart['title']}: {line['name']}" if len(chart["lines"]) > 1 else chart["title"]
            for kind in ("y", "low", "high"):
                for x, value in zip(line["x"], line[kind] or ()):
                    if value is not None:
                        yield Said("curves", f"{name}, {kind}", int(x), value)
        if len(chart["lines"]) == 1 and len(chart["said"]) >= 2 and chart["said"][0].isdigit():
            value = chart["said"][1].partition(" ")[0]
            yield Said("legend", f"{chart['title']}, y", int(chart["said"][0]), value)
    for value, iteration in re.findall(
        r"pass@1 on validation\s+([\d.]+)[^\n]*?after (\d+) iter", read["words"]
    ):
        yield Said("top", "pass@1", int(iteration), value)


def _of_answers(read: Mapping[str, Any]) -> Iterator[Said]:
    for row in read["rows"]:
        asked = {key: values[0] for key, values in parse_qs(urlsplit(row["address"]).query).items()}
        iteration = int(asked["source"].removeprefix("i"))
        yield Said("answers", f"{asked['answer']}, score", iteration, row["score"].split()[-1])
        for name in ("tokens", "advantage mean"):
            if row["numbers"].get(name):
                yield Said("answers", f"{asked['answer']}, {name}", iteration, row["numbers"][name])


def recorded_metrics(directory: ExperimentDirectory) -> dict[tuple[str, str, int], float]:
    """What ``metrics.jsonl`` says now, by page, name and iteration."""
    found = dict[tuple[str, str, int], float]()
    rows = [
        {key: value for key, value in row.items() if isinstance(value, int | float) and math.isfinite(value)}
        for row in directory.read_metrics()
    ]
    recorded = {key for row in rows for key in row}
    for row in rows:
        after = row["iteration"] + 1
        for title, keys in (REWARD, *CURVES):
            title = title.replace("in grey", "dashed")
            there = [key for key in keys if key in recorded]
            for key in (key for key in there if key in row):
                name = f"{title}: {key.split('/', 1)[1]}" if len(there) > 1 else title
                found["curves", f"{name}, y", after] = found["legend", f"{name}, y", after] = row[key]
    return found


def records(experiment: Experiment) -> dict[tuple[str, str, int], float]:
    """What is so, by page, name and iteration: read from the run's files, past the viewer."""
    directory = experiment.directory
    found = recorded_metrics(directory)
    for path in directory.path.glob("evaluations/*/validation/summary.json"):
        summary = read_record(path, "carry the run out anew")
        after = int(path.parent.parent.name)
        for kind, key in (("y", "pass_at_1"), ("low", "ci_low"), ("high", "ci_high")):
            found["curves", f"pass@1 on validation, {kind}", after] = summary[key]
        found["legend", "pass@1 on validation, y", after] = summary["pass_at_1"]
        found["top", "pass@1", after] = summary["pass_at_1"]
    for iteration in range(ITERATIONS):
        folder = directory.iteration(iteration)
        for one in read_trajectories(folder / "trajectories.arrow"):
            assert one.grade.is_known
            found["answers", f"{one.id}, score", iteration + 1] = one.grade.reward
            found["answers", f"{one.id}, tokens", iteration + 1] = len(one.response_ids)
        for episode in read_episodes(folder / "episodes.arrow"):
            assert episode.advantages is not None
            own = [float(a) for a, t in zip(episode.advantages, episode.trained, strict=True) if t]
            mean = math.fsum(own) / len(own)
            found["answers", f"{episode.trajectory}, advantage mean", iteration + 1] = mean
    return found


def wrong_ones(said: set[Said], true: Mapping[tuple[str, str, int], float]) -> list[str]:
    """What a page gave for an iteration that isn't its records'."""
    found = []
    for one in said:
        value = true.get((one.page, one.name, one.iteration))
        if value is None:
            found.append(f"{one}: no record has it")
        elif isinstance(one.value, str):  # in the digits that the page has
            digits = f"{value:.3f}" if one.page == "top" else number(value)
            near = one.page == "legend" and math.isclose(float(one.value), value, rel_tol=6e-3)
            if one.value != digits and not near:
                found.append(f"{one}: the records have {value!r}, {digits}")
        elif one.value != value:
            found.append(f"{one}: the records have {value!r}")
    return sorted(found)


def strike(run: Forked, watch: Watch, seconds: float) -> str:
    """Starts the run and kills it after so many seconds of work, until the page says so. Returns a row of the
    page's table. The run's end before that ends the script."""
    recorded = len(_recorded(run))
    process, begun = run.start(), time.monotonic()
    watch.until(lambda: watch.state == "running", LONGEST_START_S, "running run on the page")
    running = time.monotonic() - begun
    watch.until(lambda: len(_recorded(run)) > recorded or _ended(process), LONGEST_START_S, "iteration")
    at = time.monotonic() + seconds
    watch.until(lambda: time.monotonic() >= at or _ended(process), LONGEST_RUN_S, "blow")
    if _ended(process):
        raise SystemExit("the run came to its end before all blows had fallen: give fewer --kills")
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    struck, recorded = time.monotonic(), len(_recorded(run))
    watch.before |= recorded_metrics(run.experiment.directory)
    watch.until(lambda: watch.state == "stopped", LONGEST_START_S, "stopped run on the page")
    return f"| {seconds:.1f} | {recorded} | {running:.1f} | {time.monotonic() - struck:.1f} |"


def _recorded(run: Forked) -> list[Path]:
    return list(run.experiment.directory.path.glob("iterations/*/metrics.json"))


def _ended(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the instants")
    parser.add_argument("--within", type=float, default=6.0, help="seconds of work in which a blow falls")
    parser.add_argument("--output", type=Path, help="also write the page there")
    options = parser.parse_args()
    if MISSING:
        parser.error(MISSING)
    import deepspeed  # noqa: F401  once for all that are forked off
    import transformers  # noqa: F401

    begun, draw = time.monotonic(), random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="viewer-watched-") as made:
        run = Forked(Experiment(Path(made, "experiments")), [OVERRIDE])
        run.experiment.base.mkdir()
        first = run.start()
        _wait(lambda: bool(_recorded(run)) or _ended(first))
        os.kill(first, signal.SIGKILL)  # the pages need an experiment to be opened on
        os.waitpid(first, 0)
        with (
            started_viewer([run.experiment.base], Path(made, "cache")) as address,
            browser() as curves,
            browser() as answers,
        ):
            watch = Watch(curves, answers)
            _open(watch, address)
            blows = []
            for _ in range(options.kills):
                seconds = draw.uniform(0, options.within)
                blows.append(strike(run, watch, seconds))
                print(blows[-1], flush=True)
            process = run.start()
            watch.until(lambda: _ended(process), LONGEST_RUN_S, "end of the run")
            run.end(process)
            watch.until(lambda: watch.state == "finished", LONGEST_START_S, "finished run on the page")
            watch.until(lambda: watch.done == ITERATIONS, 30, f"{ITERATIONS} iterations on the page")
            faults = curves.faults() + answers.faults()
            curves.open("about:blank")
            answers.open("about:blank")
        true = watch.before | records(run.experiment)
    wrong = [*watch.wrong, *faults, *wrong_ones(watch.said, true)]
    counts = Counter(one.page for one in watch.said)
    text = PAGE.format(
        **vars(options),
        iterations=ITERATIONS,
        readings=watch.readings,
        minutes=(time.monotonic() - begun) / 60,
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        rows="\n".join(f"| {number} {row}" for number, row in enumerate(blows, 1)),
        verdict=f"**Wrong**: {'; '.join(wrong[:20])}" if wrong else GOOD,
        taken_back="; ".join(watch.taken_back) or "none",
        **{name: counts[name] for name in ("curves", "legend", "top", "answers")},
    )
    if options.output:
        options.output.write_text(text)
    print("\n" + text)
    return 1 if wrong else 0


def _wait(over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_START_S
    while not over():
        if time.monotonic() > deadline:
            raise SystemExit(f"no iteration within {LONGEST_START_S:.0f} s")
        time.sleep(0.01)


def _open(watch: Watch, address: str) -> None:
    origin = address.partition("/?")[0]
    answers = "/answers?run=small&of=iterations&size=200"
    for window, path in ((watch.curves, "/run?run=small"), (watch.answers, answers)):
        window.open(address)
        window.open(origin + path)
        window.wait("document.querySelector('main').innerText.length > 0")
        window.script("window.marked = true")


PAGE = """# A run watched in the viewer while it was killed and went on

`python tests/endurance/viewer_watched.py --kills {kills} --seed {seed}`: the small experiment
(`tests/support/small.jsonnet`: VinePPO) with {iterations} iterations and an evaluation after each,
sampled by the run's own process in place of a server; `kill -9` at {kills} instants drawn at random. Two
windows of Chromium, one on its curves and one on all answers of its iterations, were read {readings} times,
about once a second. {minutes:.0f} minutes on {cores} cores beside other work, Python {python}, CPU.

| blow | seconds of work | iterations recorded | page said running after, s | said stopped after, s |
|---:|---:|---:|---:|---:|
{rows}

Different numbers that were on the pages at some time: {curves} points of curves and bounds of intervals,
{legend} in legends, {top} pass@1 at the top of the page, {answers} scores, lengths and mean advantages of
answers. Each was held against the final records of the iteration that the page gave it for: points exactly,
the others in the digits that the page shows.

{verdict}

Finished iterations that a start took back, since the blow fell between their metrics and their checkpoint,
and carried out anew: {taken_back}.
"""
GOOD = """None was wrong, and neither page was loaded
anew: what a script had put into their windows at the start was there at the end. No error in the console, no
request to another machine."""


if __name__ == "__main__":
    sys.exit(main())
