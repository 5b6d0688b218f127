"""What a trainer knew of each trained token before the first update, kept beside the episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.columns import Column, Columnar

if TYPE_CHECKING:
    import pyarrow as pa

SIGNALS = "token_signals.arrow"
"""In an iteration's folder. Row i is of episode i of ``episodes.arrow``."""

REMEDY = "delete it: nothing is trained on it"


@dataclass(frozen=True, eq=False)
class TokenSignals(Columnar):
    """Of one episode: float32 for each of its trained tokens, in their order; NaN where the trainer does not
    know.

    `logprobs` and `entropies` (nats) are the policy's before the iteration's first update, of the whole
    distribution at the rollout's temperature. `gaps` are the trainer's log-probs minus the engine's, both of
    what was sampled from; None where the engine's are not there.
    """

    trajectory: str
    logprobs: Column
    entropies: Column
    gaps: Column | None


def write_token_signals(path: Path, rows: Sequence[TokenSignals]) -> None:
    """One column per field: at most 12 bytes for each trained token, before compression."""
    from treetune.rollouts.storage import write_rows

    write_rows(path, "token signals", rows, _schema(), _columns)


def read_token_signals(path: Path) -> list[TokenSignals]:
    """What `write_token_signals` wrote. Raises as `read_episodes` does."""
    from treetune.rollouts.storage import read_rows

    return read_rows(path, "token signals", signals_of, REMEDY)


def signals_of(batch: pa.RecordBatch) -> Iterator[TokenSignals]:
    from treetune.rollouts.columns import rows_of

    numbers = (rows_of(batch[name]) for name in ("logprobs", "entropies", "gaps"))
    for trajectory, logprobs, entropies, gaps in zip(batch["trajectory"].to_pylist(), *numbers, strict=True):
        assert logprobs is not None and entropies is not None, "these columns have no null"
        yield TokenSignals(trajectory, logprobs, entropies, gaps)


def _schema() -> pa.Schema:
    import pyarrow as pa

    numbers = pa.list_(pa.float32())
    return pa.schema({"trajectory": pa.string(), "logprobs": numbers, "entropies": numbers, "gaps": numbers})


def _columns(rows: Sequence[TokenSignals], schema: pa.Schema) -> list[pa.Array]:
    import pyarrow as pa

    from treetune.rollouts.columns import lists

    names = [field.name for field in schema if field.name != "trajectory"]
    own = [lists([getattr(row, name) for row in rows], schema.field(name).type) for name in names]
    return [pa.array([row.trajectory for row in rows], pa.string()), *own]
