"""Flips single bits in the files of a finished run, and checks that every reader notices or is unharmed.

    python tests/endurance/flipped_bytes.py [--flips 500] [--seed 1] [--output FILE.md]

A small run with an evaluation is trained; it samples in its own process. Each flip changes a random bit of
one file in a copy of the run; each kind of file is chosen equally often. Then four readers try the copy,
each in a forked process: the report, the viewer's pages, a resume for one iteration, and an evaluation. A
reader may name the damage or give the same as for an untouched copy. Other content, a crash or silence is a
fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
DEADLINE_S = 120.0
TOKEN = "a-token-of-the-script"
CONFIG = """(import 'quickstart/grpo.jsonnet') + {
  directory: '%s', experiment_name: 'run',
  model: { type: 'tiny', layers: 1, hidden_size: 64, heads: 2, intermediate_size: 96, context_length: 128 },
  context_length: 128,
  engines+: { policy: { type: 'in_process' } },
  rollout+: { samples: 2, max_tokens: 24, unfinished_reward: 1.0 },
  iterations: %d, problems_per_iteration: 4,
  checkpoints: { every: 1 },
  trainer+: { schedule+: { may_outlast_training: true } },
  evaluation: { sets: [{ split: 'test', problems: 4, samples: 1 } %s] },
}"""
ANOTHER_SET = ", { split: 'validation', problems: 4, samples: 1 }"
READERS = ("report", "viewer", "going on", "evaluation")


def run_treetune(*arguments: str) -> str:
    """Runs a command and returns its output; raises RuntimeError with the output if it fails."""
    from treetune.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(arguments)
    if code:
        raise RuntimeError(f"exit code {code}: {out.getvalue()}")
    return out.getvalue()


def read_run(folder: Path, reader: str) -> str:
    """Lets a reader read the run in a folder, and returns its output."""
    run = folder / "run"
    if reader == "report":
        run_treetune("report", str(run), "--output", str(folder / "report.html"))
        return (folder / "report.html").read_text()
    if reader == "viewer":
        from starlette.testclient import TestClient

        from treetune.view.app import make_application
        from treetune.view.store import Store

        client = TestClient(
            make_application(Store([folder], folder / "cache"), TOKEN), base_url="http://127.0.0.1"
        )
        client.get("/", params={"token": TOKEN})
        names = ("run", "answers", "timeline", "compare", "configuration")
        addresses = ["/", *(f"/{name}?run=run" for name in names)]
        answers = client.get("/answers?run=run").text
        addresses += re.findall(r'href="(/answer\?[^"]+)"', answers)[:2]
        pages = []
        for address in addresses:
            response = client.get(address.replace("&amp;", "&"))
            if response.status_code >= 500:
                raise AssertionError(f"{address} is answered with an error of the server")
            pages.append(response.text)
        return "".join(pages)
    config = folder / "config.jsonnet"
    config.write_text(CONFIG % (folder, 3, ANOTHER_SET if reader == "evaluation" else ""))
    command = "run_evaluation" if reader == "evaluation" else "run_iteration_loop"
    output = run_treetune("--configs", str(config), command)
    return output + "\0" + json.dumps(result(run))


def result(run: Path) -> dict[str, Any]:
    """Returns the weights and the metrics of a run, without times."""
    import hashlib

    from treetune.runtime.directory import ExperimentDirectory
    from treetune.store.checksums import read_record

    is_timed = re.compile(r"seconds|time|per_second|restarts|memory|sync|answers$")
    rows = [*ExperimentDirectory(run).read_metrics()]
    rows += [read_record(path, "") for path in sorted(run.glob("evaluations/*/*/summary.json"))]

    def without_times(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if not is_timed.search(name)}

    weights = sorted(run.glob("checkpoints/*/policy/model.safetensors"))[-1]
    return {
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "rows": [without_times(row) for row in rows],
    }


def run_forked(read: Callable[[], str]) -> tuple[str, str]:
    """Calls a function in a forked process.

    Returns:
        ``output`` with the function's result, ``named`` with the message of its error, or ``crash``.
    """
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if child == 0:
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            try:
                answer = ("output", read())
            except (ValueError, OSError, RuntimeError) as error:
                answer = ("named", str(error))
            except BaseException as error:
                answer = ("crash", repr(error)[:500])
            json.dump(answer, file)
            file.flush()
            os._exit(0)
        deadline = time.monotonic() + DEADLINE_S
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "crash", "silence"
            time.sleep(0.01)
        file.seek(0)
        text = file.read()
    end_of_process, output = json.loads(text) if text else ("crash", "a signal ended it")
    return end_of_process, output


def comparable(text: str, folder: Path) -> str:
    """Removes the folder's name, marks and times from a reader's output."""
    text = text.rpartition("\0")[2].replace(str(folder), "FOLDER")
    text = re.sub(r'data-fingerprint="[^"]*"|tokens-[\w-]+', "", text)
    return re.sub(r"\d+(\.\d+)? ?(s|ms|min|h)\b|\d\d:\d\d(:\d\d)?|\d{9,}(\.\d+)?|\d{4}-\d\d-\d\d", "T", text)


def judge(end_of_process: str, output: str, expected: str, folder: Path) -> str:
    """Judges what a reader made of a damaged copy: ``same``, ``named``, ``other`` or ``crash``."""
    if end_of_process != "output":
        return "crash" if "Traceback" in output else end_of_process
    if comparable(output, folder) == expected:
        return "same"
    names_damage = re.search(
        r"damaged|can(&#39;|')t be read|could not be read|is not a whole|begins anew|again", output
    )
    return "named" if names_damage else "other"


def kind_of(path: Path, run: Path) -> str:
    """Returns the name of a file without the numbers of its folders, which is its kind."""
    return re.sub(r"\d{4}", "N", path.relative_to(run).as_posix())


def trials(base: Path, slot: Path, numbers: range, seed: int) -> list[dict[str, Any]]:
    """Flips a bit for each number, each in a copy of the base, and lets all readers read the copy."""
    expected = {}
    for reader in READERS:
        copy_run(base, slot)
        end_of_process, output = run_forked(partial(read_run, slot, reader))
        assert end_of_process == "output", f"{reader} of an untouched copy: {output}"
        expected[reader] = comparable(output, slot)
    flips = []
    for number in numbers:
        draw = random.Random(f"{seed} {number}")
        copy_run(base, slot)
        run = slot / "run"
        files: dict[str, list[Path]] = {}
        for path in sorted(run.rglob("*")):
            if path.is_file() and path.stat().st_size and not path.name.endswith(".lock"):
                files.setdefault(kind_of(path, run), []).append(path)
        chosen = draw.choice(sorted(files))
        name = draw.choice(files[chosen]).relative_to(run)
        content = bytearray((run / name).read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        flip: dict[str, Any] = {"number": number, "file": chosen}
        for reader in READERS:
            copy_run(base, slot)
            (run / name).write_bytes(content)
            end_of_process, output = run_forked(partial(read_run, slot, reader))
            flip[reader] = judge(end_of_process, output, expected[reader], slot)
            if flip[reader] in ("other", "crash"):
                if end_of_process == "output":
                    flip[f"{reader}, output"] = first_difference(comparable(output, slot), expected[reader])
                else:
                    flip[f"{reader}, output"] = output[-1000:]
        flips.append(flip)
        print(json.dumps(flip), flush=True)
    return flips


def first_difference(text: str, expected: str) -> str:
    """Quotes the surroundings of the first character that differs."""
    pairs = enumerate(zip(text, expected, strict=False))
    position = next((i for i, (character, other) in pairs if character != other), 0)
    around = slice(max(0, position - 80), position + 120)
    return f"{text[around]!r} for {expected[around]!r}"


def copy_run(base: Path, slot: Path) -> None:
    shutil.rmtree(slot, ignore_errors=True)
    shutil.copytree(base / "run", slot / "run")


def page(flips: list[dict[str, Any]], seed: int) -> str:
    lines = [
        "# Flipped bits in the files of a finished run",
        "",
        f"`python tests/endurance/flipped_bytes.py --flips {len(flips)} --seed {seed}`. One bit each, in a"
        " copy of a small finished run; then each of four readers, in a process of its own.",
        "",
        "| reader | as of an untouched copy | damage named | **other content** | **crash or silence** |",
        "|---|---:|---:|---:|---:|",
    ]
    for reader in READERS:
        counts = Counter(flip[reader] for flip in flips)
        lines.append(
            f"| {reader} | {counts['same']} | {counts['named']} | {counts['other']} | {counts['crash']} |"
        )
    lines += ["", "| file | flips | named by a reader | other content | crash |", "|---|---:|---:|---:|---:|"]
    for name in sorted({flip["file"] for flip in flips}):
        of_file = [flip for flip in flips if flip["file"] == name]
        counts_of_file = []
        for verdict in ("named", "other", "crash"):
            with_verdict = [flip for flip in of_file if verdict in {flip[reader] for reader in READERS}]
            counts_of_file.append(len(with_verdict))
        lines.append(f"| `{name}` | {len(of_file)} | {' | '.join(map(str, counts_of_file))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="also write the page there")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="flips-") as folder:
        base = Path(folder, "base")
        base.mkdir()
        (base / "config.jsonnet").write_text(CONFIG % (base, 2, ""))
        config = str(base / "config.jsonnet")
        end_of_process, output = run_forked(lambda: run_treetune("--configs", config, "run_iteration_loop"))
        assert end_of_process == "output", output
        import deepspeed  # noqa: F401  (once, for all processes that are forked off)
        import pyarrow.compute  # noqa: F401
        import starlette.testclient  # noqa: F401
        import transformers  # noqa: F401

        import treetune.view.app  # noqa: F401

        slots = []
        for slot in range(2):
            file = Path(folder, f"{slot}.json")
            child = os.fork()
            if child == 0:
                numbers = range(slot, options.flips, 2)
                file.write_text(json.dumps(trials(base, Path(folder, f"slot{slot}"), numbers, options.seed)))
                os._exit(0)
            slots.append((child, file))
        for child, _ in slots:
            os.waitpid(child, 0)
        flips = []
        for _, file in slots:
            flips.extend(json.loads(file.read_text()))
    text = page(flips, options.seed)
    print(text)
    if options.output:
        options.output.write_text(text)
    verdicts = {flip[reader] for flip in flips for reader in READERS}
    return int(bool(verdicts & {"other", "crash"}))


if __name__ == "__main__":
    sys.exit(main())
