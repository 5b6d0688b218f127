"""Mirrors of the metrics besides `metrics.jsonl`, which a run can lose without noticing."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from treetune.config.registrable import Registrable
from treetune.vocabulary import Metrics

logger = logging.getLogger(__name__)


class Sink(Registrable):
    """A mirror of the metrics. `open` may fail; a sink that fails later is dropped with a warning."""

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        """Begins; returns the handle that `log` and `close` get, here one with the calls of a W&B run."""
        raise NotImplementedError

    def log(self, handle: Any, iteration: int, metrics: Metrics) -> None:
        handle.log(dict(metrics), step=iteration)

    def close(self, handle: Any) -> None:
        handle.finish()


@Sink.register("trackio")
@dataclass(frozen=True, kw_only=True)
class TrackioSink(Sink):
    """Trackio (`pip install trackio`): on this machine, where `trackio show` finds it."""

    project: str = "treetune"
    """The project's name there."""

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        trackio = import_module("trackio")  # in no lock file
        return trackio.init(project=self.project, name=name, config=dict(config), resume="allow", embed=False)


@Sink.register("wandb")
@dataclass(frozen=True, kw_only=True)
class WandbSink(Sink):
    """Weights & Biases: offline unless someone is logged in; `WANDB_RUN_ID` continues that run."""

    project: str = "treetune"
    """The project's name there."""
    entity: str | None = None
    """User or team; null: the default of the user who is logged in."""

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        import wandb

        netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        logged_in = os.environ.get("WANDB_API_KEY") or (netrc.is_file() and "wandb.ai" in netrc.read_text())
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in else "offline")
        return wandb.init(
            project=self.project,
            entity=self.entity,
            name=name,
            dir=str(directory),
            config=dict(config),
            id=os.environ.get("WANDB_RUN_ID"),
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
        )


@Sink.register("tensorboard")
@dataclass(frozen=True, kw_only=True)
class TensorboardSink(Sink):
    """Event files under ``tensorboard/`` in the experiment."""

    further_names: Mapping[str, str] = field(default_factory=dict)
    """Names under which metrics are written as well, each with the metric's own name: for dashboards of
    another program. Metrics that a run doesn't record are left out."""

    def open(self, directory: Path, name: str, config: Mapping[str, Any]) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(directory / "tensorboard"))

    def log(self, handle: Any, iteration: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            handle.add_scalar(key, value, iteration)
        for name, key in self.further_names.items():
            if key in metrics:
                handle.add_scalar(name, metrics[key], iteration)

    def close(self, handle: Any) -> None:
        handle.close()


class Mirrors:
    """The sinks of one run. Only the experiment directory is the source; these may fail."""

    def __init__(
        self, sinks: tuple[Sink, ...], directory: Path, name: str, config: Mapping[str, Any]
    ) -> None:
        self._open: list[tuple[Sink, Any]] = []
        for sink in sinks:
            try:
                self._open.append((sink, sink.open(directory, name, config)))
            except Exception as error:  # a mirror must not end a run, whatever a vendor's library raises
                logger.warning("%s is off for this run: %s", type(sink).__name__, error)

    def log(self, iteration: int, metrics: Metrics) -> None:
        for sink, handle in list(self._open):
            try:
                sink.log(handle, iteration, metrics)
            except Exception as error:  # as above
                logger.warning("%s is off from here on: %s", type(sink).__name__, error)
                self._open.remove((sink, handle))

    def close(self) -> None:
        for sink, handle in self._open:
            try:
                sink.close(handle)
            except Exception as error:  # as above
                logger.warning("%s did not close: %s", type(sink).__name__, error)
        self._open = []
