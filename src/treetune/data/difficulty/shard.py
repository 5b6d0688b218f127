"""Works on one shard: asks the questions that have no answer yet and grades the answers that have no grade
yet, also after an earlier job was killed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from treetune.data.difficulty.answering import (
    EMPTY_OUTCOME,
    REFUSED_OUTCOME,
    AskingShard,
    NoReply,
    PolicyReply,
    SampleQuestion,
)
from treetune.data.pipelines import EstimateDifficulty
from treetune.domains.domain_rows import DomainRow, read_domain_rows, row_key
from treetune.rollouts.answers import contiguous_share, cut_at_stop
from treetune.runtime.claims import Claim, Claims
from treetune.runtime.console import Console
from treetune.seeds import derive_seed
from treetune.store.files import write_json
from treetune.store.journal import Journal, read_journal
from treetune.tasks.graders.pool import GraderPool
from treetune.tasks.rows import RowsTask
from treetune.vocabulary import Grade, Problem

PROGRESS_S = 2.0
EXIT_SHARD_TAKEN = 75
"""The exit code of a job whose shard belongs to another job: `EX_TEMPFAIL` of sysexits.h."""

MOST_UNGRADED = 4096
"""The most answers that may wait for their grades. With more, no further answer is taken from the policy
until some are graded."""

MESSAGE_CHARACTERS = 500
"""The most characters of an error's message that are written into a journal."""


SampleKey: TypeAlias = tuple[int, int]
"""The number of a row, and the number of a sample among the row's answers."""


@dataclass(frozen=True)
class RowOfInput:
    """A row of the input. `index` is its number in the whole input, `key` a hash of its content, and
    `occurrence` the number of earlier rows with the same key."""

    index: int
    key: str
    occurrence: int
    row: DomainRow


def input_rows(source: Path) -> Iterator[RowOfInput]:
    """Yields the rows with a key made from their content, since ids may be missing or occur twice."""
    occurrences: dict[str, int] = {}
    for index, (_, row) in enumerate(read_domain_rows(source)):
        key = row_key(row)
        occurrence = occurrences.get(key, 0)
        occurrences[key] = occurrence + 1
        yield RowOfInput(index, key, occurrence, row)


def shard_folder(output: Path, shard: int) -> Path:
    return output / "shards" / f"{shard:04d}"


def work_on_shard(pipeline: EstimateDifficulty, source: Path, output: Path, shard: int) -> int:
    """Works on a shard, and returns the exit code. Raises RuntimeError if the policy stops answering; the
    next job continues."""
    folder = shard_folder(output, shard)
    # A claim is a file that lets only one process work on the shard. None: another process holds it.
    claim = Claims().take(folder / CLAIM_FILE)
    if claim is None:
        return EXIT_SHARD_TAKEN
    console = Console(folder / "logs" / "shard.log", visible=True)
    try:
        _Shard(pipeline, source, shard, folder, claim, console).work()
    except _ShardTakenOver:
        console.say(f"shard {shard}: another job has taken over while this one was suspended")
        return EXIT_SHARD_TAKEN
    finally:
        console.close()
        claim.release()
    return 0


class _ShardTakenOver(Exception):
    """Another job has the shard's claim now: this job was suspended for so long that it counted as dead."""


class _UngradedAnswer(NamedTuple):
    """An answer that is being graded. Two of its fields are written next to the grade."""

    grade: Future[Grade]
    complete: bool
    tokens: int | None


class _Shard:
    """The work on a shard: which answers and grades it has, and which answers are being graded."""

    def __init__(
        self,
        pipeline: EstimateDifficulty,
        source: Path,
        shard: int,
        folder: Path,
        claim: Claim,
        console: Console,
    ) -> None:
        self._pipeline, self._shard, self._folder, self._console = pipeline, shard, folder, console
        self._claim = claim
        rows = contiguous_share(list(input_rows(source)), shard, pipeline.shards)
        assert isinstance(pipeline.task, RowsTask)
        self._problems: dict[int, Problem] = {
            row.index: pipeline.task.problem_of(row.row, f"row/{row.index}") for row in rows
        }
        self._keys = {row.index: (row.key, row.occurrence) for row in rows}
        self._total = len(rows) * pipeline.answers.samples
        self._progress_written = 0.0
        self._answered = self._graded = self._unavailable = 0
        self._answered_earlier: set[SampleKey] = set()
        """The samples that earlier jobs have answered."""
        self._waiting: dict[SampleKey, _UngradedAnswer] = {}
        """The samples that are being graded."""
        self._done: deque[SampleKey] = deque()
        """The samples whose grades have come and are not in the journal yet."""

    def work(self) -> None:
        """Grades earlier answers without a grade, asks the questions without an answer, and returns when all
        grades are in the journal."""
        ungraded = self._read_journals()
        questions = self._list_open_questions()
        self._console.say(
            f"shard {self._shard}: {self._total} answers, {self._answered} are here and {self._graded} graded"
        )
        pipeline = self._pipeline
        pool = GraderPool(
            pipeline.task.grader, workers=pipeline.grader_workers, deadline=pipeline.grader_deadline
        )
        # Without checksums, other programs can read these journals as JSON lines.
        with (
            closing(Journal(self._folder / ANSWERS_FILE, without_checksums=True)) as self._answers,
            closing(Journal(self._folder / GRADES_FILE, without_checksums=True)) as self._grades,
            pool as self._pool,
            self._console.phase(f"shard {self._shard}", "answers") as self._show,
        ):
            self._write_progress(at_once=True)
            for answer in ungraded:
                self._submit_answer(answer)
            if questions:  # without questions, no server needs to be started
                shard = AskingShard(self._shard, self._folder, pipeline.seed)
                with pipeline.policy.open(pipeline.answers.params, shard) as ask:
                    ask(questions, self._keep_answer)
            while self._waiting:
                self._wait_for_one()
                self._write_progress()
            # The journals must be on the disk before `DONE_FILE` says that they are complete.
            for journal in (self._answers, self._grades):
                journal.close(durable=True)
        if self._claim.is_lost():
            raise _ShardTakenOver
        counts = {"answers": self._answered, "graded": self._graded, "unavailable": self._unavailable}
        write_json(self._folder / DONE_FILE, counts)
        self._write_progress(at_once=True)

    def _read_journals(self) -> list[dict[str, Any]]:
        """Counts the answers and grades of earlier jobs, and returns the answers that have no grade yet."""
        graded_samples = {(row["row"], row["sample"]) for row in read_journal(self._folder / GRADES_FILE)}
        ungraded: list[dict[str, Any]] = []
        for answer in read_journal(self._folder / ANSWERS_FILE):
            sample_key = answer["row"], answer["sample"]
            # Of two answers to a question, the first one counts.
            if sample_key not in self._answered_earlier and sample_key not in graded_samples:
                ungraded.append(answer)
            self._answered_earlier.add(sample_key)
        self._answered, self._graded = len(self._answered_earlier), len(graded_samples)
        return ungraded

    def _list_open_questions(self) -> list[SampleQuestion]:
        """Returns the questions that no earlier job has an answer to."""
        questions: list[SampleQuestion] = []
        for index, problem in self._problems.items():
            for sample in range(self._pipeline.answers.samples):
                if (index, sample) not in self._answered_earlier:
                    # The seed comes from the row's content and not from its number. So the seed stays the
                    # same if the rows are in another order.
                    seed = derive_seed(self._pipeline.seed, *self._keys[index], sample, "difficulty")
                    questions.append(SampleQuestion(index, sample, seed, problem))
        return questions

    def _keep_answer(self, question: SampleQuestion, reply: PolicyReply | NoReply | None) -> None:
        """Writes an answer to the journal, so that a killed job doesn't lose it, and sends it to the
        graders."""
        answer: dict[str, Any] = {"row": question.row, "sample": question.sample}
        # None: the question can't be asked, since its prompt is empty or too long. `NoReply`: the endpoint
        # refused the question, or its answer has no text.
        if reply is None:
            answer |= {"text": None, "complete": False, "tokens": None}
        elif isinstance(reply, NoReply):
            answer |= {"text": None, "complete": False, "tokens": None}
            answer |= {"outcome": reply.outcome, "message": reply.why[:MESSAGE_CHARACTERS]}
        else:
            answer |= {"text": reply.text, "complete": reply.complete, "tokens": reply.tokens}
            if reply.begins_in_thought:
                answer["begins_in_thought"] = True
        self._answers.add(answer)
        self._answered += 1
        self._submit_answer(answer)
        self._collect_grades()
        while len(self._waiting) > MOST_UNGRADED:
            self._wait_for_one()
        self._write_progress()

    def _submit_answer(self, answer: dict[str, Any]) -> None:
        """Sends an answer to the graders. A question without an answer gets its line in the journal at
        once."""
        sample_key = answer["row"], answer["sample"]
        if answer["text"] is None:
            line = {"row": answer["row"], "sample": answer["sample"]}
            line["outcome"] = answer.get("outcome", NOT_ASKED)  # no outcome: the question can't be asked
            if "message" in answer:
                line["message"] = answer["message"]
            self._grades.add(line)
            self._graded += 1
            return
        text = cut_at_stop(answer["text"], self._pipeline.answers.stop)  # graders don't see stop strings
        problem = self._problems[answer["row"]]
        if answer.get("begins_in_thought"):  # the prompt opened the thought, so the text has no opening tag
            problem = replace(problem, is_thought_open=True)
        future = self._pool.submit(text, problem)
        self._waiting[sample_key] = _UngradedAnswer(future, answer["complete"], answer["tokens"])
        future.add_done_callback(lambda _: self._done.append(sample_key))

    def _collect_grades(self) -> None:
        """Writes each grade that has arrived into the journal."""
        while self._done:
            row, sample = self._done.popleft()
            answer = self._waiting.pop((row, sample))
            grade = answer.grade.result()
            if grade.outcome == "unavailable":
                # The answer is graded again when a job works on the shard again.
                self._unavailable += 1
                continue
            line = {
                "row": row,
                "sample": sample,
                "reward": grade.reward,
                "correct": grade.correct,
                "outcome": grade.outcome,
                "extracted": grade.extracted,
                "complete": answer.complete,
                "tokens": answer.tokens,
            }
            if grade.message is not None:
                line["message"] = grade.message[:MESSAGE_CHARACTERS]
            self._grades.add(line)
            self._graded += 1

    def _wait_for_one(self) -> None:
        """Waits for the grade that has been outstanding the longest, and writes all grades that have come."""
        oldest = next(iter(self._waiting.values()))
        oldest.grade.result()
        self._collect_grades()

    def _write_progress(self, at_once: bool = False) -> None:
        """Writes the progress for the command that watches the jobs, at most every `PROGRESS_S` seconds
        unless `at_once`. Raises `_ShardTakenOver` if another job has the shard's claim."""
        self._show(self._graded, self._total)
        moment = time.monotonic()
        if at_once or moment - self._progress_written > PROGRESS_S:
            self._progress_written = moment
            # Two jobs that write the same journals would ask the same questions twice.
            if self._claim.is_lost():
                raise _ShardTakenOver
            progress = {"answered": self._answered, "graded": self._graded, "total": self._total}
            write_json(self._folder / PROGRESS_FILE, progress, durable=False)


ANSWERS_FILE, GRADES_FILE = "answers.jsonl", "grades.jsonl"
DONE_FILE, PROGRESS_FILE = "done.json", "progress.json"
FAILURE_FILE, CLAIM_FILE = "failure.json", "claims"
NOT_ASKED = "not asked"
"""The outcome of a question that can't be asked: its prompt is empty, or leaves no room for an answer."""
WITHOUT_ANSWER = (NOT_ASKED, REFUSED_OUTCOME, EMPTY_OUTCOME)
"""Outcomes of questions without an answer that could be right or wrong. They don't count in any rate."""
