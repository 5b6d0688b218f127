"""Answers of several turns: the policy writes, an environment replies, and so on.

Each answer is a separate coroutine, which only waits for its own turns::

    MultiTurn.answer (one coroutine for each answer; `in_flight` of them converse at a time)
      ├ _converse: until the answer ends
      │   ├ context.engine.sample(turn) ─────► the policy's turn
      │   └ Play.act(action) ────────────────► the environment's reply (`environments.pool`)
      └ _grade: another answer begins meanwhile, so that a grader delays neither engine nor environments
    announcer.announce ──────────────────────► credit may begin to continue this answer (`states.early`)
"""

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
    Continuations,
    Experiment,
    Feature,
    Finding,
    Need,
    OneLine,
    SampledAnswers,
    Turns,
)
from treetune.credit.states.base import AnswerPrefix, StateRule
from treetune.credit.states.whole_answers import WholeAnswers
from treetune.domains.conversation import EVENTS, Conversation, TurnLimits, actions_of, unpack_snapshot
from treetune.domains.environments.base import NOTHING, Environment, Reward, Turn, environment_of
from treetune.domains.environments.pool import Play, Played
from treetune.engine.programs import result_of
from treetune.engine.requests import Request
from treetune.models.chat import TOOL_RESULT
from treetune.rollouts.answers import Announcer, GrowingRollout, Start, is_decided
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext, require
from treetune.rollouts.numbers import Number, NumberGroup, declare_group
from treetune.rollouts.single_turn import adapt_to_fixed_problems
from treetune.seeds import derive_seed
from treetune.tasks.base import Task
from treetune.tasks.mixed import parts_of, task_of
from treetune.vocabulary import Grade, TextCodec, Trajectory, concatenate

declare_group(
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


OBSERVATION_PLACEHOLDER = "{observation}"
"""The place of the observation in `observation_format`."""
IN_FLIGHT_PER_REQUEST = 4
"""If `in_flight` is null, the limit of answers in progress is this many times the number of samples that the
engine draws at the same time."""
OBSERVATION_ON_A_LINE = f"\n{OBSERVATION_PLACEHOLDER}\n"
"""The default text between turns of a model without a chat."""


@Rollout.register("multi_turn")
@dataclass(frozen=True, kw_only=True)
class MultiTurn(GrowingRollout):
    """Samples `samples` answers to each problem, turn by turn. An environment replies to what the policy
    writes, and its reply is added to the answer, until the environment ends the answer or a limit is reached.
    Answers don't wait for each other.

    The environment's replies are injected: they have no log-probs, and aren't trained. An observation is
    encoded once. Sampled tokens are never decoded and encoded again, so training sees the sampled token ids.
    An answer that reaches `max_turns`, or `max_tokens` with its observations counted, is unfinished.

    If the environment hangs or fails, the answer ends with the outcome ``timeout`` or ``error`` and earns
    nothing. If a requirement of the environment is missing, the answer is left out of training and
    measurements.

    ``turns/…`` are means over answers: turns, tokens of observations, and events (`EVENTS`).
    """

    environment: Environment | None = None
    """The environment that replies to the policy; null: the environment of each problem's task."""
    max_turns: Annotated[int, Gt(0)]
    """The most turns of an answer."""
    turn_tokens: Annotated[int, Gt(0)] | None = None
    """The most sampled tokens of a turn; null: as many as remain of the answer's `max_tokens`. A turn that is
    cut off at this limit goes to the environment nevertheless."""
    answer_deadline: Annotated[float, Gt(0)] | None = None
    """Seconds that the environment may take for all turns of an answer together; null: only each turn has a
    deadline. An answer that needs more ends with the outcome ``timeout``. A continuation of an answer has all
    of this time for its own turns."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn. They stay in its tokens, and the environment reads the text before them."""
    reward: Reward | None = None
    """Reward of an answer: the sum of its turns' rewards (``environment``), the grader's reward for its last
    turn (``grader``), or the ``sum`` of both. null: the environment's default."""
    unfinished_reward: float | None = 0.0
    """Reward of an answer that reached its limit of turns or tokens. null: the reward that it has earned so
    far."""
    in_flight: Annotated[int, Gt(0)] | None = None
    """The most answers that are in progress at the same time; null: four times the samples that the engine
    draws at the same time, so that the engine is busy while environments compute."""
    observation_characters: Annotated[int, Gt(0)] = 2000
    """The most characters of an observation, or of each result of a native call. The rest is cut off."""
    observation_format: str | None = None
    """The text between two turns, with ``{observation}`` in it. null: the text that the model's chat template
    puts there, or for a model without a chat, the observation on a separate line
    (`OBSERVATION_ON_A_LINE`)."""

    seed_name = "turns"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turn_tokens is not None and self.turn_tokens > self.max_tokens:
            raise ValueError(
                f"turn_tokens is {self.turn_tokens}, which exceeds max_tokens, the limit of the whole answer:"
                f" {self.max_tokens}; lower it, or leave it out"
            )
        if self.observation_format is not None and OBSERVATION_PLACEHOLDER not in self.observation_format:
            raise ValueError(
                f"observation_format is {self.observation_format!r}, which leaves the observation out: put"
                f" {OBSERVATION_PLACEHOLDER} into it"
            )

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        # `OneLine(turns=True)`: no threads, and an environment's replies between the policy's turns.
        return SampledAnswers(), Answers(self.samples), OneLine(turns=True), Turns()

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        environments = self.environments(experiment)
        if not environments:
            yield Finding(
                "the rollout has no environment, and neither has the task",
                "environment",
                "give one, e.g. {type: 'tools', tools: [{type: 'python'}]}, or choose the task 'environment'",
            )
        # Environments that read special tokens take native calls: tool calls in the model's own format.
        if any(environment.reads_specials for environment in environments):
            if experiment.model.chat is None:
                yield Finding(
                    "the environment's format of calls needs a chat, and the model has none",
                    "$.model.chat",
                    "set model.chat to {}, or leave the environment's format at 'tags'",
                )
            if self.observation_format is not None:
                yield Finding(
                    "the results of native calls are formatted by the chat template, so that"
                    " observation_format has no effect",
                    "observation_format",
                    "leave it out, or leave the environment's format at 'tags'",
                )

    def environments(self, experiment: Experiment) -> list[Environment]:
        """Returns all environments that answers may have. There may be several, since the domains of a
        mixture may have different environments."""
        if self.environment is not None:
            return [self.environment]
        return [
            environment
            for part in parts_of(experiment.task)
            if (environment := environment_of(part)) is not None
        ]

    def environment_for(self, task: Task) -> Environment:
        """Returns the environment of answers to a task's problems. It is `NOTHING` if the task has none, as
        may happen in a mixture."""
        return self.environment or environment_of(task) or NOTHING

    def frame(self, codec: TextCodec) -> Callable[[str], str] | None:
        """Returns a function that turns an observation into the text between two turns. Returns None if the
        chat template makes this text."""
        if self.observation_format is None and codec.turn_frame is not None:
            return None
        text_before, _, text_after = (self.observation_format or OBSERVATION_ON_A_LINE).partition(
            OBSERVATION_PLACEHOLDER
        )
        return lambda observation: f"{text_before}{observation}{text_after}"

    @override
    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self.environment_for(task).offered()

    @override
    def check_at_start(self, codec: TextCodec) -> None:
        # Native calls are tool calls in the model's own format. The chat template writes their results.
        # The task and its environment aren't known here, so only the rollout's `environment` is checked.
        calls_natively = self.environment is not None and self.environment.reads_specials
        if codec.turn_frame is not None and (calls_natively or self.frame(codec) is None):
            # Formats an example. This raises if the template can't put such a message between two turns.
            codec.turn_frame([TOOL_RESULT] if calls_natively else "")

    @override
    async def answers(self, context: RolloutContext, starts: Sequence[Start]) -> list[Trajectory]:
        """Samples and grades one answer from each start; see `GrowingRollout`.

        The environment's seed derives from the problem, so all answers to a problem have the same one.
        """
        in_flight = self.limit_in_flight(context)
        announcer = Announcer(context, len(starts))

        async def answer_and_announce(start: Start) -> Trajectory:
            answer = await self.answer(context, start, in_flight)
            await announcer.announce(answer)
            return answer

        try:
            return await asyncio.gather(*(answer_and_announce(start) for start in starts))
        finally:
            close_turn_journal(context)

    def limit_in_flight(self, context: RolloutContext) -> asyncio.Semaphore:
        """Returns a semaphore that limits how many answers are in progress at the same time."""
        assert context.engine is not None, "a rollout that samples needs an engine"
        return asyncio.Semaphore(self.in_flight or IN_FLIGHT_PER_REQUEST * context.engine.at_once)

    async def answer(self, context: RolloutContext, start: Start, in_flight: asyncio.Semaphore) -> Trajectory:
        """Samples and grades one answer. Its number (`Trajectory.sample`) is 0 until the caller sets it.

        `in_flight` is the limit from `limit_in_flight`. All answers of a phase share it.
        """
        async with in_flight:
            conversation = await self._converse(context, start)
        # Another answer may begin now, so that a grader delays neither the engine nor an environment.
        grade = await self._grade(context, start, conversation)
        return self._trajectory(context, start, conversation, grade)

    async def _converse(self, context: RolloutContext, start: Start) -> Conversation:
        """Alternates turns of the policy and of the environment until the answer ends."""
        assert context.engine is not None, "a rollout that samples needs an engine"
        conversation, play = self._begin(context, start)
        if start.segments:
            # This answer has turns already. The environment must first get into the state after these turns:
            # from a copy of that state in the last segment, or by playing the turns again. `play.begin` does
            # the one or the other. A new answer needs neither: its environment begins with the first action.
            replayed = await result_of(play.begin())
            has_snapshot = start.segments[-1].snapshot is not None
            if has_snapshot:
                conversation.restore(start.segments)
            else:
                conversation.replay(start.segments, replayed.turns)
        while (next_turn := conversation.next_turn) is not None:
            # A task adjusts only `max_tokens` and `stop`. The conversation was begun with the adjusted values
            # (see `_begin`), and all other settings come from the rollout's `sampling`.
            stop = conversation.limits.stop
            request = Request(
                next_turn.context_ids,
                seed=derive_seed(start.seed, next_turn.number),
                n=1,
                sampling=replace(self.sampling, max_tokens=next_turn.max_tokens, stop=stop),
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
        """Returns a conversation without turns, and the `Play` that passes its actions to the environment."""
        task = task_of(context.task, start.problem)
        environment = self.environment_for(task)
        sampling = task.adjust_sampling(self.sampling)
        limits = TurnLimits(
            turn_tokens=self.turn_tokens or sampling.max_tokens,
            max_turns=self.max_turns,
            observation_characters=self.observation_characters,
            stop=sampling.stop,
            reads_specials=environment.reads_specials,  # whether actions keep special tokens
        )
        budget = context.settings.token_budget(start.prompt_ids, sampling.max_tokens)
        conversation = Conversation(
            context.codec, self.frame(context.codec), limits, start.prompt_ids, budget
        )
        # The turns that the answer has already: the policy's actions, and the environment's state after them.
        # For a new answer they are empty and None.
        actions = actions_of(context.codec, start.prompt_ids, start.segments, limits)
        snapshot = unpack_snapshot(start.segments).environment
        journal = context.turn_journal
        play: Play = require(context.environments, "environments").begin(
            environment,
            start.problem,
            seed=derive_seed(context.seed, context.iteration, start.problem.id, "environment"),
            actions=actions,
            snapshot=snapshot,
            # The journal keeps the environment's replies on disk, so that a run that is started again needn't
            # ask for them again. It identifies an answer by its seed.
            journal=None if journal is None else (journal, start.seed),
            seconds=self.answer_deadline or math.inf,
        )
        return conversation, play

    async def _grade(self, context: RolloutContext, start: Start, conversation: Conversation) -> Grade:
        """Returns the grader's grade of the last turn, with the numbers of the environment's last reply.

        The grader isn't asked if the environment failed, or if answers earn only the environment's rewards.
        Then the grade has the reward 0, and the outcome, message and numbers of the environment's last reply.
        What the environment's turns earn is added in `_trajectory`.
        """
        last_reply = conversation.replies[-1] if conversation.replies else Turn()
        if conversation.outcome != "ok" or self._reward_of(context, start) == "environment":
            return Grade(
                reward=0.0,
                outcome=last_reply.outcome,
                message=last_reply.message,
                numbers=last_reply.numbers,
            )
        assert conversation.finish is not None, "a conversation is graded when it has ended"
        # If the answer gets `unfinished_reward` anyway, it is `decided`: no judge is asked about it.
        decided = is_decided(conversation.finish, self.unfinished_reward)
        problem = start.problem
        if context.grader.grader.of(problem).reads_turns:
            environment = self.environment_for(task_of(context.task, problem))
            # `environment.message` turns an action into a message of a chat.
            problem = replace(problem, transcript=conversation.transcript(environment.message))
        # There is at least one action, since a conversation ends only after a completion. A chat template may
        # end the prompt with an opening ``<think>``. `Conversation` puts this tag before such an action, so
        # `follows_prompt=False` tells the grader not to look for it at the end of the prompt.
        grade = await result_of(
            context.grader.submit(conversation.actions[-1], problem, decided=decided, follows_prompt=False)
        )
        # A number that both give, such as ``rewards/format``, is the grader's.
        return replace(grade, numbers={**last_reply.numbers, **grade.numbers})

    def _reward_of(self, context: RolloutContext, start: Start) -> Reward:
        return self.reward or self.environment_for(task_of(context.task, start.problem)).earns

    def _trajectory(
        self, context: RolloutContext, start: Start, conversation: Conversation, grade: Grade
    ) -> Trajectory:
        """Returns the answer of an ended conversation. The settings `reward` and `unfinished_reward` decide
        what each of its turns earns."""
        rewards = conversation.rewards  # the environment's reward of each turn, in a new list
        if self._reward_of(context, start) == "grader":
            rewards = [0.0] * len(rewards)
        # If only the environment gives rewards, the grader wasn't asked: `grade.reward` is 0.
        rewards_of_grader = grade.step_rewards or (grade.reward,)
        if len(rewards_of_grader) > len(rewards):
            raise ValueError(
                f"a grade has step_rewards {rewards_of_grader}, and its answer has {len(rewards)} turns:"
                " give at most one reward for each turn"
            )
        # If the grader gives fewer rewards than there are turns, they belong to the last turns.
        first_graded_turn = len(rewards) - len(rewards_of_grader)
        for turn, reward in enumerate(rewards_of_grader, first_graded_turn):
            rewards[turn] += reward
        message, outcome = grade.message, grade.outcome
        assert conversation.finish is not None, "a conversation is graded when it has ended"
        if conversation.outcome != "ok":
            rewards = [0.0] * len(rewards)  # the environment hung or failed
        elif conversation.finish == "length" and self.unfinished_reward is not None:
            rewards = [0.0] * (len(rewards) - 1) + [self.unfinished_reward]
            # The outcome of a grader that was unavailable would leave the answer out of training. But the
            # reward is known here without the grader.
            if not grade.is_known:
                outcome = "no_answer"
            message = (
                "cut off by max_turns" if conversation.events["turns_spent"] else "cut off by max_tokens"
            )
        segments = tuple(conversation.segments)
        response_ids = concatenate([segment.token_ids for segment in segments])
        injected = sum(len(segment.token_ids) for segment in segments if segment.origin == "injected")
        return Trajectory(
            problem=start.problem,
            sample=0,  # `GrowingRollout.run` numbers the answers
            prompt_ids=start.prompt_ids,
            segments=segments,
            finish_reason=conversation.finish,
            text=context.codec.decode(response_ids),
            grade=replace(grade, reward=sum(rewards), outcome=outcome, message=message),
            step_ends=conversation.step_ends,
            # Empty if no turn before the last one earned anything: then the last turn's reward is the sum,
            # which the grade has.
            step_rewards=tuple(rewards) if any(rewards[:-1]) else (),
            numbers={
                "turns/count": float(len(conversation.step_ends)),
                "turns/observation_tokens": float(injected),
                "turns/environment_seconds": conversation.environment_seconds,
                **{f"turns/{event}": float(conversation.events[event]) for event in EVENTS},
            },
        )


def close_turn_journal(context: RolloutContext) -> None:
    """Closes the journal of turns, if there is one. It opens again if another answer adds a turn."""
    if context.turn_journal is not None:
        context.turn_journal.close()


def _take_played(conversation: Conversation, played: Played) -> None:
    """Adds the environment's reply to the last action to a conversation."""
    (reply,) = played.turns  # one action makes one turn
    conversation.environment_seconds += played.seconds
    try:
        conversation.take_reply(reply, played.snapshot)
    except ValueError as error:  # the tokenizer has no tokens for the observation
        conversation.replies.pop()  # `take_reply` had added it before it raised
        conversation.take_reply(Turn(done=True, outcome="error", message=str(error)))


def check_restorable(environments: Iterable[Environment], key: str, remedy: str) -> Iterable[Finding]:
    """Yields a finding for each environment whose state after a turn can't be reached again.

    Args:
        environments: All environments that answers may have.
        key: The configuration key for the finding, relative to the part that continues answers, such as
            "type".
        remedy: What to choose instead of that part: "choose a credit for whole answers".
    """
    for environment in environments:
        if environment.again == "never":
            yield Finding(
                "it continues answers from their middle, and the environment"
                f" {type(environment).__name__} can neither be copied nor played again (again = 'never')",
                key,
                f"{remedy}, or another environment; if the same seed and actions always make the same"
                " observations, set again = 'replay' in its class",
            )


@StateRule.register("turns")
@dataclass(frozen=True, kw_only=True)
class TurnStates(WholeAnswers):
    """The states at which the turns of an answer begin, after the environment's reply to the previous turn.

    The value of a state is the expected reward of complete answers that pass through it, including what the
    turns before the state have earned. A turn's advantage is the difference of the values at its end and at
    its beginning: its own reward plus its effect on later rewards. The environment's seed derives from the
    problem, so a continuation has the same one as the answer that it continues. The gradient stays unbiased,
    since this seed doesn't depend on the policy's actions. The rollout itself samples the continuations
    (`WholeAnswers`).
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
        return True  # where a turn begins depends only on the tokens before it: the previous reply's end

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        # The rollout that samples the answers. It may be inside another rollout, such as `until_mixed`, which
        # this function takes away.
        rollout = adapt_to_fixed_problems(experiment.rollout)
        # Only credit that continues answers needs the environment in a state within an answer.
        if not isinstance(rollout, MultiTurn) or Continuations() not in experiment.credit.gives:
            return
        yield from check_restorable(
            rollout.environments(experiment), "type", "choose a credit for whole answers, such as 'group'"
        )

    @override
    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return (0, *trajectory.step_ends[:-1])

    @override
    def state_seed(self, context: RolloutContext, prefix: AnswerPrefix, purpose: str) -> int:
        state = repr(tuple(prefix.token_ids.tolist()))
        return derive_seed(context.seed, context.iteration, prefix.problem.id, state, f"turns {purpose}")
