// ARC-AGI-2 (arcprize/ARC-AGI-2 on GitHub) as Guru has it: 190 tasks.
local lib = import 'data/lib.libsonnet';
{
  type: 'prepare_data',
  data_source: 'logic__arcagi2',
  ability: 'logical_reasoning',
  copy: true,
  source: lib.guru('train/logic__arcagi2_190.parquet'),
  rules: [lib.length],
}
