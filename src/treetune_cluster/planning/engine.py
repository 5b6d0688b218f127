"""What a vLLM server takes of each GPU it runs on, or of a CPU's memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from treetune.inference.settings import VllmSettings
from treetune.models.shapes import Shape
from treetune.runtime.machine import GIB, Machine

OUTSIDE = int(1.5 * GIB)
"""Assumed, of a GPU: CUDA's context, graphs and what is not PyTorch's, within the server's share."""
ASLEEP = int(2.5 * GIB)
"""Assumed, of a GPU: what a sleeping server keeps."""
PROCESS = int(2.0 * GIB)
"""Of the host: libraries and heap of a server's processes (on a CPU 1.6 GiB were seen for tiny models)."""


@dataclass(frozen=True)
class EngineMemory:
    """Of one server, in bytes, on each of its devices."""

    settings: VllmSettings
    shape: Shape
    machine: Machine
    context_length: int

    @property
    def itemsize(self) -> int:
        return 4 if self.settings.resolved_dtype(self.machine.device) == "float32" else 2

    @property
    def weights(self) -> int:
        return self.itemsize * self.shape.served // self.settings.tensor_parallel_size

    @cached_property
    def passes(self) -> int:
        """What the server's largest step makes: its MLPs, and the logits of all sequences with what is
        sampled from them."""
        settings, shape = self.settings, self.shape
        tokens = max(settings.max_num_batched_tokens, settings.max_num_seqs)
        mlp = self.itemsize * tokens * (4 * shape.hidden + 3 * shape.intermediate)
        logits = settings.max_num_seqs * shape.vocabulary * (self.itemsize + 4 * 4)
        return (mlp + logits) // settings.tensor_parallel_size

    @property
    def share(self) -> int:
        """What it takes of a GPU while it is awake, keys and values included."""
        return int(self.settings.gpu_memory_utilization * self.machine.device_memory)

    @property
    def bytes_per_token(self) -> float:
        """Keys and values of one token on one device."""
        heads = max(self.shape.kv_heads / self.settings.tensor_parallel_size, 1)
        return 2 * self.shape.layers * heads * self.shape.head_dim * self.itemsize

    @property
    def cache(self) -> int:
        """Bytes for keys and values; negative where not even the weights fit."""
        if self.machine.device == "cpu":
            return self.settings.kv_cache_gib * GIB
        return self.share - self.weights - self.passes - OUTSIDE

    @property
    def cached_tokens(self) -> int:
        return int(max(0, self.cache) // self.bytes_per_token)

    @property
    def least_share(self) -> int:
        """With room for one sequence as long as the context, without which vLLM doesn't start."""
        return int(self.weights + self.passes + OUTSIDE + self.context_length * self.bytes_per_token)

    @property
    def on_cpu(self) -> int:
        """Of the host's memory, where it runs on a CPU."""
        return self.weights + self.passes + self.cache + PROCESS


def servers_on_a_machine(settings: Any, machine: Machine) -> int:
    """How many there are; those of ranks that share one are on the first machine."""
    return settings.replicas_on(machine.device) * (machine.ranks if settings.servers == "per_rank" else 1)
