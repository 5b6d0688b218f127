"""What an end token in the last step costs on an embedded task: Monte-Carlo credit's gradient, both ways.

    python benchmarks/end_token.py configs/signposts/late_grpo.jsonnet POLICY --problems 24 --samples 4

Answers of a policy (the folder of a checkpoint), sampled on the CPU, are cut as the task cuts them
and as GSM8K's splitter would, each with the end token in the last step and in one of its own.
Values are the teacher's, which are exact for whoever writes like the teacher: nothing but the cut
differs. Told are the share of answers that it changes, by how much an end token's advantage differs
there, how sure the policy is of it, and the difference of the gradients by the weights as a share
of the gradient's length."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from treetune.config.build import build
from treetune.config.jsonnet import load
from treetune.credit.vineppo import step_advantages
from treetune.models.tokenizer import codec_of, step_ends
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.tasks.base import Task
from treetune.tasks.steps import Lines
from treetune.vocabulary import Problem, TextCodec

Cut = Callable[[str], list[int]]


def sampled(model: Any, codec: TextCodec, problem: Problem, count: int, most: int) -> list[list[int]]:
    """The token ids of so many answers, without their prompt and what stands behind their end."""
    prompt = torch.tensor([list(codec.encode_prompt(problem))] * count)
    with torch.no_grad():
        rows = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            max_new_tokens=most,
            eos_token_id=codec.eos_id,
            pad_token_id=codec.eos_id,
        )
    answers = []
    for row in rows[:, prompt.shape[1] :].tolist():
        end = row.index(codec.eos_id) + 1 if codec.eos_id in row else len(row)
        answers.append(row[:end])
    return answers


def advantages(task: Any, problem: Problem, ids: Sequence[int], codec: TextCodec, cut: Cut) -> list[float]:
    """Of each token, with the teacher's values at the cuts."""
    text = codec.decode(ids)
    ends = step_ends(ids, cut(text), codec, text)
    values = []
    for start in (0, *ends[:-1]):
        begun = codec.decode(ids[:start])
        values.append(
            task.teacher_value(problem, begun if not begun or begun.endswith("\n") else begun + "\n")
        )
    of_steps = step_advantages(values, task.grader.grade(text, problem).reward)
    starts = zip((0, *ends[:-1]), ends, of_steps, strict=True)
    return [advantage for start, end, advantage in starts for _ in range(start, end)]


def logprobs(model: Any, codec: TextCodec, problem: Problem, ids: Sequence[int]) -> Tensor:
    prompt = list(codec.encode_prompt(problem))
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def cuts(task: Task) -> dict[str, tuple[Cut, Cut]]:
    """By name: with the end token in the last step, and in one of its own."""
    lines = Lines()
    return {
        "as the task cuts (a newline ends a step)": (task.step_boundaries, task.answer_boundaries),
        "as on GSM8K (a newline begins a step)": (
            replace(lines, end_token="last_step").answer_boundaries,
            lines.answer_boundaries,
        ),
    }


class Difference:
    """Sums over answers that are cut both ways."""

    def __init__(self, size: int) -> None:
        self.last, self.own = torch.zeros(size), torch.zeros(size)
        self.off: list[float] = []
        self.unsure: list[float] = []

    def add(
        self,
        last: Sequence[float],
        own: Sequence[float],
        differs: bool,
        scored: Tensor,
        weights: Sequence[Tensor],
    ) -> None:
        if differs:
            self.off.append(abs(last[-1] - own[-1]))
            self.unsure.append(1 - float(scored[-1].detach().exp()))
        for total, given in ((self.last, last), (self.own, own)):
            slopes = torch.autograd.grad((scored * torch.tensor(given)).sum(), weights, retain_graph=True)
            total += torch.cat([slope.flatten() for slope in slopes])

    def told(self, answers: int) -> str:
        sizes = f"{fmean(self.off):.3f} | {fmean(self.unsure):.4f}" if self.off else "- | -"
        apart = float((self.last - self.own).norm() / self.own.norm())
        cosine = float(self.last @ self.own / self.last.norm() / self.own.norm())
        return f"{len(self.off) / answers:.1%} | {sizes} | {apart:.4f} | {cosine:.5f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", help="an experiment on an embedded task that has a teacher")
    parser.add_argument("policy", help="a folder with a policy")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import treetune.parts  # noqa: F401  # registers all parts

    root = build(Runtime, load(options.configs.split(",")).data)
    assert isinstance(root, PolicyIteration)
    task, codec = root.task, codec_of(AutoTokenizer.from_pretrained(options.policy))
    model = AutoModelForCausalLM.from_pretrained(options.policy, dtype=torch.float32).eval()
    torch.manual_seed(0)
    problems = task.problems("validation")[: options.problems]
    most = max(len(codec.encode(task.demonstration(one, 0))) for one in problems) + 8
    weights = list(model.parameters())
    of_cut = {name: Difference(sum(p.numel() for p in weights)) for name in cuts(task)}
    told = solved = 0
    for problem in problems:
        for ids in sampled(model, codec, problem, options.samples, most):
            text = codec.decode(ids)
            told += 1
            solved += task.grader.grade(text, problem).correct
            scored = logprobs(model, codec, problem, ids)
            for name, both in cuts(task).items():
                last, own = (advantages(task, problem, ids, codec, cut) for cut in both)
                ends = [step_ends(ids, cut(text), codec, text) for cut in both]
                of_cut[name].add(last, own, ends[0] != ends[1], scored, weights)
    print(f"{told} answers, {solved / told:.1%} correct\n")
    columns = ("answers that change", "an end token's advantage differs by", "1 - its probability")
    print("| steps |", " | ".join(columns), "| difference of the gradients | cosine |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, difference in of_cut.items():
        print(f"| {name} | {difference.told(told)} |")


if __name__ == "__main__":
    main()
