"""Jsonnet that can't be read, names that no folder can have, tables and starts that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.endurance.wrong_configurations.mutation import (
    GRPO,
    TABLE,
    VINEPPO,
    Mutation,
    override,
)


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
        "a number times an object": "{ iterations: 3 * {} }",
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
    yield Mutation(
        "jsonnet", "not UTF-8", f"{VINEPPO},mine.jsonnet", files={"mine.jsonnet": b"{ x: '\xff' }"}
    )


def folder_names() -> Iterator[Mutation]:
    """Names that folders can't have, or that lead out of the experiments' folder."""
    for name in [
        "", ".", "..", "/", "/tmp/x", "../x", "a/../../../x", "a/..", "a//b", "a/", "a/./b", " ", "a\nb",
        "a\tb", "a\x00b",
        "x" * 300, "a/" + "x" * 300, "ü" * 150, "a/ /b", "\u202ea",
    ]:  # fmt: skip
        label = repr(name if len(name) < 30 else name[:9] + "…")
        yield Mutation(
            "folder names", f"experiment {label}", GRPO, (override(["experiment_name"], json.dumps(name)),)
        )
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
        "{experiments+: {extra: {configs: ['quickstart/grpo.jsonnet'], overrides: ['{credit: {type: 1}}']}}}",
        "{experiments+: {extra: {configs: ['tables/quickstart.jsonnet']}}}",
        "{rows+: [{name: 'x', experiment: 'sft', cells: {['test']: {value: 'a.b'}}}]}",
        "{deadline_hours: 0}",
        "{on_failure: 'cry'}",
        "{colour: 1}",
        "{type: 'reproductions'}",
    ]:
        yield Mutation("tables", change, TABLE, (change,))
    for change in [
        "{rows: []}",
        "{output: 'x.csv'}",
        "{checkpoint: 'best', best_on: 'test'}",
        "{rows+: [super.rows[0]]}",
    ]:
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
                            ("APP_SEED", "9" * 30), ("APP_DIRECTORY", " "),
                            ("APP_EXPERIMENT_NAME", "")]:  # fmt: skip
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
