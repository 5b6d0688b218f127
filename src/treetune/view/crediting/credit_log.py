"""Credits a log: each of its files is read, credited in one call of the library, and stored.

    for each file of the log that isn't credited yet:
        rows ──read_answers_of──> answers ──CreditAssigner──> values, advantages ──> the folder's iteration
                                                   │
                              every continuation ──┴──> the iteration's journal

One file is one call, as one iteration of a run is, since some credits read all answers of an iteration. A
killed command loses nothing that was sampled: the next start finds credited files in the folder, and the
continuations of the file that it was at in the journal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from treetune.config.build import build
from treetune.credit.base import Credit
from treetune.credit.library.answers import GradedAnswer
from treetune.credit.library.assigner import AssignedCredit, CreditAssigner
from treetune.credit.library.checks import check_credit
from treetune.credit.library.engines import open_engine
from treetune.credit.library.limits import CreditCost
from treetune.engine.base import Engine
from treetune.engine.requests import SamplingParams
from treetune.exceptions import CreditLimitReached
from treetune.tasks.graders.base import Grader
from treetune.tasks.steps import StepSplitter
from treetune.tree import answers_of
from treetune.view.crediting.folder import CreditedFile, CreditedFolder, JournalOfFiles, mark_of
from treetune.view.crediting.log import (
    LogFile,
    LoggedAnswer,
    LoggedAnswers,
    files_of_log,
    find_log,
    read_answers_of,
)
from treetune.view.crediting.tokens import LogTokenizer, open_tokenizer
from treetune.view.experiment import CREDITED_LOG
from treetune.vocabulary import Episode, Grade, Message, Metrics, Problem, Segment, Trajectory

NO_CONTINUATION = "without a continuation of its prompt that could be graded"


@dataclass(frozen=True, kw_only=True)
class CreditOfLog:
    """The settings of the command. Example: ``CreditOfLog(log=Path("rollouts"), output=Path("credited"),
    credit={"type": "rloo"}, tokenizer="models/qwen")``."""

    log: Path
    output: Path
    credit: Mapping[str, Any]
    """The configuration of a credit."""
    engine: str | None = None
    """A folder with the weights that sampled the answers, or the address of a server that has them."""
    grader: Mapping[str, Any] | None = None
    """The configuration of a grader of continuations."""
    tokenizer: str | None = None
    """The folder of the tokenizer; None: the engine's folder."""
    sampling: Mapping[str, Any] | None = None
    """The fields of `SamplingParams`, as the answers were sampled."""
    steps: Mapping[str, Any] | None = None
    """The configuration of the rule that splits answers into steps; None: the library's default."""
    context_length: int | None = None
    grade_unfinished: bool = False
    """Whether continuations that were cut off are graded; otherwise they earn 0."""
    seed: int = 0
    budget: int | None = None
    """The largest number of sampled tokens, over all starts."""
    deadline: float | None = None
    """Seconds until this start is given up."""


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
        engine: Takes the place of `settings.engine`; the caller closes it.
        tokenizer: Takes the place of `settings.tokenizer`.

    Raises:
        ValueError: A setting or the log is wrong, or no answer could be credited.
        CreditLimitReached: The budget is used up, or the deadline has passed. What was credited and sampled
            is stored.
        EngineError: The engine failed.
    """
    import treetune.parts  # noqa: F401  # a configuration may name any part

    deadline = None if settings.deadline is None else time.monotonic() + settings.deadline
    credit = build(Credit, dict(settings.credit), key=("credit",))
    _check(settings, credit, has_engine=engine is not None)
    # Built before anything is written, so that a wrong configuration leaves no folder.
    grader = None if settings.grader is None else build(Grader, dict(settings.grader), key=("grader",))
    steps = None if settings.steps is None else build(StepSplitter, dict(settings.steps), key=("steps",))
    sampling = None if settings.sampling is None else read_sampling(settings.sampling)
    log = find_log(settings.log)
    files = files_of_log(log)
    if tokenizer is None and (source := settings.tokenizer or settings.engine) is not None:
        tokenizer = open_tokenizer(source)
    folder = CreditedFolder(settings.output, log.path)
    with folder.locked():
        folder.begin(_config(settings, sampling, files))
        if tokenizer is not None:
            folder.write_tokens(tokenizer.codec, tokenizer.vocabulary_size)
        results = folder.results_of(files)
        if results:
            say(f"{len(results)} of {len(files)} files were credited before")
        if len(results) < len(files):
            crediting = _Crediting(
                settings, folder, tokenizer, grader, steps, sampling, deadline, results, say
            )
            with ExitStack() as stack:
                journal = None
                if credit.needs_engine:
                    journal = stack.enter_context(_open_journal(settings, engine, tokenizer))
                assigner = stack.enter_context(crediting.open_assigner(credit, journal))
                for file in files:
                    if file.number not in results:
                        crediting.credit_file(file, assigner, journal)
    for warning in [] if tokenizer is None else tokenizer.warnings():
        say(f"note: {warning}")
    total = total_of(list(results.values()))
    say(describe(str(settings.output), total))
    if not total.credited:
        raise ValueError(f"no row of {settings.log} could be credited: {_list_reasons(total.reasons)}")


def _check(settings: CreditOfLog, credit: Credit, *, has_engine: bool) -> None:
    """Raises ValueError for a credit that can't be assigned to a log, or that needs further options."""
    check_credit(credit, has_engine=True, has_grader=True, has_sampling=True)
    if not credit.needs_engine:
        return
    missing = []
    if settings.engine is None and not has_engine:
        missing.append("--engine (a folder with the weights that sampled the answers, or a server's address)")
    if settings.grader is None:
        missing.append("--grader (such as math, or reward.py:score for a function of yours)")
    if settings.sampling is None:
        missing.append("--sampling (such as '{max_tokens: 512}', as the answers were sampled)")
    if missing:
        raise ValueError(
            f"the credit {credit.registered_name()!r} samples continuations of the answers and grades them:"
            f" give {', '.join(missing)}"
        )


def read_sampling(settings: Mapping[str, Any]) -> SamplingParams:
    """Returns sampling parameters. Raises ValueError for an unknown name, and without `max_tokens`."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "stop")
    unknown = [name for name in settings if name not in names]
    if unknown or not isinstance(settings.get("max_tokens"), int):
        what = f"has no key {unknown[0]!r}" if unknown else "needs max_tokens, the tokens of a whole answer"
        raise ValueError(f"--sampling {what}: its keys are {', '.join(names)}")
    stop = settings.get("stop", ())
    return SamplingParams(**{**settings, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})


def _config(
    settings: CreditOfLog, sampling: SamplingParams | None, files: Sequence[LogFile]
) -> dict[str, Any]:
    """Returns the configuration of the folder, which the viewer reads."""
    rollout = None
    if sampling is not None:
        # The viewer finds the continuations of a state by the settings of the rollout.
        rollout = {"type": "single_turn", **asdict(sampling)}
        del rollout["stop_ids"]
    return {
        "type": CREDITED_LOG,
        "experiment_name": settings.output.name,
        "directory": str(settings.output.parent),
        "log": str(settings.log.resolve()),
        "engine": _resolve(settings.engine),
        "tokenizer": _resolve(settings.tokenizer),
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


def _resolve(source: str | None) -> str | None:
    """Returns the absolute path of a folder; an address stays as it is."""
    return str(Path(source).resolve()) if source is not None and Path(source).is_dir() else source


def _open_journal(
    settings: CreditOfLog, engine: Engine | None, tokenizer: LogTokenizer | None
) -> AbstractContextManager[JournalOfFiles]:
    """Opens the engine, whose samples are stored. The context closes it, unless the caller gave it."""
    if engine is not None:
        return nullcontext(JournalOfFiles(engine))
    assert settings.engine is not None and tokenizer is not None, "`_check` asks for an engine"
    return closing(JournalOfFiles(open_engine(settings.engine, tokenizer.codec, settings.seed)))


@dataclass(frozen=True)
class _Crediting:
    """What the files of a log have in common while they are credited."""

    settings: CreditOfLog
    folder: CreditedFolder
    tokenizer: LogTokenizer | None
    """None if the log has token ids."""
    grader: Grader | None
    steps: StepSplitter | None
    sampling: SamplingParams | None
    deadline: float | None
    """The time by `time.monotonic` at which the command is given up."""
    results: dict[int, CreditedFile]
    """The results so far, by the number of the file's iteration."""
    say: Callable[[str], None]

    def open_assigner(self, credit: Credit, journal: JournalOfFiles | None) -> CreditAssigner:
        """Returns the library's assigner, which the caller closes."""
        return CreditAssigner(
            credit,
            engine=journal,
            grader=self.grader,
            tokenizer=None if self.tokenizer is None else self.tokenizer.codec,
            sampling=self.sampling,
            steps=self.steps,
            context_length=self.settings.context_length,
            unfinished_reward=None if self.settings.grade_unfinished else 0.0,
            seed=self.settings.seed,
        )

    def credit_file(self, file: LogFile, assigner: CreditAssigner, journal: JournalOfFiles | None) -> None:
        """Credits the answers of a file and stores them."""
        mark = mark_of(file)  # before it is read, so that a change during the reading is noticed
        max_tokens = None if self.sampling is None else self.sampling.max_tokens
        logged = read_answers_of(file.path, assigner.credit, self.tokenizer, max_tokens)
        assigned = None
        if logged.to_credit:
            if journal is not None:
                journal.begin(self.folder.iteration(file), file.number - 1)
            assigned = self._assign(file, assigner, [item.answer for item in logged.to_credit])
        trajectories, episodes = _rows_of(logged, assigned)
        result = self._result(file, mark, logged, assigned)
        codec = None if self.tokenizer is None else self.tokenizer.codec
        self.folder.write(file, result, trajectories, episodes, codec)
        self.results[file.number] = result
        self.folder.write_metrics(self.results)
        self.say(describe(file.source.title, result))

    def _assign(
        self, file: LogFile, assigner: CreditAssigner, answers: Sequence[GradedAnswer]
    ) -> AssignedCredit:
        budget = seconds_left = None
        if self.settings.budget is not None:
            # Samples of a file that a killed command began are in its journal, and are counted again.
            budget = self.settings.budget - sum(result.cost.tokens for result in self.results.values())
            if budget < 1:
                raise self._limit_reached(f"before {file.source.title}", is_budget=True)
        if self.deadline is not None:
            seconds_left = self.deadline - time.monotonic()
            if seconds_left <= 0:
                raise self._limit_reached(f"before {file.source.title}", is_budget=False)
        try:
            return assigner.assign(answers, iteration=file.number - 1, budget=budget, deadline=seconds_left)
        except CreditLimitReached as error:
            is_budget = self.deadline is None or time.monotonic() < self.deadline
            raise self._limit_reached(f"in {file.source.title}", is_budget=is_budget) from error

    def _limit_reached(self, where: str, *, is_budget: bool) -> CreditLimitReached:
        what = f"the budget of {self.settings.budget} tokens is used up"
        if not is_budget:
            what = f"the deadline of {self.settings.deadline:g} s has passed"
        return CreditLimitReached(
            f"{what} {where}: {len(self.results)} files are credited in {self.settings.output}, and all"
            " continuations that were sampled are kept there. The same command with a higher limit continues"
        )

    def _result(
        self, file: LogFile, mark: list[int], logged: LoggedAnswers, assigned: AssignedCredit | None
    ) -> CreditedFile:
        reasons = logged.reasons.copy()
        credited = 0
        cost = CreditCost(samples=0, tokens=0, seconds=0.0)
        metrics: Metrics = {}
        if assigned is not None:
            credited = len(assigned.episodes)
            cost = assigned.cost
            metrics = assigned.answer_metrics | assigned.metrics
            if left_out := len(logged.to_credit) - credited:
                reasons[NO_CONTINUATION] += left_out
        metrics |= {"seconds/credit": cost.seconds, "seconds/total": cost.seconds}
        name = self.folder.name_of(file)
        return CreditedFile(name, mark, logged.rows, credited, dict(reasons), cost, metrics)


def _rows_of(
    logged: LoggedAnswers, assigned: AssignedCredit | None
) -> tuple[list[Trajectory], list[Episode]]:
    """Returns the answers of a file and their training rows, in the order of the log.

    Answers that aren't credited are among the trajectories, with the reason as the message of their grade.
    """
    credited_by_id = {}
    episode_by_id = {}
    if assigned is not None:
        credited_by_id = {trajectory.id: trajectory for trajectory in answers_of(assigned.trees)}
        episode_by_id = {episode.trajectory: episode for episode in assigned.episodes}
    problems: dict[str, Problem] = {}
    credited_counts: Counter[str] = Counter()
    further_counts = Counter(str(item.answer.group) for item in logged.to_credit)
    trajectories, episodes = [], []
    for item in logged.answers:
        group = str(item.answer.group)
        problem = problems.setdefault(group, _problem_of(item))
        if item.why_not:
            # Numbers after those of the group's credited answers.
            trajectories.append(_uncredited(item, problem, further_counts[group]))
            further_counts[group] += 1
            continue
        trajectory = credited_by_id[f"{group}#{credited_counts[group]}"]
        credited_counts[group] += 1
        episode = episode_by_id.get(trajectory.id)
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
    line = item.line
    messages = [text for text in (message, line["message"]) if text]
    return Grade(
        reward=item.answer.reward,
        outcome=line["outcome"],
        extracted=line["extracted"],
        message="; ".join(messages) or None,
    )


def _numbers_of(item: LoggedAnswer) -> dict[str, float]:
    """Returns the further numbers of the row, such as the advantage that TRL computed."""
    return {f"log/{name}": number for name, number in item.line["numbers"].items()}


def _uncredited(item: LoggedAnswer, problem: Problem, sample: int) -> Trajectory:
    """Returns an answer without credit, which the viewer shows with the reason."""
    answer, line = item.answer, item.line
    return Trajectory(
        problem=problem,
        sample=sample,
        prompt_ids=answer.prompt_ids,
        segments=(Segment(answer.response_ids, "sampled"),),
        finish_reason="stop" if answer.finished else "length",
        text=line["text"],
        grade=_grade_of(item, f"not credited: {item.why_not}"),
        step_ends=(len(answer.response_ids),),
        numbers=_numbers_of(item),
    )


# Messages


def total_of(results: Sequence[CreditedFile]) -> CreditedFile:
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
    return CreditedFile("", [], rows, credited, dict(reasons), cost)


def describe(name: str, result: CreditedFile) -> str:
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
