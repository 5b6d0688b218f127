"""Credit methods against the true values of start models, without a server: a look in a minute or two.

    for task in wandering fork; do
      treetune --configs configs/signposts/${task}_sft.jsonnet,engines/in_process.jsonnet run_iteration_loop
    done
    python benchmarks/credit_bench_start.py --models experiments/signposts --output docs/results

The methods and true values of benchmarks/credit_bench_models.py for 1,024 answers of the models that SFT
made, at one policy each. Tokens are sampled in this process by plain PyTorch, each sample's from its own
seed: they are those that a server would count, and seconds are not told. Panels that are there are
left as they are."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from tests.support.chains import InlineGrades  # noqa: E402
from treetune.config.build import build  # noqa: E402
from treetune.config.jsonnet import load  # noqa: E402
from treetune.inference.base import EngineLaunch, SamplingParams  # noqa: E402
from treetune.inference.engine import start_engine  # noqa: E402
from treetune.inference.journal import JournaledEngine  # noqa: E402
from treetune.inference.settings import InProcessSettings  # noqa: E402
from treetune.rollouts.context import AnswerSettings, RolloutContext  # noqa: E402
from treetune.runtime.base import PolicyIteration, Runtime  # noqa: E402
from treetune.store.files import write_json  # noqa: E402
from treetune.tree import answers_of  # noqa: E402
from treetune_lab.analyzers.credit_bench import (  # noqa: E402
    CreditBench,
    credited,
    draw_credit,
    table,
)
from treetune_lab.analyzers.credit_measures import Truth, measure, reliability  # noqa: E402
from treetune_lab.analyzers.figures import save  # noqa: E402
from treetune_lab.analyzers.true_values import (  # noqa: E402
    PolicySteps,
    State,
    expanded,
)

STARTS = {"wandering": "wandering", "fork": "fork", "late": "fork", "slips": "slips", "repair": "repair"}
PICTURE = "credit_bench_start"
SAMPLES_OF_TRUTH = 4


def bench(variant: str, policy: Path, problems: int, work: Path) -> dict[str, Any]:
    """A panel's numbers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import treetune.parts  # noqa: F401  # registers all parts
    from treetune.models.tokenizer import codec_of

    configs = (f"signposts/{variant}_grpo.jsonnet", "signposts/bench.jsonnet")
    config = build(Runtime, load(configs).data)
    assert isinstance(config, PolicyIteration)
    sampling = config.rollout.sampling
    assert isinstance(sampling, SamplingParams)
    [analyzer] = config.analyzers
    assert isinstance(analyzer, CreditBench)
    codec = codec_of(AutoTokenizer.from_pretrained(policy))
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    launch = EngineLaunch(policy, work, seed=1, context_length=config.context_length, end_ids=codec.end_ids)
    engine = start_engine(InProcessSettings(), launch)
    context = RolloutContext(
        task=config.task,
        engine=JournaledEngine(engine, work / f"{variant}.jsonl"),
        grader=InlineGrades(config.task.grader),  # type: ignore[arg-type]
        codec=codec,
        seed=1,
        iteration=0,
        settings=AnswerSettings(config.context_length, sampling),
        services=[config.rollout],
    )
    trees, _ = config.rollout.run(context, config.task.problems("train")[:problems])
    answers = list(answers_of(trees))
    print(f"{variant}: {len(answers)} answers", flush=True)
    places = [
        State(one.problem, one.prompt_ids, one.response_ids[:start])
        for one in answers
        for start in (0, *one.step_ends[:-1])
    ]
    distinct = {(one.problem.id, one.begun_ids.tobytes()): one for one in places}
    begun = time.perf_counter()
    steps = PolicySteps(model, 1.0)
    found = dict(
        zip(distinct, expanded(steps, context, list(distinct.values()), SAMPLES_OF_TRUTH), strict=True)
    )
    print(f"{variant}: {len(found)} true values in {time.perf_counter() - begun:.0f} s", flush=True)
    known = iter(found[one.problem.id, one.begun_ids.tobytes()] for one in places)
    truths = []
    for one in answers:
        own = [next(known) for _ in one.step_ends]
        values, noise = tuple(each.value for each in own), tuple(each.noise for each in own)
        truths.append(Truth(one.problem.id, one.step_ends, values, one.reward, noise))
    methods = {}
    for name in sorted(analyzer.methods, key=lambda name: -getattr(analyzer.methods[name], "samples", 0)):
        methods[name] = credited(context, analyzer.methods[name], answers)
        print(f"  {name:28} {methods[name].tokens / len(answers):8.0f} tokens", flush=True)
    return {
        "answers": len(answers),
        "solved": sum(one.reward for one in answers) / len(answers),
        "truth_reliability": reliability(truths),
        "methods": {name: measure(truths, methods[name], 1) | {"seconds": None} for name in analyzer.methods},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, help="where VARIANT/sft lie")
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {PICTURE}.md, .json, .png")
    parser.add_argument("--variants", nargs="+", default=["wandering", "fork", "late"], choices=STARTS)
    parser.add_argument("--problems", type=int, default=128, help="with 8 answers each")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    kept = options.output / f"{PICTURE}.json"
    panels: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    for variant in options.variants:
        if variant not in panels:
            folder = options.models / STARTS[variant] / "sft" / "checkpoints"
            policy = sorted(folder.glob("[0-9]*"))[-1] / "policy"
            panels[variant] = bench(variant, policy, options.problems, options.output / f".{PICTURE}")
            write_json(kept, panels)
    lines = ["# Credit methods against the true values of start models", ""]
    lines += [
        (__doc__ or "").split("\n\n", 2)[2].strip(),
        "",
        f"![quality against tokens]({PICTURE}.png)",
        "",
    ]
    for variant, found in panels.items():
        lines += [
            f"## {variant} ({found['solved']:.0%} solved, {found['answers']} answers)",
            "",
            f"Reliability of the true advantages: {found['truth_reliability']:.4f}.",
            "",
            *table(found["methods"]),
            "",
        ]
    (options.output / f"{PICTURE}.md").write_text("\n".join(lines))
    save(
        draw_credit({variant: found["methods"] for variant, found in panels.items()}), options.output, PICTURE
    )


if __name__ == "__main__":
    main()
