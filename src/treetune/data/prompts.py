"""The prompts of `make_threads`. A `{name}` is filled in."""

from __future__ import annotations

ANSWER_AGAIN = (
    "That could not be used: {reason}. Please answer the last question again, whole, in exactly the form that"
    " it asks for."
)

STEPS = """\
Below are a problem and a written solution to it. Somebody wrote the solution from top to bottom. We \
want to know which stretches of it several people could have written at the same moment, each of them \
knowing the problem and everything above those stretches, but nothing of what the others are writing. We \
will get there in six small tasks.

<problem>
{problem}
</problem>

<solution>
{numbered}
</solution>

The number before each | is the number of that line; it is not a part of the solution.

Task 1 of 6: list the main steps of the solution. A step is a run of neighbouring lines with one \
purpose. Together the steps hold all {count} lines, each line once, in their order. Write one line per \
step: its number, its first and last line, what it does in a few words, and the numbers of the earlier \
steps whose results it uses."""

SUBSTEPS = """\
Task 2 of 6: divide every main step that does more than one thing into sub-steps (1.1, 1.2, …), in the \
same form as before, and a sub-step that still does more than one thing once more (1.1.1, 1.1.2, …), but \
no further. Two cases, two computations that don't need each other, or the same check for several values \
are sub-steps of their own."""

GROUPS = """\
Task 3 of 6: find groups of main steps that stand next to each other and are independent of each other: \
none uses, corrects, repeats or refers to what another one of its group found out. What they all build \
on stands above the group. Long steps gain most; steps of a line or two are not worth it. Name the steps \
of each group with their lines and say why none needs another, or say that there is no such group. If in \
doubt, leave a step out."""

SUBGROUPS = """\
Task 4 of 6: do the same within each main step that is in no group: find groups of its sub-steps (of \
either level) that stand next to each other and are independent in that sense."""

RANGES = """\
Task 5 of 6: write the groups down for a program. One <parallel> element per group, in the order of the \
solution, with one <thread> element per independent stretch, holding its first and last line:

<parallel><thread>4-9</thread><thread>10-17</thread></parallel>
<parallel><thread>25-31</thread><thread>32-40</thread><thread>41-44</thread></parallel>

The threads of a group follow each other without lines between them that belong to none, no line is in \
two threads, and groups are not inside each other. If there is no group at all, write <none/>."""

CHECK = """\
Task 6 of 6: check these groups once more with fresh eyes. They are numbered, and so are the threads in each:

{blocks}

Read the lines of each thread again. It passes if somebody who sees the problem, the lines above the \
group and none of the other threads could have written it with at most a few words changed. It fails if \
it uses a result, a name or a decision that first appears in another thread of its group. Answer with a \
JSON list and nothing else, one object per thread:

[{{"group": 1, "thread": 1, "pass": true, "note": "why, in a few words"}}, …]"""

REFERENCES = """\
Two people wrote parts of the solution to a problem at the same time, without seeing each other's text. \
But the part below was cut out of a text that one person wrote from top to bottom, so it may still speak \
of the other part.

<problem>
{problem}
</problem>

Both know what stands above their parts:

<known>
{known}
</known>

The other part, which the writer can't know:

<hidden>
{hidden}
</hidden>

The part to put right:

<part>
{part}
</part>

Find everything in the part that only makes sense to someone who has read the hidden text: words such as \
"likewise", "as in the previous case", "the other root", or a result that first appears there. Change as \
little as will do: leave out the reference, or say the same from the problem and the known text alone. \
What the part itself finds out stays as it is, also its numbers and its style. Answer with a JSON list \
of replacements and nothing else:

[{{"source": "words as they stand in the part", "destination": "words that replace them"}}]

Each source must occur exactly once in the part, letter by letter; take in neighbouring words where it \
would occur more often. If nothing has to change, answer []. In JSON, a backslash is written twice."""

OUTLINES = """\
The solution to a problem is being written. At some point the writer hands out {count} pieces of work \
that are done at the same time, and says beforehand in one or two sentences what each of them is to do.

<problem>
{problem}
</problem>

What stands above:

<known>
{known}
</known>

What will come of each piece of work:

{parts}

Write the announcements, one per piece and in this order, as the writer could have put them before any \
of this was done: they tell what to look at and how, in terms of the problem and of what stands above, \
and never what comes out: no result, no intermediate value, no verdict. One or two short sentences each, \
on one line, without numbering. Answer with a JSON list of {count} strings and nothing else. In JSON, a \
backslash is written twice."""
