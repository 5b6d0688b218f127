"""Supervised fine-tuning in one file, on torch and transformers alone. Read it from top to bottom.

    python examples/one_file/sft.py

A Llama of a hundred thousand random weights learns to add four numbers from a teacher who writes every
running total in a line of its own, and who slips now and then. After a minute it is right in a third of
its answers. Its weights go to experiments/one_file/sft, where the five other programs of this folder begin.
This is the first step of Ouyang et al. (arXiv:2203.02155, section 3.5), with the loss of language modelling
(Radford et al., 2018, equation 1) over what the teacher wrote. The same experiment, composed of treetune's
parts, is sft.jsonnet: its weights are the same, bit for bit.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

Tokens, Numbers = list[int], tuple[int, ...]
SEED, FOLDER = 1, Path("experiments/one_file/sft")
# The task. Problems of the test and the validation come first and are never trained on.
COUNT, TEST_SIZE, VALIDATION_SIZE, TRAIN_SIZE = 4, 1000, 500, 20_000
SLIP_PROBABILITY = 0.12
# The model.
LAYERS, HIDDEN_SIZE, HEADS, INTERMEDIATE_SIZE, CONTEXT_LENGTH = 2, 64, 2, 192, 128
# Training: each iteration has new problems, and steps on so many of their solutions each.
ITERATIONS, PROBLEMS, MINIBATCH_SIZE = 12, 6400, 32
LEARNING_RATE, WARMUP_STEPS, MAX_GRAD_NORM = 3e-3, 50, 1.0
TOKENS_PER_MICRO_BATCH = 8192


# 1. Chance. Every number that is drawn has a place, such as (iteration, problem), and its generator is seeded
# with a hash of it: the same command gives the same weights, and no draw depends on what else is drawn.
def derive_seed(*place: int | str) -> int:
    parts = [repr(part).encode() for part in place]
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 16


# 2. The task. A problem is "12+34+56+78=\n", and no two have the same numbers.
def make_problems() -> list[Numbers]:
    generator = random.Random(derive_seed(0, "operands", 10, 100, COUNT))
    problems: dict[Numbers, Numbers] = {}
    while len(problems) < TEST_SIZE + VALIDATION_SIZE + TRAIN_SIZE:
        numbers = tuple(generator.choices(range(10, 100), k=COUNT))
        problems.setdefault(tuple(sorted(numbers)), numbers)
    return list(problems.values())


def prompt_of(numbers: Numbers) -> str:
    return "+".join(map(str, numbers)) + "=\n"


# 3. The teacher writes "12+34=46\n46+56=102\n102+78=180\n#180". When they slip, a sum is too large by 1 or by
# 10, and they continue from it: what follows is right again, but for the answer.
def demonstration(numbers: Numbers, generator: random.Random) -> str:
    total, text = numbers[0], ""
    for number in numbers[1:]:
        slips = generator.random() < SLIP_PROBABILITY
        written = total + number + (generator.choice((1, 10)) if slips else 0)
        text += f"{total}+{number}={written}\n"
        total = written
    return f"{text}#{total}"


# 4. Tokens. Each is a character, but for 0, which pads, and 1, which ends an answer.
ALPHABET = "0123456789+=#\n"
PAD, END = 0, 1


def encode(text: str) -> Tokens:
    return [ALPHABET.index(character) + 2 for character in text]


# 5. The model, with weights that transformers draws.
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


# 6. Log-probs. Solutions of unlike lengths run together, padded on the right. There is no attention mask: a
# token sees none to its right. How solutions are cut into micro-batches costs memory and changes no update.
Solution = tuple[Tokens, Tokens]  # a prompt and its response


def micro_batches(solutions: list[Solution]) -> Iterator[list[Solution]]:
    """Neighbours in length, of at most TOKENS_PER_MICRO_BATCH, padding included."""
    batch: list[Solution] = []
    for prompt, response in sorted(solutions, key=lambda one: -len(one[0] + one[1])):
        if batch and len(batch[0][0] + batch[0][1]) * (len(batch) + 1) > TOKENS_PER_MICRO_BATCH:
            yield batch
            batch = []
        batch.append((prompt, response))
    yield batch


def logprobs(model: LlamaForCausalLM, batch: list[Solution]) -> Tensor:
    """log π(y_t | x, y_<t) of all response tokens, one solution after the other: [N]."""
    ids_BT = pad_sequence([torch.tensor(prompt + response) for prompt, response in batch], batch_first=True)
    predicts_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    # The token at t is predicted at t - 1, and only there the head runs.
    for row, (prompt, response) in enumerate(batch):
        predicts_BT[row, len(prompt) - 1 : len(prompt + response) - 1] = True
    hidden_ND = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[predicts_BT]
    labels_N = ids_BT.roll(-1, dims=1)[predicts_BT]
    return model.lm_head(hidden_ND).log_softmax(-1).gather(-1, labels_N[:, None])[:, 0]


# 7. The loop. An iteration draws problems and has the teacher solve them. Each step is one of AdamW on
#
#     L(θ) = - 1/N Σ log π_θ(y_t | x, y_<t)
#
# over the N response tokens of its minibatch. Micro-batches add their parts of that sum to the gradient.
def main() -> LlamaForCausalLM:
    torch.set_num_threads(1)  # several add sums up in another order, which changes the last bits
    problems = make_problems()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    step = 0
    print("iteration  steps  loss of a token  right")
    for iteration in range(ITERATIONS):
        solutions, losses = [], []
        drawn = random.Random(derive_seed(SEED, iteration, "problems")).sample(range(TRAIN_SIZE), PROBLEMS)
        for index in drawn:
            numbers, name = problems[TEST_SIZE + VALIDATION_SIZE + index], f"train/{index}"
            seed = derive_seed(SEED, iteration, name, 0, "demonstration")
            text = demonstration(numbers, random.Random(derive_seed(seed, name, "demonstration")))
            solutions.append((encode(prompt_of(numbers)), [*encode(text), END]))
        order = list(range(len(solutions)))
        random.Random(derive_seed(SEED, iteration, "minibatches", 0)).shuffle(order)
        for first in range(0, len(order), MINIBATCH_SIZE):
            minibatch = [solutions[number] for number in sorted(order[first : first + MINIBATCH_SIZE])]
            tokens = sum(len(response) for _, response in minibatch)
            losses.append(0.0)
            for batch in micro_batches(minibatch):
                loss = -(logprobs(model, batch) * (1 / tokens)).sum()
                loss.backward()
                losses[-1] += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        right = share_right(model, problems[:TEST_SIZE])
        print(f"{iteration + 1:9}  {step:5}  {sum(losses) / len(losses):15.3f}  {right:5.0%}", flush=True)
    return model


# 8. How good is it? One answer to each of 256 problems that it has never seen, by transformers' own sampling.
# (It draws from torch's generator, and training from generators of its own: it changes no weight.)
def share_right(model: LlamaForCausalLM, problems: list[Numbers]) -> float:
    prompts_BT = torch.tensor([encode(prompt_of(numbers)) for numbers in problems[:256]])
    answers_BT = model.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        do_sample=True,
        top_k=0,
        max_new_tokens=48,
    )[:, prompts_BT.shape[1] :]
    texts = ["".join(ALPHABET[token - 2] for token in ids if token > END) for ids in answers_BT.tolist()]
    right = [text.endswith(f"\n#{sum(numbers)}") for text, numbers in zip(texts, problems)]
    return sum(right) / len(right)


if __name__ == "__main__":
    main().save_pretrained(FOLDER)
