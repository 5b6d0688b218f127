"""Carries `make_threads` out: rows in, many solutions at a time, a folder that any end leaves whole."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.runtime.console import Console
from treetune.store.files import whole_file, write_json
from treetune.tasks.rows import as_text, missing
from treetune.tasks.sources import json_lines
from treetune_data.asking import Asker, Ledger, OutOfBudget, Questions
from treetune_data.parallel_solutions import make_parallel
from treetune_data.pipelines import MakeThreads
from treetune_data.thread_blocks import Rule
from treetune_domains.endpoints.client import SECRET_CHARACTERS, Client, EndpointError, Unanswered
from treetune_domains.endpoints.journal import AnswerJournal


@dataclass(frozen=True)
class Solution:
    """A row of the input. `wrong` says why it is none."""

    number: int
    place: str
    row: dict[str, Any]
    problem: str
    text: str
    wrong: str | None

    @property
    def hash(self) -> str:
        return content_hash([self.problem, self.text])


def content_hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def solutions(source: Path, problem_field: str, solution_field: str) -> Iterator[Solution]:
    """The input's rows, one at a time. Raises ValueError for a line that is no JSON object."""
    for number, (place, row) in enumerate(json_lines(source)):
        wrong = missing(row, problem_field) or missing(row, solution_field)
        problem, text = ("", "") if wrong else (as_text(row[problem_field]), as_text(row[solution_field]))
        yield Solution(number, place, row, problem, text, wrong)


class Sidecars:
    """The files below ``solutions/``, a thousand in a folder."""

    def __init__(self, output: Path, settings: str) -> None:
        self._folder, self._settings = output / "solutions", settings

    def path(self, number: int) -> Path:
        return self._folder / f"{number // 1000:04d}" / f"{number:07d}.json"

    def heading(self, solution: Solution) -> dict[str, str]:
        """Returns the beginning of a record: its solution, and the settings that made it."""
        return {"place": solution.place, "source": solution.hash, "settings": self._settings}

    def unanswered(self, solution: Solution) -> bool:
        """Returns whether the endpoint gave no answer when it was last worked on."""
        record = self._record(solution)
        return record is not None and record["outcome"] == "unanswered"

    def read(self, solution: Solution) -> dict[str, Any] | None:
        """Returns the end of the solution; None where that is still open: it wasn't worked on, had no answer,
        or went another way, under other settings.

        Raises ValueError where another solution's end stands in its place.
        """
        record = self._record(solution)
        if record is None or record["outcome"] == "unanswered" or record["settings"] != self._settings:
            return None
        return record

    def _record(self, solution: Solution) -> dict[str, Any] | None:
        path = self.path(solution.number)
        try:
            record: dict[str, Any] = json.loads(path.read_text())
            known = record["source"], record["settings"], record["outcome"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no record of a solution ({error!r}): delete it") from error
        if known[0] != solution.hash:
            raise ValueError(
                f"{path} is of another solution than {solution.place}: name another output, or delete that"
                " file if the input was put right"
            )
        return record


_SUMMED = ("blocks", "threads", "edits", "sequential_characters", "characters", "critical_characters")


def write_rows(
    pipeline: MakeThreads, source: Path, output: Path, sidecars: Sidecars, ledger: Ledger
) -> dict[str, Any]:
    """Writes the rows with threads, in the input's order, and returns the summary."""
    outcomes: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    rows = 0

    with whole_file(output / "threads.jsonl") as file:
        for solution in solutions(source, pipeline.problem_field, pipeline.solution_field):
            rows += 1
            end = sidecars.read(solution)
            if end is None:
                outcomes["unanswered" if sidecars.unanswered(solution) else "open"] += 1
                continue
            outcomes[end["outcome"]] += 1
            dropped.update(block["reason"] for block in end.get("dropped", ()))
            if end["outcome"] != "accepted":
                rejected[end["reason"]] += 1
                continue
            sums.update({name: end["statistics"][name] for name in _SUMMED})
            file.write(json.dumps({**solution.row, pipeline.output_field: end["text"]}) + "\n")
    usage = ledger.total.as_row(pipeline.prices)
    return {
        "solutions": rows,
        **{name: outcomes[name] for name in ("accepted", "rejected", "unanswered", "open")},
        "reasons": dict(rejected.most_common()),
        "blocks_dropped": dict(dropped.most_common()),
        **{name: sums[name] for name in _SUMMED},
        "acceleration_ratio": _ratio(sums["critical_characters"], sums["characters"]),
        "usage": {
            **usage,
            "steps": {name: step.as_row(pipeline.prices) for name, step in ledger.steps.items()},
        },
        "budget": pipeline.budget,
        "budget_spent": ledger.exhausted,
    }


def cost(ledger: Ledger) -> str:
    return f"{ledger.dollars:.4f} $" if ledger.prices else f"{ledger.total.output_tokens} tokens"


def in_words(summary: dict[str, Any], output: Path) -> list[str]:
    """The summary for a person, a line each."""
    usage = summary["usage"]
    lines = [
        f"{summary['accepted']} of {summary['solutions']} solutions have threads now, in"
        f" {output / 'threads.jsonl'}: {summary['blocks']} blocks of {summary['threads']} threads"
    ]
    if summary["accepted"]:
        critical, sequential = summary["critical_characters"], summary["sequential_characters"]
        lines.append(
            f"  their critical paths have {critical / sequential:.1%} of the sequential solutions' characters"
            f" (acceleration ratio {summary['acceleration_ratio']:.3f} of all that is written)"
        )
    lines += [f"  rejected: {count} × {reason}" for reason, count in summary["reasons"].items()]
    lines += [
        f"  block left sequential: {count} × {reason}" for reason, count in summary["blocks_dropped"].items()
    ]
    if summary["unanswered"]:
        lines.append(f"  unanswered: {summary['unanswered']}; the same command asks again")
    lines += [f"  {name:<11}{_usage(step)}" for name, step in usage["steps"].items()]
    lines.append(f"  {'in all':<11}{_usage(usage)}")
    if usage["estimated"]:
        lines.append(
            f"  {usage['estimated']} answers came without usage: their tokens are taken for as many as bytes"
        )
    if summary["failed_attempts"]:
        lines.append(
            f"  {summary['failed_attempts']} attempts of this run failed; what the endpoint asks for them is"
            " not in here"
        )
    if summary["budget_spent"]:
        lines.append(
            f"stopped by the budget of {summary['budget']:g} $: one more request could cost more than is"
            f" left. {summary['open']} solutions are open; raise budget, and the same command goes on"
        )
    return lines


def _usage(usage: dict[str, Any]) -> str:
    dollars = f", {usage['dollars']:.4f} $" if "dollars" in usage else ""
    tokens = f"{usage['input_tokens']} tokens in, {usage['output_tokens']} out"
    return f"{usage['requests']} answers, {tokens}{dollars}"


def _ratio(critical: int, characters: int) -> float:
    return 1 - critical / characters if characters else 0.0


NOT_ALL = 1
"""The exit code where solutions are left that the endpoint didn't answer."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Input:
    rows: int
    finished: int


def work(pipeline: MakeThreads, source: Path, output: Path, config: dict[str, Any]) -> int:
    """Returns the exit code: 0 when all is done or the budget is spent. See `DataPipeline.run`."""
    key = pipeline.endpoint.key()
    if key is not None and len(key) >= SECRET_CHARACTERS and key in json.dumps(config, ensure_ascii=False):
        raise ValueError(
            "the configuration holds the key itself, and would be written down: leave it in the environment"
            f" variable {pipeline.endpoint.api_key_variable} alone"
        )
    sidecars = Sidecars(output, content_hash(pipeline.identity()))
    todo = _check(pipeline, source, sidecars)
    ledger = Ledger(pipeline.prices, pipeline.budget)
    journal = AnswerJournal(
        output / "journal.jsonl",
        lambda answer: ledger.steps[answer.step].add(
            answer.input_tokens, answer.output_tokens, answer.estimated
        ),
    )
    console = Console(output / "logs" / "run.log", visible=True)
    try:
        write_json(output / "config.json", config)
        found = ledger.total.requests
        console.say(f"{todo.rows} solutions, {todo.finished} finished; {found} answers are in the journal")
        with console.phase("make_threads", "solutions", lambda: cost(ledger)) as progress:
            failure, failed_attempts = asyncio.run(
                _work(pipeline, source, sidecars, todo, ledger, journal, progress)
            )
        summary = write_rows(pipeline, source, output, sidecars, ledger)
        summary["failed_attempts"] = failed_attempts
        write_json(output / "summary.json", summary)
        for line in in_words(summary, output):
            console.say(line)
        if failure is not None:
            raise RuntimeError(f"{failure}. What was answered is kept: the same command goes on from there")
        return NOT_ALL if summary["unanswered"] else 0
    finally:
        journal.close()
        console.close()


def _check(pipeline: MakeThreads, source: Path, sidecars: Sidecars) -> _Input:
    """Reads the whole input once, before anything is asked."""
    rows = finished = 0
    for solution in solutions(source, pipeline.problem_field, pipeline.solution_field):
        if pipeline.output_field in solution.row:
            raise ValueError(
                f"{solution.place} has a {pipeline.output_field!r} already: name another output_field,"
                " or another input"
            )
        finished += sidecars.read(solution) is not None
        rows += 1
    if not rows:
        raise ValueError(f"there are no rows in {source}")
    return _Input(rows, finished)


async def _work(
    pipeline: MakeThreads,
    source: Path,
    sidecars: Sidecars,
    todo: _Input,
    ledger: Ledger,
    journal: AnswerJournal,
    progress: Progress,
) -> tuple[EndpointError | None, int]:
    """Returns the failure that ended the work before its time, and how many attempts came to nothing."""
    done = todo.finished
    waiting = (
        solution
        for solution in solutions(source, pipeline.problem_field, pipeline.solution_field)
        if sidecars.read(solution) is None
    )
    asker: Asker
    async with Client.of(pipeline.endpoint, lambda: asker.stopping) as client:
        asker = Asker(client, pipeline.endpoint, journal, ledger, pipeline.extra_for)

        async def worker(waiting: Iterator[Solution]) -> None:
            nonlocal done
            for solution in waiting:
                if asker.stopping:
                    return
                questions = Questions(asker, pipeline.repairs)
                try:
                    end = await _end_of(pipeline, questions, solution)
                except (OutOfBudget, EndpointError):
                    return  # the asker knows; nothing is decided about this solution
                usage = questions.usage.as_row(pipeline.prices)
                write_json(
                    sidecars.path(solution.number),
                    {**sidecars.heading(solution), **end, "usage": usage, "answers": questions.keys},
                )
                done += end["outcome"] != "unanswered"
                progress(done, todo.rows)

        progress(done, todo.rows)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(pipeline.endpoint.concurrency):
                    group.create_task(worker(waiting))
        except BaseExceptionGroup as several:  # such as a full disk: the first says it
            raise several.exceptions[0] from None
        return asker.failure, client.failed_attempts


async def _end_of(pipeline: MakeThreads, questions: Questions, solution: Solution) -> dict[str, Any]:
    if solution.wrong is not None:
        return {
            "outcome": "rejected",
            "reason": "the row has no problem and solution",
            "detail": solution.wrong,
        }
    try:
        way = await make_parallel(
            questions, solution.problem, solution.text,
            rule=Rule(pipeline.min_saved_characters, pipeline.max_threads), self_check=pipeline.self_check,
        )  # fmt: skip
    except Unanswered as error:
        return {"outcome": "unanswered", "reason": "the endpoint gave no answer", "detail": str(error)}
    return way.as_row()
