"""The worker of a server that receives weights in shared memory, with a stand-in for the model.

Promises that these tests hold:

* All chunks in their order are the model's new weights, the same as from a folder (the slow test, with vLLM).
* A damaged or missing chunk and a weight that no chunk had are refused and named.
* vLLM finds the worker and the transfer by the names that the server is started with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.engine import receiving_program
from treetune.engine.launch import BACKEND_OF_METHOD, WORKER_EXTENSION
from treetune.store.checksums import digest_of_weights

NAMES = ("a.weight", "b.weight", "c.weight")


class Model(nn.Module):
    """Loads weights as vLLM's models do, and returns their names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            parameters[name].data.copy_(weight)
            loaded.add(name)
        return loaded


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Any:
    from treetune.engine import shared_memory_worker as worker

    # These functions of vLLM work on the layers of its own models only.
    monkeypatch.setattr(worker, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(worker, "finalize_layerwise_reload", lambda model, config: None)
    config = SimpleNamespace(parallel_config=None, model_config=None)
    receiver = worker.SharedMemoryReceiver(None, config, torch.device("cpu"), Model())
    receiver.init_transfer_engine(receiver.parse_init_info({}))
    return receiver


def write_chunk(folder: Path, number: int, **changes: Any) -> dict[str, Any]:
    path = folder / f"{number}.safetensors"
    save_file({NAMES[number]: torch.full((2, 2), float(number))}, path)
    update_info = {
        "path": str(path),
        "number": number,
        "last": number == 2,
        "digest": digest_of_weights(path),
    }
    return update_info | changes


def test_all_chunks_in_their_order_are_the_models_new_weights(receiver: Any, tmp_path: Path) -> None:
    for _ in range(2):
        receiver.start_weight_update()
        for number in range(3):
            receiver.update_weights(write_chunk(tmp_path, number))
        receiver.finish_weight_update()
    for number, name in enumerate(NAMES):
        assert torch.equal(receiver.model.get_parameter(name), torch.full((2, 2), float(number)))


def test_a_damaged_chunk_is_refused(receiver: Any, tmp_path: Path) -> None:
    receiver.start_weight_update()
    update_info = write_chunk(tmp_path, 0)
    path = Path(update_info["path"])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    before = receiver.model.a.weight.clone()
    with pytest.raises(ValueError, match=r"0\.safetensors is damaged"):
        receiver.update_weights(update_info)
    assert torch.equal(receiver.model.a.weight, before)


def test_a_chunk_that_is_missing_is_noticed_at_the_next_and_at_the_end(receiver: Any, tmp_path: Path) -> None:
    receiver.start_weight_update()
    receiver.update_weights(write_chunk(tmp_path, 0))
    with pytest.raises(ValueError, match="chunk 2 of the weights came, and chunk 1 was expected"):
        receiver.update_weights(write_chunk(tmp_path, 2))
    with pytest.raises(ValueError, match="ended after 1 chunks"):
        receiver.finish_weight_update()


def test_weights_that_no_chunk_had_are_named(receiver: Any, tmp_path: Path) -> None:
    receiver.start_weight_update()
    receiver.update_weights(write_chunk(tmp_path, 0, last=True))
    with pytest.raises(ValueError, match=r"no chunk had 2 of the model's weights: b\.weight, c\.weight"):
        receiver.finish_weight_update()
    with pytest.raises(ValueError, match="came, and chunk 1 was expected"):
        receiver.update_weights(write_chunk(tmp_path, 1))


def test_vllm_finds_the_worker_and_the_transfers_by_the_names_in_the_servers_command() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.worker_base import WorkerBase

    extension = resolve_obj_by_qualname(WORKER_EXTENSION)
    assert not [name for name in vars(extension) if not name.startswith("__") and hasattr(WorkerBase, name)]
    for backend in BACKEND_OF_METHOD.values():
        assert backend in WeightTransferEngineFactory._registry


@pytest.mark.slow
def test_a_model_of_vllm_has_the_same_weights_by_chunks_and_from_a_folder(tmp_path: Path) -> None:
    from treetune.models.policy_files import write_for_engine
    from treetune.models.sources import TinyModel

    source = TinyModel(layers=2, hidden_size=64, heads=2)
    tokenizer = source.load_tokenizer(lambda: "0123456789+=")
    folders = [tmp_path / name for name in ("old", "new", "chunks")]
    for seed, folder in enumerate(folders[:2]):
        model = source.load_model(seed, lambda: "0123456789+=")
        write_for_engine(dict(model.named_parameters()), model.config, tokenizer, folder)
    folders[2].mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, receiving_program.__file__, *map(str, folders)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
