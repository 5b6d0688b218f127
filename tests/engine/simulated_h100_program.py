"""Builds vLLM's whole configuration as a server does at its start, on an H100 that isn't there.

Run with a Python that has vLLM, for CPUs or for CUDA. Standard input: a list of objects with a server's
`command` and `environment`; standard output: for each, the `configuration` that vLLM built or its `error`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from types import ModuleType
from typing import Any

EXTENSIONS = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
"""Modules that are compiled for CUDA; building a configuration only asks whether they exist."""
QUERIES_OF_EXTENSIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
)
MEMORY_BYTES = 85_017_624_576
"""As torch.cuda reports them for an H100 of 80 GB: 79.2 GiB."""


def simulate() -> None:
    """Makes vLLM see a machine with eight H100. Call it before anything of vLLM is imported."""
    for name in EXTENSIONS:
        sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    import torch

    for name in QUERIES_OF_EXTENSIONS:
        setattr(torch.ops._C, name, lambda capability: True)
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H100(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return MEMORY_BYTES

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def get_cuda_runtime_major(cls) -> int:
            return 13

        def is_cumem_allocator_available(self) -> bool:
            return True

    platforms.current_platform = H100()
    from vllm.config import vllm as vllm_config
    from vllm.model_executor.models import registry

    vllm_config.HAS_TRITON = True  # the wheel for CUDA brings it
    registry._run_in_subprocess = lambda look: look()  # which would find the CPU


def build_configuration(parser: Any, command: list[str]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments = parser.parse_args(command)
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    model, scheduler, graphs = config.model_config, config.scheduler_config, config.compilation_config
    transfer = config.weight_transfer_config
    return {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async_scheduling": scheduler.async_scheduling,
        "policy": scheduler.policy,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "sequences": scheduler.max_num_seqs,
        "tokens": scheduler.max_num_batched_tokens,
        "graphs": graphs.cudagraph_mode.name,
        "largest_graph": graphs.max_cudagraph_capture_size,
        "sleeps_by": model.sleep_mode_backend if model.enable_sleep_mode else None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": model.max_model_len,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "gpus": config.parallel_config.world_size,
        "transfer": None if transfer is None else transfer.backend,
        "tied": model.hf_config.tie_word_embeddings,
    }


def main() -> None:
    starts = json.load(sys.stdin)
    answers, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        # A cache of its own: what vLLM learns here of models is wrong for servers on this machine.
        os.environ |= {"VLLM_CACHE_ROOT": folder, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        simulate()
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser())
        results = []
        for start in starts:
            variables = {
                name: value for name, value in start["environment"].items() if name.startswith("VLLM_")
            }
            before = {name: os.environ.get(name) for name in variables}
            os.environ |= variables
            try:
                results.append({"configuration": build_configuration(parser, start["command"])})
            except (Exception, SystemExit) as error:
                results.append({"error": f"{type(error).__name__}: {error}"})
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value
    json.dump(results, answers)


if __name__ == "__main__":
    main()
