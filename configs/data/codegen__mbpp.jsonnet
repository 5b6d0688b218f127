// MBPP: 500 small functions of its test split, three tests each, which the prompt shows.
local lib = import 'lib.libsonnet';

lib.test {
  data_source: 'codegen__mbpp',
  ability: 'codegen',
  source: lib.hub('google-research-datasets/mbpp', subset='full', train=null, test='test'),
  prompt: '{{ text }}\n\nYour code should pass these tests:\n\n{{ test_list | join("\\n") }}',
  instruction: lib.python,
  ground_truth: '{{ {"functional": test_list} | json }}',
  extra_info: { prefix: 'test_setup_code', reference: 'code' },
  rules+: [lib.own_solution],
}
