"""Opens the engine that continues answers: from a folder, or around a model or a function of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from treetune.engine.base import Engine, EngineLaunch
from treetune.engine.held_model import HeldModelEngine
from treetune.engine.in_process import InProcessEngine
from treetune.engine.requests import Completion, Deferred, OnResult, Request
from treetune.engine.settings import InProcessSettings
from treetune.exceptions import EngineError
from treetune.vocabulary import TextCodec

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

UNBOUNDED_CONTEXT_LENGTH = 1 << 20
"""The context length of models whose configuration doesn't have one."""


SampleRequests = Callable[[Sequence[Request]], Sequence[Sequence[Completion]]]
"""A user's function that samples: it returns `Request.n` completions for each request."""


class FunctionEngine(Engine):
    """Samples with a function of the user, such as one that calls a trainer's own vLLM.

    Each call of the function gets all requests that can be sampled by then. Requests that follow from their
    completions come in the next call.
    """

    def __init__(self, sample_requests: SampleRequests) -> None:
        self.version = 0
        self.tokens = 0
        self._sample_requests = sample_requests
        self._name = getattr(sample_requests, "__name__", type(sample_requests).__name__)

    @override
    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        """Samples the requests with the user's function. Each call of the function gets all requests that can
        be sampled by then."""
        results: list[list[Completion]] = []
        unsent: list[Request] = []
        deferred: list[Deferred] = []

        def add_requests(new_requests: Sequence[Request | Deferred]) -> None:
            """Adds requests to be sampled, and each `Deferred`, which stands for requests that wait for a
            result."""
            for request in new_requests:
                if isinstance(request, Deferred):
                    deferred.append(request)
                else:
                    unsent.append(request)

        add_requests(requests)
        while unsent or deferred:
            # If there are requests to sample, this doesn't wait. If there are none, it waits until one of
            # `deferred` is ready, such as one that follows from a grade.
            wait([request.ready for request in deferred], 0 if unsent else None, FIRST_COMPLETED)
            ready = [request for request in deferred if request.ready.done()]
            for request in ready:
                deferred.remove(request)
                add_requests(request.requests())
            requests_of_call = list(unsent)
            unsent.clear()
            for completions in self._sample(requests_of_call):
                results.append(completions)
                self.tokens += sum(len(completion.token_ids) for completion in completions)
                if on_result is not None:
                    add_requests(on_result(len(results) - 1, completions) or ())
        return results

    def _sample(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Returns the completions of the user's function. Raises EngineError if they are too many or too
        few."""
        if not requests:
            return []
        completions_by_request = [list(completions) for completions in self._sample_requests(requests)]
        requested_counts = [request.n for request in requests]
        returned_counts = [len(completions) for completions in completions_by_request]
        if returned_counts != requested_counts:
            raise EngineError(
                f"the engine {self._name} returned {returned_counts} completions for {len(requests)}"
                f" requests, which ask for {requested_counts}: return a list of n completions for each"
                " request"
            )
        return completions_by_request


def can_score(source: Any) -> bool:
    """Returns whether an engine can score given texts.

    Args:
        source: The engine in any form in which a user may give it. A function can't score, since it only gets
            requests for samples.
    """
    if isinstance(source, Engine):
        return source.scores
    is_function = callable(source) and not hasattr(source, "generate")  # models can be called, too
    return not is_function


def open_engine(source: Any, codec: TextCodec, special_ids: Mapping[str, int], seed: int) -> Engine:
    """Returns an engine that samples in this process. The caller closes it.

    Args:
        source: A folder with weights and a ``config.json``, a transformers model, or a function as in
            `FunctionEngine`.
        codec: The codec of the model's tokenizer.
        special_ids: The ids of the tokenizer's special tokens, by their texts.
        seed: The engine's seed. Requests have seeds of their own.

    Raises:
        ValueError: There is no such folder, or the engine can't sample with the model.
    """
    if isinstance(source, str | Path):
        folder = Path(source).expanduser()
        if not (folder / "config.json").is_file():
            raise ValueError(f"engine is {str(source)!r}, and there is no model (config.json) in that folder")
        # These packages are imported here, since an engine that is a function needs none of them.
        import torch
        from transformers import AutoConfig, GenerationConfig

        config = AutoConfig.from_pretrained(folder)
        generation_config = None
        if (folder / "generation_config.json").is_file():
            generation_config = GenerationConfig.from_pretrained(folder)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        launch = _make_launch(folder, config, generation_config, codec, special_ids, seed, device)
        return InProcessEngine(InProcessSettings(), launch)
    if hasattr(source, "config") and hasattr(source, "generate"):
        model: Any = source  # of transformers; such models are callable too
        device = model.device.type
        launch = _make_launch(Path(), model.config, model.generation_config, codec, special_ids, seed, device)
        return HeldModelEngine(model, codec, launch)
    if callable(source):
        return FunctionEngine(source)
    # Callers handle addresses of servers and engines themselves. The message names all that users may give.
    raise ValueError(
        f"engine is of the type {type(source).__name__}: give the address of a vLLM server, a folder with a"
        " model, a transformers model, a function of requests, or an Engine"
    )


def _make_launch(
    weights: Path,
    config: PretrainedConfig,
    generation_config: GenerationConfig | None,
    codec: TextCodec,
    special_ids: Mapping[str, int],
    seed: int,
    device: str,
) -> EngineLaunch:
    """Returns the facts about the model with which an engine starts.

    Args:
        weights: The model's folder; not read for a model in memory.
        config: Has the number of the model's positions.
        generation_config: Has tokens that end an answer, in addition to those of the codec. None: there are
            no such tokens.
        codec: The codec of the model's tokenizer.
        special_ids: The ids of the tokenizer's special tokens, by their texts.
        seed: The engine's seed. Requests have seeds of their own.
        device: ``cpu`` or ``cuda``.
    """
    further_end_ids: list[int] = []
    if generation_config is not None:
        eos = generation_config.eos_token_id  # None, an id, or a list of ids
        if isinstance(eos, int):
            further_end_ids = [eos]
        elif eos is not None:
            further_end_ids = list(eos)
    return EngineLaunch(
        weights=weights,
        logs=Path(),  # unused: an engine in this process writes no log
        seed=seed,
        context_length=getattr(config, "max_position_embeddings", None) or UNBOUNDED_CONTEXT_LENGTH,
        device=device,
        end_ids=(*codec.end_ids, *further_end_ids),
        special_ids=special_ids,
    )
