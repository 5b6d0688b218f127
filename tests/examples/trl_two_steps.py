"""A program: TRL trains two steps with examples/other_trainers/trl_grpo.py on the model of a folder.

It compares each advantage in TRL's loss with that of a run's credit for the same answer and the weights that
sampled it, and prints how many answers it has compared.
"""

import sys
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from trl_grpo import CreditGRPOTrainer

from tests.examples.runs_credit import advantages_in_run

warnings.filterwarnings("ignore")
FOLDER = Path(sys.argv[1])
CREDIT = {"type": "monte_carlo", "samples": 3}


def reward(prompts, completions, first, **columns):
    """Returns the share of characters that are the row's first digit, which random weights write, too."""
    return [text.count(digit) / max(1, len(text)) for text, digit in zip(completions, first, strict=True)]


class RecordingTrainer(CreditGRPOTrainer):
    compared = 0
    steps = 0

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        rewards = self._rewards[:, 0].tolist()
        self.expected = {}
        answers = []
        for number, row in enumerate(inputs):
            prompt_ids = batch["prompt_ids"][number][batch["prompt_mask"][number].bool()].tolist()
            ids = batch["completion_ids"][number][batch["completion_mask"][number].bool()].tolist()
            answers.append((row, prompt_ids, ids, rewards[number], None))
        expected = advantages_in_run(
            CREDIT,
            answers,
            model=self.model,
            tokenizer=self.processing_class,
            reward=lambda text, row: reward([row["prompt"]], [text], [row["first"]])[0],
            max_tokens=self.args.max_completion_length,
            seed=self.args.seed,
            iteration=self.state.global_step,
        )
        for (_, prompt_ids, ids, _, _), row in zip(answers, expected, strict=True):
            self.expected[tuple(prompt_ids), tuple(ids)] = torch.as_tensor(row, dtype=torch.float32)
        return batch

    def _compute_loss(self, model, inputs):
        type(self).steps += 1
        for number, advantages in enumerate(inputs["advantages"]):
            prompt_ids = inputs["prompt_ids"][number][inputs["prompt_mask"][number].bool()].tolist()
            ids = inputs["completion_ids"][number][inputs["completion_mask"][number].bool()].tolist()
            expected = self.expected[tuple(prompt_ids), tuple(ids)]
            assert torch.equal(advantages[: len(ids)], expected), (advantages, expected)
            assert not advantages[len(ids) :].any()
            type(self).compared += len(set(expected.tolist())) > 1
        return super()._compute_loss(model, inputs)


model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
weights_before = model.lm_head.weight.detach().clone()
trainer = RecordingTrainer(
    model,
    reward_funcs=reward,
    args=GRPOConfig(
        output_dir=str(FOLDER / "trl"),
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=24,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        seed=7,
    ),
    train_dataset=Dataset.from_list([{"prompt": f"{n}+1=?\n", "first": str(n)} for n in range(2, 8)]),
    processing_class=AutoTokenizer.from_pretrained(FOLDER, padding_side="left"),
    credit=CREDIT,
)
trainer.train()
assert not torch.equal(trainer.model.lm_head.weight, weights_before), "nothing was trained"
sys.stdout.write(
    f"steps {RecordingTrainer.steps}, answers with several advantages {RecordingTrainer.compared}\n"
)
