"""Checks that treetune trains models correctly: a sweep over the architectures of transformers.

    python benchmarks/architectures.py                       # all, and writes docs/results/architectures.md
    python benchmarks/architectures.py --only granite phi3   # some, and prints them
    python benchmarks/architectures.py --vllm llama granite  # these on a server of vLLM as well

Each architecture is tested with a tiny model, whose random weights are large enough to matter. The models
have what treetune got wrong in the past: dropout of 0.1 wherever the configuration has any, logits that are
scaled or capped, positions that depend on the longest row, buffers that are learned elsewhere. What treetune
computes or writes is compared with the model itself, as transformers runs it in evaluation mode. The result
of a test is "right", "refused" (a ValueError that names the architecture), WRONG, or another error.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.architectures import COLUMNS, LIMIT, MORE, NAMES, Cell, sweep  # noqa: E402

PAGE = ROOT / "docs/results/architectures.md"
Results = dict[str, dict[str, Cell]]
"""Cells of the table by architecture and column."""
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
"""The test of each column of the table."""
NOT_MADE = "made"
"""The column of an architecture of which no tiny model could be made, instead of all others."""


def write_page(results: Results, seconds: float) -> Iterator[str]:
    """Yields the lines of the page.

    Args:
        results: The results of all architectures.
        seconds: The seconds that the sweep took.
    """
    import transformers

    tested = {name: cells for name, cells in results.items() if NOT_MADE not in cells}
    counts = Counter(cell.kind for cells in tested.values() for cell in cells.values())
    yield "# Architectures"
    yield ""
    yield "Does treetune train your model's architecture correctly? Look up its `model_type` in the table."
    yield ""
    yield "```bash"
    yield "python benchmarks/architectures.py"
    yield "```"
    yield ""
    yield (
        f"The table has {len(tested)} architectures of transformers {transformers.__version__}. Each was"
        " tested with a tiny model of random weights, in float32 on a CPU. Each cell compares log-probs that"
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
    notes: dict[str, int] = {}  # notes and their numbers
    for name, cells in tested.items():
        texts = []
        for column in COLUMNS:
            cell = cells.get(column)
            if cell is None:
                texts.append("")
            elif cell.note:
                # Cells with the same note share its number.
                number = notes.setdefault(cell.note, len(notes) + 1)
                texts.append(f"{cell.kind} [{number}]")
            else:
                texts.append(cell.kind)
        yield f"| {name} | " + " | ".join(texts) + " |"
    yield ""
    for note, number in notes.items():
        yield f"{number}. {note}"
    not_made = [f"{name} ({cells[NOT_MADE].note})" for name, cells in results.items() if NOT_MADE in cells]
    if not_made:
        yield ""
        yield f"Not tested, because no tiny model could be made: {'; '.join(not_made)}"


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, which are printed")
    parser.add_argument("--vllm", nargs="*", default=[], metavar="NAME", help="on a server of vLLM too")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS[:-1])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    start = time.monotonic()
    results: Results = {}
    has_mistakes = False
    for name in options.only or [*NAMES, *MORE]:
        columns = [*options.columns]
        if name in options.vllm:
            columns.append("vLLM")
        results[name] = sweep(name, tuple(columns))
        lines = []
        for column, cell in results[name].items():
            if cell.kind != "right" or options.only:
                lines.append(f"{column}: {cell.kind} {cell.note}".strip())
            if cell.kind in ("WRONG", "error"):
                has_mistakes = True
        print(name, *lines, sep="\n    ")
        sys.stdout.flush()
    if not options.only:
        PAGE.write_text("\n".join(write_page(results, time.monotonic() - start)) + "\n")
    if has_mistakes:
        sys.exit(1)


if __name__ == "__main__":
    main()
