"""Kernels for GPUs alone: whether they can run here, and how Liger's come into a model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEVICES = Path("/dev")
_PACKAGES = {"flash_attn": "flash-attn", "liger_kernel": "liger-kernel"}
_GPUS = ("nvidia[0-9]*", "dxg")
"""What a GPU is called below /dev, on Linux and in its Windows subsystem."""


def require_kernels(module: str, setting: str, remedy: str) -> None:
    """Raises ValueError, importing nothing heavy, if `setting` asks for kernels that can't run here."""
    problem = None
    if not any(found for pattern in _GPUS for found in _DEVICES.glob(pattern)):
        problem = "an NVIDIA GPU, and this machine has none"
    elif importlib.util.find_spec(module) is None:
        problem = f"the package {_PACKAGES[module]} (in requirements.txt), which is not installed"
    if problem is not None:
        raise ValueError(f"{setting} needs {problem}: {remedy}")


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
