"""Compares credit methods on the same answers of the same policy, with each other and with true values."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Finding, Need, OneLine
from treetune.credit.base import Credit
from treetune.credit.episodes import make_episode
from treetune.credit.literature.token_level import innermost_credit
from treetune.credit.reward_models import RewardModelCredit
from treetune.credit.rloo import Rloo
from treetune.engine.base import Engine
from treetune.lab.analyzers.points import OfCheckpoints
from treetune.lab.analyzers.true_values import ByEngine, StateIds, TrueValues, find_values_once
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.runtime.analysis import ONE_LINE_REMEDY, Analyzer, Findings
from treetune.runtime.base import PolicyIteration
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Problem, Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treetune.lab.analyzers.credit_measures import CreditOfMethod, Truth
    from treetune.runtime.resources import RunResources
    from treetune.runtime.session import Session


@dataclass(frozen=True, kw_only=True)
class CreditWithRollout:
    """A credit, and the rollout that samples the answers for it."""

    rollout: Rollout
    credit: Credit


@Analyzer.register("credit_bench")
@dataclass(frozen=True, kw_only=True)
class CreditBench(OfCheckpoints):
    """Measures how much each of `methods` reduces the noise of the gradient at a checkpoint, and at what cost
    (`treetune.lab.arena.gain`), compared with exact advantages. Nothing is trained.

    All of `methods` get the same answers: all answers to `problems` problems. They are the run's own answers
    by the checkpoint's weights if the run stored answers to enough problems, and fresh ones otherwise.
    `truth` finds the true values of states. They are stored in the experiment's folder ``truths``, so they
    are found only once.

    Methods that ask for the same continuations share them. Each method is charged for the tokens of all its
    continuations, and for the seconds that sampling these tokens takes at the measured speed.
    """

    methods: Mapping[str, Credit] = field(default_factory=dict, hash=False)
    """The credits to compare, by their names in tables."""
    with_rollouts: Mapping[str, CreditWithRollout] = field(default_factory=dict, hash=False)
    """Credits that need their own answers, such as trees, by their names in tables. Their rollouts answer the
    same problems. Each of their gradients is scaled to the length of the true gradient, since another number
    of answers to a problem changes the length. Bias and gain are then computed as for biased credits. The
    values and advantages of these credits are not compared with the true ones."""
    problems: Annotated[int, Gt(0)] = 16
    """The number of problems whose answers get credit."""
    truth: TrueValues | None = field(default_factory=ByEngine)
    """How the true values of states are found; null: methods are not compared with exact advantages."""

    needs_engine = True
    needs = (Need(OneLine(), "it continues answers from their beginnings", ONE_LINE_REMEDY),)

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        yield from super().check(experiment)
        if not self.methods:
            yield Finding(
                "there are no methods to compare",
                "methods",
                "append configs/analyzers/credit_bench.jsonnet to --configs",
            )
        if self.truth is not None:
            yield from self.truth.check(experiment)
        yield from find_missing_models("methods", self.methods, experiment)
        credits = {name: method.credit for name, method in self.with_rollouts.items()}
        yield from find_missing_models("with_rollouts", credits, experiment)
        for name, method in self.with_rollouts.items():
            if name in self.methods:
                yield Finding(f"{name!r} is in methods, too", ("with_rollouts", name), "rename one of them")
            if not method.rollout.needs_engine:
                yield Finding(
                    f"the rollout of {name!r} doesn't sample from the policy",
                    ("with_rollouts", name, "rollout"),
                    "choose one that does, such as 'tree'",
                )

    @override
    def analyse(self, resources: RunResources, points: Sequence[int], work: Path) -> Findings:
        return Findings(
            {
                "truth": None if self.truth is None else self.truth.describe_settings(),
                "by_checkpoint": {
                    str(point): self._measure_checkpoint(resources, point, work) for point in points
                },
            }
        )

    def _measure_checkpoint(self, resources: RunResources, point: int, work: Path) -> dict[str, Any]:
        """Returns the numbers of a checkpoint, above all the gain, cost and bias of each method.

        For each of `methods` there are also the seconds that it takes. If there are true values,
        `measure_method` compares the method's values with them.
        """
        from treetune.lab.analyzers.credit_measures import CreditOfMethod, measure_method, measure_reliability
        from treetune.lab.analyzers.gradients import problem_gradients
        from treetune.lab.analyzers.stored import answers_at, context_at
        from treetune.lab.arena.gain import TRUE_ADVANTAGES, measure_gain

        resources.server.load_checkpoint(point)
        # If the run stored answers to enough problems, `origin` is "stored". Otherwise answers to
        # `self.problems` problems are sampled now, and it is "sampled".
        answers, origin = answers_at(resources, point, work, self.seed, self.problems, enough=self.problems)
        problem_ids = list(dict.fromkeys(answer.problem.id for answer in answers))[: self.problems]
        answers = [answer for answer in answers if answer.problem.id in problem_ids]
        methods: dict[str, CreditOfMethod] = {}
        truths: list[Truth] = []
        if self.truth is not None:
            with resources.phase(f"true values after iteration {point}", "states") as show:
                context = context_at(resources, point, work, self.seed, "truth", show)
                truths = find_true_values(self.truth, context, resources.session, point, answers)
            episodes = [
                make_episode(context, answer, truth.advantages, truth.values)
                for truth, answer in zip(truths, answers, strict=True)
            ]
            methods[TRUE_ADVANTAGES] = CreditOfMethod(episodes)
        speed = Speed(resources.server.engine)
        context = context_at(resources, point, work, self.seed, "credit")
        # Methods with the most continuations come first: their continuations include those of the others.
        # Methods without the setting `samples` come last.
        samples_by_name = {
            name: getattr(innermost_credit(method), "samples", 0) for name, method in self.methods.items()
        }
        for name in sorted(self.methods, key=lambda name: -samples_by_name[name]):
            with resources.phase(f"{name} after iteration {point}", "continuations") as show:
                context = replace(context, log=replace(context.log, progress=show))
                with speed.measure_block():
                    methods[name] = credit_of_method(context, self.methods[name], answers)
        reference = credit_of_method(context, Rloo(), answers)  # gains are relative to RLOO
        sampled_tokens = sum(len(answer.response_ids) for answer in answers)
        with resources.phase(f"gradients after iteration {point}", "problems") as show:
            # RLOO comes first because it trains all tokens, as `problem_gradients` needs.
            credits = [reference.episodes, *(method.episodes for method in methods.values())]
            reference_gradients, *gradients_of_methods = problem_gradients(
                resources.session, point, credits, self.seed, show, work / "gradients"
            )
        # True advantages are the first method. Without them, RLOO's gradients stand for the true ones: they
        # are unbiased, too.
        true_gradients = gradients_of_methods[0] if truths else reference_gradients
        numbers = {}
        for (name, method), gradients in zip(methods.items(), gradients_of_methods, strict=True):
            is_unbiased = name == TRUE_ADVANTAGES or self.methods[name].is_unbiased(context)
            cost = 1 + method.tokens / sampled_tokens  # in units of sampling the answers
            numbers[name] = measure_gain(
                reference_gradients, true_gradients, gradients, cost, is_unbiased, self.seed
            )
            if truths:
                numbers[name] |= measure_method(truths, method, self.seed)
            numbers[name]["seconds"] = speed.seconds(method.tokens)
        problems = list({answer.problem.id: answer.problem for answer in answers}.values())
        for name, with_rollout in self.with_rollouts.items():
            method = sample_and_credit(resources, point, work, self.seed, name, with_rollout, problems)
            episodes = order_by_problem(name, method.episodes, problems)
            with resources.phase(f"gradients of {name} after iteration {point}", "problems") as show:
                [gradients] = problem_gradients(
                    resources.session, point, [episodes], self.seed, show, work / "gradients"
                )
            cost = method.tokens / sampled_tokens  # the method's tokens include those of its own answers
            # The method may have another number of answers to a problem, which changes its gradient's length.
            # It counts as biased, so that `measure_gain` scales its gradient to the true gradient's length.
            numbers[name] = measure_gain(
                reference_gradients, true_gradients, gradients, cost, unbiased=False, seed=self.seed
            )
        return {
            "answers": origin,
            "solved": mean([answer.reward for answer in answers]),
            "truth_reliability": measure_reliability(truths) if truths else None,
            "methods": numbers,
        }

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        from treetune.lab.arena.gain import draw_gain

        methods_by_title = {}
        for name, result in results.items():
            for point, numbers in result["numbers"]["by_checkpoint"].items():
                methods_by_title[f"{name}, after {point} iterations"] = numbers["methods"]
        return draw_gain(methods_by_title)


def order_by_problem(name: str, episodes: Sequence[Episode], problems: Sequence[Problem]) -> list[Episode]:
    """Returns a method's episodes in the order of the problems: its rollout may return answers in any order,
    and gradients are compared row by row, with a row for each problem.

    Raises:
        ValueError: A problem has no episode, or an episode is of another problem.
    """
    episodes_by_problem: dict[str, list[Episode]] = {problem.id: [] for problem in problems}
    for episode in episodes:
        if episode.group not in episodes_by_problem:
            raise ValueError(
                f"credit_bench: the rollout of {name!r} also answered {episode.group}, which isn't among the"
                " problems of the comparison: choose a rollout that answers only the given problems, or leave"
                " it out"
            )
        episodes_by_problem[episode.group].append(episode)
    problems_without_credit = [
        problem for problem, of_problem in episodes_by_problem.items() if not of_problem
    ]
    if problems_without_credit:
        raise ValueError(
            f"credit_bench: {name!r} gave no advantages to the answers to"
            f" {', '.join(problems_without_credit)}, so that its gradients can't be compared problem by"
            " problem: choose other problems, or leave it out"
        )
    return list(itertools.chain.from_iterable(episodes_by_problem.values()))


def find_true_values(
    truth: TrueValues,
    context: RolloutContext,
    session: Session,
    point: int,
    answers: Sequence[Trajectory],
) -> list[Truth]:
    """Returns the true values of the states before the steps of each answer."""
    from treetune.lab.analyzers.credit_measures import Truth

    states = []
    for answer in answers:
        for start in (0, *answer.step_ends[:-1]):
            states.append(StateIds(answer.problem, answer.prompt_ids, answer.response_ids[:start]))
    # Values that an earlier analysis has stored are only read.
    estimates = iter(find_values_once(truth, context, session, point, states))
    truths = []
    for answer in answers:
        estimates_of_answer = [next(estimates) for _ in answer.step_ends]
        values = tuple(estimate.value for estimate in estimates_of_answer)
        variances = tuple(estimate.noise for estimate in estimates_of_answer)  # of the errors of `values`
        truths.append(Truth(answer.problem.id, answer.step_ends, values, answer.reward, noise=variances))
    return truths


class Speed:
    """Measures the speed of an engine."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine, self._tokens, self._seconds = engine, 0, 0.0

    @contextmanager
    def measure_block(self) -> Iterator[None]:
        """Adds the tokens that are sampled in the block, and their seconds, to the measurement."""
        assert self._engine is not None
        tokens_before, began = self._engine.tokens, time.perf_counter()
        yield
        sampled_tokens = self._engine.tokens - tokens_before
        if sampled_tokens:  # a block that sampled nothing would make the engine look slow
            self._tokens += sampled_tokens
            self._seconds += time.perf_counter() - began

    def seconds(self, tokens: int) -> float | None:
        """Returns the seconds that sampling `tokens` tokens takes.

        Returns None where the speed is unknown because all continuations were read from the journal.
        """
        if not tokens:
            return 0.0
        return self._seconds * tokens / self._tokens if self._tokens else None


def find_missing_models(
    key: str, methods: Mapping[str, Credit], experiment: PolicyIteration
) -> Iterator[Finding]:
    """Yields a finding for each method that needs something that an analysis doesn't have: a critic that the
    run didn't train, a reward model that learns, or the trainer's reference model. `key` is the setting that
    has the methods."""
    for name, credit in methods.items():
        # Credit without `asks_critic` leaves the critic's values to the trainer. Only training computes these
        # values, and an analysis doesn't train. Credit with `asks_critic` reads the values itself, and can
        # read them from the critic that the run has trained.
        if credit.needs_critic and not (credit.asks_critic and experiment.credit.needs_critic):
            yield Finding(
                f"{name!r} needs a critic, and analyses don't train one",
                (key, name),
                "leave the method out, or analyse a run that trains a critic, with the credit monte_carlo and"
                " the values 'critic' or 'control_variate'",
            )
        if isinstance(credit, RewardModelCredit):
            yield Finding(
                f"{name!r} needs a reward model that learns, and analyses don't train one",
                (key, name),
                "leave the method out",
            )
        if credit.trainer_scores.reference:
            yield Finding(
                f"{name!r} needs the trainer's reference model, and analyses have none",
                (key, name),
                "set its scorer to 'policy', or leave the method out",
            )


def sample_and_credit(
    resources: RunResources,
    point: int,
    work: Path,
    seed: int,
    name: str,
    method: CreditWithRollout,
    problems: Sequence[Problem],
) -> CreditOfMethod:
    """Samples answers to the problems with a method's rollout, and credits them with the method's credit.

    Returns:
        The episodes, and the number of sampled tokens: of the answers, and of the continuations that estimate
        values.
    """
    from treetune.lab.analyzers.credit_measures import CreditOfMethod
    from treetune.lab.analyzers.stored import context_at

    with resources.phase(f"{name} after iteration {point}", "answers") as show:
        # Methods with the same rollout read the answers of the first one from the journal.
        context = context_at(resources, point, work, seed, "own-answers", show, method.rollout)
        trees, _ = method.rollout.run(context, problems)
        episodes, metrics = method.credit.assign(context, trees)
    tokens_of_answers = 0
    for tree in trees:
        tokens_of_answers += sum(len(node.segment.token_ids) for node in tree.nodes)
    return CreditOfMethod(episodes, tokens_of_answers + int(metrics.get("credit/value_tokens", 0)))


def credit_of_method(
    context: RolloutContext, credit: Credit, answers: Sequence[Trajectory]
) -> CreditOfMethod:
    """Returns the episodes that a method makes of the answers, in the order of the answers, and the number of
    tokens that it sampled for them."""
    from treetune.lab.analyzers.credit_measures import CreditOfMethod

    episodes, metrics = credit.assign(context, trees_of(answers))
    episode_by_answer = {episode.trajectory: episode for episode in episodes}
    episodes_in_order = [episode_by_answer[answer.id] for answer in answers]
    return CreditOfMethod(episodes_in_order, int(metrics.get("credit/value_tokens", 0)))
