// LiveCodeBench as DeepCoder has it: 599 problems to train on, 279 to measure on. It has no solutions.
local lib = import 'lib.libsonnet';

lib.code {
  data_source: 'codegen__livecodebench',
  source: lib.hub('agentica-org/DeepCoder-Preview-Dataset', subset='lcbv5', test='test'),
  splits: ['train', 'test'],
  expand: 'treetune.data.expansions:code_tests',
  prompt: lib.program,
  ground_truth: '{{ oracle | json }}',
  extra_info: { function_name: 'function_name' },
  // Its test split is one of the sets that rows are compared with.
  rules: [lib.length, { type: 'exact_duplicates', loose: true }, { type: 'near_duplicates', similarity: 0.9 }],
}
