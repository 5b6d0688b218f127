// HumanEval+: the same functions, with eighty times the tests.
local lib = import 'data/lib.libsonnet';
lib.test {
  data_source: 'codegen__humanevalplus',
  ability: 'codegen',
  source: lib.hub('evalplus/humanevalplus', train=null, test='test'),
  prompt: lib.complete,
  ground_truth: '{{ {"functional": test ~ "\\n\\ncheck(" ~ entry_point ~ ")"} | json }}',
  extra_info: { prefix: 'prompt ~ "    pass\\n"', reference: 'prompt ~ canonical_solution' },
  rules+: [lib.own_solution],
}
