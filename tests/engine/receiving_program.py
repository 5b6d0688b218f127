"""Gives a model of vLLM's new weights in chunks, and beside it from a folder: run by a test.

    python receiving_program.py OLD_FOLDER NEW_FOLDER CHUNKS_FOLDER

Without a server: what its worker does to the model, in a process that ends with it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CHUNK_BYTES = 20_000


def main(old: Path, new: Path, chunks: Path) -> None:
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from treetune.engine.shared_memory_worker import SharedMemoryExtension, SharedMemoryReceiver
    from treetune.models.shards import in_chunks, shard_path, write_index, write_shard
    from treetune.store.checksums import digest_of_weights

    arguments = EngineArgs(
        model=str(old), dtype="float32", enforce_eager=True, hf_overrides={"tie_word_embeddings": False}
    )
    config = arguments.create_engine_config()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for CPUs has it
    with set_current_vllm_config(config):
        place = f"file://{chunks / 'meeting'}"
        init_distributed_environment(1, 0, place, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = get_model(vllm_config=config)
        receiver: Any = SharedMemoryReceiver(None, config, torch.device("cpu"), model)
        before = values(model)
        receiver.start_weight_update()
        weights = load_file(new / "model.safetensors")
        number, files, sent = -1, dict[str, str](), list[dict[str, Any]]()
        for number, (chunk, last) in enumerate(in_chunks(weights.items(), CHUNK_BYTES, lambda one: one)):
            path = shard_path(chunks, number)
            write_shard(chunk, path)
            told = {"path": str(path), "number": number, "last": last, "digest": digest_of_weights(path)}
            receiver.update_weights(told)
            sent.append(told)
            files |= dict.fromkeys(chunk, path.name)
        receiver.finish_weight_update()
        by_chunks = values(model)
        reload_weights(config, model, None, str(old), True)
        back = values(model)
        reload_weights(config, model, None, str(new), True)
        from_folder = values(model)
        reload_weights(config, model, None, str(old), True)
        write_index(files, chunks)
        reload_weights(config, model, None, str(chunks), True)
        from_chunks_folder = values(model)
        worker: Any = SharedMemoryExtension()
        worker.model_config = config.model_config
        worker.model_runner = SimpleNamespace(get_model=lambda: model)
        after_failures = []
        for last in range(number):  # however far the update came
            receiver.start_weight_update()
            for told in sent[: last + 1]:
                receiver.update_weights(told)
            worker.give_up_weight_update()
            reload_weights(config, model, None, str(new if last % 2 else old), True)
            after_failures.append(values(model))
        torn = chunks / "torn"
        shutil.copytree(new, torn)
        whole = (torn / "model.safetensors").read_bytes()
        (torn / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        try:
            reload_weights(config, model, None, str(torn), True)
        except Exception as error:
            refused = repr(error)
    assert "SafetensorError" in refused, "weights that are not whole were taken"
    assert number > 2 and len(before) > 14
    assert before.keys() == by_chunks.keys() == from_folder.keys()
    same = [name for name in before if torch.equal(before[name], by_chunks[name])]
    assert all(torch.equal(before[name], back[name]) for name in before)
    assert all(torch.equal(by_chunks[name], from_folder[name]) for name in from_folder)
    assert all(torch.equal(by_chunks[name], from_chunks_folder[name]) for name in from_folder)
    for last, found in enumerate(after_failures):
        expected = from_folder if last % 2 else back
        assert all(torch.equal(found[name], expected[name]) for name in expected), f"after chunk {last}"
    assert all("norm" in name for name in same), f"{same} did not change"  # they begin as ones


def values(model: Any) -> dict[str, Any]:
    """Every parameter, and what every linear layer makes of one input: on a CPU these go on with a copy of
    their weights that is packed otherwise, and the parameters say nothing of it."""
    import torch
    from vllm.model_executor.layers.linear import LinearBase

    def some(size: int) -> torch.Tensor:
        return torch.linspace(-1, 1, size)[None]

    found = {name: weight.detach().clone() for name, weight in model.named_parameters() if "norm" in name}
    found["embeddings"] = model.model.embed_tokens.weight.detach().clone()
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            found[name] = layer(some(layer.input_size))[0].detach().clone()
    head = model.lm_head
    found["head"] = head.quant_method.apply(head, some(head.embedding_dim)).detach().clone()
    return found


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
