// HumanEval: 164 functions to complete.
local lib = import 'data/lib.libsonnet';
lib.test {
  data_source: 'codegen__humaneval',
  ability: 'codegen',
  source: lib.hub('openai/openai_humaneval', train=null, test='test'),
  prompt: lib.complete,
  ground_truth: '{{ {"functional": test ~ "\\n\\ncheck(" ~ entry_point ~ ")"} | json }}',
  // The stub before the answer has the imports and helpers that an answer may leave out.
  extra_info: { prefix: 'prompt ~ "    pass\\n"', reference: 'prompt ~ canonical_solution' },
  rules+: [lib.own_solution],
}
