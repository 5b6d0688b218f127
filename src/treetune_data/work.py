"""Carries `make_threads` out: rows in, many solutions at a time, a folder that any end leaves whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.runtime.console import Console
from treetune.store.files import write_json
from treetune_data.asking import Asker, Questions
from treetune_data.blocks import Rule
from treetune_data.ledger import Ledger, OutOfBudget
from treetune_data.make_threads import MakeThreads
from treetune_data.rows import Sidecars, Solution, content_hash, solutions
from treetune_data.solutions import make_parallel
from treetune_data.summary import cost, in_words, write_rows
from treetune_domains.endpoints.client import SECRET_CHARACTERS, Client, EndpointError, Unanswered
from treetune_domains.endpoints.journal import AnswerJournal

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
    """What ended the work before its time, and how many attempts came to nothing."""
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
