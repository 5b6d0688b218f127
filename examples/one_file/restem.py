"""RestEM in one file, on torch and transformers alone. Read it from top to bottom.

    python examples/one_file/sft.py     # once: the model to start from
    python examples/one_file/restem.py

The model of sft.py adds four numbers, and is right in a third of its answers. Here it samples eight answers
to each of 320 problems, and learns those that are right by heart, beginning again with the start model. What
that gives samples the next answers (Singh et al., arXiv:2312.06585, section 3). The same
experiment, composed of treetune's parts, is restem.jsonnet: its weights are the same, bit for bit.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

Tokens, Numbers = list[int], tuple[int, ...]
SEED, START = 1, Path("experiments/one_file/sft")
# The task, as in sft.py. Problems of the test and the validation come first and are never trained on.
COUNT, TEST_SIZE, VALIDATION_SIZE, TRAIN_SIZE = 4, 1000, 500, 20_000
# What an iteration samples, and what an answer earns that MAX_TOKENS cuts off.
ITERATIONS, PROBLEMS, SAMPLES, MAX_TOKENS, UNFINISHED_REWARD = 4, 320, 8, 48, 0.0
# What is learnt: right answers, at most so many of one problem.
MAX_PER_PROBLEM = 10
# Training: steps on so many answers each, so many times through all of them.
MINIBATCH_SIZE, EPOCHS, LEARNING_RATE, WARMUP_STEPS, MAX_GRAD_NORM = 64, 3, 1e-3, 10, 1.0
TOKENS_PER_MICRO_BATCH = 8192


# 1. Chance. Every number that is drawn has a place, such as (iteration, problem), and its generator is seeded
# with a hash of it: the same command gives the same weights, and no draw depends on what else is drawn.
def derive_seed(*place: int | str) -> int:
    parts = [repr(part).encode() for part in place]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 16


# 2. The task. A problem is "12+34+56+78=\n", and no two have the same numbers. An answer is right if the sum
# is after its last "#". A token is a character, but for 0, which pads, and 1, which ends an answer.
ALPHABET = "0123456789+=#\n"
PAD, END = 0, 1


def make_problems() -> list[Numbers]:
    generator = random.Random(derive_seed(0, "operands", 10, 100, COUNT))
    problems: dict[Numbers, Numbers] = {}
    while len(problems) < TEST_SIZE + VALIDATION_SIZE + TRAIN_SIZE:
        numbers = tuple(generator.choices(range(10, 100), k=COUNT))
        problems.setdefault(tuple(sorted(numbers)), numbers)
    return list(problems.values())[TEST_SIZE + VALIDATION_SIZE :]


def reward_of(response: Tokens, numbers: Numbers) -> float:
    if response[-1] != END:
        return UNFINISHED_REWARD
    text = "".join(ALPHABET[token - 2] for token in response if token > END)
    answer = re.search(r"#\s*\+?0*([0-9]+)\s*$", text)
    return float(answer is not None and answer[1] == str(sum(numbers)))


# 3. Sampling. All answers grow at once by a token a step. What attention needs of earlier tokens, their keys
# and values, is kept, so that only each answer's newest token goes through the model. The numbers in [0, 1)
# that choose an answer's tokens come from a seed of its own: it doesn't depend on the others.
class Cache:
    """Keys and values of each layer, [B, heads, T, dimension]; transformers' attention calls `update`."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.places_B = torch.empty(0)  # of the tokens that come in, one a row

    def update(self, keys: Tensor, values: Tensor, layer: int, *rest: object) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:  # the prompts come in, and all positions after them
            self.layers[layer] = keys, values
            return keys, values
        for kept, new in zip(self.layers[layer], (keys, values)):
            kept[torch.arange(len(new)), :, self.places_B] = new[:, :, 0]
        return self.layers[layer]


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: list[Tokens], seeds: list[int], limit: int) -> list[Tokens]:
    """A response to each prompt, with its END if one came before both together had `limit` tokens."""
    width = -(-(limit + 1) // 32) * 32  # sums over multiples of 32 places round alike, whatever the multiple
    rows_B, places_T = torch.arange(len(prompts)), torch.arange(width)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    ids_BT = torch.tensor([prompt + [PAD] * (width - len(prompt)) for prompt in prompts])
    chances_BT = torch.tensor(np.array([np.random.default_rng(seed).random(width) for seed in seeds]))
    cache = Cache()
    model.model(
        input_ids=ids_BT,
        position_ids=places_T.expand(len(prompts), -1),
        attention_mask=(places_T <= places_T[:, None]).expand(len(prompts), 1, -1, -1),
        past_key_values=cache,
    )
    for step in range(limit - int(lengths_B.min())):
        cache.places_B = (lengths_B - 1 + step).clamp(max=limit - 1)
        logits_BV = model(
            input_ids=ids_BT[rows_B, cache.places_B][:, None],
            position_ids=cache.places_B[:, None],
            attention_mask=(places_T <= cache.places_B[:, None])[:, None, None],
            past_key_values=cache,
        ).logits[:, -1]
        # The probabilities cut [0, 1) into parts. The token is the one whose part holds the number.
        sums_BV = logits_BV.double().softmax(-1).cumsum(-1)
        chances_B1 = chances_BT[:, step, None] * sums_BV[:, -1:]
        ids_BT[rows_B, cache.places_B + 1] = torch.searchsorted(sums_BV, chances_B1, right=True)[:, 0]
    responses = [ids[len(prompt) : limit] for ids, prompt in zip(ids_BT.tolist(), prompts)]
    return [ids[: ids.index(END) + 1] if END in ids else ids for ids in responses]


@dataclass
class Answer:
    problem: int
    prompt: Tokens
    response: Tokens
    tokens: tuple[int, ...]  # both
    reward: float


def rollout(policy: LlamaForCausalLM, problems: list[Numbers], iteration: int) -> list[Answer]:
    """SAMPLES answers to each of PROBLEMS problems, those to one problem side by side."""
    drawn = random.Random(derive_seed(SEED, iteration, "problems")).sample(range(TRAIN_SIZE), PROBLEMS)
    asked = [(index, number) for index in drawn for number in range(SAMPLES)]
    prompts = [[ALPHABET.index(c) + 2 for c in "+".join(map(str, problems[i])) + "=\n"] for i, _ in asked]
    seeds = [derive_seed(SEED, iteration, f"train/{index}", "rollout") + number for index, number in asked]
    responses = sample(policy, prompts, seeds, len(prompts[0]) + MAX_TOKENS)
    return [
        Answer(index, prompt, response, (*prompt, *response), reward_of(response, problems[index]))
        for (index, _), prompt, response in zip(asked, prompts, responses)
    ]


# 4. Generate (E-step): of the answers, the right ones are kept, those that earn 1, of a problem not too many.
def right_ones(answers: list[Answer]) -> list[Answer]:
    taken: Counter[int] = Counter()
    kept = []
    for answer in answers:
        if answer.reward == 1 and taken[answer.problem] < MAX_PER_PROBLEM:
            taken[answer.problem] += 1
            kept.append(answer)
    return kept


# 5. Log-probs. Answers of unlike lengths run together, padded on the right. There is no attention mask: a
# token sees none to its right. How answers are cut into micro-batches costs memory and changes no update.
def micro_batches(answers: list[Answer], most_tokens: int) -> Iterator[list[Answer]]:
    """Neighbours in length, of at most so many tokens, padding included."""
    batch: list[Answer] = []
    for answer in sorted(answers, key=lambda one: -len(one.tokens)):
        if batch and len(batch[0].tokens) * (len(batch) + 1) > most_tokens:
            yield batch
            batch = []
        batch.append(answer)
    yield batch


def logprobs(model: LlamaForCausalLM, batch: list[Answer]) -> Tensor:
    """log π(a_t | s_t) of all tokens of these answers, one answer after the other: [N]."""
    ids_BT = pad_sequence([torch.tensor(one.tokens) for one in batch], batch_first=True)
    predicts_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, one in enumerate(batch):  # the token at t is predicted at t - 1, and only there the head runs
        predicts_BT[row, len(one.prompt) - 1 : len(one.tokens) - 1] = True
    hidden_ND = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[predicts_BT]
    labels_N = ids_BT.roll(-1, dims=1)[predicts_BT]
    return model.lm_head(hidden_ND).log_softmax(-1).gather(-1, labels_N[:, None])[:, 0]


# 6. Improve (M-step). It begins with the start model, and not with the policy that sampled, and maximises
#
#     J(θ) = E_(x, y) r(x, y) log p_θ(y | x)
#
# over the iteration's answers, where r is 1 for right ones and 0 for others. Each answer weighs the same: its
# log p is divided by its number of tokens. The learning rate rises, and then falls to 0 in a straight line.
def improve(answers: list[Answer], iteration: int) -> tuple[LlamaForCausalLM, float]:
    """The next policy, and the loss of its last step."""
    policy = LlamaForCausalLM.from_pretrained(START)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps, step = EPOCHS * ceil(len(answers) / MINIBATCH_SIZE), 0
    for epoch in range(EPOCHS):
        order = list(range(len(answers)))
        random.Random(derive_seed(SEED, iteration, "minibatches", epoch)).shuffle(order)
        for first in range(0, len(order), MINIBATCH_SIZE):
            minibatch = [answers[number] for number in sorted(order[first : first + MINIBATCH_SIZE])]
            last_loss = 0.0
            for batch in micro_batches(minibatch, TOKENS_PER_MICRO_BATCH):
                lengths_B = torch.tensor([len(one.response) for one in batch])
                weights_N = (1 / (len(minibatch) * lengths_B.double())).float().repeat_interleave(lengths_B)
                loss = -(weights_N * logprobs(policy, batch)).sum()
                loss.backward()
                last_loss += loss.item()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
            left = 1 - min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
            rising = (step + 1) / WARMUP_STEPS
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (rising if step < WARMUP_STEPS else left)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return policy, last_loss


# 7. The loop: sample, keep what is right, learn that.
def main() -> LlamaForCausalLM:
    torch.set_num_threads(1)  # several add sums up in another order, which changes the last bits
    problems = make_problems()
    policy = LlamaForCausalLM.from_pretrained(START)
    print("iteration  right  kept  last loss")
    for iteration in range(ITERATIONS):
        answers = rollout(policy, problems, iteration)
        kept = right_ones(answers)
        policy, loss = improve(kept, iteration)
        right = fmean(one.reward for one in answers)
        print(f"{iteration + 1:9}  {right:5.0%}  {len(kept):4}  {loss:9.3f}", flush=True)
    return policy


if __name__ == "__main__":
    main()
