"""Answers of several turns: the policy writes, an environment answers, and all go on at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import (
    Answers,
    Experiment,
    Feature,
    Finding,
    Need,
    OneLine,
    SampledAnswers,
    Turns,
)
from treetune.domains.conversation import EVENTS, Conversation, TurnLimits, actions_of, unpacked
from treetune.domains.environments.base import NOTHING, Environment, Reward, Turn, environment_of
from treetune.domains.environments.pool import EnvironmentPool, Play, Played, TurnJournal
from treetune.engine.base import Request
from treetune.engine.programs import result_of
from treetune.models.chat import TOOL_RESULT
from treetune.rollouts.answers import Announcer, GrowingRollout, Start, is_decided
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.numbers import Number, NumberGroup, declare
from treetune.rollouts.single_turn import for_fixed_problems
from treetune.rollouts.states import WholeAnswers
from treetune.rollouts.values import AnswerPrefix, StateRule
from treetune.seeds import derive_seed
from treetune.tasks.base import Task
from treetune.vocabulary import Grade, TextCodec, Trajectory, joined

declare(
    NumberGroup(
        "turns",
        {
            "count": Number("turns of an answer", largest=True, while_training=True, label="turns"),
            "observation_tokens": Number("tokens that the environment added to an answer"),
            "environment_seconds": Number("seconds that an answer waited for its environment", largest=True),
            **{event: Number(title) for event, title in EVENTS.items()},
        },
    )
)


OBSERVATION = "{observation}"
IN_FLIGHT = 4
"""Answers in flight for each sample that the engine draws at a time, unless the rollout says otherwise."""
PLAIN = f"\n{OBSERVATION}\n"
"""The text between turns of a model without a chat, unless the rollout says otherwise."""


@Rollout.register("multi_turn")
@dataclass(frozen=True, kw_only=True)
class MultiTurn(GrowingRollout):
    """`samples` answers to each problem, in turns: what the policy writes goes to an environment, and what
    that says is put behind it, until the environment says that it is done. Every answer goes on as soon as
    its environment has spoken, whatever the others do.

    What the environment says is injected: it has no log-probs and is not trained. An observation is encoded
    once, and nothing that was sampled is encoded again. An answer that comes to the end of its turns or
    tokens, observations included, is unfinished.

    Where the environment hangs or fails, the answer ends with that outcome and earns nothing; where what the
    environment needs isn't there, the answer is left out of all that is learnt and measured.

    ``turns/…`` are means over answers: turns, tokens of observations, and events (`EVENTS`).
    """

    environment: Environment | None = None
    """The environment that the policy acts in; None: the task's own."""
    max_turns: Annotated[int, Gt(0)]
    """Turns of an answer at most."""
    turn_tokens: Annotated[int, Gt(0)] | None = None
    """Sampled tokens of a turn; None: as many as are left of the answer's. A turn that comes to so many goes
    to the environment as it stands."""
    answer_deadline: Annotated[float, Gt(0)] | None = None
    """Seconds that an answer's turns may take its environment together; None: only each turn has a deadline.
    An answer that uses them up ends as ``timeout``. Each continuation has as many of its own."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn, and stay in it; the environment reads what stands before them."""
    reward: Reward | None = None
    """Reward of an answer: its turns' rewards together (``environment``), what the task's grader gives to
    its last turn (``grader``), or the ``sum`` of both. None: what the environment is made for."""
    unfinished_reward: float | None = 0.0
    """Reward of an answer that came to the end of its turns or tokens. None: what it has earned."""
    in_flight: Annotated[int, Gt(0)] | None = None
    """Answers that have begun and not ended, at a time; None: four times what the engine samples at a time,
    so that it has work while environments have theirs."""
    observation_characters: Annotated[int, Gt(0)] = 2000
    """Characters to which observations are cut."""
    observation_format: str | None = None
    """The text between two turns, with ``{observation}`` in it. None: what the model's chat template has
    there, or a line for the observation where the model has no chat."""

    seed_name = "turns"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turn_tokens is not None and self.turn_tokens > self.max_tokens:
            raise ValueError(
                f"turn_tokens is {self.turn_tokens}, which no turn reaches in an answer of max_tokens ="
                f" {self.max_tokens}: lower it, or leave it out"
            )
        if self.observation_format is not None and OBSERVATION not in self.observation_format:
            raise ValueError(
                f"observation_format is {self.observation_format!r}, which leaves the observation out: put"
                f" {OBSERVATION} into it"
            )

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return SampledAnswers(), Answers(self.samples), OneLine(turns=True), Turns()

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        if self.environment is None and not any(map(environment_of, experiment.task.parts())):
            yield Finding(
                "the rollout lacks an environment, and the task has none",
                "environment",
                "give one, e.g. {type: 'tools', tools: [{type: 'python'}]}, or choose the task 'environment'",
            )
        environment = self.environment or environment_of(experiment.task)
        if environment is not None and environment.reads_specials:
            if experiment.model.chat is None:
                yield Finding(
                    "tools are called natively, in a chat, and the model has none",
                    "$.model.chat",
                    "set model.chat to {}, or leave the environment's format at 'tags'",
                )
            if self.observation_format is not None:
                yield Finding(
                    "results of native calls stand in the chat as its template has them",
                    "observation_format",
                    "leave it out, or leave the environment's format at 'tags'",
                )

    def environment_of(self, task: Task) -> Environment:
        """Returns the environment of answers to the task's problems; in a mixture, some may have none."""
        return self.environment or environment_of(task) or NOTHING

    def frame(self, codec: TextCodec) -> Callable[[str], str] | None:
        """Returns the text between turns around an observation; None for that of the model's chat."""
        form = self.observation_format
        if form is None and codec.turn_frame is not None:
            return None
        before, _, behind = (form or PLAIN).partition(OBSERVATION)
        return lambda observation: f"{before}{observation}{behind}"

    @override
    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self.environment_of(task).offered()

    @override
    def prepare(self, codec: TextCodec) -> None:
        native = self.environment is not None and self.environment.reads_specials
        if codec.turn_frame is not None and (native or self.frame(codec) is None):
            codec.turn_frame([TOOL_RESULT] if native else "")  # raises where the template has none

    @override
    async def answers(self, context: RolloutContext, starts: Sequence[Start]) -> list[Trajectory]:
        """See `GrowingRollout`. The environment's seed derives from the problem as well."""
        assert context.engine is not None, "a rollout that samples needs an engine"
        in_flight = asyncio.Semaphore(self.in_flight or IN_FLIGHT * context.engine.at_once)
        announcer = Announcer(context, len(starts))
        try:
            return await asyncio.gather(
                *(self._answer(context, start, in_flight, announcer) for start in starts)
            )
        finally:
            if (journal := context.find(TurnJournal)) is not None:
                journal.close()

    async def _answer(
        self, context: RolloutContext, start: Start, in_flight: asyncio.Semaphore, announcer: Announcer
    ) -> Trajectory:
        async with in_flight:
            conversation = await self._converse(context, start)
        # The next answer may begin: a grader holds up neither the engine nor an environment.
        grade = await self._grade(context, start, conversation)
        answer = self._trajectory(context, start, conversation, grade)
        await announcer.announce(answer)
        return answer

    async def _converse(self, context: RolloutContext, start: Start) -> Conversation:
        """Has the policy and the environment speak in turns until the answer ends."""
        assert context.engine is not None, "a rollout that samples needs an engine"
        conversation, play = self._begin(context, start)
        if start.segments:
            played = await result_of(play.begin())
            if any(segment.snapshot for segment in start.segments):
                conversation.restore(start.segments)
            else:
                conversation.replay(start.segments, played.turns)
        while (turn := conversation.next_turn) is not None:
            request = Request(
                turn.context_ids,
                seed=derive_seed(start.seed, turn.number),
                n=1,
                sampling=replace(self.sampling, max_tokens=turn.max_tokens, stop=conversation.limits.stop),
                priority=context.settings.priority,
                reads_logprobs=context.settings.reads_logprobs,
            )
            (completion,) = await context.engine.sample(request)
            asks_environment = conversation.take_completion(completion)
            if asks_environment:
                played = await result_of(play.act(conversation.actions[-1]))
                _take_played(conversation, played)
        play.end()
        return conversation

    def _begin(self, context: RolloutContext, start: Start) -> tuple[Conversation, Play]:
        """Returns a conversation without a turn, and the environment that it is held with."""
        task = context.task.of(start.problem)
        environment, sampling = self.environment_of(task), task.sampling(self.sampling)
        limits = TurnLimits(
            turn_tokens=self.turn_tokens or sampling.max_tokens,
            max_turns=self.max_turns,
            observation_characters=self.observation_characters,
            stop=sampling.stop,
            reads_specials=environment.reads_specials,
        )
        conversation = Conversation(
            context.codec,
            self.frame(context.codec),
            limits,
            start.prompt_ids,
            context.settings.token_budget(start.prompt_ids, sampling.max_tokens),
        )
        actions = actions_of(context.codec, start.prompt_ids, start.segments, limits)
        journal = context.find(TurnJournal)
        play = context.get(EnvironmentPool).begin(
            environment,
            start.problem,
            derive_seed(context.seed, context.iteration, start.problem.id, "environment"),
            actions,
            unpacked(start.segments)[-1],
            None if journal is None else (journal, start.seed),
            self.answer_deadline or math.inf,
        )
        return conversation, play

    async def _grade(self, context: RolloutContext, start: Start, conversation: Conversation) -> Grade:
        """Returns what the answer earns beside its turns' rewards, or why it earns nothing."""
        if conversation.outcome != "ok" or self._reward_of(context, start) == "environment":
            last = conversation.turns[-1] if conversation.turns else Turn()
            return Grade(reward=0.0, outcome=last.outcome, message=last.message, numbers=last.numbers)
        assert conversation.finish is not None, "a conversation is graded when it has ended"
        decided = is_decided(conversation.finish, self.unfinished_reward)
        problem = start.problem
        if context.grader.grader.of(problem).reads_turns:
            message = self.environment_of(context.task.of(problem)).message
            problem = replace(problem, transcript=conversation.transcript(message))
        # The action says itself whether its turn began in a thought.
        grade = context.grader.submit(
            conversation.actions[-1], problem, decided=decided, follows_prompt=False
        )
        return await result_of(grade)

    def _reward_of(self, context: RolloutContext, start: Start) -> Reward:
        return self.reward or self.environment_of(context.task.of(start.problem)).earns

    def _trajectory(
        self, context: RolloutContext, start: Start, conversation: Conversation, grade: Grade
    ) -> Trajectory:
        rewards = conversation.rewards
        if self._reward_of(context, start) == "grader":
            rewards = [0.0] * len(rewards)
        graded = grade.step_rewards or (grade.reward,)
        if len(graded) > len(rewards):
            raise ValueError(
                f"a grade has step_rewards {graded}, and its answer {len(rewards)} turns: give one for each"
            )
        # The grades are those of the last turns; one alone is that of the last turn.
        first_graded = len(rewards) - len(graded)
        for turn, reward in enumerate(graded, first_graded):
            rewards[turn] += reward
        message, outcome = grade.message, grade.outcome
        assert conversation.finish is not None, "a conversation is graded when it has ended"
        if conversation.outcome != "ok":
            rewards = [0.0] * len(rewards)
        elif conversation.finish == "length" and self.unfinished_reward is not None:
            rewards = [0.0] * (len(rewards) - 1) + [self.unfinished_reward]
            outcome = outcome if grade.is_known else "no_answer"  # what it earns is known
            message = (
                "cut off by max_turns" if conversation.events["turns_spent"] else "cut off by max_tokens"
            )
        segments = tuple(conversation.segments)
        response_ids = joined([segment.token_ids for segment in segments])
        injected = sum(len(segment.token_ids) for segment in segments if segment.origin == "injected")
        return Trajectory(
            problem=start.problem,
            sample=0,
            prompt_ids=start.prompt_ids,
            segments=segments,
            finish_reason=conversation.finish,
            text=context.codec.decode(response_ids),
            grade=replace(grade, reward=sum(rewards), outcome=outcome, message=message),
            step_ends=conversation.step_ends,
            step_rewards=tuple(rewards) if any(rewards[:-1]) else (),
            numbers={
                "turns/count": float(len(conversation.step_ends)),
                "turns/observation_tokens": float(injected),
                "turns/environment_seconds": conversation.environment_seconds,
                **{f"turns/{event}": float(conversation.events[event]) for event in EVENTS},
            },
        )


def _take_played(conversation: Conversation, played: Played) -> None:
    """Takes the turn that the environment made of the last action."""
    (turn,) = played.turns
    conversation.environment_seconds += played.seconds
    try:
        conversation.take_turn(turn, played.snapshot)
    except ValueError as error:  # there are no tokens for the observation
        conversation.turns.pop()
        conversation.take_turn(Turn(done=True, outcome="error", message=str(error)))


@StateRule.register("turns")
@dataclass(frozen=True, kw_only=True)
class TurnStates(WholeAnswers):
    """A state where each of an answer's turns begins, behind what the environment said to the turn before.

    A value is what whole answers through the state earn, rewards of the turns before it included, so that a
    turn's advantage is its own reward and the difference that it made to all later ones. Continuations meet
    the environment's chances that their answer met, since its seed is the problem's: these don't depend on
    what the policy does, so that the gradient stays unbiased.
    """

    needs = (
        Need(
            Turns(),
            "it values the turns of answers",
            "choose the rollout 'multi_turn', or the states 'step_boundaries'",
        ),
    )

    @override
    def looks_back(self, task: Task) -> bool:
        return True

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        rollout = for_fixed_problems(experiment.rollout)
        if not isinstance(rollout, MultiTurn) or not experiment.credit.needs_engine:
            return
        environment = rollout.environment or environment_of(experiment.task)
        if environment is not None and environment.again == "never":
            yield Finding(
                f"it goes on with answers from their middle, and the environment {type(environment).__name__}"
                " can neither be copied nor played again (again = 'never')",
                "type",
                "choose a credit for whole answers, such as 'group', or another environment; one in which the"
                " same seed and actions make the same observations may say again = 'replay'",
            )

    @override
    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return (0, *trajectory.step_ends[:-1])

    @override
    def state_seed(self, context: RolloutContext, prefix: AnswerPrefix, purpose: str) -> int:
        state = repr(tuple(prefix.token_ids.tolist()))
        return derive_seed(context.seed, context.iteration, prefix.problem.id, state, f"turns {purpose}")
