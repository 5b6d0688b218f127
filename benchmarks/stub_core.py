"""An engine core without a model, for vLLM's own front end: so many tokens a second, whatever they are.

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
FIRST = 2
"""Ids from here on are drawn: those before pad and end."""


class StubExecutor(UniProcExecutor):
    """Draws a request's tokens from its seed, one for each step. The model is loaded and never run.

    A step takes as long as a device would need beside which the next step is planned: the seconds of its
    tokens at the rate of the variable `RATE`, counted from the end of the step before.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self.rate = float(os.environ[RATE])
        self.vocabulary = self.model_config.get_vocab_size() - FIRST
        self.draws: dict[str, Iterator[int]] = {}
        self.done = 0.0

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        for name in scheduler_output.finished_req_ids:
            self.draws.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            assert new.sampling_params is not None
            self.draws[new.req_id] = count(7919 * (new.sampling_params.seed or 0), 104_729)
        names = list(scheduler_output.num_scheduled_tokens)
        # Prompts aren't cut on a CPU, so that every scheduled request has a token.
        ids = [FIRST + next(self.draws[name]) % self.vocabulary for name in names]
        self.done = max(self.done + len(ids) / self.rate, time.monotonic())
        time.sleep(max(0.0, self.done - time.monotonic()))
        column = np.array(ids, np.int32)[:, None]
        self.sampled = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[one] for one in ids],
            logprobs=LogprobsLists(column, -column.astype(np.float32) / 7001, np.ones(len(ids), np.int32)),
        )
        # Nothing is sampled from a step without tokens.
        output = None if names else self.sampled
        return done(output) if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return done(self.sampled) if non_block else self.sampled


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
