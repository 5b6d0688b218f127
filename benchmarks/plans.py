"""Writes docs/results/plan.md: which shipped experiment fits where, and plans beside what PyTorch counts.

python benchmarks/plans.py            the tables, with what was counted before
python benchmarks/plans.py --count    counts as well: some minutes on an idle core, below 8 GiB of memory
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ["OMP_NUM_THREADS"] = "1"  # one server on a CPU, whatever machine writes the page

import treetune.parts  # noqa: E402, F401  (registers them)
from tests.runtime.planning.plans import PUBLISHED_RUNS, experiment, seconds_of_published  # noqa: E402
from tests.support.shipped import whole_configurations  # noqa: E402
from treetune.cluster.commands import start_shape  # noqa: E402
from treetune.config.build import build  # noqa: E402
from treetune.config.explain import Explanation  # noqa: E402
from treetune.config.jsonnet import load  # noqa: E402
from treetune.models.shapes import shape_of  # noqa: E402
from treetune.runtime.base import PolicyIteration, Runtime  # noqa: E402
from treetune.runtime.machine import GIB, MIB, Machine, described_machine  # noqa: E402
from treetune.runtime.planning.plan import Plan, remedy  # noqa: E402
from treetune.runtime.planning.report import estimates, predicted  # noqa: E402

PAGE = ROOT / "docs/results/plan.md"
COUNTED = ROOT / "docs/results/plan_counted.json"
"""Counts of `--count`, which git ignores: without them the page has no such table."""
GPUS = (1, 4, 8)
GPU_GIB = 80
SMALL = 20_000_000
"""Parameters below which an experiment is for processors."""
LAPTOP = Machine(device="cpu", ranks=1, cores=2, host_memory=8 * GIB, shared_memory=4 * GIB)

HEAD = """\
# Plans: memory and seconds

```bash
python benchmarks/plans.py            # --count also counts memory with PyTorch's profiler
```

Which shipped experiment fits on which GPUs, and how accurate is [`treetune
plan`](../hardware.md#does-it-fit)?

## What it says

The planned memory of training is within 5 % of PyTorch's own count on a CPU. The planned seconds of
each phase are within 44 % of published H100 runs. One published run is an exception: it took 3.4 times
the planned seconds in total, which the plan does not explain. The phases of a quickstart iteration on a
CPU are predicted within 6 %.

## What it does not say

No memory on this page was measured on a GPU; the memory that GPU kernels use in addition is assumed.
[GPU](gpu.md) has one measurement of a tiny model.

The seconds leave out the fixed costs of each optimiser step. With a model of a few million parameters
and many small steps, they are most of an iteration. The command says so for models below 10 million
parameters.

## Shipped experiments on GPUs

A cell is the memory of each GPU, in GiB, in the phase that needs most; an 80 GB GPU has 79.2 GiB. In
*generation*, the server takes the largest share that fits, so many experiments show the same number.
*Sync* is the transfer of new weights to the server. If an experiment does not fit, the cell names the
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
        count()
    lines = [
        HEAD.rstrip("\n"),
        *table(),
        "",
        *on_named_hardware(),
        "",
        *on_a_cpu(),
        "",
        *counted_table(),
        "",
        *published(),
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    print(PAGE)


def experiments() -> Iterator[tuple[str, PolicyIteration]]:
    """All that the repository ships, by file; tables and data pipelines are made of others."""
    for name in whole_configurations():
        data = load([str(ROOT / name)], environment_keys=())
        if data.data.get("type") == "policy_iteration":
            root = build(Runtime, data.data, Explanation(data))
            assert isinstance(root, PolicyIteration)
            yield name.removeprefix("configs/").removesuffix(".jsonnet"), root


def table() -> Iterator[str]:
    for name, root in experiments():
        if parameters(root) >= SMALL:
            yield row(name, root)


def parameters(root: PolicyIteration) -> int:
    shape = start_shape(root)
    assert shape is not None, "shipped experiments start from models whose sizes are known"
    return shape.parameters


def row(name: str, root: PolicyIteration) -> str:
    """One experiment on all numbers of GPUs."""
    plans = [Plan.of(root, described_machine(gpus, GPU_GIB), shape=start_shape(root)) for gpus in GPUS]
    return f"| {name} | {plans[0].shape.parameters / 1e9:.2f} B | " + " | ".join(map(cell, plans)) + " |"


def cell(plan: Plan) -> str:
    if not plan.fits:
        found = remedy(plan)
        return "no" if found is None else f"with {found.text}"
    worst = max((use for use in plan.uses if "GPU" in use.where), key=lambda use: use.needed)
    phase = "" if worst.phase == "training" else f" ({worst.phase})"
    return f"{worst.needed / GIB:.1f}{phase}"


NAMED = (
    ("threadweaver/parallel", 8, 4, 80),
    ("guru/32b_grpo", 8, 16, 140),
    ("guru/32b_ppo", 8, 16, 140),
)
"""Experiments, and the GPUs, machines and GiB that their files or papers name."""


def on_named_hardware() -> Iterator[str]:
    yield "Three experiments need the number of GPUs that their papers or files name:"
    yield ""
    yield "| experiment | machines × GPUs × GB | largest memory of a GPU, GiB |"
    yield "|---|---|---|"
    found = dict(experiments())
    for name, gpus, nodes, memory in NAMED:
        plan = Plan.of(found[name], described_machine(gpus, memory, nodes), shape=start_shape(found[name]))
        yield f"| {name} | {nodes} × {gpus} × {memory} | {cell(plan)} |"


def on_a_cpu() -> Iterator[str]:
    yield "## Shipped experiments for CPUs"
    yield ""
    plans = [
        (name, Plan.of(root, LAPTOP, shape=start_shape(root)))
        for name, root in experiments()
        if parameters(root) < SMALL
    ]
    largest = max(plans, key=lambda one: max(use.needed for use in one[1].uses))
    most = max(use.needed for use in largest[1].uses) / GIB
    fit = sum(plan.fits for _, plan in plans)
    yield (
        f"{fit} of {len(plans)} fit a machine with 2 cores and 8 GiB of memory. The largest needs"
        f" {most:.1f} GiB (`{largest[0]}`), most of it for the server."
    )


def count() -> None:
    """Plans beside what PyTorch counts, for models with random weights."""
    import torch

    from tests.support.peak_memory import Case
    from treetune.models.lora import Lora
    from treetune.models.shapes import PUBLISHED
    from treetune.objectives.policy_gradient import ClippedPolicyGradient
    from treetune.trainer.base import Trainer

    torch.use_deterministic_algorithms(False)

    def shape(
        kind: str, layers: int, hidden: int, heads: int, kv: int, mlp: int, vocabulary: int, tied: bool
    ):
        described = {
            "model_type": kind,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": 64,
            "intermediate_size": mlp,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
        }
        found = shape_of(described, "benchmarks/plans.py")
        assert found is not None
        return found

    def case(name: str, of: object, tokens: int = 256, **trainer: object) -> Case:
        settings = {"learning_rate": 1e-5, "tokens_per_micro_batch": tokens} | trainer
        return Case(
            name=name,
            shape=of,  # type: ignore[arg-type]
            trainer=Trainer(objective=ClippedPolicyGradient(), **settings),  # type: ignore[arg-type]
            answers=4,
            prompt_tokens=32,
            answer_tokens=96,
        )

    llama = shape("llama", 12, 768, 12, 12, 2048, 32_000, False)
    qwen3 = shape("qwen3", 12, 768, 12, 4, 2304, 50_000, True)
    half = shape_of(PUBLISHED["Qwen/Qwen2.5-0.5B"], "published")
    cases = [
        case("Llama, float32", llama),
        case("Llama, float32, no reference", llama, measure_kl=False),
        case("Llama, float32, checkpointing", llama, gradient_checkpointing=True),
        case("Qwen3, float32, packed", qwen3, layout="packed"),
        case("Qwen3, bfloat16, ZeRO-1", qwen3, precision="bfloat16", zero_stage=1),
        case("Qwen3, bfloat16, ZeRO-2", qwen3, precision="bfloat16", zero_stage=2, measure_kl=False),
        case("Qwen3, bfloat16, ZeRO-3", qwen3, precision="bfloat16", zero_stage=3, measure_kl=False),
        case("Qwen2.5-0.5B, float32, adapters", half, lora=Lora(rank=16), tokens=128),
    ]
    found = json.loads(COUNTED.read_text()) if COUNTED.is_file() else []
    done = {one["case"] for one in found}
    for one in cases:
        if one.name in done:
            continue
        planned_bytes, counted_bytes = one.planned().peak, one.measured()
        found.append(
            {
                "case": one.name,
                "parameters": one.shape.parameters,
                "planned": planned_bytes,
                "counted": counted_bytes,
            }
        )
        COUNTED.write_text(json.dumps(found, indent=1) + "\n")
        print(found[-1], flush=True)


def counted_table() -> Iterator[str]:
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
    for one in json.loads(COUNTED.read_text()) if COUNTED.is_file() else []:
        ratio = one["planned"] / one["counted"]
        yield (
            f"| {one['case']} | {one['parameters'] / 1e6:.1f} M | {one['planned'] / MIB:,.0f} |"
            f" {one['counted'] / MIB:,.0f} | {ratio:.3f} |"
        )


PAPER = 40_000
"""Tokens a second of VinePPO's 7B on eight H100 (arXiv:2410.01679, v2)."""


def published() -> Iterator[str]:
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
        for phase, (own, theirs) in seconds_of_published(name).items():
            yield f"| {name} | {phase} | {own:.0f} | {theirs:.0f} | {own / theirs - 1:+.0%} |"
    yield ""
    yield (
        "The plan does not explain the last run. It took 338 s, of which 25 s are scoring and training. So "
        "its eight engines, of one GPU each, sampled for about 310 s, which is 2,480 GPU seconds. In the run "
        "above it, one engine of four GPUs did the same work in 227 s, which is 908 GPU seconds. Two things "
        "may explain a part of the difference: a small KV cache, from which sequences are evicted and "
        "computed again, and ranks that wait for the slowest. treetune's servers accept only as many "
        "sequences as their cache holds."
    )
    root = experiment("polIter_deepseekSft2_vineppo_MATH")
    plan = Plan.of(root, described_machine(8, GPU_GIB), shape=start_shape(root))
    seconds = next(one.seconds for one in estimates(plan) if one.phase == "continuations")
    rate = plan.work.continued_tokens / seconds
    yield ""
    yield (
        f"VinePPO's paper reports {PAPER:,} tokens per second for DeepSeekMath-7B on eight H100. The plan"
        f" assumes {rate:,.0f} for continuations ({rate / PAPER - 1:+.0%})."
    )
    yield ""
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
    root = experiment("quickstart/vineppo")
    two = replace(root.engines, policy=replace(root.engines.policy, replicas=2))
    root = replace(root, engines=two)
    said = predicted(Plan.of(root, replace(LAPTOP, cores=2), shape=start_shape(root)))
    for phase, theirs in QUICKSTART.items():
        own = sum(said[f"seconds/{part}"] for part in phase.split(" + "))
        yield f"| {phase} | {own:.2f} | {theirs:.2f} | {own / theirs - 1:+.0%} |"


QUICKSTART = {"generation + credit": 2.51, "training": 1.32, "sync": 0.09, "evaluation": 0.26, "total": 4.23}
"""Seconds of the mean iteration of `configs/quickstart/vineppo.jsonnet`, seed 1."""


if __name__ == "__main__":
    main()
