"""An engine that writes what a script gives for the text before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.support.tabular_mdp import drop_unread_logprobs
from tests.support.threads import CODEC, decode, encode
from treetune.engine.base import Engine
from treetune.engine.requests import Completion, OnResult, Request

Ids = tuple[int, ...]
Script = Callable[[str, Request], str]
"""From the text before (prompt included) to what follows; a ``$`` is the end of text."""


class ScriptedEngine(Engine):
    """Cuts the text of the script where the request would have stopped, and answers in a random order."""

    version = 0

    def __init__(self, script: Script, order_seed: int = 0) -> None:
        self.script, self.requests = script, list[Request]()
        self.answered: dict[tuple[Ids, int], Ids] = {}
        self._order = random.Random(order_seed)

    def generate(
        self, requests: Sequence[Request], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = [[] for _ in requests]
        waiting = list(enumerate(requests))
        while waiting:
            index, request = waiting.pop(self._order.randrange(len(waiting)))
            self.requests.append(request)
            results[index] = drop_unread_logprobs(request, [self._completion(request)])
            prompt_and_seed = tuple(request.prompt_ids.tolist()), request.seed
            self.answered[prompt_and_seed] = tuple(results[index][0].token_ids.tolist())
            further = on_result(index, results[index]) if on_result is not None else None
            for next_request in further or ():
                waiting.append((len(results), next_request))
                results.append([])
        return results

    def _completion(self, request: Request) -> Completion:
        text = self.script(decode(request.prompt_ids), request)
        ids: Ids = ()
        for token in ids_of(text):
            ids = (*ids, token)
            if token in (*request.sampling.stop_ids, CODEC.eos_id):
                return Completion(ids, _logprobs(ids), "stop", self.version, seconds=1.0)
            if len(ids) == request.sampling.max_tokens:
                return Completion(ids, _logprobs(ids), "length", self.version, seconds=1.0)
        raise AssertionError(f"the script ends before the request does: {text!r}")


def ids_of(text: str) -> Ids:
    """Encodes a text in which ``$`` is the end token."""
    first, *later_parts = text.split("$")
    ids = encode(first)
    for part in later_parts:
        ids += (CODEC.eos_id, *encode(part))
    return ids


def _logprobs(ids: Ids) -> tuple[float, ...]:
    return tuple(-0.01 * token for token in ids)
