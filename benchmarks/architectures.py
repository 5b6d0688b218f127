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
    yield "```bash"
    yield "python benchmarks/architectures.py"
    yield "```"
    yield ""
    yield (
        f"{len(made)} architectures of transformers {transformers.__version__}, tiny and with random weights,"
        " in float32 on a CPU. Each cell compares what treetune computes or writes with the model itself, as"
        f" transformers runs it. Of the cells, {counts['right']} are right, {counts['refused']} are refused"
        " by a message that names the architecture or the remedy,"
        f" {counts['WRONG']} are wrong and {counts['error']} end with another error. The sweep took"
        f" {seconds:.0f} s."
    )
    yield ""
    yield (
        f"*Right*: no log-prob differs by more than {LIMIT:g} nats, or only by rounding, as a note says."
        " Dropout is 0.1 where a configuration has any. *Neighbours*: a row padded next to a longer one."
        " *Packed*: two sequences in one row. *Checkpoint*: a policy that is written and loaded by"
        " transformers. *Reload*: weights that are sharded while they are read (ZeRO-3). *LoRA*: adapters"
        " merged and loaded. *In-process* and *vLLM*: log-probs of 40 sampled tokens after a weight update."
        " Empty cells were not tried."
    )
    yield ""
    yield (
        "Larger models of an architecture may use features that the tiny one does not. The column vLLM has"
        " the architectures that `--vllm` names."
    )
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
        yield "Not made with these sizes, so that nothing is known of them: " + "; ".join(
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
