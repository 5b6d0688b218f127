"""VinePPO in one file, with torch and transformers alone. Read it from top to bottom.

    python examples/one_file/sft.py     # once: trains the start model
    python examples/one_file/vineppo.py

The start model adds four numbers, one number per line, and gets a third of its sums right:

    prompt      12+34+56+78=
    answer      12+34=46
                46+56=102
                102+78=180
                #180

VinePPO estimates, before and after each line, the chance that the answer ends right. Lines that raise this
chance become more likely (Kazemnejad et al., arXiv:2410.01679, section 4). The algorithm, with the section of
this file that implements a line:

    π_θ is the start model
    for each iteration:
        draw problems, sample answers to each from π_θ, and grade them                  [2, 3]
        for each state s of the answers, which is the prompt or the end of a line:
            V(s) = the mean reward of K continuations of s, sampled from π_θ            [4]
        for each step of the answers, which is a line:
            A = V(the state after it) - V(the state before it)                          [5]
        take an AdamW step on PPO's clipped ratio · A                                   [6, 7]

treetune runs the same experiment from vineppo.jsonnet, and ends with the same weights, bit for bit.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

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
ITERATIONS = 20
PROBLEMS_PER_ITERATION = 32
ANSWERS_PER_PROBLEM = 8
MAX_TOKENS = 48  # the longest response
UNFINISHED_REWARD = 0.0  # the reward of a response that has no end token within MAX_TOKENS
# The objective
CONTINUATIONS = 3  # K, of each state
CLIP = 0.2  # ε
# Training
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
    advantages_T: Tensor | None = None  # of the response's tokens

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


# 4. Values. A state's value is the mean reward of K continuations:
#
#     V(s) = 1/K Σ_k R(τ_k),    τ_k ~ π_θ(· | s)
class State(NamedTuple):
    """The beginning of a step: the prompt, or the end of a line. Answers that begin alike share states."""

    problem: int
    beginning: tuple[int, ...]  # the tokens of the response up to here


def find_step_starts(answer: Answer) -> list[int]:
    """Returns the index of the first token of each step. A step is a line."""
    [newline] = encode("\n")
    starts = [0]
    for index in range(1, len(answer.response)):
        if answer.response[index - 1] == newline:
            starts.append(index)
    return starts


def list_states(answer: Answer) -> list[State]:
    """Returns the state before each step."""
    return [State(answer.problem, tuple(answer.response[:start])) for start in find_step_starts(answer)]


def estimate_values(
    policy: LlamaForCausalLM, problems: list[Numbers], iteration: int, answers: list[Answer]
) -> dict[State, float]:
    """Returns V(s) of each state of the answers. A state that answers share is estimated once."""
    prompts: dict[State, Tokens] = {}
    for answer in answers:
        for state in list_states(answer):
            prompts[state] = answer.prompt
    prefixes, seeds = [], []
    for state, prompt in prompts.items():
        seed = derive_seed(SEED, iteration, f"train/{state.problem}", repr(state.beginning), "value")
        for number in range(CONTINUATIONS):
            prefixes.append([*prompt, *state.beginning])
            seeds.append(seed + number)
    continuations = sample(policy, prefixes, seeds, max_length=len(answers[0].prompt) + MAX_TOKENS)
    states = list(prompts)
    rewards: dict[State, list[float]] = {state: [] for state in states}
    for number, continuation in enumerate(continuations):
        state = states[number // CONTINUATIONS]
        whole_response = [*state.beginning, *continuation]
        rewards[state].append(compute_reward(whole_response, problems[state.problem]))
    return {state: fmean(rewards_of_state) for state, rewards_of_state in rewards.items()}


# 5. Credit. A step's advantage is the change of the value. The reward comes with the last step, and the state
# after it is worth nothing:
#
#     A(s_t, a_t) = r_t + V(s_{t+1}) - V(s_t)
def set_advantages(answers: list[Answer], values: dict[State, float]) -> None:
    for answer in answers:
        values_before = [values[state] for state in list_states(answer)]
        # For the last step, r_t + V(s_{t+1}) is the reward alone. Earlier steps have no reward.
        values_after = [*values_before[1:], answer.reward]
        step_advantages = [after - before for before, after in zip(values_before, values_after)]
        # All tokens of a step have its advantage.
        step_lengths = torch.tensor([*find_step_starts(answer), len(answer.response)]).diff()
        answer.advantages_T = torch.tensor(step_advantages).repeat_interleave(step_lengths)
    whiten_advantages(answers)


def whiten_advantages(answers: list[Answer]) -> None:
    """Gives the advantages of all tokens of the iteration mean 0 and variance 1."""
    advantages_N = torch.cat([answer.advantages_T for answer in answers]).double()
    whitened_N = ((advantages_N - advantages_N.mean()) / (advantages_N.var() + 1e-8).sqrt()).float()
    lengths = [len(answer.response) for answer in answers]
    for answer, whitened_T in zip(answers, whitened_N.split(lengths)):
        answer.advantages_T = whitened_T


# 6. Log-probs. The answers of a batch are padded on the right. No mask is needed for the padding, since
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


# 7. The objective is PPO's (Schulman et al., arXiv:1707.06347, equation 7), the mean over all tokens of
#
#     min(ρ A, clip(ρ, 1 - ε, 1 + ε) A),    ρ = π_θ(a_t | s_t) / π_old(a_t | s_t)
#
# Here an iteration takes a single step, and before it π_θ is π_old. So ρ is 1, its gradient is that of
# log π_θ, and the clip changes nothing. It matters where an iteration takes several steps, as in ppo.py.
def vineppo_loss(policy: LlamaForCausalLM, batch: list[Answer], all_tokens: int) -> Tensor:
    """Returns a micro-batch's part of the loss, the mean over the `all_tokens` tokens of the iteration."""
    advantages_N = torch.cat([answer.advantages_T for answer in batch])
    logprobs_N = compute_logprobs(policy, batch)
    old_logprobs_N = logprobs_N.detach()
    ratio_N = (logprobs_N - old_logprobs_N).exp()
    clipped_ratio_N = ratio_N.clamp(1 - CLIP, 1 + CLIP)
    # The minimum of the objective is a maximum in the loss, which has the opposite sign.
    policy_loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * clipped_ratio_N)
    return (policy_loss_N * (1 / all_tokens)).sum()


# 8. The loop: sample, grade, estimate values, train.
def main() -> LlamaForCausalLM:
    torch.set_num_threads(1)  # more threads add numbers in another order, which changes the last bits
    problems = draw_problems()
    policy = LlamaForCausalLM.from_pretrained(START)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    print("iteration  right  tokens  states  their value")
    for iteration in range(ITERATIONS):
        answers = rollout(policy, problems, iteration)
        values = estimate_values(policy, problems, iteration, answers)
        set_advantages(answers, values)
        all_tokens = sum(len(answer.response) for answer in answers)
        for batch in split_into_micro_batches(answers, TOKENS_PER_MICRO_BATCH):
            vineppo_loss(policy, batch, all_tokens).backward()  # gradients add up
        warmup = min(1.0, (iteration + 1) / WARMUP_STEPS)
        take_step(policy, optimizer, LEARNING_RATE * warmup)
        print_metrics(iteration, answers, values)
    return policy


def take_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


def print_metrics(iteration: int, answers: list[Answer], values: dict[State, float]) -> None:
    accuracy = fmean(answer.reward for answer in answers)
    mean_length = fmean(len(answer.response) for answer in answers)
    mean_value = fmean(values.values())
    print(
        f"{iteration + 1:9}  {accuracy:5.0%}  {mean_length:6.1f}  {len(values):6}  {mean_value:11.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
