"""Promises of tools that a model calls in the format of its chat:

* calls are read as models write them, and every call of a turn is answered, a wrong one with its fault;
* ids, log-probs and masks of an answer are those of one forward pass over the chat that the template
  writes;
* a call within a thought that the prompt opened is not made;
* a grader reads the whole conversation, also of an answer that continues from a copy;
* an MCP server that errs, hangs or dies is an observation, and a rollout that was killed asks it nothing
  twice;
* Python that keeps names has, in a copy, those of the moment at which the copy was made.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.domains.graders.code_grading import needs_sandbox
from tests.support.chat_models import TURN_END, bpe_tokenizer, random_model, template
from tests.support.columns import plain
from tests.support.contexts import context_of
from tests.support.fake_engine import FakeEngine
from tests.support.trees import answered
from tests.support.turns import Letters
from treetune.credit.episodes import make_episode
from treetune.domains.conversation import Conversation, TurnLimits, actions_of
from treetune.domains.environments.base import Reward, Turn
from treetune.domains.environments.calls import ToolCall
from treetune.domains.environments.mcp_tools import Mcp, end_servers
from treetune.domains.environments.pool import EnvironmentPool, TurnJournal
from treetune.domains.environments.tools import Function, Python, Tool, Tools
from treetune.domains.multi_turn import MultiTurn
from treetune.engine.journal import JournaledEngine
from treetune.engine.requests import Completion, SamplingParams
from treetune.exceptions import EngineError
from treetune.findings import missing_requirements
from treetune.models.chat import Chat
from treetune.models.tokenizer import codec_of
from treetune.rollouts.answers import Start
from treetune.seeds import derived_random
from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Grade, Problem, TextCodec, Trajectory, concatenate, token_array

PROBLEM = Problem("x/0", "What is 12 times 34?", "408")
SERVER = str(Path(__file__).parents[2] / "support" / "mcp_server.py")


def multiply(a: int, b: int = 2) -> int:
    """Multiplies two numbers.

    Args:
        a: A number.
        b: Another number.
    """
    return a * b


def doubled(argument: str) -> str:
    """Doubles a number.

    Args:
        argument: The number.
    """
    return str(2 * int(argument))


MULTIPLY = Function(path=f"{__name__}.multiply")


def message_with_calls(*calls: str) -> str:
    return "Let me see. " + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def results_of_turns(environment: Tools, *actions: str) -> list[list[str] | None]:
    """Play turns, and list the results of each turn's calls, None for a turn that ends the answer."""
    state = environment.reset(PROBLEM, 0)
    turns = [environment.step(state, action) for action in actions]
    return [None if turn.done else [text for _, _, text in turn.results] for turn in turns]


def call(name: str, arguments: str = "{}") -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


# Reading


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (
            "hermes",
            message_with_calls(call("a", '{"x": 1}'), call("b")),
            [("a", {"x": 1}, ""), ("b", {}, "")],
        ),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}', [("a", {}, "")]),
        ("hermes", 'It is {"name": "a"}.', []),
        ("llama", '{"name": "a", "parameters": {"x": 1}}', [("a", {"x": 1}, "")]),
        ("llama", '<|python_tag|>{"name": "a"}; {"name": "b"}', [("a", {}, ""), ("b", {}, "")]),
        ("llama", '{"answer": 3}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}, "id": "q"}]', [("a", {"x": 1}, "q")]),
        ("mistral", '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}', [("a", {"x": 1}, ""), ("b", {}, "")]),
        ("mistral", 'So[TOOL_CALLS]a[CALL_ID]q[ARGS]{"x": [2]}', [("a", {"x": [2]}, "q")]),
    ],
)
def test_calls_are_read_as_models_write_them(form: str, text: str, calls: list) -> None:
    assert Tools(tools=(MULTIPLY,), format=form).calls(text) == [ToolCall(*call) for call in calls]


@pytest.mark.parametrize(
    "text", ['{"name": "a', "[]x", '{"name": 3}', '{"arguments": {}}', '{"name": "a", "arguments": 3}']
)
def test_a_call_that_can_not_be_read_is_answered_with_its_fault(text: str) -> None:
    (results,) = results_of_turns(Tools(tools=(MULTIPLY,), format="hermes"), message_with_calls(text))
    assert results is not None
    assert "A call is JSON with a name and an object of arguments" in results[-1]


def test_all_calls_of_a_turn_are_answered_and_wrong_arguments_are_told() -> None:
    tools = Tools(tools=(MULTIPLY,), format="hermes", most_calls=6)
    turn = message_with_calls(
        call("multiply", '{"a": 12, "b": "34"}'),
        call("multiply", '{"a": "x"}'),
        call("multiply", '{"a": 1, "third": 3}'),
        call("divide"),
        call("multiply", '{"a": 5}'),
        "so",
        call("multiply", '{"a": 1}'),
    )
    first, last = results_of_turns(tools, turn, "408")
    assert last is None and first is not None
    assert first[0] == "408" and first[4] == "10"
    assert first[1].startswith("multiply can't be called so: a: ")
    assert "third: Unexpected keyword argument" in first[2]
    assert first[3] == "There is no tool divide; there is multiply."
    assert first[5].startswith("The call is no JSON")
    assert first[6] == "There are no calls left: give your answer."


def test_a_tool_that_raises_says_so_and_the_answer_goes_on() -> None:
    class Broken(Tool):
        name = "broken"

        def call(self, argument: str = "") -> str:
            raise ZeroDivisionError("nothing to divide by")

    tools = Tools(tools=(Broken(),), format="hermes")
    assert results_of_turns(tools, message_with_calls(call("broken"))) == [
        ["ZeroDivisionError: nothing to divide by"]
    ]


@pytest.mark.slow  # the import of vLLM
def test_vllms_parsers_read_calls_outside_of_a_server(tmp_path: Path) -> None:
    bpe_tokenizer(template=template("tools")).save_pretrained(tmp_path)
    tools = Tools(tools=(MULTIPLY,), format="vllm:hermes", tokenizer=str(tmp_path))
    text = message_with_calls(call("multiply", '{"a": 12, "b": 34}'), call("multiply", '{"a": 3}'))
    assert results_of_turns(tools, text, "408") == [["408", "6"], None]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "xml"}, "give tags, hermes, llama, mistral, or vllm:NAME"),
        ({"format": "vllm:hermes"}, "with a tokenizer"),
        ({"format": "hermes", "call": "x(?P<argument>y)"}, "pattern of tags"),
        ({"tools": (Mcp(command=("true",)),)}, "set format"),
    ],
)
def test_unknown_formats_and_settings_that_do_not_fit_a_format_are_refused(
    settings: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Tools(**{"tools": (MULTIPLY,), **settings})


# In a chat

TURNS_OF_MODEL = (
    message_with_calls(call("multiply", '{"a": 12, "b": 34}'), call("multiply", '{"a": "x"}')),
    "<tool_call>" + call("multiply", '{"a": 408, "b": 2}'),  # cut, as by a stop string
    "It is 408.",
)


def codec_with_tools(tools: Tools) -> TextCodec:
    codec = codec_of(bpe_tokenizer(template=template("tools")), chat=Chat())
    assert codec.with_tools is not None
    return codec.with_tools(tools.offered())


class ScriptedModel(FakeEngine):
    """Write one text in each turn, with the log-probs that a model gives to each request by itself."""

    def __init__(self, codec: TextCodec, texts: Sequence[str], **settings: Any) -> None:
        super().__init__(lambda ids, version: (), codec.eos_id, **settings)
        self._codec, self._texts = codec, texts
        torch.manual_seed(0)
        size = len(bpe_tokenizer())
        self.model = random_model("qwen2", size, max_position_embeddings=2048).eval()

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """Compute the log-prob of each id but the first in one forward pass."""
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1].double()
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()

    def _sample(
        self, prompt: tuple, seed: int, sampling: SamplingParams, reads_logprobs: bool = True
    ) -> Completion:
        turn = list(prompt).count(self._codec.encode("<|im_start|>")[0]) // 2 - 1
        text = self._texts[min(turn, len(self._texts) - 1)]
        cut = derived_random(seed, "cut").randrange(len(text))
        # The beginning is written letter by letter, as no tokenizer would. Code that encodes the text again
        # gets other ids, and the test notices.
        ids: list[int] = []
        for letter in text[:cut]:
            ids += self._codec.encode(letter)
        ids += [*self._codec.encode(text[cut:]), self._codec.eos_id]
        return Completion(ids, self.logprobs((*prompt, *ids))[len(prompt) - 1 :], "stop", 0)


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool() as pool:
        yield pool
    end_servers()


Sampled = Callable[..., tuple[list[Trajectory], Any]]


@pytest.fixture
def sample_answers(pool: EnvironmentPool) -> Sampled:
    """Return a function that samples two answers to each of two questions, in a chat that offers tools."""

    def sample(
        tools: Tools, engine: Any, codec: TextCodec, turn_journal: TurnJournal | None = None,
        pool: EnvironmentPool = pool, grader: Grader | None = None, gold: str = "",
    ) -> Any:  # fmt: skip
        reward: Reward = "environment" if grader is None else "grader"
        rollout = MultiTurn(environment=tools, samples=2, max_turns=4, max_tokens=900, reward=reward)
        task = Letters(golds=(gold, gold), environment=None)
        rollout.check_at_start(codec)
        context = context_of(
            task, engine, GraderPool(grader or task.grader), codec, sampling=rollout.sampling,
            unfinished_reward=0.0, context_length=2048, rollout=rollout, environments=pool,
            turn_journal=turn_journal,
        )  # fmt: skip
        return answered(rollout.run(context, task.problems("train")))[0], context

    return sample


def test_ids_logprobs_and_masks_are_those_of_one_forward_pass_over_the_templates_chat(
    sample_answers: Sampled,
) -> None:
    tools = Tools(tools=(MULTIPLY,), format="hermes")
    codec = codec_with_tools(tools)
    engine = ScriptedModel(codec, TURNS_OF_MODEL)
    answers, context = sample_answers(tools, engine, codec)
    tokenizer = bpe_tokenizer(template=template("tools"))
    (end,) = codec.encode(TURN_END)
    tokenisations = set()
    for answer in answers:
        row = make_episode(context, answer)
        all_ids = (*plain(answer.prompt_ids), *plain(row.response_ids))
        logprobs_of_one_pass = engine.logprobs(all_ids)[len(answer.prompt_ids) - 1 :]
        assert np.abs(logprobs_of_one_pass - row.behaviour_logprobs)[row.trained].max() < 1e-6
        turns = [plain(segment.token_ids) for segment in answer.segments if segment.origin == "sampled"]
        assert plain(row.response_ids[row.trained]) == sum(turns, ()) and len(turns) == 3
        assert all(turn[-1] == end for turn in turns), "its end is trained, once"
        tokenisations.add(tuple(turns))
        fault = (
            "multiply can't be called so: a: Input should be a valid integer, unable to parse string as an"
            " integer"
        )
        messages = [
            {"role": "user", "content": answer.problem.prompt},
            {"role": "assistant", "content": TURNS_OF_MODEL[0]},
            {"role": "tool", "content": "408"},
            {"role": "tool", "content": fault},
            {"role": "assistant", "content": TURNS_OF_MODEL[1]},
            {"role": "tool", "content": "816"},
            {"role": "assistant", "content": TURNS_OF_MODEL[2]},
        ]
        text = tokenizer.apply_chat_template(messages, tools=list(tools.offered()), tokenize=False)
        assert tokenizer.decode(all_ids) == text.removesuffix("\n")
    assert len(tokenisations) > 1, "the answers have the same text in different tokens"


class TurnCounter(Grader):
    """Reward each turn with the number of its messages, and keep the transcripts that it reads."""

    isolation: ClassVar[Isolation] = "inline"
    reads_turns: ClassVar[bool] = True

    def __init__(self) -> None:
        self.transcripts: list[Any] = []

    def grade(self, response: str, problem: Problem) -> Grade:
        assert problem.transcript is not None
        self.transcripts.append(problem.transcript)
        rewards = tuple(float(len(turn)) for turn in problem.transcript.turns)
        return Grade(reward=sum(rewards), outcome="ok", step_rewards=rewards)


def test_a_grader_reads_the_whole_conversation_also_of_an_answer_that_goes_on_from_a_copy(
    sample_answers: Sampled,
) -> None:
    tools = Tools(tools=(MULTIPLY,), format="hermes")
    codec, grader = codec_with_tools(tools), TurnCounter()
    answers, context = sample_answers(tools, ScriptedModel(codec, TURNS_OF_MODEL), codec, grader=grader)
    text, turns, _ = grader.transcripts[0]
    message, *results = turns[0]
    (call,) = message["tool_calls"][:1]
    assert message["content"] == "Let me see."
    assert call["function"] == {"name": "multiply", "arguments": {"a": 12, "b": 34}}
    assert (results[0]["content"], results[0]["tool_call_id"]) == ("408", call["id"])
    assert [len(turn) for turn in turns] == [3, 2, 1]
    assert turns[2] == [{"role": "assistant", "content": "It is 408."}]
    assert text == answers[0].text and text.count("<tool_response>") == 3
    for answer in answers:
        assert (answer.step_rewards, answer.reward) == ((3.0, 2.0, 1.0), 6.0)
        assert make_episode(context, answer).step_rewards == answer.step_rewards
    after_first_turn = Start(PROBLEM, answers[0].prompt_ids, 1, answers[0].segments[:2])
    (continued,) = context.engine.run(context.rollout.answers(context, [after_first_turn]))
    assert grader.transcripts[-1] == grader.transcripts[0]
    assert continued.step_rewards == (3.0, 2.0, 1.0)


# In a thought that the prompt opened


class ScriptedTurns(FakeEngine):
    """Write one text in each turn, which is the number of results that stand in the prompt."""

    def __init__(self, codec: TextCodec, result: str, texts: Sequence[str]) -> None:
        super().__init__(lambda ids, version: (), codec.eos_id)
        self._codec, self._result, self._texts = codec, result, texts

    def _sample(
        self, prompt: tuple, seed: int, sampling: SamplingParams, reads_logprobs: bool = True
    ) -> Completion:
        decode = self._codec.decode_all or self._codec.decode
        text = self._texts[decode(prompt).count(self._result)]
        ids = (*self._codec.encode(text), self._codec.eos_id)
        return Completion(ids, np.zeros(len(ids)), "stop", 0)


MULTIPLY_CALL = message_with_calls(call("multiply", '{"a": 12, "b": 34}'))


@pytest.mark.parametrize(
    ("texts", "turns", "reward"),
    [
        # A call within the thought isn't made, and the answer ends in its thought.
        ([f"I could write {MULTIPLY_CALL}"], 1, 0.0),
        ([f"I could write {MULTIPLY_CALL} but 408 is it."], 1, 0.0),
        ([f"I need a product.</think>{MULTIPLY_CALL}", "So it is clear.</think>#### 408"], 2, 1.0),
        ([f"I need a product.</think>{MULTIPLY_CALL}", f"Again {MULTIPLY_CALL}"], 2, 0.0),
        (["12 times 34, that is 408.</think>#### 408"], 1, 1.0),
    ],
)
def test_calls_in_a_thought_that_the_chat_template_opened_are_not_made(
    sample_answers: Sampled, texts: list[str], turns: int, reward: float
) -> None:
    opening = template("tools").removesuffix("{% endif %}") + "<think>\n{% endif %}"
    tools = Tools(tools=(MULTIPLY,), format="hermes")
    codec = codec_of(bpe_tokenizer(template=opening), chat=Chat(earlier_turns="as_sampled"))
    assert codec.with_tools is not None
    codec = codec.with_tools(tools.offered())
    engine = ScriptedTurns(codec, "<tool_response>", texts)
    answers, _ = sample_answers(tools, engine, codec, grader=Numeric(), gold="408")
    for answer in answers:
        assert len(answer.step_ends) == turns
        assert answer.reward == reward
        assert answer.text == codec.decode(concatenate([segment.token_ids for segment in answer.segments]))


@pytest.mark.parametrize(
    ("texts", "turns", "reward"),
    [
        (["Let me see.</think><doubled>12</doubled>", "So: #### 408"], 2, 1.0),
        (["I might call <doubled>12</doubled> but then again no.</think>#### 408"], 1, 1.0),
        (["I might call <doubled>12</doubled> but"], 1, 0.0),
    ],
)
def test_without_a_chat_only_the_first_turn_begins_in_the_thought_of_the_prompt(
    sample_answers: Sampled, texts: list[str], turns: int, reward: float
) -> None:
    codec = TextCodec(
        encode=lambda text: [ord(letter) for letter in text],
        decode=lambda ids: "".join(chr(token) for token in ids if token),
        eos_id=0,
        frame=lambda question: f"{question}\nAssistant: <think>\n",
    )
    tools = Tools(tools=(Function(path=f"{__name__}.doubled"),))
    answers, _ = sample_answers(
        tools, ScriptedTurns(codec, "<result>", texts), codec, grader=Numeric(), gold="408"
    )
    for answer in answers:
        assert len(answer.step_ends) == turns
        assert answer.reward == reward


def test_an_answer_that_continues_has_the_same_actions(sample_answers: Sampled) -> None:
    codec = TextCodec(
        encode=lambda text: [ord(letter) for letter in text],
        decode=lambda ids: "".join(chr(token) for token in ids if token),
        eos_id=0,
        frame=lambda question: f"{question}\nAssistant: <think>\n",
    )
    limits = TurnLimits(turn_tokens=100, max_turns=3, observation_characters=100, stop=())
    prompt_ids = token_array(codec.encode_prompt(PROBLEM))
    conversation = Conversation(codec, "\n{}\n".format, limits, prompt_ids, 1000)
    for text in ("six</think> one", "two"):
        ids = (*codec.encode(text), codec.eos_id)
        assert conversation.take_completion(Completion(ids, None, "stop", 0))
        conversation.take_reply(Turn("said"))
    assert conversation.actions == ("<think>six</think> one", "two")
    assert actions_of(codec, prompt_ids, conversation.segments, limits) == conversation.actions


class Undescribed(Tool):
    name = "undescribed"

    def call(self, argument: str) -> str:
        return argument


def test_a_template_without_tools_is_refused_and_so_is_a_model_without_a_chat() -> None:
    codec = codec_of(bpe_tokenizer(), chat=Chat())
    with pytest.raises(ValueError, match="has no place for tools"):
        codec.with_tools(Tools(tools=(MULTIPLY,), format="hermes").offered())
    assert codec_of(bpe_tokenizer()).with_tools is None
    undescribed = Tools(tools=(Undescribed(),), format="hermes")
    with pytest.raises(ValueError, match=r"has no schema.*docstring"):
        undescribed.offered()


# Servers


def tools_of_counting_server(folder: Path, **settings: Any) -> Tools:
    command = (sys.executable, SERVER, str(folder / "counted"))
    return Tools(tools=(Mcp(command=command, call_seconds=6.0, **settings),), format="hermes", deadline=60.0)


@pytest.fixture
def ended_servers() -> Iterator[None]:
    """End all servers after the test."""
    yield
    end_servers()


@pytest.mark.usefixtures("ended_servers")
def test_a_server_that_errs_hangs_or_dies_is_an_observation_and_the_next_call_is_answered(
    tmp_path: Path,
) -> None:
    tools = tools_of_counting_server(tmp_path)
    names = [schema["function"]["name"] for schema in tools.offered()]
    assert names == ["count", "fail", "hang", "wait", "die"]
    assert tools.isolation == "service"
    turns = results_of_turns(
        tools,
        message_with_calls(call("count"), call("count", '{"step": "5"}')),
        message_with_calls(call("count", '{"step": "x"}'), call("fail", '{"why": "so"}'), call("nothing")),
        message_with_calls(call("wait"), call("count")),
        message_with_calls(call("die"), call("count")),
        message_with_calls(call("hang"), call("count")),
    )
    assert turns[0] == ["1", "6"]
    assert turns[1] is not None and turns[1][0].startswith("Error: ") and turns[1][1].startswith("Error: ")
    assert turns[1][2] == "There is no tool nothing; there is count, fail, hang, wait, die."
    assert turns[2:] == [
        ["No result within 6 s.", "7"],
        ["The server ended during the call.", "8"],
        ["No result within 6 s.", "9"],
    ]


@pytest.mark.usefixtures("ended_servers")
def test_missing_servers_and_missing_tools_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not available"):
        Mcp(command=(sys.executable, "-c", "raise SystemExit('out of order')")).schemas()
    with pytest.raises(ValueError, match=r"didn't list its tools within 0.5 s"):
        Mcp(command=("sleep", "60"), start_seconds=0.5).schemas()
    with pytest.raises(ValueError, match="only names fly, which"):
        tools_of_counting_server(tmp_path, only=("count", "fly")).offered()
    assert missing_requirements([Mcp(command=("no-such-program",))]) == [
        "no-such-program, which is to be started as an MCP server, isn't there"
    ]
    with pytest.raises(ValueError, match="a command or an address"):
        Mcp()


def test_a_killed_rollout_goes_on_to_the_same_answers_and_asks_its_server_nothing_twice(
    tmp_path: Path, sample_answers: Sampled
) -> None:
    tools = tools_of_counting_server(tmp_path)
    codec = codec_with_tools(tools)
    texts = (
        message_with_calls(call("count")),
        message_with_calls(call("count"), call("fail")),
        "Done.",
    )

    def answers_of_run(engine: FakeEngine, **settings: Any) -> list[Trajectory]:
        journaled = JournaledEngine(engine, tmp_path / "0.jsonl")
        return sample_answers(tools, journaled, codec, TurnJournal(tmp_path / "0.turns"), **settings)[0]

    # A pool for the killed run alone, whose end waits for turns that are being played.
    with EnvironmentPool() as pool_of_killed_run, pytest.raises(EngineError):
        answers_of_run(ScriptedModel(codec, texts, fail_after=7), pool=pool_of_killed_run)
    end_servers()  # as they end with the process of a run
    answers = answers_of_run(ScriptedModel(codec, texts))
    counted = (tmp_path / "counted").read_text()
    engine_of_third_run = ScriptedModel(codec, texts)
    assert answers_of_run(engine_of_third_run) == answers and not engine_of_third_run.asked
    assert (tmp_path / "counted").read_text() == counted and 8 <= len(counted) <= 12
    assert all(answer.grade.outcome == "ok" and "Error" in answer.text for answer in answers)


# Python that keeps its names


@needs_sandbox
def test_names_stay_from_call_to_call_and_a_copy_has_the_names_of_its_moment() -> None:
    tools = Tools(tools=(Python(state=True),), format="hermes")
    state = tools.reset(PROBLEM, 0)

    def run_python(state: Any, code: str) -> str:
        return tools.step(state, message_with_calls(call("python", f'{{"code": "{code}"}}'))).observation

    assert run_python(state, "x = [1]") == ""
    snapshot = pickle.dumps(state)
    assert run_python(state, "x.append(2); print(x)") == "[1, 2]"
    copied_state = pickle.loads(snapshot)
    assert (
        run_python(copied_state, "x.append(3); print(x)") == "[1, 3]" and run_python(state, "x") == "[1, 2]"
    )
    assert run_python(pickle.loads(pickle.dumps(copied_state)), "x") == "[1, 3]"
    assert "ended" in run_python(copied_state, "import os; os._exit(1)")
    assert "NameError" in run_python(copied_state, "x") and "NameError" in run_python(
        pickle.loads(pickle.dumps(copied_state)), "x"
    )
    assert run_python(tools.reset(PROBLEM, 0), "print('x' in globals())") == "False"


def test_python_that_keeps_names_is_refused_where_the_sandbox_forgets() -> None:
    from treetune.domains.sandbox.program import UnsafeLocal
    from treetune.domains.sandbox.python_tool import PythonTool

    with pytest.raises(ValueError, match="needs the sandbox bubblewrap"):
        Python(state=True, console=PythonTool(sandbox=UnsafeLocal()))
