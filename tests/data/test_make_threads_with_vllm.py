"""Promise of `make_threads` with a real vLLM server: useless answers of a tiny model with random weights
end in rejected solutions, with reasons, exact counts of tokens and costs.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.scripted import PROBLEM, SOLUTION
from treetune.engine.base import EngineLaunch
from treetune.engine.engine import VllmEngine, start_engine
from treetune.engine.launch import MODEL_NAME
from treetune.engine.settings import VllmSettings
from treetune.main import main

pytestmark = [pytest.mark.server, pytest.mark.slow]

CONTEXT = 8192
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a model whose tokens are bytes and whose tokenizer has a chat template; yield its address."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from treetune.models.policy_files import write_for_engine
    from treetune.models.sources import TinyModel

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(["<pad>", "<eos>", *letters])}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )
    # The model's own alphabet is a stand-in of the same size.
    stand_in = "".join(chr(0x4E00 + i) for i in range(len(letters)))
    source = TinyModel(layers=2, hidden_size=64, heads=2, context_length=CONTEXT)
    model = source.load_model(0, lambda: stand_in)
    folder = tmp_path_factory.mktemp("weights")
    write_for_engine(dict(model.named_parameters()), model.config, tokenizer, folder)
    launch = EngineLaunch(folder, tmp_path_factory.mktemp("logs"), seed=0, context_length=CONTEXT)
    engine = start_engine(VllmSettings(omp_threads=1, max_num_seqs=8, start_timeout=300.0), launch)
    assert isinstance(engine, VllmEngine)
    try:
        engine.wait_ready()
        address = engine._replicas[0].server.wait_until_ready()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SERVER_KEY", address.key)
            yield address.url + "/v1"
    finally:
        engine.close()


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_rubbish_ends_in_rejected_solutions_with_reasons_and_costs(
    api: str, url: str, tmp_path: Path
) -> None:
    rows = [{"problem": f"{PROBLEM} {letter}", "solution": SOLUTION} for letter in string.ascii_lowercase[:3]]
    source, output, config = tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "config.jsonnet"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Random tokens end no answer: one in sixteen does.
    ends = {"seed": 1, "stop_token_ids": list(range(2, 258, 16))}
    endpoint = {"base_url": url, "model": MODEL_NAME, "api": api, "max_tokens": 64, "extra": ends}
    endpoint["api_key_variable"] = "SERVER_KEY"
    prices = {"input": 1.0, "output": 2.0}
    settings = {"type": "make_threads", "endpoint": endpoint, "prices": prices, "repairs": 3}
    config.write_text(json.dumps(settings))
    command = ["--configs", str(config), "make_threads", "--input", str(source), "--output", str(output)]
    assert main(command) == 0
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["accepted"], summary["rejected"], summary["unanswered"]) == (0, 3, 0)
    assert summary["reasons"] == {"the analysis can't be read": 3}
    assert (output / "threads.jsonl").read_text() == ""
    usage = summary["usage"]
    assert usage["estimated"] == summary["failed_attempts"] == 0
    assert 0 < usage["output_tokens"] <= 64 * usage["requests"]
    assert usage["steps"]["ranges"]["requests"] >= 4, "the conversation came as far as what a program reads"
    assert usage["dollars"] == pytest.approx((usage["input_tokens"] + 2 * usage["output_tokens"]) / 1e6)
    # A token is a byte, so each first question has more tokens than problem and solution have bytes.
    first_questions = usage["steps"]["steps"]
    assert first_questions["input_tokens"] > first_questions["requests"] * len((PROBLEM + SOLUTION).encode())
