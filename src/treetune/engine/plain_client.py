"""Samples from plain vLLM servers: token ids in, token ids and log-probs out, by vLLM's own routes.

The two routes, with the fields that this client uses (vLLM 0.32)::

    POST /inference/v1/generate     {model, token_ids, sampling_params, cache_salt}
        {choices: [{index, token_ids, logprobs: {content: [{token_id, logprob}]}, finish_reason,
                    weight_versions: [{version, start, end}]}]}

    POST /v1/completions            {model, prompt, n, seed, …, return_token_ids: true, cache_salt}
        {choices: [{index, token_ids, logprobs: {token_logprobs}, finish_reason}]}

The first one exists in servers that were started with ``--enable-scale-out``. It names the weights that
sampled each token, so that an answer of other weights than the run's is noticed wherever a router sent its
request. The second one names no weights.

Both routes score given tokens as those of a prompt: with the parameter ``prompt_logprobs``, an answer has the
log-prob of each of them at temperature 1.

Both routes draw sample i of a request with the seed ``seed + i``. Neither promises an order among requests:
the servers sample them in the order in which they arrive, so `engine.sampling` sends answers before
continuations.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from typing_extensions import override

from treetune.engine.client import Address, Client, RequestPart, read_completions, read_scored_completion
from treetune.engine.requests import Completion, Request, SamplingParams, ScoreRequest
from treetune.engine.settings import PlainVllmSettings
from treetune.exceptions import EngineError, ServerFailure, TemporaryFailure
from treetune.vocabulary import token_array

Route = Literal["tokens", "completions"]

TOKENS_ROUTE, COMPLETIONS_ROUTE = "/inference/v1/generate", "/v1/completions"
PATH_OF_ROUTE: Mapping[Route, str] = {"tokens": TOKENS_ROUTE, "completions": COMPLETIONS_ROUTE}

TEMPORARY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""The HTTP statuses after which the same request may succeed."""
REFUSED_KEY_STATUSES = frozenset({401, 403})
"""The HTTP statuses of a server that refuses the API key, or a request without a key."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 8.0
"""The seconds before the first retry, and the limit of these seconds, which double with each retry."""

NAME_WHILE_REPLACED = "being-replaced"
"""The name that a server's weights have while they are replaced."""

MISSING_ROUTE_STATUSES = frozenset({401, 403, 404, 405, 501})
"""The HTTP statuses of a server that doesn't have a route, or of a proxy that doesn't forward it. Here 401
and 403 come from such a proxy: a key that is refused would have been noticed earlier, when the client asked
for the models."""

GREEDY_SAMPLING = SamplingParams(max_tokens=16, temperature=0.0)
"""Settings that sample the most probable tokens. At temperature 0, their log-probs are the model's own."""
SAMPLING_OF_ONE_TOKEN = SamplingParams(max_tokens=1)
FORCED_IDS = (1, 2)
"""Two tokens that a server is made to sample, each by itself. In a model's own distribution, their
probabilities sum to at most 1."""
LOGPROB_ROUNDING = 1e-3
"""Log-probs that differ by less than this are equal up to rounding."""
LARGEST_TIE_LOGPROB = -0.5
"""A token whose log-prob is above this isn't a tie: of two equally probable tokens, each has at most
log 1/2 = -0.69. The difference leaves room for rounding."""

TIMEOUT_MARGIN_S = 10.0
"""Seconds that the client waits beyond a request's own time limit, which should end the request first."""

EXCERPT_CHARACTERS = 200
"""Most characters of a server's answer in a message."""

SERVE_COMMAND = (
    "vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm"
)
"""The command that starts a server for this client, for messages."""


@dataclass(frozen=True)
class ServerFacts:
    """The facts about a server and its model, which the client asks for when it meets the server.

    Example::

        ServerFacts(name="policy", root="/models/rho-1b", route="tokens", context_length=2048,
                    takes_weights=True, has_processed_logprobs=True)
    """

    name: str
    """The model's name in requests."""
    root: str
    """The folder or the hub's name that the server loaded the model from."""
    route: Route
    """The route that samples."""
    context_length: int
    """Most tokens of prompt and response together; 0 if the server doesn't say."""
    takes_weights: bool
    """Whether the server has the routes that load weights."""
    has_processed_logprobs: bool
    """Whether its log-probs are those of the distribution that it samples from, after temperature and top-p.
    If not, they are the model's own."""
    greedy: tuple[tuple[int, float], ...] = field(default=(), compare=False)
    """The tokens that the server sampled with `GREEDY_SAMPLING`, each with its log-prob. Other weights have
    others."""

    def differs_from(self, earlier: ServerFacts, tolerance: float) -> str | None:
        """Returns how the server's weights differ from its earlier ones; None if no difference is seen.

        The attribute `greedy` of both facts is compared: the tokens that the server sampled as the most
        probable ones, each with its log-prob.

        Args:
            earlier: The facts when the server had its earlier weights.
            tolerance: The largest mean difference of log-probs that rounding explains.
        """
        differences = []
        for (earlier_id, earlier_logprob), (token_id, logprob) in zip(earlier.greedy, self.greedy):
            differences.append(abs(logprob - earlier_logprob))
            if token_id != earlier_id:
                # Rounding may swap two tokens that are about equally probable: a tie. In a tie, both
                # log-probs are below `LARGEST_TIE_LOGPROB`. So a higher one shows other weights. After
                # different tokens the two texts differ, so their next log-probs can't be compared.
                if max(logprob, earlier_logprob) > LARGEST_TIE_LOGPROB:
                    return f"its most probable token is {token_id}, and it was {earlier_id}"
                break
        if not differences:
            return None
        mean = math.fsum(differences) / len(differences)
        if mean <= tolerance:
            return None
        return f"its log-probs differ from the earlier ones by {mean:.2g} on average"


class PlainClient(Client):
    """A client for plain vLLM servers.

    `facts` has the facts about each server by its URL; only servers with facts are asked for samples.

    Args:
        salt: A text that only this run has. With it, servers whose weights have no name use no prefixes that
            they have cached for other clients, perhaps with other weights.
    """

    def __init__(
        self,
        settings: PlainVllmSettings,
        end_ids: Sequence[int] = (),
        special_ids: Mapping[str, int] | None = None,
        salt: str = "",
    ) -> None:
        # Read first: it may raise, and then no thread of the client must have been started.
        certificates = _read_certificates(settings.certificate, settings.key_path)
        super().__init__(end_ids, special_ids or {})
        self.certificates = certificates
        self.facts: dict[str, ServerFacts] = {}
        self.keeps_weights = settings.weight_transfer == "none"
        """Whether the servers keep the weights that they have."""
        self._settings, self._key_path, self._salt = settings, settings.key_path, salt

    # Sampling

    @override
    async def sample(
        self, address: Address, part: RequestPart, version: int, timeout: float
    ) -> list[Completion]:
        """Returns a part's samples. Sends the request again while the server can't be reached or is
        overloaded, up to `retries` times and within `timeout` seconds."""
        started = time.monotonic()
        wait_s = FIRST_WAIT_S
        retries_left = self._settings.retries
        while True:
            try:
                remaining_s = timeout - (time.monotonic() - started)
                answer = await self._send_once(address, part, version, remaining_s)
                seconds = time.monotonic() - started
                return self._completions_of_answer(answer, address, part, version, seconds)
            except TemporaryFailure as failure:
                # Computed again, since the attempt has taken time.
                remaining_s = timeout - (time.monotonic() - started)
                if retries_left == 0 or wait_s >= remaining_s:
                    raise ServerFailure(
                        f"{failure} (sent {self._settings.retries - retries_left + 1} times)"
                    ) from failure
            retries_left -= 1
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _send_once(
        self, address: Address, part: RequestPart, version: int, timeout: float
    ) -> dict[str, Any]:
        """Sends a part's request once, and returns the server's answer."""
        facts = self.facts[address.url]
        sampling = part.request.sampling
        needs_processed_logprobs = part.request.reads_logprobs and not _is_whole_distribution(sampling)
        if needs_processed_logprobs and not facts.has_processed_logprobs:
            raise EngineError(
                f"the server at {address.url} returns the model's own log-probs, and this run samples with"
                f" temperature {sampling.temperature:g}, top_p {sampling.top_p:g} and top_k {sampling.top_k},"
                " whose log-probs differ: start it with --logprobs-mode processed_logprobs, or sample with"
                " temperature 1 alone"
            )
        # vLLM uses a cached prefix only for requests of the same salt. Prefixes that other weights computed
        # must not be used, so each version of the weights has its own salt: the name of the weights. If the
        # run doesn't name its weights, the salt is a text that only this run has, with the version's number.
        cache_salt = address.weights or f"{self._salt}version-{version}"
        body = self.body(facts, part, cache_salt)
        return await self.ask(address, PATH_OF_ROUTE[facts.route], body, timeout)

    def _completions_of_answer(
        self, answer: Mapping[str, Any], address: Address, part: RequestPart, version: int, seconds: float
    ) -> list[Completion]:
        """Returns the samples in a server's answer, or the scores of a `ScoreRequest`."""
        route = self.facts[address.url].route
        # A request for scores samples a token, too. The weights that sampled it are checked here.
        samples = samples_of_answer(answer, route, expected_weights=address.weights)
        if isinstance(part.request, ScoreRequest):
            logprobs = scores_of_answer(answer, route, part.request)
            return [read_scored_completion({"logprobs": logprobs}, part.request, version, seconds)]
        return read_completions({"samples": samples}, part, version, seconds)

    def body(self, facts: ServerFacts, part: RequestPart, cache_salt: str) -> dict[str, Any]:
        """Returns the JSON body of a part's request.

        Args:
            facts: The facts about the server.
            cache_salt: A text that stands for the weights. vLLM uses cached prefixes only for requests of the
                same salt, so prefixes of older weights aren't used.
        """
        sampling = part.request.sampling.with_special_stops(self.special_ids)
        parameters = {
            "n": part.n,
            # Sample i of a request has the seed `seed + i`, and the part begins with sample `first`.
            "seed": part.request.seed + part.first,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # Sent although these are vLLM's defaults, since a model's generation_config may change them.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0 if part.request.reads_logprobs else None,  # 0: only that of the sampled token
            "stop_token_ids": [*self.end_ids, *sampling.stop_ids],
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
        }
        prompt_ids = part.request.prompt_ids.tolist()
        if isinstance(part.request, ScoreRequest):
            # vLLM scores the tokens of a prompt. It also samples a token after them, which is not used.
            prompt_ids = part.request.all_ids.tolist()
            parameters["prompt_logprobs"] = 0  # 0: only those of the prompt's own tokens
        if facts.route == "tokens":
            # Text is only needed to look for stop strings in it.
            parameters["detokenize"] = bool(sampling.stop)
            return {
                "model": facts.name,
                "token_ids": prompt_ids,
                "sampling_params": parameters,
                "cache_salt": cache_salt,
            }
        return parameters | {
            "model": facts.name,
            "prompt": prompt_ids,
            "add_special_tokens": False,
            "return_token_ids": True,
            # Without this, a server that has no tokenizer couldn't return log-probs.
            "return_tokens_as_token_ids": True,
            "cache_salt": cache_salt,
        }

    # Facts about a server

    def meet(self, address: Address, timeout: float, *, is_router: bool = False) -> ServerFacts:
        """Asks a server for the facts about it, and remembers them.

        Args:
            is_router: Whether it is a router, which takes no weights itself.

        Raises:
            ServerFailure: The server can't be reached.
            EngineError: It is not a vLLM server that this client can use.
        """
        answer = self.get(address, "/v1/models", timeout)
        cards = answer.get("data") or []
        if not isinstance(cards, list) or not all(map(_is_card, cards)):
            raise EngineError(
                f"the server at {address.url} doesn't list its models as vLLM does: expected"
                f" {{'data': [{{'id': …, 'root': …, 'max_model_len': …}}]}}, got {_shorten_answer(answer)}."
                f" List addresses of vLLM servers in {self._key_path}.addresses, such as `{SERVE_COMMAND}`"
                " starts"
            )
        card = self._choose_card(address, cards)
        name = card["id"]
        route, greedy = self._try_routes(address, name, timeout)
        facts = ServerFacts(
            name=name,
            root=card.get("root") or name,
            route=route,
            context_length=card.get("max_model_len") or 0,
            takes_weights=not (is_router or self.keeps_weights) and self._has_weight_routes(address, timeout),
            has_processed_logprobs=self._has_processed_logprobs(address, name, route, timeout),
            greedy=greedy,
        )
        self.facts[address.url] = facts
        return facts

    def get(self, address: Address, path: str, timeout: float) -> dict[str, Any]:
        """Gets a JSON object from a route; for the errors see `Client.post`."""

        async def ask() -> dict[str, Any]:
            status, text = await self.exchange("GET", address, path, None, timeout)
            return self.read_answer(path, status, text)

        return self.run(ask(), timeout + TIMEOUT_MARGIN_S)

    def tokenize(self, address: Address, model: str, text: str, timeout: float) -> list[int] | None:
        """Returns the server's token ids of a text, without special tokens before and after it. Returns None
        if the server doesn't tokenize. Raises ServerFailure as `exchange` does."""
        path, body = "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}
        status, answer_text = self.run(
            self.exchange("POST", address, path, body, timeout), timeout + TIMEOUT_MARGIN_S
        )
        if status != 200:
            return None
        token_ids = self.read_answer(path, status, answer_text).get("tokens")
        if not isinstance(token_ids, list) or not all(map(_is_token_id, token_ids)):
            return None
        return token_ids

    def _choose_card(self, address: Address, cards: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the description of the configured model among those that the server lists."""
        wanted_model = self._settings.model
        names = [card.get("id") for card in cards]
        fitting_cards = [card for card in cards if wanted_model is None or card.get("id") == wanted_model]
        if len(fitting_cards) == 1:
            return fitting_cards[0]
        listed = ", ".join(map(repr, names)) or "no model"
        if wanted_model is not None:
            raise EngineError(
                f"the server at {address.url} has {listed}, and {self._key_path}.model is {wanted_model!r}:"
                " set it to a name that the server has"
            )
        raise EngineError(
            f"the server at {address.url} has {listed}: set {self._key_path}.model to the name of the policy"
        )

    def _try_routes(
        self, address: Address, name: str, timeout: float
    ) -> tuple[Route, tuple[tuple[int, float], ...]]:
        """Returns the first configured route that the server has, and the tokens that it sampled with
        `GREEDY_SAMPLING`, each with its log-prob."""
        setting = self._settings.route
        routes: tuple[Route, ...] = ("tokens", "completions") if setting == "auto" else (setting,)
        for route in routes:
            status, text = self._send_probe(address, name, route, GREEDY_SAMPLING, timeout)
            # Without the route, older versions of vLLM answer 404, and newer ones 403.
            if status in (404, 403) and route == "tokens":
                if setting == "tokens":
                    raise EngineError(
                        f"the server at {address.url} doesn't have the route {PATH_OF_ROUTE[route]}"
                        f" (HTTP {status}): start it with --enable-scale-out, or set {self._key_path}.route"
                        " to 'completions'"
                    )
                continue
            sample = self._read_probe(address, route, status, text)
            return route, tuple(zip(sample["token_ids"], sample["logprobs"], strict=True))
        raise AssertionError("the last route returns or raises")

    def _has_processed_logprobs(self, address: Address, name: str, route: Route, timeout: float) -> bool:
        """Returns whether the server's log-probs are those of the distribution that it samples from.

        The server is made to sample one token, and then another one: each time no other token is allowed. In
        the distributions that the server samples from, each of the two has the log-prob 0. The model's own
        log-probs can't be 0 for two tokens at the same position, even if the model is certain of one of them.
        """
        logprobs = []
        for token_id in FORCED_IDS:
            status, text = self._send_probe(
                address, name, route, SAMPLING_OF_ONE_TOKEN, timeout, allowed_token_ids=[token_id]
            )
            sample = self._read_probe(address, route, status, text)
            logprobs += sample["logprobs"]
        return all(abs(logprob) < LOGPROB_ROUNDING for logprob in logprobs)

    def _has_weight_routes(self, address: Address, timeout: float) -> bool:
        """Returns whether the server has the routes that load weights. Raises ServerFailure if it is only
        overloaded or just starting."""
        path = "/weight_info"  # vLLM has this route together with those that load weights
        status, text = self.run(
            self.exchange("GET", address, path, None, timeout), timeout + TIMEOUT_MARGIN_S
        )
        if status in MISSING_ROUTE_STATUSES:
            return False
        self.read_answer(path, status, text)
        return True

    def _send_probe(
        self,
        address: Address,
        name: str,
        route: Route,
        sampling: SamplingParams,
        timeout: float,
        **parameters: Any,
    ) -> tuple[int, bytes]:
        """Requests one sample after the prompt of token 0, and returns the HTTP status and the answer.

        Args:
            parameters: Further sampling parameters of vLLM.
        """
        # The body of a request depends only on the name and the route. All other facts are placeholders.
        facts = ServerFacts(
            name=name,
            root=name,
            route=route,
            context_length=0,
            takes_weights=False,
            has_processed_logprobs=True,
        )
        request = Request(token_array([0]), seed=0, n=1, sampling=sampling)
        part = RequestPart(index=0, first=0, n=1, request=request)
        # A salt that no other request has, so that no cached prefix is used: the server's weights may have
        # changed since the last probe.
        body = self.body(facts, part, f"probe-{secrets.token_hex(8)}")
        # The end of a text is sampled like other tokens, so that samples have the same lengths.
        parameters |= {"stop_token_ids": [], "ignore_eos": True}
        # The completions route has the sampling parameters in the body itself.
        sampling_parameters = body.get("sampling_params", body)
        sampling_parameters.update(parameters)
        return self.run(
            self.exchange("POST", address, PATH_OF_ROUTE[route], body, timeout), timeout + TIMEOUT_MARGIN_S
        )

    def _read_probe(self, address: Address, route: Route, status: int, text: bytes) -> dict[str, Any]:
        """Returns the sample in a probe's answer. Raises EngineError if the answer has another form."""
        path = PATH_OF_ROUTE[route]
        answer = self.read_answer(path, status, text)
        try:
            # Any weights may answer a probe.
            samples = samples_of_answer(answer, route, expected_weights="")
        except ServerFailure as failure:
            raise EngineError(f"the server at {address.url} can't be used: {path}: {failure}") from failure
        sample = samples[0]  # `samples_of_answer` returns at least one sample
        token_count = len(sample["token_ids"])
        has_all_logprobs = token_count > 0 and len(sample["logprobs"]) == token_count
        if len(samples) != 1 or not has_all_logprobs:
            raise EngineError(
                f"the server at {address.url} can't be used: {path}: expected one sample with tokens and a"
                f" log-prob for each token, got {_shorten_answer(answer)}"
            )
        return sample

    # HTTP

    @override
    def headers(self, address: Address) -> dict[str, str]:
        return {"Authorization": f"Bearer {address.key}"} if address.key else {}

    @override
    async def exchange(
        self, method: str, address: Address, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> tuple[int, bytes]:
        """Sends one HTTP request. Raises EngineError with a remedy if the connection can't be encrypted."""
        import aiohttp

        try:
            return await super().exchange(method, address, path, body, timeout)
        except TemporaryFailure as failure:
            if isinstance(failure.__cause__, aiohttp.ClientSSLError):
                raise EngineError(
                    f"the connection to {address.url} could not be encrypted ({failure.__cause__}): set"
                    f" {self._key_path}.certificate to a file with the certificate that signed the server's"
                ) from failure
            raise

    @override
    def raise_for_status(self, path: str, status: int, beginning: str) -> NoReturn:
        """Raises the error for a status other than 200: TemporaryFailure if a later attempt may succeed, and
        otherwise EngineError with a remedy.

        Args:
            beginning: The beginning of the server's answer, for the message.
        """
        if status in TEMPORARY_STATUSES:
            raise TemporaryFailure(f"{path}: HTTP {status}: {beginning}")
        if status in REFUSED_KEY_STATUSES:
            raise EngineError(
                f"the server refused {path} with HTTP {status}: set {self._key_path}.key_variable to the name"
                " of the environment variable that has its API key"
            )
        if status == 404:
            raise EngineError(
                f"the server doesn't have the route or the model that it was asked for ({path}, HTTP 404:"
                f" {beginning}): list addresses of vLLM servers, such as `{SERVE_COMMAND}` starts, without a"
                " path"
            )
        raise EngineError(f"the server refused {path} with HTTP {status}: {beginning}")


def samples_of_answer(
    answer: Mapping[str, Any], route: Route, *, expected_weights: str
) -> list[dict[str, Any]]:
    """Returns the samples of a route's answer, in their order and in the form that `read_completions` reads.

    Args:
        expected_weights: The name of the weights that all tokens must be sampled by; empty: any. Answers of
            the completions route don't name the weights, so they aren't checked.

    Raises:
        ServerFailure: Other weights have sampled some tokens, or the answer has another form than vLLM's.
        EngineError: The server doesn't return token ids.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise _make_form_failure("'choices', a list of samples", answer)
    for choice in choices:
        if not isinstance(choice, dict) or not isinstance(choice.get("index"), int):
            raise _make_form_failure("a sample with its 'index'", choice)
    choices = sorted(choices, key=lambda choice: choice["index"])
    return [_sample_of_choice(choice, route, expected_weights) for choice in choices]


def scores_of_answer(answer: Mapping[str, Any], route: Route, request: ScoreRequest) -> list[float]:
    """Returns the log-probs of the tokens of a request's text.

    vLLM got the request's prompt and text as one prompt. It returned a log-prob for each token but the first.

    Example: the tokens 17, 28 and the text 20 have ``[None, {"28": {"logprob": -2.1}}, {"20": {"logprob":
    -0.11}}]``, whose last entry is the text's.

    Raises:
        ServerFailure: The answer has another form than vLLM's.
        EngineError: The server returns no log-probs.
    """
    # The completions route returns the log-probs within a sample. There is one sample.
    object_with_scores = answer if route == "tokens" else answer["choices"][0]
    entries = object_with_scores.get("prompt_logprobs")
    if entries is None:
        raise EngineError(
            "the server returned no log-probs of the tokens that it was asked to score, so it is an older"
            f" vLLM or another program: use a vLLM whose {PATH_OF_ROUTE[route]} knows prompt_logprobs"
        )
    expected = f"'prompt_logprobs', a list with an entry for each of {len(request.all_ids)} tokens"
    if not isinstance(entries, list) or len(entries) != len(request.all_ids):
        raise _make_form_failure(expected, entries)
    logprobs: list[float] = []
    entries_of_text = entries[len(request.prompt_ids) :]
    for token_id, entry in zip(request.text_ids.tolist(), entries_of_text, strict=True):
        described = entry.get(str(token_id)) if isinstance(entry, dict) else None
        logprob = described.get("logprob") if isinstance(described, dict) else None
        if logprob is None or not _is_finite_number(logprob):
            raise _make_form_failure(f"a log-prob of the token {token_id}", entry)
        logprobs.append(logprob)
    if max(logprobs) > LOGPROB_ROUNDING:  # above 0 by more than rounding
        raise EngineError(
            f"the server returned {max(logprobs):g} as a log-prob, so it returns logits: start it with"
            " --logprobs-mode processed_logprobs"
        )
    return logprobs


def _sample_of_choice(choice: Mapping[str, Any], route: Route, expected_weights: str) -> dict[str, Any]:
    """Returns one sample of an answer; see `samples_of_answer`."""
    token_ids = choice.get("token_ids")
    if token_ids is None:
        raise EngineError(
            "the server returned no token ids, so it is an older vLLM or another program: use a vLLM whose"
            f" {COMPLETIONS_ROUTE} knows return_token_ids"
        )
    if not isinstance(token_ids, list) or not all(map(_is_token_id, token_ids)):
        raise _make_form_failure("'token_ids', a list of integers", token_ids)
    logprobs_of_choice = choice.get("logprobs") or {}
    if not isinstance(logprobs_of_choice, dict):
        raise _make_form_failure("'logprobs', an object", logprobs_of_choice)
    if route == "tokens":
        entries = logprobs_of_choice.get("content") or []
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise _make_form_failure("the 'content' of 'logprobs', a list of objects", entries)
        logprobs = [entry.get("logprob") for entry in entries]
        # Versions of vLLM that don't name the weights return no spans.
        spans = choice.get("weight_versions")
        if expected_weights and spans is not None:
            _refuse_other_weights(spans, expected_weights)
    else:
        logprobs = logprobs_of_choice.get("token_logprobs") or []
        if not isinstance(logprobs, list):
            raise _make_form_failure("'token_logprobs', a list of numbers", logprobs)
    if not all(map(_is_finite_number, logprobs)):
        raise _make_form_failure("a finite number for each log-prob", logprobs)
    return {
        "token_ids": token_ids,
        "logprobs": logprobs,
        "finish_reason": choice.get("finish_reason"),
    }


def _refuse_other_weights(spans: Any, expected_weights: str) -> None:
    """Raises ServerFailure unless the weights of this name have sampled all tokens of an answer."""
    are_spans = isinstance(spans, list) and all(
        isinstance(span, dict) and isinstance(span.get("version"), str) for span in spans
    )
    if not are_spans:
        raise _make_form_failure("'weight_versions', a list of objects with a 'version'", spans)
    versions = sorted({span["version"] for span in spans})
    if versions != [expected_weights]:
        raise ServerFailure(f"its answer was sampled by the weights {versions}, not by {expected_weights!r}")


def _make_form_failure(expected: str, answer: Any) -> ServerFailure:
    """Returns the error for an answer that doesn't have the form of vLLM's."""
    return ServerFailure(
        f"its answer has another form than vLLM's: expected {expected}, got {_shorten_answer(answer)}"
    )


def _shorten_answer(answer: Any) -> str:
    """Returns the beginning of an answer as JSON, for messages."""
    text = json.dumps(answer, ensure_ascii=False)
    return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "…"


def _is_card(card: Any) -> bool:
    """Returns whether a value describes a model as vLLM does."""
    return (
        isinstance(card, dict)
        and isinstance(card.get("id"), str)
        and isinstance(card.get("root"), str | None)
        and isinstance(card.get("max_model_len"), int | None)
    )


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole_distribution(sampling: SamplingParams) -> bool:
    """Returns whether tokens are sampled from the model's own distribution: nothing scales or cuts it."""
    return sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k <= 0


def _read_certificates(file: str | None, key_path: str) -> ssl.SSLContext | None:
    """Returns the certificates of a file; None for the system's.

    Args:
        key_path: The path of the settings in the configuration, for the message.

    Raises:
        ValueError: The file can't be read.
    """
    if file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(Path(file).expanduser()))
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"{key_path}.certificate, {file}, can't be read ({error}): it must be a PEM file with"
            " certificates"
        ) from error
