"""RestEM in one file, with torch and transformers alone. Read it from top to bottom.

    python examples/one_file/sft.py     # once: trains the start model
    python examples/one_file/restem.py

The start model adds four numbers, one number per line, and gets a third of its sums right:

    prompt      12+34+56+78=
    answer      12+34=46
                46+56=102
                102+78=180
                #180

RestEM fine-tunes the start model on correct answers, which the model of the previous iteration has sampled
(Singh et al., arXiv:2312.06585, section 3). The algorithm, with the section of this file that implements a
line:

    π is the start model
    for each iteration:
        Generate (E-step):
            draw problems, sample answers to each from π, and grade them        [2, 3]
            keep the correct answers                                            [4]
        Improve (M-step):
            π = the start model, fine-tuned on the kept answers                 [5, 6]

treetune runs the same experiment from restem.jsonnet, and ends with the same weights, bit for bit.
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

# Names of tensors end in their shape: B is the batch, T tokens, V the vocabulary, D the hidden size,
# and N all response tokens of a batch, one answer after the other.
Tokens = list[int]
Numbers = tuple[int, ...]

SEED = 1
START = Path("experiments/one_file/sft")  # the start model
# The task
NUMBERS_PER_PROBLEM = 4
TEST_SIZE, VALIDATION_SIZE, TRAIN_SIZE = 1000, 500, 20_000  # problems; only the last ones are trained on
# Sampling
ITERATIONS = 4
PROBLEMS_PER_ITERATION = 320
ANSWERS_PER_PROBLEM = 8
MAX_TOKENS = 48  # the longest response
UNFINISHED_REWARD = 0.0  # the reward of a response that has no end token within MAX_TOKENS
# Selection
MAX_PER_PROBLEM = 10  # correct answers that are kept
# Training
MINIBATCH_SIZE = 64  # answers of an optimizer step
EPOCHS = 3  # passes over the kept answers of an iteration
LEARNING_RATE, WARMUP_STEPS, MAX_GRAD_NORM = 1e-3, 10, 1.0
TOKENS_PER_MICRO_BATCH = 8192  # bounds the memory of a backward pass


# 1. Randomness. Each random draw has its own seed: a hash of the run's seed and of what is drawn, such as
# (SEED, iteration, "train/7", "rollout"). The same command gives the same weights, and no draw depends on
# another one.
def derive_seed(*key: int | str) -> int:
    """Returns a hash of `key` with 48 bits, so that adding the number of a sample never overflows 64 bits."""
    text = b""
    for part in key:
        part_text = repr(part).encode()
        # With their lengths, so that ("a", "bc") and ("ab", "c") differ.
        text += len(part_text).to_bytes(4, "big") + part_text
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 16


# 2. The task. Each character is a token. Token 0 is padding, token 1 ends an answer.
ALPHABET = "0123456789+=#\n"
PAD, END = 0, 1


def encode(text: str) -> Tokens:
    return [ALPHABET.index(character) + 2 for character in text]


def decode(tokens: Tokens) -> str:
    return "".join(ALPHABET[token - 2] for token in tokens if token not in (PAD, END))


def draw_problems() -> list[Numbers]:
    """Draws all problems and returns those of training. No two problems consist of the same numbers."""
    # With 0 in place of SEED: runs with different seeds have the same problems.
    generator = random.Random(derive_seed(0, "operands", 10, 100, NUMBERS_PER_PROBLEM))
    problems: list[Numbers] = []
    drawn: set[Numbers] = set()
    while len(problems) < TEST_SIZE + VALIDATION_SIZE + TRAIN_SIZE:
        numbers = tuple(generator.choices(range(10, 100), k=NUMBERS_PER_PROBLEM))
        ordered = tuple(sorted(numbers))
        if ordered not in drawn:
            drawn.add(ordered)
            problems.append(numbers)
    return problems[TEST_SIZE + VALIDATION_SIZE :]


def write_prompt(numbers: Numbers) -> str:
    return "+".join(map(str, numbers)) + "=\n"


def compute_reward(response: Tokens, numbers: Numbers) -> float:
    """Returns 1 if the number after the last "#" is the sum, and 0 if not."""
    if response[-1] != END:
        return UNFINISHED_REWARD
    match = re.search(r"#\s*\+?0*([0-9]+)\s*$", decode(response))
    is_correct = match is not None and match[1] == str(sum(numbers))
    return float(is_correct)


# 3. Sampling. All answers grow together, by one token per step. The keys and values of earlier tokens are
# cached, so that only the newest token of each answer goes through the model.
class Cache:
    """The keys and values of each layer, [B, heads, T, head size]. The attention layers call `update`."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions_B = torch.empty(0)  # where the newest token of each answer stands

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            # The first pass has the prompts, padded to the full width, and so reserves all positions.
            self.layers[layer] = keys, values
            return keys, values
        cached_keys, cached_values = self.layers[layer]
        rows_B = torch.arange(len(keys))
        cached_keys[rows_B, :, self.positions_B] = keys[:, :, 0]
        cached_values[rows_B, :, self.positions_B] = values[:, :, 0]
        return cached_keys, cached_values


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: list[Tokens], seeds: list[int], max_length: int) -> list[Tokens]:
    """Samples a response to each prompt, at temperature 1.

    Args:
        model: The policy.
        prompts: The prompts. The same prompt may stand there several times.
        seeds: The seed of each response, which therefore doesn't depend on the others.
        max_length: The largest number of tokens of prompt and response together. A response that reaches it
            without an end token is cut off.
    """
    # Sums over 32, 64, … positions round alike, so that the last bits don't depend on the longest prompt.
    width = 32 * ceil((max_length + 1) / 32)
    rows_B = torch.arange(len(prompts))
    positions_T = torch.arange(width)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    ids_BT = torch.tensor([prompt + [PAD] * (width - len(prompt)) for prompt in prompts])
    uniform_BT = torch.tensor(np.array([np.random.default_rng(seed).random(width) for seed in seeds]))

    # The first pass fills the cache with the prompts.
    cache = Cache()
    is_visible_TT = positions_T <= positions_T[:, None]  # a token sees itself and the tokens before it
    model.model(
        input_ids=ids_BT,
        position_ids=positions_T.expand(len(prompts), -1),
        attention_mask=is_visible_TT.expand(len(prompts), 1, -1, -1),
        past_key_values=cache,
    )
    for step in range(max_length - int(lengths_B.min())):
        # The newest token of each answer; in the first step, the last one of the prompt. A longer prompt
        # reaches `max_length` before others do, and then stays there.
        newest_B = (lengths_B - 1 + step).clamp(max=max_length - 1)
        cache.positions_B = newest_B
        logits_BV = model(
            input_ids=ids_BT[rows_B, newest_B][:, None],
            position_ids=newest_B[:, None],
            attention_mask=(positions_T <= newest_B[:, None])[:, None, None],
            past_key_values=cache,
        ).logits[:, -1]
        # The probabilities divide [0, 1) into intervals. The next token is the one whose interval contains
        # the uniform number. (The last sum is 1 but for rounding.)
        cumulative_BV = logits_BV.double().softmax(-1).cumsum(-1)
        threshold_B1 = uniform_BT[:, step, None] * cumulative_BV[:, -1:]
        next_ids_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True)
        ids_BT[rows_B, newest_B + 1] = next_ids_B1[:, 0]

    responses = []
    for prompt, ids in zip(prompts, ids_BT.tolist()):
        response = ids[len(prompt) : max_length]
        if END in response:
            response = response[: response.index(END) + 1]
        responses.append(response)
    return responses


@dataclass
class Answer:
    problem: int  # its index among the problems of training
    prompt: Tokens
    response: Tokens
    reward: float

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.response)


def rollout(policy: LlamaForCausalLM, problems: list[Numbers], iteration: int) -> list[Answer]:
    """Draws problems, samples answers, and grades them. Answers to the same problem stand side by side."""
    generator = random.Random(derive_seed(SEED, iteration, "problems"))
    drawn, prompts, seeds = [], [], []
    for problem in generator.sample(range(TRAIN_SIZE), PROBLEMS_PER_ITERATION):
        seed = derive_seed(SEED, iteration, f"train/{problem}", "rollout")
        for number in range(ANSWERS_PER_PROBLEM):
            drawn.append(problem)
            prompts.append(encode(write_prompt(problems[problem])))
            seeds.append(seed + number)
    responses = sample(policy, prompts, seeds, max_length=len(prompts[0]) + MAX_TOKENS)
    answers = []
    for problem, prompt, response in zip(drawn, prompts, responses):
        reward = compute_reward(response, problems[problem])
        answers.append(Answer(problem, prompt, response, reward))
    return answers


# 4. Selection. An answer is correct if its reward is 1.
def keep_correct_answers(answers: list[Answer]) -> list[Answer]:
    """Returns the first MAX_PER_PROBLEM correct answers to each problem."""
    kept_per_problem: Counter[int] = Counter()
    kept = []
    for answer in answers:
        if answer.reward == 1 and kept_per_problem[answer.problem] < MAX_PER_PROBLEM:
            kept_per_problem[answer.problem] += 1
            kept.append(answer)
    return kept


# 5. Log-probs. The answers of a batch are padded on the right. No mask is needed for the padding, since
# attention is causal: no token sees what is to its right.
def split_into_micro_batches(answers: list[Answer], max_tokens: int) -> Iterator[list[Answer]]:
    """Yields batches of answers of similar length, with at most `max_tokens` tokens, padding included."""
    batch: list[Answer] = []
    for answer in sorted(answers, key=lambda answer: len(answer.tokens), reverse=True):
        # The first answer of a batch is the longest: the others are padded to its length.
        if batch and len(batch[0].tokens) * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(answer)
    yield batch


def compute_logprobs(model: LlamaForCausalLM, batch: list[Answer]) -> Tensor:
    """Returns log π(a_t | s_t) of all response tokens of the batch, one answer after the other: [N]."""
    ids_BT = pad_sequence([torch.tensor(answer.tokens) for answer in batch], batch_first=True)
    # The output at a position predicts the next token. The model's head runs only where that is a token of
    # the response.
    predicts_response_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, answer in enumerate(batch):
        predicts_response_BT[row, len(answer.prompt) - 1 : len(answer.tokens) - 1] = True
    hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BTD[predicts_response_BT])
    response_ids_N = torch.cat([torch.tensor(answer.response) for answer in batch])
    return logits_NV.log_softmax(-1).gather(-1, response_ids_N[:, None])[:, 0]


# 6. Improve (M-step). Training begins with the start model, not with the policy that sampled, and maximizes
#
#     J(θ) = E_(x, y) [ r(x, y) log p_θ(y | x) ]
#
# over the answers of the iteration, where r is 1 for correct answers and 0 for others. Each answer has the
# same weight: its log p is divided by its number of tokens.
def improve(kept: list[Answer], iteration: int) -> tuple[LlamaForCausalLM, float]:
    """Returns the next policy, and the loss of its last step."""
    policy = LlamaForCausalLM.from_pretrained(START)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps = EPOCHS * ceil(len(kept) / MINIBATCH_SIZE)
    for step, minibatch in enumerate(draw_minibatches(kept, iteration)):
        loss_of_step = 0.0
        for batch in split_into_micro_batches(minibatch, TOKENS_PER_MICRO_BATCH):
            loss = restem_loss(policy, batch, len(minibatch))
            loss.backward()  # gradients add up
            loss_of_step += loss.item()
        take_step(policy, optimizer, compute_learning_rate(step, steps))
    return policy, loss_of_step


def restem_loss(policy: LlamaForCausalLM, batch: list[Answer], minibatch_size: int) -> Tensor:
    """Returns a micro-batch's part of the loss, the mean over the answers of its minibatch."""
    lengths_B = torch.tensor([len(answer.response) for answer in batch])
    weights_B = (1 / (minibatch_size * lengths_B.double())).float()
    weights_N = weights_B.repeat_interleave(lengths_B)
    return -(weights_N * compute_logprobs(policy, batch)).sum()


def compute_learning_rate(step: int, steps: int) -> float:
    """Returns the rate of a step: it rises for WARMUP_STEPS steps, and then falls to 0 in a straight line."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * ((step + 1) / WARMUP_STEPS)
    decayed_share = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return LEARNING_RATE * (1 - decayed_share)


def draw_minibatches(answers: list[Answer], iteration: int) -> Iterator[list[Answer]]:
    """Yields the minibatches of all epochs. Each epoch has all answers, in another random order."""
    for epoch in range(EPOCHS):
        order = list(range(len(answers)))
        random.Random(derive_seed(SEED, iteration, "minibatches", epoch)).shuffle(order)
        for start in range(0, len(order), MINIBATCH_SIZE):
            indices = sorted(order[start : start + MINIBATCH_SIZE])
            yield [answers[index] for index in indices]


def take_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


# 7. The loop: sample, grade, keep what is correct, and learn that.
def main() -> LlamaForCausalLM:
    torch.set_num_threads(1)  # more threads add numbers in another order, which changes the last bits
    problems = draw_problems()
    policy = LlamaForCausalLM.from_pretrained(START)
    print("iteration  right  kept  last loss")
    for iteration in range(ITERATIONS):
        answers = rollout(policy, problems, iteration)
        kept = keep_correct_answers(answers)
        policy, loss = improve(kept, iteration)
        accuracy = fmean(answer.reward for answer in answers)
        print(f"{iteration + 1:9}  {accuracy:5.0%}  {len(kept):4}  {loss:9.3f}", flush=True)
    return policy


if __name__ == "__main__":
    main()
