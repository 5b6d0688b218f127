// IFeval: 541 prompts with instructions that a program can check.
local lib = import 'lib.libsonnet';

lib.test {
  data_source: 'ood__ifeval',
  ability: 'ood',
  source: lib.hub('google/IFEval', train=null, test='train'),
  prompt: '{{ prompt }}',
  ground_truth: '{{ {"instruction_id_list": instruction_id_list, "kwargs": kwargs} | json }}',
  extra_info: { key: 'key' },
}
