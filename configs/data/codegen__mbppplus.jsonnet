// MBPP+: 378 of these functions, with thirty-five times the tests.
local lib = import 'lib.libsonnet';

lib.test {
  data_source: 'codegen__mbppplus',
  ability: 'codegen',
  source: lib.hub('evalplus/mbppplus', train=null, test='test'),
  prompt: '{{ prompt }}\n\nYour code should pass these tests:\n\n{{ test_list | join("\\n") }}',
  instruction: lib.python,
  ground_truth: '{{ {"functional": test} | json }}',
  extra_info: { reference: 'code' },
  rules+: [lib.own_solution],
}
