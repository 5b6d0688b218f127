"""Makes the contexts with which rollout, credit, evaluation and analyses sample and grade."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.domains.environments.pool import EnvironmentPool, TurnJournal
from treetune.domains.graders.judge import RunningJudge
from treetune.engine.journal import JournaledEngine, Observe
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import AnswerSettings, Log, RolloutContext
from treetune.rollouts.model_scores import ModelScores
from treetune.rollouts.single_turn import adapt_to_fixed_problems
from treetune.runtime.judge_server import judge_server
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.session import Session
from treetune.tasks.base import Task
from treetune.tasks.graders.base import ServiceContext
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Metrics

if TYPE_CHECKING:
    from treetune.trainer.scoring import ReferencePrefetch


class RunResources:
    """The resources with which a process samples and grades: the session, the policy server, the graders and
    their services. Makes the contexts of rollout, credit, evaluation and analyses from them.

    Example::

        with RunResources.open(session, server) as resources:
            resources.wait_until_ready()
            context = resources.context(config.rollout, seed=0, iteration=3, journal=path)
            trees, metrics = config.rollout.run(context, problems)
    """

    def __init__(
        self,
        session: Session,
        server: PolicyServer,
        grader: GraderPool,
        service_context: ServiceContext,
        environments: EnvironmentPool | None,
    ) -> None:
        """Keeps what the run's rollouts need.

        Args:
            session: The open session of this process.
            server: The policy's server.
            grader: The graders of the run's task.
            service_context: What the services of graders need, such as the judge that the run serves.
            environments: Plays the environments of answers with turns; None where no answer is made.
        """
        self.session, self.server, self.grader = session, server, grader
        self._service_context = service_context
        self._environments = environments
        self._judge_was_checked = False
        self.model_scores = ModelScores()
        """The functions by which the run's trainer computes the scores that the credit asks for. Set by
        `training.open_trainer`."""
        self.reference: ReferencePrefetch | None = None
        """The reference of the run's trainer, if it scores answers while others are sampled."""

    @staticmethod
    @contextmanager
    def open(session: Session, server: PolicyServer) -> Iterator[RunResources]:
        """Starts graders and what their services need, such as the server of a judge. Collective."""
        config = session.config
        # The garbage collector would go through all modules in the middle of sampling. That takes a quarter
        # of a second each time. The objects that exist by now are never freed, so the collector leaves them
        # out from here on. The trainer's models are made later and can still be freed.
        gc.collect()
        gc.freeze()
        # Evaluation answers fixed problems, so its rollout must draw no further problems.
        for rollout in (config.rollout, adapt_to_fixed_problems(config.evaluation.rollout or config.rollout)):
            rollout.check_at_start(session.model.codec)
        # A run without an engine grades answers, too: those of its demonstrations.
        grades_answers = server.engine is not None or session.purpose == "run"
        with ExitStack() as stack:
            environments: EnvironmentPool | None = None
            judge: RunningJudge | None = None
            if grades_answers:
                environments = stack.enter_context(EnvironmentPool(timeline=session.console.timeline))
                judge = stack.enter_context(judge_server(session))
            service_context = ServiceContext(
                folder=session.directory.path / "judge",
                name=f"{session.purpose}-{session.ranks.rank}",  # of this process's files in the folder
                judge=judge,
            )
            stack.enter_context(closing(service_context))
            grader = stack.enter_context(grader_pool(session, config.task, service_context))
            yield RunResources(session, server, grader, service_context, environments)

    def wait_until_ready(self) -> None:
        """Waits until the engine samples from the newest weights and the run's judge has answered once.
        Collective.

        Raises:
            ValueError: The judge can't be used.
        """
        self.server.wait_until_ready()
        session, judge = self.session, self._service_context.judge
        if judge is None or self._judge_was_checked:
            return
        message = ""
        if session.ranks.is_first:
            try:
                judge.refuse_unusable(session.config.task, session.train_problems)
            except ValueError as error:
                message = str(error)
        # All ranks raise together, or the others would wait for the first one.
        message = session.ranks.from_first("the judge answers", message)
        if message:
            raise ValueError(message)
        self._judge_was_checked = True

    def for_thread(self) -> RunResources:
        """Returns a copy for a second thread of each rank. Only one of the two threads may sample at a time.
        Collective."""
        resources = copy.copy(self)
        resources.session = self.session.for_thread()
        return resources

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
    ) -> RolloutContext:
        """Returns the context of a rollout, or of the credit of its answers. Callers add the fields that only
        their phase has.

        Args:
            journal: The file of answered requests, which a restart reads instead of sampling again; None to
                keep none.
            journals: The journals of other processes for the same requests.
            earlier: The journal of an earlier phase of this iteration. Of that phase, only the replies of
                environments (the turns) are read.
            continuations: The journal of continuations that are requested while answers are sampled.
            progress: Gets (done, total).
            observe: Gets all answered requests.
            task: None for the run's task.
            grader: The graders of `task`; None for the run's.
            reads_logprobs: Whether the log-probs of answers are needed.
        """
        session, engine = self.session, self.server.engine
        turn_journal: TurnJournal | None = None
        if engine is not None and journal is not None:
            engine = JournaledEngine(engine, journal, journals, continuations, observe)
            other_journals = list(journals)
            if earlier is not None:
                other_journals.append(earlier)
            turn_journal = TurnJournal.for_requests(journal, other_journals)
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
            # Credit continues answers with this rollout. A rollout that draws further problems
            # (`until_mixed`) is replaced by the rollout inside it.
            rollout=adapt_to_fixed_problems(rollout),
            model_scores=self.model_scores,
            environments=self._environments,
            turn_journal=turn_journal,
        )

    @contextmanager
    def grader_of(self, task: Task | None) -> Iterator[GraderPool]:
        """Yields the graders of a task: the run's if the task has the same ones, else others, which end with
        the block."""
        if task is None or task.grader == self.session.config.task.grader:
            yield self.grader
            return
        with grader_pool(self.session, task, self._service_context) as pool:
            yield pool

    def service_metrics(self, grader: GraderPool, name_prefix: str = "") -> Metrics:
        """Returns the counts of the graders' services on all ranks since the last call. Collective if there
        are services.

        Args:
            name_prefix: The beginning of each name after its group: with ``values_``, ``judge/asked`` becomes
                ``judge/values_asked``.
        """
        if not grader.has_services:
            return {}
        # A service counts sums, such as the questions that were asked, and means, such as the seconds of an
        # answer. A sum is (value, None). A mean is (sum, number of terms), so that the means of several ranks
        # can be combined.
        sums: dict[str, float] = defaultdict(float)
        terms_of_means: dict[str, float] = defaultdict(float)
        for counts in self.session.ranks.exchange("services", grader.take_counts()):
            for name, (value, terms) in counts.items():
                sums[name] += value
                if terms is not None:
                    terms_of_means[name] += terms
        metrics: Metrics = {}
        for full_name, total in sorted(sums.items()):
            # 1 for a sum, and for a mean without terms, whose sum is 0.
            divisor = terms_of_means.get(full_name) or 1.0
            group, _, name = full_name.partition("/")
            metrics[f"{group}/{name_prefix}{name}"] = total / divisor
        return metrics

    def phase(self, title: str, unit: str) -> AbstractContextManager[Callable[[int, int], None]]:
        """Shows a phase on the console, with the engine's speed and the last iteration's results. Example:
        ``phase("iteration 3: sampling", "answers")``."""

        def describe_state() -> str:
            texts = []
            engine, last_row = self.server.engine, self.session.last_row
            if engine is not None and engine.tokens_per_second:
                texts.append(f"{engine.tokens_per_second:.0f} tokens/s")
            for name, key, form in (
                ("reward", "episodes/reward", "{:.3f}"),
                ("unfinished", "episodes/unfinished", "{:.0%}"),
                ("KL", "train/kl", "{:.4f}"),
            ):
                if key in last_row:
                    texts.append(f"{name} {form.format(last_row[key])}")
            return "  ".join(texts)

        return self.session.console.phase(title, unit, describe_state)


def grader_pool(session: Session, task: Task, service_context: ServiceContext) -> GraderPool:
    """Returns a pool that grades answers of the task; its processes start with the first answer."""
    config = session.config
    return GraderPool(
        task.grader,
        workers=config.grader_workers,
        deadline=config.grader_deadline,
        context=service_context,
        # The pool sees in the whole prompt, with its chat template, whether answers begin within a thought.
        whole_prompt=session.model.codec.whole_prompt,
    )
