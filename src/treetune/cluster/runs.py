"""Additions to every run: it is refused on a machine that it doesn't fit, and on machines that differ."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.config.errors import SameOnAllRanks
from treetune.contracts import BEFORE_A_RUN, RANKS_MEET, RUN_SERVICES, SIZED_ENGINES
from treetune.engine.base import ADDRESSED_SERVERS, TRANSFERS
from treetune.runtime.directory import PREDICTION
from treetune.store.checksums import write_record

if TYPE_CHECKING:
    from treetune.cluster.planning.plan import Plan
    from treetune.engine.base import EngineLaunch
    from treetune.engine.server import Server
    from treetune.engine.settings import VllmSettings
    from treetune.engine.transfer import WeightTransfer
    from treetune.runtime.base import PolicyIteration
    from treetune.runtime.session import Session
    from treetune.trainer.ranks import Meeting


@BEFORE_A_RUN.register("gpus_are_shared")
def refuse_an_engine_without_a_gpu(config: PolicyIteration) -> None:
    """Raises ValueError where a server is to share the trainer's GPU, which takes one process alone."""
    from treetune.engine.settings import VllmSettings

    engines = {"engines.policy": config.engines.policy}
    if config.engines.judge is not None:
        engines["engines.judge.server"] = config.engines.judge.server
    for name, engine in engines.items():
        if isinstance(engine, VllmSettings) and engine.devices is None and engine.addresses is None:
            refuse_gpus_of_one_process(f"the trainer and {name} (whose devices are null)")


def refuse_gpus_of_one_process(who: str) -> None:
    """Raises ValueError where a GPU that this process may use doesn't take `who` at a time, as some clusters
    have it."""
    from treetune.runtime.machine import query_gpus

    try:
        modes = query_gpus("compute_mode")
    except ValueError:
        return  # what asks for its memory says so
    if other := [mode for mode in modes if mode.startswith(("Exclusive", "Prohibited"))]:
        raise SameOnAllRanks(
            f"the GPUs' compute mode is {other[0]}, and {who} share a GPU, which are two processes: have the"
            " mode set to Default (sudo nvidia-smi -c 0; on a cluster it is asked for with the job), or give"
            " the engine GPUs of its own (engines.policy.devices)"
        )


@BEFORE_A_RUN.register("fits_the_machine")
def refuse_what_does_not_fit(config: PolicyIteration) -> None:
    """Raises ValueError with what doesn't fit and the smallest change that helps: what the ranks of a machine
    find alike, one of them says. Where the model's sizes aren't known, or nvidia-smi says nothing, the first
    rank says that nobody has looked."""
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    try:
        plan = plan_here(config)
    except ValueError as error:
        if rank == "0":
            print(f"note: whether the run fits this machine wasn't checked: {error}", file=sys.stderr)
        return
    if plan is not None and not plan.fits:
        from treetune.cluster.planning.report import verdict_of

        # Machines may be smaller than the first rank's: on each of them one rank speaks.
        speaks = plan.machine.nodes > 1 and rank != "0" and local_rank == "0"
        raise (ValueError if speaks else SameOnAllRanks)(
            f"{plan.machine.words}: {verdict_of(plan)}\n"
            "  the command `plan` shows all of it; the numbers are estimates, and with"
            " --override '{plan: {check: false}}' the run starts without them"
        )


def plan_here(config: PolicyIteration) -> Plan | None:
    """Returns the run's plan on this machine; None where the configuration wants none. Raises ValueError
    where none can be made."""
    if not config.plan.check:
        return None
    from treetune.cluster.planning.plan import Plan
    from treetune.runtime.machine import here

    return Plan.of(config, here(started=True))


@SIZED_ENGINES.register("vllm")
def sized_by_plan(config: PolicyIteration) -> VllmSettings:
    """Returns engines.policy with the share of a GPU that it leaves to the plan, and no more sequences at
    once than the KV cache has room for; as it is where no plan can be made."""
    settings: Any = config.engines.policy
    with contextlib.suppress(ValueError):
        plan = plan_here(config)
        if plan is not None and plan.engine is not None and plan.machine.device == "cuda":
            return replace(plan.engine.settings, max_num_seqs=plan.sequences_at_once)
    return settings


@RUN_SERVICES.register("prediction")
@contextlib.contextmanager
def predict(session: Session) -> Iterator[None]:
    """Keeps what the plan says of an iteration beside the run's metrics, which are compared with it."""
    if session.purpose == "run" and session.ranks.is_first:
        from treetune.cluster.planning.report import predicted

        with contextlib.suppress(ValueError):
            if (plan := plan_here(session.config)) is not None:
                write_record(session.directory.path / PREDICTION, predicted(plan))
    yield


@RANKS_MEET.register("machines_agree")
def agree(meeting: Meeting, directory: Path, plain_config: Mapping[str, Any], *, share: bool) -> None:
    """Raises MachinesDiffer where the ranks' machines can't do the run together. Collective."""
    from treetune.cluster import several_machines

    several_machines.agree(meeting, directory, plain_config, share=share)


@TRANSFERS.register("cuda_ipc")
def cuda_ipc(*arguments: Any) -> WeightTransfer:
    from treetune.cluster.cuda_transfers import CudaIpc

    return CudaIpc(*arguments)


@TRANSFERS.register("nccl")
def nccl(*arguments: Any) -> WeightTransfer:
    from treetune.cluster.cuda_transfers import Nccl

    return Nccl(*arguments)


@ADDRESSED_SERVERS.register("vllm")
def servers_at_addresses(settings: VllmSettings, launch: EngineLaunch) -> list[Server]:
    from treetune.cluster import given

    return given.servers_at_addresses(settings, launch)
