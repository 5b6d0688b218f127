"""Minibatches, dealt out to ranks and cut into micro-batches, the tensors that models run on.

The plan is a pure function of lengths, computed alike on every rank, and never changes the update:
only how fast it is computed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treetune.models.logprobs import ModelInputs
from treetune.objectives.base import Objective
from treetune.prefix_tree import GrowingTree, PrefixTree
from treetune.trainer.base import Layout, Trainer
from treetune.trainer.ranks import Ranks
from treetune.trainer.tokens import Row, Sequences, Unit
from treetune.vocabulary import Episode


@dataclass(frozen=True)
class Minibatch:
    """The sequences that a step is taken on, the same on every rank. `weights_N` are over all of the
    iteration's tokens.

    `units` are the rows that are run, sequence by sequence or pair by pair: sequences without weight add
    nothing to the loss. None are left where there is nothing to learn, and no step is taken then.
    `keep_units` says whether a unit's rows have to run together.
    """

    units: list[Unit]
    keep_units: bool
    weights_N: Tensor
    weight_sum: float
    sequence_weight: float
    pair_weight: float

    @staticmethod
    def of(sequences: Sequences, units: Sequence[Unit], objective: Objective) -> Minibatch:
        starts, indices = sequences.starts, [index for unit in units for index in unit]
        weights = objective.sequence_weights(
            [starts[index + 1] - starts[index] for index in indices],
            [sequences.scores[index] for index in indices],
        )
        weights_N = torch.zeros(sequences.n_tokens)
        for index, weight in zip(indices, weights, strict=True):
            weights_N[starts[index] : starts[index + 1]] = weight
        weighing = {index for index, weight in zip(indices, weights, strict=True) if weight != 0}
        return Minibatch(
            units=[sequences.rows_of(unit) for unit in units if weighing.intersection(unit)],
            keep_units=objective.needs_whole_sequences,
            weights_N=weights_N,
            weight_sum=float(weights_N.double().sum()),
            sequence_weight=1 / len(indices),
            pair_weight=1 / len(units),
        )


@dataclass(frozen=True)
class MicroBatch:
    """The rows that a model runs on at once.

    A dummy repeats rows of its rank's so that all ranks run equally often; its results are dropped and
    its loss weighs nothing.
    """

    inputs: ModelInputs
    flat_index_N: Tensor
    """Where its trained tokens lie in the iteration's flat tensors, int64."""
    trained_tokens: tuple[int, ...]
    """Number of trained tokens of each of its sequences, of which it may hold a part."""
    computed_tokens: int
    """Tokens that a model runs over, padding left out."""
    is_dummy: bool
    loss_scale: float
    """Factor of this rank's loss on it: one over the ranks that run it together; 0 of a dummy's."""


@dataclass(frozen=True)
class PlannedBatch:
    """Indices of rows (or trees) that run at once. A dummy only keeps the ranks in step."""

    indices: Unit
    is_dummy: bool = False


def plan_micro_batches(
    lengths: Sequence[int],
    units: Sequence[Unit],
    *,
    ranks: int,
    max_tokens: int,
    max_rows: int | None,
    layout: Layout,
) -> list[list[PlannedBatch]]:
    """Micro-batches for each rank, as many on one as on another.

    `lengths` are of all rows, `units` those of this minibatch. Units go, longest first, to
    the rank with the fewest tokens so far; on a rank, neighbours in length share a micro-batch of
    at most `max_tokens` tokens (padding included) and at most `max_rows` rows. A unit beyond the
    budget runs alone.
    """
    widths = {unit: max(lengths[i] for i in unit) for unit in units}
    totals = {unit: sum(lengths[i] for i in unit) for unit in units}
    units_by_rank: list[list[Unit]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda u: (-widths[u], -totals[u], u)):
        tokens, rank = heapq.heappop(load)
        units_by_rank[rank].append(unit)
        heapq.heappush(load, (tokens + totals[unit], rank))
    planned: list[list[PlannedBatch]] = []
    for units_of_rank in units_by_rank:
        batches: list[Unit] = []
        current: Unit = ()
        width = total = 0
        for unit in units_of_rank:
            # They come longest first, so a padded micro-batch is as wide as its first unit.
            rows = len(current) + len(unit)
            tokens = width * rows if layout == "padded" else total + totals[unit]
            if current and (tokens > max_tokens or (max_rows is not None and rows > max_rows)):
                batches.append(current)
                current, total = (), 0
            if not current:
                width = widths[unit]
            current += unit
            total += totals[unit]
        if current:
            batches.append(current)
        planned.append([PlannedBatch(indices) for indices in batches])
    # With ZeRO 2 and 3 every backward pass is a collective: a rank with fewer would be waited for for ever.
    most = max(map(len, planned))
    shortest = min(units, key=lambda u: (totals[u], u))
    return [batches + [PlannedBatch(shortest, is_dummy=True)] * (most - len(batches)) for batches in planned]


def micro_batches(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: Trainer,
    ranks: Ranks,
    *,
    keep_units: bool = False,
    with_gradient: bool = True,
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of the `units`, which are of rows: as many as every other rank's.

    Without `keep_units`, any row may run apart from the others of its unit.
    """
    planned, rows_by_group = _planned(sequences, units, settings, ranks, keep_units, with_gradient)
    group = ranks.rank // settings.model_parallel_size
    for turn, batch in enumerate(planned[group]):
        # Every rank runs the head on as many chunks as the one with the most positions: see `PolicyModule`.
        most = max(sum(sequences.rows[i].trained for i in rows[turn]) for rows in rows_by_group)
        yield micro_batch(
            sequences,
            rows_by_group[group][turn],
            settings.layout,
            ranks.device,
            max_positions=most,
            is_dummy=batch.is_dummy,
            model_parallel_size=settings.model_parallel_size,
        )


def rows_of_rank(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: Trainer,
    ranks: Ranks,
    *,
    keep_units: bool = False,
    with_gradient: bool = True,
) -> set[int]:
    """The rows that `micro_batches` would run on this rank. Where `layout` isn't ``tree``, which is cut by
    tokens, lengths alone decide it: no row need have its tokens."""
    _, rows_by_group = _planned(sequences, units, settings, ranks, keep_units, with_gradient)
    return {row for rows in rows_by_group[ranks.rank // settings.model_parallel_size] for row in rows}


def sequences_of_rank(
    episodes: Collection[Episode],
    settings: Trainer,
    ranks: Ranks,
    steps: Sequence[Sequence[Unit]],
    *,
    scores_all: bool,
) -> Sequences:
    """The episodes' sequences, with the tokens of those that this rank runs in these `steps`, each given by
    its sequences, and, with `scores_all`, when models are run over the whole iteration before them."""
    if ranks.world_size == 1 or settings.layout == "tree":
        return Sequences.of(
            episodes
        )  # prefix trees are cut by their tokens, so that every rank needs them all
    known = Sequences.of(episodes, kept=())
    kept: set[int] = set()
    if scores_all:
        kept |= rows_of_rank(known, known.once(), settings, ranks, with_gradient=False)
    for members in steps:
        minibatch = Minibatch.of(known, members, settings.objective)
        if minibatch.units:
            keep_units = minibatch.keep_units
            kept |= rows_of_rank(known, minibatch.units, settings, ranks, keep_units=keep_units)
    if settings.reference_scores == "while_sampling":
        kept |= rows_scored_by(known, ranks)
    return Sequences.of(episodes, kept)


def rows_scored_by(sequences: Sequences, ranks: Ranks) -> set[int]:
    """The rows that this rank scores under the reference, where nobody has scored them while sampling."""
    return set(range(ranks.rank, len(sequences.rows), ranks.world_size))


def _planned(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: Trainer,
    ranks: Ranks,
    keep_units: bool,
    with_gradient: bool,
) -> tuple[list[list[PlannedBatch]], list[list[list[int]]]]:
    """The micro-batches of each group of ranks that run them together, and the rows of each of them."""
    layout = settings.layout
    max_tokens = settings.tokens_per_micro_batch * settings.sequence_parallel_size
    if not with_gradient:
        max_tokens *= 2  # there is no graph to keep
    groups: list[Unit]
    if layout == "tree":
        groups, lengths = _trees(sequences, units, max_tokens, keep_units)
        units = [(tree,) for tree in range(len(groups))]
    else:
        groups, lengths = (
            [(row,) for row in range(len(sequences.rows))],
            [row.length for row in sequences.rows],
        )
        units = units if keep_units else [(row,) for unit in units for row in unit]
    planned = plan_micro_batches(
        lengths,
        units,
        ranks=ranks.world_size // settings.model_parallel_size,
        max_tokens=max_tokens,
        max_rows=settings.sequences_per_micro_batch,
        layout=layout,
    )
    rows = [[[row for i in batch.indices for row in groups[i]] for batch in batches] for batches in planned]
    return planned, rows


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
    inputs, computed_tokens = _laid_out(rows, layout)
    tensors = {name: x.to(device) for name, x in inputs._asdict().items() if isinstance(x, Tensor)}
    by_sequence = itertools.groupby(rows, key=lambda row: row.sequence)
    return MicroBatch(
        inputs=inputs._replace(**tensors, max_positions=max_positions),
        flat_index_N=sequences.flat_index(indices),
        trained_tokens=tuple(sum(row.trained for row in group) for _, group in by_sequence),
        computed_tokens=computed_tokens,
        is_dummy=is_dummy,
        loss_scale=0.0 if is_dummy else 1 / model_parallel_size,
    )


def _laid_out(rows: Sequence[Row], layout: Layout) -> tuple[ModelInputs, int]:
    """The input of a model for these rows, and its number of tokens without padding."""
    ids = [row.token_ids for row in rows]
    predicting = [row.predicting for row in rows]
    labels_N = torch.cat([ids_T[at + 1] for ids_T, at in zip(ids, predicting, strict=True)])
    tokens = sum(row.length for row in rows)
    if layout == "tree":
        # One row that is their prefix tree. A token's position is its depth, and it is predicted at its
        # parent, which stands where the depth-first walk has put it.
        tree = PrefixTree.of([ids_T.numpy() for ids_T in ids])
        paths = [torch.from_numpy(path) for path in tree.paths]
        positions_N = torch.cat([path[at] for path, at in zip(paths, predicting, strict=True)])
        ids_1T, depths_1T, last_1T = (
            torch.from_numpy(array)[None] for array in (tree.token_ids_T, tree.depths_T, tree.subtree_last_T)
        )
        return ModelInputs(ids_1T, positions_N, labels_N, depths_1T, last_1T), len(tree.token_ids_T)
    if layout == "packed":
        # One row, with position ids that start again at every one of ours, from which transformers keeps them
        # apart.
        starts = itertools.accumulate((len(ids_T) for ids_T in ids), initial=0)
        positions_N = torch.cat([at + start for at, start in zip(predicting, starts, strict=False)])
        counts_1T = torch.cat([torch.arange(len(ids_T)) for ids_T in ids])[None]
        return ModelInputs(torch.cat(ids)[None], positions_N, labels_N, counts_1T), tokens
    # Right padding and no attention mask: under causal attention no real token sees a token to its right.
    ids_BT = pad_sequence(ids, batch_first=True)
    positions_N = torch.cat([at + number * ids_BT.shape[1] for number, at in enumerate(predicting)])
    return ModelInputs(ids_BT, positions_N, labels_N), tokens


def _trees(
    sequences: Sequences, units: Sequence[Unit], max_tokens: int, keep_units: bool
) -> tuple[list[Unit], list[int]]:
    """The rows of each tree, and its number of tokens.

    The units of a problem grow one tree until it would exceed `max_tokens`; then the next one begins. A unit
    that exceeds them alone is taken apart row by row, unless it has to be kept (`keep_units`).
    """

    def grown(tree: GrowingTree, rows: Unit) -> int:
        for row in rows:
            tree.add(sequences.rows[row].token_ids.numpy())
        return tree.size

    def fits(unit: Unit) -> bool:
        rows = sum(sequences.rows[row].length for row in unit)
        return rows <= max_tokens or grown(GrowingTree(), unit) <= max_tokens

    by_problem: dict[str, list[Unit]] = {}
    for unit in sorted(units):
        by_problem.setdefault(sequences.groups[sequences.rows[unit[0]].sequence], []).append(unit)
    trees: list[Unit] = []
    sizes: list[int] = []
    for units_of_problem in by_problem.values():
        tree, size = GrowingTree(), 0
        rows: Unit = ()
        for unit in units_of_problem:
            for part in [unit] if keep_units or fits(unit) else [(row,) for row in unit]:
                grown_size = grown(tree, part)
                if rows and grown_size > max_tokens:
                    trees.append(rows)
                    sizes.append(size)
                    tree, rows = GrowingTree(), ()
                    grown_size = grown(tree, part)
                rows, size = rows + part, grown_size
        trees.append(rows)
        sizes.append(size)
    return trees, sizes
