"""Credits a log: each of its files is read, credited in one call of the library, and stored.

    for each file of the log that isn't credited yet:
        rows ──read_answers_of──> answers ──CreditAssigner──> values, advantages ──> the folder's iteration
                                                   │
                              every continuation ──┴──> the iteration's journal

A file is credited in one call, like an iteration of a run, because some credits read all answers of an
iteration. A killed command loses nothing that was sampled: the next start finds the credited files in the
folder, and the continuations of an unfinished file in the journal of its iteration.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from treetune.config.build import build
from treetune.contracts import Continuations
from treetune.credit.base import Credit
from treetune.credit.library.answers import GradedAnswer
from treetune.credit.library.assigner import CreditAssigner, CreditedTrees
from treetune.credit.library.checks import check_credit
from treetune.credit.library.limits import CreditCost
from treetune.credit.library.servers import is_address
from treetune.engine.base import Engine
from treetune.engine.requests import SamplingParams
from treetune.exceptions import CreditLimitReached
from treetune.tasks.graders.base import Grader
from treetune.tasks.steps import StepSplitter
from treetune.tree import answers_of
from treetune.view.crediting.folder import CreditedFile, CreditedFolder, FileJournal, time_and_size_of
from treetune.view.crediting.log import (
    LoggedAnswer,
    LoggedAnswers,
    LoggedFile,
    files_of_log,
    find_log,
    read_answers_of,
)
from treetune.view.crediting.tokens import LogTokenizer, open_tokenizer
from treetune.view.experiment import CREDITED_LOG, LOG_CREDITED, LOG_ROWS
from treetune.vocabulary import Episode, Grade, Message, Metrics, Problem, Segment, Trajectory

NO_CONTINUATION = "without a continuation of its prompt that could be graded"
"""A reason why an answer isn't credited, as a message has it after a count or "not credited:"."""


@dataclass(frozen=True, kw_only=True)
class CreditOfLog:
    """The settings of the command ``treetune credit``.

    Example: ``CreditOfLog(log=Path("rollouts"), output=Path("credited"), credit={"type": "rloo"},
    tokenizer="models/qwen")``.
    """

    log: Path
    """The log: a folder or a file."""
    output: Path
    """The folder for the credited answers."""
    credit: Mapping[str, Any]
    """The configuration of a credit."""
    engine: str | Mapping[str, Any] | None = None
    """A folder with the weights that sampled the answers, the address of a server with these weights, or the
    configuration of servers. None if the credit needs no engine."""
    grader: Mapping[str, Any] | None = None
    """The configuration of a grader of continuations."""
    tokenizer: str | None = None
    """The folder of the tokenizer; None for the engine's folder."""
    sampling: Mapping[str, Any] | None = None
    """The parameters with which the answers were sampled, as fields of `SamplingParams`."""
    steps: Mapping[str, Any] | None = None
    """The configuration of the rule that splits answers into steps; None for the library's default."""
    context_length: int | None = None
    """The most tokens of a prompt and its answer together; None for the longest prompt's tokens and as many
    as an answer may have."""
    grade_unfinished: bool = False
    """Whether continuations that were cut off are graded. If not, they earn 0."""
    seed: int = 0
    budget: int | None = None
    """The largest number of sampled tokens, over all starts."""
    deadline: float | None = None
    """The seconds after which this start of the command stops."""


def credit_log(
    settings: CreditOfLog,
    say: Callable[[str], None],
    *,
    engine: Engine | None = None,
    tokenizer: LogTokenizer | None = None,
) -> None:
    """Credits a log, and says for each file how many of its rows were credited.

    Args:
        settings: The settings of the command.
        say: Prints a line.
        engine: An engine to use instead of `settings.engine`; the caller closes it.
        tokenizer: A tokenizer to use instead of that of the settings.

    Raises:
        ValueError: A setting or the log is wrong, or no answer could be credited.
        CreditLimitReached: The budget is used up, or the deadline has passed. What was credited and sampled
            is stored.
        EngineError: The engine failed.
    """
    import treetune.parts  # noqa: F401  # a configuration may name any part

    deadline = None if settings.deadline is None else time.monotonic() + settings.deadline
    credit = build(Credit, dict(settings.credit), key=("credit",))
    _check_options(settings, credit, has_engine=engine is not None)
    # The parts are built before anything is written, so a wrong configuration leaves no folder behind.
    grader = None if settings.grader is None else build(Grader, dict(settings.grader), key=("grader",))
    steps = None if settings.steps is None else build(StepSplitter, dict(settings.steps), key=("steps",))
    sampling = None if settings.sampling is None else read_sampling(settings.sampling)
    log = find_log(settings.log)
    files = files_of_log(log)
    if tokenizer is None:
        tokenizer = _open_tokenizer_of_settings(settings, credit)
    folder = CreditedFolder(settings.output, log.path)
    with folder.hold_lock():
        folder.begin(_make_config(settings, sampling, files))
        if tokenizer is not None:
            folder.write_tokens(tokenizer.codec, tokenizer.vocabulary_size)
        results = folder.read_results(files)
        if results:
            folder.write_metrics(results)  # a killed command may lack the line of its last credited file
            say(f"{len(results)} of {len(files)} files were credited before")
        if len(results) < len(files):
            crediting = _Crediting(
                settings, folder, tokenizer, grader, steps, sampling, deadline, results, say
            )
            source = engine if engine is not None else settings.engine
            with crediting.open_assigner(credit, source) as assigner:
                for file in files:
                    if file.number not in results:
                        crediting.credit_file(file, assigner)  # adds its result to `results`
    if tokenizer is not None:
        for warning in tokenizer.warnings():
            say(f"note: {warning}")
    total = sum_results(list(results.values()))
    say(describe_result(str(settings.output), total))
    if not total.credited:
        raise ValueError(f"no row of {settings.log} could be credited: {_list_reasons(total.reasons)}")


def _check_options(settings: CreditOfLog, credit: Credit, *, has_engine: bool) -> None:
    """Raises ValueError for a credit that can't be assigned to a log, or that needs further options."""
    # First checks whether the credit can be assigned to a log if all options are given. Then finds which of
    # the options that it needs are missing.
    check_credit(credit, has_engine=True, engine_scores=True, has_grader=True, has_sampling=True)
    missing_options = []
    if credit.needs_engine and settings.engine is None and not has_engine:
        missing_options.append(
            "--engine (a folder with the weights that sampled the answers, or a server's address)"
        )
    # A credit that samples continuations of answers declares it in `gives`.
    samples_continuations = Continuations() in credit.gives
    if samples_continuations and settings.grader is None:
        missing_options.append("--grader (such as math, or reward.py:score for a function of yours)")
    if samples_continuations and settings.sampling is None:
        missing_options.append("--sampling (such as '{max_tokens: 512}', as the answers were sampled)")
    if missing_options:
        task_text = (
            "samples and grades continuations of answers" if samples_continuations else "scores given texts"
        )
        raise ValueError(
            f"the credit {credit.registered_name()!r} {task_text}: give {', '.join(missing_options)}"
        )


def _open_tokenizer_of_settings(settings: CreditOfLog, credit: Credit) -> LogTokenizer | None:
    """Returns the tokenizer of the settings, or else that of the engine's folder; None if there is neither.

    Raises ValueError if the engine's folder doesn't exist, or if the engine is a server and the credit needs
    it, because a tokenizer must then be given.
    """
    if settings.tokenizer is not None:
        return open_tokenizer(settings.tokenizer)
    if isinstance(settings.engine, str) and not is_address(settings.engine):
        if not Path(settings.engine).is_dir():
            raise ValueError(f"--engine is {settings.engine!r}: give a folder with a model, or an address")
        return open_tokenizer(settings.engine)
    if credit.needs_engine and settings.engine is not None:  # an address, or a configuration of servers
        raise ValueError(
            "--engine names a server: give --tokenizer too, the folder of the tokenizer of the server's model"
        )
    return None


def read_sampling(settings: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters of a configuration. ``stop`` may be a single text.

    Raises ValueError for an unknown name, and if `max_tokens` is missing.
    """
    names = ("max_tokens", "temperature", "top_p", "top_k", "stop")
    unknown = [name for name in settings if name not in names]
    if unknown or not isinstance(settings.get("max_tokens"), int):
        mistake = (
            f"has no key {unknown[0]!r}" if unknown else "needs max_tokens, the tokens of a whole answer"
        )
        raise ValueError(f"--sampling {mistake}: its keys are {', '.join(names)}")
    stop = settings.get("stop", ())
    stop_texts = (stop,) if isinstance(stop, str) else tuple(stop)
    return SamplingParams(**{**settings, "stop": stop_texts})


def _make_config(
    settings: CreditOfLog, sampling: SamplingParams | None, files: Sequence[LoggedFile]
) -> dict[str, Any]:
    """Returns the configuration of the credited folder. The viewer reads it like that of a run."""
    rollout = None
    if sampling is not None:
        # A journal identifies continuations by their sampling parameters, too. The viewer looks for them
        # under the parameters that it finds in the settings of the rollout.
        rollout = {"type": "single_turn", **asdict(sampling)}
        del rollout["stop_ids"]  # rollouts have no such setting: engines derive them from `stop`
    return {
        "type": CREDITED_LOG,
        "experiment_name": settings.output.name,
        "directory": str(settings.output.parent),
        "log": str(settings.log.resolve()),
        "engine": _resolve_folder(settings.engine),
        "tokenizer": _resolve_folder(settings.tokenizer),
        "credit": dict(settings.credit),
        "grader": None if settings.grader is None else dict(settings.grader),
        "steps": None if settings.steps is None else dict(settings.steps),
        "rollout": rollout,
        "context_length": settings.context_length,
        "grade_unfinished": settings.grade_unfinished,
        "seed": settings.seed,
        "iterations": len(files),
        "titles": {str(file.number): file.source.title for file in files},
    }


def _resolve_folder(source: str | Mapping[str, Any] | None) -> Any:
    """Returns the absolute path if `source` is a folder. An address or a configuration is returned as it
    is."""
    is_folder = isinstance(source, str) and Path(source).is_dir()
    return str(Path(str(source)).resolve()) if is_folder else source


@dataclass(frozen=True)
class _Crediting:
    """The objects that all files of a log are credited with, and the results so far."""

    settings: CreditOfLog
    folder: CreditedFolder
    tokenizer: LogTokenizer | None
    """None if the log has token ids."""
    grader: Grader | None
    steps: StepSplitter | None
    sampling: SamplingParams | None
    deadline: float | None
    """The time of `time.monotonic` at which the command stops; None for no deadline."""
    results: dict[int, CreditedFile]
    """The results so far, by the number of the file's iteration, counted from 1."""
    say: Callable[[str], None]
    """Prints a line."""

    def open_assigner(self, credit: Credit, engine: Any) -> CreditAssigner:
        """Returns the object that assigns credit to the answers of a file, which the caller closes.

        Args:
            credit: The credit.
            engine: An engine, a folder with a model, the address of a server, or a configuration; None for
                credit that needs no engine.
        """
        return CreditAssigner(
            credit,
            engine=engine,
            grader=self.grader,
            tokenizer=None if self.tokenizer is None else self.tokenizer.source,
            sampling=self.sampling,
            steps=self.steps,
            context_length=self.settings.context_length,
            # None makes the assigner grade continuations that were cut off like all others.
            unfinished_reward=None if self.settings.grade_unfinished else 0.0,
            seed=self.settings.seed,
        )

    def credit_file(self, file: LoggedFile, assigner: CreditAssigner) -> None:
        """Credits the answers of a file and stores them."""
        # These are noted before the file is read. If the file changes while it is read, they are then
        # outdated, and the next start credits the file again.
        time_and_size = time_and_size_of(file)
        max_tokens = None if self.sampling is None else self.sampling.max_tokens
        logged = read_answers_of(file.path, assigner.credit, self.tokenizer, max_tokens)
        assigned = None
        if logged.to_credit:
            assigned = self._assign(file, assigner, [item.answer for item in logged.to_credit])
        trajectories, episodes = _rows_of(logged, assigned)
        result = self._make_result(file, time_and_size, logged, assigned)
        codec = None if self.tokenizer is None else self.tokenizer.codec
        self.folder.write(file, result, trajectories, episodes, codec)
        self.results[file.number] = result
        self.folder.write_metrics(self.results)
        self.say(describe_result(file.source.title, result))

    def _assign(
        self, file: LoggedFile, assigner: CreditAssigner, answers: Sequence[GradedAnswer]
    ) -> CreditedTrees:
        """Assigns credit to a file's answers within the tokens and the time that are left.

        Raises CreditLimitReached if the tokens or the time are not enough.
        """
        budget = seconds_left = None
        if self.settings.budget is not None:
            # Samples that a killed command made for this file are read from the journal. The assigner counts
            # them towards the budget like new samples.
            budget = self.settings.budget - sum(result.cost.tokens for result in self.results.values())
            if budget < 1:
                raise self._make_limit_error(f"before {file.source.title}", "budget")
        if self.deadline is not None:
            seconds_left = self.deadline - time.monotonic()
            if seconds_left <= 0:
                raise self._make_limit_error(f"before {file.source.title}", "deadline")

        iteration = file.number - 1  # `file.number` counts from 1, and the assigner from 0

        def with_journal(engine: Engine) -> Engine:
            """Returns the engine with the journal of this file's iteration."""
            return FileJournal(engine, self.folder.folder_of(file), iteration)

        try:
            return assigner.assign(
                answers,
                iteration=iteration,
                budget=budget,
                deadline=seconds_left,
                wrap_engine=with_journal,
            )
        except CreditLimitReached as error:
            raise self._make_limit_error(f"in {file.source.title}", error.limit) from error

    def _make_limit_error(
        self, place_in_log: str, limit: Literal["budget", "deadline", "cancelled"]
    ) -> CreditLimitReached:
        """Returns the error for a limit that was reached at a place, such as "in 10.jsonl"."""
        if limit == "deadline":
            reason = f"the deadline of {self.settings.deadline:g} s has passed"
        else:  # the budget: the command cancels no call
            reason = f"the budget of {self.settings.budget} tokens is used up"
        return CreditLimitReached(
            f"{reason} {place_in_log}: {len(self.results)} files are credited in {self.settings.output}, and"
            " all continuations that were sampled are kept there. The same command with a higher limit"
            " continues",
            limit,
        )

    def _make_result(
        self,
        file: LoggedFile,
        time_and_size: list[int],
        logged: LoggedAnswers,
        assigned: CreditedTrees | None,
    ) -> CreditedFile:
        """Returns the result for a file. `assigned` is None if the file has no answer that can be
        credited."""
        reasons = logged.reasons.copy()
        credited = 0
        cost = CreditCost(samples=0, tokens=0, seconds=0.0)
        metrics: Metrics = {}
        if assigned is not None:
            credited = len(assigned.episodes)
            cost = assigned.cost
            metrics = assigned.answer_metrics | assigned.metrics
            left_out = len(logged.to_credit) - credited
            if left_out:  # credit leaves out an answer for this reason only
                reasons[NO_CONTINUATION] += left_out
        # The credit is the only work for a file, so its seconds are also the total.
        metrics |= {
            LOG_ROWS: float(logged.rows),
            LOG_CREDITED: float(credited),
            "seconds/credit": cost.seconds,
            "seconds/total": cost.seconds,
        }
        name = self.folder.name_of(file)
        return CreditedFile(name, time_and_size, logged.rows, credited, dict(reasons), cost, metrics)


def _rows_of(logged: LoggedAnswers, assigned: CreditedTrees | None) -> tuple[list[Trajectory], list[Episode]]:
    """Returns the answers of a file as trajectories, and the training rows of those with credit as episodes.

    Both are in the order of the log. Answers that aren't credited are among the trajectories, and the message
    of their grade has the reason.
    """
    credited_by_id = {}
    episode_by_id = {}
    if assigned is not None:
        credited_by_id = {trajectory.id: trajectory for trajectory in answers_of(assigned.trees)}
        episode_by_id = {episode.trajectory: episode for episode in assigned.episodes}
    problems: dict[str, Problem] = {}
    # The assigner got only the answers to credit, and numbered those of each group from 0, in the log's
    # order: "gsm8k/17#1" is the second one of the group gsm8k/17. The other answers of a group get the
    # numbers after these.
    next_credited: Counter[str] = Counter()
    credited_in_group = Counter(str(item.answer.group) for item in logged.to_credit)
    next_uncredited = credited_in_group.copy()
    trajectories, episodes = [], []
    for item in logged.answers:
        group = str(item.answer.group)
        problem = problems.setdefault(group, _problem_of(item))
        if item.reason:
            trajectories.append(_make_uncredited(item, problem, next_uncredited[group]))
            next_uncredited[group] += 1
            continue
        trajectory = credited_by_id[f"{group}#{next_credited[group]}"]
        next_credited[group] += 1
        episode = episode_by_id.get(trajectory.id)
        # There is only one reason for which credit makes no episode of an answer.
        message = None if episode is not None else f"not credited: {NO_CONTINUATION}"
        trajectories.append(
            replace(
                trajectory,
                problem=problem,
                text=item.line["text"],
                grade=_grade_of(item, message),
                numbers=_numbers_of(item),
            )
        )
        if episode is not None:
            episodes.append(replace(episode, text=item.line["text"]))
    return trajectories, episodes


def _problem_of(item: LoggedAnswer) -> Problem:
    """Returns the problem of an answer's group, with the messages of its prompt for the viewer."""
    answer, turns = item.answer, item.line["messages"]
    messages = tuple(Message(turn["role"], turn["content"]) for turn in turns)
    return Problem(str(answer.group), answer.prompt, answer.gold, answer.data, messages=messages)


def _grade_of(item: LoggedAnswer, message: str | None) -> Grade:
    """Returns the grade that an answer has in the log. `message` is put before the log's own message."""
    line = item.line
    messages = [text for text in (message, line["message"]) if text]
    return Grade(
        reward=item.answer.reward,
        outcome=line["outcome"],
        extracted=line["extracted"],
        message="; ".join(messages) or None,
    )


def _numbers_of(item: LoggedAnswer) -> dict[str, float]:
    """Returns the further numbers of an answer's row in the log, such as the advantage that TRL computed."""
    return {f"log/{name}": number for name, number in item.line["numbers"].items()}


def _make_uncredited(item: LoggedAnswer, problem: Problem, sample: int) -> Trajectory:
    """Returns an answer without credit, which the viewer shows with the reason."""
    answer, line = item.answer, item.line
    return Trajectory(
        problem=problem,
        sample=sample,
        prompt_ids=answer.prompt_ids,
        segments=(Segment(answer.response_ids, "sampled"),),
        finish_reason="stop" if answer.finished else "length",
        text=line["text"],
        grade=_grade_of(item, f"not credited: {item.reason}"),
        step_ends=(len(answer.response_ids),),  # the whole answer is one step
        numbers=_numbers_of(item),
    )


# Messages


def sum_results(results: Sequence[CreditedFile]) -> CreditedFile:
    """Returns the sum of the results of all files."""
    reasons: Counter[str] = Counter()
    for result in results:
        reasons.update(result.reasons)
    costs = [result.cost for result in results]
    cost = CreditCost(
        sum(cost.samples for cost in costs),
        sum(cost.tokens for cost in costs),
        sum(cost.seconds for cost in costs),
    )
    rows, credited = sum(result.rows for result in results), sum(result.credited for result in results)
    return CreditedFile(name="", stat=[], rows=rows, credited=credited, reasons=dict(reasons), cost=cost)


def describe_result(name: str, result: CreditedFile) -> str:
    """Returns a line such as "10.jsonl: 512 rows, 509 credited: 3 without a reward; 4,581 continuations with
    91,620 tokens, 31.0 s"."""
    line = f"{name}: {result.rows:,} rows, {result.credited:,} credited"
    if result.reasons:
        line += f": {_list_reasons(result.reasons)}"
    cost = result.cost
    if cost.samples:
        line += f"; {cost.samples:,} continuations with {cost.tokens:,} tokens"
    return f"{line}, {cost.seconds:.1f} s"


def _list_reasons(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "it has no rows"
