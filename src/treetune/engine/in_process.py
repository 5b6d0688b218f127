"""An engine without a server: each rank samples in its own process, with PyTorch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from treetune.architectures import length_rule, probe_rows
from treetune.engine.base import (
    Canary,
    Chunk,
    Completion,
    Engine,
    EngineLaunch,
    Later,
    OnResult,
    Request,
    SamplingParams,
    SyncReport,
    check_request,
)
from treetune.engine.canary import Probe, judge
from treetune.engine.settings import InProcessSettings
from treetune.exceptions import EngineError
from treetune.vocabulary import TokenIds, token_array

FEWEST_ROWS = 8
"""Rows of the smallest batch. A product of one to three rows is computed by other code, with other last bits;
from four rows on, a row's result doesn't depend on how many there are (measured on a CPU, one thread)."""
BLOCK = 32
"""Prompts and caches are padded to a multiple of it: a prompt's own length decides how it is computed."""
PREFILL_ROWS = 64
"""Prompts of one forward pass."""


@dataclass(eq=False)
class _Sample:
    """A sample that is being drawn: sample `number` of the request `index`, its tokens so far, and the
    numbers in [0, 1) that choose them."""

    index: int
    number: int
    request: Request
    chances: np.ndarray
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class InProcessEngine(Engine):
    """See `Engine`. Samples are rows of one batch; a row whose sample has ended is given to the next one."""

    def __init__(self, settings: InProcessSettings, launch: EngineLaunch) -> None:
        self.version = 0
        self.tokens = 0
        self.at_once, self._tolerance = settings.rows, settings.tolerance(launch.device)
        self._context_length, self._device = launch.context_length, launch.device
        self._end_ids = frozenset(launch.end_ids)
        self._special_ids = dict(launch.special_ids)
        self._closed = False
        self._probes: list[Probe] = []
        self._trust_remote_code = launch.trust_remote_code
        self._read(launch.weights)
        refuse_unlike_model(self._model, self._device, self._context_length)

    @override
    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        started, before = time.monotonic(), self.tokens
        results: list[list[Completion | None]] = []
        waiting: dict[int, deque[_Sample]] = {}
        promised: list[Later] = []

        def ask(more: Sequence[Request | Later]) -> None:
            promised.extend(request for request in more if isinstance(request, Later))
            added: dict[int, list[_Sample]] = {}
            for request in more:
                if isinstance(request, Request):
                    index, sampling = len(results), request.sampling
                    check_request(index, request, self._context_length)
                    for number in range(request.n):
                        generator = np.random.default_rng(request.seed + number)
                        sample = _Sample(index, number, request, generator.random(sampling.max_tokens))
                        added.setdefault(request.priority, []).append(sample)
                    results.append([None] * request.n)
            for priority, samples in added.items():  # before what still waits of their priority
                waiting.setdefault(priority, deque()).extendleft(reversed(samples))

        batch = _RowBatch(self._model, self._device)
        ask(requests)
        while batch.samples or promised or any(waiting.values()):
            if self._closed:
                raise EngineError("the engine was closed while it sampled")
            if promised and not batch.samples and not any(waiting.values()):
                wait([later.ready for later in promised], return_when=FIRST_COMPLETED)
            for later in [later for later in promised if later.ready.done()]:
                promised.remove(later)
                ask(later.requests())
            free_rows = self.at_once - len(batch.samples)
            admitted: list[_Sample] = []
            for _, queue in sorted(waiting.items()):  # by priority
                while queue and len(admitted) < free_rows:
                    admitted.append(queue.popleft())
            batch.admit(admitted)
            if not batch.samples:
                continue
            for sample in self._step(batch):
                completions = results[sample.index]
                completions[sample.number] = Completion(
                    np.array(sample.ids),
                    np.array(sample.logprobs) if sample.request.reads_logprobs else None,
                    sample.finish_reason,  # type: ignore[arg-type]
                    self.version,
                    time.monotonic() - started,
                )
                self.tokens += len(sample.ids)
                if None not in completions and on_result is not None:
                    ask(on_result(sample.index, completions) or ())  # type: ignore[arg-type]
        self.tokens_per_second = (self.tokens - before) / max(time.monotonic() - started, 1e-9)
        return results  # type: ignore[return-value]

    @override
    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        started = time.monotonic()
        for _ in chunks or ():  # the folder is whole when all of them have been made
            pass
        self._read(directory)
        self.version = version
        if canary is None:
            return SyncReport(time.monotonic() - started, math.nan)
        probes = self._probe(canary)
        gap = judge(probes, self._probes, canary.tolerance or self._tolerance)
        if gap.problem:
            raise EngineError(f"the weights in {directory} were read, and {gap.problem}")
        self._probes = probes
        return SyncReport(time.monotonic() - started, gap.largest, gap.mean)

    @override
    def close(self) -> None:
        self._closed = True

    def _read(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._folder = folder
        self._tokenizer: Any = None
        self._model = (
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, trust_remote_code=self._trust_remote_code
            )
            .eval()
            .to(self._device)
        )
        if longest_window(self._model) is not None:
            attach_windowed_attention(self._model)

    def _step(self, batch: _RowBatch) -> list[_Sample]:
        """Gives every sample of the batch one more token. Returns those that end, which leave the batch."""
        rows = list(batch.samples)
        tokens, logprobs = draw(batch.next_logits()[rows], list(batch.samples.values()))
        ended = []
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            sample = batch.samples[row]
            sample.ids.append(token)
            sample.logprobs.append(logprob)
            sampling = sample.request.sampling.with_special_stops(self._special_ids)
            if token in self._end_ids or token in sampling.stop_ids or self._has_stop(sample):
                sample.finish_reason = "stop"
            elif len(sample.ids) == sampling.max_tokens:
                sample.finish_reason = "length"
            if sample.finish_reason:
                ended.append(batch.samples.pop(row))
        return ended

    def _has_stop(self, sample: _Sample) -> bool:
        if not sample.request.sampling.stop:
            return False
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(
                self._folder, trust_remote_code=self._trust_remote_code
            )
        text = self._tokenizer.decode(sample.ids, skip_special_tokens=True)
        return any(stop in text for stop in sample.request.sampling.stop)

    def _probe(self, canary: Canary) -> list[Probe]:
        requests = canary.requests(self._context_length)
        before = self.tokens
        sampled = [completions[0] for completions in self.generate(requests)]
        self.tokens = before
        pairs: list[tuple[TokenIds, TokenIds]] = [
            (request.prompt_ids, sample.token_ids) for request, sample in zip(requests, sampled, strict=True)
        ]
        scores = canary.score(pairs)
        return [
            Probe(prompt_ids, ids, sample.logprobs.tolist() if sample.logprobs is not None else [], row)
            for (prompt_ids, ids), sample, row in zip(pairs, sampled, scores, strict=True)
        ]


WINDOWED = "treetune_windowed"
"""The name under which transformers finds this engine's attention of layers with sliding windows."""
LONGEST_PROBE = 600
"""Tokens of the longest row with which an engine is compared with its model at the start."""
PROBE_STEPS = 4
PROBE_LIMIT = 1e-3
"""Largest difference between log-probs, in nats, that float32's rounding explains there."""


def longest_window(model: Any) -> int | None:
    """Returns the tokens that a layer with a sliding window sees; None where no layer has one."""
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not isinstance(window, int) or (kinds is not None and "sliding_attention" not in kinds):
        return None
    return window


def attach_windowed_attention(model: Any) -> None:
    """Makes layers with a sliding window see that many tokens of the cache. Masks are given for all layers
    alike, and each layer tells its attention the window that it has."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if model.config._attn_implementation != "sdpa":
        raise ValueError(
            f"the engine in_process has no attention for {type(model).__name__}, which has sliding windows"
            " and doesn't work with PyTorch's own attention: set engines.policy to the type 'vllm'"
        )
    AttentionInterface.register(WINDOWED, windowed_attention)
    AttentionMaskInterface.register(WINDOWED, sdpa_mask)  # else our masks would be dropped
    model.set_attn_implementation(WINDOWED)


def windowed_attention(
    module: Any,
    query_BHTD: Any,
    key_BHKD: Any,
    value_BHKD: Any,
    attention_mask: Any,
    *,
    sliding_window: int | None = None,
    **settings: Any,
) -> Any:
    """Attention within the window of the layer, [B, T, H, D]; see transformers' ``AttentionInterface``. The
    mask, [B, 1, T, K], is True for each token and all before it."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if sliding_window is not None and attention_mask is not None:
        positions_B1T1 = attention_mask.sum(-1, keepdim=True) - 1
        places_K = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
        attention_mask = attention_mask & (places_K > positions_B1T1 - sliding_window)
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return inner(module, query_BHTD, key_BHKD, value_BHKD, attention_mask, **settings)


def refuse_unlike_model(model: Any, device: str, context_length: int) -> None:
    """Raises ValueError where this engine, with its cache and its masks, computes other log-probs than the
    model: recurrent states and convolutions, for example, lie in no cache of keys and values.

    Two rows of unlike lengths are fed to both, longer than the model's window where it has a short one.
    """
    import torch

    name = type(model).__name__
    remedy = "set engines.policy to the type 'vllm', or train another architecture"
    rule = length_rule(model.config.to_dict())
    if rule is not None and context_length > rule.limit:
        raise ValueError(
            f"{name} has {rule.kind}, which computes all samples of a batch otherwise where one has more than"
            f" {rule.limit} tokens: set context_length to {rule.limit} or less"
        )
    length = min(max(24, (longest_window(model) or 0) + 8), LONGEST_PROBE, context_length)
    if length < 2 * PROBE_STEPS:
        return
    gaps = []
    try:
        rows = probe_rows(model.config, (length, length // 2))
        samples = []
        for number, row in enumerate(rows):
            prompt_ids = token_array(row[:-PROBE_STEPS])
            request = Request(prompt_ids, 0, 1, SamplingParams(max_tokens=PROBE_STEPS))
            samples.append(_Sample(number, 0, request, np.zeros(PROBE_STEPS)))
        batch = _RowBatch(model, device)
        batch.admit(samples)
        expected = {}
        for sample, row in zip(samples, rows, strict=True):
            with torch.no_grad():
                logits_1TV = model(input_ids=torch.tensor([row], device=device), use_cache=False).logits
            expected[sample] = logits_1TV[0].float().log_softmax(-1)
        for step in range(PROBE_STEPS):
            logprobs_BV = batch.next_logits().float().log_softmax(-1)
            for place, sample in batch.samples.items():
                row = rows[sample.index]
                at = len(row) - PROBE_STEPS + step
                gaps.append(float((logprobs_BV[place] - expected[sample][at - 1]).abs().max()))
                sample.ids.append(row[at])
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"the engine in_process doesn't know how {name} remembers what it has read"
            f" ({type(error).__name__}: {error}): {remedy}"
        ) from error
    if not max(gaps) <= PROBE_LIMIT:
        raise ValueError(
            f"the engine in_process computes other log-probs than {name} (by up to {max(gaps):.2g}), which"
            f" has layers that a cache of keys and values is not enough for: {remedy}"
        )


class _Cache:
    """Keys and values by layer, as a model's attention asks for them.

    `positions` None takes a whole prompt as it is; otherwise each row's one token goes to its position. The
    tensors have the shape [rows, heads, tokens, dimension].
    """

    is_compileable = False

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Any, Any]] = {}
        self.positions: Any = None
        self.used = 0
        """Tokens of the longest row, padded."""

    def update(self, keys: Any, values: Any, layer: int, *rest: Any, **named: Any) -> tuple[Any, Any]:
        if self.positions is None:
            self.layers[layer] = keys, values
            return keys, values
        rows = range(len(self.positions))
        for whole, new in zip(self.layers[layer], (keys, values), strict=True):
            whole[rows, :, self.positions] = new[:, :, 0]
        known_keys, known_values = self.layers[layer]
        return known_keys[:, :, : self.used], known_values[:, :, : self.used]


class _RowBatch:
    """Samples by the row in which they are computed, and the cache of all rows."""

    def __init__(self, model: Any, device: str) -> None:
        self.samples: dict[int, _Sample] = {}
        self._model, self._device = model, device
        self._cache = _Cache()
        self._height = self._width = 0

    def admit(self, samples: Sequence[_Sample]) -> None:
        """Puts samples into free rows, with the keys and values of their prompts but the last token."""
        everybody = [*self.samples.values(), *samples]
        if not everybody or (not samples and 2 * max(len(everybody), FEWEST_ROWS) > self._height):
            return
        prompts = {s.request.prompt_ids.tobytes(): s.request.prompt_ids for s in samples}
        computed = dict(self._prefill(prompts))
        width = max([_padded(len(s.request.prompt_ids) + s.request.sampling.max_tokens) for s in everybody])
        kept = list(self.samples)
        if len(everybody) > self._height or width > self._width or 2 * len(everybody) <= self._height:
            # Rows are moved anew: more of them, longer ones, or half of them at most.
            self._height, self._width = max(FEWEST_ROWS, len(everybody)), width
            for layer, both in next(iter(computed.values()), self._cache.layers).items():
                old = self._cache.layers.get(layer)
                moved = []
                for index, like in enumerate(both):
                    new = like.new_zeros((self._height, like.shape[-3], width, like.shape[-1]))
                    if old is not None and kept:
                        shared = min(width, old[index].shape[2])
                        new[: len(kept), :, :shared] = old[index][kept, :, :shared]
                    moved.append(new)
                self._cache.layers[layer] = moved[0], moved[1]
            self.samples = dict(enumerate(self.samples.values()))
        free = (row for row in range(self._height) if row not in self.samples)
        for row, sample in list(zip(free, samples, strict=False)):
            for layer, both in computed[sample.request.prompt_ids.tobytes()].items():
                for whole, part in zip(self._cache.layers[layer], both, strict=True):
                    whole[row, :, : part.shape[1]] = part
            self.samples[row] = sample

    def next_logits(self) -> Any:
        """Returns the logits of the token behind each row's last one, [rows, V]; rows without a sample hold
        anything."""
        import torch

        ids, positions = [0] * self._height, [0] * self._height
        for row, sample in self.samples.items():
            prompt_ids = sample.request.prompt_ids
            ids[row] = sample.ids[-1] if sample.ids else int(prompt_ids[-1])
            positions[row] = len(prompt_ids) + len(sample.ids) - 1
        self._cache.positions = torch.tensor(positions, device=self._device)
        self._cache.used = _padded(max(positions) + 1)
        mask_BT = torch.arange(self._cache.used, device=self._device) <= self._cache.positions[:, None]
        with torch.no_grad():
            return self._model(
                input_ids=torch.tensor(ids, device=self._device)[:, None],
                position_ids=self._cache.positions[:, None],
                attention_mask=mask_BT[:, None, None],
                past_key_values=self._cache,
                use_cache=True,
            ).logits[:, -1]

    def _prefill(self, prompts: dict[bytes, TokenIds]) -> Iterator[tuple[bytes, dict[int, tuple[Any, Any]]]]:
        """Yields keys and values of each prompt but its last token, by layer: [heads, tokens, dimension]."""
        import torch

        by_length: dict[int, list[bytes]] = {}
        for key, ids in prompts.items():
            by_length.setdefault(_padded(len(ids) - 1), []).append(key)
        for length, keys in sorted(by_length.items()):
            mask_TT = torch.ones((length, length), dtype=torch.bool, device=self._device).tril()
            for chosen in (keys[i : i + PREFILL_ROWS] for i in range(0, len(keys), PREFILL_ROWS)):
                ids_BT = torch.zeros((len(chosen), length), dtype=torch.long)
                for row, key in enumerate(chosen):
                    ids_BT[row, : len(prompts[key]) - 1] = torch.from_numpy(
                        prompts[key][:-1].astype(np.int64)
                    )
                cache = _Cache()
                with torch.no_grad():
                    self._model.base_model(
                        input_ids=ids_BT.to(self._device),
                        position_ids=torch.arange(length, device=self._device).expand(len(chosen), -1),
                        attention_mask=mask_TT.expand(len(chosen), 1, -1, -1),
                        past_key_values=cache,
                        use_cache=True,
                    )
                for row, key in enumerate(chosen):
                    end = len(prompts[key]) - 1
                    layers = cache.layers.items()
                    yield key, {layer: (k[row, :, :end], v[row, :, :end]) for layer, (k, v) in layers}


def _padded(length: int) -> int:
    return -(-max(length, 1) // BLOCK) * BLOCK


def draw(logits_BV: Any, samples: Sequence[_Sample]) -> tuple[list[int], list[float]]:
    """Returns each sample's next token and its log-prob under the distribution that it was drawn from: at the
    sample's temperature, cut to its top-k and of that to its top-p, as vLLM does. At temperature 0, the
    likeliest token and its untempered log-prob."""
    import torch

    sampling = [sample.request.sampling for sample in samples]
    temperatures_B1 = logits_BV.new_tensor([[s.temperature or 1.0] for s in sampling], dtype=torch.float64)
    probs_BV = (logits_BV.double() / temperatures_B1).softmax(-1)
    cut = [row for row, s in enumerate(sampling) if s.top_k > 0 or s.top_p < 1]
    if cut:
        sorted_CV, order_CV = probs_BV[cut].sort(dim=-1, descending=True, stable=True)
        ranks_V = torch.arange(probs_BV.shape[1], device=probs_BV.device)
        most_C1 = ranks_V.new_tensor(
            [[sampling[r].top_k if sampling[r].top_k > 0 else len(ranks_V)] for r in cut]
        )
        sorted_CV = sorted_CV * (ranks_V < most_C1)
        top_p_C1 = sorted_CV.new_tensor([[sampling[row].top_p] for row in cut])
        before_CV = sorted_CV.cumsum(-1) - sorted_CV
        sorted_CV = sorted_CV * (before_CV < top_p_C1 * sorted_CV.sum(-1, keepdim=True))
        left_CV = torch.zeros_like(sorted_CV).scatter(1, order_CV, sorted_CV)
        probs_BV[cut] = left_CV / left_CV.sum(-1, keepdim=True)
    chances_B1 = probs_BV.new_tensor([[sample.chances[len(sample.ids)]] for sample in samples])
    sums_BV = probs_BV.cumsum(-1)
    drawn_B1 = torch.searchsorted(sums_BV, chances_B1 * sums_BV[:, -1:], right=True)
    greedy_B1 = torch.tensor([[s.temperature == 0] for s in sampling], device=probs_BV.device)
    drawn_B1 = torch.where(greedy_B1, probs_BV.argmax(-1, keepdim=True), drawn_B1)
    logprobs_B = probs_BV.gather(-1, drawn_B1).log()[:, 0]
    return drawn_B1[:, 0].tolist(), logprobs_B.tolist()
