"""Credit as a library, for answers that another trainer has sampled and graded.

These tests promise:

* The same answers get exactly the advantages that they get in a run.
* Lists, NumPy arrays and tensors come back in the form in which they came; DeepSpeed isn't needed.
* A budget, a deadline, a cancelled task and a failing grader end a call with an error that says so.
* Wrong answers, and a credit that needs a run, are refused with a message that says how to do it right.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import treetune.parts  # noqa: F401  (registers the credits that `build` makes)
from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from tests.support.documents import ROOT
from tests.support.fake_engine import FakeEngine
from treetune.config.build import build
from treetune.credit import (
    CreditAssigner,
    CreditedAnswers,
    CreditLimitReached,
    GradedAnswer,
    advantages,
    advantages_async,
)
from treetune.credit.base import Credit
from treetune.credit.library.answers import read_answers, trees_of_answers
from treetune.credit.trees import TreeCredit
from treetune.engine.base import EngineLaunch
from treetune.engine.held_model import HeldModelEngine
from treetune.engine.in_process import InProcessEngine
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.engine.settings import InProcessSettings
from treetune.exceptions import ConfigError, EngineError, Unavailable
from treetune.tasks.graders.pool import GraderPool
from treetune.tree import trees_of
from treetune.vocabulary import Fork, Problem, Segment, Trajectory

SAMPLING = SamplingParams(max_tokens=mdp.LONGEST)
CREDITS: list[dict[str, Any]] = [
    {"type": "group"},
    {"type": "group", "std": False},
    {"type": "rloo"},
    {"type": "outcome"},
    {"type": "monte_carlo", "samples": 3},
    {"type": "monte_carlo", "samples": 3, "values": {"type": "siblings"}},
    {"type": "monte_carlo", "samples": 3, "values": {"type": "topped_up"}},
    {"type": "monte_carlo", "samples": 3, "values": {"type": "filtered"}},
    {
        "type": "monte_carlo",
        "samples": 2,
        "values": {"type": "bisect"},
        "siblings_count_into_prompt_value": False,
    },
    {"type": "monte_carlo", "samples": 2, "states": {"type": "every_n_tokens", "tokens": 1}},
    {"type": "monte_carlo", "samples": 2, "states": {"type": "low_probability", "every": 2}},
    {"type": "tempo"},
    {"type": "probability_mask", "over": {"type": "rloo"}, "below": 0.7},
]


def fake_engine() -> FakeEngine:
    return FakeEngine(mdp.chances, mdp.EOS, decode=mdp.decode)


def answers_in_run() -> list[Trajectory]:
    """Returns four answers to each of two problems, of different lengths and rewards."""
    texts = ["a;a;b", "b;a", "a;a;a", "b"]
    trajectories = []
    for problem in mdp.problems(2):
        for sample, text in enumerate(texts):
            answer = (*mdp.encode(text), mdp.EOS)
            logprobs = mdp.policy_logprobs(answer)
            trajectories.append(mdp.trajectory(answer, problem, sample, logprobs=logprobs))
    return trajectories


def as_graded_answer(trajectory: Trajectory, **changed: Any) -> GradedAnswer:
    """Returns the answer of a run as another trainer would give it."""
    logprobs = [segment.logprobs for segment in trajectory.segments if segment.logprobs is not None]
    settings: dict[str, Any] = {
        "prompt_ids": plain(trajectory.prompt_ids),
        "response_ids": trajectory.response_ids,
        "reward": trajectory.reward,
        "group": trajectory.problem.id,
        "logprobs": np.concatenate(logprobs) if logprobs else None,
        "prompt": trajectory.problem.prompt,
        "step_ends": trajectory.step_ends,
    }
    return GradedAnswer(**settings | changed)


def make_assigner(credit: Any, **changed: Any) -> CreditAssigner:
    settings: dict[str, Any] = {
        "engine": fake_engine(),
        "grader": mdp.LetterGrader(),
        "tokenizer": mdp.CODEC,
        "sampling": SAMPLING,
        "context_length": 64,
        "seed": 1,
    }
    return CreditAssigner(credit, **settings | changed)


def two_answers(**changed: Any) -> list[dict[str, Any]]:
    return [
        {"prompt_ids": [3, 4], "response_ids": [5, 6, 0], "reward": 1.0, **changed},
        {"prompt_ids": [3, 4], "response_ids": [7, 0], "reward": 0.0},
    ]


@pytest.mark.parametrize("credit", CREDITS, ids=str)
def test_the_same_answers_get_the_same_advantages_as_in_a_run(credit: dict[str, Any]) -> None:
    trajectories = answers_in_run()
    credit_in_run = build(Credit, credit)
    episodes, metrics = mdp.assign_credit(credit_in_run, trajectories, engine=fake_engine(), iteration=3)
    with make_assigner(credit) as library:
        from_library = library.advantages([as_graded_answer(answer) for answer in trajectories], iteration=3)
    assert from_library.left_out == []
    for number, episode in enumerate(episodes):
        assert np.array_equal(from_library.advantages[number], episode.advantages)
        assert np.array_equal(from_library.trained[number], episode.trained)
        assert (from_library.step_ends[number], from_library.values[number]) == (
            episode.step_ends,
            episode.step_values,
        )
    assert from_library.metrics == metrics
    assert from_library.cost.samples == metrics.get("credit/value_samples", 0)
    assert from_library.cost.tokens == metrics.get("credit/value_tokens", 0)


@pytest.mark.parametrize("credit", ["trace", {"type": "monte_carlo", "values": {"type": "rredcot"}}], ids=str)
def test_credit_that_scores_reference_answers_is_that_of_a_run(credit: Any) -> None:
    trajectories = answers_in_run()
    configuration = {"type": credit} if isinstance(credit, str) else credit
    episodes, _ = mdp.assign_credit(build(Credit, configuration), trajectories, engine=fake_engine())
    answers = [as_graded_answer(answer, gold=answer.problem.gold) for answer in trajectories]
    with make_assigner(credit, grader=None, sampling=None) as library:
        credited = library.advantages(answers)
    for number, episode in enumerate(episodes):
        assert np.array_equal(credited.advantages[number], episode.advantages)
    assert (credited.cost.samples, credited.cost.tokens) == (0, 0), "nothing was sampled"


def test_answers_keep_their_order_and_groups_may_be_mixed() -> None:
    trajectories = answers_in_run()
    mixed = [trajectories[number] for number in (4, 0, 5, 1, 6, 2, 7, 3)]
    credit = {"type": "monte_carlo", "samples": 3}
    with make_assigner(credit) as library:
        in_order = library.advantages([as_graded_answer(answer) for answer in trajectories])
        credited = library.advantages([as_graded_answer(answer) for answer in mixed])
    for answer, row in zip(mixed, credited.advantages, strict=True):
        assert np.array_equal(row, in_order.advantages[trajectories.index(answer)])


def test_answers_with_equal_prompts_are_a_group_and_get_steps_from_their_text() -> None:
    trajectories = answers_in_run()
    answers = [as_graded_answer(answer, group=None, prompt="", step_ends=None) for answer in trajectories]
    with make_assigner({"type": "monte_carlo", "samples": 2}, steps="lines") as library:
        credited = library.advantages(answers)
    assert {len(ends) for ends in credited.step_ends} == {2}, "one line, and the end token as its own step"
    assert credited.values[0] != credited.values[4], "another prompt is another state"


def test_answers_that_branch_off_from_each_other_are_a_tree() -> None:
    texts, forks = ["a;a;b", "a;b", "a;a;a", "b"], [None, Fork(0, 2), Fork(0, 4), None]
    # Each answer is cut into segments at the steps, so that the forks lie between segments.
    cuts = [[0, 2, 4, 6], [0, 2, 4], [0, 2, 4, 6], [0, 2]]
    trajectories = []
    for sample, (text, fork, answer_cuts) in enumerate(zip(texts, forks, cuts, strict=True)):
        trajectory = mdp.trajectory((*mdp.encode(text), mdp.EOS), sample=sample)
        ids = trajectory.response_ids
        segments = tuple(Segment(ids[start:end]) for start, end in itertools.pairwise(answer_cuts))
        trajectories.append(
            Trajectory(
                problem=trajectory.problem,
                sample=sample,
                prompt_ids=trajectory.prompt_ids,
                segments=segments,
                finish_reason="stop",
                text=text,
                grade=trajectory.grade,
                step_ends=(len(ids),),
                fork=fork,
            )
        )
    episodes, _ = TreeCredit().assign(mdp.context(), trees_of(trajectories))
    credited = advantages(
        [as_graded_answer(answer, fork=answer.fork) for answer in trajectories], credit="tree"
    )
    for number, episode in enumerate(episodes):
        assert np.array_equal(credited.advantages[number], episode.advantages)
        assert np.array_equal(credited.trained[number], episode.trained)
    assert plain(credited.trained[2]) == (False,) * 4 + (True,) * 2
    with pytest.raises(ValueError, match="choose the credit 'tree'"):
        advantages([as_graded_answer(answer, fork=answer.fork) for answer in trajectories], credit="rloo")
    wrong = [as_graded_answer(trajectories[0]), as_graded_answer(trajectories[3], fork=(0, 1))]
    with pytest.raises(ValueError, match="first 1 tokens are not those of answer 0"):
        advantages(wrong, credit="tree")


@pytest.mark.parametrize("sampled", [None, [True, True, True, True], [False, True, True, True]], ids=str)
def test_a_fork_from_an_answer_with_other_sampled_tokens_is_refused(sampled: list[bool] | None) -> None:
    answers = [
        {
            "prompt_ids": [3, 4],
            "response_ids": [1, 2, 3, 4],
            "reward": 1.0,
            "sampled": [False, False, True, True],
        },
        {
            "prompt_ids": [3, 4],
            "response_ids": [1, 2, 3, 5],
            "reward": 0.0,
            "fork": (0, 3),
            "sampled": sampled,
        },
    ]
    message = r"sampled of its first 3 tokens differs from that of answer 0: give"
    with pytest.raises(ValueError, match=message):
        trees_of_answers(mdp.context(), read_answers(answers), has_text=False)
    with pytest.raises(ValueError, match=message):
        advantages(answers, credit="tree")


def test_tokens_of_an_environment_are_not_trained() -> None:
    answers = two_answers(sampled=[True, False, True])
    for credit in ("gigpo", "tree"):
        credited = advantages(answers, credit=credit)
        assert credited.trained == [[True, False, True], [True, True]]
    with pytest.raises(ValueError, match="answers in one line that the policy writes by itself"):
        advantages(answers, credit={"type": "grpo_lambda"})


@pytest.mark.parametrize(
    "credit", ["group", {"type": "group"}, "{ type: 'group' }", build(Credit, {"type": "group"})], ids=str
)
def test_a_credit_is_given_by_name_configuration_jsonnet_or_as_an_object(credit: Any) -> None:
    assert advantages(two_answers(), credit=credit).advantages[0] == [pytest.approx(0.70710, abs=1e-4)] * 3


def test_columns_come_back_as_they_were_given() -> None:
    answers = two_answers()
    answers[1]["response_ids"] = np.array([7, 0])
    credited = advantages(answers, credit="rloo")
    assert credited.advantages[0] == [1.0, 1.0, 1.0] and credited.trained[0] == [True] * 3
    assert credited.advantages[1].dtype == np.float64 and plain(credited.advantages[1]) == (-1.0, -1.0)
    assert credited.padded().tolist() == [[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]
    assert credited.padded(4).shape == (2, 4)
    with pytest.raises(ValueError, match="longest answer has 3 tokens"):
        credited.padded(2)
    logprobs = [torch.full((3,), -0.5, dtype=torch.bfloat16), torch.full((2,), -0.5)]
    tensors = []
    for answer, answer_logprobs in zip(answers, logprobs, strict=True):
        ids = torch.as_tensor(answer["response_ids"])
        tensors.append({**answer, "response_ids": ids, "logprobs": answer_logprobs})
    padded = advantages(tensors, credit="rloo").padded()
    assert padded.dtype == torch.float32 and padded.tolist() == [[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]


def test_credit_needs_neither_deepspeed_nor_torch_for_plain_lists() -> None:
    program = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("deepspeed", "vllm"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
from treetune.credit import advantages
answers = [
    {"prompt_ids": [1, 2], "response_ids": [5, 6, 0], "reward": 1.0},
    {"prompt_ids": [1, 2], "response_ids": [5, 0], "reward": 0.0},
]
states = {"type": "every_n_tokens", "tokens": 1}
siblings = {"type": "monte_carlo", "values": {"type": "siblings"}, "states": states}
for credit in ("group", "rloo", siblings):
    print(advantages(answers, credit=credit).advantages)
print([name for name in ("torch", "deepspeed", "vllm") if name in sys.modules])
"""
    process = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    *rows, heavy_modules = process.stdout.splitlines()
    assert rows[1] == "[[1.0, 1.0, 1.0], [-1.0, -1.0]]" and len(rows) == 3
    assert heavy_modules == "[]"


# Graders


def grade_by_prompt_and_text(prompt: str, text: str) -> float:
    assert prompt in ("0?", "1?")
    return float(text.count("a") >= 2)


def grade_by_problem(prompt: str, text: str, problem: Problem) -> float:
    assert problem.gold == "2" and problem.data["level"] == 1
    return float(text.count("a") >= int(problem.gold))


@pytest.mark.parametrize("grader", [grade_by_prompt_and_text, grade_by_problem])
def test_a_function_grades_continuations_as_a_grader_would(grader: Any) -> None:
    credit = {"type": "monte_carlo", "samples": 3}
    answers = [as_graded_answer(answer, gold="2", data={"level": 1}) for answer in answers_in_run()]
    with make_assigner(credit) as library, make_assigner(credit, grader=grader) as with_function:
        expected, credited = library.advantages(answers), with_function.advantages(answers)
    assert list(map(plain, credited.advantages)) == list(map(plain, expected.advantages))


def test_a_function_that_fails_ends_the_call_with_its_name() -> None:
    def broken(prompt: str, text: str) -> float:
        return {}[text]

    def without_return(prompt: str, text: str) -> None:
        pass

    answers = [as_graded_answer(answer) for answer in answers_in_run()]
    with (
        make_assigner("monte_carlo", grader=broken) as library,
        pytest.raises(
            RuntimeError, match="grader broken raised KeyError on a continuation of the group 'train/0'"
        ),
    ):
        library.advantages(answers)
    with (
        make_assigner("monte_carlo", grader=without_return) as library,
        pytest.raises(ValueError, match=r"grader without_return returned None .*return a finite number"),
    ):
        library.advantages(answers)


def test_answers_whose_prompt_no_grader_can_value_are_left_out() -> None:
    class Down(mdp.LetterGrader):
        isolation = "inline"

        def grade(self, response: str, problem: Problem) -> Any:
            if problem.id == "train/1":
                raise Unavailable("the judge is down")
            return super().grade(response, problem)

    answers = [as_graded_answer(answer) for answer in answers_in_run()]
    with make_assigner({"type": "monte_carlo", "samples": 2}, grader=Down()) as library:
        credited = library.advantages(answers)
    assert credited.left_out == [4, 5, 6, 7]
    assert not any(credited.trained[number].any() for number in credited.left_out)
    assert credited.trained[0].all()


# Limits


def test_a_budget_of_tokens_ends_the_call() -> None:
    answers = [as_graded_answer(answer) for answer in answers_in_run()]
    with make_assigner({"type": "monte_carlo", "samples": 9}) as library:
        cost = library.advantages(answers).cost
        assert library.advantages(answers, budget=cost.tokens).cost.tokens == cost.tokens
        with pytest.raises(CreditLimitReached, match=r"budget of 40 tokens is used up: \d+ continuations"):
            library.advantages(answers, budget=40)


@pytest.fixture(scope="module")
def endless_model() -> Any:
    """A model that can't sample the end token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=mdp.EOS, eos_token_id=None, bos_token_id=None, pad_token_id=None,
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=65536,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def credit_without_end(model: Any) -> CreditAssigner:
    return make_assigner(
        {"type": "monte_carlo", "samples": 1},
        engine=model,
        grader=lambda prompt, text: 0.0,
        sampling=SamplingParams(max_tokens=60000),
        context_length=None,
    )


def test_a_deadline_ends_a_call_within_a_long_sample(endless_model: Any) -> None:
    with (
        credit_without_end(endless_model) as library,
        pytest.raises(CreditLimitReached, match=r"deadline of 1 s"),
    ):
        library.advantages(two_answers(step_ends=[1, 3]), deadline=1)


def test_a_call_is_awaited_and_ends_when_its_task_is_cancelled(endless_model: Any) -> None:
    answers = [as_graded_answer(answer) for answer in answers_in_run()]
    settings: dict[str, Any] = {
        "credit": "monte_carlo",
        "grader": grade_by_prompt_and_text,
        "tokenizer": mdp.CODEC,
    }

    async def call_twice() -> CreditedAnswers:
        credited = await advantages_async(answers, engine=fake_engine(), sampling=SAMPLING, **settings)
        with credit_without_end(endless_model) as library:
            task = asyncio.create_task(library.advantages_async(two_answers(step_ends=[1, 3])))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return credited

    credited = asyncio.run(call_twice())
    expected = advantages(answers, engine=fake_engine(), sampling=SAMPLING, **settings)
    assert list(map(plain, credited.advantages)) == list(map(plain, expected.advantages))


# Engines


def test_a_model_in_memory_samples_as_its_folder_would_and_stays_in_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=mdp.EOS + 1, eos_token_id=mdp.EOS,
        hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, initializer_range=0.3, attention_dropout=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    model.lm_head.eval()  # as a trainer does with modules whose dropout is to be off
    model.save_pretrained(tmp_path)
    launch = EngineLaunch(tmp_path, tmp_path, seed=0, context_length=64, end_ids=(mdp.EOS,))
    held = HeldModelEngine(model, mdp.CODEC, launch)
    from_folder = InProcessEngine(InProcessSettings(), launch)
    request = Request(np.array([3, 4]), 0, 4, SamplingParams(max_tokens=20))
    # A prompt of more than one block, whose keys and values an engine stores for the next call.
    long_request = Request(np.array([3, 4] * 20), 0, 4, SamplingParams(max_tokens=20))
    assert held.generate([request]) == from_folder.generate([request])
    held.generate([long_request])
    assert model.training and model.model.training and not model.lm_head.training, "its modes are restored"
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
        model.model.embed_tokens.weight.mul_(-0.5)
    assert held.generate([request]) != from_folder.generate([request]), "it has the present weights"
    new_engine = HeldModelEngine(model, mdp.CODEC, launch)
    assert held.generate([long_request]) == new_engine.generate([long_request]), "and none of the earlier"
    with_stop = Request(np.array([3, 4]), 0, 4, SamplingParams(max_tokens=20, stop=("b",)))
    (completions,) = held.generate([with_stop])
    assert all("b" not in mdp.decode(completion.token_ids[:-1]) for completion in completions)
    with pytest.raises(ValueError, match=r"are torch\.bfloat16, and this engine computes in float32"):
        HeldModelEngine(model.to(torch.bfloat16), mdp.CODEC, launch)


def test_the_engine_is_closed_even_if_the_grader_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    engine = fake_engine()
    monkeypatch.setattr(engine, "close", lambda: closed.append("engine"))
    monkeypatch.setattr("treetune.credit.library.assigner.open_engine", lambda *arguments, **settings: engine)
    assigner = make_assigner({"type": "monte_carlo", "samples": 2}, engine=lambda requests: [])
    assigner.advantages([as_graded_answer(answer) for answer in answers_in_run()])

    close = GraderPool.close

    def fail(pool: GraderPool) -> None:
        close(pool)
        raise RuntimeError("worker processes did not end")

    monkeypatch.setattr(GraderPool, "close", fail)
    with pytest.raises(RuntimeError, match="did not end"):
        assigner.close()
    assert closed == ["engine"]


@pytest.mark.parametrize("deadline", [None, 600.0])
def test_a_function_samples_as_an_engine_would(deadline: float | None) -> None:
    """With a deadline, there is an alarm among the requests."""
    answers = [as_graded_answer(answer) for answer in answers_in_run()]
    credit = {"type": "monte_carlo", "values": {"type": "sequential"}}
    sizes = []

    def sample(requests: Sequence[Request]) -> list[list[Completion]]:
        sizes.append(len(requests))
        return fake_engine().generate(requests)

    with make_assigner(credit) as library, make_assigner(credit, engine=sample) as with_function:
        expected = library.advantages(answers, deadline=deadline)
        credited = with_function.advantages(answers, deadline=deadline)
    assert list(map(plain, credited.advantages)) == list(map(plain, expected.advantages))
    assert credited.cost.tokens == expected.cost.tokens > 0
    assert len(sizes) > 1 and sizes[0] > 1, "all states of a round are sampled in one call"
    with (
        make_assigner(credit, engine=lambda requests: [[] for _ in requests]) as library,
        pytest.raises(EngineError, match="return a list of n completions for each request"),
    ):
        library.advantages(answers)


# Refusals


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        ("gae", "learns a critic, which only a run of treetune trains"),
        ({"type": "monte_carlo", "values": {"type": "critic"}}, "learns a critic"),
        ("none", "leaves advantages to the trainer of a run"),
        ("monte_carlo", r"give engine .*, grader .*, sampling"),
        (
            {"type": "monte_carlo", "values": {"type": "siblings"}},
            "answer 0 has no step_ends.*give the tokenizer",
        ),
        ("probability_mask", "answer 0 has no logprobs"),
        ({"type": "hicra", "phrases": ["so"]}, "give the tokenizer"),
        (
            {"type": "monte_carlo", "values": {"type": "siblings"}, "states": {"type": "threads"}},
            "needs answers that fork into threads",
        ),
        (
            {"type": "trace", "scorer": "reference"},
            r"'trace' scores given texts with a reference model, which only a run .*scorer .*'group'",
        ),
        (
            {"type": "implicit_reward", "reward_model": {"type": "pretrained", "name_or_path": "m"}},
            r"'implicit_reward' scores given texts with a reference model, .* does: choose a credit",
        ),
        (
            {"type": "distillation", "teacher": {"type": "pretrained", "name_or_path": "m"}},
            "leaves advantages to the trainer of a run",
        ),
        ("trace", r"the credit 'trace' scores given texts: give engine \(the address"),
        ({"type": "self_distillation"}, r"'self_distillation' makes prompts with the chat template of a run"),
        (
            {"type": "probability_mask", "over": {"type": "trace", "scorer": "reference"}},
            "'probability_mask' scores given texts with a reference model",
        ),
        (
            {"type": "monte_carlo", "values": {"type": "rredcot", "scorer": "reference"}},
            "'monte_carlo' scores given texts with a reference model",
        ),
        (
            "forking_tokens",
            "'forking_tokens' reads the policy's entropies, which only a run of treetune computes",
        ),
        (3, "credit is of the type int: give a Credit"),
    ],
    ids=str,
)
def test_a_credit_that_needs_more_is_refused(credit: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(two_answers(), credit=credit)


def test_a_wrong_configuration_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"credit\.stdd: unknown key of credit 'group'"):
        advantages(two_answers(), credit={"type": "group", "stdd": 1})
    with pytest.raises(ConfigError, match=r"credit"):
        advantages(two_answers(), credit="{type: 'group',, }")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": float("nan")}, "answer 0: its reward is nan"),
        ({"response_ids": []}, "response_ids have the shape"),
        ({"response_ids": [[5, 6]]}, "give one row of token ids"),
        ({"response_ids": [0.5, 1.0]}, "are not token ids"),
        ({"response_ids": [5, -100]}, "integers of at least 0"),
        ({"logprobs": [-0.1]}, r"logprobs have the shape \[1\]: give one for each of its 3 response tokens"),
        ({"sampled": [False] * 3}, "sampled is False for all"),
        ({"fork": 3}, "answer 0: its fork is 3: give two integers"),
        ({"fork": (0, 1.5)}, r"its fork is \(0, 1.5\): give two integers"),
        ({"step_ends": [2]}, "the last is the number of response tokens"),
        ({"step_ends": []}, r"step_ends are \[\]: they rise, and the last is the number of response"),
        ({"step_rewards": [0.5]}, "step_rewards add up to 0.5, and its reward is 1"),
        ({"reward": None}, "its reward is None: give a finite number"),
        ({"rewards": 1.0}, "there is no key 'rewards'; keys are prompt_ids"),
        ({"group": "other"}, "the group 'other' has 1: give 2 or more"),
        ({"prompt_ids": [9]}, "has 1: give 2 or more answers"),
    ],
    ids=str,
)
def test_a_wrong_answer_is_refused_with_its_number(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(two_answers(**changed), credit="rloo")


def test_other_wrong_calls_say_what_would_be_right(tmp_path: Path) -> None:
    def refuse(message: str, answers: Sequence[Any], **settings: Any) -> None:
        with pytest.raises(ValueError, match=message):
            advantages(answers, **settings)

    refuse("there are no answers", [], credit="rloo")
    refuse("answers 0 and 1 are both of the group 'x', and their prompt_ids differ", [
        {"prompt_ids": [1], "response_ids": [1], "reward": 1, "group": "x"},
        {"prompt_ids": [2], "response_ids": [1], "reward": 1, "group": "x"},
    ], credit="rloo")  # fmt: skip
    refuse("is of the type int: give a GradedAnswer", [3], credit="rloo")
    refuse(
        "scores given texts, and the engine can't: give the address",
        two_answers(),
        credit="trace",
        engine=lambda requests: [],
        tokenizer=mdp.CODEC,
    )
    refuse(
        "has tokens that the tokenizer can't decode, up to 999",
        two_answers(response_ids=[999, 0]),
        credit="rloo",
        tokenizer=mdp.CODEC,
    )
    refuse("the key 'reward' is missing", [{"prompt_ids": [1], "response_ids": [1]}], credit="rloo")
    vine: dict[str, Any] = {
        "credit": "monte_carlo",
        "grader": grade_by_prompt_and_text,
        "tokenizer": mdp.CODEC,
        "sampling": SAMPLING,
    }
    refuse("no model \\(config.json\\) in that folder", two_answers(), **vine, engine=str(tmp_path))
    refuse("engine is of the type int", two_answers(), **vine, engine=3)
    refuse("budget is 0", two_answers(), **vine, engine=fake_engine(), budget=0)
    refuse("deadline is -1", two_answers(), **vine, engine=fake_engine(), deadline=-1)
    refuse("grader is of the type int", two_answers(), **vine | {"grader": 3}, engine=fake_engine())
    refuse(
        "the grader reads text: give the tokenizer",
        two_answers(),
        **vine | {"tokenizer": None},
        engine=fake_engine(),
    )
    refuse("sampled at temperature 0", two_answers(), engine=fake_engine(),
           **vine | {"sampling": SamplingParams(max_tokens=6, temperature=0)})  # fmt: skip
    refuse("may have 2: raise sampling.max_tokens", two_answers(), engine=fake_engine(),
           **vine | {"sampling": SamplingParams(max_tokens=2)})  # fmt: skip
