"""The models that a trainer works with, made from the start model as its settings say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from treetune.models.in_parts import read_whole
from treetune.models.logprobs import CriticModule, PolicyModule
from treetune.models.lora import adapters_off
from treetune.models.packed_attention import attach_packed_attention
from treetune.models.sequence_parallel import SequenceParallel
from treetune.models.tree_attention import attach_tree_attention
from treetune.seeds import derive_seed
from treetune.trainers.base import Trainer
from treetune.trainers.deepspeed_model import DeepSpeedModel, frozen
from treetune.trainers.ranks import Ranks

Reference = Callable[[], AbstractContextManager[Callable[..., Any]]]
"""The reference for as long as it is needed, called like a `PolicyModule`."""


@dataclass
class ModelFactory:
    """Makes policy, reference and critic. `load_model` gives a fresh copy of the start model.

    Raises ValueError where the run's ranks can't be grouped as the settings say.
    """

    settings: Trainer
    load_model: Callable[[], nn.Module]
    ranks: Ranks
    seed: int
    parallel: SequenceParallel | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        settings, ranks = self.settings, self.ranks
        parallel = settings.model_parallel_size
        if ranks.world_size % parallel:
            raise ValueError(
                f"trainer.{settings.model_parallel_setting} is {parallel}, which doesn't divide the run's"
                f" {ranks.world_size} ranks: start it with a multiple (--num_gpus), or set it to 1"
            )
        size = settings.sequence_parallel_size
        if size > 1:
            self.parallel = SequenceParallel(ranks.group(size), ranks.rank % size, size)

    def policy(self) -> DeepSpeedModel:
        """The start model with an optimiser, of its adapters alone where there are any."""
        model = self._trained()
        if self.settings.lora is not None:
            self.settings.lora.apply(model, self.seed)
        objective = self.settings.objective
        terms = objective.terms if objective.has_terms else None
        return DeepSpeedModel(PolicyModule(model, self.parallel, terms), self.settings, self.ranks)

    def critic(self) -> DeepSpeedModel:
        critic = CriticModule(self._trained(), derive_seed(self.seed, "critic"), self.parallel)
        return DeepSpeedModel(critic, self.settings, self.ranks)

    def reference(self, policy: Callable[[], DeepSpeedModel]) -> Reference:
        """The start model as it stays. Where adapters are trained, it is in `policy` (the present one)
        already; else it is a model of its own, on the CPU while it isn't needed if so set, or else dealt out
        over the ranks where the policy's weights are (ZeRO-3).
        """
        if self.settings.lora is not None:

            @contextmanager
            def without_adapters() -> Iterator[Callable[..., Any]]:
                with adapters_off(policy().module):
                    yield policy()

            return without_adapters
        model = PolicyModule(self._attached(self.load_model()), self.parallel).requires_grad_(False).eval()
        dealt_out = self.settings.zero_stage == 3 and not self.settings.offload_reference
        if dealt_out:
            shared = frozen(model, self.settings, self.ranks)
            return lambda: nullcontext(shared)
        read_whole(model)
        if self.settings.offload_reference:
            return visiting(model, self.ranks.device)
        model.to(self.ranks.device)
        return lambda: nullcontext(model)

    def _trained(self) -> nn.Module:
        model = self._attached(self.load_model())
        if self.settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def _attached(self, model: nn.Module) -> nn.Module:
        if self.settings.layout == "tree":
            attach_tree_attention(model)
        if self._packs_on_a_gpu(model):
            attach_packed_attention(model)
        if self.parallel is not None:
            self.parallel.attach(model)
        return model

    def _packs_on_a_gpu(self, model: nn.Module) -> bool:
        """On a CPU rows are short, and the mask for their packing is small."""
        attention = model.config._attn_implementation
        return self.settings.layout == "packed" and attention == "sdpa" and self.ranks.device.type == "cuda"


def visiting(module: nn.Module, device: torch.device) -> Reference:
    """A module whose weights stay on the CPU, pinned where that speeds their way to the device up. They are
    copied there for as long as they are needed, and never back: nobody changes them."""
    module.to("cpu")
    resting: dict[nn.Parameter, nn.Parameter] = {}  # a weight that two places share stays one
    for parameter in module.parameters():
        kept = parameter.data.pin_memory() if device.type == "cuda" else parameter.data
        resting[parameter] = nn.Parameter(kept, requires_grad=False)
    places = [
        (part, name, resting[parameter])
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    for part in module.modules():
        part._buffers.update({n: None if one is None else one.to(device) for n, one in part._buffers.items()})

    def put(parameters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for part, name, kept in places:
            part._parameters[name] = parameters[kept]

    put({kept: kept for kept in resting.values()})

    @contextmanager
    def on_device() -> Iterator[Callable[..., Any]]:
        there = {one: one.data.to(device, non_blocking=True) for one in resting.values()}
        put({one: nn.Parameter(data, requires_grad=False) for one, data in there.items()})
        try:
            yield module
        finally:
            put({one: one for one in resting.values()})

    return on_device
