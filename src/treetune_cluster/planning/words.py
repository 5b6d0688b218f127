"""A plan as text, and as plain data."""

from __future__ import annotations

from typing import Any

from treetune.runtime.machine import in_units
from treetune_cluster.planning.plan import Plan
from treetune_cluster.planning.remedies import Remedy, remedy
from treetune_cluster.planning.seconds import estimates


def as_text(plan: Plan) -> str:
    """What is needed where and when, what is sampled, how long it may take, and what doesn't fit."""
    shape, work, trainer = plan.shape, plan.work, plan.trainer
    lines = [
        f"{plan.experiment.experiment_name} on {plan.machine.words}",
        f"model: {shape.parameters / 1e9:.3f} billion parameters ({shape.source})",
        "",
    ]
    for place in plan.places:
        room = "(room not known)" if place.room is None else f"of {in_units(place.room)}"
        verdict = "" if place.fits else "  DOES NOT FIT"
        lines.append(f"{place.phase}, {place.where}: {in_units(place.needed)} {room}{verdict}")
        lines += [f"    {in_units(item.size):>11}  {item.what}" for item in place.items if item.size]
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
    """What is in the way, and the smallest change that helps; or that it fits."""
    if plan.fits:
        return "it fits"
    found = found or remedy(plan)
    lines = ["it doesn't fit:", *(f"  {words}" for words in plan.problems)]
    if found is None:
        lines.append("  no change of how work is cut makes it fit: take a smaller model, or other hardware")
    else:
        lines.append(f"  the smallest change that makes it fit: {found.words}")
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
                "phase": place.phase,
                "where": place.where,
                "needed": place.needed,
                "room": place.room,
                "fits": place.fits,
                "items": {item.what: item.size for item in place.items if item.size},
            }
            for place in plan.places
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
        "remedy": None if found is None else {"words": found.words, "override": found.override},
    }
