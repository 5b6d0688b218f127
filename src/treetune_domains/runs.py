"""Services of every run: the model that judges answers, and environments with a journal of their turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, MinLen

from treetune.contracts import PHASE_SERVICES, RUN_SERVICES, Experiment, Finding
from treetune.inference.settings import EngineSettings, ServedModel
from treetune_domains.endpoints.settings import Asking
from treetune_domains.graders.judge import asks_the_run

if TYPE_CHECKING:
    from treetune.runtime.session import Session
    from treetune_domains.environments.pool import EnvironmentPool, TurnJournal
    from treetune_domains.graders.judge import RunningJudge


@ServedModel.register("judge")
@dataclass(frozen=True, kw_only=True)
class JudgeModel(Asking, ServedModel):
    """A model that the run serves beside the policy, to judge answers (grader ``judge``). It isn't
    trained."""

    model: Annotated[str, MinLen(1)]
    """A folder in Hugging Face format, ``…/checkpoints/last/policy`` of an experiment, or a name on the
    hub."""
    revision: str | None = None
    """A branch, tag or commit on the hub."""
    server: EngineSettings
    """One server for all ranks. On GPUs it is never put to sleep, so give it devices of its own."""
    context_length: Annotated[int, Gt(1)] = 8192
    """Tokens of a question and its answer at most."""
    temperature: Annotated[float, Ge(0)] | None = 0.0
    max_tokens: Annotated[int, Gt(0)] = 512
    timeout: Annotated[float, Gt(0)] = 120.0

    @classmethod
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        # Who judges, and how it is asked, decides on rewards.
        return frozenset({"server", "timeout"})

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        tasks = [
            experiment.task,
            *(each.task for each in experiment.evaluation.sets if each.task is not None),
        ]
        if not any(asks_the_run(part) for task in tasks for part in task.grader.parts()):
            yield Finding(
                "a model is served to judge answers, and no grader asks it",
                "$.task.grader",
                "choose the grader 'judge' without an endpoint, or leave engines.judge out",
            )
        if self.max_tokens >= self.context_length:
            yield Finding(
                f"a reply may have {self.max_tokens} tokens, and the context of {self.context_length} leaves"
                " nothing for the question",
                "max_tokens",
                "lower it, or raise context_length",
            )
        if getattr(self.server, "sleep", False):
            yield Finding(
                "the judge's server would be put to sleep by nobody",
                "server.sleep",
                "set it to false, and give the server devices of its own",
            )
        if getattr(self.server, "addresses", None) is not None:
            yield Finding(
                "a judge that somebody else serves is none of the run's servers",
                "server.addresses",
                "leave engines.judge out, and give the grader its endpoint",
            )
        if getattr(self.server, "servers", "one") != "one":
            yield Finding("one server judges for all ranks", "server.servers", "set it to 'one'")


@RUN_SERVICES.register("judge")
def judge(session: Session) -> AbstractContextManager[RunningJudge | None]:
    from treetune_domains.judge_server import judge_server

    return judge_server(session)


@RUN_SERVICES.register("environments")
def environments(session: Session) -> AbstractContextManager[EnvironmentPool]:
    from treetune_domains.environments.pool import EnvironmentPool

    return EnvironmentPool(workers=session.config.grader_workers)


@PHASE_SERVICES.register("turns")
def turns(journal: Path, others: Sequence[Path]) -> TurnJournal:
    from treetune_domains.environments.pool import SUFFIX, TurnJournal

    return TurnJournal(journal.with_suffix(SUFFIX), [other.with_suffix(SUFFIX) for other in others])
