"""What stands around an engine, and hands on all that it doesn't do otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from treetune.inference.base import Canary, Chunk, Engine, SyncReport


class EngineAround(Engine):
    """Everything but `generate` goes straight through."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.engine.version

    @property
    def tokens(self) -> int:  # type: ignore[override]
        return self.engine.tokens

    @property
    def sleeps(self) -> bool:  # type: ignore[override]
        return self.engine.sleeps

    @property
    def tokens_per_second(self) -> float:
        return self.engine.tokens_per_second

    def wait_ready(self) -> None:
        self.engine.wait_ready()

    def wait_settled(self) -> None:
        self.engine.wait_settled()

    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        return self.engine.load(directory, version, canary, chunks)

    def asleep(self) -> AbstractContextManager[None]:
        return self.engine.asleep()

    def close(self) -> None:
        self.engine.close()
