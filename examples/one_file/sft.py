"""Supervised fine-tuning in one file, with torch and transformers alone. Read it from top to bottom.

    python examples/one_file/sft.py

A Llama with a hundred thousand random weights learns to add four numbers, one number per line:

    prompt      12+34+56+78=
    solution    12+34=46
                46+56=102
                102+78=180
                #180

A teacher writes the solutions, and makes mistakes in some lines. After about a minute the model gets a third
of the sums right. This is step 1 of InstructGPT (Ouyang et al., arXiv:2203.02155, section 3.5), with the loss
of language modelling (Radford et al., 2018, equation 1) on the tokens of the solution. The algorithm, with
the section of this file that implements a line:

    π_θ is a model with random weights                                          [4]
    for each iteration:
        draw problems, and let the teacher solve them                           [2, 3]
        for each minibatch of solutions:                                        [6]
            take an AdamW step on the negative mean of log π_θ(token)           [5, 6]

The weights are saved in experiments/one_file/sft. The five other programs of this folder start from them.
treetune runs the same experiment from sft.jsonnet, and ends with the same weights, bit for bit.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

# Names of tensors end in their shape: B is the batch, T tokens, V the vocabulary, D the hidden size,
# and N all response tokens of a batch, one answer after the other.
Tokens = list[int]
Numbers = tuple[int, ...]

SEED = 1
FOLDER = Path("experiments/one_file/sft")  # for the trained weights
# The task
NUMBERS_PER_PROBLEM = 4
TEST_SIZE, VALIDATION_SIZE, TRAIN_SIZE = 1000, 500, 20_000  # problems; only the last ones are trained on
SLIP_PROBABILITY = 0.12  # of a mistake in a line of the teacher's
# The model
LAYERS, HIDDEN_SIZE, HEADS, INTERMEDIATE_SIZE, CONTEXT_LENGTH = 2, 64, 2, 192, 128
# Training
ITERATIONS = 12
PROBLEMS_PER_ITERATION = 6400
MINIBATCH_SIZE = 32  # solutions of an optimizer step
LEARNING_RATE, WARMUP_STEPS, MAX_GRAD_NORM = 3e-3, 50, 1.0
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
    """Draws all problems: test, validation, training. No two problems consist of the same numbers."""
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
    return problems


def write_prompt(numbers: Numbers) -> str:
    return "+".join(map(str, numbers)) + "=\n"


# 3. The teacher makes mistakes: a sum is then too large by 1 or by 10. The next lines continue from the wrong
# sum and are right in themselves.
@dataclass
class Solution:
    prompt: Tokens
    response: Tokens

    @property
    def tokens(self) -> Tokens:
        return self.prompt + self.response


def write_solution(numbers: Numbers, generator: random.Random) -> str:
    text = ""
    total = numbers[0]
    for number in numbers[1:]:
        result = total + number
        if generator.random() < SLIP_PROBABILITY:
            result += generator.choice((1, 10))
        text += f"{total}+{number}={result}\n"
        total = result
    return f"{text}#{total}"


def draw_solutions(problems: list[Numbers], iteration: int) -> list[Solution]:
    """Draws the problems of an iteration, and lets the teacher solve each once."""
    generator = random.Random(derive_seed(SEED, iteration, "problems"))
    solutions = []
    for problem in generator.sample(range(TRAIN_SIZE), PROBLEMS_PER_ITERATION):
        name = f"train/{problem}"
        seed = derive_seed(SEED, iteration, name, 0, "demonstration")
        teacher = random.Random(derive_seed(seed, name, "demonstration"))
        text = write_solution(problems[problem], teacher)
        prompt = encode(write_prompt(problems[problem]))
        solutions.append(Solution(prompt, [*encode(text), END]))
    return solutions


# 4. The model: a Llama with random weights.
def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(ALPHABET) + 2,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT_LENGTH,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )
    torch.manual_seed(derive_seed(SEED, "model"))
    return LlamaForCausalLM(config)


# 5. Log-probs. The solutions of a batch are padded on the right. No mask is needed for the padding, since
# attention is causal: no token sees what is to its right.
def split_into_micro_batches(solutions: list[Solution], max_tokens: int) -> Iterator[list[Solution]]:
    """Yields batches of solutions of similar length, with at most `max_tokens` tokens, padding included."""
    batch: list[Solution] = []
    for solution in sorted(solutions, key=lambda solution: len(solution.tokens), reverse=True):
        # The first solution of a batch is the longest: the others are padded to its length.
        if batch and len(batch[0].tokens) * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(solution)
    yield batch


def compute_logprobs(model: LlamaForCausalLM, batch: list[Solution]) -> Tensor:
    """Returns log π(y_t | x, y_<t) of all response tokens of the batch, one solution after the other: [N]."""
    ids_BT = pad_sequence([torch.tensor(solution.tokens) for solution in batch], batch_first=True)
    # The output at a position predicts the next token. The model's head runs only where that is a token of
    # the response.
    predicts_response_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for row, solution in enumerate(batch):
        predicts_response_BT[row, len(solution.prompt) - 1 : len(solution.tokens) - 1] = True
    hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BTD[predicts_response_BT])
    response_ids_N = torch.cat([torch.tensor(solution.response) for solution in batch])
    return logits_NV.log_softmax(-1).gather(-1, response_ids_N[:, None])[:, 0]


# 6. The loop: draw problems, solve them, train. The loss of a minibatch is, over its N response tokens,
#
#     L(θ) = - 1/N Σ log π_θ(y_t | x, y_<t)
def main() -> LlamaForCausalLM:
    torch.set_num_threads(1)  # more threads add numbers in another order, which changes the last bits
    problems = draw_problems()
    test_problems, training_problems = problems[:TEST_SIZE], problems[TEST_SIZE + VALIDATION_SIZE :]
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    step = 0
    print("iteration  steps  loss of a token  right")
    for iteration in range(ITERATIONS):
        solutions = draw_solutions(training_problems, iteration)
        losses = []
        for minibatch in draw_minibatches(solutions, iteration):
            all_tokens = sum(len(solution.response) for solution in minibatch)
            loss_of_step = 0.0
            for batch in split_into_micro_batches(minibatch, TOKENS_PER_MICRO_BATCH):
                loss = -(compute_logprobs(model, batch) * (1 / all_tokens)).sum()
                loss.backward()  # gradients add up
                loss_of_step += loss.item()
            losses.append(loss_of_step)
            step += 1
            warmup = min(1.0, step / WARMUP_STEPS)
            take_step(model, optimizer, LEARNING_RATE * warmup)
        accuracy = measure_accuracy(model, test_problems)
        print(f"{iteration + 1:9}  {step:5}  {fmean(losses):15.3f}  {accuracy:5.0%}", flush=True)
    return model


def draw_minibatches(solutions: list[Solution], iteration: int) -> Iterator[list[Solution]]:
    """Yields the minibatches of an iteration: all solutions, in a random order."""
    order = list(range(len(solutions)))
    random.Random(derive_seed(SEED, iteration, "minibatches", 0)).shuffle(order)
    for start in range(0, len(order), MINIBATCH_SIZE):
        indices = sorted(order[start : start + MINIBATCH_SIZE])
        yield [solutions[index] for index in indices]


def take_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


# 7. Evaluation: one answer to each of 256 test problems. The method `generate` of transformers samples, with
# the global generator of torch. Training doesn't use that, so evaluation changes no weight.
def measure_accuracy(model: LlamaForCausalLM, test_problems: list[Numbers]) -> float:
    """Returns the share of correct answers."""
    problems = test_problems[:256]
    prompts_BT = torch.tensor([encode(write_prompt(numbers)) for numbers in problems])
    ids_BT = model.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        do_sample=True,
        top_k=0,
        max_new_tokens=48,
    )
    responses = ids_BT[:, prompts_BT.shape[1] :].tolist()
    correct = 0
    for numbers, response in zip(problems, responses):
        correct += decode(response).endswith(f"\n#{sum(numbers)}")
    return correct / len(problems)


if __name__ == "__main__":
    main().save_pretrained(FOLDER)
