"""Compiles kernels for an H100 (sm_90) without a GPU: those that vLLM's Model Runner V2 samples with,
and Liger's. Needs the CUDA builds of PyTorch and vLLM (scripts/gpu/without_one.sh has them).

Triton is given a driver that compiles to a binary of the GPU and launches nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

ROWS, VOCABULARY = 4, 151_936
SHARED_BYTES, PROCESSORS = 232_448, 132
"""An H100's largest shared memory of a block, and its number of multiprocessors."""


class Driver:
    """An H100 that is never asked to compute."""

    def __init__(self) -> None:
        self.binaries: list[str] = []
        properties = {
            "max_shared_mem": SHARED_BYTES,
            "multiprocessor_count": PROCESSORS,
            "max_num_regs": 65_536,
        }
        properties |= {
            "warpSize": 32,
            "sm_clock_rate": 1_980_000,
            "mem_clock_rate": 2_619_000,
            "mem_bus_width": 5120,
        }
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=self.load,
            unload_module=lambda module: None,
        )

    def load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert binary[:4] == b"\x7fELF" and shared <= SHARED_BYTES, name
        self.binaries.append(name)
        return 1, 1, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda


def sampler(torch: Any) -> None:
    """Runs the kernels of a request with a temperature, top-p, top-k, a seed and a log-prob."""
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    logits, rows = torch.randn(ROWS, VOCABULARY), torch.arange(ROWS, dtype=torch.int32)
    seeds, positions, warm = torch.arange(ROWS), torch.arange(ROWS), torch.full((ROWS,), 0.6)
    apply_temperature(logits, rows, warm)
    for top_k, top_p in ((None, 0.9), (10, None), (10, 0.9)):
        k = None if top_k is None else torch.full((ROWS,), top_k, dtype=torch.int32)
        p = None if top_p is None else torch.full((ROWS,), top_p)
        apply_top_k_top_p_triton(logits, k, p)
    gumbel_sample(logits, rows, warm, seeds, positions, True, False)
    compute_token_logprobs(logits, torch.zeros(ROWS, 1, dtype=torch.int64))


def liger(torch: Any) -> None:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_()

    LigerRMSNormFunction.apply(draw(ROWS, 2048), draw(2048), 1e-6).sum().backward()
    LigerSiLUMulFunction.apply(draw(ROWS, 5632), draw(ROWS, 5632)).sum().backward()
    angles = torch.randn(1, 16, 64)
    query, key = LigerRopeFunction.apply(draw(1, 32, 16, 64), draw(1, 8, 16, 64), angles.cos(), angles.sin())
    (query.sum() + key.sum()).backward()


def main() -> int:
    import torch

    if torch.version.cuda is None:
        sys.exit("this PyTorch is built for CPUs: scripts/gpu/without_one.sh installs the other")
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    from tests.engine.simulated_h100_program import simulate

    CudaDriver.is_active = staticmethod(lambda: True)
    h100 = SimpleNamespace(multi_processor_count=PROCESSORS, major=9, minor=0, name="NVIDIA H100 80GB HBM3")
    torch.cuda.get_device_properties = lambda device=None: h100
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    simulate()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        for work in (sampler, liger):
            driver = Driver()
            triton.runtime.driver.set_active(driver)
            try:
                work(torch)
            except Exception as error:
                failed.append(work.__name__)
                sys.stdout.write(f"{work.__name__}: {type(error).__name__}: {error}\n")
            sys.stdout.write(f"{work.__name__}: {', '.join(sorted(set(driver.binaries)))}\n")
            if not driver.binaries:
                failed.append(work.__name__)
    sys.stdout.write(
        f"{'not' if failed else 'all'} compiled for sm_90{': ' + ', '.join(failed) if failed else ''}\n"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
