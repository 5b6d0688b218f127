"""TRL's GRPOTrainer, held before each optimiser step until it is its turn."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.child import Turns

SEQUENCES_PER_PASS = 64
"""Of the sequences of a step, how many go through the model at once: 128 and 512 were slower."""


def serve(settings: dict[str, Any], turns: Turns) -> None:
    """Each turn is one step: the ``seconds`` that it took, and its answers' ``tokens``."""
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
    at_once = min(SEQUENCES_PER_PASS, sequences)
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
