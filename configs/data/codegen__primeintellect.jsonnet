// PrimeIntellect's problems as DeepCoder has them. Those with pictures or without a description go, and those whose own solution fails.
local lib = import 'lib.libsonnet';

lib.code {
  data_source: 'codegen__primeintellect',
  source: lib.hub('agentica-org/DeepCoder-Preview-Dataset', subset='primeintellect'),
  expand: 'treetune.data.expansions:code_tests',
  filters: [
    { name: 'pictures', where: '"![" not in problem and "<image" not in problem' },
    { name: 'no description', where: '(problem | alphanumerics) >= 100' },
  ],
  prompt: lib.program,
  ground_truth: '{{ oracle | json }}',
  extra_info: { function_name: 'function_name', references: 'solutions' },
  rules+: [lib.own_solution { reference: 'extra_info.references' }],
}
