"""An engine without a server: each rank samples in its own process, with PyTorch.

The samples being drawn are rows of one batch, which share a cache of keys and values. Samples of the same
prompt share a row until they draw different tokens, so that equal beginnings are computed once. In each step
every sample gets one token. A row without samples is given to the next waiting ones::

    waiting samples ──admit──► rows of the batch ──next_logits──► draw a token for each ──► ended samples
                                     ▲                                     │
                                     └── branch ──── unfinished samples ───┘
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from treetune.architectures import length_rule, probe_rows
from treetune.engine.base import Canary, Chunk, Engine, EngineLaunch, SyncReport, check_request
from treetune.engine.canary import Probe, judge_gap
from treetune.engine.requests import Completion, Deferred, OnResult, Request, SamplingParams, ScoreRequest
from treetune.engine.settings import InProcessSettings
from treetune.exceptions import EngineError
from treetune.vocabulary import Column, TokenIds, token_array

if TYPE_CHECKING:
    from torch import Tensor

FEWEST_ROWS = 8
"""The rows of the smallest batch. A matrix product of one to three rows is computed by other code, with other
last bits. From four rows on, a row's result doesn't depend on their number (measured on a CPU with one
thread)."""
BLOCK_TOKENS = 32
"""Prompts and caches are padded to a multiple of this. So a row is computed in a way that depends only on its
own length, and not on the other rows. This is also the number of tokens in a block of `_PromptBlocks`."""
MOST_PREFILL_ROWS = 64
"""The most prompts of one forward pass."""
MOST_STORED_BYTES = 1 << 29
"""The most bytes of keys and values that are stored for later prompts, 512 MiB: 11,000 tokens of a model with
135 million weights."""
MOST_SCORED_TOKENS = 1 << 14
"""The most tokens of one forward pass over texts that are scored, unless `FEWEST_ROWS` rows have more."""
MOST_LOGITS = 1 << 26
"""The most logits that exist at a time while texts are scored: 256 MB in float32."""


@dataclass(eq=False)
class _Sample:
    """A sample that is being drawn."""

    index: int
    """The index of its request."""
    number: int
    """The number of the sample among those of the request."""
    request: Request
    uniforms: np.ndarray
    """One random number in [0, 1) for each token, by which `draw` chooses the token. The sample's seed
    determines all of these numbers."""
    ids: list[int] = field(default_factory=list)
    """The tokens so far."""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class InProcessEngine(Engine):
    """An engine that samples in this process; see `Engine`."""

    scores = True

    def __init__(self, settings: InProcessSettings, launch: EngineLaunch) -> None:
        self.version = 0
        self.tokens = 0
        self.at_once = settings.rows  # the most samples that are drawn at the same time
        # The largest mean difference between the log-probs of engine and trainer after a sync.
        self._tolerance = settings.tolerance(launch.device)
        self._context_length, self._device = launch.context_length, launch.device
        self._end_ids = frozenset(launch.end_ids)
        self._special_ids = dict(launch.special_ids)
        self._closed = False
        self._probes: list[Probe] = []  # the last canary's samples, with log-probs of engine and trainer
        self._trust_remote_code = launch.trust_remote_code
        self._read(launch.weights)
        # Refuses a model whose log-probs aren't those that this engine computes with its cache.
        refuse_wrong_engine_logprobs(self._model, self._device, self._context_length)

    @override
    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        """Samples all requests in the rows of one batch; see `Engine.generate`.

        A row holds samples of the same prompt that have drawn the same tokens so far, so that these tokens
        are computed once. In each step every sample gets one token. A row whose samples have all ended is
        given to the next waiting samples.
        """
        started, tokens_before = time.monotonic(), self.tokens
        batch = _RowBatch(self._model, self._device, self._prompts)
        call = _GenerateCall(self._refuse_unfit_request, on_result)
        call.add_requests(requests)
        while batch.rows or call.has_waiting:
            if self._closed:
                raise EngineError("the engine was closed while it sampled")
            # Texts are scored before the next sampling step, in few forward passes.
            score_requests, call.waiting_texts = call.waiting_texts, []
            for index, completion in self._score_texts(score_requests, started):
                call.add_completion(index, number=0, completion=completion)
            # After a score, `add_completion` may have added requests that follow from it. If not even these
            # are waiting, there is nothing to compute until the requests of one `Deferred` are known.
            if not (batch.rows or call.waiting_samples or call.waiting_texts):
                call.wait_for_deferred()
            call.add_known_requests()
            free = self.at_once - batch.count_samples()
            # Samples of the same prompt share a row only if they are admitted together. So if not all
            # waiting samples fit, none is admitted until half of the batch has ended: if they were admitted
            # one by one, each would need a separate row.
            if len(call.waiting_samples) > free and 2 * free < self.at_once:
                free = 0
            batch.admit(call.waiting_samples.take(free))
            if not batch.rows:
                continue
            for sample in self._step(batch):
                completion = Completion(
                    np.array(sample.ids),
                    np.array(sample.logprobs) if sample.request.reads_logprobs else None,
                    sample.finish_reason,  # type: ignore[arg-type]
                    self.version,
                    time.monotonic() - started,
                )
                self.tokens += len(sample.ids)
                call.add_completion(sample.index, sample.number, completion)
        seconds = max(time.monotonic() - started, 1e-9)
        self.tokens_per_second = (self.tokens - tokens_before) / seconds
        return call.results  # type: ignore[return-value]

    @override
    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        """Reads the weights in the folder, and compares the log-probs with the trainer's."""
        started = time.monotonic()
        # This engine reads the folder, and not the chunks. The folder is complete when all chunks have been
        # made.
        for _ in chunks or ():
            pass
        self._read(directory)
        self.version = version
        # With a canary, the engine samples after a few prompts, and the trainer scores these samples. Without
        # one, the difference between the log-probs of engine and trainer is unknown.
        if canary is None:
            return SyncReport(time.monotonic() - started, math.nan)
        probes = self._probe(canary)
        # Compares the engine's log-probs with the trainer's. The probes of the previous weights show whether
        # the engine still has those weights.
        gap = judge_gap(probes, self._probes, canary.tolerance or self._tolerance)
        if gap.problem:
            raise EngineError(f"the weights in {directory} were loaded, but {gap.problem}")
        self._probes = probes
        return SyncReport(time.monotonic() - started, gap.largest, gap.mean)

    @override
    def close(self) -> None:
        self._closed = True

    def _read(self, folder: Path) -> None:
        """Loads the model from a folder."""
        import torch
        from transformers import AutoModelForCausalLM

        self._folder = folder
        self._tokenizer: Any = None  # loaded when a stop string is looked for
        self._model = (
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, trust_remote_code=self._trust_remote_code
            )
            .eval()
            .to(self._device)
        )
        self._forget_prompts()
        attach_attention(self._model)

    def _forget_prompts(self) -> None:
        """Drops the stored keys and values of prompts, which earlier weights computed."""
        self._prompts = _PromptBlocks(self._model, self._device)

    def _step(self, batch: _RowBatch) -> list[_Sample]:
        """Draws one more token for every sample of the batch. Returns the samples that end, which leave the
        batch."""
        rows = list(batch.rows)
        samples_by_row = list(batch.rows.values())
        tokens_by_row, logprobs_by_row = draw(batch.next_logits()[rows], samples_by_row)
        ended: list[_Sample] = []
        for row, samples, tokens, logprobs in zip(
            rows, samples_by_row, tokens_by_row, logprobs_by_row, strict=True
        ):
            unfinished: list[_Sample] = []
            for sample, token, logprob in zip(samples, tokens, logprobs, strict=True):
                sample.ids.append(token)
                sample.logprobs.append(logprob)
                # Stop strings that are special tokens become `stop_ids`, since texts lack special tokens.
                sampling = sample.request.sampling.with_special_stops(self._special_ids)
                if token in self._end_ids or token in sampling.stop_ids or self._has_stop(sample):
                    sample.finish_reason = "stop"
                elif len(sample.ids) == sampling.max_tokens:
                    sample.finish_reason = "length"
                if sample.finish_reason:
                    ended.append(sample)
                else:
                    unfinished.append(sample)
            if unfinished:
                batch.rows[row] = unfinished
            else:
                del batch.rows[row]
        batch.branch()  # samples of a row that drew different tokens now need a row each
        return ended

    def _refuse_unfit_request(self, index: int, request: Request) -> None:
        """Raises ValueError for a request that doesn't fit into the context, or that scores a token which the
        model doesn't have."""
        check_request(index, request, self._context_length)
        if not isinstance(request, ScoreRequest):
            return
        vocabulary = self._model.get_input_embeddings().num_embeddings
        largest = int(request.all_ids.max())
        if largest >= vocabulary:
            raise ValueError(
                f"request {index} scores the token {largest}, and the model has the tokens 0 to"
                f" {vocabulary - 1}: encode the text with the model's tokenizer"
            )

    def _score_texts(
        self, requests: Sequence[tuple[int, ScoreRequest]], started: float
    ) -> Iterator[tuple[int, Completion]]:
        """Yields the completion of each request with its index. Texts of about the same length share a
        forward pass; prompts that begin alike are computed again for each text."""
        requests_by_length: dict[int, list[tuple[int, ScoreRequest]]] = {}
        for index, request in requests:
            padded_length = _round_up_to_blocks(len(request.all_ids))
            requests_by_length.setdefault(padded_length, []).append((index, request))
        for length, requests_of_length in sorted(requests_by_length.items()):
            fitting_rows = MOST_SCORED_TOKENS // length
            # At least `FEWEST_ROWS`, since smaller batches are filled up to that many rows.
            rows_at_once = min(max(fitting_rows, FEWEST_ROWS), MOST_PREFILL_ROWS)
            for first in range(0, len(requests_of_length), rows_at_once):
                batch = requests_of_length[first : first + rows_at_once]
                logprobs_of_batch = self._text_logprobs([request for _, request in batch], length)
                for (index, request), logprobs_T in zip(batch, logprobs_of_batch, strict=True):
                    seconds = time.monotonic() - started
                    # Given tokens always have the finish reason "length".
                    yield index, Completion(request.text_ids, logprobs_T, "length", self.version, seconds)

    def _text_logprobs(self, requests: Sequence[ScoreRequest], length: int) -> list[Column]:
        """Returns the log-probs of each request's text, float32.

        Args:
            length: The tokens of a row; shorter rows are padded at their end, where no token sees the
                padding.
        """
        import torch

        from treetune.logits import backbone_of

        # At least `FEWEST_ROWS` rows, of which some may be unused. With fewer rows, a row's last bits would
        # depend on their number.
        ids_BT = torch.zeros((max(len(requests), FEWEST_ROWS), length), dtype=torch.long)
        for row, request in enumerate(requests):
            ids = request.all_ids
            ids_BT[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        mask_TT = torch.ones((length, length), dtype=torch.bool, device=self._device).tril()
        with torch.no_grad():
            # The head isn't run here, since the logits of all rows may need far more memory than the model.
            hidden_BTD = backbone_of(self._model)(
                input_ids=ids_BT.to(self._device),
                position_ids=_make_positions(self._model, 0, length).expand(len(ids_BT), -1),
                attention_mask=mask_TT.expand(len(ids_BT), 1, -1, -1),
                use_cache=False,
            ).last_hidden_state
        logprobs_of_texts = []
        for row, request in enumerate(requests):
            start = len(request.prompt_ids)
            end = start + len(request.text_ids)
            # The hidden state at a position predicts the next token.
            hidden_TD = hidden_BTD[row, start - 1 : end - 1]
            text_T = ids_BT[row, start:end].to(self._device)
            logprobs_of_texts.append(self._next_token_logprobs(hidden_TD, text_T))
        return logprobs_of_texts

    def _next_token_logprobs(self, hidden_TD: Tensor, ids_T: Tensor) -> Column:
        """Returns the log-prob of each token under the distribution that its hidden state predicts, float32.
        Computes at most `MOST_LOGITS` logits at a time."""
        import torch

        from treetune.logits import logits_of

        vocabulary = self._model.get_input_embeddings().num_embeddings
        positions_at_once = max(1, MOST_LOGITS // vocabulary)
        logprobs_of_chunks = []
        with torch.no_grad():
            chunks = zip(hidden_TD.split(positions_at_once), ids_T.split(positions_at_once), strict=True)
            for hidden_CD, ids_C in chunks:
                logprobs_CV = logits_of(self._model, hidden_CD).float().log_softmax(-1)
                logprobs_of_chunks.append(logprobs_CV.gather(-1, ids_C[:, None])[:, 0])
        return torch.cat(logprobs_of_chunks).cpu().numpy()

    def _has_stop(self, sample: _Sample) -> bool:
        """Returns whether the text of the sample contains a stop string."""
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
        """Samples after the canary's few prompts, and has the trainer score the samples. A probe is such a
        sample with the engine's log-probs and the trainer's, which show whether the weights are the same."""
        requests = canary.requests(self._context_length)
        # The canary's tokens don't count in `self.tokens`, since they only check the weights.
        tokens_of_run = self.tokens
        sampled = [completions[0] for completions in self.generate(requests)]
        self.tokens = tokens_of_run
        pairs: list[tuple[TokenIds, TokenIds]] = [
            (request.prompt_ids, sample.token_ids) for request, sample in zip(requests, sampled, strict=True)
        ]
        scores = canary.score(pairs)
        probes = []
        for (prompt_ids, ids), sample, trainer_logprobs in zip(pairs, sampled, scores, strict=True):
            assert sample.logprobs is not None, "a canary's requests read log-probs"
            probes.append(Probe(prompt_ids, ids, sample.logprobs.tolist(), trainer_logprobs))
        return probes


CACHED_ATTENTION = "treetune_cached"
"""The name of this engine's attention, by which transformers finds it."""
LONGEST_PROBE = 600
"""The most tokens of a row with which the engine is compared with its model at the start."""
PROBE_STEPS = 4
"""The tokens of each row that are computed with the cache."""
PROBE_LIMIT = 1e-3
"""The largest difference between log-probs, in nats, that rounding in float32 explains."""


def sliding_window_of(model: Any) -> int | None:
    """Returns the width in tokens of the model's sliding window; None if no layer has a window."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)  # None: all layers have the window
    a_layer_has_it = layer_types is None or "sliding_attention" in layer_types
    return window if isinstance(window, int) and a_layer_has_it else None


def attach_attention(model: Any) -> None:
    """Has the model use this engine's attention, `cached_attention`, in place of PyTorch's.

    Raises:
        ValueError: The model can't use PyTorch's attention, and has sliding windows. A model without windows
            that can't use PyTorch's attention keeps the attention that it has.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(CACHED_ATTENTION, cached_attention)
        # Without this registration, transformers would drop the engine's masks.
        AttentionMaskInterface.register(CACHED_ATTENTION, sdpa_mask)
        model.set_attn_implementation(CACHED_ATTENTION)
    elif sliding_window_of(model) is not None:
        # The engine's masks show a token all tokens before it, so the attention itself has to apply the
        # window, as `cached_attention` does.
        raise ValueError(
            f"the engine in_process doesn't support {type(model).__name__}, which has sliding windows and"
            " can't use PyTorch's scaled_dot_product_attention: set engines.policy to the type 'vllm'"
        )


def cached_attention(
    module: Any,
    query_BHTD: Any,
    key_BGKD: Any,
    value_BGKD: Any,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> Any:
    """Computes attention within the layer's window, [B, T, H, D]; see transformers' ``AttentionInterface``.

    The second value, for which transformers has the attention's weights, is None.

    H query heads share G heads of keys and values.

    Args:
        attention_mask: Whether each of the T new tokens sees each of the K tokens in the cache,
            [B, 1, T, K]. A token sees itself and all tokens before it.
        sliding_window: The number of tokens that a token sees in this layer; None: all tokens before it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if sliding_window is not None and attention_mask is not None:
        # The engine's masks are the same for all layers, and each layer passes its window.
        attention_mask = _narrow_to_window(attention_mask, sliding_window)
    # Two kinds of calls are left to transformers: calls without a mask, which compute whole rows without a
    # cache, and calls with position biases. The biases differ from head to head, so the heads can't be put
    # together.
    if attention_mask is None or settings.get("position_bias") is not None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query_BHTD, key_BGKD, value_BGKD, attention_mask, scaling=scaling, **settings)
    return _attend_by_shared_heads(query_BHTD, key_BGKD, value_BGKD, attention_mask, scaling), None


def _narrow_to_window(mask_B1TK: Any, window: int) -> Any:
    """Returns the mask without the tokens that lie before each token's window.

    Example: with the window 2, the row ``1 1 1 0`` of the third token becomes ``0 1 1 0``.
    """
    import torch

    # A token sees itself and all tokens before it. Their number gives the token's position.
    positions_B1T1 = mask_B1TK.sum(-1, keepdim=True) - 1
    index_K = torch.arange(mask_B1TK.shape[-1], device=mask_B1TK.device)
    return mask_B1TK & (index_K > positions_B1T1 - window)


def _attend_by_shared_heads(
    query_BHTD: Any, key_BGKD: Any, value_BGKD: Any, mask_B1TK: Any, scaling: float | None
) -> Any:
    """Returns the attention of each token and query head, [B, T, H, D]. Keys and values aren't copied.

    transformers copies keys and values for each query head, which took a third of the time of a sampling
    step. Here the R = H / G query heads that share a head are put one after the other, as if they were
    Q = R·T tokens of one query head.
    """
    import torch

    rows, heads, tokens, _ = query_BHTD.shape
    shared_heads, seen_tokens = key_BGKD.shape[1], key_BGKD.shape[2]
    heads_of_each = heads // shared_heads  # R
    query_BGQD = query_BHTD.reshape(rows, shared_heads, heads_of_each * tokens, -1)
    # All R query heads of a token have the token's mask.
    mask_B1RTK = mask_B1TK[:, :, None].expand(rows, 1, heads_of_each, tokens, seen_tokens)
    mask_B1QK = mask_B1RTK.reshape(rows, 1, heads_of_each * tokens, seen_tokens)
    results_BGQD = torch.nn.functional.scaled_dot_product_attention(
        query_BGQD, key_BGKD, value_BGKD, attn_mask=mask_B1QK, scale=scaling
    )
    return results_BGQD.reshape(rows, heads, tokens, -1).transpose(1, 2).contiguous()


def refuse_wrong_engine_logprobs(model: Any, device: str, context_length: int) -> None:
    """Compares this engine's log-probs, computed with its cache and its masks, with the model's own.

    The engine and the model compute two rows of tokens, of different lengths. The longer row is longer than
    the model's sliding window, unless the window is wider than `LONGEST_PROBE` or the context.

    Raises:
        ValueError: The log-probs differ. Recurrent states and convolutions, for example, are not in a cache
            of keys and values.
    """
    name = type(model).__name__
    remedy = "set engines.policy to the type 'vllm', or train another architecture"
    rule = length_rule(model.config.to_dict())
    if rule is not None and context_length > rule.limit:
        raise ValueError(
            f"{name} has {rule.kind}, which computes all samples of a batch differently if one of them has"
            f" more than {rule.limit} tokens: set context_length to {rule.limit} or less"
        )
    # A few more tokens than a block and the window have, so that tokens after the ends of both are compared.
    longest_part = max(BLOCK_TOKENS, sliding_window_of(model) or 0)
    length = min(longest_part + 8, LONGEST_PROBE, context_length)
    # The shorter row has half as many tokens: a prompt of one token at least, and then the steps that are
    # compared.
    if length // 2 <= PROBE_STEPS:
        return  # the context is too short for the comparison
    try:
        gaps = _gaps_to_model(model, device, probe_rows(model.config, (length, length // 2)))
    # Models that expect another cache than this engine's raise any of these errors.
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"the engine in_process doesn't support the cache of {name}"
            f" ({type(error).__name__}: {error}): {remedy}"
        ) from error
    if not all(gap <= PROBE_LIMIT for gap in gaps):  # also if one is NaN
        raise ValueError(
            f"the log-probs of the engine in_process differ from those of {name} by up to {max(gaps):.2g}."
            f" The model has layers that need more than a cache of keys and values: {remedy}"
        )


def _gaps_to_model(model: Any, device: str, rows: Sequence[Sequence[int]]) -> list[float]:
    """Returns the largest difference between log-probs of this engine and of the model, over the vocabulary,
    for each of the last `PROBE_STEPS` tokens of each row."""
    import torch

    # The model's log-probs, from one pass over the whole row without a cache.
    model_logprobs_TV = []
    for row in rows:
        with torch.no_grad():
            logits_1TV = model(input_ids=torch.tensor([row], device=device), use_cache=False).logits
        model_logprobs_TV.append(logits_1TV[0].float().log_softmax(-1))

    # The engine's log-probs: the last tokens of each row are computed one by one.
    samples = []
    for number, row in enumerate(rows):
        prompt_ids = token_array(row[:-PROBE_STEPS])
        request = Request(prompt_ids, seed=0, n=1, sampling=SamplingParams(max_tokens=PROBE_STEPS))
        # The zeros, in place of random numbers, are never used: the loop below appends the row's tokens.
        uniforms = np.zeros(PROBE_STEPS)
        samples.append(_Sample(index=number, number=0, request=request, uniforms=uniforms))
    batch = _RowBatch(model, device, _PromptBlocks(model, device))
    batch.admit(samples)
    gaps = []
    for step in range(PROBE_STEPS):
        engine_logprobs_BV = batch.next_logits().float().log_softmax(-1)
        for batch_row, [sample] in batch.rows.items():
            token_ids = rows[sample.index]
            position = len(token_ids) - PROBE_STEPS + step
            # The model's distribution of a token is computed at the position before it.
            model_logprobs_V = model_logprobs_TV[sample.index][position - 1]
            gaps.append(float((engine_logprobs_BV[batch_row] - model_logprobs_V).abs().max()))
            sample.ids.append(token_ids[position])
    return gaps


_Layers = dict[int, tuple[Any, Any]]
"""Keys and values by layer, such as ``{0: (keys, values), 1: (keys, values)}``."""


class _Cache:
    """The keys and values of each layer, with the interface that transformers' attention uses.

    The tensors have the shape [rows, heads, tokens, dimension].
    """

    is_compileable = False

    def __init__(self) -> None:
        self.layers: _Layers = {}
        self.positions: Any = None
        """The position of each row's new token: a step computes one token of each row."""
        self.used_tokens = 0
        """The tokens of the longest row, rounded up to a multiple of `BLOCK_TOKENS`."""

    def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Stores new keys and values of a layer, and returns all keys and values that its attention reads."""
        # A step computes one token of each row. The keys and values of row r's token, [rows, heads, 1,
        # dimension] in `new`, belong to the position `self.positions[r]`.
        rows = range(len(self.positions))
        for cached, new in zip(self.layers[layer], (keys, values), strict=True):
            cached[rows, :, self.positions] = new[:, :, 0]
        cached_keys, cached_values = self.layers[layer]
        return cached_keys[:, :, : self.used_tokens], cached_values[:, :, : self.used_tokens]


class _BlockCache:
    """The keys and values that a pass over one block of prompts reads and makes; see `_Cache`."""

    is_compileable = False

    def __init__(self, earlier: _Layers) -> None:
        """Makes the cache of a pass.

        Args:
            earlier: The keys and values of the tokens before the block; empty for the first block.
        """
        self._earlier = earlier
        self.new: _Layers = {}
        """The keys and values of the block's own tokens."""

    def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Stores new keys and values of a layer, and returns all keys and values that its attention reads."""
        import torch

        self.new[layer] = keys, values
        if not self._earlier:
            return keys, values
        earlier_keys, earlier_values = self._earlier[layer]
        return torch.cat([earlier_keys, keys], dim=2), torch.cat([earlier_values, values], dim=2)


def _group_by_prefix(tokens_of_prompt: Mapping[bytes, TokenIds], start: int) -> dict[bytes, list[bytes]]:
    """Returns the prompts that have a block from `start` on, grouped by their tokens up to the block's end.

    The key of a group is the bytes of these tokens. The prompts of a group share the block. A prompt without
    tokens has an empty first block.
    """
    prompts_of_prefix: dict[bytes, list[bytes]] = {}
    for prompt, ids in tokens_of_prompt.items():
        has_block = start < max(len(ids), 1)
        if has_block:
            prefix = ids[: start + BLOCK_TOKENS].tobytes()
            prompts_of_prefix.setdefault(prefix, []).append(prompt)
    return prompts_of_prefix


class _PromptBlocks:
    """Computes keys and values of prompts block by block, and stores them for prompts that begin alike, such
    as those of an answer's continuations.

    The keys and values of a block of 32 tokens depend on these tokens and on all earlier ones::

        prompt             block 0      block 1       block 2
        "… What is 7+8?"   tokens 0–31  tokens 32–63  tokens 64–70
        "… What is 7+2?"   the same     the same      others

    Each block is computed in a separate pass of the same shape, whether earlier blocks were stored or have
    just been computed. So the stored blocks change the speed, and no bit of a result.
    """

    def __init__(self, model: Any, device: str) -> None:
        self._model, self._device = model, device
        self._stored: dict[bytes, _Layers] = {}
        """Each block's keys and values by layer, [heads, tokens, dimension]. The key of a block is the bytes
        of all tokens up to its end. The block that was used last comes last."""
        self._stored_bytes = 0

    def layers_of(self, prompts: Mapping[bytes, TokenIds]) -> dict[bytes, _Layers]:
        """Returns the keys and values by layer, [heads, tokens, dimension], of each prompt's tokens. The last
        token is left out, since the next sampling step computes it.

        Args:
            prompts: The prompts, by their bytes, so that equal ones are computed once.
        """
        tokens_of_prompt = {prompt: ids[:-1] for prompt, ids in prompts.items()}
        blocks_of_prompt: dict[bytes, list[_Layers]] = {prompt: [] for prompt in prompts}
        longest = max((len(ids) for ids in tokens_of_prompt.values()), default=0)
        # A prompt of one token has an empty block, from which `_RowBatch` takes the shape of its cache.
        for start in range(0, max(longest, 1), BLOCK_TOKENS):
            prompts_of_prefix = _group_by_prefix(tokens_of_prompt, start)
            missing = [prefix for prefix in prompts_of_prefix if prefix not in self._stored]
            for first in range(0, len(missing), MOST_PREFILL_ROWS):
                prefixes = missing[first : first + MOST_PREFILL_ROWS]
                # All prompts of a prefix have the same earlier blocks, so any one of these prompts will do.
                examples = [prompts_of_prefix[prefix][0] for prefix in prefixes]
                computed = self._compute(
                    [tokens_of_prompt[prompt][start : start + BLOCK_TOKENS] for prompt in examples],
                    [blocks_of_prompt[prompt] for prompt in examples],
                )
                for prefix, block in zip(prefixes, computed, strict=True):
                    self._store(prefix, block)
            for prefix, prompts_of_block in prompts_of_prefix.items():
                block = self._stored.pop(prefix)
                self._stored[prefix] = block  # now it is the one that was used last
                for prompt in prompts_of_block:
                    blocks_of_prompt[prompt].append(block)
        self._drop_oldest_blocks()
        layers_of_prompts = {}
        for prompt, blocks in blocks_of_prompt.items():
            layers_of_prompts[prompt] = {layer: _join_blocks(blocks, layer) for layer in blocks[0]}
        return layers_of_prompts

    def _compute(
        self, tokens_of_rows: Sequence[TokenIds], earlier_of_rows: Sequence[Sequence[_Layers]]
    ) -> list[_Layers]:
        """Computes one block of each row, and returns the keys and values of each block by layer.

        Args:
            tokens_of_rows: The tokens of each row's block, at most `BLOCK_TOKENS`. Fewer are padded at the
                end, where no token sees the padding.
            earlier_of_rows: For each row, the keys and values of the blocks before its block. All rows have
                equally many such blocks.
        """
        import torch

        start = len(earlier_of_rows[0]) * BLOCK_TOKENS
        ids_BT = torch.zeros((len(tokens_of_rows), BLOCK_TOKENS), dtype=torch.long)
        for row, ids in enumerate(tokens_of_rows):
            ids_BT[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        earlier: _Layers = {}
        # Every block has the same layers, so the first block of the first row shows which there are.
        layers = list(earlier_of_rows[0][0]) if start else []
        for layer in layers:
            keys_of_rows = []
            values_of_rows = []
            for blocks in earlier_of_rows:
                keys, values = _join_blocks(blocks, layer)
                keys_of_rows.append(keys)
                values_of_rows.append(values)
            earlier[layer] = torch.stack(keys_of_rows), torch.stack(values_of_rows)
        cache = _BlockCache(earlier)
        # Token t of the block sees all earlier blocks, the block's tokens before it, and itself. K counts the
        # tokens of the earlier blocks and of this one.
        end = start + BLOCK_TOKENS
        mask_TK = torch.ones((BLOCK_TOKENS, end), dtype=torch.bool, device=self._device).tril(start)
        with torch.no_grad():
            self._model.base_model(
                input_ids=ids_BT.to(self._device),
                position_ids=_make_positions(self._model, start, end).expand(len(ids_BT), -1),
                attention_mask=mask_TK.expand(len(ids_BT), 1, -1, -1),
                past_key_values=cache,
                use_cache=True,
            )
        blocks = []
        for row, ids in enumerate(tokens_of_rows):
            block = {}
            for layer, (keys, values) in cache.new.items():
                # Copied, so that no block keeps the tensors of the whole pass in memory.
                block[layer] = keys[row, :, : len(ids)].clone(), values[row, :, : len(ids)].clone()
            blocks.append(block)
        return blocks

    def _store(self, prefix: bytes, block: _Layers) -> None:
        self._stored[prefix] = block
        self._stored_bytes += _bytes_of(block)

    def _drop_oldest_blocks(self) -> None:
        """Removes the blocks that were not used for the longest time, until the others fit."""
        while self._stored_bytes > MOST_STORED_BYTES:
            oldest = next(iter(self._stored))
            self._stored_bytes -= _bytes_of(self._stored.pop(oldest))


def _join_blocks(blocks: Sequence[_Layers], layer: int) -> tuple[Any, Any]:
    """Returns a layer's keys and values, each joined over the blocks, which follow each other in a prompt."""
    import torch

    keys = torch.cat([block[layer][0] for block in blocks], dim=1)
    values = torch.cat([block[layer][1] for block in blocks], dim=1)
    return keys, values


def _bytes_of(block: _Layers) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in block.values())


class _GenerateCall:
    """The requests of one call of `generate`: those that wait, and the results so far."""

    def __init__(
        self, refuse_unfit_request: Callable[[int, Request], None], on_result: OnResult | None
    ) -> None:
        self._refuse_unfit_request, self._on_result = refuse_unfit_request, on_result
        self.results: list[list[Completion | None]] = []
        """The completions of each request, by its index; None for those that aren't there yet."""
        self.waiting_samples = _WaitingSamples()
        self.waiting_texts: list[tuple[int, ScoreRequest]] = []
        """The texts to score, with the indices of their requests."""
        self._deferred: list[Deferred] = []
        """Promises of further requests: each `Deferred` gets its requests while others are answered."""

    @property
    def has_waiting(self) -> bool:
        """Whether there are samples that have no row yet, texts to score, or requests that aren't known
        yet."""
        return bool(self.waiting_samples or self.waiting_texts or self._deferred)

    def add_requests(self, requests: Sequence[Request | Deferred]) -> None:
        """Gives requests their indices, and puts their samples before waiting ones of the same priority.

        New requests often continue an answer. By coming first, they finish this answer before others begin.
        """
        new_samples: dict[int, list[_Sample]] = {}  # by priority
        for request in requests:
            if isinstance(request, Deferred):  # requests that aren't known yet
                self._deferred.append(request)
                continue
            index = len(self.results)
            self._refuse_unfit_request(index, request)
            if isinstance(request, ScoreRequest):
                self.waiting_texts.append((index, request))
                self.results.append([None])
                continue
            for number in range(request.n):
                # All random numbers of a sample are drawn here from its own seed, so that it depends on no
                # other sample.
                generator = np.random.default_rng(request.seed + number)
                uniforms = generator.random(request.sampling.max_tokens)
                sample = _Sample(index, number, request, uniforms)
                new_samples.setdefault(request.priority, []).append(sample)
            self.results.append([None] * request.n)
        for priority, samples in new_samples.items():
            self.waiting_samples.add_in_front(priority, samples)

    def add_completion(self, index: int, number: int, completion: Completion) -> None:
        """Stores a completion of a request. If it is the request's last one, adds the requests that
        `on_result` returns for the request's completions."""
        completions = self.results[index]
        completions[number] = completion
        if None not in completions and self._on_result is not None:
            self.add_requests(self._on_result(index, completions) or ())  # type: ignore[arg-type]

    def wait_for_deferred(self) -> None:
        """Returns when the requests of a `Deferred` are known; at once if there is none."""
        if self._deferred:
            wait([deferred.ready for deferred in self._deferred], return_when=FIRST_COMPLETED)

    def add_known_requests(self) -> None:
        """Adds the requests of each `Deferred` whose requests are known by now."""
        ready = [deferred for deferred in self._deferred if deferred.ready.done()]
        for deferred in ready:
            self._deferred.remove(deferred)
            self.add_requests(deferred.requests())


class _WaitingSamples:
    """The samples that have no row yet, by priority: the lowest number comes first."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[_Sample]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def add_in_front(self, priority: int, samples: Sequence[_Sample]) -> None:
        """Adds samples before the waiting ones of the same priority, so that answers which have begun are
        finished first."""
        self._queues.setdefault(priority, deque()).extendleft(reversed(samples))

    def take(self, count: int) -> list[_Sample]:
        """Removes the first samples, `count` at most, and returns them."""
        taken: list[_Sample] = []
        for priority in sorted(self._queues):
            queue = self._queues[priority]
            while queue and len(taken) < count:
                taken.append(queue.popleft())
        return taken


class _RowBatch:
    """The samples that are being drawn, in rows, and the cache of all rows.

    The samples of a row have the same prompt, the same tokens so far, and the same distribution of the next
    token. Example: three samples of one prompt begin in one row, ``{0: [a, b, c]}``. If `b` draws another
    token than the other two, it moves to another row, ``{0: [a, c], 1: [b]}``.
    """

    def __init__(self, model: Any, device: str, prompts: _PromptBlocks) -> None:
        self.rows: dict[int, list[_Sample]] = {}
        """The samples of each row; free rows are left out."""
        self._model, self._device, self._prompts = model, device, prompts
        self._cache = _Cache()
        self._height = self._width = 0
        """The numbers of rows and of tokens for which the cache has room."""

    def count_samples(self) -> int:
        return sum(len(samples) for samples in self.rows.values())

    def admit(self, samples: Sequence[_Sample]) -> None:
        """Puts samples into free rows, and computes the keys and values of their prompts.

        The keys and values of a prompt's last token are left to the next step, which also needs the token's
        logits. If the cache is too small, it first gets room for more rows or tokens. If half of its rows are
        free, it gets fewer rows.
        """
        samples_of_new_rows = _group_by_distribution(samples)
        row_count = len(self.rows) + len(samples_of_new_rows)
        if not row_count:
            return
        # A batch never has fewer than `FEWEST_ROWS` rows.
        is_half_empty = 2 * max(row_count, FEWEST_ROWS) <= self._height
        if not samples and not is_half_empty:  # without samples, the cache can only get fewer rows
            return
        prompts = {sample.request.prompt_ids.tobytes(): sample.request.prompt_ids for sample in samples}
        computed = self._prompts.layers_of(prompts)
        # The width has room for the longest sample, with as many tokens as its request allows.
        all_samples = [*samples]
        for samples_of_row in self.rows.values():
            all_samples += samples_of_row
        lengths = [len(s.request.prompt_ids) + s.request.sampling.max_tokens for s in all_samples]
        width = max(_round_up_to_blocks(length) for length in lengths)
        is_too_small = row_count > self._height or width > self._width
        if is_too_small or is_half_empty:
            # `_resize` takes the number of heads and the dimension of each layer from these examples: a new
            # prompt's keys and values or, without a new prompt, those of the cache.
            examples = next(iter(computed.values()), self._cache.layers)
            self._resize(max(FEWEST_ROWS, row_count), width, examples)
        # Not strict: there may be more free rows than new ones.
        for row, samples_of_row in zip(self._free_rows(), samples_of_new_rows, strict=False):
            layers_of_prompt = computed[samples_of_row[0].request.prompt_ids.tobytes()]
            for layer, keys_and_values in layers_of_prompt.items():
                for cached, new in zip(self._cache.layers[layer], keys_and_values, strict=True):
                    cached[row, :, : new.shape[1]] = new
            self.rows[row] = samples_of_row

    def branch(self) -> None:
        """Moves samples to new rows if they drew another token than the first sample of their row.

        The keys and values of the tokens so far are copied into the new rows. Those of the newly drawn tokens
        are left to the next step.
        """
        row_count = sum(len(_group_by_last_token(samples)) for samples in self.rows.values())
        if row_count > self._height:
            # Half as many rows again as are needed, so that the cache isn't moved in every step.
            self._resize(row_count + row_count // 2, self._width, self._cache.layers)
        free_rows = iter(self._free_rows())
        old_rows, new_rows = [], []
        for row, samples in list(self.rows.items()):
            staying, *leaving = _group_by_last_token(samples)
            self.rows[row] = staying
            for samples_with_same_token in leaving:
                new_row = next(free_rows)
                self.rows[new_row] = samples_with_same_token
                old_rows.append(row)
                new_rows.append(new_row)
        if not new_rows:
            return
        for keys_and_values in self._cache.layers.values():
            for cached in keys_and_values:
                cached[new_rows] = cached[old_rows]

    def _free_rows(self) -> list[int]:
        return [row for row in range(self._height) if row not in self.rows]

    def _resize(self, height: int, width: int, layers: dict[int, tuple[Any, Any]]) -> None:
        """Makes a cache of `height` rows and `width` tokens, and moves the present rows to its first ones.

        Args:
            layers: A tensor of keys and one of values for each layer, [heads, tokens, dimension] or [rows,
                heads, tokens, dimension]. The new tensors get their number of heads, dimension, dtype and
                device.
        """
        rows = list(self.rows)
        for layer, examples in layers.items():
            old = self._cache.layers.get(layer)
            resized = []
            for index, example in enumerate(examples):
                heads, dimension = example.shape[-3], example.shape[-1]
                new = example.new_zeros((height, heads, width, dimension))
                if old is not None and rows:
                    common_width = min(width, old[index].shape[2])
                    new[: len(rows), :, :common_width] = old[index][rows, :, :common_width]
                resized.append(new)
            self._cache.layers[layer] = resized[0], resized[1]
        self._height, self._width = height, width
        # The k-th present row is now row k of the cache.
        self.rows = dict(enumerate(self.rows.values()))

    def next_logits(self) -> Any:
        """Returns the logits of each row's next token, [rows, V], and stores the keys and values of the row's
        last token. The logits of rows without a sample are arbitrary."""
        import torch

        ids, positions = [0] * self._height, [0] * self._height
        # The samples of a row have the same tokens, since a sample that draws another one moves to another
        # row (`branch`). So the first sample stands for all.
        for row, [sample, *_] in self.rows.items():
            prompt_ids = sample.request.prompt_ids
            ids[row] = sample.ids[-1] if sample.ids else int(prompt_ids[-1])
            positions[row] = len(prompt_ids) + len(sample.ids) - 1
        self._cache.positions = torch.tensor(positions, device=self._device)
        self._cache.used_tokens = _round_up_to_blocks(max(positions) + 1)
        # K counts the tokens of the cache that attention reads. A row's token sees itself and the row's
        # tokens before it.
        mask_BK = torch.arange(self._cache.used_tokens, device=self._device) <= self._cache.positions[:, None]
        with torch.no_grad():
            return self._model(
                input_ids=torch.tensor(ids, device=self._device)[:, None],
                position_ids=self._cache.positions[:, None],
                attention_mask=mask_BK[:, None, None],
                past_key_values=self._cache,
                use_cache=True,
            ).logits[:, -1]


def _group_by_distribution(samples: Sequence[_Sample]) -> list[list[_Sample]]:
    """Returns groups of samples. The samples of a group have the same prompt and the same distribution of the
    next token."""
    groups: dict[object, list[_Sample]] = {}
    for sample in samples:
        sampling = sample.request.sampling
        distribution = sampling.temperature, sampling.top_k, sampling.top_p
        groups.setdefault((sample.request.prompt_ids.tobytes(), distribution), []).append(sample)
    return list(groups.values())


def _group_by_last_token(samples: Sequence[_Sample]) -> list[list[_Sample]]:
    """Returns groups of samples with the same last token. The first group has the first sample."""
    groups: dict[int, list[_Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.ids[-1], []).append(sample)
    return list(groups.values())


def _make_positions(model: Any, start: int, end: int) -> Any:
    """Returns the positions from `start` to `end`, without `end`, on the model's device.

    Padding can lie after the last position that a model with learned positions has. No token sees the
    padding, so it gets the last position.
    """
    import torch

    positions = torch.arange(start, end, device=model.device)
    most_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if most_positions is None else positions.clamp(max=most_positions - 1)


def _round_up_to_blocks(length: int) -> int:
    """Returns the length rounded up to a multiple of `BLOCK_TOKENS`, and at least `BLOCK_TOKENS`."""
    return -(-max(length, 1) // BLOCK_TOKENS) * BLOCK_TOKENS


def draw(
    logits_BV: Any, samples_by_row: Sequence[Sequence[_Sample]]
) -> tuple[list[list[int]], list[list[float]]]:
    """Draws each sample's next token. The samples of a row have the same distribution.

    The distribution is that of vLLM: the model's distribution at the sample's temperature, cut to its top-k
    tokens, and these cut to its top-p. At temperature 0, the most likely token is taken.

    Returns:
        The tokens of each row's samples, and their log-probs under these distributions. For a sample at
        temperature 0, the log-prob is the one at temperature 1.
    """
    import torch

    sampling = [samples[0].request.sampling for samples in samples_by_row]
    # At temperature 0, the log-probs are those at temperature 1.
    temperatures_B1 = logits_BV.new_tensor([[s.temperature or 1.0] for s in sampling], dtype=torch.float64)
    probs_BV = (logits_BV.double() / temperatures_B1).softmax(-1)
    cut_rows = [row for row, s in enumerate(sampling) if s.top_k > 0 or s.top_p < 1]
    if cut_rows:
        probs_BV[cut_rows] = _cut_to_top(probs_BV[cut_rows], [sampling[row] for row in cut_rows])

    # Inverse sampling: the first token at which the cumulative probability exceeds the uniform number. The
    # uniform number is scaled by the sum of the probabilities, since rounding makes the sum differ from 1.
    # S counts the samples of a row. Rows with fewer samples than others are padded with zeros.
    uniforms = np.zeros((len(samples_by_row), max(len(samples) for samples in samples_by_row)))
    for row, samples in enumerate(samples_by_row):
        uniforms[row, : len(samples)] = [sample.uniforms[len(sample.ids)] for sample in samples]
    uniforms_BS = torch.from_numpy(uniforms).to(probs_BV.device)
    sums_BV = probs_BV.cumsum(-1)
    drawn_BS = torch.searchsorted(sums_BV, uniforms_BS * sums_BV[:, -1:], right=True)

    greedy_B1 = torch.tensor([[s.temperature == 0] for s in sampling], device=probs_BV.device)
    drawn_BS = torch.where(greedy_B1, probs_BV.argmax(-1, keepdim=True), drawn_BS)
    logprobs_BS = probs_BV.gather(-1, drawn_BS).log()
    tokens_by_row, logprobs_by_row = [], []
    for samples, tokens_S, logprobs_S in zip(samples_by_row, drawn_BS, logprobs_BS, strict=True):
        tokens_by_row.append(tokens_S[: len(samples)].tolist())
        logprobs_by_row.append(logprobs_S[: len(samples)].tolist())
    return tokens_by_row, logprobs_by_row


def _cut_to_top(probs_BV: Any, sampling: Sequence[SamplingParams]) -> Any:
    """Cuts the distribution of each row to its top-k tokens and these to its top-p, and normalises it."""
    import torch

    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    top_k = [s.top_k if s.top_k > 0 else len(ranks_V) for s in sampling]
    top_k_B1 = ranks_V.new_tensor(top_k)[:, None]
    sorted_BV = sorted_BV * (ranks_V < top_k_B1)
    # A token stays if those before it have less than top-p of the remaining probability.
    top_p_B1 = sorted_BV.new_tensor([[s.top_p] for s in sampling])
    mass_before_BV = sorted_BV.cumsum(-1) - sorted_BV
    sorted_BV = sorted_BV * (mass_before_BV < top_p_B1 * sorted_BV.sum(-1, keepdim=True))
    cut_BV = torch.zeros_like(sorted_BV).scatter(1, order_BV, sorted_BV)
    return cut_BV / cut_BV.sum(-1, keepdim=True)
