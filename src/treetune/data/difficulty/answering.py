"""Policies that answer rows: a model on servers that a job starts, or a model at OpenAI-compatible
addresses.

An `Ask` function returns when all questions are answered. It calls `keep` with one answer after the other::

    Served                                         a vLLM server of this job
      engine.generate(WAVE requests) ────────────► samples, `request_timeout` for each request
        keep(question, reply) ◄──────────────────  returns an answer
      the wave is answered: the next wave          if it dies, it is restarted, and asked again

    AtAddresses: an event loop, with `concurrency` tasks
      worker: takes the next question
        await client.ask ────────────────────────► the address, `timeout` for each of `retries` + 1 attempts
        await keep(question, reply) ◄────────────  returns an answer
          in a thread, after the `keep` of others
      `failure` is set, or no question is left: each worker ends after its present request

`keep` of a shard waits for the graders if too many answers have no grade yet (`shard.MOST_UNGRADED`). In the
event loop, this wait would use up the time of the requests that are in flight. The asking ends with an error
if the server fails more than `max_restarts` times in a row, if the address is given up, or if `keep` raises.
If the job is killed, its server ends too, and the next job asks for the answers that were not kept.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt, MinLen
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Finding
from treetune.data.asking import run_workers
from treetune.domains.endpoints.client import EndpointClient, EndpointReply
from treetune.domains.endpoints.settings import EndpointSettings
from treetune.engine.base import Engine, EngineLaunch
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.engine.settings import EngineSettings
from treetune.exceptions import EndpointError, RequestRefused, Unanswered
from treetune.models.sources import ModelSource
from treetune.store import held_folders
from treetune.store.files import make_new_private_folder, remove_folder
from treetune.tasks.thoughts import ends_in_thought
from treetune.vocabulary import Problem

if TYPE_CHECKING:
    from treetune.vocabulary import TextCodec

QUESTIONS_OF_A_WAVE = 4096
"""The number of answers that are asked for at a time: many more than are sampled side by side, and few enough
to keep their requests in memory."""


@dataclass(frozen=True)
class SampleQuestion:
    """An answer to ask for."""

    row: int
    """The number of the row that is the problem."""
    sample: int
    """The number of the answer among those to the row."""
    seed: int
    """The seed that the answer is drawn with."""
    problem: Problem


@dataclass(frozen=True)
class PolicyReply:
    """An answer."""

    text: str
    complete: bool
    """Whether the answer ended by itself, and was not cut off."""
    tokens: int | None
    """The number of tokens of the answer; None if the endpoint didn't report it."""
    begins_in_thought: bool = False
    """Whether the prompt ended with the tag that opens a thought, so the answer begins within the thought."""


REFUSED_OUTCOME, EMPTY_OUTCOME = "refused", "empty"


@dataclass(frozen=True)
class NoReply:
    """A question without an answer that could be right or wrong."""

    outcome: str
    """`REFUSED_OUTCOME` if the endpoint refuses the question, `EMPTY_OUTCOME` if its answer has no text."""
    why: str


Keep = Callable[[SampleQuestion, PolicyReply | NoReply | None], None]
"""A function that is called with every question and its answer, as soon as the answer comes. None: the
question can't be asked, since its prompt is empty or too long. Calls follow one after the other, perhaps in
different threads."""

Ask = Callable[[Sequence[SampleQuestion], Keep], None]
"""A function that asks questions, and returns when all are answered. It raises RuntimeError if no more
answers come."""


@dataclass(frozen=True)
class AskingShard:
    """The shard that asks."""

    number: int
    folder: Path
    seed: int
    """The seed of its engine."""


class Policy(Registrable):
    """Answers questions."""

    def check_answers(self, sampling: SamplingParams) -> Iterable[Finding]:
        """Yields what is wrong with asking the policy with these settings."""
        return ()

    def identity(self) -> object:
        """Returns the settings that, with the question, determine an answer. Their repr is compared."""
        raise NotImplementedError

    def open(self, sampling: SamplingParams, shard: AskingShard) -> AbstractContextManager[Ask]:
        """Opens the policy: it can be asked within the block."""
        raise NotImplementedError


@Policy.register("served")
@dataclass(frozen=True, kw_only=True)
class Served(Policy):
    """A model on a server that each job starts for itself. The server ends with the job."""

    model: ModelSource
    engine: EngineSettings
    """The server."""
    context_length: Annotated[int, Gt(1)]
    """The most tokens of prompt and answer together. A row whose prompt leaves no room for an answer can't be
    asked; the summary names it."""

    @override
    def check_answers(self, sampling: SamplingParams) -> Iterable[Finding]:
        """Yields findings about a context that is longer than the model's, or leaves no room for a prompt."""
        model_limit = self.model.longest  # in tokens of prompt and answer together
        if model_limit is not None and model_limit < self.context_length:
            yield Finding(
                f"the model was made for {model_limit} tokens, and context_length is {self.context_length}",
                "$.policy.context_length",
                f"lower it to {model_limit} or less",
            )
        if sampling.max_tokens >= self.context_length:
            yield Finding(
                f"an answer may have {sampling.max_tokens} tokens, and the context_length of"
                f" {self.context_length} leaves no room for a prompt",
                "$.answers.max_tokens",
                "lower it, or raise policy.context_length",
            )

    @override
    def identity(self) -> object:
        return self.model, self.context_length

    @override
    @contextmanager
    def open(self, sampling: SamplingParams, shard: AskingShard) -> Iterator[Ask]:
        """Starts the server with the model's weights, and yields the function that asks it."""
        import torch

        from treetune.engine.engine import start_engine
        from treetune.models.policy_files import write_for_engine
        from treetune.models.saved_weights import saved_weights

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model.check_at_start()
        # `_no_alphabet` raises an error for a model that asks for a task's alphabet: rows have none.
        tokenizer = self.model.load_tokenizer(_no_alphabet)
        codec = self.model.codec(tokenizer)
        memory = _memory_folder(shard)
        weights = memory / "weights"
        try:
            model = self.model.load_model(shard.seed, _no_alphabet)
            write_for_engine(saved_weights(model), model.config, tokenizer, weights)
            del model  # frees its memory before the engine loads the weights
            launch = EngineLaunch(
                weights=weights,
                logs=shard.folder / "logs",
                seed=shard.seed,
                context_length=self.context_length,
                device=device,
                end_ids=codec.end_ids,
            )
            engine = start_engine(self.engine, launch)
            try:
                engine.wait_ready()
                yield partial(self._ask, engine, codec, sampling)
            finally:
                engine.close()
        finally:
            shutil.rmtree(memory, ignore_errors=True)

    def _ask(
        self,
        engine: Engine,
        codec: TextCodec,
        sampling: SamplingParams,
        questions: Sequence[SampleQuestion],
        keep: Keep,
    ) -> None:
        """Asks all questions, at most `QUESTIONS_OF_A_WAVE` at a time, so that few requests are in memory."""
        for start in range(0, len(questions), QUESTIONS_OF_A_WAVE):
            self._ask_wave(engine, codec, sampling, questions[start : start + QUESTIONS_OF_A_WAVE], keep)

    def _ask_wave(
        self,
        engine: Engine,
        codec: TextCodec,
        sampling: SamplingParams,
        questions: Sequence[SampleQuestion],
        keep: Keep,
    ) -> None:
        """Asks some questions, and returns when all of them are answered."""
        # Questions that can't be asked are kept without a reply, and left out here.
        requests, asked_questions = self._requests(questions, codec, sampling, keep)

        def keep_completion(index: int, completions: list[Completion]) -> None:
            """Gives the answer to a question to `keep`. The index is that of the question's request."""
            question = asked_questions[index]
            [completion] = completions  # a request asks for one sample
            prompt = codec.whole_prompt(question.problem)  # with the chat template
            reply = PolicyReply(
                text=codec.decode(completion.token_ids),
                complete=completion.finish_reason == "stop",
                tokens=len(completion.token_ids),
                begins_in_thought=ends_in_thought(prompt),
            )
            keep(question, reply)

        if requests:
            engine.generate(requests, keep_completion)

    def _requests(
        self, questions: Sequence[SampleQuestion], codec: TextCodec, sampling: SamplingParams, keep: Keep
    ) -> tuple[list[Request], list[SampleQuestion]]:
        """Returns a request for each question that can be asked, and these questions in the same order.

        A request asks for one answer: a killed job then loses only the answers that were being sampled. A
        question whose prompt is empty, or leaves no room for an answer, is given to `keep` without a reply.
        """
        requests: list[Request] = []
        asked_questions: list[SampleQuestion] = []
        for question in questions:
            prompt_ids = codec.encode_prompt(question.problem)
            tokens_left = self.context_length - len(prompt_ids)
            if len(prompt_ids) == 0 or tokens_left < 1:
                keep(question, None)  # None: it can't be asked
                continue
            limited_sampling = replace(sampling, max_tokens=min(sampling.max_tokens, tokens_left))
            request = Request(prompt_ids, question.seed, n=1, sampling=limited_sampling, reads_logprobs=False)
            requests.append(request)
            asked_questions.append(question)
        return requests, asked_questions


def _no_alphabet() -> str:
    """Refuses the model 'tiny', whose tokens are the characters of a task (its alphabet)."""
    raise ValueError(
        "the model 'tiny' knows the characters of a task, and rows have none: give its alphabet, or take the"
        " model 'pretrained'"
    )


def _memory_folder(shard: AskingShard) -> Path:
    """Makes the empty folder for the engine's weights: in memory where the user may write there."""
    held_folders.delete_abandoned_folders()  # removes the folders of jobs that were killed
    if os.access(held_folders.SHARED_MEMORY, os.W_OK):
        return held_folders.make_folder_in_memory()
    folder = shard.folder / "weights-in-the-engine"
    remove_folder(folder)
    make_new_private_folder(folder)
    return folder


@Policy.register("endpoint")
@dataclass(frozen=True, kw_only=True)
class AtAddresses(Policy):
    """A model at OpenAI-compatible addresses. The shards use them in turn.

    The settings in `answers` replace an address's own temperature and max_tokens. A seed is sent with each
    request; the address decides whether the same seed gives the same answer. Set `answers.top_k` to -1 for
    addresses that don't know this parameter, and `send_seed` to false for addresses that refuse a seed.

    If an address refuses a request because of its content, that answer is left out."""

    addresses: Annotated[tuple[EndpointSettings, ...], MinLen(1)]
    send_seed: bool = True
    """Whether requests contain the seed with which an answer is to be drawn."""
    template_opens_thought: bool = False
    """Whether the chat template of the addresses' server ends with the tag that opens a thought, and the
    server leaves thoughts in answers. Then an answer that was cut off within its thought is all thought. With
    the api ``completions``, the prompt itself shows whether it opens a thought."""

    @override
    def identity(self) -> object:
        # The URLs, for example, don't change an answer.
        return [(address.model, address.api, address.extra) for address in self.addresses]

    @override
    @contextmanager
    def open(self, sampling: SamplingParams, shard: AskingShard) -> Iterator[Ask]:
        """Yields the function that asks one of the addresses. The shards are spread over the addresses."""
        chosen = self.addresses[shard.number % len(self.addresses)]
        settings = replace(chosen, temperature=sampling.temperature, max_tokens=sampling.max_tokens)
        yield partial(self._ask, settings, sampling)

    def _ask(
        self,
        settings: EndpointSettings,
        sampling: SamplingParams,
        questions: Sequence[SampleQuestion],
        keep: Keep,
    ) -> None:
        """Asks all questions at an address."""

        def keep_marked(question: SampleQuestion, reply: PolicyReply | NoReply | None) -> None:
            if isinstance(reply, PolicyReply) and self._opens_thought(settings, question.problem):
                # The tag that opens the thought is in the prompt, and not in the reply.
                reply = replace(reply, begins_in_thought=True)
            keep(question, reply)

        asyncio.run(_ask_address(settings, sampling, questions, keep_marked, send_seed=self.send_seed))

    def _opens_thought(self, settings: EndpointSettings, problem: Problem) -> bool:
        if settings.api == "completions":
            return ends_in_thought(problem.prompt)
        return self.template_opens_thought


async def _ask_address(
    settings: EndpointSettings,
    sampling: SamplingParams,
    questions: Sequence[SampleQuestion],
    keep: Keep,
    *,
    send_seed: bool = True,
) -> None:
    """Asks all questions at an address, `settings.concurrency` of them at a time.

    Raises RuntimeError if requests fail, after all answers were kept. An error of `keep`, such as that of a
    full disk, is raised as it is.
    """
    address = _AskedAddress(settings, sampling, questions, keep, send_seed=send_seed)

    def is_given_up() -> bool:
        return address.failure is not None

    async with EndpointClient.of(settings, is_given_up) as client:
        await run_workers(lambda: address.work(client), settings.concurrency)
    if address.failure is not None:
        raise address.failure
    # Before its first answer, an address might refuse every request, whatever the question. This address was
    # not given up for that, so its early refusals are about their questions.
    for question, refusal in address.early_refusals:
        keep(question, refusal)
    if address.unanswered:
        raise EndpointError(
            f"{len(address.unanswered)} requests failed; the other answers are kept. The first:"
            f" {address.unanswered[0]}"
        )


class _AskedAddress:
    """An address with the questions that workers ask it, and the errors so far."""

    def __init__(
        self,
        settings: EndpointSettings,
        sampling: SamplingParams,
        questions: Sequence[SampleQuestion],
        keep: Keep,
        *,
        send_seed: bool,
    ) -> None:
        self.settings, self.sampling, self.keep, self.send_seed = settings, sampling, keep, send_seed
        self.waiting = iter(questions)
        """All workers take their questions from this one iterator."""
        self.failure: EndpointError | None = None
        """Ends all workers."""
        self.unanswered: list[str] = []
        """The row and the error of each request that failed."""
        self.unanswered_in_a_row = 0
        self.early_refusals: list[tuple[SampleQuestion, NoReply]] = []
        """The refusals before the first answer.

        A refusal may be about its question, which then counts as refused. But an address that refuses every
        request, perhaps because of an unknown parameter, says nothing about any question. Therefore these
        refusals are only kept at the end, and not at all if the address was given up.
        """
        self.is_answering = False
        """Whether the address has answered a question."""
        self._keep_lock = asyncio.Lock()
        """Held while `keep` is called, since only one call may run at a time."""

    async def work(self, client: EndpointClient) -> None:
        """Asks one question after the other, until none is left or the address is given up."""
        for question in self.waiting:
            if self.failure is not None:
                return
            body = _body(self.settings, self.sampling, question, send_seed=self.send_seed)
            try:
                reply = await client.ask(body)
            except RequestRefused as error:
                await self._take_refusal(question, error)
            except Unanswered as error:
                self._take_failed_request(question, error)
            except EndpointError as error:
                self.failure = error
            else:
                await self._take_reply(question, reply)

    async def _keep(self, question: SampleQuestion, reply: PolicyReply | NoReply) -> None:
        """Calls `keep` in a thread. It may wait for graders, and the event loop goes on with the requests of
        the other workers."""
        async with self._keep_lock:
            await asyncio.to_thread(self.keep, question, reply)

    async def _take_refusal(self, question: SampleQuestion, error: RequestRefused) -> None:
        """Keeps a refused request as the question's reply, once the address has answered a question. Before
        that, the address may refuse every request, and is given up after some refusals."""
        refusal = NoReply(REFUSED_OUTCOME, str(error))
        if self.is_answering:  # so the refusal is about this question
            await self._keep(question, refusal)
            return
        self.early_refusals.append((question, refusal))
        if len(self.early_refusals) >= self.settings.give_up_after:
            self.failure = EndpointError(
                f"the first {len(self.early_refusals)} requests were refused, and none was answered; the"
                f" last: {error}"
            )

    def _take_failed_request(self, question: SampleQuestion, error: Unanswered) -> None:
        """Notes a request that failed. Gives the address up after too many of them in a row."""
        self.unanswered.append(f"row {question.row}: {error}")
        self.unanswered_in_a_row += 1
        if self.unanswered_in_a_row >= self.settings.give_up_after:
            self.failure = EndpointError(
                f"{self.unanswered_in_a_row} requests in a row failed; the last: {error}"
            )

    async def _take_reply(self, question: SampleQuestion, reply: EndpointReply) -> None:
        """Keeps the reply to a question. A reply without text is kept as a `NoReply`."""
        self.unanswered_in_a_row = 0
        self.is_answering = True
        if reply.why_empty is not None:
            await self._keep(question, NoReply(EMPTY_OUTCOME, reply.why_empty))
        else:
            await self._keep(question, PolicyReply(reply.text, reply.complete, reply.output_tokens))


def _body(
    settings: EndpointSettings, sampling: SamplingParams, question: SampleQuestion, *, send_seed: bool
) -> dict[str, Any]:
    """Returns the body of the request for an answer."""
    # This is the body of an empty conversation. Only its settings are used, such as the model and the
    # temperature. Below, the prompt comes from the question, and the stop strings come from `sampling`.
    body = settings.body((), {})
    for key in ("messages", "prompt", "stop"):
        body.pop(key, None)
    problem = question.problem
    if settings.api == "chat":
        messages = [vars(message) for message in problem.messages]
        body["messages"] = messages or [{"role": "user", "content": problem.prompt}]
    else:
        body["prompt"] = problem.prompt
    if send_seed:
        body["seed"] = question.seed
    if sampling.top_p < 1:
        body["top_p"] = sampling.top_p
    if sampling.top_k > 0:
        body["top_k"] = sampling.top_k
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body
