"""Wrong configurations, hundreds of them, each made of a shipped one by a single change that can't be meant.

    python scripts/mutations.py [--only CLASS] [--sample N] [--output docs/results/mutations.md]

Every one goes through `check_config`. It has to be refused, each mistake with its key (or its file, where Jsonnet
can't be read), the place that set it, and a remedy. The exit code is 1 where one is accepted, ends in a traceback, or is
refused with less than that. How the changes are made says why each is wrong: see the functions.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import annotated_types

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
os.chdir(ROOT)

import treetune.parts  # noqa: F401  (registers them)
from treetune.config import schema
from treetune.config.jsonnet import CONFIGS, load
from treetune.main import main as treetune
from treetune.runtime.base import Runtime

SFT, GRPO, PPO = "quickstart/sft.jsonnet", "quickstart/grpo.jsonnet", "quickstart/ppo.jsonnet"
VINEPPO, RLOO, DAPO = "quickstart/vineppo.jsonnet", "quickstart/rloo.jsonnet", "quickstart/dapo.jsonnet"
RESTEM, DPO = "quickstart/restem.jsonnet", "quickstart/dpo_positive.jsonnet"
SPO = "quickstart/spo_3_1.jsonnet"
REINFORCE = "quickstart/reinforce_pp.jsonnet"
THREADS = "threadweaver/tiny/rl_parallel_published.jsonnet"
COUNTDOWN = "countdown/tiny_grpo.jsonnet"
PAPER = "polIter_rho1bSft2_vineppo_MATH.jsonnet"
TABLE = "tables/quickstart_methods.jsonnet"
MECHANICAL = (VINEPPO, DAPO, DPO, COUNTDOWN)
"""What keys, types, names and numbers are changed in: every kind of part is in one of them."""

Verdict = Literal["refused", "vague", "traceback", "accepted"]


@dataclass(frozen=True)
class Mutation:
    """One wrong configuration. `files` are texts that are configurations of their own, by name."""

    kind: str
    label: str
    configs: str
    overrides: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    seconds: float
    message: str


# What can be derived from the schema


@dataclass(frozen=True)
class Place:
    """A key of a configuration that is written in an object, and what the schema says of it."""

    path: tuple[str, ...]
    value: Any
    annotation: Any


def places(configs: str) -> list[Place]:
    """Every key that can be overridden: those not within a list."""
    data = load([configs], environ={}).data
    return list(_places(Runtime, data, ()))


def _places(annotation: Any, data: dict[str, Any], path: tuple[str, ...]) -> Iterator[Place]:
    part = _class_of(annotation, data)
    if part is None:
        return
    for name, key in schema.keys_of(part).items():
        if name not in data:
            continue
        yield Place((*path, name), data[name], key.annotation)
        if isinstance(data[name], dict):
            yield from _places(schema.bare(key.annotation)[0], data[name], (*path, name))


def _class_of(annotation: Any, data: Mapping[str, Any]) -> type | None:
    for member in schema.members(annotation):
        if schema.is_family(member):
            return schema.choices(member).get(data.get("type", ""))
        if schema.is_plain_part(member):
            return member
    return None


def override(path: Sequence[str], value: str) -> str:
    """``{trainer+: {learning_rate: …}}``."""
    text = value
    for depth, name in enumerate(reversed(path)):
        text = f"{{{json.dumps(name)}{'+' if depth else ''}: {text}}}"
    return text


def misspelt(name: str) -> str:
    """The name with two letters in the middle exchanged, or one twice where they are the same."""
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    return swapped if swapped != name else name[:middle] + name[middle - 1] + name[middle:]


def keys() -> Iterator[Mutation]:
    """A key that no object has, by two exchanged letters, by a foreign name, or in another object's place."""
    for configs in MECHANICAL:
        found = places(configs)
        objects = {place.path for place in found if isinstance(place.value, dict) and "type" in place.value}
        for place in found:
            if len(place.path[-1]) > 3:
                wrong = (*place.path[:-1], misspelt(place.path[-1]))
                yield Mutation("keys", f"misspelt {'.'.join(wrong)}", configs, (override(wrong, _json(place.value)),))
        for path in sorted(objects):
            yield Mutation("keys", f"unknown key in {'.'.join(path)}", configs, (override((*path, "colour"), "1"),))
        by_name = {place.path[-1]: place for place in found}
        for path, (name, place) in itertools.product(sorted(objects), sorted(by_name.items())):
            siblings = {other.path[-1] for other in found if other.path[:-1] == path}
            part = next((p for p in found if p.path == path), None)
            owner = _class_of(schema.bare(part.annotation)[0], part.value) if part else None
            if owner is None or name in siblings or name in schema.keys_of(owner) or place.path[:-1] == path:
                continue
            if (len(name) + len(path[-1])) % 7 == 0:  # some of the many
                label = f"{name} in {'.'.join(path)}"
                yield Mutation("keys", label, configs, (override((*path, name), _json(place.value)),))


def types() -> Iterator[Mutation]:
    """A value of another type than the key's."""
    for configs in MECHANICAL:
        for place in places(configs):
            words = schema.describe(place.annotation)
            wrong = None
            if isinstance(place.value, bool):
                wrong = "'yes'"
            elif isinstance(place.value, int | float):
                wrong = "'many'" if "a text" not in words else "[1]"
            elif isinstance(place.value, str) and place.path[-1] != "type":
                wrong = "{}" if "number" in words else "7"
            elif isinstance(place.value, dict | list):
                wrong = "7"
            if wrong is not None and words != "anything":
                label = f"{'.'.join(place.path)} is {wrong}"
                yield Mutation("types", label, configs, (override(place.path, wrong),))


def names() -> Iterator[Mutation]:
    """The name of a part, or of one of a few choices, that is none of them."""
    for configs in MECHANICAL:
        for place in places(configs):
            if isinstance(place.value, dict) and "type" in place.value:
                path = (*place.path, "type")
                wrong = misspelt(place.value["type"]) + "x"
                yield Mutation("names", f"{'.'.join(path)}: {wrong}", configs, (override(path, _json(wrong)),))
                label = f"{'.'.join(place.path)} without a type"
                yield Mutation("names", label, configs, (override(place.path, '{"size": 1}'),))
            inner = schema.bare(place.annotation)[0]
            choices = [get_args(member) for member in schema.members(inner) if _is_choice(member)]
            if choices:
                label = f"{'.'.join(place.path)}: none of its choices"
                yield Mutation("names", label, configs, (override(place.path, '"neither"'),))


def _is_choice(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is Literal


def numbers() -> Iterator[Mutation]:
    """A number beyond the bound that its key declares; a fraction for a count."""
    for configs in MECHANICAL:
        for place in places(configs):
            if isinstance(place.value, bool) or not isinstance(place.value, int | float):
                continue
            for wrong in sorted(set(_beyond(place.annotation))):
                label = f"{'.'.join(place.path)} is {wrong:g}"
                yield Mutation("numbers", label, configs, (override(place.path, repr(wrong)),))
            if schema.describe(place.annotation).startswith("a whole number"):
                label = f"{'.'.join(place.path)} is 2.5"
                yield Mutation("numbers", label, configs, (override(place.path, "2.5"),))


def _beyond(annotation: Any) -> Iterator[float]:
    for member in schema.members(annotation):
        for constraint in schema.bare(member)[1]:
            if isinstance(constraint, annotated_types.Gt):
                yield constraint.gt  # type: ignore[misc]
            elif isinstance(constraint, annotated_types.Ge):
                yield constraint.ge - 1  # type: ignore[misc, operator]
            elif isinstance(constraint, annotated_types.Lt):
                yield constraint.lt  # type: ignore[misc]
            elif isinstance(constraint, annotated_types.Le):
                yield constraint.le + 1  # type: ignore[misc, operator]


def _json(value: Any) -> str:
    return json.dumps(value)


# What somebody has to know to write it


def jsonnet() -> Iterator[Mutation]:
    """Text that Jsonnet can't evaluate, or that is no object."""
    texts = {
        "no closing brace": "{ iterations: 3",
        "no comma": "{ iterations: 3 seed: 2 }",
        "no colon": "{ iterations 3 }",
        "unknown variable": "{ iterations: twelve }",
        "a key twice": "{ iterations: 3, iterations: 4 }",
        "division by zero": "{ iterations: 3 / 0 }",
        "no such field": "{ iterations: $.itertions }",
        "no super": "{ trainer+: { learning_rate: super.rate * 2 } }",
        "an assertion": "{ assert false : 'no' }",
        "an error of its own": "{ iterations: error 'think first' }",
        "itself": "{ iterations: self.iterations + 1 }",
        "a number and an object": "{ iterations: 3 + {} }" if False else "{ iterations: 3 * {} }",
        "a function": "{ iterations: function(x) x }",
        "no such function": "{ iterations: std.dubble(3) }",
        "an unclosed text": "{ experiment_name: 'x }",
        "an unclosed comment": "{ iterations: 3 } /* and so on",
        "a local without a body": "local x = 3;",
        "an unset variable": "{ seed: std.extVar('APP_NOT_SET_ANYWHERE') }",
        "a foreign variable": "{ seed: std.extVar('HOME') }",
        "a missing import": "(import 'no/such.jsonnet')",
        "a list": "[1, 2]",
        "a number": "3",
        "null": "null",
        "a text": "'a text'",
        "nothing": "",
        "a wrong index": "{ iterations: [1, 2][5] }",
        "a wrong call": "{ iterations: std.length() }",
        "a tab of bytes": "{ iterations: 3 \x00 }",
        "a path in the key": "{ trainer.learning_rate: 1e-4 }",
        "YAML": "iterations: 3\nseed: 1",
    }
    for name, text in texts.items():
        yield Mutation("jsonnet", f"{name} (override)", VINEPPO, (text,))
        yield Mutation("jsonnet", f"{name} (file)", f"{VINEPPO},mine.jsonnet", files={"mine.jsonnet": text})
    yield Mutation("jsonnet", "not UTF-8", f"{VINEPPO},mine.jsonnet", files={"mine.jsonnet": b"{ x: '\xff' }"})


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
        (DAPO, "{rollout+: {local old = super.rollout, rollout: {type: 'until_mixed', rollout: old, groups: 3}}}"),
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
        (GRPO, "{engine+: {devices: [0, 0]}}"),
        (GRPO, "{engine+: {devices: [0, 1, 2], tensor_parallel_size: 2}}"),
        (GRPO, "{engine+: {devices: [0, 1]}}"),
        (GRPO, "{engine+: {max_num_batched_tokens: 16}}"),
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
    known = sorted(path.stem for path in (CONFIGS / "presets").glob("*.jsonnet"))
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
        (THREADS, "{rollout+: {thread_tokens: 100}, evaluation+: {sets: [{split: 'test', max_tokens: 90}]}}"),
        (THREADS, "{rollout+: {thread_tokens: 100}, evaluation+: {sets: [{split: 'test', max_tokens: 100}]}}"),
        (SFT, "{context_length: 30}"),
        (SFT, "{context_length: 20}"),
        (SFT, "{model+: {context_length: 64}}"),
        (SFT, "{model+: {alphabet: '0123456789'}}"),
        (SFT, "{model+: {alphabet: 'abc'}}"),
        (SFT, "{engine+: {context_length: 100000}}"),
        (SFT, "{engine+: {context_length: 20}}"),
        (GRPO, "{engine+: {context_length: 20}}"),
        (PAPER, "{engine+: {context_length: 100}}"),
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
        (GRPO, "{engine+: {max_num_seqs: 100000}}"),
        (GRPO, "{task: {type: 'gsm8k', train: ['configs/overlays/smoke_problems/gsm8k.jsonl']}}"),
        (
            GRPO,
            "{task: {type: 'gsm8k', train: ['configs/overlays/smoke_problems/gsm8k.jsonl'], validation_size: 4,"
            " test: ['configs/overlays/smoke_problems/gsm8k.jsonl']}, evaluation+: {sets: []}}",
        ),
    ]:
        yield Mutation("lengths", f"{Path(configs).stem} {change}", configs, (change,))


def folder_names() -> Iterator[Mutation]:
    """Names that folders can't have, or that lead out of the experiments' folder."""
    for name in [
        "", ".", "..", "/", "/tmp/x", "../x", "a/../../../x", "a/..", "a//b", "a/", "a/./b", " ", "a\nb", "a\tb", "a\x00b",
        "x" * 300, "a/" + "x" * 300, "ü" * 150, "a/ /b", "\u202ea",
    ]:  # fmt: skip
        label = repr(name if len(name) < 30 else name[:9] + "…")
        yield Mutation("folder names", f"experiment {label}", GRPO, (override(["experiment_name"], json.dumps(name)),))
        if name not in ("",):  # an empty one of a set is the split's
            one = f"{{evaluation+: {{sets: [{{split: 'test', name: {json.dumps(name)}}}]}}}}"
            yield Mutation("folder names", f"set {label}", GRPO, (one,))
    for name in ["", "a/b", "../x", ".hidden", "a\nb"]:
        yield Mutation("folder names", f"table {name!r}", TABLE, (override(["name"], json.dumps(name)),))
    for name in ["/tmp/x", "../x", "x" * 300]:
        environ = {"APP_EXPERIMENT_NAME": name}
        yield Mutation("folder names", f"APP_EXPERIMENT_NAME {name[:9]!r}", GRPO, environ=environ)


def tables() -> Iterator[Mutation]:
    """Rows, columns, panels and experiments of a table that aren't there, or that no run will write."""
    column = "{columns: [{name: 'x', %s}]}"
    panel = "{panels: [{name: 'x', %s}]}"
    for change in [
        "{baseline: 'PPPO'}",
        "{seeds: []}",
        "{seeds: [1, 1]}",
        "{seeds: [-1]}",
        "{seeds: ['one']}",
        "{rows: []}",
        "{columns: []}",
        "{experiments: {}}",
        "{interval: 'gauss'}",
        "{rows+: [{name: 'x', experiment: 'nothing'}]}",
        "{rows+: [{name: 'x', cells: {tset: {}}}]}",
        "{rows+: [super.rows[0]]}",
        "{columns+: [super.columns[0]]}",
        column % "evaluation: 'tset'",
        column % "evaluation: 'test', value: 'pass_at_64'",
        column % "evaluation: 'test', value: 'pass_at_3'",
        column % "evaluation: 'test', value: 'accuracy'",
        column % "evaluation: 'test', value: 'with_parallel'",
        column % "evaluation: 'test', value: 'speed_up'",
        column % "evaluation: 'test', over: 'PPO'",
        column % "evaluation: 'test', analysis: 'value_accuracy'",
        column % "analysis: 'value_accuracy', value: 'numbers.all.x'",
        column % "value: 'pass_at_1'",
        column % "speedup: {of: 'nobody', over: 'tokens'}, curve: 'validation'",
        column % "speedup: {of: 'PPO', over: 'tokens'}",
        column % "speedup: {of: 'PPO', over: 'money'}, curve: 'validation'",
        column % "evaluation: 'test', curve: 'tset'",
        column % "evaluation: 'test', value: 'mean_tokens', curve: 'test'",
        panel % "metric: 'train/entropi'",
        panel % "metric: 'entropy'",
        panel % "metric: 'critic/los'",
        panel % "metric: 'preference/acuracy'",
        panel % "metric: 'episodes/rewards'",
        panel % "metric: 'evaluation/tset/pass_at_1'",
        panel % "metric: 'threads/with_paralel'",
        panel % "metric: 'seconds/sleeping'",
        panel % "metric: 'train/loss', evaluation: 'test'",
        panel % "evaluation: 'tset'",
        panel % "evaluation: 'test', value: 'speed_up'",
        panel % "evaluation: 'test', value: 'pass_at_999'",
        panel % "metric: 'train/loss', value: 'mean_tokens'",
        panel % "percent: true",
        "{panels: [{name: 'x', metric: 'train/loss'}, {name: 'x', metric: 'train/kl'}]}",
        "{panels_over: 'money'}",
        "{experiments+: {extra: {configs: ['no/such.jsonnet']}}, rows+: [{name: 'x', experiment: 'extra'}]}",
        "{experiments+: {extra: {configs: []}}}",
        "{experiments+: {extra: {configs: ['quickstart/grpo.jsonnet'], needs: ['nothing']}}}",
        "{experiments+: {extra: {configs: ['quickstart/grpo.jsonnet'], needs: ['extra']}}}",
        "{experiments+: {extra: {configs: ['quickstart/grpo.jsonnet'], overrides: ['{iteratons: 3}']}}}",
        "{experiments+: {extra: {configs: ['quickstart/grpo.jsonnet'], overrides: ['{iterations: ']}}}",
        "{experiments+: {extra: {configs: ['quickstart/grpo.jsonnet'], overrides: ['{rollout+: {samples: 1}}']}}}",
        "{experiments+: {extra: {configs: ['tables/quickstart.jsonnet']}}}",
        "{rows+: [{name: 'x', experiment: 'sft', cells: {['test']: {value: 'a.b'}}}]}",
        "{deadline_hours: 0}",
        "{on_failure: 'cry'}",
        "{colour: 1}",
        "{type: 'reproductions'}",
    ]:
        yield Mutation("tables", change, TABLE, (change,))
    for change in ["{rows: []}", "{output: 'x.csv'}", "{checkpoint: 'best', best_on: 'test'}", "{rows+: [super.rows[0]]}"]:
        yield Mutation("tables", f"quickstart {change}", "tables/quickstart.jsonnet", (change,))


def starts() -> Iterator[Mutation]:
    """Files and variables that a start is wrong with."""
    yield Mutation("starts", "no such file", "quickstart/vinepo.jsonnet")
    yield Mutation("starts", "no such second file", f"{VINEPPO},presets/grop.jsonnet")
    yield Mutation("starts", "a folder", "quickstart")
    yield Mutation("starts", "no file at all", ",")
    yield Mutation("starts", "a fragment alone", "credit/group.jsonnet")
    yield Mutation("starts", "a task alone", "tasks/math.jsonnet")
    yield Mutation("starts", "a library", "lib/quickstart.libsonnet")
    yield Mutation("starts", "a program", f"{VINEPPO},mine.jsonnet", files={"mine.jsonnet": "print('hello')"})
    for variable, value in [("APP_SEED", "one"), ("APP_SEED", "1.5"), ("APP_SEED", ""), ("APP_SEED", "-1"),
                            ("APP_SEED", "9" * 30), ("APP_DIRECTORY", " "), ("APP_EXPERIMENT_NAME", "")]:  # fmt: skip
        yield Mutation("starts", f"{variable}={value!r}", GRPO, environ={variable: value})
    pipeline = "data_pipelines/make_threads.jsonnet"
    environ = {"APP_ENDPOINT": "https://host/v1", "APP_MODEL": "m"}
    for change in [
        "{endpoint+: {api_key_variable: 'sk-abcdef0123456789abcdef'}}",
        "{endpoint+: {api_key_variable: 'hf_AbCdEfGhIjKlMnOpQrStUvWxYz'}}",
        "{endpoint+: {api_key_variable: ''}}",
        "{endpoint+: {base_url: 'host'}}",
        "{endpoint+: {base_url: 'https://me:secret@host/v1'}}",
        "{endpoint+: {temperature: -1}}",
        "{endpoint+: {colour: 1}}",
    ]:
        yield Mutation("starts", f"pipeline {change}", pipeline, (change,), environ)


CLASSES: Mapping[str, Callable[[], Iterator[Mutation]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        keys, types, names, numbers, jsonnet, combinations, presets, lengths, folder_names, tables, starts,
    )
}  # fmt: skip


def mutations(kinds: Sequence[str] = tuple(CLASSES)) -> list[Mutation]:
    return [mutation for kind in kinds for mutation in CLASSES[kind]()]


# Trying them


def outcome(mutation: Mutation, folder: Path) -> Outcome:
    """What `check_config` says, in this process. `folder` is an empty one of this mutation's own."""
    configs = []
    for name in mutation.configs.split(","):
        if name in mutation.files:
            content = mutation.files[name]
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
            name = str(folder / name)
        configs.append(name)
    arguments = ["--configs", ",".join(configs)]
    for text in mutation.overrides:
        arguments += ["--override", text]
    out, err = io.StringIO(), io.StringIO()
    started = time.perf_counter()
    with _environment(mutation.environ), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = treetune([*arguments, "check_config"])
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception:
            return Outcome("traceback", time.perf_counter() - started, traceback.format_exc())
    seconds, told = time.perf_counter() - started, err.getvalue()
    if code == 0:
        return Outcome("accepted", seconds, out.getvalue())
    if "Traceback" in told:
        return Outcome("traceback", seconds, told)
    return Outcome("refused" if is_clear(told) else "vague", seconds, told)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("APP_")]:
        del os.environ[name]
    os.environ.update({name: value for name, value in changes.items() if "\x00" not in value})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def is_clear(told: str) -> bool:
    """Whether every mistake has a key or a file, the place that set it, and a remedy."""
    _, *issues = [block for block in re.split(r"\n\n", told.strip()) if not block.startswith("note: ")]
    head = told.strip().splitlines()[0]
    if not head.startswith("wrong configuration"):
        return False
    texts = [block.split("\n", 1)[1] if block.startswith("wrong configuration") else block for block in issues]
    return bool(texts) and all(
        re.match(r"\S[^\n]*:", text) and "\n  where   " in text and "\n  remedy  " in text for text in texts
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CLASSES), help="one class of mutations")
    parser.add_argument("--output", type=Path, help="a Markdown file for the counts")
    parser.add_argument("--show", action="store_true", help="every message")
    options = parser.parse_args()
    import tempfile

    tried: list[tuple[Mutation, Outcome]] = []
    for mutation in mutations([options.only] if options.only else tuple(CLASSES)):
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(mutation, Path(folder))
        tried.append((mutation, found))
        if options.show or found.verdict != "refused":
            print(f"== {found.verdict}: {mutation.kind}: {mutation.label}\n{found.message.strip()}\n", flush=True)
    text = summary(tried)
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0 if all(found.verdict == "refused" for _, found in tried) else 1


def summary(tried: Sequence[tuple[Mutation, Outcome]]) -> str:
    verdicts: tuple[Verdict, ...] = get_args(Verdict)
    counts = Counter((mutation.kind, found.verdict) for mutation, found in tried)
    kinds = list(dict.fromkeys(mutation.kind for mutation, _ in tried))
    seconds = sorted(found.seconds for _, found in tried)
    lines = [
        "# Wrong configurations",
        "",
        "Single changes of shipped configurations, each of which can't be meant, through `check_config`:",
        "`python scripts/mutations.py --output docs/results/mutations.md`. *Refused* is refused with the key (or",
        "file), the place that set it, and a remedy, for every mistake that is told; *vague* is refused with less.",
        "",
        "| class | " + " | ".join([*verdicts, "all"]) + " |",
        "|---" + "|---:" * (len(verdicts) + 1) + "|",
    ]
    for kind in kinds:
        row = [counts[kind, verdict] for verdict in verdicts]
        lines.append(f"| {kind} | " + " | ".join(map(str, [*row, sum(row)])) + " |")
    row = [sum(counts[kind, verdict] for kind in kinds) for verdict in verdicts]
    lines.append("| **all** | " + " | ".join(f"**{count}**" for count in [*row, sum(row)]) + " |")
    middle, last = seconds[len(seconds) // 2], seconds[-1]
    lines += ["", f"One check took {middle:.2f} s in the middle and {last:.2f} s at most, in one process.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
