"""Gives rollout, credit, evaluation and analyses what they sample and grade with: engine, graders,
services."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.domains.environments.pool import EnvironmentPool, TurnJournal
from treetune.engine.journal import JournaledEngine, Observe
from treetune.rollouts.base import Critic, Rollout
from treetune.rollouts.context import AnswerSettings, Log, RolloutContext
from treetune.rollouts.single_turn import for_fixed_problems
from treetune.runtime.judge_server import judge_server
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.session import Session
from treetune.tasks.base import Task
from treetune.tasks.graders.base import CheckedService, ServiceContext
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Metrics

if TYPE_CHECKING:
    from treetune.trainer.scoring import ReferencePrefetch


class Sampler:
    """Makes contexts for rollout, credit, evaluation and analyses, from the session, its server and its
    graders."""

    def __init__(
        self,
        session: Session,
        server: PolicyServer,
        grader: GraderPool,
        services: ServiceContext,
    ) -> None:
        """`services` are for graders that are services; rollouts get those in it by their types."""
        self.session, self.server, self.grader, self._services = session, server, grader, services
        self._services_were_checked = False
        self.critic: Critic | None = None
        """The critic of the run's trainer, where the credit asks it (`training.open_trainer`)."""
        self.reference: ReferencePrefetch | None = None
        """The reference of the run's trainer, where it scores answers while others are sampled."""

    @staticmethod
    @contextmanager
    def open(session: Session, server: PolicyServer) -> Iterator[Sampler]:
        """Starts graders and services, the model that judges among them, where answers are made.
        Collective."""
        config = session.config
        # Modules and all else that is there by now stays: each pass of the garbage collector over it takes a
        # quarter of a second, in the middle of sampling. The trainer's models come later, and may go.
        gc.collect()
        gc.freeze()
        for rollout in (config.rollout, for_fixed_problems(config.evaluation.rollout or config.rollout)):
            rollout.prepare(session.model.codec)
        grades = server.engine is not None or session.purpose == "run"
        with ExitStack() as stack:
            started: list[object] = []
            if grades:
                started.append(stack.enter_context(EnvironmentPool(timeline=session.console.timeline)))
                judge = stack.enter_context(judge_server(session))
                if judge is not None:
                    started.append(judge)
            name = f"{session.purpose}-{session.ranks.rank}"
            services = ServiceContext(session.directory.path / "judge", name, started)
            stack.enter_context(closing(services))
            grader = stack.enter_context(grader_pool(session, config.task, services))
            yield Sampler(session, server, grader, services)

    def ready(self) -> None:
        """Waits until the engine samples from the newest weights and services have answered once. Raises
        ValueError where they can't. Collective."""
        self.server.ready()
        session = self.session
        checked = [one for one in self._services.services if isinstance(one, CheckedService)]
        if not checked or self._services_were_checked:
            return
        problem = ""
        if session.ranks.is_first:
            try:
                for service in checked:
                    service.refuse_unusable(session.config.task, session.train_problems)
            except ValueError as error:
                problem = str(error)
        if problem := session.ranks.from_first("services answer", problem):
            raise ValueError(problem)
        self._services_were_checked = True

    def for_thread(self) -> Sampler:
        """Returns a copy for a second thread. Only one of the two samples at a time. Collective."""
        sampler = copy.copy(self)
        sampler.session = self.session.for_thread()
        return sampler

    def context(
        self,
        rollout: Rollout,
        *,
        seed: int,
        iteration: int,
        journal: Path | None,
        journals: Sequence[Path] = (),
        earlier: Path | None = None,
        continuations: Path | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        observe: Observe | None = None,
        task: Task | None = None,
        grader: GraderPool | None = None,
        reads_logprobs: bool = True,
        services: Sequence[object] = (),
    ) -> RolloutContext:
        """Returns the context for a rollout, or for credit of its answers. With `journal`, finished requests
        outlive a crash; `journals` have what others finished, `earlier` is that of an earlier phase of this
        iteration, whose services these ones go on from, and `continuations` is the file for continuations
        that are requested among answers; `observe` is called with all answered requests. `task` and its
        `grader` are the run's unless given. `services` are those that features of this phase need.
        """
        session, engine = self.session, self.server.engine
        services = (for_fixed_problems(rollout), *services, *self._services.services)
        if self.critic is not None:
            services += (self.critic,)
        if engine is not None and journal is not None:
            engine = JournaledEngine(engine, journal, journals, continuations, observe)
            others = [*journals, *([earlier] if earlier is not None else [])]
            services += (TurnJournal.beside(journal, others),)
        return RolloutContext(
            task=task or session.config.task,
            engine=engine,
            grader=grader or self.grader,
            codec=session.model.codec,
            seed=seed,
            iteration=iteration,
            settings=AnswerSettings(
                session.config.context_length, rollout.sampling, rollout.unfinished_reward, reads_logprobs
            ),
            ranks=session.ranks,
            log=Log(session.console.say, progress),
            services=services,
        )

    @contextmanager
    def grader_of(self, task: Task | None) -> Iterator[GraderPool]:
        """Gives the run's graders or, for the block, those of another task that grades otherwise."""
        if task is None or task.grader == self.session.config.task.grader:
            yield self.grader
            return
        with grader_pool(self.session, task, self._services) as pool:
            yield pool

    def service_metrics(self, grader: GraderPool, beginning: str = "") -> Metrics:
        """Returns the numbers of the pool's services on all ranks since the last call, by names such as
        ``judge/asked``, with `beginning` behind the slash. Collective where there are services.
        """
        if not grader.has_services:
            return {}
        total: dict[str, tuple[float, float | None]] = {}
        for counts in self.session.ranks.exchange("services", grader.counted()):
            for name, (value, over) in counts.items():
                before, parts = total.get(name, (0.0, 0.0))
                total[name] = before + value, None if over is None else (parts or 0.0) + over
        return {
            "/".join([room, beginning + name]): value / (over or 1.0)
            for full, (value, over) in sorted(total.items())
            for room, _, name in [full.partition("/")]
        }

    def phase(self, what: str, unit: str) -> AbstractContextManager[Callable[[int, int], None]]:
        """Shows a phase on the console, with the engine's speed and the last iteration's results."""

        def news() -> str:
            words = []
            engine, last = self.server.engine, self.session.last_row
            if engine is not None and engine.tokens_per_second:
                words.append(f"{engine.tokens_per_second:.0f} tokens/s")
            for name, key, form in (
                ("reward", "episodes/reward", "{:.3f}"),
                ("unfinished", "episodes/unfinished", "{:.0%}"),
                ("KL", "train/kl", "{:.4f}"),
            ):
                if key in last:
                    words.append(f"{name} {form.format(last[key])}")
            return "  ".join(words)

        return self.session.console.phase(what, unit, news)


def grader_pool(session: Session, task: Task, services: ServiceContext) -> GraderPool:
    config = session.config
    return GraderPool(
        task.grader,
        workers=config.grader_workers,
        deadline=config.grader_deadline,
        context=services,
        whole_prompt=session.model.codec.framed,
    )
