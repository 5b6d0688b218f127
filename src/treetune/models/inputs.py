"""What a policy or a critic is run on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ModelInputs(NamedTuple):
    """B rows of T tokens, and the N positions in them about which the model is asked.

    A tuple, because DeepSpeed looks for tensors in tuples: ZeRO-3's hooks go through what a module is
    called with.
    """

    input_ids_BT: Tensor
    positions_N: Tensor
    """Indices of the flattened ``B*T`` tokens."""
    labels_N: Tensor | None = None
    """The tokens that follow there, which a policy is asked for; a critic needs none."""
    position_ids_BT: Tensor | None = None
    """None: every row counts from 0. Packed rows begin again with each sequence; in a prefix tree it is the
    depth."""
    subtree_last_1T: Tensor | None = None
    """Where the row is a prefix tree, the last node of each node's subtree; see `models.tree_attention`."""
    max_positions: int = 0
    """The largest N that any rank has at this turn. Ranks run their heads on equally many chunks."""

    def __eq__(self, other: object) -> bool:
        # DeepSpeed compares what the ranks of a tensor-parallel group are given. Tuples would ask
        # `tensor == tensor` for one truth value.
        return isinstance(other, ModelInputs) and all(
            torch.equal(one, two.to(one.device))
            if isinstance(one, Tensor) and isinstance(two, Tensor)
            else one is two or (not isinstance(one, Tensor) and one == two)
            for one, two in zip(self, other, strict=True)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other
