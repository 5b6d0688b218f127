"""Runs the other side of a pair, its peer, in a process of its own: vLLM without a server, or TRL.

Both processes exchange lines over pipes. `Child` is the end of the process that measures, and `Turns` that of
the peer::

    Child.wait_ready   ── starts the process ──>   loads its model
                       <── {"ready": true} ─────
    Child.ask          ── a JSON object, a line ─>  takes its turn
                       <── {"seconds": 1.2, …} ──

The process ends when its standard input ends.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

END_S = 30.0
"""Seconds within which a process ends when it is asked to."""


class Child:
    """A process that runs one of the functions `offline_vllm` and `trl_grpo` of this file."""

    def __init__(self, name: str, settings: Mapping[str, Any], *, environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, __file__, name, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "PYTHONPATH": path},
            start_new_session=True,
        )

    def ask(self, question: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
        """Has the process take a turn, and returns its answer.

        Raises:
            RuntimeError: if it ends, or does not answer within `deadline` seconds.
        """
        return self._exchange(json.dumps(question).encode() + b"\n", deadline)

    def wait_ready(self, *, deadline: float) -> dict[str, Any]:
        """Waits until the process can take turns. Raises RuntimeError as `ask` does."""
        return self._exchange(b"", deadline)

    def _exchange(self, line: bytes, deadline: float) -> dict[str, Any]:
        """Sends a line, unless it is empty, and returns the next line that the process prints."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if line:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        answer = b""
        until = time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise RuntimeError(f"{self.name} said nothing for {deadline:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise RuntimeError(f"{self.name} ended with code {self._process.wait(END_S)}")
                answer += piece
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        self._process.stdout.close()


class Turns:
    """The peer's end of the pipes: iterates over the questions that it is asked."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers

    def answer(self, answer: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def next_question(self) -> dict[str, Any] | None:
        """Waits for a question. Returns None if there will be no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.next_question, None)


def take_standard_output() -> IO[str]:
    """Returns standard output, for answers alone. From now on, other output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def offline_vllm(settings: dict[str, Any], turns: Turns) -> None:
    """Serves ``LLM.generate``.

    A question has ``requests``. The answer has the ``seconds`` of ``LLM.generate``, the number of sampled
    ``tokens``, and a ``digest`` of their ids.

    Args:
        settings: ``arguments`` is the command line of a vLLM server, by which the engine is configured.
            ``core`` tells whether its core runs in a process of its own, as the server's does, or in this
            one.
        turns: The questions.
    """
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    # Options that only a server has (host, port, …) are left over.
    engine_options, _ = parser.parse_known_args(settings["arguments"])
    arguments = EngineArgs.from_cli_args(engine_options)
    arguments.disable_log_stats = True  # the default of LLM
    if settings["core"]:
        # The variable VLLM_ENABLE_V1_MULTIPROCESSING would do the same, but with it vLLM refuses the executor
        # without workers.
        LLMEngine.from_engine_args = functools.partial(
            LLMEngine.from_engine_args, enable_multiprocessing=True
        )
    llm = vllm.LLM.from_engine_args(arguments)
    turns.answer({"ready": True})
    for question in turns:
        prompts = []
        sampling = []
        for request in question["requests"]:
            prompts.append(vllm.TokensPrompt(prompt_token_ids=request["prompt_ids"]))
            parameters = {"logprobs": 0} | request["sampling"]
            sampling.append(vllm.SamplingParams(**parameters, detokenize=False))
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        samples = [sample.token_ids for output in outputs for sample in output.outputs]
        tokens = sum(len(sample) for sample in samples)
        turns.answer({"seconds": seconds, "tokens": tokens, "digest": digest_samples(samples)})


def digest_samples(samples: Iterable[Iterable[Any]]) -> str:
    """Returns a digest of token ids, which are grouped by sample."""
    lists = [[int(token) for token in sample] for sample in samples]
    return hashlib.blake2b(json.dumps(lists).encode(), digest_size=8).hexdigest()


def trl_grpo(settings: dict[str, Any], turns: Turns) -> None:
    """Serves TRL's GRPOTrainer, which waits for a question before each optimiser step.

    The answer has the ``seconds`` of the step, the number of sampled ``tokens``, those of the ``longest``
    answer, and the mean ``reward``.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from treetune.tasks.graders.final_answer import FinalAnswer
    from treetune.vocabulary import Problem

    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    grader = FinalAnswer()
    # The lengths and rewards of the last step's answers, which the reward function sees.
    lengths: list[int] = []
    rewards: list[float] = []

    def reward(
        completions: list[str], completion_ids: list[list[int]], gold: list[str], **_: Any
    ) -> list[float]:
        lengths[:] = [len(ids) for ids in completion_ids]
        rewards.clear()
        for text, ids, right_answer in zip(completions, completion_ids, gold, strict=True):
            # As in treetune, an answer that was cut off earns nothing.
            is_finished = ids[-1] == tokenizer.eos_token_id
            problem = Problem(id="", prompt="", gold=right_answer)
            rewards.append(grader.grade(text, problem).reward if is_finished else 0.0)
        return rewards

    class OneStepAtATime(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.answer({"ready": True})

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if turns.next_question() is None:
                raise SystemExit
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.start
            turns.answer(
                {
                    "seconds": seconds,
                    "tokens": sum(lengths),
                    "longest": max(lengths),
                    "reward": sum(rewards) / len(rewards),
                }
            )

    sequences = settings["problems"] * settings["samples"]
    sequences_per_pass = settings["sequences_per_pass"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        max_steps=settings["steps"],
        per_device_train_batch_size=sequences_per_pass,
        gradient_accumulation_steps=sequences // sequences_per_pass,
        num_generations=settings["samples"],
        max_completion_length=settings["max_tokens"],
        temperature=settings["temperature"],
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings["warmup_steps"],
        adam_beta1=settings["adam_betas"][0],
        adam_beta2=settings["adam_betas"][1],
        weight_decay=0.0,
        max_grad_norm=settings["max_grad_norm"],
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        seed=settings["seed"],
        report_to=[],
        save_strategy="no",
        logging_steps=10**9,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(json.loads(Path(settings["rows"]).read_text())),
        processing_class=tokenizer,
        callbacks=[OneStepAtATime()],
    )
    trainer.train()


if __name__ == "__main__":
    # Python puts this file's folder there. Its modules would hide others of the same names.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    serve = {"offline_vllm": offline_vllm, "trl_grpo": trl_grpo}[sys.argv[1]]
    serve(json.loads(sys.argv[2]), Turns(take_standard_output()))
