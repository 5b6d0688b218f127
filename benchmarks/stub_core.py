"""An engine core for vLLM's own front end that needs no model: it draws tokens at a fixed rate.

`--distributed-executor-backend benchmarks.stub_core.StubExecutor` in a server's command line puts it in the
place of what computes. Scheduler, messages between the processes and the HTTP side are vLLM's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

RATE = "TREETUNE_STUB_TOKENS_PER_SECOND"
"""The environment variable with the rate."""
FIRST = 2
"""The first id that is drawn; the smaller ones are padding and the end token."""


class StubExecutor(UniProcExecutor):
    """Draws a token for each request in each step, by the request's seed. The model is loaded and never run.

    A step takes as long as it would on a device that computes while the next step is planned: the seconds of
    its tokens at the rate `RATE`, counted from the end of the step before.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self.rate = float(os.environ[RATE])
        self.vocabulary = self.model_config.get_vocab_size() - FIRST
        # By the id of a request: endless numbers, of which its tokens are made.
        self.draws: dict[str, Iterator[int]] = {}
        self.end_of_step = 0.0

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self.draws.pop(request_id, None)
        for new_request in scheduler_output.scheduled_new_reqs:
            assert new_request.sampling_params is not None
            seed = new_request.sampling_params.seed or 0
            self.draws[new_request.req_id] = count(7919 * seed, 104_729)
        # Prompts aren't cut on a CPU, so that every scheduled request has a token.
        request_ids = list(scheduler_output.num_scheduled_tokens)
        token_ids = []
        for request_id in request_ids:
            token_ids.append(FIRST + next(self.draws[request_id]) % self.vocabulary)
        self.end_of_step = max(self.end_of_step + len(token_ids) / self.rate, time.monotonic())
        time.sleep(max(0.0, self.end_of_step - time.monotonic()))

        column = np.array(token_ids, np.int32)[:, None]
        logprobs = -column.astype(np.float32) / 7001
        ranks: np.ndarray = np.ones(len(token_ids), np.int32)
        self.sampled = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[[token_id] for token_id in token_ids],
            logprobs=LogprobsLists(column, logprobs, ranks),
        )
        # vLLM asks for the samples by `sample_tokens`, except after a step without requests.
        output = None if request_ids else self.sampled
        return completed_future(output) if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return completed_future(self.sampled) if non_block else self.sampled


def completed_future(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
