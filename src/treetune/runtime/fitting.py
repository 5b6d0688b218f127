"""Holds a run against the machine that it is to run on: before it starts, and while its engine is sized."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace

from treetune.engine.settings import VllmSettings
from treetune.exceptions import SameOnAllRanks
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import PREDICTION
from treetune.runtime.machine import here, query_gpus
from treetune.runtime.planning.plan import Plan
from treetune.runtime.planning.report import predicted, verdict_of
from treetune.runtime.session import Session
from treetune.store.checksums import write_record


def refuse_an_engine_without_a_gpu(config: PolicyIteration) -> None:
    """Raises ValueError where a server is to share the trainer's GPU, which takes one process alone."""
    engines = {"engines.policy": config.engines.policy}
    if config.engines.judge is not None:
        engines["engines.judge.server"] = config.engines.judge.server
    for name, engine in engines.items():
        if isinstance(engine, VllmSettings) and engine.devices is None and engine.addresses is None:
            refuse_gpus_of_one_process(f"the trainer and {name} (whose devices are null)")


def refuse_gpus_of_one_process(who: str) -> None:
    """Raises ValueError where a GPU that this process may use doesn't take `who` at a time, as some clusters
    have it."""
    try:
        modes = query_gpus("compute_mode")
    except ValueError:
        return  # what asks for its memory says so
    if exclusive := [mode for mode in modes if mode.startswith(("Exclusive", "Prohibited"))]:
        raise SameOnAllRanks(
            f"the GPUs' compute mode is {exclusive[0]}, and {who} share a GPU, which are two processes: have"
            " the mode set to Default (sudo nvidia-smi -c 0; on a cluster it is asked for with the job), or"
            " give the engine GPUs of its own (engines.policy.devices)"
        )


def refuse_what_does_not_fit(config: PolicyIteration) -> None:
    """Raises ValueError with what doesn't fit this machine and the smallest change that helps.

    If all ranks of a machine find the same, one of them reports it. If the model's sizes aren't known, or
    nvidia-smi doesn't answer, the first rank says that nothing was checked.
    """
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    try:
        plan = plan_here(config)
    except ValueError as error:
        if rank == "0":
            print(f"note: whether the run fits this machine wasn't checked: {error}", file=sys.stderr)
        return
    if plan is None:
        return
    if plan.fits and plan.checkpoints.problem is None:
        if plan.checkpoints.warning and rank == "0":
            print(f"note: {plan.checkpoints.warning}", file=sys.stderr)
        return
    # Machines may be smaller than the first rank's: on each of them one rank speaks.
    speaks_for_machine = plan.machine.nodes > 1 and rank != "0" and local_rank == "0"
    kind_of_error = ValueError if speaks_for_machine else SameOnAllRanks
    raise kind_of_error(
        f"{plan.machine.words}: {verdict_of(plan)}\n"
        "  the command `plan` shows all of it; the numbers are estimates, and with"
        " --override '{plan: {check: false}}' the run starts without them"
    )


def plan_here(config: PolicyIteration) -> Plan | None:
    """Returns the run's plan on this machine; None where the configuration wants none. Raises ValueError
    where none can be made."""
    return Plan.of(config, here(started=True)) if config.plan.check else None


def sized_by_plan(config: PolicyIteration, settings: VllmSettings) -> VllmSettings:
    """Returns the settings of engines.policy with the share of a GPU that they leave to the plan, and no more
    sequences at once than the KV cache has room for; as they are where no plan can be made."""
    with contextlib.suppress(ValueError):
        plan = plan_here(config)
        if plan is not None and plan.engine is not None and plan.machine.device == "cuda":
            return replace(plan.engine.settings, max_num_seqs=plan.sequences_at_once)
    return settings


def write_prediction(session: Session) -> None:
    """Writes what the plan says of an iteration beside the run's metrics, which are compared with it."""
    if not session.ranks.is_first:
        return
    with contextlib.suppress(ValueError):
        plan = plan_here(session.config)
        if plan is not None:
            write_record(session.directory.path / PREDICTION, predicted(plan))
