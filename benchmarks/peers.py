"""Peers, vLLM without a server and TRL: the other side of a pair, in a process of its own that takes turns.

One JSON object a line goes in by a pipe and one comes out. The child ends when its standard input does.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

END_S = 30.0


class Child:
    """Runs the function NAME of this file and takes turns with it."""

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
        """One turn. Raises RuntimeError if the child ends or says nothing within `deadline` seconds."""
        return self._talk(json.dumps(question).encode() + b"\n", deadline)

    def wait_ready(self, *, deadline: float) -> dict[str, Any]:
        return self._talk(b"", deadline)

    def _talk(self, line: bytes, deadline: float) -> dict[str, Any]:
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
    """The child's end of the pipe."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers

    def say(self, answer: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def listen(self) -> dict[str, Any] | None:
        """The next question; None when nobody will ask any more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.listen, None)


def own_standard_output() -> IO[str]:
    """Standard output for us alone: what libraries print there goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def offline_vllm(settings: dict[str, Any], turns: Turns) -> None:
    """Serves ``LLM.generate`` as configured by the server's command line.

    `settings` are ``arguments`` of the server, and whether the engine's ``core`` is a process of its own, as
    the server's is, or computes in this one. Each turn's ``requests`` are answered with the seconds
    of ``LLM.generate``, the tokens sampled, and a digest of their ids."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    # What only a server knows (host, port, …) is left over.
    known, _ = parser.parse_known_args(settings["arguments"])
    arguments = EngineArgs.from_cli_args(known)
    arguments.disable_log_stats = True  # LLM's own default
    if settings["core"]:
        # Not by VLLM_ENABLE_V1_MULTIPROCESSING, with which vLLM refuses the executor without workers.
        with_core = functools.partial(LLMEngine.from_engine_args, enable_multiprocessing=True)
        LLMEngine.from_engine_args = with_core  # type: ignore[method-assign]
    llm = vllm.LLM.from_engine_args(arguments)
    turns.say({"ready": True})
    for question in turns:
        prompts = [vllm.TokensPrompt(prompt_token_ids=r["prompt_ids"]) for r in question["requests"]]
        sampling = [
            vllm.SamplingParams(**{"logprobs": 0} | r["sampling"], detokenize=False)
            for r in question["requests"]
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        samples = [sample.token_ids for output in outputs for sample in output.outputs]
        turns.say({"seconds": seconds, "tokens": sum(map(len, samples)), "digest": digest(samples)})


def digest(samples: Iterable[Sequence[int]]) -> str:
    """Equal for the same tokens."""
    text = json.dumps([[int(token) for token in sample] for sample in samples])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def trl_grpo(settings: dict[str, Any], turns: Turns) -> None:
    """Serves TRL's GRPOTrainer, held before each optimiser step until it is its turn.

    Each turn is one step: the ``seconds`` that it took, and its answers' ``tokens``."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from treetune.tasks.graders.final_answer import FinalAnswer
    from treetune.vocabulary import Problem

    grader = FinalAnswer()
    lengths: list[int] = []
    rewards: list[float] = []

    def reward(
        completions: list[str], completion_ids: list[list[int]], gold: list[str], **_: Any
    ) -> list[float]:
        lengths[:] = [len(ids) for ids in completion_ids]
        rewards[:] = [
            # As ours: what the budget cut off earns nothing.
            grader.grade(text, Problem(id="", prompt="", gold=right)).reward if ids[-1] == end else 0.0
            for text, ids, right in zip(completions, completion_ids, gold, strict=True)
        ]
        return rewards

    class OneStepAtATime(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if turns.listen() is None:
                raise SystemExit
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.start
            turns.say(
                {
                    "seconds": seconds,
                    "tokens": sum(lengths),
                    "longest": max(lengths),
                    "reward": sum(rewards) / len(rewards),
                }
            )

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.say({"ready": True})

    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    end = tokenizer.eos_token_id
    sequences = settings["problems"] * settings["samples"]
    at_once = settings["sequences_per_pass"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        max_steps=settings["steps"],
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=sequences // at_once,
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
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder's files are no top-level modules
    peer = {"offline_vllm": offline_vllm, "trl_grpo": trl_grpo}[sys.argv[1]]
    peer(json.loads(sys.argv[2]), Turns(own_standard_output()))
