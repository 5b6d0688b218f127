"""A program: examples/other_trainers/verifiers_traces.py writes advantages into traces of verifiers.

It makes two traces of one task, of which one has a reply of a tool between two turns, and compares what
verifiers reads from them with the formula of RLOO.
"""

import sys

from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Reward, Trace
from verifiers_traces import assign_credit


def node(role, token_ids, mask, parent):
    fields = {"tool_call_id": "1"} if role == "tool" else {}
    return MessageNode(
        parent=parent,
        message={"role": role, "content": "…", **fields},
        sampled=any(mask),
        token_ids=token_ids,
        mask=mask,
        logprobs=[-0.5] * sum(mask),
    )


def trace(nodes, reward):
    """Returns a trace with what the shim reads; its agent and task are left unchecked."""
    task = type("Task", (), {"key": "2+3", "hash": None, "data": None})()
    return Trace.model_construct(task=task, nodes=nodes, calls=[], rewards={"right": Reward(score=reward)})


prompt = node("user", [1, 2, 3], [False] * 3, None)
right = trace([prompt, node("assistant", [9, 5, 0], [False, True, True], 0)], 1.0)
with_tool = trace(
    [
        prompt,
        node("assistant", [9, 6, 7], [False, True, True], 0),
        node("tool", [4, 4], [False, False], 1),
        node("assistant", [9, 8, 0], [False, True, True], 2),
    ],
    0.0,
)
credited = assign_credit([right, with_tool], credit="rloo")
assert credited.trained[1] == [True, True, False, False, False, True, True]
assert right.branches[0].advantages == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
assert with_tool.branches[0].advantages == [0.0] * 4 + [-1.0, -1.0] + [0.0] * 3 + [-1.0, -1.0]
assert with_tool.nodes[2].advantages is None, "the policy has not sampled the tool's reply"
sys.stdout.write("equal\n")
