"""New weights into the live server, and the proof that they are there. The one file that knows how.

vLLM offers several ways (weights by NCCL, by CUDA IPC, from a folder), and their interface changes
between its versions. This is the folder's: the same on a CPU and on GPUs, with the folder in
/dev/shm at memory speed, in place, so that CUDA graphs stay valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from treetune.inference.base import Canary, Completion, Request, SamplingParams
from treetune.inference.client import Chunk, Client, ServerFailure
from treetune.inference.launch import ADAPTER_CONFIG, MODEL_NAME
from treetune.vocabulary import TokenIds

PROBE_CONCURRENCY = 64


def reload_weights(
    client: Client,
    url: str,
    directory: Path,
    timeout: float,
    *,
    between: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Exchanges the weights, or the adapters on them where the directory holds such, in place and drops
    the prefix cache; seconds of each part.

    `between` runs after the one and before the other. No request may be in flight. Raises
    ServerFailure; the server is then in an unknown state, even if it says that it is well.
    """
    started = time.monotonic()
    if (directory / ADAPTER_CONFIG).is_file():
        named = {"lora_name": MODEL_NAME, "lora_path": str(directory), "load_inplace": True}
        client.post(url, "/v1/load_lora_adapter", named, timeout=timeout, answers="text")
    else:
        body = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(directory)},
            "timeout": timeout,
        }
        client.post(url, "/collective_rpc", body, timeout=timeout)
    reloaded = time.monotonic()
    between()
    answer = client.post(url, "/reset_prefix_cache", timeout=timeout)
    # Refused while blocks are held; vLLM before 0.30 answers nothing.
    if answer.get("success", True) is not True:
        raise ServerFailure("the prefix cache was not dropped: a request still holds blocks")
    return {"reload": reloaded - started, "reset_cache": time.monotonic() - reloaded}


def sample_probes(
    client: Client,
    url: str,
    canary: Canary,
    version: int,
    timeout: float,
) -> list[tuple[TokenIds, Completion]]:
    """The engine's own answers to the canary's prompts."""
    sampling = SamplingParams(max_tokens=canary.max_tokens, temperature=canary.temperature)
    chunks = [
        Chunk(index, 0, 1, Request(prompt, canary.seed, 1, sampling))
        for index, prompt in enumerate(canary.prompts)
    ]
    with client.sampling(url, version, concurrency=PROBE_CONCURRENCY, timeout=timeout) as samples:
        samples.add(chunks)
        answers = {chunk.index: completions[0] for chunk, completions in samples}
    return [(chunk.request.prompt_ids, answers[chunk.index]) for chunk in chunks]


def largest_gap(probes: Sequence[tuple[TokenIds, Completion]], scores: Sequence[Sequence[float]]) -> float:
    """max |engine log-prob - trainer log-prob| over all sampled tokens; inf where one is no number."""
    gap = 0.0
    for (_, completion), trainer in zip(probes, scores, strict=True):
        for ours, theirs in zip(completion.logprobs.tolist(), trainer, strict=True):
            difference = abs(ours - theirs)
            # A comparison with NaN is false: `max` would drop it.
            gap = max(gap, difference) if difference == difference else float("inf")
    return gap
