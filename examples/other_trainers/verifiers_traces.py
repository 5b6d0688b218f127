"""Assigns treetune's credit to traces of verifiers (v1), which trainers such as prime-rl train on.

    pip install verifiers    # into an environment with treetune's base dependencies

    from verifiers_traces import assign_credit
    assign_credit(traces, credit={"type": "group"})

Traces of the same task are a group. The advantages go where verifiers keeps them: `MessageNode.advantages`
has one for each sampled token of the message. A trace must have a single branch, i.e. be a conversation that
doesn't fork. Tokens of tools and users are part of the answer, but are not trained.
"""

from treetune.credit import GradedAnswer, advantages


def assign_credit(traces, credit, **settings):
    """Writes the advantages of the traces' tokens, and returns treetune's `CreditedAnswers`.

    `settings` are those of `treetune.credit.advantages`.
    """
    answers = [read_answer(trace) for trace in traces]
    credited = advantages(answers, credit=credit, **settings)
    for trace, advantages_T in zip(traces, credited.advantages, strict=True):
        write_advantages(trace.branches[0], advantages_T)
    return credited


def read_answer(trace):
    """Returns the trace as an answer, whose prompt is all that precedes the first sampled token."""
    if len(trace.branches) != 1:
        raise ValueError(f"trace {trace.id} has {len(trace.branches)} branches: give traces of one branch")
    [branch] = trace.branches
    start = branch.sampled_mask.index(True)
    return GradedAnswer(
        branch.token_ids[:start],
        branch.token_ids[start:],
        trace.reward,
        group=trace.task.key or trace.task.hash,
        logprobs=branch.logprobs[start:],
        sampled=branch.sampled_mask[start:],
        data={"task": trace.task.data},
    )


def write_advantages(branch, advantages_T):
    """Writes the advantages into the messages of the branch, those of sampled tokens only.

    `advantages_T` begins with the first sampled token.
    """
    sampled_mask_T = branch.sampled_mask[-len(advantages_T) :]
    sampled_advantages = []
    for advantage, is_sampled in zip(advantages_T, sampled_mask_T, strict=True):
        if is_sampled:
            sampled_advantages.append(advantage)
    start = 0
    for node in branch.nodes:
        sampled_tokens = sum(node.mask)
        if sampled_tokens:
            node.advantages = sampled_advantages[start : start + sampled_tokens]
            start += sampled_tokens
