"""Loads new weights into a model of vLLM in chunks and from a folder, and compares them: run by a test.

    python receiving_program.py OLD_FOLDER NEW_FOLDER CHUNKS_FOLDER

It runs the code of a server's worker without a server, in a process of its own.
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
    from treetune.models.shards import shard_path, split_into_chunks, write_index, write_shard
    from treetune.store.checksums import digest_of_weights

    arguments = EngineArgs(
        model=str(old), dtype="float32", enforce_eager=True, hf_overrides={"tie_word_embeddings": False}
    )
    config = arguments.create_engine_config()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for CPUs has it
    with set_current_vllm_config(config):
        meeting_point = f"file://{chunks / 'meeting'}"
        init_distributed_environment(1, 0, meeting_point, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = get_model(vllm_config=config)
        receiver: Any = SharedMemoryReceiver(None, config, torch.device("cpu"), model)
        before = values_of_weights(model)
        receiver.start_weight_update()
        weights = load_file(new / "model.safetensors")
        number, files, sent = -1, dict[str, str](), list[dict[str, Any]]()
        for number, (chunk, last) in enumerate(
            split_into_chunks(weights.items(), CHUNK_BYTES, lambda weight: weight)
        ):
            path = shard_path(chunks, number)
            write_shard(chunk, path)
            update_info = {
                "path": str(path),
                "number": number,
                "last": last,
                "digest": digest_of_weights(path),
            }
            receiver.update_weights(update_info)
            sent.append(update_info)
            files |= dict.fromkeys(chunk, path.name)
        receiver.finish_weight_update()
        by_chunks = values_of_weights(model)
        reload_weights(config, model, None, str(old), True)
        values_of_old = values_of_weights(model)
        reload_weights(config, model, None, str(new), True)
        from_folder = values_of_weights(model)
        reload_weights(config, model, None, str(old), True)
        write_index(files, chunks)
        reload_weights(config, model, None, str(chunks), True)
        from_chunks_folder = values_of_weights(model)
        worker: Any = SharedMemoryExtension()
        worker.model_config = config.model_config
        worker.model_runner = SimpleNamespace(get_model=lambda: model)
        after_failures = []
        for last in range(number):  # an update that failed behind each chunk
            receiver.start_weight_update()
            for update_info in sent[: last + 1]:
                receiver.update_weights(update_info)
            worker.give_up_weight_update()
            reload_weights(config, model, None, str(new if last % 2 else old), True)
            after_failures.append(values_of_weights(model))
        torn = chunks / "torn"
        shutil.copytree(new, torn)
        content = (torn / "model.safetensors").read_bytes()
        (torn / "model.safetensors").write_bytes(content[: len(content) // 2])
        try:
            reload_weights(config, model, None, str(torn), True)
        except Exception as error:
            refused = repr(error)
    assert "SafetensorError" in refused, "weights that are not whole were taken"
    assert number > 2 and len(before) > 14
    assert before.keys() == by_chunks.keys() == from_folder.keys()
    same = [name for name in before if torch.equal(before[name], by_chunks[name])]
    assert all(torch.equal(before[name], values_of_old[name]) for name in before)
    for name, weight in from_folder.items():
        assert torch.equal(by_chunks[name], weight)
        assert torch.equal(from_chunks_folder[name], weight)
    for last, weights_after in enumerate(after_failures):
        expected = from_folder if last % 2 else values_of_old
        is_equal = [torch.equal(weights_after[name], expected[name]) for name in expected]
        assert all(is_equal), f"after chunk {last}"
    # Only the weights of norms are equal in both models: they are 1.
    assert all("norm" in name for name in same), f"{same} did not change"


def values_of_weights(model: Any) -> dict[str, Any]:
    """Collects the norms, the embeddings, and the output of every linear layer for one input.

    On a CPU, linear layers compute with a packed copy of their weights, which the parameters don't show.
    """
    import torch
    from vllm.model_executor.layers.linear import LinearBase

    def input_of_size(size: int) -> torch.Tensor:
        return torch.linspace(-1, 1, size)[None]

    values = {name: weight.detach().clone() for name, weight in model.named_parameters() if "norm" in name}
    values["embeddings"] = model.model.embed_tokens.weight.detach().clone()
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            values[name] = layer(input_of_size(layer.input_size))[0].detach().clone()
    head = model.lm_head
    values["head"] = head.quant_method.apply(head, input_of_size(head.embedding_dim)).detach().clone()
    return values


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
