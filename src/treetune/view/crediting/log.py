"""Finds the files of another program's log, and reads the rows of a file as answers that can be credited.

a row of the file ──foreign readers──> prompt, answer, reward ──token ids──> `GradedAnswer`
      └── rows that can't be credited are counted with the reason
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treetune.credit.base import Credit
from treetune.credit.library.answers import GradedAnswer
from treetune.credit.library.checks import count_needed_answers, reads_logprobs
from treetune.view.crediting.tokens import LogTokenizer
from treetune.view.store.folders import Run, folders_below, is_experiment
from treetune.view.store.foreign import FileReport, MappedRow, holds_answers, read_mapped_rows
from treetune.view.store.foreign.layout import group_by_run, step_of
from treetune.view.store.foreign.line import UNFINISHED_REASON
from treetune.view.store.foreign.named_fields import FIELD_NAMES
from treetune.view.store.foreign.token_ids import StoredTokens, stored_tokens
from treetune.view.store.index import AnswerFile, find_sources
from treetune.vocabulary import TokenIds, token_array

NO_TOKENIZER = (
    "the log has no token ids: give --tokenizer, the folder of the tokenizer of the model that sampled the"
    " answers"
)

# Reasons why a row isn't credited

NO_REWARD = "without a reward"
ROLLOUT_FAILED = "failed"
NOT_READABLE = "not readable"


def find_log(path: Path) -> Run:
    """Returns the log in a folder, or in a single file.

    Raises:
        ValueError: There is nothing at `path`, or there are no answers or several logs, or the folder is an
            experiment of treetune.
    """
    if path.is_file():
        if not holds_answers(path):
            raise ValueError(
                f"{path} has no rows with a prompt, an answer and a reward: docs/evaluation.md lists the"
                " files that are read (Answers of other trainers)"
            )
        file = path.resolve()
        return Run(file.stem, file.parent, files=(file,))
    if not path.is_dir():
        raise ValueError(f"there is no file or folder {path} (looked for in {Path.cwd()})")
    root = path.resolve()
    files_by_folder: dict[Path, tuple[Path, ...]] = {}
    folders_with_entries = folders_below(
        root, is_whole=is_experiment, may_follow=lambda folder: not folder.is_symlink()
    )
    for folder, entries in folders_with_entries:
        if is_experiment(entries):
            if folder == root:
                raise ValueError(
                    f"{path} is an experiment of treetune, whose answers have credit already: `treetune"
                    " replay` assigns another one"
                )
            continue  # an experiment below the folder is not a part of the log
        files_by_folder[folder] = _files_with_answers(folder, entries)
    logs = {folder: files for folder, files in group_by_run(files_by_folder, root).items() if files}
    if not logs:
        raise ValueError(
            f"no file below {path} has rows with a prompt, an answer and a reward: docs/evaluation.md lists"
            " the files that are read (Answers of other trainers)"
        )
    if len(logs) > 1:
        listed = ", ".join(str(folder.relative_to(root)) for folder in sorted(logs))
        raise ValueError(f"there are {len(logs)} logs below {path}: name one of them ({listed})")
    [(folder, files)] = logs.items()
    return Run(folder.name, folder, files=files)


def _files_with_answers(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    """Returns the files with answers among the entries `names` of a folder, without hidden files."""
    paths = [folder / name for name in sorted(names) if not name.startswith(".")]
    return tuple(path for path in paths if path.is_file() and holds_answers(path))


@dataclass(frozen=True)
class LoggedFile:
    """A file of the log, and the number of its iteration in the credited folder, counted from 1.

    Example: `LoggedFile(10, AnswerFile(…, title="10.jsonl"))` for the answers of verl's step 10.
    """

    number: int
    source: AnswerFile

    @property
    def path(self) -> Path:
        return self.source.path


def files_of_log(log: Run) -> list[LoggedFile]:
    """Returns the files of a log in their order, each with the number of its iteration.

    If each file has a step of training in its path, and no two files have the same, a file's number is its
    step (or the step plus 1 if steps begin with 0). If not, files are numbered from 1 in their order.

    Raises ValueError if a file is a symbolic link to another folder: such links are not followed.
    """
    links: list[Path] = []
    files = find_sources(log, left_out=links)
    if links:
        listed = ", ".join(str(link) for link in links)
        raise ValueError(
            f"symbolic links to other folders are not followed: copy the files in place of {listed}"
        )
    steps = [step_of(file.path, log.path).number for file in files]
    numbers = [step for step in steps if step is not None]
    if len(set(numbers)) < len(files):  # a file has no step, or two files have the same
        return [LoggedFile(number, file) for number, file in enumerate(files, 1)]
    offset = 1 if min(numbers) == 0 else 0  # Iterations are counted from 1.
    return [LoggedFile(step + offset, file) for step, file in zip(numbers, files, strict=True)]


@dataclass(frozen=True)
class LoggedAnswer:
    """An answer of the log that has token ids."""

    answer: GradedAnswer
    line: Mapping[str, Any]
    """The row, in the form of a line of an evaluation's file."""
    reason: str = ""
    """The reason why the answer isn't credited; empty if it can be credited."""


@dataclass
class LoggedAnswers:
    """The answers of a file, and the reasons why rows of it aren't credited."""

    answers: list[LoggedAnswer] = field(default_factory=list)
    """The rows with token ids. Those that can't be credited have a reason."""
    rows: int = 0
    """The number of all rows of the file."""
    reasons: Counter[str] = field(default_factory=Counter)
    """The number of rows that aren't credited, by the reason: {"without a reward": 3}."""

    @property
    def to_credit(self) -> list[LoggedAnswer]:
        """The answers that can be credited."""
        return [logged for logged in self.answers if not logged.reason]


def read_answers_of(
    path: Path, credit: Credit, tokenizer: LogTokenizer | None, max_tokens: int | None
) -> LoggedAnswers:
    """Reads the answers of a file, and decides which of them the credit can be assigned to.

    Args:
        path: A file that a reader of `treetune.view.store.foreign` reads.
        credit: The credit. It decides whether answers need log-probs, and how many answers a group needs.
        tokenizer: Encodes rows without token ids; None if the log has token ids.
        max_tokens: The largest number of tokens of an answer; None if it is unknown.

    Raises:
        ValueError: The file can't be read, or needs a tokenizer.
    """
    report = FileReport()
    logged = LoggedAnswers()
    prompt_ids_by_group: dict[str, TokenIds] = {}  # of the groups so far
    for mapped in read_mapped_rows(path, report):
        try:
            logged_answer = _make_answer(mapped, tokenizer, max_tokens, prompt_ids_by_group)
        except _NotCredited as error:
            logged.reasons[str(error)] += 1
            continue
        logged.answers.append(logged_answer)
    logged.rows = report.rows
    unread = sum(map(len, report.unread.values()))
    if unread:
        logged.reasons[NOT_READABLE] += unread
    if reads_logprobs(credit):
        logged.answers = list(_rule_out_missing_logprobs(logged.answers))
    # Groups are checked last, because only answers that no other check has ruled out count in their group.
    logged.answers = list(_rule_out_small_groups(logged.answers, count_needed_answers(credit)))
    logged.reasons.update(answer.reason for answer in logged.answers if answer.reason)
    return logged


class _NotCredited(Exception):
    """A row can't become an answer. The message is the reason, by which such rows are counted."""


def _make_answer(
    mapped: MappedRow,
    tokenizer: LogTokenizer | None,
    max_tokens: int | None,
    prompt_ids_by_group: dict[str, TokenIds],
) -> LoggedAnswer:
    """Returns the answer of a row.

    Raises _NotCredited if the row can't become an answer, for example if its texts can't be encoded, and
    ValueError if it has no token ids and there is no tokenizer.
    """
    line = mapped.line
    if mapped.why_unmapped:
        raise _NotCredited(mapped.why_unmapped)
    was_cut_off = line["finish_reason"] == UNFINISHED_REASON
    tokens = stored_tokens(mapped.row.content)
    if tokens is None:
        # `changed` says why the text is not what the model wrote. Such a text would give other token ids.
        if line["changed"]:
            raise _NotCredited(f"{line['changed']} without token ids")
        if tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        try:
            prompt_ids = tokenizer.encode_prompt(line["prompt"], line["asked_messages"])
            response_ids = tokenizer.encode_answer(line["text"])
        except ValueError as error:
            raise _NotCredited(str(error)) from error
        # Most trainers don't store why an answer ended. An answer of at least `max_tokens` tokens was cut
        # off.
        was_cut_off = was_cut_off or (max_tokens is not None and len(response_ids) >= max_tokens)
        if not was_cut_off:
            response_ids = tokenizer.add_end(response_ids)
        tokens = StoredTokens(prompt_ids.tolist(), response_ids.tolist())  # lists, as those of a row
    if not tokens.prompt_ids:
        raise _NotCredited("an empty prompt")
    if not tokens.response_ids:
        raise _NotCredited("an empty answer")
    prompt_ids, response_ids = token_array(tokens.prompt_ids), token_array(tokens.response_ids)
    answer = GradedAnswer(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        reward=0.0 if line["reward"] is None else line["reward"],  # without a reward it gets no credit
        group=_group_of(line["problem"], prompt_ids, prompt_ids_by_group),
        logprobs=tokens.logprobs,
        sampled=tokens.sampled,
        finished=not was_cut_off,
        prompt=line["prompt"],
        gold=line["gold"] or "",
        data=_data_of(mapped.row.content),
    )
    return LoggedAnswer(answer, line, _reason_without_credit(line, tokens, max_tokens))


def _reason_without_credit(line: Mapping[str, Any], tokens: StoredTokens, max_tokens: int | None) -> str:
    """Returns the reason why an answer can't be credited; empty if its row has no such reason."""
    if line["outcome"] == "error":
        return ROLLOUT_FAILED
    if line["reward"] is None:
        return NO_REWARD
    if tokens.sampled is not None and not any(tokens.sampled):
        return "without a sampled token"
    if max_tokens is not None and len(tokens.response_ids) > max_tokens:
        return f"longer than max_tokens ({max_tokens})"
    return ""


def _group_of(problem: str, prompt_ids: TokenIds, prompt_ids_by_group: dict[str, TokenIds]) -> str:
    """Returns the name of an answer's group, which is the name of its problem.

    Answers to one problem may have different prompt ids, for example from different chat templates. Each
    further prompt of a problem is a separate group, such as ``gsm8k/17 prompt 2``.

    Args:
        problem: The name of the problem.
        prompt_ids: The prompt of the answer.
        prompt_ids_by_group: The prompt ids of each group so far. If the answer's group is new, it is added.
    """
    name, prompt_number = problem, 1
    while name in prompt_ids_by_group and prompt_ids_by_group[name].tolist() != prompt_ids.tolist():
        prompt_number += 1
        name = f"{problem} prompt {prompt_number}"
    prompt_ids_by_group[name] = prompt_ids
    return name


def _data_of(row: Any) -> dict[str, Any]:
    """Returns those fields of a row that name the problem's task (`FIELD_NAMES`), which some reward functions
    read."""
    if not isinstance(row, Mapping):
        return {}
    return {name: row[name] for name in FIELD_NAMES["task"] if isinstance(row.get(name), str)}


def _rule_out_missing_logprobs(answers: Sequence[LoggedAnswer]) -> Iterator[LoggedAnswer]:
    """Yields all answers, and gives those without log-probs a reason why they aren't credited."""
    for logged in answers:
        if not logged.reason and logged.answer.logprobs is None:
            yield replace(logged, reason="without log-probs of its tokens")
        else:
            yield logged


def _rule_out_small_groups(answers: Sequence[LoggedAnswer], needed: int) -> Iterator[LoggedAnswer]:
    """Yields all answers, and gives those in a group of fewer than `needed` answers a reason why they aren't
    credited. Only answers without another reason count in their group."""
    sizes = Counter(logged.answer.group for logged in answers if not logged.reason)
    for logged in answers:
        size = sizes[logged.answer.group]
        if not logged.reason and size < needed:
            yield replace(logged, reason=f"in a group of {size}, and the credit needs {needed} answers")
        else:
            yield logged
