"""What a model runs on at once: rows of a minibatch as tensors, in any of the layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treetune.models.inputs import ModelInputs
from treetune.prefix_tree import GrowingTree, PrefixTree
from treetune.trainers.base import Trainer
from treetune.trainers.batching import Layout, PlannedBatch, Unit, plan_micro_batches
from treetune.trainers.tokens import Row, Sequences


@dataclass(frozen=True)
class MicroBatch:
    """What a model runs on at once.

    A dummy repeats rows of its rank's so that all ranks run equally often; its results are dropped and
    its loss weighs nothing.
    """

    inputs: ModelInputs
    flat_index_N: Tensor
    """Where its trained tokens lie in the iteration's flat tensors, int64."""
    trained_tokens: tuple[int, ...]
    """How many each of its sequences has, of which it may hold a part."""
    computed_tokens: int
    """Tokens that a model runs over, padding left out."""
    is_dummy: bool
    loss_scale: float
    """What this rank's loss on it counts: one over the ranks that run it together; 0 of a dummy's."""


def micro_batches(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: Trainer,
    device: torch.device,
    *,
    rank: int = 0,
    ranks: int = 1,
    keep_units: bool = False,
    with_gradient: bool = True,
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of the `units`, which are of rows: as many as every other rank's.

    Without `keep_units`, any row may run apart from the others of its unit.
    """
    planned, rows_by_rank = _planned(sequences, units, settings, ranks, keep_units, with_gradient)
    own = rank // settings.model_parallel_size
    for turn, batch in enumerate(planned[own]):
        most = max(sum(sequences.rows[i].trained for i in rows[turn]) for rows in rows_by_rank)
        yield micro_batch(
            sequences,
            rows_by_rank[own][turn],
            settings.layout,
            device,
            max_positions=most,
            is_dummy=batch.is_dummy,
            model_parallel_size=settings.model_parallel_size,
        )


def rows_of_rank(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: Trainer,
    *,
    rank: int,
    ranks: int,
    keep_units: bool = False,
    with_gradient: bool = True,
) -> set[int]:
    """Those that `micro_batches` runs on this rank. It asks for no row's tokens, but with trees."""
    _, rows_by_rank = _planned(sequences, units, settings, ranks, keep_units, with_gradient)
    return {row for rows in rows_by_rank[rank // settings.model_parallel_size] for row in rows}


def _planned(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: Trainer,
    ranks: int,
    keep_units: bool,
    with_gradient: bool,
) -> tuple[list[list[PlannedBatch]], list[list[list[int]]]]:
    """The micro-batches of each group of ranks that run them together, and the rows of each of them."""
    layout, parallel = settings.layout, settings.model_parallel_size
    max_tokens = settings.tokens_per_micro_batch * settings.sequence_parallel_size
    if not with_gradient:
        max_tokens *= 2  # there is no graph to keep
    groups: list[Unit]
    if layout == "tree":
        groups, lengths = _trees(sequences, units, max_tokens, keep_units)
        units = [(tree,) for tree in range(len(groups))]
    else:
        groups, lengths = [(row,) for row in range(len(sequences.rows))], sequences.lengths
        units = units if keep_units else [(row,) for unit in units for row in unit]
    planned = plan_micro_batches(
        lengths,
        units,
        ranks=ranks // parallel,
        max_tokens=max_tokens,
        max_rows=settings.sequences_per_micro_batch,
        layout=layout,
    )
    return planned, [[[row for i in one.indices for row in groups[i]] for one in own] for own in planned]


def micro_batch(
    sequences: Sequences,
    indices: Sequence[int],
    layout: Layout,
    device: torch.device,
    *,
    max_positions: int = 0,
    is_dummy: bool = False,
    model_parallel_size: int = 1,
) -> MicroBatch:
    """The tensors of one micro-batch of these rows, which `model_parallel_size` ranks run together."""
    rows = [sequences.rows[i] for i in indices]
    laid_out = _LAYOUTS[layout](rows)
    of_sequences = itertools.groupby(rows, key=lambda row: row.sequence)
    return MicroBatch(
        inputs=ModelInputs(
            input_ids_BT=laid_out.input_ids_BT.to(device),
            positions_N=torch.cat(laid_out.positions).to(device),
            labels_N=torch.cat([row.token_ids[row.predicting + 1] for row in rows]).to(device),
            position_ids_BT=None if laid_out.position_ids_BT is None else laid_out.position_ids_BT.to(device),
            subtree_last_1T=None if laid_out.subtree_last_1T is None else laid_out.subtree_last_1T.to(device),
            max_positions=max_positions,
        ),
        flat_index_N=sequences.flat_index(indices),
        trained_tokens=tuple(sum(row.trained for row in own) for _, own in of_sequences),
        computed_tokens=laid_out.tokens,
        is_dummy=is_dummy,
        loss_scale=0.0 if is_dummy else 1 / model_parallel_size,
    )


@dataclass(frozen=True)
class _LaidOut:
    """Rows as a layout has them."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor | None
    positions: list[Tensor]
    """Of each row, where in the flattened input its trained tokens are predicted."""
    tokens: int
    """Without padding."""
    subtree_last_1T: Tensor | None = None


def _padded(rows: Sequence[Row]) -> _LaidOut:
    """Right padding and no attention mask. Under causal attention no real token sees a token to its right,
    so the padding never matters."""
    ids_BT = pad_sequence([row.token_ids for row in rows], batch_first=True)
    width = ids_BT.shape[1]
    positions = [row.predicting + number * width for number, row in enumerate(rows)]
    return _LaidOut(ids_BT, None, positions, sum(len(row.token_ids) for row in rows))


def _packed(rows: Sequence[Row]) -> _LaidOut:
    """One row, with position ids that start again at every one of ours, from which transformers keeps
    them apart."""
    starts = list(itertools.accumulate((len(row.token_ids) for row in rows), initial=0))
    return _LaidOut(
        torch.cat([row.token_ids for row in rows])[None],
        torch.cat([torch.arange(len(row.token_ids)) for row in rows])[None],
        [row.predicting + start for row, start in zip(rows, starts, strict=False)],
        starts[-1],
    )


def _tree(rows: Sequence[Row]) -> _LaidOut:
    """One row that is their prefix tree. A token's position is its depth, and it is predicted at its parent,
    which stands where the depth-first walk has put it."""
    tree = PrefixTree.of([row.token_ids.numpy() for row in rows])
    return _LaidOut(
        torch.from_numpy(tree.token_ids_T)[None],
        torch.from_numpy(tree.depths_T)[None],
        [torch.from_numpy(path)[row.predicting] for row, path in zip(rows, tree.paths, strict=True)],
        len(tree.token_ids_T),
        torch.from_numpy(tree.subtree_last_T)[None],
    )


_LAYOUTS = {"padded": _padded, "packed": _packed, "tree": _tree}


def _trees(
    sequences: Sequences, units: Sequence[Unit], max_tokens: int, keep_units: bool
) -> tuple[list[Unit], list[int]]:
    """The rows of each tree, and its number of tokens.

    The units of a problem grow one tree until it would exceed `max_tokens`; then the next one begins. A unit
    that exceeds them alone is taken apart row by row, unless it has to be kept (`keep_units`).
    """
    by_problem: dict[str, list[Unit]] = {}
    for unit in sorted(units):
        by_problem.setdefault(sequences.groups[sequences.rows[unit[0]].sequence], []).append(unit)
    trees: list[Unit] = []
    sizes: list[int] = []
    for own in by_problem.values():
        tree, size = GrowingTree(), 0
        rows: Unit = ()
        for unit in own:
            kept = keep_units or _fits(sequences, unit, max_tokens)
            for part in [unit] if kept else [(row,) for row in unit]:
                _add(sequences, tree, part)
                if rows and tree.size > max_tokens:
                    trees.append(rows)
                    sizes.append(size)
                    tree, rows = GrowingTree(), ()
                    _add(sequences, tree, part)
                rows, size = rows + part, tree.size
        trees.append(rows)
        sizes.append(size)
    return trees, sizes


def _fits(sequences: Sequences, unit: Unit, max_tokens: int) -> bool:
    """Whether the tree of its rows alone has no more than so many tokens."""
    if sum(sequences.rows[row].length for row in unit) <= max_tokens:
        return True
    tree = GrowingTree()
    _add(sequences, tree, unit)
    return tree.size <= max_tokens


def _add(sequences: Sequences, tree: GrowingTree, rows: Unit) -> None:
    for row in rows:
        tree.add(sequences.rows[row].token_ids.numpy())
