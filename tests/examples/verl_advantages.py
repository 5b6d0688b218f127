"""A program: verl's Ray trainer computes advantages with examples/other_trainers/verl_advantage.py.

It calls `compute_advantage` as the trainer does, twice, with the batch of a rollout, and compares the
advantages with those of a run's credit for the same answers.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl_advantage import use_credit

from tests.examples.runs_credit import advantages_in_run
from treetune import SamplingParams

FOLDER = Path(sys.argv[1])
CREDIT = {"type": "monte_carlo", "samples": 3}
TEXTS = ["1+1=2\n2+1=3", "1+1=3", "2=2\n3=3\n1", "11\n"]
WIDTH = 16

model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")


def share_of_digit(text, digit):
    return text.count(digit) / max(1, len(text))


def batch_of_rollout():
    """Returns the batch of a rollout: prompts padded on the left, responses on the right."""
    prompts = tokenizer(["1+1+1=?\n"] * 2 + ["1+2=?\n"] * 2, return_tensors="pt", padding=True)
    responses = torch.full((4, WIDTH), tokenizer.pad_token_id)
    mask = torch.zeros(4, WIDTH, dtype=torch.long)
    rewards = torch.zeros(4, WIDTH)
    for row, text in enumerate(TEXTS):
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        responses[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
        rewards[row, len(ids) - 1] = share_of_digit(text, "1")
    columns = {
        "prompts": prompts["input_ids"],
        "responses": responses,
        "attention_mask": torch.cat([prompts["attention_mask"], mask], dim=1),
        "response_mask": mask,
        "token_level_rewards": rewards,
    }
    uids = np.array(["first", "first", "second", "second"], dtype=object)
    return DataProto(batch=TensorDict(columns, batch_size=4), non_tensor_batch={"uid": uids})


def compute(data):
    """Calls verl as `RayPPOTrainer.fit` does."""
    return ray_trainer.compute_advantage(data, adv_estimator="treetune", config={}).batch["advantages"]


use_credit(
    CREDIT,
    engine=model,
    tokenizer=tokenizer,
    grader=lambda prompt, text: share_of_digit(text, "1"),
    sampling=SamplingParams(max_tokens=WIDTH),
    unfinished_reward=None,
)
for step in range(2):
    data = batch_of_rollout()
    advantages = compute(data)
    batch = data.batch
    answers = []
    for row, uid in enumerate(data.non_tensor_batch["uid"]):
        width = batch["prompts"].shape[1]
        prompt_ids = batch["prompts"][row][batch["attention_mask"][row, :width].bool()].tolist()
        ids = batch["responses"][row][batch["response_mask"][row].bool()].tolist()
        answers.append(({}, prompt_ids, ids, float(batch["token_level_rewards"][row].sum()), uid))
    expected = advantages_in_run(
        CREDIT,
        answers,
        model=model,
        tokenizer=tokenizer,
        reward=lambda text, row: share_of_digit(text, "1"),
        max_tokens=WIDTH,
        seed=0,
        iteration=step,
    )
    for row, of_run in enumerate(expected):
        assert torch.equal(advantages[row, : len(of_run)], torch.as_tensor(of_run, dtype=torch.float32))
        assert not advantages[row, len(of_run) :].any()
    assert len(set(advantages[2].tolist())) > 2, "VinePPO tells the steps of an answer apart"

use_credit("rloo")
without_ids = batch_of_rollout()
for name in ("prompts", "responses", "attention_mask"):  # as in verl's trainer v1
    del without_ids.batch[name]
rewards = without_ids.batch["token_level_rewards"].sum(1)
assert torch.allclose(
    compute(without_ids)[:2, 0], torch.stack([rewards[0] - rewards[1], rewards[1] - rewards[0]])
)
use_credit("tempo")
message = ""
try:
    compute(without_ids)
except ValueError as error:
    message = str(error)
assert "no token ids" in message
sys.stdout.write("equal\n")
