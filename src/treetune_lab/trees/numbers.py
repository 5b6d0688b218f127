"""What is known of sampled trees, as metrics of an iteration."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean, pooled
from treetune.rollouts.numbers import Number, NumberGroup, declare
from treetune.tree import Tree
from treetune.vocabulary import Metrics

declare(
    NumberGroup(
        "tree",
        {
            "answers": Number("answers of a tree"),
            "nodes": Number("nodes of a tree: stretches of tokens between branchings"),
            "depth": Number("branchings on the longest way through a tree"),
            "tokens": Number("sampled tokens of a tree"),
            "tokens_of_chains": Number("tokens of a tree's answers, had each been sampled from the prompt"),
            "shared": Number(
                "share of answers' tokens that weren't sampled for them", share=True, label="shared"
            ),
        },
    )
)


def tree_metrics(context: RolloutContext, trees: Sequence[Tree]) -> Metrics:
    """Means over all ranks' trees; ``tree/shared`` is 1 − tokens / tokens_of_chains of all. Collective."""
    columns: dict[str, list[float]] = {name: [] for name in ("answers", "nodes", "depth", "tokens")}
    columns["tokens_of_chains"] = []
    for tree in trees:
        columns["answers"].append(len(tree.leaves))
        columns["nodes"].append(len(tree.nodes))
        columns["depth"].append(max(map(len, tree.paths)) - 1)
        columns["tokens"].append(sum(len(node.segment.token_ids) for node in tree.nodes))
        columns["tokens_of_chains"].append(sum(len(leaf.response_ids) for leaf in tree.leaves))
    found = {f"tree/{name}": mean(values) for name, values in pooled(context, "trees", columns).items()}
    return found | {"tree/shared": 1 - found["tree/tokens"] / found["tree/tokens_of_chains"]}
