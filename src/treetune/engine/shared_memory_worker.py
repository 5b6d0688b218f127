"""Receives new weights in a server's workers, from files in shared memory, chunk by chunk.

One update, of three chunks::

    trainer                                    worker of the server
      start                         ─────────►   `start_weight_update`
      writes chunk 0, names it      ─────────►   `receive_weights`: checks number and digest, loads it
      writes chunk 1, names it      ─────────►   `receive_weights`
      writes chunk 2, the last one  ─────────►   `receive_weights`
      finish                        ─────────►   `finish_weight_update`: refuses if a weight is missing
      after any failure             ─────────►   `give_up_weight_update`

vLLM has transfers by CUDA IPC and NCCL, and lets others be registered. Importing this module registers this
one. The worker imports it when the server starts, since `SharedMemoryExtension` is in it.
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

from treetune.engine.launch import BACKEND_OF_METHOD
from treetune.engine.packed_experts import pack_at_each_update
from treetune.store.checksums import digest_of_weights


@dataclass
class EmptyMessage(WeightTransferInitInfo):
    """vLLM's message that prepares a transfer; empty, since each chunk names its file."""


@dataclass
class ChunkInfo(WeightTransferUpdateInfo):
    """A chunk's file, as the trainer names it in a request; see `treetune.engine.base.Chunk`."""

    path: str
    number: int
    last: bool
    digest: str


class SharedMemoryReceiver(WeightTransferEngine[EmptyMessage, ChunkInfo]):
    """Loads chunks in their order.

    Raises ValueError if a chunk is damaged, missing or out of order, and at the end if a weight of the model
    is missing.
    """

    init_info_cls = EmptyMessage
    update_info_cls = ChunkInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._n_received = 0
        self._complete = False
        """Whether the last chunk has come."""
        self._model_names: set[str] = set()
        """The names of the model's weights."""
        self._loaded_names: set[str] | None = set()
        """The names of the weights that came; None if the model doesn't report them."""

    def init_transfer_engine(self, init_info: EmptyMessage) -> None:
        pass

    def start_weight_update(self) -> None:
        """Prepares for the chunks of new weights, and forgets those of earlier weights."""
        self._n_received, self._complete, self._loaded_names = 0, False, set()
        self._model_names = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the weights in a chunk's file into the model, and waits until the device has copied them."""
        self.receive_weights(self.parse_update_info(update_info))
        # The chunk must have been copied when the server answers (`WeightTransfer.send`), so this waits for
        # the device. On a machine without an accelerator, `synchronize` fails.
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ChunkInfo) -> None:
        """Loads the weights in a chunk's file into the model. Raises ValueError if the chunk is out of order
        or its file is damaged."""
        if self._complete or update_info.number != self._n_received:
            raise ValueError(
                f"chunk {update_info.number} of the weights came, and chunk {self._n_received} was expected"
            )
        path = Path(update_info.path)
        if (digest := digest_of_weights(path)) != update_info.digest:
            raise ValueError(f"{path} is damaged: its digest is {digest}, and {update_info.digest} was sent")
        # A chunk has only some of the model's weights. Without `disable_mtp_completeness_check`, vLLM would
        # report a weight of multi-token prediction as missing if it is in another chunk.
        with safe_open(path, framework="pt") as file, disable_mtp_completeness_check():
            # The tensors lie in the mapped file, so nothing is copied before the model loads it.
            names = file.keys()
            weights = ((name, file.get_tensor(name)) for name in names)
            loaded = self.model.load_weights(weights)
        if loaded is None:  # the model doesn't report which weights it has loaded
            self._loaded_names = None
        elif self._loaded_names is not None:
            self._loaded_names = self._loaded_names | loaded
        self._n_received += 1
        self._complete = update_info.last

    def finish_weight_update(self) -> None:
        """Ends an update. Raises ValueError if the last chunk or a weight of the model is missing."""
        if not self._complete:
            raise ValueError(
                f"the update of the weights ended after {self._n_received} chunks, without the last one"
            )
        if self._loaded_names is not None:  # None: the model doesn't report which weights it has loaded
            missing = self._model_names - self._loaded_names
            if missing:
                shown = ", ".join(sorted(missing)[:8])
                raise ValueError(f"no chunk had {len(missing)} of the model's weights: {shown}")
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class SharedMemoryExtension:
    """Adds a method to vLLM's worker. A server that names this class imports this module in its workers."""

    model_runner: Any
    model_config: Any

    def give_up_weight_update(self) -> None:
        """Ends an update that failed. The weights are wrong until the next update.

        Without this call, a layer that got some of its weights would count them in the next update too, and
        would seem complete too early (vLLM 0.32, ``initialize_layerwise_reload``).
        """
        finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
        self._weight_update_active = False


WeightTransferEngineFactory.register_engine(BACKEND_OF_METHOD["shared_memory"], SharedMemoryReceiver)
pack_at_each_update()
