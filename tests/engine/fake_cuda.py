"""A fake CUDA with the current device of each thread: a new thread begins on the first GPU, as in CUDA."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

GPUS = 4


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    index: int

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)


KINDS = [type(f"OnGpu{index}", (OnGpu,), {"index": index}) for index in range(GPUS)]


def on_gpu(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor.as_subclass(KINDS[index])


class FakeCuda:
    """Replaces PyTorch's functions of CUDA. `done` lists their calls, each with its GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, int]] = []
        self._thread = threading.local()
        empty = torch.empty

        def empty_on(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
            tensor = empty(*size, **options)
            if device is None or torch.device(device).type != "cuda":
                return tensor
            return on_gpu(tensor, self.index(device))

        def exported(tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
            assert tensor.device.index == self.current(), "exported from another GPU's context"
            return None, (tensor.numel(), self.current())

        class Stream(_Stream):
            def __init__(stream, device: Any = None) -> None:
                super().__init__(self, self.index(device))

        for name, fake in {
            "empty": empty_on,
            "cuda.current_device": self.current,
            "accelerator.current_device_index": self.current,
            "cuda.set_device": self.set,
            "cuda.device": self.device,
            "accelerator.device_index": self.device,
            "cuda.Stream": Stream,
            "cuda.stream": lambda stream: self.device(stream.index),
            "cuda.current_stream": Stream,
            "cuda.ipc_collect": lambda: self.done.append(("ipc_collect", self.current())),
            "cuda.get_device_properties": lambda device: _Properties(f"GPU-{self.index(device)}"),
        }.items():
            monkeypatch.setattr(f"torch.{name}", fake)
        monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", exported)

    def current(self) -> int:
        return getattr(self._thread, "index", 0)

    def set(self, device: Any) -> None:
        self._thread.index = self.index(device)

    def index(self, device: Any = None) -> int:
        if device is None:
            return self.current()
        index = device if isinstance(device, int) else torch.device(device).index
        return self.current() if index is None else index

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current()
        self.set(device)
        try:
            yield
        finally:
            self.set(before)


class _Stream:
    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self.cuda, self.index = cuda, index

    def synchronize(self) -> None:
        self.cuda.done.append(("synchronize", self.index))


class _Properties:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
