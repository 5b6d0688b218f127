"""Credit of treetune for the traces of verifiers (v1), which trainers such as prime-rl train on.

    pip install verifiers    # into an environment with treetune's base dependencies

    from verifiers_traces import assign_credit
    assign_credit(traces, credit={"type": "group"})

Traces of the same task are a group. The advantages are written where verifiers keeps them, into
`MessageNode.advantages`: one for each sampled token. A trace must have a single branch, i.e. be a
conversation that does not fork. Tokens of tools and users are part of the answer, but are not trained.
"""

from treetune.credit import GradedAnswer, advantages


def assign_credit(traces, credit, **settings):
    """Writes the advantages of the traces' tokens, and returns treetune's `CreditedAnswers`.

    `settings` are those of `treetune.credit.advantages`.
    """
    branches = []
    for trace in traces:
        if len(trace.branches) != 1:
            raise ValueError(
                f"trace {trace.id} has {len(trace.branches)} branches: give traces of one branch"
            )
        branches += trace.branches
    answers = []
    for trace, branch in zip(traces, branches, strict=True):
        sampled = branch.sampled_mask
        start = sampled.index(True)  # the prompt is all before the first sampled token
        answers.append(
            GradedAnswer(
                branch.token_ids[:start],
                branch.token_ids[start:],
                trace.reward,
                group=trace.task.key or trace.task.hash,
                logprobs=branch.logprobs[start:],
                sampled=sampled[start:],
                data={"task": trace.task.data},
            )
        )
    credited = advantages(answers, credit=credit, **settings)
    for branch, row in zip(branches, credited.advantages, strict=True):
        remaining = iter(
            value for value, is_sampled in zip(row, branch.sampled_mask[-len(row) :]) if is_sampled
        )
        for node in branch.nodes:
            if any(node.mask):
                node.advantages = [next(remaining) for is_sampled in node.mask if is_sampled]
    return credited
