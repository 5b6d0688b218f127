"""Plans of runs: memory, disk and time, and the smallest change with which a run fits.

Promises that these tests hold:

* Sizes are those of the published models and of transformers; every copy and pass of a method is counted.
* A run that doesn't fit is refused at its start, with the smallest change that makes it fit.
* The engine gets the largest share of memory that fits beside the trainer.
* Published seconds of other trainers' iterations are planned within a factor of two.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
import statistics
from pathlib import Path

import pytest

from tests.runtime.planning.plans import PUBLISHED_RUNS, experiment, plan, seconds_of_published
from tests.support.shipped import issues_of
from treetune import main as command_line
from treetune.cluster.commands import _configuration_that_makes, find_shape
from treetune.config.catalogue import find_configurations
from treetune.config.layers import CONFIGS_FOLDER
from treetune.contracts import Advantages, Continuations
from treetune.credit.base import Credit
from treetune.engine.settings import VllmSettings
from treetune.exceptions import SameOnAllRanks
from treetune.models.shapes import PUBLISHED, shape_of
from treetune.runtime import fitting, machine
from treetune.runtime.machine import GIB, Machine, make_described_machine
from treetune.runtime.planning import disk, report
from treetune.runtime.planning.memory import LOGITS_PER_CHUNK, EngineMemory
from treetune.runtime.planning.plan import SPARE_BYTES, Plan, find_remedy
from treetune.runtime.planning.report import as_data, as_text, predict_metrics

BIG = "polIter_deepseekSft2_vineppo_MATH"
SMALL = "polIter_rho1bSft2_vineppo_MATH"

BILLIONS = {
    "microsoft/rho-math-1b-v0.1": 1.10,
    "deepseek-ai/deepseek-math-7b-base": 6.91,
    "meta-llama/Llama-3.2-1B": 1.24,
    "HuggingFaceTB/SmolLM2-135M": 0.1345,
    "Qwen/Qwen2.5-0.5B": 0.49,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.61,
    "Qwen/Qwen2.5-32B": 32.8,
    "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
}
"""Billions of parameters, from the models' cards and the indices of their files."""


def test_a_server_on_a_cpu_computes_its_longest_sequence_in_one_step():
    settings = VllmSettings(max_num_batched_tokens=2048, max_num_seqs=16)
    shape = shape_of(PUBLISHED["Qwen/Qwen2.5-0.5B"], "")

    def bytes_of_step(machine: Machine, context_length: int) -> int:
        return EngineMemory(settings, shape, machine, context_length).largest_step

    gpu = make_described_machine(1, 80)
    cpu = dataclasses.replace(gpu, device="cpu")
    assert bytes_of_step(gpu, 1024) == bytes_of_step(gpu, 8192)
    further_tokens = 8192 - 2048
    bytes_per_token = 4 * (4 * shape.hidden + 3 * shape.intermediate)
    assert bytes_of_step(cpu, 8192) - bytes_of_step(cpu, 1024) == further_tokens * bytes_per_token


@pytest.mark.parametrize("name", BILLIONS)
def test_published_sizes_add_up_to_the_published_number_of_parameters(name):
    shape = shape_of(PUBLISHED[name], name)
    assert shape.parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_a_shape_has_the_weights_that_transformers_makes():
    import torch

    from tests.support.peak_memory import random_model

    for name in ("meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B"):
        shape = dataclasses.replace(shape_of(PUBLISHED[name], name), layers=2, vocabulary=1000)
        with torch.device("meta"):
            model = random_model(shape, "float32")
        assert shape.parameters == sum(weight.numel() for weight in model.parameters())


def test_the_chunks_of_the_head_are_those_that_the_policy_has():
    from treetune.models import logprobs

    assert LOGITS_PER_CHUNK == {
        "cpu": logprobs.LOGITS_PER_CHUNK,
        "cuda": logprobs.LOGITS_PER_CHUNK_ON_A_GPU,
    }


def test_a_run_that_does_not_fit_gets_a_change_with_which_it_fits_if_need_be_more_gpus():
    too_large = plan(BIG, machine=make_described_machine(1, 80))
    assert [use.phase for use in too_large.misfits] == ["training"]
    change = find_remedy(too_large)
    assert change.override in as_text(too_large)
    assert plan(BIG, change.override, machine=make_described_machine(1, 80)).fits
    small, kept = make_described_machine(1, 40), "{trainer+: {offload_reference: false}}"
    change = find_remedy(plan(BIG, kept, machine=small))
    assert "trainer.offload_reference" in {setting.key for setting in change.changes}
    assert plan(BIG, kept, change.override, machine=small).fits
    change = find_remedy(plan("guru/32b_ppo", machine=make_described_machine(1, 80)))
    assert change.gpus > 1
    larger = make_described_machine(change.gpus, 80, change.nodes)
    assert plan("guru/32b_ppo", change.override, machine=larger).fits


@pytest.mark.parametrize(
    ("override", "is_less"),
    [
        ("{trainer+: {zero_stage: 3}}", True),
        ("{trainer+: {offload_optimizer: true}}", True),
        ("{trainer+: {tokens_per_micro_batch: 4096}}", True),
        ("{trainer+: {lora: {}, offload_reference: false}}", True),
        ("{trainer+: {offload_reference: false}}", False),
        ("{trainer+: {gradient_checkpointing: false}}", False),
        ("{trainer+: {zero_stage: 1}}", False),
        ("{credit: {type: 'gae'}}", False),
    ],
)
def test_settings_that_save_or_take_memory_in_training_are_planned_so(override, is_less):
    machine = make_described_machine(4, 80)
    plain = plan(BIG, machine=machine).trainer.peak
    changed = plan(BIG, override, machine=machine).trainer.peak
    if is_less:
        assert changed < plain
    else:
        assert changed > plain


def test_an_engine_has_memory_during_training_unless_it_sleeps_or_has_its_own_gpus():
    awake = plan(SMALL, "{engines+: {policy+: {sleep: false}}}")
    training = next(use for use in awake.uses if use.phase == "training")
    assert any(item.what == "engine: KV cache" for item in training.items)
    apart = plan(SMALL, "{engines+: {policy+: {sleep: false, servers: 'one', devices: [7]}}}")
    kinds_of_gpus = {use.where for use in apart.uses if "GPU" in use.where}
    assert kinds_of_gpus == {"an engine's GPU", "a trainer's GPU"}


def test_a_share_too_small_for_one_sequence_and_ranks_that_cannot_be_grouped_are_problems():
    small = plan(BIG, "{engines+: {policy+: {gpu_memory_utilization: 0.1}}}")
    assert any("gpu_memory_utilization 0.1" in problem for problem in small.problems)
    single = plan("guru/32b_ppo", machine=make_described_machine(1, 80))
    assert any("sequence_parallel_size is 2" in problem for problem in single.problems)


def test_the_default_share_of_the_engine_is_the_largest_that_fits_beside_the_trainer():
    planned = plan(BIG)
    assert planned.fits and planned.engine.settings.gpu_memory_utilization == pytest.approx(0.79)
    on_gpus = [use for use in planned.uses if use.phase == "generation" and use.where == "a GPU"]
    most = max(use.needed for use in on_gpus)
    # Shares are rounded to hundredths: one hundredth more would not fit.
    hundredth = 0.01 * planned.machine.device_memory
    assert 0 <= most + SPARE_BYTES - planned.uses[0].room + hundredth <= 2**30
    smaller = plan(BIG, "{engines+: {policy+: {gpu_memory_utilization: 0.6}}}")
    assert smaller.engine.cache < planned.engine.cache
    apart = plan(SMALL, "{engines+: {policy+: {sleep: false, servers: 'one', devices: [7]}}}")
    assert apart.engine.settings.gpu_memory_utilization == 0.9


def test_a_run_starts_its_server_with_the_planned_share_and_sequences_that_fit_in_the_cache(monkeypatch):
    monkeypatch.setattr(fitting, "this_machine", lambda **_: make_described_machine(8, 80))

    def sized_engine(config):
        return fitting.size_engine(config, config.engines.policy)

    planned = plan(BIG)
    sized = sized_engine(experiment(BIG))
    assert sized.gpu_memory_utilization == planned.engine.settings.gpu_memory_utilization
    length = planned.work.prompt_tokens + planned.work.answer_tokens
    assert sized.max_num_seqs * length <= planned.engine.cached_tokens < (sized.max_num_seqs + 1) * length
    assert sized_engine(experiment(BIG, "{plan: {check: false}}")).gpu_memory_utilization is None
    assert sized_engine(experiment(SMALL)).max_num_seqs == 512


def test_a_remedy_uses_all_gpus_for_sampling():
    too_large = plan("guru/32b_grpo")
    change = find_remedy(too_large)
    assert {setting.key: setting.value for setting in change.changes}["engines.policy.replicas"] == 4
    settings = plan("guru/32b_grpo", change.override).engine.settings
    assert settings.replicas_on("cuda") * settings.tensor_parallel_size == too_large.machine.ranks


def test_a_tree_of_answers_is_planned_with_its_prompt_once():
    rows = plan(SMALL)
    counts = {"problems": 64, "rows": 512, "prompt_tokens": 300, "answer_tokens": 100, "longest": 1000}
    work = dataclasses.replace(rows.work, **counts, steps=1, epochs=1)
    assert report.count_trained_tokens(work, "padded") == 512 * 400
    assert report.count_trained_tokens(work, "tree") == 64 * 300 + 512 * 100
    with_shared_beginning = dataclasses.replace(work, shared_prompt_tokens=200)
    assert report.count_trained_tokens(with_shared_beginning, "padded") == 512 * 400
    assert report.count_trained_tokens(with_shared_beginning, "tree") == 200 + 64 * 100 + 512 * 100
    tree = plan(SMALL, "{trainer+: {layout: 'tree'}}")
    seconds = {estimate.phase: estimate.seconds for estimate in report.estimate_phases(rows)}
    seconds_of_tree = {estimate.phase: estimate.seconds for estimate in report.estimate_phases(tree)}
    assert seconds_of_tree["scoring"] < seconds["scoring"]
    assert seconds_of_tree["training"] < seconds["training"]


def test_memory_at_the_assumed_lengths_is_that_of_a_steps_own_tokens():
    lengths = "{plan+: {prompt_tokens: 170, shared_prompt_tokens: 150, answer_tokens: 240}}"
    steps = "{problems_per_iteration: 8, trainer+: {layout: 'tree', minibatch_size: 64}}"
    one_gpu = make_described_machine(1, 80)
    planned = plan(SMALL, lengths, steps, machine=one_gpu)
    usual = report.training_at_assumed_lengths(planned)
    assert planned.work.steps / planned.work.epochs == 1
    assert usual.micro_batch_tokens == 150 + 8 * 20 + 64 * 240
    assert usual.micro_batch_tokens < planned.trainer.micro_batch
    whole = next(use.needed for use in planned.uses if use.phase == "training")
    assert usual.needed < whole
    assert f"a micro-batch has at most {usual.micro_batch_tokens:,} tokens" in as_text(planned)
    assert as_data(planned)["at_assumed_lengths"]["needed"] == usual.needed
    # With this limit, micro-batches can't have more tokens than that, and the whole plan needs as much.
    limit = f"{{trainer+: {{tokens_per_micro_batch: {usual.micro_batch_tokens}}}}}"
    of_limit = plan(SMALL, lengths, steps, limit, machine=one_gpu)
    assert next(use.needed for use in of_limit.uses if use.phase == "training") == usual.needed
    assert "with these lengths" not in as_text(of_limit)


def test_all_ranks_of_a_machine_count_in_the_memory_at_the_assumed_lengths():
    lengths = "{plan+: {prompt_tokens: 100, answer_tokens: 20}, trainer+: {minibatch_size: 64}}"
    two_ranks = Machine(device="cpu", ranks=2, cores=2, host_memory=64 * GIB)
    planned = plan(SMALL, lengths, machine=two_ranks)
    usual = report.training_at_assumed_lengths(planned)
    assert usual.micro_batch_tokens == 32 * 120
    bounded = dataclasses.replace(planned.trainer, bound_of_micro_batch=32 * 120)
    whole = next(use.needed for use in planned.uses if use.phase == "training")
    assert whole - usual.needed == 2 * (planned.trainer.peak - bounded.peak) > 0


def test_trees_compute_a_prompt_once_in_each_step_that_has_an_answer_to_it():
    """The rows are those of 3 problems with 4 answers each, shuffled and cut into steps."""
    work = dataclasses.replace(
        plan(SMALL).work, problems=3, rows=12, prompt_tokens=50, answer_tokens=10, longest=100, epochs=1
    )
    draw = random.Random(0)
    for steps in (1, 2, 4):
        problems_of_steps = []
        for _ in range(2000):
            rows = [problem for problem in range(3) for _ in range(4)]
            draw.shuffle(rows)
            size = 12 // steps
            cuts = [rows[first : first + size] for first in range(0, 12, size)]
            problems_of_steps.append(sum(len(set(cut)) for cut in cuts))
        drawn = 50 * statistics.fmean(problems_of_steps) + 12 * 10
        planned = report.count_trained_tokens(dataclasses.replace(work, steps=steps), "tree")
        # The plan draws the step of each row on its own, as if steps could have different sizes.
        assert planned == pytest.approx(drawn, rel=0.1)


def test_sampling_in_process_is_estimated_where_the_model_is_large_enough():
    in_process = "{engines: {policy: {type: 'in_process'}}}"
    large = plan(SMALL, in_process, machine=machine.Machine(device="cpu", ranks=1, cores=2))
    phases = {estimate.phase: estimate.seconds for estimate in report.estimate_phases(large)}
    assert phases["answers"] > 0 and phases["continuations"] > 0 and phases["sync"] > 0
    assert "not estimated" not in as_text(large)


def test_a_plan_without_a_server_lists_the_phases_that_it_does_not_estimate():
    in_process = plan(SMALL, "{engines: {policy: {type: 'in_process'}}}")
    assert "not estimated: sampling, continuations, sync and evaluation" in as_text(in_process)
    assert "not estimated" not in as_text(plan(SMALL))
    assert "seconds/total" not in predict_metrics(in_process), "training alone is no estimate of an iteration"
    assert "seconds/total" in predict_metrics(plan(SMALL))


def test_the_mean_context_of_continuations_is_two_thirds_of_an_answer():
    length, prompt = 300, 40
    # Continuations begin at every token of an answer with the same frequency, and go to its end.
    contexts = []
    for begin in range(length):
        contexts += [prompt + position for position in range(begin, length)]
    work = dataclasses.replace(plan(SMALL).work, answer_tokens=length, prompt_tokens=prompt)
    assert sum(contexts) / len(contexts) == pytest.approx(work.continued_context, rel=0.01)


@pytest.mark.parametrize("name", [name for name in PUBLISHED_RUNS if "in turn" not in name])
def test_published_seconds_of_an_iteration_are_planned_within_a_factor_of_two(name):
    for phase, (planned, published) in seconds_of_published(name).items():
        assert 0.5 < planned / published < 2, phase


def test_continuations_are_counted_by_the_estimators_own_budget():
    work = plan(SMALL).work
    assert work.answers == 512
    adaptive = "{credit+: {values: {type: 'sequential', most: 40}}}"
    assert plan(SMALL, adaptive).work.most_continuations == 40 * work.most_continuations // 9
    assert plan("polIter_rho1bSft2_grpo_MATH").work.continuations == 0


@pytest.mark.parametrize(
    "credit",
    [{"type": "remax"}, {"type": "weighted_by", "signal": "surprise", "over": {"type": "remax"}}],
)
def test_remax_is_planned_with_a_greedy_answer_to_each_problem(credit):
    planned = plan("polIter_rho1bSft2_grpo_MATH", {"credit": credit})
    work = planned.work
    assert work.answers == 8 * work.problems
    assert work.further_tokens == work.sampled_tokens / 8
    assert f"{work.problems} answers for credit" in as_text(planned)
    seconds = {estimate.phase: estimate.seconds for estimate in report.estimate_phases(planned)}
    assert 0 < seconds["answers for credit"] < seconds["answers"]
    assert predict_metrics(planned)["credit/value_tokens"] == work.further_tokens
    assert predict_metrics(planned)["seconds/credit"] >= seconds["answers for credit"]
    assert "answers for credit" not in seconds_by_phase()


def test_problems_of_further_rounds_are_counted():
    three_rounds = "{rollout+: {max_rounds: 3}}"
    dapo = plan("quickstart/dapo", three_rounds)
    # 64 problems in each of three rounds, and the selection keeps 64 of them.
    assert (dapo.work.problems, dapo.work.answers, dapo.work.rows) == (192, 1536, 512)
    assert dapo.work.steps == 1
    (issue,) = issues_of("quickstart/dapo", "{rollout+: {max_rounds: 3}, trainer+: {minibatch_size: 513}}")
    assert issue.key == "trainer.minibatch_size" and "512 sequences" in issue.what
    remax = plan("quickstart/grpo,rollouts/until_mixed", three_rounds, {"credit": {"type": "remax"}})
    assert remax.work.further_answers == 192


def test_answers_of_trees_within_another_rollout_are_counted():
    tree, tree_in_rounds = plan("quickstart/tree").work, plan("quickstart/tree,rollouts/until_mixed").work
    assert tree_in_rounds.problems == 10 * tree.problems
    assert tree_in_rounds.answers == 10 * tree.answers


def test_the_command_needs_no_gpu_and_says_whether_it_fits(capsys):
    arguments = ["--configs", f"configs/{BIG}.jsonnet", "plan", "--gpus", "1", "--memory", "80"]
    assert command_line.main(arguments) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert command_line.main([*arguments[:3], "--gpus", "8", "--memory", "80", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["fits"] and printed["parameters"] == 6_910_365_696
    assert {use["phase"] for use in printed["places"]} >= {"start", "generation", "sync", "training"}


def test_seconds_of_a_tiny_model_come_with_a_warning():
    assert "fixed costs of each step" in as_text(plan("quickstart/vineppo"))
    assert "fixed costs of each step" not in as_text(plan(SMALL))


def test_a_critics_weights_and_states_are_counted_in_training():
    training = next(use for use in plan("polIter_rho1bSft2_ppo_MATH").uses if use.phase == "training")
    sizes = {item.what: item.size for item in training.items}
    assert sizes["critic: weights"] == pytest.approx(sizes["policy: weights"], rel=0.1)
    assert sizes["critic: optimizer and the rest"] > sizes["critic: weights"]


def seconds_by_phase(*overrides):
    planned = plan("polIter_rho1bSft2_grpo_MATH", *overrides)
    return {estimate.phase: estimate.seconds for estimate in report.estimate_phases(planned)}


def weighted_by(**settings):
    return {"credit": {"type": "weighted_by", "over": {"type": "group"}} | settings}


def test_the_scoring_passes_of_credit_are_planned():
    plain = seconds_by_phase()
    assert "scoring for credit" not in plain
    assert "scoring for credit" not in seconds_by_phase(weighted_by(signal="surprise"))
    by_entropy = seconds_by_phase(weighted_by(signal="entropy"))["scoring for credit"]
    # The policy is scored once for the entropies; training scores the reference and the policy.
    assert by_entropy == pytest.approx(plain["scoring"] / 2)
    for settings, passes in (
        ({"signal": "group_divergence"}, 1),
        ({"signal": "deviation"}, 2),
        ({"signal": "entropy", "over": {"type": "forking_tokens"}}, 2),
    ):
        seconds = seconds_by_phase(weighted_by(**settings))["scoring for credit"]
        assert seconds == pytest.approx(passes * by_entropy)
    metrics = predict_metrics(plan("polIter_rho1bSft2_grpo_MATH", weighted_by(signal="entropy")))
    assert metrics["seconds/credit"] == pytest.approx(by_entropy)


def test_the_passes_of_vimpo_are_planned():
    vimpo = (
        "{credit: {type: 'group', std: false},"
        " trainer+: {objective: {type: 'vimpo'}, advantage_normalisation: 'none'}}"
    )
    # Policy and reference run once more, since their whole distributions are compared.
    assert seconds_by_phase(vimpo)["scoring"] == pytest.approx(2 * seconds_by_phase()["scoring"])
    one_step = "{trainer+: {minibatch_size: null, epochs: 1}}"
    assert seconds_by_phase(vimpo, one_step)["scoring"] == pytest.approx(
        4 * seconds_by_phase(one_step)["scoring"]
    )


def test_a_moving_teacher_is_planned_as_one_more_copy_of_the_weights_and_one_more_pass():
    def with_teacher(teacher: str) -> str:
        objective = f"{{type: 'distribution_distillation', divergence: 'jsd', top_k: 9, teacher: {teacher}}}"
        return f"{{credit: {{type: 'none'}}, trainer+: {{objective: {objective}}}}}"

    of_policy = with_teacher("{weights: 'policy'}")
    moving = with_teacher("{weights: 'average', decay: 0.95}")
    plan_of_policy = plan("polIter_rho1bSft2_grpo_MATH", of_policy)
    planned = plan("polIter_rho1bSft2_grpo_MATH", moving)
    training = next(use for use in planned.uses if use.phase == "training")
    sizes = {item.what: item.size for item in training.items}
    weights = planned.shape.parameters
    # The average is kept in float32, and as a model in bfloat16.
    assert sizes["moving average of the weights (teacher)"] == (4 + 2) * weights
    assert planned.trainer.peak - plan_of_policy.trainer.peak == 6 * weights
    assert planned.trainer.put_aside - plan_of_policy.trainer.put_aside == 6 * weights
    assert planned.checkpoints.state - plan_of_policy.checkpoints.state == 4 * weights
    # The policy takes three passes (one forward, two backward), or four if it recomputes activations.
    ratio = seconds_by_phase(moving)["training"] / seconds_by_phase()["training"]
    assert ratio == pytest.approx(5 / 4 if planned.experiment.trainer.gradient_checkpointing else 4 / 3)


def test_a_reward_model_that_learns_is_planned_as_a_second_model():
    prime = "{credit: {type: 'prime'}}"
    plain_plan = plan("polIter_rho1bSft2_grpo_MATH")
    planned = plan("polIter_rho1bSft2_grpo_MATH", prime)
    training = next(use for use in planned.uses if use.phase == "training")
    sizes = {item.what: item.size for item in training.items}
    assert sizes["reward model: weights"] == sizes["policy: weights"]
    assert sizes["reward model: optimizer and the rest"] > sizes["reward model: weights"]
    assert planned.checkpoints.weights == 2 * plain_plan.checkpoints.weights
    plain, with_model = seconds_by_phase(), seconds_by_phase(prime)
    assert with_model["scoring"] == pytest.approx(1.5 * plain["scoring"])
    # It passes over the answers once, and the policy twice.
    assert with_model["training"] == pytest.approx(1.5 * plain["training"])


def test_a_reward_model_trains_its_head_also_if_the_policy_has_adapters():
    # In larger micro-batches, the logits of a chunk take more memory than the gradient of the head's weight.
    adapters = "{trainer+: {lora: {}, offload_reference: false, tokens_per_micro_batch: 2048}}"
    prime = "{credit: {type: 'prime'}}"
    with_policy_alone = plan("polIter_rho1bSft2_grpo_MATH", adapters).trainer
    with_reward_model = plan("polIter_rho1bSft2_grpo_MATH", adapters, prime).trainer
    all_weights = "{trainer+: {tokens_per_micro_batch: 2048}}"
    without_adapters = plan("polIter_rho1bSft2_grpo_MATH", all_weights, prime).trainer
    assert with_reward_model.micro_batch_pass == without_adapters.micro_batch_pass
    assert with_reward_model.micro_batch_pass > with_policy_alone.micro_batch_pass


def test_comparisons_of_whole_distributions_need_memory():
    def training_of(*overrides):
        # The sort of a nucleus takes more memory than any comparison, and would hide the differences.
        base = "{trainer+: {tokens_per_micro_batch: 4096}, rollout+: {top_p: 1.0}}"
        planned = plan("polIter_rho1bSft2_grpo_MATH", base, *overrides)
        return planned, planned.trainer.scoring

    planned, plain = training_of()
    logprobs = 4 * 2 * 4096 * planned.shape.vocabulary
    _, deviation = training_of(weighted_by(signal="deviation"))
    assert plain + 0.4 * logprobs < deviation < plain + 3 * logprobs
    _, divergence = training_of(weighted_by(signal="group_divergence"))
    assert divergence > plain
    # A credit that weighs the advantages of another one needs the memory of either comparison.
    inner = {"type": "weighted_by", "signal": "group_divergence"}
    _, both = training_of(weighted_by(signal="deviation", over=inner))
    assert both == max(deviation, divergence)
    inner = {"type": "weighted_by", "signal": "deviation"}
    _, both = training_of(weighted_by(signal="group_divergence", over=inner))
    assert both == max(deviation, divergence)
    _, entropy = training_of(weighted_by(signal="entropy"))
    assert entropy == plain


def test_a_critics_head_and_its_longer_prompts_need_memory():
    def training_of(*overrides: str) -> dict[str, int]:
        sizes = {}
        for use in plan("polIter_rho1bSft2_ppo_MATH", *overrides).uses:
            if use.phase == "training":
                sizes |= {item.what: item.size for item in use.items}
        return sizes

    plain = training_of()
    classifier = training_of("{credit+: {critic+: {loss: {type: 'hl_gauss', bins: 101}}}}")
    assert classifier["critic: weights"] > plain["critic: weights"]
    short_prompts = "{rollout+: {max_prompt_tokens: 100}, trainer+: {tokens_per_micro_batch: 100}"
    shorter = training_of(short_prompts + "}")
    privileged = training_of(
        short_prompts + ", analyzers: [], credit+: {critic+: {template: '{prompt} {gold}'}}}"
    )
    assert sum(privileged.values()) > sum(shorter.values())


def test_gpus_without_memory_are_refused(capsys):
    assert command_line.main(["--configs", f"configs/{BIG}.jsonnet", "plan", "--gpus", "8"]) == 2
    assert "--gpus and --memory go together" in capsys.readouterr().err


def test_a_plan_as_data_is_json_whose_sums_agree():
    data = as_data(plan(SMALL))
    assert json.loads(json.dumps(data)) == data
    for use in data["places"]:
        assert use["needed"] == sum(use["items"].values())


class TestSharedMemory:
    """Plans on a machine with 64 MiB of shared memory, the default of a container."""

    MACHINE = dataclasses.replace(make_described_machine(8, 80, host_gib=2000), shared_memory=64 * 2**20)

    def test_the_remedy_is_weights_in_files_which_need_no_shared_memory(self):
        too_large = plan(SMALL, machine=self.MACHINE)
        assert [use.where for use in too_large.misfits] == ["/dev/shm"]
        change = find_remedy(too_large)
        assert change.override == '{engines+: {policy+: {weight_transfer: "file"}}}'
        line = next(line for line in as_text(too_large).splitlines() if "--override" in line)
        assert shlex.split(line) == ["--override", change.override], "a shell passes it on unchanged"
        in_files = plan(SMALL, change.override, machine=self.MACHINE)
        assert in_files.fits
        for use in in_files.uses:
            assert not any("/dev/shm" in item.what and item.size for item in use.items)

    def test_more_gpus_are_not_taken_for_more_shared_memory(self):
        one_gpu = dataclasses.replace(make_described_machine(1, 80, host_gib=2000), shared_memory=64 * 2**20)
        change = find_remedy(plan("guru/32b_ppo", machine=one_gpu))
        assert change.gpus > 1
        larger = dataclasses.replace(one_gpu, ranks=change.gpus, nodes=change.nodes, host_memory=None)
        assert plan("guru/32b_ppo", change.override, machine=larger).fits

    def test_shared_memory_that_cannot_be_written_to_is_not_used(self):
        read_only = dataclasses.replace(self.MACHINE, shared_memory=0)
        assert plan(SMALL, machine=read_only).fits

    def test_adapters_need_one_version_of_the_weights_in_shared_memory_and_merged_weights_two(self):
        def needed(send: str) -> int:
            planned = plan(
                SMALL,
                f"{{trainer+: {{offload_reference: false, lora: {{send: '{send}'}}}}}}",
                machine=self.MACHINE,
            )
            return next(use.needed for use in planned.uses if use.where == "/dev/shm")

        assert 2 * needed("adapters") == needed("merged")


def test_with_zero_3_the_host_has_the_whole_model_once_and_not_once_for_each_rank():
    def read(override: str) -> int:
        start = next(use for use in plan(BIG, override).uses if use.where == "the machine")
        return sum(item.size for item in start.items if "model" in item.what and "/dev/shm" not in item.what)

    in_parts = read("{trainer+: {zero_stage: 3, offload_parameters: false}}")
    assert 4 * in_parts == pytest.approx(read("{trainer+: {zero_stage: 2, offload_parameters: false}}"))


@pytest.mark.parametrize(
    "name",
    [entry.name for entry in find_configurations() if entry.kind == "experiments" and "/" in entry.name],
)
def test_a_checkpoint_of_a_shipped_experiment_has_its_configuration(name):
    """Also of experiments with a dot in their names, such as countdown/qwen2.5-3b_grpo."""
    checkpoint = Path("experiments", name.removesuffix(".jsonnet"), "checkpoints", "0100", "policy")
    assert _configuration_that_makes(checkpoint) == CONFIGS_FOLDER / name


def test_an_experiment_is_planned_before_its_reference_is_trained():
    """The reference is a checkpoint of an experiment of ``configs/`` that hasn't run."""
    prime = experiment("hinted_sums/prime")
    machine = make_described_machine(8, 80)
    assert Plan.of(prime, machine, shape_of=find_shape).trainer.reference > 0
    with pytest.raises(ValueError, match="there is no complete checkpoint"):
        assert Plan.of(prime, machine).trainer.reference


def test_credit_of_a_users_own_that_continues_answers_is_planned():
    class OwnCredit(Credit):
        @property
        def gives(self):
            return Advantages(before_training=True), Continuations()

    root = dataclasses.replace(experiment(SMALL), credit=OwnCredit())
    credit_plan = Plan.of(root, make_described_machine(8, 80), shape_of=find_shape)
    assert credit_plan.work.continuations == 0


class TestStart:
    """The start of runs on machines that they don't fit, and how a machine is recognised."""

    @pytest.fixture
    def start(self, monkeypatch):
        """A function that starts an experiment on a described machine."""

        def start(root, *described, **more):
            monkeypatch.setattr(
                fitting, "this_machine", lambda **_: make_described_machine(*described, **more)
            )
            fitting.refuse_what_does_not_fit(root)

        return start

    def test_it_is_refused_before_anything_starts_unless_the_user_switches_the_check_off(self, start):
        expected = r"(?s)training: a GPU has 79.20 GiB.*plan: \{check: false\}"
        with pytest.raises(ValueError, match=expected) as error:
            start(experiment(BIG), 1, 80, host_gib=2000)
        assert "smallest change" in str(error.value)
        with pytest.raises(ValueError, match=r"the machine has 32\.00 GiB"):
            start(experiment(BIG), 8, 80, host_gib=32)
        start(experiment(BIG, "{plan: {check: false}}"), 1, 80)

    def test_one_rank_of_each_machine_raises_the_error_for_all_of_its_ranks(self, start, monkeypatch):
        def kind(nodes: int, rank: str, of_machine: str) -> type[Exception]:
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("LOCAL_RANK", of_machine)
            with pytest.raises(ValueError, match="it doesn't fit") as error:
                start(experiment(SMALL), 2, 80, nodes, host_gib=8)
            return error.type

        assert kind(1, "0", "0") is kind(1, "1", "1") is kind(2, "3", "1") is SameOnAllRanks
        assert kind(2, "2", "0") is ValueError

    def test_a_model_of_unknown_sizes_starts_with_a_warning(self, start, capsys, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
        root = experiment(SMALL, {"model": {"type": "pretrained", "name_or_path": str(tmp_path)}})
        with pytest.raises(ValueError, match="sizes are unknown"):
            Plan.of(root, make_described_machine(1, 80))
        start(root, 1, 80)
        assert "was not checked" in capsys.readouterr().err

    def test_a_process_without_a_launcher_is_one_rank(self, monkeypatch):
        monkeypatch.setattr(machine, "query_gpus", lambda what, environment: [str(80 * 1024)] * 4)
        assert machine.this_machine({}, is_rank=True).ranks == 1
        assert machine.this_machine({}, is_rank=True).gpus == machine.this_machine({}).ranks == 4
        assert "1 of 4 GPUs" in machine.this_machine({}, is_rank=True).description

    @pytest.mark.parametrize("launcher", ["LOCAL_SIZE", "LOCAL_WORLD_SIZE"])
    def test_launchers_say_how_many_ranks_a_machine_has(self, launcher):
        this = machine.this_machine(
            {"CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "8", launcher: "4"}, is_rank=True
        )
        assert (this.ranks, this.nodes) == (4, 2)

    @pytest.mark.parametrize(
        ("visible", "answers"),
        [
            ("1", ["--id=1"]),
            ("11,1", ["--id=11,1"]),
            ("GPU-1f", ["--id=GPU-1f"]),
            ("", []),
            ("-1", []),
            ("-1,0", []),
        ],
    )
    def test_only_visible_gpus_are_queried(self, visible, answers, tmp_path, monkeypatch):
        nvidia_smi = tmp_path / "nvidia-smi"
        nvidia_smi.write_text('#!/bin/bash\necho "${@: -1}"\n')  # its last argument
        nvidia_smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert machine.query_gpus("memory.total", {"CUDA_VISIBLE_DEVICES": visible}) == answers
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names = ",".join(machine.list_gpus())
        assert answers == ([f"--id={names}"] if names else [])


def test_sizes_are_written_in_readable_units():
    from treetune.runtime.machine import format_bytes

    assert format_bytes(GIB) == "1.00 GiB"
    assert format_bytes(3 * 2**20) == "3.0 MiB"


def test_a_disk_without_room_for_checkpoints_is_refused_and_one_that_fills_up_is_noted(monkeypatch):
    run = plan(BIG, machine=dataclasses.replace(make_described_machine(8, 80), is_here=True))
    space = run.checkpoints
    # Weights in bfloat16, and Adam's two moments with float32 master weights.
    assert space.weights == 2 * run.shape.parameters
    assert space.state > 12 * run.shape.parameters
    for free, verdict in (
        (space.bytes_at_once - 1, "it doesn't fit:\n  checkpoints: the disk of experiments has room for"),
        (space.bytes_at_once, "it fits, but checkpoints take"),
        (space.bytes_by_the_end, "it fits"),
    ):
        monkeypatch.setattr(disk, "_count_available_bytes", lambda folder, experiment, free=free: free)
        again = plan(BIG, machine=dataclasses.replace(make_described_machine(8, 80), is_here=True))
        assert as_text(again).splitlines() and report.verdict_of(again).startswith(verdict)
        assert as_data(again)["fits"] == (free >= space.bytes_at_once)


def test_the_disk_of_another_machine_is_unknown():
    assert plan(BIG, machine=make_described_machine(8, 80)).checkpoints.room is None
