"""The smallest change that makes an experiment fit a machine: each is tried by planning again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from treetune.inference.ways import SETTING
from treetune_cluster.planning.plan import Plan
from treetune_cluster.planning.training import itemsize

SHARE = "engines.policy.gpu_memory_utilization"
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Values of it that are tried."""
MORE_GPUS = (2, 4, 8)


@dataclass(frozen=True)
class Change:
    """Of one setting. `cost` orders them by what they cost in time; none changes the update."""

    key: str
    value: Any
    cost: int

    @property
    def words(self) -> str:
        return f"{self.key}: {self.as_jsonnet}"

    @property
    def as_jsonnet(self) -> str:
        return str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)

    def applied(self, plan: Plan) -> Plan | None:
        """The plan with it; None where the parts of the configuration refuse it."""
        try:
            changed = _with(plan.experiment, self.key.split("."), self.value)
        except ValueError:
            return None
        return replace(plan, experiment=changed)


@dataclass(frozen=True)
class Remedy:
    """Changes of the configuration, or more GPUs, with which everything fits."""

    changes: tuple[Change, ...]
    gpus: int | None = None
    nodes: int = 1

    @property
    def words(self) -> str:
        own = ", ".join(change.words for change in self.changes)
        if self.gpus is None:
            return own
        machines = (
            f"{self.nodes} machines with {self.gpus} GPUs each" if self.nodes > 1 else f"{self.gpus} GPUs"
        )
        return machines + (f" and {own}" if own else "")

    @property
    def override(self) -> str:
        """As Jsonnet, for ``--override``."""
        return _as_jsonnet([(change.key.split("."), change.as_jsonnet) for change in self.changes])


def _as_jsonnet(settings: list[tuple[list[str], str]]) -> str:
    """One object in which each key stands once."""
    texts = []
    for name in dict.fromkeys(path[0] for path, _ in settings):
        below = [(path[1:], value) for path, value in settings if path[0] == name]
        texts.append(f"{name}: {below[0][1]}" if not below[0][0] else f"{name}+: {_as_jsonnet(below)}")
    return "{" + ", ".join(texts) + "}"


def remedy(plan: Plan) -> Remedy | None:
    """The cheapest set of changes, of as few as possible, on this machine; else with the fewest GPUs of the
    same kind. None where none of them helps."""
    if plan.fits:
        return Remedy(())
    if (changes := _changes(plan)) is not None:
        return Remedy(changes)
    if plan.machine.device == "cpu":
        return None
    for gpus, nodes in [*((more, 1) for more in MORE_GPUS), (8, 2), (8, 4)]:
        machine = plan.machine
        if gpus * nodes <= machine.world_size:
            continue
        larger = replace(machine, ranks=gpus, nodes=nodes, host_memory=None, gpus=None)
        on_more = replace(plan, machine=larger)
        if on_more.fits:
            return Remedy((), gpus, nodes)
        if (changes := _changes(on_more)) is not None:
            return Remedy(changes, gpus, nodes)
    return None


def _changes(plan: Plan) -> tuple[Change, ...] | None:
    """One change or two, whichever are cheapest; else as few as are left when none more can be left out."""
    candidates = sorted(_candidates(plan), key=lambda change: change.cost)
    for count in (1, 2):
        sets = [one for one in itertools.combinations(candidates, count) if _of_different_keys(one)]
        for chosen in sorted(sets, key=_cost):
            if _fits_with(plan, chosen):
                return chosen
    shares = [change for change in candidates if change.key == SHARE]
    rest = [change for change in candidates if change.key != SHARE]
    found = [left for share in [None, *shares] if (left := _left(plan, share, rest)) is not None]
    return min(found, key=lambda chosen: (len(chosen), _cost(chosen)), default=None)


def _left(plan: Plan, share: Change | None, candidates: list[Change]) -> tuple[Change, ...] | None:
    """Of the strongest change of every key, beside this share of a GPU for the engine, what can't be left out
    or be weaker; dearer ones are left out first. None where even all of them don't help."""
    strongest = {change.key: change for change in candidates}
    chosen = [*strongest.values(), *([share] if share is not None else [])]
    if not _fits_with(plan, tuple(chosen)):
        return None
    for change in sorted(strongest.values(), key=lambda change: -change.cost):
        without = [one for one in chosen if one is not change]
        weaker = [one for one in candidates if one.key == change.key and one.cost < change.cost]
        for other in [None, *weaker]:
            fewer = [*without, *([other] if other is not None else [])]
            if _fits_with(plan, tuple(fewer)):
                chosen = fewer
                break
    return tuple(chosen)


def _of_different_keys(changes: Iterable[Change]) -> bool:
    keys = [change.key for change in changes]
    return len(set(keys)) == len(keys)


def _cost(changes: Iterable[Change]) -> int:
    return sum(change.cost for change in changes)


def _fits_with(plan: Plan, changes: tuple[Change, ...]) -> bool:
    changed: Plan | None = plan
    # Some are refused before others are there: ZeRO's stage goes first.
    for change in sorted(changes, key=lambda change: change.key != "trainer.zero_stage"):
        changed = change.applied(changed) if changed is not None else None
    return changed is not None and changed.fits


def _candidates(plan: Plan) -> Iterator[Change]:
    """Those that could help, each with its cost."""
    trainer, on_gpu = plan.experiment.trainer, plan.machine.device == "cuda"
    tokens, cost = trainer.tokens_per_micro_batch, 1
    while tokens // 2 >= max(256, plan.work.longest // 2) and cost < 5:
        tokens, cost = tokens // 2, cost + 1
        yield Change("trainer.tokens_per_micro_batch", tokens, cost)
    if not trainer.gradient_checkpointing:
        yield Change("trainer.gradient_checkpointing", True, 6)
    if plan.sends_through_memory:
        yield Change(SETTING, "file", 8)
    if on_gpu and plan.engine is not None:
        yield from _for_the_engine(plan)
    if not on_gpu and plan.engine is not None and plan.engine.settings.replicas_on("cpu") > 1:
        yield Change("engines.policy.replicas", 1, 3)
    if on_gpu and trainer.keeps_reference and trainer.lora is None and not trainer.offload_reference:
        yield Change("trainer.offload_reference", True, 4)
    least = 1 if itemsize(trainer) == 2 else 0
    for stage in range(max(trainer.zero_stage + 1, least), 4):
        if plan.machine.world_size > 1:
            yield Change("trainer.zero_stage", stage, 5 * stage)
    if on_gpu and not trainer.offload_optimizer:
        yield Change("trainer.offload_optimizer", True, 20)
    if on_gpu and not trainer.offload_parameters:
        if trainer.zero_stage < 3 and plan.machine.world_size == 1:
            yield Change("trainer.zero_stage", 3, 15)
        yield Change("trainer.offload_parameters", True, 25)


def _for_the_engine(plan: Plan) -> Iterator[Change]:
    assert plan.engine is not None
    settings = plan.engine.settings
    if plan.shares_device and not settings.sleep:
        yield Change("engines.policy.sleep", True, 2)
    for place, share in enumerate(SHARES):
        if share < settings.gpu_memory_utilization:
            yield Change(SHARE, share, 3 + place)
        elif share > settings.gpu_memory_utilization:
            yield Change(SHARE, share, 3)
    if settings.max_num_seqs > 128:
        yield Change("engines.policy.max_num_seqs", 128, 4)
    if settings.servers == "per_rank" and plan.machine.nodes == 1:
        yield Change("engines.policy.servers", "one", 10)
    for size in (2, 4, 8):
        if settings.tensor_parallel_size < size <= plan.machine.ranks:
            yield Change("engines.policy.tensor_parallel_size", size, 10 + size)


def _with(part: Any, path: list[str], value: Any) -> Any:
    """A copy of a part in which one setting is another; the constructors check it."""
    name, *rest = path
    return replace(part, **{name: _with(getattr(part, name), rest, value) if rest else value})
