"""Carries out `make_threads`: converts many solutions at a time. After a kill, the same command continues.

All tasks run in one event loop, in the main thread::

    convert_all                  `concurrency` tasks "worker"               SolutionAsker
    ─────────────────────        ──────────────────────────────────         ───────────────────────────
    starts the workers ────────► take the next solution that isn't done
    waits for all of them          make_parallel: questions, some at
                                   the same time ─────────────────────────► journal, or a request: at most
                                   waits for their answers ◄──────────────  `concurrency` in flight together
                                   writes the solution's record
                                 return if no solution is left,
    returns the failure ◄──────  or the asker is stopping ◄───────────────  the endpoint is given up, or the
                                                                            budget is spent

Only requests have deadlines (`treetune.data.asking`). If a worker raises another error, such as that of a
full disk, the other workers are cancelled with their requests. A kill loses only the requests in flight:
answers are in the journal, and finished solutions have records.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.data.asking import Ledger, Questions, SolutionAsker, run_workers
from treetune.data.parallel_solutions import make_parallel
from treetune.data.pipelines import MakeThreads
from treetune.data.thread_blocks import BlockRule
from treetune.domains.endpoints.asking import AnswerJournal
from treetune.domains.endpoints.client import SECRET_CHARACTERS, EndpointClient
from treetune.exceptions import EndpointError, OutOfBudget, Unanswered
from treetune.runtime.console import Console
from treetune.store.files import write_atomically, write_json
from treetune.tasks.row_values import text_of_value
from treetune.tasks.rows import fault_of_text
from treetune.tasks.sources import read_json_lines

EXIT_SOME_UNANSWERED = 1
"""The exit code if the endpoint didn't answer for some solutions."""
# The statistics of a record that the summary sums over all solutions.
SUMMED_STATISTICS = (
    "blocks", "threads", "edits", "sequential_characters", "characters", "critical_characters",
)  # fmt: skip


def content_hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def make_threads(pipeline: MakeThreads, source: Path, output: Path, config: dict[str, Any]) -> int:
    """Makes solutions parallel, and returns the exit code: 0 if all are done or the budget is spent.

    Solutions that were finished earlier are kept.

    Raises:
        ValueError: The input is wrong.
        RuntimeError: The endpoint failed. All answers so far are kept.
    """
    key = pipeline.endpoint.key()
    # A shorter key is a placeholder for a local server, and may be an ordinary word of the configuration.
    if key is not None and len(key) >= SECRET_CHARACTERS and key in json.dumps(config, ensure_ascii=False):
        raise ValueError(
            "the configuration contains the key itself, and is written to disk: put the key into the"
            f" environment variable {pipeline.endpoint.api_key_variable} only"
        )
    making = _Making(pipeline, source, output)
    making.count()
    ledger = making.ledger
    # Reads the answers of earlier commands, and counts their tokens in the ledger.
    journal = AnswerJournal(
        output / "journal.jsonl",
        lambda answer: ledger.steps[answer.step].add(
            answer.input_tokens, answer.output_tokens, answer.estimated
        ),
    )
    console = Console(output / "logs" / "run.log", visible=True)

    def cost() -> str:
        return f"{ledger.dollars:.4f} $" if ledger.prices else f"{ledger.total.output_tokens} tokens"

    try:
        write_json(output / "config.json", config)
        answers_in_journal = ledger.total.requests
        console.say(
            f"{making.rows} solutions, {making.finished} finished; {answers_in_journal} answers are in the"
            " journal"
        )
        with console.phase("make_threads", "solutions", cost) as progress:
            failure, failed_attempts = asyncio.run(making.convert_all(journal, progress))
        summary = making.write_rows() | {"failed_attempts": failed_attempts}
        write_json(output / "summary.json", summary)
        for line in _describe_summary(summary, output):
            console.say(line)
        if failure is not None:
            raise RuntimeError(
                f"{failure}. All answers so far are kept: the same command continues from there"
            )
        return EXIT_SOME_UNANSWERED if summary["unanswered"] else 0
    finally:
        journal.close()
        console.close()


@dataclass(frozen=True)
class _Solution:
    """A row of the input. `location` is its file and line, and `text` its solution. `fault` says why the row
    can't be used; None if it can."""

    number: int
    location: str
    row: dict[str, Any]
    problem: str
    text: str
    fault: str | None

    @property
    def hash(self) -> str:
        return content_hash([self.problem, self.text])


class _Making:
    """The solutions of the input, and their records in the output's folder: a file for each solution below
    ``solutions/``, a thousand to a folder."""

    def __init__(self, pipeline: MakeThreads, source: Path, output: Path) -> None:
        self.pipeline, self.source, self.output = pipeline, source, output
        self.ledger = Ledger(pipeline.prices, pipeline.budget)
        self._settings = content_hash(pipeline.identity())
        self.rows = 0
        """The number of rows of the input."""
        self.finished = 0
        """The number of rows that are done (`is_done`)."""

    def solutions(self) -> Iterator[_Solution]:
        """Yields the input's rows. Raises ValueError for a line that isn't a JSON object."""
        problem_field, solution_field = self.pipeline.problem_field, self.pipeline.solution_field
        for number, (location, row) in enumerate(read_json_lines(self.source)):
            fault = fault_of_text(row, problem_field) or fault_of_text(row, solution_field)
            problem = text = ""
            if not fault:
                problem, text = text_of_value(row[problem_field]), text_of_value(row[solution_field])
            yield _Solution(number, location, row, problem, text, fault)

    def _record_path(self, number: int) -> Path:
        return self.output / "solutions" / f"{number // 1000:04d}" / f"{number:07d}.json"

    def record(self, solution: _Solution) -> dict[str, Any] | None:
        """Returns the record of a solution; None if there is none.

        Raises ValueError if the record is another solution's.
        """
        path = self._record_path(solution.number)
        try:
            record: dict[str, Any] = json.loads(path.read_text())
            # All three keys are read here, so that a file without one of them is refused below.
            solution_hash, _, _ = record["source"], record["settings"], record["outcome"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} isn't a record of a solution ({error!r}): delete it") from error
        if solution_hash != solution.hash:
            raise ValueError(
                f"{path} is of another solution than {solution.location}: name another output, or delete that"
                " file if the input was corrected"
            )
        return record

    def is_done(self, record: dict[str, Any] | None) -> bool:
        """Returns whether a solution was worked on with the present settings, and the endpoint answered. The
        solution may have been rejected."""
        return (
            record is not None and record["outcome"] != "unanswered" and record["settings"] == self._settings
        )

    def count(self) -> None:
        """Reads the whole input once, before anything is asked, and counts its rows and those that are
        finished. Raises ValueError for an input without rows, or with rows that have threads already."""
        for solution in self.solutions():
            if self.pipeline.output_field in solution.row:
                raise ValueError(
                    f"{solution.location} has a {self.pipeline.output_field!r} already: name another"
                    " output_field, or another input"
                )
            self.finished += self.is_done(self.record(solution))
            self.rows += 1
        if not self.rows:
            raise ValueError(f"there are no rows in {self.source}")

    async def convert_all(
        self, journal: AnswerJournal, progress: Callable[[int, int], None]
    ) -> tuple[EndpointError | None, int]:
        """Converts all solutions. Returns the failure that stopped the work, or None if there was none, and
        the number of failed attempts. The work also ends, without a failure, when the budget is spent."""
        endpoint = self.pipeline.endpoint
        # All workers take their solutions from this one iterator.
        waiting_solutions = (
            solution for solution in self.solutions() if not self.is_done(self.record(solution))
        )
        # The client and the asker need each other: the asker sends its requests by the client, and the client
        # asks the asker when to stop retrying. So the asker is made after the client, inside of the block.
        asker: SolutionAsker
        async with EndpointClient.of(endpoint, lambda: asker.is_stopping) as client:
            asker = SolutionAsker(client, endpoint, journal, self.ledger, self.pipeline.extra_for)
            progress(self.finished, self.rows)
            await run_workers(
                lambda: self._convert_waiting(waiting_solutions, asker, progress), endpoint.concurrency
            )
            return asker.failure, client.failed_attempts

    async def _convert_waiting(
        self,
        waiting_solutions: Iterator[_Solution],
        asker: SolutionAsker,
        progress: Callable[[int, int], None],
    ) -> None:
        """Converts one solution after the other, until none is left or the asker is stopping."""
        for solution in waiting_solutions:
            if asker.is_stopping:
                return
            questions = Questions(asker, self.pipeline.repairs)
            try:
                result = await self._convert(questions, solution)
            except (OutOfBudget, EndpointError):
                return  # the asker keeps the failure; this solution stays open
            record = {"place": solution.location, "source": solution.hash, "settings": self._settings}
            usage = questions.usage.as_row(self.pipeline.prices)
            record |= result | {"usage": usage, "answers": questions.keys}
            write_json(self._record_path(solution.number), record)
            if result["outcome"] != "unanswered":  # the next command works on unanswered ones again
                self.finished += 1
            progress(self.finished, self.rows)

    async def _convert(self, questions: Questions, solution: _Solution) -> dict[str, Any]:
        """Returns the record of a solution.

        `make_parallel` makes the record. For a solution that can't be converted, the record says why. Errors
        that end the whole work, such as OutOfBudget, are raised.
        """
        if solution.fault is not None:
            reason = "the row has no problem and solution"
            return {"outcome": "rejected", "reason": reason, "detail": solution.fault}
        rule = BlockRule(self.pipeline.min_saved_characters, self.pipeline.max_threads)
        check = self.pipeline.self_check
        try:
            return await make_parallel(
                questions, solution.problem, solution.text, rule=rule, self_check=check
            )
        except Unanswered as error:
            reason = "the endpoint gave no answer"
            return {"outcome": "unanswered", "reason": reason, "detail": str(error)}

    def write_rows(self) -> dict[str, Any]:
        """Writes the rows with threads, in the input's order, and returns the summary."""
        pipeline, ledger = self.pipeline, self.ledger
        outcomes, rejected, dropped_blocks, sums = (Counter[str]() for _ in range(4))
        with write_atomically(self.output / "threads.jsonl") as file:
            for solution in self.solutions():
                record = self.record(solution)
                if record is None or not self.is_done(record):
                    is_unanswered = record is not None and record["outcome"] == "unanswered"
                    outcomes["unanswered" if is_unanswered else "open"] += 1
                    continue
                outcomes[record["outcome"]] += 1
                # Blocks may be dropped from accepted and from rejected solutions. A solution about which the
                # model was not asked has no list of them.
                dropped_blocks.update(block["reason"] for block in record.get("dropped", ()))
                if record["outcome"] != "accepted":
                    rejected[record["reason"]] += 1
                    continue
                sums.update({name: record["statistics"][name] for name in SUMMED_STATISTICS})
                file.write(json.dumps({**solution.row, pipeline.output_field: record["text"]}) + "\n")
        critical, characters = sums["critical_characters"], sums["characters"]
        steps = {name: step.as_row(pipeline.prices) for name, step in ledger.steps.items()}
        return {
            "solutions": outcomes.total(),
            **{name: outcomes[name] for name in ("accepted", "rejected", "unanswered", "open")},
            "reasons": dict(rejected.most_common()),
            "blocks_dropped": dict(dropped_blocks.most_common()),
            **{name: sums[name] for name in SUMMED_STATISTICS},
            "acceleration_ratio": 1 - critical / characters if characters else 0.0,
            "usage": ledger.total.as_row(pipeline.prices) | {"steps": steps},
            "budget": pipeline.budget,
            "budget_spent": ledger.exhausted,
        }


def _describe_summary(summary: dict[str, Any], output: Path) -> list[str]:
    """Returns the lines of the summary for the user."""

    def usage_line(usage: dict[str, Any]) -> str:
        dollars = f", {usage['dollars']:.4f} $" if "dollars" in usage else ""
        tokens = f"{usage['input_tokens']} tokens in, {usage['output_tokens']} out"
        return f"{usage['requests']} answers, {tokens}{dollars}"

    usage = summary["usage"]
    lines = [
        f"{summary['accepted']} of {summary['solutions']} solutions have threads now, in"
        f" {output / 'threads.jsonl'}: {summary['blocks']} blocks of {summary['threads']} threads"
    ]
    if summary["accepted"]:
        critical, sequential = summary["critical_characters"], summary["sequential_characters"]
        # The acceleration ratio is 1 − (characters of critical paths) / (characters of parallel solutions).
        lines.append(
            f"  their critical paths have {critical / sequential:.1%} of the sequential solutions' characters"
            f" (acceleration ratio {summary['acceleration_ratio']:.3f} of all that is written)"
        )
    lines += [f"  rejected: {count} × {reason}" for reason, count in summary["reasons"].items()]
    dropped_blocks = summary["blocks_dropped"]
    lines += [f"  block left sequential: {count} × {reason}" for reason, count in dropped_blocks.items()]
    if summary["unanswered"]:
        lines.append(f"  unanswered: {summary['unanswered']}; the same command asks again")
    lines += [f"  {name:<11}{usage_line(step)}" for name, step in usage["steps"].items()]
    lines.append(f"  {'in all':<11}{usage_line(usage)}")
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
            f" left. {summary['open']} solutions are open; raise budget, and the same command continues"
        )
    return lines
