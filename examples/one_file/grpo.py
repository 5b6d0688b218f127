"""GRPO in one file, on torch and transformers alone. Read it from top to bottom.

    python examples/one_file/sft.py     # once: the model to start from
    python examples/one_file/grpo.py

The model of sft.py adds four numbers, and is right in a third of its answers. Here it samples eight answers
to each of 64 problems and is told which are right; those better than the others become more likely.
Equations are those of DeepSeekMath (Shao et al., arXiv:2402.03300), which GRPO comes from. The same
experiment, composed of treetune's parts, is grpo.jsonnet: its weights are the same, bit for bit.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

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
ITERATIONS, PROBLEMS, SAMPLES, MAX_TOKENS, UNFINISHED_REWARD = 15, 64, 8, 48, 0.0
# The objective: ε, β, and what is added to a deviation before it is divided by.
CLIP, KL_COEF, STD_EPS = 0.2, 0.04, 1e-6
# Training: steps on so many answers each, so many times through all of them.
MINIBATCH_SIZE, EPOCHS, LEARNING_RATE, WARMUP_STEPS, MAX_GRAD_NORM = 128, 2, 4e-4, 10, 1.0
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
    prompt: Tokens
    response: Tokens
    tokens: tuple[int, ...]  # both
    reward: float
    advantage: float = 0.0
    old_logprobs_T: Tensor | None = None  # of the policy before the iteration's first step
    ref_logprobs_T: Tensor | None = None  # of the model that training began with


def rollout(policy: LlamaForCausalLM, problems: list[Numbers], iteration: int) -> list[Answer]:
    """SAMPLES answers to each of PROBLEMS problems, those to one problem side by side."""
    drawn = random.Random(derive_seed(SEED, iteration, "problems")).sample(range(TRAIN_SIZE), PROBLEMS)
    asked = [(index, number) for index in drawn for number in range(SAMPLES)]
    prompts = [[ALPHABET.index(c) + 2 for c in "+".join(map(str, problems[i])) + "=\n"] for i, _ in asked]
    seeds = [derive_seed(SEED, iteration, f"train/{index}", "rollout") + number for index, number in asked]
    responses = sample(policy, prompts, seeds, len(prompts[0]) + MAX_TOKENS)
    return [
        Answer(prompt, response, (*prompt, *response), reward_of(response, problems[index]))
        for (index, _), prompt, response in zip(asked, prompts, responses)
    ]


# 4. Credit (section 4.1.2). The advantage of an answer, and of all its tokens, A = (r - mean(r)) / std(r),
# compares it with the others to its problem. Where all earned the same, there is nothing to learn.
def give_advantages(answers: list[Answer]) -> None:
    for first in range(0, len(answers), SAMPLES):
        rewards = [one.reward for one in answers[first : first + SAMPLES]]
        for one in answers[first : first + SAMPLES] if len(set(rewards)) > 1 else []:
            one.advantage = (one.reward - fmean(rewards)) / (stdev(rewards) + STD_EPS)


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


@torch.no_grad()
def scored(model: LlamaForCausalLM, answers: list[Answer]) -> list[Tensor]:
    """The log-probs of each answer's tokens. Equal answers run once."""
    found: dict[tuple[int, ...], Tensor] = {}
    distinct = {one.tokens: one for one in answers}
    for batch in micro_batches(list(distinct.values()), 2 * TOKENS_PER_MICRO_BATCH):
        parts = logprobs(model, batch).split([len(one.response) for one in batch])
        found.update((one.tokens, part_T) for one, part_T in zip(batch, parts))
    return [found[one.tokens] for one in answers]


# 6. The objective (equations 3 and 4) is the mean over answers of the mean over their tokens of
#
#     min(ρ A, clip(ρ, 1 - ε, 1 + ε) A) - β (exp(-d) - 1 + d)
#
# with ρ = π(a_t | s_t) / π_old(a_t | s_t) and d = log π(a_t | s_t) - log π_ref(a_t | s_t). In the first of an
# iteration's steps ρ is 1. In later ones, the clip ends the gradient of tokens that have moved enough. The
# second term, an estimate of the KL divergence, holds all of them near the model that training began with.
def grpo_loss(policy: LlamaForCausalLM, batch: list[Answer], minibatch_size: int) -> Tensor:
    """What a micro-batch adds to the loss of its minibatch."""
    lengths_B = torch.tensor([len(one.response) for one in batch])
    advantages_N = torch.tensor([one.advantage for one in batch]).repeat_interleave(lengths_B)
    weights_N = (1 / (minibatch_size * lengths_B.double())).float().repeat_interleave(lengths_B)
    logprobs_N = logprobs(policy, batch)
    ratio_N = (logprobs_N - torch.cat([one.old_logprobs_T for one in batch])).exp()
    surrogate_N = (-advantages_N * ratio_N).maximum(-advantages_N * ratio_N.clamp(1 - CLIP, 1 + CLIP))
    difference_N = logprobs_N - torch.cat([one.ref_logprobs_T for one in batch])
    kl_N = (-difference_N).exp() - 1 + difference_N
    return (weights_N * surrogate_N).sum() + KL_COEF * (weights_N * kl_N).sum()


# 7. The loop: sample, credit, train.
def main() -> LlamaForCausalLM:
    torch.set_num_threads(1)  # several add sums up in another order, which changes the last bits
    problems = make_problems()
    policy, reference = (LlamaForCausalLM.from_pretrained(START) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    step = 0
    print("iteration  right  tokens  KL to start")
    for iteration in range(ITERATIONS):
        answers = rollout(policy, problems, iteration)
        give_advantages(answers)
        for answer, old_T, ref_T in zip(answers, scored(policy, answers), scored(reference, answers)):
            answer.old_logprobs_T, answer.ref_logprobs_T = old_T, ref_T
        for epoch in range(EPOCHS):
            order = list(range(len(answers)))
            random.Random(derive_seed(SEED, iteration, "minibatches", epoch)).shuffle(order)
            for first in range(0, len(order), MINIBATCH_SIZE):
                minibatch = [answers[number] for number in sorted(order[first : first + MINIBATCH_SIZE])]
                for batch in micro_batches(minibatch, TOKENS_PER_MICRO_BATCH):
                    grpo_loss(policy, batch, len(minibatch)).backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
                optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
        right, tokens = fmean(one.reward for one in answers), fmean(len(one.response) for one in answers)
        gap_N = torch.cat([one.old_logprobs_T - one.ref_logprobs_T for one in answers])
        kl = float(((-gap_N).exp() - 1 + gap_N).mean())
        print(f"{iteration + 1:9}  {right:5.0%}  {tokens:6.1f}  {kl:11.4f}", flush=True)
    return policy


if __name__ == "__main__":
    main()
