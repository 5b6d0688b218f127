"""How hard rows are for a model: the share of its answers to each that are right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, MinLen

from treetune.contracts import Finding
from treetune.findings import UNKNOWN
from treetune.inference.base import SamplingParams
from treetune.rollouts.answers import check_sampling
from treetune.tasks.base import Task
from treetune.tasks.rows import RowsTask
from treetune_data.base import DataPipeline
from treetune_data.difficulty.jobs import Jobs, LocalJobs
from treetune_data.difficulty.policies import Policy


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How answers are sampled: `samples` of at most `max_tokens` to each row. As Guru's estimates are, unless
    said otherwise."""

    samples: Annotated[int, Gt(0)] = 16
    """Answers to each row."""
    max_tokens: Annotated[int, Gt(0)] = 4096
    temperature: Annotated[float, Ge(0)] = 1.0
    """Of sampling."""
    top_p: Annotated[float, Gt(0), Le(1)] = 0.9
    """Samples among the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Ge(-1)] = 100
    """Of a step's tokens, the likeliest so many; -1: all."""
    stop: tuple[Annotated[str, MinLen(1)], ...] = ()
    """Strings that end an answer."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.samples)

    @property
    def params(self) -> SamplingParams:
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

    The rows are cut into `shards`, each a job that `jobs` starts, watches and starts again. An answer's seed
    comes from `seed`, the row's content and the answer's number: how the work was cut, who died on the way
    and in which order answers came changes nothing. What was answered is written down at once and asked for
    no more.
    """

    task: Task
    policy: Policy
    answers: Answers = field(default_factory=Answers)
    shards: Annotated[int, Gt(0)] = 1
    jobs: Jobs = field(default_factory=LocalJobs)
    column: Annotated[str, MinLen(1)] = "pass_rate"
    """``low_pass_rate`` for the strong model and ``high_pass_rate`` for the weak one, as `filter_data` reads
    them."""
    seed: int = 42
    grader_workers: Annotated[int, Gt(0)] = 2
    """Processes of a shard that grade."""
    grader_deadline: Annotated[float, Gt(0)] = 10.0
    """Seconds for one answer; then its outcome is ``timeout``."""

    @property
    def model(self) -> Any:
        """For the engine, which looks at it when it checks itself."""
        return getattr(self.policy, "model", UNKNOWN)

    @property
    def context_length(self) -> Any:
        return getattr(self.policy, "context_length", UNKNOWN)

    def check(self, experiment: Any) -> Iterable[Finding]:
        yield from self._check_task()
        yield from self.policy.check_answers(self.answers.params)

    def _check_task(self) -> Iterator[Finding]:
        if self.task is not UNKNOWN and not isinstance(self.task, RowsTask):
            yield Finding(
                "the task doesn't read rows, and what is estimated are rows",
                "task",
                "take {type: 'rows', routes: {…}}, which says how each source is graded",
            )

    def run(self, source: Path | None, output: Path, config: dict[str, Any]) -> int:
        raise AssertionError("the command line starts it, with what its jobs are started by")
