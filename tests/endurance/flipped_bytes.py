"""Flips single bytes in the files of a finished run, and looks what those who read them make of it.

    python tests/endurance/flipped_bytes.py [--flips 500] [--seed 1] [--output FILE.md]

A small run with an evaluation is trained, sampled in its own process. Each flip changes a random bit of one
file in a copy of it, each kind of file as often. Then its report is written, the viewer's pages are made, it
goes on for an iteration, and it is evaluated anew, each in a process that is forked off. What may happen: the
damage is told, or all comes out as of an untouched copy. What may not: other content, a crash, silence.
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
STEPS = ("report", "viewer", "going on", "evaluation")


def command(*words: str) -> str:
    """What a command prints. Raises RuntimeError with it where it fails."""
    from treetune.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words)
    if code:
        raise RuntimeError(f"exit code {code}: {out.getvalue()}")
    return out.getvalue()


def of_folder(folder: Path, step: str) -> str:
    """What a step makes of the run in the folder, without what clocks decide."""
    run = folder / "run"
    if step == "report":
        command("report", str(run), "--output", str(folder / "report.html"))
        return (folder / "report.html").read_text()
    if step == "viewer":
        from starlette.testclient import TestClient

        from treetune.view.app import application
        from treetune.view.store import Store

        client = TestClient(
            application(Store([folder], folder / "cache"), TOKEN), base_url="http://127.0.0.1"
        )
        client.get("/", params={"token": TOKEN})
        pages = [
            "/",
            *(f"/{name}?run=run" for name in ("run", "answers", "timeline", "compare", "configuration")),
        ]
        answers = client.get("/answers?run=run").text
        pages += re.findall(r'href="(/answer\?[^"]+)"', answers)[:2]
        found = [client.get(page.replace("&amp;", "&")) for page in pages]
        if failed := [page for page, one in zip(pages, found, strict=True) if one.status_code >= 500]:
            raise AssertionError(f"{failed[0]} is answered with an error of the server's")
        return "".join(one.text for one in found)
    config = folder / "config.jsonnet"
    config.write_text(CONFIG % (folder, 3, ANOTHER_SET if step == "evaluation" else ""))
    name = "run_evaluation" if step == "evaluation" else "run_iteration_loop"
    said = command("--configs", str(config), name)
    return said + "\0" + json.dumps(result(run))


def result(run: Path) -> dict[str, Any]:
    """What a run came to, clocks left out."""
    import hashlib

    from treetune.runtime.directory import ExperimentDirectory
    from treetune.store.checksums import read_record

    timed = re.compile(r"seconds|time|per_second|restarts|memory|sync|answers$")
    rows = [*ExperimentDirectory(run).read_metrics()]
    rows += [read_record(path, "") for path in sorted(run.glob("evaluations/*/*/summary.json"))]
    weights = sorted(run.glob("checkpoints/*/policy/model.safetensors"))[-1]
    return {
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "rows": [{name: value for name, value in row.items() if not timed.search(name)} for row in rows],
    }


def forked(act: Callable[[], str]) -> tuple[str, str]:
    """What became of it in a process of its own, and what it gave or said."""
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if child == 0:
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            try:
                answer = ("made", act())
            except (ValueError, OSError, RuntimeError) as error:
                answer = ("told", str(error))
            except BaseException as error:
                answer = ("crash", repr(error)[:500])
            json.dump(answer, file)
            file.flush()
            os._exit(0)
        end = time.monotonic() + DEADLINE_S
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "crash", "silence"
            time.sleep(0.01)
        file.seek(0)
        text = file.read()
    what, words = json.loads(text) if text else ("crash", "a signal ended it")
    return what, words


def plain(text: str, folder: Path) -> str:
    """What is compared: without where it lies, and times of making."""
    text = text.rpartition("\0")[2].replace(str(folder), "FOLDER")
    text = re.sub(r'data-mark="[^"]*"|tokens-[\w-]+', "", text)
    return re.sub(r"\d+(\.\d+)? ?(s|ms|min|h)\b|\d\d:\d\d(:\d\d)?|\d{9,}(\.\d+)?|\d{4}-\d\d-\d\d", "T", text)


def judged(what: str, words: str, clean: str, folder: Path) -> str:
    """``same``, ``told``, ``other`` or ``crash``."""
    if what != "made":
        return "crash" if "Traceback" in words else what
    if plain(words, folder) == clean:
        return "same"
    says = re.search(
        r"damaged|can(&#39;|')t be read|could not be read|is not a whole|begins anew|again", words
    )
    return "told" if says else "other"


def kind(path: Path, run: Path) -> str:
    """Files of one kind lie in numbered folders."""
    return re.sub(r"\d{4}", "N", path.relative_to(run).as_posix())


def trials(base: Path, slot: Path, numbers: range, seed: int) -> list[dict[str, Any]]:
    """So many flips, each in a copy of the base."""
    clean = {}
    for step in STEPS:
        fresh(base, slot)
        what, words = forked(partial(of_folder, slot, step))
        assert what == "made", f"{step} of an untouched copy: {words}"
        clean[step] = plain(words, slot)
    found = []
    for number in numbers:
        draw = random.Random(f"{seed} {number}")
        fresh(base, slot)
        run = slot / "run"
        files: dict[str, list[Path]] = {}
        for path in sorted(run.rglob("*")):
            if path.is_file() and path.stat().st_size and not path.name.endswith(".lock"):
                files.setdefault(kind(path, run), []).append(path)
        chosen = draw.choice(sorted(files))
        name = draw.choice(files[chosen]).relative_to(run)
        content = bytearray((run / name).read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        one: dict[str, Any] = {"number": number, "file": chosen}
        for step in STEPS:
            fresh(base, slot)
            (run / name).write_bytes(content)
            what, words = forked(partial(of_folder, slot, step))
            one[step] = judged(what, words, clean[step], slot)
            if one[step] in ("other", "crash"):
                one[f"{step}, said"] = (
                    words[-1000:] if what != "made" else first_difference(plain(words, slot), clean[step])
                )
        found.append(one)
        print(json.dumps(one), flush=True)
    return found


def first_difference(one: str, other: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return f"{one[max(0, place - 80) : place + 120]!r} for {other[max(0, place - 80) : place + 120]!r}"


def fresh(base: Path, slot: Path) -> None:
    shutil.rmtree(slot, ignore_errors=True)
    shutil.copytree(base / "run", slot / "run")


def page(found: list[dict[str, Any]], seed: int) -> str:
    lines = [
        "# Flipped bits in the files of a finished run",
        "",
        f"`python tests/endurance/flipped_bytes.py --flips {len(found)} --seed {seed}`. One bit each, in a"
        " copy of a small finished run; then each of four readers, in a process of its own.",
        "",
        "| reader | as of an untouched copy | damage told | **other content** | **crash or silence** |",
        "|---|---:|---:|---:|---:|",
    ]
    for step in STEPS:
        counts = Counter(one[step] for one in found)
        lines.append(
            f"| {step} | {counts['same']} | {counts['told']} | {counts['other']} | {counts['crash']} |"
        )
    lines += ["", "| file | flips | told by a reader | other content | crash |", "|---|---:|---:|---:|---:|"]
    for name in sorted({one["file"] for one in found}):
        own = [one for one in found if one["file"] == name]
        shares = [
            sum(any(one[step] == what for step in STEPS) for one in own)
            for what in ("told", "other", "crash")
        ]
        lines.append(f"| `{name}` | {len(own)} | {' | '.join(map(str, shares))} |")
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
        what, words = forked(lambda: command("--configs", str(base / "config.jsonnet"), "run_iteration_loop"))
        assert what == "made", words
        import deepspeed  # noqa: F401  once for all that are forked off
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
        found = [one for _, file in slots for one in json.loads(file.read_text())]
    text = page(found, options.seed)
    print(text)
    if options.output:
        options.output.write_text(text)
    return int(any(one[step] in ("other", "crash") for one in found for step in STEPS))


if __name__ == "__main__":
    sys.exit(main())
