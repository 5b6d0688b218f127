"""Compares a run with this machine: before it starts, and to choose the size of its engine."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace

from treetune.engine.settings import VllmSettings
from treetune.exceptions import SameOnAllRanks
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import PREDICTION
from treetune.runtime.machine import query_gpus, this_machine
from treetune.runtime.planning.plan import Plan
from treetune.runtime.planning.report import predict_metrics, verdict_of
from treetune.runtime.session import Session
from treetune.store.checksums import write_record


def refuse_engines_on_exclusive_gpus(config: PolicyIteration) -> None:
    """Raises ValueError if a server would share the trainer's GPU, but the GPU accepts only one process."""
    engines = {"engines.policy": config.engines.policy}
    if config.engines.judge is not None:
        engines["engines.judge.server"] = config.engines.judge.server
    for name, engine in engines.items():
        if isinstance(engine, VllmSettings) and engine.devices is None and engine.addresses is None:
            refuse_exclusive_gpus(f"the trainer and {name} (whose devices are null)")


def refuse_exclusive_gpus(sharing_processes: str) -> None:
    """Raises ValueError if a GPU of this process accepts only one process at a time, as on some clusters.

    Args:
        sharing_processes: The two processes that would share it, for the message.
    """
    try:
        modes = query_gpus("compute_mode")
    except ValueError:
        return  # `this_machine` reports this error
    exclusive = [mode for mode in modes if mode.startswith(("Exclusive", "Prohibited"))]
    if exclusive:
        raise SameOnAllRanks(  # a ValueError that only the first rank prints
            f"the GPUs' compute mode is {exclusive[0]}, which allows one process, but {sharing_processes}"
            " share a GPU: set the mode to Default (sudo nvidia-smi -c 0; on a cluster, request it with the"
            " job), or give the engine GPUs of its own (engines.policy.devices)"
        )


def refuse_what_does_not_fit(config: PolicyIteration) -> None:
    """Raises ValueError if the run doesn't fit this machine, with the smallest change that helps.

    One rank of each machine reports it. If the model's sizes are unknown, or nvidia-smi fails, the first rank
    prints that nothing was checked.
    """
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    try:
        plan = plan_on_this_machine(config)
    except ValueError as error:
        if rank == "0":
            print(f"note: it was not checked whether the run fits this machine: {error}", file=sys.stderr)
        return
    if plan is None:
        return
    if plan.fits and plan.checkpoints.problem is None:
        if plan.checkpoints.warning and rank == "0":
            print(f"note: {plan.checkpoints.warning}", file=sys.stderr)
        return
    # A SameOnAllRanks is printed by the first rank alone. Another machine may be smaller than the first
    # rank's, so one of its ranks raises a plain ValueError, and prints it itself.
    reports_for_machine = plan.machine.nodes > 1 and rank != "0" and local_rank == "0"
    error_class = ValueError if reports_for_machine else SameOnAllRanks
    raise error_class(
        f"{plan.machine.description}: {verdict_of(plan)}\n"
        "  the command `plan` shows the details. The numbers are estimates:"
        " --override '{plan: {check: false}}' starts the run nevertheless"
    )


def plan_on_this_machine(config: PolicyIteration) -> Plan | None:
    """Returns the run's plan on this machine; None if `plan.check` is false. Raises ValueError if no plan can
    be made."""
    return Plan.of(config, this_machine(is_rank=True)) if config.plan.check else None


def size_engine(config: PolicyIteration, settings: VllmSettings) -> VllmSettings:
    """Returns the settings of engines.policy with the sizes that the run's plan chooses.

    The plan chooses the engine's share of a GPU, unless the settings have a share. It also lowers the number
    of sequences at once to the number that fits into the KV cache. Without a plan for an engine on a GPU, the
    settings are returned unchanged.
    """
    # If no plan can be made, `refuse_what_does_not_fit` has said so before.
    with contextlib.suppress(ValueError):
        plan = plan_on_this_machine(config)
        if plan is not None and plan.engine is not None and plan.machine.device == "cuda":
            # The engine's settings in the plan have its share of a GPU already.
            return replace(plan.engine.settings, max_num_seqs=plan.sequences_at_once)
    return settings


def write_prediction(session: Session) -> None:
    """Writes the plan's estimates of an iteration into the experiment's folder, for a comparison with the
    run's metrics."""
    if not session.ranks.is_first:
        return
    # If no plan can be made, `refuse_what_does_not_fit` has said so before.
    with contextlib.suppress(ValueError):
        plan = plan_on_this_machine(session.config)
        if plan is not None:
            write_record(session.directory.path / PREDICTION, predict_metrics(plan))
