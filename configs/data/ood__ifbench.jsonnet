// IFbench: instructions that IFEval doesn't have; the grader knows IFEval's alone, and tells those that it can't check.
local lib = import 'lib.libsonnet';

lib.test {
  data_source: 'ood__ifbench',
  ability: 'ood',
  source: lib.hub('allenai/IFBench_test', train=null, test='train'),
  prompt: '{{ prompt }}',
  ground_truth: '{{ {"instruction_id_list": instruction_id_list, "kwargs": kwargs} | json }}',
  extra_info: { key: 'key' },
}
