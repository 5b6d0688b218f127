"""Defines the configurations of data pipelines, which read rows and write a folder with other rows."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import override

from treetune.cluster.jobs import Jobs, LocalJobs
from treetune.config.imports import function_at
from treetune.config.registrable import Registrable
from treetune.contracts import Experiment, Finding
from treetune.data.difficulty.answering import Policy
from treetune.data.rules.base import Rule
from treetune.data.templates import check_text, check_value, evaluate_expression, render_text
from treetune.domains.domain_rows import DomainRow, domain_of, domain_row, normalise_row
from treetune.domains.endpoints.settings import EndpointSettings, Prices, check_extra
from treetune.domains.routed_rows import RoutedRows
from treetune.engine.requests import SamplingParams
from treetune.exceptions import MissingField
from treetune.findings import UNKNOWN
from treetune.rollouts.answers import check_sampling
from treetune.seeds import derive_seed
from treetune.tasks.base import Split, Task
from treetune.tasks.rows import RowsTask
from treetune.tasks.sources import Source
from treetune.threads.format import MOST_THREADS


class DataPipeline(Registrable, root="a data pipeline"):
    """The root of a pipeline's configuration."""

    def __getattr__(self, name: str) -> Any:
        """Returns `UNKNOWN` for an attribute that experiments have and this pipeline lacks.

        Models, graders and engines are parts of experiments as well. When they check themselves, they look at
        other parts of the experiment.
        """
        if name in Experiment.__annotations__:
            return UNKNOWN
        raise AttributeError(f"{type(self).__name__} has no {name}")


@DataPipeline.register("filter_data")
@dataclass(frozen=True, kw_only=True)
class FilterData(DataPipeline):
    """Applies rules to rows of the schema, one after the other, and reports how many rows each removes."""

    rules: Annotated[tuple[Rule, ...], MinLen(1)]
    """The rules, in their order."""
    seed: int = 42
    """The seed of random choices, such as the choice of the rows that a quota keeps."""


PipelineStep = Literal[
    "steps", "substeps", "groups", "subgroups", "ranges", "check", "references", "outlines"
]

_CHANGES_NO_ANSWER = frozenset(
    {"base_url", "api_key_variable", "concurrency", "timeout", "retries", "backoff", "give_up_after"}
)
_VERSION_OF_THREADS = 1
"""The version of the questions, and of the code that uses their answers. If it changes, all solutions are
worked on anew."""


@DataPipeline.register("make_threads")
@dataclass(frozen=True, kw_only=True)
class MakeThreads(DataPipeline):
    """Finds independent parts of a solution, cuts it there into blocks of threads, takes references between
    siblings out, writes an outline for each thread, and keeps what is of the right form. The steps are
    ThreadWeaver's; the questions are this project's own.

    A row keeps its own solution and gets the parallel one in a further field, so that a task can use either
    as its demonstration.
    """

    endpoint: EndpointSettings
    """The model's address."""
    prices: Prices | None = None
    """Dollars per million tokens."""
    budget: Annotated[float, Gt(0)] | None = None
    """The most dollars that the requests for the output's folder may cost, earlier runs included: no request
    is sent that could cost more than is left."""
    problem_field: Annotated[str, MinLen(1)] = "problem"
    """The field of a row's problem."""
    solution_field: Annotated[str, MinLen(1)] = "solution"
    """The field of a row's solution."""
    output_field: Annotated[str, MinLen(1)] = "parallel_solution"
    """The field of the parallel solution."""
    min_saved_characters: Annotated[int, Gt(0)] = 200
    """The least characters of a block that need not be waited for (all threads but the longest)."""
    max_threads: Annotated[int, Ge(2), Le(MOST_THREADS)] = MOST_THREADS
    """The most threads of a block. Each thread is compared with every earlier one, in a separate request."""
    self_check: bool = True
    """Whether the model checks each thread once more. A block with a thread that fails this check stays
    sequential."""
    repairs: Annotated[int, Ge(0)] = 1
    """How often an answer that can't be read is sent back to the model with the reason."""
    extra_for: Mapping[PipelineStep, Mapping[str, Any]] = field(default_factory=dict)
    """Additions to the requests of a step, by the step's name, in addition to `endpoint.extra`."""

    def __post_init__(self) -> None:
        if self.budget is not None and self.prices is None:
            raise ValueError("budget needs prices: {input: …, output: …}, dollars per million tokens")
        if self.output_field in (self.problem_field, self.solution_field):
            raise ValueError(
                f"output_field is {self.output_field!r}, which the input has: name a field of its own, so"
                " that rows keep their sequential solution"
            )
        for step, extra in self.extra_for.items():
            if step not in get_args(PipelineStep):
                raise ValueError(
                    f"extra_for has no step {step!r}: the steps are {', '.join(get_args(PipelineStep))}"
                )
            check_extra(f"extra_for.{step}", extra)

    def identity(self) -> dict[str, Any]:
        """Returns the settings on which the result for a solution depends. If they change, the solution is
        converted again."""
        settings = dataclasses.asdict(self)
        endpoint = {
            key: value for key, value in settings.pop("endpoint").items() if key not in _CHANGES_NO_ANSWER
        }
        for name in ("prices", "budget", "output_field"):
            del settings[name]
        return {"version": _VERSION_OF_THREADS, "endpoint": endpoint, **settings}


@dataclass(frozen=True, kw_only=True)
class DifficultySampling:
    """The sampling of answers: `samples` of at most `max_tokens` to each row. The defaults are those of
    Guru's estimates."""

    samples: Annotated[int, Gt(0)] = 16
    """Answers to each row."""
    max_tokens: Annotated[int, Gt(0)] = 4096
    """The most tokens of an answer."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """The temperature of sampling."""
    top_p: Annotated[float, Gt(0), Le(1)] = 0.9
    """Samples among the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Ge(-1)] = 100
    """The number of likeliest tokens to sample among; -1: all."""
    stop: tuple[Annotated[str, MinLen(1)], ...] = ()
    """Strings that end an answer."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.samples)

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the answers."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
        )


@DataPipeline.register("estimate_difficulty")
@dataclass(frozen=True, kw_only=True)
class EstimateDifficulty(DataPipeline):
    """Asks `policy` for `answers` to each row of the schema, has them graded as `task` (of type ``rows``)
    says, and writes down how many are right: rates.parquet, the rows with their rate in a column called
    `column`, a histogram, a summary.

    The rows are cut into `shards`. For each shard there is a job, which is started, watched and restarted as
    `jobs` says. An answer's seed comes from `seed`, the row's content and the answer's number, so neither the
    number of shards, nor jobs that died, nor the order of answers changes a result. Each answer is stored at
    once, and is not asked for again.
    """

    task: Task
    policy: Policy
    answers: DifficultySampling = field(default_factory=DifficultySampling)
    shards: Annotated[int, Gt(0)] = 1
    jobs: Jobs = field(default_factory=LocalJobs)
    column: Annotated[str, MinLen(1)] = "pass_rate"
    """The column for the rates. `filter_data` reads the strong model's rates from ``low_pass_rate``, and the
    weak model's from ``high_pass_rate``."""
    seed: int = 42
    grader_workers: Annotated[int, Gt(0)] = 2
    """Processes of a shard that grade."""
    grader_deadline: Annotated[float, Gt(0)] = 10.0
    """Seconds for the grade of one answer. After that, the answer's outcome is ``timeout``."""

    @property
    def model(self) -> Any:
        """The policy's model, which the engine looks at when it checks itself."""
        return getattr(self.policy, "model", UNKNOWN)

    @property
    def context_length(self) -> Any:
        return getattr(self.policy, "context_length", UNKNOWN)

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        yield from self._check_task()
        yield from self.policy.check_answers(self.answers.params)

    def _check_task(self) -> Iterator[Finding]:
        """Yields a finding for a task that doesn't read rows, and for one whose `stop` has strings that
        `answers.stop` lacks."""
        if self.task is not UNKNOWN and not isinstance(self.task, RowsTask):
            yield Finding(
                "the task doesn't read rows, and what is estimated are rows",
                "task",
                "take {type: 'rows', routes: {…}}, which says how each source is graded",
            )
        if isinstance(self.task, RoutedRows) and not set(self.task.stop) <= set(self.answers.stop):
            yield Finding(
                f"the task's stop {list(self.task.stop)} ends no answer, and answers.stop is"
                f" {list(self.answers.stop)}: name the strings in answers.stop, or leave the task's out",
                "task.stop",
                level="warning",
            )


_SOURCE = re.compile(r"[a-z][a-z0-9_]*?__\S+")

VERSION_OF_ROWS = 4
"""The version of the code that makes rows and applies rules. If it changes, all rows are made anew."""


BAD_ROWS, EXPAND = "bad rows", "expand"
"""Names in the summary for data of the source that can't be made into a row, and for rows for which `expand`
returns nothing."""


@dataclass(frozen=True, kw_only=True)
class MessageTemplate:
    """A message of a prompt; `content` is a template."""

    content: Annotated[str, MinLen(1)]
    role: Literal["system", "user", "assistant"] = "user"
    """The speaker."""


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """A filter of the source's rows: a row stays if the expression `where` about its fields is true. The
    summary calls the filter by its `name`."""

    name: Annotated[str, MinLen(1)]
    where: Annotated[str, MinLen(1)]


@DataPipeline.register("prepare_data")
@dataclass(frozen=True, kw_only=True)
class PrepareData(DataPipeline):
    """Reads a data set, makes rows of the common schema from it, and drops the rows that a rule rejects.

    Texts (`prompt`, `ground_truth`, `raw_prompt`) are Jinja templates over the fields of a source's row, as
    in ``'{{ question }}'``; values (`extra_info`, `filters`) are Jinja expressions, as in ``metadata.level``,
    and keep their type. `expand` names a Python function, ``module:function``. It is called first, with a
    source's row and a seed, and returns the fields for the templates: an object, a list of objects if the row
    becomes several rows, or None if the row is left out. `instruction` is added at the end of the last
    message. If `copy` is true, the source's rows have the schema already, and no templates are needed.

    The `splits` of the source are read in the order test, validation, train. So of two equal rows in
    different splits, a rule against duplicates keeps the one to measure on. The rules are applied one after
    the other. Then `hold_out` moves rows from train to another split, and `sample` limits the rows of a
    split; `seed` and the rows' content decide which rows.
    """

    data_source: str
    """``<domain>__<name>``, which says how answers are graded."""
    source: Source
    splits: tuple[Split, ...] = ("train",)
    copy: bool = False
    expand: str | None = None
    filters: tuple[RowFilter, ...] = ()
    prompt: str | tuple[MessageTemplate, ...] = ""
    instruction: str = ""
    raw_prompt: str | None = None
    """The whole text that a model continues if `apply_chat_template` is false. In it, ``{{ prompt }}`` is the
    last message, with `instruction`."""
    apply_chat_template: bool = True
    """Puts a model's chat template around the prompt."""
    ground_truth: str = ""
    ability: str | None = None
    """The ability that the row asks for; null: its domain."""
    extra_info: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    hold_out: Mapping[Split, Annotated[int, Ge(1)]] = field(default_factory=dict)
    sample: Mapping[Split, Annotated[int, Ge(1)]] = field(default_factory=dict)
    seed: int = 42
    bad_rows: Literal["stop", "drop"] = "stop"
    """What to do with a row of the source that can't be made into a row of the schema, such as one without a
    field that a template uses: stop the command, or drop the row."""

    def __post_init__(self) -> None:
        if not _SOURCE.fullmatch(self.data_source):
            raise ValueError(
                f"data_source is {self.data_source!r}: it should be <domain>__<name>, such as 'math__dapo'"
            )
        if not self.splits or len(set(self.splits)) < len(self.splits):
            raise ValueError("splits names no split, or one twice: name each of the source's once")
        for key, text in self._texts():
            check_text(text, key)
        for name, expression in self.extra_info.items():
            check_value(expression, f"extra_info.{name}")
        for row_filter in self.filters:
            check_value(row_filter.where, f"the filter {row_filter.name!r}")
        self._check_names_of_filters()
        if not self.copy and not (self.prompt and self.ground_truth):
            raise ValueError(
                "a row needs a prompt and a ground_truth: give templates for both, such as '{{ question }}',"
                " or set copy to true for a source of this schema"
            )
        if self.copy and (self.prompt or self.ground_truth or self.extra_info or self.raw_prompt):
            raise ValueError(
                "copy takes the source's rows as they are: leave prompt, ground_truth, raw_prompt and"
                " extra_info out, or set copy to false"
            )
        if not self.apply_chat_template and not self.raw_prompt and not self.copy:
            raise ValueError(
                "apply_chat_template is false: say with raw_prompt what the model is given, such as"
                " '{{ prompt }}'"
            )
        if "train" in self.hold_out:
            raise ValueError("hold_out names train, which rows are held out of: name validation or test")

    def _check_names_of_filters(self) -> None:
        """Raises ValueError if two filters have the same name, or one has a name that the summary gives to
        other rows. The summary counts rows by these names."""
        names = [row_filter.name for row_filter in self.filters]
        for name in names:
            if name in (BAD_ROWS, EXPAND):
                raise ValueError(
                    f"a filter is called {name!r}, as the summary calls rows that are left out for another"
                    " reason: give the filter another name"
                )
            if names.count(name) > 1:
                raise ValueError(
                    f"several filters are called {name!r}, and the summary counts rows by this name: give"
                    " each filter another name, or join their expressions with 'and'"
                )

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yields the key and the text of each template."""
        yield "ground_truth", self.ground_truth
        yield "raw_prompt", self.raw_prompt or ""
        turns = [self.prompt] if isinstance(self.prompt, str) else [turn.content for turn in self.prompt]
        yield from (("prompt", text) for text in turns)

    def rows_of(self, fields: Mapping[str, Any]) -> list[DomainRow | str]:
        """Returns the rows that are made from a row of the source: several if `expand` returns several
        objects. In place of a row that is dropped, the list has the name of the filter that dropped it, or
        ``expand`` if that returned nothing.

        Raises MissingField if a field is missing, and ValueError for a row that can't be read.
        """
        expanded: Any = fields
        if self.expand is not None:
            content = repr(sorted(fields.items()))
            expanded = _load_function(self.expand)(dict(fields), derive_seed(self.seed, content, "expand"))
            if not expanded:
                return [EXPAND]
        fields_of_rows = expanded if isinstance(expanded, list) else [expanded]
        return [self._row(fields_of_row) for fields_of_row in fields_of_rows]

    def _row(self, fields: Mapping[str, Any]) -> DomainRow | str:
        """Returns the row that the templates make from these fields, or the name of the filter that drops
        it."""
        for row_filter in self.filters:
            if not evaluate_expression(row_filter.where, fields):
                return row_filter.name
        if self.copy:
            row = normalise_row(fields)
            return {**row, "data_source": self.data_source, "ability": self.ability or row["ability"]}
        turns = (MessageTemplate(content=self.prompt),) if isinstance(self.prompt, str) else self.prompt
        messages = [{"role": turn.role, "content": render_text(turn.content, fields)} for turn in turns]
        messages[-1]["content"] += self.instruction
        for message in messages:
            if not message["content"].strip():
                raise MissingField(f"the {message['role']}'s message is empty")
        prompt = messages[-1]["content"]
        raw = render_text(self.raw_prompt, {**fields, "prompt": prompt}) if self.raw_prompt else ""
        return domain_row(
            self.data_source,
            messages,
            render_text(self.ground_truth, fields),
            ability=self.ability or domain_of(self.data_source),
            extra_info={name: evaluate_expression(text, fields) for name, text in self.extra_info.items()},
            raw_prompt=raw,
            apply_chat_template=self.apply_chat_template,
        )

    def code(self) -> str:
        """Returns the source code of the module that `expand` names, or "" without `expand`. After a change
        of this code, rows are made again."""
        if self.expand is None:
            return ""
        function = _load_function(self.expand)
        return inspect.getsource(sys.modules[function.__module__])


_load_function = functools.cache(function_at)
