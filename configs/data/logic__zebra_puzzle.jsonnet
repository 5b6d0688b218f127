// Guru's own zebra puzzles; 1.3 thousand.
local lib = import 'data/lib.libsonnet';
{
  type: 'prepare_data',
  data_source: 'logic__zebra_puzzle',
  ability: 'logical_reasoning',
  copy: true,
  source: lib.guru('train/logic__zebra_puzzle*.parquet'),
  rules: [lib.length],
}
