"""After new weights came into the live server: nothing of the old ones is left, and the proof of that."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.inference.base import Canary, Completion, Request, SamplingParams
from treetune.inference.client import Address, Client, RequestPart, ServerFailure
from treetune.inference.sampling import Answered, Limit, Lost, Sampling
from treetune.vocabulary import TokenIds

PROBE_CONCURRENCY = 64


def drop_cache(client: Client, address: Address, timeout: float) -> None:
    """Whatever keys and values of old weights the server keeps are forgotten. Raises ServerFailure."""
    answer = client.post(address, "/reset_prefix_cache", timeout=timeout)
    # Refused while blocks are held; vLLM before 0.30 answers nothing.
    if answer.get("success", True) is not True:
        raise ServerFailure("the prefix cache was not dropped: a request still holds blocks")


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
