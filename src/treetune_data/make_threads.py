"""Ordinary long solutions become parallel ones, with the help of a language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, MinLen

from treetune_data.base import DataPipeline
from treetune_domains.endpoints.settings import EndpointSettings, Prices, check_extra
from treetune_threads.faults import MOST_THREADS

Step = Literal["steps", "substeps", "groups", "subgroups", "ranges", "check", "references", "outlines"]

_CHANGES_NO_ANSWER = frozenset(
    {"base_url", "api_key_variable", "concurrency", "timeout", "retries", "backoff", "give_up_after"}
)
_VERSION = 1
"""Of the questions and of what is made of the answers: another one works on all solutions anew."""


@DataPipeline.register("make_threads")
@dataclass(frozen=True, kw_only=True)
class MakeThreads(DataPipeline):
    """Finds independent parts of a solution, cuts it there into blocks of threads, takes references between
    siblings out, writes an outline for each thread, and keeps what is of the right form. The steps are
    ThreadWeaver's; the questions are this project's own.

    A row of the input has a problem and a solution under `problem_field` and `solution_field`. It comes out
    as it is, with the parallel solution under `output_field`, so that a task takes the one or the other for
    its demonstration.

    A block is kept if at least `min_saved_characters` of it need not be waited for (all threads but the
    longest), and if it has at most `max_threads` threads, each of which is held against every earlier one in
    a request of its own. With `self_check`, the model looks once more at each thread, and what it doesn't
    let pass stays sequential. An answer that can't be read is sent back with the reason `repairs` times.

    `prices` are dollars per million tokens. `budget` (dollars) bounds what the folder has cost, earlier
    runs included: no request is sent that could cost more than is left. `extra_for` adds to the requests of
    a step, beside `endpoint.extra`.
    """

    endpoint: EndpointSettings
    prices: Prices | None = None
    budget: Annotated[float, Gt(0)] | None = None
    problem_field: Annotated[str, MinLen(1)] = "problem"
    solution_field: Annotated[str, MinLen(1)] = "solution"
    output_field: Annotated[str, MinLen(1)] = "parallel_solution"
    min_saved_characters: Annotated[int, Gt(0)] = 200
    max_threads: Annotated[int, Ge(2), Le(MOST_THREADS)] = MOST_THREADS
    self_check: bool = True
    repairs: Annotated[int, Ge(0)] = 1
    extra_for: Mapping[Step, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.budget is not None and self.prices is None:
            raise ValueError("budget needs prices: {input: …, output: …}, dollars per million tokens")
        if self.output_field in (self.problem_field, self.solution_field):
            raise ValueError(
                f"output_field is {self.output_field!r}, which the input has: name a field of its own, so"
                " that rows keep their sequential solution"
            )
        for step, extra in self.extra_for.items():
            if step not in get_args(Step):
                raise ValueError(f"extra_for has no step {step!r}: the steps are {', '.join(get_args(Step))}")
            check_extra(f"extra_for.{step}", extra)

    def identity(self) -> dict[str, Any]:
        """The settings that decide what becomes of a solution."""
        own = dataclasses.asdict(self)
        endpoint = {key: value for key, value in own.pop("endpoint").items() if key not in _CHANGES_NO_ANSWER}
        for name in ("prices", "budget", "output_field"):
            del own[name]
        return {"version": _VERSION, "endpoint": endpoint, **own}

    def run(self, source: Path | None, output: Path, config: dict[str, Any]) -> int:
        from treetune_data.work import work

        assert source is not None, "the command line asks for it"

        return work(self, source, output, config)
