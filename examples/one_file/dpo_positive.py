"""DPO-positive in one file, with torch and transformers alone. Read it from top to bottom.

    python examples/one_file/sft.py     # once: trains the start model
    python examples/one_file/dpo_positive.py

The start model adds four numbers, one number per line, and gets a third of its sums right:

    prompt      12+34+56+78=
    answer      12+34=46
                46+56=102
                102+78=180
                #180

DPO-positive learns to prefer a correct answer to a wrong one to the same problem, without making the correct
one less likely than it was (Pal et al., arXiv:2402.13228, whose equation numbers are used here). The
algorithm, with the section of this file that implements a line:

    π_θ and π_ref are the start model
    for each iteration:
        draw problems, sample answers to each from π_θ, and grade them          [2, 3]
        make pairs of a correct and a wrong answer to the same problem          [4]
        for each minibatch of pairs, in each of EPOCHS passes:                  [7]
            take an AdamW step on equation 3                                    [5, 6]

treetune runs the same experiment from dpo_positive.jsonnet, and ends with the same weights, bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

# Names of tensors end in their shape: B is the batch, T tokens, V the vocabulary, D the hidden size,
# and N all response tokens of a batch, one answer after the other. P is pairs.
Tokens = list[int]
Numbers = tuple[int, ...]

SEED = 1
START = Path("experiments/one_file/sft")  # the start model
# The task
NUMBERS_PER_PROBLEM = 4
TEST_SIZE, VALIDATION_SIZE, TRAIN_SIZE = 1000, 500, 20_000  # problems; only the last ones are trained on
# Sampling
ITERATIONS = 4
PROBLEMS_PER_ITERATION = 100
ANSWERS_PER_PROBLEM = 16
MAX_TOKENS = 48  # the longest response
UNFINISHED_REWARD = 0.0  # the reward of a response that has no end token within MAX_TOKENS
# The objective
MAX_PAIRS_PER_PROBLEM = 16
BETA = 0.3  # β
PENALTY = 5  # λ
BAND = 0.01  # on each side of 0, the width in which the kink of max(0, ·) is rounded off; in nats
# Training
MINIBATCH_SIZE = 64  # pairs of an optimizer step
EPOCHS = 2  # passes over the pairs of an iteration
LEARNING_RATE, WARMUP_STEPS, MAX_GRAD_NORM = 2e-4, 10, 1.0
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
    ref_logprobs_T: Tensor | None = None  # of the response's tokens, under π_ref

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.response)


Pair = tuple[Answer, Answer]  # a correct and a wrong answer to the same problem


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


# 4. Pairs. An answer is correct if its reward is 1.
def make_pairs(answers: list[Answer], iteration: int) -> list[Pair]:
    """Returns all pairs of a correct and a wrong answer, of a problem at most MAX_PAIRS_PER_PROBLEM."""
    pairs: list[Pair] = []
    for start in range(0, len(answers), ANSWERS_PER_PROBLEM):
        group = answers[start : start + ANSWERS_PER_PROBLEM]
        correct = [answer for answer in group if answer.reward == 1]
        wrong = [answer for answer in group if answer.reward < 1]
        pairs_of_group = list(itertools.product(correct, wrong))
        if len(pairs_of_group) > MAX_PAIRS_PER_PROBLEM:
            # Keeps random pairs, in the order of the list.
            generator = random.Random(derive_seed(SEED, iteration, f"train/{group[0].problem}", "pairs"))
            indices = generator.sample(range(len(pairs_of_group)), MAX_PAIRS_PER_PROBLEM)
            pairs_of_group = [pairs_of_group[index] for index in sorted(indices)]
        pairs += pairs_of_group
    return pairs


# 5. Log-probs. The answers of a batch are padded on the right. No mask is needed for the padding, since
# attention is causal: no token sees what is to its right.
def split_into_micro_batches(units: Sequence[tuple[Answer, ...]], max_tokens: int) -> Iterator[list[Answer]]:
    """Yields batches of answers of similar length, with at most `max_tokens` tokens, padding included.

    Args:
        units: Answers that stay in the same batch: pairs, or single answers.
        max_tokens: The bound on a batch. A single unit may exceed it.
    """

    def measure(unit: tuple[Answer, ...]) -> tuple[int, int]:
        lengths = [len(answer.tokens) for answer in unit]
        return max(lengths), sum(lengths)

    batch: list[Answer] = []
    for unit in sorted(units, key=measure, reverse=True):
        if batch:
            # All answers are padded to the longest one.
            longest = max(len(answer.tokens) for answer in batch)
            if longest * (len(batch) + len(unit)) > max_tokens:
                yield batch
                batch = []
        batch += unit
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


@torch.no_grad()
def score_reference(reference: LlamaForCausalLM, answers: list[Answer]) -> None:
    """Sets the reference's log-probs of each answer. Answers with the same tokens are computed once."""
    distinct = {answer.tokens: (answer,) for answer in answers}
    logprobs_by_tokens: dict[tuple[int, ...], Tensor] = {}
    # Without a backward pass, twice as many tokens need about the same memory.
    for batch in split_into_micro_batches(list(distinct.values()), 2 * TOKENS_PER_MICRO_BATCH):
        lengths = [len(answer.response) for answer in batch]
        for answer, logprobs_T in zip(batch, compute_logprobs(reference, batch).split(lengths)):
            logprobs_by_tokens[answer.tokens] = logprobs_T
    for answer in answers:
        answer.ref_logprobs_T = logprobs_by_tokens[answer.tokens]


# 6. The objective (equation 3), for a correct answer w and a wrong one l, is
#
#     - log σ(β (d(w) - d(l) - λ max(0, -d(w)))),    d(y) = log π_θ(y | x) - log π_ref(y | x)
#
# The term with λ is new in DPO-positive. DPO's loss also falls where both answers become less likely, the
# wrong one faster; the term penalizes that. In the first step d(w) is 0 up to rounding, exactly where
# max(0, ·) has its kink, and rounding errors would decide whether there is a penalty. So the kink is rounded
# off.
def dpo_positive_loss(policy: LlamaForCausalLM, batch: list[Answer], all_pairs: int) -> Tensor:
    """Returns a micro-batch's part of the loss, the mean over the `all_pairs` pairs of its minibatch."""
    lengths = [len(answer.response) for answer in batch]
    logprobs_B = torch.stack([part_T.sum() for part_T in compute_logprobs(policy, batch).split(lengths)])
    ref_logprobs_B = torch.stack([answer.ref_logprobs_T.sum() for answer in batch])
    difference_B = logprobs_B - ref_logprobs_B
    # The answers of a pair follow each other.
    correct_P, wrong_P = difference_B[::2], difference_B[1::2]
    margin_P = correct_P - wrong_P - PENALTY * smooth_relu(-correct_P)
    return (1 / all_pairs) * -logsigmoid(BETA * margin_P).sum()


def smooth_relu(x_P: Tensor) -> Tensor:
    """Returns max(0, x), and between -BAND and BAND the parabola that joins both sides without a kink."""
    parabola_P = (x_P + BAND).square() / (4 * BAND)
    return parabola_P.where(x_P.abs() < BAND, x_P.clamp(min=0))


# 7. The loop: sample, grade, pair, train.
def main() -> LlamaForCausalLM:
    torch.set_num_threads(1)  # more threads add numbers in another order, which changes the last bits
    problems = draw_problems()
    policy = LlamaForCausalLM.from_pretrained(START)
    reference = LlamaForCausalLM.from_pretrained(START)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    print("iteration  right  pairs  loss")
    for iteration in range(ITERATIONS):
        answers = rollout(policy, problems, iteration)
        pairs = make_pairs(answers, iteration)
        score_reference(reference, [answer for pair in pairs for answer in pair])
        steps = EPOCHS * ceil(len(pairs) / MINIBATCH_SIZE)
        mean_loss = 0.0
        for step, minibatch in enumerate(draw_minibatches(pairs, iteration)):
            for batch in split_into_micro_batches(minibatch, TOKENS_PER_MICRO_BATCH):
                loss = dpo_positive_loss(policy, batch, len(minibatch))
                loss.backward()  # gradients add up
                mean_loss += loss.item() / steps
            # treetune counts the steps of earlier iterations as if each had had as many as this one.
            warmup = min(1.0, (iteration * steps + step + 1) / WARMUP_STEPS)
            take_step(policy, optimizer, LEARNING_RATE * warmup)
        accuracy = fmean(answer.reward for answer in answers)
        print(f"{iteration + 1:9}  {accuracy:5.0%}  {len(pairs):5}  {mean_loss:4.2f}", flush=True)
    return policy


def draw_minibatches(pairs: list[Pair], iteration: int) -> Iterator[list[Pair]]:
    """Yields the minibatches of all epochs. Each epoch has all pairs, in another random order."""
    for epoch in range(EPOCHS):
        order = list(range(len(pairs)))
        random.Random(derive_seed(SEED, iteration, "minibatches", epoch)).shuffle(order)
        for start in range(0, len(order), MINIBATCH_SIZE):
            indices = sorted(order[start : start + MINIBATCH_SIZE])
            yield [pairs[index] for index in indices]


def take_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
