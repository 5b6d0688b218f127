"""A plan as text and as plain data, with the seconds that an iteration may take.

Estimates of seconds may be wrong by a factor of four for one iteration. Published ones are compared in
docs/results/plan.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from treetune.runtime.machine import in_units
from treetune.store.held_folders import MEMORY
from treetune_cluster.planning.memory import itemsize, servers_on_a_machine
from treetune_cluster.planning.plan import Plan, Remedy, remedy

GPU_FLOPS = 989e12
"""Dense bfloat16 operations a second of an H100 SXM (NVIDIA's data sheet)."""
GPU_BANDWIDTH = 3.35e12
"""Bytes a second from an H100 SXM's memory (NVIDIA's data sheet)."""
GPU_SHARE = 0.4
"""The share of the operations that is assumed to be reached in training and scoring."""
BANDWIDTH_SHARE = 0.6
"""The share of the bandwidth that is assumed to be reached in decoding."""
CORE_FLOPS = 25e9
"""Float32 operations a second that PyTorch reaches on one core with small matrices, about."""
HTTP_TOKEN, HTTP_SAMPLE = 25e-6, 0.9e-3
"""Seconds of a server's one HTTP process for each token and each sample, fitted on a CPU."""
FILE_BYTES = 0.9e9
"""Bytes a second into /dev/shm, as they were seen on a CPU (0.7 to 1.1 GB/s)."""
RELOAD = 4.0
"""Seconds in which a server reads 7 billion weights again (published: 3.3), in proportion."""


@dataclass(frozen=True)
class Estimate:
    """The seconds of one phase of an iteration."""

    phase: str
    seconds: float
    source: str


def estimates(plan: Plan) -> Iterator[Estimate]:
    """Yields the seconds of the phases that an iteration has."""
    work, trainer = plan.work, plan.experiment.trainer
    if plan.engine is not None and work.is_sampled:
        yield _sampling(plan, "answers", work.answers, work.answer_tokens)
        if work.continuations:
            yield _sampling(plan, "continuations", work.continuations, work.answer_tokens / 2)
    weights = plan.shape.parameters
    tokens = work.rows * work.row_tokens
    passes = (1 if trainer.keeps_reference else 0) + (1 if work.steps > 1 else 0)
    critic = plan.trainer.critic is not None
    rate, source = _training_rate(plan)
    scoring = 2 * weights * tokens * (passes + critic)
    backward = (8 if trainer.gradient_checkpointing else 6) * weights * tokens * work.epochs * (1 + critic)
    yield Estimate("scoring", scoring / rate, f"2 operations a weight and token; {source}")
    times = "8 (activations are made again)" if trainer.gradient_checkpointing else "6"
    yield Estimate("training", backward / rate, f"{times} operations a weight and token; {source}")
    if plan.engine is not None:
        size = itemsize(trainer) * plan.shape.served
        where = str(MEMORY) if plan.sends_through_memory else "files, as if they were in memory"
        yield Estimate(
            "sync",
            size / FILE_BYTES + RELOAD * plan.shape.served / 7e9,
            f"0.9 GB/s into {where}, then read by the server",
        )


def _sampling(plan: Plan, phase: str, samples: int, tokens: float) -> Estimate:
    """Returns the seconds of all servers together: whichever is slower, the device or the server's HTTP
    process."""
    assert plan.engine is not None
    machine, settings = plan.machine, plan.engine.settings
    servers = servers_on_a_machine(settings, machine) * (
        machine.nodes if settings.servers == "per_rank" else 1
    )
    own = samples / servers
    http = own * (HTTP_SAMPLE + tokens * HTTP_TOKEN)
    length = plan.work.prompt_tokens + plan.work.answer_tokens
    at_once = min(settings.max_num_seqs, max(1, plan.engine.cached_tokens / length), max(own, 1))
    operations = 2 * plan.shape.parameters * own * tokens
    if machine.device == "cuda":
        step = plan.engine.weights + at_once * length / 2 * plan.engine.bytes_per_token
        reading = own * tokens / at_once * step / (GPU_BANDWIDTH * BANDWIDTH_SHARE)
        computing = operations / (GPU_FLOPS * GPU_SHARE * settings.tensor_parallel_size)
        seconds, source = max(reading, computing), f"{at_once:.0f} sequences at once, an H100's bandwidth"
    else:
        seconds = operations / (CORE_FLOPS * settings.threads(machine.ranks))
        source = "the cores' operations"
    if http > seconds:
        return Estimate(phase, http, "one HTTP process a server: 25 µs a token, 0.9 ms a sample")
    return Estimate(phase, seconds, source)


def _training_rate(plan: Plan) -> tuple[float, str]:
    machine = plan.machine
    if machine.device == "cuda":
        return GPU_FLOPS * GPU_SHARE * machine.world_size, f"{GPU_SHARE:.0%} of an H100 on each rank"
    return CORE_FLOPS * machine.cores, "25 billion operations a second on each core"


def as_text(plan: Plan) -> str:
    """Returns what is needed where and when, what is sampled, how long it may take, and what doesn't fit."""
    shape, work, trainer = plan.shape, plan.work, plan.trainer
    lines = [
        f"{plan.experiment.experiment_name} on {plan.machine.words}",
        f"model: {shape.parameters / 1e9:.3f} billion parameters ({shape.source})",
        "",
    ]
    for use in plan.uses:
        room = "(room not known)" if use.room is None else f"of {in_units(use.room)}"
        verdict = "" if use.fits else "  DOES NOT FIT"
        lines.append(f"{use.phase}, {use.where}: {in_units(use.needed)} {room}{verdict}")
        lines += [f"    {in_units(item.size):>11}  {item.what}" for item in use.items if item.size]
    if plan.engine is not None:
        engine = plan.engine
        lines += [
            "",
            f"KV cache of a server: {engine.cached_tokens:,} tokens,"
            f" {engine.cached_tokens / engine.context_length:.1f} sequences of {engine.context_length:,}",
        ]
    lines += ["", f"micro-batches: up to {trainer.micro_batch:,} tokens on a rank", *_work(plan), ""]
    found = list(estimates(plan))
    scope = "an iteration" if work.is_known else "one problem"
    lines.append(f"seconds of {scope}, by estimate (may be wrong by a factor of four):")
    lines += [f"    {one.seconds:8.1f}  {one.phase}: {one.source}" for one in found]
    lines.append(f"    {sum(one.seconds for one in found):8.1f}  in all")
    return "\n".join([*lines, "", verdict_of(plan)])


def _work(plan: Plan) -> list[str]:
    work = plan.work
    whose = (
        f"{work.problems:,} problems"
        if work.is_known
        else "one problem (how many there are isn't known here)"
    )
    lines = [
        f"work of an iteration, for {whose}: {work.answers:,} answers of {work.answer_tokens:,.0f} tokens on"
        f" average (as assumed), {work.rows:,} rows, {work.steps:,} steps"
    ]
    if work.is_sampled:
        lines.append(f"sampled: {work.sampled_tokens:,.0f} tokens of answers")
    if work.continuations:
        lines.append(
            f"    and {work.continued_tokens:,.0f} tokens of {work.continuations:,} continuations"
            f" (at most {work.most_continuations:,} continuations)"
        )
    return lines


def verdict_of(plan: Plan, found: Remedy | None = None) -> str:
    """Returns what is in the way, and the smallest change that helps; or that it fits."""
    if plan.fits:
        return "it fits"
    found = found or remedy(plan)
    lines = ["it doesn't fit:", *(f"  {words}" for words in plan.problems)]
    if found is None:
        lines.append("  no change of how work is cut makes it fit: take a smaller model, or other hardware")
    else:
        lines.append(f"  the smallest change that makes it fit: {found.text}")
        if found.changes:
            lines.append(f"    --override '{found.override}'")
    return "\n".join(lines)


def as_data(plan: Plan) -> dict[str, Any]:
    """The same for programs; sizes in bytes."""
    shape, work, machine = plan.shape, plan.work, plan.machine
    found = None if plan.fits else remedy(plan)
    return {
        "experiment": plan.experiment.experiment_name,
        "machine": {
            "device": machine.device,
            "ranks": machine.ranks,
            "nodes": machine.nodes,
            "device_memory": machine.device_memory,
            "host_memory": machine.host_memory,
            "shared_memory": machine.shared_memory,
        },
        "parameters": shape.parameters,
        "shape": {name: getattr(shape, name) for name in shape.__dataclass_fields__},
        "places": [
            {
                "phase": use.phase,
                "where": use.where,
                "needed": use.needed,
                "room": use.room,
                "fits": use.fits,
                "items": {item.what: item.size for item in use.items if item.size},
            }
            for use in plan.uses
        ],
        "kv_cache_tokens": None if plan.engine is None else plan.engine.cached_tokens,
        "micro_batch_tokens": plan.trainer.micro_batch,
        "work": {name: getattr(work, name) for name in work.__dataclass_fields__},
        "sampled_tokens": work.sampled_tokens,
        "continued_tokens": work.continued_tokens,
        "seconds": [
            {"phase": one.phase, "seconds": round(one.seconds, 3), "source": one.source}
            for one in estimates(plan)
        ],
        "fits": plan.fits,
        "problems": plan.problems,
        "remedy": None if found is None else {"words": found.text, "override": found.override},
    }
