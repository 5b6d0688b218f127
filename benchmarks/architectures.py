"""Is the model that is trained the model that was named? A sweep over the architectures of transformers.

    python benchmarks/architectures.py                       # all, and writes docs/results/architectures.md
    python benchmarks/architectures.py --only granite phi3   # some, and prints them
    python benchmarks/architectures.py --vllm llama granite  # these on a server of vLLM as well

Each architecture is made tiny, with random weights large enough to matter, and with what this package got
wrong before: dropout of 0.1 wherever the configuration has any, logits that are scaled or capped, positions
that depend on the longest row, buffers that are learned elsewhere. What the package computes or writes is
held to the model itself, as transformers runs it in evaluation mode. A cell is "right", or "refused" where a
ValueError says so by name, or WRONG.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.architectures import COLUMNS, LIMIT, MORE, NAMES, Cell, sweep  # noqa: E402

PAGE = ROOT / "docs/results/architectures.md"
TESTS = {
    "log-probs": "a single sequence",
    "dropout": "the same with dropout 0.1, if the architecture has dropout",
    "neighbours": "a sequence that is padded next to a longer one",
    "packed": "two sequences in one row (`trainer.layout: 'packed'`)",
    "checkpoint": "a policy that treetune writes and transformers loads",
    "reload": "weights that are sharded while they are read (ZeRO-3)",
    "LoRA": "adapters that are merged and loaded",
    "in-process": "40 tokens of the engine `in_process`, after a weight update",
    "vLLM": "40 tokens of a vLLM server, after a weight update; only architectures that `--vllm` names",
}
"""What each column of the table tests."""


def page(results: dict[str, dict[str, Cell]], seconds: float) -> Iterator[str]:
    """The lines of the page."""
    import transformers

    made = {name: cells for name, cells in results.items() if "made" not in cells}
    counts = {
        kind: sum(cell.kind == kind for cells in made.values() for cell in cells.values())
        for kind in ("right", "refused", "WRONG", "error")
    }
    yield "# Architectures"
    yield ""
    yield "Does treetune train your model's architecture correctly? Look up its `model_type` in the table."
    yield ""
    yield "```bash"
    yield "python benchmarks/architectures.py"
    yield "```"
    yield ""
    yield (
        f"The table has {len(made)} architectures of transformers {transformers.__version__}. Each was tested"
        " with a tiny model of random weights, in float32 on a CPU. Each cell compares log-probs that"
        " treetune computes with those of the same model in transformers."
        f" *right*: no log-prob differs by more than {LIMIT:g} nats, or by more than rounding explains (a"
        " note says so). *refused*: treetune refuses such a run, with the message in the note. An empty cell"
        f" was not tested. {counts['right']} cells are right, {counts['refused']} are refused,"
        f" {counts['WRONG']} are wrong and {counts['error']} ended with another error. The command takes"
        f" {seconds:.0f} s."
    )
    yield ""
    yield "| column | tests |"
    yield "|---|---|"
    for column, test in TESTS.items():
        yield f"| {column} | {test} |"
    yield ""
    yield "A larger model of the same architecture may use features that the tiny model does not have."
    yield ""
    yield "| architecture | " + " | ".join(COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    notes: dict[str, int] = {}
    for name, cells in made.items():
        shown = []
        for column in COLUMNS:
            cell = cells.get(column)
            if cell is None:
                shown.append("")
                continue
            mark = f" [{notes.setdefault(cell.note, len(notes) + 1)}]" if cell.note else ""
            shown.append(cell.kind + mark)
        yield f"| {name} | " + " | ".join(shown) + " |"
    yield ""
    for note, number in notes.items():
        yield f"{number}. {note}"
    failed = {name: cells["made"].note for name, cells in results.items() if "made" in cells}
    if failed:
        yield ""
        yield "Not tested, because no tiny model could be made: " + "; ".join(
            f"{name} ({note})" for name, note in failed.items()
        )


def main() -> None:
    import transformers

    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, which are printed")
    parser.add_argument("--vllm", nargs="*", default=[], metavar="NAME", help="on a server of vLLM too")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS[:-1])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    began, results = time.monotonic(), {}
    for name in options.only or [*NAMES, *MORE]:
        columns = (*options.columns, *(["vLLM"] if name in options.vllm else []))
        cells = results[name] = sweep(name, columns)
        told = {column: cell for column, cell in cells.items() if cell.kind != "right" or options.only}
        lines = [f"{column}: {cell.kind} {cell.note}".strip() for column, cell in told.items()]
        print(name, *lines, sep="\n    ")
        sys.stdout.flush()
    if not options.only:
        PAGE.write_text("\n".join(page(results, time.monotonic() - began)) + "\n")
    if any(cell.kind in ("WRONG", "error") for cells in results.values() for cell in cells.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
