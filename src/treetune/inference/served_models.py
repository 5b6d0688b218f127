"""The models that a run serves: the policy, and the one that judges answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, MinLen

from treetune.contracts import Experiment, Finding, Part
from treetune.inference.settings import EngineSettings
from treetune_domains.endpoints.settings import Asking


@dataclass(frozen=True, kw_only=True)
class JudgeModel(Asking, Part):
    """A model that the run serves beside the policy, to judge answers (grader ``judge``). It is not trained.

    `model` is a folder in Hugging Face format, ``…/checkpoints/last/policy`` of an experiment, or a name on
    the hub, with `revision` a branch, tag or commit there. `server` says how it is served, one server for
    all ranks; on GPUs it is never put to sleep, so give it devices of its own. `context_length` bounds a
    question and its answer, in tokens.
    """

    model: Annotated[str, MinLen(1)]
    revision: str | None = None
    server: EngineSettings
    context_length: Annotated[int, Gt(1)] = 8192
    temperature: Annotated[float, Ge(0)] | None = 0.0
    max_tokens: Annotated[int, Gt(0)] = 512
    timeout: Annotated[float, Gt(0)] = 120.0

    @classmethod
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        """How it is served; who judges, and how it is asked, decides what answers earn."""
        return frozenset({"server", "timeout"})

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        from treetune_domains.graders.judge import asks_the_run

        tasks = [experiment.task, *(one.task for one in experiment.evaluation.sets if one.task is not None)]
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


@dataclass(frozen=True, kw_only=True)
class Engines(Part):
    """The models that a run serves: the `policy`, whose weights follow the training, and the one that judges
    answers (`judge`), where a grader asks it."""

    policy: EngineSettings
    judge: JudgeModel | None = None

    @classmethod
    def changeable(cls, settings: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"policy"})
