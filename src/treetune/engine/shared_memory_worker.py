"""The receiver in the server's workers of weights from files in shared memory, chunk by chunk.

vLLM knows transfers by CUDA IPC and NCCL, and lets others be registered. Importing this module does that; the
server does so on its way up, since the worker's extension is named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from treetune.engine.launch import BACKENDS
from treetune.engine.packed_experts import pack_at_each_reading
from treetune.store.checksums import digest_of_weights


@dataclass
class EmptyMessage(WeightTransferInitInfo):
    """An empty message: files are found by their names."""


@dataclass
class ChunkInfo(WeightTransferUpdateInfo):
    """See `treetune.engine.base.Chunk`."""

    path: str
    number: int
    last: bool
    digest: str


class SharedMemoryReceiver(WeightTransferEngine[EmptyMessage, ChunkInfo]):
    """Loads chunks in their order. Raises where one is damaged, missing or out of its turn, and at the end
    where a weight of the model did not come."""

    init_info_cls = EmptyMessage
    update_info_cls = ChunkInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._taken = 0
        self._complete = False
        self._names: set[str] = set()
        self._loaded: set[str] | None = set()

    def init_transfer_engine(self, init_info: EmptyMessage) -> None:
        pass

    def start_weight_update(self) -> None:
        self._taken, self._complete, self._loaded = 0, False, set()
        self._names = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # this call fails on a machine without an accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ChunkInfo) -> None:
        if self._complete or update_info.number != self._taken:
            raise ValueError(f"chunk {update_info.number} of the weights came where {self._taken} was due")
        path = Path(update_info.path)
        if (digest := digest_of_weights(path)) != update_info.digest:
            raise ValueError(f"{path} is damaged: its digest is {digest}, and {update_info.digest} was sent")
        with safe_open(path, framework="pt") as file, disable_mtp_completeness_check():
            # Tensors on the mapped file: nothing is copied before the model takes it.
            names = list(file.keys())
            weights = ((name, file.get_tensor(name)) for name in names)
            loaded = self.model.load_weights(weights)
        # Some models don't say what they took.
        self._loaded = None if loaded is None or self._loaded is None else self._loaded | loaded
        self._taken += 1
        self._complete = update_info.last

    def finish_weight_update(self) -> None:
        if not self._complete:
            raise ValueError(
                f"the update ended after {self._taken} chunks, and the last one was not among them"
            )
        if self._loaded is not None and (missing := self._names - self._loaded):
            raise ValueError(f"no chunk had {', '.join(sorted(missing)[:8])} ({len(missing)} weights)")
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class SharedMemoryExtension:
    """Methods of vLLM's worker. Naming it has this module imported there."""

    model_runner: Any
    model_config: Any

    def give_up_weight_update(self) -> None:
        """Ends an update that failed, whatever it brought: the weights are wrong until others are read.

        Otherwise a layer that has had some of its weights would count them at the next reading too, and be
        taken for whole before it is (vLLM 0.32, ``initialize_layerwise_reload``).
        """
        finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
        self._weight_update_active = False


WeightTransferEngineFactory.register_engine(BACKENDS["shared_memory"], SharedMemoryReceiver)
pack_at_each_reading()
