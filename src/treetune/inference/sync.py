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
from treetune.inference.client import Address, Client, RequestPart, ServerFailure
from treetune.inference.launch import ADAPTER_CONFIG, MODEL_NAME
from treetune.inference.sampling import Answered, Limit, Lost, Sampling
from treetune.vocabulary import TokenIds

PROBE_CONCURRENCY = 64


def reload_weights(
    client: Client,
    address: Address,
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
        client.post(address, "/v1/load_lora_adapter", named, timeout=timeout, answers="text")
    else:
        body = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(directory)},
            "timeout": timeout,
        }
        client.post(address, "/collective_rpc", body, timeout=timeout)
    reloaded = time.monotonic()
    between()
    answer = client.post(address, "/reset_prefix_cache", timeout=timeout)
    # Refused while blocks are held; vLLM before 0.30 answers nothing.
    if answer.get("success", True) is not True:
        raise ServerFailure("the prefix cache was not dropped: a request still holds blocks")
    return {"reload": reloaded - started, "reset_cache": time.monotonic() - reloaded}


def probes_of(canary: Canary, context_length: int) -> list[Request]:
    """A request for each of the canary's prompts, of at most `max_tokens` and of what the prompt leaves of
    the context. A prompt that leaves nothing loses its beginning: any text shows whose weights they are."""
    requests = []
    for prompt in canary.prompts:
        fitting = prompt[-(context_length - 1) :]
        tokens = min(canary.max_tokens, context_length - len(fitting))
        sampling = SamplingParams(max_tokens=tokens, temperature=canary.temperature)
        requests.append(Request(fitting, canary.seed, 1, sampling))
    return requests


def sample_probes(
    client: Client,
    address: Address,
    requests: Sequence[Request],
    version: int,
    timeout: float,
) -> list[tuple[TokenIds, Completion]]:
    """The prompts and the engine's own answers to them."""
    parts = [RequestPart(index, 0, 1, request) for index, request in enumerate(requests)]
    answers = {}
    with Sampling(client, version, Limit(PROBE_CONCURRENCY, PROBE_CONCURRENCY), timeout) as sampling:
        sampling.open({0: address})
        sampling.add(parts)
        while sampling.outstanding:
            came = sampling.next()
            if isinstance(came, Lost):
                raise ServerFailure(came.reason)
            if isinstance(came, Answered):
                answers[came.part.index] = came.completions[0]
    return [(part.request.prompt_ids, answers[part.index]) for part in parts]
