"""PPO in one file, with torch and transformers alone. Read it from top to bottom.

    python examples/one_file/sft.py     # once: trains the start model
    python examples/one_file/ppo.py

The start model adds four numbers, one number per line, and gets a third of its sums right:

    prompt      12+34+56+78=
    answer      12+34=46
                46+56=102
                102+78=180
                #180

PPO makes tokens more likely after which an answer turns out better than a critic expected (Schulman et al.,
arXiv:1707.06347, whose equation numbers are used here). The critic is a second model of the same size, which
learns the values of states. The algorithm, with the section of this file that implements a line:

    π_θ is the start model, and V the start model with a head that gives one number
    for each iteration:
        π_old = π_θ
        draw problems, sample answers to each from π_old, and grade them                [2, 3]
        compute advantages A_t and returns R_t from the rewards and from V              [4, 5]
        for each minibatch of answers, in each of EPOCHS passes:                        [7]
            take an AdamW step of π_θ on clipped ratio · A_t, and one of V on (V - R_t)²   [6]

treetune runs the same experiment from ppo.jsonnet, and ends with the same weights, bit for bit.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator
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
ITERATIONS = 15
PROBLEMS_PER_ITERATION = 64
ANSWERS_PER_PROBLEM = 8
MAX_TOKENS = 48  # the longest response
UNFINISHED_REWARD = 0.0  # the reward of a response that has no end token within MAX_TOKENS
# The objective
CLIP = 0.2  # ε
GAMMA, LAMBDA = 1.0, 1.0  # γ and λ
# Training
MINIBATCH_SIZE = 128  # answers of an optimizer step
EPOCHS = 2  # passes over the answers of an iteration
LEARNING_RATE, CRITIC_LEARNING_RATE, WARMUP_STEPS, MAX_GRAD_NORM = 4e-4, 1e-3, 10, 1.0
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
    old_logprobs_T: Tensor | None = None  # of the response's tokens, under π_old
    advantages_T: Tensor | None = None
    returns_T: Tensor | None = None  # the targets of the critic

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


# 4. Log-probs and values. The answers of a batch are padded on the right. No mask is needed for the padding,
# since attention is causal: no token sees what is to its right.
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


def run_on_states(model: LlamaForCausalLM, batch: list[Answer]) -> Tensor:
    """Returns the output of the model's head for the state before each response token.

    It has the shape [N, V] for the policy, whose head gives logits, and [N, 1] for the critic, whose head
    gives the state's value.
    """
    ids_BT = pad_sequence([torch.tensor(answer.tokens) for answer in batch], batch_first=True)
    # The output at a position belongs to the state before the next token. The model's head runs only where
    # that is a token of the response.
    precedes_response_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, answer in enumerate(batch):
        precedes_response_BT[row, len(answer.prompt) - 1 : len(answer.tokens) - 1] = True
    hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return model.lm_head(hidden_BTD[precedes_response_BT])


def compute_logprobs(policy: LlamaForCausalLM, batch: list[Answer]) -> Tensor:
    """Returns log π(a_t | s_t) of all response tokens of the batch, one answer after the other: [N]."""
    logits_NV = run_on_states(policy, batch)
    response_ids_N = torch.cat([torch.tensor(answer.response) for answer in batch])
    return logits_NV.log_softmax(-1).gather(-1, response_ids_N[:, None])[:, 0]


def compute_values(critic: LlamaForCausalLM, batch: list[Answer]) -> Tensor:
    """Returns V(s_t) before each response token of the batch, one answer after the other: [N]."""
    return run_on_states(critic, batch)[:, 0]


@torch.no_grad()
def score(
    compute: Callable[[LlamaForCausalLM, list[Answer]], Tensor],
    model: LlamaForCausalLM,
    answers: list[Answer],
) -> list[Tensor]:
    """Returns what `compute` gives for each answer, without gradients. `compute` is one of the two above.

    Answers with the same tokens are computed once.
    """
    distinct = {answer.tokens: answer for answer in answers}
    scores_by_tokens: dict[tuple[int, ...], Tensor] = {}
    # Without a backward pass, twice as many tokens need about the same memory.
    for batch in split_into_micro_batches(list(distinct.values()), 2 * TOKENS_PER_MICRO_BATCH):
        lengths = [len(answer.response) for answer in batch]
        for answer, scores_T in zip(batch, compute(model, batch).split(lengths)):
            scores_by_tokens[answer.tokens] = scores_T
    return [scores_by_tokens[answer.tokens] for answer in answers]


# 5. Credit (equations 11 and 12): generalized advantage estimation.
#
#     δ_t = r_t + γ V(s_{t+1}) - V(s_t)        A_t = δ_t + γλ A_{t+1}        R_t = A_t + V(s_t)
#
# The last token earns the reward, and nothing comes after it.
def set_advantages(answers: list[Answer], values: list[Tensor]) -> None:
    for answer, values_T in zip(answers, values):
        values_of_answer = values_T.tolist()
        last = len(values_of_answer) - 1
        advantages = [0.0] * len(values_of_answer)
        next_value, next_advantage = 0.0, 0.0
        for t in range(last, -1, -1):
            reward = answer.reward if t == last else 0.0
            delta = reward + GAMMA * next_value - values_of_answer[t]
            advantages[t] = delta + GAMMA * LAMBDA * next_advantage
            next_value, next_advantage = values_of_answer[t], advantages[t]
        returns = [advantage + value for advantage, value in zip(advantages, values_of_answer)]
        answer.advantages_T = torch.tensor(advantages)
        answer.returns_T = torch.tensor(returns)


# 6. The objective (equations 7 and 9) is the mean over all tokens of
#
#     min(ρ A, clip(ρ, 1 - ε, 1 + ε) A) - 1/2 (V(s_t) - R_t)²,    ρ = π_θ(a_t | s_t) / π_old(a_t | s_t)
#
# In the first step of an iteration ρ is 1. In later steps, the clip stops the gradient of tokens whose
# probability has changed enough. Policy and critic share no weights: each learns from its own term.
def ppo_loss(
    policy: LlamaForCausalLM, critic: LlamaForCausalLM, batch: list[Answer], all_tokens: int
) -> Tensor:
    """Returns a micro-batch's part of the loss, the mean over the `all_tokens` tokens of its minibatch."""
    advantages_N = torch.cat([answer.advantages_T for answer in batch])
    old_logprobs_N = torch.cat([answer.old_logprobs_T for answer in batch])
    returns_N = torch.cat([answer.returns_T for answer in batch])

    ratio_N = (compute_logprobs(policy, batch) - old_logprobs_N).exp()
    clipped_ratio_N = ratio_N.clamp(1 - CLIP, 1 + CLIP)
    # The minimum of the objective is a maximum in the loss, which has the opposite sign.
    policy_loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * clipped_ratio_N)
    squared_error_N = (compute_values(critic, batch) - returns_N).square()

    weight = torch.tensor(1 / all_tokens)
    # In float32, `all_tokens` times the weight isn't exactly 1. treetune divides the critic's weights by that
    # sum, which changes the last bits.
    critic_weight = weight / float(weight.double() * all_tokens)
    return (policy_loss_N * weight).sum() + 0.5 * (squared_error_N * critic_weight).sum()


# 7. The loop: sample, grade, estimate advantages, train.
def main() -> LlamaForCausalLM:
    torch.set_num_threads(1)  # more threads add numbers in another order, which changes the last bits
    problems = draw_problems()
    policy = LlamaForCausalLM.from_pretrained(START)
    critic = make_critic()
    policy_optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), weight_decay=0.0)
    step = 0
    print("iteration  right  tokens  critic's error")
    for iteration in range(ITERATIONS):
        answers = rollout(policy, problems, iteration)
        set_advantages(answers, score(compute_values, critic, answers))
        for answer, old_logprobs_T in zip(answers, score(compute_logprobs, policy, answers)):
            answer.old_logprobs_T = old_logprobs_T
        for minibatch in draw_minibatches(answers, iteration):
            all_tokens = sum(len(answer.response) for answer in minibatch)
            for batch in split_into_micro_batches(minibatch, TOKENS_PER_MICRO_BATCH):
                ppo_loss(policy, critic, batch, all_tokens).backward()  # gradients add up
            step += 1
            learning_rate = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
            take_step(policy, policy_optimizer, learning_rate)
            # The critic's rate follows the same warm-up.
            take_step(critic, critic_optimizer, learning_rate * CRITIC_LEARNING_RATE / LEARNING_RATE)
        print_metrics(iteration, answers)
    return policy


def make_critic() -> LlamaForCausalLM:
    """Returns the start model with a head that gives one number, from random weights."""
    critic = LlamaForCausalLM.from_pretrained(START)
    size = critic.config.hidden_size
    generator = torch.Generator().manual_seed(derive_seed(SEED, "critic"))
    critic.lm_head = torch.nn.Linear(size, 1)
    critic.lm_head.weight.data = torch.randn(1, size, generator=generator) / (size + 1) ** 0.5
    critic.lm_head.bias.data.zero_()
    return critic


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


def print_metrics(iteration: int, answers: list[Answer]) -> None:
    accuracy = fmean(answer.reward for answer in answers)
    mean_length = fmean(len(answer.response) for answer in answers)
    # An advantage is R_t - V(s_t), the difference between the critic's target and its value.
    mean_squared_error = float(torch.cat([answer.advantages_T for answer in answers]).square().mean())
    print(f"{iteration + 1:9}  {accuracy:5.0%}  {mean_length:6.1f}  {mean_squared_error:14.3f}", flush=True)


if __name__ == "__main__":
    main()
