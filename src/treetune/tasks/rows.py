"""Tasks whose problems are rows of data sets: in files of JSON lines or Parquet, or from the Hugging Face
hub."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, MinLen
from typing_extensions import override

from treetune.config.errors import did_you_mean
from treetune.contracts import Finding, innermost_rollout
from treetune.exceptions import BadRow, NoPlainValue, NoSplit
from treetune.seeds import derived_random
from treetune.tasks.base import Split, Task, check_split
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.row_values import check_plain, is_empty, messages_in_text, text_of_value
from treetune.tasks.sources import (
    InFiles,
    LocatedRow,
    OnDisk,
    Source,
    count_rows,
    describe_missing_file,
    files_matching,
    is_json_array,
    read_json_lines,
    read_rows,
)
from treetune.tasks.splitter_task import SplitterTask
from treetune.tasks.steps import Lines, StepSplitter
from treetune.vocabulary import Problem

QUICKLY_READ_BYTES = 4_000_000
"""The size in bytes up to which a file that isn't Parquet is read as a whole while a configuration is
checked."""

PROBLEM_PLACEHOLDER = "{problem}"

PROMPT = "[MATH_TASK] Problem:\n{problem}\n\nSolution:"
"""The VinePPO paper's zero-shot prompt. Nothing follows the colon: a response begins with a newline."""

STOP = ("\n\n\nProblem:",)
"""Stop strings: the beginning of another problem, which the paper's models would write after an answer."""

NUMERIC, LINES = Numeric(), Lines()
_CALCULATION = re.compile(r"<<[^<>\n]*>>")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RowsTask(SplitterTask):
    """Problems from files of JSON lines or Parquet (``.parquet``), or from a Hugging Face data set."""

    train: tuple[str, ...] = ()
    """Files of the train split, relative to the working directory. They are read one after the other."""
    validation: tuple[str, ...] = ()
    """Files of the validation split."""
    test: tuple[str, ...] = ()
    """Files of the test split."""
    source: Source | None = None
    """A Hugging Face data set, on disk or from the hub, or a pattern of files. All splits come from it, and
    the files above are not read."""
    validation_size: Annotated[int, Gt(0)] | None = None
    """The number of problems that are held out of the train split for validation. The remaining problems and
    those held out keep the order of the rows."""
    split_seed: int = 0
    """Decides which problems are held out. It is independent of the run's seed, so that every run is measured
    on the same problems."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Whether a row that isn't a problem stops the run, or is left out with a warning."""
    steps: StepSplitter = LINES
    """The rule that splits answers into steps."""

    def __post_init__(self) -> None:
        if self.validation and self.validation_size is not None:
            raise ValueError(
                "validation names files and validation_size holds problems out of the train files: "
                "leave one of them out"
            )

    @override
    def size(self, split: Split) -> int | None:
        """Returns the number of problems of a split, without those that are held out of it; None if counting
        takes long."""
        held_out = self.validation_size  # the number of train problems that are held out for validation
        if split == "test" or held_out is None:
            return self._count(split)
        if split == "validation":
            return held_out
        rows = self._count("train")
        if rows is None or rows <= held_out:  # `check` reports that `validation_size` is too large
            return None
        return rows - held_out

    @override
    def check(self, experiment: Any) -> Iterator[Finding]:
        if self.train and self.validation_size:
            rows = self._count("train")
            try:
                if rows is not None:
                    _check_held_out(self.validation_size, rows)
            except ValueError as error:
                yield Finding.of(error, "validation_size")
        for path in self._files_to_look_at():
            yield from self.first_findings(path)
        yield from self.missing_rows()
        if self.source is not None and not isinstance(self.source, InFiles | OnDisk):
            yield Finding(
                "the rows of the data set are not checked, because check doesn't fetch them: a wrong field is"
                " reported when the run begins",
                level="warning",
            )

    def _files_to_look_at(self) -> Iterator[Path]:
        """Yields the files of the task whose first rows can be read quickly."""
        names = () if self.source is not None else (*self.train, *self.validation, *self.test)
        paths = [Path(name) for name in names]
        if isinstance(self.source, InFiles):
            for split in get_args(Split):
                with contextlib.suppress(ValueError):  # a missing split is reported when the split is read
                    paths += self.source.files(split)
        for path in dict.fromkeys(paths):  # each file once
            # The first lines of a large file can be read quickly, but the first row of a JSON array can only
            # be read with the whole file.
            if path.is_file() and (is_quickly_read(path) or not is_json_array(path)):
                yield path

    def first_findings(self, path: Path) -> Iterator[Finding]:
        """Yields findings about the first rows of a file."""
        first_rows = _read_first_rows(path, self.columns, self._setting_that_names(path))
        if isinstance(first_rows, Finding):
            yield first_rows
            return
        bad: list[str] = []
        # Test rows need no solution. `problem_of` recognises them by the beginning of their ids.
        id = "test/0" if self._is_test_file(path) else "example/0"
        for file_and_line, row in first_rows:
            try:
                self.problem_of(row, id)
            except BadRow as error:
                bad.append(f"{file_and_line}: {error}")
            except ValueError:
                continue  # the configuration is wrong, not the row: another check reports that
        if not bad:
            return
        if len(bad) == len(first_rows):
            fault = f"none of the first {len(bad)} rows is a problem of this task; {bad[0]}"
            yield Finding(fault, self._setting_that_names(path), "name the fields of these rows")
        elif self.bad_rows == "stop":
            yield Finding(bad[0], self._setting_that_names(path), "fix the row, or set bad_rows to 'skip'")

    def _count(self, split: Split) -> int | None:
        """Returns the number of rows of a split. Returns None if counting takes long. Raises NoSplit if the
        configuration doesn't have the split."""
        if self.source is not None:
            self.source.name_of(split)  # raises NoSplit if the data set has no such split
            return None  # counting would read or fetch the whole data set
        files = [Path(name) for name in self._files(split)]
        if not all(is_quickly_read(file) for file in files):
            return None
        return sum(map(count_rows, files))

    def _is_test_file(self, path: Path) -> bool:
        """Returns whether only the test split reads a file."""
        if self.source is not None:
            return False
        return path in map(Path, self.test) and path not in map(Path, (*self.train, *self.validation))

    def _setting_that_names(self, path: Path) -> str:
        """Returns the key under which a file of rows is configured, such as ``validation``."""
        if self.source is not None:
            return "source"
        return next((split for split in get_args(Split) if path in map(Path, getattr(self, split))), "train")

    def missing_rows(self) -> Iterator[Finding]:
        """Yields a finding for each file or folder that the task should read and that doesn't exist."""
        if self.source is None:
            for split in get_args(Split):
                for path in map(Path, getattr(self, split)):
                    if not path.is_file():
                        yield Finding(describe_missing_file(path), split, level="missing")
        elif isinstance(self.source, OnDisk) and not Path(self.source.path).is_dir():
            message = f"there is no data set in {self.source.path} (looked for in {Path.cwd()})"
            yield Finding(message, "source.path", level="missing")
        elif isinstance(self.source, InFiles):
            for split in get_args(Split):
                with contextlib.suppress(NoSplit):
                    pattern = self.source.name_of(split)
                    try:
                        files_matching(pattern)
                    except ValueError as error:
                        yield Finding(str(error), ("source", split), level="missing")

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        """Returns the first problems of the first file that can be read quickly. Returns no problems if there
        is no such file, or if one of these rows is bad."""
        if self.source:  # the problems are those of `source`, and the files below are not read
            return ()
        for name in (*self.train, *self.validation, *self.test):
            path = Path(name)
            if is_quickly_read(path):
                rows = itertools.islice(read_file_rows(path, self.columns), count)
                # The rows of the first file suffice, since examples need not be complete.
                try:
                    return [self.problem_of(row, f"example/{number}") for number, (_, row) in enumerate(rows)]
                except ValueError:  # a bad row is reported with its location when the split is read
                    return ()
        return ()

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names of the columns that are read from a Parquet file; None: all."""
        return None

    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        """Makes a problem with this id from a row. Raises BadRow for a row that isn't a problem."""
        raise NotImplementedError

    @override
    def problems(self, split: Split) -> Sequence[Problem]:
        """Returns the problems of a split. Raises ValueError if the split is missing or empty, or if a row is
        bad and `bad_rows` is ``stop``."""
        check_split(split)
        return _cached_problems(self, split)

    def _files(self, split: Split) -> tuple[str, ...]:
        """Returns the names of a split's files. Raises NoSplit if the configuration names none."""
        files = {"train": self.train, "validation": self.validation, "test": self.test}
        names: tuple[str, ...] = files[split]
        if not names:
            remedy = " or set validation_size, to hold problems out of train" if split == "validation" else ""
            raise NoSplit(f"the task has no {split} split: name its files under {split!r}{remedy}")
        return names

    def _read_split(self, split: Split) -> list[Problem]:
        """Reads all problems of the files, or of the data set's split."""
        if self.source is not None:
            rows = self.source.rows(split)
        else:
            files = map(Path, self._files(split))
            rows = itertools.chain.from_iterable(read_file_rows(path, self.columns) for path in files)
        problems: list[Problem] = []
        file_and_line = ""  # of the last row, for messages; empty if there are no rows
        for file_and_line, row in rows:
            try:
                problems.append(self.problem_of(row, f"{split}/{len(problems)}"))
            except BadRow as error:
                message = f"{file_and_line}: {error}"
                if self.bad_rows == "stop":
                    raise ValueError(f"{message}; fix it, or set bad_rows to 'skip'") from None
                log.warning("%s; left out", message)
        if not problems:
            reason = f"no good row up to {file_and_line}" if file_and_line else "there are no rows in it"
            raise ValueError(f"the {split} split is empty: {reason}")
        return problems


@lru_cache(maxsize=64)
def _cached_problems(task: RowsTask, split: Split) -> tuple[Problem, ...]:
    """Returns the problems of a split. With `validation_size`, the validation split is held out of the train
    split."""
    size = task.validation_size
    if split == "test" or size is None:
        return tuple(task._read_split(split))
    problems = task._read_split("train")
    _check_held_out(size, len(problems))
    held_out = set(derived_random(task.split_seed, "validation").sample(range(len(problems)), size))
    # Each problem keeps the id of its row in the train split.
    if split == "validation":
        return tuple(problem for index, problem in enumerate(problems) if index in held_out)
    return tuple(problem for index, problem in enumerate(problems) if index not in held_out)


def _check_held_out(size: int, problem_count: int) -> None:
    """Raises ValueError if no problem of the train split is left when `size` of them are held out."""
    if size >= problem_count:
        raise ValueError(
            f"validation_size is {size}, but the train split has only {problem_count} problems: "
            "choose a smaller one"
        )


def read_file_rows(path: Path, columns: Sequence[str] | None) -> Iterator[LocatedRow]:
    """Yields the rows of a file. Raises ValueError if it doesn't exist or can't be read."""
    return read_rows(path, columns) if path.suffix == ".parquet" else read_json_lines(path)


FIRST_ROWS = 20
"""The number of rows at the beginning of a file that `check` reads."""


def _read_first_rows(path: Path, columns: Sequence[str] | None, setting: str) -> list[LocatedRow] | Finding:
    """Returns the first rows of a file, or a finding if the file can't be read. `setting` is the key that
    names the file."""
    try:
        return list(itertools.islice(read_file_rows(path, columns), FIRST_ROWS))
    except ValueError as error:
        # If the message ends with a remedy after a colon, `Finding.of` takes that remedy.
        return Finding.of(error, setting, "" if ": " in str(error) else "fix the file")


def check_stop(task: Task, stop: Sequence[str], experiment: Any) -> Iterator[Finding]:
    """Yields a warning for stop strings of a task that end no answer.

    Only a mixture uses the stop strings of its tasks. Outside of a mixture, only the stop strings of the
    rollout end an answer. So the rollout has to name the task's stop strings, too.

    Args:
        task: The task.
        stop: Its stop strings.
        experiment: The configuration's root. It may have no evaluation, as pipelines for data.
    """
    evaluation = getattr(experiment, "evaluation", None)
    if not stop or evaluation is None:
        return
    is_trained = experiment.task is task
    is_evaluated = is_trained or any(evaluation_set.task is task for evaluation_set in evaluation.sets)
    rollouts: dict[str, Any] = {}  # those that sample answers to the task's problems, by key
    if is_trained or (is_evaluated and evaluation.rollout is None):
        rollouts["rollout"] = experiment.rollout
    if is_evaluated and evaluation.rollout is not None:
        rollouts["evaluation.rollout"] = evaluation.rollout
    for key_of_outermost, outermost in rollouts.items():
        rollout, key = innermost_rollout(outermost, key_of_outermost)
        sampling = rollout.sampling
        if sampling is not None and not set(stop) <= set(sampling.stop):
            yield Finding(
                f"the task's stop {list(stop)} ends no answer outside of a mixture, and {key}.stop is"
                f" {list(sampling.stop)}: name the strings there, or leave the task's out",
                "stop",
                level="warning",
            )
            return


def is_quickly_read(path: Path) -> bool:
    """Returns whether the first rows of a file, and their number, can be read quickly."""
    return path.is_file() and (path.suffix == ".parquet" or path.stat().st_size <= QUICKLY_READ_BYTES)


@dataclass(frozen=True, kw_only=True)
class JsonLines(RowsTask):
    """Rows with the text of a problem and a gold answer. `RowsTask` explains where rows come from and how
    some are held out."""

    problem_field: Annotated[str, MinLen(1)] = "question"
    """The key of a row's problem."""
    gold_field: Annotated[str, MinLen(1)] = "answer"
    """The key of the gold. The gold may be a worked solution or only an answer: graders find the answer in
    it."""
    gold_fallback: str | None = None
    """Another key of the gold, for rows that have nothing under `gold_field`."""
    demonstration_field: str | None = None
    """The key of the demonstration; null: the gold is also the demonstration."""
    keep: tuple[str, ...] = ()
    """Keys of rows that are copied into `Problem.data`."""
    prompt: str = PROMPT
    """The template, in which ``{problem}`` is replaced by the problem."""
    stop: tuple[str, ...] = STOP
    """The stop strings that belong to the template. A rollout names them as its own `stop`."""
    grader: Grader

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt.count(PROBLEM_PLACEHOLDER) != 1:
            raise ValueError(f"prompt needs {PROBLEM_PLACEHOLDER} exactly once, in place of the problem")
        if "" in self.stop:
            raise ValueError("stop has an empty string, which would end every answer at once")

    @override
    def check(self, experiment: Any) -> Iterator[Finding]:
        """Also yields a finding for each setting that names a column which the source doesn't have."""
        yield from super().check(experiment)
        # Stop strings that the configuration sets. The default ones belong to the default template.
        if self.stop != type(self).stop:
            yield from check_stop(self, self.stop, experiment)
        if isinstance(self.source, OnDisk):
            for split in get_args(Split):
                with contextlib.suppress(NoSplit):  # a source may have no validation rows, for example
                    columns = self.source.columns(split)
                    if columns is not None:
                        source = f"{self.source.path}, split {self.source.name_of(split)}"
                        yield from self._missing_fields(columns, source, need_demonstrations=split != "test")

    @override
    def first_findings(self, path: Path) -> Iterator[Finding]:
        """Yields findings about the first rows of a file: the fields that no row has or, if there are none,
        bad rows."""
        first_rows = _read_first_rows(path, self.columns, self._setting_that_names(path))
        missing_fields: list[Finding] = []
        # A `Finding` means that the file can't be read. `RowsTask.first_findings` reports it below.
        if not isinstance(first_rows, Finding) and first_rows:
            # Each field once, in the order of the rows.
            fields = list(dict.fromkeys(itertools.chain.from_iterable(row for _, row in first_rows)))
            source = f"the first {len(first_rows)} rows of {path}"
            is_test = self._is_test_file(path)
            missing_fields = list(self._missing_fields(fields, source, need_demonstrations=not is_test))
        # A missing field makes every row bad, so the rows need not be reported as well.
        yield from missing_fields or super().first_findings(path)

    def _missing_fields(
        self, fields: Sequence[str], source: str, need_demonstrations: bool
    ) -> Iterator[Finding]:
        """Yields a finding for each setting that names a field which no row has.

        Args:
            fields: The fields that the rows have.
            source: The rows in messages, such as ``the first 20 rows of train.jsonl``.
            need_demonstrations: Whether the rows must also have demonstrations. Test rows need none.
        """
        settings = {"problem_field": self.problem_field, "gold_field": self.gold_field}
        if self.demonstration_field is not None and need_demonstrations:
            settings["demonstration_field"] = self.demonstration_field
        for setting, field in settings.items():
            # Rows without the gold field may have the gold under `gold_fallback`.
            has_fallback = setting == "gold_field" and self.gold_fallback in fields
            if field not in fields and not has_fallback:
                yield Finding(
                    f"{setting} is {field!r}, and there is no such field in {source}",
                    setting,
                    did_you_mean(field, fields),
                )

    def fill_prompt(self, problem: str) -> str:
        """Returns the template with a problem in it."""
        # `str.format` would also interpret other braces in the template, such as those of LaTeX.
        return self.prompt.replace(PROBLEM_PLACEHOLDER, problem.strip())

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns the data set's own solution, after a newline that separates it from the prompt. The seed
        has no effect.

        Raises ValueError for a problem of the test split whose row has no solution.
        """
        if "solution" not in problem.data:
            raise ValueError(
                f"problem {problem.id!r} has no text under {self.demonstration_field!r} to learn from: name a"
                " field with solutions as demonstration_field"
            )
        text = str(problem.data["solution"]).strip()
        return "\n" + self.solution(text)  # `solution` converts the text to the form that is learned

    def solution(self, text: str) -> str:
        """Converts a solution of the data set to the form that a model should learn. By default it stays as
        it is."""
        return text

    @override
    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        gold_field, fallback = self.gold_field, self.gold_fallback
        if (
            fallback is not None
            and fault_of_text(row, gold_field) is not None
            and fault_of_text(row, fallback) is None
        ):
            gold_field = fallback
        # The keys under which the row must have a text, by what the text is.
        fields = {"problem": self.problem_field, "gold answer": gold_field}
        solution_field = self.demonstration_field or gold_field
        # Test problems are only graded, so their rows may lack a solution. Other rows must have one.
        is_test = id.startswith("test/")
        uses_solution = not is_test or fault_of_text(row, solution_field) is None
        if uses_solution and solution_field != gold_field:
            fields["demonstration"] = solution_field
        for content, key in fields.items():
            fault = fault_of_text(row, key)
            if fault is not None:
                raise BadRow(f"a row without a {content}: {fault}")
        data = {key: row[key] for key in self.keep if key in row}
        try:
            for key, value in data.items():
                check_plain(value, repr(key))
        except NoPlainValue as error:
            raise BadRow(f"{error}, and keep names it") from error
        if uses_solution:
            data["solution"] = text_of_value(row[solution_field])
        return Problem(
            id=id,
            prompt=self.fill_prompt(question_of(row[self.problem_field], self.problem_field)),
            gold=text_of_value(row[gold_field]),
            data=data,
        )


def fault_of_text(row: dict[str, Any], key: str) -> str | None:
    """Returns what is wrong with a row's text under `key`. Returns None if nothing is. Numbers count as
    text."""
    if key not in row:
        return f"it has no {key!r} (it has {', '.join(map(repr, sorted(row))) or 'nothing'})"
    value = row[key]
    if value is None:
        return f"its {key!r} is null"
    if isinstance(value, bytes):  # text in UTF-8 was decoded when the row was read
        return f"its {key!r} is {len(value)} bytes that aren't text in UTF-8"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return f"its {key!r} is {type(value).__name__}, not text"
    return f"its {key!r} is empty" if is_empty(value) else None


def question_of(value: Any, key: str) -> str:
    """Returns the text of a row's question.

    If the value is a chat written as text, with a single message of the user, the question is that message.
    Raises BadRow for any other chat, since a template for one text can't hold it.
    """
    text = text_of_value(value)
    try:
        messages = messages_in_text(text)
    except ValueError as error:
        raise BadRow(f"its {key!r} {error}") from error
    if messages is None:
        return text
    roles = [message.get("role") for message in messages]
    if roles != ["user"] or is_empty(messages[0].get("content")):
        raise BadRow(
            f"its {key!r} is a chat of the roles {', '.join(map(str, roles))}, and this task's questions are"
            " one text: use the task of type rows, which reads chats"
        )
    return str(messages[0]["content"])


@Task.register("questions")
@dataclass(frozen=True, kw_only=True)
class QuestionRows(JsonLines):
    """Questions with reference answers in your own files: JSON lines or Parquet, one question a row, for
    example ``{"question": "6 times 7?", "answer": "42"}``."""

    name: str | None = None
    """The data's name in the viewer, reports and model cards; null: ``questions``."""
    prompt: str = PROBLEM_PLACEHOLDER
    stop: tuple[str, ...] = ()


@Task.register("gsm8k")
@dataclass(frozen=True, kw_only=True)
class Gsm8k(JsonLines):
    """GSM8K, grade-school word problems (Cobbe et al., 2021, arXiv:2110.14168), in the data set's own files,
    with `question` and `answer` in each row.

    373 of the 7,473 training problems are held out for validation, as many as in the VinePPO paper, whose
    splits have 7,100, 373 and 1,319 problems. `split_seed` decides which problems are held out: they are not
    the paper's own 373. Demonstrations don't have the calculator notes ``<<1+1=2>>``.
    """

    train: tuple[str, ...] = ("data/gsm8k/train.jsonl",)
    test: tuple[str, ...] = ("data/gsm8k/test.jsonl",)
    validation_size: Annotated[int, Gt(0)] | None = 373
    grader: Grader = NUMERIC

    @override
    def solution(self, text: str) -> str:
        return _CALCULATION.sub("", text)
