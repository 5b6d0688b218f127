"""Writes docs/results/plan.md: which GPUs each shipped experiment fits on, and how accurate plans are.

python benchmarks/plans.py            # the tables, with the counts of earlier calls
python benchmarks/plans.py --count    # first counts memory: some minutes on an idle core, below 8 GiB
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
# With it, plans for a CPU have one server, on whatever machine the page is written.
os.environ["OMP_NUM_THREADS"] = "1"

import treetune.parts  # noqa: E402, F401  (registers all parts)
from tests.runtime.planning.plans import PUBLISHED_RUNS, seconds_of_published  # noqa: E402
from tests.support.peak_memory import Case  # noqa: E402
from tests.support.shipped import whole_configurations  # noqa: E402
from treetune.cluster.commands import find_shape  # noqa: E402
from treetune.config.build import build  # noqa: E402
from treetune.config.explain import Explanation  # noqa: E402
from treetune.config.jsonnet import load  # noqa: E402
from treetune.engine.settings import VllmSettings  # noqa: E402
from treetune.models.lora import Lora  # noqa: E402
from treetune.models.shapes import PUBLISHED, Shape, shape_of  # noqa: E402
from treetune.objectives.policy_gradient import ClippedPolicyGradient  # noqa: E402
from treetune.runtime.base import PolicyIteration, Runtime  # noqa: E402
from treetune.runtime.machine import GIB, MIB, Machine, make_described_machine  # noqa: E402
from treetune.runtime.planning.plan import Plan, find_remedy  # noqa: E402
from treetune.runtime.planning.report import estimate_phases, predict_metrics  # noqa: E402
from treetune.trainer.base import Trainer  # noqa: E402

PAGE = ROOT / "docs/results/plan.md"
COUNTED = ROOT / "docs/results/plan_counted.json"
"""The counts of `--count`. Git ignores the file; without it, the table of counts is empty."""
GPUS = (1, 4, 8)
GPU_GIB = 80
SMALL = 20_000_000
"""The number of parameters below which an experiment is meant for CPUs."""
NAMED_HARDWARE = (
    ("threadweaver/parallel", 8, 4, 80),
    ("guru/32b_grpo", 8, 16, 140),
    ("guru/32b_ppo", 8, 16, 140),
)
"""Experiments with the hardware that their files or papers name: GPUs of a machine, machines, GB of a GPU."""
PAPERS_RATE = 40_000
"""Tokens per second of VinePPO with a 7B model on eight H100 (arXiv:2410.01679, v2)."""
QUICKSTART_SECONDS = {
    "generation + credit": 2.51,
    "training": 1.32,
    "sync": 0.09,
    "evaluation": 0.26,
    "total": 4.23,
}
"""Seconds of the mean iteration of `configs/quickstart/vineppo.jsonnet`, seed 1."""
LAPTOP = Machine(device="cpu", ranks=1, cores=2, host_memory=8 * GIB, shared_memory=4 * GIB)

HEAD = """\
# Plans: memory and seconds

```bash
python benchmarks/plans.py            # --count also counts memory with PyTorch's profiler
```

Which shipped experiment fits on which GPUs, and how accurate is [`treetune \
plan`](../hardware.md#does-it-fit)?

## What it says

The planned memory of training is within 5 % of PyTorch's own count on a CPU. The planned seconds of \
each phase are within 44 % of published H100 runs. One published run is an exception: it took 3.2 times \
the planned seconds in total, which the plan does not explain. A quickstart iteration on a CPU is \
predicted within 13 %, and each of its phases within 31 %.

## What it does not say

No memory on this page was measured on a GPU; the memory that GPU kernels use in addition is assumed. \
[GPU](gpu.md) has one measurement of a tiny model.

The seconds leave out the fixed costs of each optimiser step. With a model of a few million parameters \
and many small steps, they are most of an iteration. The command says so for models below 10 million \
parameters.

## Shipped experiments on GPUs

A cell is the memory of each GPU, in GiB, in the phase that needs most; an 80 GB GPU has 79.2 GiB. In \
*generation*, the server takes the largest share that fits, so many experiments show the same number. \
*Sync* is the transfer of new weights to the server. If an experiment does not fit, the cell names the \
smallest change that makes it fit.

| experiment | parameters | 1 × 80 GB | 4 × 80 GB | 8 × 80 GB |
|---|---:|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", action="store_true")
    if parser.parse_args().count:
        count_memory()
    experiments = read_experiments()
    lines = [
        HEAD.rstrip("\n"),
        *rows_of_gpus(experiments),
        "",
        *section_of_named_hardware(experiments),
        "",
        *section_of_cpus(experiments),
        "",
        *section_of_counts(),
        "",
        *section_of_published_runs(experiments),
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    print(PAGE)


# Memory of the shipped experiments


@dataclass(frozen=True)
class ShippedExperiment:
    """An experiment of ``configs/``."""

    root: PolicyIteration
    shape: Shape
    """The sizes of its start model."""

    def plan(self, machine: Machine) -> Plan:
        return Plan.of(self.root, machine, shape_of=find_shape)


def read_experiments() -> dict[str, ShippedExperiment]:
    """Returns all shipped experiments by name. Tables and data pipelines are left out.

    Some experiments start from a model that a table or another experiment trains, or have such a model as
    their reference. They are left out where this model is missing, and standard error says so.
    """
    experiments = {}
    for file in whole_configurations():
        config = load([str(ROOT / file)], environment_keys=())
        if config.data.get("type") != "policy_iteration":
            continue
        name = file.removeprefix("configs/").removesuffix(".jsonnet")
        root = build(Runtime, config.data, Explanation(config))
        assert isinstance(root, PolicyIteration)
        reference = root.credit.trainer_scores.reference_model
        try:
            shape = find_shape(root.model, root.task.alphabet)
            if reference is not None:
                find_shape(reference, root.task.alphabet)  # a plan needs the sizes of both models
        except ValueError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        assert shape is not None, "shipped experiments start from models whose sizes are known"
        experiments[name] = ShippedExperiment(root, shape)
    return experiments


def rows_of_gpus(experiments: Mapping[str, ShippedExperiment]) -> Iterator[str]:
    """Yields a row of the table in `HEAD` for each experiment that is meant for GPUs."""
    for name, experiment in experiments.items():
        parameters = experiment.shape.parameters
        if parameters < SMALL:
            continue
        cells = [name, f"{parameters / 1e9:.2f} B"]
        for gpus in GPUS:
            cells.append(describe_fit(experiment.plan(make_described_machine(gpus, GPU_GIB))))
        yield f"| {' | '.join(cells)} |"


def describe_fit(plan: Plan) -> str:
    """Returns the GiB of a GPU in the phase that needs most, or else the change that makes the plan fit."""
    if not plan.fits:
        change = find_remedy(plan)
        return "no" if change is None else f"with {change.text}"
    uses_of_gpus = [use for use in plan.uses if "GPU" in use.where]
    largest = max(uses_of_gpus, key=lambda use: use.needed)
    phase = "" if largest.phase == "training" else f" ({largest.phase})"
    return f"{largest.needed / GIB:.1f}{phase}"


def section_of_named_hardware(experiments: Mapping[str, ShippedExperiment]) -> Iterator[str]:
    yield "Three experiments need the number of GPUs that their papers or files name:"
    yield ""
    yield "| experiment | machines × GPUs × GB | largest memory of a GPU, GiB |"
    yield "|---|---|---|"
    for name, gpus, nodes, memory in NAMED_HARDWARE:
        plan = experiments[name].plan(make_described_machine(gpus, memory, nodes))
        yield f"| {name} | {nodes} × {gpus} × {memory} | {describe_fit(plan)} |"


def section_of_cpus(experiments: Mapping[str, ShippedExperiment]) -> Iterator[str]:
    yield "## Shipped experiments for CPUs"
    yield ""
    plans = {}
    for name, experiment in experiments.items():
        if experiment.shape.parameters < SMALL:
            plans[name] = experiment.plan(LAPTOP)
    needed = {name: max(use.needed for use in plan.uses) for name, plan in plans.items()}
    largest = max(needed, key=lambda name: needed[name])
    fitting = sum(plan.fits for plan in plans.values())
    yield (
        f"{fitting} of {len(plans)} fit a machine with 2 cores and 8 GiB of memory. The largest needs"
        f" {needed[largest] / GIB:.1f} GiB (`{largest}`), most of it for the server."
    )


# Planned memory against PyTorch's count


def count_memory() -> None:
    """Counts the memory of training models with random weights, and writes the counts next to the plans.

    Cases that the file has already are not counted again.
    """
    import torch

    torch.use_deterministic_algorithms(False)
    rows = json.loads(COUNTED.read_text()) if COUNTED.is_file() else []
    counted_names = {row["case"] for row in rows}
    for case in list_cases():
        if case.name in counted_names:
            continue
        row = {
            "case": case.name,
            "parameters": case.shape.parameters,
            "planned": case.planned().peak,
            "counted": case.measured(),
        }
        rows.append(row)
        COUNTED.write_text(json.dumps(rows, indent=1) + "\n")
        print(row, flush=True)


def list_cases() -> list[Case]:
    """Returns the models and trainers whose memory is counted."""
    llama = make_shape(
        model_type="llama",
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=12,
        intermediate_size=2048,
        vocab_size=32_000,
        tie_word_embeddings=False,
    )
    qwen3 = make_shape(
        model_type="qwen3",
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2304,
        vocab_size=50_000,
        tie_word_embeddings=True,
    )
    qwen_half_billion = shape_of(PUBLISHED["Qwen/Qwen2.5-0.5B"], "published")
    assert qwen_half_billion is not None
    in_bfloat16: dict[str, Any] = {"precision": "bfloat16"}
    return [
        make_case("Llama, float32", llama),
        make_case("Llama, float32, no reference", llama, measure_kl=False),
        make_case("Llama, float32, checkpointing", llama, gradient_checkpointing=True),
        make_case("Qwen3, float32, packed", qwen3, layout="packed"),
        make_case("Qwen3, bfloat16, ZeRO-1", qwen3, **in_bfloat16, zero_stage=1),
        make_case("Qwen3, bfloat16, ZeRO-2", qwen3, **in_bfloat16, zero_stage=2, measure_kl=False),
        make_case("Qwen3, bfloat16, ZeRO-3", qwen3, **in_bfloat16, zero_stage=3, measure_kl=False),
        make_case(
            "Qwen2.5-0.5B, float32, adapters",
            qwen_half_billion,
            lora=Lora(rank=16),
            tokens_per_micro_batch=128,
        ),
    ]


def make_shape(**config: Any) -> Shape:
    """Returns the sizes of a model with a head dimension of 64.

    Args:
        config: Keys of the model's config.json.
    """
    shape = shape_of({**config, "head_dim": 64}, "benchmarks/plans.py")
    assert shape is not None
    return shape


def make_case(name: str, shape: Shape, **trainer: Any) -> Case:
    """Returns a case of training a model.

    Args:
        name: The name in the table.
        shape: The sizes of the model.
        trainer: Settings of the trainer.
    """
    settings = {"learning_rate": 1e-5, "tokens_per_micro_batch": 256} | trainer
    return Case(
        name=name,
        shape=shape,
        trainer=Trainer(objective=ClippedPolicyGradient(), **settings),
        answers=4,
        prompt_tokens=32,
        answer_tokens=96,
    )


def section_of_counts() -> Iterator[str]:
    yield "## Planned memory compared with PyTorch's count, on a CPU"
    yield ""
    yield (
        "Peak memory of training in the second iteration, on one rank: as planned, and as PyTorch's profiler "
        "counts the tensors of the process. Models have random weights; a batch is two micro-batches of 256 "
        "tokens (with adapters, four of 128)."
    )
    yield ""
    yield "| trainer | parameters | planned, MiB | counted, MiB | planned / counted |"
    yield "|---|---:|---:|---:|---:|"
    rows = json.loads(COUNTED.read_text()) if COUNTED.is_file() else []
    for row in rows:
        ratio = row["planned"] / row["counted"]
        yield (
            f"| {row['case']} | {row['parameters'] / 1e6:.1f} M | {row['planned'] / MIB:,.0f} |"
            f" {row['counted'] / MIB:,.0f} | {ratio:.3f} |"
        )


# Planned seconds against measured ones


def section_of_published_runs(experiments: Mapping[str, ShippedExperiment]) -> Iterator[str]:
    yield "## Planned seconds compared with published runs"
    yield ""
    yield (
        "CASPO's repository (April 2026) reports seconds of VinePPO with K = 9 on MATH, 512 answers an "
        "iteration, on H100s. The plan uses the repository's settings (`tests/runtime/planning/plans.py`). "
        "The repository reports no lengths of answers, so the plan assumes 250 tokens. The plan's constants "
        "were fitted to the first three runs; the other runs are predictions. *Rows alone* means that a "
        "micro-batch is one sequence."
    )
    yield ""
    yield "| run | phase | planned, s | published, s | error |"
    yield "|---|---|---:|---:|---:|"
    for name in PUBLISHED_RUNS:
        for phase, (planned, published) in seconds_of_published(name).items():
            error = planned / published - 1
            yield f"| {name} | {phase} | {planned:.0f} | {published:.0f} | {error:+.0%} |"
    yield ""
    yield (
        "The plan does not explain the last run. It took 338 s, of which 25 s are scoring and training. So "
        "its eight engines, of one GPU each, sampled for about 310 s, which is 2,480 GPU seconds. In the run "
        "above it, one engine of four GPUs did the same work in 227 s, which is 908 GPU seconds. Two things "
        "may explain a part of the difference: a small KV cache, from which sequences are evicted and "
        "computed again, and ranks that wait for the slowest. treetune's servers accept only as many "
        "sequences as their cache holds."
    )
    plan = experiments["polIter_deepseekSft2_vineppo_MATH"].plan(make_described_machine(8, GPU_GIB))
    seconds_of_phases = {estimate.phase: estimate.seconds for estimate in estimate_phases(plan)}
    rate = plan.work.continued_tokens / seconds_of_phases["continuations"]
    yield ""
    yield (
        f"VinePPO's paper reports {PAPERS_RATE:,} tokens per second for DeepSeekMath-7B on eight H100. The"
        f" plan assumes {rate:,.0f} for continuations ({rate / PAPERS_RATE - 1:+.0%})."
    )
    yield ""
    yield from section_of_quickstart(experiments["quickstart/vineppo"])


def section_of_quickstart(vineppo: ShippedExperiment) -> Iterator[str]:
    yield "## Planned seconds compared with the quickstart, on a CPU"
    yield ""
    yield (
        "An iteration of the quickstart's VinePPO on 2 idle cores of an AMD EPYC: as planned, and the mean "
        "of 25 iterations on 2026-11-28. Continuations are sampled together with answers, so only the sum of "
        "generation and credit is compared. The plan assumed 18,432 tokens of answers, 27,648 tokens of "
        "continuations and 8.4 GB of memory; measured were 18,433, 24,808 and 7.5 GB."
    )
    yield ""
    yield "| phase | planned, s | measured, s | error |"
    yield "|---|---:|---:|---:|"
    policy = vineppo.root.engines.policy
    assert isinstance(policy, VllmSettings)
    two_servers = replace(vineppo.root.engines, policy=replace(policy, replicas=2))
    with_two_servers = replace(vineppo, root=replace(vineppo.root, engines=two_servers))
    plan = with_two_servers.plan(replace(LAPTOP, cores=2))
    planned_seconds = predict_metrics(plan)
    for phases, measured in QUICKSTART_SECONDS.items():
        planned = sum(planned_seconds[f"seconds/{phase}"] for phase in phases.split(" + "))
        yield f"| {phases} | {planned:.2f} | {measured:.2f} | {planned / measured - 1:+.0%} |"


if __name__ == "__main__":
    main()
