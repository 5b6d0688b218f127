"""Trees that branch where the policy was least sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.columns import joined
from treetune.vocabulary import Trajectory
from treetune_lab.trees.branching import Branches, Branching, forks_along


@Branching.register("least_sure")
@dataclass(frozen=True, kw_only=True)
class LeastSure(Branching):
    """In each of `rounds` rounds every tree that an answer from the prompt began branches before the
    `positions` tokens that were sampled with the least probability, into `ways` further answers each
    (TreeRL's entropy-guided search, Hou et al., arXiv:2506.11902, section 3.1, which takes −log p of the
    sampled token for its uncertainty). M answers from the prompt make M (1 + rounds · positions · ways).

    A position branches once. **Biased**: whether it branches depends on the token that was sampled there and
    on all other positions, so the answer that shows it is no fair sample of what follows. On the tests'
    language the expected gradient of the credit `tree` is off by 11 % of its length (cosine 0.998).
    """

    unbiased = False

    positions: Annotated[int, Gt(0)] = 2
    ways: Annotated[int, Gt(0)] = 2
    rounds: Annotated[int, Gt(0)] = 1

    def most_answers(self, samples: int) -> int:
        return samples * (1 + self.rounds * self.positions * self.ways)

    def branches(self, answers: Sequence[Trajectory], number: int) -> list[Branches]:
        if number == self.rounds:
            return []
        of_tree: dict[int, list[tuple[float, int, int]]] = {}
        roots: list[int] = []
        for answer, forks in zip(answers, forks_along(answers), strict=True):
            roots.append(answer.sample if answer.fork is None else roots[answer.fork.sample])
            begins = 0 if answer.fork is None else answer.fork.tokens
            logprobs = joined([one.logprobs for one in answer.segments if one.logprobs is not None])
            of_tree.setdefault(roots[-1], []).extend(
                (logprob, answer.sample, tokens)
                for tokens, logprob in enumerate(logprobs.tolist())
                if tokens > begins and tokens not in forks
            )
        return [
            Branches(sample, tokens, self.ways)
            for places in of_tree.values()
            for _, sample, tokens in sorted(places)[: self.positions]
        ]
