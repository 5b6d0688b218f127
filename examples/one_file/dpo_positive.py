"""DPO-positive in one file, on torch and transformers alone. Read it from top to bottom.

    python examples/one_file/sft.py     # once: the model to start from
    python examples/one_file/dpo_positive.py

The model of sft.py adds four numbers, and is right in a third of its answers. Here it samples sixteen answers
to each of 100 problems, and learns to prefer each right answer to a wrong one to the same problem, without
making the right one less likely than it was. Equations are those of Pal et al. (arXiv:2402.13228). The same
experiment, composed of treetune's parts, is dpo_positive.jsonnet: its weights are the same, bit for bit.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

Tokens, Numbers = list[int], tuple[int, ...]
SEED, START = 1, Path("experiments/one_file/sft")
# The task, as in sft.py. Problems of the test and the validation come first and are never trained on.
COUNT, TEST_SIZE, VALIDATION_SIZE, TRAIN_SIZE = 4, 1000, 500, 20_000
# What an iteration samples, and what an answer earns that MAX_TOKENS cuts off.
ITERATIONS, PROBLEMS, SAMPLES, MAX_TOKENS, UNFINISHED_REWARD = 4, 100, 16, 48, 0.0
# The objective: β, λ, and over how many nats the kink of the maximum is rounded off.
MAX_PAIRS_PER_PROBLEM, BETA, PENALTY, BAND = 16, 0.3, 5, 0.01
# Training: steps on so many pairs each, so many times through all of them.
MINIBATCH_SIZE, EPOCHS, LEARNING_RATE, WARMUP_STEPS, MAX_GRAD_NORM = 64, 2, 2e-4, 10, 1.0
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
    ref_logprobs_T: Tensor | None = None  # of the model that training began with


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


# 4. Pairs of a right and a wrong answer to the same problem: all of them, or MAX_PAIRS_PER_PROBLEM.
def make_pairs(answers: list[Answer], iteration: int) -> list[tuple[Answer, Answer]]:
    pairs = []
    for first in range(0, len(answers), SAMPLES):
        group = answers[first : first + SAMPLES]
        own = [(right, wrong) for right in group if right.reward == 1 for wrong in group if wrong.reward < 1]
        if len(own) > MAX_PAIRS_PER_PROBLEM:
            draw = random.Random(derive_seed(SEED, iteration, f"train/{group[0].problem}", "pairs"))
            own = [own[number] for number in sorted(draw.sample(range(len(own)), MAX_PAIRS_PER_PROBLEM))]
        pairs += own
    return pairs


# 5. Log-probs. Answers of unlike lengths run together, padded on the right. There is no attention mask: a
# token sees none to its right. How a minibatch is cut into micro-batches costs memory and changes no update.
def micro_batches(units: list[tuple[Answer, ...]], most_tokens: int) -> Iterator[list[Answer]]:
    """Neighbours in length, of at most so many tokens, padding included; a pair is never cut in two."""

    def lengths(unit: tuple[Answer, ...]) -> tuple[int, int]:
        return max(len(one.tokens) for one in unit), sum(len(one.tokens) for one in unit)

    batch: list[Answer] = []
    for unit in sorted(units, key=lengths, reverse=True):
        if batch and max(len(one.tokens) for one in batch) * (len(batch) + len(unit)) > most_tokens:
            yield batch
            batch = []
        batch += unit
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
def score_reference(reference: LlamaForCausalLM, answers: list[Answer]) -> None:
    """Equal answers run once."""
    distinct = {one.tokens: (one,) for one in answers}
    found: dict[tuple[int, ...], Tensor] = {}
    for batch in micro_batches(list(distinct.values()), 2 * TOKENS_PER_MICRO_BATCH):
        parts = logprobs(reference, batch).split([len(one.response) for one in batch])
        found.update((one.tokens, part_T) for one, part_T in zip(batch, parts))
    for one in answers:
        one.ref_logprobs_T = found[one.tokens]


# 6. The objective (equation 3). For right w and wrong l, with d(y) = log π(y | x) - log π_ref(y | x):
#
#     - log σ(β (d(w) - d(l) - λ max(0, -d(w))))
#
# The last term is DPO-positive's own: DPO is content where both become less likely, the wrong one faster. All
# training begins at the kink of the maximum, and rounding would choose the side: it is rounded off over BAND.
def dpo_positive_loss(policy: LlamaForCausalLM, batch: list[Answer], pairs: int) -> Tensor:
    """What a micro-batch adds to the loss of its minibatch, which has so many pairs."""
    parts = logprobs(policy, batch).split([len(one.response) for one in batch])
    ref_B = torch.stack([one.ref_logprobs_T.sum() for one in batch])
    ratio_B = torch.stack([part_T.sum() for part_T in parts]) - ref_B
    shortfall_P = -ratio_B[::2]
    rounded_P = (shortfall_P + BAND).square() / (4 * BAND)
    penalty_P = rounded_P.where(shortfall_P.abs() < BAND, shortfall_P.clamp(min=0))
    z_P = ratio_B[::2] - ratio_B[1::2] - PENALTY * penalty_P
    return (1 / pairs) * -logsigmoid(BETA * z_P).sum()


# 7. The loop: sample, pair, train.
def main() -> LlamaForCausalLM:
    torch.set_num_threads(1)  # several add sums up in another order, which changes the last bits
    problems = make_problems()
    policy, reference = (LlamaForCausalLM.from_pretrained(START) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    print("iteration  right  pairs  loss")
    for iteration in range(ITERATIONS):
        answers = rollout(policy, problems, iteration)
        pairs = make_pairs(answers, iteration)
        score_reference(reference, [answer for pair in pairs for answer in pair])
        starts, total = range(0, len(pairs), MINIBATCH_SIZE), 0.0
        for epoch in range(EPOCHS):
            order = list(range(len(pairs)))
            random.Random(derive_seed(SEED, iteration, "minibatches", epoch)).shuffle(order)
            for number, first in enumerate(starts):
                minibatch = [pairs[place] for place in sorted(order[first : first + MINIBATCH_SIZE])]
                for batch in micro_batches(minibatch, TOKENS_PER_MICRO_BATCH):
                    loss = dpo_positive_loss(policy, batch, len(minibatch))
                    loss.backward()
                    total += loss.item() / EPOCHS / len(starts)
                torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
                step = (iteration * EPOCHS + epoch) * len(starts) + number
                optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
                optimizer.step()
                optimizer.zero_grad()
        right = fmean(one.reward for one in answers)
        print(f"{iteration + 1:9}  {right:5.0%}  {len(pairs):5}  {total:4.2f}", flush=True)
    return policy


if __name__ == "__main__":
    main()
