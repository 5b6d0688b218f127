"""Makes vLLM send complete answers, as token ids. vLLM's own processes import this file.

By default, vLLM sends each token from the engine core to the HTTP process as soon as it is sampled, and
decodes it, for clients that stream answers. This project doesn't stream, and the HTTP process's Python code
for each token would be slower than a GPU (benchmarks/http_side.py).

With this file, one request passes once between the processes in each direction::

    the run's client         HTTP process              engine core (a process)
      POST SAMPLES  ──────►    SamplesRoute  ───────►    WholeAnswersScheduler
                                 waits                     step 1: keeps token 1
                                 waits                     step 2: keeps token 2
      JSON          ◄──────      token ids   ◄───────      last step: all tokens
      disconnects   ──────►      aborts      ───────►      drops what it kept (`finish_requests`)

A second route, `SCORES_ROUTE`, returns the log-probs of tokens that the client gives.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from treetune.engine.client import MODEL_NAME, SAMPLES_ROUTE, SCORES_ROUTE
from treetune.engine.key import App, Send, respond

ARRAYS_TO_JOIN = 256
"""As soon as an unfinished sample has this many arrays of log-probs, they are joined into one. There is an
array for each token, which takes 300 bytes."""


class WholeAnswersScheduler(Scheduler):
    """vLLM's scheduler, which keeps outputs until their request is finished.

    Two kinds of requests get each output at once: those that stream, and those with stop strings, since the
    HTTP process looks for stop strings in the decoded text after each token.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._unfinished: dict[str, tuple[EngineCoreOutput, list[LogprobsLists]]] = {}
        """The output so far of each unfinished request, and the parts of its log-probs."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Returns what is sent to each client after a step, without the outputs of unfinished requests."""
        outputs_by_client = super().update_from_output(scheduler_output, model_runner_output)
        for client, outputs in list(outputs_by_client.items()):
            complete = [self._complete(output) for output in outputs.outputs]
            outputs.outputs = [output for output in complete if output is not None]
            has_content = outputs.outputs or outputs.finished_requests or outputs.scheduler_stats
            if not has_content:  # an empty message would only cost time
                del outputs_by_client[client]
        return outputs_by_client

    def _complete(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Returns what is sent to the client after an output of the engine; None if nothing is sent yet.

        The client gets each output of a request that streams or has stop strings. Of any other request, it
        gets nothing before the last output, and then the complete answer.
        """
        unfinished = self._unfinished.get(output.request_id)
        # None: this is the request's first output, or all of its outputs are passed on.
        if unfinished is None:
            if output.finished:
                return output
            params = self.requests[output.request_id].sampling_params
            # A client that streams reads each output, and stop strings are found in the HTTP process.
            if params is None or params.stop or params.output_kind is not RequestOutputKind.FINAL_ONLY:
                return output
            output.new_token_ids = list(output.new_token_ids)  # a copy, which later outputs extend
            logprobs = [] if output.new_logprobs is None else [output.new_logprobs]
            self._unfinished[output.request_id] = output, logprobs
            return None
        answer, logprobs = unfinished
        answer.new_token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            logprobs.append(output.new_logprobs)
        if logprobs and (output.finished or len(logprobs) == ARRAYS_TO_JOIN):
            # An array for each token takes much memory, so the arrays are joined whenever there are
            # ARRAYS_TO_JOIN of them.
            logprobs[:] = [_join_logprobs(logprobs)]
        if not output.finished:
            return None
        del self._unfinished[output.request_id]
        answer.new_logprobs = logprobs[0] if logprobs else None
        answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
        return answer

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Ends requests before they are complete, such as those of a client that has disconnected."""
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._unfinished.pop(request.request_id, None)  # the outputs that were kept so far
        return ended


class AsyncWholeAnswers(WholeAnswersScheduler, AsyncScheduler):
    """`WholeAnswersScheduler` for a GPU, where vLLM plans a step while the GPU still computes the step before
    it."""


class SamplesRoute:
    """ASGI middleware with the routes `SAMPLES_ROUTE` and `SCORES_ROUTE`; see `make_sampling_body` and
    `make_scoring_body` in `treetune.engine.client`. It decodes text only for requests with stop strings. If a
    client disconnects, its samples are aborted."""

    def __init__(self, app: App) -> None:
        self._app = app
        if current_platform.is_cpu():
            # A lower priority, so that this process doesn't interrupt the engine on its core for each
            # request.
            os.nice(10)

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        """Answers the requests for `SAMPLES_ROUTE` and `SCORES_ROUTE`, and passes all others on to vLLM's
        app."""
        routes = {SAMPLES_ROUTE: self._sample, SCORES_ROUTE: self._score}
        handler = routes.get(scope.get("path", ""))
        if handler is None:
            await self._app(scope, receive, send)
            return
        body = await HttpRequest(scope, receive).json()
        answering = asyncio.ensure_future(handler(scope["app"].state, body))
        # The next message says that the client has disconnected.
        disconnect = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({answering, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                status, answer = answering.result()
                await respond(send, status, answer)
        finally:
            disconnect.cancel()
            answering.cancel()  # if the client has disconnected, this makes vLLM abort its request

    async def _sample(self, app_state: Any, request: dict[str, Any]) -> tuple[int, bytes]:
        """Returns the status and the body of the answer to a request."""
        stop = request["sampling"].get("stop")
        try:
            params = SamplingParams(
                **request["sampling"],
                include_stop_str_in_output=True,
                detokenize=bool(stop),  # text is only needed to look for stop strings in it
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            final_output = await self._generate(app_state, request, request["prompt"], params)
        except (VLLMClientError, ValueError, TypeError) as error:
            return 400, str(error).encode()
        except Exception as error:  # the client reports the server as failed
            return 500, f"{type(error).__name__}: {error}".encode()
        samples = []
        for sample in final_output.outputs:
            logprobs: list[float] | None = None  # if the request asks for none
            if sample.logprobs is not None:
                logprobs = make_finite(sample.logprobs.logprobs)
            samples.append(
                {
                    "token_ids": list(sample.token_ids),
                    "logprobs": logprobs,
                    "finish_reason": sample.finish_reason,
                }
            )
        return 200, json.dumps({"samples": samples}, allow_nan=False).encode()

    async def _score(self, app_state: Any, request: dict[str, Any]) -> tuple[int, bytes]:
        """Returns the status and the body of the answer to a request for scores."""
        prompt, text = request["prompt"], request["text"]
        try:
            output = await self._run_over(app_state, request, reads_cache=True)
            # The log-prob of a token is computed at the position before it, and vLLM computes none at
            # positions that it reads from its cache. So the prompt's last position must not be cached. It is
            # cached if the text was sampled or scored before.
            first_needed = len(prompt) - 1
            if (output.num_cached_tokens or 0) > first_needed:
                output = await self._run_over(app_state, request, reads_cache=False)
        except (VLLMClientError, ValueError, TypeError) as error:
            return 400, str(error).encode()
        except Exception as error:  # the client reports the server as failed
            return 500, f"{type(error).__name__}: {error}".encode()
        logprobs = make_finite(output.prompt_logprobs.logprobs[-len(text) :])
        return 200, json.dumps({"logprobs": logprobs}, allow_nan=False).encode()

    async def _run_over(self, app_state: Any, request: dict[str, Any], reads_cache: bool) -> RequestOutput:
        """Runs the model over a prompt and a text, for the log-probs of their tokens."""
        params = SamplingParams(
            max_tokens=1,  # vLLM samples at least one token, which isn't used
            temperature=0.0,
            prompt_logprobs=0,  # 0: only those of the prompt's own tokens
            flat_logprobs=True,
            detokenize=False,
            skip_reading_prefix_cache=not reads_cache,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return await self._generate(app_state, request, request["prompt"] + request["text"], params)

    async def _generate(
        self, app_state: Any, request: dict[str, Any], token_ids: list[int], params: SamplingParams
    ) -> RequestOutput:
        """Returns the final output of vLLM for a prompt of these tokens."""
        outputs = app_state.engine_client.generate(
            tokens_input(token_ids, cache_salt=request["cache_salt"]),
            params,
            uuid.uuid4().hex,
            lora_request=app_state.openai_serving_models.lora_requests.get(MODEL_NAME),
            priority=request["priority"],
        )
        # The parameters ask for `RequestOutputKind.FINAL_ONLY`, so there is one output.
        final_output: RequestOutput
        (final_output,) = [output async for output in outputs]
        return final_output


def _join_logprobs(parts: Sequence[LogprobsLists]) -> LogprobsLists:
    """Returns the log-probs of all parts, in their order."""
    # Each of these arrays has a row for each token. The fourth field of `LogprobsLists` is for log-probs of
    # several requests, so it stays None.
    return LogprobsLists(
        logprob_token_ids=np.concatenate([part.logprob_token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        sampled_token_ranks=np.concatenate([part.sampled_token_ranks for part in parts]),
    )


def make_finite(logprobs: Iterable[float]) -> list[float]:
    """Replaces minus infinity, which JSON doesn't have, by the number that vLLM's own routes write."""
    return [max(logprob, -9999.0) for logprob in logprobs]
