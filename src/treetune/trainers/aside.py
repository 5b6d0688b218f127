"""Memory of the accelerator that only training needs, given up and taken again.

A storage is emptied in place and filled again in place, so that whatever looks into it (a flat buffer's many
views, a parameter's gradient) goes on doing so. DeepSpeed's own `offload_states` knows neither the optimiser
that it takes for ZeRO-1 in bfloat16, nor under ZeRO-3 any Adam but its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Aside:
    """What lies in the memory of the CPU meanwhile. One is kept for each model: pinning memory takes long."""

    def __init__(self) -> None:
        self._places: list[torch.UntypedStorage] = []
        self._copies: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """How much is aside at present."""
        return sum(copy.nbytes for copy, _ in zip(self._copies, self._places, strict=False))

    def put(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Copies the storages of these tensors and empties them, those on `device` alone."""
        assert not self._places, "what is aside comes back before anything else goes"
        found = {
            storage._cdata: storage
            for storage in (tensor.untyped_storage() for tensor in tensors if tensor.device == device)
            if storage.nbytes() and storage.resizable()
        }
        self._places = list(found.values())
        pinned = device.type == "cuda"
        if [copy.nbytes for copy in self._copies] != [place.nbytes() for place in self._places]:
            self._copies = [
                torch.empty(place.nbytes(), dtype=torch.uint8, pin_memory=pinned) for place in self._places
            ]
        for copy, place in zip(self._copies, self._places, strict=True):
            copy.copy_(_bytes_of(place), non_blocking=True)
        _finish(device)
        for place in self._places:
            place.resize_(0)

    def take_back(self, device: torch.device) -> None:
        """Everything as it was before `put`."""
        for copy, place in zip(self._copies, self._places, strict=False):
            place.resize_(copy.nbytes)
            _bytes_of(place).copy_(copy, non_blocking=True)
        _finish(device)
        self._places = []


def of_training_alone(engine: Any) -> list[Tensor]:
    """The tensors of a DeepSpeed engine that neither a forward pass nor an export reads: the optimiser's
    states, master weights, gradients and buffers for them."""
    kept = {tensor.untyped_storage()._cdata for tensor in of_the_weights(engine.module)}
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    masters = [parameter for group in inner.param_groups for parameter in group["params"]]
    found = [*_tensors(vars(optimizer)), *_tensors(inner.state), *masters]
    leaves = [tensor for tensor in [*found, *engine.module.parameters()] if tensor.is_leaf]
    found += [tensor.grad for tensor in leaves if tensor.grad is not None]
    return [tensor for tensor in found if tensor.untyped_storage()._cdata not in kept]


def of_the_weights(module: nn.Module) -> list[Tensor]:
    """The module's weights; under ZeRO-3 what this rank has of them."""
    parameters = list(module.parameters())
    return [*parameters, *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor"))]


def _tensors(holder: Any) -> Iterator[Tensor]:
    """In containers and records, however deep."""
    if isinstance(holder, Tensor):
        yield holder
    elif isinstance(holder, dict):
        for value in holder.values():
            yield from _tensors(value)
    elif isinstance(holder, list | tuple | set):
        for value in holder:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(holder) and not isinstance(holder, type):
        for field in dataclasses.fields(holder):
            yield from _tensors(getattr(holder, field.name))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
