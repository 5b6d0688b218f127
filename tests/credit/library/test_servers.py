"""Credit as a library over vLLM servers that the caller has started, tested with a fake HTTP server.

These tests promise:

* The same answers get the same advantages as with an engine in this process that samples the same tokens.
* No weights are loaded into a server, and no prefix of an earlier call is used: its weights may change
  between calls.
* An address that can't be asked, a wrong key, another model and a server without the needed routes each end
  in one message that names the setting `engine`. The key is in none of them.
* The budget and the deadline of a call also end it while a server samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.support.fake_vllm import ROUTES, FakeVllm
from tests.support.stub_server import sample
from treetune.credit import CreditAssigner, CreditLimitReached, advantages
from treetune.engine.launch import find_free_port
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.engine.settings import PlainVllmSettings
from treetune.exceptions import ConfigError, EngineError
from treetune.vocabulary import TextCodec

CREDIT = {"type": "monte_carlo", "samples": 3}
WEIGHTS = "weights of the trainer"
CODEC = TextCodec(
    encode=lambda text: list(text.encode("latin-1")),
    decode=lambda token_ids: bytes(map(int, token_ids)).decode("latin-1"),
    eos_id=0,
)
"""A tokenizer whose token ids are bytes."""


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeVllm]]:
    fakes = []

    def start(**attributes: Any) -> FakeVllm:
        fake = FakeVllm(WEIGHTS)
        for name, value in attributes.items():
            setattr(fake, name, value)
        fakes.append(fake)
        return fake

    yield start
    for fake in fakes:
        fake.close()


def answers() -> list[dict[str, Any]]:
    """Returns two answers of three and two lines."""
    texts = ["a=1\nb=2\nc=3", "a=2\nb=1"]
    prompt_ids = list(b"c?\n")
    return [
        {"prompt_ids": prompt_ids, "response_ids": [*text.encode(), 0], "reward": float(reward)}
        for text, reward in zip(texts, (1, 0), strict=True)
    ]


def grade_by_parity(prompt: str, text: str) -> float:
    return float(sum(map(ord, text)) % 2 == 0)


def settings(**changed: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "credit": CREDIT,
        "tokenizer": CODEC,
        "grader": grade_by_parity,
        "sampling": SamplingParams(max_tokens=20),
        "unfinished_reward": None,  # the fake server cuts off all of its samples
    }
    return common | changed


def sample_like_the_server(requests: Sequence[Request]) -> list[list[Completion]]:
    """Returns the samples that a fake server with the weights `WEIGHTS` returns."""
    completions_by_request = []
    for request in requests:
        completions = []
        for number in range(request.n):
            prompt = request.prompt_ids.tolist()
            ids, _ = sample(WEIGHTS, prompt, request.seed + number, request.sampling.max_tokens)
            completions.append(Completion(ids, None, "length", 0))
        completions_by_request.append(completions)
    return completions_by_request


@pytest.mark.parametrize("token_route", [True, False])
def test_a_server_continues_answers_as_an_engine_in_this_process_would(
    serve: Callable[..., FakeVllm], token_route: bool
) -> None:
    fake = serve(token_route=token_route, tokenize=CODEC.encode)
    expected = advantages(answers(), **settings(engine=sample_like_the_server))
    credited = advantages(answers(), **settings(engine=fake.url))
    assert credited.advantages == expected.advantages
    assert credited.values == expected.values
    assert (credited.cost.samples, credited.cost.tokens) == (expected.cost.samples, expected.cost.tokens)
    assert credited.cost.tokens > 0
    assert {body["path"] for body in fake.requests} == {ROUTES[0] if token_route else ROUTES[1]}


def test_addresses_are_given_alone_as_a_list_as_a_configuration_or_as_settings(
    serve: Callable[..., FakeVllm],
) -> None:
    first, second = serve(), serve()
    expected = advantages(answers(), **settings(engine=sample_like_the_server)).advantages
    for engine in (
        f"{first.url}/",
        [first.url, second.url],
        {"type": "plain_vllm", "addresses": [first.url], "max_concurrency": 1},
        PlainVllmSettings(addresses=(first.url,)),
    ):
        assert advantages(answers(), **settings(engine=engine)).advantages == expected
    assert second.requests, "the second server got its share"


def test_no_weights_are_loaded_and_no_prefix_of_an_earlier_call_is_used(
    serve: Callable[..., FakeVllm],
) -> None:
    fake = serve()
    with CreditAssigner(**settings(engine=fake.url)) as assigner:
        first = assigner.advantages(answers())
        salts_of_first = {body["cache_salt"] for body in fake.requests}
        fake.requests.clear()
        fake.weights = "weights after the trainer's update"
        second = assigner.advantages(answers())
    salts_of_second = {body["cache_salt"] for body in fake.requests}
    assert first.advantages != second.advantages
    assert len(salts_of_first) == len(salts_of_second) == 1
    assert salts_of_first != salts_of_second
    assert not {"/collective_rpc", "/update_weight_version", "/reset_prefix_cache"} & set(fake.paths)


def test_the_key_is_sent_and_is_in_no_message_and_no_log(
    serve: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = serve(key="a very secret key")
    engine = {"type": "plain_vllm", "addresses": [fake.url], "key_variable": "MY_KEY"}
    monkeypatch.setenv("MY_KEY", "a very secret key")
    with caplog.at_level(logging.DEBUG):
        advantages(answers(), **settings(engine=engine))
    assert "very secret" not in caplog.text
    monkeypatch.setenv("MY_KEY", "another key")
    with pytest.raises(EngineError, match=r"HTTP 401: set engine\.key_variable to the name") as refusal:
        advantages(answers(), **settings(engine=engine))
    assert "another key" not in str(refusal.value)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match=r"engine\.key_variable is 'MY_KEY', and .* is not set"):
        advantages(answers(), **settings(engine=engine))
    with pytest.raises(EngineError, match=r"HTTP 401: set engine\.key_variable"):
        advantages(answers(), **settings(engine=fake.url))


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    with pytest.raises(EngineError, match=rf"nothing listens at {url} .*: start a server there, such as"):
        advantages(answers(), **settings(engine=url))


def other_tokens(text: str) -> list[int]:
    return [ord(character) + 1 for character in text]


@pytest.mark.parametrize(
    ("attributes", "changed", "message"),
    [
        (
            {"tokenize": other_tokens},
            {},
            r"has the model 'tiny', whose tokenizer is not the given one: it encodes 'a=1.*' as \[98, 62,"
            r" .*\] …, and the given one as \[97, 61, .*\] …\. Give the tokenizer",
        ),
        ({"models": ["a", "b"]}, {}, r"has 'a', 'b': set engine\.model to the name of the policy"),
        ({}, {"model": "c"}, r"has 'tiny', and engine\.model is 'c'"),
        ({"token_route": False}, {"route": "tokens"}, r"--enable-scale-out, or set engine\.route"),
        ({"returns_token_ids": False, "token_route": False}, {}, "returned no token ids"),
        (
            {"probe_answer": {"choices": [{"index": 0, "token_ids": [1], "logprobs": None}]}},
            {},
            "expected one sample with tokens and a log-prob for each token",
        ),
        ({"max_model_len": 16}, {}, r"takes 16 tokens of prompt and response, and context_length is 23"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(
    serve: Callable[..., FakeVllm], attributes: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    fake = serve(**attributes)
    engine = {"type": "plain_vllm", "addresses": [fake.url], **changed}
    with pytest.raises(EngineError, match=message):
        advantages(answers(), **settings(engine=engine))
    assert not fake.requests, "something was sampled"


@pytest.mark.parametrize(
    ("engine", "error", "message"),
    [
        ({"type": "in_process"}, ValueError, r"has the type 'in_process': give .*'plain_vllm'"),
        ({"type": "plain_vllm"}, ConfigError, r"engine\.addresses"),
        (
            {"type": "plain_vllm", "addresses": ["http://a:1"], "weight_transfer": "file"},
            ValueError,
            r"engine\.weight_transfer is 'file', and the library loads no weights",
        ),
        (["http://a:1", 3], ValueError, "engine is a list with 3: list addresses"),
        ([], ValueError, "addresses is empty"),
        ("http://a:1?x", ValueError, "addresses has a user name, a password or a query"),
        ("http://me:secret@a:1", ValueError, "addresses has a user name, a password or a query"),
        (["http://a:1", "me:secret@b:1"], ValueError, "engine is a list with an address that is not shown"),
    ],
    ids=str,
)
def test_an_engine_that_names_no_servers_is_refused(
    engine: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        advantages(answers(), **settings(engine=engine))
    assert "secret" not in str(raised.value)


def test_a_tokenizer_has_to_be_given_with_an_address() -> None:
    with pytest.raises(ValueError, match="the grader reads text: give the tokenizer"):
        advantages(answers(), **settings(engine="http://a:1", tokenizer=None))


def test_a_call_ends_at_its_deadline_while_a_server_samples(serve: Callable[..., FakeVllm]) -> None:
    fake = serve(replies=["hangs"] * 10)
    with pytest.raises(CreditLimitReached, match=r"deadline of 1 s has passed"):
        advantages(answers(), **settings(engine=fake.url), deadline=1)


def test_a_call_ends_at_its_budget(serve: Callable[..., FakeVllm]) -> None:
    with pytest.raises(CreditLimitReached, match="budget of 30 tokens is used up"):
        advantages(answers(), **settings(engine=serve().url), budget=30)


@pytest.mark.parametrize("token_route", [True, False])
def test_a_server_scores_the_texts_of_a_credit(serve: Callable[..., FakeVllm], token_route: bool) -> None:
    """The fake server gives the token number n a log-prob of −n/8."""
    fake = serve(token_route=token_route)
    graded_answers = [{**answer, "gold": "\x08"} for answer in answers()]
    credit = {"type": "monte_carlo", "values": {"type": "rredcot"}}
    credited = advantages(graded_answers, credit=credit, engine=fake.url, tokenizer=CODEC)
    assert credited.values[0] == pytest.approx([math.exp(-1.0)] * 3)
    assert (credited.cost.samples, credited.cost.tokens) == (0, 0), "nothing was sampled"
    assert credited.metrics["credit/scored_texts"] == len(fake.requests) > 0


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"returns_scores": False}, "returned no log-probs of the tokens that it was asked to score"),
        ({"replies": ["forgets a score"] * 10}, "another form than vLLM's: expected 'prompt_logprobs'"),
    ],
)
def test_a_server_that_does_not_score_is_refused(
    serve: Callable[..., FakeVllm], attributes: dict[str, Any], message: str
) -> None:
    graded_answers = [{**answer, "gold": "x"} for answer in answers()]
    engine = {"type": "plain_vllm", "addresses": [serve(**attributes).url], "max_restarts": 0}
    with pytest.raises(EngineError, match=message):
        advantages(graded_answers, credit="trace", engine=engine, tokenizer=CODEC)


@pytest.mark.parametrize("reply", [503, "no JSON"])
def test_requests_that_fail_are_sent_again(serve: Callable[..., FakeVllm], reply: int | str) -> None:
    fake = serve(replies=[reply])
    expected = advantages(answers(), **settings(engine=sample_like_the_server)).advantages
    assert advantages(answers(), **settings(engine=fake.url)).advantages == expected


def test_a_server_that_is_busy_at_first_is_waited_for(serve: Callable[..., FakeVllm]) -> None:
    fake = serve(statuses={"/v1/models": [503, 503]})
    expected = advantages(answers(), **settings(engine=sample_like_the_server)).advantages
    assert advantages(answers(), **settings(engine=fake.url)).advantages == expected
