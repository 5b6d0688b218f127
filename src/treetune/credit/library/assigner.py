"""Assigns credit to answers from elsewhere, with the same credits as a run.

    answers ──read_answers──> checked answers ──trees_of_answers──> trees ──Credit.assign──> episodes
                                                                              │
                                   engine (continuations), grader (rewards) ──┘
    episodes ──> an advantage for each token, in the order and in the type of the answers: `CreditedAnswers`

A run calls the same `Credit.assign`. The seeds of continuations derive from the call's seed and iteration and
from the answer's group and tokens, as in a run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from typing_extensions import override

from treetune.config.build import build
from treetune.config.registrable import Registrable
from treetune.contracts import Continuations
from treetune.credit.base import Credit
from treetune.credit.library.answers import (
    GradedAnswer,
    convert_like,
    read_answers,
    trees_of_answers,
)
from treetune.credit.library.checks import check_answers, check_credit
from treetune.credit.library.engines import SampleRequests, can_score, open_engine
from treetune.credit.library.grading import RewardFunction, open_grading
from treetune.credit.library.limits import CreditCost, CreditLimits, LimitedEngine
from treetune.credit.library.servers import CallersServers, open_servers, read_servers
from treetune.engine.base import Engine
from treetune.engine.requests import SamplingParams
from treetune.engine.settings import PlainVllmSettings
from treetune.rollouts.context import AnswerSettings, Log, RolloutContext
from treetune.rollouts.metrics import trajectory_metrics
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.pool import GraderPool
from treetune.tasks.splitter_task import SplitterTask
from treetune.tasks.steps import Lines, StepSplitter
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics, TextCodec, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger("treetune.credit")

Family = TypeVar("Family", bound=Registrable)

EngineSource: TypeAlias = (
    "Engine | PreTrainedModel | SampleRequests | PlainVllmSettings | Mapping[str, Any] | Sequence[str] | str"
    " | Path"
)
"""The ways to give the policy that continues answers; see `CreditAssigner`."""


@dataclass(frozen=True, eq=False)
class CreditedAnswers:
    """The advantages of a call's answers. All lists are in the order of the answers.

    A column has the type of the answer's `response_ids`: a list, a NumPy array (float64) or a PyTorch tensor.
    Example: two answers of 3 and 2 tokens, which earned 1 and 0, under RLOO::

        CreditedAnswers(advantages=[[1.0, 1.0, 1.0], [-1.0, -1.0]], ...)
    """

    advantages: list[Any]
    """For each answer a column with an advantage for each token."""
    trained: list[Any]
    """For each answer a mask of the tokens to train. Tokens of an environment are False. A token that several
    answers share (`GradedAnswer.fork`) is True in only one of them, unless the credit trains it in each (the
    credit ``tree`` with ``weight: 'each'``)."""
    step_ends: list[tuple[int, ...]]
    """For each answer the number of response tokens up to the end of each step."""
    values: list[tuple[float, ...] | None]
    """For each answer the value of the state before each step; None if the answer is left out, or if the
    credit estimates no values."""
    errors: list[tuple[float, ...] | None]
    """The standard errors of `values`."""
    left_out: list[int]
    """The numbers of answers without credit, because no continuation of their prompt could be graded. Their
    advantages are 0, and none of their tokens is trained."""
    cost: CreditCost
    """The samples that were drawn for the advantages, and the seconds that the call took."""
    metrics: Metrics = field(default_factory=dict)
    """The metrics of credit, as a run shows them, such as ``credit/value_std``."""

    def padded(self, length: int | None = None) -> Any:
        """Returns the advantages as one array or tensor, [answers, length], with 0 after each answer's end.

        Args:
            length: The number of columns; None: the number of tokens of the longest answer.
        """
        import numpy as np

        longest = max(len(row) for row in self.advantages)
        if length is not None and length < longest:
            raise ValueError(f"length is {length}, and the longest answer has {longest} tokens")
        padded = np.zeros((len(self.advantages), length or longest))
        for number, row in enumerate(self.advantages):
            padded[number, : len(row)] = row.cpu() if hasattr(row, "cpu") else row
        first_row = self.advantages[0]
        is_tensor = hasattr(first_row, "detach")  # rows that are lists or arrays become one array
        return convert_like(padded, first_row) if is_tensor else padded


@dataclass(frozen=True)
class CreditedTrees:
    """The credit of a call's answers as a run stores it: trees of answers, and training rows."""

    answers: list[GradedAnswer]
    """The answers as `read_answers` returned them, in the caller's order, with the names of their groups."""
    trees: list[Tree]
    """A tree for each group. Answer 3 of the group ``p`` is the trajectory ``p#3``."""
    episodes: list[Episode]
    """The training rows with their advantages, at most one for each answer. An answer without a row has no
    credit."""
    cost: CreditCost
    metrics: Metrics
    """The metrics of credit, such as ``credit/value_std``."""
    answer_metrics: Metrics
    """The metrics that a run records of answers, such as ``episodes/reward``."""


@dataclass(frozen=True, kw_only=True)
class _OutsideTask(SplitterTask):
    """Takes the place of a run's task: it splits answers into steps, and has no problems."""

    grader: Grader
    steps: StepSplitter


class CreditAssigner(AbstractContextManager["CreditAssigner"]):
    """Assigns credit in many calls, with the same engine and grader. They stay open until `close`::

        with CreditAssigner(credit={"type": "monte_carlo", "samples": 9}, engine=model, ...) as assigner:
            for step, answers in enumerate(batches):
                credited = assigner.advantages(answers, iteration=step)

    Calls from several threads wait for each other.
    """

    def __init__(
        self,
        credit: Credit | Mapping[str, Any] | str,
        *,
        engine: EngineSource | None = None,
        grader: Grader | GraderPool | Mapping[str, Any] | RewardFunction | None = None,
        tokenizer: PreTrainedTokenizerBase | TextCodec | str | Path | None = None,
        sampling: SamplingParams | None = None,
        steps: StepSplitter | Mapping[str, Any] | str | None = None,
        context_length: int | None = None,
        unfinished_reward: float | None = 0.0,
        seed: int = 0,
    ) -> None:
        """Args:
            credit: A credit; the configuration of a credit, such as ``{"type": "group", "std": False}``, also
                as a Jsonnet text; or the name of a credit, such as ``"rloo"``.
            engine: The policy that sampled the answers, for credit with continuations: the address of a vLLM
                server that has its weights (``"http://127.0.0.1:8000"``), a list of addresses, or
                ``{"type": "plain_vllm", "addresses": [...], "key_variable": ...}``; a folder with its
                weights; a transformers model of this process; a function that returns the completions of
                requests; or any `Engine`.
            grader: Grades continuations: a function ``(prompt, text) -> reward`` (or ``(prompt, text,
                problem)``, with the answer's `gold` and `data`), a `Grader`, the configuration of one, or a
                `GraderPool`, which stays open.
            tokenizer: Decodes answers, for graders and for steps. None: the tokenizer in the engine's folder,
                if the engine is given as a folder.
            sampling: The parameters with which the answers were sampled. `max_tokens` is the largest number
                of tokens of a whole answer.
            steps: The rule that splits answers into steps; None: each line is a step, with its newline.
            context_length: The largest number of tokens of prompt and answer together; None: the number of
                tokens of the longest prompt plus `max_tokens`.
            unfinished_reward: The reward of a continuation that was cut off; None: it is graded.
            seed: A number from which the seeds of continuations derive.

        Raises:
            ConfigError: A configuration is wrong.
            ValueError: The credit needs more than it is given, or works only in a run of treetune.
        """
        import treetune.parts  # noqa: F401  # a configuration may name any part

        self.credit = _read_part(Credit, credit, "credit")
        self._steps = Lines(newline="ends") if steps is None else _read_part(StepSplitter, steps, "steps")
        check_credit(
            self.credit,
            has_engine=engine is not None,
            engine_scores=can_score(engine),
            has_grader=grader is not None,
            has_sampling=sampling is not None,
        )
        servers = read_servers(engine)
        if tokenizer is None and servers is None and isinstance(engine, str | Path):
            tokenizer = engine
        self._codec, self._special_ids = read_tokenizer(tokenizer)
        if self._codec is None and self.credit.needs_engine:
            use_of_text = "scores reference answers, which it encodes"
            if Continuations() in self.credit.gives:
                use_of_text = "samples continuations, and the grader reads text"
            raise ValueError(f"the credit {use_of_text}: give the tokenizer")
        self._sampling, self._context_length = sampling, context_length
        self._unfinished_reward, self._seed = unfinished_reward, seed
        # A credit that samples and scores nothing uses neither engine nor grader, even if the user gave them.
        self._engine_source = (servers or engine) if self.credit.needs_engine else None
        self._engine: Engine | None = None
        """The engine that this object has opened, and that it closes. None before the first call, and if the
        user gave an `Engine` or servers."""
        self._grading = open_grading(grader if self.credit.needs_engine else None)
        self._owns_grading = self._grading is not grader  # a pool that the user gave is the user's to close
        self._lock = threading.Lock()

    def advantages(
        self,
        answers: Iterable[GradedAnswer | Mapping[str, Any]],
        *,
        iteration: int = 0,
        budget: int | None = None,
        deadline: float | None = None,
    ) -> CreditedAnswers:
        """Returns the advantages of answers.

        Args:
            answers: `GradedAnswer` objects, or dictionaries with the same keys. Give all answers to a problem
                in the same call.
            iteration: The number of the trainer's step. The seeds of continuations derive from it. With the
                same number, equal states get equal continuations.
            budget: The largest number of sampled tokens. Samples in flight may exceed it. None: no limit.
            deadline: The seconds after which the call fails, if it still waits or samples then. None: no
                limit.

        Raises:
            ValueError: An answer is wrong, or the credit can't be assigned to it.
            CreditLimitReached: The budget is used up, or the deadline has passed.
            RuntimeError: The grader raised an exception.
            EngineError: The engine failed.
        """
        return self._assign(answers, iteration, CreditLimits(budget, deadline))

    async def advantages_async(
        self,
        answers: Iterable[GradedAnswer | Mapping[str, Any]],
        *,
        iteration: int = 0,
        budget: int | None = None,
        deadline: float | None = None,
    ) -> CreditedAnswers:
        """Does the same as `advantages` in a thread, so that the caller's event loop continues.

        If the awaiting task is cancelled, sampling ends.
        """
        limits = CreditLimits(budget, deadline, can_be_cancelled=True)
        work = asyncio.ensure_future(asyncio.to_thread(self._assign, answers, iteration, limits))
        try:
            # Without the shield, a cancellation would cancel the future `work`, too, and the end of the
            # thread could not be awaited below.
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            limits.end("the call was cancelled", "cancelled")
            # The thread still uses the engine, which the caller may close next. So wait for its end.
            await asyncio.gather(work, return_exceptions=True)
            raise

    def assign(
        self,
        answers: Iterable[GradedAnswer | Mapping[str, Any]],
        *,
        iteration: int = 0,
        budget: int | None = None,
        deadline: float | None = None,
        wrap_engine: Callable[[Engine], Engine] | None = None,
    ) -> CreditedTrees:
        """Returns the credit of answers as a run stores it. Raises the same as `advantages`.

        Args:
            answers: As in `advantages`.
            iteration: As in `advantages`.
            budget: As in `advantages`.
            deadline: As in `advantages`.
            wrap_engine: Takes the engine, and returns another one that samples with it, such as one that
                also stores the samples in a file (`JournaledEngine`).
        """
        limits = CreditLimits(budget, deadline)
        return self._assign_trees(list(answers), iteration, limits, wrap_engine)

    def close(self) -> None:
        """Ends the grader's processes, and the engine if this object has opened it. May be called twice."""
        with ExitStack() as stack:  # closes the engine, even if closing the grader's processes fails
            if self._engine is not None:
                stack.callback(self._engine.close)
                self._engine = None
            if self._owns_grading:
                stack.callback(self._grading.close)

    @override
    def __exit__(self, *error: object) -> None:
        self.close()

    def _assign(
        self, answers: Iterable[GradedAnswer | Mapping[str, Any]], iteration: int, limits: CreditLimits
    ) -> CreditedAnswers:
        """Returns the advantages of answers, in columns of the types in which the caller gave the tokens."""
        answers = list(answers)
        assigned = self._assign_trees(answers, iteration, limits)
        original_ids = [_get_response_ids(answer) for answer in answers]
        return _collect_columns(assigned, original_ids)

    def _assign_trees(
        self,
        answers: Sequence[GradedAnswer | Mapping[str, Any]],
        iteration: int,
        limits: CreditLimits,
        wrap_engine: Callable[[Engine], Engine] | None = None,
    ) -> CreditedTrees:
        """Returns the trees of answers, and their training rows with advantages; see `assign`."""
        checked = read_answers(answers)
        sampling, context_length = self._sampling_and_context_length(checked)
        task = _OutsideTask(grader=self._grading.grader, steps=self._steps)
        has_text = self._codec is not None
        check_answers(self.credit, checked, task, sampling, context_length, has_text=has_text)
        with self._lock:
            limits.raise_if_over()  # the call may have been cancelled while it waited for the lock
            # The pool keeps grades by problem and text. Another call may have used the same names of groups
            # for other problems, so its grades must not be found.
            self._grading.forget_grades()
            with self._engine_of_call(checked, context_length, limits) as engine:
                if engine is not None:
                    wrapped = engine if wrap_engine is None else wrap_engine(engine)
                    engine = LimitedEngine(wrapped, limits)
                context = RolloutContext(
                    task=task,
                    engine=engine,
                    grader=self._grading,
                    codec=self._codec or _make_codec_without_text(),
                    seed=self._seed,
                    iteration=iteration,
                    settings=AnswerSettings(context_length, sampling, self._unfinished_reward),
                    log=Log(say=log.warning),  # warnings are shown even if the user hasn't set up logging
                )
                trees = trees_of_answers(context, checked, has_text=has_text)
                episodes, metrics = self.credit.assign(context, trees)
                answer_metrics = trajectory_metrics(context, answers_of(trees))
        return CreditedTrees(checked, trees, episodes, limits.cost, metrics, answer_metrics)

    def _sampling_and_context_length(self, answers: Sequence[GradedAnswer]) -> tuple[SamplingParams, int]:
        """Returns the sampling parameters of the answers, and the context length, with their defaults."""
        longest_answer = max(len(answer.response_ids) for answer in answers)
        longest_prompt = max(len(answer.prompt_ids) for answer in answers)
        # `sampling` may only be missing if nothing is sampled, so any parameters will do.
        sampling = self._sampling or SamplingParams(max_tokens=longest_answer)
        return sampling, self._context_length or longest_prompt + sampling.max_tokens

    @contextmanager
    def _engine_of_call(
        self, answers: Sequence[GradedAnswer], context_length: int, limits: CreditLimits
    ) -> Iterator[Engine | None]:
        """Yields the engine of a call; None for credit that samples nothing."""
        source = self._engine_source
        if source is None:
            yield None
            return
        if isinstance(source, Engine):
            yield source
            return
        assert self._codec is not None, "the constructor asks for a tokenizer"
        if isinstance(source, CallersServers):
            # Servers are connected anew in each call, since a trainer gives them new weights between calls.
            example_ids, seconds_left = answers[0].response_ids, limits.seconds_left()
            with open_servers(
                source, self._codec, self._special_ids, example_ids, context_length, seconds_left
            ) as engine:
                yield engine
            return
        if self._engine is None:
            self._engine = open_engine(source, self._codec, self._special_ids, self._seed)
        yield self._engine


def advantages(
    answers: Iterable[GradedAnswer | Mapping[str, Any]],
    *,
    credit: Credit | Mapping[str, Any] | str,
    iteration: int = 0,
    budget: int | None = None,
    deadline: float | None = None,
    **settings: Any,
) -> CreditedAnswers:
    """Returns an advantage for each token of answers that were sampled and graded elsewhere.

    Example: Dr. GRPO's advantages of two answers to a prompt::

        credited = advantages(
            [
                {"prompt_ids": [1, 2], "response_ids": [5, 6, 0], "reward": 1.0},
                {"prompt_ids": [1, 2], "response_ids": [7, 0], "reward": 0.0},
            ],
            credit={"type": "group", "std": False},
        )
        credited.advantages == [[0.5, 0.5, 0.5], [-0.5, -0.5]]

    Args:
        answers: As in `CreditAssigner.advantages`.
        credit: As in `CreditAssigner`.
        iteration: As in `CreditAssigner.advantages`.
        budget: As in `CreditAssigner.advantages`.
        deadline: As in `CreditAssigner.advantages`.
        settings: Further settings of `CreditAssigner`: `engine`, `grader`, `tokenizer`, …

    Raises:
        ValueError, RuntimeError: As `CreditAssigner` and its method `advantages`.
    """
    with CreditAssigner(credit, **settings) as assigner:
        return assigner.advantages(answers, iteration=iteration, budget=budget, deadline=deadline)


async def advantages_async(
    answers: Iterable[GradedAnswer | Mapping[str, Any]],
    *,
    credit: Credit | Mapping[str, Any] | str,
    iteration: int = 0,
    budget: int | None = None,
    deadline: float | None = None,
    **settings: Any,
) -> CreditedAnswers:
    """Does the same as `advantages` in a thread, so that the caller's event loop continues."""
    with CreditAssigner(credit, **settings) as assigner:
        return await assigner.advantages_async(answers, iteration=iteration, budget=budget, deadline=deadline)


# Reading the settings


def _read_part(family: type[Family], setting: Family | Mapping[str, Any] | str, name: str) -> Family:
    """Returns the part that a user gives as an object, as its configuration, or by its `type`."""
    if isinstance(setting, family):
        return setting
    if isinstance(setting, str):
        if "{" in setting:
            setting = _evaluate_jsonnet(setting, name)
        else:  # a name; `build` reports an unknown one
            setting = {"type": setting}
    if not isinstance(setting, Mapping):
        raise ValueError(
            f"{name} is of the type {type(setting).__name__}: give a {family.__name__}, or its configuration"
            f" such as {{'type': '{next(iter(family.parts_by_name()))}'}}"
        )
    return build(family, dict(setting), key=(name,))


def _evaluate_jsonnet(text: str, name: str) -> Any:
    """Returns the value of a Jsonnet text, such as ``{type: 'group', std: false}``."""
    from treetune.config.jsonnet import sum_of
    from treetune.config.layers import Layer

    # A configuration is the sum of its layers. Here, the text is the only layer.
    return sum_of([Layer(name, text)], variables={})


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a folder, or of a name on the hub. Raises ValueError if it can't be loaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the tokenizer {str(source)!r} can't be loaded ({error}): give a folder with a tokenizer"
        ) from error
    return tokenizer


def read_tokenizer(
    tokenizer: PreTrainedTokenizerBase | TextCodec | str | Path | None,
) -> tuple[TextCodec | None, Mapping[str, int]]:
    """Returns the codec of a tokenizer, and the ids of its special tokens by their texts. The codec is None
    if `tokenizer` is."""
    if tokenizer is None or isinstance(tokenizer, TextCodec):
        return tokenizer, {}  # a codec doesn't list its special tokens
    from treetune.models.control_tokens import special_tokens
    from treetune.models.tokenizer import codec_of

    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer)
    if not hasattr(tokenizer, "eos_token_id"):
        raise ValueError(
            f"tokenizer is of the type {type(tokenizer).__name__}: give one of transformers, or a folder"
            " with one"
        )
    return codec_of(tokenizer), special_tokens(tokenizer)


def _make_codec_without_text() -> TextCodec:
    """Returns a codec that can't decode, for a call without a tokenizer."""

    def decode(token_ids: Sequence[int] | TokenIds) -> str:
        raise ValueError("the credit reads the text of answers: give the tokenizer")

    def encode(text: str) -> Sequence[int]:
        # Only a credit that uses an engine encodes texts. Without a tokenizer, `CreditAssigner` refuses it.
        raise AssertionError("credit without an engine encodes nothing")

    return TextCodec(encode=encode, decode=decode, eos_id=0)  # any id would do, since no answer is sampled


# The result


def _get_response_ids(answer: GradedAnswer | Mapping[str, Any]) -> Any:
    return answer["response_ids"] if isinstance(answer, Mapping) else answer.response_ids


def _collect_columns(assigned: CreditedTrees, original_ids: Sequence[Any]) -> CreditedAnswers:
    """Returns the advantages in the order of the answers.

    Args:
        assigned: The answers and their training rows.
        original_ids: The `response_ids` of each answer as the caller gave them. The columns get their type.

    Raises:
        RuntimeError: An advantage is infinite or not a number.
    """
    import numpy as np

    episode_by_id = {episode.trajectory: episode for episode in assigned.episodes}
    # For each group, the number of its answers so far. No group is None here, although the type allows it:
    # `read_answers` has given every answer a group.
    answers_so_far: Counter[str | None] = Counter()
    credited = CreditedAnswers(
        advantages=[],
        trained=[],
        step_ends=[],
        values=[],
        errors=[],
        left_out=[],
        cost=assigned.cost,
        metrics=assigned.metrics,
    )
    for number, (answer, response_ids) in enumerate(zip(assigned.answers, original_ids, strict=True)):
        # `Episode.trajectory` is the answer's id: its group, and its number in it.
        episode = episode_by_id.get(f"{answer.group}#{answers_so_far[answer.group]}")
        answers_so_far[answer.group] += 1
        # _T: one entry for each token.
        if episode is None:  # the credit has left the answer out
            tokens = len(answer.response_ids)
            credited.left_out.append(number)
            credited.advantages.append(convert_like(np.zeros(tokens), response_ids))
            credited.trained.append(convert_like(np.zeros(tokens, np.bool_), response_ids))
            credited.step_ends.append((tokens,))
            credited.values.append(None)
            credited.errors.append(None)
            continue
        advantages_T = episode.advantages
        assert advantages_T is not None, "`check_credit` has refused other credits"
        if not np.isfinite(advantages_T).all():
            raise RuntimeError(f"the credit gave answer {number} an advantage that isn't finite")
        credited.advantages.append(convert_like(advantages_T, response_ids))
        credited.trained.append(convert_like(episode.trained, response_ids))
        credited.step_ends.append(episode.step_ends)
        credited.values.append(episode.step_values)
        credited.errors.append(episode.step_errors)
    return credited
