// ARC-AGI-1 (fchollet/ARC-AGI on GitHub) as Guru has it: 111 tasks, at most six demonstrations each.
local lib = import 'data/lib.libsonnet';
{
  type: 'prepare_data',
  data_source: 'logic__arcagi1',
  ability: 'logical_reasoning',
  copy: true,
  source: lib.guru('train/logic__arcagi1_111.parquet'),
  rules: [lib.length],
}
