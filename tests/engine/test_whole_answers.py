"""The scheduler that hands on whole answers instead of tokens.

Promises that these tests hold:

* An answer leaves vLLM's engine core once, with all of its tokens and log-probs.
* A client that needs each token at once, as for stop strings, gets it.
* The scheduler forgets a request that was given up.
* Asynchronous scheduling gives the same answers (the slow test, with vLLM's own core).

vLLM is imported in the tests, since every worker of the suite imports this file, and importing vLLM takes
seconds.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.shipped import ROOT
from treetune.engine.base import EngineLaunch
from treetune.engine.launch import ServerLaunch
from treetune.engine.settings import VllmSettings
from treetune.models.policy_files import write_for_engine
from treetune.models.sources import TinyModel

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

    from treetune.engine.whole_answers import WholeAnswersScheduler

JOINED_TWICE = 521
"""Tokens whose arrays of log-probs are joined twice, with some left."""


def outputs_of(name: str, tokens: int, reads_logprobs: bool = True) -> list[EngineCoreOutput]:
    """Builds the outputs of one answer step by step, as vLLM's scheduler does: some steps have two tokens."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    draws = random.Random(tokens)
    ids = [draws.randrange(1000) for _ in range(tokens)]
    outputs = []
    while ids:
        width = draws.choice((1, 1, 2))
        ids_of_step, ids = ids[:width], ids[width:]
        column = np.array(ids_of_step, np.int32)[:, None]
        logprobs = LogprobsLists(column, -column.astype(np.float32) / 7, column[:, 0])
        outputs.append(EngineCoreOutput(name, ids_of_step, logprobs if reads_logprobs else None))
    outputs[-1].finish_reason, outputs[-1].stop_reason = FinishReason.STOP, 7
    return outputs


def ids_of(outputs: list[EngineCoreOutput]) -> list[int]:
    ids: list[int] = []
    for output in outputs:
        ids.extend(output.new_token_ids)
    return ids


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> WholeAnswersScheduler:
    """The scheduler on a stand-in for vLLM's base class, which returns the outputs that `step` gets."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from treetune.engine.whole_answers import WholeAnswersScheduler

    monkeypatch.setattr(Scheduler, "__init__", lambda self: None)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, outputs, _: outputs)
    whole_answers = WholeAnswersScheduler()
    whole_answers.requests = {}
    return whole_answers


def step(scheduler: WholeAnswersScheduler, *outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
    from vllm.v1.engine import EngineCoreOutputs

    by_client: Any = {0: EngineCoreOutputs(outputs=list(outputs))}
    outputs_by_client = scheduler.update_from_output(by_client, None)  # type: ignore[arg-type]
    handed_on: list[EngineCoreOutput] = []
    for message in outputs_by_client.values():
        assert message.outputs, "an empty message would only wake the HTTP side"
        handed_on.extend(message.outputs)
    return handed_on


def add_request(scheduler: WholeAnswersScheduler, name: str, **params: Any) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    settings = SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY} | params)
    scheduler.requests[name] = SimpleNamespace(request_id=name, sampling_params=settings)


@pytest.mark.parametrize("reads_logprobs", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 40, JOINED_TWICE])
def test_an_answer_comes_once_and_has_all_tokens_and_logprobs(
    scheduler: WholeAnswersScheduler, tokens: int, reads_logprobs: bool
) -> None:
    from vllm.v1.engine import FinishReason

    from treetune.engine.whole_answers import ARRAYS_TO_JOIN

    assert JOINED_TWICE // ARRAYS_TO_JOIN == 2
    add_request(scheduler, "answer")
    outputs = outputs_of("answer", tokens, reads_logprobs)
    ids = ids_of(outputs)
    handed_on = []
    for output in outputs:
        handed_on.extend(step(scheduler, output))
    (whole,) = handed_on
    assert whole.new_token_ids == ids
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.STOP, 7)
    if reads_logprobs:
        assert whole.new_logprobs is not None
        assert whole.new_logprobs.logprobs.tobytes() == (-np.array(ids, np.float32) / 7).tobytes()
        assert whole.new_logprobs.logprob_token_ids[:, 0].tolist() == ids
        assert whole.new_logprobs.sampled_token_ranks.tolist() == ids
    else:
        assert whole.new_logprobs is None
    assert not scheduler._unfinished


def test_the_tokens_of_two_answers_at_a_time_are_kept_apart(scheduler: WholeAnswersScheduler) -> None:
    long, short = outputs_of("long", 30), outputs_of("short", 4)
    ids_of_long, ids_of_short = ids_of(long), ids_of(short)
    for name in ("long", "short"):
        add_request(scheduler, name)
    handed_on = []
    while long or short:
        outputs = [answer.pop(0) for answer in (long, short) if answer]
        handed_on += step(scheduler, *outputs)
    assert [(answer.request_id, answer.new_token_ids) for answer in handed_on] == [
        ("short", ids_of_short),
        ("long", ids_of_long),
    ]


@pytest.mark.parametrize("has_stop_string", [True, False])
def test_a_client_that_reads_token_by_token_gets_each_token_at_once(
    scheduler: WholeAnswersScheduler, has_stop_string: bool
) -> None:
    from vllm.sampling_params import RequestOutputKind

    params: dict[str, Any] = {"stop": ["x"]} if has_stop_string else {"output_kind": RequestOutputKind.DELTA}
    add_request(scheduler, "answer", **params)
    outputs = outputs_of("answer", 5)
    assert [step(scheduler, output) for output in outputs] == [[output] for output in outputs]


def test_a_request_that_was_given_up_is_forgotten(
    scheduler: WholeAnswersScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    add_request(scheduler, "answer")
    first, *_ = outputs_of("answer", 40)
    step(scheduler, first)
    ended = [scheduler.requests["answer"]]
    monkeypatch.setattr(Scheduler, "finish_requests", lambda *_: ended)
    assert scheduler.finish_requests("answer", RequestStatus.FINISHED_ABORTED) == ended
    assert not scheduler._unfinished


def test_only_beside_a_gpu_the_scheduler_is_asynchronous() -> None:
    """With a synchronous scheduler, vLLM doesn't schedule asynchronously on a GPU, and gives no warning."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from treetune.engine.whole_answers import AsyncWholeAnswers, WholeAnswersScheduler

    run = EngineLaunch(Path("/weights"), Path("/logs"), seed=0, context_length=64)

    def scheduler_class(device: str, **settings: Any) -> str:
        launch = ServerLaunch(VllmSettings(**settings), replace(run, device=device))
        command = launch.command(Path("/weights"), 1)
        return command[command.index("--scheduler-cls") + 1].rpartition(".")[2]

    assert scheduler_class("cpu") == WholeAnswersScheduler.__name__
    assert scheduler_class("cuda", async_scheduling=False) == WholeAnswersScheduler.__name__
    assert scheduler_class("cuda") == AsyncWholeAnswers.__name__
    assert issubclass(AsyncWholeAnswers, AsyncScheduler)
    bases = AsyncWholeAnswers.__mro__
    assert bases.index(WholeAnswersScheduler) < bases.index(AsyncScheduler)


@pytest.mark.slow
def test_asynchronous_scheduling_gives_the_same_answers_whole_as_token_by_token(
    tmp_path: Path,
) -> None:
    """Runs vLLM's own core with two steps in flight, as beside a GPU, on a stub for the model.

    The cache is so small that vLLM preempts a request and begins it again.
    """
    source = TinyModel(layers=1, hidden_size=32, heads=1, intermediate_size=32, context_length=320)
    model = source.load_model(0, lambda: "0123456789")
    tokenizer = source.load_tokenizer(lambda: "0123456789")
    write_for_engine(dict(model.named_parameters()), model.config, tokenizer, tmp_path / "weights")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TREETUNE_STUB_TOKENS_PER_SECOND": "1e9",
    }
    schedulers = (
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
        "treetune.engine.whole_answers.AsyncWholeAnswers",
    )
    command = [sys.executable, "-c", ASYNCHRONOUS, str(tmp_path), *schedulers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    by_tokens, whole = (json.loads((tmp_path / f"{scheduler}.json").read_text()) for scheduler in schedulers)
    assert by_tokens == whole
    assert [len(ids) for ids, _, _ in whole] == [5 + 17 * i for i in range(6) for _ in range(3)]


ASYNCHRONOUS = """
import json, os, sys
import vllm
import vllm.v1.worker.cpu_worker
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.scheduler import Scheduler

check_and_update, preempt = CpuPlatform.check_and_update_config, Scheduler._preempt_request
preempted = []

def check_and_keep_async_scheduling(cls, config):
    check_and_update(config)
    config.scheduler_config.async_scheduling = True

def record_and_preempt(self, request, *arguments, **named):
    preempted.append(request)
    return preempt(self, request, *arguments, **named)

CpuPlatform.check_and_update_config = classmethod(check_and_keep_async_scheduling)
Scheduler._preempt_request = record_and_preempt

# A process for each scheduler, forked so that vLLM is imported once.
folder, *schedulers = sys.argv[1:]
for scheduler in schedulers:
    if (child := os.fork()) == 0:
        break
    _, status = os.waitpid(child, 0)
    assert status == 0
else:
    sys.exit()

llm = vllm.LLM(
    f"{folder}/weights", scheduler_cls=scheduler, dtype="float32", enforce_eager=True, max_model_len=320,
    max_num_seqs=8, block_size=32, num_gpu_blocks_override=14, enable_prefix_caching=False,
    enable_chunked_prefill=False, distributed_executor_backend="benchmarks.stub_core.StubExecutor",
)
assert llm.llm_engine.engine_core.engine_core.batch_queue_size == 2
prompts = [vllm.TokensPrompt(prompt_token_ids=[2 + i, 3, 4]) for i in range(6)]
params = [
    vllm.SamplingParams(n=3, seed=100 * i, max_tokens=5 + 17 * i, logprobs=0, detokenize=False)
    for i in range(6)
]
answers = []
for output in llm.generate(prompts, params, use_tqdm=False):
    for sample in output.outputs:
        logprobs = [next(iter(by_token.values())).logprob for by_token in sample.logprobs]
        answers.append([list(sample.token_ids), logprobs, sample.finish_reason])
assert preempted
with open(f"{folder}/{scheduler}.json", "w") as file:
    json.dump(answers, file)
"""
