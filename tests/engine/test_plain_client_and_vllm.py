"""The plain client and the installed vLLM agree on requests, answers and routes.

The tests build both sides with vLLM's own classes, without a server. They hold that vLLM reads each body that
the client sends, that the client reads each answer of vLLM, and that the routes that load weights exist.
"""

from __future__ import annotations

import json

import pytest

from treetune.engine.client import RequestPart, read_completions
from treetune.engine.plain_client import (
    PlainClient,
    Route,
    ServerFacts,
    samples_of_answer,
    scores_of_answer,
)
from treetune.engine.requests import Request, SamplingParams, ScoreRequest
from treetune.engine.settings import PlainVllmSettings
from treetune.vocabulary import token_array

pytest.importorskip("vllm")

SAMPLING = SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, top_k=-1, stop=("\n",), stop_ids=(9,))
PART = RequestPart(0, 3, 2, Request(token_array([5, 6, 7]), 100, 8, SAMPLING))


TO_SCORE = RequestPart(0, 0, 1, ScoreRequest(token_array([5, 6]), text_ids=token_array([7, 8])))


def body(route: Route, part: RequestPart = PART) -> dict[str, object]:
    client = PlainClient(PlainVllmSettings(addresses=("http://a:1",)), end_ids=(2,))
    facts = ServerFacts("tiny", "tiny", route, 64, takes_weights=True, has_processed_logprobs=True)
    try:
        return client.body(facts, part, "salt")
    finally:
        client.close()


def assert_sampling_is_the_parts(params: object) -> None:
    expected = {
        "n": 2,
        "seed": 103,
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "stop": ["\n"],
        "stop_token_ids": [2, 9],
        "include_stop_str_in_output": True,
        "detokenize": True,
    }
    assert {name: getattr(params, name) for name in expected} == expected
    assert getattr(params, "top_k", None) in (0, -1)


def test_vllm_reads_the_body_for_its_route_of_tokens() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    request = GenerateRequest.model_validate(body("tokens"))
    assert (request.token_ids, request.model, request.cache_salt) == ([5, 6, 7], "tiny", "salt")
    assert_sampling_is_the_parts(request.sampling_params)


def test_vllm_reads_the_body_for_its_route_of_completions() -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest.model_validate(body("completions"))
    assert (request.prompt, request.model, request.cache_salt) == ([5, 6, 7], "tiny", "salt")
    assert request.return_token_ids and request.return_tokens_as_token_ids and not request.add_special_tokens
    # A model's generation_config would change what the body leaves open.
    defaults = {"temperature": 0.1, "top_p": 0.2, "top_k": 3, "min_p": 0.4, "repetition_penalty": 1.5}
    assert_sampling_is_the_parts(request.to_sampling_params(5, defaults))


def test_the_client_reads_what_vllm_answers() -> None:
    from vllm.entrypoints.openai.completion.protocol import (
        CompletionLogProbs,
        CompletionResponse,
        CompletionResponseChoice,
    )
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateLogProbs,
        GenerateLogProbsContent,
        GenerateTokensChoice,
        GenerateTokensResponse,
    )
    from vllm.entrypoints.serve.engine.protocol import UsageInfo
    from vllm.outputs import WeightVersionSpan

    answers: dict[Route, dict[str, object]] = {
        "tokens": GenerateTokensResponse(
            request_id="a",
            created=0,
            model="tiny",
            usage=UsageInfo(),
            choices=[
                GenerateTokensChoice(
                    index=index,
                    token_ids=[index, 2],
                    logprobs=GenerateLogProbs(
                        content=[
                            GenerateLogProbsContent(token_id=index, logprob=-0.5),
                            GenerateLogProbsContent(token_id=2, logprob=-0.25),
                        ]
                    ),
                    finish_reason="stop",
                    weight_versions=[WeightVersionSpan("run 0001", 0, 2)],
                )
                for index in (0, 1)
            ],
        ).model_dump(),
        "completions": CompletionResponse(
            model="tiny",
            usage=UsageInfo(),
            choices=[
                CompletionResponseChoice(
                    index=index,
                    text="",
                    token_ids=[index, 2],
                    logprobs=CompletionLogProbs(token_logprobs=[-0.5, -0.25]),
                    finish_reason="stop",
                )
                for index in (0, 1)
            ],
        ).model_dump(),
    }
    for route, answer in answers.items():
        samples = samples_of_answer(answer, route, expected_weights="run 0001")
        completions = read_completions({"samples": samples}, PART, 1)
        assert [completion.token_ids.tolist() for completion in completions] == [[0, 2], [1, 2]]
        assert [completion.logprobs.tolist() for completion in completions] == [[-0.5, -0.25]] * 2  # type: ignore[union-attr]


def test_vllm_reads_the_bodies_that_score_and_the_client_its_answers() -> None:
    from vllm.entrypoints.openai.completion.protocol import (
        CompletionRequest,
        CompletionResponse,
        CompletionResponseChoice,
    )
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateRequest,
        GenerateTokensChoice,
        GenerateTokensResponse,
    )
    from vllm.entrypoints.serve.engine.protocol import UsageInfo
    from vllm.logprobs import Logprob

    of_tokens = GenerateRequest.model_validate(body("tokens", TO_SCORE))
    of_completions = CompletionRequest.model_validate(body("completions", TO_SCORE))
    assert of_tokens.token_ids == of_completions.prompt == [5, 6, 7, 8]
    for params in (of_tokens.sampling_params, of_completions.to_sampling_params(1, {})):
        assert (params.prompt_logprobs, params.max_tokens, params.temperature) == (0, 1, 1.0)
        assert params.skip_reading_prefix_cache, "vLLM has no log-probs of a cached prefix"
    prompt_logprobs = [None, *({token_id: Logprob(-token_id / 8)} for token_id in (6, 7, 8))]
    usage = UsageInfo()
    choice = GenerateTokensChoice(index=0, token_ids=[1], finish_reason="length")
    completion = CompletionResponseChoice(index=0, text="", token_ids=[1], prompt_logprobs=prompt_logprobs)
    answers: dict[Route, str] = {
        "tokens": GenerateTokensResponse(
            request_id="a", created=0, usage=usage, choices=[choice], prompt_logprobs=prompt_logprobs
        ).model_dump_json(),
        "completions": CompletionResponse(model="tiny", usage=usage, choices=[completion]).model_dump_json(),
    }
    assert isinstance(TO_SCORE.request, ScoreRequest)
    for route, answer in answers.items():
        assert scores_of_answer(json.loads(answer), route, TO_SCORE.request) == [-7 / 8, -1.0]


def test_vllm_has_the_routes_that_load_and_name_weights() -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.rl.online.api_router import router as weights_router
    from vllm.entrypoints.serve.dev.cache.api_router import router as cache_router
    from vllm.entrypoints.serve.dev.rpc.api_router import router as rpc_router

    calls: list[object] = []

    class Engine:
        """The methods of vLLM's engine that these routes call."""

        name = "default"

        async def get_weight_version(self) -> str:
            return self.name

        async def update_weight_version(self, new_version: str) -> None:
            self.name = new_version

        async def collective_rpc(self, method: str, **arguments: object) -> list[None]:
            calls.append((method, arguments["kwargs"]))
            return [None]

        async def reset_prefix_cache(self, *arguments: object) -> bool:
            calls.append("reset_prefix_cache")
            return True

    app = FastAPI()
    app.state.engine_client = Engine()
    for router in (weights_router, cache_router, rpc_router):
        app.include_router(router)
    http = TestClient(app)
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": "0001"}, "timeout": 300.0}
    assert http.get("/weight_info").json() == {"weight_version": "default"}
    assert http.post("/collective_rpc", json=rpc).status_code == 200
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert http.post("/update_weight_version", json={"new_version": "run 0001"}).status_code == 200
    assert http.get("/weight_info").json() == {"weight_version": "run 0001"}
    assert calls == [("reload_weights", {"weights_path": "0001"}), "reset_prefix_cache"]
