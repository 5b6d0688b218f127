"""Parts, presets and lengths that are each right and don't go together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from tests.endurance.wrong_configurations.mutation import (
    COUNTDOWN,
    DAPO,
    DPO,
    GRPO,
    PAPER,
    PPO,
    REINFORCE,
    RESTEM,
    RLOO,
    SFT,
    SPO,
    THREADS,
    VINEPPO,
    Mutation,
)
from treetune.config.jsonnet import CONFIGS, configurations


def combinations() -> Iterator[Mutation]:
    """Parts that are each right and don't go together."""
    told = "{trainer+: {objective: {type: '%s'}}}"
    for configs, change in [
        (GRPO, "{rollout+: {samples: 1}}"),
        (RLOO, "{rollout+: {samples: 1}}"),
        ("quickstart/dr_grpo.jsonnet", "{rollout+: {samples: 1}}"),
        (COUNTDOWN, "{rollout+: {samples: 1}}"),
        (DPO, "{rollout+: {samples: 1}}"),
        (DPO, "{selection: {type: 'all'}}"),
        (DPO, "{selection: {type: 'correct_only'}}"),
        (DPO, "{selection: {type: 'mixed_groups'}}"),
        (DPO, told % "ppo"),
        (DPO, told % "mle"),
        (DPO, "{credit: {type: 'monte_carlo'}}"),
        (DPO, "{credit: {type: 'gae'}}"),
        (GRPO, "{selection: {type: 'preference_pairs'}}"),
        (RESTEM, "{selection: {type: 'preference_pairs'}}"),
        (RESTEM, "{selection: {type: 'all'}}"),
        (RESTEM, "{credit: {type: 'gae'}}"),
        (RESTEM, "{credit: {type: 'monte_carlo'}}"),
        (RESTEM, told % "ppo"),
        (RESTEM, "{selection+: {reward_threshold: 2}}"),
        (DPO, "{selection+: {reward_threshold: 1.01}}"),
        (SPO, "{selection: {type: 'correct_only'}}"),
        (SPO, "{selection: {type: 'mixed_groups'}, rollout+: {samples: 4}}"),
        (SPO, "{trainer+: {skip_without_advantage: true}}"),
        (PPO, "{trainer+: {skip_without_advantage: true}}"),
        (PPO, "{restart: 'every_iteration'}"),
        (GRPO, "{restart: 'every_iteration'}"),
        (VINEPPO, "{credit+: {temperature: 0}}"),
        (VINEPPO, "{credit+: {top_k: 0}}"),
        (VINEPPO, "{credit+: {siblings_count_into_prompt_value: true}, rollout+: {samples: 1}}"),
        (VINEPPO, "{credit+: {siblings_count_into_prompt_value: true, temperature: 0.5}}"),
        (VINEPPO, "{rollout+: {temperature: 0}}"),
        (VINEPPO, "{rollout+: {temperature: 0, samples: 1}}"),
        (VINEPPO, "{rollout+: {top_k: 0}}"),
        (VINEPPO, "{rollout+: {stop: ['']}}"),
        (VINEPPO, "{shaping: [{type: 'wrong_answers'}]}"),
        (VINEPPO, "{shaping: [{type: 'overlong_penalty', cache: 4}]}"),
        (GRPO, "{shaping: [{type: 'wrong_answers'}, {type: 'wrong_answers', penalty: 2}]}"),
        (GRPO, "{shaping: [{type: 'overlong_penalty', cache: 49}]}"),
        (GRPO, "{shaping: [{type: 'length_penalty', from_iteration: 99}]}"),
        (REINFORCE, "{shaping: [{type: 'length_penalty'}], rollout+: {samples: 1}}"),
        (REINFORCE, "{shaping: [{type: 'group_length_penalty'}], rollout+: {samples: 1}}"),
        (SPO, "{shaping: [{type: 'wrong_answers'}]}"),
        (RESTEM, "{shaping: [{type: 'wrong_answers'}]}"),
        (DAPO, "{problems_per_iteration: null, rollout+: {groups: 9}, selection: {type: 'all'}}"),
        (DAPO, "{rollout+: {groups: 999}, selection: {type: 'all'}}"),
        (DAPO, "{selection+: {at_most: 2}}"),
        (DAPO, told % "mle"),
        (DAPO, "{rollout+: {rollout+: {samples: 1}}, shaping: []}"),
        (DAPO, "{rollout+: {rollout: {type: 'demonstrations', samples: 2}}, shaping: []}"),
        (
            DAPO,
            "{rollout+: {local o = super.rollout, rollout: {type: 'until_mixed', rollout: o, groups: 3}}}",
        ),
        (SFT, "{rollout: {type: 'single_turn', max_tokens: 48}}"),
        (SFT, "{credit: {type: 'outcome'}, trainer+: {objective: {type: 'ppo'}}}"),
        (SFT, "{credit: {type: 'gae'}}"),
        (SFT, "{credit: {type: 'monte_carlo'}}"),
        (SFT, "{credit: {type: 'monte_carlo_threads'}}"),
        (SFT, "{selection: {type: 'preference_pairs'}}"),
        (SFT, "{selection: {type: 'mixed_groups'}}"),
        (SFT, "{trainer+: {skip_without_advantage: true}}"),
        (SFT, "{trainer+: {objective: {type: 'spo', importance_cap: 2}}}"),
        (SFT, "{analyzers: [{type: 'diversity'}]}"),
        (SFT, "{analyzers: [{type: 'advantage_distribution'}]}"),
        (SFT, "{analyzers: [{type: 'gradient_variance'}]}"),
        (SFT, "{evaluation+: {rollout: null}}"),
        (SFT, "{evaluation+: {rollout: {type: 'demonstrations'}}}"),
        (THREADS, "{shaping: [], credit: {type: 'monte_carlo'}}"),
        (THREADS, "{credit: {type: 'gae'}}"),
        (THREADS, "{shaping: [], credit: {type: 'monte_carlo_threads'}, rollout+: {parallel: false}}"),
        (THREADS, "{analyzers: [{type: 'value_accuracy'}]}"),
        (THREADS, "{analyzers: [{type: 'action_ranking'}]}"),
        (THREADS, "{trainer+: {layout: 'tree', sequence_parallel_size: 2}}"),
        (THREADS, "{rollout+: {thread_tokens: 5000}}"),
        (THREADS, "{model: {type: 'tiny', context_length: 2048}}"),
        (THREADS, "{rollout+: {temperature: 0}}"),
        (GRPO, "{credit: {type: 'monte_carlo_threads'}}"),
        (GRPO, "{analyzers: [{type: 'weight_distance', checkpoints: [26]}]}"),
        (GRPO, "{analyzers: [{type: 'diversity', iterations: [25]}]}"),
        (GRPO, "{analyzers: [{type: 'diversity', iterations: []}]}"),
        (GRPO, "{analyzers: [{type: 'diversity'}, {type: 'diversity', order: 2}]}"),
        (GRPO, "{analyzers: [{type: 'diversity', name: 'a/b'}]}"),
        (RESTEM, "{analyzers: [{type: 'gradient_variance'}]}"),
        (GRPO, "{evaluation+: {sets: [{split: 'test', samples: 4, temperature: 0}]}}"),
        (PAPER, "{evaluation+: {sets: [super.sets[0] {temperature: 0}]}}"),
        (GRPO, "{evaluation+: {sets: [{split: 'test'}, {split: 'test'}]}}"),
        (RESTEM, "{choose_checkpoint+: {set: 'tset'}}"),
        (RESTEM, "{evaluation+: {sets: []}}"),
        (GRPO, "{trainer+: {offload_optimizer: true}}"),
        (GRPO, "{trainer+: {offload_parameters: true}}"),
        (GRPO, "{trainer+: {precision: 'bfloat16'}}"),
        (GRPO, "{trainer+: {lora: {rank: 4}, offload_reference: true}}"),
        (GRPO, "{trainer+: {lora: {rank: 4}, tensor_parallel_size: 2}}"),
        (GRPO, "{trainer+: {entropy_target: {target: 0.2, lowest: 0.1, highest: 0.05}}}"),
        (GRPO, "{trainer+: {entropy_target: {target: 0.2, lowest: 0.01}}}"),
        (DPO, "{trainer+: {entropy_target: {target: 0.2}}}"),
        (GRPO, "{trainer+: {schedule: {type: 'warmup', steps: 3, ratio: 0.1}}}"),
        (GRPO, "{trainer+: {objective+: {constant_length: 20}}}"),
        (GRPO, "{trainer+: {objective+: {aggregation: 'constant'}}}"),
        (GRPO, "{trainer+: {objective+: {kl_clamp: [3, 1]}}}"),
        (GRPO, "{trainer+: {objective+: {kl_placement: 'reward', kl_clamp: [0, 1]}}}"),
        (GRPO, "{trainer+: {adam_betas: [0.9, 1.0]}}"),
        (SPO, "{trainer+: {objective+: {loss_on: 'all', normalise_by: 'correct'}}}"),
        ("quickstart/dpo.jsonnet", "{trainer+: {objective+: {form: 'ipo', label_smoothing: 0.1}}}"),
        (SFT, "{model+: {hidden_size: 100}}"),
        (SFT, "{model+: {heads: 8}}"),
        (SFT, "{model+: {added_tokens: ['<a>', '<a>']}}"),
        (SFT, "{model+: {added_tokens: ['a b']}}"),
        (GRPO, "{model: {type: 'pretrained', name_or_path: 'x/y', attention: 'flash_attention_2'}}"),
        (GRPO, "{engines+: { policy+: {devices: [0, 0]} }}"),
        (GRPO, "{engines+: { policy+: {devices: [0, 1, 2], tensor_parallel_size: 2} }}"),
        (GRPO, "{engines+: { policy+: {devices: [0, 1]} }}"),
        (GRPO, "{engines+: { policy+: {max_num_batched_tokens: 16} }}"),
        (GRPO, "{diagnostics: {on_collapse: 'stop', stopping: []}}"),
        (COUNTDOWN, "{rollout: {type: 'demonstrations'}, task+: {operators: ['*']}}"),
        (COUNTDOWN, "{task+: {numbers: [4, 3]}}"),
        (COUNTDOWN, "{task+: {prompt: 'no place for numbers'}}"),
        (GRPO, "{task+: {digits: 1, count: 2}}"),
        ("tasks/multiplication_threads.jsonnet," + GRPO, "{task: {type: 'multiplication', form: 'tree'}}"),
    ]:
        yield Mutation("combinations", f"{Path(configs.split(',')[-1]).stem} {change}", configs, (change,))


def presets() -> Iterator[Mutation]:
    """Two presets, one on another kind of experiment, one on the left of the experiment."""
    known = [path.stem for path in configurations(CONFIGS / "presets")]
    on_a_corpus = "greedy_jsd"
    sampling = [name for name in known if name != on_a_corpus]
    for name in sampling:
        yield Mutation("presets", f"{name} on demonstrations", f"{SFT},presets/{name}.jsonnet")
    for configs in (VINEPPO, PPO, RESTEM, DPO):
        yield Mutation("presets", f"{on_a_corpus} on {configs}", f"{configs},presets/{on_a_corpus}.jsonnet")
    for name in known:
        base = SFT if name == on_a_corpus else PPO
        yield Mutation("presets", f"{name} on the left", f"presets/{name}.jsonnet,{base}")
    for first, second in itertools.islice(itertools.permutations(sampling, 2), 0, None, 7):
        pair = f"{PPO},presets/{first}.jsonnet,presets/{second}.jsonnet"
        yield Mutation("presets", f"{second} on {first}", pair)


def lengths() -> Iterator[Mutation]:
    """Lengths that don't fit each other, and sizes beyond what there is."""
    tiny = "{model: {type: 'tiny'}, %s}"
    cut = "{rollout+: {thread_tokens: 100}, evaluation+: {rollout: null, sets: %s}}"
    for configs, change in [
        (VINEPPO, "{context_length: 40}"),
        (VINEPPO, "{context_length: 48}"),
        (GRPO, "{rollout+: {max_tokens: 4096}}"),
        (GRPO, tiny % "context_length: 50"),
        (GRPO, tiny % "context_length: 60"),
        (GRPO, tiny % "context_length: 4096"),
        (GRPO, tiny % "rollout+: {max_prompt_tokens: 5}"),
        (GRPO, "{rollout+: {max_prompt_tokens: 5000}}"),
        (GRPO, "{evaluation+: {sets: [{split: 'test', max_tokens: 5000}]}}"),
        (
            THREADS,
            cut % "[{split: 'test', max_tokens: 90}]",
        ),
        (
            THREADS,
            cut % "[{split: 'test', max_tokens: 100}]",
        ),
        (SFT, "{context_length: 30}"),
        (SFT, "{context_length: 20}"),
        (SFT, "{model+: {context_length: 64}}"),
        (SFT, "{model+: {alphabet: '0123456789'}}"),
        (SFT, "{model+: {alphabet: 'abc'}}"),
        (SFT, "{engines+: { policy+: {context_length: 100000} }}"),
        (SFT, "{engines+: { policy+: {context_length: 20} }}"),
        (GRPO, "{engines+: { policy+: {context_length: 20} }}"),
        (PAPER, "{engines+: { policy+: {context_length: 100} }}"),
        (PAPER, "{context_length: 1000}"),
        (PAPER, "{context_length: 1500}"),
        (PAPER, "{rollout+: {max_prompt_tokens: 9999}}"),
        (PAPER, "{evaluation+: {sets: [super.sets[0] {max_tokens: 99999}]}}"),
        (GRPO, "{trainer+: {minibatch_size: 513}}"),
        (DPO, "{trainer+: {minibatch_size: 100000}}"),
        (RESTEM, "{trainer+: {minibatch_size: 3201}}"),
        (SFT, "{trainer+: {minibatch_size: 6401}}"),
        (GRPO, "{trainer+: {schedule+: {steps: 26}}}"),
        (SFT, "{trainer+: {schedule+: {steps: 1201}}}"),
        (GRPO, "{iterations: 9}"),
        (GRPO, "{problems_per_iteration: 100001}"),
        (GRPO, "{evaluation+: {sets: [{split: 'test', problems: 1001}]}}"),
        (GRPO, "{evaluation+: {sets: [{split: 'validation', problems: 501}]}}"),
        (COUNTDOWN, "{problems_per_iteration: 1000000}"),
        (COUNTDOWN, "{context_length: 20}"),
        (DAPO, "{problems_per_iteration: 100000}"),
        (DAPO, "{context_length: 48}"),
        (GRPO, "{task+: {train_size: 60}}"),
        (GRPO, "{engines+: { policy+: {max_num_seqs: 100000} }}"),
        (GRPO, "{task: {type: 'gsm8k', train: ['configs/overlays/smoke_problems/gsm8k.jsonl']}}"),
        (
            GRPO,
            "{task: {type: 'gsm8k', train: ['configs/overlays/smoke_problems/gsm8k.jsonl'],"
            " validation_size: 4,"
            " test: ['configs/overlays/smoke_problems/gsm8k.jsonl']}, evaluation+: {sets: []}}",
        ),
    ]:
        yield Mutation("lengths", f"{Path(configs).stem} {change}", configs, (change,))
