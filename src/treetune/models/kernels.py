"""Kernels for GPUs alone: whether they can run here, and how Liger's come into a model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEVICES = Path("/dev")
_PACKAGES = {
    "flash_attn": "flash-attn (TREETUNE_FLASH_ATTN=1 scripts/setup.sh builds it)",
    "liger_kernel": "liger-kernel (in requirements.txt)",
}
_GPUS = ("nvidia[0-9]*", "dxg")
"""What a GPU is called below /dev, on Linux and in its Windows subsystem."""


def require_kernels(module: str, setting: str, remedy: str) -> None:
    """Raises ValueError, importing nothing heavy, if `setting` asks for kernels that can't run here."""
    problem = None
    if not has_gpu():
        problem = "an NVIDIA GPU, and this machine has none"
    elif importlib.util.find_spec(module) is None:
        problem = f"the package {_PACKAGES[module]}, which is not installed"
    if problem is not None:
        raise ValueError(f"{setting} needs {problem}: {remedy}")


def has_gpu() -> bool:
    """Whether the system has an NVIDIA GPU, be its driver what it may."""
    return any(found for pattern in _GPUS for found in _DEVICES.glob(pattern))


def refuse_unusable_gpu(environment: Mapping[str, str], cuda: str | None, is_available: bool) -> None:
    """Raises ValueError where a GPU is here, PyTorch was built for it (for CUDA `cuda`) and can't use it: the
    run would go on, on the CPU, a hundred times slower."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES") == "" or environment.get("DS_ACCELERATOR") == "cpu"
    if is_available or hidden or cuda is None or not has_gpu():
        return
    raise ValueError(
        f"this machine has an NVIDIA GPU, and PyTorch, built for CUDA {cuda}, can't use it: nvidia-smi says"
        " which driver there is, and scripts/setup.sh whether it is too old. To run on the CPU all the same,"
        " set CUDA_VISIBLE_DEVICES to nothing"
    )


def apply_liger(model: PreTrainedModel) -> None:
    """Puts Liger's rotary embeddings, RMS norms and MLPs (Hsu et al. 2024) into the model, in place.

    Its losses stay out: log-probs are computed in chunks here, for every objective alike. Raises
    ValueError for an architecture that it has no kernels for, where it would do nothing, silently.
    """
    import inspect

    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    patch = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    if patch is None:
        raise ValueError(
            f"model.liger is true, and Liger has no kernels for {model.config.model_type!r}: set it to false"
        )
    wanted = {
        "rope": True,
        "rms_norm": True,
        "swiglu": True,
        "geglu": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    known = inspect.signature(patch).parameters
    patch(model=model, **{name: on for name, on in wanted.items() if name in known})
