"""vLLM without a server: ``LLM.generate`` as configured by the server's command line."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.child import Turns


def serve(settings: dict[str, Any], turns: Turns) -> None:
    """`settings`: ``arguments`` of the server, and whether the engine's ``core`` is a process of its own, as
    the server's is, or computes in this one. Each turn's ``requests`` are answered with the seconds
    of ``LLM.generate``, the tokens sampled, and a digest of their ids."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    # What only a server knows (host, port, …) is left over.
    known, _ = parser.parse_known_args(settings["arguments"])
    arguments = EngineArgs.from_cli_args(known)
    arguments.disable_log_stats = True  # LLM's own default
    if settings["core"]:
        # Not by VLLM_ENABLE_V1_MULTIPROCESSING, with which vLLM refuses the executor without workers.
        with_core = functools.partial(LLMEngine.from_engine_args, enable_multiprocessing=True)
        LLMEngine.from_engine_args = with_core  # type: ignore[method-assign]
    llm = vllm.LLM.from_engine_args(arguments)
    turns.say({"ready": True})
    for question in turns:
        prompts = [vllm.TokensPrompt(prompt_token_ids=r["prompt_ids"]) for r in question["requests"]]
        sampling = [
            vllm.SamplingParams(**r["sampling"], logprobs=0, detokenize=False) for r in question["requests"]
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        samples = [sample.token_ids for output in outputs for sample in output.outputs]
        turns.say({"seconds": seconds, "tokens": sum(map(len, samples)), "digest": digest(samples)})


def digest(samples: Iterable[Sequence[int]]) -> str:
    """Equal for the same tokens."""
    text = json.dumps([[int(token) for token in sample] for sample in samples])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
