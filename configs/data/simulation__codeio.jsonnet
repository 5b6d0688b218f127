// CodeI/O: programs of PyEdu with a description; one pair of input and output each, of which one is given and the other is to be
// predicted, either way as often. Its first 200 thousand programs, of which a tenth trains.
local lib = import 'lib.libsonnet';

{
  type: 'prepare_data',
  data_source: 'simulation__codeio',
  ability: 'simulation',
  source: lib.hub('hkust-nlp/CodeIO-PyEdu-Reasoning-Raw', files={ train: '0_368500_filtered_v2_ds25.sced.jsonl' }),
  expand: 'treetune.data.expansions:codeio_pair',
  prompt: |||
    {{ problem_description }}

    {{ io_requirements }}

    {% if direction == "output" %}Given the following input:

    {{ given | json }}

    Can you predict the output without writing any code?{% else %}Given the following output:

    {{ given | json }}

    Can you predict a feasible input without writing any code?{% endif %} Reason, then put the {{ direction }} as JSON into a block ```json ... ```, as {"{{ direction }}": ...}.

    This code may guide you:

    {{ refcode }}
  |||,
  ground_truth: '{{ wanted | json }}',
  extra_info: { direction: 'direction', refcode: 'refcode', dataset: 'source | default("pyedu")' },
  bad_rows: 'drop',
  rules: [lib.length, { type: 'exact_duplicates' }, { type: 'near_duplicates', similarity: 0.9 }],
  hold_out: { test: 200 },
  sample: { train: 20000 },
}
