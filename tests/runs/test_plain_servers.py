"""Whole runs over plain vLLM servers that the run did not start.

Promises that these tests hold:

* A run of VinePPO samples from such a server, loads its weights into it, and finds them there (canary).
* The run, killed (SIGKILL) and started again, ends with the weights of an undisturbed run.
* Two servers behind a reverse proxy serve one run, and give it the same weights.
* A server that can't load weights is refused before anything is sampled, and serves evaluations.
* The credit library continues answers on such a server by both of its routes, and scores what it samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import treetune.parts  # noqa: F401  (registers them)
from tests.runs.shared_server import built
from tests.support.experiment_runs import CONFIG, Experiment
from tests.support.plain_server import (
    KEY,
    PlainServerProcess,
    round_robin_proxy,
    start_plain_server,
    wait_for,
)
from treetune.config.jsonnet import load
from treetune.credit import advantages
from treetune.credit.library.servers import open_servers, read_servers
from treetune.engine.client import Address
from treetune.engine.plain_client import PlainClient
from treetune.engine.requests import Request, SamplingParams
from treetune.engine.settings import PlainVllmSettings
from treetune.models.policy_files import write_for_engine
from treetune.models.tokenizer import codec_of

pytestmark = [pytest.mark.server, pytest.mark.slow]

ITERATIONS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a model like the experiment's, of another seed: the run loads its own weights first."""
    experiment = built(load([str(CONFIG)], [], environ={}))
    alphabet = experiment.task.alphabet
    folder = tmp_path_factory.mktemp("served") / "model"
    weights = experiment.model.load_model(99, alphabet)
    tokenizer = experiment.model.load_tokenizer(alphabet)
    write_for_engine(dict(weights.named_parameters()), weights.config, tokenizer, folder)
    return folder


@contextmanager
def serving(model: Path, log: Path, *arguments: str, dev_mode: bool = True) -> Iterator[PlainServerProcess]:
    server = start_plain_server(model, log, *arguments, dev_mode=dev_mode)
    try:
        wait_for(server)
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[PlainServerProcess]:
    with serving(model, model.parent / "server.log", "--enable-scale-out") as server:
        yield server


@pytest.fixture(scope="module")
def text_server(model: Path) -> Iterator[PlainServerProcess]:
    """A server with text routes only, which takes no weights and returns the log-probs of the raw logits."""
    raw = ("--logprobs-mode", "raw_logprobs")
    with serving(model, model.parent / "text_server.log", *raw, dev_mode=False) as server:
        yield server


@pytest.fixture(autouse=True, scope="module")
def key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        yield


@pytest.fixture(scope="module")
def undisturbed(server: PlainServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A run over one server that nothing disturbs."""
    run = experiment(tmp_path_factory.mktemp("undisturbed"), [server.url])
    assert KEY not in run.run()
    return run


def experiment(base: Path, addresses: list[str], **settings: object) -> Experiment:
    """The small experiment of VinePPO with two iterations over these servers."""
    policy = {
        "type": "plain_vllm",
        "addresses": addresses,
        "key_variable": "VLLM_API_KEY",
        "max_concurrency": 2,
        "start_timeout": 60,
        **settings,
    }
    base.mkdir(parents=True, exist_ok=True)
    config = base / "plain.jsonnet"
    config.write_text(
        f"(import '{CONFIG}') + {{ iterations: {ITERATIONS}, engines: {{ policy: {json.dumps(policy)} }},"
        " checkpoints: { every: 1, keep_every: 1 }, problems_per_iteration: 4, trainer+: { epochs: 1 } }"
    )
    return Experiment(base, config=config, forked=True)


def assert_good_run(run: Experiment) -> None:
    rows = run.directory.read_metrics()
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    assert rows[0]["engine/canary_gap"] <= 1e-4
    assert rows[1]["engine/logprob_gap_max"] <= 1e-4, "the second iteration sampled from other weights"


def test_a_run_over_a_plain_server_is_killed_and_resumed_with_the_same_weights(
    server: PlainServerProcess, undisturbed: Experiment, tmp_path: Path
) -> None:
    assert_good_run(undisturbed)
    struck = experiment(tmp_path, [server.url])
    running = replace(struck, forked=False).start()
    iteration = struck.directory.iteration_folder(1)
    # Four problems are sampled in a moment: the run may be anywhere in the iteration when it is stopped.
    running.freeze(
        mark=(iteration / "journal" / "rollout-0.jsonl").is_file,
        over=(iteration / "metrics.json").is_file,
        what="iteration 1",
    )
    running.kill("launcher")  # its only rank is in the same process
    assert running.wait() != 0
    struck.run()
    assert_good_run(struck)
    assert struck.policy(ITERATIONS) == undisturbed.policy(ITERATIONS)
    assert struck.policy(ITERATIONS) != undisturbed.policy(1), "training moved no weight"
    assert server.process.poll() is None, "the run ended a server that it didn't start"


def test_the_facts_about_a_server_say_which_log_probs_it_returns(
    server: PlainServerProcess, text_server: PlainServerProcess
) -> None:
    for address, route, is_processed in ((server, "tokens", True), (text_server, "completions", False)):
        settings = PlainVllmSettings(addresses=(address.url,), dtype="float32")
        client = PlainClient(settings)
        try:
            facts = client.meet(Address(address.url, 1, KEY), 60.0)
            again = client.meet(Address(address.url, 1, KEY), 60.0)
        finally:
            client.close()
        assert (facts.route, facts.takes_weights) == (route, is_processed)
        assert facts.has_processed_logprobs is is_processed
        assert len(facts.greedy) == 16
        assert again.differs_from(facts, settings.tolerance("cpu").mean) is None


def test_the_credit_library_continues_and_scores_answers_on_a_server(
    server: PlainServerProcess, model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt_ids = np.array([3, 4, 5])
    answers = [
        {"prompt_ids": prompt_ids, "response_ids": [6, 7, 8, 9], "reward": 1.0, "step_ends": [2, 4]},
        {"prompt_ids": prompt_ids, "response_ids": [6, 7, 7], "reward": 0.0, "step_ends": [2, 3]},
    ]
    engine = {"type": "plain_vllm", "addresses": [server.url], "key_variable": "VLLM_API_KEY"}
    credited = []
    for route in ("tokens", "completions"):
        credited.append(
            advantages(
                answers,
                credit={"type": "monte_carlo", "samples": 4},
                engine={**engine, "route": route},
                tokenizer=tokenizer,
                grader=lambda prompt, text: float(len(text) % 2),
                sampling=SamplingParams(max_tokens=8),
                unfinished_reward=None,
            )
        )
    assert credited[0].advantages == credited[1].advantages
    assert credited[0].cost.tokens == credited[1].cost.tokens > 0
    codec = codec_of(tokenizer)
    for route in ("tokens", "completions"):
        settings = read_servers({**engine, "route": route})
        assert settings is not None
        with open_servers(settings, codec, {}, prompt_ids, 64, None) as opened:
            ((sampled,),) = opened.generate([Request(prompt_ids, 1, 1, SamplingParams(max_tokens=12))])
            scores = opened.run(opened.score(prompt_ids, sampled.token_ids))
        np.testing.assert_allclose(scores, sampled.logprobs, rtol=0, atol=1e-4)


def test_two_servers_with_a_proxy_before_them_serve_a_run_with_the_same_weights(
    server: PlainServerProcess, undisturbed: Experiment, model: Path, tmp_path: Path
) -> None:
    with serving(model, tmp_path / "second.log", "--enable-scale-out") as second:
        urls = [server.url, second.url]
        with round_robin_proxy(urls) as (proxy, asked):
            routed = experiment(tmp_path, [proxy], servers=urls)
            routed.run()
    assert_good_run(routed)
    assert routed.policy(ITERATIONS) == undisturbed.policy(ITERATIONS)
    counts = [asked.count(url) for url in urls]
    assert min(counts) > 5, counts


def test_a_server_that_takes_no_weights_evaluates_by_text_routes_and_is_refused_by_a_run(
    text_server: PlainServerProcess, tmp_path: Path
) -> None:
    run = experiment(tmp_path / "run", [text_server.url])
    running = run.start()
    assert running.wait() != 0
    printed = " ".join(running.tail().split())
    assert "has no routes that load weights: start it with the environment variable" in printed
    assert not run.journals(), "something was sampled"

    sets = "{ evaluation: { sets: [{ split: 'test', problems: 4 }] } }"
    running = run.start("run_evaluation_on_baseline", sets)
    assert running.wait() == 0, running.tail()
    (summary,) = run.directory.path.glob("evaluations/0000/*/summary.json")
    assert json.loads(summary.read_text())["n_problems"] == 4
