"""Distributes minibatches over the ranks, and cuts them into micro-batches, the tensors that models run on.

::

    minibatch         the sequences of a step, the same on every rank
       │ plan_micro_batches: longest first, to the rank with the fewest tokens
       ├─► rank 0:    micro-batch, micro-batch, …
       └─► rank 1:    micro-batch, micro-batch, dummy      as many as rank 0

Every rank computes the same plan, for which it needs only the lengths of rows (or, for trees, their tokens).
The plan changes only how fast the update is computed, never the update.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treetune.models.logprobs import ModelInputs
from treetune.objectives.base import Objective
from treetune.objectives.further_inputs import MarkingObjective
from treetune.prefix_tree import GrowingTree, PrefixTree
from treetune.trainer.base import Layout, Trainer
from treetune.trainer.ranks import Ranks
from treetune.trainer.tokens import EpisodesOfCritic, Row, Sequences, Unit
from treetune.vocabulary import Episode


@dataclass(frozen=True)
class Minibatch:
    """The sequences of an optimiser step, the same on every rank."""

    units: list[Unit]
    """The rows that are computed: a unit for each sequence whose weight isn't 0, or for each pair of which at
    least one sequence has such a weight. Empty if there is nothing to learn; then no step is taken."""
    keep_units: bool
    """Whether the rows of a unit must be in the same micro-batch."""
    weights_N: Tensor
    """The weight of each trained token of the iteration; 0 outside of the minibatch."""
    weight_sum: float
    """The sum of `weights_N`."""
    sequence_weight: float
    """1 / number of sequences."""
    pair_weight: float
    """1 / number of pairs."""
    marked_N: Tensor | None = None
    """A mask of the iteration's trained tokens: True for those that the objective has marked. None if the
    objective marks no tokens."""

    def with_marked_tokens(
        self, objective: MarkingObjective, logprobs_N: Tensor, advantages_N: Tensor, draw: random.Random
    ) -> Minibatch:
        """Returns a copy of the minibatch whose `marked_N` has the tokens that the objective marks.

        The loss treats marked tokens differently (`MarkingObjective.marked_tokens`).

        Args:
            logprobs_N: The log-probs of all trained tokens of the iteration.
            advantages_N: The advantages of all trained tokens of the iteration.
            draw: Draws random numbers, the same ones on every rank.
        """
        is_trained_N = self.weights_N != 0
        marked_N = torch.zeros_like(is_trained_N)
        marked_N[is_trained_N] = objective.marked_tokens(
            logprobs_N[is_trained_N], advantages_N[is_trained_N], draw
        )
        return replace(self, marked_N=marked_N)

    @staticmethod
    def of(sequences: Sequences, units: Sequence[Unit], objective: Objective) -> Minibatch:
        """Makes the minibatch of some of the sequences.

        Sequences to which the objective gives the weight 0 aren't computed, but count in `sequence_weight`
        and `pair_weight`.

        Args:
            units: The sequences: the index of each one, or both indices of each pair that the objective
                compares. The minibatch's own `units` have the indices of their rows instead.
        """
        starts = sequences.starts
        indices = list(itertools.chain.from_iterable(units))
        lengths = [starts[index + 1] - starts[index] for index in indices]
        scores = [sequences.scores[index] for index in indices]
        weights = objective.sequence_weights(lengths, scores)
        weights_N = torch.zeros(sequences.n_tokens)
        weighted_sequences = set()
        for index, weight in zip(indices, weights, strict=True):
            weights_N[starts[index] : starts[index + 1]] = weight
            if weight != 0:
                weighted_sequences.add(index)
        weighted_units = [unit for unit in units if weighted_sequences.intersection(unit)]
        return Minibatch(
            units=[sequences.rows_of(unit) for unit in weighted_units],
            keep_units=objective.needs_whole_sequences or objective.needs_pairs,
            weights_N=weights_N,
            weight_sum=float(weights_N.double().sum()),  # a float32 sum over many tokens would be rounded
            sequence_weight=1 / len(indices),
            pair_weight=1 / len(units),
        )


@dataclass(frozen=True)
class MicroBatch:
    """The rows that a model computes at once.

    A dummy repeats rows so that all ranks run the model equally often. Its results are dropped, and its loss
    has weight 0.
    """

    inputs: ModelInputs
    flat_index_N: Tensor
    """The indices of its trained tokens in the iteration's flat tensors, int64."""
    trained_tokens: tuple[int, ...]
    """The number of trained tokens of each of its sequences. Some rows of a sequence may be in another
    micro-batch; their tokens don't count here."""
    computed_tokens: int
    """The number of tokens without padding."""
    is_dummy: bool
    loss_scale: float
    """The factor of this rank's loss: 1 / (number of ranks that compute this micro-batch together); 0 for a
    dummy."""
    teacher_inputs: ModelInputs | None = None
    """The same rows as the teacher sees them, with the same trained tokens in the same order; None if no
    teacher is needed."""


@dataclass(frozen=True)
class PlannedBatch:
    """The indices of the rows (or trees) of a micro-batch. A dummy only keeps the ranks in step.

    Example: the rows 4 and 7, and a dummy of row 2: ``PlannedBatch((4, 7)), PlannedBatch((2,), True)``.
    """

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
    """Returns the micro-batches of each rank, the same number for all.

    Units go, longest first, to the rank with the fewest tokens so far. On a rank, units of similar length
    then share a micro-batch.

    Args:
        lengths: The lengths of all rows of the iteration; with the layout ``tree``, of all trees of rows.
        units: The units of this minibatch. A unit has the indices of rows that must share a micro-batch, or
            the index of a tree.
        max_tokens: The most tokens of a micro-batch, with padding. A longer unit has one to itself.
        max_rows: The most rows of a micro-batch; None for no limit.
    """
    width_of: dict[Unit, int] = {}
    tokens_of: dict[Unit, int] = {}
    for unit in units:
        lengths_of_rows = [lengths[index] for index in unit]
        width_of[unit] = max(lengths_of_rows)  # a unit is padded to its longest row
        tokens_of[unit] = sum(lengths_of_rows)

    # Distribute the units over the ranks.
    units_by_rank: list[list[Unit]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap: the rank with the fewest tokens comes first
    # Units of equal size are in the order of their indices, so that every rank makes the same plan.
    for unit in sorted(units, key=lambda unit: (-width_of[unit], -tokens_of[unit], unit)):
        load, rank = heapq.heappop(loads)
        units_by_rank[rank].append(unit)
        heapq.heappush(loads, (load + tokens_of[unit], rank))

    # Cut the units of each rank, in their order, into micro-batches.
    planned: list[list[PlannedBatch]] = []
    for units_of_rank in units_by_rank:
        batches: list[PlannedBatch] = []
        batch: Unit = ()  # the rows of the micro-batch that is being filled
        width = tokens_of_batch = 0
        for unit in units_of_rank:
            if not batch:
                width = width_of[unit]
            rows_with_unit = len(batch) + len(unit)
            tokens_with_unit = tokens_of_batch + tokens_of[unit]
            if layout == "padded":
                # The longest unit comes first, so a padded micro-batch is as wide as its first unit.
                tokens_with_unit = width * rows_with_unit
            has_room = tokens_with_unit <= max_tokens and (max_rows is None or rows_with_unit <= max_rows)
            if batch and not has_room:
                batches.append(PlannedBatch(batch))
                batch, tokens_of_batch, width = (), 0, width_of[unit]
            batch += unit
            tokens_of_batch += tokens_of[unit]
        if batch:
            batches.append(PlannedBatch(batch))
        planned.append(batches)

    # With ZeRO 2 and 3 every backward pass is a collective call: a rank with fewer micro-batches would make
    # the others wait for ever. So it repeats the smallest unit.
    n_batches = max(map(len, planned))
    dummy = PlannedBatch(min(units, key=lambda unit: (tokens_of[unit], unit)), is_dummy=True)
    return [batches + [dummy] * (n_batches - len(batches)) for batches in planned]


def micro_batches(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: Trainer,
    ranks: Ranks,
    *,
    keep_units: bool = False,
    with_gradient: bool = True,
    with_teacher: bool = False,
) -> Iterator[MicroBatch]:
    """Yields this rank's micro-batches of the units; every rank has the same number.

    Args:
        units: Each unit has the indices of some rows.
        keep_units: Whether the rows of a unit must be in the same micro-batch.
        with_gradient: Whether a backward pass follows. Without one, a micro-batch may have twice the tokens.
        with_teacher: Whether a teacher runs over the same rows. Its prompts don't count in the limits of a
            micro-batch.
    """
    batches_by_group = _plan_rows(sequences, units, settings, ranks, keep_units, with_gradient)
    group = ranks.rank // settings.sequence_parallel_size
    for planned_at_once in zip(*batches_by_group, strict=True):  # the next micro-batch of each group
        # The head is computed in chunks of positions. Every rank computes as many chunks as the rank with the
        # most positions needs: see `PolicyModule`.
        positions_by_group = []
        for planned_of_group in planned_at_once:
            positions_by_group.append(sum(sequences.rows[row].trained for row in planned_of_group.indices))
        planned = planned_at_once[group]
        batch = micro_batch(
            sequences,
            planned.indices,
            settings.layout,
            ranks.device,
            max_positions=max(positions_by_group),
            is_dummy=planned.is_dummy,
            ranks_together=settings.sequence_parallel_size,
        )
        if with_teacher:
            # If no answer has a privileged prompt, the teacher reads the policy's rows. The loss needs its
            # results as an input, but doesn't count them then (`has_teacher_N`).
            sequences_of_teacher = sequences.of_teacher or sequences
            batch_of_teacher = micro_batch(
                sequences_of_teacher, planned.indices, settings.layout, ranks.device
            )
            batch = replace(batch, teacher_inputs=batch_of_teacher.inputs)
        yield batch


def rows_of_rank(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: Trainer,
    ranks: Ranks,
    *,
    keep_units: bool = False,
    with_gradient: bool = True,
) -> set[int]:
    """Returns the rows that `micro_batches` would compute on this rank.

    With the layout ``tree``, this needs the tokens of all rows; with other layouts, only their lengths.
    """
    batches_by_group = _plan_rows(sequences, units, settings, ranks, keep_units, with_gradient)
    group = ranks.rank // settings.sequence_parallel_size
    return set(itertools.chain.from_iterable(batch.indices for batch in batches_by_group[group]))


def sequences_of_rank(
    episodes: Collection[Episode],
    settings: Trainer,
    ranks: Ranks,
    units_by_step: Sequence[Sequence[Unit]],
    *,
    scores_all: bool,
) -> Sequences:
    """Returns the episodes' sequences, with the tokens of only those rows that this rank computes.

    A sequence is an episode, and a row is an input of the model. A sequence has one row or, if its answer has
    threads, one for each sampled part.

    Args:
        units_by_step: The units of each step. A unit has the index of a sequence, or the two indices of a
            pair of sequences.
        scores_all: Whether models are run over all sequences before the first step.
    """
    # A single rank computes all rows. With the layout `tree`, their tokens decide which rank computes which
    # rows, so every rank needs all tokens.
    if ranks.world_size == 1 or settings.layout == "tree":
        return Sequences.of(episodes)
    sequences = _with_tokens_of_rank(episodes, settings, ranks, units_by_step, scores_all)
    if sequences.critic_has_prompts:
        # The critic sees other prompts than the policy, so its rows have other tokens. It computes the values
        # of all sequences before the first step.
        sequences_of_critic = _with_tokens_of_rank(
            EpisodesOfCritic(episodes), settings, ranks, units_by_step, scores_all=True
        )
        sequences = replace(sequences, of_critic=sequences_of_critic)
    return sequences


def _with_tokens_of_rank(
    episodes: Collection[Episode],
    settings: Trainer,
    ranks: Ranks,
    units_by_step: Sequence[Sequence[Unit]],
    scores_all: bool,
) -> Sequences:
    """Returns the episodes' sequences as `sequences_of_rank` does, for a layout other than ``tree``.

    With such a layout, only the lengths of rows decide which rank computes which rows. So the rows of this
    rank are found without tokens, and then only their tokens are loaded.
    """
    without_tokens = Sequences.of(episodes, rows_with_tokens=())
    computed_rows: set[int] = set()
    if scores_all:
        distinct_rows = without_tokens.distinct_rows()  # equal rows are scored once
        computed_rows |= rows_of_rank(without_tokens, distinct_rows, settings, ranks, with_gradient=False)
    for units in units_by_step:
        minibatch = Minibatch.of(without_tokens, units, settings.objective)
        if minibatch.units:
            computed_rows |= rows_of_rank(
                without_tokens,
                minibatch.units,
                settings,
                ranks,
                # The rows of a unit stay together if the objective needs whole sequences.
                keep_units=minibatch.keep_units,
            )
    if settings.reference_scores == "while_sampling":
        # After sampling, the reference scores the rows that it hasn't scored yet. Each rank has its share.
        computed_rows |= rows_scored_by(without_tokens, ranks)
    return Sequences.of(episodes, rows_with_tokens=computed_rows)


def rows_scored_by(sequences: Sequences, ranks: Ranks) -> set[int]:
    """Returns this rank's share of all rows, for the case that the reference has to score them after
    sampling: every `world_size`-th row. `ReferencePrefetch` scores only those rows of the share that no rank
    has submitted during sampling."""
    return set(range(ranks.rank, len(sequences.rows), ranks.world_size))


def _plan_rows(
    sequences: Sequences,
    units: Sequence[Unit],
    settings: Trainer,
    ranks: Ranks,
    keep_units: bool,
    with_gradient: bool,
) -> list[list[PlannedBatch]]:
    """Plans the micro-batches of each group of ranks, with the indices of their rows.

    A group is the `sequence_parallel_size` ranks that compute a micro-batch together; by default one rank.
    """
    max_tokens = settings.tokens_per_micro_batch * settings.sequence_parallel_size
    if not with_gradient:
        max_tokens *= 2  # no activations are kept for a backward pass
    groups = ranks.world_size // settings.sequence_parallel_size
    plan_batches = partial(
        plan_micro_batches,
        ranks=groups,  # a group computes its micro-batches like a single rank
        max_tokens=max_tokens,
        max_rows=settings.sequences_per_micro_batch,
        layout=settings.layout,
    )
    if settings.layout != "tree":
        lengths = [row.length for row in sequences.rows]
        return plan_batches(lengths, units if keep_units else _split_into_single_rows(units))
    # The rows of a tree are computed together, so trees are distributed, and not rows.
    trees = _grow_trees(sequences, units, max_tokens, keep_units)
    lengths = [tree.tokens for tree in trees]
    units_of_trees = [(index,) for index in range(len(trees))]  # each tree is a unit by itself
    batches_by_group = []
    for batches_of_trees in plan_batches(lengths, units_of_trees):
        batches_by_group.append([_with_rows_of_trees(batch, trees) for batch in batches_of_trees])
    return batches_by_group


def _with_rows_of_trees(batch: PlannedBatch, trees: Sequence[_TreeOfRows]) -> PlannedBatch:
    """Returns the batch with the indices of rows in place of those of trees."""
    rows = itertools.chain.from_iterable(trees[index].rows for index in batch.indices)
    return replace(batch, indices=tuple(rows))


def _split_into_single_rows(units: Iterable[Unit]) -> list[Unit]:
    """Returns a unit for each row of the units."""
    return [(row,) for row in itertools.chain.from_iterable(units)]


def micro_batch(
    sequences: Sequences,
    indices: Sequence[int],
    layout: Layout,
    device: torch.device,
    *,
    max_positions: int = 0,
    is_dummy: bool = False,
    ranks_together: int = 1,
) -> MicroBatch:
    """Makes the tensors of a micro-batch of rows, which `ranks_together` ranks compute together.

    Args:
        max_positions: The largest number of trained positions in the micro-batches that all ranks compute at
            this time; 0: only those of this micro-batch count. It decides in how many chunks each rank
            computes the head (the output layer).
    """
    rows = [sequences.rows[i] for i in indices]
    inputs, computed_tokens = _lay_out(rows, layout)
    tensors_on_device = {
        name: value.to(device) for name, value in inputs._asdict().items() if isinstance(value, Tensor)
    }
    trained_tokens = []
    for _, rows_of_sequence in itertools.groupby(rows, key=lambda row: row.sequence):
        trained_tokens.append(sum(row.trained for row in rows_of_sequence))
    return MicroBatch(
        inputs=inputs._replace(**tensors_on_device, max_positions=max_positions),
        flat_index_N=sequences.flat_index(indices),
        trained_tokens=tuple(trained_tokens),
        computed_tokens=computed_tokens,
        is_dummy=is_dummy,
        # The losses of all ranks are added up. So a dummy counts nothing, and a micro-batch that several
        # ranks compute together counts once.
        loss_scale=0.0 if is_dummy else 1 / ranks_together,
    )


def _lay_out(rows: Sequence[Row], layout: Layout) -> tuple[ModelInputs, int]:
    """Returns the model's inputs for these rows, and their number of tokens without padding.

    Example: the rows ``5 6 7`` and ``5 6 8 9``, by layout::

        padded    5 6 7 0          packed   5 6 7 5 6 8 9          tree   5 6 7 8 9
                  5 6 8 9                   positions 0 1 2 0 1 2 3       depths 0 1 2 2 3
    """
    ids_by_row = [row.token_ids for row in rows]
    # The positions in each row whose next token is trained. A position predicts the token after it.
    predicting_by_row = [row.predicting for row in rows]
    labels_by_row = [
        ids_T[predicting + 1] for ids_T, predicting in zip(ids_by_row, predicting_by_row, strict=True)
    ]
    labels_N = torch.cat(labels_by_row)
    if layout == "tree":
        # All rows become one: their prefix tree. The position id of a token is its depth. The token is
        # predicted by its parent, which may be anywhere before it in the order of the depth-first walk.
        tree = PrefixTree.of([ids_T.numpy() for ids_T in ids_by_row])
        # The node of each token of each row.
        nodes_by_row = [torch.from_numpy(path) for path in tree.paths]
        positions_by_row = [
            nodes_T[predicting] for nodes_T, predicting in zip(nodes_by_row, predicting_by_row, strict=True)
        ]
        positions_N = torch.cat(positions_by_row)
        ids_1T = torch.from_numpy(tree.token_ids_T)[None]
        depths_1T = torch.from_numpy(tree.depths_T)[None]
        # The last token of the subtree below each token. By it, attention finds a token's ancestors.
        subtree_last_1T = torch.from_numpy(tree.subtree_last_T)[None]
        inputs = ModelInputs(ids_1T, positions_N, labels_N, depths_1T, subtree_last_1T)
        return inputs, len(tree.token_ids_T)
    tokens = sum(row.length for row in rows)
    if layout == "packed":
        # All rows become one. Position ids start again at each row, by which transformers finds the rows.
        ends = list(itertools.accumulate(len(ids_T) for ids_T in ids_by_row))
        starts = [0, *ends[:-1]]
        positions_by_row = [
            predicting + start for predicting, start in zip(predicting_by_row, starts, strict=True)
        ]
        positions_N = torch.cat(positions_by_row)
        position_ids_1T = torch.cat([torch.arange(len(ids_T)) for ids_T in ids_by_row])[None]
        return ModelInputs(torch.cat(ids_by_row)[None], positions_N, labels_N, position_ids_1T), tokens
    # Padding on the right needs no attention mask: a token sees only tokens on its left.
    ids_BT = pad_sequence(ids_by_row, batch_first=True)
    width = ids_BT.shape[1]
    # Positions count through the flattened batch, row after row.
    positions_by_row = [predicting + number * width for number, predicting in enumerate(predicting_by_row)]
    positions_N = torch.cat(positions_by_row)
    return ModelInputs(ids_BT, positions_N, labels_N), tokens


class _TreeOfRows(NamedTuple):
    """Rows that are computed together, as their prefix tree."""

    rows: Unit
    tokens: int
    """The number of tokens of the prefix tree."""


def _grow_trees(
    sequences: Sequences, units: Sequence[Unit], max_tokens: int, keep_units: bool
) -> list[_TreeOfRows]:
    """Packs the units of each problem into prefix trees of at most `max_tokens` tokens.

    A unit that alone has more tokens is split into its rows, unless `keep_units` is set.
    """
    parts_by_problem: dict[str, list[Unit]] = {}
    # A minibatch shuffles its units. Here the rows of a problem are in their order in the iteration.
    for unit in sorted(units):
        first_sequence = sequences.rows[unit[0]].sequence
        problem = sequences.groups[first_sequence]
        parts = parts_by_problem.setdefault(problem, [])
        if keep_units or _fits_into_tree(sequences, unit, max_tokens):
            parts.append(unit)
        else:
            parts += _split_into_single_rows([unit])
    trees: list[_TreeOfRows] = []
    for parts in parts_by_problem.values():
        trees += _pack_into_trees(sequences, parts, max_tokens)
    return trees


def _fits_into_tree(sequences: Sequences, unit: Unit, max_tokens: int) -> bool:
    """Returns whether a unit's prefix tree has at most `max_tokens` tokens."""
    tokens_without_sharing = sum(sequences.rows[row].length for row in unit)
    if tokens_without_sharing <= max_tokens:
        return True  # the tree has at most as many tokens, so it needn't be made
    tokens_of_tree = _add_rows(GrowingTree(), sequences, unit)
    return tokens_of_tree <= max_tokens


def _add_rows(tree: GrowingTree, sequences: Sequences, rows: Unit) -> int:
    """Adds the rows, and returns the tree's new number of tokens."""
    for row in rows:
        tree.add(sequences.rows[row].token_ids.numpy())
    return tree.size


def _pack_into_trees(sequences: Sequences, parts: Sequence[Unit], max_tokens: int) -> list[_TreeOfRows]:
    """Puts the rows of the parts into trees of at most `max_tokens` tokens, in their order. The rows of a
    part stay together; a part with more tokens has a tree to itself."""
    trees: list[_TreeOfRows] = []
    tree, tokens_of_tree = GrowingTree(), 0
    rows: Unit = ()
    for part in parts:
        # How many tokens the tree has with this part is known only once the part is added.
        tokens_with_part = _add_rows(tree, sequences, part)
        if rows and tokens_with_part > max_tokens:
            # The rows before this part become a tree, and the next tree begins with this part.
            trees.append(_TreeOfRows(rows, tokens_of_tree))
            tree, rows = GrowingTree(), ()
            tokens_with_part = _add_rows(tree, sequences, part)
        rows, tokens_of_tree = rows + part, tokens_with_part
    trees.append(_TreeOfRows(rows, tokens_of_tree))
    return trees
